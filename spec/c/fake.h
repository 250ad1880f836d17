/* A backend for tests of the core: its "server" is a table and a thread here, and
 * a test decides for every request when it is applied, when it is answered, and
 * whether the answer gets through. What was sent may be applied long after its
 * connection broke, as with a real, frozen server. */
#ifndef DLK_FAKE_H
#define DLK_FAKE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "lock.h"

enum { FK_N = 64, FK_VALUE = 320 };

struct fk_entry {
  struct fk_entry *next;
  char *name;
  char owner[FK_VALUE]; /* "": free */
  int64_t expires;
  uint64_t fence;
};

struct fk_what {
  char *name, owner[FK_VALUE];
  int64_t ttl;
  enum dlk_outcome out;
  uint64_t token;
};

struct fk_call;
struct fk_req {
  struct fk_req *next;
  uint64_t conn;
  enum dlk_verb verb;
  size_t n;
  struct fk_what what[FK_N];
  char heir[FK_VALUE], holder[FK_VALUE];
  int64_t holder_ttl;
  bool contend;
  /* Set by the plan; FOREVER: until the test says so. */
  int64_t apply_at, reply_at;
  bool broken;           /* the connection breaks instead of an answer */
  bool applied, over;    /* over: answered or broken */
  struct fk_call *waits; /* NULL: nobody any more */
};

struct fk_self {
  struct dlk_client *client;
  uint64_t conn; /* the loop's */
};

struct fk_lane {
  struct fk_self *self;
  uint64_t conn;
};

struct fk_call {
  struct dlk_source src;
  struct dlk_call *call;
  struct fk_req *req;
  struct fk_self *self;
  uint64_t req_conn;
};

struct fk_watch {
  struct fk_watch *next;
  struct dlk_client *client;
  struct dlk_grant *g;
};

static struct {
  pthread_mutex_t m;
  pthread_cond_t more;
  struct fk_entry *entries;
  struct fk_req *reqs, **tail;
  struct fk_watch *watches; /* touched by the loop alone */
  struct dlk_task wake;
  uint64_t last_conn;
  bool started, no_wakes;
  size_t pending;    /* calls not ended */
  size_t sent[DLK_PING + 1];
  void (*plan)(struct fk_req *); /* mutex held */
  bool (*unsent)(const struct dlk_call *); /* mutex held; true: it cannot be sent */
} fk = {.m = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER, .tail = &fk.reqs};

static void fk_lock(void) { pthread_mutex_lock(&fk.m); }
static void fk_unlock(void) { pthread_mutex_unlock(&fk.m); }

/* ---- the server ---- */

static struct fk_entry *fk_entry(const char *name) {
  struct fk_entry *e = fk.entries;
  while (e && strcmp(e->name, name))
    e = e->next;
  if (!e) {
    e = calloc(1, sizeof *e);
    e->name = strdup(name);
    e->next = fk.entries;
    fk.entries = e;
  }
  if (e->owner[0] && dlk_now_ms() >= e->expires)
    e->owner[0] = 0;
  return e;
}

static void fk_free(struct fk_entry *e) {
  e->owner[0] = 0;
  if (!fk.no_wakes)
    dlk_post(&fk.wake);
}

static void fk_set(struct fk_entry *e, const char *owner, struct fk_what *w) {
  memmove(e->owner, owner, strlen(owner) + 1);
  e->expires = dlk_now_ms() + w->ttl;
  w->token = ++e->fence;
  w->out = DLK_DONE;
}

static void fk_apply_one(struct fk_req *r, struct fk_what *w) {
  struct fk_entry *e = fk_entry(w->name);
  bool mine = !strcmp(e->owner, w->owner), heirs = *r->heir && !strcmp(e->owner, r->heir);
  w->out = !e->owner[0] ? DLK_GONE : mine ? DLK_DONE : DLK_TAKEN;
  if (r->verb == DLK_ACQUIRE && (mine || !e->owner[0])) {
    fk_set(e, w->owner, w);
  } else if (r->verb == DLK_ACQUIRE) {
    w->out = DLK_BUSY;
    memcpy(r->holder, e->owner, sizeof r->holder);
    r->holder_ttl = e->expires - dlk_now_ms();
  } else if (r->verb == DLK_RENEW && mine) {
    e->expires = dlk_now_ms() + w->ttl;
  } else if (r->verb == DLK_RELEASE && mine) {
    fk_free(e);
  } else if (r->verb == DLK_HAND_OVER && (mine || heirs)) {
    fk_set(e, r->heir, w);
  } else if (r->verb == DLK_BREAK) {
    fk_free(e);
  }
}

static void fk_apply(struct fk_req *r) {
  for (size_t i = 0; i < r->n && !r->applied; i++)
    fk_apply_one(r, &r->what[i]);
  r->applied = true;
}

static unsigned char fk_dead[1 << 20]; /* connections that broke */

static bool fk_is_dead(uint64_t conn) { return fk_dead[conn % sizeof fk_dead]; }

static void fk_answer(struct fk_req *r) {
  uint64_t one = 1;
  if (r->over)
    return;
  r->over = true;
  if (r->waits && write(r->waits->src.fd, &one, sizeof one) < 0)
    abort();
  if (!r->broken || fk_is_dead(r->conn))
    return;
  fk_dead[r->conn % sizeof fk_dead] = 1;
  for (struct fk_req *q = fk.reqs; q; q = q->next)
    if (q->conn == r->conn && !q->over) {
      q->broken = true;
      fk_answer(q);
    }
}

static void fk_req_free(struct fk_req *r) {
  for (size_t i = 0; i < r->n; i++)
    free(r->what[i].name);
  free(r);
}

/* One look at everything; returns when the next one is due. */
static int64_t fk_turn(void) {
  int64_t now = dlk_now_ms(), due = DLK_FOREVER;
  for (struct fk_req **p = &fk.reqs, *r; (r = *p);) {
    if (r->apply_at <= now)
      fk_apply(r);
    if (r->reply_at <= now) {
      if (!r->broken)
        fk_apply(r);
      fk_answer(r);
    }
    if (r->applied && r->over && !r->waits) {
      *p = r->next;
      fk_req_free(r);
      continue;
    }
    if (!r->applied)
      due = dlk_min(due, r->apply_at);
    if (!r->over)
      due = dlk_min(due, r->reply_at);
    p = &r->next;
  }
  fk.tail = &fk.reqs;
  while (*fk.tail)
    fk.tail = &(*fk.tail)->next;
  return due;
}

static void *fk_main(void *arg) {
  (void)arg;
  fk_lock();
  for (;;) {
    int64_t due = fk_turn(), now = dlk_now_ms();
    struct timespec t;
    dlk_cond_deadline(&t, dlk_max(dlk_min(due, now + 1000) - now, 0));
    pthread_cond_clockwait(&fk.more, &fk.m, CLOCK_MONOTONIC, &t);
  }
  return NULL;
}

/* The first waiter of every free name tries again. */
static void fk_wake_run(struct dlk_task *t) {
  (void)t;
  for (struct fk_watch *w = fk.watches; w; w = w->next) {
    fk_lock();
    bool freed = !fk_entry(w->g->items[0].name)->owner[0];
    fk_unlock();
    if (freed)
      dlk_wake(w->client, w->g->items[0].name, w->g->items[0].len);
  }
}

/* ---- the client's side ---- */

static uint64_t fk_conn_new(void) {
  fk_lock();
  uint64_t n = ++fk.last_conn;
  fk_dead[n % sizeof fk_dead] = 0;
  fk_unlock();
  return n;
}

static enum dlock_err fk_open(struct dlk_client *c, const struct dlk_url *url, const struct dlock_config *cfg,
                              void **self, char *msg) {
  (void)url;
  (void)cfg;
  struct fk_self *s = calloc(1, sizeof *s);
  if (!s)
    return dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  s->client = c;
  s->conn = fk_conn_new();
  fk_lock();
  pthread_t t;
  if (!fk.started) {
    fk.wake.run = fk_wake_run;
    fk.started = !pthread_create(&t, NULL, fk_main, NULL) && !pthread_detach(t);
  }
  fk_unlock();
  *self = s;
  return DLOCK_E_OK;
}

static void fk_close(void *self) { free(self); }

static void *fk_lane_open(void *self, struct dlk_poller *p) {
  (void)p;
  struct fk_lane *l = calloc(1, sizeof *l);
  if (l) {
    l->self = self;
    l->conn = fk_conn_new();
  }
  return l;
}

static void fk_lane_close(void *lane) { free(lane); }

static void fk_take(struct fk_call *f, struct dlk_call *call) {
  struct fk_req *r = f->req;
  for (size_t i = 0; i < r->n && i < call->n; i++) {
    call->out[i] = r->what[i].out;
    if (r->what[i].token)
      (call->heir ? call->heir : call->grants[i])->items[0].token = r->what[i].token;
  }
  if (r->verb >= DLK_INSPECT)
    call->info = dlk_info_new();
  memcpy(call->holder, r->holder, sizeof call->holder - 1);
  call->holder_ttl_ms = r->holder_ttl;
  call->retry_ms = 50;
}

static void fk_ready(struct dlk_source *s, unsigned got) {
  struct fk_call *f = (struct fk_call *)s;
  struct dlk_call *call = f->call;
  (void)got;
  fk_lock();
  bool over = f->req->over, broken = f->req->broken;
  if (over) {
    if (!broken)
      fk_take(f, call);
    f->req->waits = NULL;
    fk.pending--;
    pthread_cond_signal(&fk.more);
  }
  fk_unlock();
  if (!over)
    return;
  if (broken && !call->lane && f->self->conn == f->req_conn)
    f->self->conn = fk_conn_new();
  if (broken && call->lane && !call->lane->adopted)
    ((struct fk_lane *)dlk_call_lane(call))->conn = fk_conn_new();
  dlk_source_del(&f->src);
  dlk_fd_close(f->src.fd);
  free(f);
  if (broken)
    dlk_call_fail(call, DLOCK_E_INDETERMINATE, "the connection broke");
  else
    dlk_call_done(call);
}

static struct fk_req *fk_req_new(const struct dlk_call *call, uint64_t conn) {
  struct fk_req *r = calloc(1, sizeof *r);
  r->conn = conn;
  r->verb = call->verb;
  r->contend = call->contend;
  r->n = call->verb >= DLK_INSPECT ? 1 : call->n;
  for (size_t i = 0; i < r->n && call->verb < DLK_INSPECT; i++) {
    const struct dlk_grant *g = call->grants[i];
    r->what[i].name = strdup(g->items[0].name);
    r->what[i].ttl = call->ttl_ms[i];
    memcpy(r->what[i].owner, g->owner, g->owner_len + 1);
  }
  if (call->verb >= DLK_INSPECT)
    r->what[0].name = strdup(call->key);
  if (call->heir)
    memcpy(r->heir, call->heir->owner, call->heir->owner_len + 1);
  return r;
}

static void fk_start(void *self, struct dlk_call *call) {
  struct fk_self *s = self;
  struct fk_lane *lane = call->lane && !call->behind ? dlk_call_lane(call) : NULL;
  fk_lock();
  bool no = fk.unsent && fk.unsent(call);
  fk_unlock();
  if (no) {
    dlk_call_fail(call, DLOCK_E_UNAVAILABLE, "no connection");
    return;
  }
  struct fk_call *f = calloc(1, sizeof *f);
  int fd = f ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
  dlk_fd_own(fd);
  if (f)
    f->src = (struct dlk_source){.fd = fd, .want = DLK_READ, .ready = fk_ready};
  if (fd < 0 || dlk_source_add(dlk_call_poller(call), &f->src)) {
    dlk_fd_close(fd);
    free(f);
    dlk_call_fail(call, DLOCK_E_NOMEM, "out of memory");
    return;
  }
  f->call = call;
  f->self = s;
  fk_lock();
  bool behind = call->behind && !fk_is_dead((uintptr_t)call->behind);
  fk_unlock();
  f->req_conn = behind ? (uintptr_t)call->behind : lane ? lane->conn : s->conn;
  call->via = (void *)(uintptr_t)f->req_conn;
  call->sent_ms = dlk_now_ms();
  fk_lock();
  struct fk_req *r = f->req = fk_req_new(call, f->req_conn);
  r->waits = f;
  r->apply_at = r->reply_at = dlk_now_ms();
  if (fk.plan)
    fk.plan(r);
  /* One connection keeps its order. */
  for (struct fk_req *q = fk.reqs; q; q = q->next)
    if (q->conn == r->conn) {
      r->apply_at = dlk_max(r->apply_at, q->apply_at);
      r->reply_at = dlk_max(r->reply_at, q->reply_at);
    }
  *fk.tail = r;
  fk.tail = &r->next;
  fk.pending++;
  fk.sent[call->verb]++;
  pthread_cond_signal(&fk.more);
  fk_unlock();
}

static void fk_give_up(void *self, struct dlk_call *call) {
  struct fk_self *s = self;
  if (!call->lane && s->conn == (uintptr_t)call->via)
    s->conn = fk_conn_new();
}

static void fk_watch(void *self, struct dlk_grant *g, bool on) {
  struct fk_self *s = self;
  if (on) {
    struct fk_watch *w = calloc(1, sizeof *w);
    *w = (struct fk_watch){.client = s->client, .g = g, .next = fk.watches};
    fk.watches = w;
    dlk_wake(s->client, g->items[0].name, g->items[0].len);
    return;
  }
  for (struct fk_watch **p = &fk.watches; *p; p = &(*p)->next)
    if ((*p)->g == g) {
      struct fk_watch *w = *p;
      *p = w->next;
      free(w);
      return;
    }
}

static void fk_forget(void *self, struct dlk_grant *g) {
  (void)self;
  (void)g;
}

static const char *const fk_schemes[] = {"fake", NULL}, *const fk_loop_schemes[] = {"fakeloop", NULL};
static const struct dlk_backend
    fk_backend = {"fake", fk_schemes, DLK_CAP_LANES | DLK_CAP_HAND_OVER, fk_open, fk_close, fk_lane_open,
                  fk_lane_close, fk_start, fk_give_up, fk_watch, NULL, fk_forget, NULL},
    fk_loop_backend = {"fakeloop", fk_loop_schemes, DLK_CAP_HAND_OVER, fk_open, fk_close, NULL,
                       NULL, fk_start, fk_give_up, fk_watch, NULL, fk_forget, NULL};
const struct dlk_backend *const dlk_backends[] = {&fk_backend, &fk_loop_backend, NULL};
const char *dlk_scheme_missing(const char *scheme) { return (void)scheme, NULL; }

/* ---- for tests ---- */

/* Whether the server has this owner's value under this name. */
static inline bool fk_holds(const char *name, const char *owner) {
  fk_lock();
  bool yes = !strcmp(fk_entry(name)->owner, owner);
  fk_unlock();
  return yes;
}

static inline bool fk_is_free(const char *name) { return fk_holds(name, ""); }

static inline struct dlk_client *fk_client(const char *url) {
  struct dlock_config cfg = {.url = url, .ttl_ms = 1000, .timeout_ms = 1000, .connect_timeout_ms = 1000,
                             .events = true};
  struct dlk_client *c;
  bool bad;
  char msg[DLOCK_MSG_MAX];
  if (dlock_client_open(&cfg, &c, &bad, msg)) {
    fprintf(stderr, "%s: %s\n", url, msg);
    exit(1);
  }
  return c;
}

#endif
