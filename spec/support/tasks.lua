-- Many callers in one process: coroutines that wait for dlock's operations at
-- one doorbell. `tasks.runtime` is the option for dlock.connect; calls outside
-- a task work too, and let the tasks go on meanwhile.

local core = require "dlock.core"
local helpers = require "spec.helpers"

local proc, now = helpers.proc, helpers.now
local huge, max, min = math.huge, math.max, math.min

local M = {}

-- One bell for the life of the process, so that it is in every leak check's base line.
local bell = assert(core.bell())
local live, current = {}, nil

local function ready(task)
  return now() >= task.due or task.op and task.op:wait(0)
end

local function resume(task)
  current = task
  local ok, op, due = coroutine.resume(task.thread)
  current = nil
  task.op, task.due = ok and op or nil, ok and due or 0
  if not ok then task.failed = debug.traceback(task.thread, tostring(op)) end
  if coroutine.status(task.thread) == "dead" then task.done = true end
end

-- Waits until something happened or `due` has come, and lets all go on that can.
local function turn(due)
  for _, task in ipairs(live) do due = min(due, task.due) end
  proc.read(bell:fd(), max(0, min(due - now(), 1)) * 1000)
  bell:drain()
  local still, failed = {}, nil
  for _, task in ipairs(live) do
    if not task.done and ready(task) then resume(task) end
    failed = failed or task.failed
    if not task.done then still[#still + 1] = task end
  end
  live = still
  if failed then
    live = {}
    error(failed, 0)
  end
end

local function wait(op, seconds)
  local due = seconds == huge and huge or now() + seconds
  while not op:wait(0) do
    if now() >= due then return false end
    if current then coroutine.yield(op, due) else turn(min(due, now() + 0.05)) end
  end
  return true
end

function M.sleep(seconds)
  local due = now() + seconds
  repeat
    if current then coroutine.yield(nil, due) else turn(due) end
  until now() >= due
end

M.runtime = { bell = bell, wait = wait, sleep = M.sleep }

--- Starts fn(...) as a task; an error in it comes out of whoever drives.
-- Returns { done = boolean }.
function M.start(fn, ...)
  local args = { n = select("#", ...), ... }
  local task = { due = 0 }
  task.thread = coroutine.create(function()
    fn((table.unpack or unpack)(args, 1, args.n)) -- luacheck: ignore
  end)
  live[#live + 1] = task
  return task
end

--- Drives until fn() is true; as helpers.eventually, also inside a task.
function M.eventually(fn, bound, what)
  local stop = now() + helpers.bound(bound or 5)
  while true do
    local got = fn()
    if got then return got end
    if now() > stop then
      if type(what) == "function" then what = what() end
      error(("not so within %g s: %s"):format(helpers.bound(bound or 5), tostring(what)), 2)
    end
    M.sleep(0.005)
  end
end

--- Drives until all tasks are done.
function M.run(bound)
  local stop = now() + helpers.bound(bound or 30)
  while #live > 0 do
    if now() > stop then
      local n = #live
      live = {}
      error(("%d tasks not done within %g s"):format(n, helpers.bound(bound or 30)), 2)
    end
    turn(min(stop, now() + 0.2))
  end
end

--- Forgets all tasks: a test failed in the middle.
function M.forget() live = {} end

--- Forgets a task where it waits, as a runtime that kills a coroutine does.
function M.drop(task)
  for i, t in ipairs(live) do
    if t == task then table.remove(live, i) break end
  end
  task.op, task.thread = nil, nil
end

return M
