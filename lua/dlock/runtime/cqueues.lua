--- The runtime for cqueues: a wait suspends its coroutine.
--
-- `dlock.connect(url, { runtime = "cqueues" })`. One client may serve the coroutines of
-- any number of controllers of this Lua state. A call from outside every controller
-- blocks, as cqueues' own functions do there.
--
-- Of the coroutines of a controller that wait, one polls dlock's doorbell, and signals
-- the others whose operations have ended; when it is done itself another one takes over.
-- So no coroutine of dlock's own keeps a loop alive, and a wake-up costs the same
-- however many wait.
-- @module dlock.runtime.cqueues

local condition = require "cqueues.condition"
local core = require "dlock.core"
local cqueues = require "cqueues"
local thread = require "dlock.runtime.thread"

local huge, min = math.huge, math.min
local next, pairs = next, pairs
local now = core.now

-- A coroutine that waits for another's signal looks for itself this often, seconds: the one that
-- polls may have been destroyed.
local SLICE = 1

local M = {}

-- waiters: id of an operation -> { wake = condition, loop }. readers: controller -> waiter.
local bell, generation
local waiters = {}
local readers = setmetatable({}, { __mode = "k" })

--- The bell, made on first use and again after a fork.
-- @treturn[1] userdata
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `nomem`
function M.bell()
  if bell and generation == core.generation() then return bell end
  local msg, code
  bell, msg, code = core.bell()
  generation = core.generation()
  waiters, readers = {}, setmetatable({}, { __mode = "k" })
  return bell, msg, code
end

local function dispatch()
  bell:drain()
  for id in function() return bell:next() end do
    local waiter = waiters[id]
    if waiter then waiter.wake:signal() end
  end
end

local pollable = {
  pollfd = function() return bell:fd() end,
  events = function() return "r" end,
  timeout = function() end,
}

-- Nobody of the loop polls the bell now: one that waits there must.
local function pass_on(loop)
  for _, waiter in pairs(waiters) do
    if waiter.loop == loop then
      waiter.wake:signal()
      return
    end
  end
end

local function poll_once(waiter, seconds)
  local loop = waiter.loop
  local reader = readers[loop]
  if reader and reader ~= waiter and waiters[reader.id] == reader then
    cqueues.poll(waiter.wake, min(seconds, SLICE))
    return
  end
  readers[loop] = waiter
  -- Its own signal too: the reader of another controller may drain the bell.
  if seconds == huge then
    cqueues.poll(pollable, waiter.wake)
  else
    cqueues.poll(pollable, waiter.wake, seconds)
  end
  dispatch()
end

local function loop_until_done(op, waiter, seconds)
  local deadline = seconds == huge and huge or now() + seconds
  local left = seconds
  while left > 0 do
    poll_once(waiter, left)
    if op:wait(0) then return true end
    left = deadline - now()
  end
  return false
end

local function leave(waiter, ok, ...)
  waiters[waiter.id] = nil
  if readers[waiter.loop] == waiter then
    readers[waiter.loop] = nil
    if next(waiters) then pass_on(waiter.loop) end
  end
  if not ok then error((...), 0) end
  return ...
end

--- Suspend the coroutine until the operation has ended.
-- @tparam userdata op
-- @tparam number seconds 0 .. `math.huge`
-- @treturn boolean whether it is done
function M.wait(op, seconds)
  if op:wait(0) then return true end
  local loop = cqueues.running()
  if not loop then return thread.wait(op, seconds) end
  local waiter = { id = op:id(), wake = condition.new(), loop = loop }
  waiters[waiter.id] = waiter
  return leave(waiter, pcall(loop_until_done, op, waiter, seconds))
end

--- Suspend the coroutine.
-- @function sleep
-- @tparam number seconds
M.sleep = cqueues.sleep

return M
