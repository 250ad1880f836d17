/* The page that the processes of a hand-off run share: who is inside, when the
 * last holder began to let go, and what each hand-off took. Only the holder
 * writes, so a broken exclusion shows as `violations`. The layout is also known
 * to support/redispy.py. */
#ifndef DLK_BENCH_SHARE_H
#define DLK_BENCH_SHARE_H

#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SHARE_SAMPLES = 1 << 16 };

struct share {
  int64_t released_ns; /* 0: nobody has let go yet */
  int64_t grants;
  int64_t n;
  int32_t inside;
  int32_t violations;
  int64_t sample_ns[SHARE_SAMPLES];
};

static inline int64_t share_now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void share_nap_us(long us) {
  struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
  nanosleep(&t, NULL);
}

static inline struct share *share_map(int fd) {
  void *p = mmap(NULL, sizeof(struct share), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return p == MAP_FAILED ? NULL : p;
}

/* Right after the lock was granted. */
static inline void share_enter(struct share *s) {
  int64_t now = share_now_ns();
  if (__atomic_exchange_n(&s->inside, 1, __ATOMIC_ACQ_REL) != 0) s->violations++;
  if (s->released_ns && s->n < SHARE_SAMPLES) s->sample_ns[s->n++] = now - s->released_ns;
  __atomic_add_fetch(&s->grants, 1, __ATOMIC_RELEASE);
}

/* Right before the release begins; returns how many grants there were. */
static inline int64_t share_leave(struct share *s) {
  int64_t grants = s->grants;
  __atomic_store_n(&s->inside, 0, __ATOMIC_RELEASE);
  s->released_ns = share_now_ns();
  return grants;
}

/* Politeness: who let go waits until somebody else was let in. */
static inline void share_after_you(const struct share *s, int64_t grants, int64_t until_ns) {
  while (__atomic_load_n(&s->grants, __ATOMIC_ACQUIRE) == grants && share_now_ns() < until_ns)
    share_nap_us(200);
}

#endif
