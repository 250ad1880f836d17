-- What all specs share: waiting with a bound, other processes, the leak check,
-- and the backends of the contract suite. See spec/support for servers, the
-- proxy and the C module below this (dlkproc: spec/support/proc.c).

local proc = require "dlkproc"

local M = { proc = proc }

M.build = assert(os.getenv "DLOCK_BUILD", "run specs by make test, or spec/support/runner.py")
M.lua = os.getenv "DLOCK_LUA"
M.python = os.getenv "PYTHON" or "python3"
M.jit = rawget(_G, "jit") ~= nil

-- "asan", "tsan", "valgrind" or "": what we run under.
M.under = os.getenv "DLOCK_UNDER" or ""

-- How much longer everything takes there. Bounds go through M.bound.
M.slack = tonumber(os.getenv "DLOCK_SLACK" or 1)
function M.bound(seconds) return seconds * M.slack end

-- Long runs: n at `make soak`, a twentieth of it otherwise, at least `least`.
M.scale = tonumber(os.getenv "DLOCK_SCALE" or 0.05)
function M.scaled(n, least) return math.max(least or 1, math.floor(n * M.scale + 0.5)) end

-- Seconds on CLOCK_BOOTTIME.
function M.now() return proc.now() / 1000 end

-- Runs fn(...) and returns how many seconds it took, then its results.
function M.timed(fn, ...)
  local start = M.now()
  local function pack(...) return { n = select("#", ...), ... } end
  local r = pack(fn(...))
  return M.now() - start, (table.unpack or unpack)(r, 1, r.n) -- luacheck: ignore
end

--- Calls fn until it returns something true, which is returned; fails with
-- `what` (or fn's second result) after `bound` seconds (default 5).
function M.eventually(fn, bound, what)
  local stop = M.now() + M.bound(bound or 5)
  local step = 1
  while true do
    local got, why = fn()
    if got then return got end
    if M.now() > stop then
      if type(what) == "function" then what = what() end
      error(("not so within %g s: %s"):format(M.bound(bound or 5),
        tostring(what or why or "condition")), 2)
    end
    proc.pause(step)
    step = math.min(step * 1.5, 20)
  end
end

--- Fails when fn is true at any look within `seconds`: for "must not happen".
function M.never(fn, seconds, what)
  local stop = M.now() + seconds
  repeat
    if fn() then error(tostring(what or "it") .. " happened", 2) end
    proc.pause(5)
  until M.now() > stop
end

-- ---- processes ----

M.SIG = { HUP = 1, INT = 2, KILL = 9, USR1 = 10, PIPE = 13, ALRM = 14, TERM = 15, CONT = 18,
  STOP = 19, TSTP = 20 }

local Process = {}
Process.__index = Process

-- The environment as a list, changed by { NAME = "value" or false }.
local function environment(changes)
  local list = {}
  for _, entry in ipairs(proc.environ()) do
    if changes[entry:match "^[^=]*"] == nil then list[#list + 1] = entry end
  end
  for name, value in pairs(changes) do
    if value then list[#list + 1] = name .. "=" .. value end
  end
  return list
end

--- Starts a program. `what` is a list of strings with, by name: env (changes),
-- cwd, setsid, orphan (may outlive us; all others die with us), stdin = text or
-- "pipe", stdout, stderr = "pipe" (default: stderr and stdout together in one
-- pipe that p:output() reads), "inherit", or a descriptor; tty = true gives it
-- a terminal of its own (p.tty is our end).
function M.spawn(what)
  local p = setmetatable({ text = "" }, Process)
  local plan, theirs = {}, {}
  for k, v in pairs(what) do plan[k] = v end
  if what.env then plan.env = environment(what.env) end
  if what.tty then
    local ours, tty = assert(proc.openpty())
    p.tty, p.out = ours, ours
    plan.stdin, plan.stdout, plan.stderr = tty, tty, tty
    theirs[1] = tty
  else
    local function pipe(name)
      local r, w = assert(proc.pipe())
      local mine, its = r, w
      if name == "stdin" then mine, its = w, r end
      plan[name], theirs[#theirs + 1] = its, its
      return mine
    end
    if type(what.stdin) == "string" then p.inp = pipe "stdin" end
    if what.stdout == nil or what.stdout == "pipe" then p.out = pipe "stdout" end
    if what.stderr == "pipe" then
      p.err = pipe "stderr"
    elseif what.stderr == nil and p.out then
      plan.stderr = plan.stdout
    end
    for _, name in ipairs { "stdout", "stderr" } do
      if plan[name] == "inherit" then plan[name] = nil end
    end
  end
  local pid, err = proc.spawn(plan)
  for _, fd in ipairs(theirs) do proc.close(fd) end
  p.pid = assert(pid, err)
  if type(what.stdin) == "string" and what.stdin ~= "pipe" then
    p:write(what.stdin)
    p:close_stdin()
  end
  return p
end

function Process:write(text) return proc.write(self.inp or self.tty, text) end

function Process:close_stdin()
  if self.inp then proc.close(self.inp) end
  self.inp = nil
end

function Process:kill(signal)
  if not self.ended then return proc.kill(self.pid, M.SIG[signal or "KILL"] or signal) end
end

--- Reads on until the output matches `pattern` (its captures are returned);
-- fails with what there is after `bound` seconds or at the end.
function Process:expect(pattern, bound)
  local stop = M.now() + M.bound(bound or 10)
  while true do
    local first, last = self.text:find(pattern)
    if first then
      local function rest(...)
        self.text = self.text:sub(last + 1)
        return ...
      end
      return rest(self.text:match(pattern))
    end
    local got, err = proc.read(self.out, math.max(0, (stop - M.now()) * 1000))
    if not got or got == "" then
      error(("no %q (%s) in: %s"):format(pattern, got and "end of output" or err, self.text), 2)
    end
    self.text = self.text .. got
  end
end

local function drain(fd, stop)
  local all = {}
  while fd do
    local got, err = proc.read(fd, math.max(0, (stop - M.now()) * 1000))
    if got == "" then break end
    all[#all + 1] = assert(got, err == "timeout" and "the output does not end" or err)
  end
  return table.concat(all)
end

--- Waits for the end; returns the exit status (128 + signal when killed), all
-- output that was not taken by expect, and stderr if that was asked for apart.
function Process:finish(bound)
  local stop = M.now() + M.bound(bound or 20)
  local how, code = self:wait(bound)
  if how == "running" then
    self:kill "KILL"
    self:wait(5)
    error(("process %d did not end within %g s; output: %s"):format(self.pid,
      M.bound(bound or 20), self.text), 2)
  end
  local out = self.text .. drain(self.out, math.max(stop, M.now() + 2))
  local err = self.err and drain(self.err, math.max(stop, M.now() + 2))
  self:close()
  return how == "signaled" and 128 + code or code, out, err
end

--- "exited", code; "signaled", signal; or "running" after the bound.
function Process:wait(bound)
  if not self.ended then
    local how, code = proc.wait(self.pid, M.bound(bound or 20) * 1000)
    if how == "running" then return how end
    assert(how, code)
    self.ended = { how, code }
  end
  return self.ended[1], self.ended[2]
end

--- Kills it if it lives, reaps it, closes our ends.
function Process:close()
  if not self.ended then
    self:kill "CONT"
    self:kill "KILL"
    self:wait(10)
  end
  for _, name in ipairs { "inp", "out", "err" } do
    if self[name] then proc.close(self[name]) end
    self[name] = nil
  end
  self.tty = nil
end

--- Starts a Lua program in the interpreter that runs us, with the same
-- sanitizer: source text, then strings that it finds in the global ARGS.
function M.spawn_lua(source, ...)
  local args = {}
  for i = 1, select("#", ...) do args[i] = ("%q"):format((select(i, ...))) end
  return M.spawn {
    M.lua, "-e", "ARGS={" .. table.concat(args, ",") .. "} " .. source,
    stdin = "",
    env = { LD_PRELOAD = os.getenv "DLOCK_PRELOAD" or false },
  }
end

--- Runs it to its end, which only the time limit of the whole file bounds:
-- status, output.
function M.run_lua(source, ...) return M.spawn_lua(source, ...):finish(3600) end

--- Runs a program to its end: status, stdout, stderr.
function M.run(...)
  return M.spawn({ stderr = "pipe", stdin = "", ... }):finish()
end

--- Runs fn in a forked child, which ends with _exit(fn's result or 0; 99 on an
-- error, told on stderr). Returns an object like spawn's, without output.
function M.fork(fn)
  io.stdout:flush()
  local pid = assert(proc.fork())
  if pid == 0 then
    local ok, r = pcall(fn)
    if not ok then io.stderr:write("in the child: ", tostring(r), "\n") end
    proc.exit_now(ok and tonumber(r) or ok and 0 or 99)
  end
  return setmetatable({ pid = pid, text = "" }, Process)
end

--- busted's `it`, for tests whose forked child starts threads; `pending`, which
-- counts as skipped, under TSan with a client library that has threads: TSan
-- still knows the parent's in the child, and dies of one with the same stack
-- ("dup thread with used id").
function M.it_forks(backend)
  local busted = require "busted"
  return M.under == "tsan" and backend.threads and busted.pending or busted.it
end

-- ---- files ----

function M.read_file(path)
  local f = io.open(path, "rb")
  if not f then return nil end
  local s = f:read "*a"
  f:close()
  return s
end

function M.write_file(path, text)
  local f = assert(io.open(path, "wb"))
  assert(f:write(text))
  assert(f:close())
end

--- A new directory; the runner removes them all when the file is done.
function M.tmpdir() return assert(proc.mkdtemp()) end

function M.remove_tree(dir)
  assert(dir:find "/dlock%-spec%-%w+$", dir)
  M.run("rm", "-rf", dir)
end

-- ---- the leak check ----

local function threads() return #assert(proc.list "/proc/self/task") end

--- { ["3"] = "socket:[123]", ... }
function M.fds()
  local fds = {}
  for _, fd in ipairs(assert(proc.list "/proc/self/fd")) do
    fds[fd] = proc.readlink("/proc/self/fd/" .. fd)
  end
  return fds
end

local function count(t)
  local n = 0
  for _ in pairs(t) do n = n + 1 end
  return n
end

-- Starts what the process keeps for good (watchdog, its descriptors), so that
-- the base line has it.
local function warm_up()
  local dlock = require "dlock"
  local dir = M.tmpdir()
  local client = assert(dlock.connect("local://" .. dir))
  local lock = assert(client:acquire "warm up")
  lock:release()
  client:close()
  M.remove_tree(dir)
end

local function collect()
  collectgarbage()
  collectgarbage()
end

local function above(base, fixtures)
  collect()
  local n = threads()
  if n > base.threads then return ("%d threads, were %d"):format(n, base.threads) end
  local fds = M.fds()
  if count(fds) > count(base.fds) then
    local new = {}
    for fd, to in pairs(fds) do
      if base.fds[fd] ~= to then new[#new + 1] = fd .. " " .. tostring(to) end
    end
    return ("%d descriptors, were %d; new: %s"):format(count(fds), count(base.fds),
      table.concat(new, ", "))
  end
  for _, f in ipairs(fixtures) do
    local keys = f.leftovers and f:leftovers() or {}
    if #keys > 0 then return "keys on the server: " .. table.concat(keys, " ") end
  end
end

--- After each test of the describe block that calls this, the process is back
-- at its base line of threads and descriptors, and each fixture has no keys but
-- fencing counters. Its arguments are functions that return a fixture, since
-- servers start later than this line runs. busted runs the after_each of one
-- block in the order they were written, inner blocks first: what closes the
-- clients must stand before this call, or in an inner block.
function M.no_leaks(...)
  local busted = require "busted"
  local getters = { ... }
  local base
  busted.before_each(function()
    if not base then warm_up() end
    collect()
    base = { threads = threads(), fds = M.fds() }
  end)
  busted.after_each(function()
    local fixtures = {}
    for _, get in ipairs(getters) do fixtures[#fixtures + 1] = get() end
    local why
    local ok = pcall(M.eventually, function()
      why = above(base, fixtures)
      return not why
    end, 5)
    if not ok then error("left behind: " .. why, 0) end
  end)
end

-- ---- backends ----

--- Calls fn(name, fixture) for every backend of this build, for one suite that
-- runs over all of them. `fixture` comes from spec/support/fixtures.lua; a
-- backend that has none there fails the run.
function M.each_backend(fn)
  local fixtures = require "spec.support.fixtures"
  local names = require("dlock.core").backends()
  assert(#names > 0, "this build has no backend")
  for _, name in ipairs(names) do
    fn(name, assert(fixtures[name], "the backend " .. name .. " has no fixture in spec/support"))
  end
end

return M
