-- Handlers of nginx.conf. One client per worker serves all of its requests.

local dlock = require "dlock"

local ngx = ngx -- luacheck: ignore ngx

local M = {}

M.client = assert(dlock.connect(os.getenv "DLOCK_URL" or "local:", {
  namespace = "shop:", ttl = 10, wait = 5,
  on_event = function(ev)
    if ev.type == "lost" or ev.type == "leaked" then
      ngx.log(ngx.WARN, "lock ", ev.key, ": ", ev.type, ": ", ev.message)
    end
  end,
}))

-- What went wrong, as a status: try again later, or look at what was done.
local function fail(msg, code)
  ngx.status = code == "lost" and 500 or 503
  if ngx.status == 503 then ngx.header["Retry-After"] = 1 end
  ngx.say(code, ": ", msg)
end

-- The work on one order, of which there must never be two at a time. The database
-- would refuse a token smaller than the largest it has seen for this order.
local function ship(lock, id)
  local shop = ngx.shared.shop
  local n = (shop:get("shipped " .. id) or 0) + 1
  ngx.sleep(0.05)
  shop:set("shipped " .. id, n)
  return n, lock.token_string
end

function M.order(id)
  local opts = { wait = 2, abort_on_lost = true }
  local ok, n, token = M.client:with("order:" .. id, opts, ship, id)
  if not ok then return fail(n, token) end -- then they are message and code
  ngx.say("order ", id, ": step ", n, " under token ", token)
end

-- ---- a cache that one worker rebuilds ----

local FRESH = 5 -- seconds

local function rebuild()
  ngx.sleep(0.5) -- the slow query
  local text = "report of " .. ngx.utctime() .. " by worker " .. ngx.worker.pid()
  ngx.shared.shop:set("report", text)
  ngx.shared.shop:set("report fresh", true, FRESH)
  return text
end

local function answer(how, text)
  ngx.header["X-Cache"] = how
  ngx.say(text)
end

-- Stale is better than waiting, but the very first time there is nothing to serve.
function M.report()
  local shop = ngx.shared.shop
  local old = shop:get "report"
  if shop:get "report fresh" then return answer("fresh", old) end
  local ok, text, code = M.client:with("rebuild the report", { wait = old and 0 or 5 }, function()
    if shop:get "report fresh" then return shop:get "report" end -- while we waited
    return rebuild()
  end)
  if ok then return answer("rebuilt", text) end
  if old then return answer("stale (" .. code .. ")", old) end
  fail(text, code)
end

-- ---- who holds what ----

local function escape(text)
  return (tostring(text):gsub("[&<>\"]", { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;",
    ['"'] = "&quot;" }))
end

local function seconds(n) return n and ("%.1f s"):format(n) or "" end

function M.locks()
  local keys, msg, code = M.client:list()
  if not keys then return fail(msg, code) end
  ngx.say "<!doctype html><title>locks</title><h1>Locks</h1><table border=1>"
  ngx.say "<tr><th>key<th>holder<th>token<th>held for<th>ttl left<th>waiters"
  for _, key in ipairs(keys) do
    local who = M.client:inspect(key)
    if who and who.held then
      ngx.say("<tr><td>", escape(key), "<td>", escape(who.owner or "?"), "<td>",
        escape(who.token_string or ""), "<td>", seconds(who.age), "<td>", seconds(who.ttl), "<td>",
        who.waiters and #who.waiters or "")
    end
  end
  ngx.say "</table>"
end

return M
