-- What happens to a lock, as it happens: on_event, ensure, wait_lost.
--
--   lua examples/05-events.lua     (DLOCK_URL=redis://... for a server)
local dlock = require "dlock"

local url = os.getenv "DLOCK_URL" or "local:"

-- Called inside calls on the client and its locks, never from another thread.
local function on_event(event)
  print(("  %s  event %s %s %s"):format(os.date("%H:%M:%S", math.floor(event.time)), event.type,
    event.key or "", event.reason or event.message or ""))
end

local client = assert(dlock.connect(url, { ttl = 3, namespace = "example:", on_event = on_event }))

local lock, err, code = client:acquire("deploy", { wait = 5 })
if not lock then
  print(("no lock: %s (%s)"):format(err, code))
  os.exit(1)
end
print(("deploy is ours for %s s, and renewed while we live"):format(lock:remaining()))

-- Before a step that must not be cut short.
local safe, why = lock:ensure(2)
print(safe and "2 s are left at least: copying files" or "better not begin: " .. why)

-- Nothing happens for a while ...
local reason
reason, err, code = lock:wait_lost(0.5)
print(reason and "lost: " .. reason or ("after 0.5 s: %s (%s)"):format(err, code))

-- ... and then an administrator frees the lock, as by `dlock break`. A kernel lock's holder
-- learns of it at once, a server's at its next renewal.
local admin = assert(dlock.connect(url, { namespace = "example:" }))
assert(admin:break_lock "deploy")
reason, err, code = lock:wait_lost(5)
print(reason and "lost: " .. reason or ("%s (%s)"):format(err, code))

local ok
ok, err, code = lock:release()
print(ok and "released" or ("release says: %s (%s)"):format(err, code))
client:close()
admin:close()
