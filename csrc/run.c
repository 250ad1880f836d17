#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "run.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"

/* ---- descendants ---- */

struct proc {
  pid_t pid, ppid;
  unsigned long long born; /* with the pid: this process and no later one */
  bool ours;
};

struct procs {
  struct proc *v;
  size_t n, cap;
};

/* False for what is gone already: a zombie waits for its parent only. The name
 * may hold any character, so fields are counted from the last ")". */
static bool read_proc(const char *pid, struct proc *p) {
  char path[64], buf[1024], state;
  int threads;
  snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  ssize_t n = read(fd, buf, sizeof buf - 1);
  close(fd);
  if (n <= 0) return false;
  buf[n] = '\0';
  const char *s = strrchr(buf, ')');
  p->pid = (pid_t)strtol(pid, NULL, 10);
  p->ours = false;
  if (!s || sscanf(s + 1,
                   " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %d %*d %llu",
                   &state, &p->ppid, &threads, &p->born) != 4)
    return false;
  /* A leader that has ended shows as a zombie while its threads run on. */
  return (state != 'Z' && state != 'X') || threads > 1;
}

static bool add_proc(struct procs *all, const struct proc *p) {
  if (all->n == all->cap) {
    size_t cap = all->cap ? all->cap * 2 : 256;
    struct proc *v = realloc(all->v, cap * sizeof *v);
    if (!v) return false;
    all->v = v;
    all->cap = cap;
  }
  all->v[all->n++] = *p;
  return true;
}

static int by_pid(const void *a, const void *b) {
  pid_t x = ((const struct proc *)a)->pid, y = ((const struct proc *)b)->pid;
  return (x > y) - (x < y);
}

static struct proc *find_proc(const struct procs *all, pid_t pid) {
  struct proc key = {.pid = pid};
  return all->n ? bsearch(&key, all->v, all->n, sizeof key, by_pid) : NULL;
}

/* Marks all descendants of this process; false: /proc could not be read. */
static bool read_tree(struct procs *all) {
  DIR *d = opendir("/proc");
  if (!d) return false;
  all->n = 0;
  struct proc p;
  for (struct dirent *e; (e = readdir(d));)
    if (e->d_name[0] >= '1' && e->d_name[0] <= '9' && read_proc(e->d_name, &p) &&
        !add_proc(all, &p))
      break;
  closedir(d);
  if (all->n) qsort(all->v, all->n, sizeof *all->v, by_pid);
  pid_t self = getpid();
  for (bool more = true; more;) {
    more = false;
    for (size_t i = 0; i < all->n; i++) {
      struct proc *q = &all->v[i];
      const struct proc *parent = q->ours ? NULL : find_proc(all, q->ppid);
      if (q->ours || (q->ppid != self && !(parent && parent->ours))) continue;
      q->ours = more = true;
    }
  }
  return true;
}

/* The pid may have passed to another process since the walk: the descriptor
 * pins whoever has it now, and a second look proves that it is the one meant. */
static void signal_proc(const struct proc *p, int sig) {
  int fd = (int)syscall(SYS_pidfd_open, p->pid, 0);
  if (fd < 0) {
    if (errno == ENOSYS || errno == EPERM) kill(p->pid, sig);
    return;
  }
  char pid[24];
  struct proc now;
  snprintf(pid, sizeof pid, "%d", (int)p->pid);
  if (read_proc(pid, &now) && now.born == p->born) syscall(SYS_pidfd_send_signal, fd, sig, NULL, 0);
  close(fd);
}

/* Signals the descendants that `before` does not have; how many those were. */
static size_t signal_new(const struct procs *all, const struct procs *before, int sig) {
  size_t n = 0;
  for (size_t i = 0; i < all->n; i++) {
    const struct proc *p = &all->v[i], *q = find_proc(before, p->pid);
    if (!p->ours || (q && q->ours && q->born == p->born)) continue;
    signal_proc(p, sig);
    n++;
  }
  return n;
}

/* Each descendant once, and in further rounds those that were forked while we
 * looked. How many rounds found any: over 1 means that they go on forking. */
static int signal_all(int sig, int rounds) {
  struct procs now = {.v = NULL}, before = {.v = NULL};
  int n = 0;
  while (n < rounds && read_tree(&now) && signal_new(&now, &before, sig)) {
    struct procs t = before;
    before = now;
    now = t;
    n++;
  }
  free(now.v);
  free(before.v);
  return n;
}

/* Few rounds: what a handler of SIGTERM starts to clean up with is let live. */
static void term_all(void) { signal_all(SIGTERM, 4); }

static int kill_all(void) { return signal_all(SIGKILL, 64); }

/* Whether the descendants of this process are all the keeper's. */
static bool adopts;

bool dlk_run_kill_descendants(void) {
  if (!adopts) return false;
  kill_all();
  pid_t p;
  while ((p = waitpid(-1, NULL, WNOHANG)) > 0) {
  }
  return p == 0;
}

/* ---- messages ---- */

static int send_msg(int fd, const struct dlk_run_msg *m, const char *payload, size_t len,
                    int pass, int flags) {
  struct iovec iov[2] = {{.iov_base = (void *)(uintptr_t)m, .iov_len = sizeof *m},
                         {.iov_base = (void *)(uintptr_t)payload, .iov_len = len}};
  union {
    char buf[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
  } control = {.buf = {0}};
  struct msghdr h = {.msg_iov = iov, .msg_iovlen = len ? 2 : 1};
  if (pass >= 0) {
    h.msg_control = control.buf;
    h.msg_controllen = sizeof control.buf;
    struct cmsghdr *c = CMSG_FIRSTHDR(&h);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof pass);
    memcpy(CMSG_DATA(c), &pass, sizeof pass);
  }
  ssize_t n;
  do n = sendmsg(fd, &h, MSG_NOSIGNAL | flags);
  while (n < 0 && errno == EINTR);
  return n < 0 ? errno : 0;
}

/* As dlk_keeper_recv; *len: what `payload` got; *fd: a passed descriptor or -1. */
static int recv_msg(int sock, struct dlk_run_msg *m, char *payload, size_t *len, int *fd) {
  struct iovec iov[2] = {{.iov_base = m, .iov_len = sizeof *m},
                         {.iov_base = payload, .iov_len = *len}};
  union {
    char buf[CMSG_SPACE(sizeof(int))];
    struct cmsghdr align;
  } control;
  struct msghdr h = {.msg_iov = iov, .msg_iovlen = *len ? 2 : 1, .msg_control = control.buf,
                     .msg_controllen = sizeof control.buf};
  ssize_t n;
  do n = recvmsg(sock, &h, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  if (n < (ssize_t)sizeof *m) return -1;
  *len = (size_t)n - sizeof *m;
  *fd = -1;
  struct cmsghdr *c = CMSG_FIRSTHDR(&h);
  if (c && c->cmsg_type == SCM_RIGHTS) memcpy(fd, CMSG_DATA(c), sizeof *fd);
  return 1;
}

/* ---- the keeper ----
 *
 *   IDLE ──START──> RUNNING ──────> ENDING ──kill_at──> KILLING
 *                      │    TERM      │                    │
 *                      │ (deadline, KILL, wrapper gone,    │ no child left
 *                      │  command died of a signal)        ▼
 *                      └──command exits by itself──────> DONE
 */
enum phase { IDLE, RUNNING, ENDING, KILLING };

struct keeper {
  char *const *argv;
  int sock, timer, children, exec_fd, lock_fd; /* -1: none */
  pid_t cmd;  /* 0: collected */
  int status; /* of the command, once collected */
  bool failed, exited;
  uint64_t early; /* signals (bit n - 1) for the command that came before its exec */
  enum phase phase;
  enum dlk_run_why why;
  int64_t until, grace, margin, kill_at, sweep_ms;
  struct sigaction old_chld; /* the caller's */
  sigset_t mask;             /* the same */
  char env[DLK_RUN_PAYLOAD_MAX + 1];
};

static void tell(const struct keeper *k, enum dlk_run_what what, int n, int flags) {
  struct dlk_run_msg m = {.what = what, .n = n, .why = k->why};
  send_msg(k->sock, &m, NULL, 0, -1, flags);
}

static int64_t kill_time(const struct keeper *k) {
  return k->until == DLK_FOREVER ? DLK_FOREVER : k->until - k->margin;
}

static int64_t term_time(const struct keeper *k) {
  return k->until == DLK_FOREVER ? DLK_FOREVER : k->until - k->margin - k->grace;
}

static void arm(const struct keeper *k) {
  int64_t at = DLK_FOREVER;
  if (k->phase == RUNNING) at = term_time(k);
  if (k->phase == ENDING) at = k->kill_at;
  if (k->phase == KILLING) at = dlk_now_ms() + k->sweep_ms;
  struct itimerspec t = {.it_value = {.tv_sec = 0}};
  if (at != DLK_FOREVER) {
    /* All zero would disarm it; a time in the past fires at once. */
    at = dlk_max(at, 1);
    t.it_value.tv_sec = at / 1000;
    t.it_value.tv_nsec = (long)(at % 1000) * 1000000;
  }
  timerfd_settime(k->timer, TFD_TIMER_ABSTIME, &t, NULL);
}

/* The leader first: the walk takes a while where many processes run. */
static void sweep(struct keeper *k) {
  if (k->cmd) kill(k->cmd, SIGKILL);
  k->sweep_ms = kill_all() > 1 ? 1 : dlk_min(k->sweep_ms * 2, 250);
}

static void begin_killing(struct keeper *k) {
  k->phase = KILLING;
  k->sweep_ms = 4;
  sweep(k);
}

/* What was stopped gets its SIGTERM when it is continued, and is never
 * continued by us: SIGKILL reaches it as it is. */
static void begin_ending(struct keeper *k, enum dlk_run_why why, int64_t grace_ms) {
  int64_t at = dlk_min(dlk_after(dlk_now_ms(), grace_ms), kill_time(k));
  if (k->phase == KILLING) return;
  if (k->phase == ENDING) {
    k->kill_at = dlk_min(k->kill_at, at);
    return;
  }
  k->phase = ENDING;
  k->why = why;
  k->kill_at = at;
  term_all();
}

static void on_timer(struct keeper *k) {
  uint64_t n;
  if (read(k->timer, &n, sizeof n) < 0 && errno != EAGAIN) return;
  int64_t now = dlk_now_ms();
  if (k->phase == RUNNING && now >= term_time(k)) begin_ending(k, DLK_RUN_DEADLINE, k->grace);
  if (k->phase == ENDING && now >= k->kill_at)
    begin_killing(k);
  else if (k->phase == KILLING)
    sweep(k);
}

/* What came while we waited is dropped. A handler would not survive the exec and
 * must not run before it. lua puts one over SIGINT and so hides that a shell
 * started us in the background with INT and QUIT ignored; the two are always
 * ignored together there. */
static void restore_signals(const struct keeper *k) {
  struct sigaction def = {.sa_handler = SIG_DFL}, ign = {.sa_handler = SIG_IGN}, was, quit = def;
  sigaction(SIGQUIT, NULL, &quit);
  for (int s = 1; s < NSIG; s++) {
    if (sigaction(s, NULL, &was) != 0) continue;
    bool keep = was.sa_handler == SIG_IGN;
    if (s == SIGINT && was.sa_handler != SIG_DFL) keep = quit.sa_handler == SIG_IGN;
    if (s == SIGCHLD) keep = k->old_chld.sa_handler == SIG_IGN;
    sigaction(s, &ign, NULL);
    if (!keep) sigaction(s, &def, NULL);
  }
  sigprocmask(SIG_SETMASK, &k->mask, NULL);
}

/* In the child, which becomes the command. All descriptors of ours are
 * close-on-exec. */
static void be_command(struct keeper *k, pid_t keeper, int sock) __attribute__((noreturn));
static void be_command(struct keeper *k, pid_t keeper, int sock) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  close(k->sock);
  ssize_t len = getppid() == keeper ? recv(sock, k->env, DLK_RUN_PAYLOAD_MAX, 0) : 0;
  if (len <= 0) _exit(127);
  k->env[len] = '\0';
  int err = 0;
  for (char *s = k->env; s < k->env + len; s += strlen(s) + 1)
    if (*s && putenv(s) != 0) err = ENOMEM;
  if (!err) {
    restore_signals(k);
    execvp(k->argv[0], k->argv);
    err = errno;
  }
  send(sock, &err, sizeof err, MSG_NOSIGNAL);
  _exit(127);
}

/* The command's process is forked before the keeper leaves the caller's session,
 * to which there is no way back, and waits there to be told what to do. */
static int fork_command(struct keeper *k) {
  int s[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, s) != 0) return errno;
  pid_t self = getpid(), pid = fork();
  if (pid == 0) {
    close(s[0]);
    be_command(k, self, s[1]);
  }
  int err = pid < 0 ? errno : 0;
  close(s[1]);
  k->exec_fd = s[0];
  k->cmd = pid > 0 ? pid : 0;
  return err;
}

/* The caller's descriptors are the command's; a pipe that we kept open would
 * hide its end from whoever reads it. */
static void drop_descriptors(const struct keeper *k) {
  DIR *d = opendir("/proc/self/fd");
  if (!d) return;
  const int keep[] = {k->sock, k->timer, k->children, k->exec_fd, dirfd(d)};
  for (struct dirent *e; (e = readdir(d));) {
    int fd = e->d_name[0] == '.' ? -1 : atoi(e->d_name);
    for (size_t i = 0; i < sizeof keep / sizeof *keep; i++)
      if (fd == keep[i]) fd = -1;
    if (fd >= 0) close(fd);
  }
  closedir(d);
  dlk_run_plug();
}

static void give_up_start(struct keeper *k, int err) {
  k->failed = true;
  tell(k, DLK_RUN_FAILED, err, MSG_DONTWAIT);
}

static void start(struct keeper *k, size_t env_len) {
  if (!env_len) env_len = 1; /* an empty message would be an end of file */
  if (!k->cmd || send(k->exec_fd, k->env, env_len, MSG_NOSIGNAL) < 0)
    give_up_start(k, k->cmd ? errno : ESRCH);
  else
    k->phase = RUNNING;
}

/* Before the exec a signal would be dropped with those from before the start. */
static void pass_on(struct keeper *k, int sig) {
  if (sig < 1 || sig > 64 || !k->cmd) return;
  /* What is being ended is not continued any more. */
  if (sig == SIGCONT && k->phase != RUNNING) return;
  if (k->exec_fd < 0) {
    kill(k->cmd, sig);
    return;
  }
  if (sig == SIGCONT) k->early &= ~(UINT64_C(1) << (SIGTSTP - 1));
  k->early |= UINT64_C(1) << (sig - 1);
}

static void pass_on_early(struct keeper *k) {
  for (int sig = 1; sig <= 64; sig++)
    if (k->early >> (sig - 1) & 1) pass_on(k, sig);
  k->early = 0;
}

/* End of file: the exec went well and closed the child's end. */
static void on_exec(struct keeper *k) {
  int err = 0;
  ssize_t n = recv(k->exec_fd, &err, sizeof err, MSG_DONTWAIT);
  close(k->exec_fd);
  k->exec_fd = -1;
  if (n == (ssize_t)sizeof err) {
    give_up_start(k, err);
  } else if (k->phase != IDLE) {
    tell(k, DLK_RUN_STARTED, k->cmd, MSG_DONTWAIT);
    pass_on_early(k);
  }
}

static void on_gone(struct keeper *k, int status) {
  if (k->exec_fd >= 0) on_exec(k);
  k->cmd = 0;
  k->status = status;
  if (k->failed || k->phase == IDLE) return;
  k->exited = true;
  if (k->phase == RUNNING && WIFSIGNALED(status)) begin_ending(k, DLK_RUN_LEFT, k->grace);
  tell(k, DLK_RUN_EXITED, status, MSG_DONTWAIT);
}

/* False: no child is left. */
static bool collect(struct keeper *k) {
  pid_t pid;
  int status;
  while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED)) > 0) {
    if (pid != k->cmd) continue;
    if (k->phase == IDLE && !WIFEXITED(status) && !WIFSIGNALED(status)) continue;
    if (WIFSTOPPED(status))
      tell(k, DLK_RUN_STOPPED, WSTOPSIG(status), MSG_DONTWAIT);
    else if (WIFCONTINUED(status))
      tell(k, DLK_RUN_CONTINUED, 0, MSG_DONTWAIT);
    else
      on_gone(k, status);
  }
  return pid == 0;
}

static void on_message(struct keeper *k, const struct dlk_run_msg *m, size_t len) {
  switch (m->what) {
    case DLK_RUN_START:
      k->until = m->at;
      k->grace = m->grace_ms;
      k->margin = m->margin_ms;
      if (k->phase == IDLE) start(k, len);
      break;
    case DLK_RUN_ALIVE:
      k->until = m->at;
      if (k->phase == ENDING) k->kill_at = dlk_min(k->kill_at, kill_time(k));
      break;
    case DLK_RUN_KILL:
      begin_ending(k, DLK_RUN_ASKED, m->grace_ms);
      break;
    case DLK_RUN_SIGNAL:
      pass_on(k, m->n);
      break;
    default:
      break;
  }
}

static void on_socket(struct keeper *k) {
  for (;;) {
    struct dlk_run_msg m;
    size_t len = k->phase == IDLE ? DLK_RUN_PAYLOAD_MAX : 0;
    int fd = -1;
    int got = recv_msg(k->sock, &m, k->env, &len, &fd);
    if (got == 0) return;
    if (got < 0) {
      if (k->phase == IDLE) _exit(0);
      begin_ending(k, DLK_RUN_ORPHAN, k->grace);
      close(k->sock);
      k->sock = -1;
      return;
    }
    if (fd >= 0) k->lock_fd = fd;
    on_message(k, &m, len);
  }
}

/* The wrapper may be stopped, with its queue full: the lock is let go first. */
static void finish(struct keeper *k) __attribute__((noreturn));
static void finish(struct keeper *k) {
  if (k->lock_fd >= 0) close(k->lock_fd);
  if (!k->failed) tell(k, DLK_RUN_DONE, k->status, 0);
  _exit(0);
}

static void keep(struct keeper *k) __attribute__((noreturn));
static void keep(struct keeper *k) {
  for (;;) {
    arm(k);
    struct pollfd p[] = {{.fd = k->sock, .events = POLLIN},
                         {.fd = k->timer, .events = POLLIN},
                         {.fd = k->exec_fd, .events = POLLIN},
                         {.fd = k->children, .events = POLLIN}};
    poll(p, sizeof p / sizeof *p, -1);
    /* The wrapper's end and the deadline go before the command's end: what it
     * leaves behind is let live only while the lock is held. */
    if (p[0].revents) on_socket(k);
    if (p[1].revents) on_timer(k);
    if (p[2].revents && k->exec_fd >= 0) on_exec(k);
    struct signalfd_siginfo si;
    if (p[3].revents && read(k->children, &si, sizeof si) < 0 && errno != EAGAIN) continue;
    bool children = collect(k);
    if (k->failed && !k->cmd) finish(k);
    if (!k->exited) continue;
    if (k->phase == RUNNING || !children) finish(k);
  }
}

/* 0 or errno. A session of its own: no signal for the
 * job hits it, and the job's group is as orphaned (so that Ctrl-Z does nothing)
 * or not as it would be without it. */
static int set_up(struct keeper *k) {
  k->timer = timerfd_create(CLOCK_BOOTTIME, TFD_CLOEXEC | TFD_NONBLOCK);
  sigset_t chld;
  sigemptyset(&chld);
  sigaddset(&chld, SIGCHLD);
  k->children = signalfd(-1, &chld, SFD_CLOEXEC | SFD_NONBLOCK);
  if (k->timer < 0 || k->children < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) return errno;
  int err = fork_command(k);
  if (err) return err;
  if (setsid() < 0) return errno;
  prctl(PR_SET_NAME, "dlock-keeper");
  drop_descriptors(k);
  return 0;
}

/* In the forked process, all signals blocked. */
static void be_keeper(char *const argv[], int sock, const sigset_t *mask) __attribute__((noreturn));
static void be_keeper(char *const argv[], int sock, const sigset_t *mask) {
  static struct keeper k;
  k = (struct keeper){.argv = argv, .sock = sock, .exec_fd = -1, .lock_fd = -1, .mask = *mask};
  k.until = DLK_FOREVER;
  /* An ignored SIGCHLD would throw exit statuses away. */
  struct sigaction def = {.sa_handler = SIG_DFL};
  sigaction(SIGCHLD, &def, &k.old_chld);
  int err = set_up(&k);
  if (err) {
    give_up_start(&k, err);
    _exit(1);
  }
  keep(&k);
}

/* ---- the wrapper's side ---- */

/* Off the numbers that the caller may have closed and the libraries print to. */
static int move_up(int *fd) {
  int up = fcntl(*fd, F_DUPFD_CLOEXEC, 10);
  if (up < 0) return errno;
  close(*fd);
  *fd = up;
  return 0;
}

/* When the keeper is killed its orphans come to us, and so can be ended. Not
 * with children from before an exec: their orphans could not be told apart. */
static void adopt_orphans(void) {
  siginfo_t si;
  adopts = waitid(P_ALL, 0, &si, WEXITED | WNOHANG | WNOWAIT) < 0 && errno == ECHILD &&
           prctl(PR_SET_CHILD_SUBREAPER, 1) == 0;
}

int dlk_keeper_fork(char *const argv[], struct dlk_keeper *k) {
  int s[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, s) != 0) return errno;
  int err = move_up(&s[0]);
  if (!err) err = move_up(&s[1]);
  adopt_orphans();
  sigset_t all, mask;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, &mask);
  pid_t pid = err ? -1 : fork();
  if (pid == 0) {
    close(s[0]);
    be_keeper(argv, s[1], &mask);
  }
  if (!err && pid < 0) err = errno;
  sigprocmask(SIG_SETMASK, &mask, NULL);
  close(s[1]);
  if (err) {
    close(s[0]);
    return err;
  }
  *k = (struct dlk_keeper){.pid = pid, .fd = s[0]};
  return 0;
}

int dlk_keeper_send(const struct dlk_keeper *k, const struct dlk_run_msg *m, const char *payload,
                    size_t len, int fd) {
  if (len > DLK_RUN_PAYLOAD_MAX) return EMSGSIZE;
  return send_msg(k->fd, m, payload, len, fd, MSG_DONTWAIT);
}

int dlk_keeper_recv(const struct dlk_keeper *k, struct dlk_run_msg *m) {
  size_t len = 0;
  int fd;
  return recv_msg(k->fd, m, NULL, &len, &fd);
}

void dlk_keeper_close(struct dlk_keeper *k) {
  if (k->fd >= 0) close(k->fd);
  k->fd = -1;
}

void dlk_keeper_collect(struct dlk_keeper *k, bool kill_it) {
  dlk_keeper_close(k);
  if (k->pid <= 0) return;
  if (kill_it) kill(k->pid, SIGKILL);
  while (waitpid(k->pid, NULL, 0) < 0 && errno == EINTR) {
  }
  k->pid = -1;
}

static const int caught[] = {SIGHUP,  SIGINT,  SIGQUIT, SIGTERM,
                             SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};

/* A blocked signal is queued even when it is ignored (nohup). See
 * restore_signals about SIGINT under lua. */
static bool is_ignored(int sig) {
  struct sigaction now, quit;
  if (sigaction(sig, NULL, &now) != 0) return true;
  if (now.sa_handler == SIG_IGN) return true;
  return sig == SIGINT && now.sa_handler != SIG_DFL && sigaction(SIGQUIT, NULL, &quit) == 0 &&
         quit.sa_handler == SIG_IGN;
}

int dlk_run_catch_signals(void) {
  sigset_t set, block;
  sigemptyset(&set);
  for (size_t i = 0; i < sizeof caught / sizeof *caught; i++)
    if (!is_ignored(caught[i])) sigaddset(&set, caught[i]);
  block = set;
  sigaddset(&block, SIGPIPE); /* a message to a closed stderr must not end us */
  if (is_ignored(SIGINT)) sigaddset(&block, SIGINT);
  sigprocmask(SIG_BLOCK, &block, NULL);
  struct sigaction def = {.sa_handler = SIG_DFL};
  sigaction(SIGCHLD, &def, NULL);
  int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  if (fd >= 0 && move_up(&fd) != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

int dlk_run_next_signal(int fd, bool *sent) {
  struct signalfd_siginfo si;
  if (read(fd, &si, sizeof si) != (ssize_t)sizeof si) return 0;
  *sent = si.ssi_code != SI_KERNEL;
  return (int)si.ssi_signo;
}

void dlk_run_stop(void) {
  sigset_t tstp;
  sigemptyset(&tstp);
  sigaddset(&tstp, SIGTSTP);
  raise(SIGTSTP); /* pending, and delivered by the next line */
  sigprocmask(SIG_UNBLOCK, &tstp, NULL);
  sigprocmask(SIG_BLOCK, &tstp, NULL);
}

void dlk_run_plug(void) {
  for (int fd = 0; fd <= 2; fd++)
    if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDWR) != fd) return;
}
