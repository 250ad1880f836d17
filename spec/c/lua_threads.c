/* Three threads, each with a Lua state and a client of its own, acquire, time
 * out, are interrupted and close at random on a few shared keys: no wait goes
 * past its bound, nothing is left behind, and (under TSan) nothing races. Then
 * the quiet test: lost hand-overs hide under load, so one short waiter, one long
 * waiter and one asynchronous operation stand alone on a server that is paused. */
#include <lauxlib.h>
#include <lualib.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"
#include "test.h"

enum { THREADS = 3 };

static char dir[] = "/tmp/dlock-threads-XXXXXX";
static pid_t server;
extern char **environ;

/* Lua: url, seed, seconds, slack -> number of acquires, or an error. */
static const char random_life[] =
    "local url, seed, seconds, slack = ...\n"
    "local core, dlock = require 'dlock.core', require 'dlock'\n"
    "local thread = require 'dlock.runtime.thread'\n"
    "math.randomseed(seed)\n"
    "local interrupted = {}\n"
    "local runtime = { sleep = thread.sleep, wait = function(op, t)\n"
    "  if math.random(8) > 1 then return thread.wait(op, t) end\n"
    "  if op:wait(math.random() * 0.02) then return true end\n"
    "  error(interrupted)\n"
    "end }\n"
    "local stop, n = core.now() + seconds, 0\n"
    "while core.now() < stop do\n"
    "  local client = assert(dlock.connect(url, { ttl = 5, runtime = runtime, retry = false, timeout = 2 }))\n"
    "  local kept = {}\n"
    "  for i = 1, math.random(40) do\n"
    "    local wait = math.random(3) == 1 and 0 or math.random() * 0.05\n"
    "    local start = core.now()\n"
    "    local ok, lock, msg, code = pcall(client.acquire, client, 'k' .. math.random(3), { wait = wait })\n"
    "    local took = core.now() - start\n"
    "    if not ok and lock ~= interrupted then error(lock) end\n"
    "    if ok and not lock and code ~= 'held' and code ~= 'timeout' then error(code .. ': ' .. msg) end\n"
    "    if took > wait + 2 * slack then error(('waited %.3f s instead of %.3f'):format(took, wait)) end\n"
    "    n = n + 1\n"
    "    if ok and lock then\n"
    "      local how = math.random(6)\n"
    "      if how == 1 then kept[#kept + 1] = lock\n"
    "      elseif how == 2 then pcall(lock.wait_lost, lock, 0.001) pcall(lock.release, lock)\n"
    "      elseif how == 3 then pcall(lock.extend, lock, 3) pcall(lock.release, lock)\n"
    "      elseif how > 4 then pcall(lock.release, lock) end\n"
    "    end\n"
    "    if math.random(10) == 1 then collectgarbage() end\n"
    "  end\n"
    "  pcall(client.close, client)\n"
    "end\n"
    "return n\n";

/* Everything is free again: url, slack. */
static const char all_free[] =
    "local url, slack = ...\n"
    "local client = assert(require 'dlock'.connect(url, { ttl = 5 }))\n"
    "for i = 1, 3 do\n"
    "  local lock = assert(client:acquire('k' .. i, { wait = 2 * slack }))\n"
    "  assert(lock:release())\n"
    "end\n"
    "client:close()\n"
    "return 1\n";

/* One acquire: url, key, wait -> code, seconds it took. */
static const char one_wait[] =
    "local url, key, wait = ...\n"
    "local core, dlock = require 'dlock.core', require 'dlock'\n"
    "local client = assert(dlock.connect(url, { ttl = 5, retry = false, timeout = wait }))\n"
    "local start = core.now()\n"
    "local lock, _, code = client:acquire(key, { wait = wait })\n"
    "local took = core.now() - start\n"
    "if lock then lock:release() end\n"
    "client:close()\n"
    "return lock and 'got' or code, took\n";

/* An asynchronous acquire beside the two threads: url, wait -> code, seconds. */
static const char one_async[] =
    "local url, wait = ...\n"
    "local core = require 'dlock.core'\n"
    "local client = assert(core.connect { url = url, ttl = 5, timeout = wait, connect_timeout = wait, namespace = '' })\n"
    "local bell, start = core.bell(), core.now()\n"
    "local op = client:acquire('async', { ttl = 5, timeout = wait, max_hold = math.huge, renew = true }, wait, bell)\n"
    "while not op:wait(0.05) and core.now() < start + 3 * wait do end\n"
    "local lock, _, code = op:result()\n"
    "return lock and 'got' or code or 'nothing', core.now() - start\n";

struct job {
  pthread_t thread;
  const char *code, *url, *key;
  double a, b, c;
  char result[256];
  double number;
};

static double slack(void) {
  const char *s = getenv("DLOCK_SLACK");
  return s ? atof(s) : 1;
}

static double seconds(double full) {
  const char *s = getenv("DLOCK_SCALE");
  double scale = s ? atof(s) : 0.05;
  return full * scale < 1 ? 1 : full * scale;
}

static void *run(void *arg) {
  struct job *j = arg;
  lua_State *L = luaL_newstate();
  luaL_openlibs(L);
  int n = 0;
  if (luaL_loadstring(L, j->code) == 0) {
    lua_pushstring(L, j->url);
    n = 1;
    if (j->key)
      lua_pushstring(L, j->key), n++;
    lua_pushnumber(L, j->a);
    lua_pushnumber(L, j->b);
    lua_pushnumber(L, j->c);
    n += 3;
  }
  bool ok = n && lua_pcall(L, n, 2, 0) == 0;
  const char *s = lua_tostring(L, ok ? -2 : -1);
  snprintf(j->result, sizeof j->result, "%s%s", ok ? "" : "error: ", s ? s : "nothing");
  j->number = ok ? lua_tonumber(L, -1) : -1;
  lua_close(L);
  return NULL;
}

static void start(struct job *j) { CHECK(pthread_create(&j->thread, NULL, run, j) == 0); }
static void join(struct job *j) { CHECK(pthread_join(j->thread, NULL) == 0); }

static void ring(int sig) { (void)sig; }

static void test_random(const char *url) {
  struct job job[THREADS];
  double s = seconds(30);
  for (int i = 0; i < THREADS; i++) {
    job[i] = (struct job){.code = random_life, .url = url, .a = i + 1, .b = s, .c = slack()};
    start(&job[i]);
  }
  /* Signals cut waits short at any moment. */
  for (int64_t end = dlk_now_ms() + (int64_t)(s * 1000) - 200; dlk_now_ms() < end;) {
    struct timespec t = {0, 7000000};
    nanosleep(&t, NULL);
    pthread_kill(job[dlk_now_ms() % THREADS].thread, SIGUSR1);
  }
  for (int i = 0; i < THREADS; i++) {
    join(&job[i]);
    double n = atof(job[i].result);
    if (n < 10)
      fprintf(stderr, "%s, thread %d: %s\n", url, i, job[i].result);
    CHECK(n >= 10);
  }
  struct job last = {.code = all_free, .url = url, .a = slack()};
  run(&last);
  if (strcmp(last.result, "1"))
    fprintf(stderr, "%s: %s\n", url, last.result);
  CHECK(!strcmp(last.result, "1"));
}

static void pause_server(int ms) {
  char command[256];
  snprintf(command, sizeof command, "redis-cli -s %s/redis.sock CLIENT PAUSE %d > /dev/null", dir, ms);
  CHECK(system(command) == 0);
}

static void test_quiet(const char *url) {
  struct job brief = {.code = one_wait, .url = url, .key = "short", .a = 0.1};
  struct job patient = {.code = one_wait, .url = url, .key = "long", .a = 2 * slack()};
  struct job async = {.code = one_async, .url = url, .a = 2 * slack()};
  pause_server((int)(300 * slack()));
  start(&brief);
  start(&patient);
  start(&async);
  join(&brief);
  join(&patient);
  join(&async);
  fprintf(stderr, "quiet: short %s %.3f s, long %s %.3f s, async %s %.3f s\n", brief.result, brief.number,
          patient.result, patient.number, async.result, async.number);
  CHECK(!strcmp(brief.result, "indeterminate") || !strcmp(brief.result, "unavailable"));
  CHECK(!strcmp(patient.result, "got") && patient.number < 1 * slack());
  CHECK(!strcmp(async.result, "got") && async.number < 1 * slack());
}

static bool start_server(void) {
  char sock[64], ready[128];
  snprintf(sock, sizeof sock, "%s/redis.sock", dir);
  const char *argv[] = {"redis-server", "--port", "0", "--unixsocket", sock, "--save", "", "--dir", dir,
                        "--logfile", "redis.log", NULL};
  if (posix_spawnp(&server, argv[0], NULL, NULL, (char *const *)argv, environ))
    return false;
  struct stat st;
  snprintf(ready, sizeof ready, "redis-cli -s %s PING > /dev/null 2>&1", sock);
  for (int64_t end = dlk_now_ms() + 10000; dlk_now_ms() < end;)
    if (!stat(sock, &st) && !system(ready))
      return true;
  return false;
}

int main(void) {
  char url[256], command[256];
  struct sigaction act = {.sa_handler = ring}; /* no SA_RESTART: waits end early */
  sigaction(SIGUSR1, &act, NULL);
  CHECK(mkdtemp(dir) != NULL);
  snprintf(url, sizeof url, "local://%s/locks", dir);
  test_random(url);
  CHECK(start_server());
  snprintf(url, sizeof url, "redis+unix://%s/redis.sock", dir);
  test_quiet(url);
  test_random(url);
  kill(server, SIGKILL);
  waitpid(server, NULL, 0);
  snprintf(command, sizeof command, "rm -rf %s", dir);
  CHECK(system(command) == 0);
  return DONE();
}
