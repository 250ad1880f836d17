-- time limit: 300 s
-- Curator and kazoo, as they come from Debian, in one line with us.
if not (" " .. table.concat(require("dlock.core").backends(), " ") .. " "):find " zookeeper " then
  return
end

local peers = require "spec.support.zk_peers"
local rigs = require "spec.support.rig"
local tasks = require "spec.support.tasks"
local zookeeper = require "spec.support.zookeeper"

describe("On ZooKeeper", function()
  local server
  local rig = rigs.new(function() return server end)
  setup(function() server = zookeeper.start() end)
  teardown(function() server:stop() end)

  local function connect(opts) return rig.connect(server.url, opts) end

  local function places(n)
    tasks.eventually(function() return #server:ephemerals() >= n end, 10, "a place in the line")
  end

  local who = {
    { name = "Curator's InterProcessMutex", peer = peers.curator,
      dialects = { "curator", "both" } },
    { name = "kazoo's Lock", peer = peers.kazoo, dialects = { "kazoo", "both" } },
  }
  for _, w in ipairs(who) do
    for _, dialect in ipairs(w.dialects) do
      it(w.name .. " and dlock (" .. dialect .. ") exclude and wake each other", function()
        local c = connect { zk_dialect = dialect, wait = 20 }
        local peer = rig.keep(w.peer(server.address, "/locks/job"))
        -- Theirs first.
        peer:write "acquire 5000\n"
        peer:expect("held\n", 10)
        assert.are.equal("held", select(3, c:acquire("locks/job", { wait = 0 })))
        assert.is_false(c:inspect("locks/job").dlock)
        local lock
        tasks.start(function() lock = assert(c:acquire "locks/job") end)
        places(dialect == "both" and 3 or 2)
        peer:write "release\n"
        peer:expect("released\n", 10)
        tasks.run()
        -- Ours first.
        peer:write "acquire 300\n"
        peer:expect("timeout\n", 10)
        peer:write "acquire 20000\n"
        places(dialect == "both" and 3 or 2)
        assert.is_true(lock:release())
        peer:expect("held\n", 5)
        peer:write "release\n"
        peer:expect("released\n", 10)
      end)
    end
  end

  it("all stand in one line, in order", function()
    local c = connect { zk_dialect = "both", wait = 30 }
    local kazoo = rig.keep(peers.kazoo(server.address, "/locks/job"))
    local curator = rig.keep(peers.curator(server.address, "/locks/job"))
    local first = assert(c:acquire "locks/job")
    kazoo:write "acquire 20000\n"
    places(3)
    local second
    local d = connect { zk_dialect = "both", wait = 30 }
    local task = tasks.start(function() second = assert(d:acquire "/locks/job") end)
    places(5)
    curator:write "acquire 20000\n"
    places(6)
    assert.is_true(first:release())
    kazoo:expect("held\n", 5)
    tasks.sleep(0.2)
    assert.is_falsy(task.done)
    kazoo:write "release\n"
    tasks.run()
    assert.is_true(second.token > first.token)
    assert.is_true(second:release())
    curator:expect("held\n", 5)
    curator:write "release\n"
    curator:expect("released\n", 5)
  end)
end)
