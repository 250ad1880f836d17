--- The command `dlock`: runs commands under a lock, shows and breaks locks.
-- @module dlock.cli

local core = require "dlock.core"
local dlock = require "dlock"
local job = require "dlock.cli.job"
local options = require "dlock.cli.options"
local output = require "dlock.cli.output"

local huge = math.huge
local concat, sort = table.concat, table.sort
local format = string.format
local print_json, printable, say = output.print_json, output.printable, output.say
local usage = options.usage

local M = {}

-- Exit statuses, after sysexits.h.
local EX_USAGE, EX_SOFTWARE, EX_SIGNAL = 64, 70, 128

local function read_url_file(path)
  local f, msg = io.open(path, "rb")
  if not f then usage("--url-file: %s", msg) end
  local text, err = f:read "*a"
  f:close()
  local url = text and text:match "^%s*(.-)%s*$"
  if not url or url == "" then usage("--url-file: %s: %s", path, err or "there is no URL in it") end
  return url
end

local function find_url(o)
  if o.url and o.url_file then usage("--url and --url-file exclude each other") end
  if o.url_file then return read_url_file(o.url_file) end
  local env = os.getenv "DLOCK_URL"
  return o.url or (env and env ~= "" and env) or "local:"
end

-- ---- the small commands ----

local function ask(o, what, method, ...)
  local client, msg, code = job.checked(pcall(dlock.connect, find_url(o), {}))
  local answer, more
  if client then
    answer, more, code = job.checked(pcall(client[method], client, ...))
    pcall(client.close, client)
    msg = more
  end
  if answer == nil then
    say("%s: %s", what, msg)
    return nil, job.status_of(code, o)
  end
  return answer, more
end

local function key_of(operands, command)
  if not operands[1] then usage("KEY is missing: dlock %s [options] KEY", command) end
  return operands[1]
end

local function command_status(o, operands)
  local key = key_of(operands, "status")
  local info, status = ask(o, key, "inspect", key)
  if not info then return status end
  if o.json then
    print_json { { "key", key }, { "held", info.held }, { "owner", info.owner },
      { "token", info.token_string }, { "age", info.age }, { "ttl", info.ttl },
      { "dlock", info.dlock }, { "waiters", info.waiters or {} } }
    return 0
  end
  local text = info.held and job.holder_text(info) or "free"
  if info.held and info.token_string then text = text .. ", token " .. info.token_string end
  if info.waiters and #info.waiters > 0 then
    text = text .. "; waiting: " .. concat(info.waiters, " ")
  end
  io.stdout:write(printable(key), ": ", printable(text), "\n")
  return 0
end

local function command_ls(o, operands)
  local keys, status = ask(o, "ls", "list", operands[1] or "")
  if not keys then return status end
  sort(keys)
  if o.json then
    print_json { { "keys", keys } }
    return 0
  end
  for _, key in ipairs(keys) do io.stdout:write(printable(key), "\n") end
  return 0
end

local function command_break(o, operands)
  local key = key_of(operands, "break")
  local ok, was_held = ask(o, key, "break_lock", key)
  if not ok then return was_held end
  if o.json then
    print_json { { "key", key }, { "was_held", was_held and true or false } }
  else
    io.stdout:write(printable(key), was_held and ": broken\n" or ": was free\n")
  end
  return 0
end

local function command_ping(o)
  local began = core.run.now()
  local text, status = ask(o, "ping", "ping")
  if not text then return status end
  if o.json then
    print_json { { "answer", text }, { "seconds", core.run.now() - began } }
  else
    io.stdout:write(printable(text), "\n")
  end
  return 0
end

local function command_version(o)
  local lua = rawget(_G, "jit") and jit.version or _VERSION -- luacheck: ignore jit
  local backends = core.backends and core.backends() or {}
  if o.json then
    print_json { { "version", dlock._VERSION }, { "lua", lua }, { "backends", backends } }
  else
    io.stdout:write("dlock ", dlock._VERSION, " (", lua, "; ", concat(backends, ", "), ")\n")
  end
  return 0
end

-- ---- commands and help ----

local STATUSES = [[
Exit status of dlock: 0 done; 69 the backend could not be used (unreachable, credentials
refused, ...); 64 the command line is wrong.
]]

local commands = {
  run = {
    call = function(o, operands) return job.run(o, operands, find_url) end, most = huge,
    usage = "[options] KEY -- command [args...]", line = "run a command while holding a lock",
    text = [[
Waits until nobody holds the lock KEY, runs the command, and gives the lock back. The command
keeps stdin, stdout, stderr, every other descriptor, its terminal and process group. It finds
DLOCK_KEY, DLOCK_TOKEN (rises with every grant of the key: let what the lock guards refuse a
smaller one) and DLOCK_OWNER in its environment.
]],
    after = [[
TIME is a number with ms, s, m, h or d; without one, seconds.

While the command runs, the lease is renewed. If it cannot be, or if this program is killed or
stopped, the command and everything that it started get SIGTERM, and SIGKILL before somebody
else can have the lock. Signals that another process sends to dlock are passed on to the
command; Ctrl-C and Ctrl-Z work as without dlock. Background processes that the command leaves
behind when it exits run on, without the lock; after a death by a signal they are ended first.
A command that becomes another user (sudo) can only be ended as far as that user lets it.

Exit status: the command's own, 128+N if signal N killed it, or
  64   the command line is wrong
  69   the backend could not be used (unreachable, credentials refused, ...)
  70   the lock was lost while the command ran
  75   not acquired: somebody else holds it (see --conflict-exit-code)
  126  the command could not be run
  127  the command was not found
  128+N  signal N came while we waited for the lock

Examples:
  dlock run backup -- ./backup.sh
  dlock run --no-wait --conflict-exit-code 0 nightly -- ./report --all
  dlock run --url-file /etc/dlock.url --ttl 1m --wait 10m deploy -- make deploy
  dlock run --shell stats -- 'sort in.txt | uniq -c > out.txt'
]],
  },
  status = {
    call = command_status, most = 1, usage = "[options] KEY", line = "show who holds a lock",
    text = "Shows who holds KEY, for how long, and who waits for it.\n", after = STATUSES,
  },
  ls = {
    call = command_ls, most = 1, usage = "[options] [PREFIX]",
    line = "list the locks that are held",
    text = "Lists the keys that are held now, all or those that begin with PREFIX.\n",
    after = STATUSES,
  },
  ["break"] = {
    call = command_break, most = 1, usage = "[options] KEY",
    line = "take a lock away from its holder",
    text = [[
Frees KEY, whoever holds it, and wakes those who wait. The holder learns of it at its next
renewal at the latest; until then two may run. For holders that are known to be dead or lost.
]], after = STATUSES,
  },
  ping = {
    call = command_ping, most = 0, usage = "[options]", line = "check the backend",
    text = "Checks that the backend is there and can do what dlock needs.\n", after = STATUSES,
  },
  version = {
    call = command_version, most = 0, usage = "[options]", line = "show version and backends",
    text = "Shows the version and the backends of this build.\n", after = "",
  },
}
local order = { "run", "status", "ls", "break", "ping", "version" }

local function help_of(name)
  local c = commands[name]
  local tail = c.after == "" and "" or "\n" .. c.after
  return concat { "Usage: dlock ", name, " ", c.usage, "\n\n", c.text, "\nOptions:\n",
    options.help(name), tail }
end

local function help()
  local out = { "Usage: dlock COMMAND [options] [...]\n\nCommands:\n" }
  for _, name in ipairs(order) do
    out[#out + 1] = format("  %-9s %s\n", name, commands[name].line)
  end
  out[#out + 1] = "\ndlock COMMAND --help tells the rest. To begin with: dlock run KEY -- command\n"
  return concat(out)
end

local function show(text)
  io.stdout:write(text)
  return 0
end

local aliases = { ["--version"] = "version", ["-V"] = "version" }
local helps = { ["--help"] = true, ["-h"] = true, help = true }

local function call(name, args)
  local c = commands[name]
  if not c then usage("unknown command %s; see dlock --help", name) end
  local o, operands = options.parse(name, args)
  if o.help then return show(help_of(name)) end
  if #operands > c.most then usage("too many operands: dlock %s %s", name, c.usage) end
  return c.call(o, operands)
end

--- Run the command line.
-- @tparam table args as in `arg`
-- @treturn number exit status
function M.main(args)
  local name = args[1]
  if name == nil then
    io.stderr:write(help())
    return EX_USAGE
  end
  name = aliases[name] or name
  if helps[name] then return show(commands[args[2]] and help_of(args[2]) or help()) end
  local ok, status = pcall(call, name, args)
  if ok then return status end
  if getmetatable(status) == options.Usage then
    say("%s%s", status.message, commands[name] and " (see dlock " .. name .. " --help)" or "")
    return EX_USAGE
  end
  if tostring(status):find("interrupted!", 1, true) then return EX_SIGNAL + core.run.INT end
  say("%s", status)
  return EX_SOFTWARE
end

return M
