/* Inside the ZooKeeper backend: paths, the session, and the calls over it.
 *
 * Everything here runs on the loop thread. libzookeeper's own threads only copy
 * what they were told and post a task; short-lived threads of ours do what may
 * block (opening a handle resolves names, closing one waits for the server). */
#ifndef DLK_ZK_H
#define DLK_ZK_H

#ifndef THREADED
#define THREADED
#endif
#include <zookeeper/zookeeper.h>

#include "backend.h"

enum zk_dialect { ZK_CURATOR, ZK_KAZOO, ZK_BOTH };

/* ---- paths and names (zk_name.c) ---- */

/* A part of a path that has the shape of a contender, of any known library:
 * marker, then a sequence number of ten digits, or a sign and ten. */
bool zk_contender(const char *name, int32_t *seq);
/* Is a before b in the line? Numbers wrap; equal ones go by name. */
bool zk_before(const char *a, int32_t seq_a, const char *b, int32_t seq_b);

/* The directory of a lock: root, then the key, escaped. NULL: no memory. */
char *zk_dir(const char *root, const char *key, size_t len);
/* One part of a path, unescaped, appended at `to`; returns the new end. */
char *zk_unescape(char *to, const char *part);
/* dir "/" name; NULL: no memory. */
char *zk_join(const char *dir, const char *name);

struct zk_names {
  char **v;
  size_t n;
};
void zk_names_free(struct zk_names *names);
bool zk_names_copy(struct zk_names *to, const struct String_vector *from);
/* Keeps the contenders only, in the order of the line. */
void zk_names_line(struct zk_names *names);

/* ---- what a client has ---- */

struct zk_session;
struct zk_call;

/* What a grant has on the server: its place in the line. Loop thread, but for
 * forget(), which comes when nothing is left there. */
struct zk_hold {
  struct zk_hold *next, **link; /* in zk->holds while a node may exist */
  struct dlk_grant *g;
  unsigned serial;   /* of the session that the nodes belong to */
  char *dir;
  char *node[2];     /* full paths; the lower one first */
  char guid[33];     /* in every name of ours; new for each try to create */
  bool unsure;       /* a create is out, or was never answered */
  bool deleting;     /* a delete is out, or was never answered */
  uint64_t czxid;
  char *watched;     /* the predecessor that a watch stands on */
  int64_t refused;   /* since when deletes are refused; 0: they are not */
};

struct zk {
  struct dlk_client *client;
  enum zk_dialect dialect;
  char *root;  /* "" or "/chroot" */
  char *hosts; /* host:port,host:port, shuffled */
  char *auth;  /* user:password or NULL */
  int64_t ask_ms, connect_ms;
  struct zk_session *session;
  unsigned serial; /* of the newest session */
  unsigned sessions; /* not closed yet */
  bool closed;
  struct zk_hold *holds;
  struct zk_call *parked; /* what waits for a connection, oldest first */
  int slot; /* where its library messages go */
  char said[160]; /* the last of them, guarded by the slots' mutex */
  int64_t said_ms;
  struct dlk_timer beat, give_up;
};

/* ---- the session (zk_session.c) ---- */

struct zk_session {
  struct zk *z;
  zhandle_t *zh;
  unsigned serial;
  bool ready;         /* connected now */
  bool opened;        /* the opening thread is done */
  bool early;         /* connected before that */
  bool ended;         /* nothing that it says counts any more */
  zhandle_t *made;    /* by the opening thread */
  int64_t id;         /* 0: was never connected */
  int64_t timeout_ms; /* what the server gave */
  int64_t down_ms;    /* since when it is not connected */
  int64_t proved_ms;  /* the last proof was sent then */
  int64_t until;
  int err;            /* of opening */
  char *hosts, *auth; /* for the thread that opens it */
  struct zk_req *reqs; /* not answered yet */
  struct dlk_task task;
};

/* The session, opened now if there is none; NULL: no memory. */
struct zk_session *zk_session(struct zk *z);
bool zk_ready(const struct zk *z);
/* The server answered something that only a live session gets, sent then. */
void zk_proved(struct zk_session *s, int64_t sent_ms);
/* Heartbeats go on while there is something to keep. */
void zk_keep_alive(struct zk *z);
/* Ends it: its locks are lost, its nodes go with it. */
void zk_session_drop(struct zk *z, const char *why);
/* Until when the calls that wait for a connection may wait. */
void zk_connect_limit(struct zk *z);
/* Frees z too, once the library is done with all its sessions. */
void zk_session_close(struct zk *z);
int zk_slot_take(struct zk *z);
/* What libzookeeper last complained of; "" if nothing. */
void zk_said(struct zk *z, char *out, size_t size);

/* One request. `then` runs on the loop with the answer, and must not keep it. */
struct zk_req {
  struct dlk_task task;
  struct zk_req *next, **link; /* in the session's */
  void (*then)(struct zk_req *);
  void *ctx;
  unsigned at; /* which of several */
  int rc;
  struct Stat stat;
  char *text; /* a created path, or data */
  size_t len;
  struct zk_names names;
  zoo_op_t ops[2];
  zoo_op_result_t results[2];
  char *paths[2];
  int64_t sent_ms;
};
struct zk_req *zk_req(void (*then)(struct zk_req *), void *ctx, unsigned at);
void zk_req_free(struct zk_req *r);
bool zk_lost(int rc); /* the outcome is unknown */

/* Each takes the request over; false: not sent (it is freed). */
bool zk_create(struct zk *z, struct zk_req *r, const char *path, const char *data, size_t len,
               int mode);
bool zk_create_pair(struct zk *z, struct zk_req *r, char *a, char *b, const char *data,
                    size_t len);
bool zk_children(struct zk *z, struct zk_req *r, const char *path);
bool zk_get(struct zk *z, struct zk_req *r, const char *path, bool watch);
bool zk_exists(struct zk *z, struct zk_req *r, const char *path, bool watch);
bool zk_sync(struct zk *z, struct zk_req *r);
bool zk_delete(struct zk *z, struct zk_req *r, const char *path);

/* ---- calls (zookeeper.c) ---- */

/* One dlk_call under way: a few requests, then `step` when all are answered.
 * Every verb can be run again from the start, with what its hold knows. */
struct zk_call {
  struct zk_call *next, **link; /* parked */
  struct zk *z;
  struct dlk_call *call;
  void (*run)(struct zk_call *);
  void (*step)(struct zk_call *);
  unsigned out;    /* requests that are out */
  unsigned tries;
  bool lost;       /* one of them was cut off */
  bool late;       /* nobody waits for the outcome any more */
  struct dlk_task end;
  int rc[2];       /* of the requests of this step */
  int rc_line;
  size_t at;
  struct zk_names line;
  struct Stat stat;
  char *holder;    /* value of the first in the line */
  bool watch_refused;
  void *more;      /* of a query */
  void (*more_free)(void *);
};

void zk_wait(struct zk_call *k, void (*step)(struct zk_call *));
/* Counts a request that was sent; what was not counts as cut off. */
void zk_sent(struct zk_call *k, bool ok);
/* At the end of each request's `then`. */
void zk_answered(struct zk_call *k, int rc);
void zk_end(struct zk_call *k, enum dlock_err e, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void zk_park(struct zk_call *k);
/* What an error of the server means. */
void zk_end_rc(struct zk_call *k, int rc);

/* What the session tells: connected; not any more; over; a watch fired. */
void zk_on_ready(struct zk *z);
void zk_on_over(struct zk *z);
void zk_on_change(struct zk *z, const char *path);
void zk_fail_parked(struct zk *z, enum dlock_err e, const char *msg);

/* ---- opening (zk_open.c) ---- */
enum dlock_err zk_open(struct dlk_client *c, const struct dlk_url *url,
                       const struct dlock_config *cfg, void **self, char *msg);

/* ---- queries (zk_query.c) ---- */
void zk_run_inspect(struct zk_call *k);
void zk_run_break(struct zk_call *k);
void zk_run_list(struct zk_call *k);
void zk_run_ping(struct zk_call *k);

#endif
