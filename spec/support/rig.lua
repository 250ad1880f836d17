-- What the fault specs share: things that a test opens and that are closed
-- before the leak check looks.

local busted = require "busted"
local dlock = require "dlock"
local helpers = require "spec.helpers"
local tasks = require "spec.support.tasks"

local M = {}

--- To be called first inside a describe block, in place of helpers.no_leaks.
-- Returns a rig: rig.connect(url, opts) for clients on the runtime of
-- spec.support.tasks, rig.keep(thing) for whatever has a method `close` or `stop`;
-- all are closed after each test, the youngest first.
-- The arguments are functions that return servers, which are thawed then.
function M.new(...)
  local getters, things = { ... }, {}
  local rig = {}

  function rig.keep(thing)
    things[#things + 1] = thing
    return thing
  end

  function rig.connect(url, opts)
    local o = { runtime = tasks.runtime }
    for k, v in pairs(opts or {}) do o[k] = v end
    return rig.keep(assert(dlock.connect(url, o)))
  end

  busted.after_each(function()
    tasks.forget()
    for _, get in ipairs(getters) do
      local server = get()
      if server and server.stopped then server:thaw() end
    end
    for i = #things, 1, -1 do
      local thing = things[i]
      things[i] = nil
      if thing.close then thing:close() else thing:stop() end
    end
  end)
  helpers.no_leaks(...)
  return rig
end

--- Collects what on_event gets, in `list`; what notices say goes to `notices`.
function M.events()
  local e = { list = {}, notices = {} }
  function e.on_event(ev)
    local to = ev.type == "notice" and e.notices or e.list
    to[#to + 1] = ev
  end
  --- "acquired lost(expired)", of one key or all.
  function e.text(key)
    local out = {}
    for _, ev in ipairs(e.list) do
      if key == nil or key == ev.key then
        out[#out + 1] = ev.type .. (ev.reason and "(" .. ev.reason .. ")" or "")
      end
    end
    return table.concat(out, " ")
  end
  return e
end

--- Fails unless `key` is gone from the server within so many seconds of `since`.
function M.key_gone(server, key, since, within)
  tasks.eventually(function() return server:call("EXISTS", key) == 0 end, 60, "key gone")
  local took = helpers.now() - since
  if took >= helpers.bound(within) then
    error(("the key %s was there for %.3f s, not %g s"):format(key, took, helpers.bound(within)), 2)
  end
end

return M
