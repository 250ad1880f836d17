-- 10,000 locks held by one process: what keeping them alive costs it, over whole
-- periods of renewal (ttl / 3), one at least.

local bench = require "spec.bench.support.bench"
local core = require "dlock.core"

local lib, helpers = bench.lib, bench.helpers
local LOCKS, TTL = 10000, 30
local PERIOD = TTL / 3
local SECONDS = PERIOD * math.max(1, math.ceil(60 * helpers.scale / PERIOD))
local OPTIONS = { ttl = TTL, timeout = 10, max_hold = math.huge, renew = true }

local function finish(op)
  while not op:wait(1) do end
  local result, err = op:result()
  op:close()
  return assert(result, err)
end

local function hold(client, bell)
  local ops, locks = {}, {}
  for i = 1, LOCKS do ops[i] = assert(client:acquire("held-" .. i, OPTIONS, 10, bell)) end
  for i, op in ipairs(ops) do locks[i] = finish(op) end
  return locks
end

local function count_lost(locks)
  local lost = 0
  for _, lock in ipairs(locks) do
    if not lock:is_held() then lost = lost + 1 end
  end
  return lost
end

-- Connections of clients, without the one that asks.
local function connections(server)
  local _, n = assert(server:call("CLIENT", "LIST")):gsub("id=%d+ ", "")
  return n - 1
end

local function server_cpu(server)
  return server:info "used_cpu_user" + server:info "used_cpu_sys"
end

bench.run("redis", function(server)
  local client = assert(core.connect { url = server.url, ttl = TTL, timeout = 10,
    connect_timeout = 2 })
  local bell = assert(core.bell())
  local began = lib.now_us()
  local locks = hold(client, bell)
  bench.note(("%d acquired in %.2f s"):format(LOCKS, (lib.now_us() - began) / 1e6))
  bench.sleep(1)

  local theirs, watch = server_cpu(server), bench.watch(server)
  local cpu, renewed = lib.cpu_us(), client:stats().renewed
  bench.sleep(SECONDS)
  cpu, renewed = (lib.cpu_us() - cpu) / 1e6, client:stats().renewed - renewed
  local commands = watch:commands()
  watch:close()
  theirs = server_cpu(server) - theirs

  bench.value_row(("%d held, ttl %g s, for %g s: CPU"):format(LOCKS, TTL, SECONDS), 2,
    100 * cpu / SECONDS, "% of a core")
  bench.value_row("  lost", 0, count_lost(locks), "")
  bench.value_row("  renewals", nil, renewed / SECONDS, "a second")
  bench.value_row("  locks renewed by one request", nil, renewed / math.max(1, #commands), "")
  bench.value_row("  connections", nil, connections(server), "")
  bench.note(("%s; server %.1f %% of a core"):format(bench.kinds(commands),
    100 * theirs / SECONDS))
  finish(client:close_op())
end)
