-- Hand-over from one waiter of a process to the next: first come, first served, with
-- a token each, and at most `local_handover` times before another process has its turn.

local dlock = require "dlock"
local fixtures = require "spec.support.fixtures"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

describe("local_handover", function()
  local server
  setup(function() server = fixtures.redis.start() end)
  teardown(function() server:stop() end)
  local r = rig.new(function() return server end)

  -- n coroutines in a line at one client, all behind a holder; who had it, in order, and tokens.
  local function line(client, n, name, order, tokens)
    for _ = 1, n do
      tasks.start(function()
        local lock = assert(client:acquire("k", { wait = 20 }))
        order[#order + 1], tokens[#tokens + 1] = name, lock.token
        assert(lock:release())
      end)
    end
  end

  local function run(limit, n)
    local ours = r.connect(server.url, { local_handover = limit })
    local theirs = r.connect(server.url)
    local first = assert(ours:acquire "k")
    local order, tokens = {}, {}
    line(ours, n, "ours", order, tokens)
    tasks.eventually(function() return ours:stats().waiting >= n end, 5, "ours wait")
    line(theirs, 1, "theirs", order, tokens)
    -- In the server's line, so that the next release which is not a hand-over wakes it.
    tasks.eventually(function() return #(theirs:inspect("k").waiters or {}) >= 1 end, 5,
      "theirs waits")
    assert(first:release())
    tasks.run(20)
    for i = 2, #tokens do assert.is_true(tokens[i] > tokens[i - 1], "token " .. i) end
    for i, name in ipairs(order) do
      if name == "theirs" then return i, ours:stats().handed_over end
    end
  end

  it("lets another client have its turn after that many hand-overs", function()
    local at = run(3, 12)
    assert.is_true(at <= 5, "their turn was number " .. at)
  end)

  it("goes on to the last waiter when it is large", function()
    local at, handed = run(1000, 12)
    assert.are.equal(13, at)
    assert.are.equal(12, handed)
  end)

  it("hands nothing over when it is 0", function()
    local _, handed = run(0, 4)
    assert.are.equal(0, handed)
  end)

  it("must be a number in its range", function()
    for _, v in ipairs { -1, 1e7, "3" } do
      assert.has_error(function() dlock.connect("local:", { local_handover = v }) end)
    end
  end)
end)
