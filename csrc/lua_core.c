/// The C side of dlock, for the Lua modules in `lua/dlock`. Not a public
// interface: names and shapes change with them. Times are seconds. Arguments
// are trusted to have passed `dlock.options`; a wrong type still raises.
// @module dlock.core
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <sys/random.h>
#include <time.h>

#include "backend.h"
#include "clock.h"
#include "lua_dlock.h"

/* ---- helpers of all classes ---- */

void dlk_lua_class(lua_State *L, const char *name, const luaL_Reg *meta,
                   const luaL_Reg *methods) {
  luaL_newmetatable(L, name);
  luaL_setfuncs(L, meta, 0);
  lua_newtable(L);
  luaL_setfuncs(L, methods, 0);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}

void *dlk_lua_box(lua_State *L, size_t size, const char *name) {
  char *p = lua_newuserdatauv(L, size, 0);
  for (size_t i = 0; i < size; i++) p[i] = 0;
  luaL_setmetatable(L, name);
  return p;
}

int64_t dlk_lua_ms(double seconds) {
  double ms = seconds * 1000;
  if (!(ms > 0)) return 0;
  if (ms >= 9e15) return DLK_FOREVER;
  int64_t whole = (int64_t)ms;
  /* The slack keeps 0.29 s, which is 290.00000000000006 ms, at 290. */
  return ms - (double)whole > 1e-6 ? whole + 1 : whole;
}

void dlk_lua_push_ms(lua_State *L, int64_t ms) {
  lua_pushnumber(L, ms == DLK_FOREVER ? HUGE_VAL : (double)ms / 1000);
}

void dlk_lua_push_token(lua_State *L, uint64_t token) {
  lua_pushinteger(L, (lua_Integer)token);
}

void dlk_lua_push_token_text(lua_State *L, uint64_t token) {
  char text[24];
  snprintf(text, sizeof text, "%" PRIu64, token);
  lua_pushstring(L, text);
}

int dlk_lua_fail(lua_State *L, enum dlock_err e, const char *msg) {
  lua_pushnil(L);
  lua_pushstring(L, msg && *msg ? msg : dlock_err_text(e));
  lua_pushstring(L, dlock_err_code(e));
  return 3;
}

struct dlock_how dlk_lua_how(lua_State *L, int at) {
  struct dlock_how how = {.timeout_ms = dlk_lua_ms(luaL_checknumber(L, at))};
  how.bell = dlk_lua_opt_bell(L, at + 1);
  how.blocking = lua_isnoneornil(L, at + 1);
  return how;
}

/* ---- the module ---- */

/*** The clock of all deadlines: CLOCK_BOOTTIME, which runs during suspend.
@function now
@treturn number seconds, in steps of a millisecond */
static int core_lua_now(lua_State *L) {
  lua_pushnumber(L, (double)dlk_now_ms() / 1000);
  return 1;
}

/*** Sleep; a signal ends it early, so that the interpreter can handle it.
@function sleep
@tparam number seconds
@treturn boolean whether the whole time has passed */
static int core_lua_sleep(lua_State *L) {
  double s = luaL_checknumber(L, 1);
  if (!(s > 0)) s = 0;
  if (s > 1e8) s = 1e8;
  struct timespec t = {.tv_sec = (time_t)s};
  t.tv_nsec = (long)((s - (double)t.tv_sec) * 1e9);
  lua_pushboolean(L, nanosleep(&t, NULL) == 0);
  return 1;
}

/*** A random number from the kernel: never the same in two processes or after a
fork, as a generator seeded at start would be.
@function random
@treturn number in [0, 1) */
static int core_lua_random(lua_State *L) {
  uint64_t bits = 0;
  while (getrandom(&bits, sizeof bits, 0) != (ssize_t)sizeof bits)
    if (errno != EINTR) return luaL_error(L, "getrandom failed");
  lua_pushnumber(L, (double)(bits >> 11) / 9007199254740992.0);
  return 1;
}

/*** What this build can talk to.
@function backends
@treturn table list of names: `local`, ... */
static int core_lua_backends(lua_State *L) {
  lua_newtable(L);
  for (int i = 0; dlk_backends[i]; i++) {
    lua_pushstring(L, dlk_backends[i]->name);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

static void push_codes(lua_State *L) {
  lua_newtable(L);
  for (int e = DLOCK_E_OK + 1; e < DLOCK_E_COUNT; e++) {
    lua_pushstring(L, dlock_err_text((enum dlock_err)e));
    lua_setfield(L, -2, dlock_err_code((enum dlock_err)e));
  }
}

/*** How many forks lie between this process and the one that loaded dlock: for
runtimes, whose state is the parent's after a fork.
@function generation
@treturn number */
static int core_lua_generation(lua_State *L) {
  lua_pushnumber(L, dlk_generation());
  return 1;
}

static const luaL_Reg core_functions[] = {{"connect", dlk_lua_connect},
                                          {"generation", core_lua_generation},
                                          {"bell", dlk_lua_bell},
                                          {"backends", core_lua_backends},
                                          {"now", core_lua_now},
                                          {"sleep", core_lua_sleep},
                                          {"random", core_lua_random},
                                          {NULL, NULL}};

/*** Fields: `version`; `codes`, every error code with its default text; `run`,
the keeper of `dlock run`.
@table core */
__attribute__((visibility("default"))) int luaopen_dlock_core(lua_State *L);
int luaopen_dlock_core(lua_State *L) {
  dlk_lua_client_class(L);
  dlk_lua_lock_class(L);
  dlk_lua_op_class(L);
  dlk_lua_bell_class(L);
  luaL_newlib(L, core_functions);
  lua_pushstring(L, DLOCK_VERSION);
  lua_setfield(L, -2, "version");
  push_codes(L);
  lua_setfield(L, -2, "codes");
  dlk_lua_open_run(L);
  lua_setfield(L, -2, "run");
  return 1;
}
