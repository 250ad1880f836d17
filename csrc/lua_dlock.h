/* What the binding's files share. They take arguments in, call the core, and
 * push results; nothing else.
 *
 * Two rules. A userdata is made, emptied and given its metatable before the
 * resource that it will own exists, so an error between the two leaks nothing.
 * The core never calls back and copies out whatever it returns, so no mutex of
 * ours is held during a Lua call, which may collect garbage and come back here. */
#ifndef DLK_LUA_DLOCK_H
#define DLK_LUA_DLOCK_H

#include "compat.h"
#include "dlock.h"

#define DLK_MT_CLIENT "dlock.client"
#define DLK_MT_LOCK "dlock.lock"
#define DLK_MT_OP "dlock.op"
#define DLK_MT_BELL "dlock.bell"

/* Creates the metatable, its methods reachable by __index. */
void dlk_lua_class(lua_State *L, const char *name, const luaL_Reg *meta,
                   const luaL_Reg *methods);
int dlk_lua_connect(lua_State *L);
void dlk_lua_client_class(lua_State *L);
void dlk_lua_lock_class(lua_State *L);
void dlk_lua_op_class(lua_State *L);
int dlk_lua_bell(lua_State *L);
void dlk_lua_bell_class(lua_State *L);

/* An empty box of `size` bytes with metatable `name`, on the stack. */
void *dlk_lua_box(lua_State *L, size_t size, const char *name);

/* Seconds to milliseconds, rounded up (a short wait is not "no wait"), huge to
 * INT64_MAX; and back, INT64_MAX to math.huge. */
int64_t dlk_lua_ms(double seconds);
void dlk_lua_push_ms(lua_State *L, int64_t ms);

void dlk_lua_push_token(lua_State *L, uint64_t token);
void dlk_lua_push_token_text(lua_State *L, uint64_t token);

/* nil, message, code; returns 3. msg NULL or "": the code's own text. */
int dlk_lua_fail(lua_State *L, enum dlock_err e, const char *msg);

/* Arguments `at` (seconds for one request) and `at` + 1 (bell; none: the
 * operation is driven by whoever waits for it; false: nobody waits for it). */
struct dlock_how dlk_lua_how(lua_State *L, int at);
dlock_bell *dlk_lua_opt_bell(lua_State *L, int at);

/* An operation's userdata: first the box, then what the core gave for it. */
enum dlk_lua_yield { DLK_YIELD_TRUE, DLK_YIELD_LOCK, DLK_YIELD_INFO };
struct dlk_lua_op {
  dlock_op *op;
  enum dlk_lua_yield yield;
};
struct dlk_lua_op *dlk_lua_new_op(lua_State *L, enum dlk_lua_yield yield);
int dlk_lua_return_op(lua_State *L, struct dlk_lua_op *box, dlock_op *op);

/* An empty lock box, to be filled by the caller. */
dlock_lock **dlk_lua_new_lock(lua_State *L);

/* The command's part (lua_run.c): pushes its table. */
int dlk_lua_open_run(lua_State *L);

#endif
