-- Acquire and release of a free local lock, through Lua, against a bare kernel
-- file lock in C: open, lock, write, unlock, close. No target: for the record.

local bench = require "spec.bench.support.bench"
local dlock = require "dlock"

local lib = bench.lib
local BLOCK, ROUNDS = 10, 500

bench.run("local", function(server)
  local client = assert(dlock.connect(server.url, { wait = 0 }))
  local floor = server.dir .. "/floor"
  local us = bench.take_turns(ROUNDS, {
    function() return lib.file_pairs(floor, ("x"):rep(64), BLOCK) / BLOCK end,
    function()
      local began = lib.now_us()
      for _ = 1, BLOCK do assert(assert(client:acquire "pair"):release()) end
      return (lib.now_us() - began) / BLOCK
    end,
  })
  bench.ratio_row("pair / open, lock, write, unlock, close", nil, us[1], us[2])
  client:close()
end)
