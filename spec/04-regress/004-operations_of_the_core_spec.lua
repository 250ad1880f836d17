-- The Lua side of operations. `close_op()` without a bell took the operation that
-- it was about to return for one, and raised. And `result()` of an operation that
-- was not done said "true": with a runtime whose `wait` came back too early, a
-- release that the server never saw looked like a good one.
local core = require "dlock.core"
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"

describe("an operation", function()
  local server, client, bell
  local options = { ttl = 5, timeout = 2, max_hold = math.huge, renew = true }

  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)
  before_each(function()
    bell = assert(core.bell())
    client = assert(core.connect { url = server.url, namespace = "", ttl = 5, timeout = 2,
      connect_timeout = 2 })
  end)
  after_each(function() client, bell = nil, nil end)
  helpers.no_leaks(function() return server end)

  local function finish(op)
    helpers.eventually(function() return op:wait(0.05) end, 5, "done")
    return op:result()
  end

  it("that closes needs no bell", function()
    assert.is_true(finish(client:close_op()))
    assert.is_true(finish(client:close_op(nil)))
  end)

  it("has no result before it is done", function()
    local lock = finish(client:acquire("k", options, 1, bell))
    server:freeze()
    local op = lock:release(2, bell)
    local ok, err = pcall(op.result, op)
    server:thaw()
    assert.is_false(ok)
    assert.matches("not done", err)
    assert.is_true(finish(op))
    finish(client:close_op(bell))
  end)
end)
