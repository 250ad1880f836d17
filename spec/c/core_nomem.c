/* The n-th allocation fails, for every n, in a short life of a few locks over the
 * local and the Redis backend: nothing crashes, every call says so or does its
 * work, every wait ends, and no lock is left. time limit: 200 s */
#include <errno.h>
#include <openssl/evp.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lock.h"
#include "test.h"

/* ---- failing ---- */

static unsigned long made, fail_from = -1ul, fail_to; /* allocations [from, to) fail */

/* The sanitizers and valgrind have an allocator of their own: there it runs without failures. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { CAN_FAIL = 0 };
#else
enum { CAN_FAIL = 1 };
static bool fails(void) {
  unsigned long n = __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED);
  return n >= __atomic_load_n(&fail_from, __ATOMIC_RELAXED) && n < __atomic_load_n(&fail_to, __ATOMIC_RELAXED);
}

#define SHOWN __attribute__((visibility("default")))
void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
SHOWN void *malloc(size_t n) {
  if (!fails())
    return __libc_malloc(n);
  errno = ENOMEM;
  return NULL;
}
SHOWN void *calloc(size_t n, size_t size) {
  if (!fails())
    return __libc_calloc(n, size);
  errno = ENOMEM;
  return NULL;
}
SHOWN void *realloc(void *p, size_t n) {
  if (!fails())
    return __libc_realloc(p, n);
  errno = ENOMEM;
  return NULL;
}
#endif

/* ---- a short life ---- */

static int64_t slack_ms(int64_t ms) {
  const char *s = getenv("DLOCK_SLACK");
  return (int64_t)((double)ms * (s ? atof(s) : 1));
}

static dlock_bell *bell;
static char key[32];
static unsigned long where;

static bool ended(dlock_op *op, int64_t ms) {
  int64_t end = dlk_now_ms() + slack_ms(ms);
  while (!dlock_op_wait(op, 20))
    if (dlk_now_ms() > end) {
      fprintf(stderr, "allocation %lu: an operation (kind %d) does not end\n", where, (int)op->kind);
      return false;
    }
  return true;
}

/* One that failed says why. */
static void over(dlock_op *op) {
  if (!op)
    return;
  CHECK(ended(op, 3000));
  CHECK(dlock_op_msg(op)[0]);
  dlock_op_unref(op);
}

static struct dlock_how how(bool blocking) {
  return (struct dlock_how){.timeout_ms = slack_ms(1000), .blocking = blocking, .bell = blocking ? NULL : bell};
}

static dlock_op *acquire(dlock_client *c, int64_t wait_ms, bool blocking) {
  struct dlock_how h = how(blocking);
  struct dlock_acquire a = {.key = key, .key_len = strlen(key), .ttl_ms = 300, .wait_ms = wait_ms, .renew = true,
                            .timeout_ms = h.timeout_ms, .blocking = blocking, .bell = h.bell};
  return dlock_acquire(c, &a);
}

static dlock_lock *taken(dlock_op *op) {
  dlock_lock *l = op && ended(op, 3000) ? dlock_op_lock(op) : NULL;
  dlock_op_unref(op);
  return l;
}

static void released(dlock_lock *l, bool blocking) {
  struct dlock_how h = how(blocking);
  dlock_op *op = l ? dlock_release(l, &h) : NULL;
  if (op)
    over(op);
  else if (l)
    dlock_lock_abandon(l);
  dlock_lock_unref(l);
}

static dlock_client *open_client(const char *url) {
  struct dlock_config cfg = {.url = url, .ttl_ms = 600, .timeout_ms = slack_ms(1000),
                             .connect_timeout_ms = slack_ms(1000), .events = true};
  dlock_client *c = NULL;
  bool bad;
  char msg[DLOCK_MSG_MAX] = "";
  enum dlock_err e = dlock_client_open(&cfg, &c, &bad, msg);
  CHECK(e == DLOCK_E_OK || msg[0]);
  return c;
}

/* Two clients, so that one waits at the server, and a second waiter of one
 * client, so that there is a hand-over; a renewal, an extension, queries. */
static void life(const char *url) {
  struct dlock_how h = how(true);
  dlock_client *c = open_client(url), *d = open_client(url);
  bell = dlock_bell_new();
  dlock_lock *l = c ? taken(acquire(c, 0, true)) : NULL;
  if (l) {
    dlock_op *heir = acquire(c, 200, false), *other = d ? acquire(d, 1000, false) : NULL;
    over(dlock_extend(l, 400, &h));
    over(dlock_ask(c, DLOCK_INSPECT, key, strlen(key), &h));
    released(l, true);
    released(taken(heir), false);
    released(taken(other), true);
  }
  if (d) {
    over(dlock_ask(d, DLOCK_LIST, key, strlen(key), &h));
    over(dlock_ask(d, DLOCK_PING, "", 0, &h));
    l = taken(acquire(d, 500, true));
    if (l && !(where & 3)) /* a renewal */
      usleep(300 * 1000);
    if (l)
      dlock_lock_abandon(l);
    dlock_lock_unref(l);
  }
  struct dlock_event ev;
  while (c && dlock_next_event(c, &ev))
    free(ev.key);
  if (c)
    over(dlock_client_close(c, NULL));
  dlock_client_unref(c);
  if (d)
    over(dlock_client_close(d, bell));
  dlock_client_unref(d);
  dlock_bell_unref(bell);
}

static bool none_left(void) {
  dlk_enter();
  bool none = !dlk_clients;
  dlk_leave();
  return none;
}

/* What is left, if it should not be. */
static void tell(void) {
  dlk_enter();
  for (struct dlk_client *c = dlk_clients; c; c = c->next) {
    fprintf(stderr, "client: refs %d closed %d busy %zu\n", c->refs, c->closed, c->busy);
    for (struct dlk_lock *l = c->locks; l; l = l->next)
      fprintf(stderr, "  lock: %s refs %d unclean %d unknown %d queued %d cleaning %d call %d timer %zu watching %d\n",
              dlk_state_text(l->state), l->refs, l->unclean, l->unknown, l->g.queued, l->cleaning, l->call != NULL,
              l->timer.at, l->watching);
  }
  dlk_leave();
}

static void free_again(const char *url) {
  for (int64_t end = dlk_now_ms() + slack_ms(5000); !none_left() && dlk_now_ms() < end;)
    usleep(500);
  CHECK(none_left());
  tell();
  dlock_client *c = open_client(url);
  dlock_op *op = acquire(c, 0, true);
  CHECK(ended(op, 3000));
  if (dlock_op_err(op))
    fprintf(stderr, "allocation %lu: %s\n", where, dlock_op_msg(op));
  CHECK(dlock_op_err(op) == DLOCK_E_OK);
  released(dlock_op_lock(op), true);
  dlock_op_unref(op);
  dlock_client_unref(c);
}

static void fail(unsigned long from, unsigned long to) {
  __atomic_store_n(&made, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&fail_to, to, __ATOMIC_RELAXED);
  __atomic_store_n(&fail_from, from, __ATOMIC_RELAXED);
}

/* Each life in a process of its own, so that the first use of everything is in it. */
static void one(const char *url, unsigned long from, unsigned long many, unsigned long *n) {
  where = from;
  test_failed = 0;
  snprintf(key, sizeof key, "key%lu", from);
  fail(from, from + many);
  life(url);
  *n = __atomic_load_n(&made, __ATOMIC_RELAXED);
  fail(-1ul, 0);
  free_again(url);
  if (test_failed)
    fprintf(stderr, "%s: allocation %lu and %lu more\n", url, from, many - 1);
  exit(test_failed ? 1 : 0);
}

static void reap(void) {
  int status = -1;
  CHECK(wait(&status) > 0 && status == 0);
  if (status)
    fprintf(stderr, "status %#x\n", (unsigned)status);
}

/* `many`: this many fail in a row. */
static void every_one(const char *url, unsigned long many, unsigned long only) {
  enum { SIDE_BY_SIDE = 12 };
  unsigned long *n = mmap(NULL, sizeof *n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), unused;
  int running = 1;
  fflush(NULL);
  if (!fork())
    one(url, -1ul - many, many, n);
  reap();
  const char *under = getenv("DLOCK_UNDER");
  bool can_fail = CAN_FAIL && !(under && !strcmp(under, "valgrind"));
  CHECK(!can_fail || *n > 20);
  unsigned long all = *n + 20;
  for (unsigned long i = only ? only : 1; can_fail && i <= (only ? only : all); i++, running++) {
    if (running > SIDE_BY_SIDE) {
      reap();
      running--;
    }
    if (!fork())
      one(url, i, many, &unused);
  }
  while (--running)
    reap();
  munmap(n, sizeof *n);
}

/* ---- a Redis ---- */

static char dir[] = "/tmp/dlock-nomem-XXXXXX";
static pid_t server;
extern char **environ;

static bool start_server(char *url, size_t size) {
  char sock[64];
  snprintf(sock, sizeof sock, "%s/redis.sock", dir);
  snprintf(url, size, "redis+unix://%s", sock);
  const char *argv[] = {"redis-server", "--port", "0", "--unixsocket", sock, "--save", "", "--dir", dir,
                        "--logfile", "redis.log", NULL};
  if (posix_spawnp(&server, argv[0], NULL, NULL, (char *const *)argv, environ))
    return false;
  struct stat st;
  for (int64_t end = dlk_now_ms() + 10000; stat(sock, &st) && dlk_now_ms() < end;)
    usleep(10000);
  usleep(100000);
  return !stat(sock, &st);
}

int main(int argc, char **argv) {
  char url[128], command[128];
  unsigned long many = argc > 1 ? strtoul(argv[1], NULL, 10) : 0, only = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
  unsigned char digest[EVP_MAX_MD_SIZE];
  /* OpenSSL's own 6,500 first allocations are not what is tested. */
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, NULL);
  CHECK(EVP_Digest("", 0, digest, NULL, EVP_sha1(), NULL) && EVP_Digest("", 0, digest, NULL, EVP_sha256(), NULL));
  CHECK(mkdtemp(dir) != NULL);
  snprintf(url, sizeof url, "local://%s/locks", dir);
  if (argc < 4 || *argv[3] == 'l') {
    every_one(url, many ? many : 1, only);
    if (!many)
      every_one(url, 5, only);
  }
#ifdef DLK_WITH_REDIS
  CHECK(start_server(url, sizeof url));
  if (argc < 4 || *argv[3] == 'r') {
    every_one(url, many ? many : 1, only);
    if (!many)
      every_one(url, 5, only);
  }
  kill(server, SIGKILL);
  waitpid(server, NULL, 0);
#endif
  snprintf(command, sizeof command, "rm -rf %s", dir);
  CHECK(system(command) == 0);
  return DONE();
}
