/* Class dlock.op: something that the backend was asked for. Losing it cancels
 * it, also when it carries a lock that nobody has taken out. */
#include "lua_dlock.h"

static struct dlk_lua_op *op_check(lua_State *L) {
  struct dlk_lua_op *box = luaL_checkudata(L, 1, DLK_MT_OP);
  luaL_argcheck(L, box->op, 1, "the operation is closed");
  return box;
}

struct dlk_lua_op *dlk_lua_new_op(lua_State *L, enum dlk_lua_yield yield) {
  struct dlk_lua_op *box = dlk_lua_box(L, sizeof *box, DLK_MT_OP);
  box->yield = yield;
  return box;
}

int dlk_lua_return_op(lua_State *L, struct dlk_lua_op *box, dlock_op *op) {
  box->op = op;
  return op ? 1 : dlk_lua_fail(L, DLOCK_E_NOMEM, NULL);
}

/*** Wait for the operation; one that was started without a bell is driven by it.
@function op:wait
@tparam number seconds longest wait
@treturn boolean whether it is done; false also when a signal came in: call it again */
static int op_lua_wait(lua_State *L) {
  struct dlk_lua_op *box = op_check(L);
  lua_pushboolean(L, dlock_op_wait(box->op, dlk_lua_ms(luaL_checknumber(L, 2))));
  return 1;
}

/*** A number that no other operation of this process has; see `bell:next`.
@function op:id
@treturn number */
static int op_lua_id(lua_State *L) {
  lua_pushnumber(L, (lua_Number)dlock_op_id(op_check(L)->op));
  return 1;
}

/* Strings that the backend left out become absent fields. */
static void set_text(lua_State *L, const char *name, const char *text) {
  if (!text) return;
  lua_pushstring(L, text);
  lua_setfield(L, -2, name);
}

static void set_ms(lua_State *L, const char *name, int64_t ms) {
  if (ms < 0) return;
  dlk_lua_push_ms(L, ms);
  lua_setfield(L, -2, name);
}

static void set_flag(lua_State *L, const char *name, bool on) {
  lua_pushboolean(L, on);
  lua_setfield(L, -2, name);
}

static void push_info(lua_State *L, const struct dlk_info *i) {
  lua_newtable(L);
  if (!i) return;
  set_flag(L, "found", i->found);
  set_flag(L, "ours", i->ours);
  set_text(L, "owner", i->owner);
  set_text(L, "text", i->text);
  set_ms(L, "age", i->age_ms);
  set_ms(L, "ttl", i->ttl_ms);
  if (i->token) {
    dlk_lua_push_token(L, i->token);
    lua_setfield(L, -2, "token");
    dlk_lua_push_token_text(L, i->token);
    lua_setfield(L, -2, "token_string");
  }
  lua_createtable(L, (int)i->n, 0);
  for (size_t k = 0; k < i->n; k++) {
    lua_pushlstring(L, i->list[k], i->list_len[k]);
    lua_rawseti(L, -2, (int)k + 1);
  }
  lua_setfield(L, -2, "list");
}

static int push_lock(lua_State *L, dlock_op *op) {
  dlock_lock **box = dlk_lua_new_lock(L);
  *box = dlock_op_lock(op);
  return *box ? 1 : luaL_error(L, "the lock of this operation was taken before");
}

/*** What a finished operation came to.
@function op:result
@treturn[1] userdata|table|boolean the lock, the answer, or true
@treturn[2] nil
@treturn[2] string message
@treturn[2] string code */
static int op_lua_result(lua_State *L) {
  struct dlk_lua_op *box = op_check(L);
  /* "True" must never be said of a release that nobody has answered. */
  if (!dlock_op_wait(box->op, 0))
    return luaL_error(L, "the operation is not done: the runtime's wait ended too early");
  enum dlock_err e = dlock_op_err(box->op);
  if (e != DLOCK_E_OK) return dlk_lua_fail(L, e, dlock_op_msg(box->op));
  if (box->yield == DLK_YIELD_LOCK) return push_lock(L, box->op);
  if (box->yield == DLK_YIELD_INFO)
    push_info(L, dlock_op_info(box->op));
  else
    lua_pushboolean(L, 1);
  return 1;
}

/*** Give it up; what it may have left on the server is cleaned up in the background.
@function op:cancel */
static int op_lua_cancel(lua_State *L) {
  dlock_op_cancel(op_check(L)->op);
  return 0;
}

/*** Let go of it, which cancels it unless it is done.
@function op:close */
static int op_lua_gc(lua_State *L) {
  struct dlk_lua_op *box = luaL_checkudata(L, 1, DLK_MT_OP);
  dlock_op *op = box->op;
  box->op = NULL;
  if (op) dlock_op_unref(op);
  return 0;
}

/* A wait that an error unwinds (Ctrl-C) ends its operation there and then, and
 * one that came to its end lets go of it without waiting for a collection. */
static const luaL_Reg op_meta[] = {{"__gc", op_lua_gc}, {"__close", op_lua_gc}, {NULL, NULL}};
static const luaL_Reg op_methods[] = {{"wait", op_lua_wait},
                                      {"id", op_lua_id},
                                      {"result", op_lua_result},
                                      {"cancel", op_lua_cancel},
                                      {"close", op_lua_gc},
                                      {NULL, NULL}};

void dlk_lua_op_class(lua_State *L) { dlk_lua_class(L, DLK_MT_OP, op_meta, op_methods); }
