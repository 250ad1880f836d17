/* A Redis connection: RESP2 requests and hiredis' reader over a stream of
 * ours. Knows the protocol and the log-in; nothing of locks.
 *
 *   INIT ──▶ RESOLVE ──▶ CONNECT ──▶ AUTH ──▶ SELECT ──▶ READY
 *    ▲        └────┬────────┘      (each only where asked for)
 *    │     (the stream's own)          │         │         │
 *    └── CLOSED ◀──┴───── broken, refused, closed by us ────┘
 *
 * Requests wait in a FIFO, whose order is that of the bytes and of the replies.
 * None goes out before READY; the first one opens the connection, also again
 * after it was CLOSED. A connection has a number, so that "the same connection"
 * can be asked for after it is gone. One thread at a time: the poller's. */
#ifndef DLK_REDIS_LINK_H
#define DLK_REDIS_LINK_H

#include <hiredis/hiredis.h>
#include <string.h>

#include "net.h"

/* No reply of ours comes near; a server that sends more is not one. */
#define DLK_RLINK_REPLY_MAX ((size_t)16 << 20)
#define DLK_RLINK_OUT_MAX ((size_t)64 << 20)

enum dlk_rlink_state {
  DLK_RL_INIT,
  DLK_RL_OPENING, /* RESOLVE, CONNECT */
  DLK_RL_AUTH,
  DLK_RL_SELECT,
  DLK_RL_READY,
  DLK_RL_CLOSED,
};

/* Where to, and as whom. Outlives the links. */
struct dlk_redis_to {
  struct dlk_net_to net;
  char *user, *password; /* NULL: none */
  int db;
  int64_t connect_ms; /* until READY */
};

struct dlk_rreq {
  struct dlk_rreq *next;
  uint64_t at; /* place and length in the stream */
  size_t len;
  unsigned replies; /* still to come */
  int64_t *sent_ms; /* set right before its first byte goes out; 0 until then */
  /* The link frees the reply. With the last one (replies == 0) r is the owner's again. */
  void (*reply)(struct dlk_rreq *r, redisReply *reply);
  /* No further reply will come; *sent_ms tells whether it may have been run. */
  void (*broken)(struct dlk_rreq *r, enum dlock_err why, const char *msg);
};

struct dlk_rlink;
/* Any of these may free the link. */
struct dlk_rlink_events {
  void (*ready)(struct dlk_rlink *);                       /* may be NULL */
  void (*idle)(struct dlk_rlink *);                        /* nothing is pending; may be NULL */
  void (*closed)(struct dlk_rlink *, enum dlock_err,
                 const char *msg);                /* after the requests; may be NULL */
  void (*push)(struct dlk_rlink *, redisReply *); /* what nobody asked for; NULL: nonsense */
};

struct dlk_rlink_buf {
  char *p;
  size_t off, len, cap;
};

struct dlk_rlink {
  struct dlk_net net;
  struct dlk_timer timer; /* the log-in's */
  enum dlk_rlink_state state;
  const struct dlk_redis_to *to;
  struct dlk_poller *poller;
  const struct dlk_rlink_events *ev;
  void *ctx;
  uint64_t number;   /* of the connection */
  unsigned openings; /* tells a loop that its connection was replaced under it */
  int64_t due, used_ms;
  struct dlk_rlink_buf hello, out;
  uint64_t end, mark; /* of the stream; where the request that is being put began */
  bool full;          /* a put of it failed */
  struct dlk_rreq *head, **tail, *unsent;
  redisReader *reader;
  redisReplyObjectFunctions fn;
  size_t fed; /* bytes since the last whole reply */
  unsigned depth;
  bool doomed;
};

struct dlk_rlink *dlk_rlink_new(const struct dlk_redis_to *to, struct dlk_poller *p,
                                const struct dlk_rlink_events *ev, void *ctx);
/* Nothing may be pending. */
void dlk_rlink_free(struct dlk_rlink *l);

/* The number of the connection that the next request goes over. Looks first
 * whether one that lay idle is still there. */
uint64_t dlk_rlink_number(struct dlk_rlink *l);

/* One command of the request that dlk_rlink_go then sends; a request may have
 * several, each with one reply. */
void dlk_rlink_put(struct dlk_rlink *l, size_t argc, const char **argv, const size_t *len);
/* r->replies, ->sent_ms, ->reply and ->broken are set. It may be over on return. */
void dlk_rlink_go(struct dlk_rlink *l, struct dlk_rreq *r);

/* Takes back a request of which nothing was sent; false: too late. */
bool dlk_rlink_drop(struct dlk_rlink *l, struct dlk_rreq *r);
/* Ends everything pending and closes. */
void dlk_rlink_break(struct dlk_rlink *l, enum dlock_err why, const char *msg);
/* After dlk_poller_move. */
void dlk_rlink_moved(struct dlk_rlink *l, struct dlk_poller *to);
static inline bool dlk_rlink_pending(const struct dlk_rlink *l) { return l->head != NULL; }

/* What an error reply means. */
enum dlock_err dlk_redis_class(const char *text);
static inline bool dlk_redis_is(const redisReply *r, const char *word) {
  return r->type == REDIS_REPLY_ERROR && !strncmp(r->str, word, strlen(word));
}

/* A script and its SHA1 in hex, computed once. */
struct dlk_script {
  const char *text;
  size_t len;
  char sha[41];
};
/* NOMEM, or UNSUPPORTED: OpenSSL refuses SHA-1. */
enum dlock_err dlk_script_init(struct dlk_script *s);

#endif
