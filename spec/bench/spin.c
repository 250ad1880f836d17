/* spin: keeps every core of this process' set awake until it is killed. A core
 * that goes to sleep between two requests adds its waking to what is measured;
 * SCHED_IDLE threads give way to everything else at once. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>

static void *spin(void *core) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET((size_t)core, &one);
  pthread_setaffinity_np(pthread_self(), sizeof one, &one);
  const struct sched_param p = {.sched_priority = 0};
  if (pthread_setschedparam(pthread_self(), SCHED_IDLE, &p) != 0) return NULL;
  for (volatile unsigned long n = 0;; n++) continue;
}

int main(void) {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  pthread_t last;
  for (size_t i = 0; i < CPU_SETSIZE; i++)
    if (CPU_ISSET(i, &set) && pthread_create(&last, NULL, spin, (void *)i) != 0) return 1;
  puts("spinning");
  fflush(stdout);
  pthread_join(last, NULL);
  return 0;
}
