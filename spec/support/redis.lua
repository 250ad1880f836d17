-- A real redis-server for specs, and the smallest client that can check on it.

local helpers = require "spec.helpers"
local proc = helpers.proc

local M = {}
local Server = {}
Server.__index = Server

-- ---- a connection ----

local Connection = {}
Connection.__index = Connection

local function encode(...)
  local n = select("#", ...)
  local out = { "*" .. n .. "\r\n" }
  for i = 1, n do
    local s = tostring((select(i, ...)))
    out[#out + 1] = "$" .. #s .. "\r\n" .. s .. "\r\n"
  end
  return table.concat(out)
end

function Connection:fill()
  local got, err = proc.read(self.fd, helpers.bound(10) * 1000)
  assert(got and got ~= "", err or "the server closed the connection")
  self.buf = self.buf .. got
end

function Connection:line()
  while true do
    local at = self.buf:find("\r\n", 1, true)
    if at then
      local line = self.buf:sub(1, at - 1)
      self.buf = self.buf:sub(at + 2)
      return line
    end
    self:fill()
  end
end

function Connection:reply()
  local line = self:line()
  local kind, rest = line:sub(1, 1), line:sub(2)
  if kind == "+" then return rest end
  if kind == "-" then return nil, rest end
  if kind == ":" then return tonumber(rest) end
  local n = tonumber(rest)
  if n < 0 then return nil end
  if kind == "$" then
    while #self.buf < n + 2 do self:fill() end
    local s = self.buf:sub(1, n)
    self.buf = self.buf:sub(n + 3)
    return s
  end
  assert(kind == "*", line)
  local list = {}
  for i = 1, n do
    local v, err = self:reply()
    list[i] = v == nil and (err or false) or v
  end
  return list
end

--- Sends one command and returns its reply: string, number, list, nil for
-- "none"; nil, message for an error.
function Connection:call(...)
  assert(proc.write(self.fd, encode(...)))
  return self:reply()
end

function Connection:send(...) assert(proc.write(self.fd, encode(...))) end

function Connection:close()
  if self.fd then proc.close(self.fd) end
  self.fd = nil
end

--- To a port or the path of a socket. nil, message when nobody is there.
function M.connect(where)
  local fd, err = proc.connect(where)
  if not fd then return nil, err end
  return setmetatable({ fd = fd, buf = "" }, Connection)
end

-- ---- the server ----

--- Starts one: a free loopback port and a unix socket in a directory of its
-- own, nothing saved to disk. `opts.config` has more options ({ maxmemory =
-- "1mb" }); opts.password sets requirepass; opts.persist keeps data over
-- restarts (append-only file, every write). Waits until it answers.
-- Fields: port, socket, dir, pid, url, unix_url.
function M.start(opts)
  opts = opts or {}
  local s = setmetatable({ opts = opts, dir = helpers.tmpdir() }, Server)
  s.socket = s.dir .. "/redis.sock"
  for try = 1, 5 do
    s.port = proc.free_port()
    local ok, err = pcall(s.launch, s)
    if ok then break end
    if try == 5 then error(err, 0) end
  end
  s.url = "redis://127.0.0.1:" .. s.port
  s.unix_url = "redis+unix://" .. s.socket
  return s
end

function Server:launch()
  local bin = os.getenv "REDIS_SERVER" or "redis-server"
  local what = { bin, "--port", tostring(self.port), "--bind", "127.0.0.1", "--unixsocket",
    self.socket, "--dir", self.dir, "--save", "", "--appendonly",
    self.opts.persist and "yes" or "no", "--appendfsync", "always", "--daemonize", "no",
    "--logfile", self.dir .. "/redis.log" }
  if self.opts.password then
    what[#what + 1], what[#what + 2] = "--requirepass", self.opts.password
  end
  for name, value in pairs(self.opts.config or {}) do
    what[#what + 1], what[#what + 2] = "--" .. name, tostring(value)
  end
  what.stdin, what.stdout = "", "inherit"
  self.process = helpers.spawn(what)
  self.pid = self.process.pid
  helpers.eventually(function()
    if self.process:wait(0) ~= "running" then
      error("redis-server ended: " .. (helpers.read_file(self.dir .. "/redis.log") or ""), 0)
    end
    return self:answers()
  end, 10, "redis-server answers")
end

function Server:answers()
  local c = M.connect(self.socket)
  if not c then return false end
  local _, err = c:call "PING"
  c:close()
  return not (err and err:find "LOADING")
end

--- A connection as the default user (logged in when there is a password).
function Server:connect()
  local c = assert(M.connect(self.socket))
  if self.opts.password then assert(c:call("AUTH", self.opts.password)) end
  return c
end

--- One command, over a connection that is opened and closed for it.
function Server:call(...)
  local c = self:connect()
  local function finish(...)
    c:close()
    return ...
  end
  return finish(c:call(...))
end

--- A number out of INFO, as in s:info("total_commands_processed").
function Server:info(name)
  return tonumber(self:call("INFO"):match(name .. ":([%d.]+)"))
end

--- All keys but fencing counters, sorted: what must be gone when all is over.
function Server:leftovers()
  if self.process.ended or self.stopped then return {} end
  local keys = {}
  for _, key in ipairs(assert(self:call("KEYS", "*"))) do
    if not key:find ":fence$" then keys[#keys + 1] = key end
  end
  table.sort(keys)
  return keys
end

--- SIGSTOP: the kernel goes on accepting and buffering, nothing is answered.
function Server:freeze()
  self.process:kill "STOP"
  self.stopped = true
  helpers.eventually(function()
    local stat = helpers.read_file("/proc/" .. self.pid .. "/stat") or ""
    return stat:match "^%d+ %(.*%) T"
  end, 5, "redis-server stopped")
end

function Server:thaw()
  self.process:kill "CONT"
  self.stopped = false
end

--- kill -9, and reap it.
function Server:kill()
  self.process:kill "KILL"
  self.process:wait(10)
  self.process:close()
end

--- Again on the same port: after kill, or after a kill of its own.
function Server:restart()
  self:kill()
  self.stopped = false
  self:launch()
end

function Server:stop()
  if self.process then self:kill() end
  helpers.remove_tree(self.dir)
end

return M
