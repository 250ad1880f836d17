-- time limit: 600 s
-- Exclusion, seen from outside: processes increment a number in a file under the
-- lock, and end their holds in every orderly way, or by kill -9.
local helpers = require "spec.helpers"

local PROCESSES = 8

-- ARGS: url, directory, ending, increments. The file holds "NUMBER TOKEN", is
-- replaced by rename, and is read and written in separate steps with something
-- in between, so that two holders at a time would lose updates. Every token must
-- be larger than the one before.
local WORKER = [[
local dlock = require "dlock"
local url, dir, ending, n = ARGS[1], ARGS[2], ARGS[3], tonumber(ARGS[4])
local client = assert(dlock.connect(url, { ttl = tonumber(ARGS[5]), wait = 120 }))
local path = dir .. "/number"
local temp = path .. "." .. client:acquire("name", { wait = 120 }).token_string

local function read()
  local f = assert(io.open(path))
  local number, token = f:read("*n", "*n")
  f:close()
  return number, token
end

local function increment(lock)
  local number, token = read()
  assert(lock.token > token, "token " .. lock.token_string .. " after " .. token)
  if ending == "killed" then print("start") io.stdout:flush() end
  for _ = 1, 2000 do math.sqrt(2) end
  local f = assert(io.open(temp, "w"))
  f:write(number + 1, " ", lock.token_string, "\n")
  f:close()
  assert(lock:is_held(), "lost while working")
  assert(os.rename(temp, path))
  if ending == "killed" then print("done") io.stdout:flush() end
end

local ends = {}
function ends.released()
  local lock = assert(client:acquire "number")
  increment(lock)
  assert(lock:release())
end
ends.killed = ends.released
function ends.error()
  local ok, err = pcall(client.with, client, "number", function(lock)
    increment(lock)
    error("on purpose", 0)
  end)
  assert(not ok and err == "on purpose", err)
end
function ends.collected()
  local lock = assert(client:acquire "number")
  increment(lock)
  lock = nil
  collectgarbage()
  collectgarbage()
end
ends.exit = ends.released

collectgarbage()
collectgarbage()
for i = 1, n do
  if ending == "exit" and i == n then
    increment(assert(client:acquire "number"))
    os.exit(0)
  end
  ends[ending]()
end
client:close()
]]

helpers.each_backend(function(name, backend)
describe("on " .. name, function()
  local fixture, dir, children

  setup(function() fixture = backend.start() end)
  teardown(function() fixture:stop() end)
  before_each(function()
    dir = helpers.tmpdir()
    helpers.write_file(dir .. "/number", "0 0\n")
    children = {}
  end)
  after_each(function()
    for _, child in ipairs(children) do child:close() end
    helpers.remove_tree(dir)
  end)

  local function spawn(ending, n, ttl)
    local child = helpers.spawn_lua(WORKER, fixture.url, dir, ending, tostring(n),
      tostring(ttl or 10))
    children[#children + 1] = child
    return child
  end

  local function number() return tonumber(helpers.read_file(dir .. "/number"):match "%d+") end

  for _, ending in ipairs { "released", "error", "collected" } do
    it("loses no update when holds end " .. ending, function()
      local each = helpers.scaled(2000 / PROCESSES, 10)
      for _ = 1, PROCESSES do spawn(ending, each) end
      for _, child in ipairs(children) do
        local status, out = child:finish(300)
        assert.equal(0, status, out)
      end
      assert.equal(PROCESSES * each, number())
    end)
  end

  it("loses no update when holders end by os.exit", function()
    local each, rounds = 10, helpers.scaled(2000 / PROCESSES / 10, 2)
    for _ = 1, rounds do
      local some = {}
      for i = 1, PROCESSES do some[i] = spawn("exit", each) end
      for _, child in ipairs(some) do
        local status, out = child:finish(300)
        assert.equal(0, status, out)
      end
    end
    assert.equal(PROCESSES * each * rounds, number())
  end)

  -- The file is replaced by rename: an increment that was cut off has happened
  -- or not, so that "done" <= number <= "start".
  it("keeps started, written and acknowledged in order over kills -9", function()
    local kills, started, done = helpers.scaled(40, 5), 0, 0
    local workers = {}
    local function count(child)
      local status, out = child:finish(30)
      local _, s = out:gsub("start\n", "")
      local _, d = out:gsub("done\n", "")
      started, done = started + s, done + d
      assert(status == 0 or status == 137, out)
    end
    for i = 1, 3 do workers[i] = spawn("killed", 1000000, 1) end
    math.randomseed(7)
    for k = 1, kills do
      local i = k % 3 + 1
      local victim = workers[i]
      helpers.eventually(function()
        local got = helpers.proc.read(victim.out, 0)
        victim.text = victim.text .. (got or "")
        return victim.text:find "start\n[^\n]*$"
      end, 20, "a worker that holds")
      helpers.proc.pause(math.random(0, 2))
      victim:kill "KILL"
      count(victim)
      workers[i] = spawn("killed", 1000000, 1)
    end
    for _, child in ipairs(workers) do
      child:kill "KILL"
      count(child)
    end
    assert(done > 0 and done <= number() and number() <= started,
      ("%d done, %d written, %d started"):format(done, number(), started))
  end)
end)
end)
