-- A function under a lock: client:with acquires, calls it, and releases, however it ends.
--
--   lua examples/02-guarded-function.lua     (DLOCK_URL=redis://... for a server)
local dlock = require "dlock"

local url = os.getenv "DLOCK_URL" or "local:"
local client = assert(dlock.connect(url, { ttl = 5, wait = 2, namespace = "example:" }))

-- Work in steps looks between them whether the lock is still ours.
local function pay(lock, amount, steps)
  for step = 1, steps do
    if not lock:is_held() then return ("stopped before step %d of %d"):format(step, steps) end
    os.execute "sleep 0.1" -- the work
  end
  return ("paid %d under token %s"):format(amount, lock.token_string)
end

local function report(what, ok, result, code, returned)
  if ok then
    print(what .. ": " .. result)
  elseif code == "lost" then -- it ran, but somebody else may have run beside it: check its work
    print(("%s: lost while it ran (%s); it returned: %s"):format(what, result, returned))
  else -- it was not called: "held", "timeout", "unavailable", ...
    print(("%s: not called, %s (%s)"):format(what, code, result))
  end
end

report("a payment", client:with("account:7", pay, 100, 3))

client:with("account:7", function()
  report("another one meanwhile", client:with("account:7", { wait = 0 }, pay, 200, 3))
end)

-- max_hold bounds how long a function that hangs keeps the others out.
report("a slow one", client:with("account:7", { max_hold = 0.3 }, pay, 300, 20))

-- An error goes through unchanged, and the lock is free again.
local ok, err = pcall(client.with, client, "account:7", function() error("no money", 0) end)
print(("one that raises: %s (%s)"):format(ok and "no error" or "error", tostring(err)))
report("the next", client:with("account:7", pay, 400, 1))
client:close()
