/* Pollers: a set of descriptors and timers driven by one thread at a time.
 *
 * There are two kinds and one code path. The *loop* (epoll) belongs to the
 * watchdog thread for the life of the process. A *lane* poller (poll) belongs
 * to one blocked caller, who drives it in place; when that caller gives up,
 * everything on it moves to the loop and goes on there. Nothing here takes a
 * mutex: only the driving thread may touch a poller or what is on it. */
#ifndef DLK_LOOP_H
#define DLK_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "clock.h"

#define DLK_READ 1u
#define DLK_WRITE 2u

struct dlk_timer {
  int64_t due;
  size_t at; /* place in the heap, 1-based; 0 = not set */
  void (*fire)(struct dlk_timer *);
  struct dlk_poller *on; /* kept by dlk_timer_set; unused in bare heaps */
};

/* A binary heap of timers, earliest first. */
struct dlk_heap {
  struct dlk_timer **v;
  size_t n, cap;
};

bool dlk_heap_set(struct dlk_heap *h, struct dlk_timer *t, int64_t due); /* false: no memory */
bool dlk_heap_reserve(struct dlk_heap *h, size_t n); /* room for n timers in all */
void dlk_heap_del(struct dlk_heap *h, struct dlk_timer *t);
static inline int64_t dlk_heap_due(const struct dlk_heap *h) {
  return h->n ? h->v[0]->due : DLK_FOREVER;
}

struct dlk_source {
  int fd;
  unsigned want; /* DLK_READ | DLK_WRITE */
  void (*ready)(struct dlk_source *, unsigned got); /* errors count as both */
  struct dlk_poller *on;
  struct dlk_source *next, **link;
};

struct dlk_poller {
  int epfd; /* -1: a lane, driven by poll */
  int timerfd;
  int64_t armed; /* what timerfd is set to */
  struct dlk_heap timers;
  struct dlk_source *sources;
  struct dlk_source **batch; /* of the turn that runs now; deleted ones are NULLed */
  int batch_n;
};

int dlk_poller_init(struct dlk_poller *p, bool epoll); /* 0 or errno */
void dlk_poller_destroy(struct dlk_poller *p);

/* One turn: wait until something is ready, a timer is due or `until` (on
 * dlk_now_ms) has come, then run the callbacks. Returns EINTR when a signal cut
 * the wait short, else 0. */
int dlk_poller_turn(struct dlk_poller *p, int64_t until);

/* 0 or errno. s->fd, s->want and s->ready are set by the caller. */
int dlk_source_add(struct dlk_poller *p, struct dlk_source *s);
void dlk_source_want(struct dlk_source *s, unsigned want);
void dlk_source_del(struct dlk_source *s);

bool dlk_timer_set(struct dlk_poller *p, struct dlk_timer *t, int64_t due);
void dlk_timer_stop(struct dlk_timer *t);

/* Moves every source and timer of `from` to `to`; `from` is empty then. */
void dlk_poller_move(struct dlk_poller *from, struct dlk_poller *to);

#endif
