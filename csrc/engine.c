/* One mutex, one thread. The thread sleeps in the loop's poller until the next
 * lock timer, poller timer, task or socket; whoever makes an earlier due time
 * or a task while it sleeps rings an eventfd. Everything here is lazy and per
 * process: a forked child starts over with nothing but its generation number. */
#include "engine.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* How long the end of the process may wait for its releases. */
enum { EXIT_WAIT_MS = 500 };

static struct {
  pthread_mutex_t m;
  bool ready;      /* process-wide handlers are registered */
  bool at_fork;    /* ... those for fork */
  bool running;    /* the thread of this process exists */
  pthread_t thread;
  pid_t pid;
  unsigned generation;
  struct dlk_poller loop;
  struct dlk_heap due;
  size_t due_places;
  struct dlk_task *tasks, **tail;
  int wakefd;
  struct dlk_source wake;
  bool asleep;
  int64_t until; /* while asleep: what it sleeps for */
  pthread_cond_t exit_cond;
  pthread_mutex_t fd_m;
  unsigned char *fds; /* fds[n]: descriptor n is ours */
  size_t fds_n;
} E = {.m = PTHREAD_MUTEX_INITIALIZER,
       .fd_m = PTHREAD_MUTEX_INITIALIZER,
       .exit_cond = PTHREAD_COND_INITIALIZER,
       .tail = &E.tasks,
       .wakefd = -1};

void dlk_enter(void) { pthread_mutex_lock(&E.m); }
void dlk_leave(void) { pthread_mutex_unlock(&E.m); }
struct dlk_poller *dlk_loop(void) { return &E.loop; }
unsigned dlk_generation(void) { return __atomic_load_n(&E.generation, __ATOMIC_RELAXED); }

bool dlk_on_loop(void) {
  return __atomic_load_n(&E.running, __ATOMIC_ACQUIRE) && pthread_equal(E.thread, pthread_self());
}

void dlk_cond_deadline(struct timespec *t, int64_t ms) {
  clock_gettime(CLOCK_MONOTONIC, t);
  t->tv_sec += ms / 1000;
  t->tv_nsec += ms % 1000 * 1000000;
  if (t->tv_nsec >= 1000000000) {
    t->tv_sec++;
    t->tv_nsec -= 1000000000;
  }
}

bool dlk_cond_wait(pthread_cond_t *c, const struct timespec *until) {
  return pthread_cond_clockwait(c, &E.m, CLOCK_MONOTONIC, until) != ETIMEDOUT;
}

/* ---- descriptors ---- */

void dlk_fd_own(int fd) {
  if (fd < 0)
    return;
  pthread_mutex_lock(&E.fd_m);
  if ((size_t)fd >= E.fds_n) {
    size_t n = ((size_t)fd + 64) * 2;
    unsigned char *v = realloc(E.fds, n);
    if (v) {
      memset(v + E.fds_n, 0, n - E.fds_n);
      E.fds = v;
      E.fds_n = n;
    }
  }
  if ((size_t)fd < E.fds_n)
    E.fds[fd] = 1;
  pthread_mutex_unlock(&E.fd_m);
}

void dlk_fd_close(int fd) {
  if (fd < 0)
    return;
  pthread_mutex_lock(&E.fd_m);
  if ((size_t)fd < E.fds_n)
    E.fds[fd] = 0;
  pthread_mutex_unlock(&E.fd_m);
  close(fd);
}

/* ---- the thread ---- */

static void ring(void) {
  uint64_t one = 1;
  E.asleep = false;
  if (write(E.wakefd, &one, sizeof one) < 0) {
    /* EAGAIN: it is rung already. */
  }
}

static void rung(struct dlk_source *s, unsigned got) {
  uint64_t n;
  (void)got;
  if (read(s->fd, &n, sizeof n) < 0) {
    /* EAGAIN: spurious. */
  }
}

static void fire_due(void) {
  int64_t now = dlk_now_ms();
  for (size_t n = E.due.n; n && dlk_heap_due(&E.due) <= now; n--) {
    struct dlk_timer *t = E.due.v[0];
    dlk_heap_del(&E.due, t);
    t->fire(t);
  }
}

/* Runs the tasks that are there now; later ones wait for the next turn. */
static bool run_tasks(void) {
  struct dlk_task *last = E.tasks ? (struct dlk_task *)((char *)E.tail - offsetof(struct dlk_task, next)) : NULL;
  bool any = last != NULL;
  for (bool more = any; more;) {
    struct dlk_task *t = E.tasks;
    more = t != last;
    E.tasks = t->next;
    if (!E.tasks)
      E.tail = &E.tasks;
    t->queued = false;
    dlk_leave();
    t->run(t);
    dlk_enter();
  }
  return any;
}

static void *thread_main(void *arg) {
  (void)arg;
  dlk_enter();
  for (;;) {
    fire_due();
    bool busy = run_tasks() || E.tasks;
    E.until = busy ? 0 : dlk_heap_due(&E.due); /* written by this thread alone */
    E.asleep = !busy;
    dlk_leave();
    dlk_poller_turn(&E.loop, E.until);
    dlk_enter();
    E.asleep = false;
  }
  return NULL;
}

static int open_loop(void) {
  int err = dlk_poller_init(&E.loop, true);
  if (err)
    return err;
  E.wakefd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (E.wakefd < 0) {
    err = errno;
    dlk_poller_destroy(&E.loop);
    return err;
  }
  dlk_fd_own(E.wakefd);
  E.wake = (struct dlk_source){.fd = E.wakefd, .want = DLK_READ, .ready = rung};
  err = dlk_source_add(&E.loop, &E.wake);
  if (err) {
    dlk_fd_close(E.wakefd);
    E.wakefd = -1;
    dlk_poller_destroy(&E.loop);
  }
  return err;
}

/* When it fails the work stays queued, and the next call tries again. */
bool dlk_engine_start(void) {
  if (E.running)
    return true;
  if (E.wakefd < 0 && open_loop())
    return false;
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  bool ok = !pthread_create(&E.thread, NULL, thread_main, NULL);
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  if (!ok)
    return false;
  pthread_setname_np(E.thread, "dlock");
  pthread_detach(E.thread);
  __atomic_store_n(&E.running, true, __ATOMIC_RELEASE);
  return true;
}

void dlk_post_locked(struct dlk_task *t) {
  if (!t->queued) {
    t->queued = true;
    t->next = NULL;
    *E.tail = t;
    E.tail = &t->next;
  }
  dlk_engine_start();
  if (E.asleep && !dlk_on_loop()) /* the loop itself looks before it sleeps again */
    ring();
}

void dlk_post(struct dlk_task *t) {
  dlk_enter();
  dlk_post_locked(t);
  dlk_leave();
}

bool dlk_due_reserve(void) {
  if (!dlk_heap_reserve(&E.due, E.due_places + 1))
    return false;
  E.due_places++;
  return true;
}

void dlk_due_unreserve(void) { E.due_places--; }

void dlk_due_set(struct dlk_timer *t, int64_t due) {
  dlk_heap_set(&E.due, t, due); /* its place is reserved */
  dlk_engine_start();
  if (E.asleep && due < E.until && !dlk_on_loop())
    ring();
}

void dlk_due_stop(struct dlk_timer *t) { dlk_heap_del(&E.due, t); }

/* ---- fork ---- */

static void before_fork(void) {
  dlk_enter();
  pthread_mutex_lock(&E.fd_m);
}

static void after_fork_parent(void) {
  pthread_mutex_unlock(&E.fd_m);
  dlk_leave();
}

static void forget_heap(struct dlk_heap *h) {
  for (size_t i = 0; i < h->n; i++)
    h->v[i]->at = 0;
  h->n = 0;
}

static void after_fork_child(void) {
  pthread_mutex_init(&E.m, NULL);
  pthread_mutex_init(&E.fd_m, NULL);
  pthread_cond_init(&E.exit_cond, NULL);
  for (size_t i = 0; i < E.fds_n; i++)
    if (E.fds[i])
      close((int)i);
  if (E.fds_n)
    memset(E.fds, 0, E.fds_n);
  forget_heap(&E.due);
  forget_heap(&E.loop.timers);
  memset(&E.loop, 0, sizeof E.loop);
  while (E.tasks) {
    E.tasks->queued = false;
    E.tasks = E.tasks->next;
  }
  E.tail = &E.tasks;
  E.wakefd = -1;
  E.asleep = false;
  E.running = false;
  E.pid = getpid();
  __atomic_add_fetch(&E.generation, 1, __ATOMIC_RELAXED);
  dlk_enter();
  dlk_lock_after_fork();
  dlk_leave();
}

/* ---- exit ---- */

void dlk_exit_signal(void) { pthread_cond_broadcast(&E.exit_cond); }

static void at_exit(void) {
  if (E.pid != getpid())
    return;
  struct timespec t;
  dlk_cond_deadline(&t, EXIT_WAIT_MS);
  dlk_enter();
  if (dlk_lock_exit_begin() && E.running)
    while (dlk_lock_exit_busy() && dlk_cond_wait(&E.exit_cond, &t))
      ;
  dlk_leave();
}

int dlk_engine_init(void) {
  int err = 0;
  dlk_enter();
  if (!E.ready) { /* after a failure: each part once */
    /* Its clean-up at exit must not run before ours, nor under our thread. */
    OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, NULL);
    E.pid = getpid();
    err = E.at_fork ? 0 : pthread_atfork(before_fork, after_fork_parent, after_fork_child);
    E.at_fork = !err;
    if (!err)
      err = atexit(at_exit) ? ENOMEM : 0;
    E.ready = !err;
  }
  dlk_leave();
  return err;
}
