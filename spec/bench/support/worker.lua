-- worker.lua URL SHARE HOLD_US: one of the processes of a hand-off run, with
-- dlock. The turns are those of token.c.

local dlock = require "dlock"
local lib = require "dlkbench"

local url, path, hold_us = arg[1], arg[2], tonumber(arg[3])
local share = lib.share(path)
local client = assert(dlock.connect(url, { ttl = 10, retry = false }))

local function turn(seconds)
  local until_us, n = lib.now_us() + seconds * 1e6, 0
  while true do
    local left = (until_us - lib.now_us()) / 1e6
    if left <= 0 then return n end
    local lock, err, code = client:acquire("hand-off", { wait = left })
    if lock then
      share:enter()
      lib.nap_us(hold_us)
      local grants = share:leave()
      assert(lock:release())
      share:after_you(grants, (until_us - lib.now_us()) / 1e6)
      n = n + 1
    else
      assert(code == "timeout" or code == "held", err)
    end
  end
end

io.stdout:setvbuf "line"
for line in io.lines() do print(("done %d"):format(turn(tonumber(line) / 1000))) end
