/* One non-blocking stream on a poller: TCP or a unix socket. Owns the socket,
 * the resolving of names, the trying of several addresses and the deadline of
 * all that; knows nothing of what is said over it.
 *
 *          open            name known          connected
 *    OFF ───────▶ RESOLVE ───────────▶ CONNECT ─────────▶ OPEN
 *     ▲              │ (numeric, unix: skipped) │ ↺ next address │
 *     └──────────────┴──── failed() ────────────┘               │
 *     └──────────────────────── close ──────────────────────────┘
 *
 * Names are resolved on short-lived threads, at most two in the process; a
 * stream that is closed meanwhile is never touched by them. Callbacks run in
 * the thread that drives the poller and may close the stream. */
#ifndef DLK_NET_H
#define DLK_NET_H

#include <stdbool.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "error.h"
#include "loop.h"

/* Addresses of one name that are tried. */
#define DLK_NET_ADDRS 8

enum dlk_net_state { DLK_NET_OFF, DLK_NET_RESOLVE, DLK_NET_CONNECT, DLK_NET_OPEN };

/* Where to. It must outlive the stream. */
struct dlk_net_to {
  const char *host; /* NULL: a unix socket */
  int port;
  const char *path;
  const char *label; /* for messages: "host:port" or the path */
};

struct dlk_net;
struct dlk_net_events {
  void (*opened)(struct dlk_net *);
  void (*failed)(struct dlk_net *, const char *msg); /* never opened; it is OFF */
  void (*ready)(struct dlk_net *, unsigned got);     /* while OPEN */
};

struct dlk_net {
  enum dlk_net_state state;
  const struct dlk_net_events *ev;
  const struct dlk_net_to *to;
  struct dlk_poller *poller;
  unsigned generation; /* of the process that opened it */
  struct dlk_source src;
  struct dlk_timer timer;
  int64_t deadline, asked_ms;
  struct dlk_net_lookup *lookup;
  struct dlk_net_addr {
    socklen_t len;
    struct sockaddr_storage sa;
  } addrs[DLK_NET_ADDRS];
  size_t n_addrs, next;
  char msg[DLOCK_MSG_MAX]; /* why the last address did not work */
};

/* The stream must be zeroed at first, or closed. opened() or failed() may come
 * before this returns. */
void dlk_net_open(struct dlk_net *n, struct dlk_poller *p, const struct dlk_net_to *to,
                  int64_t timeout_ms, const struct dlk_net_events *ev);
void dlk_net_close(struct dlk_net *n);

/* After dlk_poller_move: what is added from now on goes to the new poller. */
void dlk_net_moved(struct dlk_net *n, struct dlk_poller *to);

/* Bytes pass here and nowhere else (TLS would sit in these three): > 0 bytes, 0
 * would block, -1 broken (errno; 0: the other side closed it). */
ssize_t dlk_net_send(struct dlk_net *n, const void *buf, size_t len);
ssize_t dlk_net_recv(struct dlk_net *n, void *buf, size_t len);
/* True when a stream that waits for nothing has been closed or was sent to. */
bool dlk_net_stale(struct dlk_net *n);

void dlk_net_want(struct dlk_net *n, unsigned want);

#endif
