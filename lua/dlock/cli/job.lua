--- `dlock run`: the wrapper around a command.
--
-- It forks the keeper (csrc/run.h) first of all, then takes the lock, tells the
-- keeper to start the command, and from then on tells it how long the lease is
-- valid. It turns the command's end, a lost lock and signals into one exit
-- status. All its waiting is one poll over the signals, the keeper and the
-- doorbell of dlock's operations.
-- @module dlock.cli.job

local core = require "dlock.core"
local dlock = require "dlock"
local options = require "dlock.cli.options"
local output = require "dlock.cli.output"

local run = core.run
local huge, floor, min, max, abs = math.huge, math.floor, math.min, math.max, math.abs
local concat = table.concat
local format = string.format
local say, seconds_text = output.say, output.seconds_text
local time_text, usage = options.time_text, options.usage

-- Exit statuses, after sysexits.h and env(1).
local EX_UNAVAILABLE, EX_SOFTWARE, EX_TEMPFAIL = 69, 70, 75
local EX_CANNOT_RUN, EX_NOT_FOUND, EX_SIGNAL = 126, 127, 128

-- Raised to leave the wait for the lock through all layers, when a signal comes.
local LEAVE = {}

local M = {}

--- Exit status for what kept us from the lock or an answer.
function M.status_of(code, o)
  if code == "held" or code == "timeout" then return o.conflict_exit_code or EX_TEMPFAIL end
  return EX_UNAVAILABLE
end

--- What the library calls misuse is a wrong command line here: its message is a
-- string without a position, since our pcall called it. Anything else goes on.
function M.checked(ok, ...)
  if ok then return ... end
  local err = ...
  if type(err) ~= "string" or err:find "^[^%s:]+:%d+: " or err:find("interrupted!", 1, true) then
    error(err, 0)
  end
  usage("%s", err)
end

--- The holder, for people.
function M.holder_text(info)
  local parts = { "held by " .. (info.owner or "somebody") }
  if info.age then parts[#parts + 1] = " for " .. seconds_text(info.age) end
  if info.ttl and info.ttl < huge then
    parts[#parts + 1] = ", " .. seconds_text(info.ttl) .. " left of its lease"
  end
  return concat(parts)
end

local Job = {}
Job.__index = Job

function Job:note(...)
  if self.o.verbose then say(...) end
end

function Job:status_line(...)
  if self.o.status_fd then run.write(self.o.status_fd, format(...) .. "\n") end
end

-- The margin is for the killing itself: all must be gone before the lease is.
local function lease_times(o, ttl)
  local grace = o.grace or min(5, ttl / 4)
  return min(grace, ttl / 3), min(0.2, ttl / 10)
end

local function check_times(o)
  if o.wait and o.no_wait then usage("--wait and --no-wait exclude each other") end
  if o.grace and o.grace > o.ttl / 3 then
    usage("--grace %s is over a third of --ttl %s: the command would have to be ended before a "
      .. "renewal could fail twice", time_text(o.grace), time_text(o.ttl))
  end
  local grace, margin = lease_times(o, o.ttl)
  if o.max_hold and o.max_hold <= grace + margin then
    usage("--max-hold %s leaves the command no time: it gets SIGTERM --grace %s before that",
      time_text(o.max_hold), time_text(grace))
  end
end

local function argv_of(o, operands)
  for i, what in ipairs { "KEY", "the command" } do
    if not operands[i] then
      usage("%s is missing: dlock run [options] KEY -- command [args]", what)
    end
  end
  local argv = {}
  for i = 2, #operands do argv[#argv + 1] = operands[i] end
  if o.shell then argv = { "/bin/sh", "-c", concat(argv, " ") } end
  return argv
end

-- While the lock is waited for, any of these ends us, as it would have without
-- a handler; Ctrl-Z stops us, and leaves us in the line.
function Job:on_waiting_signal(n)
  if n == run.TSTP then return run.stop() end
  if n == run.CONT then return end
  self.left_by = n
  error(LEAVE, 0)
end

function Job:read_signals(handler)
  while true do
    local n, sent = run.next_signal(self.signals)
    if not n then return end
    handler(self, n, sent)
  end
end

-- How the library waits: see dlock.runtime.thread. With a doorbell, so that one
-- poll sees signals too.
function Job:runtime()
  local bell = assert(core.bell())
  self.bell = bell
  local function turn(seconds)
    run.wait(seconds, bell:fd(), self.waiting and self.signals or bell:fd())
    if self.waiting then self:read_signals(self.on_waiting_signal) end
  end
  local runtime = { bell = bell }
  function runtime.wait(op, seconds)
    local deadline = seconds == huge and huge or run.now() + seconds
    while true do
      bell:drain()
      if op:wait(0) then return true end
      local left = deadline - run.now()
      if left <= 0 then return false end
      turn(left)
    end
  end
  function runtime.sleep(seconds)
    local deadline = run.now() + seconds
    while run.now() < deadline do
      bell:drain()
      turn(deadline - run.now())
    end
  end
  return runtime
end

-- A wait without end is for locks, not for servers that were never there.
function Job:patience()
  local next_delay = dlock.retry.exponential({}):start()
  return function(attempt, code, elapsed)
    if self.wait == huge and self.client:stats().connects == 0 then return nil end
    if attempt == 1 then say("%s: %s; trying again", self.key, dlock.codes[code] or code) end
    return next_delay(attempt, code, elapsed)
  end
end

function Job:connect(url)
  local o = self.o
  local opts = { ttl = o.ttl, wait = self.wait, owner = o.owner, max_hold = o.max_hold,
    retry = self:patience(), runtime = self:runtime() }
  local told = { notice = true, renew_failed = true, lost = true }
  if o.verbose then
    opts.on_event = function(ev)
      if told[ev.type] then say("%s: %s", ev.key or self.key, ev.message) end
    end
  end
  local msg, code
  self.client, msg, code = M.checked(pcall(dlock.connect, url, opts))
  if not self.client then return self:fail(M.status_of(code, o), code, "%s", msg) end
end

-- Sets the exit status, and says why, once.
function Job:fail(status, reason, ...)
  if self.status then return end
  self.status, self.source = status, "dlock"
  self.reason = reason
  say("%s: %s", self.key, format(...))
end

function Job:not_acquired(msg, code, waited)
  if code == "held" or code == "timeout" then
    local info = self.client:inspect(self.key)
    if info and info.held then
      msg = M.holder_text(info)
      if code == "timeout" then msg = msg .. "; gave up after " .. seconds_text(waited) end
    end
  end
  self:fail(M.status_of(code, self.o), code, "%s", msg)
end

local function take(self)
  local lock, msg, code = M.checked(pcall(self.client.acquire, self.client, self.key))
  self.lock = lock
  -- Until the command is there to get them, signals are for us.
  self:read_signals(self.on_waiting_signal)
  return msg, code
end

function Job:acquire()
  local began = run.now()
  self:note("%s: asking for the lock", self.key)
  self.waiting = true
  local ok, msg, code = pcall(take, self)
  self.waiting = false
  if not ok and msg == LEAVE then
    return self:fail(EX_SIGNAL + self.left_by, "signal", "not acquired: %s",
      run.signal_text(self.left_by))
  end
  if not ok then error(msg, 0) end
  if not self.lock then return self:not_acquired(msg, code, run.now() - began) end
  self.acquired_at = run.now()
  self:note("%s: acquired after %s, token %s", self.key, seconds_text(run.now() - began),
    self.lock.token_string)
  self:status_line("acquired %s", self.lock.token_string)
end

-- What was read from the clock first cannot be too late, even if we are
-- stopped before the second line.
function Job:valid_until()
  local now = run.now()
  return now + self.lock:remaining()
end

function Job:tell_alive()
  local till = self:valid_until()
  if till == self.till then return end
  if till < huge and self.till < huge and abs(till - self.till) < 0.005 then return end
  -- A keeper that reads nothing goes by what it heard before, which is safe.
  if self.keeper:alive(till) then self.till = till end
end

function Job:start()
  local lock, o = self.lock, self.o
  local env = {}
  for name, value in pairs { KEY = self.key, TOKEN = lock.token_string, OWNER = lock.owner } do
    env[#env + 1] = "DLOCK_" .. name .. "=" .. value .. "\0"
  end
  self.grace, self.margin = lease_times(o, min(o.ttl, lock.ttl))
  -- An answer that came late left little of the lease.
  if lock.ttl < huge and lock:remaining() < lock.ttl * 0.8 then lock:extend() end
  local fd = lock:hold_fd()
  self.till = self:valid_until()
  if self.till - run.now() <= self.grace + self.margin then
    if fd then run.close(fd) end
    return self:fail(EX_SOFTWARE, "lost", "the lease was over before the command could start")
  end
  local ok, msg = self.keeper:start(self.till, self.grace, self.margin, concat(env), fd)
  if fd then run.close(fd) end
  if not ok then self:fail(EX_SOFTWARE, "keeper", "the keeper is gone: %s", msg) end
  return ok
end

local on_message = {
  started = function(self, pid)
    self.started = pid
    self:note("%s: the command runs as process %d", self.key, pid)
  end,
  failed = function(self, errno, text) self.failed = { errno = errno, text = text } end,
  stopped = function(self) self.stopped = true end,
  continued = function(self) self.stopped = false end,
  exited = function(self, code, signal, why)
    self.ended = { code = code, signal = signal, why = why }
    if why == "left" then
      self:note("%s: the command died (%s); ending what it has left behind", self.key,
        run.signal_text(signal))
    end
  end,
  done = function(self, code, signal, why)
    self.ended = { code = code, signal = signal, why = why }
    self.over, self.done = true, true
  end,
  gone = function(self) self.over = true end,
}

function Job:read_keeper()
  while not self.over do
    local what, a, b, c = self.keeper:receive()
    if not what then return end
    on_message[what](self, a, b, c)
  end
end

-- How long a command may take over stopping after Ctrl-Z, seconds.
local STOP_PATIENCE = 10

-- The terminal sends a signal to the whole job, the command included, so only
-- what a process sent to us is passed on. A hangup goes to the leader of the
-- session alone.
function Job:on_running_signal(n, sent)
  if n == run.TSTP then
    self.stop_wanted = run.now() + STOP_PATIENCE
  elseif n == run.CONT then
    self.stop_wanted = nil
  elseif n == run.HUP then
    sent = sent or run.leads_session()
  end
  if sent then self.keeper:signal(n) end
end

local TSTP_DIGIT = -1 - floor((run.TSTP - 1) / 4) -- of a mask in hex, from the right
local TSTP_BIT = 2 ^ ((run.TSTP - 1) % 4)

-- Whether the command catches or ignores Ctrl-Z, or has ended.
function Job:answers_stop()
  local f = io.open("/proc/" .. self.started .. "/status", "rb")
  local text = f and f:read "*a" or ""
  if f then f:close() end
  if not text:find "State:%s*[^ZX%s]" then return true end
  for mask in text:gmatch "Sig[IC]g[nt]:%s*(%x+)" do
    local digit = tonumber(mask:sub(TSTP_DIGIT, TSTP_DIGIT), 16)
    if digit % (TSTP_BIT * 2) >= TSTP_BIT then return true end
  end
  return false
end

-- A command that handles Ctrl-Z (an editor puts the terminal right) stops
-- before us, or not at all, as the shell would see it without us. One that does
-- not is not waited for: in vfork it stops only when it is continued.
function Job:maybe_stop()
  if not self.stop_wanted or not self.started or self.ended then return end
  if not self.stopped and self:answers_stop() then return end
  local in_time = run.now() < self.stop_wanted
  self.stop_wanted = nil
  if not in_time then return end
  run.stop()
end

local unlike_expired = { taken = true, deleted = true, revoked = true, session = true }

-- Learnt only now: somebody else may run already. (By the clock the keeper is
-- ahead of us.)
function Job:check_lock()
  if self.lost or self.lock:is_held() then return end
  self.lost = self.lock:lost_reason() or "expired"
  local grace = min(self.grace, 1)
  self.keeper:kill(grace)
  self.give_up_at = run.now() + grace + 1
end

-- The keeper was killed, or stopped. Its death kills the command, and orphans
-- come to us.
function Job:replace_keeper()
  self.keeper:close(true)
  local pause = 0.005
  while run.kill_descendants() do
    run.wait(pause)
    pause = min(pause * 2, 0.25)
  end
end

function Job:hold()
  local keeper_fd, bell_fd = self.keeper:fd(), self.bell:fd()
  local lost_op = self.lock._grant:until_lost(2, self.bell) -- rings the bell
  -- Often enough to hear of a renewal long before the keeper must act.
  local pause = self.lock.ttl < huge and max(min(self.lock.ttl / 30, 1), 0.03) or 3600
  while not self.over do
    run.wait(self.lost and 0.1 or pause, keeper_fd, bell_fd, self.signals)
    self.bell:drain()
    self:read_keeper()
    if self.over then break end
    self:read_signals(self.on_running_signal)
    self:maybe_stop()
    self:check_lock()
    if not self.lost then self:tell_alive() end
    if self.lost and run.now() > self.give_up_at then break end
  end
  if lost_op then lost_op:close() end
end

function Job:max_hold_over()
  local most = self.o.max_hold
  return most and run.now() >= self.acquired_at + most - self.grace - self.margin - 0.1
end

function Job:lost_text()
  if self.lost == "max_hold" or self:max_hold_over() then
    return "--max-hold " .. time_text(self.o.max_hold) .. " is over; the command was ended"
  end
  if unlike_expired[self.lost] then
    return "the lock was lost (" .. self.lost .. "); the command was ended, but somebody else may "
      .. "have run beside it"
  end
  return "the lease was not renewed in time (backend unreachable, or this process stopped); the "
    .. "command was ended before it ran out"
end

-- Sets the status from how the command went. `lost` wins over the command's own.
function Job:judge()
  local e = self.ended
  if self.failed then
    local status = self.failed.errno == run.ENOENT and EX_NOT_FOUND or EX_CANNOT_RUN
    return self:fail(status, "exec", "cannot run %s: %s", self.argv[1], self.failed.text)
  end
  if e and e.why == "deadline" then self.lost = self.lost or "expired" end
  if self.lost then return self:fail(EX_SOFTWARE, "lost", "%s", self:lost_text()) end
  if not self.done then
    return self:fail(EX_SOFTWARE, "keeper", "the keeper was killed; the command was ended")
  end
end

function Job:release()
  local ok, msg, code = self.lock:release()
  if ok then return self:note("%s: released", self.key) end
  if code == "lost" then return self:fail(EX_SOFTWARE, "lost", "%s", msg) end
  say("%s: the lock could not be released (%s); it ends with its lease", self.key, msg)
end

function Job:command_status()
  local e = self.ended
  self.source = e.signal and "signal" or "command"
  self.status = e.signal and EX_SIGNAL + e.signal or e.code
end

function Job:run_command()
  if self:start() then
    self:hold()
    if self.done or self.failed then self.keeper:close() else self:replace_keeper() end
    self:judge()
  end
  self:release()
  if not self.status then self:command_status() end
end

function Job:go(url)
  self:connect(url)
  if not self.status then self:acquire() end
  if not self.status then self:run_command() end
end

local function finish(job, ok, err)
  -- Ends a command that an error of ours has left running, before the lock goes.
  job.keeper:close()
  if job.client then pcall(job.client.close, job.client) end
  if not ok then
    local wrong = getmetatable(err) == options.Usage
    job:status_line("exit dlock %d %s", wrong and 64 or EX_SOFTWARE, wrong and "usage" or "error")
    error(err, 0)
  end
  local tail = job.reason and " " .. job.reason or ""
  job:status_line("exit %s %d%s", job.source, job.status, tail)
  return job.status
end

--- Run a command under a lock.
-- @tparam table o options
-- @tparam table operands the key, then the command and its arguments
-- @tparam function find_url called once the rest of the command line is known to be right
-- @treturn number exit status
function M.run(o, operands, find_url)
  options.fill_in("run", o)
  local argv = argv_of(o, operands)
  check_times(o)
  local url = find_url(o)
  if o.status_fd then
    local ok, msg = run.keep_private(o.status_fd)
    if not ok then usage("--status-fd %d: %s", o.status_fd, msg) end
  end
  local job = setmetatable({ o = o, key = operands[1], argv = argv }, Job)
  job.wait = o.no_wait and 0 or o.wait or huge
  -- First of all, while there is no socket and no thread.
  job.keeper = assert(run.keeper(argv))
  job.signals = assert(run.catch_signals())
  run.plug()
  return finish(job, pcall(job.go, job, url))
end

return M
