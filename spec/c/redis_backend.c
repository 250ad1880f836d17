/* The Redis backend against a real server (and against servers that are none),
 * call by call: on a lane that this thread drives, and on the loop. Linked with
 * the whole core, as every program here; its calls are its own. Starts its
 * servers itself: redis-server must be in the PATH. */
#include <stdio.h>

#include "test.h"

#ifndef DLK_WITH_REDIS
int main(void) { return DONE(); }
#else
#include <errno.h>
#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lock.h"

enum { BOUND_MS = 10000 };

/* ---- a server of our own ---- */

struct server {
  pid_t pid;
  int port;
  char dir[64], sock[96];
  redisContext *c; /* for looking and meddling */
};

static int listen_any(int *port) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 16) ||
      getsockname(fd, (struct sockaddr *)&a, &len)) {
    perror("listen");
    exit(1);
  }
  *port = ntohs(a.sin_port);
  return fd;
}

static void server_exec(const struct server *s) {
  char port[16];
  snprintf(port, sizeof port, "%d", s->port);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  execlp("redis-server", "redis-server", "--port", port, "--bind", "127.0.0.1", "--unixsocket",
         s->sock, "--dir", s->dir, "--save", "", "--appendonly", "no", "--logfile", "log",
         (char *)NULL);
  perror("redis-server");
  _exit(127);
}

static void server_connect(struct server *s) {
  int64_t until = dlk_now_ms() + BOUND_MS;
  do {
    if (s->c)
      redisFree(s->c);
    s->c = redisConnect("127.0.0.1", s->port);
    redisReply *r = s->c && !s->c->err ? redisCommand(s->c, "PING") : NULL;
    bool up = r && r->type == REDIS_REPLY_STATUS;
    if (r)
      freeReplyObject(r);
    if (up)
      return;
    usleep(10000);
  } while (dlk_now_ms() < until);
  fprintf(stderr, "redis-server did not start\n");
  exit(1);
}

static void server_fork(struct server *s) {
  s->pid = fork();
  if (s->pid == 0)
    server_exec(s);
  server_connect(s);
}

static void server_start(struct server *s) {
  memset(s, 0, sizeof *s);
  strcpy(s->dir, "/tmp/dlock-c-XXXXXX");
  if (!mkdtemp(s->dir)) {
    perror("mkdtemp");
    exit(1);
  }
  snprintf(s->sock, sizeof s->sock, "%s/sock", s->dir);
  close(listen_any(&s->port));
  server_fork(s);
}

static void server_kill(struct server *s) {
  kill(s->pid, SIGCONT);
  kill(s->pid, SIGKILL);
  waitpid(s->pid, NULL, 0);
}

static void server_stop(struct server *s) {
  char cmd[128];
  server_kill(s);
  redisFree(s->c);
  snprintf(cmd, sizeof cmd, "rm -r %s", s->dir);
  if (system(cmd))
    fprintf(stderr, "not removed: %s\n", s->dir);
}

static redisReply *ask(struct server *s, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  redisReply *r = redisvCommand(s->c, fmt, ap);
  va_end(ap);
  if (!r || r->type == REDIS_REPLY_ERROR) {
    fprintf(stderr, "%s: %s\n", fmt, r ? r->str : s->c->errstr);
    exit(1);
  }
  return r;
}

static void tell(struct server *s, const char *cmd) { freeReplyObject(ask(s, cmd)); }

static long long number(struct server *s, const char *fmt, const char *key, size_t len) {
  redisReply *r = ask(s, fmt, key, len);
  long long v = r->type == REDIS_REPLY_INTEGER ? r->integer : r->str ? atoll(r->str) : -99;
  freeReplyObject(r);
  return v;
}

static bool exists(struct server *s, const char *key) {
  return number(s, "EXISTS %b", key, strlen(key)) == 1;
}

/* ---- calls of our own ---- */

static pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

struct tcall {
  struct dlk_call call;
  struct dlk_grant *grants[64];
  enum dlk_outcome out[64];
  int64_t ttl[64];
  int64_t timeout;
  bool ended, was_late;
  enum dlock_err late_err;
};

static void call_done(struct dlk_call *call) {
  struct tcall *t = (struct tcall *)call;
  pthread_mutex_lock(&m);
  if (call->in_flight) {
    t->was_late = true;
    t->late_err = call->err;
  } else
    t->ended = true;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&m);
}

static struct tcall *new_call(struct dlk_client *c, enum dlk_verb verb) {
  struct tcall *t = calloc(1, sizeof *t);
  dlk_enter();
  struct dlk_call *blank = dlk_call_new(c, verb, 0); /* for the timer that call.c sets up */
  t->call = *blank;
  t->call.info = NULL;
  t->call.grants = t->grants;
  t->call.out = t->out;
  t->call.ttl_ms = t->ttl;
  t->call.done = call_done;
  t->timeout = 5000;
  dlk_call_free(blank);
  dlk_leave();
  return t;
}

static void with_grant(struct tcall *t, struct dlk_grant *g) {
  t->ttl[t->call.n] = g->ttl_ms;
  t->grants[t->call.n++] = g;
}

static void call_free(struct tcall *t) {
  dlk_info_free(t->call.info);
  free(t);
}

static bool wait_flag(const bool *flag) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += BOUND_MS / 1000;
  pthread_mutex_lock(&m);
  while (!*flag && !pthread_cond_timedwait(&changed, &m, &until))
    ;
  bool set = *flag;
  pthread_mutex_unlock(&m);
  return set;
}

static void start_on_loop(struct dlk_task *task) {
  struct tcall *t = (struct tcall *)((char *)task - offsetof(struct dlk_call, task));
  dlk_call_start(&t->call, NULL, t->timeout);
}

/* Where the calls of a test run. NULL lane: the loop. */
struct place {
  struct dlk_client *c;
  struct dlk_lane *lane;
};

static void run(struct place *p, struct tcall *t) {
  if (!p->lane) {
    t->call.task.run = start_on_loop;
    dlk_post(&t->call.task);
    wait_flag(&t->ended);
    return;
  }
  int64_t until = dlk_now_ms() + BOUND_MS;
  p->lane->call = &t->call;
  dlk_call_start(&t->call, p->lane, t->timeout);
  while (!t->ended && !t->call.late && dlk_now_ms() < until)
    dlk_poller_turn(&p->lane->p, until);
}

static struct dlk_client *client_at(const char *url, const char *ns, const char *user,
                                    const char *password) {
  struct dlock_config cfg = {.url = url, .ns = ns, .ns_len = ns ? strlen(ns) : 0, .owner = "tester",
                             .username = user, .password = password,
                             .ttl_ms = 10000, .timeout_ms = 2000, .connect_timeout_ms = 2000};
  struct dlk_client *c = NULL;
  bool bad;
  char msg[DLOCK_MSG_MAX];
  if (dlock_client_open(&cfg, &c, &bad, msg))
    fprintf(stderr, "%s: %s\n", url, msg);
  return c;
}

static struct dlk_client *client(int port) {
  char url[64];
  snprintf(url, sizeof url, "redis://127.0.0.1:%d", port);
  return client_at(url, NULL, NULL, NULL);
}

static struct dlk_lane *take_lane(struct dlk_client *c) {
  dlk_enter();
  struct dlk_lane *l = dlk_lane_take(c);
  dlk_leave();
  return l;
}

static void put_lane(struct dlk_lane *l) {
  dlk_enter();
  dlk_lane_put(l);
  dlk_leave();
}

/* ---- grants ---- */

/* Inside a lock, since the core may poke the lock of a late call. */
struct tgrant {
  struct dlk_lock l;
  char owner[128];
};

static void nothing(struct dlk_task *t) { (void)t; }

static void grant(struct tgrant *t, const char *key, size_t len, int64_t ttl) {
  unsigned char r[16];
  memset(t, 0, sizeof *t);
  t->l.refs = 1;
  t->l.task.run = nothing;
  t->l.item = (struct dlk_item){.name = (char *)key, .len = len, .limit = 1};
  t->l.g = (struct dlk_grant){.items = &t->l.item, .n = 1, .owner = t->owner, .ttl_ms = ttl};
  dlk_random(r, sizeof r);
  strcpy(t->owner, "dlock1:");
  for (size_t i = 0; i < sizeof r; i++)
    snprintf(t->owner + 7 + 2 * i, 3, "%02x", r[i]);
  strcat(t->owner, ":label");
  t->l.g.owner_len = strlen(t->owner);
}

struct result {
  enum dlock_err err;
  enum dlk_outcome out;
  int64_t sent, retry, holder_ttl;
  char holder[256], msg[DLOCK_MSG_MAX];
};

static struct result once(struct place *p, enum dlk_verb verb, struct tgrant *g) {
  struct tcall *t = new_call(p->c, verb);
  with_grant(t, &g->l.g);
  run(p, t);
  CHECK(t->ended);
  struct result r = {
      t->call.err, t->out[0], t->call.sent_ms, t->call.retry_ms, t->call.holder_ttl_ms, "", ""};
  strcpy(r.holder, t->call.holder);
  strcpy(r.msg, t->call.msg);
  if (r.err && getenv("SHOW"))
    fprintf(stderr, "   %s: %s\n", dlock_err_code(r.err), r.msg);
  call_free(t);
  return r;
}

static struct tcall *query(struct place *p, enum dlk_verb verb, const char *key) {
  struct tcall *t = new_call(p->c, verb);
  t->call.key = key;
  t->call.key_len = strlen(key);
  run(p, t);
  CHECK(t->ended);
  if (t->call.err && getenv("SHOW"))
    fprintf(stderr, "   %s: %s\n", dlock_err_code(t->call.err), t->call.msg);
  return t;
}

/* ---- what a lock goes through ---- */

static void test_basics(struct server *s, struct place *p) {
  static const char key[] = "k\0ey\xff";
  struct tgrant a, b;
  tell(s, "FLUSHALL");
  grant(&a, key, sizeof key - 1, 10000);
  grant(&b, key, sizeof key - 1, 5000);
  struct result r = once(p, DLK_ACQUIRE, &a);
  CHECK(!r.err && r.out == DLK_DONE && r.sent > 0);
  uint64_t first = a.l.item.token;
  CHECK(first > 10000000000000u && first < 100000000000000u);
  r = once(p, DLK_ACQUIRE, &b);
  CHECK(!r.err && r.out == DLK_BUSY && !strcmp(r.holder, a.owner));
  CHECK(r.holder_ttl > 9000 && r.holder_ttl <= 10000 && r.retry > 0 && r.retry <= 1000);
  CHECK(!b.l.g.queued);
  r = once(p, DLK_ACQUIRE, &a); /* as after a lost reply */
  CHECK(!r.err && r.out == DLK_DONE && a.l.item.token > first);
  CHECK(once(p, DLK_RENEW, &b).out == DLK_TAKEN);
  CHECK(once(p, DLK_RELEASE, &b).out == DLK_TAKEN);
  a.l.g.ttl_ms = 50000;
  CHECK(once(p, DLK_RENEW, &a).out == DLK_DONE);
  CHECK(number(s, "PTTL %b", key, sizeof key - 1) > 45000);
  CHECK(once(p, DLK_RELEASE, &a).out == DLK_DONE);
  CHECK(once(p, DLK_RELEASE, &a).out == DLK_GONE);
  CHECK(once(p, DLK_RENEW, &a).out == DLK_GONE);
  tell(s, "FLUSHALL");
  first = a.l.item.token;
  CHECK(once(p, DLK_ACQUIRE, &b).out == DLK_DONE && b.l.item.token > first);
  CHECK(once(p, DLK_RELEASE, &b).out == DLK_DONE);
}

static void test_scripts_lost(struct server *s, struct place *p) {
  struct tgrant g;
  grant(&g, "noscript", 8, 10000);
  tell(s, "SCRIPT FLUSH");
  CHECK(once(p, DLK_ACQUIRE, &g).out == DLK_DONE);
  tell(s, "SCRIPT FLUSH");
  CHECK(once(p, DLK_RENEW, &g).out == DLK_DONE);
  tell(s, "SCRIPT FLUSH");
  CHECK(once(p, DLK_RELEASE, &g).out == DLK_DONE);
}

static void test_batch(struct server *s, struct place *p) {
  enum { N = 64 };
  static struct tgrant g[N];
  static char name[N][24];
  tell(s, "FLUSHALL");
  tell(s, "SCRIPT FLUSH");
  for (int i = 0; i < N; i++) {
    snprintf(name[i], sizeof name[i], "batch%d", i);
    grant(&g[i], name[i], strlen(name[i]), 10000);
    CHECK(once(p, DLK_ACQUIRE, &g[i]).out == DLK_DONE);
  }
  tell(s, "DEL batch7");
  tell(s, "SET batch9 other");
  tell(s, "DEL batch11");
  tell(s, "LPUSH batch11 x");
  for (int i = 0; i < 2; i++) {
    struct tcall *t = new_call(p->c, i ? DLK_RELEASE : DLK_RENEW);
    for (int k = 0; k < N; k++)
      with_grant(t, &g[k].l.g);
    run(p, t);
    CHECK(t->ended && !t->call.err);
    for (int k = 0; k < N; k++)
      CHECK(t->out[k] == (k == 7 ? DLK_GONE : k == 9 || k == 11 ? DLK_TAKEN : DLK_DONE));
    call_free(t);
  }
  CHECK(!exists(s, "batch0") && !exists(s, "batch63") && exists(s, "batch9"));
}

static void test_hand_over(struct server *s, struct place *p) {
  struct tgrant a, b, c;
  tell(s, "FLUSHALL");
  grant(&a, "hand", 4, 10000);
  grant(&b, "hand", 4, 20000);
  grant(&c, "hand", 4, 20000);
  CHECK(once(p, DLK_ACQUIRE, &a).out == DLK_DONE);
  for (int i = 0; i < 2; i++) {
    struct tcall *t = new_call(p->c, DLK_HAND_OVER);
    with_grant(t, i ? &c.l.g : &a.l.g);
    t->call.heir = &b.l.g;
    if (i) /* c is not the holder, and b is not on its way in */
      t->call.heir = &a.l.g;
    run(p, t);
    CHECK(t->ended && !t->call.err && t->out[0] == (i ? DLK_TAKEN : DLK_DONE));
    call_free(t);
  }
  CHECK(b.l.item.token > a.l.item.token);
  CHECK(number(s, "PTTL %b", "hand", 4) > 15000);
  CHECK(once(p, DLK_RELEASE, &a).out == DLK_TAKEN);
  struct tcall *t = new_call(p->c, DLK_RELEASE);
  with_grant(t, &b.l.g);
  t->call.keep_ms = 60000;
  run(p, t);
  CHECK(t->out[0] == DLK_DONE && number(s, "PTTL %b", "hand", 4) > 50000);
  call_free(t);
}

static void test_foreign(struct server *s, struct place *p) {
  struct tgrant g;
  tell(s, "FLUSHALL");
  tell(s, "HSET hash a 1");
  grant(&g, "hash", 4, 10000);
  struct result r = once(p, DLK_ACQUIRE, &g);
  CHECK(r.err == DLOCK_E_FOREIGN && strstr(r.msg, "hash") && r.sent == 0);
  CHECK(once(p, DLK_RELEASE, &g).out == DLK_TAKEN);
  struct tcall *t = query(p, DLK_BREAK, "hash");
  CHECK(t->call.err == DLOCK_E_FOREIGN && exists(s, "hash"));
  call_free(t);
  tell(s, "SET plain value");
  grant(&g, "plain", 5, 10000);
  r = once(p, DLK_ACQUIRE, &g);
  CHECK(!r.err && r.out == DLK_BUSY && r.retry >= 50 && r.retry <= 250 && r.holder_ttl == -1);
  CHECK(!strcmp(r.holder, "value"));
  /* A counter that is none: nothing is left behind. */
  tell(s, "LPUSH odd:fence x");
  grant(&g, "odd", 3, 10000);
  CHECK(once(p, DLK_ACQUIRE, &g).err == DLOCK_E_FOREIGN && !exists(s, "odd"));
  tell(s, "SET odd2:fence word");
  grant(&g, "odd2", 4, 10000);
  CHECK(once(p, DLK_ACQUIRE, &g).err == DLOCK_E_FOREIGN && !exists(s, "odd2") &&
        exists(s, "odd2:fence"));
  grant(&g, "x:fence", 7, 10000);
  CHECK(once(p, DLK_ACQUIRE, &g).err == DLOCK_E_UNSUPPORTED);
}

static void test_queries(struct server *s, struct place *p) {
  struct tgrant g;
  tell(s, "FLUSHALL");
  grant(&g, "query*1", 7, 10000);
  struct tcall *t = query(p, DLK_INSPECT, "query*1");
  CHECK(!t->call.err && t->call.info && !t->call.info->found);
  call_free(t);
  CHECK(once(p, DLK_ACQUIRE, &g).out == DLK_DONE);
  tell(s, "ZADD query*1:q 1 aaaaaaaaaaaaaaaa:first 2 bbbbbbbbbbbbbbbb:second");
  t = query(p, DLK_INSPECT, "query*1");
  const struct dlk_info *i = t->call.info;
  CHECK(!t->call.err && i && i->found && i->ours && !strcmp(i->owner, "label"));
  CHECK(i && i->token == g.l.item.token && i->age_ms >= 0 && i->age_ms < 5000 && i->ttl_ms > 5000);
  CHECK(i && i->n == 2 && !strcmp(i->list[0], "first") && !strcmp(i->list[1], "second"));
  call_free(t);
  for (int k = 0; k < 3000; k++)
    freeReplyObject(ask(s, "SET query%d dlock1:0123456789abcdef0123456789abcdef:x", k));
  freeReplyObject(ask(s, "SET queryforeign x"));
  freeReplyObject(ask(s, "HSET queryhash a 1"));
  t = query(p, DLK_LIST, "query*");
  CHECK(!t->call.err && t->call.info && t->call.info->n == 1 &&
        !strcmp(t->call.info->list[0], "query*1"));
  call_free(t);
  t = query(p, DLK_LIST, "query");
  CHECK(!t->call.err && t->call.info && t->call.info->n == 3001);
  call_free(t);
  t = query(p, DLK_LIST, "nothing");
  CHECK(!t->call.err && t->call.info && t->call.info->n == 0);
  call_free(t);
  t = query(p, DLK_BREAK, "query*1");
  CHECK(!t->call.err && t->call.info && t->call.info->found && !exists(s, "query*1"));
  call_free(t);
  t = query(p, DLK_BREAK, "query*1");
  CHECK(!t->call.err && t->call.info && !t->call.info->found);
  call_free(t);
  t = query(p, DLK_PING, "");
  CHECK(!t->call.err && t->call.info && t->call.info->text && strstr(t->call.info->text, "Redis "));
  call_free(t);
}

/* A release tells the first in the line that is there; one that comes after its
 * wake-up was eaten passes it on. */
static void test_line(struct server *s, struct place *p) {
  struct tgrant g;
  tell(s, "FLUSHALL");
  redisContext *sub = redisConnect("127.0.0.1", s->port);
  struct timeval bound = {5, 0};
  redisSetTimeout(sub, bound);
  freeReplyObject(redisCommand(sub, "SUBSCRIBE dlock:wake:bbbbbbbbbbbbbbbb"));
  for (int i = 0; i < 3; i++) {
    tell(s,
         "ZADD line:q 1 aaaaaaaaaaaaaaaa:dead 2 bbbbbbbbbbbbbbbb:alive 3 cccccccccccccccc:later");
    grant(&g, "line", 4, 10000);
    if (i != 1)
      CHECK(once(p, DLK_ACQUIRE, &g).out == DLK_DONE);
    g.l.g.queued = i == 1;
    if (i < 2) {
      CHECK(once(p, DLK_RELEASE, &g).out == (i ? DLK_GONE : DLK_DONE));
    } else {
      struct tcall *t = query(p, DLK_BREAK, "line");
      CHECK(!t->call.err);
      call_free(t);
    }
    redisReply *r = NULL;
    CHECK(redisGetReply(sub, (void **)&r) == REDIS_OK && r && r->elements == 3 &&
          !strcmp(r->element[2]->str, "line"));
    if (r)
      freeReplyObject(r);
    CHECK(number(s, "ZCARD %b", "line:q", 6) == 1);
  }
  redisFree(sub);
}

static void test_place(struct server *s, struct place *p) {
  test_basics(s, p);
  test_scripts_lost(s, p);
  test_batch(s, p);
  test_hand_over(s, p);
  test_foreign(s, p);
  test_queries(s, p);
  test_line(s, p);
}

/* ---- a server that restarts, freezes ---- */

static void test_restart(struct server *s, struct place *p) {
  struct tgrant g;
  grant(&g, "restart", 7, 10000);
  CHECK(once(p, DLK_ACQUIRE, &g).out == DLK_DONE);
  uint64_t before = g.l.item.token;
  server_kill(s);
  usleep(150000); /* the link must count as idle: it is looked at after 100 ms */
  struct result r = once(p, DLK_ACQUIRE, &g);
  CHECK(r.err == DLOCK_E_UNAVAILABLE && r.sent == 0 && strstr(r.msg, "refused"));
  server_fork(s);
  r = once(p, DLK_ACQUIRE, &g);
  CHECK(!r.err && r.out == DLK_DONE && g.l.item.token > before);
  CHECK(once(p, DLK_RELEASE, &g).out == DLK_DONE);
}

/* An acquire is given up on a frozen server; its release goes behind it. */
static void test_frozen(struct server *s, struct dlk_client *c, bool on_lane) {
  struct place p = {c, on_lane ? take_lane(c) : NULL};
  struct tgrant g, h;
  grant(&g, "frozen", 6, 10000);
  grant(&h, "other", 5, 10000);
  /* The scripts must be known: a late call is not sent again with its text. */
  CHECK(once(&p, DLK_ACQUIRE, &h).out == DLK_DONE && once(&p, DLK_RENEW, &h).out == DLK_DONE);
  kill(s->pid, SIGSTOP);
  struct tcall *t = new_call(c, DLK_ACQUIRE);
  with_grant(t, &g.l.g);
  t->timeout = 100;
  if (on_lane) {
    run(&p, t);
    CHECK(t->call.late && !t->ended);
    t->late_err = t->call.err;
    dlk_enter();
    dlk_lane_abandon(p.lane);
    dlk_leave();
  } else {
    t->call.task.run = start_on_loop;
    dlk_post(&t->call.task);
    CHECK(wait_flag(&t->was_late));
  }
  CHECK(t->call.sent_ms && t->late_err == DLOCK_E_INDETERMINATE);
  struct tcall *rel = new_call(c, DLK_RELEASE);
  with_grant(rel, &g.l.g);
  rel->call.behind = t->call.via;
  rel->timeout = DLK_FOREVER;
  rel->call.task.run = start_on_loop;
  dlk_post(&rel->call.task);
  struct tcall *other = new_call(c, DLK_RENEW); /* the loop's own connection is another */
  with_grant(other, &h.l.g);
  other->timeout = 100;
  other->call.task.run = start_on_loop;
  dlk_post(&other->call.task);
  CHECK(wait_flag(&other->was_late));
  kill(s->pid, SIGCONT);
  CHECK(wait_flag(&t->ended) && wait_flag(&rel->ended) && wait_flag(&other->ended));
  CHECK(!t->call.err && !rel->call.err);
  CHECK(t->out[0] == DLK_DONE && rel->out[0] == DLK_DONE && rel->call.via == t->call.via);
  CHECK(other->call.via != t->call.via && other->out[0] == DLK_DONE);
  CHECK(!exists(s, "frozen"));
  call_free(t);
  call_free(rel);
  call_free(other);
  struct place loop = {c, NULL};
  CHECK(once(&loop, DLK_RELEASE, &h).out == DLK_DONE);
  /* Behind a connection that is gone it goes over the loop's. */
  rel = new_call(c, DLK_RELEASE);
  with_grant(rel, &g.l.g);
  rel->call.behind = (void *)(uintptr_t)987654321;
  run(&loop, rel);
  CHECK(rel->ended && !rel->call.err && rel->out[0] == DLK_GONE &&
        rel->call.via != rel->call.behind);
  call_free(rel);
}

/* A call that is given up before it was sent is never sent. */
static void test_never_sent(void) {
  int port, fd = listen_any(&port);
  struct sockaddr_in a = {.sin_family = AF_INET,
                          .sin_port = htons((uint16_t)port),
                          .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int fill[64];
  for (int i = 0; i < 64; i++) { /* a full backlog: connecting takes for ever */
    fill[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connect(fill[i], (struct sockaddr *)&a, sizeof a) && errno != EINPROGRESS)
      perror("connect");
  }
  struct dlk_client *c = client(port);
  struct place p = {c, NULL};
  struct tgrant g;
  grant(&g, "never", 5, 10000);
  struct tcall *t = new_call(c, DLK_ACQUIRE);
  with_grant(t, &g.l.g);
  t->timeout = 100;
  run(&p, t);
  CHECK(t->was_late && t->ended && t->call.sent_ms == 0 && t->call.err == DLOCK_E_UNAVAILABLE);
  call_free(t);
  for (int i = 0; i < 64; i++)
    close(fill[i]);
  close(fd);
  dlock_client_unref(c);
}

/* ---- servers that are none ---- */

struct fake {
  int fd, port;
  pthread_t thread;
  const char *say;
  size_t len, times;
  bool first; /* speaks before it is spoken to */
};

static void *fake_main(void *arg) {
  struct fake *f = arg;
  for (;;) {
    int c = accept4(f->fd, NULL, NULL, SOCK_CLOEXEC);
    char buf[4096];
    if (c < 0)
      return NULL;
    if (f->first || recv(c, buf, sizeof buf, 0) > 0)
      for (size_t i = 0; i < f->times; i++)
        if (send(c, f->say, f->len, MSG_NOSIGNAL) < 0)
          break;
    shutdown(c, SHUT_WR);
    while (recv(c, buf, sizeof buf, 0) > 0)
      ;
    close(c);
  }
}

static struct result fake_once(const char *say, size_t len, size_t times, bool first,
                               bool on_lane) {
  struct fake f = {.say = say, .len = len, .times = times, .first = first};
  f.fd = listen_any(&f.port);
  pthread_create(&f.thread, NULL, fake_main, &f);
  struct dlk_client *c = client(f.port);
  struct place p = {c, on_lane ? take_lane(c) : NULL};
  struct tgrant g;
  grant(&g, "fake", 4, 10000);
  struct result r = once(&p, DLK_ACQUIRE, &g);
  if (p.lane)
    put_lane(p.lane);
  dlock_client_unref(c);
  shutdown(f.fd, SHUT_RDWR);
  pthread_join(f.thread, NULL);
  close(f.fd);
  return r;
}

static void test_fakes(bool lane) {
  static const struct {
    const char *say;
    size_t times;
    enum dlock_err err;
  } v[] = {
      {"HTTP/1.1 400 Bad Request\r\n\r\n", 1, DLOCK_E_PROTOCOL},
      {"\0\1\2\3\r\n", 1, DLOCK_E_PROTOCOL},
      {"*1\r\n", 10000, DLOCK_E_PROTOCOL},
      {"*2147483647\r\n", 1, DLOCK_E_PROTOCOL},
      {"*99999999999999999999\r\n", 1, DLOCK_E_PROTOCOL},
      {"$1073741824\r\n", 1, DLOCK_E_INDETERMINATE},
      {":abc\r\n", 1, DLOCK_E_PROTOCOL},
      {":1\r\n", 1, DLOCK_E_PROTOCOL},
      {"*0\r\n", 1, DLOCK_E_PROTOCOL},
      {"*3\r\n:1\r\n:2\r\n:3\r\n", 1, DLOCK_E_PROTOCOL},
      {"$-1\r\n", 1, DLOCK_E_PROTOCOL},
      {"$5\r\nhel", 1, DLOCK_E_INDETERMINATE},
      {"", 0, DLOCK_E_INDETERMINATE},
      {"-LOADING Redis is loading the dataset in memory\r\n", 1, DLOCK_E_UNAVAILABLE},
      {"-MASTERDOWN Link with MASTER is down\r\n", 1, DLOCK_E_UNAVAILABLE},
      {"-READONLY You can't write against a read only replica.\r\n", 1, DLOCK_E_UNAVAILABLE},
      {"-ERR Error running script (call to f_0): @user_script:1: -READONLY You can't\r\n", 1,
       DLOCK_E_UNAVAILABLE},
      {"-OOM command not allowed when used memory > 'maxmemory'.\r\n", 1, DLOCK_E_UNAVAILABLE},
      {"-MISCONF Redis is configured to save RDB snapshots\r\n", 1, DLOCK_E_UNAVAILABLE},
      {"-BUSY Redis is busy running a script.\r\n", 1, DLOCK_E_UNAVAILABLE},
      {"-NOREPLICAS Not enough good replicas to write.\r\n", 1, DLOCK_E_UNAVAILABLE},
      {"-CLUSTERDOWN Hash slot not served\r\n", 1, DLOCK_E_UNAVAILABLE},
      {"-NOAUTH Authentication required.\r\n", 1, DLOCK_E_AUTH},
      {"-NOPERM this user has no permissions\r\n", 1, DLOCK_E_AUTH},
      {"-MOVED 3999 127.0.0.1:6381\r\n", 1, DLOCK_E_UNSUPPORTED},
      {"-ERR something new\r\n", 1, DLOCK_E_PROTOCOL},
  };
  for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
    struct result r = fake_once(v[i].say, i == 1 ? 6 : strlen(v[i].say), v[i].times, false, lane);
    CHECK(r.err == v[i].err);
    if (r.err != v[i].err)
      fprintf(stderr, "   %.40s: %s (%s)\n", v[i].say, dlock_err_code(r.err), r.msg);
    bool unknown = r.err == DLOCK_E_INDETERMINATE || r.err == DLOCK_E_PROTOCOL;
    CHECK((r.sent != 0) == unknown);
  }
  struct result r = fake_once("-ERR max number of clients reached\r\n", 36, 1, true, lane);
  CHECK(r.err == DLOCK_E_UNAVAILABLE);
}

/* A bulk string that never ends is cut off, not stored. */
static void test_flood(void) {
  static char block[1 << 20];
  memset(block, 'x', sizeof block);
  memcpy(block, "$999999999\r\n", 12);
  struct result r = fake_once(block, sizeof block, 40, false, false);
  CHECK(r.err == DLOCK_E_PROTOCOL && strstr(r.msg, "too long"));
}

/* ---- log-in, places ---- */

static void test_login(struct server *s) {
  char url[128];
  struct tgrant g;
  struct result r;
  tell(s, "FLUSHALL");
  tell(s, "ACL SETUSER shop on >s3cret ~shop:* &shop:* +@all -@dangerous -@admin");
  tell(s, "ACL SETUSER quiet on >s3cret ~shop:* resetchannels +@all");
  snprintf(url, sizeof url, "redis://shop:s3cret@127.0.0.1:%d/3", s->port);
  struct dlk_client *c = client_at(url, "shop:", NULL, NULL);
  struct place p = {c, take_lane(c)};
  grant(&g, "shop:a", 6, 10000);
  CHECK(once(&p, DLK_ACQUIRE, &g).out == DLK_DONE && once(&p, DLK_RENEW, &g).out == DLK_DONE);
  struct tcall *t = query(&p, DLK_PING, "");
  CHECK(!t->call.err && t->call.info && t->call.info->text);
  call_free(t);
  t = query(&p, DLK_LIST, "shop:");
  CHECK(!t->call.err && t->call.info && t->call.info->n == 1);
  call_free(t);
  t = query(&p, DLK_INSPECT, "shop:a");
  CHECK(!t->call.err && t->call.info && t->call.info->found);
  call_free(t);
  CHECK(!exists(s, "shop:a")); /* it is in database 3 */
  CHECK(once(&p, DLK_RELEASE, &g).out == DLK_DONE);
  grant(&g, "other", 5, 10000);
  r = once(&p, DLK_ACQUIRE, &g);
  CHECK(r.err == DLOCK_E_AUTH && !strstr(r.msg, "s3cret"));
  put_lane(p.lane);
  dlock_client_unref(c);

  /* No right to publish: the release works, the waiter stays in the line. */
  snprintf(url, sizeof url, "redis://127.0.0.1:%d", s->port);
  p.c = c = client_at(url, "shop:", "quiet", "s3cret");
  p.lane = NULL;
  tell(s, "ZADD shop:b:q 1 aaaaaaaaaaaaaaaa:x");
  grant(&g, "shop:b", 6, 10000);
  CHECK(once(&p, DLK_ACQUIRE, &g).out == DLK_DONE && once(&p, DLK_RELEASE, &g).out == DLK_DONE);
  CHECK(!exists(s, "shop:b") && number(s, "ZCARD %b", "shop:b:q", 8) == 1 &&
        number(s, "PTTL %b", "shop:b:q", 8) > 0);
  dlock_client_unref(c);

  static const struct {
    const char *url;
    enum dlock_err err;
  } v[] = {
      {"redis://shop:wr0ng@127.0.0.1:%d", DLOCK_E_AUTH},
      {"redis://:wr0ng@127.0.0.1:%d", DLOCK_E_AUTH},
      {"redis://127.0.0.1:%d/99", DLOCK_E_UNSUPPORTED},
      {"redis://no-such-host.invalid:%d", DLOCK_E_UNAVAILABLE},
      {"redis+unix:///no/such/socket?db=%d", DLOCK_E_UNAVAILABLE},
  };
  for (size_t i = 0; i < sizeof v / sizeof *v; i++)
    for (int lane = 0; lane < 2; lane++) {
      snprintf(url, sizeof url, v[i].url, i == 4 ? 0 : s->port);
      p.c = c = client_at(url, "", NULL, NULL);
      p.lane = lane ? take_lane(c) : NULL;
      grant(&g, "shop:a", 6, 10000);
      r = once(&p, DLK_ACQUIRE, &g);
      CHECK(r.err == v[i].err && r.sent == 0 && !strstr(r.msg, "wr0ng"));
      if (p.lane)
        put_lane(p.lane);
      dlock_client_unref(c);
    }
  tell(s, "CONFIG SET requirepass t0p");
  p.c = c = client(s->port);
  p.lane = NULL;
  CHECK(once(&p, DLK_ACQUIRE, &g).err == DLOCK_E_AUTH);
  dlock_client_unref(c);
  snprintf(url, sizeof url, "redis://:t0p@127.0.0.1:%d", s->port);
  p.c = c = client_at(url, NULL, NULL, NULL);
  CHECK(once(&p, DLK_ACQUIRE, &g).out == DLK_DONE);
  dlock_client_unref(c);
  tell(s, "AUTH t0p");
  freeReplyObject(ask(s, "CONFIG SET requirepass %s", ""));
}

static void test_bad_urls(void) {
  static const char *const v[] = {
      "redis://h1,h2", "redis:",         "redis://h/x",  "redis://h/1?db=2",    "redis://h?x=1",
      "redis+unix:",   "redis+unix:///", "redis://h/-1", "redis+unix:///s?db=x"};
  for (size_t i = 0; i < sizeof v / sizeof *v; i++) {
    struct dlock_config cfg = {.url = v[i], .timeout_ms = 1, .connect_timeout_ms = 1};
    struct dlk_client *c;
    bool bad = false;
    char msg[DLOCK_MSG_MAX];
    CHECK(dlock_client_open(&cfg, &c, &bad, msg) == DLOCK_E_PROTOCOL && bad);
  }
  struct dlock_config cfg = {.url = "rediss://h"};
  struct dlk_client *c;
  bool bad;
  char msg[DLOCK_MSG_MAX];
  CHECK(dlock_client_open(&cfg, &c, &bad, msg) == DLOCK_E_UNSUPPORTED && !bad);
}

/* ---- waiting, through the whole core ---- */

static dlock_op *begin(struct dlk_client *c, const char *key, int64_t wait) {
  struct dlock_acquire a = {.key = key, .key_len = strlen(key), .ttl_ms = 10000, .wait_ms = wait,
                            .timeout_ms = 2000, .renew = true, .bell = NULL};
  return dlock_acquire(c, &a);
}

static dlock_lock *got(dlock_op *op) {
  bool done = dlock_op_wait(op, BOUND_MS);
  CHECK(done && dlock_op_err(op) == DLOCK_E_OK);
  if (done && dlock_op_err(op))
    fprintf(stderr, "   %s\n", dlock_op_msg(op));
  dlock_lock *l = dlock_op_lock(op);
  dlock_op_unref(op);
  return l;
}

static void release(dlock_lock *l) {
  struct dlock_how how = {.timeout_ms = 2000, .blocking = true};
  dlock_op *op = dlock_release(l, &how);
  CHECK(dlock_op_wait(op, BOUND_MS) && dlock_op_err(op) == DLOCK_E_OK);
  dlock_op_unref(op);
  dlock_lock_unref(l);
}

static bool in_line(struct server *s, const char *line, long long n) {
  int64_t until = dlk_now_ms() + BOUND_MS;
  while (number(s, "ZCARD %b", line, strlen(line)) != n)
    if (dlk_now_ms() > until)
      return false;
  return true;
}

static void test_waiting(struct server *s) {
  struct dlk_client *a = client(s->port), *b = client(s->port), *c = client(s->port);
  tell(s, "FLUSHALL");
  dlock_lock *l = got(begin(a, "wait", 0));
  for (int i = 0; i < 20; i++) {
    dlock_op *op = begin(i % 2 ? a : b, "wait", BOUND_MS);
    CHECK(in_line(s, "wait:q", 1));
    int64_t t = dlk_now_ms();
    release(l);
    l = got(op);
    CHECK(dlk_now_ms() - t < 500); /* far below the poll */
    CHECK(in_line(s, "wait:q", 0));
  }
  /* The first in the line gives up: it leaves, and the second is woken. */
  dlock_op *first = begin(b == l->client ? a : b, "wait", BOUND_MS);
  CHECK(in_line(s, "wait:q", 1));
  dlock_op *second = begin(c, "wait", BOUND_MS);
  CHECK(in_line(s, "wait:q", 2));
  dlock_op_cancel(first);
  dlock_op_unref(first);
  CHECK(in_line(s, "wait:q", 1));
  release(l);
  release(got(second));
  /* The subscriptions are cut: they come back, and nobody is lost. */
  l = got(begin(a, "wait", 0));
  second = begin(c, "wait", BOUND_MS);
  CHECK(in_line(s, "wait:q", 1));
  tell(s, "CLIENT KILL TYPE pubsub");
  CHECK(in_line(s, "wait:q", 1));
  release(l);
  release(got(second));
  dlock_client_unref(a);
  dlock_client_unref(b);
  dlock_client_unref(c);
}

static void test_notices(struct server *s) {
  struct dlk_client *c = client(s->port);
  struct place p = {c, NULL};
  struct tgrant g;
  struct dlock_event e;
  int evicts = 0, disk = 0, others = 0;
  tell(s, "CONFIG SET maxmemory 100mb");
  tell(s, "CONFIG SET maxmemory-policy allkeys-lru");
  grant(&g, "notice", 6, 10000);
  CHECK(once(&p, DLK_ACQUIRE, &g).out == DLK_DONE);
  CHECK(once(&p, DLK_RELEASE, &g).out == DLK_DONE); /* the questions came before it */
  while (dlock_next_event(c, &e)) {
    *(strstr(e.msg, "evict") ? &evicts : strstr(e.msg, "disk") ? &disk : &others) += 1;
    free(e.key);
  }
  CHECK(evicts == 1 && disk == 1 && others == 0);
  tell(s, "CONFIG SET maxmemory 0");
  dlock_client_unref(c);
}

static int open_fds(void) {
  int n = 0;
  for (int fd = 0; fd < 1024; fd++)
    n += fcntl(fd, F_GETFD) != -1;
  return n;
}

static bool settles(int fds) {
  int64_t until = dlk_now_ms() + BOUND_MS;
  while (open_fds() > fds)
    if (dlk_now_ms() > until)
      return false;
  return true;
}

int main(void) {
  struct server s;
  signal(SIGPIPE, SIG_DFL);
  server_start(&s);
  struct dlk_client *c = client(s.port);
  struct place loop = {c, NULL}, lane = {c, take_lane(c)};
  struct tgrant g;
  grant(&g, "warm", 4, 1000);
  once(&loop, DLK_ACQUIRE, &g);
  once(&lane, DLK_ACQUIRE, &g);
  int fds = open_fds();
  test_bad_urls();
  test_place(&s, &lane);
  test_place(&s, &loop);
  test_restart(&s, &lane);
  test_restart(&s, &loop);
  test_frozen(&s, c, false);
  test_frozen(&s, c, true);
  test_frozen(&s, c, true);
  test_never_sent();
  test_fakes(false);
  test_fakes(true);
  test_flood();
  test_login(&s);
  test_waiting(&s);
  test_notices(&s);
  char url[128];
  snprintf(url, sizeof url, "redis+unix://%s", s.sock);
  struct dlk_client *u = client_at(url, NULL, NULL, NULL);
  struct place unix_lane = {u, take_lane(u)};
  test_place(&s, &unix_lane);
  put_lane(unix_lane.lane);
  dlock_client_unref(u);
  snprintf(url, sizeof url, "redis://localhost:%d", s.port);
  u = client_at(url, NULL, NULL, NULL);
  struct place named = {u, NULL};
  test_basics(&s, &named);
  dlock_client_unref(u);
  CHECK(settles(fds));
  put_lane(lane.lane);
  dlock_client_unref(c);
  CHECK(settles(fds - 2));
  server_stop(&s);
  return DONE();
}
#endif
