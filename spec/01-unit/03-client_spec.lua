-- The Lua side of clients and locks on a made-up core with a clock that only
-- the tests move: retries, waits that end early, events, with().
local clock, script, log, events

local unpack = rawget(_G, "unpack") or table.unpack

local Op = {}
Op.__index = Op
function Op:wait(seconds)
  log[#log + 1] = "wait"
  if self.takes <= seconds then
    clock = clock + self.takes
    self.takes = 0
    return true
  end
  clock = clock + seconds
  self.takes = self.takes - seconds
  return false
end
function Op.cancel() log[#log + 1] = "cancel" end
function Op:close() self.closed = true end
Op.__close = function(op, err)
  if err ~= nil then op:cancel() end
  op:close()
end

function Op:result() return unpack(self.gives, 1, 3) end

local function op(takes, ...) return setmetatable({ takes = takes, gives = { ... } }, Op) end

local Grant = {}
Grant.__index = Grant
function Grant.token() return 7 end
function Grant.token_string() return "7" end
function Grant.owner() return "me" end
function Grant:ttl() return self.seconds or 30 end
function Grant:state() return self.held and "held" or "released" end
function Grant:is_held() return self.held end
function Grant:remaining() return self.held and self.left or 0 end
function Grant:lost_reason() return self.lost end
function Grant:release()
  log[#log + 1] = "release"
  if self.lost then return op(0, nil, "it is gone", "lost") end
  if not self.held then return op(0, nil, "it is released", "not_held") end
  self.held = false
  return op(0, true)
end
function Grant:extend(ttl)
  log[#log + 1] = "extend " .. ttl
  if not self.held then return op(0, nil, "it is gone", "lost") end
  if self.refuses then return op(0, nil, "no answer", "indeterminate") end
  if ttl > 0 then self.seconds = ttl end
  self.left = self.after or self.seconds or 30
  return op(0, true)
end
function Grant:until_lost() return op(self.lost_in or math.huge, nil, "gone", "lost") end

local function grant(fields)
  local g = setmetatable({ held = true, left = 30 }, Grant)
  for k, v in pairs(fields or {}) do g[k] = v end
  return g
end

local Handle = {}
Handle.__index = Handle
function Handle:acquire(key, o, seconds)
  log[#log + 1] = ("acquire %s %g"):format(key, seconds)
  self.last = o
  local step = table.remove(script, 1) or { 0, nil, "nobody home", "unavailable" }
  return op(step[1], step[2], step[3], step[4])
end
function Handle.next_event() return table.remove(events, 1) end
function Handle.ask(_, kind) return op(0, { found = true, list = {}, text = kind }) end
function Handle.stats() return {} end
function Handle.close_op() return op(0, true) end

local fake_core = {
  now = function() return clock end,
  random = math.random,
  sleep = function(s) clock = clock + s end,
}

describe("dlock.client, on a made-up core,", function()
  local client_module, options, retry, runtime
  local saved = {}
  local modules = { "core", "client", "lock", "wait", "retry", "options", "runtime.thread" }

  setup(function()
    for _, m in ipairs(modules) do
      saved[m], package.loaded["dlock." .. m] = package.loaded["dlock." .. m], nil
    end
    package.loaded["dlock.core"] = fake_core
    client_module = require "dlock.client"
    options = require "dlock.options"
    retry = require "dlock.retry"
    runtime = require "dlock.runtime.thread"
  end)

  teardown(function()
    for _, m in ipairs(modules) do package.loaded["dlock." .. m] = saved[m] end
  end)

  before_each(function() clock, script, log, events = 1000, {}, {}, {} end)

  local function connect(opts)
    return client_module.new(setmetatable({}, Handle), options.resolve("connect", opts), runtime)
  end

  local function acquires()
    local list = {}
    for _, line in ipairs(log) do list[#list + 1] = line:match "^acquire k (.*)" end
    return list
  end

  describe("retries", function()
    it("go on until the lock is there", function()
      script = {
        { 0, nil, "down", "unavailable" }, { 0, nil, "lost", "indeterminate" }, { 0, grant() },
      }
      local lock = assert(connect({ retry = retry.constant { delay = 1 } }):acquire("k"))
      assert.is_true(lock:is_held())
      assert.are.same({ "10", "9", "8" }, acquires())
    end)

    it("never begin after the wait is over, and give the last error", function()
      script = { { 0, nil, "one", "unavailable" }, { 0, nil, "two", "indeterminate" } }
      local _, msg, code = connect({ retry = retry.constant { delay = 4 } }):acquire("k",
        { wait = 6 })
      assert.are.equal("two", msg)
      assert.are.equal("indeterminate", code)
      assert.are.same({ "6", "2" }, acquires())
      assert.are.equal(1004, clock)
    end)

    it("do not happen with wait = 0, with retry = false, or for other codes", function()
      local c = connect()
      assert.are.equal("unavailable", select(3, c:acquire("k", { wait = 0 })))
      assert.are.equal("unavailable", select(3, c:acquire("k", { retry = false })))
      c:acquire("k", { wait = 0, retry = function() error("asked") end })
      for _, code in ipairs { "held", "timeout", "auth", "foreign", "protocol", "nomem" } do
        script = { { 0, nil, "no", code } }
        assert.are.equal(code, select(3, c:acquire("k")))
      end
      assert.are.equal(9, #acquires())
    end)

    it("are paced by a function that sees attempt, code and elapsed time", function()
      local seen = {}
      script = { { 2, nil, "a", "unavailable" }, { 0, nil, "b", "indeterminate" } }
      local _, msg = connect():acquire("k", {
        retry = function(attempt, code, elapsed)
          seen[#seen + 1] = { attempt, code, math.floor(elapsed + 0.5) }
          return attempt < 3 and 1 or nil
        end,
      })
      assert.are.equal("nobody home", msg)
      assert.are.same({ { 1, "unavailable", 2 }, { 2, "indeterminate", 3 },
        { 3, "unavailable", 4 } }, seen)
    end)

    it("raise on the caller's line when the function returns nonsense", function()
      for _, bad in ipairs { "soon", -1, 0 / 0, true } do
        local line
        local ok, err = pcall(function()
          line = debug.getinfo(1, "l").currentline + 1
          connect():acquire("k", { retry = function() return bad end })
        end)
        assert.is_false(ok)
        assert.truthy(err:find("03%-client_spec.lua:" .. line .. ": opts.retry must return"), err)
      end
    end)
  end)

  describe("a wait", function()
    it("is cut into slices of a tenth of a second", function()
      script = { { 0.35, grant() } }
      assert(connect():acquire("k"))
      assert.are.equal("acquire k 10,wait,wait,wait,wait", table.concat(log, ","))
    end)

    it("that an error cuts short cancels its operation and lets the error go on", function()
      local problem = {}
      local broken = { sleep = function() end, wait = function() error(problem) end }
      local c = client_module.new(setmetatable({}, Handle), options.resolve("connect"), broken)
      script = { { 5, grant() } }
      local ok, err = pcall(c.acquire, c, "k")
      assert.is_false(ok)
      assert.are.equal(problem, err)
      assert.are.equal("acquire k 10,cancel", table.concat(log, ","))
    end)
  end)

  describe("on_event", function()
    it("gets every event, in order, inside any call", function()
      local got = {}
      local c = connect { on_event = function(ev) got[#got + 1] = ev.type end }
      local calls = {
        function() return c:poll() end,
        function() return c:stats() end,
        function() return c:ping() end,
        function() return c:inspect("k") end,
        function()
          script = { { 0, grant() } }
          return c:acquire("k")
        end,
      }
      for i, call in ipairs(calls) do
        events = { { type = "a" .. i }, { type = "b" .. i } }
        assert.truthy(call())
        assert.are.same({ "a" .. i, "b" .. i }, got)
        got = {}
      end
    end)

    it("gets events during a wait", function()
      local at
      local c = connect { on_event = function() at = clock end }
      events = { { type = "notice" } }
      script = { { 5, grant() } }
      assert(c:acquire("k"))
      assert.is_true(at < 1001)
    end)

    it("is told once of its own error, and nobody else is", function()
      local got = {}
      local c = connect {
        on_event = function(ev)
          got[#got + 1] = ev.type .. ":" .. tostring(ev.message)
          error("oops", 0)
        end,
      }
      events = { { type = "acquired", message = "m" } }
      assert.are.equal(1, c:poll())
      assert.are.same({ "acquired:m", "notice:on_event raised an error: oops" }, got)
    end)

    it("survives error values that cannot be shown", function()
      local hostile = setmetatable({}, { __tostring = function() error("no") end })
      local text
      local c = connect {
        on_event = function(ev)
          if ev.type == "notice" then text = ev.message else error(hostile) end
        end,
      }
      events = { { type = "lost" } }
      c:poll()
      assert.are.equal("on_event raised an error: table", text)
    end)

    it("may use the client, which does not call it again from within", function()
      local depth, deepest = 0, 0
      local c
      c = connect {
        on_event = function()
          depth = depth + 1
          deepest = math.max(deepest, depth)
          c:poll()
          c:ping()
          depth = depth - 1
        end,
      }
      events = { { type = "a" }, { type = "b" } }
      assert.are.equal(2, c:poll())
      assert.are.equal(1, deepest)
    end)

    it("that makes an event out of each is not called for ever", function()
      local n = 0
      local c = connect {
        on_event = function()
          n = n + 1
          events[#events + 1] = { type = "again" }
        end,
      }
      events = { { type = "first" } }
      assert.are.equal(1024, c:poll())
      assert.are.equal(1024, n)
    end)

    it("may yield; meanwhile nobody else calls it", function()
      local n = 0
      local c = connect {
        on_event = function()
          n = n + 1
          if n == 1 then coroutine.yield() end
        end,
      }
      events = { { type = "a" }, { type = "b" } }
      local co = coroutine.create(function() c:poll() end)
      assert(coroutine.resume(co))
      assert.are.equal(0, c:poll())
      assert(coroutine.resume(co))
      assert.are.equal(2, n)
      events = { { type = "c" } }
      assert.are.equal(1, c:poll())
    end)

    -- Only Lua 5.4 can end a coroutine from outside.
    it("is called again after the coroutine that was inside it is dead", function()
      if not coroutine.close then return end
      local c = connect { on_event = function(ev) if ev.type == "a" then coroutine.yield() end end }
      events = { { type = "a" }, { type = "b" } }
      local co = coroutine.create(function() c:poll() end)
      assert(coroutine.resume(co))
      assert.are.equal(0, c:poll())
      assert(coroutine.close(co))
      assert.are.equal(1, c:poll())
    end)
  end)

  describe("with()", function()
    it("returns true and all results, nils too, and passes arguments", function()
      script = { { 0, grant() } }
      local function pack(...) return { n = select("#", ...), ... } end
      local r = pack(connect():with("k", function(lock, ...)
        assert.are.equal("k", lock.key)
        return select("#", ...), nil, ..., nil
      end, 1, nil))
      assert.are.equal(5, r.n)
      assert.is_true(r[1])
      assert.are.equal(2, r[2])
      assert.are.equal(1, r[4])
      assert.are.equal("release", log[#log - 1])
    end)

    it("passes on the very error value, after the release", function()
      script = { { 0, grant() } }
      local problem = {}
      local ok, err = pcall(function()
        connect():with("k", {}, function() error(problem) end)
      end)
      assert.is_false(ok)
      assert.are.equal(problem, err)
      assert.truthy(table.concat(log, ","):find("release"))
    end)

    it("keeps the traceback of the error in Lua 5.4", function()
      script = { { 0, grant() } }
      local line
      local _, trace = xpcall(function()
        connect():with("k", function()
          line = debug.getinfo(1, "l").currentline + 1
          error("here")
        end)
      end, debug.traceback)
      local kept = trace:match("stack traceback.*"):find("_spec.lua:" .. line .. ":")
      assert.are.equal(_VERSION ~= "Lua 5.1", kept ~= nil)
    end)

    it("says lost, then the results, when the lock was lost", function()
      script = { { 0, grant() } }
      local r = { connect():with("k", function(lock)
        lock._grant.held, lock._grant.lost = false, "taken"
        return 42
      end) }
      assert.is_nil(r[1])
      assert.are.equal("it is gone", r[2])
      assert.are.equal("lost", r[3])
      assert.are.equal(42, r[4])
    end)

    it("says lost also when the function had released the lost lock itself", function()
      local g = grant()
      script = { { 0, g } }
      g.release = function() return op(0, nil, "released", "not_held") end
      g.lost = "expired"
      assert.are.equal("lost", select(3, connect():with("k", function() end)))
    end)

    it("is content when the function has released the lock", function()
      script = { { 0, grant() } }
      assert.are.same({ true, "x" }, { connect():with("k", function(lock)
        assert(lock:release())
        return "x"
      end) })
    end)

    it("does not call the function when the lock is not to be had", function()
      script = { { 0, nil, "somebody has it", "held" } }
      assert.are.same({ nil, "somebody has it", "held" }, { connect():with("k", { wait = 0 },
        function() error("called") end) })
    end)

    it("raises misuse on the caller's line, with options and without", function()
      local c = connect()
      local function f() end
      local line
      for _, call in ipairs {
        function()
          line = debug.getinfo(1, "l").currentline + 1
          c:with("k", { ttl = 0 }, f)
        end,
        function()
          line = debug.getinfo(1, "l").currentline + 1
          c:with("", f)
        end,
        function()
          line = debug.getinfo(1, "l").currentline + 1
          c:with("k", {})
        end,
        function()
          line = debug.getinfo(1, "l").currentline + 1
          c.with({}, "k", f)
        end,
      } do
        local ok, err = pcall(call)
        assert.is_false(ok)
        assert.truthy(err:find("03%-client_spec.lua:" .. line .. ":"), err)
      end
    end)
  end)

  describe("ensure()", function()
    local function locked(fields)
      script = { { 0, grant(fields) } }
      return assert(connect():acquire("k"))
    end

    it("asks nobody while enough is left", function()
      assert.is_true(locked():ensure(27))
      assert.is_nil(table.concat(log, ","):find("extend"))
    end)

    it("renews once, by the present ttl, when less is left", function()
      local lock = locked { left = 3 }
      assert.is_true(lock:ensure(20))
      assert.are.equal("extend 0", log[#log - 1])
    end)

    it("says why it cannot", function()
      assert.are.equal("indeterminate", select(3, locked({ left = 3, refuses = true }):ensure(20)))
      assert.are.equal("lost", select(3, locked({ held = false }):ensure(0)))
      local _, msg, code = locked({ left = 3, after = 5 }):ensure(20)
      assert.are.equal("unavailable", code)
      assert.are.equal("only 5 s of validity are left after a renewal", msg)
    end)

    it("raises over 0.9 x the ttl, and for what is no number", function()
      local lock = locked()
      for _, bad in ipairs { 27.1, -1, 0 / 0, "5", false } do
        local _, err = pcall(lock.ensure, lock, bad)
        assert.truthy(err:find("seconds must be a number in 0 .. 27 (0.9 x the ttl), got ", 1,
          true), err)
      end
    end)
  end)

  it("extend() makes its ttl the lock's", function()
    script = { { 0, grant() } }
    local lock = assert(connect():acquire("k"))
    assert.is_true(lock:extend(60))
    assert.are.equal(60, lock.ttl)
    assert.is_true(lock:extend())
    assert.are.equal(60, lock.ttl)
  end)

  it("wait_lost() tells a lost lock from one that is still held", function()
    script = { { 0, grant { lost_in = 3, lost = "taken" } }, { 0, grant() } }
    local c = connect()
    assert.are.equal("taken", assert(c:acquire("k")):wait_lost(10))
    assert.near(1003, clock, 0.001)
    local _, _, code = assert(c:acquire("k")):wait_lost(2)
    assert.are.equal("timeout", code)
    assert.near(1005, clock, 0.001)
  end)
end)
