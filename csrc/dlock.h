/* The C API of the core; lua_*.c is its first user.
 *
 * Everything that talks to a backend is an operation: started by a call below,
 * waited for with dlock_op_wait, read, and unreferenced. A *blocking* operation
 * is driven by the thread that waits for it, on a connection of its own; the
 * others run on the watchdog thread and ring the bell they were given. Either
 * side may go first: objects are reference-counted.
 *
 * Times are milliseconds. Thread rule: any thread may use any object, but one
 * operation is waited for by one thread at a time. */
#ifndef DLOCK_H
#define DLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

#define DLOCK_VERSION "0.1.0"

/* Largest key (namespace included) and owner label, bytes. */
#define DLOCK_KEY_MAX 4096
#define DLOCK_LABEL_MAX 200

typedef struct dlk_client dlock_client;
typedef struct dlk_lock dlock_lock;
typedef struct dlk_op dlock_op;
typedef struct dlk_bell dlock_bell;

struct dlock_config {
  const char *url;
  const char *ns;         /* namespace, put before every key; NULL: none */
  size_t ns_len;
  const char *owner;      /* label other people see; NULL: host:pid */
  const char *username;   /* these two win over the URL's; NULL: the URL's */
  const char *password;
  int64_t ttl_ms;         /* the client's usual lease; sizes a session */
  int64_t timeout_ms;     /* one request */
  int64_t connect_timeout_ms;
  int zk_dialect;         /* ZooKeeper: 0 curator, 1 kazoo, 2 both */
  bool events;            /* somebody reads events; else only notices are kept */
  int local_handover;     /* hand-overs inside the process in a row; 0: 8, < 0: none */
};

/* Parses the URL and prepares the backend; no connection is made yet.
 * `bad_url` is set when the URL itself is wrong (misuse). */
enum dlock_err dlock_client_open(const struct dlock_config *cfg, dlock_client **out,
                                 bool *bad_url, char msg[DLOCK_MSG_MAX]);
void dlock_client_unref(dlock_client *c);
/* Releases all its locks, then lets go of its connections. */
dlock_op *dlock_client_close(dlock_client *c, dlock_bell *bell);
bool dlock_client_process_bound(const dlock_client *c); /* locks end with the process, not by a ttl */

struct dlock_acquire {
  const char *key;
  size_t key_len;
  int64_t ttl_ms;
  int64_t wait_ms;      /* 0: one try; INT64_MAX: for ever */
  int64_t max_hold_ms;  /* 0: no limit */
  int64_t timeout_ms;   /* one request */
  bool renew;
  const char *owner;    /* label; NULL: the client's */
  bool blocking;
  dlock_bell *bell;     /* for operations that are not blocking */
};
/* NULL: out of memory. */
dlock_op *dlock_acquire(dlock_client *c, const struct dlock_acquire *a);

/* Neither blocking nor a bell: nobody waits for the outcome. */
struct dlock_how {
  int64_t timeout_ms;
  bool blocking;
  dlock_bell *bell;
};
dlock_op *dlock_release(dlock_lock *l, const struct dlock_how *h);
/* ttl_ms 0: renew by the present ttl. */
dlock_op *dlock_extend(dlock_lock *l, int64_t ttl_ms, const struct dlock_how *h);
/* Done when the lock is no longer held: its err is LOST, or NOT_HELD after a release. */
dlock_op *dlock_until_lost(dlock_lock *l, const struct dlock_how *h);

enum dlock_query { DLOCK_INSPECT, DLOCK_BREAK, DLOCK_LIST, DLOCK_PING };
dlock_op *dlock_ask(dlock_client *c, enum dlock_query q, const char *key, size_t len,
                    const struct dlock_how *h);

/* True when the operation is done; false after `ms`, or earlier when a signal
 * came in (so that a language's own handler can run): call it again. */
bool dlock_op_wait(dlock_op *op, int64_t ms);
void dlock_op_cancel(dlock_op *op);
void dlock_op_unref(dlock_op *op); /* cancels it when nobody else has it */
uint64_t dlock_op_id(const dlock_op *op); /* never used twice in a process */
enum dlock_err dlock_op_err(const dlock_op *op);
const char *dlock_op_msg(const dlock_op *op);
dlock_lock *dlock_op_lock(dlock_op *op); /* acquire: takes the lock over; once */

struct dlk_info {
  bool found;      /* INSPECT: somebody holds it; BREAK: there was something to break */
  bool ours;       /* held by a dlock client */
  char *owner;     /* holder's label or value; may be NULL */
  uint64_t token;  /* 0: unknown */
  int64_t age_ms;  /* -1: unknown */
  int64_t ttl_ms;  /* left; -1: unknown or none */
  char *text;      /* PING: what answered, for people */
  char **list;     /* INSPECT: waiters; LIST: keys */
  size_t *list_len;
  size_t n;
};
const struct dlk_info *dlock_op_info(const dlock_op *op);

enum dlock_reason {
  DLOCK_R_NONE,
  DLOCK_R_EXPIRED,
  DLOCK_R_TAKEN,
  DLOCK_R_DELETED,
  DLOCK_R_REVOKED,
  DLOCK_R_SESSION,
  DLOCK_R_FORKED,
  DLOCK_R_MAX_HOLD,
  DLOCK_R_COUNT
};
const char *dlock_reason_name(enum dlock_reason r);

bool dlock_is_held(dlock_lock *l);
int64_t dlock_remaining(dlock_lock *l); /* ms; INT64_MAX: no end; 0: not held */
enum dlock_reason dlock_lost_reason(dlock_lock *l);
uint64_t dlock_token(const dlock_lock *l);
const char *dlock_owner(const dlock_lock *l); /* the label */
int64_t dlock_ttl(dlock_lock *l);             /* what the server enforces; INT64_MAX: none */
const char *dlock_state_name(dlock_lock *l);
int dlock_hold_fd(dlock_lock *l);             /* dup of the kernel lock's descriptor, or -1 */
void dlock_lock_ref(dlock_lock *l);
void dlock_lock_unref(dlock_lock *l);
/* The owner dropped it while held: released in the background, event `leaked`. */
void dlock_lock_abandon(dlock_lock *l);

enum dlock_event_type {
  DLOCK_EV_ACQUIRED,
  DLOCK_EV_RELEASED,
  DLOCK_EV_LOST,
  DLOCK_EV_RENEW_FAILED,
  DLOCK_EV_LEAKED,
  DLOCK_EV_NOTICE,
  DLOCK_EV_COUNT
};
const char *dlock_event_name(enum dlock_event_type t);

struct dlock_event {
  enum dlock_event_type type;
  char *key; /* may be NULL */
  size_t key_len;
  uint64_t token;
  enum dlock_err code;
  enum dlock_reason reason;
  double time; /* wall clock, seconds */
  char msg[DLOCK_MSG_MAX];
};
/* Takes the oldest event; false when there is none. Free key with free(). */
bool dlock_next_event(dlock_client *c, struct dlock_event *out);

/* Latency histogram: bucket i counts what took less than 2^i * 64 us. */
#define DLOCK_BUCKETS 24
struct dlock_latency {
  uint64_t n, sum_us, max_us, bucket[DLOCK_BUCKETS];
};
struct dlock_stats {
  uint64_t acquired, released, lost, timeouts, failed, canceled, leaked, renewed,
      renew_failed, handed_over, events_dropped, requests, connects;
  uint64_t held, waiting; /* now */
  struct dlock_latency acquire, release;
};
void dlock_client_stats(dlock_client *c, struct dlock_stats *out);

/* A doorbell: a descriptor that is readable after an operation ended. When it
 * is: drain, then take the ids of the ended operations until there is none. */
dlock_bell *dlock_bell_new(void);
/* One that is a stream socket, for event loops which can only read sockets: */
dlock_bell *dlock_bell_new_socket(void);
/* the path to connect to; the message when there can be none; */
const char *dlock_bell_listen(dlock_bell *b, char msg[DLOCK_MSG_MAX]);
/* after that connect: whether this process itself was the peer. */
bool dlock_bell_accept(dlock_bell *b);
void dlock_bell_hang_up(dlock_bell *b);
int dlock_bell_fd(dlock_bell *b); /* another one in a forked child; -1: nobody is connected */
void dlock_bell_drain(dlock_bell *b);
uint64_t dlock_bell_next(dlock_bell *b); /* 0: none */
void dlock_bell_nudge(dlock_bell *b);    /* rings it without an operation */
void dlock_bell_unref(dlock_bell *b);

#endif
