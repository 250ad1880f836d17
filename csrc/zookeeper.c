/* ZooKeeper: a lock is a line of ephemeral sequential nodes under the key's path,
 * and the first in the line holds it. Curator's InterProcessMutex, Go's zk lock
 * and (by dialect) kazoo's Lock stand in the same line.
 *
 * A verb is a chain of steps, each a few requests sent back to back; it can be
 * run again from its start, because what is on the server is noted in its hold.
 * A connection that breaks parks the call, and it is run again on the next one. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zk.h"

enum {
  POLL_MS = 5000,    /* safety net under the watch */
  DOWN_POLL_MS = 1000,
  TRIES = 16         /* parents or own nodes that vanish under one call */
};

#define CALL_OF(t) ((struct zk_call *)((char *)(t)-offsetof(struct zk_call, end)))

/* ---- calls ---- */

void zk_sent(struct zk_call *k, bool ok) {
  if (ok)
    k->out++;
  else
    k->lost = true;
}

void zk_wait(struct zk_call *k, void (*step)(struct zk_call *)) {
  k->step = step;
  if (!k->out)
    step(k);
}

void zk_answered(struct zk_call *k, int rc) {
  if (zk_lost(rc))
    k->lost = true;
  if (!--k->out)
    k->step(k);
}

static void unpark(struct zk_call *k) {
  if (!k->link)
    return;
  *k->link = k->next;
  if (k->next)
    k->next->link = k->link;
  k->link = NULL;
}

static void finish(struct zk_call *k) {
  struct dlk_call *call = k->call;
  unpark(k);
  zk_names_free(&k->line);
  free(k->holder);
  if (k->more_free)
    k->more_free(k->more);
  free(k);
  dlk_call_done(call);
}

void zk_end(struct zk_call *k, enum dlock_err e, const char *fmt, ...) {
  if (e) {
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(k->call->msg, sizeof k->call->msg, fmt, ap);
    va_end(ap);
    k->call->err = e;
  }
  finish(k);
}

void zk_end_rc(struct zk_call *k, int rc) {
  if (rc == ZNOAUTH || rc == ZAUTHFAILED || rc == ZINVALIDACL)
    zk_end(k, DLOCK_E_AUTH, "ZooKeeper: %s", zerror(rc));
  else if (rc == ZNOCHILDRENFOREPHEMERALS)
    zk_end(k, DLOCK_E_FOREIGN, "the key's path leads through somebody's ephemeral node");
  else if (rc == ZUNIMPLEMENTED)
    zk_end(k, DLOCK_E_UNSUPPORTED, "the server has no container nodes: ZooKeeper 3.5 or later is needed");
  else
    zk_end(k, DLOCK_E_UNAVAILABLE, "ZooKeeper: %s", zerror(rc));
}

static void end_task(struct dlk_task *t) {
  struct zk_call *k = CALL_OF(t);
  zk_end(k, k->call->sent_ms ? DLOCK_E_INDETERMINATE : DLOCK_E_UNAVAILABLE, "no connection in time");
}

static void end_soon(struct zk_call *k) {
  k->end.run = end_task;
  dlk_post(&k->end);
}

void zk_park(struct zk_call *k) {
  struct zk *z = k->z;
  struct zk_call **at = &z->parked;
  k->lost = false;
  while (*at)
    at = &(*at)->next;
  k->next = NULL;
  k->link = at;
  *at = k;
  if (k->late)
    end_soon(k);
  else if (!zk_session(z))
    zk_end(k, DLOCK_E_NOMEM, "out of memory");
  else
    zk_connect_limit(z);
}

static struct zk_call *parked_now(struct zk *z) {
  struct zk_call *list = z->parked;
  z->parked = NULL;
  if (list)
    list->link = &list; /* only walked below */
  return list;
}

void zk_on_ready(struct zk *z) {
  struct zk_call *list = parked_now(z), *next;
  for (struct zk_call *k = list; k; k = next) {
    next = k->next;
    k->link = NULL;
    if (!k->late)
      k->run(k);
  }
  dlk_wake_all(z->client);
}

void zk_fail_parked(struct zk *z, enum dlock_err e, const char *msg) {
  struct zk_call *list = parked_now(z), *next;
  for (struct zk_call *k = list; k; k = next) {
    next = k->next;
    k->link = NULL;
    if (!k->late)
      zk_end(k, e, "%s", msg);
  }
}

/* ---- what a grant has on the server ---- */

static void hold_list(struct zk *z, struct zk_hold *h) {
  if (h->link)
    return;
  h->next = z->holds;
  h->link = &z->holds;
  if (h->next)
    h->next->link = &h->next;
  z->holds = h;
  zk_keep_alive(z);
}

/* Nothing of it is on the server any more. */
static void hold_clear(struct zk_hold *h) {
  for (int i = 0; i < 2; i++) {
    free(h->node[i]);
    h->node[i] = NULL;
  }
  free(h->watched);
  h->watched = NULL;
  h->unsure = h->deleting = false;
  h->czxid = 0;
  h->refused = 0;
  if (!h->link)
    return;
  *h->link = h->next;
  if (h->next)
    h->next->link = h->link;
  h->link = NULL;
}

static void hold_free(struct zk_hold *h) {
  if (!h)
    return;
  free(h->node[0]);
  free(h->node[1]);
  free(h->watched);
  free(h->dir);
  free(h);
}

static struct zk_hold *hold_of(struct zk *z, struct dlk_grant *g) {
  struct zk_hold *h = g->b;
  if (h)
    return h;
  h = calloc(1, sizeof *h);
  if (!h)
    return NULL;
  h->g = g;
  h->dir = zk_dir(z->root, g->items[0].name, g->items[0].len);
  if (!h->dir) {
    free(h);
    return NULL;
  }
  g->b = h;
  return h;
}

/* Its session is over, and took it along. */
static bool is_stale(const struct zk *z, const struct zk_hold *h) {
  return h->link && (!z->session || h->serial != z->session->serial);
}

static void set_queued(struct dlk_grant *g, bool on) {
  dlk_enter();
  g->queued = on;
  dlk_leave();
}

static void new_guid(struct zk_hold *h) {
  unsigned char r[16];
  dlk_random(r, sizeof r);
  for (size_t i = 0; i < sizeof r; i++)
    sprintf(h->guid + 2 * i, "%02x", r[i]);
}

/* `_c_UUID-lock-`, as Curator and Go write it, or `HEX__lock__`, as kazoo does. */
static char *prefix(const struct zk_hold *h, bool kazoo) {
  char *path = NULL;
  const char *g = h->guid;
  int n = kazoo ? asprintf(&path, "%s/%s__lock__", h->dir, g)
                : asprintf(&path, "%s/_c_%.8s-%.4s-%.4s-%.4s-%.12s-lock-", h->dir, g, g + 8, g + 12,
                           g + 16, g + 20);
  return n < 0 ? NULL : path;
}

static bool is_ours(const struct zk_hold *h, const char *name) {
  char plain[33] = "";
  size_t n = 0;
  if (!strncmp(name, "_c_", 3))
    name += 3;
  for (; *name && n < 32; name++)
    if (*name != '-')
      plain[n++] = *name;
  return n == 32 && !memcmp(plain, h->guid, 32);
}

/* ---- acquire: the steps ---- */

static void acquire_run(struct zk_call *k);
static void acquire_judge(struct zk_call *k);

static struct zk_hold *hold(const struct zk_call *k) { return k->call->grants[k->at]->b; }

static void busy(struct zk_call *k, int64_t retry_ms) {
  struct dlk_call *c = k->call;
  c->out[0] = DLK_BUSY;
  c->retry_ms = retry_ms;
  if (k->holder)
    snprintf(c->holder, sizeof c->holder, "%s", k->holder);
  zk_end(k, DLOCK_E_OK, "%s", "");
}

/* A waiter keeps its place: it goes on waiting, and looks again when connected. */
static void acquire_parted(struct zk_call *k) {
  struct zk_hold *h = hold(k);
  if (k->call->contend && h->link && !k->late)
    busy(k, DOWN_POLL_MS);
  else
    zk_park(k);
}

/* True: the call is over or will be; what its requests did is noted. */
static bool acquire_cut(struct zk_call *k) {
  if (k->lost || is_stale(k->z, hold(k))) {
    acquire_parted(k);
    return true;
  }
  if (k->late) {
    k->call->out[0] = DLK_BUSY; /* what it left is for the release to take away */
    zk_end(k, DLOCK_E_OK, "%s", "");
    return true;
  }
  return false;
}

static void took_line(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  zk_names_free(&k->line);
  k->rc_line = r->rc;
  if (r->rc == ZOK) {
    k->line = r->names;
    r->names = (struct zk_names){0};
    zk_names_line(&k->line);
  }
  zk_answered(k, r->rc);
}

static void ask_line(struct zk_call *k, const char *dir) {
  struct zk_req *r = zk_req(took_line, k, 0);
  zk_sent(k, r && zk_children(k->z, r, dir));
}

static void took_rc(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  if (r->at < 2)
    k->rc[r->at] = r->rc;
  if (r->rc == ZOK)
    k->stat = r->stat;
  zk_answered(k, r->rc);
}

/* The lower of the two comes first. */
static void set_nodes(struct zk_hold *h, char *a, char *b) {
  int32_t sa = 0, sb = 0;
  if (b && zk_contender(a, &sa) && zk_contender(b, &sb) && zk_before(b, sb, a, sa)) {
    h->node[0] = b;
    h->node[1] = a;
  } else {
    h->node[0] = a;
    h->node[1] = b;
  }
}

static void took_created(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  struct zk_hold *h = hold(k);
  k->rc[0] = r->rc;
  if (!zk_lost(r->rc))
    h->unsure = false;
  if (r->rc == ZOK && r->paths[0]) {
    set_nodes(h, strdup(r->ops[0].create_op.buf), strdup(r->ops[1].create_op.buf));
    h->unsure = !h->node[0] || !h->node[1];
  } else if (r->rc == ZOK) {
    h->node[0] = r->text;
    r->text = NULL;
    h->czxid = (uint64_t)r->stat.czxid;
    h->unsure = !h->node[0]; /* no memory: it is looked for by its GUID */
  }
  zk_answered(k, r->rc);
}

static void parents_made(struct zk_call *k) {
  if (acquire_cut(k))
    return;
  if (k->rc[0] != ZOK && k->rc[0] != ZNODEEXISTS && k->rc[0] != ZNONODE)
    zk_end_rc(k, k->rc[0]);
  else
    acquire_run(k);
}

/* Containers, which the server removes when they have become empty. */
static void make_parents(struct zk_call *k) {
  char *path = hold(k)->dir;
  for (char *slash = path; slash;) {
    slash = strchr(slash + 1, '/');
    struct zk_req *r = zk_req(took_rc, k, slash ? 2 : 0);
    if (slash)
      *slash = 0;
    zk_sent(k, r && zk_create(k->z, r, path, NULL, 0, ZOO_CONTAINER));
    if (slash)
      *slash = '/';
  }
  zk_wait(k, parents_made);
}

static void created(struct zk_call *k) {
  struct zk_hold *h = hold(k);
  if (!h->unsure && !h->node[0])
    hold_clear(h);
  if (acquire_cut(k))
    return;
  if (k->rc[0] == ZNONODE && ++k->tries < TRIES) {
    make_parents(k);
  } else if (k->rc[0] != ZOK) {
    k->call->sent_ms = 0;
    zk_end_rc(k, k->rc[0]);
  } else if (h->unsure) {
    zk_end(k, DLOCK_E_NOMEM, "out of memory");
  } else {
    acquire_judge(k);
  }
}

static void create(struct zk_call *k) {
  struct zk *z = k->z;
  struct zk_hold *h = hold(k);
  struct dlk_grant *g = h->g;
  new_guid(h);
  h->serial = z->session->serial;
  h->unsure = true;
  h->czxid = 0;
  hold_list(z, h);
  set_queued(g, true);
  struct zk_req *r = zk_req(took_created, k, 0);
  char *a = prefix(h, z->dialect == ZK_KAZOO);
  if (z->dialect == ZK_BOTH) {
    char *b = prefix(h, true);
    if (!r) {
      free(a);
      free(b);
    }
    zk_sent(k, r && zk_create_pair(z, r, a, b, g->owner, g->owner_len));
  } else {
    if (r && !a)
      zk_req_free(r);
    zk_sent(k, r && a &&
                   zk_create(z, r, a, g->owner, g->owner_len, ZOO_EPHEMERAL_SEQUENTIAL));
    free(a);
  }
  if (!k->out) { /* nothing was sent */
    hold_clear(h);
    set_queued(g, false);
  } else {
    ask_line(k, h->dir);
  }
  zk_wait(k, created);
}

/* After an unanswered create: is there a node with our GUID? */
static void found(struct zk_call *k) {
  struct zk_hold *h = hold(k);
  if (acquire_cut(k))
    return;
  if (k->rc_line != ZOK && k->rc_line != ZNONODE) {
    zk_end_rc(k, k->rc_line);
    return;
  }
  char *node[2] = {NULL, NULL};
  size_t n = 0;
  bool ok = true;
  for (size_t i = 0; i < k->line.n && n < 2; i++)
    if (is_ours(h, k->line.v[i])) {
      node[n] = zk_join(h->dir, k->line.v[i]);
      ok = node[n++] && ok;
    }
  if (!ok) {
    free(node[0]);
    free(node[1]);
    zk_end(k, DLOCK_E_NOMEM, "out of memory");
    return;
  }
  h->unsure = false;
  if (n)
    set_nodes(h, node[0], node[1]);
  else
    hold_clear(h);
  acquire_run(k);
}

static void find(struct zk_call *k, void (*step)(struct zk_call *)) {
  struct zk_req *r = zk_req(took_rc, k, 2);
  zk_sent(k, r && zk_sync(k->z, r)); /* a follower's list may be older than our create */
  ask_line(k, hold(k)->dir);
  zk_wait(k, step);
}

/* ---- acquire: the line ---- */

static const char *name_of(const char *path) { return strrchr(path, '/') + 1; }

static bool is_own(const struct zk_hold *h, const char *name) {
  return (h->node[0] && !strcmp(name_of(h->node[0]), name)) ||
         (h->node[1] && !strcmp(name_of(h->node[1]), name));
}

static void granted(struct zk_call *k) {
  struct zk_hold *h = hold(k);
  struct zk_session *s = k->z->session;
  zk_proved(s, k->call->sent_ms);
  free(h->watched);
  h->watched = NULL;
  set_queued(h->g, false);
  h->g->items[0].token = h->czxid;
  k->call->out[0] = DLK_DONE;
  zk_end(k, DLOCK_E_OK, "%s", "");
}

static void drop_own(struct zk_call *k, void (*step)(struct zk_call *)) {
  struct zk_hold *h = hold(k);
  k->rc[0] = k->rc[1] = ZOK;
  h->deleting = true;
  for (unsigned i = 0; i < 2; i++)
    if (h->node[i]) {
      struct zk_req *r = zk_req(took_rc, k, i);
      zk_sent(k, r && zk_delete(k->z, r, h->node[i]));
    }
  zk_wait(k, step);
}

static bool deleted(int rc) { return rc == ZOK || rc == ZNONODE; }

/* A node of an earlier session found by its GUID is about to go: away with it. */
static void ghost_gone(struct zk_call *k) {
  if (acquire_cut(k))
    return;
  if (!deleted(k->rc[0]) || !deleted(k->rc[1])) {
    zk_end_rc(k, deleted(k->rc[0]) ? k->rc[1] : k->rc[0]);
    return;
  }
  hold_clear(hold(k));
  acquire_run(k);
}

static void looked_at_own(struct zk_call *k) {
  struct zk_hold *h = hold(k);
  if (acquire_cut(k))
    return;
  if (k->rc[0] == ZOK && k->stat.ephemeralOwner == k->z->session->id) {
    h->czxid = (uint64_t)k->stat.czxid;
    granted(k);
  } else if (k->rc[0] == ZOK) {
    drop_own(k, ghost_gone);
  } else if (k->rc[0] == ZNONODE && ++k->tries < TRIES) {
    drop_own(k, ghost_gone);
  } else {
    zk_end_rc(k, k->rc[0]);
  }
}

static void left_line(struct zk_call *k) {
  struct zk_hold *h = hold(k);
  if (!k->lost && deleted(k->rc[0]) && deleted(k->rc[1])) {
    hold_clear(h);
    set_queued(h->g, false);
  }
  if (!acquire_cut(k))
    busy(k, POLL_MS);
}

static void took_holder(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  if (r->rc == ZOK && r->text) {
    free(k->holder);
    k->holder = r->text;
    r->text = NULL;
  }
  zk_answered(k, r->rc);
}

static void took_watch(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  k->rc[0] = r->rc;
  if (r->at && r->rc == ZOK && r->text) { /* the predecessor is the holder */
    free(k->holder);
    k->holder = r->text;
    r->text = NULL;
  }
  zk_answered(k, r->rc);
}

static void watching(struct zk_call *k);

/* Another user's node may be unreadable; that it exists can always be seen. */
static void watch_blind(struct zk_call *k) {
  struct zk_req *r = zk_req(took_watch, k, 0);
  zk_sent(k, r && zk_exists(k->z, r, hold(k)->watched, true));
  zk_wait(k, watching);
}

static void watching(struct zk_call *k) {
  if (acquire_cut(k))
    return;
  if (k->rc[0] == ZNONODE) {
    acquire_run(k); /* it went meanwhile */
  } else if (k->rc[0] == ZNOAUTH && !k->watch_refused) {
    k->watch_refused = true;
    watch_blind(k);
  } else if (k->rc[0] != ZOK) {
    zk_end_rc(k, k->rc[0]);
  } else {
    busy(k, POLL_MS);
  }
}

static void ask_holder(struct zk_call *k, const char *dir, const char *name) {
  struct zk_req *r = zk_req(took_holder, k, 0);
  char *path = zk_join(dir, name);
  if (r && path)
    zk_sent(k, zk_get(k->z, r, path, false));
  else if (r)
    zk_req_free(r);
  free(path);
}

/* Behind `before`, the highest of those that come before our lower node. */
static void stand_behind(struct zk_call *k, const char *first, const char *before) {
  struct zk_hold *h = hold(k);
  free(k->holder);
  k->holder = strdup(first); /* until its data is there; may stay so */
  if (!k->call->contend) {
    ask_holder(k, h->dir, first);
    drop_own(k, left_line);
    return;
  }
  free(h->watched);
  h->watched = zk_join(h->dir, before);
  struct zk_req *r = h->watched ? zk_req(took_watch, k, !strcmp(first, before)) : NULL;
  zk_sent(k, r && zk_get(k->z, r, h->watched, true));
  if (strcmp(first, before))
    ask_holder(k, h->dir, first);
  zk_wait(k, watching);
}

/* The line is there, and our nodes are in it or somebody took them out. */
static void acquire_judge(struct zk_call *k) {
  struct zk_hold *h = hold(k);
  const char *before = NULL;
  size_t own = 0;
  if (acquire_cut(k))
    return;
  if (k->rc_line != ZOK && k->rc_line != ZNONODE) {
    zk_end_rc(k, k->rc_line);
    return;
  }
  for (size_t i = 0; i < k->line.n; i++) {
    if (is_own(h, k->line.v[i]))
      own++;
    else if (!own)
      before = k->line.v[i];
  }
  if (own < 1u + (h->node[1] != NULL)) {
    if (++k->tries >= TRIES)
      zk_end(k, DLOCK_E_UNAVAILABLE, "somebody keeps deleting our place in the line");
    else
      drop_own(k, ghost_gone);
  } else if (before) {
    stand_behind(k, k->line.v[0], before);
  } else if (h->czxid) {
    granted(k);
  } else {
    struct zk_req *r = zk_req(took_rc, k, 0);
    zk_sent(k, r && zk_exists(k->z, r, h->node[0], false));
    zk_wait(k, looked_at_own);
  }
}

/* Never more than the server enforces. */
static void clamp_ttl(struct zk *z, struct dlk_grant *g) {
  dlk_enter();
  g->ttl_ms = dlk_min(g->ttl_ms, z->session->timeout_ms);
  dlk_leave();
}

static void acquire_run(struct zk_call *k) {
  struct zk *z = k->z;
  struct dlk_grant *g = k->call->grants[0];
  struct zk_hold *h = hold_of(z, g);
  if (!h) {
    zk_end(k, DLOCK_E_NOMEM, "out of memory");
    return;
  }
  bool waited = h->link != NULL;
  if (is_stale(z, h))
    hold_clear(h);
  if (!zk_ready(z)) {
    if (k->call->contend && waited && !k->late && zk_session(z))
      busy(k, DOWN_POLL_MS);
    else
      zk_park(k);
    return;
  }
  clamp_ttl(z, g);
  k->lost = false;
  k->call->sent_ms = dlk_now_ms();
  if (h->unsure) {
    find(k, found);
  } else if (h->node[0]) {
    ask_line(k, h->dir);
    zk_wait(k, acquire_judge);
  } else {
    create(k);
  }
}

/* ---- release ---- */

static void release_run(struct zk_call *k);

static void released(struct zk_call *k, enum dlk_outcome out) {
  struct dlk_call *c = k->call;
  struct zk_hold *h = hold(k);
  if (h)
    hold_clear(h);
  set_queued(c->grants[k->at], false);
  c->out[k->at] = out;
  if (++k->at < c->n)
    release_run(k);
  else
    zk_end(k, DLOCK_E_OK, "%s", "");
}

/* Refused for good: after the session's timeout the session is given up, since
 * nothing else takes the node away. */
static void release_refused(struct zk_call *k, int rc) {
  struct zk *z = k->z;
  struct zk_hold *h = hold(k);
  int64_t now = dlk_now_ms();
  if (!h->refused)
    h->refused = now;
  bool enough = zk_ready(z) && now - h->refused >= z->session->timeout_ms;
  zk_end_rc(k, rc);
  if (enough)
    zk_session_drop(z, "a lock's node could not be deleted");
}

static void release_deleted(struct zk_call *k) {
  struct zk_hold *h = hold(k);
  if (k->lost)
    zk_park(k);
  else if (!deleted(k->rc[0]) || !deleted(k->rc[1]))
    release_refused(k, deleted(k->rc[0]) ? k->rc[1] : k->rc[0]);
  else
    released(k, k->rc[0] == ZOK || h->refused || k->tries ? DLK_DONE : DLK_GONE);
}

/* Deletes what a create left whose answer never came, or never may. */
static void release_found(struct zk_call *k) {
  struct zk_hold *h = hold(k);
  if (k->lost) {
    zk_park(k);
    return;
  }
  if (k->rc_line != ZOK && k->rc_line != ZNONODE) {
    release_refused(k, k->rc_line);
    return;
  }
  for (size_t i = 0, n = 0; i < k->line.n && n < 2 && !h->node[0]; i++)
    if (is_ours(h, k->line.v[i])) {
      char *path = zk_join(h->dir, k->line.v[i]);
      struct zk_req *r = path ? zk_req(took_rc, k, (unsigned)n++) : NULL;
      zk_sent(k, r && zk_delete(k->z, r, path));
      free(path);
    }
  k->rc[0] = k->rc[1] = ZOK;
  if (h->node[0])
    release_run(k); /* the create was answered meanwhile */
  else
    zk_wait(k, release_deleted);
}

static void release_run(struct zk_call *k) {
  struct zk *z = k->z;
  struct zk_hold *h = hold(k);
  if (!h || !h->link || is_stale(z, h)) {
    released(k, h && h->link ? DLK_GONE : DLK_DONE);
    return;
  }
  if (!zk_ready(z)) {
    zk_park(k);
    return;
  }
  k->call->sent_ms = dlk_now_ms();
  k->tries = h->deleting; /* then "not there" may be our own work */
  if (h->node[0])
    drop_own(k, release_deleted);
  else
    find(k, release_found);
}

/* ---- renew ---- */

struct renewal {
  bool synced;
  int rc[];
};

static void took_sync(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  ((struct renewal *)k->more)->synced = r->rc == ZOK;
  zk_answered(k, r->rc);
}

static void took_look(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  struct dlk_call *c = k->call;
  struct zk_hold *h = c->grants[r->at]->b;
  bool same = r->rc == ZOK && (uint64_t)r->stat.czxid == h->czxid;
  c->out[r->at] = same ? DLK_DONE : DLK_GONE;
  ((struct renewal *)k->more)->rc[r->at] = r->rc;
  zk_answered(k, r->rc);
}

static void renewed(struct zk_call *k) {
  struct renewal *m = k->more;
  struct zk *z = k->z;
  int bad = ZOK;
  for (size_t i = 0; i < k->call->n; i++)
    if (m->rc[i] != ZOK && m->rc[i] != ZNONODE)
      bad = m->rc[i];
  if (k->lost || !m->synced) {
    zk_end(k, DLOCK_E_UNAVAILABLE, "the connection was lost, or the server has no leader");
  } else if (bad) {
    zk_end_rc(k, bad);
  } else {
    if (zk_ready(z))
      zk_proved(z->session, k->call->sent_ms);
    zk_end(k, DLOCK_E_OK, "%s", "");
  }
}

/* A ttl beyond the session's is granted as the session's. */
static void renew_ttl(struct zk_call *k, size_t i) {
  struct dlk_call *c = k->call;
  int64_t most = k->z->session->timeout_ms;
  dlk_enter();
  if (c->ttl_ms[i] > most) {
    if (c->grants[i]->ttl_ms == c->ttl_ms[i])
      c->grants[i]->ttl_ms = most;
    c->ttl_ms[i] = most;
  }
  dlk_leave();
}

static void renew_run(struct zk_call *k) {
  struct dlk_call *c = k->call;
  struct zk *z = k->z;
  if (!zk_ready(z)) {
    zk_end(k, DLOCK_E_UNAVAILABLE, "not connected to ZooKeeper");
    return;
  }
  struct renewal *m = calloc(1, sizeof *m + c->n * sizeof *m->rc);
  if (!m) {
    zk_end(k, DLOCK_E_NOMEM, "out of memory");
    return;
  }
  k->more = m;
  k->more_free = free;
  c->sent_ms = dlk_now_ms();
  struct zk_req *r = zk_req(took_sync, k, 0);
  zk_sent(k, r && zk_sync(z, r));
  for (size_t i = 0; i < c->n; i++) {
    struct zk_hold *h = c->grants[i]->b;
    renew_ttl(k, i);
    m->rc[i] = ZNONODE;
    c->out[i] = DLK_GONE;
    if (!h || !h->node[0] || is_stale(z, h))
      continue;
    r = zk_req(took_look, k, (unsigned)i);
    zk_sent(k, r && zk_exists(z, r, h->node[0], false));
  }
  zk_wait(k, renewed);
}

/* ---- the interface ---- */

static void zk_start(void *self, struct dlk_call *call) {
  static void (*const verbs[])(struct zk_call *) = {
      [DLK_ACQUIRE] = acquire_run, [DLK_RENEW] = renew_run,     [DLK_RELEASE] = release_run,
      [DLK_INSPECT] = zk_run_inspect, [DLK_BREAK] = zk_run_break, [DLK_LIST] = zk_run_list,
      [DLK_PING] = zk_run_ping};
  struct zk_call *k = calloc(1, sizeof *k);
  if (!k) {
    dlk_call_fail(call, DLOCK_E_NOMEM, "out of memory");
    return;
  }
  k->z = self;
  k->call = call;
  k->run = verbs[call->verb];
  call->via = k; /* for give_up; a session keeps its order, whatever connection it is on */
  k->run(k);
}

static void zk_give_up(void *self, struct dlk_call *call) {
  struct zk_call *k = call->via;
  (void)self;
  k->late = true;
  if (k->link)
    end_soon(k);
}

/* The watch stands since the try that found us waiting; what fired since then
 * woke the name already. */
static void zk_watch(void *self, struct dlk_grant *g, bool on) {
  struct zk_hold *h = g->b;
  (void)self;
  if (h && !on) {
    free(h->watched);
    h->watched = NULL;
  } else if (h && !h->watched && h->link) {
    struct zk *z = self;
    if (zk_ready(z))
      dlk_wake(z->client, g->items[0].name, g->items[0].len);
  }
}

void zk_on_change(struct zk *z, const char *path) {
  for (struct zk_hold *h = z->holds; h; h = h->next)
    if (h->watched && !strcmp(h->watched, path))
      dlk_wake(z->client, h->g->items[0].name, h->g->items[0].len);
}

void zk_on_over(struct zk *z) {
  dlk_wake_all(z->client);
  struct zk_call *list = parked_now(z), *next;
  for (struct zk_call *k = list; k; k = next) {
    next = k->next;
    k->link = NULL;
    if (!k->late)
      k->run(k); /* a release finds that its node went; the rest opens a new session */
  }
}

static void zk_forget(void *self, struct dlk_grant *g) {
  (void)self;
  hold_free(g->b);
  g->b = NULL;
}

/* ---- the table ---- */

static void zk_close(void *self) { zk_session_close(self); }

static const char *const schemes[] = {"zookeeper", NULL};

const struct dlk_backend dlk_zookeeper_backend = {
    .name = "zookeeper",
    .schemes = schemes,
    .caps = DLK_CAP_SESSION,
    .open = zk_open,
    .close = zk_close,
    .start = zk_start,
    .give_up = zk_give_up,
    .watch = zk_watch,
    .forget = zk_forget,
};
