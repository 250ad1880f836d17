-- Several processes count in one file, and a lock lets one at a time do it. One of
-- them is killed (kill -9) while it holds the lock, and the others go on. Then the
-- same again without the lock.
--
--   lua examples/01-guarded-counter.lua [--url URL] [--seconds N] [--workers N]
--
-- The workers are this script too, run by the same interpreter; `work` is the part
-- to read. Exits with 1 if an increment was lost under the lock.
local dlock = require "dlock"
local sleep = require("dlock.runtime.thread").sleep

local TTL = 1 -- seconds after which a server frees the lock of a dead process
local PATIENCE = 20 -- longest wait for what should happen at once, seconds

-- ---- files and clock ----

local function read(path)
  local f = io.open(path)
  if not f then return nil end
  local text = f:read "*a"
  f:close()
  return text
end

-- Whoever reads finds the old text or the new one, even if we die in between.
local function replace(path, me, text)
  local new = path .. "." .. me
  local f = assert(io.open(new, "w"))
  assert(f:write(text))
  assert(f:close())
  assert(os.rename(new, path))
end

-- Seconds since boot, in steps of 10 ms: the finest clock that plain Lua can reach.
local function now() return tonumber(read("/proc/uptime"):match "%S+") end

local function my_pid() return read("/proc/self/stat"):match "%d+" end

-- ---- a worker ----

-- The counter file: the count, who set it, and the token of the lock it was set under.
local function read_counter(dir)
  local count, by, token = read(dir .. "/counter"):match "(%d+) (%d+) (%d+)"
  return tonumber(count), tonumber(by), tonumber(token)
end

local function write_counter(dir, me, count, token)
  replace(dir .. "/counter", me, ("%.0f %d %s"):format(count, me, token))
end

-- A journal gets one byte per increment, unbuffered: what is written survives a kill -9.
local function journal(dir, name, me)
  local f = assert(io.open(dir .. "/" .. name .. "-" .. me, "a"))
  f:setvbuf "no"
  return f
end

-- What a bug may do while it holds a lock. It ends by kill -9.
local function hang(dir, me, lock)
  replace(dir .. "/hanging", me, my_pid() .. " " .. lock.token_string)
  repeat sleep(0.05) until read(dir .. "/stop")
end

local function show_waits(dir, me, client)
  local waits = client:stats().acquire
  replace(dir .. "/waits-" .. me, me, waits.p50 .. " " .. waits.max)
end

local function work(dir, me)
  local parent, key, url = read(dir .. "/plan"):match "(.-)\n(.-)\n(.*)"
  local opts = { ttl = TTL, wait = PATIENCE, owner = "worker " .. me }
  local client = url ~= "" and assert(dlock.connect(url, opts))
  local started, acked = journal(dir, "started", me), journal(dir, "acked", me)
  local done = 0
  while not read(dir .. "/stop") and read("/proc/" .. parent .. "/stat") do
    local lock = client and assert(client:acquire(key))
    started:write "+"
    local count = read_counter(dir)
    if lock and read(dir .. "/hang-" .. me) then hang(dir, me, lock) end
    if not lock or lock:is_held() then
      write_counter(dir, me, count + 1, lock and lock.token_string or "0")
    end
    -- Acknowledged only if the lock was ours from acquire to release.
    if not lock or lock:release() then acked:write "+" end
    done = done + 1
    if client and done % 32 == 0 then show_waits(dir, me, client) end
  end
end

if arg[1] == "--work" then
  work(arg[2], tonumber(arg[3]))
  return
end

-- ---- the shell, and what the terminal can do ----

local function quote(s) return "'" .. s:gsub("'", [['\'']]) .. "'" end

local function capture(command)
  local p = assert(io.popen(command))
  local text = p:read "*a"
  p:close()
  return text
end

local function succeeds(command)
  local ok = os.execute(command)
  return ok == true or ok == 0 -- Lua 5.4; LuaJIT
end

-- The interpreter with its own options, and this script.
local function this_script()
  local first, words = 0, {}
  while arg[first - 1] do first = first - 1 end
  for i = first, 0 do words[#words + 1] = quote(arg[i]) end
  return table.concat(words, " ")
end

local function columns()
  local n = tonumber(capture("stty size </dev/tty 2>/dev/null"):match " (%d+)") or 0
  return n > 0 and n or 80
end

local live = succeeds "test -t 1" and os.getenv "TERM" ~= "dumb" and columns() >= 80
local colour = live and (os.getenv "NO_COLOR" or "") == ""
local locale = os.getenv "LC_ALL" or os.getenv "LC_CTYPE" or os.getenv "LANG" or ""
local utf8_locale = locale:upper():find "UTF%-?8"
local BLOCK = utf8_locale and "█" or "#"
local STEPS = utf8_locale and { "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█" }
  or { "_", ".", "-", "=", "+", "*", "%", "#" }

local function painter(code)
  return function(text) return colour and ("\27[%sm%s\27[0m"):format(code, text) or text end
end
local bold, dim, red, green, cyan =
  painter "1", painter "2", painter "1;31", painter "32", painter "36"

local function number(n)
  local text, more = ("%.0f"):format(n), 1
  while more > 0 do text, more = text:gsub("^(%d+)(%d%d%d)", "%1,%2") end
  return text
end

local function duration(s)
  return s < 0.01 and ("%.2f ms"):format(s * 1000) or s < 1 and ("%.0f ms"):format(s * 1000)
    or ("%.2f s"):format(s)
end

-- ---- one run of the workers ----

local START = [[
exec 2>/dev/null
dir=%s n=%d
while [ $n -gt 0 ]; do
  { %s --work "$dir" $n >>"$dir/said" 2>&1 || echo "worker $n: status $?" >>"$dir/said"; } &
  n=$((n - 1))
done
wait]]

local Run = {}
Run.__index = Run

function Run.start(dir, workers, url, key)
  local run = setmetatable({ dir = dir, workers = workers, began = now(), rates = {} }, Run)
  run.guarded, run.shown, run.drawn, run.printed = url ~= "", 0, 0, 0
  assert(succeeds("mkdir " .. quote(dir)))
  replace(dir .. "/plan", 0, my_pid() .. "\n" .. key .. "\n" .. url)
  write_counter(dir, 0, 0, "0")
  -- Nothing comes through the pipe: its end tells that the last worker is gone.
  run.pipe = assert(io.popen(START:format(quote(dir), workers, this_script())))
  return run
end

function Run:elapsed() return now() - self.began end

function Run:total(name)
  local sum = 0
  for n = 1, self.workers do sum = sum + self:count(name, n) end
  return sum
end

function Run:count(name, n)
  local f = io.open(self.dir .. "/" .. name .. "-" .. n)
  if not f then return 0 end
  local bytes = f:seek "end"
  f:close()
  return bytes
end

-- The largest p50 and the longest wait of all workers so far.
function Run:waits()
  local p50, longest = 0, 0
  for n = 1, self.workers do
    local a, b = (read(self.dir .. "/waits-" .. n) or "0 0"):match "(%S+) (%S+)"
    p50, longest = math.max(p50, tonumber(a)), math.max(longest, tonumber(b))
  end
  return p50, longest
end

function Run:rate_line(rate)
  local top, steps = 1, {}
  for _, r in ipairs(self.rates) do top = math.max(top, r) end
  for i, r in ipairs(self.rates) do steps[i] = STEPS[1 + math.floor(r / top * 7)] end
  return cyan(table.concat(steps, "", math.max(1, #steps - 49))) .. " " .. rate
end

function Run:status(count)
  local p50, longest = self:waits()
  local text = ("counter %s"):format(number(count))
  if not self.guarded then return text end
  return text .. (", waits: half under %s, longest %s"):format(duration(p50), duration(longest))
end

function Run:frame(count, rate)
  local most, lines = 1, {}
  local counts = {}
  for n = 1, self.workers do
    counts[n] = self:count("acked", n)
    most = math.max(most, counts[n])
  end
  for n = 1, self.workers do
    local dead = n == self.killed
    local bar = BLOCK:rep(math.floor(counts[n] / most * 40))
    lines[n] = ("  worker %-2d %9s %s%s"):format(n, number(counts[n]), (dead and dim or green)(bar),
      dead and red " killed" or "")
  end
  lines[#lines + 1] = ("  %5.1f s  %s"):format(self:elapsed(), self:rate_line(rate))
  lines[#lines + 1] = "           " .. self:status(count)
  return lines
end

-- Cursor up over the last frame.
function Run:rewind() return self.drawn > 0 and ("\27[%dA"):format(self.drawn) or "" end

function Run:draw(count, rate)
  local lines = self:frame(count, rate)
  io.stdout:write(self:rewind(), table.concat(lines, "\27[K\n"), "\27[K\n")
  io.stdout:flush()
  self.drawn = #lines
end

-- A line that stays, above the frame.
function Run:say(...)
  local text = (...):format(select(2, ...))
  io.stdout:write(self:rewind(), ("  %5.1f s  "):format(self:elapsed()), text,
    live and "\27[K\n\27[J" or "\n")
  io.stdout:flush()
  self.drawn = 0
end

-- Ten times a second a look at what was done; a frame each time, or a line each second.
function Run:show()
  local at, count = self:elapsed(), read_counter(self.dir)
  local last = self.last or { at = 0, count = 0 }
  if at - last.at < 0.1 then return end
  local rate = (count - last.count) / (at - last.at)
  self.rates[#self.rates + 1] = math.max(rate, 0)
  self.last = { at = at, count = count }
  if live then return self:draw(count, number(math.max(rate, 0)) .. "/s") end
  if at - self.printed < 1 then return end
  self:say("%s increments/s, %s", number(math.max(count - self.shown, 0) / (at - self.printed)),
    self:status(count))
  self.printed, self.shown = at, count
end

-- What the workers said, if one of them ended badly.
function Run:trouble()
  local said = read(self.dir .. "/said") or ""
  for n, status in said:gmatch "worker (%d+): status (%d+)" do
    if tonumber(n) ~= self.killed or status ~= "137" then return said end
  end
end

-- Shows the run until `happened` returns something, or for that many seconds.
function Run:play(seconds, happened)
  local stop = now() + seconds
  repeat
    sleep(happened and 0.01 or 0.05)
    self:show()
    local what = happened and happened()
    if what then return what end
  until now() >= stop or self:trouble()
end

-- Ends the workers; returns the totals, and what went wrong with a worker.
function Run:finish()
  local seconds = self:elapsed()
  replace(self.dir .. "/stop", 0, "")
  self.pipe:read "*a"
  self.pipe:close()
  local count = read_counter(self.dir)
  local average = number(count / seconds)
  if live then
    self:draw(count, average .. "/s on average")
  else
    self:say("%s increments/s on average, %s", average, self:status(count))
  end
  return { started = self:total "started", acked = self:total "acked", counter = count,
    trouble = self:trouble() }
end

-- ---- the show ----

local function kill_holder(run, victim)
  replace(run.dir .. "/hang-" .. victim, 0, "")
  local hanging = run:play(PATIENCE, function() return read(run.dir .. "/hanging") end)
  if not hanging then return nil, "worker " .. victim .. " never got the lock" end
  local pid, token = hanging:match "(%d+) (%d+)"
  run:say("worker %d hangs while it holds the lock (token %s)", victim, token)
  run:play(0.5)
  local at = now()
  if not succeeds("kill -9 " .. pid) then return nil, "worker " .. victim .. " was gone" end
  run.killed = victim
  run:say(red "kill -9 %s: worker %d is dead, the lock was never released", pid, victim)
  return at, tonumber(token)
end

local function await_heir(run, killed_at, token)
  local heir, heir_token
  run:play(PATIENCE, function()
    local _, by, seen = read_counter(run.dir)
    if seen > token then heir, heir_token = by, seen end
    return heir
  end)
  if not heir then return nil end
  run:say(green "worker %d took over %.2f s after the kill (token %.0f)", heir, now() - killed_at,
    heir_token)
  return true
end

local function guarded_run(o, dir)
  local run = Run.start(dir, o.workers, o.url, o.key)
  local function play()
    run:play(o.seconds * 0.4)
    local killed_at, token = kill_holder(run, math.min(2, o.workers))
    if not killed_at then return token end
    if not await_heir(run, killed_at, token) then return "nobody took over" end
    run:play(math.max(o.seconds - run:elapsed(), o.seconds * 0.3))
  end
  local ok, trouble = pcall(play)
  local result = run:finish()
  if not ok then error(trouble, 0) end
  result.trouble = result.trouble or trouble
  return result
end

local function free_run(o, dir)
  local run = Run.start(dir, o.workers, "", "")
  local ok, err = pcall(run.play, run, o.seconds / 3)
  local result = run:finish()
  if not ok then error(err, 0) end
  return result
end

local function say_trouble(r)
  if r.trouble then print(red("  went wrong: ") .. r.trouble) end
end

local function verdict(r)
  local fine = r.acked <= r.counter and r.counter <= r.started
  print(("\n  acknowledged %s <= counter %s <= started %s: %s"):format(number(r.acked),
    number(r.counter), number(r.started), fine and green "nothing lost" or red "NOT SO"))
  say_trouble(r)
  return fine and r.acked > 0 and not r.trouble
end

local function contrast(r)
  local lost = r.acked - r.counter
  print(("\n  acknowledged %s, but counter %s: %s"):format(number(r.acked), number(r.counter),
    lost > 0 and red(number(lost) .. " updates lost") or "none lost, by luck"))
  say_trouble(r)
  return not r.trouble
end

local function explain(o)
  local freed = o.is_local and "by the kernel, at once"
    or ("by the server, when its ttl of %d s was over"):format(TTL)
  local other = o.is_local and "the same on Redis: --url redis://127.0.0.1:6379"
    or "the same without a server: --url local:"
  print("\n" .. bold "What you saw")
  print "  Under the lock every acknowledged increment counted. The killed worker's lock"
  print("  was freed " .. freed .. ", and the others went on.")
  print "  Next: README.md; examples/02-guarded-function.lua; dlock run KEY -- command;"
  print("  " .. other)
end

local function show(o, dir, server)
  print(bold(("dlock %s: %d processes count in one file, a lock lets one at a time do it"):format(
    dlock._VERSION, o.workers)))
  print(dim("  " .. server) .. "\n")
  if not verdict(guarded_run(o, dir .. "/guarded")) then return false end
  print("\n" .. bold "The same without the lock" .. "\n")
  if not contrast(free_run(o, dir .. "/free")) then return false end
  explain(o)
  return true
end

-- ---- command line ----

local USAGE = "usage: 01-guarded-counter.lua [--url URL] [--seconds N] [--workers N]"

local function fail(status, ...)
  io.stderr:write(...)
  io.stderr:write "\n"
  os.exit(status)
end

local function number_option(o, name, least, most, step)
  local n = tonumber(o[name])
  if not n or n < least or n > most or n % step ~= 0 then
    fail(64, ("--%s must be a number in %g .. %g, got %s"):format(name, least, most, o[name]))
  end
  o[name] = n
end

local function options()
  if arg[1] == "--help" or arg[1] == "-h" then
    print(USAGE)
    os.exit(0)
  end
  local o = { url = os.getenv "DLOCK_URL" or "local:", seconds = 6, workers = 4 }
  for i = 1, #arg, 2 do
    local name = arg[i]:match "^%-%-(%l+)$"
    if not o[name] then fail(64, "unknown option ", arg[i], "\n", USAGE) end
    if not arg[i + 1] then fail(64, arg[i], " needs a value\n", USAGE) end
    o[name] = arg[i + 1]
  end
  number_option(o, "seconds", 0.5, 3600, 0.5)
  number_option(o, "workers", 2, 16, 1)
  o.is_local = o.url:find "^local:" ~= nil
  return o
end

-- Who answers. The URL itself is shown nowhere: it may hold a password.
local function check_server(url)
  local valid, client, message = pcall(dlock.connect, url)
  if not valid then fail(64, (client:gsub("^%S+:%d+: ", ""))) end
  local server
  if client then server, message = client:ping() end
  return server or fail(1, message)
end

local o = options()
local server = check_server(o.url)
local dir = capture("mktemp -d"):match "%S+"
o.key = "example:" .. dir
local ok, fine = pcall(show, o, dir, server)
os.execute("rm -rf " .. quote(dir))
if not ok then fail(1, tostring(fine)) end
os.exit(fine and 0 or 1)
