--- A lock that is, or was, held. Made by `client:acquire` and `client:with`.
--
-- A lock keeps its client alive. Keep the lock in a variable while you need it:
-- one that is collected while held is released in the background and reported
-- by the event `leaked`. In Lua 5.4 a to-be-closed variable (attribute `close`) releases it at the
-- end of the block, whatever ends that.
--
-- Every method may call the client's `on_event`.
-- @classmod dlock.lock

local options = require "dlock.options"
local wait = require "dlock.wait"

local huge = math.huge
local await, begin = wait.await, wait.begin

local Lock = {}
Lock.__index = Lock
Lock.__name = "dlock.lock"

--- Fields, to be read only.
-- @table fields
-- @field key string, without the namespace
-- @field token the fencing token: an integer, larger than that of every earlier grant of this key.
--   Let the resource that the lock guards refuse a smaller one
-- @field token_string the same in decimal, exact on every backend: use this wherever the token
--   leaves Lua
-- @field owner string, the label that other people see
-- @field ttl seconds that the server really enforces; `math.huge` where it ends with the process
--   (`local:`)

local function check(self, level)
  if getmetatable(self) ~= Lock then
    error("expected a lock, got " .. options.got(self) .. ": call it as lock:method(...)",
      level + 1)
  end
end

-- Made by the client only.
local function new(client, key, grant, timeout)
  return setmetatable({
    key = key,
    token = grant:token(),
    token_string = grant:token_string(),
    owner = grant:owner(),
    ttl = grant:ttl(),
    _grant = grant,
    _client = client,
    _timeout = timeout,
  }, Lock)
end

-- Starts an operation by the grant's method and waits for it.
local function perform(self, seconds, method, ttl)
  local client, grant = self._client, self._grant
  local op
  local ok, bell, code = begin(client._runtime)
  if not ok then return nil, bell, code end
  local msg
  if ttl then
    op, msg, code = grant[method](grant, ttl, self._timeout, bell)
  else
    op, msg, code = grant[method](grant, self._timeout, bell)
  end
  if not op then return nil, msg, code end
  ok, msg, code = await(client._runtime, op, seconds, client._between)
  client:_deliver()
  return ok, msg, code
end

-- The release where nothing can wait: it is sent, and nobody looks at the answer.
local function send_release(self)
  local op, msg, code = self._grant:release(self._timeout, false)
  if not op then return nil, msg, code end
  local ok = true
  if op:wait(0) then ok, msg, code = op:result() end
  op:close()
  self._client:_deliver()
  return ok, msg, code
end

--- Give it back. Returns at the latest after the request's `timeout`; if the server has not
-- answered by then, dlock goes on trying in the background, and the event `released` tells the end.
-- Where the runtime cannot wait (nginx: header_filter, body_filter, log, ...) it returns at once,
-- and the rest is done in the background.
-- @treturn[1] boolean true: it was ours without a gap from acquire to release
-- @treturn[2] nil
-- @treturn[2] string message, for people, may change
-- @treturn[2] string code: `lost` (it was ours and is no longer), `not_held` (released before),
--   `unavailable`, `indeterminate`, `auth`, `protocol`, `nomem`
-- @raise `expected a lock, got ...`
function Lock:release()
  check(self, 2)
  local runtime = self._client._runtime
  local ok, msg, code
  if begin(runtime) then
    ok, msg, code = perform(self, huge, "release")
  else
    ok, msg, code = send_release(self)
  end
  if runtime.forget then runtime.forget(self) end
  return ok, msg, code
end

--- Make the lock valid for `ttl` seconds from now; that is its ttl from now on, also for the
-- renewals in the background.
-- @tparam[opt] number ttl seconds, 0.1 .. 86400; default: the present one
-- @treturn[1] boolean true
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `lost`, `not_held`, `unavailable`, `indeterminate`, `auth`, `protocol`,
--   `nomem`. After another code than the first two it may still be held: see `is_held`
-- @raise `ttl must be a number in 0.1 .. 86400, got ...`
function Lock:extend(ttl)
  check(self, 2)
  if ttl ~= nil then options.argument("ttl", ttl, 2) end
  local ok, msg, code = perform(self, huge, "extend", ttl or 0)
  -- Without an answer too: renewals go on by the new one.
  self.ttl = self._grant:ttl()
  return ok, msg, code
end

local function check_validity(self, s, level)
  local most = self.ttl * 0.9
  if type(s) ~= "number" or not (s >= 0 and s <= most) then
    error("seconds must be a number in 0 .. " .. options.number_text(most)
      .. " (0.9 x the ttl), got " .. options.got(s), level + 1)
  end
end

--- See to it that `seconds` of validity are left, renewing once if needed: for a step that must
-- not be cut short.
-- @tparam number seconds 0 .. 0.9 x the ttl
-- @treturn[1] boolean true
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: as for `extend`; `unavailable` also when the renewal took so long, or
--   `max_hold` is so near, that less is left
-- @raise `seconds must be a number in 0 .. N (0.9 x the ttl), got ...`
function Lock:ensure(seconds)
  check(self, 2)
  check_validity(self, seconds, 2)
  local left = self:remaining()
  if left > 0 and left >= seconds then return true end
  local ok, msg, code = self:extend()
  if not ok then return nil, msg, code end
  left = self:remaining()
  if left > 0 and left >= seconds then return true end
  if not self:is_held() then
    ok, msg, code = self:extend()
    if not ok then return nil, msg, code end
  end
  return nil, "only " .. options.number_text(left) .. " s of validity are left after a renewal",
    "unavailable"
end

--- Whether it is held now. Costs no I/O; false from the moment at which its validity ends.
-- @treturn boolean
-- @raise `expected a lock, got ...`
function Lock:is_held()
  check(self, 2)
  local held = self._grant:is_held()
  self._client:_deliver()
  return held
end

--- How long it is valid if no renewal succeeds any more. Costs no I/O.
-- @treturn number seconds; 0: not held; `math.huge`: no end (`local:`)
-- @raise `expected a lock, got ...`
function Lock:remaining()
  check(self, 2)
  local left = self._grant:remaining()
  self._client:_deliver()
  return left
end

--- Why it was lost.
-- @treturn ?string `expired`, `taken`, `deleted`, `revoked`, `session`, `forked` or `max_hold`;
--   nil: it was not lost
-- @raise `expected a lock, got ...`
function Lock:lost_reason()
  check(self, 2)
  return self._grant:lost_reason()
end

--- Wait, in the runtime's way, until the lock is lost.
-- @tparam[opt=math.huge] number timeout seconds, 0 .. `math.huge`
-- @treturn[1] string reason, as from `lost_reason`
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `timeout` (it is still held), `not_held` (released), `nomem`
-- @raise `timeout must be a number in 0 .. math.huge, got ...`
function Lock:wait_lost(timeout)
  check(self, 2)
  timeout = options.argument("wait_lost", timeout, 2, "timeout")
  local done, msg, code = perform(self, timeout, "until_lost")
  if done == false then return nil, "the lock is still held", "timeout" end
  local reason = self._grant:lost_reason()
  if reason then return reason end
  return nil, msg, code
end

--- A duplicate of the kernel lock's descriptor, for a process that is to keep the lock alive
-- (`local:` only). The caller closes it.
-- @treturn ?number descriptor
-- @raise `expected a lock, got ...`
function Lock:hold_fd()
  check(self, 2)
  return self._grant:hold_fd()
end

Lock.__close = function(self) pcall(Lock.release, self) end

Lock.__tostring = function(self)
  return "dlock.lock: " .. self._grant:state() .. " " .. options.quoted(self.key)
end

return { new = new }
