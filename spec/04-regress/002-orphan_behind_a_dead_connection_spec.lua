-- The release that follows a given-up acquire goes out behind it on the same
-- connection, where the order is certain. When that connection led nowhere (a
-- peer that is gone without a word, a firewall that forgot it), the release
-- waited for its answer without an end, and was never tried over another one:
-- the key stayed for its whole ttl.
local helpers = require "spec.helpers"
local proxies = require "spec.support.proxy"
local redis = require "spec.support.redis"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

describe("an acquire whose connection went dead after the request", function()
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

  it("is released over another one", function()
    open.keep { close = function() proxy:cut() end }
    for where, runtime in pairs { lane = "thread", loop = tasks.runtime } do
      local client = open.connect(proxy.url, { runtime = runtime, timeout = 0.2 })
      assert(assert(client:acquire("warm")):release())
      proxy:rule("dead", { match = "\r\n" .. where .. "\r\n" })
      local began = helpers.now()
      local lock, _, code = client:acquire(where, { ttl = 3, wait = 0 })
      assert.is_nil(lock)
      assert.are.equal("indeterminate", code)
      assert.are.equal(1, server:call("EXISTS", where))
      rig.key_gone(server, where, began, 1.5)
    end
  end)
end)
