-- A blocked caller gave up an acquire whose reply was lost, while the watchdog
-- thread was awake. The lock's clean-up ran before the connection was the
-- watchdog's, found that it could not send yet, and nobody asked it again: the
-- key stayed for its whole ttl. It took a watchdog that had other work to do;
-- in a fresh process all went well.
local helpers = require "spec.helpers"
local proxies = require "spec.support.proxy"
local redis = require "spec.support.redis"
local rig = require "spec.support.rig"

describe("an acquire that a blocked caller gave up", function()
  local server, proxy
  local open = rig.new(function() return server end)
  setup(function()
    server = redis.start()
    proxy = proxies.start(server.port)
  end)
  teardown(function()
    proxy:stop()
    server:stop()
  end)

  it("leaves no key, also when the watchdog is awake", function()
    open.keep { close = function() proxy:cut() end }
    -- Keeps the watchdog busy with renewals.
    local other = open.connect(server.url)
    for i = 1, 20 do assert(other:acquire("busy" .. i, { ttl = 0.2 + i / 100 })) end
    local client = open.connect(proxy.url, { runtime = "thread", timeout = 0.1 })
    for round = 1, helpers.scaled(200, 10) do
      local key = "k" .. round
      assert(assert(client:acquire("warm")):release())
      proxy:rule("lose", { match = "\r\n" .. key .. "\r\n" })
      local lock, _, code = client:acquire(key, { ttl = 3, wait = 0 })
      assert.is_nil(lock)
      assert.are.equal("indeterminate", code)
      rig.key_gone(server, key, helpers.now(), 0.5)
    end
  end)
end)
