--- Options: their names, types, ranges and defaults, and where each is allowed.
--
-- One table of rules drives the checks of every public function, so that all
-- complain in one way: on the caller's line, naming the option, what it must be
-- and what came, as in `opts.ttl must be a number in 0.1 .. 86400, got string ("x")`.
-- Values of secret options are never shown.
--
-- All times are seconds; fractions are allowed.
-- @module dlock.options

local huge = math.huge
local floor, min = math.floor, math.min
local concat, sort = table.concat, table.sort
local format, sub = string.format, string.sub

local M = {}

--- Largest key, namespace included, in bytes.
M.KEY_MAX = 4096

local function is_policy(v)
  return v == false or type(v) == "function" or type(v) == "table" and type(v.start) == "function"
end

local runtimes = { thread = true, ngx = true, cqueues = true, luv = true }

local function is_runtime(v)
  return runtimes[v]
    or type(v) == "table" and type(v.wait) == "function" and type(v.sleep) == "function"
end

-- type: of the value. min, max: range of a number (NaN is in none), or of a
-- string's length in bytes. choices: the only strings. text: for checks that a
-- range cannot say, with `check`. pattern: characters a string must not hold.
local LABEL = "[%z\1-\31\127]"
local rules = {
  { name = "ttl", type = "number", min = 0.1, max = 86400, default = 30,
    connect = true, acquire = true },
  { name = "wait", type = "number", min = 0, max = huge, default = 10,
    connect = true, acquire = true },
  { name = "retry", check = is_policy, text = "a dlock.retry policy, a function or false",
    connect = true, acquire = true },
  { name = "renew", type = "boolean", default = true, connect = true, acquire = true },
  { name = "max_hold", type = "number", min = 0.1, max = huge, default = huge,
    connect = true, acquire = true },
  { name = "timeout", type = "number", min = 0.01, max = 3600, default = 2,
    connect = true, acquire = true },
  { name = "connect_timeout", type = "number", min = 0.01, max = 3600, default = 2,
    connect = true },
  { name = "owner", type = "string", min = 1, max = 200, pattern = LABEL,
    without = "control characters", connect = true, acquire = true },
  { name = "namespace", type = "string", min = 0, max = M.KEY_MAX - 1, default = "",
    connect = true },
  { name = "username", type = "string", min = 0, max = 1024, pattern = "%z",
    without = "NUL", secret = true, connect = true },
  { name = "password", type = "string", min = 0, max = 65536, pattern = "%z",
    without = "NUL", secret = true, connect = true },
  { name = "zk_dialect", type = "string", choices = { "curator", "kazoo", "both" },
    connect = true },
  { name = "on_event", type = "function", connect = true },
  { name = "runtime", check = is_runtime, connect = true,
    text = [["thread", "ngx", "cqueues", "luv" or a table with the functions wait and sleep]] },
  { name = "local_handover", type = "number", min = 0, max = 1e6, default = 8, connect = true },
  { name = "abort_on_lost", type = "boolean", with = true },
  -- Single arguments, not options.
  { name = "url", type = "string", min = 1, max = 65536, pattern = "%z", without = "NUL",
    secret = true, argument = true },
  { name = "key", type = "string", min = 1, max = M.KEY_MAX, argument = true },
  { name = "prefix", type = "string", min = 0, max = M.KEY_MAX, argument = true },
  { name = "wait_lost", type = "number", min = 0, max = huge, default = huge, argument = true },
  -- dlock.retry
  { name = "delay", type = "number", min = 0, max = 86400, default = 0.1, constant = true },
  { name = "base", type = "number", min = 0, max = 86400, default = 0.1,
    linear = true, exponential = true },
  { name = "step", type = "number", min = 0, max = 86400, default = 0.1, linear = true },
  { name = "factor", type = "number", min = 1, max = 1000, default = 2, exponential = true },
  { name = "max", type = "number", min = 0, max = 86400, default = 5,
    linear = true, exponential = true },
  { name = "jitter", type = "string", choices = { "full", "equal", "decorrelated", "none" },
    constant = true, linear = true, exponential = true },
  { name = "attempts", type = "number", min = 1, max = huge, default = huge,
    constant = true, linear = true, exponential = true },
  { name = "deadline", type = "number", min = 0, max = huge, default = huge,
    constant = true, linear = true, exponential = true },
  { name = "random", type = "function", constant = true, linear = true, exponential = true },
}

-- by_name: name -> rule. allowed: where -> list of rules.
local by_name, allowed = {}, {}
for _, where in ipairs { "connect", "acquire", "with", "constant", "linear", "exponential" } do
  allowed[where] = {}
end
for _, rule in ipairs(rules) do
  by_name[rule.name] = rule
  rule.with = rule.with or rule.acquire
  for where, list in pairs(allowed) do
    if rule[where] then list[#list + 1] = rule end
  end
end

local function number_text(n)
  if n ~= n then return "nan" end
  if n == huge then return "math.huge" end
  if n == -huge then return "-math.huge" end
  if n == floor(n) and n < 1e15 and n > -1e15 then return format("%.0f", n) end
  return format("%.14g", n)
end

local function quoted(s)
  local cut = #s > 40
  s = sub(s, 1, 40):gsub("[%c\127-\255\"\\]", function(c) return format("\\x%02x", c:byte()) end)
  return '"' .. s .. '"' .. (cut and "..." or "")
end

local function got(v, secret)
  local t = type(v)
  if t == "nil" then return "nothing" end
  if v == "" then return "an empty string" end
  if secret then return t end
  if t == "number" then return number_text(v) end
  if t == "boolean" then return tostring(v) end
  if t == "string" then return "string (" .. quoted(v) .. ")" end
  return t
end

local function list(words)
  local q = {}
  for i, w in ipairs(words) do q[i] = quoted(w) end
  if #q == 1 then return q[1] end
  return concat(q, ", ", 1, #q - 1) .. " or " .. q[#q]
end

local function wanted(rule)
  if rule.text then return rule.text end
  if rule.choices then return list(rule.choices) end
  if rule.type == "number" then
    return "a number in " .. number_text(rule.min) .. " .. " .. number_text(rule.max)
  end
  if rule.type == "string" then
    local s = "a string of " .. rule.min .. " .. " .. rule.max .. " bytes"
    return rule.without and s .. " without " .. rule.without or s
  end
  return "a " .. rule.type
end

local function has(choices, v)
  for _, c in ipairs(choices) do
    if c == v then return true end
  end
  return false
end

local function fits(rule, v)
  if rule.check then return rule.check(v) end
  if type(v) ~= rule.type then return false end
  if rule.choices then return has(rule.choices, v) end
  if rule.type == "number" then return v >= rule.min and v <= rule.max end
  if rule.type == "string" then
    return #v >= rule.min and #v <= rule.max and not (rule.pattern and v:find(rule.pattern))
  end
  return true
end

local function length_of(rule, v)
  if rule.type == "string" and type(v) == "string" and not rule.choices then
    return #v > rule.max and ", got one of " .. #v .. " bytes"
  end
end

local function complain(rule, v, path, level)
  local came = length_of(rule, v) or ", got " .. got(v, rule.secret)
  error(path .. " must be " .. wanted(rule) .. came, level + 1)
end

-- Edits (insert, delete, replace) between two short names.
local function distance(a, b)
  local row = {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local diagonal = row[0]
    row[0] = i
    for j = 1, #b do
      local cost = a:byte(i) == b:byte(j) and 0 or 1
      local best = min(row[j] + 1, row[j - 1] + 1, diagonal + cost)
      diagonal, row[j] = row[j], best
    end
  end
  return row[#b]
end

local function names(where)
  local known = {}
  for i, rule in ipairs(allowed[where]) do known[i] = rule.name end
  sort(known)
  return known
end

local function near(name, known)
  local found = {}
  for _, k in ipairs(known) do
    local d = distance(name, k)
    if d <= 2 and d < #k or #name > 2 and k:find(name, 1, true) then found[#found + 1] = k end
  end
  return found
end

local function unknown(name, where, path, level)
  if type(name) ~= "string" then
    error(path .. " has a field that is no option: [" .. got(name) .. "]", level + 1)
  end
  local known = names(where)
  local close = #name <= 40 and near(name, known) or {}
  local hint = "the options are " .. list(known)
  if by_name[name] then
    hint = "it is not allowed here; " .. hint
  elseif #close > 0 then
    hint = "did you mean " .. list(close) .. "?"
  end
  error(path .. " has no option " .. quoted(name) .. ": " .. hint, level + 1)
end

--- Check an options table.
-- @tparam string where which function's options: `connect`, `acquire`, `constant`, ...
-- @tparam ?table opts what the caller gave
-- @tparam ?table base values for what is absent; without it the rules' defaults
-- @tparam[opt=1] number level stack level to blame, 1 being the caller of this function
-- @tparam[opt="opts"] string path what the messages call the table
-- @treturn table a new table with every option of `where` that has a value; `base` itself when
--   `opts` is nil
-- @raise `opts must be a table, got ...`, `opts.NAME must be ..., got ...` and `opts has no option
--   "NAME": did you mean ...`
function M.resolve(where, opts, base, level, path)
  level, path = (level or 1) + 1, path or "opts"
  if opts == nil and base then return base end
  if opts ~= nil and type(opts) ~= "table" then
    error(path .. " must be a table, got " .. type(opts), level)
  end
  opts = opts or {}
  for name in next, opts do
    local rule = by_name[name]
    if not rule or not rule[where] then unknown(name, where, path, level) end
  end
  local out = {}
  for _, rule in ipairs(allowed[where]) do
    local name = rule.name
    local v = opts[name]
    if v == nil then
      if base then v = base[name] else v = rule.default end
    elseif not fits(rule, v) then
      complain(rule, v, path .. "." .. name, level)
    end
    out[name] = v
  end
  return out
end

--- Check one argument by the rule of that name.
-- @tparam string name of the rule
-- @param v the value; nil gives the rule's default, or is an error where there is none
-- @tparam[opt=1] number level stack level to blame, 1 being the caller of this function
-- @tparam[opt=name] string path what the message calls it
-- @return the value
function M.argument(name, v, level, path)
  local rule = by_name[name]
  if v == nil and rule.default ~= nil then return rule.default end
  if not fits(rule, v) then complain(rule, v, path or name, (level or 1) + 1) end
  return v
end

--- The rules of one function, for documentation and tests.
-- @tparam string where as for @{resolve}
-- @treturn table list of `{ name, type, min, max, default, ... }`
function M.rules(where) return allowed[where] end

--- A value as the messages show it: `string ("x")`, `12`, `table`; a secret one as its type only.
-- @function got
-- @param v
-- @tparam[opt=false] boolean secret
-- @treturn string
M.got = got

--- A number as the messages show it.
-- @function number_text
-- @tparam number n
-- @treturn string
M.number_text = number_text

--- A string in double quotes, bytes that do not print as \xHH, long ones cut.
-- @function quoted
-- @tparam string s
-- @treturn string
M.quoted = quoted


return M
