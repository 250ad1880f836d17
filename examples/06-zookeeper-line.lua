-- A line of waiters on ZooKeeper, seen from outside: served in order, and shared with
-- Curator and kazoo, which may stand in it too.
--
--   lua examples/06-zookeeper-line.lua zookeeper://127.0.0.1:2181
local dlock = require "dlock"

local url = arg[1] or os.getenv "DLOCK_URL" or "zookeeper://127.0.0.1:2181"
-- The session's timeout: how long the lock of a killed process may stay.
local client, err, code = dlock.connect(url, { ttl = 10, wait = 5, zk_dialect = "both" })
if not client then
  print(("no client: %s (%s)"):format(err, code))
  os.exit(1)
end

local lock
lock, err, code = client:acquire "example/line" -- the nodes are below /example/line
if not lock then
  print(("no lock: %s (%s)"):format(err, code))
  os.exit(1)
end
print(("ours for %.1f s at a time, of a session of %g s; token %s"):format(lock:remaining(),
  lock.ttl, lock.token_string))

-- Another client, which does not wait: it leaves no place in the line.
local other = assert(dlock.connect(url, { owner = "another", wait = 0 }))
local none, why = other:acquire "example/line"
print("another client: " .. (none and "got it, which must not be" or why))

local info = assert(other:inspect "example/line")
print(("held by %s, %d waiting"):format(info.owner, #info.waiters))

print("released: " .. tostring(lock:release()))
local again = assert(other:acquire "example/line")
print("the next token is larger: " .. tostring(again.token > lock.token))
again:release()
