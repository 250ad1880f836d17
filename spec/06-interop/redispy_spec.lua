-- time limit: 120 s
-- redis-py's Lock and ours on the same key: each keeps the other out, whoever
-- comes first, and neither takes the other's lock for its own.
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

local bound, now = helpers.bound, helpers.now

-- Obeys lines: "take NAME SECONDS" (0: one try), "drop NAME", "owned NAME", "extend NAME".
local PEER = [[
import sys, redis
server = redis.Redis(unix_socket_path=sys.argv[1])
locks = {}
for line in sys.stdin:
    verb, name, *rest = line.split()
    try:
        if verb == "take":
            wait = float(rest[0])
            locks[name] = server.lock(name, timeout=60, sleep=0.02)
            said = locks[name].acquire(blocking=wait > 0, blocking_timeout=wait or None)
        elif verb == "drop":
            said = locks[name].release()
        elif verb == "owned":
            said = locks[name].owned()
        elif verb == "extend":
            said = locks[name].extend(10)
        print(verb, name, said, flush=True)
    except redis.exceptions.LockError as e:
        print(verb, name, type(e).__name__, flush=True)
]]

describe("redis-py's Lock", function()
  local server, peer
  local open = rig.new(function() return server end)

  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)
  before_each(function()
    peer = open.keep(helpers.spawn { helpers.python, "-c", PEER, server.socket, stdin = "pipe" })
  end)

  local function ask(verb, name, ...)
    peer:write(table.concat({ verb, name, ... }, " ") .. "\n")
  end
  local function answer(verb) return (peer:expect(verb .. " %S+ (%S+)\n", 10)) end
  local function peer_says(verb, ...)
    ask(verb, ...)
    return answer(verb)
  end

  local function code_of(_, _, code) return code end

  for _, ns in ipairs { "", "shop:" } do
    local name = ns .. "order"
    local with = ns == "" and "" or " (with a namespace)"

    it("is kept out by ours, and gets the key when we release it" .. with, function()
      local client = open.connect(server.url, { namespace = ns })
      local lock = assert(client:acquire("order", { ttl = 1 }))
      assert.are.equal("False", peer_says("take", name, "0"))
      ask("take", name, "20")
      -- Renewed for it too.
      tasks.sleep(1.3)
      assert.is_true(lock:is_held())
      assert.truthy(server:call("GET", name):find("^dlock1:%x+:"))
      assert.is_true(lock:release())
      assert.are.equal("True", answer "take")
      assert.are.equal("held", code_of(client:acquire("order", { wait = 0 })))
      assert.are.equal("None", peer_says("drop", name))
    end)

    it("keeps ours out, which has the key within 300 ms of its release" .. with, function()
      local client = open.connect(server.url, { namespace = ns })
      local took = {}
      for i = 1, 5 do
        assert.are.equal("True", peer_says("take", name, "0"))
        local _, msg, code = client:acquire("order", { wait = 0 })
        assert.are.equal("held", code, msg)
        assert.are.equal("timeout", code_of(client:acquire("order", { wait = 0.1 })))
        local info = assert(client:inspect "order")
        assert.is_true(info.held)
        assert.is_false(info.dlock)
        assert(info.ttl > 50 and info.ttl <= 60, info.ttl)
        assert.is_nil(info.token)
        local got, at
        tasks.start(function()
          got = assert(client:acquire("order", { wait = 20 }))
          at = now()
        end)
        tasks.sleep(0.05 + 0.1 * math.random())
        local free = now()
        assert.are.equal("None", peer_says("drop", name))
        tasks.run(5)
        took[i] = at - free
        assert.is_true(got:release())
      end
      table.sort(took)
      assert(took[3] < bound(0.3), table.concat(took, " "))
    end)
  end

  it("neither releases nor renews ours, nor we its", function()
    local client = open.connect(server.url)
    assert.are.equal("True", peer_says("take", "k", "0"))
    server:call("DEL", "k") -- as if it had run out
    local lock = assert(client:acquire("k", { ttl = 30 }))
    assert.are.equal("False", peer_says("owned", "k"))
    assert.are.equal("LockNotOwnedError", peer_says("extend", "k"))
    assert.are.equal("LockNotOwnedError", peer_says("drop", "k"))
    assert.is_true(lock:is_held())
    assert.are.equal(1, server:call("EXISTS", "k"))
    server:call("DEL", "k")
    assert.are.equal("True", peer_says("take", "k", "0"))
    assert.are.equal("lost", code_of(lock:extend()))
    assert.are.equal("taken", lock:lost_reason())
    assert.are.equal("lost", code_of(lock:release()))
    assert.are.equal("True", peer_says("owned", "k"))
    assert.are.equal("None", peer_says("drop", "k"))
  end)

  it("is broken by break_lock like any holder", function()
    local client = open.connect(server.url)
    assert.are.equal("True", peer_says("take", "k", "0"))
    local got
    tasks.start(function() got = assert(client:acquire("k", { wait = 20 })) end)
    tasks.sleep(0.1)
    local other = open.connect(server.url)
    local ok, held = other:break_lock "k"
    assert.is_true(ok and held)
    tasks.run(5)
    assert.are.equal("LockNotOwnedError", peer_says("drop", "k"))
    assert.is_true(got:is_held())
    assert.is_true(got:release())
  end)

  it("and ours share a key under load without a moment of both", function()
    local client = open.connect(server.url)
    local file = helpers.tmpdir() .. "/count"
    helpers.write_file(file, "0")
    local rounds = helpers.scaled(400, 40)
    local worker = open.keep(helpers.spawn { helpers.python, "-c", [[
import sys, redis
server = redis.Redis(unix_socket_path=sys.argv[1])
for _ in range(int(sys.argv[3])):
    with server.lock("k", timeout=60, sleep=0.001):
        n = int(open(sys.argv[2]).read())
        open(sys.argv[2], "w").write(str(n + 1))
]], server.socket, file, tostring(rounds) })
    local last = 0
    for _ = 1, rounds do
      local lock = assert(client:acquire("k", { wait = 30 }))
      assert.is_true(lock.token > last)
      last = lock.token
      local n = tonumber(helpers.read_file(file))
      helpers.write_file(file, ("%d"):format(n + 1))
      assert.is_true(lock:release())
    end
    assert.are.equal(0, (worker:finish(60)))
    assert.are.equal(2 * rounds, tonumber(helpers.read_file(file)))
  end)
end)
