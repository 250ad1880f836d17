/* One session of a client: opened at the first use, proved alive by our own
 * heartbeat, given up when it cannot be kept.
 *
 * libzookeeper tells of an expiry only when a server does, and a follower that
 * has lost its leader goes on answering reads and pings. So only a `sync` (which
 * goes through the leader) with a read behind it proves the session, and its
 * locks are valid until half the timeout after such a pair was *sent*: the
 * leader hears of a follower's sessions up to tickTime/2 <= timeout/4 late, and
 * the touch before may be one heartbeat (timeout/6) old. Without heartbeats
 * before it, it may be one ping of the library's (timeout/3) old: then a third. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "zk.h"

enum { BEAT_PART = 6, WARM_PART = 2, COLD_PART = 3 };

#define SESSION_OF(t) ((struct zk_session *)((char *)(t)-offsetof(struct zk_session, task)))
#define ZK_OF(t, field) ((struct zk *)((char *)(t)-offsetof(struct zk, field)))

/* ---- the library's messages ---- */

/* Its log callback has no context, so each client gets a function of its own;
 * what comes to a client beyond these goes nowhere. */
enum { SLOTS = 8, SAY_EVERY_MS = 1000 };
static struct {
  pthread_mutex_t m;
  struct zk *z[SLOTS];
  unsigned generation;
} slots = {.m = PTHREAD_MUTEX_INITIALIZER};

/* "time:pid(thread):ZOO_WARN@function@line: text": complaints only, as text. */
static const char *complaint(const char *line) {
  const char *at = strstr(line, ":ZOO_ERROR@");
  if (!at)
    at = strstr(line, ":ZOO_WARN@");
  const char *text = at ? strstr(at + 1, ": ") : NULL;
  return text ? text + 2 : NULL;
}

/* Taken down here, told on the loop: the library may be anywhere in its code. */
static void said(int slot, const char *line) {
  const char *text = complaint(line);
  if (!text)
    return;
  pthread_mutex_lock(&slots.m);
  struct zk *z = slots.generation == dlk_generation() ? slots.z[slot] : NULL;
  if (z)
    snprintf(z->said, sizeof z->said, "%s", text);
  pthread_mutex_unlock(&slots.m);
}

#define SLOT(n) \
  static void said_##n(const char *line) { said(n, line); }
SLOT(0) SLOT(1) SLOT(2) SLOT(3) SLOT(4) SLOT(5) SLOT(6) SLOT(7)
static void said_nowhere(const char *line) { (void)line; }
static const log_callback_fn callbacks[SLOTS + 1] = {said_0, said_1, said_2, said_3,      said_4,
                                                     said_5, said_6, said_7, said_nowhere};

/* Another thread may have been in there when the process forked. */
static void in_child(void) { pthread_mutex_init(&slots.m, NULL); }
static void init_once(void) { pthread_atfork(NULL, NULL, in_child); }

int zk_slot_take(struct zk *z) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  int slot = SLOTS;
  pthread_once(&once, init_once);
  pthread_mutex_lock(&slots.m);
  if (slots.generation != dlk_generation()) {
    memset(slots.z, 0, sizeof slots.z); /* the parent's */
    slots.generation = dlk_generation();
  }
  for (int i = SLOTS; i-- > 0;)
    if (!slots.z[i])
      slot = i;
  if (slot < SLOTS)
    slots.z[slot] = z;
  pthread_mutex_unlock(&slots.m);
  return slot;
}

static void slot_free(struct zk *z) {
  pthread_mutex_lock(&slots.m);
  if (z->slot < SLOTS && slots.z[z->slot] == z)
    slots.z[z->slot] = NULL;
  pthread_mutex_unlock(&slots.m);
}

void zk_said(struct zk *z, char *out, size_t size) {
  pthread_mutex_lock(&slots.m);
  snprintf(out, size, "%s", z->said);
  pthread_mutex_unlock(&slots.m);
}

/* A dead server makes the library complain many times a second. */
static void tell(struct zk *z, const char *what) {
  char text[sizeof z->said];
  int64_t now = dlk_now_ms();
  if (now < z->said_ms)
    return;
  z->said_ms = now + SAY_EVERY_MS;
  pthread_mutex_lock(&slots.m);
  memcpy(text, z->said, sizeof text);
  z->said[0] = 0;
  pthread_mutex_unlock(&slots.m);
  dlk_notice(z->client, "ZooKeeper: %s%s%s", what, *text ? ": " : "", text);
}

/* ---- threads for what may block ---- */

static bool in_thread(void *(*run)(void *), void *arg) {
  pthread_t t;
  pthread_attr_t attr;
  sigset_t all, old;
  if (pthread_attr_init(&attr))
    return false;
  pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old); /* the library's threads inherit it */
  bool ok = !pthread_create(&t, &attr, run, arg);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  pthread_attr_destroy(&attr);
  return ok;
}

/* ---- what the library tells ---- */

struct event {
  struct dlk_task task;
  struct zk_session *s;
  zhandle_t *zh;
  int type, state;
  char path[];
};

static bool same_peer(int fd, const struct sockaddr *to, socklen_t len) {
  struct sockaddr_storage peer;
  socklen_t n = sizeof peer;
  if (getpeername(fd, (struct sockaddr *)&peer, &n) || peer.ss_family != to->sa_family)
    return false;
  if (to->sa_family == AF_INET) {
    const struct sockaddr_in *a = (const void *)&peer, *b = (const void *)to;
    return a->sin_port == b->sin_port && a->sin_addr.s_addr == b->sin_addr.s_addr;
  }
  return n == len && !memcmp(&peer, to, n);
}

/* The library's socket is not close-on-exec, and it does not say which one it is:
 * all that lead to this server are ours, or an equal of ours. */
static void close_on_exec(zhandle_t *zh) {
  struct sockaddr_storage to;
  socklen_t len = sizeof to;
  DIR *dir = zookeeper_get_connected_host(zh, (struct sockaddr *)&to, &len)
                 ? opendir("/proc/self/fd")
                 : NULL;
  for (struct dirent *e; dir && (e = readdir(dir));) {
    int fd = atoi(e->d_name), flags = fcntl(fd, F_GETFD);
    if (flags >= 0 && !(flags & FD_CLOEXEC) && same_peer(fd, (struct sockaddr *)&to, len))
      fcntl(fd, F_SETFD, flags | FD_CLOEXEC);
  }
  if (dir)
    closedir(dir);
}

static void on_event(struct dlk_task *t);

static void watcher(zhandle_t *zh, int type, int state, const char *path, void *ctx) {
  if (type == ZOO_SESSION_EVENT && path && *path)
    return;
  if (type == ZOO_SESSION_EVENT && state == ZOO_CONNECTED_STATE)
    close_on_exec(zh);
  size_t n = path ? strlen(path) : 0;
  struct event *e = malloc(sizeof *e + n + 1);
  if (!e)
    return; /* the poll and the deadlines find it out */
  *e = (struct event){.task = {.run = on_event}, .s = ctx, .zh = zh, .type = type, .state = state};
  memcpy(e->path, path ? path : "", n + 1);
  dlk_post(&e->task);
}

/* As above, for watches: they get every session event once more. */
static void node_watcher(zhandle_t *zh, int type, int state, const char *path, void *ctx) {
  if (type != ZOO_SESSION_EVENT)
    watcher(zh, type, state, path, ctx);
}

/* Not before the opening thread has given the credentials to the handle: what is
 * sent before them has no owner. */
static void connected(struct zk_session *s) {
  struct zk *z = s->z;
  s->early = !s->opened;
  if (s->early)
    return;
  int64_t id = zoo_client_id(s->zh)->client_id;
  if (s->id && id != s->id) {
    zk_session_drop(z, "the server gave another session");
    return;
  }
  s->id = id;
  s->timeout_ms = zoo_recv_timeout(s->zh);
  s->ready = true;
  dlk_timer_stop(&z->give_up);
  dlk_count_connect(z->client);
  zk_keep_alive(z);
  zk_on_ready(z);
}

static void disconnected(struct zk_session *s) {
  struct zk *z = s->z;
  s->early = false;
  if (!s->ready)
    return;
  s->ready = false;
  s->down_ms = dlk_now_ms();
  tell(z, "disconnected");
  dlk_timer_stop(&z->beat);
  dlk_timer_set(dlk_loop(), &z->give_up, s->down_ms + s->timeout_ms);
}

static void session_event(struct zk_session *s, int state) {
  if (state == ZOO_CONNECTED_STATE)
    connected(s);
  else if (state == ZOO_EXPIRED_SESSION_STATE)
    zk_session_drop(s->z, "the session has expired");
  else if (state == ZOO_AUTH_FAILED_STATE) {
    zk_fail_parked(s->z, DLOCK_E_AUTH, "the server refused the credentials");
    zk_session_drop(s->z, "the server refused the credentials");
  } else {
    disconnected(s);
  }
}

static void on_event(struct dlk_task *t) {
  struct event *e = (struct event *)t;
  struct zk_session *s = e->s;
  if (!s->ended) {
    s->zh = e->zh; /* it may come before the opening thread's own word */
    if (e->type == ZOO_SESSION_EVENT)
      session_event(s, e->state);
    else if (e->type != ZOO_NOTWATCHING_EVENT)
      zk_on_change(s->z, e->path);
  }
  free(e);
}

/* ---- opening and closing ---- */

static void free_secret(char *s) {
  if (s)
    explicit_bzero(s, strlen(s));
  free(s);
}

static void zk_free(struct zk *z) {
  slot_free(z);
  free(z->root);
  free(z->hosts);
  free_secret(z->auth);
  free(z);
}

static void session_free(struct zk_session *s) {
  free(s->hosts);
  free_secret(s->auth);
  free(s);
}

static void answer(struct zk_req *r);

/* The last one takes a closed client's part with it. What the library had an
 * answer for when it was closed, it drops. */
static void session_gone(struct zk_session *s) {
  struct zk *z = s->z;
  while (s->reqs) {
    s->reqs->rc = ZCLOSING;
    answer(s->reqs);
  }
  session_free(s);
  if (!--z->sessions && z->closed)
    zk_free(z);
}

static void *closing(void *arg);

static void close_handle(struct zk_session *s) {
  if (!in_thread(closing, s))
    closing(s); /* no thread to be had: then the loop waits */
}

static void opened(struct dlk_task *t) {
  struct zk_session *s = SESSION_OF(t);
  struct zk *z = s->z;
  s->opened = true;
  s->zh = s->made;
  if (s->ended) { /* given up while it was being opened */
    if (s->zh)
      close_handle(s);
    else
      session_gone(s);
  } else if (!s->zh) {
    char msg[DLOCK_MSG_MAX];
    snprintf(msg, sizeof msg, "cannot reach ZooKeeper: %s",
             s->err == ENOENT || s->err == EINVAL ? "no such host" : strerror(s->err));
    z->session = NULL;
    session_gone(s);
    zk_fail_parked(z, DLOCK_E_UNAVAILABLE, msg);
  } else if (s->early) {
    connected(s);
  }
}

static void *opening(void *arg) {
  struct zk_session *s = arg;
  /* Else it re-seeds random(3), which is the program's, to shuffle the servers. */
  zoo_deterministic_conn_order(1);
  zhandle_t *zh = zookeeper_init2(s->hosts, watcher, (int)s->timeout_ms, NULL, s, 0,
                                  callbacks[s->z->slot]);
  if (!zh)
    s->err = errno ? errno : EIO;
  else if (s->auth)
    zoo_add_auth(zh, "digest", s->auth, (int)strlen(s->auth), NULL, NULL);
  free_secret(s->auth);
  s->auth = NULL;
  s->task.run = opened;
  s->made = zh;
  dlk_post(&s->task);
  return NULL;
}

/* Every earlier event and answer has run: they were posted before this. */
static void closed(struct dlk_task *t) { session_gone(SESSION_OF(t)); }

static void *closing(void *arg) {
  struct zk_session *s = arg;
  if (s->zh)
    zookeeper_close(s->zh); /* answers what is out with ZCLOSING, joins its threads */
  s->task.run = closed;
  dlk_post(&s->task);
  return NULL;
}

struct zk_session *zk_session(struct zk *z) {
  if (z->session)
    return z->session;
  struct zk_session *s = calloc(1, sizeof *s);
  if (!s)
    return NULL;
  s->z = z;
  s->serial = ++z->serial;
  s->timeout_ms = z->ask_ms;
  s->down_ms = dlk_now_ms();
  s->hosts = strdup(z->hosts);
  s->auth = z->auth ? strdup(z->auth) : NULL;
  z->session = s;
  z->sessions++;
  if (!s->hosts || (z->auth && !s->auth) || !in_thread(opening, s)) {
    z->session = NULL;
    session_gone(s);
    return NULL;
  }
  return s;
}

bool zk_ready(const struct zk *z) { return z->session && z->session->ready; }

/* The handle may not be there yet: then opened() closes it. */
static void end_session(struct zk_session *s) {
  s->ended = true;
  s->ready = false;
  if (s->opened)
    close_handle(s);
}

void zk_session_drop(struct zk *z, const char *why) {
  struct zk_session *s = z->session;
  char msg[DLOCK_MSG_MAX];
  if (!s)
    return;
  dlk_timer_stop(&z->beat);
  dlk_timer_stop(&z->give_up);
  z->session = NULL;
  end_session(s);
  snprintf(msg, sizeof msg, "the lock was lost with its session: %s", why);
  dlk_session_lost(z->client, msg);
  tell(z, why);
  zk_on_over(z);
}

void zk_session_close(struct zk *z) {
  dlk_timer_stop(&z->beat);
  dlk_timer_stop(&z->give_up);
  z->closed = true;
  if (z->session)
    end_session(z->session);
  else if (!z->sessions)
    zk_free(z);
}

/* ---- proofs ---- */

void zk_proved(struct zk_session *s, int64_t sent_ms) {
  bool warm = s->proved_ms && sent_ms - s->proved_ms <= s->timeout_ms / 5;
  int64_t until = sent_ms + s->timeout_ms / (warm ? WARM_PART : COLD_PART);
  s->proved_ms = dlk_max(s->proved_ms, sent_ms);
  if (until <= s->until)
    return;
  s->until = until;
  dlk_session_valid(s->z->client, until);
}

struct beat {
  struct zk *z;
  unsigned serial;
  int64_t sent_ms;
  bool synced;
  int out;
};

static void beat_answered(struct zk_req *r) {
  struct beat *b = r->ctx;
  struct zk_session *s = b->z->session;
  if (!r->at)
    b->synced = r->rc == ZOK;
  else if (b->synced && (r->rc == ZOK || r->rc == ZNONODE) && s && s->serial == b->serial)
    zk_proved(s, b->sent_ms);
  if (!--b->out)
    free(b);
}

static void send_beat(struct zk *z) {
  struct beat *b = calloc(1, sizeof *b);
  if (!b)
    return;
  *b = (struct beat){.z = z, .serial = z->serial, .sent_ms = dlk_now_ms(), .out = 1};
  struct zk_hold *h = z->holds;
  while (h && !h->node[0])
    h = h->next;
  struct zk_req *sync = zk_req(beat_answered, b, 0), *look = zk_req(beat_answered, b, 1);
  b->out += sync && zk_sync(z, sync);
  b->out += look && zk_exists(z, look, h ? h->node[0] : "/", false);
  if (!--b->out)
    free(b);
}

static void beat(struct dlk_timer *t) {
  struct zk *z = ZK_OF(t, beat);
  if (!zk_ready(z) || !z->holds)
    return;
  send_beat(z);
  dlk_timer_set(dlk_loop(), t, dlk_now_ms() + z->session->timeout_ms / BEAT_PART);
}

void zk_keep_alive(struct zk *z) {
  if (!z->beat.fire)
    z->beat.fire = beat;
  if (zk_ready(z) && z->holds && !z->beat.at)
    dlk_timer_set(dlk_loop(), &z->beat, dlk_now_ms() + z->session->timeout_ms / BEAT_PART);
}

/* Not connected for so long: the session is over at the server, or will be soon
 * after the server is back. Only if it is not ours any more can that be said. */
static void give_up(struct dlk_timer *t) {
  struct zk *z = ZK_OF(t, give_up);
  char text[sizeof z->said], msg[DLOCK_MSG_MAX];
  if (!z->session || z->session->ready)
    return;
  if (z->session->id) {
    zk_session_drop(z, "no server was reached for the whole session timeout");
    return;
  }
  zk_said(z, text, sizeof text);
  snprintf(msg, sizeof msg, "cannot reach ZooKeeper: %s", *text ? text : "no connection in time");
  zk_fail_parked(z, DLOCK_E_UNAVAILABLE, msg);
}

void zk_connect_limit(struct zk *z) {
  if (!z->give_up.fire)
    z->give_up.fire = give_up;
  if (z->session && !z->session->id && !z->give_up.at)
    dlk_timer_set(dlk_loop(), &z->give_up, dlk_now_ms() + z->connect_ms);
}

/* ---- requests ---- */

struct zk_req *zk_req(void (*then)(struct zk_req *), void *ctx, unsigned at) {
  struct zk_req *r = calloc(1, sizeof *r);
  if (r) {
    r->then = then;
    r->ctx = ctx;
    r->at = at;
  }
  return r;
}

void zk_req_free(struct zk_req *r) {
  zk_names_free(&r->names);
  free(r->text);
  free(r->paths[0]);
  free(r->paths[1]);
  free(r->ops[0].create_op.buf);
  free(r->ops[1].create_op.buf);
  free(r);
}

bool zk_lost(int rc) {
  return rc == ZCONNECTIONLOSS || rc == ZOPERATIONTIMEOUT || rc == ZCLOSING || rc == ZINVALIDSTATE ||
         rc == ZSESSIONEXPIRED || rc == ZSESSIONMOVED;
}

static void answer(struct zk_req *r) {
  *r->link = r->next;
  if (r->next)
    r->next->link = r->link;
  r->then(r);
  zk_req_free(r);
}

static void answered(struct dlk_task *t) { answer((struct zk_req *)t); }

static void post(struct zk_req *r, int rc) {
  r->rc = rc;
  r->task.run = answered;
  dlk_post(&r->task);
}

static void keep_text(struct zk_req *r, int rc, const char *text, size_t len) {
  if (rc == ZOK && text) {
    r->text = malloc(len + 1);
    if (r->text) {
      memcpy(r->text, text, len);
      r->text[len] = 0;
      r->len = len;
    }
  }
}

static void got_void(int rc, const void *data) { post((struct zk_req *)data, rc); }

static void got_string(int rc, const char *value, const void *data) {
  (void)value;
  post((struct zk_req *)data, rc);
}

static void got_created(int rc, const char *path, const struct Stat *stat, const void *data) {
  struct zk_req *r = (struct zk_req *)data;
  if (rc == ZOK && stat)
    r->stat = *stat;
  keep_text(r, rc, path, path ? strlen(path) : 0);
  post(r, rc);
}

static void got_stat(int rc, const struct Stat *stat, const void *data) {
  struct zk_req *r = (struct zk_req *)data;
  if (rc == ZOK && stat)
    r->stat = *stat;
  post(r, rc);
}

static void got_data(int rc, const char *value, int len, const struct Stat *stat,
                     const void *data) {
  struct zk_req *r = (struct zk_req *)data;
  if (rc == ZOK && stat)
    r->stat = *stat;
  keep_text(r, rc, value ? value : "", value && len > 0 ? (size_t)len : 0);
  post(r, rc);
}

static void got_names(int rc, const struct String_vector *names, const void *data) {
  struct zk_req *r = (struct zk_req *)data;
  if (rc == ZOK && !zk_names_copy(&r->names, names))
    rc = ZCONNECTIONLOSS; /* no memory: as if it had not come */
  post(r, rc);
}

/* The end of every function below. */
static bool sent(const struct zk *z, struct zk_req *r, int rc) {
  if (rc != ZOK) {
    zk_req_free(r);
    return false;
  }
  struct zk_session *s = z->session;
  r->next = s->reqs;
  r->link = &s->reqs;
  if (r->next)
    r->next->link = &r->next;
  s->reqs = r;
  return true;
}

static zhandle_t *handle(const struct zk *z) { return z->session ? z->session->zh : NULL; }

static const struct ACL_vector *acl(const struct zk *z) {
  return z->auth ? &ZOO_CREATOR_ALL_ACL : &ZOO_OPEN_ACL_UNSAFE;
}

bool zk_create(struct zk *z, struct zk_req *r, const char *path, const char *data, size_t len,
               int mode) {
  zhandle_t *zh = handle(z);
  if (!zh)
    return sent(z, r, ZINVALIDSTATE);
  return sent(z, r, zoo_acreate2(zh, path, data, data ? (int)len : -1, acl(z), mode, got_created, r));
}

static bool pair_op(struct zk *z, struct zk_req *r, int i, const char *data, size_t len) {
  size_t room = strlen(r->paths[i]) + 16; /* a short buffer cuts the number off, silently */
  char *buf = malloc(room);
  if (buf)
    zoo_create_op_init(&r->ops[i], r->paths[i], data, (int)len, acl(z), ZOO_EPHEMERAL_SEQUENTIAL, buf,
                       (int)room);
  return buf != NULL;
}

/* Takes the paths over as well. Their names come in ops[].create_op.buf. */
bool zk_create_pair(struct zk *z, struct zk_req *r, char *a, char *b, const char *data, size_t len) {
  zhandle_t *zh = handle(z);
  r->paths[0] = a;
  r->paths[1] = b;
  if (!zh || !a || !b || !pair_op(z, r, 0, data, len) || !pair_op(z, r, 1, data, len))
    return sent(z, r, ZINVALIDSTATE);
  return sent(z, r, zoo_amulti(zh, 2, r->ops, r->results, got_void, r));
}

bool zk_children(struct zk *z, struct zk_req *r, const char *path) {
  zhandle_t *zh = handle(z);
  return sent(z, r, zh ? zoo_aget_children(zh, path, 0, got_names, r) : ZINVALIDSTATE);
}

/* One watcher and one context for all: then the library keeps one watch a path. */
bool zk_get(struct zk *z, struct zk_req *r, const char *path, bool watch) {
  zhandle_t *zh = handle(z);
  if (!zh)
    return sent(z, r, ZINVALIDSTATE);
  return sent(z, r, zoo_awget(zh, path, watch ? node_watcher : NULL, z->session, got_data, r));
}

bool zk_exists(struct zk *z, struct zk_req *r, const char *path, bool watch) {
  zhandle_t *zh = handle(z);
  if (!zh)
    return sent(z, r, ZINVALIDSTATE);
  return sent(z, r, zoo_awexists(zh, path, watch ? node_watcher : NULL, z->session, got_stat, r));
}

bool zk_sync(struct zk *z, struct zk_req *r) {
  zhandle_t *zh = handle(z);
  return sent(z, r, zh ? zoo_async(zh, "/", got_string, r) : ZINVALIDSTATE);
}

bool zk_delete(struct zk *z, struct zk_req *r, const char *path) {
  zhandle_t *zh = handle(z);
  return sent(z, r, zh ? zoo_adelete(zh, path, -1, got_void, r) : ZINVALIDSTATE);
}
