-- time limit: 200 s
-- Servers that refuse, talk nonsense or hang up: the documented code each time,
-- and nothing crashes or stays behind. First what real servers say, then canned
-- answers for what real ones cannot be made to say.
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"
local proxies = require "spec.support.proxy"
local rig = require "spec.support.rig"
local tasks = require "spec.support.tasks"

local bound, scaled = helpers.bound, helpers.scaled
local slop = bound(1)

local function code_of(_, _, code) return code end

-- Every call that talks to the server, by name.
local function calls(client, lock)
  return {
    { "acquire", function() return client:acquire("k", { wait = 0 }) end },
    { "wait", function() return client:acquire("k", { wait = 0.05 }) end },
    { "inspect", function() return client:inspect "k" end },
    { "break_lock", function() return client:break_lock "k" end },
    { "list", function() return client:list() end },
    { "ping", function() return client:ping() end },
    lock and { "extend", function() return lock:extend() end },
    lock and { "release", function() return lock:release() end },
  }
end

describe("a real Redis that", function()
  local server, client
  local open = rig.new(function() return server end)

  local function start(opts)
    server = open.keep(redis.start(opts))
    client = open.connect(server.url, { timeout = 1, ttl = 3 })
    return server
  end
  after_each(function() server = nil end)

  it("holds something else at the key is 'foreign', and keeps it", function()
    start()
    for kind, command in pairs {
      hash = { "HSET", "k", "f", "v" }, list = { "RPUSH", "k", "v" }, set = { "SADD", "k", "v" },
      zset = { "ZADD", "k", 1, "v" }, stream = { "XADD", "k", "*", "f", "v" },
    } do
      server:call((table.unpack or unpack)(command)) -- luacheck: ignore
      for i, call in ipairs(calls(client)) do
        if i <= 4 then
          local r, msg, code = call[2]()
          assert.is_nil(r)
          assert.are.equal("foreign", code, call[1])
          assert.truthy(msg:find(kind, 1, true), msg)
        end
      end
      assert.are.same({}, client:list())
      assert.are.equal(kind, server:call("TYPE", "k"))
      assert.are.equal(1, server:call("DEL", "k"))
    end
  end)

  it("has a lock replaced by something else, tells it as 'taken'", function()
    start()
    local lock = assert(client:acquire("k", { ttl = 1 }))
    server:call("DEL", "k")
    server:call("HSET", "k", "f", "v")
    assert.are.equal("taken", lock:wait_lost(bound(3)))
    assert.are.equal("lost", code_of(lock:release()))
    assert.are.equal("hash", server:call("TYPE", "k"))
    server:call("DEL", "k")
  end)

  it("has no counter at the place of ours is 'foreign', and gives no lock", function()
    start()
    for _, command in ipairs {
      { "SET", "k:fence", "no number" }, { "SET", "k:fence", "1e300" }, { "RPUSH", "k:fence", "v" },
      { "SET", "k:fence", "nan" },
    } do
      server:call((table.unpack or unpack)(command)) -- luacheck: ignore
      local r, msg, code = client:acquire("k", { wait = 0 })
      assert.is_nil(r)
      assert.are.equal("foreign", code, msg)
      assert.are.equal(0, server:call("EXISTS", "k"))
      server:call("DEL", "k:fence")
    end
  end)

  it("has no line of waiters at the place of ours is waited for all the same", function()
    start()
    local other = open.connect(server.url)
    local lock = assert(other:acquire("k"))
    server:call("SET", "k:q", "somebody's")
    local got
    tasks.start(function() got = assert(client:acquire("k", { wait = 10 })) end)
    tasks.sleep(0.3)
    assert.is_true(lock:release())
    tasks.run(5)
    assert.is_true(got:release())
    assert.are.equal("somebody's", server:call("GET", "k:q"))
    server:call("DEL", "k:q")
  end)

  it("is out of memory grants nothing, but renews and releases", function()
    start { config = { maxmemory = "3mb", ["maxmemory-policy"] = "noeviction" } }
    local lock = assert(client:acquire("held", { ttl = 3 }))
    local direct = open.keep(server:connect())
    local n = 0
    while direct:call("SET", "fill" .. n, ("x"):rep(65536)) do n = n + 1 end
    direct:call("APPEND", "fill0", ("x"):rep(10))
    local r, msg, code = client:acquire("k", { wait = 0 })
    assert.is_nil(r)
    assert.are.equal("unavailable", code)
    assert.truthy(msg:find("OOM", 1, true), msg)
    assert.is_true(client:inspect("held").held)
    assert.is_true(lock:extend())
    tasks.eventually(function() return client:stats().renewed > 1 end, 5, "renewed")
    assert.is_true(lock:is_held())
    assert.is_true(lock:release())
    assert.are.equal(0, direct:call("EXISTS", "held"))
    direct:call("FLUSHALL")
    assert(assert(client:acquire("k", { wait = 5 })):release())
  end)

  it("evicts a lock, its holder learns of it, and was warned", function()
    local events = rig.events()
    start { config = { maxmemory = "3mb", ["maxmemory-policy"] = "allkeys-lru" } }
    local c = open.connect(server.url, { on_event = events.on_event })
    local lock = assert(c:acquire("k", { ttl = 1.5 }))
    tasks.eventually(function()
      c:poll()
      return #events.notices > 0 and events.notices[1].message:find("allkeys-lru", 1, true)
    end, 5, "a warning")
    assert.is_nil(events.notices[1].message:find("k", 1, true) and events.notices[1].key)
    local direct = open.keep(server:connect())
    local n = 0
    tasks.eventually(function()
      for _ = 1, 50 do
        n = n + 1
        direct:call("SET", "fill" .. n, ("x"):rep(16384))
        direct:call("GET", "fill" .. n)
      end
      return direct:call("EXISTS", "k") == 0 or not lock:is_held()
    end, 20, "eviction")
    assert.are.equal("deleted", lock:wait_lost(bound(3)))
    direct:call("FLUSHALL")
  end)

  it("is a replica is 'unavailable', and again of use when it is promoted", function()
    start()
    local lock = assert(client:acquire("held", { ttl = 2 }))
    local other = open.keep(redis.start())
    server:call("REPLICAOF", "127.0.0.1", other.port)
    local r, msg, code = client:acquire("k", { wait = 0 })
    assert.is_nil(r)
    assert.are.equal("unavailable", code)
    assert.truthy(msg:find("READONLY", 1, true) or msg:find("LOADING", 1, true)
      or msg:find("MASTERDOWN", 1, true), msg)
    assert.are.equal("expired", lock:wait_lost(bound(5)))
    server:call("REPLICAOF", "NO", "ONE")
    assert(assert(client:acquire("k", { wait = 5 })):release())
  end)

  it("cannot save is 'unavailable' with its words", function()
    local dir = helpers.tmpdir()
    start { config = { dir = dir } }
    local lock = assert(client:acquire("held", { ttl = 2 }))
    server:call("CONFIG", "SET", "save", "3600 1")
    helpers.remove_tree(dir)
    server:call("BGSAVE")
    tasks.eventually(function()
      return server:call("INFO", "persistence"):find "rdb_last_bgsave_status:err"
    end, 5, "a failed save")
    local r, msg, code = client:acquire("k", { wait = 0 })
    assert.is_nil(r)
    assert.are.equal("unavailable", code)
    assert.truthy(msg:find("MISCONF", 1, true), msg)
    local _, _, release_code = lock:release()
    assert.are.equal("unavailable", release_code)
    tasks.eventually(function() return server:call("EXISTS", "held") == 0 end, 5, "gone by its ttl")
    server:call("CONFIG", "SET", "save", "")
  end)

  it("is busy with a script is 'unavailable', and heals", function()
    start { config = { ["busy-reply-threshold"] = 50 } }
    assert(assert(client:acquire("k")):release())
    local direct = open.keep(server:connect())
    direct:send("EVAL", "while true do end", 0)
    tasks.eventually(function() return select(2, server:call "PING") end, 5, "BUSY")
    local r, msg, code = client:acquire("k", { wait = 0 })
    assert.is_nil(r)
    assert.are.equal("unavailable", code, msg)
    assert.truthy(msg:find("BUSY", 1, true), msg)
    local got
    tasks.start(function() got = assert(client:acquire("k", { wait = 10 })) end)
    tasks.sleep(0.3)
    server:call("SCRIPT", "KILL")
    tasks.run(10)
    assert.is_true(got:release())
  end)

  it("has no room for more clients is 'unavailable' with its words", function()
    start { config = { maxclients = 2 } }
    local rest = {}
    for i = 1, 2 do rest[i] = open.keep(server:connect()) end
    local r, msg, code = client:acquire("k", { wait = 0 })
    assert.is_nil(r)
    assert.are.equal("unavailable", code, msg)
    rest[1]:close()
    rest[2]:close()
    assert(assert(client:acquire("k", { wait = 5 })):release())
  end)

  it("lets in only those with a password", function()
    start { password = "geheim" }
    for _, call in ipairs(calls(client)) do
      local r, msg, code = call[2]()
      assert.is_nil(r)
      assert.are.equal("auth", code, call[1] .. ": " .. tostring(msg))
    end
    local wrong = open.connect(server.url, { password = "falsch" })
    for _, call in ipairs(calls(wrong)) do
      local r, msg, code = call[2]()
      assert.is_nil(r)
      assert.are.equal("auth", code, call[1] .. ": " .. tostring(msg))
      assert.is_nil(msg:find("falsch", 1, true))
    end
    local right = open.connect(server.url, { password = "geheim" })
    assert(assert(right:acquire "k"):release())
    local by_url = open.connect((server.url:gsub("//", "//:geheim@")))
    assert(assert(by_url:acquire "k"):release())
    by_url = open.connect((server.url:gsub("//", "//default:geheim@")))
    assert(assert(by_url:acquire "k"):release())
  end)

  it("wants no password does not get one in silence", function()
    start()
    local needless = open.connect(server.url, { password = "geheim" })
    local _, msg, code = needless:acquire("k", { wait = 0 })
    assert.are.equal("auth", code, msg)
    assert.is_nil(msg:find("geheim", 1, true))
  end)
end)

-- ---- canned answers ----

-- An answer to everything, and the code of an acquire that gets it.
local ANSWERS = {
  ["LOADING"] = { "-LOADING Redis is loading the dataset in memory\r\n", "unavailable" },
  ["MASTERDOWN"] = { "-MASTERDOWN Link with MASTER is down\r\n", "unavailable" },
  ["TRYAGAIN"] = { "-TRYAGAIN Multiple keys request during rehashing of slot\r\n", "unavailable" },
  ["CLUSTERDOWN"] = { "-CLUSTERDOWN Hash slot not served\r\n", "unavailable" },
  ["READONLY"] = { "-READONLY You can't write against a read only replica.\r\n", "unavailable" },
  ["READONLY in a script, as Redis 6 says it"] = {
    "-ERR Error running script (call to f_cb4fd00c): @user_script:3: @user_script: 3: -READONLY "
      .. "You can't write against a read only replica.\r\n", "unavailable" },
  ["OOM"] = { "-OOM command not allowed when used memory > 'maxmemory'.\r\n", "unavailable" },
  ["MISCONF"] = { "-MISCONF Errors writing to the AOF file: No space left on device\r\n",
    "unavailable" },
  ["BUSY"] = { "-BUSY Redis is busy running a script.\r\n", "unavailable" },
  ["NOREPLICAS"] = { "-NOREPLICAS Not enough good replicas to write.\r\n", "unavailable" },
  ["NOAUTH"] = { "-NOAUTH Authentication required.\r\n", "auth" },
  ["WRONGPASS"] = { "-WRONGPASS invalid username-password pair or user is disabled.\r\n", "auth" },
  ["NOPERM"] = { "-NOPERM this user has no permissions to run the 'evalsha' command\r\n", "auth" },
  ["DENIED"] = { "-DENIED Redis is running in protected mode\r\n", "auth" },
  ["WRONGTYPE"] = { "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
    "foreign" },
  ["MOVED"] = { "-MOVED 3999 127.0.0.1:6381\r\n", "unsupported" },
  ["CROSSSLOT"] = { "-CROSSSLOT Keys in request don't hash to the same slot\r\n", "unsupported" },
  ["an error that nobody knows"] = { "-FLUX capacitor\r\n", "protocol" },
  ["an error without words"] = { "-\r\n", "protocol" },
  ["+OK"] = { "+OK\r\n", "protocol" },
  ["a number"] = { ":1\r\n", "protocol" },
  ["a huge number"] = { ":99999999999999999999999999\r\n", "protocol" },
  ["nil"] = { "$-1\r\n", "protocol" },
  ["a nil array"] = { "*-1\r\n", "protocol" },
  ["an empty string"] = { "$0\r\n\r\n", "protocol" },
  ["a string that is no token"] = { "$5\r\n12x45\r\n", "protocol" },
  ["a token of zero"] = { "$1\r\n0\r\n", "protocol" },
  ["a negative token"] = { "$2\r\n-5\r\n", "protocol" },
  ["a token with a NUL"] = { "$3\r\n1\0002\r\n", "protocol" },
  ["a token beyond all bounds"] = { "$30\r\n" .. ("9"):rep(30) .. "\r\n", "protocol" },
  ["an empty array"] = { "*0\r\n", "protocol" },
  ["an array of the wrong things"] = { "*3\r\n+a\r\n+b\r\n+c\r\n", "protocol" },
  ["an array of three nils"] = { "*3\r\n$-1\r\n$-1\r\n$-1\r\n", "protocol" },
  ["an error in an array"] = { "*2\r\n-ERR x\r\n-ERR y\r\n", "protocol" },
  ["arrays in arrays"] = { ("*1\r\n"):rep(200) .. ":1\r\n", "protocol" },
  ["a long array"] = { "*20000\r\n" .. (":1\r\n"):rep(20000), "protocol" },
  ["an array that is longer than memory"] = { "*2147483647\r\n", "protocol" },
  ["a length below zero"] = { "$-7\r\n", "protocol" },
  ["an HTTP server"] = { "HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n\r\n", "protocol" },
  ["noise"] = { "\0\1\2\255\254\253", "protocol" },
  ["RESP3"] = { "%1\r\n+a\r\n+b\r\n", "protocol" },
  ["NOSCRIPT for ever"] = { "-NOSCRIPT No matching script.\r\n", "protocol" },
  ["too many answers"] = { ":1\r\n:2\r\n:3\r\n", "protocol" },
}

-- Codes that a caller may get from a bad server, by what was asked.
local DOCUMENTED = {
  unavailable = true, indeterminate = true, auth = true, foreign = true, protocol = true,
  unsupported = true, timeout = true, held = true,
}

describe("a server that answers", function()
  local open = rig.new()

  local function canned(what)
    local server = open.keep(proxies.canned(what))
    return server, open.connect(server.url, { timeout = 0.3, ttl = 1 })
  end

  -- What every call says to it; `want` is the code of an acquire.
  local function try_all(server, runtime, want)
    local client = open.connect(server.url, { timeout = 0.4, ttl = 1, runtime = runtime })
    local lock, msg, code = client:acquire("k", { wait = 0 })
    assert(lock == nil and want[code], "acquire: " .. tostring(code) .. ": " .. tostring(msg))
    for _, call in ipairs(calls(client)) do
      local took, r
      took, r, msg, code = helpers.timed(call[2])
      assert(r == nil and DOCUMENTED[code] or r ~= nil and call[1] ~= "acquire",
        call[1] .. ": " .. tostring(code) .. ": " .. tostring(msg))
      assert(took < 0.6 + slop, call[1] .. " took " .. took)
    end
  end

  local function try_each(cases)
    local server = open.keep(proxies.canned {})
    for name, case in pairs(cases) do
      server:answers(case.what)
      for where, runtime in pairs { lane = "thread", loop = tasks.runtime } do
        local ok, err = pcall(try_all, server, runtime, case.want)
        if not ok then error(name .. " (" .. where .. "): " .. tostring(err), 0) end
      end
    end
  end

  it("one thing to everything gives the documented code", function()
    local cases = {}
    for name, case in pairs(ANSWERS) do
      cases[name] = { what = { replies = { case[1] } }, want = { [case[2]] = true } }
    end
    try_each(cases)
  end)

  it("nothing, or hangs up, is no lock and hangs nobody", function()
    local cases = {}
    for name, what in pairs {
      ["hangs up at once"] = { close = 0 },
      ["hangs up after the request"] = { close = 1 },
      ["hangs up in the middle"] = { replies = { "$17\r\n1234" }, close = 1 },
      ["says nothing"] = { replies = { "" } },
      ["is another kind of server"] = { hello = "220 mail.example.org ESMTP\r\n" },
      ["answers before it is asked"] = { hello = "+OK\r\n", replies = { "+OK\r\n" } },
      ["refuses before it is asked"] = { hello = "-ERR max number of clients reached\r\n",
        close = 0 },
    } do
      cases[name] = { what = what,
        want = { unavailable = true, indeterminate = true, protocol = true } }
    end
    try_each(cases)
  end)

  it("a lock, and nonsense from then on, loses it in time", function()
    local servers = {}
    for _, name in ipairs {
      "OOM", "NOAUTH", "WRONGTYPE", "+OK", "nil", "a number", "arrays in arrays", "noise",
    } do
      servers[name] = canned { replies = { "$14\r\n12345678901234\r\n", ANSWERS[name][1] } }
    end
    for name, server in pairs(servers) do
      tasks.start(function()
        local client = open.connect(server.url, { timeout = 0.3, ttl = 1 })
        local lock = assert(client:acquire("k", { wait = 0 }))
        local _, msg, code = lock:extend()
        assert(DOCUMENTED[code], name .. ": " .. tostring(code) .. ": " .. tostring(msg))
        assert.is_true(lock:is_held())
        local took, reason = helpers.timed(lock.wait_lost, lock, bound(5))
        assert.are.equal("expired", reason, name)
        assert(took < bound(1), name .. " was held for " .. took)
        assert.are.equal("lost", code_of(lock:release()))
        local second = assert(open.connect(server.url, { timeout = 0.3, ttl = 1 }):acquire "k")
        local ok
        ok, msg, code = second:release()
        assert(ok and name == "a number" or DOCUMENTED[code],
          name .. ": " .. tostring(code) .. ": " .. tostring(msg))
      end)
    end
    tasks.run(20)
  end)

  it("byte by byte is understood", function()
    local token = "12345678901234"
    local _, client = canned { replies = { "$14\r\n" .. token .. "\r\n", ":1\r\n" }, each = 0.002 }
    local lock = assert(client:acquire("k", { wait = 0, ttl = 30 }))
    assert.are.equal(token, lock.token_string)
    assert.is_true(lock:release())
  end)

  it("forever, and forever too slowly, is 'indeterminate'", function()
    local _, client = canned { replies = { "$1000\r\n" .. ("x"):rep(1000) .. "\r\n" }, each = 0.01 }
    local took, r, msg, code = helpers.timed(client.acquire, client, "k", { wait = 0 })
    assert.is_nil(r)
    assert.are.equal("indeterminate", code, msg)
    assert(took < 0.3 + slop, "took " .. took)
  end)

  it("a log-in or a database number with nonsense does not let us in", function()
    local server = open.keep(proxies.canned {})
    for reply, want in pairs {
      ["-ERR invalid password\r\n"] = "auth",
      ["-WRONGPASS invalid username-password pair\r\n"] = "auth",
      ["-ERR unknown command 'AUTH', with args beginning with: 'geheim' \r\n"] = "auth",
      ["-LOADING Redis is loading\r\n"] = "unavailable",
      [":5\r\n"] = "protocol",
      ["$6\r\ngeheim\r\n"] = "protocol",
      ["junk\r\n"] = "protocol",
    } do
      server:answers { replies = { reply } }
      local client = open.connect(server.url, { password = "geheim", timeout = 0.3 })
      local r, msg, code = client:acquire("k", { wait = 0 })
      assert.is_nil(r)
      assert.are.equal(want, code, reply .. msg)
      assert.is_nil(msg:find("geheim", 1, true), msg)
    end
    for reply, want in pairs {
      ["-ERR DB index is out of range\r\n"] = "unsupported",
      ["-ERR SELECT is not allowed in cluster mode\r\n"] = "unsupported",
      ["-NOPERM this user has no permissions to run the 'select' command\r\n"] = "auth",
      ["-NOAUTH Authentication required.\r\n"] = "auth",
      [":5\r\n"] = "protocol",
    } do
      server:answers { replies = { reply } }
      local client = open.connect(server.url .. "/7", { timeout = 0.3 })
      local r, msg, code = client:acquire("k", { wait = 0 })
      assert.is_nil(r)
      assert.are.equal(want, code, reply .. msg)
    end
  end)

  it("random bytes never crashes us", function()
    local pieces = { "*3\r\n", "$5\r\n", "hello\r\n", ":1\r\n", "+OK\r\n", "-ERR x\r\n", "$-1\r\n",
      "*-1\r\n", "\r\n", "$0\r\n\r\n", "*0\r\n", "x", "\0", "$3\r\nabc\r\n", "-NOSCRIPT y\r\n",
      "*2\r\n$7\r\nforeign\r\n$4\r\nhash\r\n", "$14\r\n12345678901234\r\n" }
    local replies = {}
    for i = 1, scaled(2000, 60) do
      local parts = {}
      for j = 1, math.random(6) do parts[j] = pieces[math.random(#pieces)] end
      replies[i] = table.concat(parts)
    end
    local server = open.keep(proxies.canned { replies = replies })
    for _ = 1, #replies / 10 do
      local client = open.connect(server.url, { timeout = 0.05, ttl = 0.2 })
      for _, call in ipairs(calls(client)) do
        local r, msg, code = call[2]()
        assert(r ~= nil or DOCUMENTED[code], call[1] .. ": " .. tostring(code) .. tostring(msg))
        if call[1] == "acquire" and r then r:release() end
      end
    end
  end)
end)
