-- time limit: 400 s
-- An ensemble of three: a leader that dies under load, and a follower that is cut
-- off from the leader while it still answers its clients.
local helpers = require "spec.helpers"

if not (" " .. table.concat(require("dlock.core").backends(), " ") .. " "):find " zookeeper " then
  return
end

local proxies = require "spec.support.proxy"
local rigs = require "spec.support.rig"
local tasks = require "spec.support.tasks"
local zookeeper = require "spec.support.zookeeper"

local now = helpers.now

-- ARGS: url, file, increments. As the contract's exclusion test, but a lock may be
-- lost while the leader changes: then that round counts for nothing. The file is
-- the resource: it refuses a token smaller than the one it has seen.
local WORKER = [[
local dlock = require "dlock"
local url, path, n = ARGS[1], ARGS[2], tonumber(ARGS[3])
local c = assert(dlock.connect(url, { ttl = 3, wait = 100, timeout = 5 }))
local done = 0
while done < n do
  local lock, msg, code = c:acquire "number"
  if not lock then
    assert(code == "unavailable" or code == "indeterminate", code .. ": " .. msg)
  else
    local f = assert(io.open(path))
    local number, token = f:read("*n", "*n")
    f:close()
    local temp = path .. "." .. lock.token_string
    f = assert(io.open(temp, "w"))
    f:write(("%d %s\n"):format(number + 1, lock.token_string))
    f:close()
    if lock:is_held() then
      assert(lock.token > token, "token " .. lock.token_string .. " after " .. token)
      assert(os.rename(temp, path))
      done = done + 1
      print "did"
      io.stdout:flush()
    else
      os.remove(temp)
    end
    lock:release()
  end
end
c:close()
]]

describe("an ensemble of three", function()
  describe("whose leader is killed while 20 processes contend", function()
    local ensemble
    local rig = rigs.new(function() return ensemble end)
    setup(function() ensemble = zookeeper.ensemble(3) end)
    teardown(function() ensemble:stop() end)

    it("goes on, with one holder at a time and nothing left", function()
      local dir = helpers.tmpdir()
      helpers.write_file(dir .. "/number", "0 0\n")
      local n, each, workers = 20, helpers.scaled(100, 5), {}
      for i = 1, n do
        workers[i] = rig.keep(helpers.spawn_lua(WORKER, ensemble.url, dir .. "/number",
          tostring(each)))
      end
      workers[1]:expect("did", 60)
      local leader = ensemble:leader()
      leader:kill()
      for _, w in ipairs(workers) do
        local status, out = w:finish(120)
        assert.are.equal(0, status, out)
      end
      assert.are.equal(n * each, tonumber(helpers.read_file(dir .. "/number"):match "%d+"))
      helpers.remove_tree(dir)
    end)
  end)

  describe("with a follower that is cut off from its leader", function()
    local ensemble
    local links = {} -- proxies in front of each quorum port, by the server that uses it
    local rig = rigs.new(function() return ensemble end)
    setup(function()
      ensemble = zookeeper.ensemble(3, {
        sync_limit = 100, -- 10 s: longer than the session
        route = function(i, _, port)
          local p = proxies.start(port, { raw = true })
          links[#links + 1] = { from = i, proxy = p }
          return math.floor(p.port)
        end,
      })
    end)
    teardown(function()
      ensemble:stop()
      for _, l in ipairs(links) do l.proxy:stop() end
    end)

    it("ends the locks of its clients before another client can have them", function()
      local leader, followers = ensemble:leader()
      local cut_off = followers[1]
      local c, other = rig.connect(cut_off.url, { ttl = 2 }), rig.connect(leader.url, { wait = 30 })
      local lock = assert(c:acquire "k")
      local lost, got
      tasks.start(function()
        assert.are.equal("session", lock:wait_lost(30))
        lost = now()
      end)
      tasks.start(function()
        local theirs = assert(other:acquire "k")
        got = now()
        assert.is_false(lock:is_held())
        assert.is_true(theirs:release())
      end)
      tasks.eventually(function() return #leader:ephemerals() == 2 end)
      for _, l in ipairs(links) do
        if l.from == cut_off.id then l.proxy:set "hold" end
      end
      tasks.run(40)
      assert.is_true(got > lost, ("%.3f s too late"):format(lost - got))
      for _, l in ipairs(links) do l.proxy:set "pass" end
    end)
  end)
end)
