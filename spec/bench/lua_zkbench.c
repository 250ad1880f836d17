/* zkbench.pair(address, path): the floor under a lock on ZooKeeper. run(n) does n
 * times what an uncontended acquire and release send, over bare libzookeeper:
 * create and get_children at once, then delete. Answers microseconds. */
#include <lauxlib.h>
#include <lua.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef DLK_WITH_ZOOKEEPER
#define THREADED
#include <pthread.h>
#include <zookeeper/zookeeper.h>

#define PAIR "zkbench.pair"

struct pair {
  zhandle_t *zh;
  pthread_mutex_t m;
  pthread_cond_t c;
  int out, rc;
  bool connected;
  char dir[64], node[192];
};

static void answered(struct pair *p, int rc) {
  pthread_mutex_lock(&p->m);
  p->out--;
  if (rc) p->rc = rc;
  pthread_cond_signal(&p->c);
  pthread_mutex_unlock(&p->m);
}

static void created(int rc, const char *path, const struct Stat *stat, const void *data) {
  struct pair *p = (struct pair *)data;
  (void)stat;
  if (!rc) strncpy(p->node, path, sizeof p->node - 1);
  answered(p, rc);
}

static void listed(int rc, const struct String_vector *names, const void *data) {
  (void)names;
  answered((struct pair *)data, rc);
}

static void deleted(int rc, const void *data) { answered((struct pair *)data, rc); }

static void watcher(zhandle_t *zh, int type, int state, const char *path, void *ctx) {
  struct pair *p = ctx;
  (void)zh;
  (void)type;
  (void)path;
  pthread_mutex_lock(&p->m);
  p->connected = state == ZOO_CONNECTED_STATE;
  pthread_cond_signal(&p->c);
  pthread_mutex_unlock(&p->m);
}

static void quiet(const char *message) { (void)message; }

static void await(struct pair *p) {
  pthread_mutex_lock(&p->m);
  while (p->out) pthread_cond_wait(&p->c, &p->m);
  pthread_mutex_unlock(&p->m);
}

static void expect(struct pair *p, int n) {
  pthread_mutex_lock(&p->m);
  p->out += n;
  pthread_mutex_unlock(&p->m);
}

static void one_pair(struct pair *p) {
  static const char owner[] = "dlock1:0123456789abcdef0123456789abcdef:host:1234";
  char path[128];
  strcpy(stpcpy(path, p->dir), "/_c_01234567-89ab-cdef-0123-456789abcdef-lock-");
  expect(p, 2);
  zoo_acreate2(p->zh, path, owner, sizeof owner - 1, &ZOO_OPEN_ACL_UNSAFE, ZOO_EPHEMERAL_SEQUENTIAL,
               created, p);
  zoo_aget_children(p->zh, p->dir, 0, listed, p);
  await(p);
  expect(p, 1);
  zoo_adelete(p->zh, p->node, -1, deleted, p);
  await(p);
}

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int pair_run(lua_State *L) {
  struct pair *p = luaL_checkudata(L, 1, PAIR);
  int n = (int)luaL_checkinteger(L, 2);
  double began = now_us();
  for (int i = 0; i < n; i++) one_pair(p);
  if (p->rc) return luaL_error(L, "ZooKeeper: %s", zerror(p->rc));
  lua_pushnumber(L, now_us() - began);
  return 1;
}

static int pair_gc(lua_State *L) {
  struct pair *p = luaL_checkudata(L, 1, PAIR);
  if (p->zh) zookeeper_close(p->zh);
  p->zh = NULL;
  return 0;
}

static int l_pair(lua_State *L) {
  const char *address = luaL_checkstring(L, 1), *path = luaL_checkstring(L, 2);
  struct pair *p = lua_newuserdata(L, sizeof *p);
  memset(p, 0, sizeof *p);
  pthread_mutex_init(&p->m, NULL);
  pthread_cond_init(&p->c, NULL);
  strncpy(p->dir, path, sizeof p->dir - 1);
  luaL_getmetatable(L, PAIR);
  lua_setmetatable(L, -2);
  p->zh = zookeeper_init2(address, watcher, 30000, NULL, p, 0, quiet);
  if (!p->zh) return luaL_error(L, "no ZooKeeper at %s", address);
  pthread_mutex_lock(&p->m);
  while (!p->connected) pthread_cond_wait(&p->c, &p->m);
  pthread_mutex_unlock(&p->m);
  return 1;
}

__attribute__((visibility("default"))) int luaopen_zkbench(lua_State *L);
int luaopen_zkbench(lua_State *L) {
  luaL_newmetatable(L, PAIR);
  lua_pushcfunction(L, pair_run);
  lua_setfield(L, -2, "run");
  lua_pushcfunction(L, pair_gc);
  lua_setfield(L, -2, "__gc");
  lua_pushvalue(L, -1);
  lua_setfield(L, -2, "__index");
  lua_newtable(L);
  lua_pushcfunction(L, l_pair);
  lua_setfield(L, -2, "pair");
  return 1;
}
#else
__attribute__((visibility("default"))) int luaopen_zkbench(lua_State *L);
int luaopen_zkbench(lua_State *L) {
  lua_newtable(L); /* this build has no ZooKeeper */
  return 1;
}
#endif
