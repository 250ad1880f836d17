-- The command on a terminal, under an interactive shell: Ctrl-C, Ctrl-Z, fg, & and pipelines
-- work as without dlock.
-- time limit: 240 s

local command = require "spec.support.command"
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"

local eventually, proc = helpers.eventually, helpers.proc

local CTRL_C, CTRL_D, CTRL_Z, CTRL_BACKSLASH = "\3", "\4", "\26", "\28"

describe("dlock run on a terminal", function()
  local server, dir, url, sh
  setup(function() server = redis.start() end)
  teardown(function() server:stop() end)

  -- The prompt is told from the echo of what was typed by the digits that the shell puts in.
  local function type_in(text)
    sh:write(text .. "\r")
  end

  local function prompt(bound) return sh:expect("ps(%d+)> ", bound) end

  -- Runs a line and returns its exit status.
  local function line(text)
    type_in(text)
    prompt()
    type_in "echo status=$?"
    return tonumber((sh:expect "status=(%d+)"))
  end

  -- Starts a holder of the lock in the background and waits until it has it.
  local function hold_in_background(seconds)
    type_in("dlock run k -- sh -c 'echo held; exec sleep " .. seconds .. "' &")
    sh:expect "held"
    type_in "echo syn''c"
    sh:expect "sync"
    prompt()
  end

  before_each(function()
    dir = helpers.tmpdir()
    url = "local://" .. dir
    sh = helpers.spawn { "bash", "--norc", "--noprofile", "-i", tty = true,
      env = { PS1 = "ps$((0))> ", DLOCK_URL = url, HISTFILE = false, TERM = "dumb", LC_ALL = "C",
        PATH = helpers.build .. "/bin:" .. os.getenv "PATH" } }
    prompt()
    type_in "bind 'set enable-bracketed-paste off' 2>/dev/null; stty -echo"
    prompt()
  end)
  after_each(function() sh:close() end)

  it("ends the command by one Ctrl-C, with 130", function()
    type_in "dlock run k -- sh -c 'echo ready; exec sleep 60'"
    sh:expect "ready"
    sh:write(CTRL_C)
    prompt()
    type_in "echo status=$?"
    assert.equal("130", (sh:expect "status=(%d+)"))
  end)

  it("gives a command that handles Ctrl-C one SIGINT", function()
    local script = command.script(dir, [[
      trap 'echo got-int' INT
      echo ready
      n=0
      while [ $n -lt 30 ]; do sleep 0.02; n=$((n + 1)); done
      echo over
      exit 7]])
    type_in("dlock run k -- sh " .. script)
    sh:expect "ready"
    sh:write(CTRL_C)
    local text = sh:expect "^(.-)over"
    local _, n = text:gsub("got%-int", "")
    assert.equal(1, n)
    prompt()
    type_in "echo status=$?"
    assert.equal("7", (sh:expect "status=(%d+)"))
  end)

  it("passes Ctrl-\\ to the command alone", function()
    type_in "ulimit -c 0; dlock run k -- sh -c 'echo ready; exec sleep 60'"
    sh:expect "ready"
    sh:write(CTRL_BACKSLASH)
    prompt()
    type_in "echo status=$?"
    assert.equal("131", (sh:expect "status=(%d+)"))
  end)

  it("leaves the line on Ctrl-C", function()
    hold_in_background(60)
    type_in "dlock run -v k -- true"
    sh:expect "asking for the lock"
    proc.pause(200)
    sh:write(CTRL_C)
    prompt()
    type_in "echo status=$?"
    assert.equal("130", (sh:expect "status=(%d+)"))
    type_in "kill %1; wait"
    prompt()
    assert.equal(0, line "dlock run -n k -- true")
  end)

  it("stays in the line over Ctrl-Z and fg", function()
    hold_in_background(3)
    type_in "dlock run -v k -- echo two"
    sh:expect "asking for the lock"
    proc.pause(200)
    sh:write(CTRL_Z)
    sh:expect "Stopped"
    prompt()
    type_in "fg"
    sh:expect "two"
    prompt()
  end)

  -- A script that says when it runs (after `first`), and a function that waits for that and
  -- returns its pid.
  local function started(first, what)
    local pidfile = dir .. "/pid"
    os.remove(pidfile)
    local script = command.script(dir, table.concat({ first, "echo $$ > " .. pidfile, "echo ready",
      what }, "\n"))
    return script, function()
      sh:expect "ready"
      return command.pids(pidfile, 1)[1]
    end
  end

  it("stops wrapper and command on Ctrl-Z, and fg goes on with both", function()
    local script, pid_of = started("", "read line; echo \"<$line>\"; exit 4")
    type_in("dlock run k -- sh " .. script)
    local pid = pid_of()
    local keeper = tonumber(command.stat(pid, 2))
    local wrapper = tonumber(command.stat(keeper, 2))
    sh:write(CTRL_Z)
    sh:expect "Stopped"
    prompt()
    eventually(function() return command.state(pid) == "T" and command.state(wrapper) == "T" end)
    assert.not_equal("T", command.state(keeper))
    assert.equal(75, line "dlock run -n k -- true") -- it is held all the while
    type_in "fg"
    proc.pause(100)
    type_in "abc"
    sh:expect "<abc>"
    prompt()
    type_in "echo status=$?"
    assert.equal("4", (sh:expect "status=(%d+)"))
  end)

  it("stops when a command that handles Ctrl-Z has tidied up", function()
    -- Not sh, which would wait for a child of its own that Ctrl-Z has stopped.
    helpers.write_file(dir .. "/editor.py", [[
import os, signal, time
def tidy(*_):
    time.sleep(0.3)
    print("tidied", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    print("resumed", flush=True)
    os._exit(6)
signal.signal(signal.SIGTSTP, tidy)
print("ready", flush=True)
while True: time.sleep(1)
]])
    type_in("dlock run k -- " .. helpers.python .. " " .. dir .. "/editor.py")
    sh:expect "ready"
    sh:write(CTRL_Z)
    sh:expect "tidied"
    sh:expect "Stopped"
    prompt()
    type_in "fg"
    sh:expect "resumed"
    prompt()
    type_in "echo status=$?"
    assert.equal("6", (sh:expect "status=(%d+)"))
  end)

  it("does not stop under a command that ignores Ctrl-Z", function()
    local script, pid_of = started("trap '' TSTP", [[
      n=0
      while [ $n -lt 20 ]; do sleep 0.05; n=$((n + 1)); done
      exit 8]])
    type_in("dlock run k -- sh " .. script)
    pid_of()
    sh:write(CTRL_Z)
    prompt()
    type_in "echo status=$?"
    assert.equal("8", (sh:expect "status=(%d+)"))
  end)

  it("goes on after Ctrl-Z and fg in time, with a lease", function()
    local script, pid_of = started("", "sleep 1.5; exit 4")
    type_in("dlock run --url " .. server.url .. " --ttl 3s k -- sh " .. script)
    pid_of()
    sh:write(CTRL_Z)
    sh:expect "Stopped"
    prompt()
    type_in "fg"
    prompt()
    type_in "echo status=$?"
    assert.equal("4", (sh:expect "status=(%d+)"))
  end)

  it("kills the stopped command when its lease ends, and never continues it", function()
    local script, pid_of = started(
      "trap 'echo continued' CONT; trap 'echo terminated' TERM", "sleep 60; sleep 60")
    local function scenario()
      type_in("dlock run --url " .. server.url .. " --ttl 2s k -- sh " .. script)
      local pid = pid_of()
      sh:write(CTRL_Z)
      sh:expect "Stopped"
      prompt()
      local c = server:connect()
      local function free() return not c:call("GET", "k") end
      local ok, why = pcall(command.gone_before, { pid }, free)
      eventually(free, 5)
      c:close()
      type_in "fg"
      local text = sh:expect "(.-not renewed in time)"
      prompt()
      if not ok then error(why, 0) end
      assert.is_nil(text:find "continued")
      assert.is_nil(text:find "terminated")
      type_in "echo status=$?"
      assert.equal("70", (sh:expect "status=(%d+)"))
      prompt()
    end
    command.unstalled(scenario)
  end)

  it("works in the background", function()
    type_in "dlock run k -- sh -c 'sleep 0.2; exit 5' & wait $!; echo status=$?"
    assert.equal("5", (sh:expect "status=(%d+)"))
    prompt()
    -- Reading the terminal stops the job, as it would without dlock.
    type_in "dlock run k -- sh -c 'read line; echo \"<$line>\"' &"
    eventually(function()
      type_in "jobs"
      prompt()
      type_in "jobs | grep -c Stopped | sed s/^/stopped=/"
      return sh:expect "stopped=(%d)" == "1"
    end)
    type_in "fg"
    proc.pause(200)
    type_in "abc"
    sh:expect "<abc>"
  end)

  it("works in a pipeline", function()
    assert.equal(0, line "echo abc | dlock run k -- tr a-z A-Z | grep -q ABC")
    type_in "yes | dlock run k -- cat | head -n1; echo ${PIPESTATUS[1]}=rc"
    sh:expect "y%s+141=rc"
    type_in "dlock run k -- cat | tr a-z A-Z"
    proc.pause(300)
    type_in "typed"
    sh:write(CTRL_D)
    sh:expect "TYPED"
    prompt()
  end)

  it("hands the terminal's size and hangup to the command", function()
    type_in("dlock run k -- sh -c 'trap \"echo hup > " .. dir .. "/hup; exit\" HUP; echo ready; "
      .. "while :; do sleep 0.05; done'")
    sh:expect "ready"
    proc.close(sh.tty)
    sh.tty, sh.out = nil, nil
    eventually(function() return helpers.read_file(dir .. "/hup") == "hup\n" end)
  end)
end)

describe("dlock run as the leader of a session", function()
  -- As sshd starts it: the hangup goes to the leader alone, and Ctrl-Z to nobody's shell.
  local dir
  before_each(function() dir = helpers.tmpdir() end)

  local function start(script)
    return helpers.spawn { command.path, "run", "--url", "local://" .. dir, "k", "--", "sh",
      command.script(dir, script), tty = true }
  end

  it("passes a hangup on", function()
    local p = start("trap 'echo hup > " .. dir .. "/hup; exit 3' HUP; echo ready; "
      .. "while :; do sleep 0.05; done")
    p:expect "ready"
    proc.close(p.tty)
    p.tty, p.out = nil, nil
    eventually(function() return helpers.read_file(dir .. "/hup") == "hup\n" end)
    assert.equal(3, (p:finish()))
  end)

  it("is not stopped by Ctrl-Z, since nobody could continue it", function()
    local p = start "echo ready; sleep 0.5; exit 3"
    p:expect "ready"
    p:write(CTRL_Z)
    assert.equal(3, (p:finish(10)))
  end)
end)
