-- Acquire and release of a free lock on Redis, through Lua, against the same two
-- requests, byte for byte, over bare hiredis in the same process; and against
-- SET NX PX with compare-and-delete. They take turns in blocks of ten pairs.

local bench = require "spec.bench.support.bench"
local dlock = require "dlock"

local lib = bench.lib
local BLOCK = 10
local ROUNDS = 500
local HELD = 1000
local TTL = 3

local COMPARE_AND_DELETE =
  "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

-- The same commands for a key of the same length, so that the two never meet.
local function for_key(commands, from, to)
  local list = {}
  for i, command in ipairs(commands) do
    list[i] = {}
    for k, part in ipairs(command) do list[i][k] = part:gsub(from, to) end
  end
  return list
end

-- What one acquire and one release send, taken off the wire.
local function requests(server, client, key)
  for _ = 1, 3 do assert(assert(client:acquire(key)):release()) end
  local watch = bench.watch(server)
  local lock = assert(client:acquire(key))
  local acquire = watch:commands()
  assert(lock:release())
  local release = watch:commands()
  watch:close()
  return acquire, release
end

local function bare_pair(server, client)
  local acquire, release = requests(server, client, "pair-s")
  bench.note(("a pair sends %s; %s"):format(bench.kinds(acquire), bench.kinds(release)))
  return lib.pair(server.port, for_key(acquire, "pair%-s", "pair-f"),
    for_key(release, "pair%-s", "pair-f"))
end

local function plain_pair(server)
  local sha = assert(server:call("SCRIPT", "LOAD", COMPARE_AND_DELETE))
  local owner = ("0123456789abcdef"):rep(2)
  return lib.pair(server.port, { { "SET", "pair-p", owner, "NX", "PX", "30000" } },
    { { "EVALSHA", sha, "1", "pair-p", owner } })
end

local function our_block(client)
  local began = lib.now_us()
  for _ = 1, BLOCK do
    local lock = assert(client:acquire "pair-s")
    assert(lock:release())
  end
  return (lib.now_us() - began) / BLOCK
end

local function measure(what, bare, plain, client)
  local function block_of(pair)
    return function() return pair:run(BLOCK) / BLOCK end
  end
  local us = bench.take_turns(ROUNDS, {
    block_of(bare), block_of(plain), function() return our_block(client) end,
  })
  bench.ratio_row(what .. " / same requests, bare", 1.10, us[1], us[3])
  bench.ratio_row(what .. " / SET NX + cmp-and-del", 1.25, us[2], us[3])
  bench.ratio_row("  same requests, bare / SET NX + cmp-and-del", nil, us[2], us[1])
end

local function hold_many(client)
  local locks = {}
  for i = 1, HELD do locks[i] = assert(client:acquire("held-" .. i, { ttl = TTL })) end
  return locks
end

local function count_lost(locks)
  local lost = 0
  for _, lock in ipairs(locks) do
    if not lock:is_held() then lost = lost + 1 end
  end
  return lost
end

bench.run("redis", function(server)
  local client = assert(dlock.connect(server.url, { wait = 0 }))
  local bare, plain = bare_pair(server, client), plain_pair(server)
  bench.apart(server)
  measure("pair", bare, plain, client)

  local locks = hold_many(client)
  local began, renewed = bench.helpers.now(), client:stats().renewed
  measure(("pair, %d held"):format(HELD), bare, plain, client)
  local left = 2 * TTL - (bench.helpers.now() - began)
  if left > 0 then bench.sleep(left) end
  local seconds = bench.helpers.now() - began
  bench.value_row(("  of the %d (ttl %g s) lost"):format(HELD, TTL), 0, count_lost(locks), "")
  bench.value_row("  renewals", nil, (client:stats().renewed - renewed) / seconds, "a second")
  client:close()
end)
