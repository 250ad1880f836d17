-- Curator's InterProcessMutex and kazoo's Lock as processes that obey lines:
-- "acquire MS", "release", "bench N".

local helpers = require "spec.helpers"

local M = {}

local LIB = "/usr/share/java/"
local JARS = {}
for _, name in ipairs { "curator-recipes", "curator-framework", "curator-client", "zookeeper",
  "zookeeper-jute", "guava", "slf4j-api", "slf4j-nop" } do
  JARS[#JARS + 1] = LIB .. name .. ".jar"
end
local CLASSPATH = table.concat(JARS, ":")

local classes

local function compile()
  if classes then return classes end
  local dir = helpers.tmpdir()
  local status, out, err = helpers.run("javac", "-cp", CLASSPATH, "-d", dir,
    "spec/06-interop/Curator.java")
  assert(status == 0, out .. err)
  classes = dir
  return dir
end

local function start(argv)
  argv.stdin, argv.env = "pipe", { LD_PRELOAD = false }
  local p = helpers.spawn(argv)
  p:expect("ready\n", 30)
  return p
end

function M.curator(address, path)
  return start { "java", "-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp",
    compile() .. ":" .. CLASSPATH, "Curator", address, path }
end

function M.kazoo(address, path)
  return start { helpers.python, "spec/06-interop/kazoo_lock.py", address, path }
end

return M
