-- time limit: 200 s
-- Fork without exec, and the end of a process: a child never renews, releases or
-- shares what its parent holds; an orderly end frees at once and is bounded.
local dlock = require "dlock"
local helpers = require "spec.helpers"

local bound, now = helpers.bound, helpers.now

-- A holder that forks: its child prints "child PID" and sleeps.
local FORKER = [[
local dlock, proc = require "dlock", require "dlkproc"
local client = assert(dlock.connect(ARGS[1], { ttl = 30 }))
local lock = assert(client:acquire("k", { wait = 10 }))
io.stdout:setvbuf "no"
if proc.fork() == 0 then
  print("child " .. proc.pid())
  while true do proc.pause(1000) end
end
while true do proc.pause(1000) end
]]

-- Ends in the way of ARGS[2] while it holds "k".
local ENDER = [[
local dlock = require "dlock"
local client = assert(dlock.connect(ARGS[1], { ttl = 30, timeout = 2 }))
local lock = assert(client:acquire("k", { wait = 10 }))
print("held " .. lock.token_string)
io.stdout:flush()
io.read()
local how = ARGS[2]
if how == "os.exit" then os.exit(0) end
if how == "os.exit(0, true)" then os.exit(0, true) end
if how == "error" then error("on purpose") end
]]

helpers.each_backend(function(name, backend)
describe("on " .. name, function()
  local fixture, client, children

  setup(function() fixture = backend.start() end)
  teardown(function() fixture:stop() end)
  before_each(function()
    client = assert(dlock.connect(fixture.url, { ttl = 1, wait = 5 }))
    children = {}
  end)
  after_each(function()
    for _, child in ipairs(children) do child:close() end
    client:close()
  end)

  local function keep(child)
    children[#children + 1] = child
    return child
  end

  it("a child's copies are lost, renew nothing and release nothing", function()
    local lock = assert(client:acquire "k")
    local child = keep(helpers.fork(function()
      assert(not lock:is_held() and lock:lost_reason() == "forked", "forked")
      local ok, _, code = lock:release()
      assert(not ok and code == "lost", code)
      assert(lock:remaining() == 0)
      lock = nil
      collectgarbage()
      collectgarbage()
      os.exit(0, true)
    end))
    assert.equal("exited", (child:wait(20)))
    assert.equal(0, select(2, child:wait()))
    helpers.never(function() return not lock:is_held() end, 1.5, "a loss in the parent")
    assert.equal("held", select(3, client:acquire("k", { wait = 0 })))
    assert(lock:release())
  end)

  local it_forks = helpers.it_forks(backend)
  it_forks("a child has locks of its own, kept alive by an engine of its own", function()
    local lock = assert(client:acquire "k")
    local child = keep(helpers.fork(function()
      local mine = assert(client:acquire "child")
      local _, _, code = client:acquire("k", { wait = 0 })
      assert(code == "held", code)
      local stop = now() + 2.5
      while now() < stop do
        assert(mine:is_held(), mine:lost_reason())
        helpers.proc.pause(50)
      end
      assert(mine:release())
      assert(client:close())
    end))
    assert.equal(0, select(2, child:wait(30)))
    assert(lock:is_held())
    assert(lock:release())
    assert.equal(0, client:stats().held)
  end)

  it("an orderly end frees the lock at once", function()
    for _, how in ipairs { "os.exit", "os.exit(0, true)", "error", "end" } do
      local child = keep(helpers.spawn {
        helpers.lua, "-e", ("ARGS={%q,%q} "):format(fixture.url, how) .. ENDER,
        stdin = "pipe", env = { LD_PRELOAD = os.getenv "DLOCK_PRELOAD" or false },
      })
      local token = tonumber(child:expect "held (%d+)")
      child:write "\n"
      child:finish(10)
      local took, lock = helpers.timed(client.acquire, client, "k")
      assert(lock, how)
      assert(took < bound(1), how .. " took " .. took)
      assert(lock.token > token)
      assert(lock:release())
    end
  end)

  if name == "local" then
    it("a killed holder's lock is free although its forked child lives on", function()
      local parent = keep(helpers.spawn_lua(FORKER, fixture.url))
      local pid = tonumber(parent:expect "child (%d+)")
      assert.equal("held", select(3, client:acquire("k", { wait = 0 })))
      parent:kill "KILL"
      local took, lock = helpers.timed(client.acquire, client, "k")
      assert(lock and took < bound(1), took)
      assert(lock:release())
      assert(helpers.proc.kill(pid, helpers.SIG.KILL))
    end)
  else
    it("a frozen server cannot hold up the end of a process for long", function()
      local child = keep(helpers.spawn {
        helpers.lua, "-e", ("ARGS={%q,%q} "):format(fixture.url, "os.exit") .. ENDER,
        stdin = "pipe", env = { LD_PRELOAD = os.getenv "DLOCK_PRELOAD" or false },
      })
      child:expect "held (%d+)"
      fixture:freeze()
      local took = helpers.timed(function()
        child:write "\n"
        child:finish(20)
      end)
      fixture:thaw()
      assert(took < bound(1.5), took)
      -- What was sent before the end is carried out.
      local lock = assert(client:acquire("k", { wait = 5 }))
      assert(lock:release())
    end)
  end

  it("without descriptors every call says so, and nothing breaks", function()
    local status, out = helpers.run_lua([[
      local dlock, proc = require "dlock", require "dlkproc"
      local url = ARGS[1]
      local client = assert(dlock.connect(url, { retry = false, timeout = 1 }))
      local open = {}
      while true do
        local fd = proc.open("/dev/null")
        if not fd then break end
        open[#open + 1] = fd
      end
      local codes = {}
      for i = 1, 3 do
        local lock, msg, code = client:acquire("k" .. i, { wait = 0 })
        assert(not lock and code and msg ~= "", tostring(msg))
        codes[#codes + 1] = code
      end
      collectgarbage()
      for _, fd in ipairs(open) do proc.close(fd) end
      local lock = assert(client:acquire("k", { wait = 5 }))
      assert(lock:is_held() and lock:release())
      assert(client:close())
      print(table.concat(codes, " "))
    ]], fixture.url)
    assert.equal(0, status, out)
    assert.matches("^unavailable unavailable unavailable", out)
  end)
end)
end)
