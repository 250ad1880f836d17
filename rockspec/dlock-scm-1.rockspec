rockspec_format = "3.0"
package = "dlock"
version = "scm-1"
source = {
  url = "git+file://.", -- from a checkout: luarocks make
}
description = {
  summary = "One lock among many processes, over file locks, Redis or ZooKeeper",
  detailed = [[
Distributed locks for Lua 5.4 and LuaJIT: exclusion with fencing tokens, leases
kept alive from a thread, loss noticed before the lease ends, and a command that
runs other commands under a lock. Backends: kernel file locks (no server needed),
Redis or Valkey, and ZooKeeper. Inside nginx and OpenResty, cqueues and luv nothing
blocks.

The Redis backend is built when hiredis is found, the ZooKeeper one when
libzookeeper-mt is; WITH_REDIS=1 or WITH_ZOOKEEPER=1 in the environment insists on
it, =0 leaves it out.
]],
  license = "MIT",
  labels = { "lock", "mutex", "distributed", "redis", "zookeeper", "openresty" },
}
supported_platforms = { "linux" }
dependencies = { "lua >= 5.1, < 5.5" } -- 5.4, or LuaJIT (which says 5.1)
external_dependencies = {
  CRYPTO = { header = "openssl/evp.h", library = "crypto" },
}
build = {
  type = "make",
  variables = {
    CC = "$(CC)",
    CFLAGS = "$(CFLAGS)",
    WERROR = "",
    LUA_INCDIR = "$(LUA_INCDIR)",
    CRYPTO_INCDIR = "$(CRYPTO_INCDIR)",
    CRYPTO_LIBDIR = "$(CRYPTO_LIBDIR)",
  },
  install_variables = {
    INST_LIBDIR = "$(LIBDIR)",
    INST_LUADIR = "$(LUADIR)",
    INST_BIN = "0",
  },
  install = { bin = { dlock = "lua/bin/dlock" } },
}
test = {
  type = "command",
  command = "make test",
}
