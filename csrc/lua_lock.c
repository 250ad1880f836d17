/* Class dlock.lock: a lock that this process was granted. One that is collected
 * while held is released in the background and reported as leaked. */

#include "lua_dlock.h"

static dlock_lock *lock_check(lua_State *L) {
  dlock_lock **box = luaL_checkudata(L, 1, DLK_MT_LOCK);
  luaL_argcheck(L, *box, 1, "the lock is closed");
  return *box;
}

dlock_lock **dlk_lua_new_lock(lua_State *L) {
  return dlk_lua_box(L, sizeof(dlock_lock *), DLK_MT_LOCK);
}

/*** Start the release.
@function lock:release
@tparam number timeout seconds for one request
@tparam[opt] userdata|boolean bell, or false: nobody waits
@treturn userdata operation; its result is true */
static int lock_lua_release(lua_State *L) {
  dlock_lock *l = lock_check(L);
  struct dlock_how how = dlk_lua_how(L, 2);
  struct dlk_lua_op *box = dlk_lua_new_op(L, DLK_YIELD_TRUE);
  return dlk_lua_return_op(L, box, dlock_release(l, &how));
}

/*** Start an extension.
@function lock:extend
@tparam number ttl seconds; 0 renews by the present ttl
@tparam number timeout seconds for one request
@tparam[opt] userdata|boolean bell, or false: nobody waits
@treturn userdata operation; its result is true */
static int lock_lua_extend(lua_State *L) {
  dlock_lock *l = lock_check(L);
  int64_t ttl_ms = dlk_lua_ms(luaL_checknumber(L, 2));
  struct dlock_how how = dlk_lua_how(L, 3);
  struct dlk_lua_op *box = dlk_lua_new_op(L, DLK_YIELD_TRUE);
  return dlk_lua_return_op(L, box, dlock_extend(l, ttl_ms, &how));
}

/*** An operation that ends, with the code `lost` or `not_held`, when the lock is
no longer held.
@function lock:until_lost
@tparam number timeout seconds for one request
@tparam[opt] userdata|boolean bell, or false: nobody waits
@treturn userdata operation */
static int lock_lua_until_lost(lua_State *L) {
  dlock_lock *l = lock_check(L);
  struct dlock_how how = dlk_lua_how(L, 2);
  struct dlk_lua_op *box = dlk_lua_new_op(L, DLK_YIELD_TRUE);
  return dlk_lua_return_op(L, box, dlock_until_lost(l, &how));
}

/*** @function lock:is_held
@treturn boolean */
static int lock_lua_is_held(lua_State *L) {
  lua_pushboolean(L, dlock_is_held(lock_check(L)));
  return 1;
}

/*** @function lock:remaining
@treturn number seconds of validity left; 0: not held; `math.huge`: no end */
static int lock_lua_remaining(lua_State *L) {
  dlk_lua_push_ms(L, dlock_remaining(lock_check(L)));
  return 1;
}

/*** @function lock:lost_reason
@treturn ?string */
static int lock_lua_lost_reason(lua_State *L) {
  enum dlock_reason r = dlock_lost_reason(lock_check(L));
  if (r == DLOCK_R_NONE)
    lua_pushnil(L);
  else
    lua_pushstring(L, dlock_reason_name(r));
  return 1;
}

/*** @function lock:token
@treturn number exact up to 2^53 under LuaJIT */
static int lock_lua_token(lua_State *L) {
  dlk_lua_push_token(L, dlock_token(lock_check(L)));
  return 1;
}

/*** @function lock:token_string
@treturn string exact, decimal */
static int lock_lua_token_string(lua_State *L) {
  dlk_lua_push_token_text(L, dlock_token(lock_check(L)));
  return 1;
}

/*** @function lock:owner
@treturn string label */
static int lock_lua_owner(lua_State *L) {
  lua_pushstring(L, dlock_owner(lock_check(L)));
  return 1;
}

/*** @function lock:ttl
@treturn number seconds that the server enforces; `math.huge`: none */
static int lock_lua_ttl(lua_State *L) {
  dlk_lua_push_ms(L, dlock_ttl(lock_check(L)));
  return 1;
}

/*** @function lock:state
@treturn string */
static int lock_lua_state(lua_State *L) {
  lua_pushstring(L, dlock_state_name(lock_check(L)));
  return 1;
}

/*** @function lock:hold_fd
@treturn ?number a duplicate of the kernel lock's descriptor, the caller's to close */
static int lock_lua_hold_fd(lua_State *L) {
  int fd = dlock_hold_fd(lock_check(L));
  if (fd < 0)
    lua_pushnil(L);
  else
    lua_pushinteger(L, fd);
  return 1;
}

static int lock_lua_gc(lua_State *L) {
  dlock_lock **box = luaL_checkudata(L, 1, DLK_MT_LOCK);
  dlock_lock *l = *box;
  *box = NULL;
  if (!l) return 0;
  if (dlock_is_held(l)) dlock_lock_abandon(l);
  dlock_lock_unref(l);
  return 0;
}

static const luaL_Reg lock_meta[] = {{"__gc", lock_lua_gc}, {"__close", lock_lua_gc}, {NULL, NULL}};
static const luaL_Reg lock_methods[] = {{"release", lock_lua_release},
                                        {"extend", lock_lua_extend},
                                        {"until_lost", lock_lua_until_lost},
                                        {"is_held", lock_lua_is_held},
                                        {"remaining", lock_lua_remaining},
                                        {"lost_reason", lock_lua_lost_reason},
                                        {"token", lock_lua_token},
                                        {"token_string", lock_lua_token_string},
                                        {"owner", lock_lua_owner},
                                        {"ttl", lock_lua_ttl},
                                        {"state", lock_lua_state},
                                        {"hold_fd", lock_lua_hold_fd},
                                        {NULL, NULL}};

void dlk_lua_lock_class(lua_State *L) {
  dlk_lua_class(L, DLK_MT_LOCK, lock_meta, lock_methods);
}
