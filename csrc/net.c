#include "net.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/un.h>
#include <unistd.h>

#include "engine.h"

/* A dead peer that sends nothing is noticed after 15 + 3 * 5 s. */
enum { LOOKUP_THREADS = 2, KEEP_IDLE_S = 15, KEEP_STEP_S = 5, KEEP_STEPS = 3 };
/* And one that does not even acknowledge what we sent, after this. */
enum { UNACKED_MS = 30000 };

/* ---- names ---- */

/* One look-up, shared by the stream that waits and the thread that works. */
struct dlk_net_lookup {
  struct dlk_net_lookup *next;
  char *host;
  char port[8];
  int efd; /* rung when the answer is there; closed with the last reference */
  int refs;
  bool abandoned, done;
  int err, sys; /* EAI_*, errno */
  struct addrinfo *found;
};

static struct {
  pthread_mutex_t m;
  pthread_once_t once;
  struct dlk_net_lookup *head, **tail;
  int threads;
} R = {.m = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT, .tail = &R.head};

static void lookup_before_fork(void) { pthread_mutex_lock(&R.m); }
static void lookup_in_parent(void) { pthread_mutex_unlock(&R.m); }

/* The threads are gone; what they held belongs to streams of the parent. */
static void lookup_in_child(void) {
  pthread_mutex_init(&R.m, NULL);
  R.head = NULL;
  R.tail = &R.head;
  R.threads = 0;
}

static void lookup_once(void) {
  pthread_atfork(lookup_before_fork, lookup_in_parent, lookup_in_child);
}

static void lookup_unref_locked(struct dlk_net_lookup *k) {
  if (--k->refs)
    return;
  if (k->found)
    freeaddrinfo(k->found);
  dlk_fd_close(k->efd);
  free(k->host);
  free(k);
}

static struct dlk_net_lookup *lookup_pop(void) {
  struct dlk_net_lookup *k = R.head;
  R.head = k->next;
  if (!R.head)
    R.tail = &R.head;
  return k;
}

static struct addrinfo stream_hints(int flags) {
  return (struct addrinfo){.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags};
}

static void lookup_run(struct dlk_net_lookup *k) {
  struct addrinfo hints = stream_hints(AI_NUMERICSERV), *found = NULL;
  int err = getaddrinfo(k->host, k->port, &hints, &found), sys = errno;
  uint64_t one = 1;
  pthread_mutex_lock(&R.m);
  k->err = err;
  k->sys = sys;
  k->found = err ? NULL : found;
  k->done = true;
  if (write(k->efd, &one, sizeof one) < 0) {
    /* Cannot happen on a fresh eventfd; the stream's deadline covers it. */
  }
}

static void *lookup_main(void *arg) {
  (void)arg;
  pthread_mutex_lock(&R.m);
  while (R.head) {
    struct dlk_net_lookup *k = lookup_pop();
    if (!k->abandoned) {
      pthread_mutex_unlock(&R.m);
      lookup_run(k); /* comes back with the mutex */
    }
    lookup_unref_locked(k);
  }
  R.threads--;
  pthread_mutex_unlock(&R.m);
  return NULL;
}

/* With R.m. All signals are blocked in the thread: they are the host's. */
static int lookup_thread(void) {
  sigset_t all, old;
  pthread_t t;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  int err = pthread_create(&t, NULL, lookup_main, NULL);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (err)
    return err;
  pthread_detach(t);
  R.threads++;
  return 0;
}

static void lookup_drop(struct dlk_net_lookup *k) {
  pthread_mutex_lock(&R.m);
  k->abandoned = true;
  lookup_unref_locked(k);
  pthread_mutex_unlock(&R.m);
}

/* 0 or errno. */
static int lookup_submit(struct dlk_net_lookup *k) {
  int err = 0;
  pthread_once(&R.once, lookup_once);
  pthread_mutex_lock(&R.m);
  k->next = NULL;
  *R.tail = k;
  R.tail = &k->next;
  k->refs++;
  if (R.threads < LOOKUP_THREADS)
    err = lookup_thread();
  if (err && R.threads) /* those that run will come to it */
    err = 0;
  if (err) {
    lookup_pop(); /* no thread, so no other entry: it is the only one */
    k->refs--;
  }
  pthread_mutex_unlock(&R.m);
  return err;
}

static struct dlk_net_lookup *lookup_new(const char *host, int port) {
  struct dlk_net_lookup *k = calloc(1, sizeof *k);
  if (!k)
    return NULL;
  k->refs = 1;
  k->host = strdup(host);
  k->efd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  snprintf(k->port, sizeof k->port, "%d", port);
  if (k->host && k->efd >= 0) {
    dlk_fd_own(k->efd);
    return k;
  }
  if (k->efd >= 0)
    close(k->efd);
  free(k->host);
  free(k);
  return NULL;
}

/* ---- the stream ---- */

static void net_failed(struct dlk_net *n) {
  char msg[DLOCK_MSG_MAX];
  memcpy(msg, n->msg, sizeof msg);
  dlk_net_close(n);
  n->ev->failed(n, msg);
}

static void say(struct dlk_net *n, const char *what) {
  snprintf(n->msg, sizeof n->msg, "%s: %s", n->to->label, what);
}

/* Takes the socket away, keeps the rest. */
static void drop_source(struct dlk_net *n) {
  if (n->src.fd < 0)
    return;
  dlk_source_del(&n->src);
  if (!n->lookup) /* else it is the look-up's */
    dlk_fd_close(n->src.fd);
  n->src.fd = -1;
}

void dlk_net_close(struct dlk_net *n) {
  if (n->state == DLK_NET_OFF)
    return;
  n->state = DLK_NET_OFF;
  if (n->generation != dlk_generation()) {
    /* The parent's: the fork handler closed the descriptor and the poller is gone. */
    n->src.fd = -1;
    n->lookup = NULL;
    return;
  }
  drop_source(n);
  dlk_timer_stop(&n->timer);
  if (n->lookup)
    lookup_drop(n->lookup);
  n->lookup = NULL;
}

static void tune(int fd, int family) {
  if (family == AF_UNIX)
    return;
  int on = 1, idle = KEEP_IDLE_S, step = KEEP_STEP_S, steps = KEEP_STEPS, unacked = UNACKED_MS;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &step, sizeof step);
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &steps, sizeof steps);
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacked, sizeof unacked);
}

/* TCP lets a socket connect to itself when the port that nobody listens on is
 * picked as its own; it would then keep the server from coming back. */
static bool to_itself(int fd) {
  struct sockaddr_storage a, b;
  socklen_t al = sizeof a, bl = sizeof b;
  memset(&a, 0, sizeof a);
  memset(&b, 0, sizeof b);
  if (getsockname(fd, (struct sockaddr *)&a, &al) || getpeername(fd, (struct sockaddr *)&b, &bl))
    return false;
  return a.ss_family != AF_UNIX && al == bl && !memcmp(&a, &b, al);
}

static void net_opened(struct dlk_net *n) {
  dlk_timer_stop(&n->timer);
  n->state = DLK_NET_OPEN;
  n->ev->opened(n);
}

/* True: on its way, or open. False: errno says why not. */
static bool connect_one(struct dlk_net *n, const struct dlk_net_addr *a) {
  int family = a->sa.ss_family;
  int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0)
    return false;
  dlk_fd_own(fd);
  tune(fd, family);
  int err = connect(fd, (const struct sockaddr *)&a->sa, a->len) ? errno : 0;
  if (err == EINPROGRESS || err == EINTR)
    err = 0;
  n->src.fd = fd;
  n->src.want = DLK_WRITE;
  if (!err)
    err = dlk_source_add(n->poller, &n->src);
  if (err) {
    dlk_fd_close(fd);
    n->src.fd = -1;
    errno = err;
  }
  return !err;
}

static void try_next(struct dlk_net *n) {
  while (n->next < n->n_addrs) {
    int64_t now = dlk_now_ms(), left = dlk_max(n->deadline - now, 0);
    int64_t share = left / (int64_t)(n->n_addrs - n->next);
    const struct dlk_net_addr *a = &n->addrs[n->next++];
    n->state = DLK_NET_CONNECT;
    if (!connect_one(n, a))
      say(n, strerror(errno));
    else if (dlk_timer_set(n->poller, &n->timer, now + share))
      return;
    else {
      say(n, strerror(ENOMEM));
      drop_source(n);
    }
  }
  net_failed(n);
}

static void take_addrs(struct dlk_net *n, const struct addrinfo *ai) {
  n->n_addrs = n->next = 0;
  for (; ai && n->n_addrs < DLK_NET_ADDRS; ai = ai->ai_next) {
    if (ai->ai_addrlen > sizeof n->addrs[0].sa)
      continue;
    n->addrs[n->n_addrs].len = ai->ai_addrlen;
    memcpy(&n->addrs[n->n_addrs++].sa, ai->ai_addr, ai->ai_addrlen);
  }
}

static void resolved(struct dlk_net *n) {
  struct dlk_net_lookup *k = n->lookup;
  pthread_mutex_lock(&R.m);
  bool done = k->done;
  pthread_mutex_unlock(&R.m);
  if (!done)
    return;
  drop_source(n);
  n->lookup = NULL;
  if (k->err)
    say(n, k->err == EAI_SYSTEM ? strerror(k->sys) : gai_strerror(k->err));
  else
    say(n, "the name has no address");
  take_addrs(n, k->found);
  lookup_drop(k);
  try_next(n);
}

static void connected(struct dlk_net *n) {
  int err = 0;
  socklen_t len = sizeof err;
  if (getsockopt(n->src.fd, SOL_SOCKET, SO_ERROR, &err, &len))
    err = errno;
  if (!err && to_itself(n->src.fd))
    err = ECONNREFUSED;
  if (!err) {
    net_opened(n);
    return;
  }
  say(n, strerror(err));
  drop_source(n);
  try_next(n);
}

static void net_ready(struct dlk_source *s, unsigned got) {
  struct dlk_net *n = (struct dlk_net *)((char *)s - offsetof(struct dlk_net, src));
  if (n->state == DLK_NET_RESOLVE)
    resolved(n);
  else if (n->state == DLK_NET_CONNECT)
    connected(n);
  else
    n->ev->ready(n, got);
}

static void net_late(struct dlk_timer *t) {
  struct dlk_net *n = (struct dlk_net *)((char *)t - offsetof(struct dlk_net, timer));
  bool naming = n->state == DLK_NET_RESOLVE;
  snprintf(n->msg, sizeof n->msg, "%s: %s within %lld ms", n->to->label,
           naming ? "the name was not resolved" : "no connection",
           (long long)(dlk_now_ms() - n->asked_ms));
  if (naming) {
    net_failed(n);
    return;
  }
  drop_source(n);
  try_next(n);
}

static void open_unix(struct dlk_net *n) {
  struct sockaddr_un *u = (struct sockaddr_un *)&n->addrs[0].sa;
  size_t len = strlen(n->to->path);
  if (len >= sizeof u->sun_path) {
    say(n, "the path is too long for a unix socket");
    net_failed(n);
    return;
  }
  memset(u, 0, sizeof *u);
  u->sun_family = AF_UNIX;
  memcpy(u->sun_path, n->to->path, len);
  n->addrs[0].len = sizeof *u;
  n->n_addrs = 1;
  try_next(n);
}

static void open_name(struct dlk_net *n) {
  n->state = DLK_NET_RESOLVE;
  n->lookup = lookup_new(n->to->host, n->to->port);
  int err = n->lookup ? lookup_submit(n->lookup) : errno;
  if (!err) {
    n->src.fd = n->lookup->efd;
    n->src.want = DLK_READ;
    err = dlk_source_add(n->poller, &n->src);
    if (err)
      n->src.fd = -1;
  }
  if (!err && !dlk_timer_set(n->poller, &n->timer, n->deadline))
    err = ENOMEM;
  if (err) {
    say(n, strerror(err));
    net_failed(n);
  }
}

static bool open_numeric(struct dlk_net *n) {
  char port[8];
  struct addrinfo hints = stream_hints(AI_NUMERICHOST | AI_NUMERICSERV), *ai = NULL;
  snprintf(port, sizeof port, "%d", n->to->port);
  if (getaddrinfo(n->to->host, port, &hints, &ai))
    return false;
  take_addrs(n, ai);
  freeaddrinfo(ai);
  try_next(n);
  return true;
}

void dlk_net_open(struct dlk_net *n, struct dlk_poller *p, const struct dlk_net_to *to,
                  int64_t timeout_ms, const struct dlk_net_events *ev) {
  memset(n, 0, sizeof *n);
  n->state = DLK_NET_CONNECT;
  n->ev = ev;
  n->to = to;
  n->poller = p;
  n->generation = dlk_generation();
  n->src.fd = -1;
  n->src.ready = net_ready;
  n->timer.fire = net_late;
  n->asked_ms = dlk_now_ms();
  n->deadline = dlk_after(n->asked_ms, timeout_ms);
  if (!to->host)
    open_unix(n);
  else if (!open_numeric(n))
    open_name(n);
}

void dlk_net_moved(struct dlk_net *n, struct dlk_poller *to) { n->poller = to; }

void dlk_net_want(struct dlk_net *n, unsigned want) { dlk_source_want(&n->src, want); }

static ssize_t outcome(ssize_t r) {
  if (r >= 0)
    return r;
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

ssize_t dlk_net_send(struct dlk_net *n, const void *buf, size_t len) {
  return outcome(send(n->src.fd, buf, len, MSG_NOSIGNAL));
}

ssize_t dlk_net_recv(struct dlk_net *n, void *buf, size_t len) {
  ssize_t r = recv(n->src.fd, buf, len, MSG_DONTWAIT);
  if (!r) {
    errno = 0;
    return -1;
  }
  return outcome(r);
}

bool dlk_net_stale(struct dlk_net *n) {
  char c;
  ssize_t r = recv(n->src.fd, &c, 1, MSG_PEEK | MSG_DONTWAIT);
  return r >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}
