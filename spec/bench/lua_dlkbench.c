/* The floors that must run in the process of what they are compared with, and
 * the clocks and shared memory of the bench. Calls raise on failure. */
#include <errno.h>
#include <hiredis/hiredis.h>
#include <lauxlib.h>
#include <lua.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "share.h"

#define MT_PAIR "dlkbench.pair"
#define MT_SHARE "dlkbench.share"

static double clock_us(clockid_t id) {
  struct timespec t;
  clock_gettime(id, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int l_now_us(lua_State *L) {
  lua_pushnumber(L, clock_us(CLOCK_MONOTONIC));
  return 1;
}

/* All threads of this process, user and system. */
static int l_cpu_us(lua_State *L) {
  lua_pushnumber(L, clock_us(CLOCK_PROCESS_CPUTIME_ID));
  return 1;
}

static int l_nap_us(lua_State *L) {
  share_nap_us((long)luaL_checknumber(L, 1));
  return 0;
}

/* pin(pid, n): keeps a process' first thread (0: the calling one, and what it starts from
 * now on) on the n-th core of ours, from 1; n < 0 counts from the end -> the core */
static int l_pin(lua_State *L) {
  pid_t pid = (pid_t)luaL_checkinteger(L, 1);
  int n = (int)luaL_checkinteger(L, 2), core = -1;
  cpu_set_t set, one;
  if (sched_getaffinity(getpid(), sizeof set, &set) != 0) return luaL_error(L, "no cores");
  if (n < 0) n += CPU_COUNT(&set) + 1;
  while (n > 0 && ++core < CPU_SETSIZE) n -= CPU_ISSET((size_t)core, &set) != 0;
  CPU_ZERO(&one);
  CPU_SET((size_t)core, &one);
  if (n != 0 || sched_setaffinity(pid, sizeof one, &one) != 0) return luaL_error(L, "cannot pin");
  lua_pushinteger(L, core);
  return 1;
}

static void *new_box(lua_State *L, size_t size, const char *type) {
  void *p = lua_newuserdata(L, size);
  memset(p, 0, size);
  luaL_getmetatable(L, type);
  lua_setmetatable(L, -2);
  return p;
}

/* ---- two requests over bare hiredis ---- */

struct request {
  char *bytes;
  size_t len;
  int replies;
};

struct pair {
  redisContext *c;
  struct request r[2];
};

static void request_add(lua_State *L, struct request *r, int argc, const char **argv,
                        const size_t *len) {
  char *one = NULL;
  long long n = redisFormatCommandArgv(&one, argc, argv, len);
  char *all = n < 0 ? NULL : realloc(r->bytes, r->len + (size_t)n);
  if (all) {
    memcpy(all + r->len, one, (size_t)n);
    r->bytes = all;
    r->len += (size_t)n;
    r->replies++;
  }
  free(one);
  if (!all) luaL_error(L, "out of memory");
}

static int list_len(lua_State *L, int at) {
  int n = 0;
  for (;; n++) {
    lua_rawgeti(L, at, n + 1);
    bool end = lua_isnil(L, -1);
    lua_pop(L, 1);
    if (end) return n;
  }
}

/* The command, a list of strings, on top of the stack. */
static void request_add_list(lua_State *L, struct request *r) {
  enum { ARGS = 64 };
  const char *argv[ARGS];
  size_t len[ARGS];
  int at = lua_gettop(L), argc = list_len(L, at);
  luaL_argcheck(L, argc > 0 && argc <= ARGS, 2, "a command has 1 to 64 parts");
  luaL_checkstack(L, argc, NULL);
  for (int i = 0; i < argc; i++) {
    lua_rawgeti(L, at, i + 1);
    argv[i] = luaL_checklstring(L, -1, &len[i]);
  }
  request_add(L, r, argc, argv, len);
  lua_settop(L, at);
}

/* pair(port, { command, ... }, { command, ... }): the commands of one request are
 * pipelined. */
static int l_pair(lua_State *L) {
  struct pair *p = new_box(L, sizeof *p, MT_PAIR);
  p->c = redisConnect("127.0.0.1", (int)luaL_checkinteger(L, 1));
  if (!p->c || p->c->err) return luaL_error(L, "connect: %s", p->c ? p->c->errstr : "no memory");
  for (int i = 0; i < 2; i++) {
    luaL_checktype(L, 2 + i, LUA_TTABLE);
    for (int k = 1, n = list_len(L, 2 + i); k <= n; k++) {
      lua_rawgeti(L, 2 + i, k);
      luaL_checktype(L, -1, LUA_TTABLE);
      request_add_list(L, &p->r[i]);
      lua_pop(L, 1);
    }
  }
  return 1;
}

static void request_run(lua_State *L, redisContext *c, const struct request *r) {
  redisAppendFormattedCommand(c, r->bytes, r->len);
  for (int i = 0; i < r->replies; i++) {
    redisReply *reply = NULL;
    if (redisGetReply(c, (void **)&reply) != REDIS_OK) luaL_error(L, "floor: %s", c->errstr);
    bool bad = reply->type == REDIS_REPLY_ERROR || reply->type == REDIS_REPLY_NIL ||
               reply->type == REDIS_REPLY_ARRAY;
    if (bad) lua_pushstring(L, reply->str ? reply->str : "somebody else holds the floor's key");
    freeReplyObject(reply);
    if (bad) luaL_error(L, "floor: %s", lua_tostring(L, -1));
  }
}

/* pair:run(n) -> microseconds that n pairs took */
static int pair_run(lua_State *L) {
  struct pair *p = luaL_checkudata(L, 1, MT_PAIR);
  int n = (int)luaL_checkinteger(L, 2);
  double began = clock_us(CLOCK_MONOTONIC);
  for (int i = 0; i < n; i++) {
    request_run(L, p->c, &p->r[0]);
    request_run(L, p->c, &p->r[1]);
  }
  lua_pushnumber(L, clock_us(CLOCK_MONOTONIC) - began);
  return 1;
}

static int pair_gc(lua_State *L) {
  struct pair *p = luaL_checkudata(L, 1, MT_PAIR);
  if (p->c) redisFree(p->c);
  for (int i = 0; i < 2; i++) free(p->r[i].bytes);
  memset(p, 0, sizeof *p);
  return 0;
}

/* ---- a bare kernel file lock ---- */

static bool file_pair(const char *path, const char *text, size_t len) {
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return false;
  struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  bool ok = fcntl(fd, F_OFD_SETLK, &l) == 0 && pwrite(fd, text, len, 0) == (ssize_t)len;
  l.l_type = F_UNLCK;
  ok = fcntl(fd, F_OFD_SETLK, &l) == 0 && ok;
  return close(fd) == 0 && ok;
}

/* file_pairs(path, text, n) -> microseconds: open, lock, write, unlock, close, n times */
static int l_file_pairs(lua_State *L) {
  size_t len;
  const char *path = luaL_checkstring(L, 1), *text = luaL_checklstring(L, 2, &len);
  int n = (int)luaL_checkinteger(L, 3);
  double began = clock_us(CLOCK_MONOTONIC);
  for (int i = 0; i < n; i++)
    if (!file_pair(path, text, len)) return luaL_error(L, "%s: %s", path, strerror(errno));
  lua_pushnumber(L, clock_us(CLOCK_MONOTONIC) - began);
  return 1;
}

/* ---- shared memory ---- */

static struct share *share_check(lua_State *L) {
  return *(struct share **)luaL_checkudata(L, 1, MT_SHARE);
}

static int share_push(lua_State *L, int fd) {
  struct share **box = new_box(L, sizeof *box, MT_SHARE);
  *box = share_map(fd);
  if (!*box) return luaL_error(L, "mmap: %s", strerror(errno));
  return 1;
}

/* share() -> object, path: new memory, which others open by the path while we live.
 * share(path) -> object */
static int l_share(lua_State *L) {
  const char *path = luaL_optstring(L, 1, NULL);
  int fd = path ? open(path, O_RDWR | O_CLOEXEC) : memfd_create("dlock-bench", MFD_CLOEXEC);
  if (fd < 0) return luaL_error(L, "shared memory: %s", strerror(errno));
  if (!path && ftruncate(fd, sizeof(struct share)) != 0)
    return luaL_error(L, "shared memory: %s", strerror(errno));
  share_push(L, fd);
  if (path) {
    close(fd);
    return 1;
  }
  lua_pushfstring(L, "/proc/%d/fd/%d", (int)getpid(), fd);
  return 2;
}

static int share_lua_reset(lua_State *L) {
  memset(share_check(L), 0, sizeof(struct share));
  return 0;
}

static int share_lua_enter(lua_State *L) {
  share_enter(share_check(L));
  return 0;
}

static int share_lua_leave(lua_State *L) {
  lua_pushnumber(L, (lua_Number)share_leave(share_check(L)));
  return 1;
}

/* share:after_you(grants, seconds) */
static int share_lua_after_you(lua_State *L) {
  int64_t until = share_now_ns() + (int64_t)(luaL_checknumber(L, 3) * 1e9);
  share_after_you(share_check(L), (int64_t)luaL_checknumber(L, 2), until);
  return 0;
}

static int by_value(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* share:sum() -> hand-offs, their p50 and p99 in microseconds, violations, grants */
static int share_lua_sum(lua_State *L) {
  struct share *s = share_check(L);
  if (s->n == 0) return luaL_error(L, "no hand-off took place");
  qsort(s->sample_ns, (size_t)s->n, sizeof *s->sample_ns, by_value);
  lua_pushnumber(L, (lua_Number)s->n);
  lua_pushnumber(L, (lua_Number)s->sample_ns[s->n / 2] / 1e3);
  lua_pushnumber(L, (lua_Number)s->sample_ns[s->n * 99 / 100] / 1e3);
  lua_pushnumber(L, s->violations);
  lua_pushnumber(L, (lua_Number)s->grants);
  return 5;
}

/* ---- the module ---- */

static void set_functions(lua_State *L, const luaL_Reg *f) {
  for (; f->name; f++) {
    lua_pushcfunction(L, f->func);
    lua_setfield(L, -2, f->name);
  }
}

static void new_class(lua_State *L, const char *type, const luaL_Reg *methods) {
  luaL_newmetatable(L, type);
  set_functions(L, methods);
  lua_pushvalue(L, -1);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
}

static const luaL_Reg pair_methods[] = {{"run", pair_run}, {"__gc", pair_gc}, {NULL, NULL}};
static const luaL_Reg share_methods[] = {{"reset", share_lua_reset},
                                         {"enter", share_lua_enter},
                                         {"leave", share_lua_leave},
                                         {"after_you", share_lua_after_you},
                                         {"sum", share_lua_sum},
                                         {NULL, NULL}};
static const luaL_Reg functions[] = {
    {"now_us", l_now_us}, {"cpu_us", l_cpu_us},         {"nap_us", l_nap_us},
    {"pair", l_pair},     {"file_pairs", l_file_pairs}, {"share", l_share},
    {"pin", l_pin},       {NULL, NULL}};

__attribute__((visibility("default"))) int luaopen_dlkbench(lua_State *L);
int luaopen_dlkbench(lua_State *L) {
  new_class(L, MT_PAIR, pair_methods);
  new_class(L, MT_SHARE, share_methods);
  lua_newtable(L);
  set_functions(L, functions);
  return 1;
}
