/* Class dlock.bell: how runtimes learn that operations have ended. */
#include "lua_dlock.h"

dlock_bell *dlk_lua_opt_bell(lua_State *L, int at) {
  if (!lua_toboolean(L, at)) return NULL;
  dlock_bell **box = luaL_checkudata(L, at, DLK_MT_BELL);
  luaL_argcheck(L, *box, at, "the bell is closed");
  return *box;
}

static dlock_bell *bell_check(lua_State *L) {
  luaL_checkudata(L, 1, DLK_MT_BELL);
  return dlk_lua_opt_bell(L, 1);
}

/*** A doorbell for runtimes.
@function bell
@tparam[opt] string kind `"socket"` for one that is reached by `listen`; else an eventfd
@treturn[1] userdata bell
@treturn[2] nil
@treturn[2] string message
@treturn[2] string code: `nomem` */
int dlk_lua_bell(lua_State *L) {
  static const char *const kinds[] = {"eventfd", "socket", NULL};
  int kind = luaL_checkoption(L, 1, "eventfd", kinds);
  dlock_bell **box = dlk_lua_box(L, sizeof *box, DLK_MT_BELL);
  *box = kind ? dlock_bell_new_socket() : dlock_bell_new();
  return *box ? 1 : dlk_lua_fail(L, DLOCK_E_NOMEM, "no memory or descriptor for a bell");
}

/*** @function bell:fd
@treturn number descriptor, readable while the bell is rung, not the caller's to close; another one
  in a forked child */
static int bell_lua_fd(lua_State *L) {
  lua_pushinteger(L, dlock_bell_fd(bell_check(L)));
  return 1;
}

/*** Make it silent again, before looking at the operations.
@function bell:drain */
static int bell_lua_drain(lua_State *L) {
  dlock_bell_drain(bell_check(L));
  return 0;
}

/*** The next operation that has ended, of those that still exist.
@function bell:next
@treturn ?number its id; nil: no more */
static int bell_lua_next(lua_State *L) {
  uint64_t id = dlock_bell_next(bell_check(L));
  if (!id) return 0;
  lua_pushnumber(L, (lua_Number)id);
  return 1;
}

/*** Ring it.
@function bell:nudge */
static int bell_lua_nudge(lua_State *L) {
  dlock_bell_nudge(bell_check(L));
  return 0;
}

/*** Open a private socket for one peer, which must be this process; an earlier
one is closed. (`"socket"` bells only, as the next two.)
@function bell:listen
@treturn[1] string path to connect to; then call `accept`, which removes it
@treturn[2] nil
@treturn[2] string message
@treturn[2] string code: `unavailable` */
static int bell_lua_listen(lua_State *L) {
  char msg[DLOCK_MSG_MAX];
  const char *path = dlock_bell_listen(bell_check(L), msg);
  if (!path) return dlk_lua_fail(L, DLOCK_E_UNAVAILABLE, msg);
  lua_pushstring(L, path);
  return 1;
}

/*** Take the connection.
@function bell:accept
@treturn boolean whether it was there, and from this process */
static int bell_lua_accept(lua_State *L) {
  lua_pushboolean(L, dlock_bell_accept(bell_check(L)));
  return 1;
}

/*** Close the socket. The bell stays rung for the next peer.
@function bell:hang_up */
static int bell_lua_hang_up(lua_State *L) {
  dlock_bell_hang_up(bell_check(L));
  return 0;
}

static int bell_lua_gc(lua_State *L) {
  dlock_bell **box = luaL_checkudata(L, 1, DLK_MT_BELL);
  dlock_bell *b = *box;
  *box = NULL;
  if (b) dlock_bell_unref(b);
  return 0;
}

static const luaL_Reg bell_meta[] = {{"__gc", bell_lua_gc}, {"__close", bell_lua_gc}, {NULL, NULL}};
static const luaL_Reg bell_methods[] = {
    {"fd", bell_lua_fd},         {"drain", bell_lua_drain},   {"next", bell_lua_next},
    {"nudge", bell_lua_nudge},   {"listen", bell_lua_listen}, {"accept", bell_lua_accept},
    {"hang_up", bell_lua_hang_up}, {NULL, NULL}};

void dlk_lua_bell_class(lua_State *L) { dlk_lua_class(L, DLK_MT_BELL, bell_meta, bell_methods); }
