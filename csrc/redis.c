/* One Redis (or Valkey) server. A lock is a plain string key with an expiry, so
 * other clients' SET NX locks exclude ours and the other way round; beside it
 * stand KEY:fence (the last token, 24 h) and KEY:q (who waits, 60 s).
 *
 * Connections: a lane has one; the loop has one for everything else, and one
 * for the subscription to our own channel, where a release tells the first in
 * the line. A connection on which a call ran out of time takes no new requests
 * ("drains"): it stays only for the late answer and for the release behind it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "redis_link.h"

enum {
  BATCH = 64,             /* locks in one request: one of 1,000 stops the server for 2 ms */
  DRAIN_MAX = 64,         /* draining connections of one client */
  DRAIN_GRACE_MS = 5000,  /* beyond the ttl of what was sent on one */
  POLL_OURS_MS = 1000,    /* a release wakes us: the poll is the safety net */
  POLL_FOREIGN_MS = 50,   /* ... 250: nobody will wake us */
  SUB_IDLE_MS = 30000,
  SUB_GRACE_MS = 5000,    /* beyond the connect timeout */
  BACKOFF_MS = 100,
  BACKOFF_MAX_MS = 5000,
  SCAN_COUNT = 512,
  SHOWN = 512,            /* bytes of a foreign value that are shown */
  ID_HEX = 16,
  TOKEN_DIGITS = 16,
  OLDEST = 5,             /* Redis version: scripts replicate by effect */
};

#define FENCE ":fence"
#define LINE ":q"
#define WAKE "dlock:wake:"
#define MEMBER_MAX (ID_HEX + 1 + DLOCK_LABEL_MAX)

/* ---- scripts ---- */

/* token(fence key, TIME): raises the counter; or nil and what to answer. SET
 * with GET is one command instead of two, where the server is 6.2 or later. */
#define LUA_TOKEN                                                               \
  "local function token(fence, t)\n"                                            \
  "  local now = t[1] * 10000 + math.floor(t[2] / 100)\n"                       \
  "  local s = string.format('%.0f', now)\n"                                    \
  "  local prev = redis.pcall('SET', fence, s, 'PX', 86400000, 'GET')\n"        \
  "  if type(prev) == 'table' then\n"                                           \
  "    prev = redis.pcall('GET', fence)\n"                                      \
  "    if type(prev) == 'table' then return nil, prev end\n"                    \
  "    local set = redis.pcall('SET', fence, s, 'PX', 86400000)\n"              \
  "    if set.err then return nil, set end\n"                                   \
  "  end\n"                                                                     \
  "  if not prev then return s end\n"                                           \
  "  local n = tonumber(prev)\n"                                                \
  "  if not n or not (n < 9e15) then\n"                                         \
  "    redis.pcall('SET', fence, prev, 'PX', 86400000)\n"                       \
  "    return nil, {'foreign', 'fence'}\n"                                      \
  "  end\n"                                                                     \
  "  if n < now then return s end\n"                                            \
  "  s = string.format('%.0f', n + 1)\n"                                        \
  "  local set = redis.pcall('SET', fence, s, 'PX', 86400000)\n"                \
  "  if set.err then return nil, set end\n"                                     \
  "  return s\n"                                                                \
  "end\n"

/* wake(line, channel prefix, name): tells the first waiter that is there. The
 * receiver count skips dead ones; where PUBLISH is refused they poll. */
#define LUA_WAKE                                                                \
  "local function wake(q, prefix, name)\n"                                      \
  "  for _ = 1, 256 do\n"                                                       \
  "    local e = redis.pcall('ZPOPMIN', q)\n"                                   \
  "    if e.err or not e[1] then return end\n"                                  \
  "    local got = redis.pcall('PUBLISH', prefix .. string.sub(e[1], 1, 16), name)\n" \
  "    if type(got) ~= 'number' then\n"                                         \
  "      redis.pcall('ZADD', q, 'NX', e[2], e[1])\n"                            \
  "      redis.pcall('PEXPIRE', q, 60000)\n"                                    \
  "      return\n"                                                              \
  "    end\n"                                                                   \
  "    if got > 0 then return true end\n"                                       \
  "  end\n"                                                                     \
  "end\n"

enum { S_ACQUIRE, S_RELEASE, S_RENEW, S_HAND_OVER, S_INSPECT, S_BREAK, S_WAKE, N_SCRIPTS };

#define SCRIPT(t) {.text = (t), .len = sizeof(t) - 1}
static struct dlk_script scripts[N_SCRIPTS] = {
    /* KEYS lock, fence, line; ARGV owner, ttl, member, enter the line, leave the line.
     * The token, or {pttl, value, entered}, or {'foreign', type}. TIME comes first
     * and what follows the SET is undone, so that no refusal leaves a lock behind. */
    [S_ACQUIRE] = SCRIPT(LUA_TOKEN
        "local t = redis.call('TIME')\n"
        "local key, owner = KEYS[1], ARGV[1]\n"
        "if not redis.call('SET', key, owner, 'NX', 'PX', ARGV[2]) then\n"
        "  local v = redis.pcall('GET', key)\n"
        "  if type(v) == 'table' then\n"
        "    return {'foreign', redis.pcall('TYPE', key).ok or 'value of another type'}\n"
        "  end\n"
        "  if v ~= owner then\n"
        "    local entered = 0\n"
        "    if ARGV[4] == '1' and string.sub(v, 1, 7) == 'dlock1:' then\n"
        "      local score = string.format('%.0f', t[1] * 1000000 + t[2])\n"
        "      if type(redis.pcall('ZADD', KEYS[3], 'NX', score, ARGV[3])) == 'number' then\n"
        "        redis.pcall('PEXPIRE', KEYS[3], 60000)\n"
        "        entered = 1\n"
        "      end\n"
        "    end\n"
        "    return {redis.call('PTTL', key), string.sub(v, 1, 240), entered}\n"
        "  end\n"
        "  redis.call('PEXPIRE', key, ARGV[2])\n"
        "end\n"
        "local s, refused = token(KEYS[2], t)\n"
        "if not s then\n"
        "  redis.call('DEL', key)\n"
        "  return refused\n"
        "end\n"
        "if ARGV[5] == '1' then redis.pcall('ZREM', KEYS[3], ARGV[3]) end\n"
        "return s\n"),
    /* KEYS lock, line; ARGV owner, member or '', channel prefix, minimum hold.
     * 1 done, 2 done and another waiter told, 0 gone, -1 somebody else's. A member that
     * was popped while we gave up has eaten a wake-up, which then goes on to the next. */
    [S_RELEASE] = SCRIPT(LUA_WAKE
        "local key, q = KEYS[1], KEYS[2]\n"
        "local v = redis.pcall('GET', key)\n"
        "local out = v and -1 or 0\n"
        "local free = not v\n"
        "if v == ARGV[1] then\n"
        "  out = 1\n"
        "  if ARGV[4] == '0' then\n"
        "    redis.call('DEL', key)\n"
        "    free = true\n"
        "  else\n"
        "    redis.call('PEXPIRE', key, ARGV[4])\n"
        "  end\n"
        "end\n"
        "local left\n"
        "if ARGV[2] ~= '' then left = redis.pcall('ZREM', q, ARGV[2]) end\n"
        "if free and (out == 1 or left == 0) and wake(q, ARGV[3], key) and out == 1 then\n"
        "  out = 2\n"
        "end\n"
        "return out\n"),
    /* KEYS locks; ARGV owner, ttl of each. 1 done, 0 somebody else's, -1 gone. */
    [S_RENEW] = SCRIPT(
        "local out = {}\n"
        "for i, key in ipairs(KEYS) do\n"
        "  local v = redis.pcall('GET', key)\n"
        "  if v == ARGV[2 * i - 1] then\n"
        "    redis.call('PEXPIRE', key, ARGV[2 * i])\n"
        "    out[i] = 1\n"
        "  else\n"
        "    out[i] = v and 0 or -1\n"
        "  end\n"
        "end\n"
        "return out\n"),
    /* KEYS lock, fence, line; ARGV old owner, new owner, ttl, member or ''.
     * The token, or 0 gone, -1 somebody else's. */
    [S_HAND_OVER] = SCRIPT(LUA_TOKEN
        "local v = redis.pcall('GET', KEYS[1])\n"
        "if v ~= ARGV[1] and v ~= ARGV[2] then return v and -1 or 0 end\n"
        "local s, refused = token(KEYS[2], redis.call('TIME'))\n"
        "if not s then return refused end\n"
        "redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])\n"
        "if ARGV[4] ~= '' then redis.pcall('ZREM', KEYS[3], ARGV[4]) end\n"
        "return s\n"),
    /* KEYS lock, fence, line. {type, value, pttl, counter, now, line}. */
    [S_INSPECT] = SCRIPT(
        "local kind = redis.call('TYPE', KEYS[1]).ok\n"
        "local line = redis.pcall('ZRANGE', KEYS[3], 0, 255)\n"
        "if line.err then line = {} end\n"
        "local t = redis.call('TIME')\n"
        "local now = string.format('%.0f', t[1] * 10000 + math.floor(t[2] / 100))\n"
        "if kind ~= 'string' then return {kind, '', -1, '', now, line} end\n"
        "local fence = redis.pcall('GET', KEYS[2])\n"
        "if type(fence) ~= 'string' then fence = '' end\n"
        "return {kind, redis.call('GETRANGE', KEYS[1], 0, 511), redis.call('PTTL', KEYS[1]),\n"
        "  fence, now, line}\n"),
    /* KEYS lock, line; ARGV channel prefix. {type, value}. */
    [S_BREAK] = SCRIPT(LUA_WAKE
        "local kind = redis.call('TYPE', KEYS[1]).ok\n"
        "if kind ~= 'string' then return {kind, ''} end\n"
        "local v = redis.call('GETRANGE', KEYS[1], 0, 511)\n"
        "redis.call('DEL', KEYS[1])\n"
        "wake(KEYS[2], ARGV[1], KEYS[1])\n"
        "return {kind, v}\n"),
    /* KEYS lock, line; ARGV channel prefix. */
    [S_WAKE] = SCRIPT(LUA_WAKE
        "if redis.call('EXISTS', KEYS[1]) == 0 then wake(KEYS[2], ARGV[1], KEYS[1]) end\n"
        "return 1\n"),
};

/* A failure is not for good: memory may be there the next time. */
static enum dlock_err init_scripts(void) {
  static bool done;
  struct dlk_script named[N_SCRIPTS];
  dlk_enter();
  bool ready = done;
  memcpy(named, scripts, sizeof named);
  dlk_leave();
  for (size_t i = 0; !ready && i < N_SCRIPTS; i++) {
    enum dlock_err e = dlk_script_init(&named[i]);
    if (e)
      return e;
  }
  dlk_enter();
  if (!done)
    memcpy(scripts, named, sizeof named);
  done = true;
  dlk_leave();
  return DLOCK_E_OK;
}

/* ---- what a client has ---- */

struct rd;

/* A connection for calls. `held`: a lane or rd->loop points to it. */
struct conn {
  struct conn *next; /* among the draining ones, oldest first */
  struct rd *rd;
  struct dlk_rlink *link;
  bool lane, held, draining;
  struct dlk_timer timer;
  int64_t bound;
  struct rcall *dropped; /* given up before they were sent; ended by the timer */
};

enum sub_state { SUB_OFF, SUB_OPENING, SUB_STANDS, SUB_WAIT, SUB_REFUSED };

struct rd {
  struct dlk_client *client;
  unsigned generation;
  struct dlk_redis_to to;
  char *label;
  char id[ID_HEX + 1];
  char *wake; /* channel prefix */
  size_t wake_len;
  struct conn *loop;
  struct conn *draining;
  size_t n_draining;
  bool asked;   /* for the server's settings */
  bool closing;

  struct dlk_rlink *sub;
  enum sub_state sub_state;
  struct dlk_timer sub_timer;
  struct dlk_rreq sub_req;
  int64_t sub_sent, sub_backoff;
  size_t watchers;
  bool stands;      /* atomic: SUB_STANDS, for lanes */
  unsigned refused; /* atomic: wake-ups that found nobody */
};

struct page {
  char **key;
  size_t *len;
  size_t n;
};

/* One dlk_call under way. */
struct rcall {
  struct dlk_rreq req;
  struct rcall *next;
  struct rd *rd;
  struct conn *conn;
  struct dlk_call *call;
  bool full; /* EVAL: the server does not know the script */
  bool late, more, was_queued, entering;
  size_t n_todo, at, again; /* RELEASE: which grants are asked for; others have one */
  unsigned char todo[BATCH];
  bool ping;
  char cursor[24];
  struct page page;
};

/* ---- building commands ---- */

struct cmd {
  size_t n;
  const char *v[8 + 3 * BATCH];
  size_t len[8 + 3 * BATCH];
  char num[BATCH + 4][24];
  size_t n_num;
  char fence[DLOCK_KEY_MAX + sizeof FENCE], line[DLOCK_KEY_MAX + sizeof LINE];
  char member[MEMBER_MAX];
};

static void add(struct cmd *c, const char *s, size_t len) {
  c->v[c->n] = s;
  c->len[c->n++] = len;
}

static void add_str(struct cmd *c, const char *s) { add(c, s, strlen(s)); }

static void add_int(struct cmd *c, int64_t v) {
  char *s = c->num[c->n_num++], *end = s + sizeof c->num[0], *p = end;
  uint64_t u = v < 0 ? -(uint64_t)v : (uint64_t)v;
  do
    *--p = (char)('0' + u % 10);
  while (u /= 10);
  if (v < 0)
    *--p = '-';
  add(c, p, (size_t)(end - p));
}

static void begin(struct cmd *c, const struct dlk_script *s, bool full, int keys) {
  c->n = c->n_num = 0;
  add_str(c, full ? "EVAL" : "EVALSHA");
  if (full)
    add(c, s->text, s->len);
  else
    add(c, s->sha, 40);
  add_int(c, keys);
}

static void add_suffixed(struct cmd *c, char *to, const char *name, size_t len,
                         const char *suffix) {
  size_t n = strlen(suffix);
  memcpy(to, name, len);
  memcpy(to + len, suffix, n);
  add(c, to, len + n);
}

static void add_keys(struct cmd *c, const char *name, size_t len, bool fence) {
  add(c, name, len);
  if (fence)
    add_suffixed(c, c->fence, name, len, FENCE);
  add_suffixed(c, c->line, name, len, LINE);
}

static void add_member(struct cmd *c, const struct rd *rd, const struct dlk_grant *g) {
  size_t n = 0;
  const char *label = dlk_owner_label(g->owner, g->owner_len, &n);
  if (!label)
    n = 0;
  if (n > DLOCK_LABEL_MAX)
    n = DLOCK_LABEL_MAX;
  memcpy(c->member, rd->id, ID_HEX);
  c->member[ID_HEX] = ':';
  if (n)
    memcpy(c->member + ID_HEX + 1, label, n);
  add(c, c->member, ID_HEX + 1 + n);
}

static void put(struct rcall *rc, const struct cmd *c) {
  dlk_rlink_put(rc->conn->link, c->n, (const char **)c->v, c->len);
  rc->req.replies++;
}

static void put_acquire(struct rcall *rc, struct cmd *c) {
  struct rd *rd = rc->rd;
  struct dlk_grant *g = rc->call->grants[0];
  const struct dlk_item *item = &g->items[0];
  rc->entering = rc->call->contend && __atomic_load_n(&rd->stands, __ATOMIC_ACQUIRE);
  if (!rc->full)
    rc->was_queued = g->queued;
  begin(c, &scripts[S_ACQUIRE], rc->full, 3);
  add_keys(c, item->name, item->len, true);
  add(c, g->owner, g->owner_len);
  add_int(c, g->ttl_ms);
  add_member(c, rd, g);
  add_int(c, rc->entering);
  add_int(c, rc->was_queued);
  put(rc, c);
  if (rc->entering) {
    g->queued = true;
    g->b = (void *)(uintptr_t)__atomic_load_n(&rd->refused, __ATOMIC_RELAXED);
  }
}

static void put_release(struct rcall *rc, struct cmd *c) {
  for (size_t i = 0; i < rc->n_todo; i++) {
    struct dlk_grant *g = rc->call->grants[rc->todo[i]];
    begin(c, &scripts[S_RELEASE], rc->full, 2);
    add_keys(c, g->items[0].name, g->items[0].len, false);
    add(c, g->owner, g->owner_len);
    if (g->queued)
      add_member(c, rc->rd, g);
    else
      add(c, "", 0);
    add(c, rc->rd->wake, rc->rd->wake_len);
    add_int(c, dlk_max(rc->call->keep_ms, 0));
    put(rc, c);
  }
}

static void put_renew(struct rcall *rc, struct cmd *c) {
  struct dlk_call *call = rc->call;
  begin(c, &scripts[S_RENEW], rc->full, (int)call->n);
  for (size_t i = 0; i < call->n; i++)
    add(c, call->grants[i]->items[0].name, call->grants[i]->items[0].len);
  for (size_t i = 0; i < call->n; i++) {
    add(c, call->grants[i]->owner, call->grants[i]->owner_len);
    add_int(c, call->ttl_ms[i]);
  }
  put(rc, c);
}

static void put_hand_over(struct rcall *rc, struct cmd *c) {
  struct dlk_grant *g = rc->call->grants[0], *heir = rc->call->heir;
  begin(c, &scripts[S_HAND_OVER], rc->full, 3);
  add_keys(c, g->items[0].name, g->items[0].len, true);
  add(c, g->owner, g->owner_len);
  add(c, heir->owner, heir->owner_len);
  add_int(c, heir->ttl_ms);
  if (heir->queued)
    add_member(c, rc->rd, heir);
  else
    add(c, "", 0);
  put(rc, c);
}

static void put_inspect(struct rcall *rc, struct cmd *c) {
  begin(c, &scripts[S_INSPECT], rc->full, 3);
  add_keys(c, rc->call->key, rc->call->key_len, true);
  put(rc, c);
}

static void put_break(struct rcall *rc, struct cmd *c) {
  begin(c, &scripts[S_BREAK], rc->full, 2);
  add_keys(c, rc->call->key, rc->call->key_len, false);
  add(c, rc->rd->wake, rc->rd->wake_len);
  put(rc, c);
}

/* Enough of each value to see whether it is ours: it may be long, and no string. */
static void put_values(struct rcall *rc, struct cmd *c) {
  for (size_t i = 0; i < rc->page.n; i++) {
    c->n = c->n_num = 0;
    add_str(c, "GETRANGE");
    add(c, rc->page.key[i], rc->page.len[i]);
    add_int(c, 0);
    add_int(c, (int64_t)strlen(DLK_OWNER_PREFIX) + DLK_OWNER_HEX);
    put(rc, c);
  }
}

static void put_list(struct rcall *rc, struct cmd *c) {
  char glob[2 * DLOCK_KEY_MAX + 1];
  size_t n = 0;
  if (rc->page.n) {
    put_values(rc, c);
    return;
  }
  for (size_t i = 0; i < rc->call->key_len; i++) {
    if (rc->call->key[i] && strchr("*?[]^-\\", rc->call->key[i]))
      glob[n++] = '\\';
    glob[n++] = rc->call->key[i];
  }
  glob[n++] = '*';
  c->n = c->n_num = 0;
  add_str(c, "SCAN");
  add_str(c, rc->cursor);
  add_str(c, "MATCH");
  add(c, glob, n);
  add_str(c, "COUNT");
  add_int(c, SCAN_COUNT);
  put(rc, c);
}

static void put_ping(struct rcall *rc, struct cmd *c) {
  c->n = 0;
  add_str(c, rc->ping ? "PING" : "INFO");
  if (!rc->ping)
    add_str(c, "server");
  put(rc, c);
}

/* ---- answers ---- */

/* The first refusal of a call is its result. */
static void __attribute__((format(printf, 3, 4))) refuse(struct rcall *rc, enum dlock_err e,
                                                         const char *fmt, ...) {
  if (rc->call->err)
    return;
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(rc->call->msg, sizeof rc->call->msg, fmt, ap);
  va_end(ap);
  rc->call->err = e;
}

/* The server did not do it: for the core, as if nothing had been sent. */
static void not_run(struct rcall *rc) {
  rc->call->sent_ms = 0;
  if (rc->call->verb == DLK_ACQUIRE)
    rc->call->grants[0]->queued = rc->was_queued;
}

static void refuse_words(struct rcall *rc, const redisReply *r) {
  enum dlock_err e = dlk_redis_class(r->str);
  if (e != DLOCK_E_PROTOCOL)
    not_run(rc);
  const char *more =
      e == DLOCK_E_UNSUPPORTED ? " (redis:// talks to one server, not to a Cluster)" : "";
  refuse(rc, e, "%s: %s%s", rc->rd->label, r->str, more);
}

static void nonsense(struct rcall *rc) {
  refuse(rc, DLOCK_E_PROTOCOL, "%s: an answer of a shape that was not asked for", rc->rd->label);
}

static bool is_array(const redisReply *r, size_t n) {
  return r->type == REDIS_REPLY_ARRAY && r->elements == n;
}

static bool is_string(const redisReply *r) { return r->type == REDIS_REPLY_STRING; }
static bool is_int(const redisReply *r) { return r->type == REDIS_REPLY_INTEGER; }

/* {'foreign', what}: true, and said. */
static bool foreign(struct rcall *rc, const redisReply *r) {
  if (!is_array(r, 2) || !is_string(r->element[0]) || !is_string(r->element[1]) ||
      strcmp(r->element[0]->str, "foreign"))
    return false;
  const char *what = r->element[1]->str;
  not_run(rc);
  if (!strcmp(what, "fence"))
    refuse(rc, DLOCK_E_FOREIGN, "the key's counter (KEY" FENCE ") holds something else");
  else
    refuse(rc, DLOCK_E_FOREIGN, "the key holds a %s, not a lock", what);
  return true;
}

static void not_a_lock(struct rcall *rc, const char *type) {
  refuse(rc, DLOCK_E_FOREIGN, "the key holds a %s, not a lock", type);
}

static bool take_token(struct dlk_grant *g, const redisReply *r) {
  if (!is_string(r) || r->len == 0 || r->len > TOKEN_DIGITS || strspn(r->str, "0123456789") != r->len)
    return false;
  g->items[0].token = strtoull(r->str, NULL, 10);
  return g->items[0].token != 0;
}

static unsigned random_below(unsigned n) {
  uint32_t x;
  dlk_random(&x, sizeof x);
  return x % n;
}

static int64_t retry_after(bool ours, int64_t pttl) {
  if (!ours)
    return POLL_FOREIGN_MS + random_below(201);
  if (pttl >= 0 && pttl < POLL_OURS_MS)
    return pttl + 1 + random_below(10);
  return POLL_OURS_MS - random_below(200);
}

static void take_busy(struct rcall *rc, const redisReply *pttl, const redisReply *value) {
  struct dlk_call *call = rc->call;
  size_t label = 0, n = value->len;
  bool ours = dlk_owner_label(value->str, value->len, &label) != NULL;
  if (n >= sizeof call->holder)
    n = sizeof call->holder - 1;
  memcpy(call->holder, value->str, n);
  call->holder[n] = 0;
  call->holder_ttl_ms = pttl->integer >= 0 ? pttl->integer : -1;
  call->retry_ms = retry_after(ours, pttl->integer);
  /* The subscription came up while the try was out: another one enters the line. */
  if (ours && call->contend && !rc->entering && __atomic_load_n(&rc->rd->stands, __ATOMIC_ACQUIRE))
    call->retry_ms = 1;
  call->out[0] = DLK_BUSY;
}

static void got_acquire(struct rcall *rc, size_t i, const redisReply *r) {
  struct dlk_grant *g = rc->call->grants[i];
  g->queued = rc->was_queued;
  if (take_token(g, r)) {
    g->queued = false; /* the script took it out of the line */
    rc->call->out[i] = DLK_DONE;
  } else if (is_array(r, 3) && is_int(r->element[0]) && is_string(r->element[1]) &&
             is_int(r->element[2])) {
    g->queued = g->queued || r->element[2]->integer;
    take_busy(rc, r->element[0], r->element[1]);
  } else if (!foreign(rc, r)) {
    nonsense(rc);
  }
}

static void got_release(struct rcall *rc, size_t i, const redisReply *r) {
  if (!is_int(r)) {
    nonsense(rc);
    return;
  }
  rc->call->grants[i]->queued = false;
  rc->call->woke = rc->call->woke || r->integer > 1;
  rc->call->out[i] = r->integer > 0 ? DLK_DONE : r->integer == 0 ? DLK_GONE : DLK_TAKEN;
}

static void got_renew(struct rcall *rc, size_t at, const redisReply *r) {
  (void)at;
  bool ok = is_array(r, rc->call->n);
  for (size_t i = 0; ok && i < r->elements; i++)
    ok = is_int(r->element[i]);
  if (!ok) {
    nonsense(rc);
    return;
  }
  for (size_t i = 0; i < r->elements; i++) {
    long long v = r->element[i]->integer;
    rc->call->out[i] = v > 0 ? DLK_DONE : v < 0 ? DLK_GONE : DLK_TAKEN;
  }
}

static void got_hand_over(struct rcall *rc, size_t i, const redisReply *r) {
  struct dlk_grant *heir = rc->call->heir, unused = {.items = &(struct dlk_item){.token = 0}};
  /* Late: the heir has gone on by itself, and has a token of its own. */
  if (rc->late)
    heir = &unused;
  if (take_token(heir, r)) {
    heir->queued = false;
    rc->call->out[i] = DLK_DONE;
  } else if (is_int(r)) {
    rc->call->out[i] = r->integer == 0 ? DLK_GONE : DLK_TAKEN;
  } else if (!foreign(rc, r)) {
    nonsense(rc);
  }
}

static struct dlk_info *new_info(struct rcall *rc) {
  if (!rc->call->info)
    rc->call->info = dlk_info_new();
  if (!rc->call->info)
    refuse(rc, DLOCK_E_NOMEM, "out of memory");
  return rc->call->info;
}

/* Who holds it: the label of one of ours, or the value as it stands. */
static void show_holder(struct rcall *rc, struct dlk_info *info, const redisReply *value) {
  size_t n = 0;
  const char *label = dlk_owner_label(value->str, value->len, &n);
  info->found = true;
  info->ours = label != NULL;
  info->owner = label ? strndup(label, n) : strndup(value->str, value->len);
  if (!info->owner)
    refuse(rc, DLOCK_E_NOMEM, "out of memory");
}

static void show_line(struct rcall *rc, struct dlk_info *info, const redisReply *line) {
  for (size_t i = 0; i < line->elements; i++) {
    const redisReply *m = line->element[i];
    bool whole = is_string(m) && m->len > ID_HEX;
    if (whole && !dlk_info_add(info, m->str + ID_HEX + 1, m->len - ID_HEX - 1))
      refuse(rc, DLOCK_E_NOMEM, "out of memory");
  }
}

static void got_inspect(struct rcall *rc, size_t at, const redisReply *r) {
  redisReply **e = r->element;
  (void)at;
  if (!is_array(r, 6) || !is_string(e[0]) || !is_string(e[1]) || !is_int(e[2]) ||
      !is_string(e[3]) || !is_string(e[4]) || e[5]->type != REDIS_REPLY_ARRAY) {
    nonsense(rc);
    return;
  }
  struct dlk_info *info = new_info(rc);
  if (!info)
    return;
  bool found = !strcmp(e[0]->str, "string");
  if (!found && strcmp(e[0]->str, "none")) {
    not_a_lock(rc, e[0]->str);
    return;
  }
  show_line(rc, info, e[5]);
  info->ttl_ms = info->age_ms = -1;
  rc->call->out[0] = DLK_DONE;
  if (!found)
    return;
  show_holder(rc, info, e[1]);
  info->ttl_ms = e[2]->integer >= 0 ? e[2]->integer : -1;
  info->token = info->ours ? strtoull(e[3]->str, NULL, 10) : 0;
  if (info->token) /* a token is the time of the grant, or a little more */
    info->age_ms = dlk_max((int64_t)(strtoull(e[4]->str, NULL, 10) - info->token) / 10, 0);
}

static void got_break(struct rcall *rc, size_t at, const redisReply *r) {
  (void)at;
  if (!is_array(r, 2) || !is_string(r->element[0]) || !is_string(r->element[1])) {
    nonsense(rc);
    return;
  }
  struct dlk_info *info = new_info(rc);
  if (!info)
    return;
  info->ttl_ms = info->age_ms = -1;
  const char *type = r->element[0]->str;
  if (!strcmp(type, "string"))
    show_holder(rc, info, r->element[1]);
  else if (strcmp(type, "none"))
    not_a_lock(rc, type);
  rc->call->out[0] = DLK_DONE;
}

static void page_free(struct page *p) {
  for (size_t i = 0; i < p->n; i++)
    free(p->key[i]);
  free(p->key);
  free(p->len);
  memset(p, 0, sizeof *p);
}

static bool page_fill(struct page *p, const redisReply *keys) {
  p->key = calloc(keys->elements, sizeof *p->key);
  p->len = calloc(keys->elements, sizeof *p->len);
  bool ok = p->key && p->len;
  for (size_t i = 0; ok && i < keys->elements; i++) {
    const redisReply *k = keys->element[i];
    char *copy = is_string(k) ? malloc(k->len + 1) : NULL;
    ok = copy != NULL;
    if (!ok)
      break;
    memcpy(copy, k->str, k->len + 1);
    p->key[p->n] = copy;
    p->len[p->n++] = k->len;
  }
  return ok;
}

struct name {
  char *s;
  size_t len;
};

static int by_name(const void *a, const void *b) {
  const struct name *x = a, *y = b;
  int c = memcmp(x->s, y->s, x->len < y->len ? x->len : y->len);
  return c ? c : x->len < y->len ? -1 : x->len > y->len;
}

/* SCAN may show a key twice. */
static void sort_names(struct rcall *rc, struct dlk_info *info) {
  if (info->n < 2)
    return;
  struct name *v = malloc(info->n * sizeof *v);
  if (!v) {
    refuse(rc, DLOCK_E_NOMEM, "out of memory");
    return;
  }
  for (size_t i = 0; i < info->n; i++)
    v[i] = (struct name){info->list[i], info->list_len[i]};
  qsort(v, info->n, sizeof *v, by_name);
  size_t n = 0;
  for (size_t i = 0; i < info->n; i++) {
    if (n && !by_name(&v[i], &(struct name){info->list[n - 1], info->list_len[n - 1]})) {
      free(v[i].s);
      continue;
    }
    info->list[n] = v[i].s;
    info->list_len[n++] = v[i].len;
  }
  info->n = n;
  free(v);
}

static void list_next(struct rcall *rc, struct dlk_info *info) {
  page_free(&rc->page);
  rc->more = strcmp(rc->cursor, "0") != 0 && !rc->call->err;
  rc->call->out[0] = DLK_DONE;
  if (!rc->more)
    sort_names(rc, info);
}

static void got_value(struct rcall *rc, struct dlk_info *info, size_t i, const redisReply *r) {
  size_t n;
  if (!is_string(r))
    nonsense(rc);
  else if (dlk_owner_label(r->str, r->len, &n) &&
           !dlk_info_add(info, rc->page.key[i], rc->page.len[i]))
    refuse(rc, DLOCK_E_NOMEM, "out of memory");
}

static void got_list(struct rcall *rc, size_t i, const redisReply *r) {
  struct dlk_info *info = new_info(rc);
  if (!info)
    return;
  if (rc->page.n) {
    if (!dlk_redis_is(r, "WRONGTYPE"))
      got_value(rc, info, i, r);
    if (!rc->req.replies)
      list_next(rc, info);
    return;
  }
  if (!is_array(r, 2) || !is_string(r->element[0]) || r->element[0]->len >= sizeof rc->cursor ||
      r->element[1]->type != REDIS_REPLY_ARRAY) {
    nonsense(rc);
    return;
  }
  memcpy(rc->cursor, r->element[0]->str, r->element[0]->len + 1);
  if (r->element[1]->elements == 0)
    list_next(rc, info);
  else if (page_fill(&rc->page, r->element[1]))
    rc->more = true;
  else
    refuse(rc, DLOCK_E_NOMEM, "out of memory, or a nonsense answer to SCAN");
}

/* "name:value" of an INFO text. */
static bool info_field(const char *text, const char *name, char *out, size_t size) {
  size_t n = strlen(name);
  for (const char *p = text; (p = strstr(p, name)); p += n) {
    if ((p != text && p[-1] != '\n') || p[n] != ':')
      continue;
    snprintf(out, size, "%.*s", (int)strcspn(p + n + 1, "\r\n"), p + n + 1);
    return true;
  }
  return false;
}

static void got_ping(struct rcall *rc, size_t at, const redisReply *r) {
  char version[64], shown[64], text[256];
  (void)at;
  struct dlk_info *info = new_info(rc);
  if (!info)
    return;
  bool known =
      !rc->ping && is_string(r) && info_field(r->str, "redis_version", version, sizeof version);
  if (!known && r->type != REDIS_REPLY_STATUS) {
    nonsense(rc);
    return;
  }
  if (known && atoi(version) < OLDEST) {
    refuse(rc, DLOCK_E_UNSUPPORTED, "%s: Redis %s is too old, dlock needs %d or later",
           rc->rd->label, version, OLDEST);
    return;
  }
  if (known && info_field(r->str, "valkey_version", shown, sizeof shown))
    snprintf(text, sizeof text, "Valkey %s at %.100s", shown, rc->rd->label);
  else if (known)
    snprintf(text, sizeof text, "Redis %s at %.100s", version, rc->rd->label);
  else
    snprintf(text, sizeof text, "Redis at %.100s (it does not tell us its version)", rc->rd->label);
  info->text = strdup(text);
  if (!info->text)
    refuse(rc, DLOCK_E_NOMEM, "out of memory");
  rc->call->out[0] = DLK_DONE;
}

static const struct {
  void (*put)(struct rcall *, struct cmd *);
  void (*got)(struct rcall *, size_t, const redisReply *);
} verbs[] = {
    [DLK_ACQUIRE] = {put_acquire, got_acquire},
    [DLK_RENEW] = {put_renew, got_renew},
    [DLK_RELEASE] = {put_release, got_release},
    [DLK_HAND_OVER] = {put_hand_over, got_hand_over},
    [DLK_INSPECT] = {put_inspect, got_inspect},
    [DLK_BREAK] = {put_break, got_break},
    [DLK_LIST] = {put_list, got_list},
    [DLK_PING] = {put_ping, got_ping},
};

/* ---- running a call ---- */

#define RCALL_OF(r) ((struct rcall *)((char *)(r)-offsetof(struct rcall, req)))

static void rcall_end(struct rcall *rc) {
  struct dlk_call *call = rc->call;
  page_free(&rc->page);
  free(rc);
  dlk_call_done(call);
}

static void rcall_send(struct rcall *rc) {
  struct cmd c;
  struct dlk_rlink *link = rc->conn->link;
  uint64_t number = dlk_rlink_number(link);
  rc->call->via = (void *)(uintptr_t)number;
  rc->at = rc->again = 0;
  rc->more = false;
  rc->req.replies = 0;
  verbs[rc->call->verb].put(rc, &c);
  dlk_rlink_go(link, &rc->req);
}

/* Nothing of a call that was given up is sent any more: not the script again,
 * not the next page. What was answered so far was "not run" or only read. */
static void rcall_stop(struct rcall *rc) {
  not_run(rc);
  rc->call->err = DLOCK_E_OK;
  refuse(rc, DLOCK_E_UNAVAILABLE, "%s: given up before all of it was sent", rc->rd->label);
  rcall_end(rc);
}

static void rcall_refused(struct rcall *rc, const redisReply *r) {
  if (rc->call->verb == DLK_PING && !rc->ping)
    rc->ping = rc->more = true;
  else
    refuse_words(rc, r);
}

static void rcall_reply(struct dlk_rreq *req, redisReply *r) {
  struct rcall *rc = RCALL_OF(req);
  size_t i = rc->call->verb == DLK_RELEASE ? rc->todo[rc->at] : rc->at;
  rc->at++;
  bool readonly = r->type == REDIS_REPLY_ERROR && strstr(r->str, "READONLY");
  bool hangs_up = dlk_redis_is(r, "ERR Protocol error");
  if (dlk_redis_is(r, "NOSCRIPT") && !rc->full)
    rc->todo[rc->again++] = (unsigned char)i;
  else if (r->type == REDIS_REPLY_ERROR && !(rc->page.n && dlk_redis_is(r, "WRONGTYPE")))
    rcall_refused(rc, r);
  else
    verbs[rc->call->verb].got(rc, i, r);
  if (req->replies)
    return;
  if (hangs_up) /* the next request must not run into it */
    dlk_rlink_break(rc->conn->link, DLOCK_E_UNAVAILABLE, "the server hung up");
  else if (readonly) /* a replica now: the name may lead to another server */
    dlk_rlink_break(rc->conn->link, DLOCK_E_UNAVAILABLE, "the server became a replica");
  if (rc->again && !rc->call->err) {
    rc->full = rc->more = true;
    rc->n_todo = rc->again;
  }
  if (!rc->more)
    rcall_end(rc);
  else if (rc->late)
    rcall_stop(rc);
  else
    rcall_send(rc);
}

static void rcall_broken(struct dlk_rreq *req, enum dlock_err why, const char *msg) {
  struct rcall *rc = RCALL_OF(req);
  rc->call->err = DLOCK_E_OK;
  if (!rc->call->sent_ms)
    not_run(rc);
  if (!rc->call->sent_ms || (why == DLOCK_E_PROTOCOL && !rc->late))
    refuse(rc, why, "%s", msg);
  else
    refuse(rc, DLOCK_E_INDETERMINATE, "%s; the request was sent and not answered", msg);
  rcall_end(rc);
}

/* ---- connections ---- */

static void ask_settings(struct conn *c);

static void conn_free(struct conn *c) {
  dlk_timer_stop(&c->timer);
  dlk_rlink_free(c->link);
  free(c);
}

/* Nothing is left on a draining connection. */
static void conn_over(struct conn *c) {
  if (c->dropped) /* the timer ends these first */
    return;
  for (struct conn **p = &c->rd->draining; *p; p = &(*p)->next)
    if (*p == c) {
      *p = c->next;
      c->rd->n_draining--;
      break;
    }
  dlk_timer_stop(&c->timer);
  if (!c->held)
    conn_free(c);
  else
    dlk_rlink_break(c->link, DLOCK_E_UNAVAILABLE, "closed");
}

static void conn_ready(struct dlk_rlink *l) {
  struct conn *c = l->ctx;
  dlk_count_connect(c->rd->client);
  if (!c->lane && !c->rd->asked)
    ask_settings(c);
}

static bool listed(const struct conn *c) {
  for (const struct conn *p = c->rd->draining; p; p = p->next)
    if (p == c)
      return true;
  return false;
}

static void conn_idle(struct dlk_rlink *l) {
  struct conn *c = l->ctx;
  if (c->draining && listed(c))
    conn_over(c);
}

static void conn_closed(struct dlk_rlink *l, enum dlock_err why, const char *msg) {
  (void)why;
  (void)msg;
  conn_idle(l);
}

static const struct dlk_rlink_events conn_events = {
    .ready = conn_ready, .idle = conn_idle, .closed = conn_closed};

static void conn_timer(struct dlk_timer *t) {
  struct conn *c = (struct conn *)((char *)t - offsetof(struct conn, timer));
  while (c->dropped) {
    struct rcall *rc = c->dropped;
    c->dropped = rc->next;
    rcall_stop(rc);
  }
  if (!dlk_rlink_pending(c->link))
    conn_over(c);
  else if (dlk_now_ms() < c->bound && dlk_timer_set(dlk_loop(), &c->timer, c->bound))
    return;
  else
    dlk_rlink_break(c->link, DLOCK_E_UNAVAILABLE, "given up on a server that does not answer");
}

static struct conn *conn_new(struct rd *rd, struct dlk_poller *p, bool lane) {
  struct conn *c = calloc(1, sizeof *c);
  if (!c)
    return NULL;
  c->rd = rd;
  c->lane = lane;
  c->held = true;
  c->timer.fire = conn_timer;
  c->link = dlk_rlink_new(&rd->to, p, &conn_events, c);
  if (c->link)
    return c;
  free(c);
  return NULL;
}

static struct conn *loop_conn(struct rd *rd) {
  if (!rd->loop)
    rd->loop = conn_new(rd, dlk_loop(), false);
  return rd->loop;
}

static bool is_number(const struct conn *c, const void *via) {
  return c->link->number == (uintptr_t)via && c->link->state != DLK_RL_CLOSED &&
         c->link->state != DLK_RL_INIT;
}

/* The loop's or a draining connection with this number, if it is still one. */
static struct conn *conn_by_number(struct rd *rd, const void *via) {
  struct conn *c = rd->loop;
  if (!c || !is_number(c, via))
    for (c = rd->draining; c && !is_number(c, via); c = c->next)
      ;
  return c;
}

static void set_now(struct conn *c) {
  if (!dlk_timer_set(dlk_loop(), &c->timer, dlk_now_ms()))
    c->bound = 0; /* no memory: what else happens on it ends it */
}

static void drain(struct rd *rd, struct conn *c) {
  if (c == rd->loop) {
    rd->loop = NULL;
    c->held = false;
  }
  c->draining = true;
  struct conn **p = &rd->draining;
  while (*p)
    p = &(*p)->next;
  *p = c;
  if (++rd->n_draining <= DRAIN_MAX)
    return;
  struct conn *oldest = rd->draining;
  oldest->bound = 0;
  set_now(oldest);
}

static int64_t longest_ttl(const struct dlk_call *call) {
  int64_t ttl = 0;
  for (size_t i = 0; i < call->n; i++)
    ttl = dlk_max(ttl, call->ttl_ms[i]);
  return ttl;
}

static struct rcall *find_rcall(const struct conn *c, const struct dlk_call *call) {
  for (struct dlk_rreq *r = c->link->head; r; r = r->next)
    if (r->reply == rcall_reply && RCALL_OF(r)->call == call)
      return RCALL_OF(r);
  return NULL;
}

static void rd_give_up(void *self, struct dlk_call *call) {
  struct rd *rd = self;
  struct conn *c = call->lane ? dlk_call_lane(call) : conn_by_number(rd, call->via);
  struct rcall *rc = c ? find_rcall(c, call) : NULL;
  if (!rc)
    return;
  rc->late = true;
  dlk_rlink_moved(c->link, dlk_loop());
  if (!c->draining)
    drain(rd, c);
  c->bound =
      dlk_max(c->bound, dlk_after(dlk_now_ms(), dlk_after(longest_ttl(call), DRAIN_GRACE_MS)));
  if (dlk_rlink_drop(c->link, &rc->req)) {
    rc->next = c->dropped;
    c->dropped = rc;
  }
  if (c->dropped)
    set_now(c);
  else if (!c->timer.at)
    dlk_timer_set(dlk_loop(), &c->timer, c->bound);
}

static void *rd_lane_open(void *self, struct dlk_poller *p) { return conn_new(self, p, true); }

static void rd_lane_close(void *lane) {
  struct conn *c = lane;
  if (c->rd->generation != dlk_generation())
    return; /* the parent's */
  c->held = false;
  if (!c->draining || !listed(c))
    conn_free(c);
}

/* Why this call cannot be done here, or NULL. */
static const char *cannot(const struct dlk_call *call) {
  if (call->n > BATCH)
    return "more than 64 locks in one request";
  if (call->key_len > DLOCK_KEY_MAX)
    return "the key is too long";
  for (size_t i = 0; i < call->n; i++) {
    const struct dlk_grant *g = call->grants[i];
    if (g->n != 1 || g->items[0].mode != DLK_EXCLUSIVE || g->items[0].limit > 1)
      return "only single exclusive locks";
    if (g->items[0].len > DLOCK_KEY_MAX)
      return "the key is too long";
  }
  return NULL;
}

static bool ends_with(const struct dlk_item *item, const char *suffix) {
  size_t n = strlen(suffix);
  return item->len >= n && !memcmp(item->name + item->len - n, suffix, n);
}

/* Such a name could be the helper key of another lock. */
static bool is_helper(const struct dlk_call *call) {
  return call->verb == DLK_ACQUIRE && (ends_with(&call->grants[0]->items[0], FENCE) ||
                                       ends_with(&call->grants[0]->items[0], LINE));
}

static struct conn *conn_for(struct rd *rd, const struct dlk_call *call) {
  if (call->lane && !call->behind)
    return dlk_call_lane(call);
  struct conn *c = call->behind ? conn_by_number(rd, call->behind) : NULL;
  return c ? c : loop_conn(rd);
}

static void rd_start(void *self, struct dlk_call *call) {
  struct rd *rd = self;
  const char *why = cannot(call);
  if (why) {
    dlk_call_fail(call, DLOCK_E_UNSUPPORTED, "redis: %s", why);
    return;
  }
  if (is_helper(call)) {
    dlk_call_fail(call, DLOCK_E_UNSUPPORTED,
                  "redis: keys that end in " FENCE " or " LINE
                  " are dlock's own; choose another name");
    return;
  }
  struct rcall *rc = calloc(1, sizeof *rc);
  struct conn *c = conn_for(rd, call);
  if (!rc || !c) {
    free(rc);
    dlk_call_fail(call, DLOCK_E_NOMEM, "out of memory");
    return;
  }
  rc->rd = rd;
  rc->conn = c;
  rc->call = call;
  rc->req.sent_ms = &call->sent_ms;
  rc->req.reply = rcall_reply;
  rc->req.broken = rcall_broken;
  strcpy(rc->cursor, "0");
  rc->n_todo = call->verb == DLK_RELEASE ? call->n : 1;
  for (size_t i = 0; i < rc->n_todo; i++)
    rc->todo[i] = (unsigned char)i;
  rcall_send(rc);
}

/* ---- our own requests on the loop's connection ---- */

struct side {
  struct dlk_rreq req;
  int64_t sent;
  struct conn *conn;
  bool full, evicts, no_aof;
  size_t len;
  char name[]; /* for the wake script */
};

#define SIDE_OF(r) ((struct side *)((char *)(r)-offsetof(struct side, req)))

static void side_broken(struct dlk_rreq *r, enum dlock_err why, const char *msg) {
  (void)why;
  (void)msg;
  free(SIDE_OF(r));
}

static struct side *side_new(struct conn *c, size_t len) {
  struct side *s = c ? calloc(1, sizeof *s + len + 1) : NULL;
  if (!s)
    return NULL;
  s->conn = c;
  s->len = len;
  s->req.sent_ms = &s->sent;
  s->req.broken = side_broken;
  return s;
}

static void take_info(struct side *s, const redisReply *r) {
  char max[32], policy[64], aof[8];
  if (!is_string(r))
    return;
  s->no_aof = info_field(r->str, "aof_enabled", aof, sizeof aof) && !strcmp(aof, "0");
  if (info_field(r->str, "maxmemory", max, sizeof max) && strcmp(max, "0") &&
      info_field(r->str, "maxmemory_policy", policy, sizeof policy) && strcmp(policy, "noeviction"))
    dlk_notice(s->conn->rd->client,
               "%s may evict locks: it has maxmemory with the policy %s; use noeviction",
               s->conn->rd->label, policy);
}

static void settings_reply(struct dlk_rreq *req, redisReply *r) {
  struct side *s = SIDE_OF(req);
  if (req->replies) {
    take_info(s, r);
    return;
  }
  if (s->no_aof && is_array(r, 2) && is_string(r->element[1]) && !r->element[1]->len)
    dlk_notice(
        s->conn->rd->client,
        "%s keeps nothing on disk (neither AOF nor RDB): when it restarts, locks are granted anew",
        s->conn->rd->label);
  free(s);
}

/* Two questions in one request; a server that does not let us ask is no error. */
static void ask_settings(struct conn *c) {
  struct side *s = side_new(c, 0);
  if (!s)
    return;
  c->rd->asked = true;
  s->req.replies = 2;
  s->req.reply = settings_reply;
  dlk_rlink_put(c->link, 1, (const char *[]){"INFO"}, (size_t[]){4});
  dlk_rlink_put(c->link, 3, (const char *[]){"CONFIG", "GET", "save"}, (size_t[]){6, 3, 4});
  dlk_rlink_go(c->link, &s->req);
}

static void wake_reply(struct dlk_rreq *req, redisReply *r);

static void wake_send(struct side *s) {
  struct cmd c;
  struct rd *rd = s->conn->rd;
  s->req.replies = 1;
  s->req.reply = wake_reply;
  begin(&c, &scripts[S_WAKE], s->full, 2);
  add_keys(&c, s->name, s->len, false);
  add(&c, rd->wake, rd->wake_len);
  dlk_rlink_put(s->conn->link, c.n, (const char **)c.v, c.len);
  dlk_rlink_go(s->conn->link, &s->req);
}

static void wake_reply(struct dlk_rreq *req, redisReply *r) {
  struct side *s = SIDE_OF(req);
  if (!dlk_redis_is(r, "NOSCRIPT") || s->full) {
    free(s);
    return;
  }
  s->full = true;
  wake_send(s);
}

/* A wake-up for a name that nobody here waits for any more: if the lock is
 * free, it belongs to the next in the line. */
static void pass_on(struct rd *rd, const char *name, size_t len) {
  __atomic_add_fetch(&rd->refused, 1, __ATOMIC_RELAXED);
  if (len > DLOCK_KEY_MAX)
    return;
  struct side *s = side_new(loop_conn(rd), len);
  if (!s)
    return;
  memcpy(s->name, name, len);
  dlk_rlink_number(s->conn->link);
  wake_send(s);
}

/* ---- the subscription ---- */

static void sub_open(struct rd *rd);

static void sub_arm(struct rd *rd, int64_t ms) {
  dlk_timer_set(dlk_loop(), &rd->sub_timer, dlk_after(dlk_now_ms(), ms));
}

/* It is down: again after a while, if anybody watches. */
static void sub_down(struct rd *rd) {
  __atomic_store_n(&rd->stands, false, __ATOMIC_RELEASE);
  dlk_timer_stop(&rd->sub_timer);
  if (rd->sub_state == SUB_REFUSED || rd->closing)
    return;
  rd->sub_state = rd->watchers ? SUB_WAIT : SUB_OFF;
  if (!rd->watchers)
    return;
  rd->sub_backoff = dlk_min(dlk_max(rd->sub_backoff * 2, BACKOFF_MS), BACKOFF_MAX_MS);
  sub_arm(rd, rd->sub_backoff / 2 + random_below((unsigned)rd->sub_backoff / 2 + 1));
}

static void sub_closed(struct dlk_rlink *l, enum dlock_err why, const char *msg) {
  (void)why;
  (void)msg;
  sub_down(l->ctx);
}

static void sub_broken(struct dlk_rreq *r, enum dlock_err why, const char *msg) {
  (void)why;
  (void)msg;
  sub_down((struct rd *)((char *)r - offsetof(struct rd, sub_req)));
}

static void sub_push(struct dlk_rlink *l, redisReply *r) {
  struct rd *rd = l->ctx;
  if (!is_array(r, 3) || !is_string(r->element[0]) || strcmp(r->element[0]->str, "message") ||
      !is_string(r->element[2]))
    return;
  const redisReply *name = r->element[2];
  if (!dlk_wake(rd->client, name->str, name->len))
    pass_on(rd, name->str, name->len);
}

static void sub_ready(struct dlk_rlink *l) { dlk_count_connect(((struct rd *)l->ctx)->client); }

static void sub_reply(struct dlk_rreq *req, redisReply *r) {
  struct rd *rd = (struct rd *)((char *)req - offsetof(struct rd, sub_req));
  if (r->type == REDIS_REPLY_ERROR) {
    if (dlk_redis_class(r->str) == DLOCK_E_AUTH) {
      rd->sub_state = SUB_REFUSED;
      dlk_notice(rd->client, "%s does not let us subscribe to %s* (%.120s): waiters only poll",
                 rd->label, rd->wake, r->str);
    }
    dlk_rlink_break(rd->sub, DLOCK_E_UNAVAILABLE, r->str);
    return;
  }
  if (!is_array(r, 3)) {
    dlk_rlink_break(rd->sub, DLOCK_E_PROTOCOL, "a nonsense answer to SUBSCRIBE");
    return;
  }
  rd->sub_state = SUB_STANDS;
  rd->sub_backoff = 0;
  dlk_timer_stop(&rd->sub_timer);
  __atomic_store_n(&rd->stands, true, __ATOMIC_RELEASE);
  if (!rd->watchers)
    sub_arm(rd, SUB_IDLE_MS);
  dlk_wake_all(rd->client);
}

static const struct dlk_rlink_events sub_events = {
    .ready = sub_ready, .closed = sub_closed, .push = sub_push};

static void sub_open(struct rd *rd) {
  if (!rd->sub)
    rd->sub = dlk_rlink_new(&rd->to, dlk_loop(), &sub_events, rd);
  if (!rd->sub) {
    sub_down(rd);
    return;
  }
  char channel[rd->wake_len + ID_HEX];
  memcpy(channel, rd->wake, rd->wake_len);
  memcpy(channel + rd->wake_len, rd->id, ID_HEX);
  rd->sub_state = SUB_OPENING;
  rd->sub_req = (struct dlk_rreq){
      .replies = 1, .sent_ms = &rd->sub_sent, .reply = sub_reply, .broken = sub_broken};
  sub_arm(rd, rd->to.connect_ms + SUB_GRACE_MS);
  dlk_rlink_number(rd->sub);
  dlk_rlink_put(rd->sub, 2, (const char *[]){"SUBSCRIBE", channel}, (size_t[]){9, sizeof channel});
  dlk_rlink_go(rd->sub, &rd->sub_req);
}

static void sub_timer(struct dlk_timer *t) {
  struct rd *rd = (struct rd *)((char *)t - offsetof(struct rd, sub_timer));
  if (rd->sub_state == SUB_WAIT && rd->watchers)
    sub_open(rd);
  else if (rd->sub_state == SUB_WAIT)
    rd->sub_state = SUB_OFF;
  else if (rd->sub_state == SUB_OPENING || !rd->watchers)
    dlk_rlink_break(rd->sub, DLOCK_E_UNAVAILABLE, "closed");
}

static void rd_watch(void *self, struct dlk_grant *g, bool on) {
  struct rd *rd = self;
  if (!on) {
    if (--rd->watchers == 0 && rd->sub_state == SUB_STANDS)
      sub_arm(rd, SUB_IDLE_MS);
    return;
  }
  rd->watchers++;
  if (rd->sub_state == SUB_OFF)
    sub_open(rd);
  if (rd->sub_state != SUB_STANDS)
    return;
  dlk_timer_stop(&rd->sub_timer);
  /* It is in the line already, unless the subscription came up after its try,
   * or a wake-up arrived before it was known to wait. */
  unsigned then = (unsigned)(uintptr_t)g->b;
  if (!g->queued || then != __atomic_load_n(&rd->refused, __ATOMIC_RELAXED))
    dlk_wake(rd->client, g->items[0].name, g->items[0].len);
}

/* ---- opening and closing ---- */

static void rd_free(struct rd *rd) {
  if (rd->to.password)
    explicit_bzero(rd->to.password, strlen(rd->to.password));
  free(rd->to.user);
  free(rd->to.password);
  free((char *)rd->to.net.host);
  free((char *)rd->to.net.path);
  free(rd->label);
  free(rd->wake);
  free(rd);
}

static void rd_close(void *self) {
  struct rd *rd = self;
  if (rd->generation != dlk_generation())
    return; /* the parent's: its sockets are closed, its poller is gone */
  rd->closing = true;
  dlk_timer_stop(&rd->sub_timer);
  if (rd->sub) {
    dlk_rlink_break(rd->sub, DLOCK_E_CLOSED, "closed");
    dlk_rlink_free(rd->sub);
  }
  if (rd->loop) {
    dlk_rlink_break(rd->loop->link, DLOCK_E_CLOSED, "closed");
    conn_free(rd->loop);
  }
  while (rd->draining) {
    struct conn *c = rd->draining;
    rd->draining = c->next;
    c->draining = false;
    dlk_rlink_break(c->link, DLOCK_E_CLOSED, "closed");
    conn_free(c);
  }
  rd_free(rd);
}

static bool parse_db(const char *s, int *db) {
  char *end;
  if (!*s) {
    *db = 0;
    return true;
  }
  long v = *s >= '0' && *s <= '9' ? strtol(s, &end, 10) : -1;
  if (v < 0 || v > 1000000 || *end)
    return false;
  *db = (int)v;
  return true;
}

static enum dlock_err take_db(struct rd *rd, const struct dlk_url *url, bool unix_socket,
                              char *msg) {
  const char *s = unix_socket || !url->path[0] ? "" : url->path + 1;
  if (url->query && strncmp(url->query, "db=", 3))
    return dlk_fail(msg, DLOCK_E_PROTOCOL, "a redis URL takes no parameters but db");
  if (url->query && *s)
    return dlk_fail(msg, DLOCK_E_PROTOCOL, "the redis URL names two databases");
  if (url->query)
    s = url->query + 3;
  if (!parse_db(s, &rd->to.db))
    return dlk_fail(msg, DLOCK_E_PROTOCOL,
                    "the database in a redis URL must be a number, as in /0");
  return DLOCK_E_OK;
}

static enum dlock_err take_place(struct rd *rd, const struct dlk_url *url, bool unix_socket,
                                 char *msg) {
  int n;
  if (unix_socket) {
    if (url->n_hosts || url->path[0] != '/' || !url->path[1])
      return dlk_fail(msg, DLOCK_E_PROTOCOL,
                      "redis+unix needs the path of a socket, as in redis+unix:///path");
    rd->to.net.path = strdup(url->path);
    rd->label = strdup(url->path);
    return DLOCK_E_OK;
  }
  if (url->n_hosts != 1)
    return dlk_fail(msg, DLOCK_E_PROTOCOL, "redis:// needs one host, as in redis://127.0.0.1:6379");
  const struct dlk_host *h = &url->hosts[0];
  rd->to.net.port = h->port ? h->port : 6379;
  rd->to.net.host = strdup(h->name);
  n = asprintf(&rd->label, strchr(h->name, ':') ? "[%s]:%d" : "%s:%d", h->name, rd->to.net.port);
  if (n < 0)
    rd->label = NULL;
  return DLOCK_E_OK;
}

static bool take_user(struct rd *rd, const struct dlk_url *url, const struct dlock_config *cfg) {
  const char *user = cfg->username ? cfg->username : url->user;
  const char *password = cfg->password ? cfg->password : url->password;
  bool ok = true;
  if (user && !*user)
    user = NULL;
  if (user && !password)
    password = ""; /* an ACL user may need none, but AUTH wants one */
  if (user)
    ok = (rd->to.user = strdup(user)) != NULL;
  if (ok && password && (user || *password))
    ok = (rd->to.password = strdup(password)) != NULL;
  return ok;
}

static bool take_names(struct rd *rd, const struct dlock_config *cfg) {
  unsigned char raw[ID_HEX / 2];
  size_t ns = cfg->ns ? cfg->ns_len : 0;
  dlk_random(raw, sizeof raw);
  for (size_t i = 0; i < sizeof raw; i++)
    snprintf(rd->id + 2 * i, 3, "%02x", raw[i]);
  rd->wake_len = ns + strlen(WAKE);
  rd->wake = malloc(rd->wake_len + 1);
  if (!rd->wake)
    return false;
  if (ns)
    memcpy(rd->wake, cfg->ns, ns);
  memcpy(rd->wake + ns, WAKE, sizeof WAKE);
  return true;
}

static enum dlock_err rd_open(struct dlk_client *client, const struct dlk_url *url,
                              const struct dlock_config *cfg, void **self, char *msg) {
  bool unix_socket = !strcmp(url->scheme, "redis+unix");
  if (!strcmp(url->scheme, "rediss"))
    return dlk_fail(
        msg, DLOCK_E_UNSUPPORTED,
        "rediss:// (TLS) comes with a later version; this one speaks redis:// (through a "
        "TLS tunnel, if need be) and redis+unix://");
  enum dlock_err e = init_scripts();
  if (e)
    return dlk_fail(msg, e, e == DLOCK_E_NOMEM ? "out of memory"
                                               : "OpenSSL here refuses SHA-1, which names scripts in Redis");
  struct rd *rd = calloc(1, sizeof *rd);
  if (!rd)
    return dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  rd->client = client;
  rd->generation = dlk_generation();
  rd->sub_timer.fire = sub_timer;
  rd->to.connect_ms = dlk_max(cfg->connect_timeout_ms, 1);
  e = take_place(rd, url, unix_socket, msg);
  if (!e)
    e = take_db(rd, url, unix_socket, msg);
  if (!e && (!rd->label || (!rd->to.net.path && !rd->to.net.host) || !take_user(rd, url, cfg) ||
             !take_names(rd, cfg)))
    e = dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  rd->to.net.label = rd->label;
  if (e)
    rd_free(rd);
  else
    *self = rd;
  return e;
}

/* A grant's `b` is a number here. */
static void rd_forget(void *self, struct dlk_grant *g) {
  (void)self;
  g->b = NULL;
}

static const char *const rd_schemes[] = {"redis", "redis+unix", "rediss", NULL};

const struct dlk_backend dlk_redis_backend = {
    .name = "redis",
    .schemes = rd_schemes,
    .caps = DLK_CAP_LANES | DLK_CAP_HAND_OVER,
    .open = rd_open,
    .close = rd_close,
    .lane_open = rd_lane_open,
    .lane_close = rd_lane_close,
    .start = rd_start,
    .give_up = rd_give_up,
    .watch = rd_watch,
    .forget = rd_forget,
};
