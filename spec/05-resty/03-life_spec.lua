-- time limit: 240 s
-- only on luajit, which nginx has
-- Whatever ends a request or a worker: no lock stays held, no waiter stays in the
-- line, and the old worker ends.

local dlock = require "dlock"
local helpers = require "spec.helpers"
local nginx = require "spec.support.nginx"

local missing = nginx.missing()
local eventually = helpers.eventually

local APP = [[
local dlock = require "dlock"
local M = {}
M.client = assert(dlock.connect(%q, { wait = 60, ttl = %g }))
function M.text(ok, a, b)
  if ok then return "ok" end
  return tostring(b) .. ": " .. tostring(a)
end
function M.hold(key, go)
  return M.client:with(key, function()
    ngx.shared.shared:set("holding " .. key, true)
    while not ngx.shared.shared:get(go or "go") do ngx.sleep(0.005) end
  end)
end
return M
]]

local SERVER = [[
lua_check_client_abort on;
location = /hold { content_by_lua_block {
  local app = require "app"
  ngx.print(app.text(app.hold(ngx.var.arg_key)))
} }
location = /wait { content_by_lua_block {
  local app = require "app"
  ngx.print(app.text(app.client:with(ngx.var.arg_key, function() end)))
} }
location = /once { content_by_lua_block {
  local app = require "app"
  ngx.print(app.text(app.client:with(ngx.var.arg_key, { wait = 0 }, function() end)))
} }
location = /stats { content_by_lua_block {
  local s = require("app").client:stats()
  ngx.print("waiting=", s.waiting, " held=", s.held)
} }
location = /set { content_by_lua_block { ngx.shared.shared:set(ngx.var.arg_name, true) } }
location = /get { content_by_lua_block {
  ngx.print(tostring(ngx.shared.shared:get(ngx.unescape_uri(ngx.var.arg_name))))
} }
location = /clear { content_by_lua_block { ngx.shared.shared:flush_all() } }
location = /on_abort { content_by_lua_block {
  local app = require "app"
  ngx.on_abort(function()
    -- It may itself wait.
    ngx.shared.shared:set("aborted", app.text(app.client:with("in on_abort", function() end)))
    ngx.exit(499)
  end)
  app.client:with(ngx.var.arg_key, function() end)
} }
location = /killed { content_by_lua_block {
  local app = require "app"
  local waits = ngx.thread.spawn(function() app.client:with(ngx.var.arg_key, function() end) end)
  ngx.sleep(0.05)
  ngx.print(tostring(ngx.thread.kill(waits)))
} }
location = /killed_holding { content_by_lua_block {
  local app = require "app"
  local holds = ngx.thread.spawn(function()
    local lock = app.client:acquire(ngx.var.arg_key)
    ngx.sleep(60)
    lock:release()
  end)
  ngx.sleep(0.05)
  ngx.print(tostring(ngx.thread.kill(holds)))
} }
location = /fails { content_by_lua_block {
  require("app").client:with(ngx.var.arg_key, function() error "on purpose" end)
} }
location = /fails_holding { content_by_lua_block {
  local lock = require("app").client:acquire(ngx.var.arg_key)
  error("on purpose " .. lock.token_string)
} }
location = /exits { content_by_lua_block {
  require("app").client:with(ngx.var.arg_key, function() ngx.exit(204) end)
} }
location = /keeps { content_by_lua_block {
  local app = require "app"
  app.kept = assert(app.client:acquire(ngx.var.arg_key))
} }
location = /kept { content_by_lua_block {
  local app = require "app"
  ngx.print(tostring(app.kept and app.kept:is_held()))
} }
location = /sleep_timer { content_by_lua_block {
  local key = ngx.var.arg_key
  assert(ngx.timer.at(0, function()
    local app = require "app"
    local lock = app.client:acquire(key)
    error("on purpose " .. lock.token_string)
  end))
} }
]]

for _, name in ipairs { "local", "redis" } do
describe("ends in nginx over " .. name, function()
  if missing then
    pending("missing: " .. missing)
    return
  end
  local fixture, server, ttl

  -- Tells whether there is nothing left: on the server, and in the (one) worker.
  local function at_base()
    local keys = fixture.leftovers and fixture:leftovers() or {}
    if #keys > 0 then return false, "keys: " .. table.concat(keys, " ") end
    local stats = server:ask "/stats"
    return stats == "waiting=0 held=0", stats
  end

  local function start(options)
    ttl = options and options.ttl or 60
    server = nginx.start {
      files = { app = APP:format(fixture.url, ttl) },
      server = SERVER, workers = options and options.workers or 1,
      main = options and options.main, http = options and options.http,
    }
  end

  setup(function() fixture = require("spec.support.fixtures")[name].start() end)
  teardown(function() fixture:stop() end)
  after_each(function()
    if server then server:stop() end
    server = nil
    eventually(function()
      local keys = fixture.leftovers and fixture:leftovers() or {}
      return #keys == 0, table.concat(keys, " ")
    end, 5)
  end)

  local function holding(key)
    eventually(function() return server:ask("/get?name=holding%20" .. key) == "true" end, 5, "held")
  end
  local function waiting(n)
    eventually(function() return server:ask("/stats"):find("waiting=" .. n .. " ") end, 5,
      n .. " waiting")
  end
  local function go() server:ask "/set?name=go" end
  local function free(key, bound)
    eventually(function()
      local text = server:ask("/once?key=" .. key)
      return text == "ok", text
    end, bound or 5)
  end

  -- As free, but no request comes to the worker meanwhile, so that nothing makes garbage there.
  local function free_by_itself(key)
    local client = assert(dlock.connect(fixture.url))
    local lock, msg = client:acquire(key, { wait = helpers.bound(10) })
    assert.is_truthy(lock, msg)
    lock:release()
    client:close()
  end

  it("gives up the wait of an aborted request while others wait on", function()
    start()
    local holder = server:get "/hold?key=a"
    holding "a"
    local gone = server:get "/wait?key=a"
    waiting(1)
    local stays = server:get "/wait?key=a"
    waiting(2)
    gone:close()
    waiting(1) -- long before the lock is released
    go()
    assert.are.equal("ok", holder:answer())
    assert.are.equal("ok", stays:answer())
    eventually(at_base)
    assert.are.equal("", server:complaints())
  end)

  it("lets go of a lock that is granted to a request that is gone", function()
    start()
    local holder = server:get "/hold?key=a"
    holding "a"
    local gone = server:get "/wait?key=a"
    waiting(1)
    gone:close()
    go()
    assert.are.equal("ok", holder:answer())
    free("a", 2)
    eventually(at_base)
    assert.are.equal("", server:complaints())
  end)

  it("lets on_abort wait, and exit", function()
    start()
    local holder = server:get "/hold?key=a"
    holding "a"
    local gone = server:get "/on_abort?key=a"
    waiting(1)
    gone:close()
    eventually(function() return server:ask "/get?name=aborted" == "ok" end)
    waiting(0)
    go()
    assert.are.equal("ok", holder:answer())
    eventually(at_base)
    assert.are.equal("", server:complaints())
  end)

  it("releases what an aborted request held", function()
    start()
    local gone = server:get "/hold?key=a"
    holding "a"
    gone:close()
    free_by_itself "a"
    eventually(at_base)
    assert.are.equal("", server:complaints())
  end)

  it("gives up the wait of a killed light thread", function()
    start()
    local holder = server:get "/hold?key=a"
    holding "a"
    assert.are.equal("1", (server:ask "/killed?key=a"))
    waiting(0)
    go()
    assert.are.equal("ok", holder:answer())
    eventually(at_base)
    assert.are.equal("", server:complaints())
  end)

  it("releases what a killed light thread held", function()
    start()
    assert.are.equal("1", (server:ask "/killed_holding?key=a"))
    free_by_itself "a"
    eventually(at_base)
  end)

  it("releases at once after an error in the guarded function", function()
    start()
    local _, status = server:ask "/fails?key=a"
    assert.are.equal(500, status)
    assert.are.equal("ok", (server:ask "/once?key=a"))
    assert.truthy(server:log():find("on purpose", 1, true))
  end)

  for how, path in pairs { ["a handler that failed"] = "/fails_holding",
    ["a function that called ngx.exit"] = "/exits", ["a timer that failed"] = "/sleep_timer" } do
    it("releases what was held by " .. how, function()
      start()
      server:ask(path .. "?key=a")
      free_by_itself "a"
      eventually(at_base)
      assert.are.equal("", server:complaints { "on purpose" })
    end)
  end

  it("leaves a lock alone that is kept in a module", function()
    start()
    server:ask "/keeps?key=a"
    helpers.never(function() return server:ask "/kept" ~= "true" end, 4)
    assert.truthy(server:ask("/once?key=a"):find "^held")
  end)

  it("lets a holder and a waiter finish over a reload, and then ends the worker", function()
    start()
    local holder = server:get "/hold?key=a"
    holding "a"
    local waiter = server:get "/wait?key=a"
    waiting(1)
    local old = server:reload()
    local new = server:get "/wait?key=a" -- in the new worker
    waiting(1)
    go()
    assert.are.equal("ok", holder:answer())
    assert.are.equal("ok", waiter:answer())
    assert.are.equal("ok", new:answer())
    nginx.gone(old, 3)
    eventually(at_base)
    assert.are.equal("", server:complaints())
  end)

  it("ends an idle worker at once, and one with a kept lock, which is released", function()
    start()
    assert.are.equal("ok", (server:ask "/once?key=b"))
    local took = helpers.timed(function() nginx.gone(server:reload(), 5) end)
    assert.is_true(took < helpers.bound(3), "took " .. took)
    server:ask "/keeps?key=a"
    nginx.gone(server:reload(), 5)
    free "a"
    assert.are.equal("", server:complaints())
  end)

  it("gives up orphans in a worker that is about to end, so that it ends", function()
    start()
    local holder = server:get "/hold?key=a"
    holding "a"
    local gone = server:get "/wait?key=a"
    waiting(1)
    local old = server:reload()
    gone:close()
    go()
    assert.are.equal("ok", holder:answer())
    nginx.gone(old, 5)
    free "a"
    assert.are.equal("", server:complaints())
  end)

  for signal, number in pairs { QUIT = 3, TERM = 15 } do
    it("ends a worker at SIG" .. signal .. " with its locks released", function()
      start()
      server:ask "/keeps?key=k"
      local worker = server:workers()[1]
      if signal == "TERM" then
        server:get "/hold?key=a"
        holding "a"
      end
      helpers.proc.kill(worker, number)
      nginx.gone({ worker }, 3)
      eventually(function() return #server:workers() == 1 end)
      free("k", 2)
      if signal == "TERM" then free("a", 2) end
      assert.are.equal("", server:complaints { "open socket" })
    end)
  end

  it("leaves the locks of a worker that was killed to their lease", function()
    start { ttl = 1 }
    server:get "/hold?key=a"
    holding "a"
    local worker = server:workers()[1]
    helpers.proc.kill(worker, 9)
    nginx.gone({ worker }, 3)
    free("a", 4)
  end)

  it("works when no timer is left: waiters look for themselves", function()
    start { http = "lua_max_running_timers 0; lua_max_pending_timers 0;" }
    local holder = server:get "/hold?key=a"
    holding "a"
    local waiters = {}
    for i = 1, 8 do waiters[i] = server:get "/wait?key=a" end
    waiting(8)
    go()
    assert.are.equal("ok", holder:answer())
    for i = 1, 8 do assert.are.equal("ok", waiters[i]:answer()) end
    eventually(at_base)
    local old = server:reload()
    nginx.gone(old, 5)
  end)

  it("works with lua_code_cache off", function()
    start { http = "lua_code_cache off;" }
    for _ = 1, 3 do
      local holder = server:get "/hold?key=a"
      holding "a"
      local waiters = {}
      for i = 1, 8 do waiters[i] = server:get "/wait?key=a" end
      go()
      assert.are.equal("ok", holder:answer())
      for i = 1, 8 do assert.are.equal("ok", waiters[i]:answer()) end
      server:ask "/clear"
    end
    local pid = server:workers()[1]
    -- Each request had a Lua VM, a bell and a reader of its own: they end by themselves.
    eventually(function()
      local n = 0
      for _, fd in ipairs(helpers.proc.list("/proc/" .. pid .. "/fd")) do
        local to = helpers.proc.readlink("/proc/" .. pid .. "/fd/" .. fd)
        if to and to:find "^socket" then n = n + 1 end
      end
      return n <= 8, n .. " sockets"
    end, 15)
    assert.are.equal("", server:complaints { "lua_code_cache is off" })
  end)
end)
end
