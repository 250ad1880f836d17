-- One key passed among 16 processes, each of which holds it for a millisecond
-- and then lets somebody else in first: how long from the start of a release to
-- the next holder, against a token passed by BLPOP and LPUSH, with redis-py's
-- Lock beside it. The three take turns.

local bench = require "spec.bench.support.bench"

local lib, helpers = bench.lib, bench.helpers
local PROCESSES, HOLD_US = 16, 1000
local ROUNDS, WARM_UP_MS, TURN_MS, COUNT_MS = 5, 200, 1200, 400

local KINDS = {
  { name = "BLPOP/LPUSH token", where = "port", argv = { bench.program "token" } },
  { name = "dlock", where = "url", argv = { helpers.lua, "spec/bench/support/worker.lua" } },
  { name = "redis-py Lock", where = "port", needs = "redis",
    argv = { helpers.python, "spec/bench/support/redispy.py" } },
}

-- What is not installed is left out, aloud.
local function installed(kinds)
  local list = {}
  for _, kind in ipairs(kinds) do
    if kind.needs and helpers.run(helpers.python, "-c", "import " .. kind.needs) ~= 0 then
      bench.note(kind.name .. " is left out: " .. helpers.python .. " cannot import "
        .. kind.needs)
    else
      list[#list + 1] = kind
    end
  end
  return list
end

local function start(kind, server, path)
  kind.processes = {}
  for i = 1, PROCESSES do
    local argv = { stdin = "pipe", stderr = "inherit" }
    for _, part in ipairs(kind.argv) do argv[#argv + 1] = part end
    argv[#argv + 1] = tostring(server[kind.where])
    argv[#argv + 1] = path
    argv[#argv + 1] = tostring(HOLD_US)
    kind.processes[i] = helpers.spawn(argv)
  end
  kind.rounds = { p50 = {}, p99 = {}, per_second = {} }
end

local function reset(server, share)
  server:call("DEL", "hand-off")
  server:call("DEL", "bench:token")
  server:call("LPUSH", "bench:token", "1")
  share:reset()
end

-- One turn of all processes of a kind; returns how many grants there were.
local function turn(kind, ms)
  for _, p in ipairs(kind.processes) do assert(p:write(ms .. "\n")) end
  local n = 0
  for _, p in ipairs(kind.processes) do n = n + tonumber((p:expect("done (%d+)\n", 30))) end
  return n
end

local function round(kind, server, share)
  reset(server, share)
  local n = turn(kind, TURN_MS)
  local _, p50, p99, violations = share:sum()
  local r = kind.rounds
  r.p50[#r.p50 + 1], r.p99[#r.p99 + 1] = p50, p99
  r.per_second[#r.per_second + 1] = n / TURN_MS * 1000
  if violations > 0 then bench.note(kind.name .. ": held twice, " .. violations .. " times") end
end

local function report(kind, floor, commands, grants)
  local r = kind.rounds
  if kind ~= floor then
    local target = kind.name == "dlock" and 2 or nil
    bench.ratio_row(kind.name .. ", p50 / " .. floor.name, target, floor.rounds.p50, r.p50)
    bench.ratio_row(kind.name .. ", p99 / " .. floor.name, nil, floor.rounds.p99, r.p99)
  end
  bench.note(("%s: %.0f acquisitions a second, %.2f commands each (%d: %s)"):format(kind.name,
    bench.median(r.per_second), #commands / grants, grants, bench.kinds(commands)))
end

bench.run("redis", function(server)
  local share, path = lib.share()
  local kinds = installed(KINDS)
  for _, kind in ipairs(kinds) do
    start(kind, server, path)
    reset(server, share)
    turn(kind, WARM_UP_MS)
  end
  for _ = 1, ROUNDS do
    for _, kind in ipairs(kinds) do round(kind, server, share) end
  end
  for _, kind in ipairs(kinds) do
    reset(server, share)
    local watch = bench.watch(server)
    local grants = turn(kind, COUNT_MS)
    local commands = watch:commands()
    watch:close()
    report(kind, kinds[1], commands, grants)
  end
  for _, kind in ipairs(kinds) do
    for _, p in ipairs(kind.processes) do p:close() end
  end
end)
