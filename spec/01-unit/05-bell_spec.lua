-- Doorbells: one ring is enough for any number of operations, none is lost while
-- nobody listens, and the private socket is private.

local core = require "dlock.core"
local dlock = require "dlock"
local helpers = require "spec.helpers"

local proc = helpers.proc

describe("a doorbell", function()
  local dir, handle, ops, locks

  before_each(function()
    dir, ops, locks = helpers.tmpdir(), {}, {}
    handle = assert(core.connect { url = "local://" .. dir, ttl = 5, timeout = 2,
      connect_timeout = 2 })
  end)
  after_each(function()
    for _, op in ipairs(ops) do op:close() end
    ops, locks, handle = {}, {}, nil
    collectgarbage()
    collectgarbage()
    helpers.remove_tree(dir)
    if helpers.jit then jit.flush() end -- luacheck: ignore jit
  end)
  helpers.no_leaks()

  local function acquire(key, bell, wait)
    local op = handle:acquire(key, { ttl = 5, timeout = 2, renew = true, max_hold = math.huge },
      wait or 0, bell)
    ops[#ops + 1] = op
    return op
  end

  local function all_done()
    for _, op in ipairs(ops) do
      if not op:wait(0) then return false end
    end
    return true
  end

  local function ids(bell)
    local list = {}
    for id in function() return bell:next() end do list[#list + 1] = id end
    table.sort(list)
    return list
  end

  local function listen(bell)
    local path = assert(bell:listen())
    local fd = assert(proc.connect(path))
    assert.is_true(bell:accept())
    assert.is_nil(proc.list(path:match "^(.*)/"), "path and directory are gone")
    return fd
  end

  it("tells which operations have ended, each once", function()
    local bell = assert(core.bell())
    local want = {}
    for i = 1, 5 do want[i] = acquire("k" .. i, bell):id() end
    helpers.eventually(all_done)
    assert.are.equal(8, #proc.read(bell:fd(), 1000))
    bell:drain()
    assert.are.same(want, ids(bell))
    assert.are.same({}, ids(bell))
  end)

  it("forgets operations that were closed", function()
    local bell = assert(core.bell())
    for i = 1, 5 do acquire("k" .. i, bell) end
    helpers.eventually(all_done)
    local want = { ops[2]:id(), ops[4]:id() }
    for _, i in ipairs { 5, 1, 3 } do ops[i]:close() end
    ops = { ops[2], ops[4] }
    assert.are.same(want, ids(bell))
  end)

  it("sends one byte, however many operations ended, until it is drained", function()
    local bell = assert(core.bell "socket")
    local fd = listen(bell)
    for i = 1, 5 do acquire("k" .. i, bell) end
    helpers.eventually(all_done)
    assert.are.equal("!", proc.read(fd, 1000))
    assert.are.same({ nil, "timeout" }, { proc.read(fd, 20) })
    bell:drain()
    acquire("another", bell)
    assert.are.equal("!", proc.read(fd, 1000))
    proc.close(fd)
  end)

  it("stays rung until somebody listens", function()
    local bell = assert(core.bell "socket")
    acquire("k", bell)
    helpers.eventually(all_done)
    local fd = listen(bell)
    assert.are.equal("!", proc.read(fd, 1000))
    bell:hang_up()
    assert.are.equal("", proc.read(fd, 1000))
    proc.close(fd)
    fd = listen(bell) -- it was not drained
    assert.are.equal("!", proc.read(fd, 1000))
    proc.close(fd)
  end)

  it("turns another process away", function()
    local bell = assert(core.bell "socket")
    local path = assert(bell:listen())
    local child = helpers.fork(function()
      local fd = assert(proc.connect(path))
      return proc.read(fd, 5000) == "!" and 1 or 0
    end)
    helpers.eventually(function()
      local text = helpers.read_file "/proc/net/unix"
      local _, n = text:gsub(path:gsub("%p", "%%%0"), "")
      return n >= 2
    end, 5, "the child has connected")
    assert.is_false(bell:accept())
    bell:nudge()
    assert.are.equal(0, (select(2, child:wait(10))))
    assert.is_nil(proc.list(path:match "^(.*)/"))
    child:close()
  end)

  it("removes its path when it is collected before anybody came", function()
    local path = assert(assert(core.bell "socket"):listen())
    if helpers.jit then jit.flush() end -- luacheck: ignore jit
    collectgarbage()
    collectgarbage()
    assert.is_nil(proc.list(path:match "^(.*)/"))
  end)

  it("is another one in a forked child, without the parent's operations", function()
    local bell = assert(core.bell())
    acquire("k", bell)
    helpers.eventually(all_done)
    assert.is_string(proc.read(bell:fd(), 1000))
    bell:drain()
    local generation = core.generation()
    local child = helpers.fork(function()
      local silent = bell:next() == nil and not proc.read(bell:fd(), 0)
      bell:nudge()
      local heard = proc.read(bell:fd(), 1000)
      return core.generation() ~= generation and silent and heard and 0 or 1
    end)
    assert.are.equal(0, (select(2, child:wait(10))))
    child:close()
    assert.is_nil(proc.read(bell:fd(), 0))
  end)

  it("is not needed for an operation that nobody waits for", function()
    local client = assert(dlock.connect("local://" .. dir, { runtime = {
      wait = function() error "nothing waits here" end,
      sleep = function() end,
      bell = function() return nil, "not here", "unsupported" end,
    } }))
    local _, msg, code = client:acquire "k"
    assert.are.same({ "not here", "unsupported" }, { msg, code })
    local op = acquire("k")
    helpers.eventually(function() return op:wait(0.1) end)
    locks[1] = assert(op:result())
    local release = locks[1]:release(2, false)
    release:close()
    helpers.eventually(function() return locks[1]:state() == "released" end)
    assert.is_true(client:close())
  end)
end)
