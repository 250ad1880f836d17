/* The engine: what a process has once. The mutex that guards all shared state
 * (clients, locks, operations, queues), the watchdog thread that alone drives
 * the loop, tasks sent to it, the descriptors that are ours, fork and exit.
 *
 * The thread is started by the first task or lock timer, in the process that
 * needs it: never at load time, never before a fork (daemons, nginx masters). */
#ifndef DLK_ENGINE_H
#define DLK_ENGINE_H

#include <pthread.h>
#include <stdbool.h>

#include "loop.h"

/* The engine mutex. Nothing that blocks, and no Lua call, while it is held.
 * Callbacks of pollers and tasks run without it. */
void dlk_enter(void);
void dlk_leave(void);

/* Waits on a condition with the mutex held; false when the time has come. */
void dlk_cond_deadline(struct timespec *t, int64_t ms);
bool dlk_cond_wait(pthread_cond_t *c, const struct timespec *until);

/* Work for the loop thread. A task is queued at most once at a time. Callable
 * with or without the mutex (dlk_post_locked: with it). */
struct dlk_task {
  void (*run)(struct dlk_task *);
  struct dlk_task *next;
  bool queued;
};
void dlk_post(struct dlk_task *t);
void dlk_post_locked(struct dlk_task *t);

/* The loop's poller. Only the loop thread may touch it. */
struct dlk_poller *dlk_loop(void);
bool dlk_on_loop(void);

/* Lock timers: set and stopped by any thread that holds the mutex, fired by
 * the loop thread *with the mutex held*. A release does not wake the thread,
 * and a set only does when it is earlier than what the thread sleeps for. */
void dlk_due_set(struct dlk_timer *t, int64_t due);
void dlk_due_stop(struct dlk_timer *t);
/* Every timer has its place before it is needed: without one a wait would not
 * end and a lock not be renewed. Mutex held; false: no memory. */
bool dlk_due_reserve(void);
void dlk_due_unreserve(void);

/* Starts the engine's process-wide parts (fork and exit handlers). 0 or errno. */
int dlk_engine_init(void);
/* Mutex held. False: the thread cannot be had now (threads, memory, descriptors). */
bool dlk_engine_start(void);

/* Counts forks: an object made under another generation belongs to a parent. */
unsigned dlk_generation(void);

/* Descriptors of ours: a forked child closes them all (close only: it must not
 * unlock, log out or end a session that is the parent's). */
void dlk_fd_own(int fd);
void dlk_fd_close(int fd);

/* For lock.c: what a forked child and the end of the process must do. */
void dlk_lock_after_fork(void);   /* in the child, mutex held */
bool dlk_lock_exit_begin(void);   /* mutex held; true: something is on its way */
bool dlk_lock_exit_busy(void);    /* mutex held */
void dlk_exit_signal(void);       /* mutex held: wakes the exit handler's wait */

#endif
