/* Class dlock.client: one backend as this process sees it. The core keeps a
 * client alive for its locks and operations, so collecting it is always safe. */
#include <stdlib.h>
#include <string.h>

#include "lua_dlock.h"

struct client_box {
  dlock_client *c;
  char *event_key; /* of the event that is being pushed: freed even if a push raises */
};

static struct client_box *client_check(lua_State *L) {
  struct client_box *box = luaL_checkudata(L, 1, DLK_MT_CLIENT);
  luaL_argcheck(L, box->c, 1, "the client is closed");
  return box;
}

/* Fields are left on the stack: what they point to stays alive. */
static const char *text_field(lua_State *L, int at, const char *name, size_t *len) {
  lua_getfield(L, at, name);
  return lua_isnil(L, -1) ? NULL : luaL_checklstring(L, -1, len);
}

static int64_t ms_field(lua_State *L, int at, const char *name) {
  lua_getfield(L, at, name);
  int64_t ms = dlk_lua_ms(luaL_checknumber(L, -1));
  lua_pop(L, 1);
  return ms;
}

/*** Prepare a client; nothing is connected yet.
@function connect
@tparam table cfg `url`, `namespace`, `owner`, `username`, `password`, `ttl`, `timeout`,
  `connect_timeout`, `zk_dialect`, `local_handover`; `on_event`, whose presence says that
  events are read
@treturn[1] userdata client
@treturn[2] nil
@treturn[2] string message
@treturn[2] string code
@treturn[2] boolean whether the URL itself is wrong, which is misuse */
int dlk_lua_connect(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  struct dlock_config cfg = {.ns = NULL};
  cfg.url = text_field(L, 1, "url", NULL);
  cfg.ns = text_field(L, 1, "namespace", &cfg.ns_len);
  cfg.owner = text_field(L, 1, "owner", NULL);
  cfg.username = text_field(L, 1, "username", NULL);
  cfg.password = text_field(L, 1, "password", NULL);
  cfg.ttl_ms = ms_field(L, 1, "ttl");
  cfg.timeout_ms = ms_field(L, 1, "timeout");
  cfg.connect_timeout_ms = ms_field(L, 1, "connect_timeout");
  const char *dialect = text_field(L, 1, "zk_dialect", NULL);
  cfg.zk_dialect = !dialect ? 0 : !strcmp(dialect, "both") ? 2 : !strcmp(dialect, "kazoo");
  lua_getfield(L, 1, "local_handover");
  int handover = (int)luaL_optnumber(L, -1, 0);
  cfg.local_handover = handover || lua_isnil(L, -1) ? handover : -1;
  lua_getfield(L, 1, "on_event");
  cfg.events = !lua_isnil(L, -1);
  luaL_argcheck(L, cfg.url, 1, "no url");
  struct client_box *box = dlk_lua_box(L, sizeof *box, DLK_MT_CLIENT);
  char msg[DLOCK_MSG_MAX] = "";
  bool bad_url = false;
  enum dlock_err e = dlock_client_open(&cfg, &box->c, &bad_url, msg);
  if (e == DLOCK_E_OK) return 1;
  dlk_lua_fail(L, e, msg);
  lua_pushboolean(L, bad_url);
  return 4;
}

/*** Start to acquire.
@function client:acquire
@tparam string key
@tparam table o `ttl`, `max_hold`, `timeout`, `renew`, `owner`
@tparam number wait seconds
@tparam[opt] userdata bell
@treturn userdata operation; its result is a lock */
static int client_lua_acquire(lua_State *L) {
  struct client_box *client = client_check(L);
  struct dlock_acquire a = {.key = NULL};
  a.key = luaL_checklstring(L, 2, &a.key_len);
  luaL_checktype(L, 3, LUA_TTABLE);
  a.wait_ms = dlk_lua_ms(luaL_checknumber(L, 4));
  a.bell = dlk_lua_opt_bell(L, 5);
  a.blocking = !a.bell;
  a.ttl_ms = ms_field(L, 3, "ttl");
  a.timeout_ms = ms_field(L, 3, "timeout");
  int64_t max_hold_ms = ms_field(L, 3, "max_hold");
  a.max_hold_ms = max_hold_ms == INT64_MAX ? 0 : max_hold_ms;
  lua_getfield(L, 3, "renew");
  a.renew = lua_toboolean(L, -1);
  a.owner = text_field(L, 3, "owner", NULL);
  struct dlk_lua_op *box = dlk_lua_new_op(L, DLK_YIELD_LOCK);
  return dlk_lua_return_op(L, box, dlock_acquire(client->c, &a));
}

/*** Start a query.
@function client:ask
@tparam string kind `inspect`, `break`, `list` or `ping`
@tparam string key or prefix; "" for a ping
@tparam number timeout seconds for one request
@tparam[opt] userdata bell
@treturn userdata operation; its result is a table */
static int client_lua_ask(lua_State *L) {
  static const char *const kinds[] = {"inspect", "break", "list", "ping", NULL};
  static const enum dlock_query queries[] = {DLOCK_INSPECT, DLOCK_BREAK, DLOCK_LIST, DLOCK_PING};
  struct client_box *client = client_check(L);
  enum dlock_query q = queries[luaL_checkoption(L, 2, NULL, kinds)];
  size_t len;
  const char *key = luaL_checklstring(L, 3, &len);
  struct dlock_how how = dlk_lua_how(L, 4);
  struct dlk_lua_op *box = dlk_lua_new_op(L, DLK_YIELD_INFO);
  return dlk_lua_return_op(L, box, dlock_ask(client->c, q, key, len, &how));
}

/*** Start to close the client: its locks are released.
@function client:close_op
@tparam[opt] userdata bell
@treturn userdata operation; its result is true */
static int client_lua_close_op(lua_State *L) {
  struct client_box *client = client_check(L);
  dlock_bell *bell = dlk_lua_opt_bell(L, 2);
  struct dlk_lua_op *box = dlk_lua_new_op(L, DLK_YIELD_TRUE);
  return dlk_lua_return_op(L, box, dlock_client_close(client->c, bell));
}

static void push_event(lua_State *L, const struct dlock_event *ev) {
  lua_createtable(L, 0, 8);
  lua_pushstring(L, dlock_event_name(ev->type));
  lua_setfield(L, -2, "type");
  lua_pushnumber(L, ev->time);
  lua_setfield(L, -2, "time");
  if (ev->key) {
    lua_pushlstring(L, ev->key, ev->key_len);
    lua_setfield(L, -2, "key");
  }
  if (ev->token) {
    dlk_lua_push_token(L, ev->token);
    lua_setfield(L, -2, "token");
    dlk_lua_push_token_text(L, ev->token);
    lua_setfield(L, -2, "token_string");
  }
  if (ev->code != DLOCK_E_OK) {
    lua_pushstring(L, dlock_err_code(ev->code));
    lua_setfield(L, -2, "code");
  }
  if (ev->reason != DLOCK_R_NONE) {
    lua_pushstring(L, dlock_reason_name(ev->reason));
    lua_setfield(L, -2, "reason");
  }
  lua_pushstring(L, ev->msg);
  lua_setfield(L, -2, "message");
}

/*** Take the oldest event.
@function client:next_event
@treturn ?table nil when there is none */
static int client_lua_next_event(lua_State *L) {
  struct client_box *client = client_check(L);
  struct dlock_event ev = {.key = NULL};
  free(client->event_key);
  client->event_key = NULL;
  if (!dlock_next_event(client->c, &ev)) return 0;
  client->event_key = ev.key;
  push_event(L, &ev);
  return 1;
}

/* Upper bound of the bucket that the given share of all samples lies in. */
static double share_us(const struct dlock_latency *l, double share) {
  uint64_t seen = 0;
  for (int i = 0; i < DLOCK_BUCKETS; i++) {
    seen += l->bucket[i];
    double bound = (double)((uint64_t)64 << i);
    if (seen && (double)seen >= share * (double)l->n)
      return bound < (double)l->max_us ? bound : (double)l->max_us;
  }
  return (double)l->max_us;
}

static void set_latency(lua_State *L, const char *name, const struct dlock_latency *l) {
  const struct {
    const char *name;
    double us;
  } fields[] = {{"mean", l->n ? (double)l->sum_us / (double)l->n : 0},
                {"max", (double)l->max_us},
                {"p50", share_us(l, 0.5)},
                {"p99", share_us(l, 0.99)}};
  lua_createtable(L, 0, 5);
  lua_pushinteger(L, (lua_Integer)l->n);
  lua_setfield(L, -2, "count");
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    lua_pushnumber(L, fields[i].us / 1e6);
    lua_setfield(L, -2, fields[i].name);
  }
  lua_setfield(L, -2, name);
}

/*** Counters since connect, what is held and waited for now, and latencies in
seconds (`p50` and `p99` are upper bounds of a histogram's steps of two).
@function client:stats
@treturn table */
static int client_lua_stats(lua_State *L) {
  struct dlock_stats s;
  dlock_client_stats(client_check(L)->c, &s);
  const struct {
    const char *name;
    uint64_t n;
  } counters[] = {{"acquired", s.acquired},         {"released", s.released},
                  {"lost", s.lost},                 {"timeouts", s.timeouts},
                  {"failed", s.failed},             {"canceled", s.canceled},
                  {"leaked", s.leaked},             {"renewed", s.renewed},
                  {"renew_failed", s.renew_failed}, {"handed_over", s.handed_over},
                  {"requests", s.requests},         {"connects", s.connects},
                  {"held", s.held},                 {"waiting", s.waiting},
                  {"events_dropped", s.events_dropped}};
  lua_newtable(L);
  for (size_t i = 0; i < sizeof counters / sizeof *counters; i++) {
    lua_pushinteger(L, (lua_Integer)counters[i].n);
    lua_setfield(L, -2, counters[i].name);
  }
  set_latency(L, "acquire", &s.acquire);
  set_latency(L, "release", &s.release);
  return 1;
}

static int client_lua_gc(lua_State *L) {
  struct client_box *box = luaL_checkudata(L, 1, DLK_MT_CLIENT);
  dlock_client *c = box->c;
  box->c = NULL;
  free(box->event_key);
  box->event_key = NULL;
  if (c) dlock_client_unref(c);
  return 0;
}

static const luaL_Reg client_meta[] = {
    {"__gc", client_lua_gc}, {"__close", client_lua_gc}, {NULL, NULL}};
static const luaL_Reg client_methods[] = {{"acquire", client_lua_acquire},
                                          {"ask", client_lua_ask},
                                          {"close_op", client_lua_close_op},
                                          {"next_event", client_lua_next_event},
                                          {"stats", client_lua_stats},
                                          {NULL, NULL}};

void dlk_lua_client_class(lua_State *L) {
  dlk_lua_class(L, DLK_MT_CLIENT, client_meta, client_methods);
}
