/* A client: one backend, its locks, its lanes, its events. Leases, queues and
 * connections belong to one client, never to two. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "lock.h"

#define CLIENT_OF(t, field) ((struct dlk_client *)((char *)(t)-offsetof(struct dlk_client, field)))

/* Hand-overs inside the process in a row, unless the caller says otherwise. */
enum { HAND_OVER_MAX = 8 };

struct dlk_client *dlk_clients; /* mutex */

/* ---- owner values ---- */

const char *dlk_owner_label(const char *value, size_t len, size_t *label_len) {
  size_t prefix = strlen(DLK_OWNER_PREFIX), at = prefix + DLK_OWNER_HEX;
  if (len <= at || memcmp(value, DLK_OWNER_PREFIX, prefix) || value[at] != ':')
    return NULL;
  *label_len = len - at - 1;
  return value + at + 1;
}

/* A pool for each thread: a mutex would be one more that a fork could leave locked. */
void dlk_random(void *buf, size_t n) {
  static _Thread_local unsigned char pool[512];
  static _Thread_local size_t left;
  static _Thread_local unsigned generation;
  if (left < n || generation != dlk_generation()) {
    size_t got = 0;
    while (got < sizeof pool) {
      ssize_t r = getrandom(pool + got, sizeof pool - got, 0);
      if (r > 0)
        got += (size_t)r;
    }
    left = sizeof pool;
    generation = dlk_generation();
  }
  left -= n;
  memcpy(buf, pool + left, n);
  memset(pool + left, 0, n);
}

/* ---- info ---- */

struct dlk_info *dlk_info_new(void) {
  struct dlk_info *i = calloc(1, sizeof *i);
  if (i)
    i->age_ms = i->ttl_ms = -1;
  return i;
}

bool dlk_info_add(struct dlk_info *i, const char *s, size_t len) {
  char **list = realloc(i->list, (i->n + 1) * sizeof *list);
  if (list)
    i->list = list;
  size_t *lens = realloc(i->list_len, (i->n + 1) * sizeof *lens);
  if (lens)
    i->list_len = lens;
  char *copy = list && lens ? malloc(len + 1) : NULL;
  if (!copy)
    return false;
  memcpy(copy, s, len);
  copy[len] = 0;
  i->list[i->n] = copy;
  i->list_len[i->n++] = len;
  return true;
}

void dlk_info_free(struct dlk_info *i) {
  if (!i)
    return;
  for (size_t k = 0; k < i->n; k++)
    free(i->list[k]);
  free(i->list);
  free(i->list_len);
  free(i->owner);
  free(i->text);
  free(i);
}

/* ---- life ---- */

void dlk_client_ref(struct dlk_client *c) { c->refs++; }

void dlk_client_post(struct dlk_client *c, struct dlk_task *t) {
  if (!t->queued)
    dlk_client_ref(c);
  dlk_post_locked(t);
}

static char *copy(const char *s, size_t n) {
  char *p = s ? malloc(n + 1) : NULL;
  if (p) {
    memcpy(p, s, n);
    p[n] = 0;
  }
  return p;
}

static void free_secret(const char *s) {
  if (s) {
    explicit_bzero((char *)s, strlen(s));
    free((char *)s);
  }
}

static void client_free(struct dlk_client *c) {
  while (c->ev_first) {
    struct dlk_event_node *n = c->ev_first;
    c->ev_first = n->next;
    free(n->e.key);
    free(n);
  }
  dlk_waitq_destroy(&c->waitq);
  free_secret(c->cfg.url);
  free_secret(c->cfg.password);
  free((char *)c->cfg.ns);
  free((char *)c->cfg.owner);
  free((char *)c->cfg.username);
  free(c);
}

/* The last reference is gone: nothing is in flight. On the loop, where the
 * backend's connections live. */
static void shut(struct dlk_task *t) {
  struct dlk_client *c = CLIENT_OF(t, shut);
  dlk_lanes_close(c);
  if (c->self)
    c->be->close(c->self);
  dlk_enter();
  dlk_exit_signal();
  dlk_leave();
  client_free(c);
}

static void quit(struct dlk_task *t) {
  struct dlk_client *c = CLIENT_OF(t, quit);
  dlk_enter();
  void *self = c->self;
  c->self = NULL;
  dlk_leave();
  dlk_lanes_close(c);
  if (self)
    c->be->close(self);
  dlk_enter();
  dlk_client_unref(c);
  dlk_leave();
}

void dlk_client_tidy(struct dlk_client *c) {
  if (!c->closed || c->locks || c->busy || c->quit.queued || !c->self || c->generation != dlk_generation())
    return;
  dlk_client_post(c, &c->quit);
}

void dlk_client_unref(struct dlk_client *c) {
  if (--c->refs > 0)
    return;
  *c->link = c->next;
  if (c->next)
    c->next->link = c->link;
  dlk_due_stop(&c->idle);
  dlk_due_unreserve();
  if (c->generation == dlk_generation())
    dlk_post_locked(&c->shut);
  else
    client_free(c); /* in a forked child: the backend's part is the parent's */
}

void dlock_client_unref(dlock_client *c) {
  if (!c)
    return;
  dlk_enter();
  dlk_client_unref(c);
  dlk_leave();
}

static void default_label(char *out, size_t size) {
  char host[128] = "localhost";
  gethostname(host, sizeof host - 1);
  snprintf(out, size, "%s:%ld", host, (long)getpid());
}

static bool copy_config(struct dlk_client *c, const struct dlock_config *cfg) {
  char label[192];
  default_label(label, sizeof label);
  const char *owner = cfg->owner ? cfg->owner : label;
  c->cfg = *cfg;
  if (!cfg->local_handover)
    c->cfg.local_handover = HAND_OVER_MAX;
  c->own_label = cfg->owner != NULL;
  c->cfg.url = copy(cfg->url, strlen(cfg->url));
  c->cfg.ns = copy(cfg->ns ? cfg->ns : "", cfg->ns_len);
  c->cfg.owner = copy(owner, strlen(owner));
  c->cfg.username = cfg->username ? copy(cfg->username, strlen(cfg->username)) : NULL;
  c->cfg.password = cfg->password ? copy(cfg->password, strlen(cfg->password)) : NULL;
  return c->cfg.url && c->cfg.ns && c->cfg.owner && (c->cfg.username || !cfg->username) &&
         (c->cfg.password || !cfg->password);
}

static const struct dlk_backend *find_backend(const char *scheme) {
  for (const struct dlk_backend *const *b = dlk_backends; *b; b++)
    for (const char *const *s = (*b)->schemes; *s; s++)
      if (!strcmp(*s, scheme))
        return *b;
  return NULL;
}

static void list_schemes(char *out, size_t size) {
  size_t n = 0;
  for (const struct dlk_backend *const *b = dlk_backends; *b; b++)
    for (const char *const *s = (*b)->schemes; *s && n < size; s++)
      n += (size_t)snprintf(out + n, size - n, "%s%s", n ? ", " : "", *s);
}

static enum dlock_err open_backend(struct dlk_client *c, bool *bad_url, char *msg) {
  struct dlk_url url;
  enum dlock_err e = dlk_url_parse(c->cfg.url, &url, msg);
  *bad_url = e != DLOCK_E_OK;
  if (e)
    return e;
  c->be = find_backend(url.scheme);
  if (c->be) {
    c->session_until = c->be->caps & DLK_CAP_SESSION ? 0 : DLK_FOREVER;
    e = c->be->open(c, &url, &c->cfg, &c->self, msg);
    *bad_url = e == DLOCK_E_PROTOCOL;
  } else {
    const char *hint = dlk_scheme_missing(url.scheme);
    *bad_url = !hint;
    char known[128] = "";
    if (!hint)
      list_schemes(known, sizeof known);
    e = dlk_fail(msg, DLOCK_E_UNSUPPORTED, "%s: %s%s", url.scheme,
                 hint ? hint : "no backend has this scheme; there are ", known);
  }
  dlk_url_free(&url);
  return e;
}

enum dlock_err dlock_client_open(const struct dlock_config *cfg, dlock_client **out, bool *bad_url,
                                 char msg[DLOCK_MSG_MAX]) {
  *out = NULL;
  *bad_url = false;
  int err = dlk_engine_init();
  if (err)
    return dlk_fail(msg, DLOCK_E_NOMEM, "cannot start: %s", strerror(err));
  struct dlk_client *c = calloc(1, sizeof *c);
  if (!c)
    return dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  c->ev_last = &c->ev_first;
  c->generation = dlk_generation();
  c->refs = 1;
  c->flush.run = dlk_lock_flush;
  c->quit.run = quit;
  c->shut.run = shut;
  c->tidy.run = dlk_lanes_tidy;
  c->idle.fire = dlk_lanes_idle;
  dlk_enter();
  bool room = dlk_due_reserve();
  dlk_leave();
  enum dlock_err e = room && copy_config(c, cfg) ? open_backend(c, bad_url, msg)
                                                 : dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  dlk_enter();
  if (e) {
    if (room)
      dlk_due_unreserve();
    dlk_leave();
    client_free(c);
    return e;
  }
  c->next = dlk_clients;
  c->link = &dlk_clients;
  if (c->next)
    c->next->link = &c->next;
  dlk_clients = c;
  dlk_leave();
  *out = c;
  return DLOCK_E_OK;
}

/* The first use in a forked child: a backend of its own; the parent's sockets
 * and sessions were closed on this side only, its memory is left alone. */
enum dlock_err dlk_client_ready(struct dlk_client *c, char *msg) {
  if (c->generation == dlk_generation() || c->closed)
    return DLOCK_E_OK;
  bool bad_url;
  char label[192];
  default_label(label, sizeof label);
  char *fresh = c->own_label ? NULL : copy(label, strlen(label));
  if (fresh) {
    free((char *)c->cfg.owner);
    c->cfg.owner = fresh;
  }
  c->self = NULL;
  enum dlock_err e = open_backend(c, &bad_url, msg);
  if (!e)
    c->generation = dlk_generation();
  return e;
}

const char *dlk_client_label(const struct dlk_client *c) { return c->cfg.owner; }

bool dlock_client_process_bound(const dlock_client *c) {
  return c->be->caps & DLK_CAP_PROCESS_BOUND;
}

dlock_op *dlock_client_close(dlock_client *c, dlock_bell *bell) {
  struct dlk_op *op = dlk_op_new(c, DLK_OP_CLOSE, !bell, bell);
  if (!op)
    return NULL;
  dlk_enter();
  c->closed = true;
  dlk_lock_close_all(c);
  if (c->locks) {
    op->next = c->closing;
    c->closing = op;
    op->refs++;
  } else {
    dlk_op_finish(op, DLOCK_E_OK, "%s", "");
  }
  dlk_client_tidy(c);
  dlk_leave();
  return op;
}

/* ---- queries ---- */

static void query_done(struct dlk_call *call) {
  struct dlk_op *op = call->ctx;
  bool timed_out = call->in_flight;
  dlk_enter();
  if (!call->late || timed_out) {
    if (!call->err && !op->done) {
      op->info = call->info;
      call->info = NULL;
    }
    dlk_op_finish(op, call->err, "%s", call->msg);
  }
  if (!timed_out) {
    dlk_op_put(op);
    free(call->ctx_buf);
    dlk_call_free(call);
  }
  dlk_leave();
}

dlock_op *dlock_ask(dlock_client *c, enum dlock_query q, const char *key, size_t len,
                    const struct dlock_how *h) {
  static const enum dlk_verb verb[] = {DLK_INSPECT, DLK_BREAK, DLK_LIST, DLK_PING};
  char msg[DLOCK_MSG_MAX];
  enum dlock_err e = dlk_client_ready(c, msg);
  struct dlk_op *op = dlk_op_new(c, DLK_OP_QUERY, h->blocking, h->bell);
  if (!op)
    return NULL;
  op->timeout_ms = h->timeout_ms;
  char *name = malloc(c->cfg.ns_len + len + 1);
  dlk_enter();
  struct dlk_call *call = name && !e ? dlk_call_new(c, verb[q], 0) : NULL;
  if (!e && c->closed)
    e = dlk_fail(msg, DLOCK_E_CLOSED, "the client is closed");
  if (!e && !call)
    e = dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  if (e) {
    free(name);
    if (call)
      dlk_call_free(call);
    dlk_op_finish(op, e, "%s", msg);
    dlk_leave();
    return op;
  }
  memcpy(name, c->cfg.ns, c->cfg.ns_len);
  memcpy(name + c->cfg.ns_len, key, len);
  name[c->cfg.ns_len + len] = 0;
  call->key = call->ctx_buf = name;
  call->key_len = c->cfg.ns_len + len;
  call->done = query_done;
  call->ctx = op;
  op->refs++;
  dlk_op_launch(op, call);
  return op;
}

/* ---- events and statistics ---- */

const char *dlock_event_name(enum dlock_event_type t) {
  static const char *const name[DLOCK_EV_COUNT] = {"acquired", "released", "lost", "renew_failed", "leaked", "notice"};
  return (unsigned)t < DLOCK_EV_COUNT ? name[t] : "notice";
}

static void drop_oldest(struct dlk_client *c) {
  struct dlk_event_node *n = c->ev_first;
  c->ev_first = n->next;
  if (!c->ev_first)
    c->ev_last = &c->ev_first;
  c->ev_n--;
  c->stats.events_dropped++;
  free(n->e.key);
  free(n);
}

void dlk_event(struct dlk_client *c, enum dlock_event_type type, struct dlk_lock *l, enum dlock_err code,
               const char *msg) {
  if (!c->cfg.events && type != DLOCK_EV_NOTICE)
    return; /* nobody listens: no memory is held for nothing */
  struct dlk_event_node *n = calloc(1, sizeof *n);
  if (!n) {
    c->stats.events_dropped++;
    return;
  }
  if (c->ev_n == DLK_EVENTS_MAX)
    drop_oldest(c);
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  n->e.type = type;
  n->e.code = code;
  n->e.time = (double)t.tv_sec + (double)t.tv_nsec / 1e9;
  snprintf(n->e.msg, sizeof n->e.msg, "%s", msg);
  if (l) {
    n->e.key = copy(l->item.name + c->cfg.ns_len, l->item.len - c->cfg.ns_len);
    n->e.key_len = n->e.key ? l->item.len - c->cfg.ns_len : 0;
    n->e.token = l->item.token;
    n->e.reason = l->reason;
  }
  *c->ev_last = n;
  c->ev_last = &n->next;
  c->ev_n++;
}

void dlk_notice(struct dlk_client *c, const char *fmt, ...) {
  char msg[DLOCK_MSG_MAX];
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(msg, sizeof msg, fmt, ap);
  va_end(ap);
  dlk_enter();
  dlk_event(c, DLOCK_EV_NOTICE, NULL, DLOCK_E_OK, msg);
  dlk_leave();
}

bool dlock_next_event(dlock_client *c, struct dlock_event *out) {
  dlk_enter();
  struct dlk_event_node *n = c->ev_first;
  if (n) {
    c->ev_first = n->next;
    if (!c->ev_first)
      c->ev_last = &c->ev_first;
    c->ev_n--;
  }
  dlk_leave();
  if (!n)
    return false;
  *out = n->e;
  free(n);
  return true;
}

int64_t dlk_now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void dlk_latency(struct dlock_latency *h, int64_t us) {
  uint64_t v = us > 0 ? (uint64_t)us : 0;
  unsigned i = 0;
  while (i + 1 < DLOCK_BUCKETS && v >= (uint64_t)64 << i)
    i++;
  h->n++;
  h->sum_us += v;
  h->bucket[i]++;
  if (v > h->max_us)
    h->max_us = v;
}

void dlk_count_connect(struct dlk_client *c) { __atomic_add_fetch(&c->connects, 1, __ATOMIC_RELAXED); }

void dlock_client_stats(dlock_client *c, struct dlock_stats *out) {
  dlk_enter();
  *out = c->stats;
  out->requests = __atomic_load_n(&c->requests, __ATOMIC_RELAXED);
  out->connects = __atomic_load_n(&c->connects, __ATOMIC_RELAXED);
  dlk_leave();
}
