-- Policies are pure: every test computes its delays and sleeps never.
local retry = require "dlock.retry"

local huge = math.huge

local function delays(policy, n)
  local next_delay, out = policy:start(), {}
  for attempt = 1, n do out[attempt] = next_delay(attempt, "unavailable") end
  return out
end

local function fixed(...)
  local values, i = { ... }, 0
  return function()
    i = i % #values + 1
    return values[i]
  end
end

-- A small generator of its own, so that both Luas see the same numbers.
local function seeded(seed)
  return function()
    seed = (seed * 1103515245 + 12345) % 2147483648
    return seed / 2147483648
  end
end

local makers = { "constant", "linear", "exponential" }

describe("dlock.retry", function()
  it("constant() waits the same each time", function()
    assert.are.same({ 0.1, 0.1, 0.1 }, delays(retry.constant(), 3))
    assert.are.same({ 2, 2, 2 }, delays(retry.constant { delay = 2 }, 3))
  end)

  it("linear() grows by its step up to max", function()
    assert.are.same({ 1, 3, 5, 6, 6 }, delays(retry.linear { base = 1, step = 2, max = 6 }, 5))
  end)

  it("exponential() grows by its factor up to max", function()
    assert.are.same({ 1, 3, 9, 20, 20 },
      delays(retry.exponential { base = 1, factor = 3, max = 20, jitter = "none" }, 5))
    assert.are.same({ 0.25, 0.5, 1, 2, 4, 5, 5 },
      delays(retry.exponential { base = 0.25, jitter = "none" }, 7))
  end)

  it("exponential() stays finite after any number of tries", function()
    local next_delay = retry.exponential { max = 5, factor = 1000, jitter = "none" }:start()
    assert.are.equal(5, next_delay(1e6))
    assert.are.equal(0, retry.exponential { base = 0 }:start()(1e6))
  end)

  it("exponential() jitters fully unless told otherwise", function()
    local p = retry.exponential { base = 1, max = 8, random = fixed(0, 0.5, 0.999) }
    local d = delays(p, 3)
    assert.are.equal(0, d[1])
    assert.are.equal(1, d[2])
    assert.near(3.996, d[3], 1e-9)
  end)

  it("equal jitter keeps half of the delay", function()
    local p = retry.exponential { base = 1, jitter = "equal", random = fixed(0, 0.5) }
    assert.are.same({ 0.5, 1.5, 2, 3.75 }, delays(p, 4))
  end)

  it("decorrelated jitter lies between the first delay and three times the one before", function()
    local p = retry.exponential {
      base = 1, max = 10, jitter = "decorrelated", random = fixed(0.5, 0.5, 1),
    }
    -- 1 + .5 * (3 - 1) = 2; 1 + .5 * (6 - 1) = 3.5; 1 + 1 * (10.5 - 1) = 10.5, at most 10
    assert.are.same({ 2, 3.5, 10 }, delays(p, 3))
  end)

  it("every jitter of every policy stays in its bounds", function()
    for _, maker in ipairs(makers) do
      for _, jitter in ipairs { "full", "equal", "decorrelated", "none" } do
        local p = retry[maker] { jitter = jitter, random = seeded(7) }
        local most = p.options.max
        for _, d in ipairs(delays(p, 200)) do
          assert.is_true(d >= 0 and d <= most, maker .. " " .. jitter .. " " .. d)
        end
      end
    end
  end)

  it("the same seed gives the same delays, another one others", function()
    local function run(seed) return delays(retry.exponential { random = seeded(seed) }, 20) end
    assert.are.same(run(1), run(1))
    assert.are_not.same(run(1), run(2))
  end)

  it("without a seed two runs differ", function()
    assert.are_not.same(delays(retry.exponential(), 20), delays(retry.exponential(), 20))
  end)

  it("a policy in use by one acquire does not change it for another", function()
    local p = retry.exponential { base = 1, jitter = "decorrelated", random = fixed(0.5) }
    local a, b = p:start(), p:start()
    local first = a(1)
    a(2)
    a(3)
    assert.are.equal(first, b(1))
  end)

  it("attempts counts all tries, the first too", function()
    for _, maker in ipairs(makers) do
      local next_delay = retry[maker] { attempts = 3 }:start()
      assert.is_number(next_delay(1))
      assert.is_number(next_delay(2))
      assert.is_nil(next_delay(3))
      assert.is_nil(retry[maker] { attempts = 1 }:start()(1))
    end
  end)

  it("deadline lets no try start after it", function()
    local next_delay = retry.constant { delay = 1, deadline = 2.5 }:start()
    assert.are.equal(1, next_delay(1))
    assert.are.equal(1, next_delay(2))
    assert.is_nil(next_delay(3))
    next_delay = retry.constant { delay = 1, deadline = 2.5 }:start()
    assert.are.equal(1, next_delay(1, "unavailable", 1.5))
    assert.is_nil(next_delay(2, "unavailable", 1.6))
  end)

  it("start() takes all that opts.retry may be", function()
    local function f() return 7 end
    assert.are.equal(f, retry.start(f))
    assert.is_nil(retry.start(false)(1))
    assert.are.equal(3, retry.start(retry.constant { delay = 3 })(1))
    assert.is_true(retry.start(nil)(1) <= 0.1)
  end)

  it("misuse raises on the caller's line and names the option", function()
    for _, maker in ipairs(makers) do
      for name, v in pairs { jitter = "some", attempts = 0, deadline = -1, random = 3, nope = 1 } do
        local line
        local ok, err = pcall(function()
          line = debug.getinfo(1, "l").currentline + 1
          retry[maker] { [name] = v }
        end)
        assert.is_false(ok)
        assert.truthy(err:find("02%-retry_spec.lua:" .. line .. ": opts"), err)
        assert.truthy(err:find(name, 1, true), err)
      end
    end
    local _, err = pcall(retry.constant, { jitter = "some" })
    assert.truthy(err:find('opts.jitter must be "full", "equal", "decorrelated" or "none", got '
      .. 'string ("some")', 1, true), err)
    assert.has_error(function() retry.exponential { factor = 0 / 0 } end)
    assert.has_error(function() retry.exponential { factor = huge } end)
  end)
end)
