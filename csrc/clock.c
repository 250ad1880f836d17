#include "clock.h"

static int64_t read_ns(clockid_t id) {
  struct timespec t;
  clock_gettime(id, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t dlk_now_ms(void) { return read_ns(CLOCK_BOOTTIME) / 1000000; }

uint64_t dlk_wall_100us(void) {
  return (uint64_t)(read_ns(CLOCK_REALTIME) / 100000);
}
