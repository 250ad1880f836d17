-- time limit: 900 s
-- Many locks held for long, and many pairs one after the other. Full length by
-- `make soak`; a twentieth of it otherwise.
local dlock = require "dlock"
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"

describe("many held locks", function()
  it("are all renewed in batches over one connection, none is lost", function()
    local server = redis.start()
    local n = helpers.scaled(10000, 300)
    local ttl = math.max(3, 30 * helpers.scale)
    local hold = 2 * ttl
    local lost = 0
    local client = assert(dlock.connect(server.url, { ttl = ttl, timeout = helpers.bound(2),
      on_event = function(e)
        if e.type == "lost" or e.type == "renew_failed" then lost = lost + 1 end
      end }))
    local locks = {}
    for i = 1, n do locks[i] = assert(client:acquire("lock " .. i)) end
    local before = client:stats()
    local stop = helpers.now() + hold
    while helpers.now() < stop do
      client:poll()
      helpers.proc.pause(100)
    end
    for i = 1, n do assert(locks[i]:is_held(), locks[i]:lost_reason()) end
    local after = client:stats()
    local renewed, requests = after.renewed - before.renewed, after.requests - before.requests
    assert.equal(0, lost)
    assert(renewed >= n * 4, renewed .. " renewals of " .. n)
    assert(renewed <= n * (hold / (ttl / 3) + 2), renewed .. " renewals of " .. n)
    -- At most 64 in one, and not far below: 10,000 locks taken one after the other.
    assert(requests >= renewed / 64 and requests <= renewed / 8, renewed .. " in " .. requests)
    -- A lane, the loop's connection, and ours that asks.
    local _, clients = server:call("CLIENT", "LIST"):gsub("id=%d+ addr", "")
    assert(clients <= 3, clients .. " connections")
    assert(client:close())
    assert.same({}, server:leftovers())
    server:stop()
  end)
end)

helpers.each_backend(function(name, backend)
describe("on " .. name, function()
  it("very many pairs leave the memory flat after the first ones", function()
    local fixture = backend.start()
    local status, out = helpers.run_lua([[
      local dlock = require "dlock"
      local client = assert(dlock.connect(ARGS[1], { on_event = function() end }))
      local function pages()
        collectgarbage()
        collectgarbage()
        local f = assert(io.open "/proc/self/statm")
        local _, resident = f:read("*n", "*n")
        f:close()
        return resident
      end
      local n, first = tonumber(ARGS[2]), tonumber(ARGS[3])
      local base
      for i = 1, n do
        local lock = assert(client:acquire("k" .. i % 7))
        assert(lock:release())
        if i == first then base = pages() end
      end
      print(pages() - base)
    ]], fixture.url, tostring(helpers.scaled(backend.slow and 100000 or 1000000, 4000)),
      tostring(backend.slow and 2000 or 10000))
    assert.equal(0, status, out)
    local grown = tonumber(out:match "%-?%d+")
    -- Sanitizers keep freed memory aside, so only the plain build is judged.
    if helpers.under == "" then assert(grown <= 64, grown .. " pages more") end
    fixture:stop()
  end)
end)
end)
