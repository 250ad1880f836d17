--- The default runtime: the calling thread waits itself.
--
-- A runtime says how a Lua caller waits. It is a table, given as `opts.runtime`
-- to `dlock.connect`, with
--
-- * `wait(op, seconds)`: wait until `op:wait(0)` is true or the seconds (which may be
--   `math.huge`) have passed; return whether it is done. It may return early; it is called again.
--   It may raise, or never come back (a killed coroutine): the operation is then canceled.
-- * `sleep(seconds)`: wait that long.
-- * `bell`: optional, from `require("dlock.core").bell()`. With a bell the operations
--   run on dlock's own thread, and `bell:fd()` gets readable when one of them has
--   ended (then `bell:drain()` and look at all that wait): for event loops, whose
--   `wait` yields. Without one an operation is run by `op:wait(seconds)`, by
--   the thread that calls it.
--
-- @module dlock.runtime.thread

local core = require "dlock.core"

local huge, min = math.huge, math.min
local now = core.now

-- Longest time spent in C at once: a signal that came in just before the wait
-- began, and so could not cut it short, is handled after that long.
local SLICE = 0.1

local M = {}

--- Wait for an operation, in slices, so that the interpreter can handle signals.
-- @tparam userdata op
-- @tparam number seconds 0 .. `math.huge`
-- @treturn boolean whether it is done
function M.wait(op, seconds)
  local deadline = seconds == huge and huge or now() + seconds
  local left = seconds
  repeat
    if op:wait(min(left, SLICE)) then return true end
    left = deadline - now()
  until left <= 0
  return false
end

--- Sleep, in slices.
-- @tparam number seconds
function M.sleep(seconds)
  local deadline = now() + seconds
  local left = seconds
  while left > 0 do
    core.sleep(min(left, SLICE))
    left = deadline - now()
  end
end

return M
