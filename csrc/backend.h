/* The interface that every backend fills. The core owns lock life, deadlines,
 * renewal times and the order of local waiters; a backend owns the wire format.
 *
 * One exchange is a *call*. start() sends it over a lane (in the caller's
 * thread) or, when call->lane is NULL, over the loop's own connection (on the
 * loop thread); dlk_call_done() ends it in the same thread. How Redlock,
 * ZooKeeper and etcd fill this: csrc/README.md. */
#ifndef DLK_BACKEND_H
#define DLK_BACKEND_H

#include "dlock.h"
#include "engine.h"
#include "url.h"

enum dlk_mode { DLK_EXCLUSIVE, DLK_SHARED, DLK_INTEND_SHARED, DLK_INTEND_EXCLUSIVE };

struct dlk_item {
  char *name; /* namespace .. key, any bytes, NUL-terminated for convenience */
  size_t len;
  enum dlk_mode mode;
  uint32_t limit; /* permits; 1 for a mutex */
  uint64_t token; /* set by a granted ACQUIRE or HAND_OVER */
};

/* What one acquire wants or has on the server: a contender, then a grant. It
 * lives from the first try until a RELEASE of it is definite. */
struct dlk_grant {
  struct dlk_item *items;
  size_t n;
  char *owner; /* "dlock1:" .. 32 hex .. ":" .. label: the owner token */
  size_t owner_len;
  int64_t ttl_ms; /* wanted; a backend that rounds or clamps writes it back */
  bool queued;    /* it may have left something in the server's line of waiters */
  void *b;        /* the backend's part (node path, descriptor ...), freed by forget() */
};

enum dlk_verb {
  DLK_ACQUIRE,   /* one try; own value found = granted (a retry after a lost reply) */
  DLK_RENEW,     /* all grants: prove ownership and set the expiry to ttl_ms from now */
  DLK_RELEASE,   /* delete if ours, leave the line, wake the next; also after a lost reply */
  DLK_HAND_OVER, /* grants[0] -> heir in one guarded write, with a new token */
  DLK_INSPECT,
  DLK_BREAK,
  DLK_LIST,
  DLK_PING,
};

enum dlk_outcome {
  DLK_UNKNOWN, /* until the backend says so */
  DLK_DONE,    /* granted, renewed, released, handed over, answered */
  DLK_BUSY,    /* ACQUIRE: somebody else has it */
  DLK_GONE,    /* RENEW, RELEASE, HAND_OVER: not there any more */
  DLK_TAKEN,   /* ... somebody else has it */
};

struct dlk_call {
  enum dlk_verb verb;
  struct dlk_client *client;
  struct dlk_lane *lane; /* NULL: the loop's own connection */
  void *behind;          /* RELEASE: the `via` of an unanswered call that it must follow; or NULL */
  struct dlk_grant **grants;
  enum dlk_outcome *out; /* one per grant; queries use out[0] */
  size_t n;
  int64_t *ttl_ms;       /* RENEW: one per grant; read these, not the grants' */
  struct dlk_grant *heir;
  bool contend;          /* ACQUIRE: enter the server's line when busy */
  int64_t keep_ms;       /* RELEASE: minimum hold still to run; 0 now */
  const char *key;       /* queries: name or prefix, with the namespace */
  size_t key_len;

  /* Filled by the backend. */
  int64_t sent_ms;       /* taken before the first byte went out; 0: nothing was sent,
                          * or the call failed and certainly changed nothing */
  void *via;             /* the connection it went over, for give_up and `behind` */
  enum dlock_err err;    /* not OK: the call failed as a whole, `out` says nothing */
  char msg[DLOCK_MSG_MAX];
  int64_t retry_ms;      /* BUSY: look again after that long at the latest */
  int64_t holder_ttl_ms; /* BUSY: -1 unknown */
  char holder[DLOCK_LABEL_MAX + 48]; /* BUSY: the holder's value, cut; "" unknown */
  bool woke;             /* RELEASE: another client was told that it is free */
  struct dlk_info *info;

  /* Used by the core. */
  void (*done)(struct dlk_call *);
  struct dlk_timer deadline;
  bool in_flight, late;
  struct dlk_task task;
  void *ctx;
  void *ctx_buf;
};

#define DLK_CAP_LANES 1u         /* a caller can run calls in place */
#define DLK_CAP_PROCESS_BOUND 2u /* the kernel frees it: no expiry on the server */
#define DLK_CAP_HAND_OVER 4u
#define DLK_CAP_SESSION 8u       /* locks live as long as their client's session: see dlk_session_valid */

struct dlk_backend {
  const char *name;
  const char *const *schemes; /* NULL-terminated */
  unsigned caps;

  /* Checks the URL's parts and prepares; no I/O that could block. */
  enum dlock_err (*open)(struct dlk_client *c, const struct dlk_url *url,
                         const struct dlock_config *cfg, void **self, char *msg);
  /* On the loop thread; nothing is in flight any more. */
  void (*close)(void *self);

  /* The backend's part of a lane, opened lazily by the first call on it; NULL
   * for backends without lanes. lane_close runs in the driving thread. */
  void *(*lane_open)(void *self, struct dlk_poller *p);
  void (*lane_close)(void *lane);

  void (*start)(void *self, struct dlk_call *call);
  /* The caller's time is up (loop thread; a lane's sources and timers have just
   * been moved to dlk_loop(), which drives them from now on). The call stays: dlk_call_done() comes
   * when the late answer does or the connection breaks. No new call may use
   * that connection, but for a RELEASE that names it in `behind`. */
  void (*give_up)(void *self, struct dlk_call *call);
  /* While on: call dlk_wake() when a new try makes sense; dlk_wake once when
   * the watch stands (something may have happened before). Loop thread. */
  void (*watch)(void *self, struct dlk_grant *g, bool on);
  /* HELD grants of process-bound backends: call dlk_gone() when it vanishes. On
   * from the loop thread, some time after the grant (look first whether it is
   * still held and there); off from any thread. NULL if there is nothing to watch. */
  void (*guard)(void *self, struct dlk_grant *g, bool on);
  void (*forget)(void *self, struct dlk_grant *g);
  int (*hold_fd)(struct dlk_grant *g); /* NULL or: dup of the kernel lock's descriptor */
};

/* The registry: NULL-terminated; `missing` schemes are known but not built in. */
extern const struct dlk_backend *const dlk_backends[];
extern const struct dlk_backend dlk_local_backend, dlk_redis_backend, dlk_zookeeper_backend;
/* What would bring a scheme that this build lacks; NULL: no such scheme is known. */
const char *dlk_scheme_missing(const char *scheme);

/* ---- what the core offers to backends ---- */

/* Ends a call, in the thread that drives it. Sets err/msg first, or uses these: */
void dlk_call_done(struct dlk_call *call);
void dlk_call_fail(struct dlk_call *call, enum dlock_err e, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* The poller that drives this call, and the backend's part of its lane. */
struct dlk_poller *dlk_call_poller(const struct dlk_call *call);
void *dlk_call_lane(const struct dlk_call *call);

/* Something happened to this name (loop thread, mutex not held): the client's
 * contender tries again. False: nobody of this client waits for it. */
bool dlk_wake(struct dlk_client *c, const char *name, size_t len);
/* Every waiter of the client (a lost subscription, a new connection). */
void dlk_wake_all(struct dlk_client *c);
/* A held grant is gone. Any thread, mutex not held. */
void dlk_gone(struct dlk_client *c, struct dlk_grant *g, enum dlock_reason why, const char *msg);
/* DLK_CAP_SESSION: until when the session is proved to live. No lock of the client
 * is valid beyond that; there is no end to a clean-up but the backend's word. It
 * starts at 0 and only rises, until dlk_session_lost() makes every held lock
 * LOST and sets it back. Any thread, mutex not held. */
void dlk_session_valid(struct dlk_client *c, int64_t until);
void dlk_session_lost(struct dlk_client *c, const char *msg);
/* Event `notice`. Any thread, mutex not held. */
void dlk_notice(struct dlk_client *c, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void dlk_count_connect(struct dlk_client *c);
const char *dlk_client_label(const struct dlk_client *c);

/* Owner values. */
#define DLK_OWNER_PREFIX "dlock1:"
#define DLK_OWNER_HEX 32
/* The label inside a value of ours, or NULL when the value is not ours. */
const char *dlk_owner_label(const char *value, size_t len, size_t *label_len);
/* Random bytes from getrandom(2), pooled; the pool is dropped after a fork. */
void dlk_random(void *buf, size_t n);

struct dlk_info *dlk_info_new(void);
bool dlk_info_add(struct dlk_info *i, const char *s, size_t len);
void dlk_info_free(struct dlk_info *i);

#endif
