-- The tools that the other specs trust.

local helpers = require "spec.helpers"
local redis = require "spec.support.redis"
local proxy = require "spec.support.proxy"

describe("processes", function()
  it("give status, output and stderr", function()
    local status, out, err = helpers.run("sh", "-c", "echo out; echo err >&2; exit 7")
    assert.same({ 7, "out\n", "err\n" }, { status, out, err })
  end)

  it("say which signal ended them", function()
    local p = helpers.spawn { "sleep", "100" }
    p:kill "TERM"
    assert.equal(128 + 15, (p:finish()))
  end)

  it("that do not end are killed, and the wait fails", function()
    local p = helpers.spawn { "sleep", "100" }
    assert.has_error(function() p:finish(0.1) end)
    assert.same({ "signaled", 9 }, { p:wait(1) })
  end)

  it("can be Lua programs with arguments", function()
    local status, out = helpers.run_lua("print(ARGS[1], ARGS[2]) os.exit(3)", "a b", "c\"d")
    assert.same({ 3, "a b\tc\"d\n" }, { status, out })
  end)

  it("can have a terminal", function()
    local p = helpers.spawn { "sh", "-c", "tty; read x; echo got $x", tty = true, setsid = true }
    p:expect "/dev/pts/%d+"
    p:write "hello\n"
    p:expect "got hello"
    assert.equal(0, (p:finish()))
  end)

  it("can be forks of us", function()
    assert.equal(5, (helpers.fork(function() return 5 end):finish()))
  end)
end)

describe("waiting", function()
  it("ends when the condition holds, and fails with a reason when it does not", function()
    local n = 0
    assert.equal(3, helpers.eventually(function()
      n = n + 1
      return n >= 3 and n
    end))
    local ok, err = pcall(helpers.eventually, function() return false, "no luck" end, 0.05)
    assert.is_false(ok)
    assert.matches("no luck", err)
  end)
end)

describe("redis-server", function()
  local server

  before_each(function() server = redis.start { password = "pw" } end)
  after_each(function() server:stop() end)

  it("answers, freezes, thaws, dies and comes back", function()
    assert.equal("OK", server:call("SET", "k", "v\r\nw"))
    assert.equal("v\r\nw", server:call("GET", "k"))
    assert.same({ "k" }, server:leftovers())
    assert.matches("^ERR", select(2, server:call "NOSUCH"))
    server:freeze()
    local c = assert(redis.connect(server.port))
    c:send("AUTH", "pw")
    assert.equal("timeout", select(2, helpers.proc.read(c.fd, 100)))
    server:thaw()
    assert.equal("OK", c:reply())
    c:close()
    server:restart()
    assert.is_nil(server:call("GET", "k"))
  end)
end)

describe("the proxy", function()
  local server, p, c

  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)

  before_each(function()
    p = proxy.start(server.port)
    c = assert(redis.connect(p.port))
  end)
  after_each(function()
    c:close()
    p:stop()
    server:call "FLUSHALL"
  end)

  local function silent() return select(2, helpers.proc.read(c.fd, 100)) == "timeout" end
  local function ended() return helpers.proc.read(c.fd, 2000) end

  it("passes and counts", function()
    assert.equal("OK", c:call("SET", "a", "1"))
    assert.equal("1", c:call("GET", "a"))
    assert.equal(2, p:stats().requests)
  end)

  it("loses the reply of the n-th matching request, which was done", function()
    p:rule("lose", { match = "SET", skip = 1 })
    assert.equal("OK", c:call("SET", "a", "1"))
    c:send("SET", "a", "2")
    assert.is_true(silent())
    assert.equal("2", server:call("GET", "a"))
    assert.equal(1, p:stats().hit)
  end)

  it("cuts after the request was done", function()
    p:rule "cut"
    c:send("SET", "a", "3")
    assert.equal("", ended())
    assert.equal("3", server:call("GET", "a"))
  end)

  it("eats a request", function()
    p:rule "eat"
    c:send("SET", "a", "4")
    assert.is_true(silent())
    assert.is_nil(server:call("GET", "a"))
  end)

  it("holds everything and lets it go", function()
    p:set "hold"
    c:send("SET", "a", "5")
    assert.is_true(silent())
    assert.is_nil(server:call("GET", "a"))
    p:set "pass"
    assert.equal("OK", c:reply())
  end)

  it("mutes, delays, refuses and cuts all", function()
    p:set "mute"
    c:send "PING"
    assert.is_true(silent())
    p:set("pass", 0.2)
    local seconds, reply = helpers.timed(c.call, c, "PING")
    assert.equal("PONG", reply)
    assert.is_true(seconds >= 0.2)
    p:set "refuse"
    local d = assert(redis.connect(p.port))
    assert.equal("", helpers.proc.read(d.fd, 2000))
    d:close()
    p:cut()
    assert.is_not_true(ended() and ended() ~= "")
  end)

  it("gives canned answers", function()
    local q = proxy.canned { hello = "\255hi", replies = { "+one\r\n", "+two\r\n" }, close = 2 }
    local d = assert(redis.connect(q.port))
    assert.equal("\255hi", helpers.proc.read(d.fd, 2000))
    assert.equal("one", d:call "PING")
    assert.equal("two", d:call "PING")
    assert.equal("", helpers.proc.read(d.fd, 2000))
    d:close()
    q:stop()
  end)
end)
