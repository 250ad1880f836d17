-- abort_on_lost outside nginx: a count hook on Lua 5.4, refused on LuaJIT.

local dlock = require "dlock"
local helpers = require "spec.helpers"

local sethook, gethook = debug.sethook, debug.gethook

describe("abort_on_lost", function()
  local dir, client

  before_each(function()
    dir = helpers.tmpdir()
    client = assert(dlock.connect("local://" .. dir, { wait = 0 }))
  end)
  after_each(function()
    sethook()
    client:close()
    client = nil
    helpers.remove_tree(dir)
    if helpers.jit then jit.flush() end -- luacheck: ignore jit
  end)
  helpers.no_leaks()

  local ON = { abort_on_lost = true }

  if helpers.jit then
    it("is unsupported on LuaJIT, and the function does not run", function()
      local ran = false
      local ok, msg, code = client:with("k", ON, function() ran = true end)
      assert.is_nil(ok)
      assert.are.equal("unsupported", code)
      assert.truthy(msg:find("is_held", 1, true))
      assert.is_false(ran)
      assert.are.equal(0, client:stats().acquired)
    end)
    return
  end

  -- Loses the lock from inside, then computes until somebody stops it.
  local function lose_and_spin(spins)
    return function(lock)
      assert(lock:is_held())
      assert(client:break_lock("k"))
      local n = 0
      for _ = 1, spins or math.huge do n = n + 1 end
      return n
    end
  end

  it("stops a loop when the lock is lost", function()
    local took, ok, _, code = helpers.timed(client.with, client, "k", ON, lose_and_spin())
    assert.is_nil(ok)
    assert.are.equal("lost", code)
    assert.is_true(took < helpers.bound(5))
    assert.is_nil((gethook()))
  end)

  it("goes on stopping a function that catches the error", function()
    local caught = 0
    local ok, _, code = client:with("k", ON, function(lock)
      local fn = lose_and_spin()
      for _ = 1, 3 do
        if not pcall(fn, lock) then caught = caught + 1 end
        fn = function() for _ = 1, math.huge do end end
      end
      for _ = 1, math.huge do end
    end)
    assert.is_nil(ok)
    assert.are.equal("lost", code)
    assert.are.equal(3, caught)
  end)

  it("returns what the function returned, and lets its error through", function()
    assert.are.same({ true, "k", 1, 2 }, { client:with("k", ON, function(lock, a, b)
      return lock.key, a, b
    end, 1, 2) })
    local value = {}
    local ok, err = pcall(client.with, client, "k", ON, function() error(value) end)
    assert.is_false(ok)
    assert.are.equal(value, err)
    assert.are.equal(0, client:stats().held)
    assert.is_nil((gethook()))
  end)

  it("keeps calling the caller's own hook, and puts it back", function()
    local lines, counts = 0, 0
    local function own(event)
      if event == "line" then lines = lines + 1 end
      if event == "count" then counts = counts + 1 end
    end
    sethook(own, "l", 0)
    assert(client:with("k", ON, function()
      local n = 0
      for _ = 1, 100 do
        n = n + 1
      end
      return n
    end))
    local hook, mask, count = gethook()
    sethook()
    assert.are.equal(own, hook)
    assert.are.equal("l", mask)
    assert.are.equal(0, count)
    assert.is_true(lines > 100)
    assert.are.equal(0, counts)
    sethook(own, "", 50)
    assert(client:with("k", ON, function() for _ = 1, 10000 do end end))
    hook, mask, count = gethook()
    sethook()
    assert.are.equal(own, hook)
    assert.are.same({ "", 50 }, { mask, count })
    assert.is_true(counts > 100)
  end)

  it("puts the caller's hook back when the function was stopped", function()
    local function own() end
    sethook(own, "r")
    client:with("k", ON, lose_and_spin())
    local hook, mask = gethook()
    sethook()
    assert.are.equal(own, hook)
    assert.are.equal("r", mask)
  end)

  it("hooks the running coroutine alone", function()
    local other = coroutine.create(function() end)
    local inside
    coroutine.wrap(function()
      client:with("k", ON, function()
        inside = gethook()
        assert.is_nil((gethook(other)))
      end)
    end)()
    assert.is_function(inside)
    assert.is_nil((gethook()))
  end)

  it("without it the function comes to its end, and the loss is told then", function()
    local ok, _, code, n = client:with("k", lose_and_spin(100000))
    assert.is_nil(ok)
    assert.are.equal("lost", code)
    assert.are.equal(100000, n)
  end)
end)
