-- Real ZooKeeper servers for specs: one alone, or an ensemble.

local helpers = require "spec.helpers"
local proc = helpers.proc

local M = {}
local Server = {}
Server.__index = Server
local Ensemble = {}
Ensemble.__index = Ensemble

local LIB = "/usr/share/java/"
local JARS = LIB .. "zookeeper.jar:" .. LIB .. "slf4j-log4j12.jar:" .. LIB .. "log4j-1.2.jar"

local LOG = [[
log4j.rootLogger=WARN, F
log4j.appender.F=org.apache.log4j.FileAppender
log4j.appender.F.File=%s/zookeeper.log
log4j.appender.F.layout=org.apache.log4j.PatternLayout
log4j.appender.F.layout.ConversionPattern=%%d %%p %%c: %%m%%n
]]

-- Sessions as short as the specs' ttls, and containers that go soon.
local CONFIG = [[
dataDir=%s
clientPort=%d
clientPortAddress=127.0.0.1
tickTime=100
initLimit=50
syncLimit=%d
minSessionTimeout=1000
maxSessionTimeout=60000
maxClientCnxns=0
admin.enableServer=false
4lw.commands.whitelist=*
standaloneEnabled=true
snapshot.trust.empty=true
]]

local function write_config(s, lines)
  helpers.write_file(s.dir .. "/log4j.properties", LOG:format(s.dir))
  helpers.write_file(s.dir .. "/zoo.cfg", CONFIG:format(s.dir, s.port, s.sync_limit or 20)
    .. (lines or ""))
end

function Server:launch()
  self.process = helpers.spawn {
    "java", "-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto",
    "-cp", self.dir .. ":" .. JARS, "-Dzookeeper.forceSync=no", "-Dzookeeper.skipACL=no",
    "-Dznode.container.checkIntervalMs=500", "-Dznode.container.maxPerMinute=1000000",
    "-Djava.net.preferIPv4Stack=true", "-Dzookeeper.jmx.log4j.disable=true",
    "org.apache.zookeeper.server.quorum.QuorumPeerMain", self.dir .. "/zoo.cfg",
    stdin = "", stdout = "inherit", env = { LD_PRELOAD = false },
  }
  self.pid = self.process.pid
  self.stopped = false
end

function Server:await()
  helpers.eventually(function()
    if self.process:wait(0) ~= "running" then
      error("ZooKeeper ended: " .. (helpers.read_file(self.dir .. "/zookeeper.log") or ""), 0)
    end
    return (self:ask "srvr" or ""):find "Mode: %a"
  end, 40, "ZooKeeper answers")
end

local function new(fields)
  local s = setmetatable(fields, Server)
  s.dir = helpers.tmpdir()
  s.port = s.port or proc.free_port()
  s.address = "127.0.0.1:" .. s.port
  s.url = "zookeeper://" .. s.address
  return s
end

--- One server, which answers when this returns.
-- Fields: port, address, url, dir, pid.
function M.start()
  for try = 1, 3 do
    local s = new {}
    write_config(s)
    s:launch()
    local ok, err = pcall(s.await, s)
    if ok then return s end
    s:stop()
    if try == 3 then error(err, 0) end
  end
end

--- A four-letter word's answer, or nil when nobody answers.
function Server:ask(word)
  if self.stopped then return nil end
  local fd = proc.connect(self.port)
  if not fd then return nil end
  local text = {}
  if proc.write(fd, word) then
    while true do
      local got = proc.read(fd, 2000)
      if not got or got == "" then break end
      text[#text + 1] = got
    end
  end
  proc.close(fd)
  return table.concat(text)
end

--- A number of `mntr`, as in s:number "znode_count".
function Server:number(name)
  return tonumber((self:ask "mntr" or ""):match("zk_" .. name .. "%s+(%d+)"))
end

--- All ephemeral nodes, sorted.
function Server:ephemerals()
  local list, on = {}, false
  for line in (self:ask "dump" or ""):gmatch "[^\n]+" do
    if line:find "^Sessions with Ephemerals" then on = true end
    local path = on and line:match "^%s+(/.*)$"
    if path then list[#list + 1] = path end
  end
  table.sort(list)
  return list
end

--- What must be gone when all is over: places in lines.
function Server:leftovers()
  if self.stopped or self.process.ended then return {} end
  return self:ephemerals()
end

--- Sessions that this server knows of, as numbers in hex.
function Server:sessions()
  local list = {}
  for id in (self:ask "dump" or ""):gmatch "0x(%x+)\n" do list[#list + 1] = id end
  return list
end

--- SIGSTOP: the kernel goes on accepting and buffering, nothing is answered.
function Server:freeze()
  self.process:kill "STOP"
  self.stopped = true
  helpers.eventually(function()
    local stat = helpers.read_file("/proc/" .. self.pid .. "/stat") or ""
    return stat:match "^%d+ %(.*%) T"
  end, 5, "ZooKeeper stopped")
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
  self.stopped = true
end

--- Again on the same port with the same data; answers when this returns.
function Server:restart()
  self:kill()
  self:launch()
  self:await()
end

function Server:stop()
  if self.process then self:kill() end
  helpers.remove_tree(self.dir)
end

-- ---- an ensemble ----

local function serves(s) return (s:ask "srvr" or ""):match "Mode: (%a+)" end

--- n servers with one leader. opts.sync_limit in ticks of 0.1 s; opts.route(i, j, port)
-- gives the port through which server i reaches j's quorum port (for a proxy between).
-- Fields: servers, url.
function M.ensemble(n, opts)
  opts = opts or {}
  local e = setmetatable({ servers = {} }, Ensemble)
  local quorum, election, hosts = {}, {}, {}
  for i = 1, n do
    quorum[i], election[i] = proc.free_port(), proc.free_port()
    e.servers[i] = new { id = i, sync_limit = opts.sync_limit }
    hosts[i] = e.servers[i].address
  end
  for i, s in ipairs(e.servers) do
    local lines = {}
    for j = 1, n do
      local port = opts.route and i ~= j and opts.route(i, j, quorum[j]) or quorum[j]
      lines[j] = ("server.%d=127.0.0.1:%d:%d"):format(j, port, election[j])
    end
    helpers.write_file(s.dir .. "/myid", i .. "\n")
    write_config(s, table.concat(lines, "\n") .. "\n")
    s:launch()
  end
  for _, s in ipairs(e.servers) do s:await() end
  e.url = "zookeeper://" .. table.concat(hosts, ",")
  return e
end

--- The leader, and the followers.
function Ensemble:leader()
  local leader, rest = nil, {}
  for _, s in ipairs(self.servers) do
    if serves(s) == "leader" then leader = s else rest[#rest + 1] = s end
  end
  return leader, rest
end

function Ensemble:leftovers()
  local leader = self:leader()
  return leader and leader:ephemerals() or {}
end

function Ensemble:stop()
  for _, s in ipairs(self.servers) do s:stop() end
end

return M
