-- only on luajit, which nginx has
-- examples/nginx does what it says.

local fixtures = require "spec.support.fixtures"
local helpers = require "spec.helpers"
local nginx = require "spec.support.nginx"

local missing = nginx.missing()

describe("examples/nginx", function()
  if missing then
    pending("missing: " .. missing)
    return
  end
  local fixture, server

  setup(function()
    fixture = fixtures.redis.start()
    server = nginx.start_example("examples/nginx", { DLOCK_URL = fixture.url })
  end)
  teardown(function()
    server:stop()
    fixture:stop()
  end)
  after_each(function() assert.are.equal("", server:complaints()) end)

  it("serialises the requests of an order", function()
    local seen = {}
    for _, body in ipairs(server:many(12, "/orders/42")) do
      local step, token = body:match "^order 42: step (%d+) under token (%d+)\n$"
      assert.is_truthy(step, body)
      assert.is_nil(seen[step])
      seen[step] = tonumber(token)
    end
    for step = 2, 12 do
      assert.is_true(seen[tostring(step)] > seen[tostring(step - 1)], "token of step " .. step)
    end
  end)

  it("tells who waits in vain to come again", function()
    local other = assert(require("dlock").connect(fixture.url, { namespace = "shop:" }))
    local lock = assert(other:acquire "order:7")
    local body, status = server:ask "/orders/7"
    assert.are.equal(503, status)
    assert.truthy(body:find "^timeout: ", body)
    local page = server:ask "/locks"
    assert.truthy(page:find("<td>order:7<td>", 1, true), page)
    assert.truthy(page:find(lock.token_string, 1, true), page)
    lock:release()
    other:close()
  end)

  it("lets one worker rebuild the report and the others serve stale", function()
    local first = server:many(6, "/report")
    for i = 2, 6 do assert.are.equal(first[1], first[i]) end
    assert.truthy(first[1]:find "^report of ", first[1])
  end)

  it("shows the numbers of all workers", function()
    helpers.eventually(function()
      local text = server:ask "/metrics"
      local sum, workers = 0, 0
      for n in text:gmatch 'dlock_acquired_total{worker="%d"} (%d+)' do
        sum, workers = sum + tonumber(n), workers + 1
      end
      return workers == 2 and sum >= 13 and text:find "# TYPE dlock_acquire_seconds summary", text
    end, 5)
  end)
end)
