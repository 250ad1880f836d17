-- For each backend: how the contract suite gets a server for it. start()
-- returns an object with url, leftovers() (what must be gone after a test) and
-- stop(). A backend of the registry that is missing here fails the run.

local helpers = require "spec.helpers"

local M = {}

M["local"] = {
  start = function()
    local dir = helpers.tmpdir()
    return {
      url = "local://" .. dir,
      dir = dir,
      leftovers = function() return {} end, -- files stay after release
      stop = function() helpers.remove_tree(dir) end,
    }
  end,
}

M.redis = { start = function() return require("spec.support.redis").start() end }

M.zookeeper = {
  start = function() return require("spec.support.zookeeper").start() end,
  -- Two spellings of one path: the slash in front may be left out.
  same = { ["/a"] = "a" },
  threads = true, -- of libzookeeper
  slow = true, -- each pair is two writes to its disk
}

return M
