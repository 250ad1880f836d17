-- time limit: 180 s
-- only on luajit, which nginx has
-- A real nginx with two workers: guarded requests, every phase, the other
-- requests of the worker, events.

local helpers = require "spec.helpers"
local nginx = require "spec.support.nginx"

local missing = nginx.missing()

local APP = [[
local dlock = require "dlock"
local M = { events = {} }
M.client = assert(dlock.connect(%q, {
  wait = 30, ttl = 10,
  on_event = function(ev) M.events[#M.events + 1] = ev.type end,
}))
function M.text(ok, a, b)
  if ok then return "ok" end
  return tostring(b) .. ": " .. tostring(a)
end
return M
]]

local SERVER = [[
location = /inc { content_by_lua_block {
  local app = require "app"
  local shared = ngx.shared.shared
  local ok, n, code = app.client:with("counter", function(lock)
    local v = shared:get("n") or 0
    ngx.sleep(0.001)
    shared:set("n", v + 1)
    shared:set("last token", math.max(shared:get("last token") or 0, lock.token))
    return v + 1
  end)
  ngx.print(ok and n or tostring(code) .. ": " .. tostring(n))
} }
location = /n { content_by_lua_block { ngx.print(ngx.shared.shared:get "n" or 0) } }
location = /hold { content_by_lua_block {
  local app = require "app"
  ngx.print(app.text(app.client:with("held", ngx.sleep and function()
    ngx.shared.shared:set("holding", true)
    repeat ngx.sleep(0.005) until ngx.shared.shared:get "go"
  end)))
} }
location = /wait { content_by_lua_block {
  local app = require "app"
  ngx.print(app.text(app.client:with("held", function() end)))
} }
location = /stats { content_by_lua_block {
  local s = require("app").client:stats()
  ngx.print(ngx.worker.pid(), " waiting=", s.waiting, " held=", s.held)
} }
location = /set { content_by_lua_block {
  ngx.shared.shared:set(ngx.var.arg_name, true)
} }
location = /get { content_by_lua_block {
  ngx.print(tostring(ngx.shared.shared:get(ngx.var.arg_name)))
} }
location = /deferred {
  access_by_lua_block {
    local app = require "app"
    ngx.ctx.lock = assert(app.client:acquire("deferred"))
  }
  content_by_lua_block { ngx.print(ngx.ctx.lock.token_string) }
  log_by_lua_block {
    local ok, msg, code = ngx.ctx.lock:release()
    ngx.shared.shared:set("log", tostring(ok) .. tostring(code))
    local again, _, why = ngx.ctx.lock:release()
    ngx.shared.shared:set("again", tostring(again) .. tostring(why))
  }
}
location = /events { content_by_lua_block {
  -- No call on the client here: the runtime delivers.
  local app = require "app"
  if ngx.var.arg_start then
    local lock = assert(app.client:acquire("of the events", { renew = false, ttl = 0.2 }))
    app.kept = lock
  end
  ngx.print(ngx.worker.pid(), " ", table.concat(app.events, " "))
} }
]]

local function counted(bodies)
  local seen, n = {}, 0
  for _, body in ipairs(bodies) do
    assert.is_truthy(tonumber(body), body)
    assert.is_nil(seen[body], "the counter had this value twice: " .. body)
    seen[body] = true
    n = n + 1
  end
  return n
end

helpers.each_backend(function(name, backend)
describe("nginx over " .. name, function()
  if missing then
    pending("missing: " .. missing)
    return
  end
  local fixture, server

  setup(function()
    fixture = backend.start()
    server = nginx.start {
      files = { app = APP:format(fixture.url) },
      http = "init_by_lua_block { require 'app' }",
      server = SERVER,
    }
  end)
  teardown(function()
    server:stop()
    fixture:stop()
  end)
  after_each(function()
    assert.are.equal("", server:complaints())
    helpers.eventually(function()
      local keys = fixture.leftovers and fixture:leftovers() or {}
      return #keys == 0, table.concat(keys, " ")
    end, 10)
  end)

  local function all_waiting(n)
    helpers.eventually(function()
      local seen, sum = {}, 0
      for _ = 1, 8 do
        local pid, waiting = server:ask("/stats"):match "^(%d+) waiting=(%d+)"
        if not seen[pid] then sum = sum + tonumber(waiting) end
        seen[pid] = true
      end
      return sum == n
    end, 20, n .. " requests wait")
  end

  it("starts nothing in the master, where init_by_lua connected", function()
    assert.are.equal(1, nginx.threads(server.pid))
  end)

  it("loses no update of 64 concurrent requests, three times", function()
    for round = 1, 3 do
      assert.are.equal(64, counted(server:many(64, "/inc")))
      assert.are.equal(64 * round, tonumber((server:ask "/n")))
    end
    for _, pid in ipairs(server:workers()) do
      -- libzookeeper has two of its own, which inherit the name.
      local most = name == "zookeeper" and 3 or 1
      assert.is_true(nginx.own_threads(pid) <= most, "one thread of ours in a worker")
    end
  end)

  it("lets other requests of the worker through while many wait, and wakes every one", function()
    server:ask "/set?name=none"
    local holder = server:get "/hold"
    helpers.eventually(function() return server:ask "/get?name=holding" == "true" end)
    local waiters = {}
    for i = 1, 32 do waiters[i] = server:get "/wait" end
    -- local: counts those who wait behind the other worker too
    all_waiting(32)
    for _ = 1, 20 do
      local took, body = helpers.timed(server.ask, server, "/fast")
      assert.are.equal("fast", body)
      assert.is_true(took < helpers.bound(2), "a request took " .. took)
    end
    server:ask "/set?name=go"
    assert.are.equal("ok", holder:answer())
    for i = 1, 32 do assert.are.equal("ok", waiters[i]:answer()) end
    all_waiting(0)
  end)

  it("releases in log what was acquired in access, without waiting", function()
    local last = 0
    for _ = 1, 20 do
      local token = tonumber((server:ask "/deferred"))
      assert.is_true(token > last)
      last = token
    end
    helpers.eventually(function() return server:ask "/get?name=log" == "truenil" end)
    assert.are.equal("nilnot_held", (server:ask "/get?name=again"))
    assert.are.equal(32, #server:many(32, "/deferred"))
  end)

  it("gives events to on_event though nobody calls the client", function()
    local body = server:ask "/events?start=1"
    local pid = body:match "^%d+"
    helpers.eventually(function()
      local now_pid, list = server:ask("/events"):match "^(%d+) (.*)$"
      return now_pid == pid and list:find "lost"
    end, 10, "the event lost")
  end)
end)
end)
