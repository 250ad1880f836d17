-- The keeper: whatever happens to wrapper, keeper, lease or server, no process of the command
-- is left when somebody else can have the lock.
-- time limit: 300 s

local command = require "spec.support.command"
local fixtures = require "spec.support.fixtures"
local helpers = require "spec.helpers"

local eventually, proc = helpers.eventually, helpers.proc
local unpack = table.unpack or unpack -- luacheck: ignore

-- A command with all kinds of descendants: a plain background child, one in another session, one
-- that ignores what it can, one that is stopped, one whose parent is gone. Writes six pids, and
-- its own to the file .main.
local FAMILY = [[
out=$1
sleep 60 & echo $! >> $out
setsid sh -c 'echo $$ >> "$1"; exec sleep 60' - $out &
sh -c 'trap "" TERM INT HUP; echo $$ >> "$1"; while :; do sleep 0.1; done' - $out &
sh -c 'echo $$ >> "$1"; kill -STOP $$' - $out &
sh -c 'sleep 60 & echo $! >> "$1"' - $out
echo $$ >> $out
echo $$ > $out.main
while :; do sleep 0.1; done
]]

for _, name in ipairs { "local", "redis" } do
  describe("the keeper of dlock run on " .. name, function()
    local fixture, url, dir
    setup(function()
      fixture = fixtures[name].start()
      url = fixture.url
    end)
    teardown(function() fixture:stop() end)
    before_each(function() dir = helpers.tmpdir() end)

    -- Returns the wrapper and the pids of the family.
    local function family(args)
      local out = dir .. "/pids"
      args = args or {}
      for i, a in ipairs { "run", "--url", url, "--ttl", "3s" } do table.insert(args, i, a) end
      for _, a in ipairs { "k", "--", "sh", command.script(dir, FAMILY), out } do
        args[#args + 1] = a
      end
      local p = command.start(args)
      return p, command.pids(out, 6), command.pids(out .. ".main", 1)[1]
    end

    -- The next holder's first instructions look for the family; returns what it found alive.
    local function next_holder(pids)
      local list = {}
      for _, pid in ipairs(pids) do list[#list + 1] = tostring(pid) end
      local script = command.script(dir, [[
        for p in "$@"; do
          test -r /proc/$p/stat || continue
          sed 's/.*) //' /proc/$p/stat 2>/dev/null | { read -r state rest; case $state in
            Z|X|'') ;; *) echo alive $p $state;; esac; }
        done]])
      local status, out, err = command.run("run", "--url", url, "--wait", "20s", "k", "--", "sh",
        script, unpack(list))
      assert.equal(0, status, err)
      return out
    end

    it("ends all when the wrapper is killed, before anybody else has the lock", function()
      local p, pids = family()
      p:kill "KILL"
      assert.equal("", next_holder(pids))
      p:finish()
    end)

    it("ends all when wrapper and command are killed together, as a job is", function()
      local p, pids, main = family()
      proc.kill(p.pid, 9)
      proc.kill(main, 9)
      assert.equal("", next_holder(pids))
      p:finish()
    end)

    it("ends all when the keeper is killed, and says 70", function()
      local p, pids = family()
      proc.kill(command.keeper(p.pid), 9)
      local status, _, err = p:finish()
      assert.equal(70, status)
      assert.matches("the keeper was killed", err)
      assert(command.all_gone(pids))
      assert.equal("", next_holder(pids))
    end)

    it("ends all when the wrapper is stopped and then killed", function()
      local p, pids = family()
      p:kill "STOP"
      proc.pause(100)
      p:kill "KILL"
      assert.equal("", next_holder(pids))
      p:finish()
    end)

    it("gives the command time to end before it kills", function()
      local out = dir .. "/said"
      local script = command.script(dir, [[
        trap 'echo term; sleep 0.2; echo tidied; exit 0' TERM
        echo ready
        while :; do sleep 0.02; done]])
      local p = command.start { "run", "--url", url, "--ttl", "3s", "--grace", "1s", "k", "--",
        "sh",
        "-c", "sh " .. script .. " > " .. out }
      eventually(function() return helpers.read_file(out) == "ready\n" end)
      p:kill "KILL"
      assert.equal("", next_holder {})
      assert.equal("ready\nterm\ntidied\n", helpers.read_file(out))
      p:finish()
    end)

    it("does not wait for a grace that nobody needs", function()
      local p, pids = family { "--grace", "100ms" }
      p:kill "KILL"
      eventually(function() return command.all_gone(pids) end, 1)
      p:finish()
    end)

    it("outruns a command that forks without end", function()
      local script = command.script(dir, [[
        f() { trap '' TERM; n=$1; setsid sh "$0" $n 2>/dev/null & exit; }
        trap '' TERM
        echo $$ >> ]] .. dir .. [[/forks
        sleep 0.01
        f]])
      local p = command.start { "run", "--url", url, "--ttl", "2s", "--grace", "100ms", "k", "--",
        "sh", "-c", "sh " .. script .. "; sleep 60" }
      command.pids(dir .. "/forks", 5)
      p:kill "KILL"
      assert.equal("", next_holder {})
      local n = #command.pids(dir .. "/forks", 5)
      proc.pause(300)
      assert.equal(n, #command.pids(dir .. "/forks", 5))
      p:finish()
    end)

    it("survives a SIGKILL for the whole job", function()
      local p, pids, main = family { setsid = true }
      assert.equal(tostring(p.pid), command.stat(main, 3)) -- group
      assert.equal(tostring(p.pid), command.stat(main, 4)) -- session
      proc.kill(-p.pid, 9)
      assert.equal("", next_holder(pids))
      p:finish()
    end)

    it("ends all when the lock is broken, and says 70", function()
      local p, pids = family()
      assert.equal(0, (command.run("break", "--url", url, "k")))
      local seconds, status, _, err = helpers.timed(p.finish, p)
      assert.equal(70, status)
      assert.matches("the lock was lost", err)
      assert.matches("somebody else may have run beside it", err)
      assert(command.all_gone(pids))
      assert.is_true(seconds < helpers.bound(4))
    end)
  end)
end

describe("the keeper of dlock run", function()
  local dir, url
  before_each(function()
    dir = helpers.tmpdir()
    url = "local://" .. dir
  end)

  local function sleeper(key)
    local p = command.start { "run", "--url", url, key, "--", "sh", "-c", "echo $$; exec sleep 60" }
    return p, tonumber((p:expect "(%d+)\n"))
  end

  it("is replaced when it is stopped and the lock is lost", function()
    local p, pid = sleeper "k"
    proc.kill(command.keeper(p.pid), helpers.SIG.STOP)
    assert.equal(0, (command.run("break", "--url", url, "k")))
    assert.equal(70, (p:finish()))
    assert.is_false(command.alive(pid))
  end)

  it("is missed when it is killed while the lock is waited for", function()
    local p = sleeper "k"
    local q = command.start { "run", "--url", url, "k", "--", "echo", "ran" }
    proc.kill(command.keeper(q.pid), 9)
    p:kill "TERM"
    p:finish()
    local status, out, err = q:finish()
    assert.same({ 70, "" }, { status, out })
    assert.matches("^dlock: k: the keeper is gone", err)
    assert.equal(0, (command.run("run", "--url", url, "-n", "k", "true")))
  end)

  it("leaves children alone that the wrapper had before an exec", function()
    local line = "sleep 60 > /dev/null 2>&1 & echo $!; exec %s run --url %s k -- "
      .. "sh -c 'echo; exec sleep 60'"
    local p = helpers.spawn { "sh", "-c", line:format(command.path, url), stdin = "" }
    local pid = tonumber((p:expect "(%d+)\n\n"))
    proc.kill(command.keeper(p.pid), 9)
    assert.equal(70, (p:finish()))
    assert.is_true(command.alive(pid))
    proc.kill(pid, 9)
  end)

  it("gets the exit status also where SIGCHLD is ignored", function()
    local status = helpers.run(helpers.python, "-c", ([[
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv("%s", ["dlock", "run", "--url", "%s", "k", "--", "sh", "-c", "exit 9"])
]]):format(command.path, url))
    assert.equal(9, status)
  end)
end)

describe("a lease on redis", function()
  local server, dir
  setup(function() server = fixtures.redis.start() end)
  teardown(function() server:stop() end)
  before_each(function() dir = helpers.tmpdir() end)

  local function start(...)
    local args = { "run", "--url", server.url, "--ttl", "2s", ... }
    local out = dir .. "/pids"
    os.remove(out)
    for _, a in ipairs { "k", "--", "sh", command.script(dir, FAMILY), out } do
      args[#args + 1] = a
    end
    local p = command.start(args)
    return p, command.pids(out, 6)
  end

  it("is renewed as long as the command runs", function()
    local status = command.run("run", "--url", server.url, "--ttl", "1s", "k", "--", "sleep", "3")
    assert.equal(0, status)
  end)

  it("ends the command first when the wrapper is stopped", function()
    command.unstalled(function()
      local p, pids = start()
      local c = server:connect()
      p:kill "STOP"
      command.gone_before(pids, function() return not c:call("GET", "k") end, 10)
      eventually(function() return not c:call("GET", "k") end, 5)
      c:close()
      p:kill "CONT"
      local status, _, err = p:finish()
      assert.equal(70, status)
      assert.matches("the lease was not renewed in time", err)
    end)
  end)

  it("goes on when the wrapper is stopped for a moment only", function()
    local p = command.start { "run", "--url", server.url, "--ttl", "3s", "k", "--", "sh", "-c",
      "echo on; sleep 2; exit 4" }
    p:expect "on"
    p:kill "STOP"
    proc.pause(500)
    p:kill "CONT"
    assert.equal(4, (p:finish()))
  end)

  it("ends the command first when the server answers no more", function()
    command.unstalled(function()
      local p, pids = start()
      server:freeze()
      local began = helpers.now() -- renewed just before at the latest
      local function over() return helpers.now() > began + 2 end
      local ok, why = pcall(command.gone_before, pids, over)
      server:thaw()
      local status, _, err = p:finish()
      if not ok then error(why, 0) end
      assert.equal(70, status)
      assert.matches("the lease was not renewed in time", err)
    end)
  end)

  it("says so when somebody else has taken the lock", function()
    local p, pids = start()
    server:call("SET", "k", "somebody")
    local status, _, err = p:finish()
    assert.equal(70, status)
    assert.matches("the lock was lost %(taken%); the command was ended, but somebody else may", err)
    assert(command.all_gone(pids))
    assert.equal("somebody", server:call("GET", "k"))
    server:call("DEL", "k")
  end)

  it("leaves the line when a signal comes while it waits", function()
    server:call("SET", "k", "somebody", "PX", 60000)
    local p = command.start { "run", "--url", server.url, "k", "--", "true" }
    proc.pause(300)
    p:kill "TERM"
    assert.equal(143, (p:finish()))
    assert.same({ "k" }, server:leftovers())
    server:call("DEL", "k")
    assert.equal(0, (command.run("run", "--url", server.url, "-n", "k", "--", "true")))
    assert.same({}, server:leftovers())
  end)
end)
