/* The local backend: kernel file locks in a directory, no server.
 *
 * One file per key. An open-file-description lock on it is the lock: it dies
 * with the last descriptor, so the kernel frees what a killed process held. The
 * file's content is one record: the fencing counter, who took it last, and when.
 * It is written by the holder alone, before the lock is handed out.
 *
 * A path may come to name another file at any moment (a sweep, an administrator,
 * a cleaner of temporary files), and two files mean two holders. So a lock counts
 * only while the path still names the file that is locked: this is checked after
 * every locking, at every renewal, and whenever inotify reports the file.
 *
 * Thread rule: what is in lc_hold and the tables below is guarded by `mu`. With
 * `mu` held nothing of the engine is called; it may be taken with the engine's
 * mutex held. `fork_mu` comes before both. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "local_file.h"

enum {
  LC_DIR_MAX = 3500,
  LC_PATH_MAX = LC_DIR_MAX + DLK_FILE_NAME_MAX + 2,
  LC_TRIES = 16,       /* how often a path may change under one acquire */
  LC_POLL_MS = 1000,   /* safety net under inotify */
  LC_SOON_MAX_MS = 64, /* after an event: 1, 2, 4 .. this */
  LC_BLIND_MAX_MS = 50 /* without inotify: 1, 2, 4 .. this */
};
enum {
  LC_IDLE_S = 3600,               /* unused for this long: swept */
  LC_SWEEP_MS = LC_IDLE_S * 1000, /* at most one sweep of a directory in this time */
  LC_TOUCH_MS = LC_IDLE_S * 500,  /* held files: twice as often as they could go stale */
  LC_SLICE = 64,                  /* directory entries in one go on the loop */
  LC_SWEEP_MAX = 1 << 16
};

/* ---- state ---- */

struct lc_node {
  struct lc_node *next, **at; /* at NULL: in no list */
};

#define LC_OF(node, field) ((struct lc_hold *)((char *)(node)-offsetof(struct lc_hold, field)))

struct lc_self {
  struct dlk_client *client;
  unsigned gen;
  char *dir;
  int dirfd; /* O_PATH; replaced in place when the directory was */
  bool named;
  uid_t dir_uid;
  gid_t dir_gid;
  mode_t mode;       /* of new files */
  int64_t sweep_due; /* atomic */
  bool blind_told;   /* atomic: "inotify refused" was said */
};

/* A grant's part here: the open lock file of a waiter or holder. */
struct lc_hold {
  struct lc_self *self;
  struct dlk_grant *g;
  unsigned gen;
  int fd;
  bool held, watching, guarded;
  bool unguarded; /* guard(off) may overtake guard(on) of the same hold in another thread */
  bool blind;    /* inotify was refused for it */
  bool lent;     /* somebody else has a duplicate of the descriptor */
  bool told;     /* dlk_gone was called */
  int wd;        /* inotify's watch, shared by all holds of one file; -1 none */
  int64_t soon;  /* ms until a still-busy try is repeated; 0: the slow poll */
  uint64_t seen; /* largest token read for this name */
  struct lc_node by_wd, marked, holder;
  char file[DLK_FILE_NAME_MAX + 1];
};

enum { LC_BUCKETS = 1024 };

static struct {
  pthread_mutex_t mu;
  pthread_cond_t called;
  /* Held from before a lock file is opened until the engine knows the descriptor,
   * and over a fork: no child inherits one that it would not close. */
  pthread_mutex_t fork_mu;
  int init_err;
  size_t selves;
  int ino; /* the one inotify instance, or -1 */
  bool ino_on_loop, touch_set;
  struct lc_node *by_wd[LC_BUCKETS], *marked, *holders;
  struct lc_hold *calling; /* dlk_gone runs for it */
  struct dlk_source source;
  struct dlk_task setup;
  struct dlk_timer touch;
  struct lc_walk *sweeping;
  uint64_t top_token; /* atomic: largest this process has granted */
} L = {.mu = PTHREAD_MUTEX_INITIALIZER,
       .called = PTHREAD_COND_INITIALIZER,
       .fork_mu = PTHREAD_MUTEX_INITIALIZER,
       .ino = -1};

static pthread_once_t once = PTHREAD_ONCE_INIT;

static void lc_setup(struct dlk_task *t);
static void lc_touch(struct dlk_timer *t);
static void lc_ino_ready(struct dlk_source *s, unsigned got);

static void lc_link(struct lc_node **head, struct lc_node *n) {
  if (n->at) return;
  n->next = *head;
  n->at = head;
  if (*head) (*head)->at = &n->next;
  *head = n;
}

static void lc_unlink(struct lc_node *n) {
  if (!n->at) return;
  *n->at = n->next;
  if (n->next) n->next->at = n->at;
  n->at = NULL;
}

static void lc_before_fork(void) { pthread_mutex_lock(&L.fork_mu); }
static void lc_after_fork(void) { pthread_mutex_unlock(&L.fork_mu); }

/* The engine's handler has closed the descriptors. The tables may be half
 * changed (other threads had `mu`), so they are dropped, not walked; holds of
 * the parent are told by their generation. */
static void lc_in_child(void) {
  pthread_mutex_init(&L.fork_mu, NULL);
  pthread_mutex_init(&L.mu, NULL);
  pthread_cond_init(&L.called, NULL);
  L.selves = 0;
  L.ino = -1;
  L.ino_on_loop = L.touch_set = false;
  memset(L.by_wd, 0, sizeof L.by_wd);
  L.marked = L.holders = NULL;
  L.calling = NULL;
  L.sweeping = NULL;
  L.source = (struct dlk_source){.fd = -1, .ready = lc_ino_ready, .want = DLK_READ};
  L.setup = (struct dlk_task){.run = lc_setup};
  L.touch = (struct dlk_timer){.fire = lc_touch};
}

/* Handlers registered later run earlier before a fork: the engine's must come
 * first here, so that fork_mu is taken before the engine's mutexes. */
static void lc_once(void) {
  L.init_err = dlk_engine_init();
  if (!L.init_err) L.init_err = pthread_atfork(lc_before_fork, lc_after_fork, lc_in_child);
  L.source = (struct dlk_source){.fd = -1, .ready = lc_ino_ready, .want = DLK_READ};
  L.setup.run = lc_setup;
  L.touch.fire = lc_touch;
}

/* O_NONBLOCK: somebody may have put a fifo there. */
#define LC_OPEN (O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY)

/* Every descriptor that may carry a lock is opened here. -1 and errno. */
static int lc_open_own(int dirfd, const char *file, int flags) {
  pthread_mutex_lock(&L.fork_mu);
  int fd = openat(dirfd, file, LC_OPEN | O_RDWR | flags, 0600);
  int err = errno;
  dlk_fd_own(fd);
  pthread_mutex_unlock(&L.fork_mu);
  errno = err;
  return fd;
}

static int lc_open_read(int dirfd, const char *file) {
  return openat(dirfd, file, LC_OPEN | O_RDONLY);
}

static void lc_nap_us(long us) {
  struct timespec t = {0, us * 1000};
  nanosleep(&t, NULL);
}

static bool lc_begins(const char *s, const char *with) { return !strncmp(s, with, strlen(with)); }

static void lc_path(const char *dir, const char *file, char out[LC_PATH_MAX]) {
  snprintf(out, LC_PATH_MAX, "%s/%s", dir, file);
}

/* Unlocks before it closes: closing alone tells inotify's watchers *before* the
 * kernel drops the lock, and their next try would still find it taken. A lent
 * duplicate keeps the file open, so that nothing is told at all: touch it. */
static void lc_unlock_close(int fd, bool lent) {
  if (fd < 0) return;
  dlk_file_unlock(fd);
  if (lent) futimens(fd, NULL);
  dlk_fd_close(fd);
}

/* ---- the directory ---- */

static enum dlock_err lc_dir_fail(const struct lc_self *s, const char *what, char *msg) {
  return dlk_fail(msg, DLOCK_E_UNAVAILABLE, "lock directory %s: %s%s", s->dir, what,
                  s->named ? "" : "; a directory of your own can be named: local:///path");
}

/* Of the default directory, which lies among other users' files, every property
 * is checked; a named one is the caller's business. */
static enum dlock_err lc_dir_check(struct lc_self *s, int fd, char *msg) {
  struct stat st;
  if (fstat(fd, &st)) return lc_dir_fail(s, strerror(errno), msg);
  if (!s->named && st.st_uid != geteuid()) return lc_dir_fail(s, "it belongs to another user", msg);
  if (!s->named && (st.st_mode & 077))
    return lc_dir_fail(s, "other users have access to it (its mode must be 0700)", msg);
  const char *fs = dlk_file_foreign_fs(fd);
  if (fs)
    return dlk_fail(
        msg, DLOCK_E_UNSUPPORTED,
        "lock directory %s is on %s: file locks there are not this machine's own, and a "
        "killed holder's may stay or be lost; name a directory on a local file system",
        s->dir, fs);
  pthread_mutex_lock(&L.mu);
  s->mode = s->named ? (st.st_mode & 0666) | 0600 : 0600;
  s->dir_uid = st.st_uid;
  s->dir_gid = st.st_gid;
  pthread_mutex_unlock(&L.mu);
  return DLOCK_E_OK;
}

static enum dlock_err lc_dir_open(struct lc_self *s, int *out, char *msg) {
  int flags = O_PATH | O_DIRECTORY | O_CLOEXEC | (s->named ? 0 : O_NOFOLLOW);
  int fd = open(s->dir, flags);
  if (fd < 0 && errno == ENOENT && (!mkdir(s->dir, 0700) || errno == EEXIST))
    fd = open(s->dir, flags);
  if (fd < 0)
    return lc_dir_fail(
        s, errno == ENOTDIR ? "not a directory, or a symbolic link" : strerror(errno), msg);
  enum dlock_err e = lc_dir_check(s, fd, msg);
  if (e) {
    close(fd);
    return e;
  }
  *out = fd;
  return DLOCK_E_OK;
}

static bool lc_same_inode(const struct stat *a, const struct stat *b) {
  return a->st_ino == b->st_ino && a->st_dev == b->st_dev;
}

/* The path may have come to name another directory, or none; then everybody who
 * connects from now on is there, and so must we be. */
static enum dlock_err lc_dir_again(struct lc_self *s, char *msg) {
  struct stat a, b;
  int fd;
  if (!stat(s->dir, &a) && !fstat(s->dirfd, &b) && lc_same_inode(&a, &b)) return DLOCK_E_OK;
  enum dlock_err e = lc_dir_open(s, &fd, msg);
  if (e) return e;
  /* In place: other threads use the number. */
  int r = dup3(fd, s->dirfd, O_CLOEXEC);
  close(fd);
  return r < 0 ? lc_dir_fail(s, strerror(errno), msg) : DLOCK_E_OK;
}

/* ---- the lock file ---- */

enum lc_path_state { LC_OURS, LC_REPLACED, LC_UNSURE };

/* Does the path still name this file? The whole path, not the directory's
 * descriptor: a directory that was moved away has no newcomers any more. The
 * link count too: an unlink tells inotify before the path stops resolving. */
static enum lc_path_state lc_where(const char *dir, const char *file, int fd, struct stat *st) {
  char path[LC_PATH_MAX];
  struct stat now;
  lc_path(dir, file, path);
  if (fstat(fd, st)) return LC_UNSURE;
  if (lstat(path, &now)) return errno == ENOENT || errno == ENOTDIR ? LC_REPLACED : LC_UNSURE;
  return st->st_nlink > 0 && lc_same_inode(st, &now) ? LC_OURS : LC_REPLACED;
}

/* In a shared directory the maker's umask must not keep the others out. Where
 * the owner cannot be changed the mode alone has to do. */
static void lc_share(const struct lc_self *s, int fd) {
  pthread_mutex_lock(&L.mu);
  uid_t uid = geteuid() == 0 ? s->dir_uid : (uid_t)-1;
  gid_t gid = s->dir_gid;
  mode_t mode = s->mode;
  pthread_mutex_unlock(&L.mu);
  if (s->named && fchown(fd, uid, gid)) {
    /* Not in that group: what the mode gives to everybody has to do. */
  }
  fchmod(fd, mode);
}

/* Another user's file between its creation and its fchmod? */
static bool lc_is_new(const struct lc_self *s, const char *file) {
  struct stat st;
  return s->named && !fstatat(s->dirfd, file, &st, AT_SYMLINK_NOFOLLOW) && S_ISREG(st.st_mode) &&
         st.st_uid != geteuid() && time(NULL) - st.st_ctime <= 1;
}

/* Without O_CREAT first: in a sticky directory the kernel may refuse O_CREAT on
 * another user's file (fs.protected_regular). -1, and errno; ESTALE: the
 * directory is gone. */
static int lc_open_file(const struct lc_self *s, const char *file) {
  for (int naps = 0, i = 0; i < LC_TRIES; i++) {
    int fd = lc_open_own(s->dirfd, file, 0);
    if (fd >= 0) return fd;
    if (errno == EACCES && lc_is_new(s, file) && naps++ < 20) {
      lc_nap_us(200);
      i--;
      continue;
    }
    if (errno != ENOENT) return -1;
    fd = lc_open_own(s->dirfd, file, O_CREAT | O_EXCL);
    if (fd >= 0) {
      lc_share(s, fd);
      return fd;
    }
    if (errno == ENOENT) errno = ESTALE;
    if (errno != EEXIST) return -1;
  }
  errno = EAGAIN;
  return -1;
}

static enum dlock_err lc_not_ours(const struct lc_self *s, const char *file, const char *what,
                                  char *msg) {
  return dlk_fail(msg, DLOCK_E_FOREIGN, "%s/%s is no lock file of dlock: %s", s->dir, file, what);
}

static enum dlock_err lc_file_fail(const struct lc_self *s, const char *file, int err, char *msg) {
  if (err == ELOOP) return lc_not_ours(s, file, "it is a symbolic link", msg);
  if (err == EISDIR || err == ENXIO || err == ENODEV)
    return lc_not_ours(s, file, "it is no regular file", msg);
  return dlk_fail(msg, DLOCK_E_UNAVAILABLE, "lock file %s/%s: %s", s->dir, file, strerror(err));
}

/* ---- inotify ---- */

#define LC_GUARD_MASK (IN_ATTRIB | IN_MOVE_SELF | IN_DELETE_SELF)
#define LC_WAIT_MASK (LC_GUARD_MASK | IN_CLOSE_WRITE)

static void lc_blind(struct lc_self *s, int err) {
  if (!__atomic_exchange_n(&s->blind_told, true, __ATOMIC_RELAXED))
    dlk_notice(
        s->client,
        "inotify refuses (%s): waiting polls every 1 to %d ms, and a lock file that is removed "
        "is noticed at the next renewal",
        strerror(err), LC_BLIND_MAX_MS);
}

/* 0 or errno. The instance is made without `mu`, since the engine is told of it. */
static int lc_ino_open(void) {
  pthread_mutex_lock(&L.mu);
  bool have = L.ino >= 0;
  pthread_mutex_unlock(&L.mu);
  if (have) return 0;
  pthread_mutex_lock(&L.fork_mu);
  int fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK), err = errno;
  dlk_fd_own(fd);
  pthread_mutex_unlock(&L.fork_mu);
  if (fd < 0) return err;
  pthread_mutex_lock(&L.mu);
  if (L.ino < 0) {
    L.ino = fd;
    fd = -1;
  }
  pthread_mutex_unlock(&L.mu);
  dlk_fd_close(fd);
  return 0;
}

static struct lc_node **lc_bucket(int wd) { return &L.by_wd[(unsigned)wd % LC_BUCKETS]; }

static bool lc_wd_used(int wd) {
  for (struct lc_node *n = *lc_bucket(wd); n; n = n->next)
    if (LC_OF(n, by_wd)->wd == wd) return true;
  return false;
}

static void lc_unwatch(struct lc_hold *h) {
  if (h->wd < 0) return;
  lc_unlink(&h->by_wd);
  if (!lc_wd_used(h->wd)) inotify_rm_watch(L.ino, h->wd);
  h->wd = -1;
}

/* With mu. 0 or errno. The kernel watches what the path names now; if that is
 * another file, the caller's next look at the path says so. */
static int lc_watch_file(struct lc_hold *h) {
  char path[LC_PATH_MAX];
  if (L.ino < 0) return EMFILE;
  lc_path(h->self->dir, h->file, path);
  int wd = inotify_add_watch(
      L.ino, path, (h->watching ? LC_WAIT_MASK : LC_GUARD_MASK) | IN_MASK_ADD | IN_DONT_FOLLOW);
  if (wd < 0) return errno == ENOENT || errno == ENOTDIR ? 0 : errno;
  if (wd != h->wd) {
    lc_unwatch(h);
    h->wd = wd;
    lc_link(lc_bucket(wd), &h->by_wd);
  }
  return 0;
}

static void lc_mark(struct lc_hold *h) { lc_link(&L.marked, &h->marked); }

static void lc_mark_wd(int wd, bool ended) {
  for (struct lc_node *n = *lc_bucket(wd), *next; n; n = next) {
    struct lc_hold *h = LC_OF(n, by_wd);
    next = n->next;
    if (h->wd != wd) continue;
    lc_mark(h);
    if (ended) {
      lc_unlink(n);
      h->wd = -1;
    }
  }
}

/* Events were lost, or inotify itself: everybody has to look. */
static void lc_mark_all(bool ended) {
  for (size_t i = 0; i < LC_BUCKETS; i++)
    for (struct lc_node *n = L.by_wd[i], *next; n; n = next) {
      struct lc_hold *h = LC_OF(n, by_wd);
      next = n->next;
      lc_mark(h);
      if (ended) {
        lc_unlink(n);
        h->wd = -1;
        h->blind = true;
      }
    }
}

/* With mu, on the loop; lets go of it for the call. The name is copied and the
 * client outlives the call, since it is closed on this thread. */
static void lc_tell_waiter(struct lc_hold *h) {
  char name[DLOCK_KEY_MAX + 1];
  struct dlk_client *c = h->self->client;
  size_t len = h->g->items[0].len;
  memcpy(name, h->g->items[0].name, len);
  h->soon = 1;
  pthread_mutex_unlock(&L.mu);
  dlk_wake(c, name, len);
  pthread_mutex_lock(&L.mu);
}

/* As above. The grant stays valid: guard(off) waits while `calling` names it. */
static void lc_tell_holder(struct lc_hold *h) {
  struct dlk_client *c = h->self->client;
  struct dlk_grant *g = h->g;
  char msg[DLOCK_MSG_MAX];
  struct stat st;
  if (h->told || h->fd < 0 || lc_where(h->self->dir, h->file, h->fd, &st) != LC_REPLACED) return;
  h->told = true;
  snprintf(msg, sizeof msg, "the lock file %s/%s was removed or replaced", h->self->dir, h->file);
  L.calling = h;
  pthread_mutex_unlock(&L.mu);
  dlk_gone(c, g, DLOCK_R_DELETED, msg);
  pthread_mutex_lock(&L.mu);
  L.calling = NULL;
  pthread_cond_broadcast(&L.called);
}

static void lc_dispatch(void) {
  pthread_mutex_lock(&L.mu);
  while (L.marked) {
    struct lc_hold *h = LC_OF(L.marked, marked);
    lc_unlink(&h->marked);
    if (h->held && h->guarded)
      lc_tell_holder(h);
    else if (h->watching)
      lc_tell_waiter(h);
  }
  pthread_mutex_unlock(&L.mu);
}

static void lc_events(const char *buf, ssize_t n) {
  pthread_mutex_lock(&L.mu);
  for (const char *p = buf; p < buf + n;) {
    const struct inotify_event *ev = (const struct inotify_event *)(const void *)p;
    if (ev->mask & IN_Q_OVERFLOW)
      lc_mark_all(false);
    else
      lc_mark_wd(ev->wd, ev->mask & IN_IGNORED);
    p += sizeof *ev + ev->len;
  }
  pthread_mutex_unlock(&L.mu);
}

static void lc_ino_ready(struct dlk_source *s, unsigned got) {
  _Alignas(struct inotify_event) char buf[8192];
  ssize_t n;
  (void)got;
  for (int i = 0; i < 16 && (n = read(s->fd, buf, sizeof buf)) > 0; i++) lc_events(buf, n);
  lc_dispatch();
}

static void lc_touch_in(struct dlk_timer *t) {
  if (dlk_timer_set(dlk_loop(), t, dlk_now_ms() + LC_TOUCH_MS)) return;
  pthread_mutex_lock(&L.mu);
  L.touch_set = false; /* the next guard() tries again */
  pthread_mutex_unlock(&L.mu);
}

/* On the loop: what guard() and watch() need there. */
static void lc_setup(struct dlk_task *t) {
  (void)t;
  pthread_mutex_lock(&L.mu);
  bool add = L.ino >= 0 && !L.ino_on_loop, touch = L.holders && !L.touch_set;
  int fd = L.ino;
  L.ino_on_loop = L.ino >= 0;
  L.touch_set = L.touch_set || touch;
  pthread_mutex_unlock(&L.mu);
  if (add) {
    L.source.fd = fd;
    if (dlk_source_add(dlk_loop(), &L.source)) {
      pthread_mutex_lock(&L.mu);
      L.ino = -1;
      L.ino_on_loop = false;
      lc_mark_all(true);
      pthread_mutex_unlock(&L.mu);
      dlk_fd_close(fd);
    }
  }
  if (touch) lc_touch_in(&L.touch);
  lc_dispatch();
}

/* Cleaners of temporary files go by the times of a file. */
static void lc_touch(struct dlk_timer *t) {
  pthread_mutex_lock(&L.mu);
  for (struct lc_node *n = L.holders; n; n = n->next)
    if (LC_OF(n, holder)->fd >= 0) futimens(LC_OF(n, holder)->fd, NULL);
  bool more = L.touch_set = L.holders != NULL;
  pthread_mutex_unlock(&L.mu);
  if (more) lc_touch_in(t);
}

/* ---- holds ---- */

static bool lc_mine(const struct lc_hold *h) { return h && h->gen == dlk_generation(); }

static struct lc_hold *lc_hold_of(struct lc_self *s, struct dlk_grant *g) {
  struct lc_hold *h = g->b;
  if (lc_mine(h)) return h;
  if (!h) h = malloc(sizeof *h);
  if (!h) return NULL;
  *h = (struct lc_hold){.self = s, .g = g, .gen = dlk_generation(), .fd = -1, .wd = -1};
  if (!dlk_file_name(g->items[0].name, g->items[0].len, h->file)) {
    free(h);
    h = NULL;
  }
  return g->b = h;
}

/* Takes the descriptor out, so that it is closed once and by one thread. */
static int lc_take_fd(struct lc_hold *h, bool *lent) {
  pthread_mutex_lock(&L.mu);
  int fd = h->fd;
  *lent = h->lent;
  h->fd = -1;
  h->held = h->lent = h->guarded = false;
  lc_unwatch(h);
  lc_unlink(&h->holder);
  lc_unlink(&h->marked);
  pthread_mutex_unlock(&L.mu);
  return fd;
}

static void lc_drop(struct lc_hold *h) {
  bool lent;
  int fd = lc_take_fd(h, &lent);
  lc_unlock_close(fd, lent);
}

static void lc_put_fd(struct lc_hold *h, int fd) {
  int err = 0;
  pthread_mutex_lock(&L.mu);
  h->fd = fd;
  if (h->watching) err = lc_watch_file(h);
  h->blind = h->blind || err;
  pthread_mutex_unlock(&L.mu);
  if (err) lc_blind(h->self, err);
}

static void lc_watch(void *self, struct dlk_grant *g, bool on) {
  struct lc_self *s = self;
  struct lc_hold *h = on ? lc_hold_of(s, g) : g->b;
  if (lc_mine(h)) {
    int err = on ? lc_ino_open() : 0;
    pthread_mutex_lock(&L.mu);
    h->watching = on;
    if (on && !err && h->fd >= 0) err = lc_watch_file(h);
    if (!on && !h->guarded) lc_unwatch(h);
    h->blind = on && err;
    h->soon = 0;
    pthread_mutex_unlock(&L.mu);
    if (err) lc_blind(s, err);
  }
  if (!on) return;
  lc_setup(NULL);
  dlk_wake(s->client, g->items[0].name, g->items[0].len);
}

static void lc_guard_on(struct lc_self *s, struct lc_hold *h) {
  struct stat st;
  int err = lc_ino_open();
  pthread_mutex_lock(&L.mu);
  if (!h->held || h->unguarded) { /* released since, by another thread */
    pthread_mutex_unlock(&L.mu);
    return;
  }
  h->guarded = true;
  if (!err) err = lc_watch_file(h);
  lc_link(&L.holders, &h->holder);
  if (h->fd >= 0 && lc_where(s->dir, h->file, h->fd, &st) == LC_REPLACED) lc_mark(h);
  bool post = L.marked || !L.touch_set || (L.ino >= 0 && !L.ino_on_loop);
  pthread_mutex_unlock(&L.mu);
  if (err) lc_blind(s, err);
  if (post) dlk_post(&L.setup);
}

static void lc_guard(void *self, struct dlk_grant *g, bool on) {
  struct lc_hold *h = g->b;
  if (!lc_mine(h)) return;
  if (on) {
    lc_guard_on(self, h);
    return;
  }
  pthread_mutex_lock(&L.mu);
  h->guarded = false;
  h->unguarded = true;
  lc_unlink(&h->holder);
  if (!h->watching) {
    lc_unlink(&h->marked);
    lc_unwatch(h);
  }
  while (L.calling == h && !dlk_on_loop()) pthread_cond_wait(&L.called, &L.mu);
  pthread_mutex_unlock(&L.mu);
}

static void lc_forget(void *self, struct dlk_grant *g) {
  struct lc_hold *h = g->b;
  (void)self;
  g->b = NULL;
  if (lc_mine(h)) lc_drop(h);
  free(h);
}

static int lc_hold_fd(struct dlk_grant *g) {
  struct lc_hold *h = g->b;
  int fd = -1;
  if (!lc_mine(h)) return -1;
  pthread_mutex_lock(&L.mu);
  if (h->held && h->fd >= 0) fd = fcntl(h->fd, F_DUPFD_CLOEXEC, 3);
  h->lent = h->lent || fd >= 0;
  pthread_mutex_unlock(&L.mu);
  return fd;
}

/* ---- acquire ---- */

static void lc_raise(uint64_t *to, uint64_t v) {
  uint64_t old = __atomic_load_n(to, __ATOMIC_RELAXED);
  while (old < v &&
         !__atomic_compare_exchange_n(to, &old, v, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    ;
}

/* Under the lock: counts up, and hands the token out only after it is written.
 * `counter` 0: the file is new, its predecessor may have been ahead of the clock. */
static enum dlock_err lc_grant(struct lc_hold *h, int fd, uint64_t counter, char *msg) {
  struct dlk_item *it = &h->g->items[0];
  struct dlk_record r = {
      .owner = h->g->owner, .owner_len = h->g->owner_len, .key = it->name, .key_len = it->len};
  if (!counter) counter = __atomic_load_n(&L.top_token, __ATOMIC_RELAXED);
  if (counter < h->seen) counter = h->seen;
  r.token = dlk_wall_100us();
  if (r.token <= counter) r.token = counter + 1;
  if (r.token > DLK_FILE_TOKEN_MAX)
    return lc_not_ours(h->self, h->file, "its counter, or this machine's clock, is out of range",
                       msg);
  int err = dlk_record_write(fd, &r);
  if (err) return lc_file_fail(h->self, h->file, err, msg);
  it->token = r.token;
  lc_raise(&L.top_token, r.token);
  return DLOCK_E_OK;
}

static enum dlock_err lc_content(struct lc_hold *h, int fd, struct dlk_record *r, char *msg) {
  const struct dlk_item *it = &h->g->items[0];
  enum dlock_err e = dlk_record_read(fd, r);
  if (e == DLOCK_E_UNAVAILABLE) return lc_file_fail(h->self, h->file, errno, msg);
  if (e) return lc_not_ours(h->self, h->file, "its content is something else", msg);
  if (!dlk_record_is_key(r, it->name, it->len))
    return lc_not_ours(h->self, h->file, "it belongs to another key", msg);
  return DLOCK_E_OK;
}

/* When to look again. A token that changed since the event means that somebody
 * else was faster: no need to hurry. */
static int64_t lc_retry_ms(struct lc_hold *h, bool changed) {
  pthread_mutex_lock(&L.mu);
  int64_t top = h->blind ? LC_BLIND_MAX_MS : LC_SOON_MAX_MS, ms;
  if (changed) h->soon = 0;
  if (h->blind && h->watching) {
    ms = h->soon ? h->soon : 1;
    h->soon = dlk_min(ms * 2, top);
  } else {
    ms = h->soon ? h->soon : LC_POLL_MS;
    h->soon = h->soon * 2 > top ? 0 : h->soon * 2;
  }
  pthread_mutex_unlock(&L.mu);
  return ms;
}

static void lc_busy(struct lc_hold *h, struct dlk_call *c) {
  struct dlk_record r;
  bool changed = false;
  if (!dlk_record_read(h->fd, &r) && !r.empty) {
    size_t n = r.owner_len < sizeof c->holder ? r.owner_len : sizeof c->holder - 1;
    memcpy(c->holder, r.owner, n);
    c->holder[n] = 0;
    changed = r.token > h->seen;
    if (changed) h->seen = r.token;
  }
  c->out[0] = DLK_BUSY;
  c->holder_ttl_ms = -1;
  c->retry_ms = lc_retry_ms(h, changed);
}

/* A sweep locks files for some microseconds, but only those that lay unused for
 * an hour, and what is held is touched: only then is "busy" looked at again. */
static int lc_lock_unswept(int fd) {
  struct stat st;
  int err = dlk_file_lock(fd);
  if (err != EAGAIN || fstat(fd, &st) || time(NULL) - st.st_mtime < LC_IDLE_S) return err;
  for (int i = 0; i < 20 && err == EAGAIN; i++) {
    lc_nap_us(100);
    err = dlk_file_lock(fd);
  }
  return err;
}

static enum dlock_err lc_file_again(struct lc_self *s, struct lc_hold *h, char *msg) {
  lc_drop(h);
  int fd = lc_open_file(s, h->file);
  if (fd < 0 && errno == ESTALE) {
    enum dlock_err e = lc_dir_again(s, msg);
    if (e) return e;
    fd = lc_open_file(s, h->file);
  }
  if (fd < 0) return lc_file_fail(s, h->file, errno, msg);
  lc_put_fd(h, fd);
  return DLOCK_E_OK;
}

/* One look at an open file. *again: it is not the one that the path names. */
static enum dlock_err lc_try_file(struct lc_self *s, struct lc_hold *h, struct dlk_call *c,
                                  bool *again) {
  struct dlk_record r;
  struct stat st;
  int err = lc_lock_unswept(h->fd);
  if (err && err != EAGAIN) return lc_file_fail(s, h->file, err, c->msg);
  enum lc_path_state where = lc_where(s->dir, h->file, h->fd, &st);
  *again = where == LC_REPLACED;
  if (*again) {
    /* Its counter still counts: the new file may know nothing of it. */
    if (!dlk_record_read(h->fd, &r) && r.token > h->seen) h->seen = r.token;
    return lc_dir_again(s, c->msg);
  }
  if (where == LC_UNSURE) return lc_file_fail(s, h->file, errno, c->msg);
  if (!S_ISREG(st.st_mode) || st.st_nlink != 1)
    return lc_not_ours(s, h->file, "it is no regular file, or has several names", c->msg);
  if (err) {
    lc_busy(h, c);
    return DLOCK_E_OK;
  }
  enum dlock_err e = lc_content(h, h->fd, &r, c->msg);
  if (!e) e = lc_grant(h, h->fd, r.token, c->msg);
  if (e) return e;
  pthread_mutex_lock(&L.mu);
  h->held = true;
  h->unguarded = false;
  pthread_mutex_unlock(&L.mu);
  c->out[0] = DLK_DONE;
  return DLOCK_E_OK;
}

static enum dlock_err lc_acceptable(const struct dlk_call *c, char *msg) {
  const struct dlk_grant *g = c->grants[0];
  if (c->n != 1 || g->n != 1 || g->items[0].mode != DLK_EXCLUSIVE || g->items[0].limit > 1)
    return dlk_fail(msg, DLOCK_E_UNSUPPORTED,
                    "local: one exclusive lock at a time is supported, no shared modes or permits");
  if (g->items[0].len > DLOCK_KEY_MAX || g->owner_len > DLK_FILE_OWNER)
    return dlk_fail(msg, DLOCK_E_UNSUPPORTED, "local: the key or the owner label is too long");
  return DLOCK_E_OK;
}

static void lc_sweep_maybe(struct lc_self *s, int64_t now);

static enum dlock_err lc_acquire(struct lc_self *s, struct dlk_call *c) {
  enum dlock_err e = lc_acceptable(c, c->msg);
  if (e) return e;
  struct lc_hold *h = lc_hold_of(s, c->grants[0]);
  if (!h) return dlk_fail(c->msg, DLOCK_E_NOMEM, "out of memory");
  if (h->held) {
    c->out[0] = DLK_DONE;
    return DLOCK_E_OK;
  }
  bool again = h->fd < 0;
  for (int i = 0; !e && i < LC_TRIES; i++) {
    if (again) e = lc_file_again(s, h, c->msg);
    if (!e) e = lc_try_file(s, h, c, &again);
    if (!e && !again) {
      lc_sweep_maybe(s, c->sent_ms);
      return DLOCK_E_OK;
    }
  }
  lc_drop(h);
  return e ? e
           : dlk_fail(c->msg, DLOCK_E_UNAVAILABLE, "lock file %s/%s keeps being replaced", s->dir,
                      h->file);
}

/* ---- renew, release, hand over ---- */

static enum dlk_outcome lc_check(struct lc_hold *h) {
  static const enum dlk_outcome as[] = {
      [LC_OURS] = DLK_DONE, [LC_REPLACED] = DLK_GONE, [LC_UNSURE] = DLK_UNKNOWN};
  struct stat st;
  enum dlk_outcome out = DLK_GONE;
  if (!lc_mine(h)) return out;
  pthread_mutex_lock(&L.mu);
  if (h->fd >= 0 && h->held) out = as[lc_where(h->self->dir, h->file, h->fd, &st)];
  pthread_mutex_unlock(&L.mu);
  return out;
}

static enum dlock_err lc_renew(struct lc_self *s, struct dlk_call *c) {
  (void)s;
  for (size_t i = 0; i < c->n; i++) c->out[i] = lc_check(c->grants[i]->b);
  return DLOCK_E_OK;
}

static enum dlk_outcome lc_release_one(struct lc_hold *h) {
  if (!lc_mine(h) || h->fd < 0) return DLK_GONE;
  enum dlk_outcome out = h->held ? lc_check(h) : DLK_DONE;
  lc_drop(h);
  return out == DLK_UNKNOWN ? DLK_DONE : out;
}

static enum dlock_err lc_release(struct lc_self *s, struct dlk_call *c) {
  (void)s;
  if (c->keep_ms > 0)
    return dlk_fail(c->msg, DLOCK_E_UNSUPPORTED,
                    "local: a hold that goes on after the release is not supported");
  for (size_t i = 0; i < c->n; i++) c->out[i] = lc_release_one(c->grants[i]->b);
  return DLOCK_E_OK;
}

/* The heir gets the descriptor, so the kernel's lock is never open in between. */
static enum dlock_err lc_hand_over(struct lc_self *s, struct dlk_call *c) {
  struct dlk_grant *g = c->grants[0];
  struct lc_hold *from = g->b, *to = lc_hold_of(s, c->heir);
  if (!to) return dlk_fail(c->msg, DLOCK_E_NOMEM, "out of memory");
  c->out[0] = lc_check(from);
  if (c->out[0] != DLK_DONE) return DLOCK_E_OK;
  enum dlock_err e = lc_grant(to, from->fd, g->items[0].token, c->msg);
  if (e) return e;
  lc_drop(to);
  bool lent;
  int fd = lc_take_fd(from, &lent);
  lc_put_fd(to, fd);
  pthread_mutex_lock(&L.mu);
  to->held = true;
  to->unguarded = false;
  to->lent = lent;
  pthread_mutex_unlock(&L.mu);
  return DLOCK_E_OK;
}

/* ---- queries ---- */

static enum dlock_err lc_info(struct dlk_call *c) {
  c->info = c->info ? c->info : dlk_info_new();
  c->out[0] = DLK_DONE;
  return c->info ? DLOCK_E_OK : dlk_fail(c->msg, DLOCK_E_NOMEM, "out of memory");
}

static enum dlock_err lc_describe(struct dlk_info *i, const struct dlk_record *r, char *msg) {
  size_t n = r->owner_len;
  const char *label = dlk_owner_label(r->owner, r->owner_len, &n);
  uint64_t now = dlk_wall_100us();
  i->found = true;
  i->ours = label != NULL;
  i->token = r->token;
  i->age_ms = r->empty ? -1 : now > r->taken ? (int64_t)((now - r->taken) / 10) : 0;
  i->ttl_ms = -1;
  if (r->empty) return DLOCK_E_OK;
  i->owner = strndup(label ? label : r->owner, n);
  return i->owner ? DLOCK_E_OK : dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
}

/* Opens the file of the query's key if somebody holds it. *fd -1: nobody does. */
static enum dlock_err lc_open_held(struct lc_self *s, struct dlk_call *c, char *file, int *fd) {
  *fd = -1;
  if (!dlk_file_name(c->key, c->key_len, file))
    return dlk_fail(c->msg, DLOCK_E_NOMEM, "out of memory");
  enum dlock_err e = lc_dir_again(s, c->msg);
  if (e) return e;
  *fd = lc_open_read(s->dirfd, file);
  if (*fd < 0) return errno == ENOENT ? DLOCK_E_OK : lc_file_fail(s, file, errno, c->msg);
  struct stat st;
  int held = fstat(*fd, &st) || !S_ISREG(st.st_mode) ? 0 : dlk_file_is_locked(*fd);
  if (held == 1) return DLOCK_E_OK;
  e = held < 0 ? lc_file_fail(s, file, errno, c->msg) : DLOCK_E_OK;
  close(*fd);
  *fd = -1;
  return e;
}

/* A reader may meet a write half-way, so nonsense is looked at again. */
static enum dlock_err lc_read_held(struct lc_self *s, const char *file, int fd,
                                   struct dlk_record *r, char *msg) {
  enum dlock_err e = dlk_record_read(fd, r);
  for (int i = 0; e == DLOCK_E_FOREIGN && i < 3; i++) e = dlk_record_read(fd, r);
  if (e == DLOCK_E_FOREIGN) return lc_not_ours(s, file, "its content is something else", msg);
  return e ? lc_file_fail(s, file, errno, msg) : DLOCK_E_OK;
}

static enum dlock_err lc_inspect(struct lc_self *s, struct dlk_call *c) {
  char file[DLK_FILE_NAME_MAX + 1];
  struct dlk_record r;
  int fd = -1;
  enum dlock_err e = lc_info(c);
  if (!e) e = lc_open_held(s, c, file, &fd);
  if (e || fd < 0) return e;
  e = lc_read_held(s, file, fd, &r, c->msg);
  close(fd);
  return e ? e : lc_describe(c->info, &r, c->msg);
}

/* A file with the counter alone, to take the place of the broken one: after a
 * plain unlink a counter that had run ahead of the clock would fall back. */
static bool lc_make_counter(struct lc_self *s, const char *tmp, int old, uint64_t token,
                            const struct dlk_call *c) {
  struct dlk_record r = {.token = token, .owner = "", .key = c->key, .key_len = c->key_len};
  struct stat st;
  int fd = lc_open_own(s->dirfd, tmp, O_CREAT | O_EXCL);
  if (fd < 0) return false;
  bool ok = !fstat(old, &st) && !fchown(fd, st.st_uid, st.st_gid) &&
            !fchmod(fd, st.st_mode & 0777) && !dlk_record_write(fd, &r);
  dlk_fd_close(fd);
  return ok;
}

/* Replaces the file; the holder and the waiters hear of it by IN_ATTRIB. */
static enum dlock_err lc_break_file(struct lc_self *s, const char *file, int old, uint64_t token,
                                    struct dlk_call *c) {
  char tmp[DLK_FILE_NAME_MAX + 1];
  uint64_t x;
  dlk_random(&x, sizeof x);
  snprintf(tmp, sizeof tmp, "%s%016llx", DLK_FILE_BROKEN, (unsigned long long)x);
  if (lc_make_counter(s, tmp, old, token, c) && !renameat(s->dirfd, tmp, s->dirfd, file))
    return DLOCK_E_OK;
  unlinkat(s->dirfd, tmp, 0);
  if (!unlinkat(s->dirfd, file, 0) || errno == ENOENT) return DLOCK_E_OK;
  return lc_file_fail(s, file, errno, c->msg);
}

static enum dlock_err lc_break(struct lc_self *s, struct dlk_call *c) {
  char file[DLK_FILE_NAME_MAX + 1];
  struct dlk_record r;
  int fd = -1;
  enum dlock_err e = lc_info(c);
  if (!e) e = lc_open_held(s, c, file, &fd);
  if (e || fd < 0) return e;
  e = lc_read_held(s, file, fd, &r, c->msg);
  if (!e) e = lc_break_file(s, file, fd, r.token, c);
  close(fd);
  return e ? e : lc_describe(c->info, &r, c->msg);
}

static enum dlock_err lc_ping(struct lc_self *s, struct dlk_call *c) {
  enum dlock_err e = lc_dir_again(s, c->msg);
  if (!e) e = lc_info(c);
  if (!e && asprintf(&c->info->text, "local file locks in %s", s->dir) < 0) {
    c->info->text = NULL;
    e = dlk_fail(c->msg, DLOCK_E_NOMEM, "out of memory");
  }
  return e;
}

/* ---- walks over the directory: list and sweep ----
 * On the loop in slices, so that nothing else there waits for a big directory. */

struct lc_walk {
  struct dlk_task task;
  DIR *dir;
  char *path;
  struct dlk_call *call; /* of a LIST; NULL: a sweep */
  bool named;
  size_t left;
};

static struct lc_walk *lc_walk_new(const struct lc_self *s) {
  struct lc_walk *w = calloc(1, sizeof *w);
  int fd = w ? openat(s->dirfd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
  if (w && fd >= 0 && (w->path = strdup(s->dir)) && (w->dir = fdopendir(fd))) {
    w->named = s->named;
    w->left = LC_SWEEP_MAX;
    return w;
  }
  int err = errno;
  if (fd >= 0) close(fd);
  if (w) free(w->path);
  free(w);
  errno = err;
  return NULL;
}

static void lc_walk_free(struct lc_walk *w) {
  closedir(w->dir);
  free(w->path);
  free(w);
}

/* True unless memory ran out. */
static bool lc_list_one(struct lc_walk *w, const char *file) {
  struct dlk_call *c = w->call;
  struct dlk_record r;
  struct stat st;
  int fd = lc_open_read(dirfd(w->dir), file);
  if (fd < 0) return true;
  bool add = !fstat(fd, &st) && S_ISREG(st.st_mode) && dlk_file_is_locked(fd) == 1 &&
             !dlk_record_read(fd, &r) && dlk_record_is_file(&r, file) && r.key_len >= c->key_len &&
             !memcmp(r.key, c->key, c->key_len);
  close(fd);
  return !add || dlk_info_add(c->info, r.key, r.key_len);
}

/* Only what is surely a lock file of ours goes: in a named directory there may
 * be anything. A counter ahead of the clock stays, or a new file would fall
 * behind it. */
static bool lc_may_sweep(const struct lc_walk *w, int fd, const char *file) {
  struct dlk_record r;
  if (dlk_record_read(fd, &r)) return false;
  if (r.empty) return !w->named;
  return r.token < dlk_wall_100us() &&
         (lc_begins(file, DLK_FILE_BROKEN) || dlk_record_is_file(&r, file));
}

static bool lc_is_stale(const struct stat *st) {
  return S_ISREG(st->st_mode) && st->st_nlink == 1 && time(NULL) - st->st_mtime >= LC_IDLE_S;
}

static void lc_sweep_one(const struct lc_walk *w, const char *file) {
  struct stat st;
  if (fstatat(dirfd(w->dir), file, &st, AT_SYMLINK_NOFOLLOW) || !lc_is_stale(&st)) return;
  int fd = lc_open_own(dirfd(w->dir), file, 0);
  if (fd < 0) return;
  if (!dlk_file_lock(fd) && lc_where(w->path, file, fd, &st) == LC_OURS && lc_is_stale(&st) &&
      lc_may_sweep(w, fd, file))
    unlinkat(dirfd(w->dir), file, 0);
  lc_unlock_close(fd, false);
}

/* Up to n entries. False: that was all. */
static bool lc_walk_step(struct lc_walk *w, size_t n) {
  for (; n > 0 && w->left > 0; n--) {
    struct dirent *d = readdir(w->dir);
    if (!d) return false;
    if (d->d_name[0] == '.' || !strcmp(d->d_name, DLK_FILE_SWEPT)) continue;
    if (!w->call) {
      w->left--;
      lc_sweep_one(w, d->d_name);
    } else if (!lc_list_one(w, d->d_name)) {
      w->call->err = dlk_fail(w->call->msg, DLOCK_E_NOMEM, "out of memory");
      return false;
    }
  }
  return w->left > 0;
}

static void lc_walk_done(struct lc_walk *w) {
  struct dlk_call *c = w->call;
  if (!c) {
    pthread_mutex_lock(&L.mu);
    L.sweeping = NULL;
    pthread_mutex_unlock(&L.mu);
  }
  lc_walk_free(w);
  if (c) dlk_call_done(c);
}

static void lc_walk_run(struct dlk_task *t) {
  struct lc_walk *w = (struct lc_walk *)((char *)t - offsetof(struct lc_walk, task));
  if (lc_walk_step(w, LC_SLICE))
    dlk_post(&w->task);
  else
    lc_walk_done(w);
}

/* Ends the call itself, perhaps later. */
static void lc_list(struct lc_self *s, struct dlk_call *c) {
  struct lc_walk *w = NULL;
  c->err = lc_info(c);
  if (!c->err) c->err = lc_dir_again(s, c->msg);
  if (!c->err && !(w = lc_walk_new(s))) c->err = lc_dir_fail(s, strerror(errno), c->msg);
  if (c->err) {
    dlk_call_done(c);
    return;
  }
  w->call = c;
  w->task.run = lc_walk_run;
  if (!c->lane) {
    dlk_post(&w->task);
    return;
  }
  while (lc_walk_step(w, LC_SLICE))
    ;
  lc_walk_done(w);
}

/* The marker's time says when this directory was swept last. True: not lately,
 * and it is marked now. */
static bool lc_sweep_mark(const struct lc_self *s) {
  struct stat st;
  if (!fstatat(s->dirfd, DLK_FILE_SWEPT, &st, AT_SYMLINK_NOFOLLOW) && S_ISREG(st.st_mode) &&
      time(NULL) - st.st_mtime < LC_IDLE_S)
    return false;
  int fd = lc_open_file(s, DLK_FILE_SWEPT);
  if (fd < 0) return false;
  bool ok = !futimens(fd, NULL);
  dlk_fd_close(fd);
  return ok;
}

/* At a client's first acquire, and hourly while it goes on acquiring. */
static void lc_sweep_maybe(struct lc_self *s, int64_t now) {
  int64_t due = __atomic_load_n(&s->sweep_due, __ATOMIC_RELAXED);
  if (now < due || !__atomic_compare_exchange_n(&s->sweep_due, &due, now + LC_SWEEP_MS, false,
                                                __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    return;
  if (!lc_sweep_mark(s)) return;
  struct lc_walk *w = lc_walk_new(s);
  if (!w) return;
  w->task.run = lc_walk_run;
  pthread_mutex_lock(&L.mu);
  bool mine = !L.sweeping;
  if (mine) L.sweeping = w;
  pthread_mutex_unlock(&L.mu);
  if (mine)
    dlk_post(&w->task);
  else
    lc_walk_free(w);
}

/* ---- the interface ---- */

static void lc_start(void *self, struct dlk_call *c) {
  static enum dlock_err (*const verbs[])(struct lc_self *, struct dlk_call *) = {
      [DLK_ACQUIRE] = lc_acquire, [DLK_RENEW] = lc_renew,
      [DLK_RELEASE] = lc_release, [DLK_HAND_OVER] = lc_hand_over,
      [DLK_INSPECT] = lc_inspect, [DLK_BREAK] = lc_break,
      [DLK_PING] = lc_ping};
  c->sent_ms = dlk_now_ms();
  if (c->verb == DLK_LIST) {
    lc_list(self, c);
    return;
  }
  c->err = verbs[c->verb](self, c);
  if (c->err) c->sent_ms = 0; /* a refusal by the kernel is definite */
  dlk_call_done(c);
}

static enum dlock_err lc_misuse(char *msg) {
  return dlk_fail(msg, DLOCK_E_PROTOCOL,
                  "write local: or local:///absolute/directory, without host, user or query");
}

/* The default directory is a matter of the user alone: no environment variable
 * decides it, so a cron job and a login shell meet. */
static char *lc_default_dir(void) {
  struct stat st;
  char *dir;
  const char *base = lstat("/run/lock", &st) && errno == ENOENT ? "/tmp" : "/run/lock";
  return asprintf(&dir, "%s/dlock-%lu", base, (unsigned long)geteuid()) < 0 ? NULL : dir;
}

static char *lc_named_dir(const char *path) {
  size_t n = strlen(path);
  while (n > 1 && path[n - 1] == '/') n--;
  return strndup(path, n);
}

static enum dlock_err lc_url(const struct dlk_url *u, struct lc_self *s, char *msg) {
  const char *path = u->path ? u->path : "";
  if (u->user || u->password || u->n_hosts || u->query) return lc_misuse(msg);
  s->named = *path != 0;
  if (s->named && *path != '/') return lc_misuse(msg);
  if (strlen(path) > LC_DIR_MAX)
    return dlk_fail(msg, DLOCK_E_PROTOCOL, "the directory's path is longer than %d bytes",
                    LC_DIR_MAX);
  s->dir = s->named ? lc_named_dir(path) : lc_default_dir();
  if (!s->dir) return dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  return strcmp(s->dir, "/") ? DLOCK_E_OK : lc_misuse(msg);
}

static void lc_free(struct lc_self *s) {
  free(s->dir);
  free(s);
}

static enum dlock_err lc_open(struct dlk_client *c, const struct dlk_url *url,
                              const struct dlock_config *cfg, void **self, char *msg) {
  struct lc_self *s = calloc(1, sizeof *s);
  (void)cfg;
  pthread_once(&once, lc_once);
  if (!s || L.init_err) {
    free(s);
    return dlk_fail(msg, DLOCK_E_NOMEM, "%s", strerror(s ? L.init_err : ENOMEM));
  }
  s->client = c;
  s->gen = dlk_generation();
  enum dlock_err e = lc_url(url, s, msg);
  if (!e) e = lc_dir_open(s, &s->dirfd, msg);
  if (e) {
    lc_free(s);
    return e;
  }
  dlk_fd_own(s->dirfd);
  pthread_mutex_lock(&L.mu);
  L.selves++;
  pthread_mutex_unlock(&L.mu);
  *self = s;
  return DLOCK_E_OK;
}

/* The last client of the process takes the inotify instance with it. */
static void lc_close(void *self) {
  struct lc_self *s = self;
  int fd = -1;
  if (s->gen == dlk_generation()) {
    dlk_fd_close(s->dirfd);
    pthread_mutex_lock(&L.mu);
    if (--L.selves == 0) {
      lc_mark_all(true);
      fd = L.ino;
      L.ino = -1;
      L.ino_on_loop = L.touch_set = false;
    }
    pthread_mutex_unlock(&L.mu);
  }
  if (fd >= 0) {
    dlk_source_del(&L.source);
    dlk_timer_stop(&L.touch);
    dlk_fd_close(fd);
  }
  lc_free(s);
}

/* A lane has no state: every call is some system calls in its caller's thread. */
static void *lc_lane_open(void *self, struct dlk_poller *p) {
  (void)p;
  return self;
}

static void lc_lane_close(void *lane) { (void)lane; }

/* Only a LIST on the loop can be late, and it ends by itself. */
static void lc_give_up(void *self, struct dlk_call *c) {
  (void)self;
  (void)c;
}

static const char *const lc_schemes[] = {"local", NULL};

const struct dlk_backend dlk_local_backend = {
    .name = "local",
    .schemes = lc_schemes,
    .caps = DLK_CAP_LANES | DLK_CAP_PROCESS_BOUND | DLK_CAP_HAND_OVER,
    .open = lc_open,
    .close = lc_close,
    .lane_open = lc_lane_open,
    .lane_close = lc_lane_close,
    .start = lc_start,
    .give_up = lc_give_up,
    .watch = lc_watch,
    .guard = lc_guard,
    .forget = lc_forget,
    .hold_fd = lc_hold_fd,
};
