-- time limit: 200 s
-- A Redis that is frozen (SIGSTOP: the kernel goes on taking bytes, nobody
-- answers): the holder knows before the server can forget, and what was sent
-- into the ice leaves no lock behind when it melts.
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

local bound, now, scaled = helpers.bound, helpers.now, helpers.scaled
local key_gone = rig.key_gone

-- What a busy machine may add to a time.
local slop = bound(1)

-- Lanes at once, so that many rounds take the time of one.
local SERVERS = 5

describe("a frozen Redis", function()
  local servers, getters = {}, {}
  for i = 1, SERVERS do getters[i] = function() return servers[i] end end
  local open = rig.new((table.unpack or unpack)(getters)) -- luacheck: ignore
  setup(function()
    for i = 1, SERVERS do servers[i] = redis.start() end
  end)
  teardown(function()
    for _, s in ipairs(servers) do s:stop() end
  end)

  local function connect(server, opts) return open.connect(server.url, opts) end

  -- Whoever asks is_held() must hear "no" before `expires`. Returns when wait_lost
  -- came back, less what this process had to wait for a processor.
  local function watch_end(lock, expires, reason)
    local told
    tasks.start(function()
      assert.are.equal(reason or "expired", lock:wait_lost(bound(10)))
      told = now()
    end)
    local last, lag = now(), 0
    repeat
      tasks.sleep(0.005)
      local asked = now()
      if lock:is_held() then assert(asked < expires, "held after its ttl was over") end
      lag, last = math.max(lag, asked - last - 0.005), asked
      assert(asked < expires + bound(10), "wait_lost did not come back")
    until told
    assert.is_false(lock:is_held())
    return told - lag
  end

  -- Freezes it; returns when the key expires, and when it froze, on our clock.
  local function freeze(server, client, key, ttl)
    local renewed = client:stats().renewed
    local left = server:call("PTTL", key) / 1000
    local expires = now() + left
    server:freeze()
    local frozen = now()
    -- A renewal may have slipped in between.
    if client:stats().renewed ~= renewed then expires = frozen + ttl end
    return expires, frozen
  end

  it("loses its locks before their ttl is over, and has none when it thaws", function()
    local function round(server)
      local client, other = connect(server), connect(server)
      local lock = assert(client:acquire("k", { ttl = 2 }))
      -- Somewhere between two renewals, which come every 0.66 s.
      tasks.sleep(0.15 + 0.66 * math.random(0, 1) + 0.35 * math.random())
      assert.is_true(lock:is_held())
      local expires, frozen = freeze(server, client, "k", 2)
      local told = watch_end(lock, expires)
      assert(told < frozen + bound(2), "wait_lost came late: " .. told - frozen)
      server:thaw()
      local thawed = now()
      key_gone(server, "k", thawed, 1)
      local heir = assert(other:acquire("k", { wait = 2 }))
      assert.is_true(heir.token > lock.token)
      local _, _, code = lock:release()
      assert.are.equal("lost", code)
      assert.is_true(heir:release())
      client:close()
      other:close()
    end
    for _ = 1, math.ceil(scaled(100, 5) / SERVERS) do
      for _, s in ipairs(servers) do tasks.start(round, s) end
      tasks.run(30)
    end
  end)

  it("loses a lock that is not renewed before the server's own clock says so", function()
    for _, server in ipairs(servers) do
      tasks.start(function()
        local client = connect(server)
        local lock = assert(client:acquire("k", { ttl = 1, renew = false }))
        tasks.sleep(0.3 * math.random())
        watch_end(lock, (freeze(server, client, "k", 1)))
        server:thaw()
        key_gone(server, "k", now(), 1)
      end)
    end
    tasks.run(20)
  end)

  it("does not keep an extension that it took up too late", function()
    for _, server in ipairs(servers) do
      tasks.start(function()
        local client = connect(server, { timeout = 0.3 })
        local lock = assert(client:acquire("k", { ttl = 30, max_hold = 1 }))
        local ends = now() + 1
        server:freeze()
        local ok, msg, code = lock:extend(60)
        assert.is_nil(ok)
        assert.are.equal("indeterminate", code, msg)
        assert.is_true(lock:is_held())
        watch_end(lock, ends, "max_hold")
        server:thaw()
        key_gone(server, "k", now(), 1)
      end)
    end
    tasks.run(20)
  end)

  it("counts a shorter ttl from the moment it was asked for", function()
    for _, server in ipairs(servers) do
      tasks.start(function()
        local lock = assert(connect(server, { timeout = 0.2 }):acquire("k", { ttl = 30 }))
        server:freeze()
        local _, _, code = lock:extend(1)
        local asked = now()
        assert.are.equal("indeterminate", code)
        assert.is_true(lock:remaining() <= 1)
        watch_end(lock, asked + 1)
        server:thaw()
        key_gone(server, "k", now(), 0.9)
      end)
    end
    tasks.run(20)
  end)

  -- How an acquire can end while the server is frozen: returns its code.
  local ways = {
    ["that ran out of time"] = function(client, key)
      local lock, _, code = client:acquire(key, { ttl = 30, wait = 0, timeout = 0.2 })
      assert.is_nil(lock)
      return code
    end,
    ["that ran out of time while it waited"] = function(client, key)
      local lock, _, code = client:acquire(key, { ttl = 30, wait = 0.3, timeout = 0.2 })
      assert.is_nil(lock)
      return code
    end,
    ["whose client was closed"] = function(client, key)
      local code
      tasks.start(function() code = select(3, client:acquire(key, { ttl = 30, wait = 5 })) end)
      tasks.sleep(0.1)
      client:close()
      tasks.eventually(function() return code end, 2, "the acquire ended")
      return code
    end,
    ["whose caller was killed"] = function(client, key)
      local task = tasks.start(client.acquire, client, key, { ttl = 30, wait = 5 })
      tasks.sleep(0.1)
      tasks.drop(task)
      collectgarbage()
      collectgarbage()
      return "canceled"
    end,
  }

  for how, way in pairs(ways) do
    it("keeps no lock of an acquire " .. how, function()
      for _ = 1, math.ceil(scaled(100, 5) / SERVERS) do
        for _, server in ipairs(servers) do
          tasks.start(function()
            local client, other = connect(server, { timeout = 0.3 }), connect(server)
            assert(client:acquire("warm", { ttl = 5 })):release()
            server:freeze()
            local code = way(client, "k")
            assert(code == "indeterminate" or code == "closed" or code == "canceled", code)
            tasks.sleep(0.2 * math.random())
            server:thaw()
            local thawed = now()
            local heir = assert(other:acquire("k", { wait = 5 }))
            assert(now() - thawed < bound(2), "the next owner waited " .. now() - thawed)
            assert.is_true(heir:release())
            key_gone(server, "k", thawed, 2)
            client:close()
            other:close()
          end)
        end
        tasks.run(30)
      end
    end)
  end

  it("keeps no lock of acquires that were given up on lanes", function()
    local server = servers[1]
    local plain = require "dlock.runtime.thread"
    local some = {}
    for i = 1, 3 do
      some[i] = connect(server, { runtime = plain })
      assert(some[i]:acquire("warm")):release()
    end
    for round = 1, scaled(20, 2) do
      server:freeze()
      for i, client in ipairs(some) do
        local took, lock, _, code = helpers.timed(client.acquire, client, "k" .. i,
          { ttl = 30, wait = 0, timeout = 0.2 })
        assert.is_nil(lock)
        assert.are.equal("indeterminate", code)
        assert(took < 0.2 + slop, "took " .. took)
      end
      -- Another key, over the same client: a connection of its own.
      server:thaw()
      local thawed = now()
      assert(assert(some[1]:acquire("other" .. round, { wait = 0 })):release())
      for i = 1, #some do key_gone(server, "k" .. i, thawed, 2) end
    end
  end)

  it("is told of a release later, which returns in time", function()
    local server = servers[1]
    local events = {}
    local client = connect(server, {
      timeout = 0.3, on_event = function(ev) events[#events + 1] = ev.type end,
    })
    local lock = assert(client:acquire("k", { ttl = 30 }))
    server:freeze()
    local took, ok, _, code = helpers.timed(lock.release, lock)
    assert.is_nil(ok)
    assert.are.equal("indeterminate", code)
    assert(took < 0.3 + slop, "took " .. took)
    assert.is_false(lock:is_held())
    assert.is_nil(lock:lost_reason())
    server:thaw()
    key_gone(server, "k", now(), 2)
    tasks.eventually(function()
      client:poll()
      return events[#events] == "released"
    end, 5, function() return "released after " .. table.concat(events, " ") end)
  end)

  it("holds up nobody's close, exit or log-in", function()
    local server = servers[1]
    local client = connect(server, { timeout = 0.3, runtime = require "dlock.runtime.thread" })
    assert(client:acquire("k", { ttl = 30 }))
    local child = helpers.spawn_lua([[
      local c = assert(require("dlock").connect(ARGS[1], { ttl = 30 }))
      lock = assert(c:acquire "child's")
      print "held" io.stdout:flush()
      io.read()
    ]], server.url)
    child:expect "held"
    server:freeze()
    local took, ok, _, code = helpers.timed(client.close, client)
    assert.is_nil(ok)
    assert.are.equal("indeterminate", code)
    assert(took < 0.3 + slop, "close took " .. took)
    local new = connect(server, { connect_timeout = 0.3, password = "x", runtime = "thread" })
    took, ok, _, code = helpers.timed(new.acquire, new, "k", { wait = 0 })
    assert.is_nil(ok)
    assert.are.equal("unavailable", code)
    assert(took < 0.3 + slop, "log-in took " .. took)
    took = helpers.timed(function() assert.are.equal(0, (child:finish(10))) end)
    assert(took < 0.5 + slop, "exit took " .. took)
    server:thaw()
    key_gone(server, "k", now(), 2)
    server:call("DEL", "child's") -- for the ttl, but where the release got through
  end)
end)
