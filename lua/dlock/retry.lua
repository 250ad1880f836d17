--- Retry policies: how long to wait before the next try, and when to stop.
--
-- Given as `opts.retry` to `dlock.connect` or `client:acquire`, a policy paces the
-- new tries after a transient error (`unavailable`, `indeterminate`) within the
-- remaining `wait`. Waiting for a lock that somebody holds needs no policy: the
-- waiter is woken.
--
-- A policy only computes: no clock, no I/O, no state between uses, so one may be
-- shared by any number of clients. A plain function does as well; it is called as
-- `f(attempt, code, elapsed)`: tries made so far, the last error's code, seconds
-- since the first try began; it returns the seconds to wait, or nil to give up.
--
-- The jitter keeps clients that failed together from coming back together. With a
-- computed delay `d`: `full` takes a random time in 0 .. d, `equal` in d/2 .. d, `none` d
-- itself, and `decorrelated` one between the policy's first delay and three times the time taken
-- before, at most `max`. Names and formulas: AWS Architecture Blog, "Exponential
-- Backoff And Jitter".
--
-- Options of all three policies: `jitter`; `attempts`, the most tries in all, 1 .. `math.huge`,
-- default `math.huge`; `deadline`, seconds since the first try after which no new one starts,
-- 0 .. `math.huge`, default `math.huge`; `random`, a function that returns a number in [0, 1),
-- default one that differs in every process.
-- @module dlock.retry
-- @usage local retry = require "dlock.retry"
-- local client = dlock.connect(url, { retry = retry.exponential { max = 2, attempts = 8 } })

local options = require "dlock.options"

local min = math.min

local M = {}

-- A generator seeded at start is the same in every process under LuaJIT, and
-- in every child after a fork, which is just what the jitter must avoid.
local has_core, core = pcall(require, "dlock.core")
local default_random = has_core and core.random or math.random

local jitters = {
  none = function(d) return d end,
  full = function(d, random) return d * random() end,
  equal = function(d, random) return d / 2 + d / 2 * random() end,
  decorrelated = function(_, random, first, before, max)
    return min(max, first + random() * (before * 3 - first))
  end,
}

local Policy = {}
Policy.__index = Policy

--- One use of a policy.
-- @function policy:start
-- @treturn function `f(attempt, code, elapsed)` -> seconds to wait, or nil to give up. `attempt` is
--   the number of tries made so far, from 1; without `elapsed` the delays given out count
function Policy:start()
  local o, delay_after = self.options, self.delay_after
  local random, jitter = o.random or default_random, jitters[o.jitter]
  local first = min(o.max, delay_after(1))
  local before, total = first, 0
  return function(attempt, _, elapsed)
    if attempt >= o.attempts then return nil end
    local delay = jitter(min(o.max, delay_after(attempt)), random, first, before, o.max)
    if (elapsed or total) + delay > o.deadline then return nil end
    before, total = delay, total + delay
    return delay
  end
end

local function policy(o, jitter, delay_after)
  o.jitter = o.jitter or jitter
  o.max = o.max or options.argument("max")
  return setmetatable({ options = o, delay_after = delay_after }, Policy)
end

--- The same delay each time.
-- @tparam[opt] table opts
-- @tparam[opt=0.1] number opts.delay seconds, 0 .. 86400
-- @tparam[opt="none"] string opts.jitter `none`, `full`, `equal` or `decorrelated`
-- @tparam[opt=math.huge] number opts.attempts most tries in all
-- @tparam[opt=math.huge] number opts.deadline seconds since the first try
-- @tparam[opt] function opts.random
-- @treturn table policy
-- @raise `opts.delay must be a number in 0 .. 86400, got ...` and the like
function M.constant(opts)
  local o = options.resolve("constant", opts, nil, 2)
  -- Only "decorrelated" can exceed the delay; three times is where it starts.
  o.max = o.jitter == "decorrelated" and o.delay * 3 or o.delay
  return policy(o, "none", function() return o.delay end)
end

--- Delays that grow by a step: base, base + step, base + 2 step ...
-- @tparam[opt] table opts
-- @tparam[opt=0.1] number opts.base first delay, seconds, 0 .. 86400
-- @tparam[opt=0.1] number opts.step seconds, 0 .. 86400
-- @tparam[opt=5] number opts.max longest delay, seconds, 0 .. 86400
-- @tparam[opt="none"] string opts.jitter `none`, `full`, `equal` or `decorrelated`
-- @tparam[opt=math.huge] number opts.attempts most tries in all
-- @tparam[opt=math.huge] number opts.deadline seconds since the first try
-- @tparam[opt] function opts.random
-- @treturn table policy
-- @raise `opts.base must be a number in 0 .. 86400, got ...` and the like
function M.linear(opts)
  local o = options.resolve("linear", opts, nil, 2)
  return policy(o, "none", function(n) return o.base + o.step * (n - 1) end)
end

--- Delays that grow by a factor: base, base x factor, base x factor^2 ...
-- @tparam[opt] table opts
-- @tparam[opt=0.1] number opts.base first delay, seconds, 0 .. 86400
-- @tparam[opt=2] number opts.factor 1 .. 1000
-- @tparam[opt=5] number opts.max longest delay, seconds, 0 .. 86400
-- @tparam[opt="full"] string opts.jitter `full`, `equal`, `decorrelated` or `none`
-- @tparam[opt=math.huge] number opts.attempts most tries in all
-- @tparam[opt=math.huge] number opts.deadline seconds since the first try
-- @tparam[opt] function opts.random
-- @treturn table policy
-- @raise `opts.factor must be a number in 1 .. 1000, got ...` and the like
function M.exponential(opts)
  local o = options.resolve("exponential", opts, nil, 2)
  return policy(o, "full", function(n)
    if o.base == 0 then return 0 end
    return o.base * o.factor ^ (n - 1)
  end)
end

--- The function that one acquire asks, from whatever `opts.retry` may be.
-- @tparam ?table|function|boolean p policy, function, false (never retry), or nil for `exponential
--   {}`
-- @treturn function as for @{policy:start}
function M.start(p)
  if p == false then return function() return nil end end
  if type(p) == "function" then return p end
  return (p or M.default):start()
end

--- What is used when nothing is given: `exponential {}`.
M.default = M.exponential()

return M
