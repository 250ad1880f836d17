-- A real nginx with lua-nginx-module for specs: its configuration, its workers,
-- and an HTTP client for many requests at once.

local helpers = require "spec.helpers"
local proc = helpers.proc

local M = {}
local Server = {}
Server.__index = Server

local MODULES = os.getenv "NGINX_MODULES" or "/usr/lib/nginx/modules"

local CONF = [[
load_module %MODULES%/ndk_http_module.so;
load_module %MODULES%/ngx_http_lua_module.so;
user root;
worker_processes %WORKERS%;
daemon off;
pid %DIR%/nginx.pid;
error_log %DIR%/error.log warn;
%MAIN%
events { worker_connections 4096; }
http {
  access_log off;
  client_body_temp_path %DIR%/body;
  proxy_temp_path %DIR%/proxy;
  fastcgi_temp_path %DIR%/fastcgi;
  uwsgi_temp_path %DIR%/uwsgi;
  scgi_temp_path %DIR%/scgi;
  lua_package_path '%ROOT%/lua/?.lua;%ROOT%/lua/?/init.lua;%DIR%/?.lua;;';
  lua_package_cpath '%BUILD%/?.so;;';
  lua_shared_dict shared 1m;
  %HTTP%
  server {
    listen 127.0.0.1:%PORT% reuseport;
    keepalive_timeout 60;
    location = /pid { content_by_lua_block { ngx.print(ngx.worker.pid()) } }
    location = /fast { content_by_lua_block { ngx.print "fast" } }
    %SERVER%
  }
}
]]

--- Why specs that need it must be skipped; nil when they need not.
function M.missing()
  if not helpers.jit then return "nginx runs LuaJIT" end
  for _, file in ipairs { "ndk_http_module.so", "ngx_http_lua_module.so" } do
    if not helpers.read_file(MODULES .. "/" .. file) then return MODULES .. "/" .. file end
  end
end

--- Starts one. opts: server, http, main (parts of the configuration), files
-- ({ name = Lua source }, reachable by require), workers (2), env.
-- Fields: dir, port, pid (of the master).
function M.start(opts)
  local s = setmetatable({ opts = opts, dir = helpers.tmpdir(), bodies = 0 }, Server)
  for name, source in pairs(opts.files or {}) do
    helpers.write_file(s.dir .. "/" .. name .. ".lua", source)
  end
  for try = 1, 5 do
    s.port = proc.free_port()
    local ok, err = pcall(s.launch, s)
    if ok then break end
    if try == 5 then error(err, 0) end
  end
  return s
end

function Server:launch()
  local root = assert(io.popen "pwd"):read "*l"
  local values = {
    MODULES = MODULES, ROOT = root, BUILD = helpers.build, DIR = self.dir,
    PORT = tostring(self.port), WORKERS = tostring(self.opts.workers or 2),
    MAIN = self.opts.main or "", HTTP = self.opts.http or "", SERVER = self.opts.server or "",
  }
  local conf = CONF:gsub("%%(%u+)%%", values) -- and once more for what the parts have
  helpers.write_file(self.dir .. "/nginx.conf", (conf:gsub("%%(%u+)%%", values)))
  self:run()
end

--- Starts the configuration of an example, as `make nginx-demo` does, on a free port.
function M.start_example(dir, env)
  local s = setmetatable({ opts = { env = env }, dir = helpers.tmpdir() }, Server)
  local root = assert(io.popen "pwd"):read "*l"
  assert(helpers.run("ln", "-s", root .. "/" .. dir .. "/lua", s.dir .. "/app") == 0)
  assert(helpers.run("mkdir", s.dir .. "/tmp") == 0)
  s.port = proc.free_port()
  local conf = assert(helpers.read_file(dir .. "/nginx.conf"))
  for from, to in pairs {
    ["127.0.0.1:8080"] = "127.0.0.1:" .. s.port,
    ["/dev/stderr"] = "error.log",
    ["$prefix/../../lua"] = root .. "/lua",
    ["$prefix/../luajit"] = helpers.build,
  } do
    local quoted = from:gsub("%p", "%%%0")
    assert(conf:find(from, 1, true), from)
    conf = conf:gsub(quoted, (to:gsub("%%", "%%%%")))
  end
  helpers.write_file(s.dir .. "/nginx.conf", conf)
  s:run("-g", ("load_module %s/ndk_http_module.so; load_module %s/ngx_http_lua_module.so; "
    .. "user root;"):format(MODULES, MODULES))
  return s
end

function Server:run(...)
  helpers.write_file(self.dir .. "/error.log", "")
  local env = { LD_PRELOAD = os.getenv "DLOCK_PRELOAD" or false }
  for name, value in pairs(self.opts.env or {}) do env[name] = value end
  self.process = helpers.spawn {
    os.getenv "NGINX" or "nginx", "-p", self.dir .. "/", "-c", self.dir .. "/nginx.conf", "-e",
    "error.log", stdin = "", env = env, ...,
  }
  self.pid = self.process.pid
  helpers.eventually(function()
    if self.process:wait(0) ~= "running" then
      error("nginx ended: " .. self:log(), 0)
    end
    local fd = proc.connect(self.port)
    if fd then proc.close(fd) end
    return fd ~= nil
  end, 10, "nginx answers")
end

--- The error log so far.
function Server:log() return helpers.read_file(self.dir .. "/error.log") or "" end

--- Its lines that are worse than a notice, but for those that match a pattern of `but`.
function Server:complaints(but)
  local list = {}
  for line in self:log():gmatch "[^\n]+" do
    local bad = line:find "%[error%]" or line:find "%[alert%]" or line:find "%[crit%]"
      or line:find "%[emerg%]" or line:find "%[warn%]"
    for _, pattern in ipairs(but or {}) do bad = bad and not line:find(pattern) end
    if bad then list[#list + 1] = line end
  end
  return table.concat(list, "\n")
end

local function children_of(pid)
  local list = {}
  for _, entry in ipairs(assert(proc.list "/proc")) do
    local stat = entry:match "^%d+$" and helpers.read_file("/proc/" .. entry .. "/stat")
    local state, parent = (stat or ""):match "%) (%a) (%d+)"
    if tonumber(parent) == pid and state ~= "Z" then list[#list + 1] = tonumber(entry) end
  end
  table.sort(list)
  return list
end

--- Live workers, those that are shutting down included.
function Server:workers() return children_of(self.pid) end

--- How many descriptors a worker has, those of client connections apart.
function M.fds(pid)
  local n = 0
  for _, fd in ipairs(proc.list("/proc/" .. pid .. "/fd") or {}) do
    if proc.readlink("/proc/" .. pid .. "/fd/" .. fd) then n = n + 1 end
  end
  return n
end

function M.threads(pid) return #(proc.list("/proc/" .. pid .. "/task") or {}) end

--- Those of them that are dlock's own (client libraries may have more).
function M.own_threads(pid)
  local n = 0
  for _, tid in ipairs(proc.list("/proc/" .. pid .. "/task") or {}) do
    local name = helpers.read_file(("/proc/%s/task/%s/comm"):format(pid, tid))
    if name == "dlock\n" then n = n + 1 end
  end
  return n
end

-- ---- requests ----

local Request = {}
Request.__index = Request

--- Sends GET path on a connection of its own; answer() reads the response.
function Server:get(path, headers)
  local fd = assert(proc.connect(self.port))
  assert(proc.write(fd, "GET " .. path .. " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    .. (headers or "") .. "\r\n"))
  return setmetatable({ fd = fd, path = path }, Request)
end

--- Body and status; nil when the connection was closed without an answer.
function Request:answer(bound)
  local stop = helpers.now() + helpers.bound(bound or 20)
  local text = {}
  while true do
    local got, err = proc.read(self.fd, math.max(0, stop - helpers.now()) * 1000)
    if got == "" then break end
    if not got and err == "timeout" then
      self:close()
      error("no answer to " .. self.path .. " in time", 2)
    end
    if not got then break end
    text[#text + 1] = got
  end
  self:close()
  text = table.concat(text)
  local status, rest = text:match "^HTTP/1.1 (%d+)[^\r]*(\r\n.*)$"
  if not status then return nil, text end
  local head, body = rest:match "^(.-)\r\n\r\n(.*)$"
  if head:lower():find "transfer%-encoding: chunked" then
    local parts = {}
    local at = 1
    while true do
      local size, next_at = body:match("^(%x+)\r\n()", at)
      size = tonumber(size or "0", 16)
      if size == 0 then break end
      parts[#parts + 1] = body:sub(next_at, next_at + size - 1)
      at = next_at + size + 2
    end
    body = table.concat(parts)
  end
  return body, tonumber(status)
end

--- As a client that goes away.
function Request:close()
  if self.fd then proc.close(self.fd) end
  self.fd = nil
end

--- One request and its answer.
function Server:ask(path, headers) return self:get(path, headers):answer() end

--- n requests at once; the list of their bodies.
function Server:many(n, path)
  local requests, bodies = {}, {}
  for i = 1, n do requests[i] = self:get(path) end
  for i = 1, n do bodies[i] = requests[i]:answer(60) or "" end
  return bodies
end

function Server:signal(name)
  proc.kill(self.pid, ({ HUP = 1, QUIT = 3, TERM = 15 })[name])
end

--- Until none of these processes lives any more.
function M.gone(pids, bound)
  helpers.eventually(function()
    for _, pid in ipairs(pids) do
      local stat = helpers.read_file("/proc/" .. pid .. "/stat")
      if stat and not stat:find "%) Z" then return false, "worker " .. pid .. " lives" end
    end
    return true
  end, bound or 5)
end

-- It takes no new connections any more.
local function is_leaving(pid)
  local title = helpers.read_file("/proc/" .. pid .. "/cmdline")
  return not title or title == "" or title:find("shutting down", 1, true)
end

--- HUP, until the new workers alone serve; returns the pids of the old ones.
function Server:reload()
  local old = self:workers()
  local is_old = {}
  for _, pid in ipairs(old) do is_old[pid] = true end
  self:signal "HUP"
  helpers.eventually(function()
    local n = 0
    for _, pid in ipairs(self:workers()) do
      if not is_old[pid] then n = n + 1 end
    end
    for _, pid in ipairs(old) do
      if not is_leaving(pid) then return false end
    end
    return n == (self.opts.workers or 2)
  end, 10, "new workers")
  return old
end

function Server:stop()
  if self.process and not self.process.ended then
    local pids = self:workers()
    self:signal "TERM"
    if self.process:wait(5) == "running" then self.process:kill "KILL" end
    self.process:wait(5)
    for _, pid in ipairs(pids) do proc.kill(pid, 9) end
  end
  if self.process then self.process:close() end
  helpers.remove_tree(self.dir)
end

return M
