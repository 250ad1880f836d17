--- The default runtime: the calling thread waits itself. And how to write one.
--
-- A runtime says how a Lua caller waits. It is a table, given as `opts.runtime`
-- to `dlock.connect`. dlock comes with this one, `dlock.runtime.ngx`,
-- `dlock.runtime.cqueues` and `dlock.runtime.luv`; one for another event loop has
--
-- * `wait(op, seconds)`: wait until `op:wait(0)` is true or the seconds (which may be
--   `math.huge`) have passed; return whether it is done. It may return early; it is called again.
--   It may raise, or never come back (a killed coroutine): let go of `op` then, or `op:close()` it,
--   and the operation is canceled, a lock that it got released.
-- * `sleep(seconds)`: wait that long.
-- * `bell`: a doorbell from `require("dlock.core").bell()`. Operations that have one
--   run on dlock's own thread. When some of them have ended, the descriptor `bell:fd()` is
--   readable: `bell:drain()`, then `bell:next()` gives their ids (`op:id()`) one by one, and nil. A
--   bell may be rung once too often, and must be drained *before* the ids are taken. Without
--   a bell an operation is run by `op:wait(seconds)`, in the thread that calls it.
--   `bell` may also be a function, called before each operation that somebody is going to
--   wait for: it returns the bell (made on first use, and again in a forked child, where
--   `core.generation()` is another number), or `nil, message, "unsupported"` where the caller
--   cannot wait. Then `release` and `close` are done in the background, and other calls return
--   just that.
--
-- and, if it likes,
--
-- * `attach(client)`: a client with an `on_event` was made; `client:poll()` delivers its events.
--   Keep it in a weak table.
-- * `remember(lock)`, `forget(lock)`: a lock was acquired, was released.
-- * `abortable()`: says whether `abort_on_lost` is possible (`true` or `nil, message, code`), and
--   `run_until_lost(lock, fn, ...)` calls `fn(lock, ...)` for it: see `dlock.abort`.
--
-- A complete one, for a scheduler whose `poll(fd, seconds)` suspends the coroutine until the
-- descriptor is readable:
--
--     local core = require "dlock.core"
--     local bell = core.bell()
--     local runtime = { bell = bell }
--     function runtime.wait(op, seconds)
--       local deadline = core.now() + seconds
--       while not op:wait(0) do
--         if core.now() >= deadline then return false end
--         scheduler.poll(bell:fd(), math.min(deadline - core.now(), 0.1))
--         bell:drain()
--       end
--       return true
--     end
--     function runtime.sleep(seconds) scheduler.poll(nil, seconds) end
--
-- (Draining wakes nobody else there, so each waiter looks again after 0.1 s at the latest.
-- `dlock.runtime.cqueues` shows how one of them reads the bell for all.)
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
