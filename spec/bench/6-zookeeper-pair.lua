-- Acquire and release of a free lock on ZooKeeper, through Lua, against the same
-- requests over bare libzookeeper in the same process, in turns; and what Curator
-- and kazoo take for a pair on the same server. Nothing is flushed to disk here,
-- so the server's share is as small as it can be and ours shows most.

local bench = require "spec.bench.support.bench"
local dlock = require "dlock"
local floor = require "zkbench"
local peers = require "spec.support.zk_peers"

local lib = bench.lib
local BLOCK = 10
local ROUNDS = 100
local PEER_PAIRS = 500

if not floor.pair then
  bench.note "this build has no ZooKeeper"
  return
end

local function our_block(client)
  local began = lib.now_us()
  for _ = 1, BLOCK do assert(assert(client:acquire "pair-s"):release()) end
  return (lib.now_us() - began) / BLOCK
end

local function peer_us(peer)
  local us
  for _ = 1, 3 do -- the first runs warm it up
    peer:write(("bench %d\n"):format(PEER_PAIRS))
    us = tonumber((peer:expect("took (%d+)\n", 60)))
  end
  peer:close()
  return us
end

bench.run("zookeeper", function(server)
  local client = assert(dlock.connect(server.url, { wait = 0 }))
  local keep = assert(client:acquire "pair-f") -- makes its directory, and keeps it
  local bare = floor.pair(server.address, "/pair-f")
  our_block(client)
  bare:run(BLOCK)
  bench.apart(server)
  local us = bench.take_turns(ROUNDS, {
    function() return bare:run(BLOCK) / BLOCK end,
    function() return our_block(client) end,
  })
  bench.ratio_row("pair / same requests, bare libzookeeper", 1.15, us[1], us[2])
  keep:release()
  client:close()
  bench.value_row("  kazoo, a pair", nil, peer_us(peers.kazoo(server.address, "/kazoo")), "us")
  local curator = peers.curator(server.address, "/curator")
  bench.value_row("  Curator, a pair", nil, peer_us(curator), "us")
end)
