-- time limit: 200 s
-- Requests and replies that get lost between us and Redis: the key is free
-- again, or rightly ours, within about one request timeout, not after the ttl.
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"
local proxies = require "spec.support.proxy"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

local bound, now, scaled = helpers.bound, helpers.now, helpers.scaled
local slop = bound(1)
local key_gone = rig.key_gone

-- What happens to one request: see spec/support/proxy.lua.
local FAULTS = { "lose", "dead", "cut", "eat", "close" }

-- Blocked callers use lanes, tasks the loop: the same code must hold on both.
local RUNTIMES = { lane = require "dlock.runtime.thread", loop = tasks.runtime }

-- Longer than any time in which a key must be gone, short enough to wait for: a
-- clean-up whose answers are lost ends with the ttl.
local TTL = 3

describe("a request to Redis", function()
  local server, proxy, direct
  local open = rig.new(function() return server end)

  setup(function()
    server = redis.start()
    proxy = proxies.start(server.port)
  end)
  teardown(function()
    proxy:stop()
    server:stop()
  end)
  before_each(function()
    proxy:clear()
    open.keep { close = function() proxy:cut() end }
    -- Scripts are known to the server, so that one verb is one request.
    direct = open.connect(server.url)
    local lock = assert(direct:acquire("k"))
    lock:extend()
    lock:release()
    direct:inspect "k"
  end)

  local function connect(opts) return open.connect(proxy.url, opts) end

  -- A client with a connection, for which the next request about `key` has the fault.
  local function faulty(runtime, fault, key, opts)
    opts = opts or {}
    opts.runtime, opts.timeout = runtime, 0.3
    local client = connect(opts)
    assert(assert(client:acquire("warm")):release())
    return client, function() proxy:rule(fault, { match = "\r\n" .. key .. "\r\n" }) end
  end

  local function check_failure(fault, began, ok, msg, code)
    local took = now() - began
    assert.is_nil(ok)
    assert(code == "indeterminate" or fault == "close" and code == "unavailable",
      fault .. ": " .. code .. ": " .. msg)
    assert(took < 0.3 + slop, fault .. ": took " .. took)
  end

  -- Whatever is still under way for an earlier owner must not hurt the later ones.
  local function all_stay(locks)
    helpers.never(function()
      for _, lock in ipairs(locks) do
        if not lock:is_held() or server:call("EXISTS", lock.key) == 0 then return true end
      end
    end, 0.4, "a stray release")
  end

  local function release_all(locks)
    for _, lock in ipairs(locks) do assert.is_true(lock:release()) end
  end

  for where, runtime in pairs(RUNTIMES) do
    where = " (" .. where .. ")"

    it("for a lock that gets lost leaves none behind" .. where, function()
      for round = 1, scaled(40, 2) do
        local heirs = {}
        for _, fault in ipairs(FAULTS) do
          local key = fault .. round
          local client, break_it = faulty(runtime, fault, key)
          break_it()
          local began = now()
          check_failure(fault, began, client:acquire(key, { ttl = TTL, wait = 0 }))
          key_gone(server, key, began, 0.3 + slop)
          heirs[#heirs + 1] = assert(direct:acquire(key, { wait = 0 }))
        end
        all_stay(heirs)
        release_all(heirs)
      end
    end)

    it("for a lock that gets lost is tried again while the wait lasts" .. where, function()
      local locks = {}
      for _, fault in ipairs(FAULTS) do
        local client, break_it = faulty(runtime, fault, fault)
        break_it()
        local took, lock, msg = helpers.timed(client.acquire, client, fault,
          { ttl = TTL, wait = 5 })
        assert(lock, msg)
        assert(took < 0.3 + slop, "took " .. took)
        locks[#locks + 1] = lock
      end
      all_stay(locks)
      release_all(locks)
    end)

    it("to release that gets lost is repeated" .. where, function()
      for _, fault in ipairs(FAULTS) do
        local events = rig.events()
        local client, break_it = faulty(runtime, fault, fault, { on_event = events.on_event })
        local lock = assert(client:acquire(fault, { ttl = 30 }))
        break_it()
        local began = now()
        check_failure(fault, began, lock:release())
        assert.is_false(lock:is_held())
        key_gone(server, fault, began, 0.3 + slop)
        assert.are.equal("lost", (select(3, lock:release())))
        assert.is_nil(lock:lost_reason())
        tasks.eventually(function()
          client:poll()
          return events.text(fault) == "acquired released"
        end, 5, function() return "released: " .. events.text() end)
      end
    end)

    it("to extend that gets lost leaves a lock that knows its shortest end" .. where, function()
      local locks, breakers = {}, {}
      for i, fault in ipairs(FAULTS) do
        local client
        client, breakers[i] = faulty(runtime, fault, fault)
        locks[i] = assert(client:acquire(fault, { ttl = 3 }))
        breakers[i]()
        local began = now()
        check_failure(fault, began, locks[i]:extend(30))
        assert.is_true(locks[i]:is_held())
        assert.is_true(locks[i]:remaining() <= 3)
      end
      -- It may or may not have been applied: the next renewal settles it.
      for i, fault in ipairs(FAULTS) do
        tasks.eventually(function() return locks[i]:remaining() > 3 end, 5, "renewed")
        assert.is_true(server:call("PTTL", fault) / 1000 >= locks[i]:remaining() - 0.05)
      end
      for i, fault in ipairs(FAULTS) do
        breakers[i]()
        local began = now()
        check_failure(fault, began, locks[i]:extend(1.5))
        assert.is_true(locks[i]:is_held())
        assert.is_true(locks[i]:remaining() <= 1.5)
      end
      tasks.sleep(1.6)
      release_all(locks)
    end)

    it("to show a lock that gets lost is an error in time" .. where, function()
      for _, fault in ipairs(FAULTS) do
        local client, break_it = faulty(runtime, fault, fault)
        break_it()
        local began = now()
        check_failure(fault, began, client:inspect(fault))
        assert.is_false(assert(client:inspect(fault)).held)
      end
    end)
  end

  it("to renew that gets lost is made up for in time", function()
    for _, fault in ipairs(FAULTS) do
      tasks.start(function()
        local events = rig.events()
        local client = connect { on_event = events.on_event }
        local lock = assert(client:acquire(fault, { ttl = 1.5 }))
        proxy:rule(fault, { match = "\r\n" .. fault .. "\r\n" })
        local stop = now() + 2.5
        repeat
          assert.is_true(lock:is_held())
          assert.are.equal(1, server:call("EXISTS", fault))
          tasks.sleep(0.01)
        until now() > stop
        local stats = client:stats()
        assert.are.equal(1, stats.renew_failed)
        assert.is_true(stats.renewed > 1)
        assert.are.equal("acquired renew_failed", events.text())
        assert.is_true(lock:release())
      end)
    end
    tasks.run(20)
  end)

  it("to renew that nobody answers ends in 'lost', before the key can go", function()
    local events = rig.events()
    local client = connect { on_event = events.on_event, timeout = 0.5 }
    local lock = assert(client:acquire("k", { ttl = 1.2 }))
    -- The server does as it is told, and would keep the key for ever.
    proxy:set "mute"
    local muted = now()
    assert.are.equal("expired", lock:wait_lost(bound(5)))
    assert(now() - muted < bound(1.2), "told after " .. now() - muted)
    assert.are.equal("acquired renew_failed lost(expired)", events.text())
    -- The clean-up is not answered either, but it is done.
    key_gone(server, "k", now(), 1)
    assert.are.equal("lost", (select(3, lock:release())))
    proxy:clear()
  end)

  it("that is slow is never taken for a lock that is over already", function()
    local client = connect { timeout = 5 }
    assert(assert(client:acquire("warm")):release())
    -- The request takes 0.5 s: the server counts the ttl from its end, we from its begin.
    for _, ttl in ipairs { 0.2, 0.4 } do
      proxy:set("pass", 0.5)
      local lock, msg, code = client:acquire("k", { ttl = ttl, wait = 0 })
      assert.is_nil(lock)
      assert.are.equal("unavailable", code, msg)
      proxy:clear()
      key_gone(server, "k", now(), 0.3 + slop)
    end
    proxy:set("pass", 0.5)
    local lock = assert(client:acquire("k", { ttl = 3, wait = 0 }))
    assert.is_true(lock:remaining() <= 2.5)
    proxy:clear()
    assert.is_true(lock:release())
  end)

  it("that is slow for all keeps a lock as long as its renewals come in time", function()
    local client = connect {}
    local lock = assert(client:acquire("k", { ttl = 2 }))
    proxy:set("pass", 0.15)
    helpers.never(function()
      return not lock:is_held() or server:call("EXISTS", "k") == 0
    end, 2.5, "the loss of the lock")
    proxy:clear()
    assert.is_true(lock:release())
  end)

  it("over a connection that leads nowhere is given up, and the lock with it", function()
    local client = connect { timeout = 0.3, connect_timeout = 0.3 }
    local lock = assert(client:acquire("held", { ttl = 1.5 }))
    proxy:set "hold"
    local began = now()
    local took, none, _, code = helpers.timed(client.acquire, client, "k", { ttl = TTL, wait = 0 })
    assert.is_nil(none)
    assert.are.equal("indeterminate", code)
    assert(took < 0.3 + slop, "took " .. took)
    assert.are.equal("expired", lock:wait_lost(bound(5)))
    assert(now() - began < bound(1.5), "told after " .. now() - began)
    proxy:set "pass"
    local there_again = now()
    key_gone(server, "k", there_again, 0.3 + slop)
    key_gone(server, "held", there_again, 0.3 + slop)
    assert(assert(client:acquire("k", { wait = 3 })):release())
  end)

  it("that is refused by the network is 'unavailable' at once, and heals", function()
    local client = connect { timeout = 0.5 }
    proxy:set "refuse"
    local took, none, _, code = helpers.timed(client.acquire, client, "k", { wait = 0 })
    assert.is_nil(none)
    assert(code == "unavailable" or code == "indeterminate", code) -- it was connected for a moment
    assert(took < slop, "took " .. took)
    local lock
    tasks.start(function() lock = assert(client:acquire("k", { wait = 10 })) end)
    tasks.sleep(0.5)
    proxy:clear()
    tasks.run(10)
    assert.is_true(lock:release())
  end)

  it("that timed out never lends its answer to the next one", function()
    local holder = assert(direct:acquire("taken", { ttl = 60 }))
    for _, runtime in pairs(RUNTIMES) do
      local client = connect { timeout = 0.2, runtime = runtime }
      assert(assert(client:acquire("warm")):release())
      for round = 1, scaled(60, 3) do
        proxy:set("pass", 0.3)
        local lock, _, code = client:acquire("free" .. round, { ttl = TTL, wait = 0 })
        assert.is_nil(lock)
        assert.are.equal("indeterminate", code)
        proxy:set("pass", 0)
        -- The late "granted" comes in about now.
        for _ = 1, 5 do
          lock, _, code = client:acquire("taken", { wait = 0 })
          assert.is_nil(lock)
          assert(code == "held" or code == "indeterminate", code)
          tasks.sleep(0.03)
        end
        assert.are.equal("held", (select(3, client:acquire("taken", { wait = 0 }))))
        key_gone(server, "free" .. round, now(), slop)
      end
      client:close()
    end
    assert.is_true(holder:release())
  end)

  it("for a hand-over that gets lost leaves the next waiter the lock, soon", function()
    for _, fault in ipairs(FAULTS) do
      local client, break_it = faulty(tasks.runtime, fault, fault)
      local first = assert(client:acquire(fault, { ttl = 20 }))
      local second
      tasks.start(function() second = assert(client:acquire(fault, { ttl = 20, wait = 10 })) end)
      tasks.eventually(function() return client:stats().waiting == 1 end, 5, "a waiter")
      break_it()
      first:release()
      local began = now()
      tasks.run(10)
      assert(now() - began < 0.3 + 2 * slop, "the next waited " .. now() - began)
      assert.is_true(second:is_held())
      assert.is_true(second.token > first.token)
      all_stay { second }
      assert.is_true(second:release())
    end
  end)
end)
