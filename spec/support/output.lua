-- Busted output for spec/support/runner.py: a line when a test starts (so that
-- the last line of a hung file says which), one when it ended with anything but
-- success, failures in full, and a line of counts that only the runner reads.

local pretty = require "pl.pretty"

local function text_of(message)
  if type(message) == "string" then return message end
  return message == nil and "no message" or pretty.write(message)
end

local function say(...)
  io.stdout:write(...)
  io.stdout:write("\n")
  io.stdout:flush()
end

return function()
  local busted = require "busted"
  local handler = require "busted.outputHandlers.base"()

  local function tell(kind, t)
    local at = t.trace and t.trace.short_src
      and ("%s:%d: "):format(t.trace.short_src, t.trace.currentline) or ""
    say(kind, "  ", t.name, "\n    ", at, (text_of(t.message):gsub("\n", "\n    ")))
    local back = t.trace and t.trace.traceback
    if kind == "error" and back and back ~= "" then say("    ", (back:gsub("\n", "\n    "))) end
  end

  local function test_start(element)
    say("      ", handler.getFullName(element))
    return nil, true
  end

  local function test_end(_, _, status)
    if status == "pending" then
      tell("skip", handler.pendings[#handler.pendings])
    elseif status == "failure" then
      tell("FAIL", handler.failures[#handler.failures])
    elseif status == "error" then
      tell("error", handler.errors[#handler.errors])
    end
    return nil, true
  end

  local function other_error(element)
    if element.descriptor ~= "it" then tell("error", handler.errors[#handler.errors]) end
    return nil, true
  end

  local function suite_end()
    say(("#counts %d %d %d"):format(handler.successesCount,
      handler.failuresCount + handler.errorsCount, handler.pendingsCount))
    return nil, true
  end

  busted.subscribe({ "test", "start" }, test_start, { predicate = handler.cancelOnPending })
  busted.subscribe({ "test", "end" }, test_end, { predicate = handler.cancelOnPending })
  busted.subscribe({ "error" }, other_error)
  busted.subscribe({ "failure" }, other_error)
  busted.subscribe({ "suite", "end" }, suite_end)
  return handler
end
