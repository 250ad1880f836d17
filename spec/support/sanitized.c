/* Part of the module in sanitizer builds only. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
static pid_t loader;

/* A forked child gives up what is its parent's: its memory is lost on purpose,
 * and LeakSanitizer cannot see the stacks of threads that did not come along.
 * Registered before dlock's own exit handler, so this runs after it. */
static void no_leak_check_in_children(int status, void *arg) {
  (void)arg;
  if (getpid() == loader) return;
  fflush(NULL);
  _exit(status);
}
#endif

__attribute__((constructor)) static void init(void) {
  /* The runtime came in by LD_PRELOAD; the processes we start must not inherit it. */
  unsetenv("LD_PRELOAD");
#ifdef __SANITIZE_ADDRESS__
  loader = getpid();
  on_exit(no_leak_check_in_children, NULL);
#endif
}
