/* Doorbells: how an event loop learns that operations have ended.
 *
 * Two kinds. An eventfd, for loops that poll descriptors. And a private stream
 * socket, for nginx, whose Lua API can read sockets but not watch descriptors:
 * the loop's side connects to a path in a directory of our own (0700), we accept
 * once, check that the peer is this very process, and remove path and directory.
 * Either carries no data, only "look": `rung` keeps at most one byte in flight,
 * so ringing never blocks and cannot be lost. While nobody is connected it stays
 * rung, and whoever connects next hears it at once.
 *
 * Which operations have ended is in the bell's list, so that a loop with
 * thousands of waiting coroutines looks only at those. Guarded by the engine
 * mutex. A forked child closed its copies of the descriptors, and their numbers may
 * be other files' by now: an eventfd bell gets a new one there, a socket bell has
 * nobody connected, and neither remembers operations, which were the parent's. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "lock.h"

struct dlk_bell {
  int refs; /* atomic */
  unsigned generation;
  bool socket, rung;
  int fd;       /* eventfd, or our end of the socket; -1: nobody is connected */
  int listener; /* -1: nobody is expected */
  struct sockaddr_un at;
  struct dlk_op *first, **last; /* ended, in that order */
};

static struct dlk_bell *bell_new(bool socket) {
  struct dlk_bell *b = calloc(1, sizeof *b);
  if (!b)
    return NULL;
  b->refs = 1;
  b->generation = dlk_generation();
  b->socket = socket;
  b->fd = b->listener = -1;
  b->last = &b->first;
  return b;
}

dlock_bell *dlock_bell_new(void) {
  struct dlk_bell *b = bell_new(false);
  if (!b)
    return NULL;
  b->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (b->fd < 0) {
    free(b);
    return NULL;
  }
  dlk_fd_own(b->fd);
  return b;
}

dlock_bell *dlock_bell_new_socket(void) { return bell_new(true); }

static void close_fd(int *fd) {
  if (*fd >= 0)
    dlk_fd_close(*fd);
  *fd = -1;
}

/* Path and directory exist from listen to accept only. */
static void stop_listening(struct dlk_bell *b) {
  if (b->listener < 0)
    return;
  close_fd(&b->listener);
  unlink(b->at.sun_path);
  *strrchr(b->at.sun_path, '/') = 0;
  rmdir(b->at.sun_path);
}

/* Mutex held. */
static void after_fork(struct dlk_bell *b) {
  if (b->generation == dlk_generation())
    return;
  b->generation = dlk_generation();
  b->rung = false;
  b->first = NULL;
  b->last = &b->first;
  b->listener = -1;
  b->fd = b->socket ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  dlk_fd_own(b->fd);
}

int dlock_bell_fd(dlock_bell *b) {
  dlk_enter();
  after_fork(b);
  int fd = b->fd;
  dlk_leave();
  return fd;
}

void dlk_bell_ref(struct dlk_bell *b) { __atomic_add_fetch(&b->refs, 1, __ATOMIC_RELAXED); }

void dlock_bell_unref(dlock_bell *b) {
  if (!b || __atomic_sub_fetch(&b->refs, 1, __ATOMIC_ACQ_REL) > 0)
    return;
  if (b->generation == dlk_generation()) {
    stop_listening(b);
    close_fd(&b->fd);
  }
  free(b);
}

/* ---- ringing ---- */

static void strike(const struct dlk_bell *b) {
  static const uint64_t one = 1;
  ssize_t n = b->socket ? send(b->fd, "!", 1, MSG_NOSIGNAL | MSG_DONTWAIT) : write(b->fd, &one, sizeof one);
  (void)n; /* a peer that is gone: the next one to connect hears it */
}

static void ring(struct dlk_bell *b) {
  if (!b->rung && b->fd >= 0)
    strike(b);
  b->rung = true;
}

void dlk_bell_ring(struct dlk_bell *b, struct dlk_op *op) {
  after_fork(b);
  op->bell_next = NULL;
  op->bell_link = b->last;
  *b->last = op;
  b->last = &op->bell_next;
  ring(b);
}

void dlk_bell_forget(struct dlk_bell *b, struct dlk_op *op) {
  if (!op->bell_link)
    return;
  *op->bell_link = op->bell_next;
  if (op->bell_next)
    op->bell_next->bell_link = op->bell_link;
  else
    b->last = op->bell_link;
  op->bell_link = NULL;
}

void dlock_bell_drain(dlock_bell *b) {
  dlk_enter();
  after_fork(b);
  uint64_t n;
  if (!b->socket && read(b->fd, &n, sizeof n) < 0) {
    /* EAGAIN: it was not rung. */
  }
  b->rung = false;
  dlk_leave();
}

uint64_t dlock_bell_next(dlock_bell *b) {
  dlk_enter();
  after_fork(b);
  struct dlk_op *op = b->first;
  uint64_t id = op ? op->id : 0;
  if (op)
    dlk_bell_forget(b, op);
  dlk_leave();
  return id;
}

void dlock_bell_nudge(dlock_bell *b) {
  dlk_enter();
  after_fork(b);
  ring(b);
  dlk_leave();
}

/* ---- the private socket ---- */

static bool make_path(struct sockaddr_un *at) {
  /* Services may have a read-only or a private /tmp; no environment decides. */
  static const char *const dirs[] = {"/tmp", "/dev/shm", "/run", "/var/tmp"};
  for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
    snprintf(at->sun_path, sizeof at->sun_path, "%s/dlock-bell-XXXXXX", dirs[i]);
    if (mkdtemp(at->sun_path)) {
      strcat(at->sun_path, "/s");
      return true;
    }
  }
  return false;
}

static int open_listener(struct dlk_bell *b) {
  b->at = (struct sockaddr_un){.sun_family = AF_UNIX};
  b->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (b->listener < 0)
    return errno;
  dlk_fd_own(b->listener);
  if (!make_path(&b->at)) {
    int err = errno;
    close_fd(&b->listener);
    return err;
  }
  if (bind(b->listener, (struct sockaddr *)&b->at, sizeof b->at) || listen(b->listener, 8)) {
    int err = errno;
    stop_listening(b);
    return err;
  }
  return 0;
}

const char *dlock_bell_listen(dlock_bell *b, char msg[DLOCK_MSG_MAX]) {
  if (!b->socket) {
    snprintf(msg, DLOCK_MSG_MAX, "this bell has no socket");
    return NULL;
  }
  dlk_enter();
  after_fork(b);
  stop_listening(b);
  close_fd(&b->fd);
  int err = open_listener(b);
  dlk_leave();
  if (!err)
    return b->at.sun_path;
  snprintf(msg, DLOCK_MSG_MAX, "no private socket could be made in /tmp, /dev/shm, /run or /var/tmp: %s", strerror(err));
  return NULL;
}

static bool is_our_process(int fd) {
  struct ucred who = {0};
  socklen_t n = sizeof who;
  return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) && who.pid == getpid();
}

bool dlock_bell_accept(dlock_bell *b) {
  dlk_enter();
  after_fork(b);
  int fd = -1;
  while (b->listener >= 0 && (fd = accept4(b->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0) {
    dlk_fd_own(fd);
    if (is_our_process(fd))
      break;
    dlk_fd_close(fd);
  }
  stop_listening(b);
  if (fd >= 0) {
    b->fd = fd;
    if (b->rung)
      strike(b);
  }
  dlk_leave();
  return fd >= 0;
}

void dlock_bell_hang_up(dlock_bell *b) {
  dlk_enter();
  after_fork(b);
  if (b->socket) {
    stop_listening(b);
    close_fd(&b->fd);
  }
  dlk_leave();
}
