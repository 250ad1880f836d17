-- What 100 waiters of one process cost the server while nothing happens: the
-- commands a second that it is sent, by a dlock holder and by one that uses
-- plain SET NX and so will wake nobody.

local bench = require "spec.bench.support.bench"
local core = require "dlock.core"

local helpers = bench.helpers
local WAITERS, SECONDS = 100, helpers.scaled(60, 6)
local OPTIONS = { ttl = 30, timeout = 2, max_hold = math.huge, renew = true }

local HOLDER = [[
local client = assert(require "dlock".connect(ARGS[1]))
local lock = assert(client:acquire(ARGS[2]))
io.stdout:write "held\n"
io.stdout:flush()
require "dlkproc".pause(1e9)
]]

local function start_waiters(client, key, bell)
  local ops = {}
  for i = 1, WAITERS do ops[i] = assert(client:acquire(key, OPTIONS, math.huge, bell)) end
  return ops
end

local function end_waiters(ops)
  for _, op in ipairs(ops) do
    if op:wait(0) then error("a waiter got the lock: " .. tostring(op:result())) end
    op:cancel()
    op:close()
  end
end

local function measure(what, target, server, client, bell, key)
  local ops = start_waiters(client, key, bell)
  bench.sleep(1)
  local watch = bench.watch(server)
  bench.sleep(SECONDS)
  local commands = watch:commands()
  watch:close()
  assert(client:stats().waiting == WAITERS, "not all of them wait")
  bench.value_row(what, target, #commands / SECONDS, "commands/s")
  bench.note(("%s in %g s"):format(bench.kinds(commands), SECONDS))
  end_waiters(ops)
end

bench.run("redis", function(server)
  local client = assert(core.connect { url = server.url, ttl = 30, timeout = 2,
    connect_timeout = 2 })
  local bell = assert(core.bell())
  local holder = helpers.spawn_lua(HOLDER, server.url, "ours")
  holder:expect "held"
  local what = WAITERS .. " waiters in a process, a %s client holds"
  measure(what:format "dlock", 2, server, client, bell, "ours")
  holder:close()
  assert(server:call("SET", "plain", "somebody", "NX", "PX", "600000"))
  measure(what:format "plain", 10, server, client, bell, "plain")
end)
