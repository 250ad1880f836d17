-- In nginx: 64 concurrent guarded requests, each with a key of its own, against the
-- same two Redis commands, byte for byte, over pooled cosockets; how long other
-- requests of the worker take while 64 wait for a lock, against 64 that sleep; memory of
-- a waiting request; and what the doorbell adds to a call. One worker, turns interleaved.

local bench = require "spec.bench.support.bench"
local dlock = require "dlock"
local nginx = require "spec.support.nginx"

local helpers = bench.helpers
local ROUNDS, TURN_MS, CONCURRENT = 5, 1500, 64
local WAITERS = 400

local missing = nginx.missing()
if missing then
  print("left out: " .. missing)
  os.exit(0)
end

local APP = [[
local dlock = require "dlock"
local M = { client = assert(dlock.connect(%q, { wait = 10 })) }
local acquire, release = %s, %s

local function command(parts, key)
  local out = { "*" .. #parts .. "\r\n" }
  for i = 1, #parts do
    local s = parts[i]:gsub("@KEY@", key)
    out[i + 1] = "$" .. #s .. "\r\n" .. s .. "\r\n"
  end
  return table.concat(out)
end

local function reply(sock)
  local line = assert(sock:receive())
  local kind, rest = line:sub(1, 1), line:sub(2)
  if kind == "-" then error(line) end
  if kind == "$" and rest ~= "-1" then return assert(sock:receive(tonumber(rest) + 2)) end
  if kind == "*" then
    for _ = 1, tonumber(rest) do reply(sock) end
  end
  return rest
end

-- As lua-resty-redis does: a socket from the pool, a request and its reply at a time.
function M.bare(key)
  local sock = ngx.socket.tcp()
  assert(sock:connect("127.0.0.1", %d, { pool_size = 256 }))
  for _, parts in ipairs { acquire, release } do
    assert(sock:send(command(parts, key)))
    reply(sock)
  end
  assert(sock:setkeepalive(60000, 256))
end

function M.ours(key)
  local lock = assert(M.client:acquire(key))
  assert(lock:release())
end

-- A key as long as the one that the commands were taken with.
function M.key(kind) return ("bench-%%s-%%010d"):format(kind, ngx.var.connection) end

function M.send(text)
  ngx.header.content_length = #text
  ngx.print(text)
end
return M
]]

local SERVER = [[
keepalive_requests 100000000;
location = /bare { content_by_lua_block {
  local app = require "app"
  app.bare(app.key "b")
  app.send "done"
} }
location = /ours { content_by_lua_block {
  local app = require "app"
  app.ours(app.key "o")
  app.send "done"
} }
location = /probe { content_by_lua_block { require("app").send "fast" } }
location = /wait { content_by_lua_block {
  local lock = require("app").client:acquire("held", { wait = tonumber(ngx.var.arg_s) })
  ngx.print(lock and "got" or "none")
} }
location = /sleep { content_by_lua_block {
  ngx.sleep(tonumber(ngx.var.arg_s))
  ngx.print "none"
} }
location = /each { content_by_lua_block {
  local app, core = require "app", require "dlock.core"
  local fn, key = app[ngx.var.arg_how], app.key(ngx.var.arg_how:sub(1, 1))
  local ffi = require "ffi"
  ffi.cdef "typedef struct { long s, ns; } bench_time; int clock_gettime(int, bench_time *);"
  local t, list = ffi.new "bench_time", {}
  local function us()
    ffi.C.clock_gettime(1, t)
    return tonumber(t.s) * 1e6 + tonumber(t.ns) / 1e3
  end
  for i = 1, 1000 do
    local began = us()
    fn(key)
    list[i] = us() - began
  end
  table.sort(list)
  ngx.print(list[500])
} }
]]

-- The parts of one request as a Lua table, the key replaced by a mark.
local function source_of(commands)
  assert(#commands == 1, "one request, not " .. #commands)
  local parts = {}
  for i, part in ipairs(commands[1]) do
    parts[i] = ("%q"):format((part:gsub("bench%-s%-0000000000", "@KEY@")))
  end
  return "{" .. table.concat(parts, ",") .. "}"
end

local function requests(server)
  local client = assert(dlock.connect(server.url))
  local key = "bench-s-0000000000"
  for _ = 1, 3 do assert(assert(client:acquire(key)):release()) end
  local watch = bench.watch(server)
  local lock = assert(client:acquire(key))
  local acquire = watch:commands()
  assert(lock:release())
  local release = watch:commands()
  watch:close()
  client:close()
  return source_of(acquire), source_of(release)
end

-- requests, p50, p99 (us)
local function load(web, path, connections, ms, every)
  local argv = { bench.program "http", web.port, path, connections, ms, every }
  for i = 1, #argv do argv[i] = tostring(argv[i]) end
  argv.stderr = "inherit"
  local status, out = helpers.spawn(argv):finish(60)
  local n, p50, p99, failed = out:match "(%d+) (%d+) (%d+) (%d+)"
  assert(status == 0 and failed == "0", out)
  return tonumber(n), tonumber(p50), tonumber(p99)
end

local function throughput(web)
  local us = bench.take_turns(ROUNDS, {
    function() return TURN_MS * 1000 / (load(web, "/bare", CONCURRENT, TURN_MS)) end,
    function() return TURN_MS * 1000 / (load(web, "/ours", CONCURRENT, TURN_MS)) end,
  })
  bench.ratio_row("64 guarded requests / two commands by cosocket", 1.25, us[1], us[2])
  bench.note(("%.0f requests a second, %.0f by cosocket"):format(1e6 / bench.median(us[2]),
    1e6 / bench.median(us[1])))
end

-- p99 of other requests, asked for every 2 ms, while 64 are at `path`.
local function stall(web, path)
  local others = {}
  for i = 1, CONCURRENT do others[i] = web:get(path) end
  local _, _, p99 = load(web, "/probe", 8, TURN_MS, 2000)
  for i = 1, CONCURRENT do others[i]:answer() end
  return p99
end

local function stalls(web, client)
  local held = assert(client:acquire "held")
  local seconds = TURN_MS / 1000 + 0.3
  local us = bench.take_turns(ROUNDS, {
    function() return stall(web, "/sleep?s=" .. seconds) end,
    function() return stall(web, "/wait?s=" .. seconds) end,
  })
  assert(held:release())
  local above = {}
  for i = 1, ROUNDS do above[i] = (us[2][i] - us[1][i]) / 1000 end
  bench.value_row("p99 of others while 64 wait, above 64 that sleep", 1, bench.median(above), "ms")
  bench.note(("p99 %.2f ms while they wait, %.2f ms while they sleep"):format(
    bench.median(us[2]) / 1000, bench.median(us[1]) / 1000))
end

local function rss(pid)
  return tonumber(helpers.read_file("/proc/" .. pid .. "/status"):match "VmRSS:%s+(%d+)")
end

local function memory(web, client, path)
  local pid = web:workers()[1]
  local held = assert(client:acquire "held")
  local before, others = rss(pid), {}
  for i = 1, WAITERS do others[i] = web:get(path .. "?s=2") end
  bench.sleep(1.2)
  local each = (rss(pid) - before) / WAITERS
  for i = 1, WAITERS do others[i]:answer() end
  assert(held:release())
  return each
end

local function latency(web)
  local us = bench.take_turns(ROUNDS, {
    function() return tonumber((web:ask "/each?how=bare")) end,
    function() return tonumber((web:ask "/each?how=ours")) end,
  })
  bench.ratio_row("a pair alone / two commands by cosocket", nil, us[1], us[2])
  bench.value_row("  added by the doorbell to each call", nil,
    (bench.median(us[2]) - bench.median(us[1])) / 2, "us")
end

bench.run("redis", function(server)
  local acquire, release = requests(server)
  local web = nginx.start {
    files = { app = APP:format(server.url, acquire, release, server.port) }, server = SERVER,
    workers = 1,
  }
  local client = assert(dlock.connect(server.url, { wait = 0 }))
  local ok, err = xpcall(function()
    load(web, "/bare", CONCURRENT, 200)
    load(web, "/ours", CONCURRENT, 200)
    throughput(web)
    latency(web)
    stalls(web, client)
    local sleeping, waiting = memory(web, client, "/sleep"), memory(web, client, "/wait")
    bench.value_row("memory of a waiting request", nil, waiting, "KB")
    bench.note(("%.1f KB if it sleeps instead"):format(sleeping))
    local complaints = web:complaints()
    if complaints ~= "" then bench.note(complaints) end
  end, debug.traceback)
  client:close()
  web:stop()
  if not ok then error(err, 0) end
end)
