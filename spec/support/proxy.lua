-- A proxy between dlock and a server that drops, delays and cuts, and servers
-- that give canned answers. Requests and replies: see spec/support/proxy.py.

local cjson = require "cjson"
local helpers = require "spec.helpers"

local M = {}
local Proxy = {}
Proxy.__index = Proxy

-- Strings are bytes on both sides: \u00XX here, latin-1 there.
local function bytes(json)
  return (json:gsub("[\128-\255]", function(c) return ("\\u%04x"):format(c:byte()) end))
end

local function do_it(self, order)
  assert(self.process:write(bytes(cjson.encode(order)) .. "\n"))
  local answer = cjson.decode(self.process:expect("([^\n]*)\n", 10))
  if answer.error then error(answer.error, 3) end
  return answer
end

local function start(order)
  local self = setmetatable({}, Proxy)
  self.process = helpers.spawn { helpers.python, "spec/support/proxy.py", stdin = "pipe" }
  order["do"] = "start"
  self.port = do_it(self, order).port
  self.url = ("redis://127.0.0.1:%d"):format(self.port)
  return self
end

--- In front of a port or a socket path; passes everything until told otherwise.
-- Fields: port, url (redis://...).
function M.start(target, opts)
  return start { target = target, raw = opts and opts.raw or nil }
end

--- A server of its own that answers with given bytes:
-- { hello = bytes at once, replies = { one per request, the last repeats },
--   close = after so many replies (0: at once), each = seconds between bytes,
--   raw = true: whatever one read gives is a request }
function M.canned(opts)
  local raw = opts.raw
  opts.raw = nil
  return start { canned = opts, raw = raw }
end

--- A canned server gets other answers, for connections from now on.
function Proxy:answers(opts) do_it(self, { ["do"] = "answers", canned = opts }) end

--- "pass", "hold" (both ways, until the next set), "mute" (replies thrown
-- away), "refuse" (new connections closed at once); delay: seconds a request.
function Proxy:set(mode, delay) do_it(self, { ["do"] = "set", mode = mode, delay = delay }) end

--- What to do with requests that contain `match`: "lose" (server does it, the
-- reply never comes), "dead" (so, and the connection leads nowhere from then
-- on), "cut" (server does it, then the connection breaks), "late" (0.1 s), "eat",
-- "close". opts: match = text, skip = n first ones, times = how often (1).
function Proxy:rule(action, opts)
  opts = opts or {}
  do_it(self, { ["do"] = "rule", action = action, match = opts.match, skip = opts.skip,
    times = opts.times })
end

--- No more rules, mode pass.
function Proxy:clear() do_it(self, { ["do"] = "clear" }) end

--- Breaks every connection that is open now.
function Proxy:cut() do_it(self, { ["do"] = "cut" }) end

--- connections, open, requests, dropped (reads of replies), hit (rules used).
function Proxy:stats() return do_it(self, { ["do"] = "stats" }) end

function Proxy:stop() self.process:close() end

return M
