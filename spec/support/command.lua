-- What the specs of the `dlock` command share: running it, and looking at the
-- processes below it.

local helpers = require "spec.helpers"
local proc = helpers.proc

local M = {}

M.path = helpers.build .. "/bin/dlock"

-- Field of /proc/PID/stat after the name: 1 the state, 2 the parent, 3 the group ...
function M.stat(pid, field)
  local text = helpers.read_file("/proc/" .. pid .. "/stat")
  local rest = text and text:match "^.*%) (.*)$"
  if not rest then return nil end
  local n = 0
  for word in rest:gmatch "%S+" do
    n = n + 1
    if n == field then return word end
  end
end

--- Whether it runs, or is stopped; a zombie is gone.
function M.alive(pid)
  local state = M.stat(pid, 1)
  return state ~= nil and state ~= "Z" and state ~= "X"
end

function M.state(pid) return M.stat(pid, 1) end

function M.children(pid)
  local found = {}
  for _, name in ipairs(assert(proc.list "/proc")) do
    if name:match "^%d+$" and M.stat(name, 2) == tostring(pid) then
      found[#found + 1] = tonumber(name)
    end
  end
  return found
end

--- The pid of the keeper of a wrapper.
function M.keeper(wrapper)
  return helpers.eventually(function()
    for _, pid in ipairs(M.children(wrapper)) do
      if helpers.read_file("/proc/" .. pid .. "/comm") == "dlock-keeper\n" then return pid end
    end
  end, 5, "a keeper")
end

--- The list of pids in a file that a command writes, one a line, once it has n.
function M.pids(path, n)
  return helpers.eventually(function()
    local pids = {}
    for pid in (helpers.read_file(path) or ""):gmatch "(%d+)\n" do
      pids[#pids + 1] = tonumber(pid)
    end
    return #pids >= n and pids
  end, 10, n .. " pids in " .. path)
end

function M.all_gone(pids)
  for _, pid in ipairs(pids) do
    if M.alive(pid) then return false, "process " .. pid .. " is alive: " .. M.stat(pid, 1) end
  end
  return true
end

-- Raised when the machine stood still just when something was due: a paused
-- machine is outside the promise.
local STALLED = {}

--- Waits until all pids are gone; at no look before may `free()` be true. Raises
-- STALLED when it was, but the looks were far apart.
function M.gone_before(pids, free, bound)
  local before, gap = helpers.now(), 0
  helpers.eventually(function()
    local gone = M.all_gone(pids)
    local now = helpers.now()
    gap = math.max(now - before, gap * 0.9)
    before = now
    if gone then return true end
    if free() then
      error(gap > 0.1 and STALLED or "free while a process of the command was there", 0)
    end
  end, bound)
end

--- Runs fn, once more for each time that the machine stood still.
function M.unstalled(fn)
  for _ = 1, 5 do
    local ok, err = pcall(fn)
    if ok then return end
    if err ~= STALLED then error(err, 0) end
  end
  error("the machine stands still all the time")
end

--- Starts `dlock ...`; options by name as for helpers.spawn.
function M.start(what)
  local plan = { M.path, env = { DLOCK_URL = false }, stderr = "pipe", stdin = "" }
  for k, v in pairs(what) do
    if type(k) == "number" then plan[k + 1] = v else plan[k] = v end
  end
  return helpers.spawn(plan)
end

--- Runs it to its end: status, stdout, stderr.
function M.run(...) return M.start({ ... }):finish(30) end

--- A shell script in a file of the directory.
function M.script(dir, text)
  M.scripts = (M.scripts or 0) + 1
  local path = dir .. "/script" .. M.scripts
  helpers.write_file(path, text)
  return path
end

return M
