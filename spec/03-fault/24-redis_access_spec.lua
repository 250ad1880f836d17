-- time limit: 200 s
-- How one gets to Redis: URL options, unix socket, database number, users with
-- few rights, and that no password shows anywhere.
local dlock = require "dlock"
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"
local proxies = require "spec.support.proxy"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

local bound = helpers.bound

local function code_of(_, _, code) return code end

local function works(client, key)
  local lock = assert(client:acquire(key or "k", { wait = 0 }))
  assert.is_true(lock:release())
end

describe("a redis URL", function()
  local server
  local open = rig.new(function() return server end)
  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)

  it("leads by address, by name and by socket to the same lock", function()
    local urls = {
      server.url, server.url .. "/", server.url .. "/0", server.url .. "?db=0",
      (server.url:gsub("127.0.0.1", "localhost")), server.unix_url, server.unix_url .. "?db=0",
    }
    local lock = assert(open.connect(server.url):acquire("k"))
    for _, url in ipairs(urls) do
      for _, runtime in ipairs { "thread", tasks.runtime } do
        local client = open.connect(url, { runtime = runtime })
        assert.are.equal("held", code_of(client:acquire("k", { wait = 0 })), url)
        assert.truthy(client:ping(), url)
        client:close()
      end
    end
    assert.is_true(lock:release())
    for _, url in ipairs(urls) do works(open.connect(url)) end
  end)

  it("with a database number leads to other locks", function()
    local clients = {}
    for i, url in ipairs { server.url .. "/0", server.url .. "/3", server.url .. "?db=4",
        server.unix_url .. "?db=5" } do
      clients[i] = open.connect(url)
    end
    local locks = {}
    for i, client in ipairs(clients) do locks[i] = assert(client:acquire("k", { wait = 0 })) end
    for i, db in ipairs { 0, 3, 4, 5 } do
      local direct = open.keep(server:connect())
      direct:call("SELECT", db)
      assert.truthy(direct:call("GET", "k"):find("dlock1:", 1, true))
      assert.are.same({ "k" }, clients[i]:list())
    end
    -- A waiter is woken in its own database only.
    local got
    local waiter = open.connect(server.url .. "/3")
    tasks.start(function() got = assert(waiter:acquire("k", { wait = 10 })) end)
    tasks.eventually(function() return #assert(clients[2]:inspect "k").waiters == 1 end)
    assert.is_true(locks[1]:release())
    tasks.sleep(0.1)
    assert.is_nil(got)
    assert.is_true(locks[2]:release())
    tasks.run(5)
    assert.is_true(got:release())
    assert.is_true(locks[3]:release())
    assert.is_true(locks[4]:release())
    for _, db in ipairs { 3, 4, 5 } do
      local direct = open.keep(server:connect())
      direct:call("SELECT", db)
      assert.are.same({ "k:fence" }, direct:call("KEYS", "*"))
    end
  end)

  it("with a database that the server has not got is 'unsupported'", function()
    for _, url in ipairs { server.url .. "/16", server.url .. "?db=1000000" } do
      local _, msg, code = open.connect(url):acquire("k", { wait = 0 })
      assert.are.equal("unsupported", code)
      assert.truthy(msg:find("database", 1, true), msg)
    end
  end)

  it("that leads nowhere is 'unavailable'", function()
    local free = helpers.proc.free_port()
    for _, url in ipairs {
      "redis://127.0.0.1:" .. free, "redis://no-such-host.invalid:" .. free,
      "redis+unix://" .. server.dir .. "/nobody", "redis+unix:///" .. ("x"):rep(200),
      "redis+unix://" .. server.dir .. "/redis.log",
    } do
      for _, runtime in ipairs { "thread", tasks.runtime } do
        local client = open.connect(url,
          { timeout = 0.5, connect_timeout = 0.5, runtime = runtime })
        local took, lock, msg, code = helpers.timed(client.acquire, client, "k", { wait = 0 })
        assert.is_nil(lock)
        assert.are.equal("unavailable", code, url .. msg)
        assert(took < 0.5 + bound(1), url .. " took " .. took)
        client:close()
      end
    end
  end)

  it("that is wrong raises, and never shows its user part", function()
    for _, url in ipairs {
      "redis://", "redis://:s3kret@", "redis://joe:s3kret@h:0", "redis://joe:s3kret@h:65536",
      "redis://joe:s3kret@h:x", "redis://joe:s3kret@h/x", "redis://joe:s3kret@h/-1",
      "redis://joe:s3kret@h/1x", "redis://joe:s3kret@h/1/2", "redis://joe:s3kret@h/1?db=1",
      "redis://joe:s3kret@h?nope=1", "redis://joe:s3kret@h,i", "redis://joe:s3kret@h/99999999999",
      "redis+unix:", "redis+unix://", "redis+unix:///", "redis+unix://joe:s3kret@h/path",
      "redis+unix:///path?db=x", "redis+unix:///path?x=1", "redis:h", "redis:/h",
      "redis://joe:s3kret%@h", "redis://joe:s3kret%zz@h", "redis://joe:s3kret%00@h",
    } do
      local ok, err = pcall(dlock.connect, url)
      assert.is_false(ok, url)
      assert.truthy(err:find("url: ", 1, true), err)
      assert.is_nil(err:find("s3kret", 1, true), err)
      assert.is_nil(err:find("joe", 1, true), err)
    end
    assert.are.equal("unsupported", code_of(dlock.connect("rediss://joe:s3kret@h")))
  end)
end)

describe("a user of Redis", function()
  local server
  local open = rig.new(function() return server end)
  local RULES = helpers.read_file("README.md"):match("For an ACL user: `([^`]+)`")

  setup(function() server = redis.start { password = "geheim" } end)
  teardown(function() server:stop() end)
  after_each(function()
    server:call("FLUSHALL")
    server:call("ACL", "DELUSER", "shop")
    server:call("ACL", "LOG", "RESET")
  end)

  local function set_user(rules)
    local words = {}
    for word in rules:gmatch "%S+" do words[#words + 1] = word end
    assert.are.equal("OK", server:call("ACL", "SETUSER", "shop", "reset", "on", ">p@ss:w/rd",
      (table.unpack or unpack)(words))) -- luacheck: ignore
  end

  local function user_url(path)
    return (server.url:gsub("//", "//shop:p%%40ss%%3Aw%%2Frd@")) .. (path or "")
  end

  -- All that dlock does on a server.
  local function do_everything(url)
    local one = open.connect(url, { namespace = "shop:" })
    local two = open.connect(url, { namespace = "shop:" })
    local warnings = {}
    local listener = open.connect(url, {
      namespace = "shop:",
      on_event = function(ev)
        if ev.type == "notice" then warnings[#warnings + 1] = ev.message end
      end,
    })
    assert(one:ping())
    local lock = assert(one:acquire("k", { ttl = 20 }))
    assert.are.equal("held", code_of(two:acquire("k", { wait = 0 })))
    assert.is_true(lock:extend())
    local got = {}
    for i, client in ipairs { one, one, two, listener } do
      tasks.start(function() got[i] = assert(client:acquire("k", { ttl = 20, wait = 10 })) end)
      tasks.sleep(0.05)
    end
    tasks.eventually(function() return #assert(two:inspect "k").waiters == 2 end, 5, "2 waiters")
    assert.are.same({ "k" }, two:list())
    assert.is_true(lock:release())
    for i = 1, 3 do
      tasks.eventually(function() return got[i] end, 5, "waiter " .. i)
      assert.is_true(got[i]:release())
    end
    tasks.eventually(function() return got[4] end, 5, "waiter 4")
    assert(two:break_lock "k")
    assert.are.equal("lost", code_of(got[4]:release()))
    -- A waiter that gives up leaves the line, and passes on what comes too late.
    lock = assert(one:acquire("k", { ttl = 20 }))
    assert.are.equal("timeout", code_of(two:acquire("k", { wait = 0.1 })))
    assert.are.same({}, assert(one:inspect "k").waiters)
    local direct = open.keep(server:connect())
    for _, channel in ipairs(direct:call("PUBSUB", "CHANNELS", "shop:dlock:wake:*")) do
      direct:call("PUBLISH", channel, "shop:nobody waits for this")
    end
    assert.is_true(lock:release())
    tasks.sleep(0.1)
    listener:poll()
    for _, w in ipairs(warnings) do assert.is_nil(w:find("subscribe", 1, true), w) end
  end

  it("with the rights that the README names can do all, and needs them all", function()
    set_user(RULES)
    server:call("CONFIG", "RESETSTAT")
    server:call("ACL", "LOG", "RESET")
    do_everything(user_url "/0")
    do_everything(user_url "/1")
    local denied = {}
    for _, entry in ipairs(server:call("ACL", "LOG")) do
      local e = {}
      for i = 1, #entry, 2 do e[entry[i]] = entry[i + 1] end
      if e.object ~= "config|get" then denied[#denied + 1] = e.reason .. " " .. e.object end
    end
    assert.are.same({}, denied)
    local used = {}
    for name in server:call("INFO", "commandstats"):gmatch "cmdstat_([%w|]+):calls=[1-9]" do
      used[name] = true
    end
    local idle = {}
    for name in RULES:gmatch "%+(%S+)" do
      if not used[name] then idle[#idle + 1] = name end
    end
    assert.are.same({}, idle)
  end)

  it("without the right to subscribe waits by polling, and is told once", function()
    set_user((RULES:gsub(" &%S+", "")) .. " resetchannels")
    local notices = {}
    local function on_event(ev)
      if ev.type == "notice" then notices[#notices + 1] = ev.message end
    end
    local one = open.connect(user_url(), { namespace = "shop:" })
    local two = open.connect(user_url(), { namespace = "shop:", on_event = on_event })
    for _ = 1, 2 do
      local lock = assert(one:acquire("k"))
      local got
      tasks.start(function() got = assert(two:acquire("k", { wait = 10 })) end)
      tasks.sleep(0.2)
      assert.is_true(lock:release())
      local took = helpers.timed(tasks.run, 10)
      assert(took < bound(1.5), "waited " .. took)
      assert.is_true(got:release())
    end
    two:poll()
    local told = 0
    for _, n in ipairs(notices) do told = told + (n:find("subscribe", 1, true) and 1 or 0) end
    assert.are.equal(1, told, table.concat(notices, "; "))
  end)

  it("with rights to other keys or none is 'auth', and writes nothing", function()
    for _, rules in ipairs {
      "~other:* &* +@all", "~shop:* &* -@all", (RULES:gsub("%+set ", "")),
      (RULES:gsub("~%S+", "~shop:k")), (RULES:gsub("%+eval ", ""):gsub("%+evalsha ", "")),
      (RULES:gsub("%+time ", "")),
    } do
      set_user(rules)
      for _, runtime in ipairs { "thread", tasks.runtime } do
        local client = open.connect(user_url(), { namespace = "shop:", runtime = runtime })
        local lock, msg, code = client:acquire("k", { wait = 0 })
        assert.is_nil(lock)
        assert.are.equal("auth", code, rules .. ": " .. msg)
        client:close()
      end
      assert.are.same({}, server:call("KEYS", "shop:*"), rules)
    end
  end)

  it("that is switched off while it holds loses the lock by its ttl", function()
    set_user(RULES)
    local client = open.connect(user_url(), { namespace = "shop:", timeout = 0.5 })
    local lock = assert(client:acquire("k", { ttl = 1 }))
    set_user("off " .. RULES)
    server:call("ACL", "DELUSER", "shop")
    assert.are.equal("expired", lock:wait_lost(bound(3)))
    assert.are.equal("auth", code_of(client:acquire("k", { wait = 0 })))
  end)

  it("can come from the options, which win over the URL", function()
    set_user(RULES)
    works(open.connect(server.url, { namespace = "shop:", username = "shop",
      password = "p@ss:w/rd" }))
    works(open.connect((server.url:gsub("//", "//shop:wrong@")), { namespace = "shop:",
      password = "p@ss:w/rd" }))
    assert.are.equal("auth", code_of(open.connect(user_url(), { namespace = "shop:",
      password = "wrong" }):acquire("k", { wait = 0 })))
  end)
end)

describe("a password", function()
  local SECRET = "s3kret-p%ss"
  local server
  local open = rig.new(function() return server end)
  setup(function() server = redis.start { password = SECRET } end)
  teardown(function() server:stop() end)

  -- Every string that can be reached from a value.
  local function strings(value, found, seen)
    if type(value) == "string" then found[#found + 1] = value end
    if type(value) ~= "table" and type(value) ~= "userdata" or seen[value] then return found end
    seen[value] = true
    found[#found + 1] = tostring(value)
    if type(value) == "table" then
      for k, v in pairs(value) do
        strings(k, found, seen)
        strings(v, found, seen)
      end
    end
    return found
  end

  it("is in no message, event, object or command line", function()
    local echo = open.keep(proxies.canned { replies = {
      "-ERR unknown command `AUTH`, with args beginning with: `" .. SECRET .. "`, \r\n" } })
    local said = {}
    local function on_event(ev) said[#said + 1] = ev end
    for _, url in ipairs {
      server.url, (server.url:gsub("//", "//nobody:s3kret-p%%25ss@")), echo.url,
      "redis://127.0.0.1:" .. helpers.proc.free_port(), "redis+unix:///nowhere",
    } do
      -- What echoes without having been told is not ours to hide.
      for _, given in ipairs(url == echo.url and { SECRET } or { SECRET, false }) do
        for _, runtime in ipairs { "thread", tasks.runtime } do
          local client = open.connect(url, {
            password = given or nil, username = given and "default" or nil,
            on_event = on_event, runtime = runtime, timeout = 0.3, ttl = 1,
          })
          said[#said + 1] = client
          for _, results in ipairs {
            { client:acquire("k", { wait = 0 }) }, { client:acquire("k", { wait = 0.05 }) },
            { client:inspect "k" }, { client:list() }, { client:ping() }, { client:break_lock "k" },
          } do said[#said + 1] = results end
          client:poll()
          said[#said + 1] = client:stats()
          client:close()
        end
      end
    end
    for _, bad in ipairs { { password = SECRET .. "\0" }, { username = SECRET .. "\0" },
        { pasword = SECRET } } do
      said[#said + 1] = select(2, pcall(dlock.connect, server.url, bad))
    end
    said[#said + 1] = select(2, pcall(dlock.connect, "redis://x:" .. SECRET .. "@h:port"))
    said[#said + 1] = select(2, pcall(dlock.connect, { SECRET }))
    said[#said + 1] = select(2, pcall(dlock.connect, "redis://x:" .. SECRET .. "@h\0"))
    local all = strings(said, {}, {})
    assert.is_true(#all > 100)
    for _, s in ipairs(all) do
      assert.is_nil(s:find("s3kret", 1, true), s)
    end
  end)
end)
