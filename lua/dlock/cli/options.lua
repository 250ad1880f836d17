--- The options of the command: one table for parsing, checking and --help.
-- @module dlock.cli.options

local concat = table.concat
local format = string.format
local huge = math.huge

-- A wrong command line is raised as an error with this metatable.
local Usage = {} -- self.message

local function usage(...) error(setmetatable({ message = format(...) }, Usage), 0) end

local units = { ms = 0.001, s = 1, m = 60, h = 3600, d = 86400, [""] = 1 }

-- Type of a value: function(text, rule) -> value, or nil and what it must be.
local types = {}

function types.text(s, rule)
  if #s > 0 then return s end
  return nil, "must not be empty (" .. rule.arg .. ")"
end

local function time_text(s)
  return s < 1 and format("%gms", s * 1000) or s % 3600 == 0 and format("%gh", s / 3600)
    or format("%gs", s)
end

function types.time(s, rule)
  local number, unit = s:match "^(%d+%.?%d*)(%l*)$"
  local v = number and units[unit] and tonumber(number) * units[unit]
  if not v then return nil, format("must be a time such as 500ms, 30s, 5m or 1h, got %q", s) end
  if v < rule.min or v > rule.max then
    local most = rule.max == huge and "" or " and " .. time_text(rule.max) .. " at most"
    return nil, format("must be %s at least%s, got %s", time_text(rule.min), most, s)
  end
  return v
end

function types.integer(s, rule)
  local v = s:match "^%d+$" and tonumber(s)
  if v and v >= rule.min and v <= rule.max then return v end
  return nil, format("must be a whole number in %d .. %d, got %q", rule.min, rule.max, s)
end

local function set(names)
  local t = {}
  for name in names:gmatch "%l+" do t[name] = true end
  return t
end

local EVERY = set "run status ls break ping version"
local ALL = set "run status ls break ping"
local ASK = set "status ls break ping version"
local RUN = set "run"

-- where: the commands that have it. A flag has no arg.
local options = {
  { name = "url", arg = "URL", type = "text", where = ALL,
    help = "backend: local:, local:///DIR, redis://[USER:PASSWORD@]HOST[:PORT][/DB], "
      .. "redis+unix:///PATH. Default: $DLOCK_URL, else local: (locks of this user on this "
      .. "machine, no server needed). Everybody can see a password given here in ps: use "
      .. "--url-file or $DLOCK_URL" },
  { name = "url-file", arg = "FILE", type = "text", where = ALL,
    help = "read the URL from FILE, so that its password shows nowhere" },
  { name = "ttl", arg = "TIME", type = "time", min = 1, max = 86400, default = 30, where = RUN,
    help = "length of the lease, renewed while the command runs; a server frees the lock that "
      .. "long after a crash of this machine (30s). local: needs none" },
  { name = "wait", short = "w", arg = "TIME", type = "time", min = 0, max = huge, where = RUN,
    help = "wait that long for the lock, then give up (default: for ever). A backend that cannot "
      .. "be reached is tried again during that time; with the default only after it was "
      .. "reached once" },
  { name = "no-wait", short = "n", where = RUN,
    help = "give up at once if somebody holds the lock" },
  { name = "owner", arg = "LABEL", type = "text", where = RUN,
    help = "what others see as the holder (default HOST:PID)" },
  { name = "max-hold", arg = "TIME", type = "time", min = 1, max = huge, where = RUN,
    help = "end the command when it has held the lock for that long" },
  { name = "grace", arg = "TIME", type = "time", min = 0, max = 86400, where = RUN,
    help = "time between SIGTERM and SIGKILL when the command must end because the lease does "
      .. "(default: ttl/4, 5s at most; largest: ttl/3)" },
  { name = "conflict-exit-code", short = "E", arg = "N", type = "integer", min = 0, max = 255,
    default = 75, where = RUN,
    help = "exit status when somebody else holds the lock (75)" },
  { name = "shell", short = "c", where = RUN,
    help = "join the arguments with spaces and run them by /bin/sh -c" },
  { name = "status-fd", arg = "N", type = "integer", min = 1, max = 1048576, where = RUN,
    help = "write what happens to descriptor N, a line each: acquired TOKEN, and at the end exit "
      .. "command N, exit signal N or exit dlock N REASON: tells our status from the command's" },
  { name = "verbose", short = "v", where = RUN, help = "say on stderr what happens" },
  { name = "json", where = ASK, help = "print one JSON object, for machines" },
  { name = "help", short = "h", where = EVERY, help = "show this text" },
}

local by_flag = {}
for _, rule in ipairs(options) do
  rule.flag = "--" .. rule.name
  rule.key = rule.name:gsub("-", "_")
  by_flag[rule.flag] = rule
  if rule.short then by_flag["-" .. rule.short] = rule end
end

local function find_rule(command, flag)
  local rule = by_flag[flag]
  if not rule then usage("unknown option %s", flag) end
  if not rule.where[command] then usage("dlock %s has no option %s", command, flag) end
  return rule
end

local function set_option(o, rule, text)
  if not rule.arg then
    if text then usage("%s takes no value", rule.flag) end
    o[rule.key] = true
    return
  end
  if not text then usage("%s needs a value: %s", rule.flag, rule.arg) end
  local value, must = types[rule.type](text, rule)
  if value == nil then usage("%s %s", rule.flag, must) end
  o[rule.key] = value
end

--- Read a command line: options by key, then the list of operands.
-- Options may stand anywhere before the command that `dlock run` is to run,
-- which begins after `--` or with the second operand.
local function parse(command, args)
  local o, operands, at, plain = {}, {}, 2, 0
  local raw_from = command == "run" and 2 or huge
  while at <= #args and plain == 0 do
    local a = args[at]
    local flag, value = a:match "^(%-%-[^=]+)=(.*)$"
    at = at + 1
    if a == "--" then
      plain = at
    elseif a:sub(1, 1) ~= "-" or a == "-" then
      operands[#operands + 1] = a
      if #operands == raw_from then plain = at end
    else
      local rule = find_rule(command, flag or a)
      if rule.arg and not value then
        value = args[at]
        at = at + 1
      end
      set_option(o, rule, value)
    end
  end
  local key_follows = #operands == 0
  for i = at, #args do
    -- As in: dlock run -- -odd-key -- command
    local second = key_follows and command == "run" and i == at + 1 and args[i] == "--"
    if not second then operands[#operands + 1] = args[i] end
  end
  return o, operands
end

--- Put the defaults of a command in.
local function fill_in(command, o)
  for _, rule in ipairs(options) do
    if rule.where[command] and o[rule.key] == nil then o[rule.key] = rule.default end
  end
end

local INDENT = (" "):rep(27)

local function wrap(text, width)
  local lines, line = {}, ""
  for word in text:gmatch "%S+" do
    if #line > 0 and #line + 1 + #word > width then
      lines[#lines + 1] = line
      line = word
    else
      line = #line > 0 and line .. " " .. word or word
    end
  end
  lines[#lines + 1] = line
  return concat(lines, "\n" .. INDENT)
end

local function help_line(rule)
  local name = "  " .. (rule.short and "-" .. rule.short .. ", " or "    ") .. rule.flag
    .. (rule.arg and " " .. rule.arg or "")
  local gap = #name < #INDENT and INDENT:sub(#name + 1) or "\n" .. INDENT
  return name .. gap .. wrap(rule.help, 98 - #INDENT) .. "\n"
end

--- The options of a command, for people.
local function help(command)
  local out = {}
  for _, rule in ipairs(options) do
    if rule.where[command] then out[#out + 1] = help_line(rule) end
  end
  return concat(out)
end

return {
  Usage = Usage,
  usage = usage,
  time_text = time_text,
  parse = parse,
  fill_in = fill_in,
  help = help,
}
