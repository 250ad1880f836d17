-- Callers of one process hand a lock over among themselves, at most eight times
-- in a row; then it is released, so that another process gets its turn. But the
-- next caller in the process tried again at once, and always came before the
-- other process had read its wake-up: it waited as long as the callers went on.
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

describe("a waiter beside a process with many callers", function()
  local server
  local open = rig.new(function() return server end)
  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)

  it("gets its turn", function()
    local many, other = open.connect(server.url), open.connect(server.url)
    local stop = false
    for _ = 1, 4 do
      tasks.start(function()
        while not stop do
          local lock = assert(many:acquire("k", { wait = 30 }))
          tasks.sleep(0.001)
          assert.is_true(lock:release())
        end
      end)
    end
    tasks.sleep(0.1)
    local slowest = 0
    for _ = 1, helpers.scaled(200, 10) do
      local took, lock = helpers.timed(other.acquire, other, "k", { wait = 20 })
      assert.truthy(lock)
      assert.is_true(lock:release())
      slowest = math.max(slowest, took)
    end
    stop = true
    tasks.run(10)
    assert(slowest < helpers.bound(1.5), "the slowest waited " .. slowest)
  end)
end)
