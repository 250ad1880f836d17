-- time limit: 200 s
-- Waiting for a lock on Redis: cheap for the server, woken at once, whatever
-- happens to the others in the line.
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"
local proxies = require "spec.support.proxy"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

local bound, now, scaled = helpers.bound, helpers.now, helpers.scaled

-- The fallback poll is 0.8 to 1 s: what is faster was woken.
local POLL = 1
local slop = bound(0.5)

describe("waiting for a lock on Redis", function()
  local server
  local open = rig.new(function() return server end)
  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)

  local function waiters(client, key, n)
    tasks.eventually(function() return #assert(client:inspect(key)).waiters == n end, 5,
      n .. " in the line of " .. key)
  end

  -- Starts a wait; the returned table gets `lock` and `at`, when it came.
  local function wait_for(client, key, opts)
    local got = {}
    opts = opts or { wait = 30, ttl = 30 }
    tasks.start(function()
      got.lock, got.msg, got.code = client:acquire(key, opts)
      got.at = now()
    end)
    return got
  end

  local function arrives(got, since, within, who)
    tasks.eventually(function() return got.at end, within + 5, "the lock")
    assert(got.lock, got.msg)
    local took = got.at - since
    assert(took < bound(within), ("%s had to wait %.3f s"):format(who or "it", took))
    return got.lock
  end

  local function middle(list)
    table.sort(list)
    return list[math.ceil(#list / 2)]
  end

  -- What clients send to the server within so many seconds.
  local function commands_in(seconds)
    local monitor = open.keep(server:connect())
    assert(monitor:call("MONITOR"))
    tasks.sleep(seconds)
    local seen, text = {}, monitor.buf
    while true do
      local more = helpers.proc.read(monitor.fd, 0)
      if not more then break end
      text = text .. more
    end
    for line in text:gmatch "[^\r\n]+" do
      if not line:find("^%+[%d.]+ %[%d+ lua%]") then seen[#seen + 1] = line end
    end
    return seen
  end

  for who, most in pairs { ["a dlock client"] = 2, ["a plain client"] = 10 } do
    local text = "costs at most %d commands/s for 100 waiters while %s holds it"
    it(text:format(most, who), function()
      local holder, client = open.connect(server.url), open.connect(server.url)
      local lock
      if most == 2 then
        lock = assert(holder:acquire("k", { ttl = 60 }))
      else
        server:call("SET", "k", "somebody", "NX", "PX", 60000)
      end
      local last, arrived = 0, 0
      for _ = 1, 100 do
        tasks.start(function()
          local mine = assert(client:acquire("k", { wait = 60, ttl = 60 }))
          assert.is_true(mine.token > last)
          last = mine.token
          arrived = arrived + 1
          assert.is_true(mine:release())
        end)
      end
      tasks.sleep(0.5)
      assert.are.equal(100, client:stats().waiting)
      local seconds = math.max(4, helpers.scale * 20)
      local seen = commands_in(seconds)
      assert(#seen <= most * seconds, #seen .. " commands: " .. table.concat(seen, "\n"))
      local sent = client:stats().requests
      if lock then assert.is_true(lock:release()) else server:call("DEL", "k") end
      tasks.run(20)
      assert.are.equal(100, arrived)
      -- About one request each: they hand it over among themselves.
      assert(client:stats().requests - sent < 200, client:stats().requests - sent)
    end)
  end

  it("on many keys takes no more than three connections a client", function()
    local holder, client = open.connect(server.url), open.connect(server.url)
    local before = server:info "connected_clients"
    local locks, got = {}, {}
    for i = 1, scaled(2000, 200) do
      locks[i] = assert(holder:acquire("k" .. i, { ttl = 600 }))
      got[i] = wait_for(client, "k" .. i, { wait = 600, ttl = 600 })
    end
    tasks.eventually(function() return client:stats().waiting == #locks end, 20)
    local most = server:info "connected_clients" - before
    assert(most <= 6, most .. " connections")
    for _, lock in ipairs(locks) do assert.is_true(lock:release()) end
    local free = now()
    for i = 1, #got do assert.is_true(arrives(got[i], free, 5 + #got / 100):release()) end
  end)

  it("ends at once by a release, a forced release, and soon by a plain DEL", function()
    local holder, client = open.connect(server.url), open.connect(server.url)
    for name, free in pairs {
      release = function(lock) assert.is_true(lock:release()) end,
      ["break"] = function() assert(holder:break_lock "k") end,
      DEL = function() server:call("DEL", "k") end,
    } do
      local took = {}
      for _ = 1, 5 do
        local lock
        if name == "DEL" then
          server:call("SET", "k", "somebody", "PX", 60000)
        else
          lock = assert(holder:acquire("k", { ttl = 60 }))
        end
        local got = wait_for(client, "k")
        if lock then waiters(holder, "k", 1) else tasks.sleep(0.1) end
        free(lock)
        local since = now()
        assert.is_true(arrives(got, since, POLL + 1):release())
        took[#took + 1] = got.at - since
        if name == "break" then assert.is_nil(lock:extend()) end -- it does not know yet
      end
      -- A plain holder wakes nobody: polled every 50 to 250 ms.
      local most = bound(name == "DEL" and 0.3 or 0.1)
      assert(middle(took) < most, name .. ": " .. table.concat(took, " "))
    end
  end)

  it("ends when a lock that nobody renews runs out", function()
    local holder, client = open.connect(server.url), open.connect(server.url)
    for _ = 1, 3 do
      assert(holder:acquire("k", { ttl = 0.7, renew = false }))
      local since = now()
      local got = wait_for(client, "k")
      assert.is_true(arrives(got, since, 0.7 + 0.5):release())
    end
  end)

  it("of a killed process costs the next in the line nothing, of a stopped one a poll", function()
    local holder, client = open.connect(server.url), open.connect(server.url)
    for _, signal in ipairs { "KILL", "STOP" } do
      local lock = assert(holder:acquire("k", { ttl = 60 }))
      local child = open.keep(helpers.spawn_lua([[
        local c = assert(require("dlock").connect(ARGS[1]))
        local lock = c:acquire("k", { wait = 60, ttl = 60 })
        print("has it") io.stdout:flush()
        lock:release()
      ]], server.url))
      waiters(holder, "k", 1)
      local got = wait_for(client, "k")
      waiters(holder, "k", 2)
      child:kill(signal)
      if signal == "KILL" then child:wait() end
      assert.is_true(lock:release())
      local mine = arrives(got, now(), signal == "KILL" and 0.5 or POLL + 0.5, "after " .. signal)
      if signal == "STOP" then
        child:kill "CONT"
        waiters(client, "k", 1)
        assert.is_true(mine:release())
        child:expect("has it", 5)
        assert.are.equal(0, (child:finish()))
      else
        assert.is_true(mine:release())
      end
    end
  end)

  it("that is given up leaves the line, and the next gets the lock at once", function()
    local holder, client = open.connect(server.url), open.connect(server.url)
    local lock = assert(holder:acquire("k", { ttl = 60 }))
    for _ = 1, 20 do wait_for(open.connect(server.url), "k", { wait = 0.3 }) end
    waiters(holder, "k", 20)
    tasks.run(5)
    waiters(holder, "k", 0)
    local got = wait_for(client, "k")
    waiters(holder, "k", 1)
    assert.is_true(lock:release())
    assert.is_true(arrives(got, now(), 0.5):release())
  end)

  it("that is given up just when the lock gets free passes the wake-up on", function()
    local holder, first, second = open.connect(server.url), open.connect(server.url),
      open.connect(server.url)
    local took = {}
    for _ = 1, scaled(600, 30) do
      local lock = assert(holder:acquire("k", { ttl = 60 }))
      local began = now()
      local quitter = wait_for(first, "k", { wait = 0.1 + 0.004 * math.random(), ttl = 60 })
      local got
      -- On a slow machine it may have given up already.
      tasks.eventually(function()
        local n = #assert(holder:inspect "k").waiters
        if not got and (n == 1 or quitter.at) then got = wait_for(second, "k") end
        return got and n == (quitter.at and 1 or 2)
      end, 5, "both in the line")
      tasks.sleep(math.max(0, 0.1 - (now() - began) - 0.004 * math.random()))
      assert.is_true(lock:release())
      local free = now()
      if quitter.lock then assert.is_true(quitter.lock:release()) end
      tasks.eventually(function() return got.at or quitter.lock end, 5)
      if quitter.lock then
        quitter.lock:release()
        tasks.eventually(function() return got.at end, 5)
      end
      took[#took + 1] = got.at - free
      assert.is_true(got.lock:release())
    end
    table.sort(took)
    assert(took[#took] < slop, "the slowest: " .. took[#took])
  end)

  it("passes a wake-up on that comes when nobody waits any more", function()
    local proxy = open.keep(proxies.start(server.port))
    local holder, second = open.connect(server.url), open.connect(server.url)
    local took = {}
    for _ = 1, 5 do
      local first = open.connect(proxy.url, { timeout = 0.2 })
      local lock = assert(holder:acquire("k", { ttl = 60 }))
      local quitter = wait_for(first, "k", { wait = 0.4, ttl = 60 })
      waiters(holder, "k", 1)
      local got = wait_for(second, "k")
      waiters(holder, "k", 2)
      proxy:set "hold"
      assert.is_true(lock:release()) -- the wake-up is stuck on its way to the first
      tasks.eventually(function() return quitter.at end, 3, "the first gave up")
      proxy:set "pass"
      local since = now()
      assert.is_true(arrives(got, since, POLL + 1):release())
      took[#took + 1] = math.max(got.at - since, 0)
      first:close()
    end
    assert(middle(took) < bound(0.2), table.concat(took, " "))
  end)

  it("is never forgotten over many hand-overs between clients under load", function()
    for _ = 1, 2 do
      open.keep(helpers.spawn { "nice", helpers.lua, "-e", "while true do end" })
    end
    local rounds, slowest = scaled(1000, 120), 0
    for pair = 1, 3 do
      tasks.start(function()
        local key = "pair" .. pair
        local a, b = open.connect(server.url), open.connect(server.url)
        local lock = assert(a:acquire(key, { ttl = 60 }))
        for _ = 1, math.ceil(rounds / 3) do
          local got = wait_for(b, key, { wait = 60, ttl = 60 })
          waiters(a, key, 1)
          if math.random(3) == 1 then tasks.sleep(0.01 * math.random()) end
          assert.is_true(lock:release())
          local free = now()
          tasks.eventually(function() return got.at end, 5)
          slowest = math.max(slowest, got.at - free)
          assert.is_true(got.lock.token > lock.token)
          lock, a, b = got.lock, b, a
        end
        assert.is_true(lock:release())
      end)
    end
    tasks.run(100)
    assert(slowest < slop, "the slowest wake-up took " .. slowest)
  end)
end)
