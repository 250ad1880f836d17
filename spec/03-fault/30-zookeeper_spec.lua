-- time limit: 400 s
-- One ZooKeeper server and what can go wrong with it: connections that break in
-- the middle of a step, sessions that end, servers that stop or start over.
local helpers = require "spec.helpers"

if not (" " .. table.concat(require("dlock.core").backends(), " ") .. " "):find " zookeeper " then
  return
end

local proxies = require "spec.support.proxy"
local rigs = require "spec.support.rig"
local tasks = require "spec.support.tasks"
local zookeeper = require "spec.support.zookeeper"

local bound, eventually, now, proc = helpers.bound, helpers.eventually, helpers.now, helpers.proc

local function code_of(_, _, code) return code end

describe("ZooKeeper", function()
  local server
  local rig = rigs.new(function() return server end)
  setup(function() server = zookeeper.start() end)
  teardown(function() server:stop() end)

  local function connect(opts, url) return rig.connect(url or server.url, opts) end

  local function proxied(opts)
    local p = rig.keep(proxies.start(server.port, { raw = true }))
    return p, connect(opts, ("zookeeper://127.0.0.1:%d"):format(p.port))
  end

  -- "name of the key, number of nodes in its line"
  local function nodes(key)
    local n = 0
    for _, path in ipairs(server:ephemerals()) do
      if path:find("/" .. key .. "/", 1, true) == 1 then n = n + 1 end
    end
    return n
  end

  local CHILD = [[
    local dlock = require "dlock"
    local c = assert(dlock.connect(ARGS[1], { ttl = tonumber(ARGS[2]), wait = 60 }))
    print "waiting"
    io.stdout:flush()
    local lock = assert(c:acquire "k")
    print("held", lock.token_string)
    io.stdout:flush()
    if ARGS[3] == "hold" then io.read() end
    assert(lock:release())
    print "released"
  ]]

  local function child(ttl, what)
    local p = helpers.spawn {
      helpers.lua, "-e", ("ARGS={%q,%q,%q} "):format(server.url, ttl, what or "") .. CHILD,
      stdin = "pipe", env = { LD_PRELOAD = os.getenv "DLOCK_PRELOAD" or false },
    }
    rig.keep(p):expect "waiting\n"
    return p
  end

  describe("a connection that breaks right after the create was sent", function()
    for _, action in ipairs { "cut", "dead" } do
      it("(" .. action .. ") leaves one node, which is found again", function()
        local p, c = proxied { ttl = 1.5, wait = 10 }
        assert(c:ping())
        p:rule(action, { match = "-lock-" })
        local lock = assert(c:acquire "k")
        assert.are.equal(1, p:stats().hit)
        assert.are.equal(1, nodes "k")
        assert.is_true(lock:is_held())
        assert.is_true(lock:release())
        assert.are.equal(0, nodes "k")
      end)
    end

    it("leaves nothing when only one try was asked for", function()
      local p, c = proxied { ttl = 1.5, wait = 0, timeout = 0.3 }
      assert(c:ping())
      p:rule("dead", { match = "-lock-" })
      local none, _, code = c:acquire "k"
      assert.is_nil(none)
      assert.are.equal("indeterminate", code)
      eventually(function() return nodes "k" == 0 end, 6, "no node")
    end)

    it("leaves nothing of a waiter that gives up meanwhile", function()
      local holder = assert(connect():acquire "k")
      local p, c = proxied { ttl = 1.5, wait = 0.4 }
      assert(c:ping())
      p:rule("dead", { match = "-lock-" })
      local _, _, code = c:acquire "k"
      assert.is_true(code == "timeout" or code == "indeterminate", code)
      eventually(function() return nodes "k" == 1 end, 6, "the holder's node alone")
      assert.is_true(holder:release())
    end)
  end)

  it("finishes a release whose answer was lost", function()
    local p, c = proxied { ttl = 1.5, timeout = 0.3 }
    local lock = assert(c:acquire "k")
    p:rule("dead", { match = "-lock-" })
    local ok, _, code = lock:release()
    assert.is_true(ok or code == "indeterminate")
    assert.are.equal(0, nodes "k")
    assert(assert(connect():acquire "k"):release())
  end)

  it("keeps a waiter's place over a new connection", function()
    local holder = assert(connect():acquire "k")
    local p, c = proxied { ttl = 3, wait = 20 }
    local first
    local task = tasks.start(function() first = assert(c:acquire "k") end)
    tasks.eventually(function() return nodes "k" == 2 end)
    p:cut()
    local late = connect { wait = 20 }
    local second
    tasks.start(function() second = assert(late:acquire "k") end)
    tasks.eventually(function() return nodes "k" == 3 end)
    assert.is_true(holder:release())
    tasks.eventually(function() return task.done end, 5)
    assert.is_nil(second)
    assert.is_true(first:release())
    tasks.run()
    assert.is_true(second.token > first.token)
    assert.is_true(second:release())
  end)

  it("ends a lock that is cut off before anybody else can have it", function()
    local p, c = proxied { ttl = 2 }
    local other = connect { wait = 20 }
    local lock = assert(c:acquire "k")
    local lost, got
    tasks.start(function()
      assert.are.equal("session", lock:wait_lost(20))
      lost = now()
    end)
    tasks.start(function()
      local theirs = assert(other:acquire "k")
      got = now()
      assert.is_false(lock:is_held())
      assert.is_true(theirs.token > lock.token)
      assert.is_true(theirs:release())
    end)
    tasks.eventually(function() return nodes "k" == 2 end)
    p:set "hold"
    tasks.run()
    assert.is_true(got - lost > 0.5, ("only %.3f s before"):format(got - lost))
    p:set "pass"
  end)

  it("that stops for longer than the session ends the locks, and comes back clean", function()
    local c = connect { ttl = 1, wait = 15 }
    local lock = assert(c:acquire "k")
    local start = now()
    server:freeze()
    assert.are.equal("session", lock:wait_lost(bound(5)))
    assert.is_true(now() - start < bound(0.8), "took " .. now() - start)
    assert.are.equal("lost", code_of(lock:release()))
    helpers.never(function() return lock:is_held() end, 1.2, "a lost lock that is held again")
    server:thaw()
    local again = assert(c:acquire "k")
    assert.is_true(again.token > lock.token)
    assert.is_true(again:release())
  end)

  it("that starts over while two clients wait serves both, in order", function()
    local holder = child(2, "hold")
    holder:expect "held"
    local one, two = connect { ttl = 2, wait = 60 }, connect { ttl = 2, wait = 60 }
    local a, b
    tasks.start(function() a = assert(one:acquire "k") end)
    tasks.eventually(function() return nodes "k" == 2 end)
    tasks.start(function() b = assert(two:acquire "k") end)
    tasks.eventually(function() return nodes "k" == 3 end)
    server:restart()
    holder:kill()
    tasks.eventually(function() return a or b end, 20)
    local first = a or b
    assert.is_true(first:is_held())
    assert.is_true(not (a and b))
    tasks.sleep(0.3) -- both at once would show
    assert.is_true(not (a and b))
    assert.is_true(first:release())
    tasks.run()
    assert.is_true((first == a and b or a):release())
    assert.is_true(b.token ~= a.token)
  end)

  it("that is not there is 'unavailable', with the reason, and stderr stays empty", function()
    local source = [[
      local dlock = require "dlock"
      local c = assert(dlock.connect("zookeeper://127.0.0.1:%d",
        { wait = 0, connect_timeout = 0.5 }))
      local _, msg, code = c:acquire "k"
      print(code, msg)
      local d = assert(dlock.connect(%q))
      assert(assert(d:acquire "k"):release())
      d:close()
    ]]
    local status, out, err = rig.keep(helpers.spawn {
      helpers.lua, "-e", source:format(proc.free_port(), server.url),
      stdin = "", stderr = "pipe", env = { LD_PRELOAD = os.getenv "DLOCK_PRELOAD" or false },
    }):finish()
    assert.are.equal(0, status, out .. err)
    assert.truthy(out:find("unavailable\tcannot reach ZooKeeper: ", 1, true), out)
    assert.are.equal("", err)
  end)

  it("names a host that does not exist", function()
    local c = connect({ wait = 0, timeout = 15 }, "zookeeper://no-such-host.invalid:2181")
    local _, msg, code = c:acquire "k"
    assert.are.equal("unavailable", code)
    assert.truthy(msg:find("no such host", 1, true), msg)
  end)

  describe("a session that is ended from outside", function()
    it("turns its locks lost and starts its waiters again", function()
      local events = rigs.events()
      local c = connect { ttl = 10, wait = 20, on_event = events.on_event }
      local id = c:ping():match "session 0x(%x+)"
      local lock = assert(c:acquire "k")
      local blocker = assert(connect():acquire "w")
      local waited
      tasks.start(function() waited = assert(c:acquire "w") end)
      tasks.eventually(function() return nodes "w" == 2 end)
      -- Its client may take the session back before the server has ended it.
      eventually(function()
        assert.are.equal(0, (helpers.run(helpers.python, "spec/support/zk_session.py",
          server.address, id)))
        return lock:wait_lost(0.5) == "session"
      end, 10)
      tasks.eventually(function() return nodes "w" == 2 end, 5)
      assert.is_true(blocker:release())
      tasks.run()
      assert.is_true(waited:release())
      local again = assert(c:acquire "k")
      assert.is_true(again.token > lock.token)
      assert.is_true(again:release())
      assert.truthy(events.text "k":find("lost(session)", 1, true))
    end)
  end)

  it("lets the second waiter in when holder and first waiter are killed", function()
    local holder = child(2, "hold")
    holder:expect "held"
    local first = child(2)
    eventually(function() return nodes "k" == 2 end)
    local second = child(30)
    eventually(function() return nodes "k" == 3 end)
    first:kill()
    holder:kill()
    local start = now()
    second:expect("held", 8)
    assert.is_true(now() - start < bound(4), "took " .. now() - start)
    assert.are.same({ "exited", 0 }, { second:wait() })
  end)

  it("gives a waiter whose node was deleted a new place", function()
    local holder = assert(connect():acquire "k")
    local c = connect { wait = 30 }
    local lock
    tasks.start(function() lock = assert(c:acquire "k") end)
    tasks.eventually(function() return nodes "k" == 2 end)
    local admin = connect()
    assert(admin:break_lock "k") -- the holder's
    tasks.run()
    assert.is_true(lock:is_held())
    assert.are.equal("lost", code_of(holder:release()))
    assert.is_true(lock:release())
  end)

  it("serves waiters in order, and one release asks little of the server", function()
    local n = 16
    local holder = assert(connect { ttl = 60 }:acquire "k")
    local children = {}
    for i = 1, n do
      children[i] = child(5, "hold")
      eventually(function() return nodes "k" == i + 1 end, 10)
    end
    local before = server:number "packets_received"
    assert.is_true(holder:release())
    for i = 1, n do
      children[i]:expect("held", 10)
      for j = i + 1, n do
        assert.is_nil(children[j].text:find "held")
        assert.are.same({ nil, "timeout" }, { proc.read(children[j].out, 0) }, j .. " after " .. i)
      end
      children[i]:write "\n"
      children[i]:expect("released", 10)
    end
    local per = (server:number "packets_received" - before) / n
    assert.is_true(per < 8, per .. " requests for each")
    for i = 1, n do assert.are.same({ "exited", 0 }, { children[i]:wait() }) end
  end)

  it("is left with no more nodes than before by many keys", function()
    local base = server:number "znode_count"
    local c = connect { wait = 0, timeout = 30 }
    local total, at = helpers.scaled(10000, 300), 0
    for _ = 1, 16 do
      tasks.start(function()
        while at < total do
          at = at + 1
          local lock = assert(c:acquire("many/" .. at))
          assert(lock:release())
        end
      end)
    end
    tasks.run(300)
    tasks.eventually(function() return server:number "znode_count" <= base end, 60,
      function() return server:number "znode_count" .. " nodes, were " .. base end)
  end)

  it("knows a user, and keeps others away from what is hers", function()
    local function as(user) return (server.url:gsub("//", "//" .. user .. "@")) end
    local ann, bob = connect({ wait = 0 }, as "ann:s3cret"), connect({ wait = 0 }, as "bob:x")
    local lock = assert(ann:acquire "hers")
    local none, msg, code = bob:acquire "hers"
    assert.is_nil(none)
    assert.are.equal("auth", code)
    assert.is_nil(msg:find("s3cret", 1, true))
    assert.are.equal("auth", code_of(connect { wait = 0 }:acquire "hers"))
    assert.are.equal("held", code_of(connect({ wait = 0 }, as "ann:s3cret"):acquire "hers"))
    assert.is_true(lock:release())
  end)

  it("keeps its sockets from programs that are started", function()
    local c = connect()
    assert(c:ping())
    local open = 0
    for fd, to in pairs(helpers.fds()) do
      if to:find "^socket:" then
        local flags = helpers.read_file("/proc/self/fdinfo/" .. fd):match "flags:%s+(%d+)"
        assert.is_true(tonumber(flags, 8) >= tonumber("02000000", 8), fd .. " " .. to)
        open = open + 1
      end
    end
    assert.is_true(open > 0)
  end)

  it("puts all below the path of its URL, which need not be there", function()
    local url = server.url .. "/some/where"
    local c, top = connect({ wait = 0 }, url), connect { wait = 0 }
    local lock = assert(c:acquire "k")
    assert.are.equal(1, nodes "some/where/k")
    assert(assert(top:acquire "k"):release())
    assert.are.equal("held", code_of(top:acquire "some/where/k"))
    assert.are.same({ "k" }, c:list())
    assert.are.same({ "some/where/k" }, top:list())
    assert.is_true(lock:release())
  end)

  it("lists the line in order, whatever the dialect", function()
    local locks = {}
    for i, dialect in ipairs { "both", "both", "kazoo" } do
      local c = connect { owner = "number " .. i, wait = 10, zk_dialect = dialect }
      tasks.start(function()
        locks[i] = assert(c:acquire "k")
        assert.is_true(locks[i]:release())
      end)
      tasks.eventually(function() return nodes "k" >= i * 2 - (i == 3 and 1 or 0) or locks[1] end)
    end
    tasks.run()
    local holder = assert(connect { owner = "holder", zk_dialect = "both" }:acquire "k")
    for i, dialect in ipairs { "curator", "both", "kazoo" } do
      local c = connect { owner = "number " .. i, wait = 20, zk_dialect = dialect }
      local before = nodes "k"
      tasks.start(function() assert(assert(c:acquire "k"):release()) end)
      tasks.eventually(function() return nodes "k" > before end)
    end
    local info = assert(connect():inspect "k")
    assert.are.equal("holder", info.owner)
    assert.are.equal(holder.token, info.token)
    assert.are.same({ "number 1", "number 2", "number 3" }, info.waiters)
    assert.is_true(holder:release())
    tasks.run()
  end)

  it("grants no more than the session's timeout", function()
    local lock = assert(connect { ttl = 3 }:acquire("k", { ttl = 50 }))
    assert.are.equal(3, lock.ttl)
    assert.is_true(lock:remaining() <= 1.5)
    assert.is_true(lock:extend(40))
    assert.are.equal(3, lock.ttl)
    assert.is_true(lock:release())
  end)
end)
