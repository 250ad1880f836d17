-- only on luajit, which nginx has
-- Every call in every phase of nginx: it works, or says `unsupported` and where
-- it would work; nothing blocks and nothing is left.

local helpers = require "spec.helpers"
local nginx = require "spec.support.nginx"

local missing = nginx.missing()

-- probe(phase) does every call and writes what came of each into the shared
-- dictionary, "phase call" -> "ok", "nil CODE", or "raised ...".
local APP = [[
local dlock = require "dlock"
local M = { url = %q, held = {} }
M.client = assert(dlock.connect(M.url, { wait = 5, ttl = 10 }))

local function outcome(ok, a, b, c)
  if not ok then return "raised " .. tostring(a) end
  if a == nil then return "nil " .. tostring(c) .. " | " .. tostring(b) end
  return "ok"
end

local function note(phase, call, ...)
  ngx.shared.shared:set(phase .. " " .. call, outcome(pcall(...)))
end

-- A lock that was acquired where that was possible, to be used in this phase.
function M.prepare(phase) M.held[phase] = assert(M.client:acquire("used in " .. phase)) end

local function lock_calls(phase, lock)
  note(phase, "is_held", lock.is_held, lock)
  note(phase, "remaining", lock.remaining, lock)
  note(phase, "lost_reason", function() return lock:lost_reason() or "none" end)
  note(phase, "ensure enough", lock.ensure, lock, 1)
  note(phase, "extend", lock.extend, lock, 12)
  note(phase, "wait_lost", lock.wait_lost, lock, 0.01)
  note(phase, "release", lock.release, lock)
  note(phase, "release again", lock.release, lock)
end

function M.probe(phase)
  local client = M.client
  note(phase, "connect", dlock.connect, M.url)
  note(phase, "acquire", function()
    local lock, msg, code = client:acquire("acquired in " .. phase)
    if lock then lock:release() end
    return lock and true, msg, code
  end)
  note(phase, "acquire once", function()
    local lock, msg, code = client:acquire("once in " .. phase, { wait = 0 })
    if lock then lock:release() end
    return lock and true, msg, code
  end)
  note(phase, "with", client.with, client, "with in " .. phase, function() return 1 end)
  note(phase, "with abort_on_lost", client.with, client, "aborted in " .. phase,
    { abort_on_lost = true }, function() return 1 end)
  note(phase, "inspect", client.inspect, client, "x")
  note(phase, "list", client.list, client)
  note(phase, "ping", client.ping, client)
  note(phase, "break_lock", client.break_lock, client, "x")
  note(phase, "stats", client.stats, client)
  note(phase, "poll", client.poll, client)
  note(phase, "close", function()
    local other = assert(dlock.connect(M.url))
    return other:close()
  end)
  if M.held[phase] then lock_calls(phase, M.held[phase]) end
  ngx.shared.shared:set("probed " .. phase, true)
end
return M
]]

local HTTP = [[
init_by_lua_block { require("app").probe("init") }
init_worker_by_lua_block {
  if ngx.worker.id() == 0 then
    require("app").probe("init_worker")
    ngx.timer.at(0, function()
      local app = require "app"
      app.prepare("timer")
      app.probe("timer")
    end)
  end
}
exit_worker_by_lua_block {
  local app = require "app"
  app.probe("exit_worker")
  local f = io.open("%DIR%/exit", "w")
  local shared = ngx.shared.shared
  for _, key in ipairs(shared:get_keys(0)) do
    if key:find "^exit_worker" then f:write(key, "=", tostring(shared:get(key)), "\n") end
  end
  f:close()
}
upstream backend {
  server 0.0.0.1;
  balancer_by_lua_block {
    require("app").probe("balancer")
    require("ngx.balancer").set_current_peer("127.0.0.1", %PORT%)
  }
}
]]

local SERVER = [[
location = /prepare { content_by_lua_block {
  require("app").prepare(ngx.var.arg_phase)
} }
location = /phases {
  set_by_lua_block $unused { require("app").probe("set") return 1 }
  rewrite_by_lua_block { require("app").probe("rewrite") }
  access_by_lua_block { require("app").probe("access") }
  content_by_lua_block { require("app").probe("content") ngx.print "done" }
  header_filter_by_lua_block { require("app").probe("header_filter") }
  body_filter_by_lua_block {
    if not ngx.ctx.probed then require("app").probe("body_filter") end
    ngx.ctx.probed = true
  }
  log_by_lua_block { require("app").probe("log") }
}
location = /balanced { proxy_pass http://backend/fast; }
location = /result { content_by_lua_block {
  ngx.print(tostring(ngx.shared.shared:get(ngx.unescape_uri(ngx.var.arg_name))))
} }
]]

local WAITS = { "acquire", "acquire once", "with", "with abort_on_lost", "inspect", "list", "ping",
  "break_lock" }
local NEVER_WAITS = { "connect", "stats", "poll", "close" }
local CAN = { "rewrite", "access", "content", "timer" }
local CANNOT = { "init", "init_worker", "set", "header_filter", "body_filter", "log", "balancer" }
local PREPARED = { "set", "rewrite", "access", "content", "header_filter", "body_filter", "log",
  "balancer" }

for _, name in ipairs { "local", "redis" } do
describe("phases of nginx over " .. name, function()
  if missing then
    pending("missing: " .. missing)
    return
  end
  local fixture, server

  setup(function()
    fixture = require("spec.support.fixtures")[name].start()
    server = nginx.start {
      files = { app = APP:format(fixture.url) },
      http = HTTP, server = SERVER, workers = 1,
    }
    for _, phase in ipairs(PREPARED) do server:ask("/prepare?phase=" .. phase) end
    assert.are.equal("done", (server:ask "/phases"))
    assert.are.equal("fast", (server:ask "/balanced"))
  end)
  teardown(function()
    server:stop()
    fixture:stop()
  end)

  local function result(phase, call)
    helpers.eventually(function()
      return server:ask("/result?name=probed%20" .. phase) == "true"
    end, 10, phase .. " was probed")
    return (server:ask("/result?name=" .. (phase .. " " .. call):gsub(" ", "%%20")))
  end

  for _, phase in ipairs(CAN) do
    it("does everything in " .. phase, function()
      for _, calls in ipairs { WAITS, NEVER_WAITS, { "is_held", "remaining", "lost_reason",
        "ensure enough", "extend", "release" } } do
        for _, call in ipairs(calls) do assert.are.equal("ok", result(phase, call), call) end
      end
      assert.truthy(result(phase, "wait_lost"):find "^nil timeout ")
      assert.truthy(result(phase, "release again"):find "^nil not_held ")
    end)
  end

  for _, phase in ipairs(CANNOT) do
    it("waits for nothing in " .. phase .. ", and says where it would", function()
      for _, call in ipairs(WAITS) do
        local text = result(phase, call)
        assert.truthy(text:find("^nil unsupported | .*in the phase " .. phase),
          call .. ": " .. text)
        assert.truthy(text:find("content", 1, true) and text:find("ngx.timer.at", 1, true), text)
      end
      for _, call in ipairs(NEVER_WAITS) do
        assert.are.equal("ok", result(phase, call), call)
      end
    end)
  end

  for _, phase in ipairs { "set", "header_filter", "body_filter", "log", "balancer" } do
    it("looks at a lock and releases it in " .. phase, function()
      for _, call in ipairs { "is_held", "remaining", "lost_reason", "ensure enough", "release" } do
        assert.are.equal("ok", result(phase, call), call)
      end
      for _, call in ipairs { "extend", "wait_lost" } do
        assert.truthy(result(phase, call):find "^nil unsupported ", call)
      end
      assert.truthy(result(phase, "release again"):find "^nil not_held ")
    end)
  end

  it("leaves nothing on the server, and nothing in the error log", function()
    helpers.eventually(function()
      local keys = fixture.leftovers and fixture:leftovers() or {}
      return #keys == 0, table.concat(keys, " ")
    end, 5)
    assert.are.equal("", server:complaints())
  end)

  it("refuses to wait in exit_worker, and lets the worker end", function()
    local old = server:reload()
    nginx.gone(old, 5)
    local text = assert(helpers.read_file(server.dir .. "/exit"))
    for _, call in ipairs(WAITS) do
      assert.truthy(text:find("exit_worker " .. call .. "=nil unsupported", 1, true), call .. text)
    end
    for _, call in ipairs(NEVER_WAITS) do
      assert.truthy(text:find("exit_worker " .. call .. "=ok", 1, true), call .. text)
    end
    assert.are.equal("", server:complaints())
  end)
end)
end
