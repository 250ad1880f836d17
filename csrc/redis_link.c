#include "redis_link.h"

#include <errno.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum {
  IDLE_MS = 100,         /* after that long a connection is looked at before use */
  ELEMENTS_MAX = 1 << 20, /* of one array in a reply */
  DEPTH_MAX = 16,        /* of arrays in one another; hiredis frees them recursively */
  READS_MAX = 16,        /* a turn, so that one server cannot keep the loop */
  READ_SIZE = 16384,
};

static uint64_t last_number;

static void read_some(struct dlk_rlink *l);

/* ---- errors ---- */

enum dlock_err dlk_redis_class(const char *text) {
  static const struct {
    const char *word;
    enum dlock_err err;
  } words[] = {
      {"LOADING", DLOCK_E_UNAVAILABLE},     {"MASTERDOWN", DLOCK_E_UNAVAILABLE},
      {"TRYAGAIN", DLOCK_E_UNAVAILABLE},    {"CLUSTERDOWN", DLOCK_E_UNAVAILABLE},
      {"READONLY", DLOCK_E_UNAVAILABLE},    {"BUSY", DLOCK_E_UNAVAILABLE},
      {"NOREPLICAS", DLOCK_E_UNAVAILABLE},  {"OOM", DLOCK_E_UNAVAILABLE},
      {"MISCONF", DLOCK_E_UNAVAILABLE},     {"NOAUTH", DLOCK_E_AUTH},
      {"WRONGPASS", DLOCK_E_AUTH},          {"NOPERM", DLOCK_E_AUTH},
      {"DENIED", DLOCK_E_AUTH},             {"WRONGTYPE", DLOCK_E_FOREIGN},
      {"MOVED", DLOCK_E_UNSUPPORTED},       {"ASK", DLOCK_E_UNSUPPORTED},
      {"CROSSSLOT", DLOCK_E_UNSUPPORTED},
  };
  static const struct {
    const char *part;
    enum dlock_err err;
  } parts[] = {
      {"invalid password", DLOCK_E_AUTH},
      {"ERR AUTH", DLOCK_E_AUTH},
      {"no password is set", DLOCK_E_AUTH},
      {"unauthenticated", DLOCK_E_AUTH}, /* a request that is too long for a stranger */
      {"ACL failure", DLOCK_E_AUTH},
      {"The user executing the script", DLOCK_E_AUTH},
      {"max number of clients", DLOCK_E_UNAVAILABLE},
      {"DB index is out of range", DLOCK_E_UNSUPPORTED},
      {"SELECT is not allowed in cluster mode", DLOCK_E_UNSUPPORTED},
  };
  for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
    size_t n = strlen(words[i].word);
    /* "-WORD " inside: a script's error as Redis before 7 wraps it. */
    const char *in = strstr(text, words[i].word);
    bool first = in == text, wrapped = in && in > text && in[-1] == '-';
    if ((first || wrapped) && (in[n] == ' ' || !in[n]))
      return words[i].err;
  }
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    if (strstr(text, parts[i].part))
      return parts[i].err;
  return DLOCK_E_PROTOCOL;
}

enum dlock_err dlk_script_init(struct dlk_script *s) {
  unsigned char d[EVP_MAX_MD_SIZE];
  unsigned n = 0;
  if (!EVP_Digest(s->text, s->len, d, &n, EVP_sha1(), NULL) || n != 20) {
    bool memory = ERR_GET_REASON(ERR_peek_last_error()) == ERR_R_MALLOC_FAILURE;
    ERR_clear_error();
    return memory ? DLOCK_E_NOMEM : DLOCK_E_UNSUPPORTED;
  }
  for (unsigned i = 0; i < n; i++)
    snprintf(s->sha + 2 * i, 3, "%02x", d[i]);
  return DLOCK_E_OK;
}

/* ---- buffers ---- */

static bool buf_add(struct dlk_rlink_buf *b, const char *p, size_t n) {
  if (b->off && b->len + n > b->cap) {
    memmove(b->p, b->p + b->off, b->len - b->off);
    b->len -= b->off;
    b->off = 0;
  }
  if (n > DLK_RLINK_OUT_MAX || b->len + n > DLK_RLINK_OUT_MAX)
    return false;
  if (b->len + n > b->cap) {
    size_t cap = b->cap ? b->cap : 1024;
    while (cap < b->len + n)
      cap *= 2;
    char *v = realloc(b->p, cap);
    if (!v)
      return false;
    b->p = v;
    b->cap = cap;
  }
  memcpy(b->p + b->len, p, n);
  b->len += n;
  return true;
}

static void buf_free(struct dlk_rlink_buf *b) {
  if (b->p)
    explicit_bzero(b->p, b->cap); /* hello has the password */
  free(b->p);
  memset(b, 0, sizeof *b);
}

static bool buf_head(struct dlk_rlink_buf *b, char kind, size_t v) {
  char s[24], *p = s + sizeof s;
  *--p = '\n';
  *--p = '\r';
  do
    *--p = (char)('0' + v % 10);
  while (v /= 10);
  *--p = kind;
  return buf_add(b, p, (size_t)(s + sizeof s - p));
}

/* hiredis' formatter runs a printf for each argument: 17,400 instructions an
 * acquire and release, a third of all that the pair cost here; this 1,800. */
static bool buf_put(struct dlk_rlink_buf *b, size_t argc, const char **argv, const size_t *len) {
  bool ok = buf_head(b, '*', argc);
  for (size_t i = 0; ok && i < argc; i++)
    ok = buf_head(b, '$', len[i]) && buf_add(b, argv[i], len[i]) && buf_add(b, "\r\n", 2);
  return ok;
}

/* ---- the reader ---- */

/* hiredis 1 has a limit of its own; before, a server could ask for 16 GiB. */
#ifndef REDIS_READER_MAX_ARRAY_ELEMENTS
static void *(*make_array)(const redisReadTask *, int);
static void *bounded_array(const redisReadTask *t, int n) {
  return n > ELEMENTS_MAX ? NULL : __atomic_load_n(&make_array, __ATOMIC_RELAXED)(t, n);
}
#endif

static redisReader *reader_new(struct dlk_rlink *l) {
  redisReader *r = redisReaderCreate();
  if (!r)
    return NULL;
#ifdef REDIS_READER_MAX_ARRAY_ELEMENTS
  (void)l;
  r->maxelements = ELEMENTS_MAX;
#else
  __atomic_store_n(&make_array, r->fn->createArray, __ATOMIC_RELAXED);
  l->fn = *r->fn;
  l->fn.createArray = bounded_array;
  r->fn = &l->fn;
#endif
  return r;
}

/* ---- opening and closing ---- */

static void enter(struct dlk_rlink *l) { l->depth++; }

static void leave(struct dlk_rlink *l) {
  if (--l->depth || !l->doomed)
    return;
  free(l);
}

static void close_stream(struct dlk_rlink *l) {
  dlk_net_close(&l->net);
  dlk_timer_stop(&l->timer);
  if (l->reader)
    redisReaderFree(l->reader);
  l->reader = NULL;
  l->fed = 0;
  buf_free(&l->hello);
  buf_free(&l->out);
  l->end = l->mark = 0;
  l->full = false;
  l->unsent = NULL;
  l->openings++;
  l->state = DLK_RL_CLOSED;
}

void dlk_rlink_break(struct dlk_rlink *l, enum dlock_err why, const char *msg) {
  char text[DLOCK_MSG_MAX];
  if (l->state == DLK_RL_INIT || l->state == DLK_RL_CLOSED)
    return;
  snprintf(text, sizeof text, "%s", msg);
  enter(l);
  struct dlk_rreq *r = l->head;
  l->head = NULL;
  l->tail = &l->head;
  close_stream(l);
  while (r) {
    struct dlk_rreq *next = r->next;
    r->broken(r, why, text);
    r = next;
  }
  if (!l->doomed && l->state == DLK_RL_CLOSED && l->ev->closed)
    l->ev->closed(l, why, text);
  leave(l);
}

static void broke(struct dlk_rlink *l, enum dlock_err why, const char *what) {
  char text[DLOCK_MSG_MAX];
  snprintf(text, sizeof text, "%s: %s", l->to->net.label, what);
  dlk_rlink_break(l, why, text);
}

struct dlk_rlink *dlk_rlink_new(const struct dlk_redis_to *to, struct dlk_poller *p,
                                const struct dlk_rlink_events *ev, void *ctx) {
  struct dlk_rlink *l = calloc(1, sizeof *l);
  if (!l)
    return NULL;
  l->to = to;
  l->poller = p;
  l->ev = ev;
  l->ctx = ctx;
  l->tail = &l->head;
  return l;
}

void dlk_rlink_free(struct dlk_rlink *l) {
  enter(l);
  close_stream(l);
  l->doomed = true;
  leave(l);
}

void dlk_rlink_moved(struct dlk_rlink *l, struct dlk_poller *to) {
  l->poller = to;
  dlk_net_moved(&l->net, to);
}

/* ---- sending ---- */

/* Notes when the first byte of each request went out. */
static void mark_sent(struct dlk_rlink *l, uint64_t upto, int64_t now) {
  for (; l->unsent && l->unsent->at < upto; l->unsent = l->unsent->next)
    *l->unsent->sent_ms = now;
}

/* A server that hangs up on us may have said why. */
static void last_words(struct dlk_rlink *l, int err) {
  unsigned openings = l->openings;
  read_some(l);
  if (l->openings == openings)
    broke(l, DLOCK_E_UNAVAILABLE, strerror(err));
}

/* True: all is out. False: the rest waits, or the link broke. */
static bool flush(struct dlk_rlink *l, struct dlk_rlink_buf *b, bool requests) {
  while (b->off < b->len) {
    int64_t now = dlk_now_ms();
    ssize_t n = dlk_net_send(&l->net, b->p + b->off, b->len - b->off);
    if (n < 0) {
      last_words(l, errno);
      return false;
    }
    if (n == 0) {
      dlk_net_want(&l->net, DLK_READ | DLK_WRITE);
      return false;
    }
    b->off += (size_t)n;
    l->used_ms = now;
    if (requests)
      mark_sent(l, l->end - (b->len - b->off), now);
  }
  b->off = b->len = 0;
  dlk_net_want(&l->net, DLK_READ);
  return true;
}

static void flush_out(struct dlk_rlink *l) {
  if (l->state == DLK_RL_READY)
    flush(l, &l->out, true);
}

static void say_hello(struct dlk_rlink *l, size_t argc, const char **argv) {
  size_t len[3];
  for (size_t i = 0; i < argc; i++)
    len[i] = strlen(argv[i]);
  if (!buf_put(&l->hello, argc, argv, len))
    broke(l, DLOCK_E_NOMEM, "out of memory");
  else
    flush(l, &l->hello, false);
}

/* The next step after the one that `state` names. */
static void log_in(struct dlk_rlink *l) {
  const struct dlk_redis_to *to = l->to;
  if (l->state == DLK_RL_OPENING && to->password) {
    const char *argv[3] = {"AUTH", to->user, to->password};
    if (!to->user)
      argv[1] = to->password;
    l->state = DLK_RL_AUTH;
    say_hello(l, to->user ? 3 : 2, argv);
    return;
  }
  if (l->state < DLK_RL_SELECT && to->db) {
    char db[16];
    snprintf(db, sizeof db, "%d", to->db);
    const char *argv[2] = {"SELECT", db};
    l->state = DLK_RL_SELECT;
    say_hello(l, 2, argv);
    return;
  }
  dlk_timer_stop(&l->timer);
  buf_free(&l->hello);
  l->state = DLK_RL_READY;
  unsigned openings = l->openings;
  if (l->ev->ready)
    l->ev->ready(l);
  if (l->openings == openings)
    flush_out(l);
}

/* ---- receiving ---- */

/* Some servers repeat the arguments of a command that they refuse. */
static const char *discreet(const struct dlk_rlink *l, const char *text) {
  const char *pw = l->to->password;
  return pw && *pw && strstr(text, pw) ? "the server refused to log us in" : text;
}

static void hello_reply(struct dlk_rlink *l, const redisReply *r) {
  if (r->type == REDIS_REPLY_STATUS) {
    log_in(l);
    return;
  }
  if (r->type != REDIS_REPLY_ERROR) {
    broke(l, DLOCK_E_PROTOCOL, "a nonsense answer to the log-in");
    return;
  }
  enum dlock_err e = dlk_redis_class(r->str);
  if (e == DLOCK_E_PROTOCOL && l->state == DLK_RL_AUTH)
    e = DLOCK_E_AUTH;
  char text[300];
  snprintf(text, sizeof text, "%s %s%s", l->state == DLK_RL_AUTH ? "log-in:" : "database number:",
           discreet(l, r->str),
           e == DLOCK_E_UNSUPPORTED ? " (name another database in the URL, or none)" : "");
  broke(l, e, text);
}

static void request_reply(struct dlk_rlink *l, redisReply *reply) {
  struct dlk_rreq *r = l->head;
  if (--r->replies == 0) {
    l->head = r->next;
    if (!l->head)
      l->tail = &l->head;
  }
  r->reply(r, reply);
}

static void take_reply(struct dlk_rlink *l, redisReply *r) {
  if (l->state != DLK_RL_READY)
    hello_reply(l, r);
  else if (l->head && l->head != l->unsent)
    request_reply(l, r);
  else if (l->ev->push && r->type == REDIS_REPLY_ARRAY)
    l->ev->push(l, r);
  else if (r->type == REDIS_REPLY_ERROR)
    broke(l, dlk_redis_class(r->str), r->str); /* "max number of clients", "DENIED" */
  else
    broke(l, DLOCK_E_PROTOCOL, "an answer that nobody asked for");
}

/* False: stop reading, the connection is another or gone. */
static bool take_replies(struct dlk_rlink *l) {
  unsigned openings = l->openings;
  for (;;) {
    void *reply = NULL;
    if (redisReaderGetReply(l->reader, &reply) != REDIS_OK) {
      broke(l, DLOCK_E_PROTOCOL, "the answer is not the Redis protocol");
      return false;
    }
    if (!reply)
      break;
    l->fed = 0;
    take_reply(l, reply);
    freeReplyObject(reply);
    if (l->doomed || l->openings != openings)
      return false;
  }
  if (l->fed <= DLK_RLINK_REPLY_MAX && l->reader->ridx <= DEPTH_MAX)
    return true;
  broke(l, DLOCK_E_PROTOCOL, "an answer that is too long or too deep");
  return false;
}

static bool take_bytes(struct dlk_rlink *l, const char *p, size_t n) {
  l->fed += n;
  l->used_ms = dlk_now_ms();
  if (redisReaderFeed(l->reader, p, n) == REDIS_OK)
    return take_replies(l);
  broke(l, DLOCK_E_NOMEM, "out of memory");
  return false;
}

static void read_some(struct dlk_rlink *l) {
  char buf[READ_SIZE];
  for (int i = 0; i < READS_MAX; i++) {
    ssize_t n = dlk_net_recv(&l->net, buf, sizeof buf);
    if (n < 0) {
      broke(l, DLOCK_E_UNAVAILABLE, errno ? strerror(errno) : "the server closed the connection");
      return;
    }
    if (n == 0 || !take_bytes(l, buf, (size_t)n) || (size_t)n < sizeof buf)
      return;
  }
}

/* ---- events of the stream ---- */

static struct dlk_rlink *link_of(struct dlk_net *n) {
  return (struct dlk_rlink *)((char *)n - offsetof(struct dlk_rlink, net));
}

static void on_opened(struct dlk_net *n) {
  struct dlk_rlink *l = link_of(n);
  enter(l);
  l->used_ms = dlk_now_ms();
  l->reader = reader_new(l);
  if (!l->reader || !dlk_timer_set(l->poller, &l->timer, l->due)) {
    broke(l, DLOCK_E_NOMEM, "out of memory");
  } else {
    dlk_net_want(n, DLK_READ);
    log_in(l);
  }
  leave(l);
}

static void on_failed(struct dlk_net *n, const char *msg) {
  dlk_rlink_break(link_of(n), DLOCK_E_UNAVAILABLE, msg);
}

static void on_ready(struct dlk_net *n, unsigned got) {
  struct dlk_rlink *l = link_of(n);
  unsigned openings = l->openings;
  enter(l);
  bool was_pending = dlk_rlink_pending(l);
  if (got & DLK_READ)
    read_some(l);
  if (!l->doomed && l->openings == openings && (got & DLK_WRITE)) {
    if (l->state == DLK_RL_READY)
      flush_out(l);
    else
      flush(l, &l->hello, false);
  }
  if (!l->doomed && l->openings == openings && was_pending && !dlk_rlink_pending(l) && l->ev->idle)
    l->ev->idle(l);
  leave(l);
}

static void log_in_late(struct dlk_timer *t) {
  struct dlk_rlink *l = (struct dlk_rlink *)((char *)t - offsetof(struct dlk_rlink, timer));
  broke(l, DLOCK_E_UNAVAILABLE, "connected, but the log-in was not answered in time");
}

/* ---- requests ---- */

static const struct dlk_net_events stream_events = {
    .opened = on_opened, .failed = on_failed, .ready = on_ready};

static void open_link(struct dlk_rlink *l) {
  l->state = DLK_RL_OPENING;
  l->due = dlk_after(dlk_now_ms(), l->to->connect_ms);
  l->timer.fire = log_in_late;
  dlk_net_open(&l->net, l->poller, &l->to->net, l->to->connect_ms, &stream_events);
}

static bool lies_idle(const struct dlk_rlink *l) {
  return l->state == DLK_RL_READY && !l->head && dlk_now_ms() - l->used_ms > IDLE_MS;
}

uint64_t dlk_rlink_number(struct dlk_rlink *l) {
  if (lies_idle(l) && dlk_net_stale(&l->net))
    dlk_rlink_break(l, DLOCK_E_UNAVAILABLE, "the server closed the connection");
  if (l->state == DLK_RL_CLOSED)
    l->state = DLK_RL_INIT;
  if (l->state == DLK_RL_INIT && !l->head)
    l->number = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
  return l->number;
}

void dlk_rlink_put(struct dlk_rlink *l, size_t argc, const char **argv, const size_t *len) {
  size_t before = l->out.len - l->out.off;
  if (l->full || !buf_put(&l->out, argc, argv, len)) {
    l->full = true;
    l->out.len = l->out.off + before; /* no half of a command */
  } else {
    l->end += l->out.len - l->out.off - before;
  }
}

/* Takes the bytes of a request out again. */
static void cut_out(struct dlk_rlink *l, uint64_t at, size_t len) {
  size_t from = l->out.len - (size_t)(l->end - at);
  memmove(l->out.p + from, l->out.p + from + len, l->out.len - from - len);
  l->out.len -= len;
  l->end -= len;
}

void dlk_rlink_go(struct dlk_rlink *l, struct dlk_rreq *r) {
  r->next = NULL;
  r->at = l->mark;
  r->len = (size_t)(l->end - l->mark);
  *r->sent_ms = 0;
  if (l->full) {
    cut_out(l, r->at, r->len);
    l->full = false;
    r->broken(r, DLOCK_E_NOMEM, "no memory for the request, or too many are waiting to be sent");
    return;
  }
  l->mark = l->end;
  *l->tail = r;
  l->tail = &r->next;
  if (!l->unsent)
    l->unsent = r;
  enter(l);
  if (l->state == DLK_RL_READY)
    flush_out(l);
  else if (l->state == DLK_RL_INIT || l->state == DLK_RL_CLOSED)
    open_link(l);
  leave(l);
}

bool dlk_rlink_drop(struct dlk_rlink *l, struct dlk_rreq *r) {
  struct dlk_rreq **p = &l->head;
  while (*p && *p != r)
    p = &(*p)->next;
  if (!*p || *r->sent_ms)
    return false;
  cut_out(l, r->at, r->len);
  l->mark = l->end;
  *p = r->next;
  if (!*p)
    l->tail = p;
  if (l->unsent == r)
    l->unsent = r->next;
  for (struct dlk_rreq *q = r->next; q; q = q->next)
    q->at -= r->len;
  return true;
}
