-- time limit: 300 s
-- One lock, on every backend: what each method returns, for every end that an
-- honest server can bring about.
local dlock = require "dlock"
local helpers = require "spec.helpers"

local eventually, never, bound, now = helpers.eventually, helpers.never, helpers.bound, helpers.now
local huge = math.huge

-- A holder in another process: prints "held TOKEN" once it has the lock, then
-- obeys lines from stdin: "release" (prints what came of it) and "quit".
local HOLDER = [[
local dlock = require "dlock"
local url, key, ttl = ARGS[1], ARGS[2], tonumber(ARGS[3])
local client = assert(dlock.connect(url, { owner = "holder", ttl = ttl })) -- sizes a session
local lock, msg = client:acquire(key, { wait = 20 })
print(lock and "held " .. lock.token_string or "failed " .. msg)
io.stdout:flush()
for line in io.lines() do
  if line == "release" then print("release", lock:release()) end
  if line == "held?" then print("held?", lock:is_held(), lock:lost_reason()) end
  io.stdout:flush()
  if line == "quit" then break end
end
]]

local function is_waiting(child)
  -- Asleep, at several looks in a row.
  for _ = 1, 5 do
    local stat = helpers.read_file("/proc/" .. child.pid .. "/stat") or ""
    if not stat:find("%) S ") then return false end
    helpers.proc.pause(2)
  end
  return true
end

helpers.each_backend(function(name, backend)
describe("on " .. name, function()
  local fixture
  -- Out here, so that it looks after the clients below are closed.
  helpers.no_leaks(function() return fixture end)
  setup(function() fixture = backend.start() end)
  teardown(function() fixture:stop() end)

  describe("a lock", function()
    local client, other
    local children = {}

    before_each(function()
      client = assert(dlock.connect(fixture.url, { owner = "one", wait = 5 }))
      other = assert(dlock.connect(fixture.url, { owner = "two", wait = 0 }))
    end)

    after_each(function()
      for _, child in ipairs(children) do child:close() end
      children = {}
      client:close()
      other:close()
      client, other = nil, nil
      -- Compiled traces keep what a test's closures refer to.
      if helpers.jit then jit.flush() end -- luacheck: ignore jit
    end)

    local function lua(...)
      local child = helpers.spawn_lua(...)
      children[#children + 1] = child
      return child
    end

    local function holder(key, ttl)
      local child = helpers.spawn {
        helpers.lua, "-e", ("ARGS={%q,%q,%q} "):format(fixture.url, key, ttl or 30) .. HOLDER,
        stdin = "pipe", env = { LD_PRELOAD = os.getenv "DLOCK_PRELOAD" or false },
      }
      children[#children + 1] = child
      return child
    end

    local function code_of(_, _, code) return code end

    describe("acquire()", function()
      it("returns a lock that says what it is", function()
        local lock = assert(client:acquire("k", { ttl = 7 }))
        assert.are.equal("k", lock.key)
        assert.are.equal("one", lock.owner)
        assert.is_number(lock.token)
        assert.are.equal(("%.0f"):format(lock.token), lock.token_string)
        assert.is_true(lock.ttl == 7 or lock.ttl == huge)
        assert.is_true(lock:is_held())
        local left = lock:remaining()
        assert.is_true(left > 5 and left <= lock.ttl)
        assert.is_nil(lock:lost_reason())
        assert.is_true(lock:release())
      end)

      it("with wait = 0 returns nil, a message that names the holder, 'held'", function()
        local lock = assert(client:acquire("k"))
        local none, msg, code = other:acquire("k", { wait = 0 })
        assert.is_nil(none)
        assert.are.equal("held", code)
        assert.truthy(msg:find("one", 1, true), msg)
        assert.is_true(lock:is_held())
        assert(lock:release())
        assert(assert(other:acquire("k", { wait = 0 })):release())
      end)

      it("says so when the holder is this process", function()
        local lock = assert(client:acquire("k"))
        local _, msg, code = client:acquire("k", { wait = 0 })
        assert.are.equal("held", code)
        assert.truthy(msg:find("this process", 1, true), msg)
        assert(lock:release())
      end)

      it("returns 'timeout' when the wait ran out, not before and not long after", function()
        local lock = assert(client:acquire("k"))
        for _, c in ipairs { client, other } do
          local took, none, msg, code = helpers.timed(c.acquire, c, "k", { wait = 0.3 })
          assert.is_nil(none)
          assert.are.equal("timeout", code)
          assert.truthy(msg:find("one", 1, true), msg)
          assert.is_true(took >= 0.29 and took < 0.3 + bound(0.4), "took " .. took)
        end
        assert(lock:release())
        assert(assert(other:acquire("k")):release())
      end)

      it("gets the lock when another process releases it, long before any expiry", function()
        local child = holder("k", 60)
        child:expect("held %d+")
        local waiter = lua([[
          local c = assert(require("dlock").connect(ARGS[1]))
          print "waiting"
          io.stdout:flush()
          local lock = assert(c:acquire("k", { wait = 20 }))
          print("got it")
        ]], fixture.url)
        waiter:expect("waiting")
        eventually(function() return is_waiting(waiter) end)
        child:write("release\n")
        local start = now()
        waiter:expect("got it", 5)
        assert.is_true(now() - start < bound(1.5))
        assert.are.same({ "exited", 0 }, { waiter:wait() })
      end)

      it("gets the lock of a process that ended without a release", function()
        for _, ending in ipairs { "", "os.exit(0)", "os.exit(1, true)", "error 'x'" } do
          local child = lua([[
            local c = assert(require("dlock").connect(ARGS[1], { ttl = 60 }))
            lock = assert(c:acquire("k"))
            print "held"
          ]] .. ending, fixture.url)
          child:expect("held")
          child:wait()
          assert(assert(client:acquire("k", { wait = bound(2) })):release())
        end
      end)

      it("gets the lock of a killed process when its ttl is over, or at once", function()
        local child = holder("k", 1)
        child:expect("held %d+")
        child:kill "KILL"
        child:wait()
        local took, lock = helpers.timed(client.acquire, client, "k", { wait = bound(5) })
        assert.truthy(lock)
        assert.is_true(took < bound(lock.ttl == huge and 0.5 or 2), "took " .. took)
        assert(lock:release())
      end)

      it("serves the waiters of one process in other processes' presence", function()
        local child = holder("k", 60)
        child:expect("held %d+")
        assert.are.equal("timeout", code_of(client:acquire("k", { wait = 0.05 })))
        child:write("release\n")
        child:expect("release%s+true")
        local lock = assert(client:acquire("k"))
        assert(lock:release())
      end)
    end)

    describe("keys", function()
      local odd = {
        "a", "a/b", "/a", "a/", "a//b", ".", "..", "../a", "a.b", "a:b", "a%2fb", "%", "a b", " ",
        "a\0b", "a\0", "\0", "a\nb", "\255\254", "h\195\182", "'\"`$(x)", "a*", "{a}", "A",
        ("k"):rep(1024), ("k"):rep(1023) .. "l", ("/"):rep(300), ("k"):rep(4096),
        ("k"):rep(4095) .. "l",
      }

      it("of any bytes are all different locks", function()
        local locks = {}
        if backend.same then -- spellings of one name
          local one = {}
          for _, key in ipairs(odd) do
            if not backend.same[key] then one[#one + 1] = key end
          end
          odd = one
        end
        for i, key in ipairs(odd) do
          local lock, msg, code = client:acquire(key, { wait = 0 })
          assert(lock, ("%q: %s (%s)"):format(key:sub(1, 20), tostring(msg), tostring(code)))
          assert.are.equal(key, lock.key)
          locks[i] = lock
        end
        for _, key in ipairs(odd) do
          assert.are.equal("held", code_of(other:acquire(key)), key:sub(1, 20))
        end
        local listed = {}
        for _, key in ipairs(assert(client:list())) do listed[key] = true end
        for _, key in ipairs(odd) do
          assert.is_true(listed[key] ~= nil, ("%q is not listed"):format(key:sub(1, 20)))
        end
        for _, lock in ipairs(locks) do assert(lock:release()) end
        for _, key in ipairs(odd) do assert(assert(other:acquire(key)):release()) end
      end)

      it("in two namespaces are two locks; equal full names are one", function()
        local a = assert(dlock.connect(fixture.url, { namespace = "a:", wait = 0 }))
        local b = assert(dlock.connect(fixture.url, { namespace = "b:", wait = 0 }))
        local lock = assert(a:acquire("k"))
        assert.are.equal("k", lock.key)
        assert(assert(b:acquire("k")):release())
        assert.are.equal("held", code_of(other:acquire("a:k")))
        assert.are.same({ "k" }, a:list())
        assert.are.same({}, b:list())
        assert.is_true(a:inspect("k").held)
        assert.is_false(b:inspect("k").held)
        assert(lock:release())
        a:close()
        b:close()
      end)
    end)

    describe("the token", function()
      it("rises with every grant, also after expiry and forced release", function()
        local last = 0
        local function grant(opts)
          local lock = assert(client:acquire("k", opts))
          assert.is_true(lock.token > last, lock.token_string .. " after " .. last)
          last = lock.token
          return lock
        end
        for _ = 1, 20 do assert(grant():release()) end
        local lock = grant { ttl = 0.2, renew = false }
        eventually(function() return not lock:is_held() end)
        lock = grant()
        assert(other:break_lock("k"))
        local next_lock = assert(other:acquire("k", { wait = bound(2) }))
        assert.is_true(next_lock.token > last)
        lock:release()
        assert.is_true(next_lock:release())
      end)

      it("passes unharmed through all that Lua does with numbers", function()
        local lock = assert(client:acquire("k"))
        local t = lock.token
        assert.is_true(t < 1e14 or name == "etcd" or name == "zookeeper")
        assert.are.equal(lock.token_string, tostring(t))
        assert.are.equal(lock.token_string, "" .. t)
        assert.are.equal(lock.token_string, ("%d"):format(t))
        assert.are.equal(t, tonumber(lock.token_string))
        local has_cjson, cjson = pcall(require, "cjson")
        if has_cjson then assert.are.equal("[" .. lock.token_string .. "]", cjson.encode { t }) end
        assert(lock:release())
      end)
    end)

    describe("release()", function()
      it("gives it back at once and is refused the second time", function()
        local lock = assert(client:acquire("k"))
        assert.is_true(lock:release())
        assert.is_false(lock:is_held())
        assert.are.equal(0, lock:remaining())
        local none, msg, code = lock:release()
        assert.is_nil(none)
        assert.is_string(msg)
        assert.are.equal("not_held", code)
        assert.is_nil(lock:lost_reason())
        assert(assert(other:acquire("k")):release())
      end)

      it("of a lock that ran out says 'lost' and leaves the next owner's alone", function()
        local lock = assert(client:acquire("k", { ttl = 0.2, renew = false }))
        eventually(function() return not lock:is_held() end)
        assert.are.equal("expired", lock:lost_reason())
        local next_lock = assert(other:acquire("k", { wait = bound(3) }))
        assert.are.equal("lost", code_of(lock:release()))
        assert.are.equal("lost", code_of(lock:extend(10)))
        assert.is_true(next_lock:is_held())
        assert.are.equal("held", code_of(client:acquire("k", { wait = 0 })))
        assert(next_lock:release())
      end)
    end)

    describe("renewal", function()
      it("keeps a lock for many times its ttl", function()
        local lock = assert(client:acquire("k", { ttl = 0.5 }))
        never(function() return other:acquire("k") end, 2, "a second grant")
        assert.is_true(lock:is_held())
        assert.is_true(lock:release())
      end)

      it("with renew = false ends after the ttl, and the holder knows first", function()
        local lock = assert(client:acquire("k", { ttl = 0.5, renew = false }))
        local start = now()
        assert.is_true(lock:remaining() <= 0.5)
        eventually(function()
          local at = now()
          local held = lock:is_held()
          assert.is_true(not held or at - start < 0.5, "held after its end")
          return not held
        end)
        assert.are.equal("expired", lock:wait_lost(0))
        assert.is_false(lock:is_held())
        assert(assert(other:acquire("k", { wait = bound(2) })):release())
      end)

      it("stops at max_hold", function()
        local lock = assert(client:acquire("k", { ttl = 0.3, max_hold = 0.8 }))
        local took, reason = helpers.timed(lock.wait_lost, lock, bound(5))
        assert.are.equal("max_hold", reason)
        assert.is_true(took > 0.5 and took < 0.8 + bound(0.4), "took " .. took)
        assert.are.equal("lost", code_of(lock:release()))
        assert(assert(other:acquire("k", { wait = bound(2) })):release())
      end)
    end)

    describe("extend()", function()
      it("makes its ttl the lock's, longer or shorter", function()
        local lock = assert(client:acquire("k", { ttl = 1, renew = false }))
        assert.is_true(lock:extend(30))
        assert.are.equal(30, lock.ttl)
        -- A session is proved for half its timeout at a time.
        local least = name == "zookeeper" and 9 or 25
        assert.is_true(lock:remaining() > least and lock:remaining() <= 30)
        assert.is_true(lock:extend(0.5))
        assert.are.equal(0.5, lock.ttl)
        assert.is_true(lock:remaining() <= 0.5)
        assert.is_true(lock:extend())
        assert.are.equal("expired", lock:wait_lost(bound(5)))
        assert(assert(other:acquire("k", { wait = bound(2) })):release())
      end)

      it("holds for later renewals too", function()
        local lock = assert(client:acquire("k", { ttl = 30 }))
        assert.is_true(lock:extend(0.4))
        never(function() return other:acquire("k") end, 1.5, "a second grant")
        assert.is_true(lock:release())
      end)

      it("of a released lock says 'not_held'", function()
        local lock = assert(client:acquire("k"))
        assert(lock:release())
        assert.are.equal("not_held", code_of(lock:extend(5)))
        assert.are.equal("not_held", code_of(lock:ensure(1)))
      end)
    end)

    describe("ensure()", function()
      it("renews when too little is left", function()
        local lock = assert(client:acquire("k", { ttl = 2, renew = false }))
        eventually(function() return lock:remaining() < 1.5 end)
        assert.is_true(lock:ensure(1.7))
        assert.is_true(lock:remaining() > 1.6)
        assert(lock:release())
      end)

      it("of a lost lock says 'lost'", function()
        local lock = assert(client:acquire("k", { ttl = 0.2, renew = false }))
        eventually(function() return not lock:is_held() end)
        assert.are.equal("lost", code_of(lock:ensure(0)))
        assert.are.equal("lost", code_of(lock:ensure(0.1)))
      end)
    end)

    describe("wait_lost()", function()
      it("returns 'timeout' while it is held, 'not_held' after a release", function()
        local lock = assert(client:acquire("k"))
        local took, none, _, code = helpers.timed(lock.wait_lost, lock, 0.2)
        assert.is_nil(none)
        assert.are.equal("timeout", code)
        assert.is_true(took >= 0.19 and took < 0.2 + bound(0.3), "took " .. took)
        assert.are.equal("timeout", code_of(lock:wait_lost(0)))
        assert(lock:release())
        assert.are.equal("not_held", code_of(lock:wait_lost()))
      end)

      it("returns the reason as soon as it is lost", function()
        local lock = assert(client:acquire("k", { ttl = 0.3, renew = false }))
        local took, reason = helpers.timed(lock.wait_lost, lock)
        assert.are.equal("expired", reason)
        assert.is_true(took < 0.3 + bound(1), "took " .. took)
      end)

      it("returns the reason at once when it is lost already", function()
        local lock = assert(client:acquire("k", { ttl = 0.2, renew = false }))
        eventually(function() return not lock:is_held() end)
        assert.are.equal("expired", lock:wait_lost(0))
        assert.are.equal("expired", lock:wait_lost())
      end)
    end)

    describe("break_lock()", function()
      it("frees the lock, tells whether it was held, and the holder learns of it", function()
        local lock = assert(client:acquire("k", { ttl = 1 }))
        local ok, was_held = other:break_lock("k")
        assert.is_true(ok)
        assert.is_true(was_held)
        local reason = lock:wait_lost(bound(3))
        assert.is_true(reason == "deleted" or reason == "taken", tostring(reason))
        assert.are.equal("lost", code_of(lock:release()))
        ok, was_held = other:break_lock("k")
        assert.is_true(ok)
        assert.is_false(was_held)
      end)

      it("wakes who waits", function()
        local lock = assert(client:acquire("k", { ttl = 60 }))
        local waiter = lua([[
          local c = assert(require("dlock").connect(ARGS[1]))
          print "waiting"
          io.stdout:flush()
          assert(c:acquire("k", { wait = 20 }))
          print("got it")
        ]], fixture.url)
        waiter:expect("waiting")
        eventually(function() return is_waiting(waiter) end)
        assert(other:break_lock("k"))
        local start = now()
        waiter:expect("got it", 5)
        assert.is_true(now() - start < bound(1.5))
        assert.are.same({ "exited", 0 }, { waiter:wait() })
        lock:release()
      end)
    end)

    describe("inspect()", function()
      it("tells who holds it", function()
        local lock = assert(client:acquire("k", { ttl = 20 }))
        local info = assert(other:inspect("k"))
        assert.is_true(info.held)
        assert.is_true(info.dlock)
        assert.are.equal("one", info.owner)
        if info.token then
          assert.are.equal(lock.token, info.token)
          assert.are.equal(lock.token_string, info.token_string)
        end
        if info.ttl then assert.is_true(info.ttl > 15 and info.ttl <= 20) end
        if info.age then assert.is_true(info.age >= 0 and info.age < bound(3)) end
        assert.is_table(info.waiters)
        assert(lock:release())
      end)

      it("tells that nobody holds it", function()
        local info = assert(client:inspect("nobody's"))
        assert.is_false(info.held)
        assert.is_false(info.dlock)
        local lock = assert(client:acquire("k"))
        assert(lock:release())
        assert.is_false(assert(client:inspect("k")).held)
      end)
    end)

    it("list() gives the held keys with a prefix, sorted", function()
      local locks = {}
      for _, key in ipairs { "p:b", "p:a", "q", "p:" } do
        locks[#locks + 1] = assert(client:acquire(key))
      end
      assert.are.same({ "p:", "p:a", "p:b" }, other:list("p:"))
      assert.are.same({ "p:", "p:a", "p:b", "q" }, other:list())
      assert.are.same({}, other:list("zz"))
      for _, lock in ipairs(locks) do assert(lock:release()) end
      assert.are.same({}, other:list("p:"))
    end)

    it("ping() says what answers", function()
      local text = assert(client:ping())
      assert.is_true(#text > 0)
    end)

    it("stats() counts", function()
      local lock = assert(client:acquire("k"))
      assert.are.equal("held", code_of(client:acquire("k", { wait = 0 })))
      assert.are.equal("timeout", code_of(client:acquire("k", { wait = 0.05 })))
      local s = client:stats()
      assert.are.equal(1, s.acquired)
      assert.are.equal(1, s.held)
      assert.are.equal(0, s.waiting)
      assert.are.equal(2, s.timeouts)
      assert(lock:release())
      s = client:stats()
      assert.are.equal(0, s.held)
      assert.are.equal(1, s.released)
      assert.are.equal(1, s.release.count)
      for _, l in ipairs { s.acquire, s.release } do
        assert.is_true(l.count >= 1 and l.mean > 0 and l.p50 <= l.p99 and l.p99 <= l.max)
      end
    end)

    describe("close()", function()
      it("releases all locks, and again does nothing", function()
        local a, b = assert(client:acquire("a")), assert(client:acquire("b"))
        assert.is_true(client:close())
        assert.is_true(client:close())
        assert.is_false(a:is_held())
        assert.is_false(b:is_held())
        assert.are.equal("not_held", code_of(a:release()))
        assert(assert(other:acquire("a")):release())
        assert(assert(other:acquire("b")):release())
      end)

      it("makes all that needs the backend say 'closed'", function()
        client:close()
        local function f() error("called") end
        for _, r in ipairs {
          { client:acquire("k") }, { client:with("k", f) }, { client:inspect("k") },
          { client:break_lock("k") }, { client:list() }, { client:ping() },
        } do
          assert.is_nil(r[1])
          assert.is_string(r[2])
          assert.are.equal("closed", r[3])
        end
        assert.is_table(client:stats())
        assert.are.equal(0, client:poll())
      end)
    end)

    it("keeps its client alive", function()
      local lock = assert(assert(dlock.connect(fixture.url, { ttl = 0.5 })):acquire("k"))
      collectgarbage()
      collectgarbage()
      never(function() return other:acquire("k") end, 1, "a second grant")
      assert.is_true(lock:release())
    end)

    it("that is collected while held is released and reported as leaked", function()
      local events = {}
      local c = assert(dlock.connect(fixture.url, {
        on_event = function(ev) events[#events + 1] = ev.type end,
      }))
      assert(c:acquire("k", { ttl = 60 }))
      local again
      eventually(function()
        collectgarbage()
        again = other:acquire("k")
        return again
      end)
      eventually(function()
        c:poll()
        return table.concat(events, " "):find("acquired leaked released", 1, true)
      end, 5, function() return table.concat(events, " ") end)
      assert.are.equal(1, c:stats().leaked)
      assert(again:release())
      c:close()
    end)

    local it_forks = helpers.it_forks(backend)
    it_forks("belongs to the process that took it: a forked child has lost it", function()
      local lock = assert(client:acquire("k", { ttl = 2 }))
      local child = helpers.fork(function()
        if lock:is_held() then return 1 end
        if lock:lost_reason() ~= "forked" then return 2 end
        if code_of(lock:release()) ~= "lost" then return 3 end
        if code_of(lock:extend(9)) ~= "lost" then return 4 end
        if code_of(client:acquire("k", { wait = 0 })) ~= "held" then return 5 end
        local own = client:acquire("child's")
        if not own or not own:release() then return 6 end
        lock, client = nil, nil
        collectgarbage()
        collectgarbage()
        return 0
      end)
      children[#children + 1] = child
      assert.are.same({ "exited", 0 }, { child:wait() })
      assert.are.equal("held", code_of(other:acquire("k")))
      assert.is_true(lock:is_held())
      assert.is_true(lock:release())
      assert(assert(other:acquire("k")):release())
    end)

    describe("Ctrl-C during a wait", function()
      local WAITER = [[
        local dlock = require "dlock"
        local c = assert(dlock.connect(ARGS[1]))
        local function waits()
          print "waiting"
          io.stdout:flush()
          local lock = c:acquire("k", { wait = math.huge })
          print("after the wait", lock)
        end
        local _, err = xpcall(waits, debug.traceback)
        print("error", err:find("interrupted", 1, true) and "interrupted" or err)
        print("traceback", err:find("client.lua", 1, true) and "kept" or "lost")
        print("waiting", c:stats().waiting)
        print "done"
        io.stdout:flush()
        io.read()
      ]]

      it("raises in the interpreter and leaves no contender", function()
        local lock = assert(client:acquire("k", { ttl = 60 }))
        local child = helpers.spawn {
          helpers.lua, "-e", ("ARGS={%q} "):format(fixture.url) .. WAITER,
          stdin = "pipe", env = { LD_PRELOAD = os.getenv "DLOCK_PRELOAD" or false },
        }
        children[#children + 1] = child
        child:expect("waiting\n")
        eventually(function() return is_waiting(child) end)
        child:kill "INT"
        local text = child:expect("error.*done", 3)
        assert.is_nil(text:find("after the wait"), text)
        assert.truthy(text:find("error\tinterrupted", 1, true), text)
        if not helpers.jit then assert.truthy(text:find("traceback\tkept", 1, true), text) end
        assert.truthy(text:find("waiting\t0", 1, true), text)
        assert(lock:release())
        -- The child lives and would take it now if it still stood in line.
        never(function()
          local again, _, code = other:acquire("k")
          if again then again:release() end
          return not again and code == "held"
        end, 0.5, "a grant to the interrupted waiter")
        assert.are.same({}, assert(other:inspect("k")).waiters)
      end)
    end)
  end)
end)
end)
