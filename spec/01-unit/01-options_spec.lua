-- The rule table and the messages that come out of it. Every rule is driven
-- through every kind of wrong value, so that a new option is covered too.
local options = require "dlock.options"

local NAN = 0 / 0

-- The message without its position, and the position.
local function complaint(f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok, "no error was raised")
  local where, text = err:match("^([^:]+:%d+): (.*)$")
  return text or err, where
end

local function resolve(opts, where) return options.resolve(where or "connect", opts) end

describe("dlock.options", function()
  describe("resolve()", function()
    it("gives every option its documented default", function()
      local o = resolve(nil)
      assert.are.same({
        ttl = 30, wait = 10, renew = true, max_hold = math.huge, timeout = 2,
        connect_timeout = 2, namespace = "", local_handover = 8,
      }, o)
    end)

    it("takes absent per-call options from the client's, and leaves those alone", function()
      local client = resolve { ttl = 7, renew = false }
      local o = options.resolve("acquire", { wait = 0 }, client)
      assert.are.equal(7, o.ttl)
      assert.is_false(o.renew)
      assert.are.equal(0, o.wait)
      assert.are.equal(10, client.wait)
      assert.is_nil(o.connect_timeout)
      assert.are.equal(client, options.resolve("acquire", nil, client))
    end)

    it("lets false override true", function()
      assert.is_false(options.resolve("acquire", { renew = false }, resolve {}).renew)
      assert.is_false(options.resolve("acquire", { retry = false }, resolve {}).retry)
    end)

    it("refuses what is not a table", function()
      -- Not the value: it may be a password given by position.
      assert.are.equal("opts must be a table, got string", (complaint(resolve, "x")))
      assert.are.equal("opts must be a table, got number", (complaint(resolve, 12)))
    end)

    it("names an unknown option and the nearest known one", function()
      assert.are.equal('opts has no option "tll": did you mean "ttl"?',
        (complaint(resolve, { tll = 1 })))
      assert.are.equal('opts has no option "Timeout": did you mean "timeout"?',
        (complaint(resolve, { Timeout = 1 })))
      assert.are.equal('opts has no option "conect_timeout": did you mean "connect_timeout"?',
        (complaint(resolve, { conect_timeout = 1 })))
    end)

    it("lists all options when nothing is near, or when it belongs elsewhere", function()
      local text = complaint(resolve, { zzzzzzzz = 1 })
      assert.truthy(text:find('^opts has no option "zzzzzzzz": the options are "connect'), text)
      text = complaint(resolve, { namespace = "x" }, "acquire")
      assert.truthy(text:find('^opts has no option "namespace": it is not allowed here; '))
    end)

    it("refuses names that are not strings", function()
      assert.are.equal("opts has a field that is no option: [1]", (complaint(resolve, { "ttl" })))
      assert.are.equal("opts has a field that is no option: [table]",
        (complaint(resolve, { [{}] = 1 })))
    end)

    it("shows hostile names and values harmlessly", function()
      local text = complaint(resolve, { ["a\nb\0\255\""] = 1 })
      assert.truthy(text:find('"a\\x0ab\\x00\\xff\\x22"', 1, true))
      text = complaint(resolve, { ttl = ("\27"):rep(1e5) })
      assert.is_true(#text < 300)
      assert.is_nil(text:find("%c"))
    end)

    it("blames the caller's line", function()
      local function api(opts) options.resolve("connect", opts, nil, 2) end
      local line
      local _, where = complaint(function()
        line = debug.getinfo(1, "l").currentline + 1
        api { ttl = 0 }
      end)
      assert.truthy(where:find(":" .. line .. "$"), where)
      _, where = complaint(function()
        line = debug.getinfo(1, "l").currentline + 1
        api { nope = 0 }
      end)
      assert.truthy(where:find(":" .. line .. "$"), where)
    end)
  end)

  describe("numbers", function()
    it("read as the documentation says", function()
      assert.are.equal('opts.ttl must be a number in 0.1 .. 86400, got string ("x")',
        (complaint(resolve, { ttl = "x" })))
      assert.are.equal("opts.ttl must be a number in 0.1 .. 86400, got 0.05",
        (complaint(resolve, { ttl = 0.05 })))
      assert.are.equal("opts.wait must be a number in 0 .. math.huge, got -1",
        (complaint(resolve, { wait = -1 })))
      assert.are.equal("opts.wait must be a number in 0 .. math.huge, got nan",
        (complaint(resolve, { wait = NAN })))
      assert.are.equal("opts.ttl must be a number in 0.1 .. 86400, got math.huge",
        (complaint(resolve, { ttl = math.huge })))
    end)

    it("take both ends of the range", function()
      for _, where in ipairs { "connect", "acquire", "constant", "linear", "exponential" } do
        for _, rule in ipairs(options.rules(where)) do
          if rule.type == "number" then
            for _, v in ipairs { rule.min, rule.max } do
              assert.are.equal(v, options.resolve(where, { [rule.name] = v })[rule.name])
            end
          end
        end
      end
    end)

    it("refuse what is just outside, infinities and NaN", function()
      for _, where in ipairs { "connect", "acquire", "constant", "linear", "exponential" } do
        for _, rule in ipairs(options.rules(where)) do
          if rule.type == "number" then
            for _, v in ipairs { rule.min - 0.001, rule.max + 1, math.huge, -math.huge, NAN } do
              if not (v >= rule.min and v <= rule.max) then
                local text = complaint(resolve, { [rule.name] = v }, where)
                assert.truthy(text:find("^opts%." .. rule.name .. " must be a number in "), text)
              end
            end
          end
        end
      end
    end)
  end)

  it("refuses every wrong type of every option", function()
    local samples = { "x", 12, true, {}, function() end, io.stdout, coroutine.create(print) }
    for _, where in ipairs { "connect", "acquire", "constant", "linear", "exponential" } do
      for _, rule in ipairs(options.rules(where)) do
        for _, v in ipairs(samples) do
          if rule.type and type(v) ~= rule.type then
            local text = complaint(resolve, { [rule.name] = v }, where)
            assert.truthy(text:find("^opts%." .. rule.name .. " must be .*, got "), text)
          end
        end
      end
    end
  end)

  it("refuses strings that are too long or hold what they must not", function()
    assert.are.equal("opts.owner must be a string of 1 .. 200 bytes without control characters, "
      .. "got one of 201 bytes", (complaint(resolve, { owner = ("x"):rep(201) })))
    for _, bad in ipairs { "", "a\nb", "a\0b", "a\127" } do
      assert.truthy(complaint(resolve, { owner = bad }):find("^opts.owner must be a string of 1"))
    end
    assert.are.equal("höst:1", resolve({ owner = "höst:1" }).owner)
  end)

  it("never shows a secret", function()
    for _, name in ipairs { "password", "username" } do
      for _, v in ipairs { "s3cret\0", { "s3cret" }, 31337 } do
        local text = complaint(resolve, { [name] = v })
        assert.is_nil(text:find("s3cret"), text)
        assert.is_nil(text:find("31337"), text)
      end
    end
    local text = complaint(options.argument, "url", "redis://:s3cret\0@h")
    assert.is_nil(text:find("s3cret"), text)
  end)

  it("takes policies, functions and false as retry, and nothing else", function()
    local retry = require "dlock.retry"
    for _, v in ipairs { retry.constant(), function() end, false } do
      assert.are.equal(v, resolve({ retry = v }).retry)
    end
    for _, v in ipairs { true, 3, "x", {} } do
      assert.truthy(complaint(resolve, { retry = v })
        :find("^opts.retry must be a dlock.retry policy, a function or false, got "))
    end
  end)

  it("takes the names of runtimes and tables with wait and sleep as runtime", function()
    local runtime = { wait = function() end, sleep = function() end }
    assert.are.equal(runtime, resolve({ runtime = runtime }).runtime)
    for _, name in ipairs { "thread", "ngx", "cqueues", "luv" } do
      assert.are.equal(name, resolve({ runtime = name }).runtime)
    end
    for _, v in ipairs { "nginx", {}, { wait = print }, 1 } do
      assert.truthy(complaint(resolve, { runtime = v }):find("^opts.runtime must be "))
    end
  end)

  describe("argument()", function()
    it("names the argument and blames the caller's line", function()
      local function api(key) options.argument("key", key, 2) end
      local line
      local text, where = complaint(function()
        line = debug.getinfo(1, "l").currentline + 1
        api("")
      end)
      assert.are.equal('key must be a string of 1 .. 4096 bytes, got an empty string', text)
      assert.truthy(where:find(":" .. line .. "$"), where)
      assert.are.equal("key must be a string of 1 .. 4096 bytes, got nothing",
        (complaint(api)))
    end)

    it("gives the default for nil where there is one", function()
      assert.are.equal(math.huge, options.argument("wait_lost"))
    end)
  end)
end)
