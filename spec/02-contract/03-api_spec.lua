-- time limit: 200 s
-- What goes around a lock: misuse, events, with(), <close>, collection, and
-- runtimes of one's own.
local core = require "dlock.core"
local dlock = require "dlock"
local helpers = require "spec.helpers"

local eventually, bound = helpers.eventually, helpers.bound
local NAN = 0 / 0

local function flush()
  -- Compiled traces keep what a test's closures refer to.
  if helpers.jit then jit.flush() end -- luacheck: ignore jit
end

-- The error that f raises, without its position, which must be the line `line`
-- of this file, or that of f's definition plus one.
local function misuse(f, line)
  local ok, err = pcall(f)
  assert(not ok, "nothing was raised")
  assert(type(err) == "string", "a string was to be raised")
  local at, text = err:match("03%-api_spec%.lua:(%d+): (.*)$")
  assert(at, "raised elsewhere: " .. err)
  line = line or debug.getinfo(f, "S").linedefined + 1
  assert(tonumber(at) == line, ("raised at line %s, not %d: %s"):format(at, line, text))
  return text
end

describe("misuse", function()
  local dir, client, lock
  helpers.no_leaks()
  setup(function() dir = helpers.tmpdir() end)

  describe("of the API", function()
    before_each(function()
      client = assert(dlock.connect("local://" .. dir, { wait = 0, namespace = "n:" }))
      lock = assert(client:acquire("k"))
    end)
    after_each(function()
      lock:release()
      client:close()
      lock, client = nil, nil
      flush()
    end)

    it("by a wrong receiver raises and says how to call", function()
      for name in pairs {
        acquire = 1, with = 1, inspect = 1, break_lock = 1, list = 1, ping = 1, stats = 1, poll = 1,
        close = 1,
      } do
        for _, self in ipairs { "k", {}, 12, lock } do
          local text = misuse(function()
            client[name](self, "k", print)
          end)
          assert.truthy(text:find("^expected a client, got .*: call it as client:method%(...%)$"),
            text)
        end
      end
      for name in pairs {
        release = 1, extend = 1, ensure = 1, is_held = 1, remaining = 1, lost_reason = 1,
        wait_lost = 1, hold_fd = 1,
      } do
        for _, self in ipairs { "k", {}, 12, client } do
          local text = misuse(function()
            lock[name](self, 1)
          end)
          assert.truthy(text:find("^expected a lock, got .*: call it as lock:method%(...%)$"), text)
        end
      end
    end)

    it("by a wrong key raises", function()
      for _, name in ipairs { "acquire", "with", "inspect", "break_lock" } do
        for want, key in pairs {
          ['key must be a string of 1 .. 4096 bytes, got an empty string'] = "",
          ["key must be a string of 1 .. 4096 bytes, got 12"] = 12,
          ["key must be a string of 1 .. 4096 bytes, got table"] = {},
          ["key must be a string of 1 .. 4096 bytes, got one of 5000 bytes"] = ("x"):rep(5000),
          ["key must have at most 4094 bytes in this namespace, got one of 4095 bytes"] =
            ("x"):rep(4095),
        } do
          assert.are.equal(want, misuse(function()
            client[name](client, key, print)
          end))
        end
        assert.are.equal("key must be a string of 1 .. 4096 bytes, got nothing", misuse(function()
          client[name](client)
        end))
      end
      assert.are.equal("prefix must be a string of 0 .. 4096 bytes, got 12", misuse(function()
        client:list(12)
      end))
    end)

    it("by wrong arguments raises", function()
      for _, bad in ipairs { "x", 0.05, 86401, -1, NAN, math.huge, {}, true } do
        assert.truthy(misuse(function()
          lock:extend(bad)
        end):find("^ttl must be a number in 0.1 .. 86400, got "))
      end
      for _, bad in ipairs { "x", -0.1, NAN, {}, false } do
        assert.truthy(misuse(function()
          lock:wait_lost(bad)
        end):find("^timeout must be a number in 0 .. math.huge, got "))
        assert.truthy(misuse(function()
          lock:ensure(bad)
        end):find("^seconds must be a number in 0 .. "))
      end
      assert.are.equal("fn must be a function, got 12", misuse(function()
        client:with("k", {}, 12)
      end))
      assert.are.equal("opts must be a table, got number", misuse(function()
        client:with("k", 12)
      end))
      assert.is_true(lock:is_held())
    end)

    it("by wrong options raises, on acquire and with too", function()
      for _, opts in ipairs {
        { ttl = 0 }, { wait = NAN }, { retry = 3 }, { renew = 1 }, { max_hold = 0 },
        { timeout = 0 }, { owner = "" }, { namespace = "x" }, { on_event = print }, { tll = 1 },
        12, "x",
      } do
        misuse(function()
          client:acquire("k", opts)
        end)
        misuse(function()
          client:with("k", opts, print)
        end)
      end
    end)

    it("is raised on a closed client as well", function()
      client:close()
      misuse(function()
        client:acquire("")
      end)
      misuse(function()
        client:with("k", {})
      end)
    end)
  end)

  it("of connect raises", function()
    for _, opts in ipairs {
      { ttl = "x" }, { connect_timeout = 0 }, { namespace = 1 }, { password = 1 },
      { username = {} }, { on_event = 1 }, { runtime = "nginx" }, { nope = 1 }, 12,
    } do
      misuse(function()
        dlock.connect("local:", opts)
      end)
    end
    for _, url in ipairs { "", 12, {}, "local:\0" } do
      assert.truthy(misuse(function()
        dlock.connect(url)
      end):find("^url must be "))
    end
    misuse(function()
      dlock.connect()
    end)
  end)

  it("by a bad URL raises, and never shows the user part", function()
    for _, url in ipairs {
      "nonsense", "foo://h", "redis://u:s3cret@", "redis://u:s3cret@h:0x",
      "redis://u:s3cret@h:99999", "redis://u:s3cret@h/notanumber", "redis://u:s3cret@h,i",
      "local://relative", "local://u:s3cret@/x", "redis://u:s3cret@[::1", "redis://u:s3cret%zz@h",
    } do
      local text = misuse(function()
        dlock.connect(url)
      end)
      assert.truthy(text:find("^url: "), text)
      assert.is_nil(text:find("s3cret"), text)
    end
  end)

  it("is not what a backend that is not there is", function()
    local none, msg, code = dlock.connect("etcd://u:s3cret@h:1")
    assert.is_nil(none)
    assert.are.equal("unsupported", code)
    assert.is_nil(msg:find("s3cret"), msg)
  end)
end)

describe("dlock", function()
  it("has its version and codes", function()
    assert.truthy(dlock._VERSION:find("^%d+%.%d+%.%d+$"))
    for _, code in ipairs {
      "held", "timeout", "lost", "not_held", "unavailable", "indeterminate", "auth", "foreign",
      "protocol", "unsupported", "canceled", "closed", "nomem",
    } do
      assert.is_string(dlock.codes[code], code)
    end
    assert.are.equal(require "dlock.retry", dlock.retry)
  end)
end)

helpers.each_backend(function(name, backend)
describe("on " .. name, function()
  local fixture
  -- Out here, so that it looks after the clients below are closed.
  helpers.no_leaks(function() return fixture end)
  setup(function() fixture = backend.start() end)
  teardown(function() fixture:stop() end)

  describe("a client", function()
    local clients = {}

    local function connect(opts)
      local c = assert(dlock.connect(fixture.url, opts))
      clients[#clients + 1] = c
      return c
    end

    after_each(function()
      for _, c in ipairs(clients) do c:close() end
      clients = {}
      flush()
    end)

    it("shows class, state and key only", function()
      local c = connect { username = "u", password = name ~= "redis" and "s3cret" or nil }
      if name ~= "redis" then
        local lock = assert(c:acquire("a\0b"))
        assert.are.equal('dlock.lock: held "a\\x00b"', tostring(lock))
        assert(lock:release())
        assert.are.equal('dlock.lock: released "a\\x00b"', tostring(lock))
      end
      assert.are.equal("dlock.client: open", tostring(c))
      c:close()
      assert.are.equal("dlock.client: closed", tostring(c))
    end)

    describe("on_event", function()
      it("gets acquired and released, with all that belongs to them", function()
        local events = {}
        local c = connect { namespace = "n:", on_event = function(ev) events[#events + 1] = ev end }
        local lock = assert(c:acquire("k"))
        assert.are.equal(1, #events)
        assert(lock:release())
        assert.are.equal(2, #events)
        assert.are.equal("acquired", events[1].type)
        assert.are.equal("released", events[2].type)
        for _, ev in ipairs(events) do
          assert.are.equal("k", ev.key)
          assert.are.equal(lock.token, ev.token)
          assert.are.equal(lock.token_string, ev.token_string)
          assert.is_nil(ev.reason)
          assert.is_string(ev.message)
          assert.is_true(math.abs(ev.time - os.time()) < 60)
        end
      end)

      it("gets lost, with the reason, in whatever call comes next", function()
        local lost
        local c = connect { on_event = function(ev) if ev.type == "lost" then lost = ev end end }
        local lock = assert(c:acquire("k", { ttl = 0.2, renew = false }))
        eventually(function()
          lock:is_held()
          return lost
        end)
        assert.are.equal("k", lost.key)
        assert.are.equal("expired", lost.reason)
        assert.are.equal("lost", lost.code)
      end)

      it("gets it inside wait_lost", function()
        local types = {}
        local c = connect { on_event = function(ev) types[#types + 1] = ev.type end }
        local lock = assert(c:acquire("k", { ttl = 0.3, renew = false }))
        assert.are.equal("expired", lock:wait_lost(bound(5)))
        assert.truthy(table.concat(types, " "):find("lost"))
      end)

      it("gets a notice while its own process is what it waits for", function()
        local notice
        local c = connect {
          on_event = function(ev) if ev.type == "notice" then notice = ev end end,
        }
        local lock = assert(c:acquire("k"))
        assert.are.equal("timeout", select(3, c:acquire("k", { wait = 0.3 })))
        assert.truthy(notice and notice.message:find("this process", 1, true))
        assert(lock:release())
      end)

      it("that raises harms nobody and is told once", function()
        local told = {}
        local c = connect {
          on_event = function(ev)
            told[#told + 1] = ev.type
            error("oops")
          end,
        }
        local lock = assert(c:acquire("k"))
        assert.is_true(lock:release())
        assert.are.same({ "acquired", "notice", "released", "notice" }, told)
      end)

      it("may take locks itself", function()
        local c
        local n = 0
        c = connect {
          on_event = function(ev)
            if ev.key == "k" then
              n = n + 1
              assert(assert(c:acquire("inner")):release())
            end
          end,
        }
        assert(assert(c:acquire("k")):release())
        assert.are.equal(2, n)
        assert.are.equal(3, c:stats().released)
      end)
    end)

    describe("with()", function()
      it("holds the lock for the function and no longer", function()
        local c, other = connect(), connect { wait = 0 }
        local r = { c:with("k", { ttl = 9 }, function(lock, a, b)
          assert.is_true(lock:is_held())
          assert.are.equal("held", select(3, other:acquire("k")))
          return a + b, lock.token_string
        end, 1, 2) }
        assert.is_true(r[1])
        assert.are.equal(3, r[2])
        assert.truthy(r[3]:find("^%d+$"))
        assert(assert(other:acquire("k")):release())
      end)

      it("releases when the function raises, and passes the same value on", function()
        local c, other = connect(), connect { wait = 0 }
        for _, problem in ipairs { "text", {}, 12, true } do
          local ok, err = pcall(c.with, c, "k", function() error(problem, 0) end)
          assert.is_false(ok)
          assert.are.equal(problem, err)
          assert(assert(other:acquire("k")):release())
        end
        local ok, err = pcall(c.with, c, "k", function() error() end)
        assert.is_false(ok)
        assert.is_nil(err)
      end)

      it("says lost, then the results, when the lock was lost meanwhile", function()
        local c, other = connect(), connect { wait = bound(2) }
        local r = { c:with("k", { ttl = 0.3, renew = false }, function(lock)
          assert.are.equal("expired", lock:wait_lost(bound(5)))
          assert(assert(other:acquire("k")):release())
          return 42, nil, "x"
        end) }
        assert.is_nil(r[1])
        assert.is_string(r[2])
        assert.are.equal("lost", r[3])
        assert.are.equal(42, r[4])
        assert.are.equal("x", r[6])
      end)

      it("nests, for other keys", function()
        local c = connect { wait = 0 }
        local r = { c:with("a", function()
          local outer = { c:with("b", function() return "inner" end) }
          local again = { c:with("a", function() return "never" end) }
          return outer[2], again[3]
        end) }
        assert.are.same({ true, "inner", "held" }, r)
      end)

      it("holds across yields", function()
        local c, other = connect(), connect { wait = 0 }
        local co = coroutine.create(function()
          return c:with("k", function() return coroutine.yield("inside") end)
        end)
        assert.are.same({ true, "inside" }, { coroutine.resume(co) })
        assert.are.equal("held", select(3, other:acquire("k")))
        assert.are.same({ true, true, "out" }, { coroutine.resume(co, "out") })
        assert(assert(other:acquire("k")):release())
      end)
    end)

    -- The syntax of `<close>` exists in Lua 5.4 alone, so it is compiled here.
    if _VERSION ~= "Lua 5.1" then
      describe("local lock <close>", function()
        local function block(text)
          return assert(load("local c, other = ... local function run() " .. text
            .. " end return run()"))
        end

        it("is released at the end of its block, whatever ends it", function()
          local c, other = connect(), connect { wait = 0 }
          for _, text in ipairs {
            "do local lock <close> = assert(c:acquire('k')) end",
            "local lock <close> = assert(c:acquire('k')) return lock.key",
            "pcall(function() local lock <close> = assert(c:acquire('k')) error('x') end)",
            "for _ = 1, 1 do local lock <close> = assert(c:acquire('k')) break end",
            "local lock <close> = assert(c:acquire('k')) assert(lock:release())",
          } do
            block(text)(c, other)
            assert(assert(other:acquire("k")):release())
          end
        end)

        it("does not hide or change the error that ends the block", function()
          local c = connect()
          local ok, err = pcall(
            block "local lock <close> = assert(c:acquire('k')) error('mine', 0)", c)
          assert.is_false(ok)
          assert.are.equal("mine", err)
        end)

        it("raises nothing when the lock is lost or the client is closed", function()
          local c, other = connect(), connect { wait = 1 }
          block([[local lock <close> = assert(c:acquire('k', { ttl = 0.1, renew = false }))
            lock:wait_lost(5)]])(c, other)
          block("local lock <close> = assert(c:acquire('k')) c:close()")(c, other)
          assert(assert(other:acquire("k", { wait = bound(2) })):release())
        end)

        it("works for clients too", function()
          local other = connect { wait = bound(2) }
          local lock = assert(load [[
            local dlock, url = ...
            local c <close> = assert(dlock.connect(url))
            return assert(c:acquire("k"))
          ]])(dlock, fixture.url)
          assert.is_false(lock:is_held())
          assert(assert(other:acquire("k")):release())
        end)

        it("is released when its coroutine is closed", function()
          local c, other = connect(), connect { wait = 0 }
          local co = coroutine.create(block [[
            local lock <close> = assert(c:acquire("k"))
            coroutine.yield()
          ]])
          assert(coroutine.resume(co, c, other))
          assert.are.equal("held", select(3, other:acquire("k")))
          assert(coroutine.close(co))
          assert(assert(other:acquire("k")):release())
        end)
      end)
    end

    it("works under a collector that never rests", function()
      local pause, mul = collectgarbage("setpause", 0), collectgarbage("setstepmul", 1000)
      local seen = 0
      local c = connect { on_event = function() seen = seen + 1 end }
      for i = 1, 100 do
        local lock = assert(c:acquire("k" .. i % 7))
        assert.is_nil((c:acquire("k" .. i % 7, { wait = 0 })))
        assert(lock:release())
        assert(c:inspect("k"))
      end
      collectgarbage("setpause", pause)
      collectgarbage("setstepmul", mul)
      assert.is_true(seen >= 200)
    end)

    describe("with a runtime of one's own", function()
      -- Waits on the bell's descriptor, as an event loop would.
      local function runtime()
        local bell = assert(core.bell())
        local r = { bell = bell, waits = 0 }
        function r.wait(op, seconds)
          r.waits = r.waits + 1
          if op:wait(0) then return true end
          helpers.proc.read(bell:fd(), math.min(seconds, 5) * 1000)
          return op:wait(0)
        end
        function r.sleep(seconds) helpers.proc.pause(seconds * 1000) end
        return r
      end

      it("does all that the default one does", function()
        local r = runtime()
        local c, other = connect { runtime = r, wait = bound(3) }, connect { wait = 0 }
        local lock = assert(c:acquire("k", { ttl = 5 }))
        assert.are.equal("held", select(3, other:acquire("k")))
        assert.is_true(lock:extend(3))
        assert.is_true(c:inspect("k").held)
        assert.are.equal("timeout", select(3, lock:wait_lost(0.2)))
        assert.is_true(lock:release())
        lock = assert(other:acquire("k", { ttl = 0.4, renew = false }))
        local mine = assert(c:acquire("k"))
        assert.is_false(lock:is_held())
        assert.is_true(mine:release())
        assert.is_true(r.waits > 5)
      end)

      it("that raises leaves nothing behind", function()
        local r = runtime()
        local c, other = connect { runtime = r }, connect { wait = 0 }
        local lock = assert(other:acquire("k"))
        local wait = r.wait
        r.wait = function() error("stop", 0) end
        local ok, err = pcall(c.acquire, c, "k")
        assert.is_false(ok)
        assert.are.equal("stop", err)
        r.wait = wait
        assert.are.equal(0, c:stats().waiting)
        assert(lock:release())
        eventually(function()
          local again = other:acquire("k")
          return again and again:release()
        end)
      end)
    end)
  end)
end)
end)
