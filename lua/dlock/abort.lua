--- `abort_on_lost`: stopping a guarded function when its lock is lost.
--
-- `client:with(key, { abort_on_lost = true }, fn)` returns `nil, message, "lost"` soon
-- after the loss, instead of when the function has come to its end. This is a
-- help, not a safety: what the function has begun stays begun, and one long C call
-- (a big `string.find`, a blocking read) is not interrupted. The fencing token is the safety.
--
-- *In nginx* the function runs in a light thread of the request, which is killed
-- when the lock is lost, at the next moment at which it waits for something. A
-- function that only computes is not stopped.
--
-- *In plain Lua 5.4* (with any runtime) a count hook on the running coroutine looks
-- at the lock every 10,000 instructions and raises an error, again and again if the function
-- catches it, until the function is left. A count hook, whatever its count, slows
-- tight loops down to about 2.7 times their time, so it is there only while the function
-- runs. A hook of your own goes on being called, and is put back; one that was set from C
-- cannot be, so that is `unsupported`. Coroutines that the function makes are not stopped. An
-- error of the function loses its traceback.
--
-- *In LuaJIT outside nginx* it is `unsupported`, since compiled code calls no hooks: ask
-- `lock:is_held()` in the loop.
-- @module dlock.abort

local M = {}

local COUNT = 10000
local gethook, sethook = debug.gethook, debug.sethook

local function hook_of(lock, lost, fn, mask, count)
  local grant = lock._grant
  local counted = count and count > 0
  return function(event, line)
    if event == "count" and not grant:is_held() and grant:lost_reason() then error(lost, 0) end
    if fn and (counted or event ~= "count") then return fn(event, line) end
  end, mask or "", counted and count or COUNT
end

local function settle(lost, fn, mask, count, ok, ...)
  if fn then sethook(fn, mask, count) else sethook() end
  if ok then return ... end
  if (...) ~= lost then error((...), 0) end
end

-- Returns nothing when the lock was lost: what that means is told by its release.
local function run_hooked(lock, fn, ...)
  local lost = setmetatable({}, { __tostring = function() return "the lock was lost" end })
  local own, mask, count = gethook()
  sethook(hook_of(lock, lost, own, mask, count))
  return settle(lost, own, mask, count, pcall(fn, lock, ...))
end

--- What runs a function until its lock is lost.
-- @tparam table runtime
-- @treturn[1] function `run(lock, fn, ...)`
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `unsupported`
function M.runner(runtime)
  if runtime.abortable then
    local ok, msg, code = runtime.abortable()
    if not ok then return nil, msg, code end
    return runtime.run_until_lost
  end
  if rawget(_G, "jit") then
    return nil, "abort_on_lost needs Lua 5.4 or nginx: LuaJIT's compiled code calls no hooks; "
      .. "ask lock:is_held() instead", "unsupported"
  end
  local own = gethook()
  if own and type(own) ~= "function" then
    return nil, "abort_on_lost needs the hook of this coroutine, and one set from C is there",
      "unsupported"
  end
  return run_hooked
end

return M
