-- time limit: 180 s
-- The examples do what they say, as their readers see it.

local helpers = require "spec.helpers"
local core = require "dlock.core"

local sanitized = helpers.under == "asan" or helpers.under == "tsan"

describe("examples/", function()
  local dir

  setup(function() dir = helpers.tmpdir() end)
  teardown(function() helpers.remove_tree(dir) end)

  local function run(changes, ...)
    local env = { DLOCK_URL = "local://" .. dir, LD_PRELOAD = os.getenv "DLOCK_PRELOAD" or false }
    for k, v in pairs(changes) do env[k] = v end
    return helpers.spawn { env = env, stdin = "", ... }:finish(60)
  end

  local function example(name, ...) return run({}, helpers.lua, "examples/" .. name, ...) end

  -- Lines in this order, others between them.
  local function has_lines(out, ...)
    local at = 1
    for _, pattern in ipairs { ... } do
      local _, last = out:find(pattern, at)
      assert(last, ("no %q in: %s"):format(pattern, out))
      at = last + 1
    end
  end

  it("06: stands in a line on ZooKeeper", function()
    if not (" " .. table.concat(core.backends(), " ") .. " "):find " zookeeper " then return end
    local server = require("spec.support.zookeeper").start()
    local status, out = example("06-zookeeper-line.lua", server.url)
    server:stop()
    has_lines(out, "ours for %d+%.%d s at a time, of a session of 10 s; token %d+\n",
      "another client: held by .-\n", "held by .-, 0 waiting\n", "released: true\n",
      "the next token is larger: true\n")
    assert.equal(0, status)
  end)

  it("02: tells a run, a refusal, a loss and an error apart", function()
    local status, out = example "02-guarded-function.lua"
    has_lines(out, "a payment: paid 100 under token %d+\n",
      "another one meanwhile: not called, held %(.-this process.-%)\n",
      "a slow one: lost while it ran %(.-max_hold.-%); it returned: stopped before step %d+ ",
      "one that raises: error %(no money%)\n", "the next: paid 400 under token %d+\n")
    assert.equal(0, status)
  end)

  it("03: the resource refuses the stale write by its token", function()
    local status, out = example "03-fencing-token.lua"
    local new, stale, than = out:match("quick worker writes with token (%d+): accepted\n"
      .. "the slow worker%s+writes with token (%d+): refused, token %d+ is older than (%d+)\n")
    assert.equal(new, than, out)
    assert.is_true(tonumber(stale) < tonumber(new))
    assert.matches("its release says: the lock was lost: its ttl ran out\n$", out)
    assert.equal(0, status)
  end)

  it("04: skips the job that comes too early, and hands on the other's status", function()
    local status, out = run({ LD_PRELOAD = false }, "sh", "examples/04-cron-job.sh")
    has_lines(out, "monday: backup with token %d+\n", "nightly: held by monday for ",
      "tuesday: skipped", "monday: done\n", "wednesday: the disk is full\n",
      "wednesday: the command failed with status 3\n", "nightly: free\n$")
    assert.not_matches("tuesday: backup", out)
    assert.equal(0, status)
  end)

  it("05: events, ensure and wait_lost", function()
    local status, out = example "05-events.lua"
    has_lines(out, "event acquired deploy", "deploy is ours for inf s",
      "2 s are left at least", "after 0.5 s: .- %(timeout%)\n")
    if not out:find "inotify refuses" then -- all of this user's instances may be in use
      has_lines(out, "event lost deploy deleted", "\nlost: deleted\n")
    end
    assert.matches("event lost deploy deleted\n", out)
    assert.matches("release says: .- %(lost%)\n$", out)
    assert.equal(0, status)
  end)

  describe("01", function()
    if sanitized then return end -- its workers start without the sanitizer's library

    local function demo(...)
      return example("01-guarded-counter.lua", "--seconds", "1", "--workers", "3", ...)
    end

    local function shows_it_all(out)
      has_lines(out, "3 processes count", "worker 2 hangs while it holds the lock %(token %d+%)\n",
        "kill %-9 %d+: worker 2 is dead", "worker [13] took over %d+%.%d+ s after the kill",
        "increments/s on average", "nothing lost\n", "The same without the lock\n",
        "acknowledged [%d,]+, but counter [%d,]+: ", "What you saw\n", "Next: ")
      local acked, counter, started =
        out:match "acknowledged ([%d,]+) <= counter ([%d,]+) <= started ([%d,]+)"
      local function number(s) return tonumber((s:gsub(",", ""))) end
      assert.is_true(number(acked) <= number(counter) and number(counter) <= number(started), out)
      assert.is_true(number(acked) > 0, out)
    end

    it("kills a holder, sees another take over, and loses nothing", function()
      local status, out = demo()
      shows_it_all(out)
      assert.not_matches("\27", out)
      assert.equal(0, status)
    end)

    it("does the same on Redis, where the ttl frees the lock", function()
      if not table.concat(core.backends(), " "):find "redis" then
        return pending "this build has no redis backend"
      end
      local server = require("spec.support.redis").start()
      finally(function() server:kill() end)
      local status, out = demo("--url", server.url)
      shows_it_all(out)
      assert.matches("when its ttl of 1 s was over", out)
      local after = tonumber(out:match "took over (%S+) s after the kill")
      assert.is_true(after > 0.3, out) -- a renewal is at most ttl / 3 old
      assert.equal(0, status)
    end)

    it("exits with 1 and says so when the lock does not exclude", function()
      local text = helpers.read_file "examples/01-guarded-counter.lua"
      local broken, n = text:gsub("client:acquire%(key%)", "client:acquire(key .. me)")
      assert.equal(1, n)
      local path = dir .. "/broken.lua"
      helpers.write_file(path, broken)
      local status, out = run({}, helpers.lua, path, "--seconds", "1.5")
      assert.matches("<= started [%d,]+: NOT SO\n", out)
      assert.equal(1, status)
    end)

    it("says why when a worker fails", function()
      local text = helpers.read_file "examples/01-guarded-counter.lua"
      local broken, n = text:gsub("    done = done %+ 1\n", "%0    error 'oh no'\n")
      assert.equal(1, n)
      local path = dir .. "/failing.lua"
      helpers.write_file(path, broken)
      local status, out = run({}, helpers.lua, path, "--seconds", "1")
      assert.matches("went wrong: .-oh no", out)
      assert.matches("worker %d: status 1\n", out)
      assert.equal(1, status)
    end)

    it("refuses what it does not know, and shows no password", function()
      local function refused(status, pattern, ...)
        local got, out = example("01-guarded-counter.lua", ...)
        assert.matches(pattern, out)
        assert.not_matches("secret", out)
        assert.equal(status, got)
      end
      refused(64, "^unknown option %-%-sekonds\nusage: ", "--sekonds", "1")
      refused(64, "^%-%-url needs a value\nusage: ", "--url")
      refused(64, "^%-%-workers must be a number in 2 %.%. 16, got 1\n$", "--workers", "1")
      refused(64, "^url: ", "--url", "secret")
      refused(1, "127%.0%.0%.1:1", "--url", "redis://:secret@127.0.0.1:1")
      refused(0, "^usage: ", "--help")
    end)

    local function on_terminal(changes)
      local env = { DLOCK_URL = "local://" .. dir, TERM = "xterm", LC_ALL = "C.UTF-8" }
      for k, v in pairs(changes) do env[k] = v end
      local p = helpers.spawn { tty = true, env = env,
        helpers.lua, "examples/01-guarded-counter.lua", "--seconds", "1" }
      finally(function() p:close() end)
      local out = p:expect("(.*)What you saw", 40)
      p:expect("Next: ", 5)
      assert.equal(0, (p:finish()))
      return out
    end

    it("draws bars in colour on a terminal", function()
      local out = on_terminal { NO_COLOR = false }
      has_lines(out, "\27%[32m█+", "\27%[%d+A", "killed")
    end)

    it("draws without colour when NO_COLOR is set, without UTF-8 in the C locale", function()
      local out = on_terminal { NO_COLOR = "1", LC_ALL = "C" }
      has_lines(out, "worker 1 +%d+ #+", "\27%[%d+A")
      assert.not_matches("\27%[[%d;]*m", out)
      assert.not_matches("[\128-\255]", out)
    end)

    it("writes plain lines on a dumb terminal", function()
      assert.not_matches("\27", on_terminal { TERM = "dumb" })
    end)

    it("leaves no process and no file behind when it is interrupted", function()
      local tmp = helpers.tmpdir()
      finally(function() helpers.remove_tree(tmp) end)
      local p = helpers.spawn { setsid = true, stdin = "",
        env = { DLOCK_URL = "local://" .. dir, TMPDIR = tmp },
        helpers.lua, "examples/01-guarded-counter.lua", "--seconds", "60" }
      finally(function() p:close() end)
      p:expect("increments/s", 20)
      assert(helpers.proc.kill(-p.pid, helpers.SIG.INT))
      local status, out = p:finish(10)
      assert.matches("interrupted!", out)
      assert.equal(1, status)
      assert.same({}, helpers.proc.list(tmp))
    end)
  end)
end)
