--- What the command prints: messages on stderr, text that is safe on a terminal, JSON.
-- @module dlock.cli.output

local concat = table.concat
local format = string.format
local floor, huge = math.floor, math.huge

-- Owner labels come from other people: no escape sequences on a terminal.
local function printable(s)
  return (tostring(s):gsub("[%c\127]", function(c) return format("\\x%02x", c:byte()) end))
end

local function say(...) io.stderr:write("dlock: ", printable(format(...)), "\n") end

local function seconds_text(s)
  if s < 60 then return format("%.1f s", s) end
  s = floor(s)
  local h, m = floor(s / 3600), floor(s / 60) % 60
  if h == 0 then return format("%d min %d s", m, s % 60) end
  return format("%d h %d min", h, m)
end

-- JSON is UTF-8; a byte that is none stands as the code point of its number.
local UTF8 = "^[\194-\244][\128-\191]+"
local function utf8_length(s, at)
  local lead, tail = s:byte(at), s:match(UTF8, at)
  local n = lead < 224 and 2 or lead < 240 and 3 or 4
  return tail and #tail >= n and n or nil
end

local function json_string(s)
  local out, at = {}, 1
  while at <= #s do
    local c, n = s:byte(at), 1
    if c >= 128 then n = utf8_length(s, at) or 1 end
    local piece = s:sub(at, at + n - 1)
    if n == 1 and (c < 32 or c >= 127 or c == 34 or c == 92) then
      piece = format("\\u%04x", c)
    end
    out[#out + 1] = piece
    at = at + n
  end
  return '"' .. concat(out) .. '"'
end

-- An object is a list of { name, value }, so that its order is kept; nil and
-- infinite values are left out.
local json

local json_of = {
  string = json_string,
  number = function(n) return format("%.14g", n) end,
  boolean = tostring,
  table = function(t)
    local out = {}
    for i, v in ipairs(t) do out[i] = json(v) end
    return "[" .. concat(out, ",") .. "]"
  end,
}

function json(v) return json_of[type(v)](v) end

local function print_json(fields)
  local out = {}
  for _, f in ipairs(fields) do
    if f[2] ~= nil and f[2] ~= huge then out[#out + 1] = json(f[1]) .. ":" .. json(f[2]) end
  end
  io.stdout:write("{", concat(out, ","), "}\n")
end

return {
  printable = printable,
  say = say,
  seconds_text = seconds_text,
  print_json = print_json,
}
