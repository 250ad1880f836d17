/* The local backend alone, against real processes, kills and files.
 *
 * local.c is compiled into this program under other names for what it takes from
 * the core's clients and calls, so that small stand-ins below see every call it
 * makes; loop.c, engine.c, clock.c, url.c and local_file.c are the real ones (the
 * Makefile links the whole core). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sys/inotify.h>

int t_inotify_init1(int flags);

#define dlk_local_backend t_local_backend
#define dlk_call_done t_call_done
#define dlk_wake t_wake
#define dlk_gone t_gone
#define dlk_notice t_notice
#define inotify_init1 t_inotify_init1
#include "local.c"
#undef inotify_init1

#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "test.h"

#ifdef __SANITIZE_THREAD__
/* Children of this program have threads of their own. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) { return "die_after_fork=0"; }
#endif

static char root[64]; /* scratch, removed at the end */

/* ---- stand-ins for the core ---- */

struct dlk_client {
  void *self;
  struct dlk_waiter *waiters;
  unsigned wakes, gones, notices, tries;
  char gone_msg[DLOCK_MSG_MAX];
};

/* A contender on the loop: watches, and tries again when woken or when the
 * backend said so. */
struct dlk_waiter {
  struct dlk_client *c;
  struct dlk_grant *g;
  struct dlk_call call;
  struct dlk_grant *grants[1];
  enum dlk_outcome out[1];
  struct dlk_task task;
  struct dlk_timer timer;
  struct dlk_waiter *next;
  bool watching, stop, ended;
  unsigned steps;
};

static pthread_mutex_t tm = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t tc = PTHREAD_COND_INITIALIZER;

static bool no_inotify;

int t_inotify_init1(int flags) {
  if (!no_inotify) return inotify_init1(flags);
  errno = EMFILE;
  return -1;
}

void t_call_done(struct dlk_call *c) { c->done(c); }

bool t_wake(struct dlk_client *c, const char *name, size_t len) {
  bool any = false;
  pthread_mutex_lock(&tm);
  c->wakes++;
  for (struct dlk_waiter *w = c->waiters; w; w = w->next)
    if (w->g->items[0].len == len && !memcmp(w->g->items[0].name, name, len)) {
      dlk_post(&w->task);
      any = true;
    }
  pthread_mutex_unlock(&tm);
  return any;
}

void t_gone(struct dlk_client *c, struct dlk_grant *g, enum dlock_reason why, const char *msg) {
  (void)g;
  pthread_mutex_lock(&tm);
  c->gones += why == DLOCK_R_DELETED;
  snprintf(c->gone_msg, sizeof c->gone_msg, "%s", msg);
  pthread_cond_broadcast(&tc);
  pthread_mutex_unlock(&tm);
}

void t_notice(struct dlk_client *c, const char *fmt, ...) {
  (void)fmt;
  pthread_mutex_lock(&tm);
  c->notices++;
  pthread_mutex_unlock(&tm);
}

/* ---- calls ---- */

struct answer {
  enum dlock_err err;
  enum dlk_outcome out;
  char msg[DLOCK_MSG_MAX];
  char holder[DLOCK_LABEL_MAX + 48];
  int64_t retry_ms;
  struct dlk_info *info;
};

static void done_flag(struct dlk_call *c) { *(bool *)c->ctx = true; }

static struct answer run(struct dlk_client *c, struct dlk_call *call) {
  static int lane;
  enum dlk_outcome out[4] = {DLK_UNKNOWN};
  bool done = false;
  call->client = c;
  call->lane = (struct dlk_lane *)(void *)&lane; /* only "not NULL" counts here */
  call->out = out;
  call->done = done_flag;
  call->ctx = &done;
  t_local_backend.start(c->self, call);
  if (!done) abort(); /* every call in a lane ends inside start() */
  struct answer a = {
      .err = call->err, .out = out[0], .retry_ms = call->retry_ms, .info = call->info};
  strcpy(a.msg, call->msg);
  strcpy(a.holder, call->holder);
  return a;
}

static struct answer verb(struct dlk_client *c, enum dlk_verb v, struct dlk_grant *g) {
  struct dlk_grant *gs[1] = {g};
  struct dlk_call call = {.verb = v, .grants = gs, .n = 1, .contend = true};
  return run(c, &call);
}

static struct answer ask(struct dlk_client *c, enum dlk_verb v, const char *key, size_t len) {
  struct dlk_call call = {.verb = v, .key = key, .key_len = len};
  return run(c, &call);
}

static struct dlk_grant *grant_of(const char *key, size_t len, const char *label) {
  struct dlk_grant *g = calloc(1, sizeof *g);
  unsigned char id[16];
  char *o = g->owner = malloc(300);
  dlk_random(id, sizeof id);
  o = stpcpy(o, DLK_OWNER_PREFIX);
  for (size_t i = 0; i < sizeof id; i++) o += sprintf(o, "%02x", id[i]);
  sprintf(o, ":%s", label);
  g->owner_len = strlen(g->owner);
  g->n = 1;
  g->items = calloc(1, sizeof *g->items);
  g->items[0] = (struct dlk_item){.name = malloc(len + 1), .len = len, .limit = 1};
  memcpy(g->items[0].name, key, len);
  g->items[0].name[len] = 0;
  return g;
}

static struct dlk_grant *grant(const char *key) { return grant_of(key, strlen(key), "tester:1"); }

static void grant_free(struct dlk_client *c, struct dlk_grant *g) {
  t_local_backend.forget(c->self, g);
  free(g->items[0].name);
  free(g->items);
  free(g->owner);
  free(g);
}

static enum dlock_err try_open(struct dlk_client *c, const char *text, char *msg) {
  struct dlk_url u;
  struct dlock_config cfg = {.url = text};
  *c = (struct dlk_client){0};
  enum dlock_err e = dlk_url_parse(text, &u, msg);
  if (e) return e;
  e = t_local_backend.open(c, &u, &cfg, &c->self, msg);
  dlk_url_free(&u);
  return e;
}

static void open_client(struct dlk_client *c, const char *dir) {
  char text[600], msg[DLOCK_MSG_MAX] = "";
  snprintf(text, sizeof text, "local://%s", dir);
  if (try_open(c, text, msg)) {
    fprintf(stderr, "open %s: %s\n", text, msg);
    exit(2);
  }
}

/* Runs something on the loop thread and waits for its end. */
struct errand {
  struct dlk_task task;
  void (*run)(void *);
  void *arg;
  bool done;
};

static void errand_run(struct dlk_task *t) {
  struct errand *x = (struct errand *)(void *)t;
  x->run(x->arg);
  pthread_mutex_lock(&tm);
  x->done = true;
  pthread_cond_broadcast(&tc);
  pthread_mutex_unlock(&tm);
}

static void on_loop(void (*fn)(void *), void *arg) {
  struct errand x = {.task = {.run = errand_run}, .run = fn, .arg = arg};
  dlk_post(&x.task);
  pthread_mutex_lock(&tm);
  while (!x.done) pthread_cond_wait(&tc, &tm);
  pthread_mutex_unlock(&tm);
}

static void nothing(void *arg) { (void)arg; }

static void close_client(struct dlk_client *c) { on_loop(t_local_backend.close, c->self); }

static void touch_now(void *t) { lc_touch(t); }

/* ---- waiting ---- */

static void waiter_ended(struct dlk_waiter *w) {
  dlk_timer_stop(&w->timer);
  if (w->watching) t_local_backend.watch(w->c->self, w->g, false);
  pthread_mutex_lock(&tm);
  w->ended = true;
  pthread_cond_broadcast(&tc);
  pthread_mutex_unlock(&tm);
}

static void waiter_done(struct dlk_call *call) {
  struct dlk_waiter *w = call->ctx;
  if (call->err || call->out[0] != DLK_BUSY) return;
  dlk_timer_set(dlk_loop(), &w->timer, dlk_now_ms() + call->retry_ms);
}

static void waiter_step(struct dlk_task *t) {
  struct dlk_waiter *w = (struct dlk_waiter *)((char *)t - offsetof(struct dlk_waiter, task));
  pthread_mutex_lock(&tm);
  bool stop = w->stop, ended = w->ended;
  w->c->tries++;
  w->steps++;
  pthread_mutex_unlock(&tm);
  if (ended) return;
  if (!stop && !w->watching) {
    w->watching = true;
    t_local_backend.watch(w->c->self, w->g, true);
    return;
  }
  w->grants[0] = w->g;
  w->call = (struct dlk_call){.verb = DLK_ACQUIRE,
                              .client = w->c,
                              .grants = w->grants,
                              .out = w->out,
                              .n = 1,
                              .contend = true,
                              .done = waiter_done,
                              .ctx = w};
  w->out[0] = DLK_UNKNOWN;
  if (!stop) t_local_backend.start(w->c->self, &w->call);
  if (stop || w->call.err || w->out[0] == DLK_DONE) waiter_ended(w);
}

static void waiter_timer(struct dlk_timer *t) {
  waiter_step(&((struct dlk_waiter *)((char *)t - offsetof(struct dlk_waiter, timer)))->task);
}

static void until_ms(struct timespec *t, int64_t ms) {
  clock_gettime(CLOCK_REALTIME, t);
  t->tv_sec += ms / 1000;
  t->tv_nsec += ms % 1000 * 1000000;
  t->tv_sec += t->tv_nsec / 1000000000;
  t->tv_nsec %= 1000000000;
}

static unsigned wakes_of(struct dlk_client *c) {
  pthread_mutex_lock(&tm);
  unsigned n = c->wakes;
  pthread_mutex_unlock(&tm);
  return n;
}

/* Until it has tried once more after its watch was there. */
static void wait_watched(const struct dlk_waiter *w) {
  for (int i = 0; i < 20000; i++) {
    pthread_mutex_lock(&tm);
    bool ok = w->steps >= 2;
    pthread_mutex_unlock(&tm);
    if (ok) break;
    lc_nap_us(1000);
  }
}

/* Begins to wait; `wait_end` waits for the outcome. */
static struct dlk_waiter *wait_begin(struct dlk_client *c, struct dlk_grant *g) {
  struct dlk_waiter *w = calloc(1, sizeof *w);
  w->c = c;
  w->g = g;
  w->task.run = waiter_step;
  w->timer.fire = waiter_timer;
  pthread_mutex_lock(&tm);
  w->next = c->waiters;
  c->waiters = w;
  pthread_mutex_unlock(&tm);
  dlk_post(&w->task);
  return w;
}

/* True: it has the lock. */
static bool wait_end(struct dlk_waiter *w, int64_t ms) {
  struct timespec t;
  until_ms(&t, ms);
  pthread_mutex_lock(&tm);
  while (!w->ended && !pthread_cond_timedwait(&tc, &tm, &t))
    ;
  if (!w->ended) {
    w->stop = true;
    dlk_post(&w->task);
    while (!w->ended) pthread_cond_wait(&tc, &tm);
  }
  struct dlk_waiter **p = &w->c->waiters;
  while (*p != w) p = &(*p)->next;
  *p = w->next;
  pthread_mutex_unlock(&tm);
  on_loop(nothing, NULL); /* behind a last wake-up that may be queued */
  bool ok = !w->stop && !w->call.err && w->out[0] == DLK_DONE;
  if (w->call.err) fprintf(stderr, "waiter: %s\n", w->call.msg);
  free(w);
  return ok;
}

static bool acquire(struct dlk_client *c, struct dlk_grant *g, int64_t ms) {
  struct answer a = verb(c, DLK_ACQUIRE, g);
  if (a.err) fprintf(stderr, "acquire: %s\n", a.msg);
  if (a.err || a.out == DLK_DONE) return !a.err;
  return ms > 0 && wait_end(wait_begin(c, g), ms);
}

static void hold(struct dlk_client *c, struct dlk_grant *g) {
  CHECK(acquire(c, g, 0));
  t_local_backend.guard(c->self, g, true);
}

static enum dlk_outcome release(struct dlk_client *c, struct dlk_grant *g) {
  t_local_backend.guard(c->self, g, false);
  struct answer a = verb(c, DLK_RELEASE, g);
  return a.err ? DLK_UNKNOWN : a.out;
}

static bool saw_gone(struct dlk_client *c, unsigned n, int64_t ms) {
  struct timespec t;
  until_ms(&t, ms);
  pthread_mutex_lock(&tm);
  while (c->gones < n && !pthread_cond_timedwait(&tc, &tm, &t))
    ;
  bool ok = c->gones == n;
  pthread_mutex_unlock(&tm);
  return ok;
}

/* ---- processes and files ---- */

static char *in_root(const char *name) {
  static _Thread_local char buf[32][400];
  static _Thread_local unsigned i;
  char *p = buf[i++ % 32];
  snprintf(p, 400, "%s/%s", root, name);
  return p;
}

static void put(const char *path, const char *text) {
  FILE *f = fopen(path, "w");
  fputs(text, f);
  fclose(f);
}

static bool exists(const char *path) {
  struct stat st;
  return !lstat(path, &st);
}

static void make_old(const char *path) {
  struct timespec t[2] = {{time(NULL) - 2 * LC_IDLE_S, 0}, {time(NULL) - 2 * LC_IDLE_S, 0}};
  utimensat(AT_FDCWD, path, t, AT_SYMLINK_NOFOLLOW);
}

static int count_fds(void) {
  int n = 0;
  DIR *d = opendir("/proc/self/fd");
  while (readdir(d)) n++;
  closedir(d);
  return n;
}

struct child {
  pid_t pid;
  int say, hear; /* from the parent's side */
};

static void kid_say(int fd, char c) {
  if (write(fd, &c, 1) != 1) _exit(3);
}

static char kid_hear(int fd) {
  char c = 0;
  return read(fd, &c, 1) == 1 ? c : 0;
}

/* A process that says 'r' and so on over a pipe, and is told over another. */
static struct child spawn(void (*main_)(int in, int out, void *arg), void *arg) {
  int a[2], b[2];
  if (pipe2(a, O_CLOEXEC) || pipe2(b, O_CLOEXEC)) exit(2);
  fflush(NULL);
  struct child k = {.pid = fork()};
  if (!k.pid) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(a[1]);
    close(b[0]);
    main_(a[0], b[1], arg);
    _exit(test_failed ? 1 : 0);
  }
  close(a[0]);
  close(b[1]);
  k.say = a[1];
  k.hear = b[0];
  return k;
}

static int reap(struct child *k, int sig) {
  int st = 0;
  if (sig) kill(k->pid, sig);
  close(k->say);
  waitpid(k->pid, &st, 0);
  close(k->hear);
  return st;
}

/* Holds "k" in the directory `arg` until told to go on, then releases it. */
static void kid_hold(int in, int out, void *arg) {
  struct dlk_client c;
  struct dlk_grant *g = grant("k");
  open_client(&c, arg);
  hold(&c, g);
  kid_say(out, 'h');
  kid_hear(in);
  CHECK(release(&c, g) == DLK_DONE);
  kid_say(out, 'r');
  kid_hear(in);
}

/* ---- tests ---- */

static void test_life(void) {
  char *dir = in_root("life");
  struct dlk_client c, d;
  struct stat st;
  open_client(&c, dir);
  open_client(&d, dir);
  struct dlk_grant *g = grant("order:42"), *h = grant("order:42");
  hold(&c, g);
  uint64_t first = g->items[0].token, now = dlk_wall_100us();
  CHECK(first + 100000 > now && first <= now);
  CHECK(!lstat(in_root("life/order%3A42"), &st) && (st.st_mode & 07777) == 0600);
  CHECK(!lstat(dir, &st) && (st.st_mode & 07777) == 0700);
  CHECK(verb(&c, DLK_RENEW, g).out == DLK_DONE);
  CHECK(verb(&c, DLK_ACQUIRE, g).out == DLK_DONE && g->items[0].token == first);

  struct answer a = verb(&d, DLK_ACQUIRE, h);
  CHECK(!a.err && a.out == DLK_BUSY && a.retry_ms == LC_POLL_MS && !strcmp(a.holder, g->owner));
  CHECK(verb(&d, DLK_RELEASE, h).out == DLK_DONE);
  a = ask(&d, DLK_INSPECT, "order:42", 8);
  CHECK(a.info->found && a.info->ours && a.info->token == first && a.info->ttl_ms == -1);
  CHECK(!strcmp(a.info->owner, "tester:1") && a.info->age_ms >= 0 && a.info->age_ms < 10000);
  dlk_info_free(a.info);
  a = ask(&d, DLK_PING, "", 0);
  CHECK(strstr(a.info->text, dir));
  dlk_info_free(a.info);

  CHECK(release(&c, g) == DLK_DONE);
  CHECK(verb(&c, DLK_RELEASE, g).out == DLK_GONE && verb(&c, DLK_RENEW, g).out == DLK_GONE);
  a = ask(&d, DLK_INSPECT, "order:42", 8);
  CHECK(!a.err && !a.info->found);
  dlk_info_free(a.info);
  a = ask(&d, DLK_BREAK, "order:42", 8);
  CHECK(!a.err && !a.info->found);
  dlk_info_free(a.info);
  CHECK(acquire(&d, h, 0) && h->items[0].token > first);
  grant_free(&d, h); /* frees the lock, too */
  CHECK(acquire(&c, g, 0));
  grant_free(&c, g);
  close_client(&c);
  close_client(&d);
}

static void test_refused_shapes(void) {
  struct dlk_client c;
  open_client(&c, in_root("life"));
  struct dlk_grant *g = grant("x");
  g->items[0].mode = DLK_SHARED;
  CHECK(verb(&c, DLK_ACQUIRE, g).err == DLOCK_E_UNSUPPORTED);
  g->items[0].mode = DLK_EXCLUSIVE;
  g->items[0].limit = 3;
  CHECK(verb(&c, DLK_ACQUIRE, g).err == DLOCK_E_UNSUPPORTED);
  g->items[0].limit = 1;
  hold(&c, g);
  struct dlk_grant *gs[1] = {g};
  struct dlk_call call = {.verb = DLK_RELEASE, .grants = gs, .n = 1, .keep_ms = 5};
  CHECK(run(&c, &call).err == DLOCK_E_UNSUPPORTED);
  CHECK(release(&c, g) == DLK_DONE);
  grant_free(&c, g);
  close_client(&c);
}

/* Any bytes, and no two keys that share a file. */
static void test_names(void) {
  static char longs[5][DLOCK_KEY_MAX];
  memset(longs, 'x', sizeof longs);
  for (size_t i = 0; i < DLOCK_KEY_MAX; i++) longs[4][i] = (char)(i * 7);
  const struct {
    const char *p;
    size_t n;
  } keys[] = {{"", 0},
              {"%", 1},
              {".", 1},
              {"..", 2},
              {"a", 1},
              {"a/b", 3},
              {"a\0b", 3},
              {"a%2Fb", 5},
              {"A", 1},
              {".hidden", 7},
              {"%swept", 6},
              {"\xff\xfe\n", 3},
              {longs[0], 200},
              {longs[0], 201},
              {longs[1], 1024},
              {longs[2], DLOCK_KEY_MAX},
              {longs[3], 4095},
              {longs[4], 1024},
              {longs[4], DLOCK_KEY_MAX}};
  enum { N = sizeof keys / sizeof *keys };
  struct dlk_grant *g[N];
  struct dlk_client c;
  open_client(&c, in_root("names"));
  for (int i = 0; i < N; i++) {
    g[i] = grant_of(keys[i].p, keys[i].n, "n");
    hold(&c, g[i]);
  }
  struct answer a = ask(&c, DLK_LIST, "", 0);
  CHECK(a.info->n == N);
  for (int i = 0; i < N; i++) {
    bool there = false;
    for (size_t k = 0; k < a.info->n; k++)
      there = there ||
              (a.info->list_len[k] == keys[i].n && !memcmp(a.info->list[k], keys[i].p, keys[i].n));
    CHECK(there);
  }
  dlk_info_free(a.info);
  a = ask(&c, DLK_LIST, "a/", 2);
  CHECK(a.info->n == 1);
  dlk_info_free(a.info);
  for (int i = 0; i < N; i++) {
    a = ask(&c, DLK_INSPECT, keys[i].p, keys[i].n);
    CHECK(!a.err && a.info->found && a.info->token == g[i]->items[0].token);
    dlk_info_free(a.info);
    CHECK(release(&c, g[i]) == DLK_DONE);
    grant_free(&c, g[i]);
  }
  a = ask(&c, DLK_LIST, "", 0);
  CHECK(!a.err && a.info->n == 0);
  dlk_info_free(a.info);
  close_client(&c);
}

static void test_urls(void) {
  struct dlk_client c;
  char msg[DLOCK_MSG_MAX];
  const char *bad[] = {"local://host/dir", "local://u:p@/dir", "local:///dir?x=1", "local:dir",
                       "local:///"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
    CHECK(try_open(&c, bad[i], msg) == DLOCK_E_PROTOCOL);
  char text[200];
  snprintf(text, sizeof text, "local://%s/no/such", root);
  CHECK(try_open(&c, text, msg) == DLOCK_E_UNAVAILABLE && strstr(msg, "/no/such"));
  put(in_root("plain"), "");
  snprintf(text, sizeof text, "local://%s/plain", root);
  CHECK(try_open(&c, text, msg) == DLOCK_E_UNAVAILABLE);
  snprintf(text, sizeof text, "local://%s/slashes///", root);
  CHECK(!try_open(&c, text, msg) && exists(in_root("slashes")));
  close_client(&c);
}

/* The rules of the default directory, tried on one of our own. */
static void test_private_dir(void) {
  struct lc_self s = {.dir = in_root("private")};
  char msg[DLOCK_MSG_MAX];
  int fd = -1;
  CHECK(!lc_dir_open(&s, &fd, msg));
  close(fd);
  CHECK(!chmod(s.dir, 0750));
  CHECK(lc_dir_open(&s, &fd, msg) == DLOCK_E_UNAVAILABLE && strstr(msg, s.dir) &&
        strstr(msg, "local:///"));
  CHECK(!chmod(s.dir, 0700));
  CHECK(!symlink(s.dir, in_root("link")));
  s.dir = in_root("link");
  CHECK(lc_dir_open(&s, &fd, msg) == DLOCK_E_UNAVAILABLE);
  if (geteuid() == 0) {
    s.dir = in_root("private");
    CHECK(!chown(s.dir, 65534, 65534));
    CHECK(lc_dir_open(&s, &fd, msg) == DLOCK_E_UNAVAILABLE && strstr(msg, "another user"));
  }
  CHECK(!unsetenv("HOME") && !setenv("XDG_RUNTIME_DIR", "/nowhere", 1) &&
        !setenv("TMPDIR", "/nowhere", 1));
  char *dir = lc_default_dir(), want[64];
  snprintf(want, sizeof want, "/run/lock/dlock-%lu", (unsigned long)geteuid());
  CHECK(!exists("/run/lock") || !strcmp(dir, want));
  free(dir);
}

static void test_shared_dir(void) {
  struct dlk_client c;
  struct stat st;
  CHECK(!mkdir(in_root("shared"), 0700) && !chmod(in_root("shared"), 01777));
  open_client(&c, in_root("shared"));
  mode_t old = umask(077);
  struct dlk_grant *g = grant("k");
  hold(&c, g);
  umask(old);
  CHECK(!lstat(in_root("shared/k"), &st) && (st.st_mode & 07777) == 0666);
  CHECK(release(&c, g) == DLK_DONE);
  grant_free(&c, g);
  close_client(&c);
}

static bool refused(struct dlk_client *c, const char *key, enum dlock_err want) {
  struct dlk_grant *g = grant(key);
  struct answer a = verb(c, DLK_ACQUIRE, g);
  bool ok = a.err == want && strstr(a.msg, key);
  if (!ok) fprintf(stderr, "%s: %s (%s)\n", key, dlock_err_code(a.err), a.msg);
  grant_free(c, g);
  return ok;
}

static void test_foreign(void) {
  struct dlk_client c;
  open_client(&c, in_root("foreign"));
  put(in_root("target"), "");
  CHECK(!symlink(in_root("target"), in_root("foreign/sym")));
  CHECK(!mkdir(in_root("foreign/dir"), 0700) && !mkfifo(in_root("foreign/fifo"), 0600));
  put(in_root("foreign/text"), "this is my diary\n");
  put(in_root("foreign/short"), "dlock1 0000000000000000");
  put(in_root("foreign/many"), "");
  CHECK(!link(in_root("foreign/many"), in_root("foreign/names")));
  const char *bad[] = {"sym", "dir", "fifo", "text", "short", "many"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) CHECK(refused(&c, bad[i], DLOCK_E_FOREIGN));

  /* Another key's file under this name, and a counter that cannot be. */
  struct dlk_grant *g = grant("mine");
  hold(&c, g);
  CHECK(release(&c, g) == DLK_DONE);
  grant_free(&c, g);
  CHECK(!rename(in_root("foreign/mine"), in_root("foreign/yours")));
  CHECK(refused(&c, "yours", DLOCK_E_FOREIGN));
  int fd = open(in_root("foreign/yours"), O_RDWR);
  struct dlk_record r = {.token = 0, .owner = "", .key = "yours", .key_len = 5};
  CHECK(!dlk_record_write(fd, &r) && pwrite(fd, "99999999999999999999", 20, 7) == 20);
  CHECK(refused(&c, "yours", DLOCK_E_FOREIGN));
  r.token = DLK_FILE_TOKEN_MAX;
  CHECK(!dlk_record_write(fd, &r) && refused(&c, "yours", DLOCK_E_FOREIGN));
  r.token = DLK_FILE_TOKEN_MAX - 1;
  CHECK(!dlk_record_write(fd, &r));
  g = grant("yours");
  CHECK(acquire(&c, g, 0) && g->items[0].token == DLK_FILE_TOKEN_MAX);
  grant_free(&c, g);
  close(fd);
  close_client(&c);
}

/* A write cut short leaves a counter that still counts. */
static void test_torn_record(void) {
  struct dlk_client c;
  char key[300];
  memset(key, 'k', 150);
  key[150] = 0;
  open_client(&c, in_root("torn"));
  struct dlk_grant *g = grant(key);
  uint64_t far = dlk_wall_100us() + 36000000;
  char path[400];
  snprintf(path, sizeof path, "%s/torn/%s", root, key);
  int fd = open(path, O_RDWR | O_CREAT, 0600);
  struct dlk_record r = {.token = far, .owner = "", .key = key, .key_len = 150};
  CHECK(!dlk_record_write(fd, &r) && !ftruncate(fd, DLK_FILE_HEAD + DLK_FILE_OWNER + 1 + 70));
  CHECK(acquire(&c, g, 0) && g->items[0].token == far + 1);
  CHECK(release(&c, g) == DLK_DONE);
  grant_free(&c, g);
  close(fd);
  close_client(&c);
  L.top_token = 0; /* it ran ahead on purpose */
}

enum { PROCS = 4, ROUNDS = 300 };
struct shared {
  volatile long counter;
  volatile uint64_t last;
  volatile int inside, overlaps, falls, stop;
};

static void kid_count(int in, int out, void *arg) {
  struct shared *m = arg;
  struct dlk_client c;
  (void)in;
  open_client(&c, in_root("count"));
  for (int i = 0; i < ROUNDS; i++) {
    struct dlk_grant *g = grant("k");
    CHECK(acquire(&c, g, 20000));
    t_local_backend.guard(c.self, g, true);
    if (m->inside++) m->overlaps++;
    if (g->items[0].token <= m->last) m->falls++;
    m->last = g->items[0].token;
    long v = m->counter;
    if (i % 16 == 0) sched_yield();
    m->counter = v + 1;
    m->inside--;
    CHECK(release(&c, g) == DLK_DONE);
    grant_free(&c, g);
  }
  kid_say(out, 'd');
}

static struct shared *shared_new(void) {
  struct shared *m =
      mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return m;
}

static void test_exclusion(void) {
  struct shared *m = shared_new();
  struct child k[PROCS];
  for (int i = 0; i < PROCS; i++) k[i] = spawn(kid_count, m);
  for (int i = 0; i < PROCS; i++) CHECK(kid_hear(k[i].hear) == 'd');
  for (int i = 0; i < PROCS; i++) CHECK(reap(&k[i], 0) == 0);
  CHECK(m->counter == (long)PROCS * ROUNDS && !m->overlaps && !m->falls);
  munmap(m, sizeof *m);
}

/* Two processes take and free a key while a third sweeps all the time files that
 * it has made look old. */
static void kid_sweep(int in, int out, void *arg) {
  struct shared *m = arg;
  (void)in;
  while (!m->stop) {
    struct dlk_client c;
    open_client(&c, in_root("count"));
    make_old(in_root("count/k"));
    struct lc_walk *w = lc_walk_new(c.self);
    while (w && lc_walk_step(w, 64))
      ;
    if (w) lc_walk_free(w);
    close_client(&c);
  }
  kid_say(out, 'd');
}

static void test_sweep_race(void) {
  struct shared *m = shared_new();
  struct child a = spawn(kid_count, m), b = spawn(kid_count, m), s = spawn(kid_sweep, m);
  CHECK(kid_hear(a.hear) == 'd' && kid_hear(b.hear) == 'd');
  m->stop = 1;
  CHECK(kid_hear(s.hear) == 'd');
  CHECK(reap(&a, 0) == 0 && reap(&b, 0) == 0 && reap(&s, 0) == 0);
  CHECK(m->counter == 2L * ROUNDS && !m->overlaps && !m->falls);
  munmap(m, sizeof *m);
}

static bool list_has(const char *dir, const char *file) {
  char path[400];
  snprintf(path, sizeof path, "%s/%s/%s", root, dir, file);
  return exists(path);
}

static void sweep_now(struct dlk_client *c) {
  struct lc_walk *w = lc_walk_new(c->self);
  while (lc_walk_step(w, 3))
    ;
  lc_walk_free(w);
}

static void test_sweep(void) {
  static const char *const names[] = {"old", "new", "held", "ahead", "diary", "empty"};
  struct dlk_client c;
  char path[400];
  open_client(&c, in_root("sweep"));
  struct dlk_grant *g[6];
  for (int i = 0; i < 4; i++) {
    g[i] = grant(names[i]);
    hold(&c, g[i]);
    if (i != 2) CHECK(release(&c, g[i]) == DLK_DONE);
  }
  int fd = open(in_root("sweep/ahead"), O_RDWR);
  struct dlk_record r = {
      .token = dlk_wall_100us() + 36000000, .owner = "", .key = "ahead", .key_len = 5};
  CHECK(!dlk_record_write(fd, &r));
  close(fd);
  put(in_root("sweep/diary"), "dear diary\n");
  put(in_root("sweep/empty"), "");
  for (int i = 0; i < 6; i++) {
    snprintf(path, sizeof path, "%s/sweep/%s", root, names[i]);
    if (i != 1) make_old(path);
  }
  sweep_now(&c);
  CHECK(!list_has("sweep", "old") && list_has("sweep", "new") && list_has("sweep", "held"));
  CHECK(list_has("sweep", "ahead") && list_has("sweep", "diary") && list_has("sweep", "empty"));
  CHECK(verb(&c, DLK_RENEW, g[2]).out == DLK_DONE);
  /* What is held is touched, and so never looks old. */
  on_loop(touch_now, &L.touch);
  struct stat st;
  CHECK(!lstat(in_root("sweep/held"), &st) && time(NULL) - st.st_mtime < 100);
  CHECK(release(&c, g[2]) == DLK_DONE);
  for (int i = 0; i < 4; i++) grant_free(&c, g[i]);
  close_client(&c);
}

/* A client sweeps at its first acquire, but not again within the hour. */
static void test_sweep_hourly(void) {
  struct dlk_client c;
  for (int round = 0; round < 2; round++) {
    open_client(&c, in_root("hourly"));
    struct dlk_grant *g = grant("stale"), *h = grant("other");
    hold(&c, g);
    CHECK(release(&c, g) == DLK_DONE);
    make_old(in_root("hourly/stale"));
    unlink(in_root("hourly/" DLK_FILE_SWEPT));
    if (round) put(in_root("hourly/" DLK_FILE_SWEPT), "");
    ((struct lc_self *)c.self)->sweep_due = 0;
    hold(&c, h);
    for (int i = 0; i < 1000 && (round ? i < 50 : exists(in_root("hourly/stale"))); i++)
      lc_nap_us(2000);
    CHECK(exists(in_root("hourly/stale")) == (round == 1));
    CHECK(release(&c, h) == DLK_DONE);
    grant_free(&c, g);
    grant_free(&c, h);
    close_client(&c);
  }
}

static void test_kill_frees(void) {
  struct dlk_client c;
  char *dir = in_root("kill");
  open_client(&c, dir);
  for (int i = 0; i < 10; i++) {
    struct child k = spawn(kid_hold, dir);
    struct dlk_grant *g = grant("k");
    CHECK(kid_hear(k.hear) == 'h');
    CHECK(!acquire(&c, g, 0));
    struct dlk_waiter *w = wait_begin(&c, g);
    wait_watched(w);
    unsigned wakes = wakes_of(&c);
    kill(k.pid, SIGKILL);
    CHECK(wait_end(w, 20000) && wakes_of(&c) > wakes); /* by the event, not by the slow poll */
    reap(&k, SIGKILL);
    CHECK(release(&c, g) == DLK_DONE);
    grant_free(&c, g);
  }
  close_client(&c);
}

static void test_release_wakes(void) {
  struct dlk_client c;
  char *dir = in_root("wake");
  open_client(&c, dir);
  struct child k = spawn(kid_hold, dir);
  struct dlk_grant *g = grant("k");
  CHECK(kid_hear(k.hear) == 'h');
  CHECK(!acquire(&c, g, 0));
  struct dlk_waiter *w = wait_begin(&c, g);
  wait_watched(w);
  unsigned wakes = wakes_of(&c);
  kid_say(k.say, 'g');
  CHECK(wait_end(w, 20000) && wakes_of(&c) > wakes);
  CHECK(kid_hear(k.hear) == 'r' && reap(&k, 0) == 0);
  CHECK(release(&c, g) == DLK_DONE);
  grant_free(&c, g);
  close_client(&c);
}

/* Waiters of one process: one event for a release; their own opening, giving up
 * and closing does not set them off in a circle. */
static void test_waiters_are_quiet(void) {
  enum { N = 5 };
  struct dlk_client h, c[N];
  struct dlk_grant *g = grant("k"), *gs[N];
  struct dlk_waiter *w[N];
  open_client(&h, in_root("quiet"));
  hold(&h, g);
  for (int i = 0; i < N; i++) {
    open_client(&c[i], in_root("quiet"));
    gs[i] = grant("k");
    w[i] = wait_begin(&c[i], gs[i]);
  }
  for (int i = 0; i < N; i++) wait_watched(w[i]);
  CHECK(!wait_end(w[N - 1], 0)); /* gives up: its close wakes the others once */
  grant_free(&c[N - 1], gs[N - 1]);
  lc_nap_us(500000);
  for (int i = 0; i < N - 1; i++) {
    pthread_mutex_lock(&tm);
    CHECK(c[i].tries >= 8 && c[i].tries <= 20 && c[i].wakes <= 6);
    pthread_mutex_unlock(&tm);
  }
  CHECK(release(&h, g) == DLK_DONE);
  uint64_t last = g->items[0].token;
  for (int left = N - 1; left > 0; left--) { /* one after another */
    int won = -1;
    for (int t = 0; t < 2000 && won < 0; t++) {
      pthread_mutex_lock(&tm);
      for (int i = 0; i < N - 1; i++)
        if (w[i] && w[i]->ended) won = i;
      pthread_mutex_unlock(&tm);
      lc_nap_us(1000);
    }
    CHECK(won >= 0);
    if (won < 0) break;
    CHECK(wait_end(w[won], 20000) && gs[won]->items[0].token > last);
    last = gs[won]->items[0].token;
    w[won] = NULL;
    CHECK(release(&c[won], gs[won]) == DLK_DONE);
  }
  for (int i = 0; i < N - 1; i++) {
    if (w[i]) wait_end(w[i], 0);
    grant_free(&c[i], gs[i]);
  }
  for (int i = 0; i < N; i++) close_client(&c[i]);
  grant_free(&h, g);
  close_client(&h);
}

/* Removed, moved, replaced: the holder hears of it at once. */
static void test_gone(void) {
  struct dlk_client c, d;
  open_client(&c, in_root("gone"));
  open_client(&d, in_root("gone"));
  for (int how = 0; how < 4; how++) {
    struct dlk_grant *g = grant("k"), *h = grant("k");
    hold(&c, g);
    CHECK(!acquire(&d, h, 0));
    struct dlk_waiter *w = wait_begin(&d, h);
    wait_watched(w);
    unsigned wakes = wakes_of(&d);
    if (how == 0) CHECK(!unlink(in_root("gone/k")));
    if (how == 1) CHECK(!rename(in_root("gone/k"), in_root("gone/elsewhere")));
    if (how == 2) put(in_root("gone/new"), "");
    if (how == 2) CHECK(!rename(in_root("gone/new"), in_root("gone/k")));
    if (how == 3) {
      struct answer a = ask(&d, DLK_BREAK, "k", 1);
      CHECK(!a.err && a.info->found && a.info->token == g->items[0].token);
      dlk_info_free(a.info);
    }
    CHECK(saw_gone(&c, (unsigned)how + 1, 20000) && strstr(c.gone_msg, "gone/k"));
    CHECK(wait_end(w, 20000) && wakes_of(&d) > wakes);
    CHECK(h->items[0].token > g->items[0].token);
    CHECK(verb(&c, DLK_RENEW, g).out == DLK_GONE && release(&c, g) == DLK_GONE);
    CHECK(release(&d, h) == DLK_DONE);
    grant_free(&c, g);
    grant_free(&d, h);
  }
  close_client(&c);
  close_client(&d);
}

/* The counter survives a break even when it is ahead of the clock. */
static void test_break_keeps_counter(void) {
  struct dlk_client c;
  open_client(&c, in_root("counter"));
  struct dlk_grant *g = grant("k"), *h = grant("k");
  hold(&c, g);
  CHECK(release(&c, g) == DLK_DONE);
  uint64_t far = dlk_wall_100us() + 36000000;
  int fd = open(in_root("counter/k"), O_RDWR);
  struct dlk_record r = {.token = far, .owner = "", .key = "k", .key_len = 1};
  CHECK(!dlk_record_write(fd, &r));
  close(fd);
  hold(&c, g);
  CHECK(g->items[0].token == far + 1);
  L.top_token = 0; /* as another process would see it */
  struct answer a = ask(&c, DLK_BREAK, "k", 1);
  CHECK(!a.err && a.info->found);
  dlk_info_free(a.info);
  CHECK(saw_gone(&c, 1, 20000));
  CHECK(acquire(&c, h, 0) && h->items[0].token == far + 2);
  /* The same process never repeats itself, even when the file is removed. */
  CHECK(!unlink(in_root("counter/k")));
  struct dlk_grant *i = grant("k");
  CHECK(acquire(&c, i, 0) && i->items[0].token > far + 2);
  /* A waiter takes over the counter that it saw in the file that went. */
  struct dlk_grant *w = grant("k");
  CHECK(!acquire(&c, w, 0));
  L.top_token = 0;
  CHECK(!unlink(in_root("counter/k")));
  CHECK(acquire(&c, w, 0) && w->items[0].token > i->items[0].token);
  grant_free(&c, w);
  grant_free(&c, g);
  grant_free(&c, h);
  grant_free(&c, i);
  close_client(&c);
  L.top_token = 0;
}

static void test_dir_replaced(void) {
  struct dlk_client c, d;
  struct dlk_grant *g = grant("k"), *h = grant("k"), *i = grant("k");
  open_client(&c, in_root("moved"));
  hold(&c, g);
  CHECK(!rename(in_root("moved"), in_root("moved-away")));
  CHECK(verb(&c, DLK_RENEW, g).out == DLK_GONE);
  open_client(&d, in_root("moved"));
  CHECK(acquire(&d, h, 0));
  CHECK(!acquire(&c, i, 0)); /* it follows to where the others are now */
  CHECK(release(&d, h) == DLK_DONE && acquire(&c, i, 0));
  CHECK(release(&c, i) == DLK_DONE && !unlink(in_root("moved/k")));
  unlink(in_root("moved/" DLK_FILE_SWEPT));
  CHECK(!rmdir(in_root("moved")));
  CHECK(acquire(&c, i, 0) && exists(in_root("moved/k")));
  grant_free(&c, g);
  grant_free(&d, h);
  grant_free(&c, i);
  close_client(&c);
  close_client(&d);
}

static void test_hand_over(void) {
  struct dlk_client c;
  open_client(&c, in_root("hand"));
  struct dlk_grant *g = grant("k"), *h = grant("k"), *x = grant("k");
  hold(&c, g);
  CHECK(!acquire(&c, h, 0)); /* the heir has the file open already */
  struct dlk_grant *gs[1] = {g};
  struct dlk_call call = {.verb = DLK_HAND_OVER, .grants = gs, .n = 1, .heir = h};
  t_local_backend.guard(c.self, g, false);
  struct answer a = run(&c, &call);
  CHECK(!a.err && a.out == DLK_DONE && h->items[0].token > g->items[0].token);
  t_local_backend.guard(c.self, h, true);
  CHECK(!acquire(&c, x, 0));
  a = ask(&c, DLK_INSPECT, "k", 1);
  CHECK(a.info->found && a.info->token == h->items[0].token);
  dlk_info_free(a.info);
  CHECK(verb(&c, DLK_RENEW, h).out == DLK_DONE && verb(&c, DLK_RENEW, g).out == DLK_GONE);
  CHECK(verb(&c, DLK_RELEASE, g).out == DLK_GONE && verb(&c, DLK_RENEW, h).out == DLK_DONE);
  CHECK(!unlink(in_root("hand/k")) && saw_gone(&c, 1, 20000));
  gs[0] = h;
  call = (struct dlk_call){.verb = DLK_HAND_OVER, .grants = gs, .n = 1, .heir = x};
  CHECK(run(&c, &call).out == DLK_GONE);
  CHECK(release(&c, h) == DLK_GONE);
  grant_free(&c, g);
  grant_free(&c, h);
  grant_free(&c, x);
  close_client(&c);
}

/* A release frees and wakes even while somebody keeps a duplicate. */
static void test_hold_fd(void) {
  struct dlk_client c, d;
  open_client(&c, in_root("lent"));
  open_client(&d, in_root("lent"));
  struct dlk_grant *g = grant("k"), *h = grant("k");
  hold(&c, g);
  int fd = t_local_backend.hold_fd(g);
  CHECK(fd >= 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC));
  CHECK(!acquire(&d, h, 0) && t_local_backend.hold_fd(h) < 0);
  struct dlk_waiter *w = wait_begin(&d, h);
  wait_watched(w);
  unsigned wakes = wakes_of(&d);
  CHECK(release(&c, g) == DLK_DONE);
  CHECK(wait_end(w, 20000) && wakes_of(&d) > wakes);
  CHECK(release(&d, h) == DLK_DONE);
  close(fd);
  grant_free(&c, g);
  grant_free(&d, h);
  close_client(&c);
  close_client(&d);
}

/* Holds, forks a child that sleeps, and is killed: the lock must be free. */
static void kid_fork(int in, int out, void *arg) {
  struct dlk_client c;
  struct dlk_grant *g = grant("k");
  open_client(&c, arg);
  hold(&c, g);
  if (fork() == 0) {
    close(out);
    kid_hear(in);
    _exit(0);
  }
  kid_say(out, 'h');
  for (;;) pause();
}

static void test_fork(void) {
  struct dlk_client c;
  char *dir = in_root("fork");
  open_client(&c, dir);
  struct dlk_grant *g = grant("k");
  struct child k = spawn(kid_fork, dir);
  CHECK(kid_hear(k.hear) == 'h' && !acquire(&c, g, 0));
  kill(k.pid, SIGKILL);
  CHECK(acquire(&c, g, 20000));
  t_local_backend.guard(c.self, g, true);

  /* A child that exits, and one that locks something itself, leave it ours. */
  fflush(NULL);
  pid_t pid = fork();
  if (!pid) {
    struct dlk_client d;
    struct dlk_grant *h = grant("k"), *i = grant("other");
    open_client(&d, dir);
    CHECK(L.ino < 0 && t_local_backend.hold_fd(g) < 0);
    CHECK(verb(&d, DLK_RELEASE, g).out == DLK_GONE);
    CHECK(!acquire(&d, h, 0));
    hold(&d, i);
    CHECK(!unlink(in_root("fork/other")) && saw_gone(&d, 1, 20000));
    CHECK(release(&d, i) == DLK_GONE);
    _exit(test_failed ? 1 : 0);
  }
  int st = -1;
  waitpid(pid, &st, 0);
  CHECK(st == 0);
  CHECK(verb(&c, DLK_RENEW, g).out == DLK_DONE);
  CHECK(!unlink(in_root("fork/k")) && saw_gone(&c, 1, 20000)); /* inotify still works here */
  CHECK(release(&c, g) == DLK_GONE);
  reap(&k, SIGKILL);
  grant_free(&c, g);
  close_client(&c);
}

/* A full disk: the acquire fails, and the lock is free again. */
static void test_full_disk(void) {
  char *dir = in_root("full");
  if (mkdir(dir, 0700) || mount("dlock", dir, "tmpfs", 0, "size=8k")) {
    printf("skipped: full disk (cannot mount a tmpfs)\n");
    return;
  }
  struct dlk_client c;
  open_client(&c, dir);
  int fd = open(in_root("full/ballast"), O_RDWR | O_CREAT, 0600);
  char page[4096] = {0};
  while (write(fd, page, sizeof page) > 0)
    ;
  struct dlk_grant *g = grant("k");
  struct answer a = verb(&c, DLK_ACQUIRE, g);
  CHECK(a.err == DLOCK_E_UNAVAILABLE && strstr(a.msg, "full/k") && g->items[0].token == 0);
  int k = open(in_root("full/k"), O_RDONLY);
  CHECK(dlk_file_is_locked(k) == 0);
  close(k);
  CHECK(!ftruncate(fd, 0));
  close(fd);
  CHECK(acquire(&c, g, 0) && release(&c, g) == DLK_DONE);
  grant_free(&c, g);
  close_client(&c);
  umount2(dir, MNT_DETACH);
}

/* No inotify instance is to be had: waiters poll, and one notice says so. */
static void test_blind(void) {
  struct dlk_client c, d;
  open_client(&c, in_root("blind"));
  open_client(&d, in_root("blind"));
  no_inotify = true;
  struct dlk_grant *g = grant("k"), *h = grant("k");
  hold(&c, g);
  struct dlk_waiter *w = wait_begin(&d, h);
  lc_nap_us(300000);
  CHECK(release(&c, g) == DLK_DONE);
  CHECK(wait_end(w, 20000));
  CHECK(c.notices == 1 && d.notices == 1 && d.tries >= 5 && d.wakes == 1);
  CHECK(release(&d, h) == DLK_DONE);
  no_inotify = false;
  hold(&c, g);
  CHECK(!unlink(in_root("blind/k")) && saw_gone(&c, 1, 20000)); /* it is tried again each time */
  CHECK(release(&c, g) == DLK_GONE);
  grant_free(&c, g);
  grant_free(&d, h);
  close_client(&c);
  close_client(&d);
}

static void list_done(struct dlk_call *call) {
  pthread_mutex_lock(&tm);
  *(bool *)call->ctx = true;
  pthread_cond_broadcast(&tc);
  pthread_mutex_unlock(&tm);
}

static void list_start(void *arg) {
  struct dlk_call *call = arg;
  t_local_backend.start(call->client->self, call);
}

/* On the loop a big directory is read in slices; the call ends later. */
static size_t list_on_loop(struct dlk_client *c, const char *prefix) {
  bool done = false;
  enum dlk_outcome out[1] = {DLK_UNKNOWN};
  struct dlk_call call = {.verb = DLK_LIST,
                          .client = c,
                          .out = out,
                          .key = prefix,
                          .key_len = strlen(prefix),
                          .done = list_done,
                          .ctx = &done};
  on_loop(list_start, &call);
  pthread_mutex_lock(&tm);
  while (!done) pthread_cond_wait(&tc, &tm);
  pthread_mutex_unlock(&tm);
  size_t n = call.info->n;
  CHECK(!call.err && out[0] == DLK_DONE);
  dlk_info_free(call.info);
  return n;
}

static void test_many(void) {
  enum { N = 2000 };
  static struct dlk_grant *g[N];
  struct dlk_client c;
  char key[32];
  open_client(&c, in_root("many"));
  for (int i = 0; i < N; i++) {
    sprintf(key, "k/%d", i);
    g[i] = grant(key);
    hold(&c, g[i]);
  }
  struct answer a = ask(&c, DLK_LIST, "k/19", 4);
  CHECK(!a.err && a.info->n == 111 && list_on_loop(&c, "k/19") == 111);
  dlk_info_free(a.info);
  for (int i = 0; i < N; i += 2) {
    sprintf(key, "many/k%%2F%d", i);
    unlink(in_root(key));
  }
  CHECK(saw_gone(&c, N / 2, 20000));
  for (int i = 0; i < N; i++) {
    CHECK(release(&c, g[i]) == (i % 2 ? DLK_DONE : DLK_GONE));
    grant_free(&c, g[i]);
  }
  close_client(&c);
}

/* Threads of one process acquire, give up and close at random. */
static void *churn(void *arg) {
  unsigned seed = (unsigned)(size_t)arg;
  struct dlk_client c;
  open_client(&c, in_root("churn"));
  for (int i = 0; i < 150; i++) {
    char key[2] = {(char)('a' + rand_r(&seed) % 3), 0};
    struct dlk_grant *g = grant(key);
    if (acquire(&c, g, rand_r(&seed) % 4)) {
      t_local_backend.guard(c.self, g, true);
      if (rand_r(&seed) % 8 == 0) {
        char path[16] = "churn/";
        strcat(path, key);
        char full[100];
        snprintf(full, sizeof full, "%s/%s", root, path);
        unlink(full);
      }
      release(&c, g);
    }
    grant_free(&c, g);
  }
  close_client(&c);
  return NULL;
}

static void test_churn(void) {
  pthread_t t[3];
  for (size_t i = 0; i < 3; i++) pthread_create(&t[i], NULL, churn, (void *)(i + 1));
  for (size_t i = 0; i < 3; i++) pthread_join(t[i], NULL);
}

static int remove_tree(const char *path) {
  char cmd[200];
  snprintf(cmd, sizeof cmd, "rm -rf -- '%s'", path);
  return system(cmd);
}

int main(void) {
  static const struct {
    const char *name;
    void (*run)(void);
  } tests[] = {{"life", test_life},
               {"shapes", test_refused_shapes},
               {"names", test_names},
               {"urls", test_urls},
               {"private", test_private_dir},
               {"shared", test_shared_dir},
               {"foreign", test_foreign},
               {"torn", test_torn_record},
               {"exclusion", test_exclusion},
               {"sweep race", test_sweep_race},
               {"sweep", test_sweep},
               {"hourly", test_sweep_hourly},
               {"kill", test_kill_frees},
               {"wake", test_release_wakes},
               {"quiet", test_waiters_are_quiet},
               {"gone", test_gone},
               {"counter", test_break_keeps_counter},
               {"moved", test_dir_replaced},
               {"hand over", test_hand_over},
               {"lent", test_hold_fd},
               {"fork", test_fork},
               {"full", test_full_disk},
               {"blind", test_blind},
               {"many", test_many},
               {"churn", test_churn}};
  signal(SIGPIPE, SIG_IGN);
  strcpy(root, "/tmp/dlock-local-XXXXXX");
  if (!mkdtemp(root)) return 2;
  int fds = 0;
  for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
    int failed = test_failed;
    tests[i].run();
    if (test_failed != failed) fprintf(stderr, "in: %s\n", tests[i].name);
    if (i == 0) fds = count_fds(); /* the loop's own are there from now on */
    CHECK(count_fds() == fds);
  }
  CHECK(!remove_tree(root));
  return DONE();
}
