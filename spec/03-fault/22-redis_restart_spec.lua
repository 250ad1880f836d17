-- time limit: 200 s
-- A Redis that is killed and comes back, with its data or without, forgets its
-- scripts, and cuts our connections: locks go on where the data did, and are
-- lost, never taken back in silence, where it did not.
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

local bound, now, scaled = helpers.bound, helpers.now, helpers.scaled
local slop = bound(1)
local key_gone = rig.key_gone

local function code_of(_, _, code) return code end

describe("after its server was killed -9", function()
  local server
  local open = rig.new(function() return server end)
  after_each(function()
    server:stop()
    server = nil
  end)

  local function start(opts)
    server = redis.start(opts)
    return server
  end

  it("and came back with its data, a lock goes on", function()
    start { persist = true }
    local events = rig.events()
    local client = open.connect(server.url, { on_event = events.on_event })
    local other = open.connect(server.url)
    local lock = assert(client:acquire("k", { ttl = 6 }))
    server:restart()
    assert.are.equal("held", code_of(other:acquire("k", { wait = 0 })))
    tasks.eventually(function() return client:stats().renewed > 0 end, 6, "renewed")
    assert.is_true(lock:is_held())
    local token = lock.token
    assert.is_true(lock:release())
    assert.are.equal("acquired released", events.text())
    local again = assert(other:acquire("k", { wait = 0 }))
    assert.is_true(again.token > token)
    assert.is_true(again:release())
  end)

  it("and came back empty, a lock is lost at the next renewal", function()
    start()
    local events = rig.events()
    local client = open.connect(server.url, { on_event = events.on_event })
    local lock = assert(client:acquire("k", { ttl = 3 }))
    server:restart()
    local restarted = now()
    assert.are.equal("deleted", lock:wait_lost(bound(5)))
    assert(now() - restarted < 1 + slop, "noticed after " .. now() - restarted)
    assert.are.equal("lost", code_of(lock:release()))
    client:poll()
    assert.are.equal("acquired lost(deleted)", events.text())
    assert.are.equal(0, server:call("EXISTS", "k"))
    local again = assert(client:acquire("k", { wait = 0 }))
    assert.is_true(again.token > lock.token)
    assert.is_true(again:release())
  end)

  it("and came back empty, a lock that somebody else took is lost as 'taken'", function()
    start()
    local client, other = open.connect(server.url), open.connect(server.url)
    local lock = assert(client:acquire("k", { ttl = 3 }))
    server:restart()
    local second = assert(other:acquire("k", { wait = 5 }))
    assert.are.equal("taken", lock:wait_lost(bound(5)))
    assert.are.equal("lost", code_of(lock:release()))
    assert.is_true(second:is_held())
    assert.are.equal("lost", code_of(lock:extend(5)))
    assert.is_true(second:release())
  end)

  it("a release of a lock that went with it says 'lost'", function()
    start()
    local client = open.connect(server.url)
    local lock = assert(client:acquire("k", { ttl = 30 }))
    server:restart()
    local _, msg, code = lock:release()
    assert(code == "lost" or code == "indeterminate" or code == "unavailable", code .. ": " .. msg)
    assert.is_true(code ~= "lost" or lock:lost_reason() == "deleted")
  end)

  it("all calls say so in time, and a lock is lost by its ttl", function()
    start()
    for _, runtime in ipairs { tasks.runtime, "thread" } do
      local client = open.connect(server.url, { timeout = 0.5, ttl = 2, runtime = runtime })
      local lock = assert(client:acquire("k", { ttl = 1 }))
      local other = assert(client:acquire("other"))
      server:kill()
      local killed = now()
      for i, call in ipairs {
        function() return client:acquire("x", { wait = 0 }) end,
        function() return client:inspect "x" end, function() return client:list() end,
        function() return client:break_lock "x" end, function() return client:ping() end,
        function() return other:extend(3) end, function() return other:release() end,
      } do
        local took, r, msg, code = helpers.timed(call)
        assert.is_nil(r)
        assert(code == "unavailable" or code == "indeterminate", i .. " " .. code .. ": " .. msg)
        assert(took < 0.5 + slop, i .. " took " .. took)
      end
      assert.are.equal("expired", lock:wait_lost(bound(5)))
      assert(now() - killed < bound(1), "lost after " .. now() - killed)
      local took, _, _, code = helpers.timed(client.acquire, client, "x", { wait = 0.5 })
      assert.are.equal("unavailable", code)
      assert(took < 0.5 + slop, "took " .. took)
      server.process = nil
      server:launch()
      assert(assert(client:acquire("k", { wait = 5 })):release())
      client:close()
    end
  end)

  for name, opts in pairs { empty = {}, ["with its data"] = { persist = true } } do
    it("and came back " .. name .. ", who waited gets the lock", function()
      start(opts)
      -- One that dlock holds in another process, one that a plain client holds.
      local child = helpers.spawn {
        helpers.lua, "-e", ("ARGS={%q} "):format(server.url) .. [[
          local c = assert(require("dlock").connect(ARGS[1], { ttl = 60, wait = 20 }))
          local lock = assert(c:acquire("ours"))
          print "held" io.stdout:flush()
          io.read()
          print("released", lock:release()) io.stdout:flush()
          io.read()
        ]], stdin = "pipe", env = { LD_PRELOAD = os.getenv "DLOCK_PRELOAD" or false },
      }
      open.keep(child)
      child:expect "held"
      server:call("SET", "plain", "somebody", "PX", 60000)
      local got, client = {}, open.connect(server.url)
      for _, key in ipairs { "ours", "plain" } do
        tasks.start(function()
          got[key] = assert(client:acquire(key, { wait = 20 }))
        end)
      end
      tasks.eventually(function() return client:stats().waiting == 2 end)
      tasks.sleep(0.2)
      server:restart()
      if opts.persist then
        tasks.sleep(0.3)
        assert.is_nil(got.ours)
        assert.is_nil(got.plain)
        server:call("DEL", "plain")
        child:write "\n"
        child:expect "released%s+true"
      end
      local free = now()
      tasks.run(10)
      -- The fallback poll, and what a reconnect waits.
      assert(now() - free < 2 + slop, "waited " .. now() - free)
      for _, lock in pairs(got) do assert.is_true(lock:release()) end
    end)
  end
end)

describe("with a server that", function()
  local server
  local open = rig.new(function() return server end)
  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)

  it("forgets its scripts at every step, all goes on without an error", function()
    for _, runtime in ipairs { tasks.runtime, "thread" } do
      local client = open.connect(server.url, { runtime = runtime })
      local function flush() server:call("SCRIPT", "FLUSH") end
      for _ = 1, scaled(100, 5) do
        flush()
        local lock = assert(client:acquire("k", { wait = 0 }))
        flush()
        assert.is_true(lock:extend(5))
        flush()
        assert.is_true(client:inspect("k").held)
        flush()
        assert.are.equal("held", code_of(client:acquire("k", { wait = 0 })))
        flush()
        assert.is_true(lock:release())
        flush()
        assert(client:break_lock "k")
      end
    end
  end)

  it("forgets its scripts all the time, renewals and hand-overs go on", function()
    local events = rig.events()
    local client = open.connect(server.url, { on_event = events.on_event })
    local other = open.connect(server.url)
    local lock = assert(client:acquire("held", { ttl = 1 }))
    local stop = now() + 2
    tasks.start(function()
      while now() < stop do
        server:call("SCRIPT", "FLUSH")
        assert.is_true(lock:is_held())
        tasks.sleep(0.005)
      end
    end)
    for _, c in ipairs { client, client, other, other } do
      tasks.start(function()
        while now() < stop do assert.is_true(assert(c:acquire("passed on")):release()) end
      end)
    end
    tasks.run(20)
    assert.is_true(client:stats().handed_over > 0)
    assert.is_true(lock:release())
    assert.are.equal("acquired released", events.text "held")
    assert.are.equal(0, client:stats().renew_failed)
  end)

  -- The connections of ours: { id, id ... }, but for the one that asks.
  local function connections(direct)
    local own, ids = direct:call("CLIENT", "ID"), {}
    for id in direct:call("CLIENT", "LIST"):gmatch "id=(%d+)" do
      if tonumber(id) ~= own then ids[#ids + 1] = id end
    end
    return ids
  end

  it("kills our connections one by one, nothing is lost", function()
    local events = rig.events()
    local client = open.connect(server.url, { on_event = events.on_event })
    local plain = open.connect(server.url, { runtime = "thread" })
    local direct = open.keep(server:connect())
    local lock = assert(client:acquire("k", { ttl = 1.5 }))
    local blocked = assert(plain:acquire("k2", { ttl = 1.5 }))
    -- Somebody waits, so that the subscription stands.
    server:call("SET", "taken", "somebody", "PX", 60000)
    local got
    tasks.start(function() got = assert(client:acquire("taken", { wait = 30 })) end)
    tasks.eventually(function()
      return #connections(direct) >= 4
    end, 5, function() return "4 connections, there are " .. #connections(direct) end)
    for _ = 1, 2 do
      for _, id in ipairs(connections(direct)) do
        direct:call("CLIENT", "KILL", "ID", id)
        tasks.sleep(0.15)
        assert.is_true(lock:is_held())
        assert.is_true(blocked:is_held())
        assert.is_true(lock:extend())
        assert.is_true(blocked:extend())
      end
    end
    -- Those that are killed while nobody looks.
    for _, id in ipairs(connections(direct)) do direct:call("CLIENT", "KILL", "ID", id) end
    tasks.sleep(2)
    assert.is_true(lock:is_held())
    assert.is_true(blocked:is_held())
    server:call("DEL", "taken")
    local free = now()
    tasks.run(5)
    assert(now() - free < slop, "the waiter came after " .. now() - free)
    assert.is_true(got:release())
    assert.is_true(lock:release())
    assert.is_true(blocked:release())
    assert.are.equal("acquired released", events.text "k")
  end)

  it("kills our subscription, a waiter still hears of a release", function()
    local client, other = open.connect(server.url), open.connect(server.url)
    local direct = open.keep(server:connect())
    for _ = 1, scaled(20, 2) do
      local lock = assert(other:acquire("k", { ttl = 60 }))
      local got
      tasks.start(function() got = assert(client:acquire("k", { wait = 30 })) end)
      tasks.eventually(function() return #assert(other:inspect "k").waiters == 1 end, 5, "a waiter")
      direct:call("CLIENT", "KILL", "TYPE", "pubsub")
      if math.random(2) == 1 then tasks.sleep(0.3 * math.random()) end
      assert.is_true(lock:release())
      local free = now()
      tasks.eventually(function() return got end, 10, "the lock")
      assert(now() - free < 1.1 + slop, "the waiter came after " .. now() - free)
      assert.is_true(got:release())
    end
  end)

  it("kills all connections all the time, no lock is left and no call hangs", function()
    local direct = open.keep(server:connect())
    local documented = { unavailable = true, indeterminate = true, timeout = true, lost = true }
    local stop, calls = now() + scaled(40, 2), 0
    local clients = {}
    for i = 1, 4 do clients[i] = open.connect(server.url, { timeout = 0.5, ttl = 2 }) end
    tasks.start(function()
      while now() < stop do
        direct:call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        if math.random(10) == 1 then direct:call("CLIENT", "KILL", "TYPE", "pubsub") end
        tasks.sleep(0.01 * math.random())
      end
    end)
    local inside = 0
    for _, client in ipairs(clients) do
      tasks.start(function()
        while now() < stop do
          local lock, _, code = client:acquire("k", { wait = 1 })
          if lock then
            inside = inside + 1
            assert(inside == 1 or not lock:is_held(), "two at once")
            tasks.sleep(0.002)
            inside = inside - 1
            local ok
            ok, _, code = lock:release()
            assert(ok or documented[code], code)
            calls = calls + 1
          else
            assert(documented[code], code)
          end
        end
      end)
    end
    tasks.run(stop - now() + 20)
    assert(calls > 10, "only " .. calls .. " locks")
    key_gone(server, "k", now(), 3 + slop)
  end)
end)
