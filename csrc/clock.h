/* Time: milliseconds on CLOCK_BOOTTIME, which goes on during suspend (a lease
 * on a server does too). DLK_FOREVER is a deadline that never comes; sums
 * saturate there. */
#ifndef DLK_CLOCK_H
#define DLK_CLOCK_H

#include <stdint.h>
#include <time.h>

#define DLK_FOREVER INT64_MAX

int64_t dlk_now_ms(void);

/* Wall clock in units of 100 us, the unit of fencing tokens that follow time. */
uint64_t dlk_wall_100us(void);

static inline int64_t dlk_after(int64_t at, int64_t ms) {
  return ms >= DLK_FOREVER - at ? DLK_FOREVER : at + ms;
}

static inline int64_t dlk_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t dlk_max(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
