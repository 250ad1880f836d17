--- A client: one backend, and the defaults for its locks. Made by `dlock.connect`.
--
-- Methods return a value on success, and `nil, message, code` otherwise, so that
-- `assert` reads well. Misuse raises on the caller's line. After `close` all but
-- `stats`, `poll` and `close` return `nil, message, "closed"`.
--
-- Keys are strings of any bytes; with the namespace they have 1 .. 4096 bytes.
-- @classmod dlock.client

local abort = require "dlock.abort"
local core = require "dlock.core"
local lock = require "dlock.lock"
local options = require "dlock.options"
local retry = require "dlock.retry"
local wait = require "dlock.wait"

local huge = math.huge
local running, status = coroutine.running, coroutine.status
local await, begin, guarded = wait.await, wait.begin, wait.guarded
local now = core.now

-- Most events given to on_event in one call: one that locks makes new ones.
local MOST_EVENTS = 1024

-- Errors that a new try may heal. (`held` and `timeout` come after all waiting.)
local transient = { unavailable = true, indeterminate = true }

local Client = {}
Client.__index = Client
Client.__name = "dlock.client"

-- Made by dlock.connect only.
local function new(handle, opts, runtime)
  local self = setmetatable({
    _handle = handle,
    _opts = opts,
    _runtime = runtime,
    _on_event = opts.on_event,
  }, Client)
  if opts.on_event then
    self._between = function() self:_deliver() end
    if runtime.attach then runtime.attach(self) end
  end
  return self
end

local function check(self, level)
  if getmetatable(self) ~= Client then
    error("expected a client, got " .. options.got(self) .. ": call it as client:method(...)",
      level + 1)
  end
end

local function check_key(self, name, key, level)
  options.argument(name, key, level + 1)
  local space = options.KEY_MAX - #self._opts.namespace
  if #key > space then
    error(name .. " must have at most " .. space .. " bytes in this namespace, got one of "
      .. #key .. " bytes", level + 1)
  end
end

local function closed() return nil, "the client is closed", "closed" end

-- An error in on_event must reach neither the caller nor, by an endless chain,
-- on_event itself: it is told once.
local function tell(on_event, event)
  local ok, err = pcall(on_event, event)
  if ok then return end
  local readable, text = pcall(tostring, err)
  pcall(on_event, {
    type = "notice",
    time = os.time(),
    message = "on_event raised an error: " .. (readable and text or type(err)),
  })
end

-- Whether some coroutine is inside on_event; one that died there counts no more.
local function delivering(self)
  local by = self._delivering
  return by and (by == true or status(by) ~= "dead")
end

function Client:_deliver()
  local on_event = self._on_event
  if not on_event or delivering(self) then return 0 end
  self._delivering = running() or true
  local n = 0
  while n < MOST_EVENTS do
    local event = self._handle:next_event()
    if not event then break end
    n = n + 1
    tell(on_event, event)
  end
  self._delivering = nil
  return n
end

local function try(self, key, o, seconds)
  local ok, bell, why = begin(self._runtime)
  if not ok then return nil, bell, why end
  local op, msg, code = self._handle:acquire(key, o, seconds, bell)
  if not op then return nil, msg, code end
  return await(self._runtime, op, huge, self._between)
end

local function check_delay(delay, level)
  if type(delay) ~= "number" or delay ~= delay or delay < 0 then
    error("opts.retry must return a number of seconds >= 0 or nil, got " .. options.got(delay),
      level + 1)
  end
end

-- After a failed first try: goes on while the policy says so and the next try
-- would begin before the wait is over. The last error is the one that counts.
local function keep_trying(self, key, o, began, msg, code)
  local next_delay, attempt = retry.start(o.retry), 1
  while true do
    local delay = next_delay(attempt, code, now() - began)
    if delay == nil then return nil, msg, code end
    check_delay(delay, 4)
    if delay >= o.wait - (now() - began) then return nil, msg, code end
    self._runtime.sleep(delay)
    local left = o.wait - (now() - began)
    if left <= 0 then return nil, msg, code end
    local grant
    grant, msg, code = try(self, key, o, left)
    if grant or not transient[code] then return grant, msg, code end
    attempt = attempt + 1
  end
end

local function acquire(self, key, o)
  local began = now()
  local grant, msg, code = try(self, key, o, o.wait)
  if transient[code] and o.wait > 0 then
    grant, msg, code = keep_trying(self, key, o, began, msg, code)
  end
  if not grant then return nil, msg, code end
  local held = lock.new(self, key, grant, o.timeout)
  if self._runtime.remember then self._runtime.remember(held) end
  return held
end

--- Take a lock.
--
-- Waits at most `wait` seconds, in the runtime's way; a waiter is woken when the lock gets
-- free. Within the `wait`, transient errors are tried again as `retry` says; `wait = 0` is one
-- try. A wait that an error cuts short (Ctrl-C) leaves nothing behind.
-- @tparam string key
-- @tparam[opt] table opts each absent one as given to `dlock.connect`
-- @tparam[opt=30] number opts.ttl seconds after which a server frees the lock of a dead process,
--   0.1 .. 86400; `lock.ttl` says what the backend made of it
-- @tparam[opt=10] number opts.wait longest wait, seconds, 0 .. `math.huge`
-- @tparam[opt] table|function|boolean opts.retry policy (see `dlock.retry`), function, or false for
--   none; default `exponential {}`
-- @tparam[opt=true] boolean opts.renew renew in the background, every ttl / 3
-- @tparam[opt=math.huge] number opts.max_hold seconds after which renewing stops, 0.1 ..
--   `math.huge`
-- @tparam[opt=2] number opts.timeout seconds for one request, 0.01 .. 3600
-- @tparam[opt="host:pid"] string opts.owner label that other people see, 1 .. 200 bytes without
--   control characters
-- @treturn[1] dlock.lock lock
-- @treturn[2] nil
-- @treturn[2] string message, for people, may change; names the holder where known
-- @treturn[2] string code: `held` (`wait` is 0), `timeout`, `unavailable`, `indeterminate`, `auth`,
--   `foreign`, `protocol`, `unsupported`, `closed`, `nomem`
-- @raise `key must be a string of 1 .. 4096 bytes, got ...`, `opts.ttl must be a number in 0.1 ..
--   86400, got ...` and the like, `opts has no option "NAME": ...`
-- @usage local lock, err, code = client:acquire("order:42", { wait = 2 })
function Client:acquire(key, opts)
  check(self, 2)
  check_key(self, "key", key, 2)
  local o = options.resolve("acquire", opts, self._opts, 2)
  if self._closed then return closed() end
  local held, msg, code = acquire(self, key, o)
  self:_deliver()
  return held, msg, code
end

-- After the function returned: a lost lock makes its work doubtful.
local function finish(held, ...)
  local _, msg, code = held:release()
  if code == "lost" then return nil, msg, code, ... end
  local reason = held:lost_reason()
  if reason then return nil, "the lock was lost: " .. reason, "lost", ... end
  return true, ...
end

-- Only ever tail-called by Client:with, whose place on the stack it takes: level 2 is the user.
local function with(self, key, opts, fn, ...)
  check(self, 2)
  check_key(self, "key", key, 2)
  local o = options.resolve("with", opts, self._opts, 2)
  if type(fn) ~= "function" then
    error("fn must be a function, got " .. options.got(fn), 2)
  end
  if self._closed then return closed() end
  local held, msg, code, run
  if o.abort_on_lost then
    run, msg, code = abort.runner(self._runtime)
    if not run then return nil, msg, code end
  end
  held, msg, code = acquire(self, key, o)
  self:_deliver()
  if not held then return nil, msg, code end
  if run then return guarded(held, finish, run, fn, ...) end
  return guarded(held, finish, fn, ...)
end

--- Take a lock, call a function, release.
--
-- If the function raises, the lock is released and the same error value goes on; Lua 5.4 keeps
-- its traceback. If the lock was lost meanwhile, that is an error even though the function
-- returned: somebody else may have run beside it.
-- @function Client:with
-- @tparam string key
-- @tparam[opt] table opts as for `acquire`; may be left out
-- @tparam[opt=false] boolean opts.abort_on_lost stop the function when the lock is lost, instead of
--   telling it afterwards: see `dlock.abort`
-- @tparam function fn called as `fn(lock, ...)`
-- @param ... further arguments for fn
-- @treturn[1] boolean true, followed by what the function returned
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `lost`, followed by what the function returned; or a code of `acquire`
--   or `unsupported` (no `abort_on_lost` here): the function was not called
-- @raise the function's error; misuse as for `acquire`; `fn must be a function, got ...`
-- @usage local ok, result, code = client:with("order:42", { wait = 2 }, function(lock)
--   return ship(42, lock.token_string)
-- end)
function Client:with(key, ...)
  local first = ...
  if type(first) == "function" then return with(self, key, nil, ...) end
  return with(self, key, ...)
end

local function ask(self, kind, key)
  if self._closed then return closed() end
  local ok, bell, why = begin(self._runtime)
  if not ok then return nil, bell, why end
  local op, msg, code = self._handle:ask(kind, key, self._opts.timeout, bell)
  local info
  if op then info, msg, code = await(self._runtime, op, huge, self._between) end
  self:_deliver()
  return info, msg, code
end

--- Who holds a key. Takes no part in the lock; the answer is old when you read it.
-- @tparam string key
-- @treturn[1] table `{ held = boolean, dlock = boolean (the holder is a dlock client), owner =
--   label or value, token, token_string, age = seconds held, ttl = seconds left, waiters = list of
--   labels }`; what the backend cannot tell is absent
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `unavailable`, `indeterminate`, `auth`, `foreign`, `protocol`, `closed`,
--   `nomem`
-- @raise `key must be a string of 1 .. 4096 bytes, got ...`
function Client:inspect(key)
  check(self, 2)
  check_key(self, "key", key, 2)
  local info, msg, code = ask(self, "inspect", key)
  if not info then return nil, msg, code end
  return {
    held = info.found,
    dlock = info.found and info.ours,
    owner = info.owner,
    token = info.token,
    token_string = info.token_string,
    age = info.age,
    ttl = info.ttl,
    waiters = info.list,
  }
end

--- The administrator's forced release: takes the lock from whoever holds it and wakes the
-- waiters. The holder learns of it at its next renewal at the latest; until then two may run.
-- @tparam string key
-- @treturn[1] boolean true: it is free
-- @treturn[1] boolean whether somebody held it
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `unavailable`, `indeterminate`, `auth`, `foreign`, `protocol`, `closed`,
--   `nomem`
-- @raise `key must be a string of 1 .. 4096 bytes, got ...`
function Client:break_lock(key)
  check(self, 2)
  check_key(self, "key", key, 2)
  local info, msg, code = ask(self, "break", key)
  if not info then return nil, msg, code end
  return true, info.found
end

--- The keys that are held now, in byte order.
-- @tparam[opt=""] string prefix only keys that begin with it
-- @treturn[1] table list of keys, without the namespace
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `unavailable`, `indeterminate`, `auth`, `protocol`, `unsupported`,
--   `closed`, `nomem`
-- @raise `prefix must be a string of 0 .. 4096 bytes, got ...`
function Client:list(prefix)
  check(self, 2)
  prefix = prefix == nil and "" or prefix
  check_key(self, "prefix", prefix, 2)
  local info, msg, code = ask(self, "list", prefix)
  if not info then return nil, msg, code end
  local skip = #self._opts.namespace + 1
  local keys = {}
  for i, name in ipairs(info.list) do keys[i] = name:sub(skip) end
  table.sort(keys)
  return keys
end

--- Check that the server is there and can do what dlock needs.
-- @treturn[1] string what answered, for people
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `unavailable`, `indeterminate`, `auth`, `protocol`, `unsupported`,
--   `closed`, `nomem`
-- @raise `expected a client, got ...`
function Client:ping()
  check(self, 2)
  local info, msg, code = ask(self, "ping", "")
  if not info then return nil, msg, code end
  return info.text or "ok"
end

--- Counters since `connect`, and latencies. Costs no I/O; works after `close` too.
-- @treturn table numbers: `acquired`, `released`, `lost`, `timeouts` (codes `timeout` and `held`),
--   `failed`, `canceled`, `leaked`, `renewed`, `renew_failed`, `handed_over` (from one waiter of
--   this process to the next), `requests`, `connects`, `events_dropped`; now: `held`, `waiting`;
--   and the tables `acquire` and `release`: `{ count, mean, max, p50, p99 }`, seconds, the last two
--   as upper bounds
-- @raise `expected a client, got ...`
function Client:stats()
  check(self, 2)
  local s = self._handle:stats()
  self:_deliver()
  return s
end

--- Deliver the events that wait to `on_event`, as every other method does at its end.
-- @treturn number how many there were, at most 1024 at once
-- @raise `expected a client, got ...`
function Client:poll()
  check(self, 2)
  local n = self:_deliver()
  return n
end

--- Release every lock of this client and let go of its connections. Returns after `timeout` seconds
-- at the latest; at once where the runtime cannot wait, and the rest is done in the background.
-- Again: does nothing.
-- @treturn[1] boolean true
-- @treturn[2] nil
-- @treturn[2] string message
-- @treturn[2] string code: `indeterminate`: the server did not answer in time; dlock goes on in the
--   background until the locks' ttl
-- @raise `expected a client, got ...`
function Client:close()
  check(self, 2)
  if self._closed then return true end
  self._closed = true
  local can, bell = begin(self._runtime)
  local op, msg, code = self._handle:close_op(can and bell or nil)
  local ok
  if op and can then
    ok, msg, code = await(self._runtime, op, self._opts.timeout, self._between)
  elseif op then
    op:close()
    ok = true
  end
  self:_deliver()
  if ok == false then
    return nil, "not all locks are released yet; that goes on in the background", "indeterminate"
  end
  return ok, msg, code
end

Client.__close = function(self) pcall(Client.close, self) end

Client.__tostring = function(self)
  return "dlock.client: " .. (self._closed and "closed" or "open")
end

return { new = new }
