--- Distributed locks: one process among many does a thing at a time.
--
-- `dlock.connect` makes a client for a backend, `client:acquire` and `client:with` take
-- locks, which dlock keeps alive from a thread of its own until they are released.
-- Times are seconds everywhere.
--
-- @module dlock
-- @usage local dlock = require "dlock"
-- local client = assert(dlock.connect("redis://127.0.0.1:6379", { ttl = 30, wait = 10 }))
-- local ok, result, code = client:with("order:42", function(lock)
--   return ship(42, lock.token_string)
-- end)

if not (_VERSION == "Lua 5.4" or rawget(_G, "jit")) then
  error("dlock needs Lua 5.4 or LuaJIT, this is " .. _VERSION)
end

local client = require "dlock.client"
local core = require "dlock.core"
local options = require "dlock.options"
local retry = require "dlock.retry"

local M = {
  --- The version, as `major.minor.patch`.
  _VERSION = core.version,
  --- Every error code with its usual text:
  --
  -- * `held`: somebody else has it, and no waiting was asked for
  -- * `timeout`: `wait` ran out
  -- * `lost`: it was ours and is no longer; `lock:lost_reason` says why
  -- * `not_held`: released before
  -- * `unavailable`: backend unreachable, out of memory, disk full; a new try may help
  -- * `indeterminate`: the request was sent and the answer never came; dlock goes on in the
  --   background until it is definite
  -- * `auth`: credentials or rights refused
  -- * `foreign`: the key holds something that is not this kind of lock
  -- * `protocol`: the backend answered nonsense
  -- * `unsupported`: this backend, build, file system or nginx phase cannot do it; the message says
  --   what can
  -- * `canceled`, `closed`, `nomem`: as they say
  codes = core.codes,
  --- The retry policies: the module `dlock.retry`.
  retry = retry,
}

--- What `on_event` gets. Events are queued by dlock (at most a bounded number: `events_dropped` of
-- `client:stats` counts what was dropped) and given to `on_event` inside calls on the client or
-- its locks, during their waits too, and now and then by the runtimes for event loops. An error in
-- `on_event` is reported to it, once, as a `notice`.
-- @table event
-- @field type `acquired`, `released`, `lost`, `renew_failed` (validity is not over yet), `leaked`
--   (a held lock was collected) or `notice`
-- @field key
-- @field token
-- @field token_string
-- @field code of the error, if it is one
-- @field reason why it was lost, as from `lock:lost_reason`
-- @field message for people, may change
-- @field time seconds since 1970

local function default_runtime()
  local ngx = rawget(_G, "ngx")
  return type(ngx) == "table" and ngx.get_phase and "ngx" or "thread"
end

--- Make a client. Opens nothing yet: `client:ping` checks the server.
-- @tparam string url `local:`, `local:///dir`, `redis://[user:password@]host[:port][/db]`,
--   `redis+unix:///path`, `zookeeper://[user:password@]host[:port],...[/path]`
-- @tparam[opt] table opts
-- @tparam[opt=30] number opts.ttl seconds after which a server frees the lock of a dead process,
--   0.1 .. 86400
-- @tparam[opt=10] number opts.wait longest wait of an acquire, seconds, 0 .. `math.huge`; 0 is one
--   try
-- @tparam[opt] table|function|boolean opts.retry how transient errors are tried again within the
--   `wait`: a policy of `dlock.retry`, a function, or false for never; default `exponential {}`
-- @tparam[opt=true] boolean opts.renew renew locks in the background, every ttl / 3
-- @tparam[opt=math.huge] number opts.max_hold seconds after which renewing stops, so that a hung
--   owner cannot hold for ever, 0.1 .. `math.huge`
-- @tparam[opt=""] string opts.namespace put before every key, 0 .. 4095 bytes
-- @tparam[opt=2] number opts.timeout seconds for one request, 0.01 .. 3600
-- @tparam[opt=2] number opts.connect_timeout seconds, 0.01 .. 3600
-- @tparam[opt="host:pid"] string opts.owner label that other people see, 1 .. 200 bytes without
--   control characters
-- @tparam[opt] string opts.username wins over the URL's
-- @tparam[opt] string opts.password wins over the URL's
-- @tparam[opt] function opts.on_event called with an @{event}
-- @tparam[opt="curator"] string opts.zk_dialect on ZooKeeper, whose locks ours stand in one line
--   with: `curator` (and Go's), `kazoo`, or `both`
-- @tparam[opt=8] number opts.local_handover how often in a row a lock goes from one waiter of this
--   process to the next before other processes get their turn, 0 .. 1000000
-- @tparam[opt] string|table opts.runtime how Lua waits: `"thread"`, `"ngx"`, `"cqueues"`, `"luv"`
--   or one of your own (see `dlock.runtime.thread`); default `"ngx"` inside nginx, else `"thread"`
-- @treturn[1] dlock.client client
-- @treturn[2] nil
-- @treturn[2] string message, for people, may change
-- @treturn[2] string code: `unsupported` (this build lacks the backend, or the file system will not
--   do), `unavailable`, `nomem`
-- @raise `url: ...` for one that is wrong, `opts.NAME must be ..., got ...`, `opts has no option
--   "NAME": ...`
function M.connect(url, opts)
  if url == M then error("call it as dlock.connect(url, opts), with a dot", 2) end
  options.argument("url", url, 2)
  local o = options.resolve("connect", opts, nil, 2)
  local runtime = o.runtime or default_runtime()
  if type(runtime) == "string" then runtime = require("dlock.runtime." .. runtime) end
  o.url = url
  local handle, msg, code, misuse = core.connect(o)
  o.url, o.password = nil, nil
  if misuse then error("url: " .. msg, 2) end
  if not handle then return nil, msg, code end
  return client.new(handle, o, runtime)
end

return M
