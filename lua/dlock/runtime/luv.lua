--- The runtime for luv (libuv): a wait suspends its coroutine.
--
-- `dlock.connect(url, { runtime = "luv" })`. Calls that wait belong into coroutines,
-- `coroutine.wrap(function() ... end)()`; the loop resumes them. From the main
-- coroutine they return `nil, message, "unsupported"` while the loop runs (they would stop
-- it), `release` and `close` excepted, which go on in the background; while it does not run they
-- block. dlock keeps the loop alive only while somebody waits.
-- @module dlock.runtime.luv

local core = require "dlock.core"
local thread = require "dlock.runtime.thread"
local uv = require "luv"

local ceil, huge, max, min = math.ceil, math.huge, math.max, math.min
local next = next
local now = core.now

-- Longest time of one timer, seconds.
local SLICE = 3600

local M = {}

-- waiters: id of an operation -> coroutine. poll: watches the bell, active while there are waiters.
local bell, poll, generation
local waiters = {}

local function in_coroutine()
  local co, main = coroutine.running()
  return co ~= nil and not main
end

-- An error of the coroutine is its caller's no more: it comes out of the loop.
local function resume(co)
  local ok, err = coroutine.resume(co)
  if not ok then error(debug.traceback(co, tostring(err)), 0) end
end

local function dispatch()
  bell:drain()
  local ready = {}
  for id in function() return bell:next() end do
    ready[#ready + 1] = waiters[id]
    waiters[id] = nil
  end
  if not next(waiters) then poll:stop() end
  for _, co in ipairs(ready) do resume(co) end
end

local function open()
  local msg, code
  bell, msg, code = core.bell()
  generation = core.generation()
  waiters = {}
  if not bell then return nil, msg, code end
  poll = uv.new_poll(bell:fd())
  return bell
end

--- The bell, made on first use and again after a fork.
-- @treturn[1] userdata
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `unsupported`, `nomem`
function M.bell()
  if not in_coroutine() and uv.loop_mode() then
    return nil, "the main coroutine cannot wait while the loop runs; it can in coroutine.wrap(...)",
      "unsupported"
  end
  if bell and generation == core.generation() then return bell end
  return open()
end

-- Yields until the operation is done or so many seconds have passed. Whoever else
-- resumes the coroutine only makes it look.
local function suspend(op, seconds)
  local id, co = op:id(), coroutine.running()
  local timer
  if not next(waiters) then poll:start("r", dispatch) end
  waiters[id] = co
  if seconds ~= huge then
    timer = uv.new_timer()
    timer:start(max(1, ceil(min(seconds, SLICE) * 1000)), 0, function()
      if waiters[id] == co then
        waiters[id] = nil
        if not next(waiters) then poll:stop() end
        resume(co)
      end
    end)
  end
  coroutine.yield()
  if timer and not timer:is_closing() then timer:close() end
  if waiters[id] == co then
    waiters[id] = nil
    if not next(waiters) then poll:stop() end
  end
end

--- Suspend the coroutine until the operation has ended.
-- @tparam userdata op
-- @tparam number seconds 0 .. `math.huge`
-- @treturn boolean whether it is done
function M.wait(op, seconds)
  if op:wait(0) then return true end
  if not in_coroutine() then return thread.wait(op, seconds) end
  local deadline = seconds == huge and huge or now() + seconds
  local left = seconds
  while left > 0 do
    suspend(op, left)
    if op:wait(0) then return true end
    left = deadline - now()
  end
  return false
end

--- Suspend the coroutine.
-- @tparam number seconds
function M.sleep(seconds)
  if not in_coroutine() then return thread.sleep(seconds) end
  local co = coroutine.running()
  local timer = uv.new_timer()
  local over = false
  timer:start(max(1, ceil(seconds * 1000)), 0, function()
    over = true
    timer:close()
    resume(co)
  end)
  repeat coroutine.yield() until over
end

return M
