-- time limit: 200 s
-- Fencing tokens on Redis: they rise over everything that can happen to a key,
-- and helper keys are few, expire, and never stand in a lock's way.
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

local bound, now, scaled = helpers.bound, helpers.now, helpers.scaled
local DAY = 86400000

describe("a token on Redis", function()
  local server
  local open = rig.new(function() return server end)
  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)

  it("rises over release, expiry, forced release, FLUSHALL, DEL and restarts", function()
    local clients = { open.connect(server.url), open.connect(server.url) }
    local last, text = 0, "0"
    local function grant(opts)
      local client = clients[math.random(#clients)]
      local lock = assert(client:acquire("k", opts))
      assert(lock.token > last, lock.token_string .. " after " .. text)
      last, text = lock.token, lock.token_string
      return lock
    end
    local ways = {
      function() assert.is_true(grant():release()) end,
      function()
        local lock = grant { ttl = 0.1, renew = false }
        tasks.eventually(function() return server:call("EXISTS", "k") == 0 end)
        assert.are.equal("lost", (select(3, lock:release())))
      end,
      function()
        local lock = grant()
        assert(clients[1]:break_lock "k")
        lock:release()
      end,
      function()
        local lock = grant()
        server:call "FLUSHALL"
        lock:release()
      end,
      function()
        local lock = grant()
        server:call("DEL", "k:fence")
        assert.is_true(lock:release())
      end,
      function()
        local lock = grant()
        server:call("SET", "k:fence", "1")
        assert.is_true(lock:release())
      end,
      function() -- one waiter after the other, in one client and over two
        local first = grant()
        local seen = {}
        for i = 1, 4 do
          tasks.start(function()
            local lock = assert(clients[i % 2 + 1]:acquire("k", { wait = 10 }))
            seen[#seen + 1] = lock
            assert.is_true(lock:release())
          end)
        end
        tasks.sleep(0.02)
        assert.is_true(first:release())
        tasks.run(10)
        for _, lock in ipairs(seen) do
          assert(lock.token > last, lock.token_string .. " after " .. text)
          last, text = lock.token, lock.token_string
        end
      end,
      function()
        local lock = grant()
        server:restart()
        lock:release()
      end,
    }
    for _ = 1, scaled(20, 2) do
      for _, way in ipairs(ways) do
        way()
        way()
      end
    end
    local many = scaled(20000, 500)
    local began = now()
    for _ = 1, many do assert.is_true(grant():release()) end
    -- It counts time in 100 us, and goes on from there.
    assert(last < 1e14, text)
    local ahead = last - (os.time() + 1) * 10000
    assert(ahead < many, ("%d ahead of the clock after %g s"):format(ahead, now() - began))
  end)

  it("goes on from a counter that is ahead of the clock", function()
    local client = open.connect(server.url)
    local ahead = 98765432101234
    server:call("SET", "k:fence", ("%d"):format(ahead))
    for i = 1, 3 do
      local lock = assert(client:acquire "k")
      assert.are.equal(("%d"):format(ahead + i), lock.token_string)
      assert.is_true(lock:release())
    end
    server:call("DEL", "k:fence")
  end)

  it("passes unharmed through what Lua does with numbers, at every size", function()
    local cjson = require "cjson"
    local client = open.connect(server.url)
    for before, after in pairs {
      [""] = false, ["99999999999997"] = "99999999999998", ["67108863999999"] = "67108864000000",
    } do
      if after then server:call("SET", "k:fence", before) else server:call("DEL", "k:fence") end
      local lock = assert(client:acquire "k")
      local t, text = lock.token, lock.token_string
      assert.truthy(text:find("^%d+$"), text)
      assert.are.equal(after or text, text)
      assert.are.equal(text, tostring(t))
      assert.are.equal(text, t .. "")
      assert.are.equal(text, ("%d"):format(t))
      assert.are.equal(text, ("%.0f"):format(t))
      assert.are.equal(t, tonumber(text))
      assert.are.equal("[" .. text .. "]", cjson.encode { t })
      assert.are.equal(t, cjson.decode("[" .. text .. "]")[1])
      assert.are.equal(text, server:call("GET", "k:fence"))
      assert.is_true(lock:release())
    end
    server:call("DEL", "k:fence")
  end)
end)

describe("the keys on Redis", function()
  local server
  local open = rig.new(function() return server end)
  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)

  it("of many names come down to their counters, which expire", function()
    local client, other = open.connect(server.url), open.connect(server.url)
    local n = scaled(10000, 500)
    local base = server:call "DBSIZE"
    for i = 1, n do
      local lock = assert(client:acquire("name" .. i, { wait = 0 }))
      if i % 10 == 0 then
        assert.are.equal("held", (select(3, other:acquire("name" .. i, { wait = 0 }))))
        tasks.start(function()
          local got = other:acquire("name" .. i, { wait = i % 20 == 0 and 0.001 or 20 })
          if got then assert.is_true(got:release()) end
        end)
        tasks.sleep(0)
      end
      assert.is_true(lock:release())
    end
    tasks.run(20)
    tasks.eventually(function() return server:call "DBSIZE" == base + n end, 5, function()
      return ("%d keys, not %d"):format(server:call "DBSIZE", base + n)
    end)
    assert.are.same({}, server:leftovers())
    local direct = open.keep(server:connect())
    for i = 1, n do
      local left = direct:call("PTTL", "name" .. i .. ":fence")
      assert(left > DAY - 600000 and left <= DAY, left)
    end
    -- A new grant renews it.
    direct:call("PEXPIRE", "name1:fence", 5000)
    assert.is_true(assert(client:acquire "name1"):release())
    assert.is_true(direct:call("PTTL", "name1:fence") > DAY - 10000)
    direct:call "FLUSHALL"
  end)

  it("have an expiry at every moment, however their owners die", function()
    local direct = open.keep(server:connect())
    local checked = 0
    local function check_all()
      for _, key in ipairs(direct:call("KEYS", "*")) do
        local left = direct:call("PTTL", key)
        assert(left ~= -1, key .. " has no expiry")
        if left >= 0 and not key:find ":fence$" then checked = checked + 1 end
      end
    end
    for _ = 1, scaled(60, 6) do
      local children = {}
      for i = 1, 2 do
        children[i] = open.keep(helpers.spawn_lua([[
          local c = assert(require("dlock").connect(ARGS[1], { ttl = 0.6, wait = 20 }))
          print "runs" io.stdout:flush()
          for i = 1, math.huge do
            local lock = assert(c:acquire("k" .. i % 3))
            if i % 7 == 0 then lock:extend(0.5) end
            if lock:is_held() then lock:release() end
          end
        ]], server.url))
      end
      for _, child in ipairs(children) do child:expect "runs" end
      local stop = now() + 0.1 * math.random()
      repeat check_all() until now() > stop
      for _, child in ipairs(children) do child:kill "KILL" end
      check_all()
      for _, child in ipairs(children) do child:wait() end
      check_all()
    end
    assert(checked > 0, "never saw a lock")
    tasks.eventually(function()
      for _, key in ipairs(server:leftovers()) do
        if not key:find ":q$" then return false end
      end
      return true
    end, 3, "free by the ttl")
    local client = open.connect(server.url)
    for i = 0, 2 do
      -- The dead in the lines cost nothing.
      local took, lock = helpers.timed(client.acquire, client, "k" .. i, { wait = 0 })
      assert.truthy(lock)
      assert(took < bound(0.5), took)
      assert.is_true(lock:release())
    end
    for _, key in ipairs(server:leftovers()) do
      local left = direct:call("PTTL", key)
      assert(left > 0 and left <= 60000, key .. " " .. left)
    end
    direct:call "FLUSHALL"
  end)

  it("that are dlock's own cannot be taken as locks", function()
    local client = open.connect(server.url)
    for _, key in ipairs { "k:fence", "k:q" } do
      local lock, msg, code = client:acquire(key, { wait = 0 })
      assert.is_nil(lock)
      assert.are.equal("unsupported", code, msg)
    end
    assert.are.equal(0, server:call "DBSIZE")
  end)
end)
