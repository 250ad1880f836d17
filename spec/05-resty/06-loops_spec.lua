-- time limit: 180 s
-- The runtimes for cqueues and luv: many coroutines, one thread; whoever waits lets the
-- others run; nothing is left when a wait is cut short.

local dlock = require "dlock"
local fixtures = require "spec.support.fixtures"
local helpers = require "spec.helpers"

local now = helpers.now

-- For each loop: start(fn) makes a coroutine, run() drives until all are done, sleep.
local loops = {}

local has_cqueues, cqueues = pcall(require, "cqueues")
if has_cqueues then
  local controller
  loops.cqueues = {
    begin = function() controller = cqueues.new() end,
    start = function(fn) controller:wrap(fn) end,
    run = function() assert(controller:loop()) end,
    sleep = cqueues.sleep,
    finish = function() controller = nil end,
  }
end

local has_luv, uv = pcall(require, "luv")
if has_luv then
  loops.luv = {
    begin = function() end,
    start = function(fn)
      local timer = uv.new_timer()
      timer:start(0, 0, function()
        timer:close()
        assert(coroutine.resume(coroutine.create(fn)))
      end)
    end,
    run = function() uv.run() end,
    sleep = function(s) require("dlock.runtime.luv").sleep(s) end,
    finish = function() end,
  }
end

for _, loop_name in ipairs { "cqueues", "luv" } do
for _, backend in ipairs { "local", "redis" } do
describe(loop_name .. " over " .. backend, function()
  local loop = loops[loop_name]
  if not loop then
    pending("missing: " .. loop_name)
    return
  end
  local fixture, client
  setup(function()
    fixture = fixtures[backend].start()
    -- What stays for the life of the process: the bell and the loop's own descriptors.
    local first = assert(dlock.connect(fixture.url, { runtime = loop_name }))
    loop.begin()
    loop.start(function() assert(assert(first:acquire "first"):release()) end)
    loop.run()
    loop.finish()
    first:close()
  end)
  teardown(function() fixture:stop() end)
  before_each(function()
    loop.begin()
    client = assert(dlock.connect(fixture.url, { runtime = loop_name, wait = 20, ttl = 5 }))
  end)
  after_each(function()
    assert(client:close())
    client = nil
    loop.finish()
    if helpers.jit then jit.flush() end -- luacheck: ignore jit
  end)
  helpers.no_leaks(function() return fixture end)

  it("loses no update of 64 coroutines", function()
    local n, done = 0, 0
    for _ = 1, 64 do
      loop.start(function()
        assert(client:with("counter", function()
          local v = n
          loop.sleep(0.001)
          n = v + 1
        end))
        done = done + 1
      end)
    end
    loop.run()
    assert.are.equal(64, done)
    assert.are.equal(64, n)
  end)

  it("lets others run while coroutines wait, in the order in which they came", function()
    local came, order, ticks, over = {}, {}, 0, false
    loop.start(function()
      local lock = assert(client:acquire "k")
      loop.sleep(0.2)
      assert(lock:release())
    end)
    for i = 1, 8 do
      loop.start(function()
        loop.sleep(0.01)
        came[#came + 1] = i
        assert(client:with("k", function() order[#order + 1] = i end))
        over = #order == 8
      end)
    end
    loop.start(function()
      while not over do
        loop.sleep(0.005)
        ticks = ticks + 1
      end
    end)
    loop.run()
    assert.are.same(came, order)
    assert.is_true(ticks > 5, ticks .. " ticks")
  end)

  it("times out on time, alone and beside others", function()
    local took, code, long = nil, nil, nil
    local other = assert(dlock.connect(fixture.url, { wait = 0 }))
    local held = assert(other:acquire "k")
    loop.start(function()
      local began = now()
      local _
      _, _, code = client:acquire("k", { wait = 0.2 })
      took = now() - began
      assert(held:release())
    end)
    loop.start(function() long = client:with("k", function() return true end) end)
    loop.run()
    other:close()
    assert.are.equal("timeout", code)
    assert.is_true(took >= 0.19 and took < helpers.bound(1), took)
    assert.is_true(long)
  end)

  it("waits for the loss of a lock, and does everything else", function()
    local reason, answers = nil, {}
    loop.start(function()
      local lock = assert(client:acquire "lost")
      reason = lock:wait_lost(10)
    end)
    loop.start(function()
      loop.sleep(0.1)
      answers.ping = client:ping()
      answers.list = #assert(client:list())
      answers.inspect = client:inspect("lost").held
      answers.broken = client:break_lock("lost")
      answers.ensure = client:with("e", function(lock) assert(lock:extend(4)) end)
    end)
    loop.run()
    assert.are.equal("deleted", reason)
    assert.is_string(answers.ping)
    assert.is_true(answers.list >= 1)
    assert.is_true(answers.inspect and answers.broken and answers.ensure)
  end)

  it("lets the loop end, and works again in the next one", function()
    for _ = 1, 3 do
      local done = false
      loop.begin()
      loop.start(function()
        assert(assert(client:acquire "k"):release())
        done = true
      end)
      loop.run()
      assert.is_true(done)
    end
  end)

  it("blocks outside the loop", function()
    local lock = assert(client:acquire "k")
    assert(lock:release())
  end)

  it("gives events to on_event during waits", function()
    local seen = {}
    local teller = assert(dlock.connect(fixture.url, {
      runtime = loop_name, on_event = function(ev) seen[ev.type] = true end,
    }))
    loop.start(function()
      local lock = assert(teller:acquire("k", { renew = false, ttl = 0.2 }))
      lock:wait_lost(5)
    end)
    loop.run()
    teller:close()
    assert.is_true(seen.acquired and seen.lost)
  end)

  it("works in a forked child", function()
    local child = helpers.fork(function()
      loop.begin()
      local done = 1
      loop.start(function()
        local other = assert(dlock.connect(fixture.url, { runtime = loop_name }))
        assert(assert(other:acquire "in the child"):release())
        assert(other:close())
        done = 0
      end)
      loop.run()
      return done
    end)
    assert.are.equal(0, (select(2, child:wait(10))))
    child:close()
  end)
end)
end
end

if has_luv then
  describe("luv", function()
    it("refuses to stop the running loop from its main coroutine, and releases there", function()
      local dir = helpers.tmpdir()
      local client = assert(dlock.connect("local://" .. dir, { runtime = "luv" }))
      local lock = assert(client:acquire "k")
      local code, released
      local timer = uv.new_timer()
      timer:start(0, 0, function()
        timer:close()
        local _
        _, _, code = client:acquire "other"
        released = lock:release()
      end)
      uv.run()
      assert.are.equal("unsupported", code)
      assert.is_true(released)
      assert.are.equal("not_held", (select(3, lock:release())))
      client:close()
      helpers.remove_tree(dir)
    end)
  end)
end

if has_cqueues then
  describe("cqueues", function()
    it("serves two controllers, one inside the other", function()
      local dir = helpers.tmpdir()
      local client = assert(dlock.connect("local://" .. dir, { runtime = "cqueues", wait = 10 }))
      local outer, inner, n = cqueues.new(), cqueues.new(), 0
      for _, controller in ipairs { outer, inner } do
        for _ = 1, 10 do
          controller:wrap(function()
            for _ = 1, 5 do
              assert(client:with("k", function()
                local v = n
                cqueues.sleep(0.0005)
                n = v + 1
              end))
            end
          end)
        end
      end
      outer:wrap(function() assert(inner:loop()) end)
      assert(outer:loop())
      assert.are.equal(100, n)
      client:close()
      helpers.remove_tree(dir)
    end)
  end)
end
