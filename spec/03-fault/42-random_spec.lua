-- time limit: 200 s
-- Random life of several processes on a few keys, through servers and connections
-- that freeze, break, delay and lose answers. Afterwards the logs are laid side by
-- side: no two holders at one time, tokens only rise; every wait ended in its
-- bound; and nothing is left in the processes or on the server.
local fixtures = require "spec.support.fixtures"
local helpers = require "spec.helpers"
local proxy = require "spec.support.proxy"

local now = helpers.now

-- url, seed, seconds, slack, threads, "tasks" or "blocking". Prints lines "hold KEY
-- FROM TO TOKEN" (ms), then "left ...".
local WORKER = [[
local url, seed, seconds, slack = ARGS[1], tonumber(ARGS[2]), tonumber(ARGS[3]), tonumber(ARGS[4])
local core, dlock, tasks = require "dlock.core", require "dlock", require "spec.support.tasks"
local thread, helpers = require "dlock.runtime.thread", require "spec.helpers"
local proc = helpers.proc
math.randomseed(seed)
local any = math.random
local base
local log, n, grants = {}, 0, 0
local function hold(key, lock, from)
  local to = from
  local stop = core.now() + any() * 0.03
  repeat
    local t = core.now()
    if not lock:is_held() then break end
    to = t
    if any(3) > 1 then tasks.sleep(any() * 0.004) end
    if any(12) == 1 then pcall(lock.extend, lock, any(2) == 1 and 0.3 or any(3)) end
    if any(30) == 1 then pcall(lock.wait_lost, lock, any() * 0.02) end
  until core.now() > stop
  if to > from then
    log[#log + 1] = ("hold %s %.0f %.0f %s"):format(key, from * 1000 + 1, to * 1000,
      lock.token_string)
  end
end
local interrupted = {}
local nervous = { sleep = thread.sleep, wait = function(op, t)
  if any(8) > 1 then return thread.wait(op, t) end
  if op:wait(any() * 0.02) then return true end
  error(interrupted)
end }
local calm = { wait = tasks.runtime.wait, sleep = tasks.sleep, bell = tasks.runtime.bell }
local function life(client)
  local key = "k" .. any(3)
  local wait = any(3) == 1 and 0 or any() * 0.2
  local start = core.now()
  local ok, lock, msg, code = pcall(client.acquire, client, key, { wait = wait, renew = any(4) > 1,
    ttl = any(2) == 1 and 0.4 or 2, max_hold = any(8) == 1 and 0.1 + any() * 0.3 or nil,
    retry = any(2) ~= 1 and nil })
  local took = core.now() - start
  if not ok and lock ~= interrupted then error(lock) end
  local most = (wait + 0.3 + 0.15) * slack + 0.3
  if took > most then
    error(("acquire waited %.3f s of %.3f: %s"):format(took, wait, tostring(code)))
  end
  n = n + 1
  if not ok or not lock then return end
  grants = grants + 1
  hold(key, lock, core.now())
  start = core.now()
  if any(6) > 1 then pcall(lock.release, lock) end
  took = core.now() - start
  if took > (0.3 + 0.15) * slack + 0.3 then
    error(("release took %.3f s"):format(took))
  end
end
local broken -- the core says that it met a state which cannot be
local function on_event(ev) broken = ev.message:find "internal" and ev.message or broken end
local function open(runtime)
  return assert(dlock.connect(url, { ttl = 2, timeout = 0.3, connect_timeout = 0.3,
    runtime = runtime, on_event = on_event }))
end
local stop = core.now() + seconds
for i = 1, ARGS[6] == "tasks" and 5 or 0 do
  tasks.start(function()
    local client = open(calm)
    while core.now() < stop do
      life(client)
      if any(20) == 1 then client:inspect("k1") end
      if any(25) == 1 then client:close() client = open(calm) end
      tasks.sleep(any() * 0.01)
    end
    client:close()
  end)
end
if ARGS[6] == "blocking" then
  local client = open(nervous)
  while core.now() < stop do
    life(client)
    if any(10) == 1 then collectgarbage() end
    if any(25) == 1 then pcall(client.close, client) client = open(nervous) end
    tasks.sleep(any() * 0.01)
  end
  pcall(client.close, client)
end
tasks.run(seconds + 20)
if broken then error(broken) end
for _, line in ipairs(log) do print(line) end
print(("did %d %d"):format(n, grants))
io.stdout:flush()
-- What is left after all that: the engine's three descriptors and one thread.
local why
local function left()
  collectgarbage() collectgarbage()
  local threads, sockets = #assert(proc.list "/proc/self/task"), 0
  for _, fd in ipairs(assert(proc.list "/proc/self/fd")) do
    local to = proc.readlink("/proc/self/fd/" .. fd) or ""
    if to:find "^socket" or to:find "inotify" or to:find "locks" then sockets = sockets + 1 end
  end
  why = ("%d threads, %d descriptors"):format(threads, sockets)
  return threads <= tonumber(ARGS[5]) and sockets == 0
end
pcall(helpers.eventually, left, 8)
print("left " .. (left() and "nothing" or why))
]]

local function worker(url, seed, seconds, how)
  -- TSan has a thread of its own.
  return helpers.spawn_lua(WORKER, url, tostring(seed), tostring(seconds),
    tostring(helpers.slack), helpers.under == "tsan" and "3" or "2", how)
end

-- Reads a worker's log into holds[key].
local function collect(p, holds)
  local tried, granted
  repeat
    local line = p:expect("([^\n]*)\n", 60)
    local key, from, to, token = line:match "^hold (%S+) (%d+) (%d+) (%d+)$"
    if key then
      holds[key] = holds[key] or {}
      table.insert(holds[key],
        { from = tonumber(from), to = tonumber(to), token = tonumber(token) })
    else
      tried, granted = line:match "^did (%d+) (%d+)$"
      assert(tried, line)
    end
  until tried
  return tonumber(tried), tonumber(granted)
end

local function check(holds)
  for key, list in pairs(holds) do
    table.sort(list, function(a, b) return a.token < b.token end)
    for i = 2, #list do
      local a, b = list[i - 1], list[i]
      if b.from < a.to then
        error(("%s was held from %d to %d (token %d) and from %d to %d (token %d)"):format(key,
          a.from, a.to, a.token, b.from, b.to, b.token), 0)
      end
    end
  end
end

describe("random life", function()
  local things = {}
  local function keep(thing)
    things[#things + 1] = thing
    return thing
  end
  after_each(function()
    while #things > 0 do
      local thing = table.remove(things)
      if thing.close then thing:close() else thing:stop() end
    end
  end)

  local function run(urls, seconds, trouble, seed)
    local workers, holds, granted = {}, {}, 0
    for i, url in ipairs(urls) do
      workers[i] = keep(worker(url, seed + i, seconds, i % 2 == 1 and "tasks" or "blocking"))
    end
    local stop = now() + seconds
    while now() < stop do trouble() end
    trouble "end"
    for _, w in ipairs(workers) do
      local _, g = collect(w, holds)
      granted = granted + g
    end
    check(holds)
    assert.is_true(granted > 20, "only " .. granted .. " grants")
    for _, w in ipairs(workers) do
      assert.equals("nothing", w:expect("left ([^\n]*)\n", 20))
      assert.equals(0, (w:finish()))
    end
  end

  local seconds = math.max(4, 60 * helpers.scale)
  local seed = tonumber(os.getenv "DLOCK_SEED") or os.time()

  it("in a directory", function()
    local fixture = keep(fixtures["local"].start())
    run({ fixture.url, fixture.url, fixture.url }, seconds, function()
      helpers.proc.pause(100)
    end, seed)
  end)

  it("on a Redis behind bad connections", function()
    local redis = keep(fixtures.redis.start())
    local a, b = keep(proxy.start(redis.port)), keep(proxy.start(redis.port))
    math.randomseed(seed)
    local any = math.random
    local function some() return { match = "EVALSHA", skip = any(5) } end
    local function trouble(what)
      local p = any(2) == 1 and a or b
      if what == "end" then
        a:clear()
        b:clear()
        if redis.stopped then redis:thaw() end
        return
      end
      local which = any(8)
      if which == 1 then p:cut()
      elseif which == 2 then p:set("pass", any() * 0.02)
      elseif which == 3 then p:set "hold"
      elseif which == 4 then p:set "mute"
      elseif which == 5 then p:rule(any(2) == 1 and "lose" or "cut", some())
      elseif which == 6 then p:rule(any(2) == 1 and "eat" or "close", some())
      elseif which == 7 then p:set "refuse" p:cut()
      else redis:freeze() end
      helpers.proc.pause(any(1, 250))
      if redis.stopped then redis:thaw() end
      p:set "pass"
      helpers.proc.pause(any(1, 200))
    end
    run({ a.url, a.url, b.url, b.url, redis.url, redis.unix_url }, seconds, trouble, seed)
    -- A try that a proxy held back enters the line when it gets there, after its
    -- clean-up: that ends by the line's own expiry of a minute.
    local function left()
      local keys = {}
      for _, key in ipairs(redis:leftovers()) do
        local ms = key:find ":q$" and redis:call("PTTL", key) or -1
        if ms < 0 or ms > 60000 then keys[#keys + 1] = key end
      end
      return keys
    end
    helpers.eventually(function() return #left() == 0 end, 10, function()
      return "left: " .. table.concat(left(), " ")
    end)
  end)
end)
