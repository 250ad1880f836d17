--- Waiting that leaves nothing behind when an error cuts it short.
--
-- An error can come out of a wait at any moment: the hook with which `lua5.4`
-- turns Ctrl-C into an error, or a runtime's own. The operation is then canceled
-- there and then, not when it is collected. Lua 5.4 does it with to-be-closed
-- variables, which keep the traceback; LuaJIT, which lacks their syntax, by
-- catching the error and raising the same value again.
-- @module dlock.wait

local core = require "dlock.core"

local huge, min = math.huge, math.min
local now = core.now

-- How often events are delivered during a wait, seconds.
local SLICE = 0.1

local M = {}

--- To be called before an operation is started that somebody will wait for.
-- @tparam table runtime
-- @treturn[1] boolean true
-- @treturn[1] ?userdata bell, to be given to the operation
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `unsupported` where the runtime cannot wait, ...
function M.begin(runtime)
  local bell = runtime.bell
  if type(bell) ~= "function" then return true, bell end
  local msg, code
  bell, msg, code = bell()
  if bell then return true, bell end
  return nil, msg, code
end

local function drive(runtime, op, seconds, between)
  local deadline = seconds == huge and huge or now() + seconds
  local slice = between and SLICE or huge
  local left = seconds
  repeat
    if runtime.wait(op, min(left, slice)) then return op:result() end
    if between then between() end
    left = deadline - now()
  until left <= 0
  if op:wait(0) then return op:result() end
  return false
end

local function settle(op, ok, ...)
  if not ok then op:cancel() end
  op:close()
  if not ok then error((...), 0) end
  return ...
end

--- Wait for an operation and return its result.
-- @function await
-- @tparam table runtime
-- @tparam userdata op closed afterwards
-- @tparam number seconds longest wait
-- @tparam ?function between called now and then during the wait
-- @return what `op:result()` returns, or false when the time ran out: then it is canceled
function M.await(runtime, op, seconds, between)
  return settle(op, pcall(drive, runtime, op, seconds, between))
end

local function finish_call(lock, finish, ok, ...)
  if ok then return finish(lock, ...) end
  getmetatable(lock).__close(lock)
  error((...), 0)
end

--- Call `fn(lock, ...)`, then `finish(lock, results...)`; when `fn` raises, close the lock and let
-- the error go on.
-- @function guarded
-- @tparam table lock
-- @tparam function finish
-- @tparam function fn
-- @param ... arguments for fn after the lock
-- @return what `finish` returns
function M.guarded(lock, finish, fn, ...)
  return finish_call(lock, finish, pcall(fn, lock, ...))
end

local closing = load([[
local drive = ...
local function await(runtime, op, seconds, between)
  local closed <close> = op
  return drive(runtime, op, seconds, between)
end
local function guarded(lock, finish, fn, ...)
  local closed <close> = lock
  return finish(lock, fn(lock, ...))
end
return await, guarded
]], "=dlock.wait")
if closing then M.await, M.guarded = closing(drive) end

return M
