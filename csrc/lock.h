/* Inside the core: clients, locks, operations and lanes. Everything in these
 * structs is guarded by the engine mutex unless it says otherwise. */
#ifndef DLK_LOCK_H
#define DLK_LOCK_H

#include "backend.h"

/* A lock's life. lock_to() in lock.c is the only writer of `state`.
 *
 *   IDLE -> ACQUIRING <-> WAITING     HELD -> RELEASING -> RELEASED
 *              |            |          |         |
 *              +--> HELD <--+          v         v
 *              v            v         LOST      LOST
 *   FAILED / CANCELED / TIMED_OUT
 *
 * FAILED, CANCELED, TIMED_OUT and LOST are followed by a compensating release
 * in the background when something may be left on the server. */
#define DLK_STATES(X)                                                          \
  X(IDLE, "idle") X(ACQUIRING, "acquiring") X(WAITING, "waiting") X(HELD, "held") \
  X(RELEASING, "releasing") X(RELEASED, "released") X(LOST, "lost")            \
  X(FAILED, "failed") X(CANCELED, "canceled") X(TIMED_OUT, "timed out")

enum dlk_state {
#define X(id, name) DLK_##id,
  DLK_STATES(X)
#undef X
      DLK_STATE_COUNT
};

bool dlk_state_may(enum dlk_state from, enum dlk_state to);
const char *dlk_state_text(enum dlk_state s);

struct dlk_lane {
  struct dlk_poller p; /* touched only by the driving thread */
  struct dlk_client *client;
  void *b;
  struct dlk_lane *next; /* among the spare ones */
  int64_t idle_since;
  bool adopted;          /* the loop drives it now */
  size_t calls;          /* in flight */
  struct dlk_call *call; /* the one that its caller waits for */
  struct dlk_task step;  /* on the loop: take it over, later close it */
};

/* All local contenders of one name in one client, first come first served. The
 * first without a holder before it is the contender that talks to the server. */
struct dlk_queue {
  struct dlk_queue *next; /* in its hash bucket */
  char *name;
  size_t len;
  struct dlk_lock *holder;
  struct dlk_lock *first, **last;
  unsigned handed; /* hand-overs in a row, so that other processes get their turn */
  bool yield;      /* another client was told that it is free, and goes first */
};

struct dlk_waitq {
  struct dlk_queue **bucket;
  size_t n_buckets, n;
};

struct dlk_queue *dlk_waitq_find(const struct dlk_waitq *w, const char *name, size_t len);
struct dlk_queue *dlk_waitq_get(struct dlk_waitq *w, const char *name, size_t len); /* NULL: no memory */
void dlk_waitq_push(struct dlk_queue *q, struct dlk_lock *l);
void dlk_waitq_remove(struct dlk_queue *q, struct dlk_lock *l);
/* Frees the queue when nobody is in it. */
void dlk_waitq_tidy(struct dlk_waitq *w, struct dlk_queue *q);
void dlk_waitq_destroy(struct dlk_waitq *w);

enum dlk_op_kind { DLK_OP_ACQUIRE, DLK_OP_RELEASE, DLK_OP_EXTEND, DLK_OP_LOST, DLK_OP_QUERY, DLK_OP_CLOSE };

struct dlk_op {
  int refs;
  uint64_t id;
  enum dlk_op_kind kind;
  struct dlk_client *client;
  struct dlk_lock *lock;
  unsigned generation;
  bool blocking, done;
  bool claimed; /* the lock was taken over by the caller */
  bool driving; /* a thread is in a turn of the lane's poller */
  enum dlock_err err;
  char msg[DLOCK_MSG_MAX];
  struct dlk_lane *lane; /* while the waiting thread must drive it */
  struct dlk_bell *bell;
  struct dlk_op *bell_next, **bell_link; /* among the bell's ended ones */
  pthread_cond_t cond;
  struct dlk_info *info;
  int64_t timeout_ms;
  int64_t started_us;
  struct dlk_op *next;   /* until-lost operations of a lock; close operations of a client */
  struct dlk_call *call; /* for loop-run operations: what `task` starts */
  struct dlk_task task;
};

struct dlk_lock {
  int refs;
  struct dlk_client *client;
  struct dlk_grant g;
  struct dlk_item item; /* g.items */
  unsigned generation;
  enum dlk_state state;
  enum dlock_reason reason;
  char why[DLOCK_MSG_MAX]; /* how it was lost */
  bool live;               /* in its client's list, with a reference */
  struct dlk_lock *next, **link;
  struct dlk_queue *q;
  struct dlk_lock *q_next, **q_link;

  struct dlk_op *acquire; /* while it is pending */
  struct dlk_op *until_lost;
  int64_t wait_until;
  int64_t timeout_ms;
  bool renew, no_wait, by_us;
  int64_t max_hold_ms;

  struct dlk_timer timer;  /* engine timer; meaning depends on the state */
  struct dlk_task task;    /* next step on the loop: try, or clean up */
  bool watching, again;    /* again: a wake-up came while a try was out */
  unsigned tries;
  struct dlk_call *call;   /* the try that is out, or the late one to clean up behind */
  char holder[DLOCK_LABEL_MAX + 64];
  int64_t holder_ttl_ms;

  int64_t valid_until, renew_at, hold_until, guard_at;
  bool guard_wanted, guarded;
  int64_t floor_ttl_ms;  /* an unanswered renewal may still set the expiry to this */
  int64_t flying_ttl_ms; /* the renewals that are out may; both DLK_FOREVER if none */
  unsigned flying;       /* how many are */
  int64_t expiry_ms;    /* by then the server has forgotten it, if it keeps its clock */
  bool renewing, renew_warned;
  bool in_due; /* in client->due: renewal not sent yet */
  struct dlk_lock *next_due;

  bool unclean;   /* something may be left on the server */
  bool unknown;   /* an unanswered request may still create it */
  bool background; /* RELEASING with nobody waiting for it */
  bool cleaning;   /* a RELEASE is out */
  bool followed;   /* one went behind the unanswered request */
  unsigned cleans;
};

#define DLK_EVENTS_MAX 256
struct dlk_event_node {
  struct dlk_event_node *next;
  struct dlock_event e;
};

struct dlk_client {
  int refs;
  struct dlk_client *next, **link;
  const struct dlk_backend *be;
  void *self;
  unsigned generation;
  bool closed;
  int64_t session_until; /* DLK_FOREVER without DLK_CAP_SESSION */
  bool own_label; /* the owner label was given, so a forked child keeps it */
  /* Copies of the configuration, to start over in a forked child. */
  struct dlock_config cfg;
  struct dlk_waitq waitq;
  struct dlk_lock *locks;
  struct dlk_lane *lanes; /* spare ones */
  struct dlk_timer idle;
  struct dlk_task tidy;
  struct dlk_lock *due; /* renewals to send */
  size_t n_due;
  struct dlk_task flush;
  size_t busy; /* calls, and lanes in use */
  struct dlk_task quit, shut;
  struct dlk_op *closing;
  struct dlk_event_node *ev_first, **ev_last;
  size_t ev_n;
  struct dlock_stats stats;
  uint64_t requests, connects; /* atomic: counted where the mutex is not held */
};

/* client.c */
void dlk_client_ref(struct dlk_client *c);
void dlk_client_unref(struct dlk_client *c);
/* Posts a task of the client's own, which has a reference until it calls unref. */
void dlk_client_post(struct dlk_client *c, struct dlk_task *t);
/* Lets go of the connections once the client is closed and nothing is left to do. */
void dlk_client_tidy(struct dlk_client *c);
extern struct dlk_client *dlk_clients;
enum dlock_err dlk_client_ready(struct dlk_client *c, char *msg); /* after a fork: start over; mutex not held */
void dlk_event(struct dlk_client *c, enum dlock_event_type type, struct dlk_lock *l,
               enum dlock_err code, const char *msg);
void dlk_latency(struct dlock_latency *h, int64_t us);
int64_t dlk_now_us(void);

/* call.c */
struct dlk_call *dlk_call_new(struct dlk_client *c, enum dlk_verb verb, size_t n); /* mutex held */
void dlk_call_free(struct dlk_call *call);
/* Adds a lock; the call keeps a reference to it until it is freed. Mutex held. */
void dlk_call_add(struct dlk_call *call, struct dlk_lock *l);
/* Mutex not held; on the driving thread. call->done comes when the call ends. If
 * its time runs out first, done comes twice: once with in_flight and late set
 * (the outcome is unknown, err and msg say so), and when the late answer or the
 * end of the connection has come, with late set alone. */
void dlk_call_start(struct dlk_call *call, struct dlk_lane *lane, int64_t timeout_ms);
/* The time is up: sets err and msg for the first `done`. Driving thread. */
void dlk_call_mark_late(struct dlk_call *call);
/* Nobody wants the answer any more: as above, but done does not come the first
 * time. On the loop thread, for calls of the loop; mutex not held. */
void dlk_call_give_up(struct dlk_call *call);
/* The lane of a caller who stops waiting moves to the loop, with its late call.
 * Mutex held. */
void dlk_lane_abandon(struct dlk_lane *lane);
struct dlk_lane *dlk_lane_take(struct dlk_client *c); /* mutex held; NULL: no memory */
void dlk_lane_put(struct dlk_lane *lane);             /* mutex held */
void dlk_lanes_close(struct dlk_client *c);           /* the spare ones, when the client ends */
void dlk_lanes_idle(struct dlk_timer *t);
void dlk_lanes_tidy(struct dlk_task *t);

/* op.c */
struct dlk_op *dlk_op_new(struct dlk_client *c, enum dlk_op_kind kind, bool blocking, struct dlk_bell *bell);
void dlk_op_finish(struct dlk_op *op, enum dlock_err e, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void dlk_op_put(struct dlk_op *op); /* mutex held: drop one reference */
/* Starts op's call: on a lane when the caller blocks and the backend has lanes,
 * else as a task of the loop. Mutex held on entry, not held on return. */
void dlk_op_launch(struct dlk_op *op, struct dlk_call *call);

/* bell.c; mutex held, but for ref */
void dlk_bell_ref(struct dlk_bell *b);
void dlk_bell_ring(struct dlk_bell *b, struct dlk_op *op);
void dlk_bell_forget(struct dlk_bell *b, struct dlk_op *op);

/* lock.c */
void dlk_lock_put(struct dlk_lock *l); /* mutex held */
void dlk_lock_poke(struct dlk_lock *l); /* mutex held: its next step runs on the loop soon */
void dlk_lock_flush(struct dlk_task *t);

void dlk_lock_close_all(struct dlk_client *c); /* mutex held */
void dlk_lock_cancel(struct dlk_lock *l, enum dlock_err e, const char *msg); /* mutex held */

#endif
