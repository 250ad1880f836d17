#include "loop.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "engine.h"

#ifndef __linux__
#error "dlock needs Linux: epoll, timerfd, inotify and open-file-description locks"
#endif

enum { TURN_MAX = 64 };

/* ---- heap ---- */

static void heap_put(struct dlk_heap *h, size_t i, struct dlk_timer *t) {
  h->v[i] = t;
  t->at = i + 1;
}

static void heap_up(struct dlk_heap *h, size_t i, struct dlk_timer *t) {
  while (i > 0 && h->v[(i - 1) / 2]->due > t->due) {
    heap_put(h, i, h->v[(i - 1) / 2]);
    i = (i - 1) / 2;
  }
  heap_put(h, i, t);
}

static void heap_down(struct dlk_heap *h, size_t i, struct dlk_timer *t) {
  for (;;) {
    size_t c = 2 * i + 1;
    if (c >= h->n)
      break;
    if (c + 1 < h->n && h->v[c + 1]->due < h->v[c]->due)
      c++;
    if (h->v[c]->due >= t->due)
      break;
    heap_put(h, i, h->v[c]);
    i = c;
  }
  heap_put(h, i, t);
}

bool dlk_heap_reserve(struct dlk_heap *h, size_t n) {
  if (n <= h->cap)
    return true;
  size_t cap = h->cap ? h->cap : 8;
  while (cap < n)
    cap *= 2;
  struct dlk_timer **v = realloc(h->v, cap * sizeof *v);
  if (!v)
    return false;
  h->v = v;
  h->cap = cap;
  return true;
}

void dlk_heap_del(struct dlk_heap *h, struct dlk_timer *t) {
  if (!t->at)
    return;
  size_t i = t->at - 1;
  t->at = 0;
  struct dlk_timer *last = h->v[--h->n];
  if (last == t)
    return;
  if (i > 0 && h->v[(i - 1) / 2]->due > last->due)
    heap_up(h, i, last);
  else
    heap_down(h, i, last);
}

bool dlk_heap_set(struct dlk_heap *h, struct dlk_timer *t, int64_t due) {
  dlk_heap_del(h, t);
  if (!dlk_heap_reserve(h, h->n + 1))
    return false;
  t->due = due;
  heap_up(h, h->n++, t);
  return true;
}

/* ---- epoll side ---- */

static uint32_t epoll_bits(unsigned want) {
  return (want & DLK_READ ? EPOLLIN | EPOLLRDHUP : 0u) | (want & DLK_WRITE ? EPOLLOUT : 0u);
}

static int epoll_set(struct dlk_poller *p, struct dlk_source *s, int op) {
  struct epoll_event e = {.events = epoll_bits(s->want), .data = {.ptr = s}};
  return epoll_ctl(p->epfd, op, s->fd, &e) ? errno : 0;
}

/* The timer descriptor, not epoll's time-out, ends a wait: it runs on
 * CLOCK_BOOTTIME, so a machine that slept wakes up to its deadlines at once. */
static void arm(struct dlk_poller *p, int64_t due) {
  if (due == p->armed)
    return;
  p->armed = due;
  struct itimerspec t = {{0, 0}, {0, 0}};
  if (due != DLK_FOREVER) {
    t.it_value.tv_sec = due <= 0 ? 0 : due / 1000;
    t.it_value.tv_nsec = due <= 0 ? 1 : due % 1000 * 1000000 + 1;
  }
  timerfd_settime(p->timerfd, TFD_TIMER_ABSTIME, &t, NULL);
}

static int wait_epoll(struct dlk_poller *p, int64_t until, struct dlk_source **out, unsigned *got) {
  struct epoll_event ev[TURN_MAX];
  bool now = until <= dlk_now_ms();
  if (!now)
    arm(p, until);
  int n = epoll_wait(p->epfd, ev, TURN_MAX, now ? 0 : -1), k = 0;
  for (int i = 0; i < n; i++) {
    if (!ev[i].data.ptr) {
      uint64_t ticks;
      p->armed = DLK_FOREVER;
      if (read(p->timerfd, &ticks, sizeof ticks) < 0)
        p->armed = -1; /* somebody re-armed it: settime decides anew */
      continue;
    }
    uint32_t e = ev[i].events;
    unsigned bad = e & (EPOLLERR | EPOLLHUP) ? DLK_READ | DLK_WRITE : 0;
    out[k] = ev[i].data.ptr;
    got[k++] = bad | (e & (EPOLLIN | EPOLLRDHUP) ? DLK_READ : 0u) | (e & EPOLLOUT ? DLK_WRITE : 0u);
  }
  return n < 0 ? -errno : k;
}

/* ---- poll side ---- */

static int wait_poll(struct dlk_poller *p, int64_t until, struct dlk_source **out, unsigned *got) {
  struct pollfd fds[TURN_MAX];
  struct dlk_source *who[TURN_MAX];
  nfds_t n = 0;
  for (struct dlk_source *s = p->sources; s && n < TURN_MAX; s = s->next) {
    fds[n].fd = s->fd;
    fds[n].events = (short)((s->want & DLK_READ ? POLLIN : 0) | (s->want & DLK_WRITE ? POLLOUT : 0));
    who[n++] = s;
  }
  int64_t left = until == DLK_FOREVER ? -1 : dlk_max(until - dlk_now_ms(), 0);
  int r = poll(fds, n, left > 60000 ? 60000 : (int)left), k = 0;
  if (r < 0)
    return -errno;
  for (nfds_t i = 0; i < n; i++) {
    short e = fds[i].revents;
    if (!e)
      continue;
    unsigned bad = e & (POLLERR | POLLHUP | POLLNVAL) ? DLK_READ | DLK_WRITE : 0;
    out[k] = who[i];
    got[k++] = bad | (e & POLLIN ? DLK_READ : 0u) | (e & POLLOUT ? DLK_WRITE : 0u);
  }
  return k;
}

/* ---- both ---- */

int dlk_poller_init(struct dlk_poller *p, bool epoll) {
  memset(p, 0, sizeof *p);
  p->epfd = p->timerfd = -1;
  p->armed = DLK_FOREVER;
  if (!epoll)
    return 0;
  p->epfd = epoll_create1(EPOLL_CLOEXEC);
  if (p->epfd < 0)
    return errno;
  dlk_fd_own(p->epfd);
  p->timerfd = timerfd_create(CLOCK_BOOTTIME, TFD_CLOEXEC | TFD_NONBLOCK);
  struct epoll_event e = {.events = EPOLLIN, .data = {.ptr = NULL}};
  int err = p->timerfd < 0 ? errno : 0;
  if (!err) {
    dlk_fd_own(p->timerfd);
    err = epoll_ctl(p->epfd, EPOLL_CTL_ADD, p->timerfd, &e) ? errno : 0;
  }
  if (err)
    dlk_poller_destroy(p);
  return err;
}

void dlk_poller_destroy(struct dlk_poller *p) {
  if (p->timerfd >= 0)
    dlk_fd_close(p->timerfd);
  if (p->epfd >= 0)
    dlk_fd_close(p->epfd);
  free(p->timers.v);
  memset(p, 0, sizeof *p);
  p->epfd = p->timerfd = -1;
}

static void fire_timers(struct dlk_poller *p) {
  int64_t now = dlk_now_ms();
  /* Bounded: a timer that sets itself anew for "now" waits for the next turn. */
  for (size_t n = p->timers.n; n && dlk_heap_due(&p->timers) <= now; n--) {
    struct dlk_timer *t = p->timers.v[0];
    dlk_heap_del(&p->timers, t);
    t->fire(t);
  }
}

int dlk_poller_turn(struct dlk_poller *p, int64_t until) {
  struct dlk_source *s[TURN_MAX];
  unsigned got[TURN_MAX];
  until = dlk_min(until, dlk_heap_due(&p->timers));
  int n = p->epfd < 0 ? wait_poll(p, until, s, got) : wait_epoll(p, until, s, got);
  p->batch = s;
  p->batch_n = n > 0 ? n : 0;
  for (int i = 0; i < n; i++)
    if (s[i])
      s[i]->ready(s[i], got[i]);
  p->batch = NULL;
  p->batch_n = 0;
  fire_timers(p);
  return n == -EINTR ? EINTR : 0;
}

static void link_source(struct dlk_poller *p, struct dlk_source *s) {
  s->on = p;
  s->next = p->sources;
  s->link = &p->sources;
  if (s->next)
    s->next->link = &s->next;
  p->sources = s;
}

static void unlink_source(struct dlk_source *s) {
  *s->link = s->next;
  if (s->next)
    s->next->link = s->link;
  s->link = NULL;
  s->on = NULL;
}

int dlk_source_add(struct dlk_poller *p, struct dlk_source *s) {
  int err = p->epfd < 0 ? 0 : epoll_set(p, s, EPOLL_CTL_ADD);
  if (!err)
    link_source(p, s);
  return err;
}

void dlk_source_want(struct dlk_source *s, unsigned want) {
  if (s->want == want)
    return;
  s->want = want;
  if (s->on && s->on->epfd >= 0)
    epoll_set(s->on, s, EPOLL_CTL_MOD);
}

void dlk_source_del(struct dlk_source *s) {
  struct dlk_poller *p = s->on;
  if (!p)
    return;
  for (int i = 0; i < p->batch_n; i++)
    if (p->batch[i] == s)
      p->batch[i] = NULL;
  if (p->epfd >= 0)
    epoll_ctl(p->epfd, EPOLL_CTL_DEL, s->fd, NULL);
  unlink_source(s);
}

bool dlk_timer_set(struct dlk_poller *p, struct dlk_timer *t, int64_t due) {
  if (t->at && t->on != p)
    dlk_timer_stop(t);
  t->on = p;
  return dlk_heap_set(&p->timers, t, due);
}

void dlk_timer_stop(struct dlk_timer *t) {
  if (t->at)
    dlk_heap_del(&t->on->timers, t);
}

void dlk_poller_move(struct dlk_poller *from, struct dlk_poller *to) {
  while (from->sources) {
    struct dlk_source *s = from->sources;
    unlink_source(s);
    /* Refused (no memory): its timers below still end what it stood for. */
    dlk_source_add(to, s);
  }
  bool room = dlk_heap_reserve(&to->timers, to->timers.n + from->timers.n);
  while (from->timers.n) {
    struct dlk_timer *t = from->timers.v[from->timers.n - 1];
    dlk_heap_del(&from->timers, t);
    if (room)
      dlk_timer_set(to, t, t->due);
    else
      t->fire(t); /* early rather than never */
  }
}
