-- time limit: 300 s
-- only on luajit, which nginx has
-- An hour's worth of reloads: 50 HUPs under load. Every request is answered,
-- every old worker ends, and nothing is left anywhere.

local helpers = require "spec.helpers"
local nginx = require "spec.support.nginx"

local missing = nginx.missing()

local APP = [[
local dlock = require "dlock"
return assert(dlock.connect(%q, { wait = 60, ttl = 10 }))
]]

local SERVER = [[
location = /inc { content_by_lua_block {
  local n, msg = require("app"):with("counter", function()
    local shared = ngx.shared.shared
    local v = shared:get("n") or 0
    ngx.sleep(0.001)
    shared:set("n", v + 1)
  end)
  ngx.print(n and "ok" or msg)
} }
location = /n { content_by_lua_block { ngx.print(ngx.shared.shared:get "n" or 0) } }
]]

local function bell_directories()
  local n = 0
  for _, dir in ipairs { "/tmp", "/dev/shm" } do
    for _, entry in ipairs(helpers.proc.list(dir) or {}) do
      if entry:find "^dlock%-bell%-" then n = n + 1 end
    end
  end
  return n
end

for _, name in ipairs { "local", "redis" } do
describe("reloads of nginx over " .. name, function()
  if missing then
    pending("missing: " .. missing)
    return
  end

  it("50 times under load leave nothing behind", function()
    local fixture = require("spec.support.fixtures")[name].start()
    local before = bell_directories()
    local server = nginx.start { files = { app = APP:format(fixture.url) }, server = SERVER }
    local ok, err = pcall(function()
      -- The first worker answers before the master has its socket pair with the second.
      helpers.eventually(function() return #server:workers() == 2 end, 10, "both workers")
      local master_fds, answered = nginx.fds(server.pid), 0
      for _ = 1, 50 do
        local requests = {}
        for i = 1, 8 do requests[i] = server:get "/inc" end
        server:signal "HUP"
        for i = 1, 8 do
          -- One that came to a worker as it closed its listening socket is cut: nginx's own.
          local body = requests[i]:answer(30)
          if body then
            assert.are.equal("ok", body)
            answered = answered + 1
          end
        end
      end
      helpers.eventually(function() return #server:workers() == 2, #server:workers() end, 10,
        "old workers end")
      assert.is_true(answered >= 360, answered .. " of 400 requests were answered")
      local n = tonumber((server:ask "/n"))
      assert.is_true(n >= answered and n <= 400, n .. " updates, " .. answered .. " answers")
      helpers.eventually(function()
        local fds = nginx.fds(server.pid)
        return fds <= master_fds, fds .. " descriptors of the master, were " .. master_fds
      end)
      assert.are.equal(1, nginx.threads(server.pid))
      assert.are.equal("", server:complaints())
      assert.are.equal(before, bell_directories())
      helpers.eventually(function()
        local keys = fixture.leftovers and fixture:leftovers() or {}
        return #keys == 0, table.concat(keys, " ")
      end, 5)
    end)
    server:stop()
    if name == "redis" then
      helpers.eventually(function() return fixture:info "connected_clients" <= 1 end, 5,
        "connections")
    end
    fixture:stop()
    if not ok then error(err, 0) end
  end)
end)
end
