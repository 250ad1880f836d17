-- /metrics in Prometheus' text format. A scrape meets one worker, so each worker
-- leaves its numbers in a shared dictionary once a second, and all of them are shown.

local ngx = ngx -- luacheck: ignore ngx

local M = {}

local COUNTERS = { "acquired", "released", "lost", "timeouts", "failed", "canceled", "leaked",
  "renewed", "renew_failed", "handed_over", "requests", "connects", "events_dropped" }
local GAUGES = { "held", "waiting" }
local LATENCIES = { "acquire", "release" }

local function publish(premature)
  if premature then return end
  local stats, lines = require("shop").client:stats(), {}
  local function add(name, value) lines[#lines + 1] = ("%s %.17g"):format(name, value) end
  for _, name in ipairs(COUNTERS) do add(name .. "_total", stats[name]) end
  for _, name in ipairs(GAUGES) do add(name, stats[name]) end
  for _, name in ipairs(LATENCIES) do
    local l = stats[name]
    add(name .. "_seconds_count", l.count)
    add(name .. "_seconds_sum", l.count * l.mean)
  end
  ngx.shared.metrics:set(ngx.worker.id(), table.concat(lines, "\n"))
end

--- From init_worker_by_lua.
function M.start() assert(ngx.timer.every(1, publish)) end

local function print_metric(name, kind, values, suffix)
  ngx.say("# TYPE dlock_", name, " ", kind)
  for _, s in ipairs(suffix or { "" }) do
    for worker, list in pairs(values) do
      if list[name .. s] then
        ngx.say("dlock_", name, s, "{worker=\"", worker, "\"} ", list[name .. s])
      end
    end
  end
end

function M.page()
  publish()
  local values = {}
  for _, worker in ipairs(ngx.shared.metrics:get_keys(0)) do
    values[worker] = {}
    for name, value in ngx.shared.metrics:get(worker):gmatch "(%S+) (%S+)" do
      values[worker][name] = value
    end
  end
  ngx.header.content_type = "text/plain; version=0.0.4"
  for _, name in ipairs(COUNTERS) do print_metric(name .. "_total", "counter", values) end
  for _, name in ipairs(GAUGES) do print_metric(name, "gauge", values) end
  for _, name in ipairs(LATENCIES) do
    print_metric(name .. "_seconds", "summary", values, { "_count", "_sum" })
  end
end

return M
