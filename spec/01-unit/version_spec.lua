-- One version, in csrc/dlock.h; everything else that names it must agree.

local helpers = require "spec.helpers"

local version = helpers.read_file("csrc/dlock.h"):match '#define DLOCK_VERSION "([^"]+)"'

describe("the version", function()
  it("has a rockspec of its own", function()
    local text = assert(helpers.read_file(("rockspec/dlock-%s-1.rockspec"):format(version)))
    assert.equal(version .. "-1", text:match 'version = "([^"]+)"')
    assert.is_truthy(text:find("dlock-" .. version .. ".tar.gz", 1, true))
  end)

  it("differs from the scm rockspec in version and source alone", function()
    local function rest(name)
      local text = assert(helpers.read_file("rockspec/dlock-" .. name .. "-1.rockspec"))
      return (text:gsub('version = "[^"]+"', "", 1):gsub("source = %b{}", "", 1))
    end
    assert.equal(rest "scm", rest(version))
  end)

  it("has an entry in the changelog", function()
    assert.is_truthy(helpers.read_file("CHANGELOG.md"):find("\n## [" .. version .. "]", 1, true))
  end)

  it("is what the module says", function()
    assert.equal(version, require("dlock.core").version)
    assert.equal(version, require("dlock")._VERSION:match "[%d.]+$")
  end)
end)
