/* The keeper of `dlock run`: a small process between the wrapper (which talks
 * to the backend) and the command, so that a dead, stopped or hung wrapper
 * cannot leave the command running while its lease passes on.
 *
 *   caller's shell ── wrapper ══ socketpair ══ keeper ── command ── ...
 *
 * The keeper is forked before the wrapper has a socket or a thread, never comes
 * back to its caller, and is the subreaper of all that the command starts:
 * whatever loses its parent becomes the keeper's child, so a walk over /proc
 * finds every descendant, in any group or session, and "no child left" means
 * that the last one is gone. It has a session of its own (a SIGSTOP or SIGKILL
 * for the job does not hit it) and blocks all signals; the command runs in the
 * wrapper's group and session. */
#ifndef DLK_RUN_H
#define DLK_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum dlk_run_what {
  /* to the keeper */
  DLK_RUN_START = 1, /* at, grace, margin; payload: assignments with NULs; maybe a descriptor */
  DLK_RUN_ALIVE,     /* at: the lease is valid until then */
  DLK_RUN_KILL,      /* grace: SIGTERM now, SIGKILL after that long */
  DLK_RUN_SIGNAL,    /* n: pass it on to the command */
  /* from the keeper */
  DLK_RUN_STARTED,   /* n: the command's pid */
  DLK_RUN_FAILED,    /* n: errno of the exec, or of a step before it */
  DLK_RUN_STOPPED,   /* n: the signal that stopped the command */
  DLK_RUN_CONTINUED,
  DLK_RUN_EXITED,    /* n: wait status of the command; why */
  DLK_RUN_DONE,      /* the same once more; nothing is left to be guarded, the keeper ends */
};

/* Why the keeper began to end the command. */
enum dlk_run_why {
  DLK_RUN_NOT,      /* it did not */
  DLK_RUN_LEFT,     /* the command died of a signal and left descendants */
  DLK_RUN_ASKED,    /* DLK_RUN_KILL */
  DLK_RUN_DEADLINE, /* the lease came to its end without a renewal */
  DLK_RUN_ORPHAN,   /* the wrapper is gone */
};

/* Times: ms, `at` on dlk_now_ms(); DLK_FOREVER: no end. SIGTERM goes out at
 * `at` - grace - margin, SIGKILL at `at` - margin at the latest. */
struct dlk_run_msg {
  uint32_t what;
  int32_t n;
  uint32_t why;
  int64_t at, grace_ms, margin_ms;
};

#define DLK_RUN_PAYLOAD_MAX 16384

struct dlk_keeper {
  pid_t pid;
  int fd;
};

/* argv of the command, NULL-terminated. 0 or errno. In the keeper it does not return. */
int dlk_keeper_fork(char *const argv[], struct dlk_keeper *k);
/* fd -1: none. 0 or errno (EAGAIN: the keeper does not read). */
int dlk_keeper_send(const struct dlk_keeper *k, const struct dlk_run_msg *m, const char *payload,
                    size_t len, int fd);
/* 1: got one; 0: none yet; -1: the keeper is gone. */
int dlk_keeper_recv(const struct dlk_keeper *k, struct dlk_run_msg *m);
/* Closes the socket: a keeper that still guards the command ends it now. */
void dlk_keeper_close(struct dlk_keeper *k);
/* Closes, waits until the keeper has ended, by SIGKILL if `kill_it` (the command
 * then dies by PR_SET_PDEATHSIG and the rest comes to this process). */
void dlk_keeper_collect(struct dlk_keeper *k, bool kill_it);

/* After that: SIGKILL to every descendant of this process; false: there is none
 * any more, or they cannot be told from children that we had before. */
bool dlk_run_kill_descendants(void);

/* Blocks the signals that the wrapper answers itself, but not those the caller
 * ignores, and returns a descriptor to read them from; -1 and errno. */
int dlk_run_catch_signals(void);
/* The next one or 0; *sent: by a process, not by the terminal. */
int dlk_run_next_signal(int fd, bool *sent);
/* Stops this process as Ctrl-Z would have done; returns when it is continued. */
void dlk_run_stop(void);
/* /dev/null for each of the descriptors 0 to 2 that is closed, so that no
 * socket of ours ends up there. */
void dlk_run_plug(void);

#endif
