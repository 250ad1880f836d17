-- The command: exit statuses, what the command inherits, options, the small commands.
-- time limit: 240 s

local command = require "spec.support.command"
local helpers = require "spec.helpers"
local redis = require "spec.support.redis"

local eventually = helpers.eventually
local unpack = table.unpack or unpack -- luacheck: ignore

describe("dlock run", function()
  local dir, url
  before_each(function()
    dir = helpers.tmpdir()
    url = "local://" .. dir .. "/locks"
    helpers.run("mkdir", dir .. "/locks")
  end)

  local function run(...) return command.run("run", "--url", url, ...) end

  local function holder(key, ...)
    local p = command.start { "run", "--url", url, key, "--", "sh", "-c",
      "echo held; exec sleep 60", ... }
    p:expect "held"
    return p
  end

  it("has the command's own exit status", function()
    local some = { 0, 1, 2, 7, 63, 64, 69, 70, 75, 100, 125, 126, 127, 128, 129, 143, 200, 255 }
    for _, n in ipairs(some) do
      local status, out, err = run("k", "--", "sh", "-c", "exit " .. n)
      assert.same({ n, "", "" }, { status, out, err })
    end
  end)

  it("has 128 + N when signal N killed the command", function()
    for _, n in ipairs { 1, 2, 3, 6, 9, 10, 15, 34, 64 } do
      local status, _, err = run("k", "--", "sh", "-c", "ulimit -c 0; kill -" .. n .. " $$")
      assert.same({ 128 + n, "" }, { status, err })
    end
  end)

  it("says 127 for a command that is not there and 126 for one that cannot be run", function()
    local status, _, err = run("k", "--", "no-such-command-here")
    assert.equal(127, status)
    assert.equal("dlock: k: cannot run no-such-command-here: No such file or directory\n", err)
    helpers.write_file(dir .. "/plain", "text")
    status, _, err = run("k", "--", dir .. "/plain")
    assert.equal(126, status)
    assert.matches("^dlock: k: cannot run [^\n]*: Permission denied\n$", err)
    assert.equal(0, (run("--no-wait", "k", "--", "true"))) -- the lock was given back
  end)

  it("says 75 and who holds it when the lock is not to be had", function()
    local p = holder "k"
    local status, _, err = run("--no-wait", "k", "--", "echo", "ran")
    assert.equal(75, status)
    assert.matches("^dlock: k: held by [^\n]+ for [%d.]+ s\n$", err)
    local seconds
    seconds, status, _, err = helpers.timed(run, "--wait", "300ms", "k", "--", "echo", "ran")
    assert.equal(75, status)
    assert.is_true(seconds >= 0.3)
    assert.matches("^dlock: k: held by [^\n]+; gave up after 0.%d s\n$", err)
    local out
    status, out = run("-n", "-E", "0", "k", "echo", "ran")
    assert.same({ 0, "" }, { status, out })
    assert.equal(9, (run("--wait=100ms", "--conflict-exit-code=9", "k", "true")))
    p:close()
  end)

  it("waits for ever by default, and starts when the lock is free", function()
    local p = holder "k"
    local q = command.start { "run", "--url", url, "k", "--", "echo", "ran" }
    assert.equal("running", (q:wait(0.3)))
    p:kill "TERM"
    assert.equal(143, (p:finish()))
    local status, out = q:finish()
    assert.same({ 0, "ran\n" }, { status, out })
  end)

  it("says 69 when the backend cannot be used, also with the endless wait", function()
    local port = helpers.proc.free_port()
    for _, how in ipairs { "", "--no-wait", "--wait=300ms" } do
      local args = { "run", "--url", "redis://127.0.0.1:" .. port, "k", "--", "echo", "ran" }
      if how ~= "" then table.insert(args, 2, how) end
      local status, out, err = command.run(unpack(args))
      assert.same({ 69, "" }, { status, out })
      assert.matches("^dlock: k: [^\n]+\n", err)
    end
    helpers.write_file(dir .. "/file", "")
    assert.equal(69, (command.run("run", "--url", "local://" .. dir .. "/file", "k", "true")))
  end)

  it("says 64 for every wrong command line, in one line, and runs nothing", function()
    local wrong = {
      {}, { "k" }, { "k", "--" }, { "--foo", "k", "true" }, { "-x", "k", "true" },
      { "--ttl", "k" }, { "--ttl", "5", }, { "--ttl", "soon", "k", "true" },
      { "--ttl", "0", "k", "true" }, { "--ttl", "-5s", "k", "true" },
      { "--ttl", "500ms", "k", "true" }, { "--ttl", "2d", "k", "true" },
      { "--ttl", "1e3", "k", "true" }, { "--ttl", "1y", "k", "true" },
      { "--ttl", "nan", "k", "true" },
      { "--wait", "", "k", "true" }, { "--wait", "1s", "--no-wait", "k", "true" },
      { "--no-wait=1", "k", "true" }, { "--grace", "11s", "k", "true" },
      { "--ttl", "6s", "--grace", "2.1s", "k", "true" }, { "--max-hold", "1s", "k", "true" },
      { "--conflict-exit-code", "256", "k", "true" }, { "--conflict-exit-code", "-1", "k", "true" },
      { "--status-fd", "77", "k", "true" }, { "--status-fd", "x", "k", "true" },
      { "--owner", "", "k", "true" }, { "--owner", "a\nb", "k", "true" },
      { "--owner", ("x"):rep(201), "k", "true" }, { "", "true" }, { ("k"):rep(4097), "true" },
      { "--url-file", dir .. "/missing", "k", "true" }, { "--url-file", "/dev/null", "k", "true" },
      { "--url", "", "k", "true" }, { "--url", "gopher://x", "k", "true" },
      { "--url", "redis://h:99999999", "k", "true" },
      { "--url-file", "/dev/null", "--url", "local:", "k", "true" },
      { "--semaphore", "3", "k", "true" }, { "--read", "k", "true" }, { "--write", "k", "true" },
      { "--key", "a", "k", "true" }, { "--at-least", "3s", "k", "true" },
      { "--json", "k", "true" },
    }
    for _, args in ipairs(wrong) do
      for i, a in ipairs(args) do
        if a == "true" then args[i] = "echo"; args[i + 1] = "ran" end
      end
      local status, out, err = command.run("run", unpack(args))
      assert.same({ 64, "" }, { status, out }, table.concat(args, " "))
      assert.matches("^dlock: [^\n]+\n$", err)
    end
    local _, _, err = command.run("run", "--ttl", "6s", "--grace", "2.1s", "k", "true")
    assert.matches("%-%-grace 2.1s", err)
    assert.matches("%-%-ttl 6s", err)
  end)

  it("takes options anywhere before the command, and odd keys", function()
    local _, out = run("k", "--ttl", "5s", "--", "echo", "--ttl", "x")
    assert.equal("--ttl x\n", out)
    _, out = run("k", "echo", "--no-wait", "--", "x")
    assert.equal("--no-wait -- x\n", out)
    _, out = run("--", "--key", "--", "sh", "-c", "echo $DLOCK_KEY")
    assert.equal("--key\n", out)
    _, out = run("--", "-k", "echo", "--")
    assert.equal("--\n", out)
    _, out = run("a/b \195\169\255", "--", "sh", "-c", "printf %s \"$DLOCK_KEY\"")
    assert.equal("a/b \195\169\255", out)
    _, out = run("--shell", "k", "--", "echo a b | tr a-z", "A-Z; exit 0")
    assert.equal("A B\n", out)
  end)

  it("gives the command its key, token and owner, and nested ones the inner", function()
    local inner = ("%s run --url %s inner -- sh -c 'echo $DLOCK_KEY $DLOCK_TOKEN'")
      :format(command.path, url)
    local status, out = run("--owner", "me", "outer", "--", "sh", "-c",
      "echo $DLOCK_KEY $DLOCK_TOKEN $DLOCK_OWNER; " .. inner .. "; echo $DLOCK_KEY")
    assert.equal(0, status)
    local t1, t2 = out:match "^outer (%d+) me\ninner (%d+)\nouter\n$"
    assert.truthy(t1 and t2, out)
    local _, again = run("outer", "--", "sh", "-c", "echo $DLOCK_TOKEN")
    assert.is_true(tonumber(again) > tonumber(t1))
  end)

  it("passes stdin and further descriptors on, and none of ours", function()
    local p = command.start { "run", "--url", url, "k", "--", "tr", "a-z", "A-Z",
      stdin = "some text" }
    local status, out = p:finish()
    assert.same({ 0, "SOME TEXT" }, { status, out })
    helpers.write_file(dir .. "/three", "third")
    local line = "exec 3<%s; exec %s run --url %s --status-fd 4 k -- sh -c "
      .. "'cat <&3; echo; ls /proc/self/fd' 4>%s"
    line = line:format(dir .. "/three", command.path, url, dir .. "/st")
    status, out = helpers.run("sh", "-c", line)
    assert.equal(0, status)
    local fds = {}
    for fd in out:gsub("^third\n", ""):gmatch "%d+" do fds[#fds + 1] = fd end
    assert.matches("^third\n", out)
    -- 4: the directory that ls reads.
    assert.same({ "0", "1", "2", "3", "4" }, fds)
  end)

  it("works with standard descriptors closed", function()
    local line = "exec %s run --url %s k -- sh -c 'ls /proc/self/fd > %s' <&- >&- 2>&-"
    local status = helpers.run("sh", "-c", line:format(command.path, url, dir .. "/out"))
    assert.equal(0, status)
    -- The command has them closed as its caller had: 1 is the file, 0 the directory.
    local fds = helpers.read_file(dir .. "/out")
    assert.equal("0\n1\n", fds)
  end)

  it("tells its own statuses from the command's by --status-fd", function()
    local function lines(...)
      local args = table.concat({ ... }, " ")
      helpers.run("sh", "-c", ("exec %s run --url %s --status-fd 3 %s 3>%s"):format(command.path,
        url, args, dir .. "/st"))
      return helpers.read_file(dir .. "/st")
    end
    assert.matches("^acquired %d+\nexit command 75\n$", lines("k -- sh -c 'exit 75'"))
    assert.matches("^acquired %d+\nexit signal 137\n$", lines("k -- sh -c 'kill -9 $$'"))
    assert.matches("^acquired %d+\nexit dlock 127 exec\n$", lines("k -- no-such-command"))
    local p = holder "k"
    assert.equal("exit dlock 75 held\n", lines("-n k -- true"))
    assert.equal("exit dlock 3 timeout\n", lines("-w 100ms -E 3 k -- true"))
    p:close()
  end)

  it("leaves the line and says 128 + N when a signal comes while it waits", function()
    local p = holder "k"
    for _, name in ipairs { "INT", "TERM", "HUP", "USR1" } do
      local q = command.start { "run", "--url", url, "--verbose", "k", "--", "echo", "ran" }
      eventually(function()
        q.err_text = (q.err_text or "") .. (helpers.proc.read(q.err, 1000) or "")
        return q.err_text:find "asking for the lock"
      end)
      helpers.proc.pause(50)
      q:kill(name)
      local seconds, status, out = helpers.timed(q.finish, q)
      assert.same({ 128 + helpers.SIG[name], "" }, { status, out })
      assert.is_true(seconds < helpers.bound(2))
    end
    p:kill "TERM"
    p:finish()
    assert.equal(0, (run("-n", "k", "--", "true")))
  end)

  it("passes signals on, and the command is gone each time", function()
    for _, name in ipairs { "TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "KILL" } do
      local n = ({ TERM = 15, INT = 2, HUP = 1, QUIT = 3, USR1 = 10, USR2 = 12, KILL = 9 })[name]
      local pidfile = dir .. "/pids-" .. name
      local script = command.script(dir, ("ulimit -c 0; sleep 60 & echo $$ > %s; echo $! >> %s; "
        .. "wait; sleep 60"):format(pidfile, pidfile))
      local p = command.start { "run", "--url", url, "k", "--", "sh", script }
      local pids = command.pids(pidfile, 2)
      helpers.proc.kill(p.pid, n)
      assert.equal(128 + n, (p:finish()))
      if name ~= "KILL" then assert(command.all_gone(pids)) end
      assert.equal(0, (run("k", "--", "true")))
      assert(command.all_gone(pids))
    end
  end)

  it("passes SIGTERM on only once, and takes the status of a command that handles it", function()
    local script = command.script(dir, [[
      trap 'echo term; exit 5' TERM
      echo ready
      while :; do sleep 0.02; done]])
    local p = command.start { "run", "--url", url, "k", "--", "sh", script }
    p:expect "ready\n"
    p:kill "TERM"
    local status, out = p:finish()
    assert.same({ 5, "term\n" }, { status, out })
  end)

  it("leaves signals ignored that its caller ignores", function()
    local script = command.script(dir,
      "grep SigIgn /proc/$$/status | cut -f2; echo ready; sleep 60")
    local sh = "trap '' HUP; exec " .. command.path .. " run --url " .. url .. " k -- sh " .. script
    local p = helpers.spawn { "sh", "-c", sh, stdin = "" }
    assert.equal("1", (p:expect "(%x)\nready"))
    p:kill "HUP"
    assert.equal("running", (p:wait(0.3)))
    p:kill "TERM"
    assert.equal(143, (p:finish()))
    -- A shell without job control ignores INT and QUIT for what it puts in the background.
    sh = command.path .. " run --url " .. url .. " k -- sh " .. script .. " & wait"
    p = helpers.spawn { "sh", "-c", sh, stdin = "", setsid = true }
    assert.equal("6", (p:expect "(%x)\nready"))
    p:close()
  end)

  it("lets background children of a command that ended by itself live, without the lock", function()
    local script = command.script(dir, "sleep 60 > /dev/null 2>&1 & echo $!; exit 3")
    local status, out = run("k", "--", "sh", script)
    assert.equal(3, status)
    local pid = tonumber(out)
    assert.is_true(command.alive(pid))
    assert.equal(0, (run("-n", "k", "--", "true")))
    helpers.proc.kill(pid, 9)
  end)

  it("ends what a command leaves behind that dies of a signal, before the lock is free", function()
    local pidfile = dir .. "/pids"
    local script = command.script(dir, [[
      (trap '' TERM; while :; do sleep 0.1; done) & echo $! > ]] .. pidfile .. [[

      setsid sleep 60 & echo $! >> ]] .. pidfile .. [[

      kill -9 $$]])
    local status = run("--grace", "300ms", "k", "--", "sh", script)
    assert.equal(137, status)
    assert(command.all_gone(command.pids(pidfile, 2)))
  end)

  it("ends the command when --max-hold is over", function()
    local script = command.script(dir, "trap 'echo term' TERM; while :; do sleep 0.05; done")
    local seconds, status, out, err = helpers.timed(run, "--max-hold", "1s", "--grace", "200ms",
      "k", "--", "sh", script)
    assert.same({ 70, "term\n" }, { status, out })
    assert.matches("dlock: k: %-%-max%-hold 1s is over", err) -- after sh's own "Terminated"
    assert.is_true(seconds < helpers.bound(1.5))
  end)

  it("finds its URL in --url-file or $DLOCK_URL", function()
    helpers.write_file(dir .. "/url", "\n  " .. url .. " \n")
    local p = holder "k"
    assert.equal(75, (command.run("run", "--url-file", dir .. "/url", "-n", "k", "true")))
    p:close()
    p = command.start { "run", "-n", "k", "true", env = { DLOCK_URL = "gopher://x" } }
    assert.equal(64, (p:finish()))
    local q = holder "k"
    p = command.start { "run", "-n", "k", "true", env = { DLOCK_URL = url } }
    assert.equal(75, (p:finish()))
    q:close()
  end)
end)

describe("dlock with a password", function()
  local secret = "s3cret-w0rd"
  local server, dir
  setup(function() server = redis.start { password = secret } end)
  teardown(function() server:stop() end)
  before_each(function() dir = helpers.tmpdir() end)

  local function url_file(password, port)
    local path = dir .. "/url"
    helpers.write_file(path, ("redis://:%s@127.0.0.1:%d/0\n"):format(password, port or server.port))
    return path
  end

  it("shows it in no output and no process list with --url-file", function()
    local p = command.start { "run", "-v", "--url-file", url_file(secret), "k", "--", "sh", "-c",
      "cat /proc/$PPID/cmdline /proc/self/cmdline; env; echo ready; exec sleep 60" }
    p:expect "ready"
    local keeper = command.keeper(p.pid)
    for _, pid in ipairs { p.pid, keeper } do
      assert.is_nil(helpers.read_file("/proc/" .. pid .. "/cmdline"):find(secret, 1, true))
      assert.is_nil(helpers.read_file("/proc/" .. pid .. "/environ"):find(secret, 1, true))
    end
    local all = p.text
    for _, args in ipairs { { "status", "k" }, { "ls" }, { "ping" }, { "ping", "--json" } } do
      local status, out, err = command.run(args[1], "--url-file", dir .. "/url", args[2])
      assert.equal(0, status, err)
      all = all .. out .. err
    end
    p:kill "TERM"
    local _, out, err = p:finish()
    all = all .. out .. err
    assert.is_nil(all:find(secret, 1, true))
  end)

  it("shows it in no message of failure", function()
    local function fails(status, path)
      local got, out, err = command.run("run", "-v", "-n", "--url-file", path, "k", "--", "true")
      assert.equal(status, got, err)
      assert.is_nil((out .. err):find(secret, 1, true))
      local url = helpers.read_file(path):match "^%s*(.-)%s*$"
      got, out, err = command.run("run", "-v", "-n", "--url", url, "k", "--", "true")
      assert.equal(status, got, err)
      assert.is_nil((out .. err):find(secret, 1, true))
    end
    fails(69, url_file(secret .. "x"))
    fails(69, url_file(secret, helpers.proc.free_port()))
    fails(64, url_file(secret, 999999))
    helpers.write_file(dir .. "/url", "gopher://user:" .. secret .. "@host/")
    fails(64, dir .. "/url")
    helpers.write_file(dir .. "/url", "redis://user:" .. secret .. "@ho st:x/")
    fails(64, dir .. "/url")
  end)
end)

describe("dlock status, ls, break, ping, version", function()
  local dir, url, p, token
  before_each(function()
    dir = helpers.tmpdir()
    url = "local://" .. dir
    p = command.start { "run", "--url", url, "--owner", "web\195\169 1", "job/1", "--", "sh", "-c",
      "echo $DLOCK_TOKEN; exec sleep 60" }
    token = p:expect "(%d+)\n"
  end)
  after_each(function() p:close() end)

  local function ask(name, ...) return command.run(name, "--url", url, ...) end

  it("show the holder, its age and its token", function()
    local status, out = ask("status", "job/1")
    assert.equal(0, status)
    assert.matches("^job/1: held by web\195\169 1 for [%d.]+ s, token %d+\n$", out)
    assert.truthy(out:find(token, 1, true))
    status, out = ask("status", "other")
    assert.same({ 0, "other: free\n" }, { status, out })
    status, out = ask("status", "--json", "job/1")
    assert.equal(0, status)
    assert.matches('^{"key":"job/1","held":true,"owner":"web\195\169 1","token":"%d+","age":[%d.]+,'
      .. '"dlock":true,"waiters":%[%]}\n$', out)
    local q = command.start { "run", "--url", url, "k\"\1\255\\", "--", "sh", "-c",
      "echo ok; exec sleep 60" }
    q:expect "ok"
    out = select(2, ask("status", "--json", "k\"\1\255\\"))
    assert.matches([[^{"key":"k\u0022\u0001\u00ff\u005c","held":true]], out)
    q:close()
  end)

  it("list the keys that are held", function()
    local q = command.start { "run", "--url", url, "a", "--", "sh", "-c", "echo ok; exec sleep 60" }
    q:expect "ok"
    local status, out = ask "ls"
    assert.same({ 0, "a\njob/1\n" }, { status, out })
    out = select(2, ask("ls", "job"))
    assert.equal("job/1\n", out)
    out = select(2, ask("ls", "--json"))
    assert.equal('{"keys":["a","job/1"]}\n', out)
    q:close()
  end)

  it("break a lock: its command is ended, and the key is free", function()
    local status, out = ask("break", "job/1")
    assert.same({ 0, "job/1: broken\n" }, { status, out })
    local rc, _, err = p:finish()
    assert.equal(70, rc)
    assert.matches("^dlock: job/1: the lock was lost %(%l+%); .*somebody else may have run", err)
    status, out = ask("break", "job/1")
    assert.same({ 0, "job/1: was free\n" }, { status, out })
    out = select(2, ask("break", "--json", "job/1"))
    assert.equal('{"key":"job/1","was_held":false}\n', out)
  end)

  it("ping and show the version", function()
    local status, out = ask "ping"
    assert.equal(0, status)
    assert.matches("^[^\n]+\n$", out)
    local err
    local nobody = "redis://127.0.0.1:" .. helpers.proc.free_port()
    status, out, err = command.run("ping", "--url", nobody)
    assert.same({ 69, "" }, { status, out })
    assert.matches("^dlock: ping: [^\n]+\n$", err)
    status, out = command.run "version"
    assert.equal(0, status)
    assert.matches("^dlock %d+%.%d+%.%d+ %(.*local.*%)\n$", out)
    local _, same = command.run "--version"
    assert.equal(out, same)
  end)

  it("say 64 for wrong command lines", function()
    local wrong = { {}, { "frobnicate" }, { "status" }, { "status", "a", "b" }, { "break" },
      { "ls", "a", "b" }, { "ping", "x" }, { "status", "--ttl", "3s", "k" },
      { "version", "--url", "x" } }
    for _, args in ipairs(wrong) do
      local status, out, err = command.run(unpack(args))
      assert.same({ 64, "" }, { status, out }, table.concat(args, " "))
      assert.truthy(#err > 0)
    end
  end)

  it("explain themselves", function()
    local status, out = command.run "--help"
    assert.equal(0, status)
    for _, name in ipairs { "run", "status", "ls", "break", "ping", "version" } do
      assert.truthy(out:find("  " .. name .. " ", 1, true))
      local s, text = command.run(name, "--help")
      assert.equal(0, s)
      assert.matches("^Usage: dlock " .. name, text)
      for line in text:gmatch "[^\n]+" do assert.is_true(#line <= 100, line) end
    end
    local _, text = command.run("run", "--help")
    for _, word in ipairs { "--url-file", "ps", "--status-fd", "DLOCK_TOKEN", "75", "--grace" } do
      assert.truthy(text:find(word, 1, true), word)
    end
  end)
end)
