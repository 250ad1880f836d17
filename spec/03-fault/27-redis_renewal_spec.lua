-- time limit: 200 s
-- Renewal on Redis: it keeps what is ours, tells why something was lost, never
-- speaks of a loss that was none, and ends when it should.
local helpers = require "spec.helpers"
local proxies = require "spec.support.proxy"
local redis = require "spec.support.redis"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

local bound, now, scaled = helpers.bound, helpers.now, helpers.scaled
local slop = bound(1)

describe("renewal on Redis", function()
  local server
  local open = rig.new(function() return server end)
  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)

  local function client_with_events(opts)
    local events = rig.events()
    opts = opts or {}
    opts.on_event = events.on_event
    return open.connect(server.url, opts), events
  end

  it("gives each kind of loss its own reason, in time", function()
    local other = open.connect(server.url)
    for want, spoil in pairs {
      deleted = function() server:call("DEL", "deleted") end,
      taken = function() server:call("SET", "taken", "somebody", "PX", 60000) end,
      expired = function() end,
      max_hold = function() end,
    } do
      tasks.start(function()
        local client, events = client_with_events()
        local began = now()
        local lock = assert(client:acquire(want, { ttl = 1.2, renew = want ~= "expired",
          max_hold = want == "max_hold" and 0.8 or nil }))
        spoil()
        assert.are.equal(want, lock:wait_lost(bound(5)))
        local took = now() - began
        local due = want == "expired" and 1.2 or want == "max_hold" and 0.8 or 0.4
        assert(took < due + slop, want .. " after " .. took)
        assert.is_false(lock:is_held())
        assert.are.equal(0, lock:remaining())
        assert.are.equal(want, lock:lost_reason())
        local _, msg, code = lock:release()
        assert.are.equal("lost", code)
        assert.truthy(msg:find("lost", 1, true), msg)
        assert.are.equal("lost", (select(3, lock:extend(5))))
        client:poll()
        assert.are.equal("acquired lost(" .. want .. ")", events.text())
        if want ~= "taken" then
          assert.is_true(assert(other:acquire(want, { wait = 5 })):release())
        end
      end)
    end
    tasks.run(20)
    assert.are.equal("somebody", server:call("GET", "taken"))
    server:call("DEL", "taken")
  end)

  it("leaves max_hold alone that is never reached, and a lease that is not renewed", function()
    local client, events = client_with_events()
    local lock = assert(client:acquire("k", { ttl = 1.2, max_hold = 30 }))
    local lease = assert(client:acquire("lease", { ttl = 1, renew = false }))
    local before = server:call("PTTL", "lease")
    tasks.sleep(0.8)
    assert(server:call("PTTL", "lease") <= before - 700, "the lease was renewed")
    assert.is_true(lease:is_held())
    assert.is_true(lease:release())
    tasks.sleep(1)
    assert.is_true(lock:is_held())
    assert.is_true(lock:release())
    assert.are.equal("acquired released", events.text "k")
  end)

  -- Renewals come at ttl/3, less up to ttl/30.
  local function near_renewal() tasks.sleep(0.178 + 0.025 * math.random()) end

  local function no_loss(client, events)
    client:poll()
    for _, ev in ipairs(events.list) do
      assert(ev.type == "acquired" or ev.type == "released", ev.type .. ": " .. ev.message)
    end
    assert.are.equal(0, client:stats().lost)
    assert(client:stats().renewed > 0, "no renewal came near")
  end

  it("races a release and never makes a false loss of it", function()
    local client, events = client_with_events()
    local rounds, side = scaled(1000, 60), 10
    for key = 1, side do
      tasks.start(function()
        for _ = 1, rounds / side do
          local lock = assert(client:acquire("k" .. key, { ttl = 0.6 }))
          near_renewal()
          local ok, msg = lock:release()
          assert(ok, msg)
        end
      end)
    end
    tasks.run(60)
    no_loss(client, events)
  end)

  it("that reaches the server after the release is no loss, and no lock", function()
    local proxy = open.keep(proxies.start(server.port))
    for _, runtime in ipairs { "thread", tasks.runtime } do
      local events = rig.events()
      local client = open.connect(proxy.url, { on_event = events.on_event, runtime = runtime })
      for _ = 1, scaled(100, 3) do
        local lock = assert(client:acquire("k", { ttl = 0.9 }))
        local sent = client:stats().requests
        proxy:rule("late", { match = "\r\nk\r\n" })
        tasks.eventually(function() return client:stats().requests > sent end, 5, "a renewal")
        assert.is_true(lock:release())
        tasks.sleep(0.12)
        assert.is_false(lock:is_held())
        assert.are.equal(0, server:call("EXISTS", "k"))
      end
      client:poll()
      for _, ev in ipairs(events.list) do
        assert(ev.type == "acquired" or ev.type == "released", ev.type .. ": " .. ev.message)
      end
      assert.are.equal(0, client:stats().lost)
    end
  end)

  it("never brings a released lock back, however late its answer", function()
    local client, other = open.connect(server.url), open.connect(server.url)
    for _ = 1, scaled(100, 5) do
      local lock = assert(client:acquire("k", { ttl = 0.6 }))
      tasks.sleep(0.18)
      server:call("CLIENT", "PAUSE", 40)
      tasks.sleep(0.025)
      local ok = lock:release()
      assert.is_true(ok)
      assert.is_false(lock:is_held())
      assert.are.equal(0, server:call("EXISTS", "k"))
      assert.is_true(assert(other:acquire("k", { wait = 0 })):release())
    end
  end)

  it("keeps very many locks with few requests", function()
    local client, events = client_with_events()
    local n, ttl = scaled(5000, 300), 3
    local locks = {}
    for i = 1, n do locks[i] = assert(client:acquire("k" .. i, { ttl = ttl })) end
    local before, began = client:stats(), now()
    local seconds = ttl * math.max(1.5, 10 * helpers.scale)
    tasks.sleep(seconds)
    for i, lock in ipairs(locks) do assert(lock:is_held(), i .. ": " .. events.text("k" .. i)) end
    local after = client:stats()
    assert.are.equal(0, after.lost)
    assert.are.equal(0, after.renew_failed)
    assert(after.renewed - before.renewed >= n, "renewed " .. after.renewed - before.renewed)
    -- Batches of 64, and what came due apart.
    local sent = after.requests - before.requests
    local rounds = (now() - began) / (ttl / 3) + 1
    assert(sent <= rounds * (n / 64 + 12), sent .. " requests")
    for _, lock in ipairs(locks) do assert.is_true(lock:release()) end
  end)

  it("goes on while Lua is busy or blocked elsewhere", function()
    local client, other = open.connect(server.url), open.connect(server.url)
    local lock = assert(client:acquire("k", { ttl = 1.2 }))
    local stop = now() + 1.5
    while now() < stop do end
    assert.is_true(lock:is_held())
    helpers.proc.pause(1500)
    assert.is_true(lock:is_held())
    assert.are.equal("held", (select(3, other:acquire("k", { wait = 0 }))))
    assert.is_true(lock:release())
  end)

  it("of a process that is stopped past the ttl ends in 'lost'", function()
    local child = open.keep(helpers.spawn_lua([[
      local c = assert(require("dlock").connect(ARGS[1]))
      local lock = assert(c:acquire("k", { ttl = 0.6 }))
      print "held" io.stdout:flush()
      while lock:is_held() do end
      print(lock:lost_reason(), select(3, lock:release()))
    ]], server.url))
    child:expect "held"
    tasks.sleep(0.3)
    assert.are.equal(1, server:call("EXISTS", "k"))
    child:kill "STOP"
    local client = open.connect(server.url)
    local lock = assert(client:acquire("k", { wait = 5 }))
    child:kill "CONT"
    assert.truthy(child:expect("(%a+)%s+lost", 5))
    child:finish()
    assert.is_true(lock:is_held())
    assert.is_true(lock:release())
  end)

  it("goes to the next of two waiters in a process with a new token and its own ttl", function()
    local client = open.connect(server.url)
    local last = assert(client:acquire("k", { ttl = 1.5 }))
    local waiting = {}
    for i = 1, 3 do
      tasks.start(function()
        waiting[i] = assert(client:acquire("k", { ttl = i == 3 and 3 or 1.5, wait = 20 }))
      end)
    end
    tasks.sleep(0.1)
    for i = 1, 3 do
      assert.is_nil(waiting[i])
      assert.is_true(last:release())
      tasks.eventually(function() return waiting[i] end, 5, "waiter " .. i)
      local lock = waiting[i]
      assert.is_true(lock.token > last.token)
      assert.is_false(last:is_held())
      assert.are.equal("not_held", (select(3, last:release())))
      tasks.sleep(i == 3 and 1.2 or 1.8) -- it is renewed as its own
      assert(lock:is_held(), ("waiter %d lost it: %s"):format(i, tostring(lock:lost_reason())))
      assert.are.equal(lock.token_string, server:call("GET", "k:fence"))
      last = lock
    end
    assert.is_true(last:release())
    assert.are.equal(2, client:stats().handed_over)
  end)
end)
