-- A lock with a ttl cannot stop a holder that was paused past it (SIGSTOP, swapping, a moved
-- virtual machine) and wakes up in the middle of a write. The resource can: each grant
-- has a larger token than the one before, and the resource refuses a smaller one.
--
--   lua examples/03-fencing-token.lua     (DLOCK_URL=redis://... for a server)
local dlock = require "dlock"

local url = os.getenv "DLOCK_URL" or "local:"
local client = assert(dlock.connect(url, { wait = 5, namespace = "example:" }))
local path = os.tmpname()

-- Tokens are decimal numbers of any length.
local function smaller(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

-- The resource: a file whose first line is the largest token seen. A database would do it in
-- one statement: UPDATE ... SET token = :t ... WHERE token <= :t
local function write(token, text)
  local f = assert(io.open(path))
  local seen = f:read "*l" or "0"
  f:close()
  if smaller(token, seen) then return nil, ("token %s is older than %s"):format(token, seen) end
  f = assert(io.open(path, "w"))
  f:write(token, "\n", text, "\n")
  f:close()
  return true
end

local function try_write(who, lock, text)
  local ok, why = write(lock.token_string, text)
  print(("%s writes with token %s: %s"):format(who, lock.token_string,
    ok and "accepted" or "refused, " .. why))
end

-- `renew = false` makes the pause: nothing keeps this lock alive.
local slow = assert(client:acquire("report", { ttl = 0.3, renew = false }))
print("the slow worker has the lock, and is paused for longer than its ttl")

local quick, err, code = client:acquire("report")
if not quick then error(("no lock: %s (%s)"):format(err, code)) end
try_write("the quick worker", quick, "new")
assert(quick:release())

try_write("the slow worker ", slow, "stale") -- wakes up, and does not ask is_held()
print("its release says: " .. select(2, slow:release()))
client:close()
os.remove(path)
