-- only on luajit, which nginx has
-- abort_on_lost in nginx: the guarded function runs in a light thread.

local helpers = require "spec.helpers"
local nginx = require "spec.support.nginx"

local missing = nginx.missing()

local APP = [[
local dlock = require "dlock"
local M = {}
M.client = assert(dlock.connect(%q, { wait = 5, ttl = 0.6 }))
function M.guarded(fn, ...)
  return M.client:with("k", { abort_on_lost = true }, fn, ...)
end
return M
]]

local SERVER = [[
location = /lost { content_by_lua_block {
  local app = require "app"
  local ok, msg, code = app.guarded(function()
    ngx.shared.shared:set("running", true)
    ngx.sleep(30)
    ngx.shared.shared:set("came to its end", true)
  end)
  ngx.print(tostring(ok), " ", tostring(code), " ", msg)
} }
location = /break { content_by_lua_block {
  ngx.print(tostring(require("app").client:break_lock("k")))
} }
location = /returns { content_by_lua_block {
  ngx.ctx.x = "ctx"
  local function fn(lock, a, b)
    if ngx.var.arg_sleep then ngx.sleep(tonumber(ngx.var.arg_sleep)) end
    return lock.key, a, b, ngx.ctx.x
  end
  local ok, key, a, b, x = require("app").guarded(fn, 1, 2)
  ngx.print(tostring(ok), " ", key, " ", a, " ", b, " ", x)
} }
location = /raises { content_by_lua_block {
  local value = {}
  local ok, err = pcall(require("app").guarded, function() ngx.sleep(0.001) error(value) end)
  ngx.print(tostring(ok), " ", tostring(err == value))
} }
location = /releases { content_by_lua_block {
  local ok, msg, code = require("app").guarded(function(lock)
    assert(lock:release())
    ngx.sleep(0.05)
    return "went on"
  end)
  ngx.print(tostring(ok), " ", tostring(msg))
} }
location = /get { content_by_lua_block {
  ngx.print(tostring(ngx.shared.shared:get(ngx.unescape_uri(ngx.var.arg_name))))
} }
location = /stats { content_by_lua_block {
  local s = require("app").client:stats()
  ngx.print("waiting=", s.waiting, " held=", s.held)
} }
]]

for _, name in ipairs { "local", "redis" } do
describe("abort_on_lost in nginx over " .. name, function()
  if missing then
    pending("missing: " .. missing)
    return
  end
  local fixture, server
  setup(function()
    fixture = require("spec.support.fixtures")[name].start()
    server = nginx.start {
      files = { app = APP:format(fixture.url) }, server = SERVER, workers = 1,
    }
  end)
  teardown(function()
    server:stop()
    fixture:stop()
  end)
  after_each(function() assert.are.equal("", server:complaints()) end)

  it("stops the function when the lock is lost", function()
    local request = server:get "/lost"
    helpers.eventually(function() return server:ask "/get?name=running" == "true" end)
    assert.are.equal("true", (server:ask "/break"))
    local body = request:answer(10)
    assert.truthy(body:find "^nil lost ", body)
    assert.are.equal("nil", (server:ask "/get?name=came%20to%20its%20end"))
    helpers.eventually(function() return server:ask "/stats" == "waiting=0 held=0" end)
  end)

  it("returns what the function returned, with its arguments and the request's context", function()
    assert.are.equal("true k 1 2 ctx", (server:ask "/returns"))
    assert.are.equal("true k 1 2 ctx", (server:ask "/returns?sleep=0.01"))
  end)

  it("lets the function's error through", function()
    assert.are.equal("false true", (server:ask "/raises"))
  end)

  it("does not stop a function that released the lock itself", function()
    assert.are.equal("true went on", (server:ask "/releases"))
  end)
end)
end
