-- What the benches share: cores that stay awake, a server, one table, and the
-- counting of commands. Nothing here asserts a speed: a miss is printed as "over".

local dlkbench = require "dlkbench"
local fixtures = require "spec.support.fixtures"
local helpers = require "spec.helpers"

local proc = helpers.proc

local M = { lib = dlkbench, helpers = helpers }

local PROGRAMS = assert(os.getenv "DLOCK_BENCH", "run benches by make bench")
function M.program(name) return PROGRAMS .. "/" .. name end

-- ---- numbers ----

--- The value below which `share` of the list lies.
function M.quantile(list, share)
  local sorted = {}
  for i, v in ipairs(list) do sorted[i] = v end
  table.sort(sorted)
  local at = 1 + (#sorted - 1) * share
  local low = math.floor(at)
  local high = math.min(low + 1, #sorted)
  return sorted[low] + (sorted[high] - sorted[low]) * (at - low)
end

function M.median(list) return M.quantile(list, 0.5) end

-- ---- the table ----

local FORMAT = "%-48s %-22s %-8s %-4s %9s %9s"

local function say(...) io.stdout:write((FORMAT:format(...):gsub("%s+$", "")), "\n") end

-- "target", "ok" or "over"; nothing where there is no target.
local function verdict(value, target)
  if not target then return "", "" end
  return ("<= %g"):format(target), value <= target and "ok" or "over"
end

local function header() say("what", "ratio [quartiles]", "target", "", "floor us", "ours us") end

--- A row of ratios, one per round. `floor` and `ours` are microseconds per round.
function M.ratio_row(what, target, floor, ours)
  local ratios = {}
  for i, us in ipairs(ours) do ratios[i] = us / floor[i] end
  local middle = M.median(ratios)
  local bound, state = verdict(middle, target)
  say(what, ("%.2f [%.2f %.2f]"):format(middle, M.quantile(ratios, 0.25), M.quantile(ratios, 0.75)),
    bound, state, ("%.1f"):format(M.median(floor)), ("%.1f"):format(M.median(ours)))
end

--- A row of one number with its unit.
function M.value_row(what, target, value, unit)
  local bound, state = verdict(value, target)
  say(what, (value < 100 and "%.3g %s" or "%.0f %s"):format(value, unit), bound, state, "", "")
end

--- Text below a row.
function M.note(text) io.stdout:write("    ", text, "\n") end

-- ---- running ----

local function keep_awake()
  local spinner = helpers.spawn { M.program "spin", stdin = "" }
  spinner:expect "spinning"
  return spinner
end

--- Calls fn(server) with every core kept awake; the server is the fixture of that backend.
function M.run(backend, fn)
  io.stdout:setvbuf "line"
  local spinner = keep_awake()
  local server
  local ok, err = xpcall(function()
    server = fixtures[backend].start()
    header()
    fn(server)
  end, debug.traceback)
  spinner:close()
  if server then server:stop() end
  if not ok then
    io.stderr:write(err, "\n")
    os.exit(1)
  end
end

--- Puts the server on a core of its own and us on another. Where they are left to
-- the scheduler they meet on one core or do not, by what else runs, and a request
-- takes 20 us or 60; a real server is never on the core of its client. Threads
-- that we have started before stay free.
function M.apart(server)
  local theirs = dlkbench.pin(server.pid, -1)
  local mine = dlkbench.pin(0, 1)
  if mine == theirs then M.note "one core only: the server shares it with us" end
end

--- Calls each of the functions, which return microseconds, once a round, in
-- another order each time; returns one list of microseconds for each.
function M.take_turns(rounds, fns)
  local lists = {}
  for i = 1, #fns do lists[i] = {} end
  for round = 1, rounds do
    for k = 0, #fns - 1 do
      local i = (round + k) % #fns + 1
      lists[i][round] = fns[i]()
    end
  end
  return lists
end

-- ---- watching the server ----

local ESCAPES = { n = "\n", r = "\r", t = "\t", a = "\a", b = "\b" }

local function unquote(text)
  return (text:gsub("\\(.)(%x?%x?)", function(c, hex)
    if c == "x" then return string.char(tonumber(hex, 16)) end
    return (ESCAPES[c] or c) .. hex
  end))
end

-- The parts of a command as MONITOR shows it; nil when a script gave it.
local function parse(line)
  local from, rest = line:match "^[%d.]+ %[%d+ (.-)%] (.*)$"
  if not from or from == "lua" then return nil end
  local parts, at = {}, 1
  while true do
    local first = rest:find('"', at, true)
    if not first then return parts end
    local last = first + 1
    while rest:sub(last, last) ~= '"' do
      last = last + (rest:sub(last, last) == "\\" and 2 or 1)
    end
    parts[#parts + 1] = unquote(rest:sub(first + 1, last - 1))
    at = last + 1
  end
end

-- Marks the end of what a watch is to see.
local MARK = "dlock-bench-mark"

local Watch = {}
Watch.__index = Watch

--- Watches what clients send. Makes the server slower: count with it, do not time.
function M.watch(server)
  local w = setmetatable({ server = server, conn = server:connect() }, Watch)
  assert(w.conn:call "MONITOR")
  return w
end

--- The commands since the last call, without those inside scripts.
function Watch:commands()
  self.server:call("ECHO", MARK)
  local list = {}
  while true do
    local parts = parse((assert(self.conn:reply())))
    if parts and parts[2] == MARK then return list end
    list[#list + 1] = parts
  end
end

function Watch:close() self.conn:close() end

--- { "SET 12", "EVALSHA 7" ... }: which commands, how often.
function M.kinds(commands)
  local count, names = {}, {}
  for _, c in ipairs(commands) do
    local name = c[1]:upper()
    if not count[name] then names[#names + 1] = name end
    count[name] = (count[name] or 0) + 1
  end
  table.sort(names)
  for i, name in ipairs(names) do names[i] = name .. " " .. count[name] end
  return table.concat(names, ", ")
end

--- Sleeps on the bench's clock.
function M.sleep(seconds) proc.pause(seconds * 1000) end

return M
