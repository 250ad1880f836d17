--- The runtime for nginx and OpenResty: a wait suspends its request, never the worker.
--
-- `dlock.connect` chooses it by itself inside nginx. A client, and a lock, may be
-- kept in a module and used by many requests at once. Nothing is started before the
-- first use in a worker, so `init_by_lua` may call `dlock.connect`.
--
-- *Phases.* Calls that wait work where Lua can yield: `rewrite`, `server_rewrite`, `access`,
-- `content`, `preread`, timers, and `ssl_certificate`, `ssl_client_hello`,
-- `ssl_session_fetch`. In all others (`init`, `init_worker`, `set`, `balancer`, `header_filter`,
-- `body_filter`, `log`, `ssl_session_store`, `exit_worker`) they return `nil, message,
-- "unsupported"`, but `lock:release`, `client:close` and whatever costs no I/O work there: the
-- release goes on in the background. From `init_worker` use `ngx.timer.at(0, ...)`.
--
-- *Ends.* When a request is aborted, a light thread is killed or a handler fails, its
-- waits are given up within about a second, or at once when the lock comes; `client:with`
-- releases after an error of its function. A lock that such a request held, and that
-- nobody refers to any more, is found by collecting garbage in small steps, and released within
-- a few seconds (later in a worker with a large heap: this may take 2 % of its time). A
-- worker that ends releases what is left; one that is killed leaves it to the ttl.
--
-- *How it works.* dlock's thread writes a byte into a private socket of this process; one
-- light thread per worker reads it, and posts the semaphores of the requests whose
-- operations have ended. It ends when nothing was locked for a few seconds. When it cannot be had
-- (`lua_max_running_timers`), waiting requests look for themselves every 1 to 20 ms.
-- @module dlock.runtime.ngx

local core = require "dlock.core"
local semaphore = require "ngx.semaphore"

local ngx = ngx -- luacheck: ignore ngx
local get_phase, exiting, timer_at = ngx.get_phase, ngx.worker.exiting, ngx.timer.at
local spawn, thread_wait, kill = ngx.thread.spawn, ngx.thread.wait, ngx.thread.kill
local huge, max, min = math.huge, math.max, math.min
local clock, now = os.clock, core.now
local next, pairs = next, pairs

-- Seconds. How often waits and locks are looked after while there are any; so many rounds
-- with nothing to do end the reader.
local TICK, IDLE_TICKS = 1, 3
-- A waiter looks for itself this often, in case the reader died.
local SLICE = 5
-- While there is no reader: first and longest pause.
local PAUSE, LONGEST_PAUSE = 0.001, 0.02
-- How often the reader looks when the worker is about to end, and must not sleep in a read.
local LAST_PAUSE = 0.01
-- A timer that has not run after this long never will (all timers of the worker are running).
local LATE = 2
-- A lock this old may be an abandoned one. Collecting takes at most a fiftieth of the time.
local OLD, SHARE = 1, 50
-- Steps of the collector, and the pause between them.
local STEP, STEP_PAUSE = 32, 0.002

local CAN_WAIT = {}
for phase in ("rewrite server_rewrite access content preread timer ssl_cert ssl_client_hello "
  .. "ssl_session_fetch"):gmatch "%S+" do
  CAN_WAIT[phase] = true
end

local M = {}

-- Clients with on_event, also those that init_by_lua made.
local clients = setmetatable({}, { __mode = "k" })

-- One worker's state; a copy that came by the fork from the master is thrown away.
-- waiting: id of an operation -> { op, sema, posted }. held: lock -> since when.
-- reader: table, up when it is connected. tick: when the next tick is due.
local worker

local function state()
  local pid = ngx.worker.pid()
  if not worker or worker.pid ~= pid then
    worker = { pid = pid, waiting = {}, free = {}, collect_at = 0, idle = 0,
      held = setmetatable({}, { __mode = "k" }) }
  end
  return worker
end

-- ---- waiters ----

-- Their coroutine was destroyed: nobody is in the semaphore's line. What the operation
-- got, or still gets, is given back.
local function is_orphan(waiter) return waiter.sema:count() >= (waiter.posted and 1 or 0) end

local function give_up(w, id, waiter)
  w.waiting[id] = nil
  waiter.op:close()
end

local function dispatch(w)
  local bell, waiting = w.bell, w.waiting
  local id = bell:next()
  while id do
    local waiter = waiting[id]
    if waiter and is_orphan(waiter) then
      give_up(w, id, waiter)
    elseif waiter then
      waiter.posted = true
      waiter.sema:post(1)
    end
    id = bell:next()
  end
end

local function sweep(w)
  for id, waiter in pairs(w.waiting) do
    if is_orphan(waiter) then give_up(w, id, waiter) end
  end
end

-- ---- abandoned locks, events ----

local function any_old(w)
  local t, old = now(), false
  for lock, since in pairs(w.held) do
    if not lock._grant:is_held() then
      w.held[lock] = nil
    elseif t - since >= OLD then
      old = true
    end
  end
  return old
end

-- One pass of the collector, in small steps. Returns the CPU time it took.
local function collect_once()
  local spent = 0
  while true do
    local began = clock()
    local done = collectgarbage("step", STEP)
    spent = spent + clock() - began
    if done then return spent end
    ngx.sleep(STEP_PAUSE)
  end
end

-- Two passes: the first may have begun while the lock was still in use.
local function collect(w)
  if w.collecting or now() < w.collect_at or not any_old(w) then return end
  w.collecting = true
  local spent = collect_once() + collect_once()
  w.collecting = nil
  w.collect_at = now() + spent * SHARE
end

local function deliver()
  for client in pairs(clients) do client:_deliver() end
end

-- ---- the reader ----

local function connect(w)
  local path, msg = w.bell:listen()
  if not path then return nil, msg end
  local sock = ngx.socket.tcp()
  -- A read that times out would be logged as an error; a tick ends it in time.
  sock:settimeouts(1000, 1000, 2147483647)
  local ok, err = sock:connect("unix:" .. path)
  if ok and w.bell:accept() then return sock end
  w.bell:hang_up()
  return nil, err or "the connection to the private socket did not come from this process"
end

local function read_bell(w, me, sock)
  while not exiting() do
    if not sock:receiveany(64) or me.stop then return end
    w.bell:drain()
    dispatch(w)
  end
  local rounds = 0
  while next(w.waiting) do
    ngx.sleep(LAST_PAUSE)
    dispatch(w)
    rounds = rounds + 1
    if rounds % 50 == 0 then sweep(w) end
  end
end

local function read(_, w, me)
  local sock, msg = connect(w)
  if sock then
    me.up = true
    dispatch(w)
    local ok, err = pcall(read_bell, w, me, sock)
    me.up = false
    if not ok then ngx.log(ngx.ERR, "dlock: ", err) end
    sock:close()
  elseif not w.told then
    w.told = true
    ngx.log(ngx.WARN, "dlock: waiting requests poll: ", msg)
  end
  if w.reader == me then
    w.bell:hang_up()
    w.reader = nil
  end
end

local function stop_reader(w)
  local me = w.reader
  if not me then return end
  me.stop = true
  w.reader = nil
  w.bell:nudge()
end

local arm

local function tick(premature, w)
  w.tick = nil
  if premature then
    if w.bell then w.bell:nudge() end -- the reader sees that the worker is about to end
    return
  end
  sweep(w)
  local busy = next(w.waiting) ~= nil or any_old(w) or next(w.held) ~= nil
  w.idle = busy and 0 or w.idle + 1
  if w.idle >= IDLE_TICKS or not arm(w) then stop_reader(w) end
  deliver()
  collect(w)
end

-- False: there is no timer to be had, so a reader would never hear of the worker's end.
function arm(w)
  local t = now()
  if w.tick and t < w.tick + LATE then return true end
  w.tick = t + TICK
  if timer_at(TICK, tick, w) then return true end
  w.tick = nil
  return false
end

local function ensure(w)
  w.idle = 0
  local ending = exiting()
  if not ending and not arm(w) then return end
  local me = w.reader
  if me and (me.up or now() < me.since + LATE) then return end
  me = { since = now(), up = false }
  w.reader = me
  if not timer_at(0, read, w, me) then w.reader = nil end
end

-- ---- the interface ----

--- The bell of this worker.
-- @treturn[1] userdata
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `unsupported` in a phase that cannot wait
function M.bell()
  local phase = get_phase()
  if not CAN_WAIT[phase] then
    return nil, "nothing can wait in the phase " .. phase .. "; it can in rewrite, access, "
      .. "content, preread, ssl_certificate, ssl_client_hello, ssl_session_fetch and in timers "
      .. "(ngx.timer.at(0, ...))", "unsupported"
  end
  local w = state()
  if not w.bell then
    local msg, code
    w.bell, msg, code = core.bell "socket"
    if not w.bell then return nil, msg, code end
  end
  return w.bell
end

local function sleep_in(w, waiter, seconds, id)
  local ok, err = waiter.sema:wait(max(seconds, 0.001))
  if not ok and err ~= "timeout" then
    w.waiting[id] = nil
    error("dlock cannot wait here: " .. tostring(err), 0)
  end
end

--- Suspend the request until the operation has ended.
-- @tparam userdata op
-- @tparam number seconds 0 .. `math.huge`
-- @treturn boolean whether it is done
function M.wait(op, seconds)
  if op:wait(0) then return true end
  local w, id = state(), op:id()
  local free = w.free
  local n = #free
  local waiter = { op = op, sema = free[n] or semaphore.new(0), posted = false }
  free[n] = nil
  w.waiting[id] = waiter
  local deadline = seconds == huge and huge or now() + seconds
  local left, pause, done = seconds, PAUSE, false
  while not done and left > 0 do
    ensure(w)
    sleep_in(w, waiter, min(left, w.reader and w.reader.up and SLICE or pause), id)
    pause = min(pause * 1.5, LONGEST_PAUSE)
    done = op:wait(0)
    left = deadline - now()
  end
  w.waiting[id] = nil
  if waiter.sema:count() == 0 then free[#free + 1] = waiter.sema end
  return done
end

--- Suspend the request.
-- @tparam number seconds
function M.sleep(seconds) ngx.sleep(max(seconds, 0.001)) end

--- Deliver this client's events by timer too.
-- @tparam dlock.client client
function M.attach(client) clients[client] = true end

--- Look after this lock, in case its request is destroyed.
-- @tparam dlock.lock lock
function M.remember(lock)
  local w = state()
  w.held[lock] = now()
  arm(w)
end

--- It was released.
-- @tparam dlock.lock lock
function M.forget(lock) state().held[lock] = nil end

--- Whether `abort_on_lost` is possible here: in the phases that can wait.
-- @treturn[1] boolean true
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `unsupported`
function M.abortable()
  local bell, msg, code = M.bell()
  if not bell then return nil, msg, code end
  return true
end

local FINISHED = {}

local function in_thread(fn, lock, ...) return FINISHED, pcall(fn, lock, ...) end

local function watch(lock) return lock:wait_lost() end

local function results(ok, ...)
  if ok then return ... end
  error((...), 0)
end

local function finished(watcher, _, _, ...)
  if watcher then kill(watcher) end
  return results(...)
end

-- The watcher was first. When it says why, the lock is lost; else it was released inside fn.
local function stopped(thread, _, reason)
  if not reason or not kill(thread) then
    -- One in a subrequest or a name's resolution cannot be killed: it comes to its end.
    return finished(nil, thread_wait(thread))
  end
end

local function first(thread, watcher, ok, what, ...)
  if what == FINISHED then return finished(watcher, ok, what, ...) end
  return stopped(thread, ok, what)
end

--- Run a function in a light thread that is killed when the lock is lost.
-- @tparam dlock.lock lock
-- @tparam function fn
-- @param ... arguments for fn after the lock
-- @return what fn returned; nothing when it was stopped
function M.run_until_lost(lock, fn, ...)
  local thread = spawn(in_thread, fn, lock, ...)
  local watcher = spawn(watch, lock)
  return first(thread, watcher, thread_wait(thread, watcher))
end

return M
