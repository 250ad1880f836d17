-- time limit: 300 s
-- The rock as a user gets it: packed, served from a folder, installed by name,
-- used with nothing but the tree it was installed into.

local helpers = require "spec.helpers"

local ABI = helpers.jit and "5.1" or "5.4"
local CONFIG = helpers.jit and [[
lua_interpreter = "luajit"
variables = { LUA_INCDIR = "/usr/include/luajit-2.1", LUA_BINDIR = "/usr/bin",
  LUA = "/usr/bin/luajit" }
]] or ""

describe("the rock", function()
  local dir, env

  -- In a folder; the environment has nothing of this tree.
  local function run(where, what, changes)
    what.cwd = where
    what.env = {}
    for k, v in pairs(env) do what.env[k] = v end
    for k, v in pairs(changes or {}) do what.env[k] = v end
    what.stdin = ""
    local status, out = helpers.spawn(what):finish(240)
    return status, out
  end

  local function must(where, ...)
    local status, out = run(where, { ... })
    assert(status == 0, out)
    return out
  end

  local function luarocks(where, ...) return must(where, "luarocks", "--lua-version", ABI, ...) end

  local function script(tree, text, changes)
    local share, lib = tree .. "/share/lua/" .. ABI, tree .. "/lib/lua/" .. ABI
    local all = { LUA_PATH = share .. "/?.lua;" .. share .. "/?/init.lua",
      LUA_CPATH = lib .. "/?.so" }
    for k, v in pairs(changes or {}) do all[k] = v end
    return run(dir, { helpers.lua, "-e", text }, all)
  end

  setup(function()
    dir = helpers.tmpdir()
    helpers.write_file(dir .. "/config.lua", CONFIG)
    env = { HOME = dir, LUAROCKS_CONFIG = dir .. "/config.lua", PATH = os.getenv "PATH",
      LUA_PATH = false, LUA_CPATH = false, MAKEFLAGS = "-j2" }
    must(".", "make", "-s", "rock", "ROCKS=" .. dir .. "/srv")
    must(dir, "tar", "xzf", "srv/dlock-0.1.0.tar.gz")
    must(dir, "mkdir", "locks")
  end)

  teardown(function() helpers.remove_tree(dir) end)

  it("passes luarocks lint", function()
    for _, version in ipairs { "scm", "0.1.0" } do
      luarocks(dir .. "/dlock-0.1.0", "lint", "rockspec/dlock-" .. version .. "-1.rockspec")
    end
  end)

  if helpers.under ~= "" then return end -- what follows builds without sanitizers

  it("installs from a folder by name, and works with only its tree", function()
    local tree = dir .. "/tree"
    luarocks(dir, "install", "dlock", "--only-server=" .. dir .. "/srv", "--tree=" .. tree)

    local status, out = script(tree, ([[
      local dlock = require "dlock"
      local client = assert(dlock.connect "local://%s")
      local lock = assert(client:acquire "k")
      print(dlock._VERSION, lock.token_string)
      assert(lock:release())
    ]]):format(dir .. "/locks"))
    assert.matches("^%S*0%.1%.0%s+%d+\n$", out)
    assert.equal(0, status)

    status, out = run(dir, { tree .. "/bin/dlock", "run", "--url", "local://" .. dir .. "/locks",
      "k", "--", "sh", "-c", "echo $DLOCK_KEY; exit 3" })
    assert.same({ 3, "k\n" }, { status, out })
  end)

  it("leaves a backend out that is not wanted, and says so at connect", function()
    local tree = dir .. "/bare"
    local status, out = run(dir .. "/dlock-0.1.0",
      { "luarocks", "--lua-version", ABI, "make", "rockspec/dlock-0.1.0-1.rockspec",
        "--tree=" .. tree }, { WITH_REDIS = "0" })
    assert(status == 0, out)
    status, out = script(tree, [[
      local dlock = require "dlock"
      print(select(3, dlock.connect "redis://127.0.0.1"), (select(2, dlock.connect "redis://h")))
    ]])
    assert.matches("^unsupported\t.*hiredis", out)
    assert.equal(0, status)
  end)
end)
