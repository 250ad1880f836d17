/* What administrators ask: who stands in a line, which lines there are, who is
 * there; and the forced release. */
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "zk.h"

enum {
  SHOWN = 256, /* contenders whose data is read */
  ABREAST = 64 /* directories listed at a time */
};

/* ---- one line ---- */

struct place {
  char *data;
  size_t len;
  bool seen;
  struct Stat stat;
};

struct queue {
  char *dir;
  size_t n;
  struct place place[];
};

static void queue_free(void *more) {
  struct queue *q = more;
  for (size_t i = 0; i < q->n; i++)
    free(q->place[i].data);
  free(q->dir);
  free(q);
}

/* The answer of BREAK and INSPECT starts so; `ready` gets the line. */
static void took_names(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  k->rc_line = r->rc;
  zk_names_free(&k->line);
  if (r->rc == ZOK) {
    k->line = r->names;
    r->names = (struct zk_names){0};
    zk_names_line(&k->line);
  }
  zk_answered(k, r->rc);
}

static void took_place(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  struct place *p = &((struct queue *)k->more)->place[r->at];
  if (r->rc == ZOK) {
    p->seen = true;
    p->stat = r->stat;
    p->data = r->text;
    p->len = r->len;
    r->text = NULL;
  } else if (r->rc == ZNOAUTH) {
    p->seen = true; /* there, but another user's */
  }
  zk_answered(k, r->rc);
}

static void ask_places(struct zk_call *k, size_t most, void (*step)(struct zk_call *)) {
  size_t n = k->line.n < most ? k->line.n : most;
  struct queue *q = calloc(1, sizeof *q + (n + 1) * sizeof *q->place);
  char *dir = q ? zk_dir(k->z->root, k->call->key, k->call->key_len) : NULL;
  if (!dir) {
    free(q);
    zk_end(k, DLOCK_E_NOMEM, "out of memory");
    return;
  }
  q->dir = dir;
  q->n = n;
  if (k->more)
    k->more_free(k->more);
  k->more = q;
  k->more_free = queue_free;
  for (size_t i = 0; i < n; i++) {
    char *path = zk_join(dir, k->line.v[i]);
    struct zk_req *r = path ? zk_req(took_place, k, (unsigned)i) : NULL;
    zk_sent(k, r && zk_get(k->z, r, path, false));
    free(path);
  }
  zk_wait(k, step);
}

static bool cut(struct zk_call *k) {
  if (!k->lost)
    return false;
  zk_park(k);
  return true;
}

/* Asks for the line of call->key; true when it is on its way. */
static bool begin(struct zk_call *k, void (*step)(struct zk_call *)) {
  if (!zk_ready(k->z)) {
    zk_park(k);
    return false;
  }
  k->call->sent_ms = dlk_now_ms();
  char *dir = zk_dir(k->z->root, k->call->key, k->call->key_len);
  struct zk_req *r = dir ? zk_req(took_names, k, 0) : NULL;
  zk_sent(k, r && zk_children(k->z, r, dir));
  free(dir);
  zk_wait(k, step);
  return true;
}

static struct dlk_info *info(struct zk_call *k) {
  if (!k->call->info)
    k->call->info = dlk_info_new();
  if (!k->call->info)
    zk_end(k, DLOCK_E_NOMEM, "out of memory");
  return k->call->info;
}

static void answer(struct zk_call *k, bool ok) {
  k->call->out[0] = DLK_DONE;
  if (ok)
    zk_end(k, DLOCK_E_OK, "%s", "");
  else
    zk_end(k, DLOCK_E_NOMEM, "out of memory");
}

/* With zk_dialect = "both" one contender has two nodes, one behind the other. */
static bool same_contender(const struct place *a, const struct place *b) {
  size_t n;
  return a->data && b->data && a->len == b->len && !memcmp(a->data, b->data, a->len) &&
         dlk_owner_label(a->data, a->len, &n);
}

/* The label, or the data, or the node's name. */
static const char *label(const struct place *p, const char *name, size_t *len) {
  const char *own = p->data ? dlk_owner_label(p->data, p->len, len) : NULL;
  if (own)
    return own;
  const char *text = p->data && p->len ? p->data : name;
  *len = text == name ? strlen(name) : p->len;
  return text;
}

static int64_t wall_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static bool describe(struct dlk_info *i, const struct place *p, const char *name) {
  size_t n;
  const char *text = label(p, name, &n);
  i->found = true;
  i->ours = p->data && dlk_owner_label(p->data, p->len, &(size_t){0});
  i->owner = strndup(text, n);
  i->token = (uint64_t)p->stat.czxid;
  if (p->stat.ctime)
    i->age_ms = dlk_max(wall_ms() - p->stat.ctime, 0);
  return i->owner != NULL;
}

static void inspected(struct zk_call *k) {
  struct queue *q = k->more;
  const struct place *last = NULL;
  bool ok = true;
  if (cut(k))
    return;
  struct dlk_info *i = info(k);
  if (!i)
    return;
  for (size_t at = 0; at < q->n; at++) {
    const struct place *p = &q->place[at];
    size_t n;
    if (!p->seen || (last && same_contender(last, p)))
      continue;
    if (!last) {
      ok = describe(i, p, k->line.v[at]) && ok;
    } else {
      const char *text = label(p, k->line.v[at], &n);
      ok = dlk_info_add(i, text, n) && ok;
    }
    last = p;
  }
  answer(k, ok);
}

static void inspect_line(struct zk_call *k) {
  if (cut(k))
    return;
  if (k->rc_line != ZOK && k->rc_line != ZNONODE)
    zk_end_rc(k, k->rc_line);
  else
    ask_places(k, SHOWN, inspected);
}

void zk_run_inspect(struct zk_call *k) { begin(k, inspect_line); }

/* ---- forced release ---- */

static void took_broken(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  k->rc[r->at] = r->rc;
  zk_answered(k, r->rc);
}

static void broken(struct zk_call *k) {
  if (cut(k))
    return;
  int rc = k->rc[0] == ZOK || k->rc[0] == ZNONODE ? k->rc[1] : k->rc[0];
  if (rc != ZOK && rc != ZNONODE) {
    zk_end_rc(k, rc);
    return;
  }
  struct dlk_info *i = info(k);
  if (!i)
    return;
  i->found = true;
  answer(k, true);
}

static void break_first(struct zk_call *k) {
  struct queue *q = k->more;
  if (cut(k))
    return;
  size_t nodes = q->n > 1 && same_contender(&q->place[0], &q->place[1]) ? 2 : q->n > 0;
  if (!nodes) {
    struct dlk_info *i = info(k);
    if (i)
      answer(k, true);
    return;
  }
  k->rc[0] = k->rc[1] = ZOK;
  for (size_t n = 0; n < nodes; n++) {
    char *path = zk_join(q->dir, k->line.v[n]);
    struct zk_req *r = path ? zk_req(took_broken, k, (unsigned)n) : NULL;
    zk_sent(k, r && zk_delete(k->z, r, path));
    free(path);
  }
  zk_wait(k, broken);
}

static void break_line(struct zk_call *k) {
  if (cut(k))
    return;
  if (k->rc_line != ZOK && k->rc_line != ZNONODE)
    zk_end_rc(k, k->rc_line);
  else
    ask_places(k, 2, break_first);
}

void zk_run_break(struct zk_call *k) { begin(k, break_line); }

/* ---- all lines ---- */

struct walk {
  struct zk_names todo; /* directories, relative to the root; a stack */
  char *at[ABREAST];
  size_t room;
  bool failed;
  int rc;
};

static void walk_free(void *more) {
  struct walk *w = more;
  for (size_t i = 0; i < ABREAST; i++)
    free(w->at[i]);
  zk_names_free(&w->todo);
  free(w);
}

static bool push(struct walk *w, char *path) {
  if (w->todo.n == w->room) {
    size_t room = w->room * 2 + 64;
    char **v = realloc(w->todo.v, room * sizeof *v);
    if (!v) {
      free(path);
      return false;
    }
    w->todo.v = v;
    w->room = room;
  }
  w->todo.v[w->todo.n++] = path;
  return path != NULL || (w->todo.n--, false);
}

/* The key of a path below the root, which may have any bytes. Begins with "/"
 * where the prefix does, or where the key itself has to. */
static char *key_of(const char *path, bool slash, size_t *len) {
  char *copy = strdup(path), *text = malloc(strlen(path) + 2), *to = text;
  if (!copy || !text) {
    free(copy);
    free(text);
    return NULL;
  }
  char *rest = copy + 1;
  *to++ = '/';
  for (char *part; (part = strsep(&rest, "/"));) {
    to = zk_unescape(to, part);
    if (rest)
      *to++ = '/';
  }
  free(copy);
  *len = (size_t)(to - text);
  if (!slash && *len > 1 && text[1] != '/')
    memmove(text, text + 1, --*len);
  return text;
}

static bool may_hold(const struct dlk_call *c, const char *key, size_t len) {
  size_t n = len < c->key_len ? len : c->key_len;
  return !memcmp(key, c->key, n);
}

static bool visit(struct zk_call *k, const char *dir, struct zk_names *names) {
  struct walk *w = k->more;
  struct dlk_call *c = k->call;
  bool slash = c->key_len && *c->key == '/', ok = true, line = false;
  int32_t seq;
  size_t n;
  for (size_t i = 0; i < names->n && ok; i++) {
    if (zk_contender(names->v[i], &seq)) {
      line = true;
      continue;
    }
    if (!*dir && !*k->z->root && !strcmp(names->v[i], "zookeeper"))
      continue;
    char *path = zk_join(dir, names->v[i]);
    char *key = path ? key_of(path, slash, &n) : NULL;
    ok = key != NULL;
    if (ok && may_hold(c, key, n))
      ok = push(w, path);
    else
      free(path);
    free(key);
  }
  if (line && *dir && ok) {
    char *key = key_of(dir, slash, &n);
    ok = key && (n < c->key_len || memcmp(key, c->key, c->key_len) || dlk_info_add(c->info, key, n));
    free(key);
  }
  return ok;
}

static void took_dir(struct zk_req *r) {
  struct zk_call *k = r->ctx;
  struct walk *w = k->more;
  if (r->rc == ZOK && !visit(k, w->at[r->at], &r->names))
    w->failed = true;
  else if (r->rc != ZOK && r->rc != ZNONODE && r->rc != ZNOAUTH)
    w->rc = r->rc;
  zk_answered(k, r->rc);
}

static void walk_on(struct zk_call *k) {
  struct walk *w = k->more;
  if (cut(k))
    return;
  for (size_t i = 0; i < ABREAST; i++) {
    free(w->at[i]);
    w->at[i] = NULL;
  }
  if (w->failed || w->rc) {
    int rc = w->rc;
    if (w->failed)
      zk_end(k, DLOCK_E_NOMEM, "out of memory");
    else
      zk_end_rc(k, rc);
    return;
  }
  if (!w->todo.n) {
    answer(k, true);
    return;
  }
  for (size_t i = 0; i < ABREAST && w->todo.n; i++) {
    char *path = NULL;
    w->at[i] = w->todo.v[--w->todo.n];
    if (asprintf(&path, "%s%s", k->z->root, w->at[i]) < 0)
      path = NULL;
    struct zk_req *r = path ? zk_req(took_dir, k, (unsigned)i) : NULL;
    zk_sent(k, r && zk_children(k->z, r, *path ? path : "/"));
    free(path);
  }
  zk_wait(k, walk_on);
}

void zk_run_list(struct zk_call *k) {
  if (!zk_ready(k->z)) {
    zk_park(k);
    return;
  }
  dlk_info_free(k->call->info); /* a walk that was cut off starts over */
  k->call->info = NULL;
  if (k->more)
    k->more_free(k->more);
  struct walk *w = calloc(1, sizeof *w);
  k->more = w;
  k->more_free = walk_free;
  struct dlk_info *i = w ? info(k) : NULL;
  if (!w)
    zk_end(k, DLOCK_E_NOMEM, "out of memory");
  if (!i)
    return;
  k->call->sent_ms = dlk_now_ms();
  w->failed = !push(w, strdup(""));
  walk_on(k);
}

/* ---- ping ---- */

static void took_ping(struct zk_req *r) { zk_answered(r->ctx, r->rc); }

static void pinged(struct zk_call *k) {
  if (cut(k))
    return;
  struct zk_session *s = k->z->session;
  struct dlk_info *i = info(k);
  if (!i)
    return;
  char host[64] = "?", port[8] = "?";
  struct sockaddr_storage to;
  socklen_t len = sizeof to;
  /* The library's own function for this shares a buffer among all threads. */
  if (s && s->zh && zookeeper_get_connected_host(s->zh, (struct sockaddr *)&to, &len))
    getnameinfo((struct sockaddr *)&to, len, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
  bool ok = asprintf(&i->text, "ZooKeeper at %s:%s, session 0x%llx, timeout %.1f s", host, port,
                     s ? (unsigned long long)s->id : 0, s ? (double)s->timeout_ms / 1000 : 0) >= 0;
  if (!ok)
    i->text = NULL;
  answer(k, ok);
}

void zk_run_ping(struct zk_call *k) {
  if (!zk_ready(k->z)) {
    zk_park(k);
    return;
  }
  k->call->sent_ms = dlk_now_ms();
  struct zk_req *sync = zk_req(took_ping, k, 0), *look = zk_req(took_ping, k, 0);
  zk_sent(k, sync && zk_sync(k->z, sync));
  zk_sent(k, look && zk_exists(k->z, look, "/", false));
  zk_wait(k, pinged);
}
