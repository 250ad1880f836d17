/* One lock's life, from the first try to the definite end on the server.
 *
 * Decisions are made with the engine mutex held, by whoever brings the news: a
 * caller's thread (its own calls), or the loop thread (everything else). What
 * follows on the loop is one task per lock, lock_step(), which looks at the
 * state and does what is missing: watch, try, or clean up. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lock.h"

/* Renewals at a third of the ttl; three tries of a sixth each fit before the end. */
enum { RENEW_PART = 3, RENEW_TRY_PART = 6 };
/* Keys in one renewal: a batch of 64 takes the server 0.12 ms, one of 1,000 stops
 * it for 1.9 ms (csrc/README.md). */
enum { RENEW_BATCH = 64 };
/* Locks that are held for longer than this are watched for removal (a process-
 * bound backend's guard); for shorter ones the watch would cost more than the lock. */
enum { GUARD_AFTER_MS = 50 };
/* Head start of another process that was woken: a try from next door is always faster. */
enum { YIELD_MS = 10 };
/* A try may always take this long, however short the wait. */
enum { TRY_MIN_MS = 100 };

#define LOCK_OF(x) ((struct dlk_lock *)((char *)(x)-offsetof(struct dlk_lock, g)))
#define LOCK_OF_TASK(t) ((struct dlk_lock *)((char *)(t)-offsetof(struct dlk_lock, task)))
#define LOCK_OF_TIMER(t) ((struct dlk_lock *)((char *)(t)-offsetof(struct dlk_lock, timer)))
#define CLIENT_OF(t, field) ((struct dlk_client *)((char *)(t)-offsetof(struct dlk_client, field)))

/* ---- states ---- */

#define BIT(s) (1u << DLK_##s)
static const unsigned may_follow[DLK_STATE_COUNT] = {
    [DLK_IDLE] = BIT(ACQUIRING),
    [DLK_ACQUIRING] = BIT(WAITING) | BIT(HELD) | BIT(FAILED) | BIT(CANCELED) | BIT(TIMED_OUT),
    [DLK_WAITING] = BIT(ACQUIRING) | BIT(HELD) | BIT(FAILED) | BIT(CANCELED) | BIT(TIMED_OUT),
    [DLK_HELD] = BIT(RELEASING) | BIT(LOST),
    [DLK_RELEASING] = BIT(RELEASED) | BIT(LOST),
};

bool dlk_state_may(enum dlk_state from, enum dlk_state to) {
  return (unsigned)from < DLK_STATE_COUNT && (unsigned)to < DLK_STATE_COUNT && may_follow[from] >> to & 1;
}

const char *dlk_state_text(enum dlk_state s) {
  static const char *const text[] = {
#define X(id, name) [DLK_##id] = name,
      DLK_STATES(X)
#undef X
  };
  return (unsigned)s < DLK_STATE_COUNT ? text[s] : "?";
}

const char *dlock_reason_name(enum dlock_reason r) {
  static const char *const name[DLOCK_R_COUNT] = {"none",    "expired", "taken",  "deleted",
                                                  "revoked", "session", "forked", "max_hold"};
  return (unsigned)r < DLOCK_R_COUNT ? name[r] : "none";
}

static bool lock_to(struct dlk_lock *l, enum dlk_state to) {
  if (!dlk_state_may(l->state, to)) {
    char msg[128];
    snprintf(msg, sizeof msg, "internal: a lock cannot go from %s to %s", dlk_state_text(l->state),
             dlk_state_text(to));
    dlk_event(l->client, DLOCK_EV_NOTICE, l, DLOCK_E_PROTOCOL, msg);
    return false;
  }
  struct dlock_stats *s = &l->client->stats;
  s->held += (to == DLK_HELD) - (uint64_t)(l->state == DLK_HELD);
  s->waiting += (to == DLK_WAITING) - (uint64_t)(l->state == DLK_WAITING);
  l->state = to;
  return true;
}

static bool over(const struct dlk_lock *l) {
  return l->state >= DLK_RELEASED; /* the states at the end of DLK_STATES */
}

/* ---- references ---- */

void dlk_lock_put(struct dlk_lock *l) {
  if (--l->refs > 0)
    return;
  struct dlk_client *c = l->client;
  if (l->generation == dlk_generation())
    c->be->forget(c->self, &l->g);
  dlk_client_unref(c);
  free(l->item.name);
  free(l->g.owner);
  free(l);
}

void dlock_lock_ref(dlock_lock *l) {
  dlk_enter();
  l->refs++;
  dlk_leave();
}

void dlock_lock_unref(dlock_lock *l) {
  if (!l)
    return;
  dlk_enter();
  if (l->generation == dlk_generation()) /* the parent's memory is left as it is */
    dlk_lock_put(l);
  dlk_leave();
}

static void live_add(struct dlk_lock *l) {
  struct dlk_client *c = l->client;
  l->live = true;
  l->refs++;
  l->next = c->locks;
  l->link = &c->locks;
  if (l->next)
    l->next->link = &l->next;
  c->locks = l;
}

/* Nothing of it is left anywhere: the engine lets go of it. */
static void retire(struct dlk_lock *l) {
  struct dlk_client *c = l->client;
  if (!l->live)
    return;
  l->live = false;
  *l->link = l->next;
  if (l->next)
    l->next->link = l->link;
  dlk_due_stop(&l->timer);
  dlk_due_unreserve();
  while (!c->locks && c->closing) {
    struct dlk_op *op = c->closing;
    c->closing = op->next;
    dlk_op_finish(op, DLOCK_E_OK, "%s", "");
    dlk_op_put(op);
  }
  if (!c->locks)
    dlk_exit_signal();
  dlk_client_tidy(c);
  dlk_lock_put(l);
}

void dlk_lock_poke(struct dlk_lock *l) {
  if (!l->task.queued) {
    l->refs++;
    dlk_post_locked(&l->task);
  }
}

/* ---- the line of local contenders ---- */

static bool is_contender(const struct dlk_lock *l) {
  return l->q && !l->q->holder && l->q->first == l && l->q_link;
}

/* The next one in the process goes to the server. */
static void queue_next(struct dlk_client *c, struct dlk_queue *q) {
  struct dlk_lock *l = q->holder ? NULL : q->first;
  bool ready = l && l->state == DLK_WAITING && !l->call;
  if (ready && q->yield) {
    dlk_due_set(&l->timer, dlk_min(l->wait_until, dlk_now_ms() + YIELD_MS));
  } else if (ready) {
    l->again = true;
    dlk_lock_poke(l);
  }
  q->yield = false;
  dlk_waitq_tidy(&c->waitq, q);
}

static void queue_leave(struct dlk_lock *l) {
  struct dlk_queue *q = l->q;
  if (!q)
    return;
  dlk_waitq_remove(q, l);
  if (q->holder == l)
    q->holder = NULL;
  l->q = NULL;
  queue_next(l->client, q);
}

static void queue_hold(struct dlk_lock *l, bool handed) {
  struct dlk_queue *q = l->q;
  dlk_waitq_remove(q, l);
  q->holder = l;
  q->handed = handed ? q->handed + 1 : 0;
}

/* ---- ends ---- */

/* After the last state: clean up what may be left, or let go at once. */
static void settle(struct dlk_lock *l) {
  dlk_due_stop(&l->timer);
  if (l->call || l->unclean || l->g.queued || l->watching)
    dlk_lock_poke(l);
  else
    retire(l);
}

static void count_end(struct dlk_lock *l, enum dlock_err e) {
  struct dlock_stats *s = &l->client->stats;
  if (e == DLOCK_E_TIMEOUT || e == DLOCK_E_HELD)
    s->timeouts++;
  else if (e == DLOCK_E_CANCELED)
    s->canceled++;
  else
    s->failed++;
}

static void acquire_end(struct dlk_lock *l, enum dlk_state to, enum dlock_err e, const char *msg) {
  if (!lock_to(l, to))
    return;
  count_end(l, e);
  struct dlk_op *op = l->acquire;
  l->acquire = NULL;
  queue_leave(l);
  settle(l);
  if (op) {
    dlk_op_finish(op, e, "%s", msg);
    dlk_op_put(op);
  }
}

void dlk_lock_cancel(struct dlk_lock *l, enum dlock_err e, const char *msg) {
  if (l && (l->state == DLK_ACQUIRING || l->state == DLK_WAITING))
    acquire_end(l, DLK_CANCELED, e, msg);
}

static void finish_until_lost(struct dlk_lock *l) {
  while (l->until_lost) {
    struct dlk_op *op = l->until_lost;
    l->until_lost = op->next;
    if (l->state == DLK_LOST)
      dlk_op_finish(op, DLOCK_E_LOST, "%s", l->why);
    else
      dlk_op_finish(op, DLOCK_E_NOT_HELD, "the lock was released");
    dlk_op_put(op);
  }
}

static void drop_due(struct dlk_lock *l) {
  struct dlk_client *c = l->client;
  if (!l->in_due)
    return;
  l->in_due = false;
  for (struct dlk_lock **p = &c->due; *p; p = &(*p)->next_due)
    if (*p == l) {
      *p = l->next_due;
      c->n_due--;
      return;
    }
}

static void lose(struct dlk_lock *l, enum dlock_reason why, const char *msg) {
  if (!lock_to(l, DLK_LOST))
    return;
  l->reason = why;
  snprintf(l->why, sizeof l->why, "%s", msg);
  drop_due(l);
  /* No reason: a release whose outcome is open. Its end is an event `released`. */
  if (why) {
    l->client->stats.lost++;
    dlk_event(l->client, DLOCK_EV_LOST, l, DLOCK_E_LOST, msg);
  }
  finish_until_lost(l);
  queue_leave(l);
  settle(l);
}

/* Its own ttl and its session, whichever ends first. */
static int64_t valid_until(const struct dlk_lock *l) {
  return dlk_min(l->valid_until, l->client->session_until);
}

/* The validity ends by the clock alone, whether or not a timer got to run. */
static void check_validity(struct dlk_lock *l) {
  if (l->state != DLK_HELD)
    return;
  int64_t now = dlk_now_ms(), session = l->client->session_until;
  if (now >= l->hold_until)
    lose(l, DLOCK_R_MAX_HOLD, "the lock was lost: max_hold is over");
  else if (now >= session && session <= l->valid_until)
    lose(l, DLOCK_R_SESSION, "the lock was lost: its session could not be kept alive");
  else if (now >= l->valid_until)
    lose(l, DLOCK_R_EXPIRED, l->renew ? "the lock was lost: it could not be renewed before its ttl ran out"
                                      : "the lock was lost: its ttl ran out");
}

void dlk_session_valid(struct dlk_client *c, int64_t until) {
  dlk_enter();
  c->session_until = dlk_max(c->session_until, until); /* timers set for less look again */
  dlk_leave();
}

void dlk_session_lost(struct dlk_client *c, const char *msg) {
  struct dlk_lock *next;
  dlk_enter();
  c->session_until = 0;
  for (struct dlk_lock *l = c->locks; l; l = next) {
    next = l->next; /* what follows takes nobody but l off the list */
    l->refs++;
    if (l->state == DLK_HELD)
      lose(l, DLOCK_R_SESSION, msg);
    dlk_lock_put(l);
  }
  dlk_leave();
}

void dlk_gone(struct dlk_client *c, struct dlk_grant *g, enum dlock_reason why, const char *msg) {
  (void)c;
  dlk_enter();
  if (LOCK_OF(g)->state == DLK_HELD)
    lose(LOCK_OF(g), why, msg);
  dlk_leave();
}

/* ---- timers ---- */

static void hold_timer(struct dlk_lock *l) {
  int64_t due = dlk_min(dlk_min(valid_until(l), l->hold_until), l->guard_at);
  if (!l->renewing)
    due = dlk_min(due, l->renew_at);
  if (due == DLK_FOREVER)
    dlk_due_stop(&l->timer);
  else
    dlk_due_set(&l->timer, due);
}

static void ask_renewal(struct dlk_lock *l) {
  struct dlk_client *c = l->client;
  l->renewing = l->in_due = true;
  l->next_due = c->due;
  c->due = l;
  c->n_due++;
  dlk_client_post(c, &c->flush);
}

static void fire(struct dlk_timer *t) {
  struct dlk_lock *l = LOCK_OF_TIMER(t);
  int64_t now = dlk_now_ms();
  if (l->state == DLK_HELD) {
    check_validity(l);
    if (l->state != DLK_HELD)
      return;
    if (now >= l->renew_at && !l->renewing)
      ask_renewal(l);
    if (now >= l->guard_at) {
      l->guard_at = DLK_FOREVER;
      l->guard_wanted = true;
      dlk_lock_poke(l);
    }
    hold_timer(l);
  } else if (l->state == DLK_WAITING || l->state == DLK_ACQUIRING) {
    if (now >= l->wait_until) {
      char msg[DLOCK_MSG_MAX];
      snprintf(msg, sizeof msg, "the wait ran out: %s", l->holder);
      acquire_end(l, DLK_TIMED_OUT, DLOCK_E_TIMEOUT, msg);
      return;
    }
    if (l->state == DLK_ACQUIRING) { /* a try is out; what it says sets the next time */
      dlk_due_set(&l->timer, l->wait_until);
      return;
    }
    l->again = true;
    dlk_lock_poke(l);
  } else {
    dlk_lock_poke(l); /* the next try to clean up */
  }
}

/* ---- acquire ---- */

static int64_t drift(int64_t ttl_ms) { return ttl_ms / 100 + 2; }

/* What the server surely enforces: an unanswered request may still set its own. */
static int64_t effective_ttl(const struct dlk_lock *l) {
  return dlk_min(l->g.ttl_ms, dlk_min(l->floor_ttl_ms, l->flying_ttl_ms));
}

/* Until when a request that was sent at `sent` and set the ttl makes it ours. */
static int64_t validity(const struct dlk_lock *l, int64_t sent) {
  if (l->client->be->caps & DLK_CAP_PROCESS_BOUND)
    return l->renew ? DLK_FOREVER : dlk_after(sent, l->g.ttl_ms);
  int64_t ttl = effective_ttl(l);
  return dlk_after(sent, ttl - drift(ttl));
}

/* Rounded down to a grid, so that many locks come due together and share batches. */
static int64_t next_renewal(const struct dlk_lock *l, int64_t sent) {
  if (!l->renew)
    return DLK_FOREVER;
  int64_t ttl = effective_ttl(l), at = dlk_after(sent, ttl / RENEW_PART);
  int64_t grid = dlk_max(dlk_min(ttl / 30, 100), 1);
  return at - at % grid;
}

/* A request is out that may set the expiry. Until its end (and without an answer
 * for ever) the ttl that it carries may be the one that counts. */
static void renewal_out(struct dlk_lock *l) {
  l->flying++;
  l->flying_ttl_ms = dlk_min(l->flying_ttl_ms, l->g.ttl_ms);
  l->expiry_ms = dlk_max(l->expiry_ms, dlk_after(dlk_now_ms(), l->g.ttl_ms));
}

/* Once for each, at its definite end. */
static void renewal_in(struct dlk_lock *l, const struct dlk_call *call, size_t i) {
  if (--l->flying == 0)
    l->flying_ttl_ms = DLK_FOREVER;
  if (!call->sent_ms)
    return;
  l->expiry_ms = dlk_max(l->expiry_ms, dlk_after(call->sent_ms, call->ttl_ms[i]));
  if (call->err)
    l->floor_ttl_ms = dlk_min(l->floor_ttl_ms, call->ttl_ms[i]);
}

/* With the mutex held; the state becomes HELD, or FAILED when it is too late. */
static void granted(struct dlk_lock *l, int64_t sent, bool handed) {
  l->unclean = true;
  l->expiry_ms = dlk_after(sent, l->g.ttl_ms);
  int64_t until = validity(l, sent), now = dlk_now_ms();
  if (dlk_min(until, l->client->session_until) <= now) {
    acquire_end(l, DLK_FAILED, DLOCK_E_UNAVAILABLE, "the lock was granted, but its ttl was over before the answer came");
    return;
  }
  if (!lock_to(l, DLK_HELD))
    return;
  l->valid_until = until;
  l->hold_until = l->max_hold_ms ? dlk_after(sent, l->max_hold_ms) : DLK_FOREVER;
  l->renew_at = next_renewal(l, sent);
  l->guard_at = l->client->be->guard ? dlk_after(now, GUARD_AFTER_MS) : DLK_FOREVER;
  l->unknown = false;
  l->again = false;
  queue_hold(l, handed);
  hold_timer(l);
  if (l->watching)
    dlk_lock_poke(l);
  struct dlk_client *c = l->client;
  c->stats.acquired++;
  struct dlk_op *op = l->acquire;
  l->acquire = NULL;
  dlk_event(c, DLOCK_EV_ACQUIRED, l, DLOCK_E_OK, "");
  if (op) {
    dlk_latency(&c->stats.acquire, dlk_now_us() - op->started_us);
    dlk_op_finish(op, DLOCK_E_OK, "%s", "");
    dlk_op_put(op);
  }
}

static bool ours_in_process(const char *value) {
  for (struct dlk_client *c = dlk_clients; c; c = c->next)
    for (struct dlk_lock *l = c->locks; l; l = l->next)
      if (l->state == DLK_HELD && !strcmp(l->g.owner, value))
        return true;
  return false;
}

/* Who has it, for messages. */
static void describe_holder(struct dlk_lock *l, const struct dlk_call *call) {
  size_t n = strlen(call->holder), ln = 0;
  const char *label = dlk_owner_label(call->holder, n, &ln), *who = label ? label : call->holder;
  bool by_us = label && ours_in_process(call->holder);
  char left[48] = "";
  if (call->holder_ttl_ms >= 0)
    snprintf(left, sizeof left, ", %.1f s left of its ttl", (double)call->holder_ttl_ms / 1000);
  snprintf(l->holder, sizeof l->holder, "held by %s%.160s%s%s", by_us ? "this process (" : "",
           n ? who : "somebody else", by_us ? ")" : "", left);
  if (by_us && !l->by_us && !l->no_wait) {
    l->by_us = true;
    dlk_event(l->client, DLOCK_EV_NOTICE, l, DLOCK_E_HELD, "waiting for a lock that this process holds");
  }
}

static void wait_more(struct dlk_lock *l, int64_t retry_ms) {
  if (l->state == DLK_ACQUIRING && !lock_to(l, DLK_WAITING))
    return;
  dlk_due_set(&l->timer, dlk_min(l->wait_until, dlk_after(dlk_now_ms(), dlk_max(retry_ms, 1))));
  dlk_lock_poke(l); /* to watch, or to try again at once */
}

static void busy(struct dlk_lock *l, const struct dlk_call *call) {
  char msg[DLOCK_MSG_MAX];
  describe_holder(l, call);
  if (l->no_wait) {
    acquire_end(l, DLK_TIMED_OUT, DLOCK_E_HELD, l->holder);
  } else if (dlk_now_ms() >= l->wait_until) {
    snprintf(msg, sizeof msg, "the wait ran out: %s", l->holder);
    acquire_end(l, DLK_TIMED_OUT, DLOCK_E_TIMEOUT, msg);
  } else {
    wait_more(l, call->retry_ms);
  }
}

/* Something was sent and its outcome is open. */
static void note_unknown(struct dlk_lock *l, const struct dlk_call *call) {
  if (!call->sent_ms)
    return;
  l->unclean = l->unknown = true;
  l->expiry_ms = dlk_max(l->expiry_ms, dlk_after(call->sent_ms, l->g.ttl_ms));
}

/* The end of a call that nobody waited for any more. */
static void acquire_late(struct dlk_lock *l, const struct dlk_call *call) {
  if (call->err && call->sent_ms)
    note_unknown(l, call);
  else if (l->call == call)
    l->unknown = false; /* answered: what it did is known, or a release undoes it */
  if (l->call == call)
    l->call = NULL;
}

static void acquire_done(struct dlk_call *call) {
  struct dlk_lock *l = LOCK_OF(call->grants[0]);
  bool timed_out = call->in_flight;
  dlk_enter();
  if (timed_out)
    note_unknown(l, call); /* stays l->call: the clean-up goes behind it */
  else if (call->late)
    acquire_late(l, call);
  else
    l->call = NULL;
  if (!call->late && call->err)
    note_unknown(l, call); /* nonsense for an answer leaves it open too */
  if (!call->late && !call->err && call->out[0] == DLK_DONE)
    l->unclean = true;
  bool open = (!call->late || timed_out) && (l->state == DLK_ACQUIRING || l->state == DLK_WAITING);
  if (open && call->err)
    acquire_end(l, DLK_FAILED, call->err, call->msg);
  else if (open && call->out[0] == DLK_DONE)
    granted(l, call->sent_ms, false);
  else if (open && call->out[0] == DLK_BUSY)
    busy(l, call);
  else if (open)
    acquire_end(l, DLK_FAILED, DLOCK_E_PROTOCOL, "the backend gave no result");
  else if (over(l))
    dlk_lock_poke(l);
  dlk_leave();
  if (timed_out)
    return;
  dlk_enter();
  dlk_call_free(call);
  dlk_leave();
}

static struct dlk_call *new_try(struct dlk_lock *l) {
  struct dlk_call *call = dlk_call_new(l->client, DLK_ACQUIRE, 1);
  if (!call)
    return NULL;
  dlk_call_add(call, l);
  call->contend = !l->no_wait;
  call->done = acquire_done;
  l->call = call;
  l->again = false;
  l->tries++;
  return call;
}

static int64_t try_limit(const struct dlk_lock *l) {
  if (l->no_wait)
    return l->timeout_ms;
  int64_t left = l->wait_until == DLK_FOREVER ? DLK_FOREVER : l->wait_until - dlk_now_ms();
  return dlk_min(l->timeout_ms, dlk_max(left, TRY_MIN_MS));
}

static void begin_acquire(struct dlk_lock *l, struct dlk_op *op, bool blocking) {
  lock_to(l, DLK_ACQUIRING);
  live_add(l);
  dlk_waitq_push(l->q, l);
  if (is_contender(l)) {
    struct dlk_call *call = new_try(l);
    if (call) {
      op->blocking = blocking;
      op->timeout_ms = try_limit(l);
      dlk_op_launch(op, call); /* lets go of the mutex */
      return;
    }
    acquire_end(l, DLK_FAILED, DLOCK_E_NOMEM, "out of memory");
  } else {
    bool held = l->q->holder != NULL;
    snprintf(l->holder, sizeof l->holder, held ? "held by this process (%.160s)" : "others in this process wait for it%.0s",
             held ? dlock_owner(l->q->holder) : "");
    if (l->no_wait) {
      acquire_end(l, DLK_TIMED_OUT, DLOCK_E_HELD, l->holder);
    } else {
      lock_to(l, DLK_WAITING);
      if (l->wait_until != DLK_FOREVER)
        dlk_due_set(&l->timer, l->wait_until);
      if (held)
        dlk_event(l->client, DLOCK_EV_NOTICE, l, DLOCK_E_HELD, "waiting for a lock that this process holds");
    }
  }
  dlk_leave();
}

static void owner_value(char *out, const char *label) {
  static const char digit[] = "0123456789abcdef";
  unsigned char r[DLK_OWNER_HEX / 2];
  dlk_random(r, sizeof r);
  out = stpcpy(out, DLK_OWNER_PREFIX);
  for (size_t i = 0; i < sizeof r; i++) {
    *out++ = digit[r[i] >> 4];
    *out++ = digit[r[i] & 15];
  }
  *out++ = ':';
  strcpy(out, label);
}

static void step(struct dlk_task *t);

static struct dlk_lock *lock_new(struct dlk_client *c, const struct dlock_acquire *a) {
  struct dlk_lock *l = calloc(1, sizeof *l);
  if (!l)
    return NULL;
  const char *label = a->owner ? a->owner : c->cfg.owner;
  size_t owner_len = strlen(DLK_OWNER_PREFIX) + DLK_OWNER_HEX + 1 + strlen(label);
  l->g.owner = malloc(owner_len + 1);
  l->item.len = c->cfg.ns_len + a->key_len;
  l->item.name = malloc(l->item.len + 1);
  if (!l->g.owner || !l->item.name) {
    free(l->g.owner);
    free(l->item.name);
    free(l);
    return NULL;
  }
  owner_value(l->g.owner, label);
  l->g.owner_len = owner_len;
  if (c->cfg.ns_len)
    memcpy(l->item.name, c->cfg.ns, c->cfg.ns_len);
  memcpy(l->item.name + c->cfg.ns_len, a->key, a->key_len);
  l->item.name[l->item.len] = 0;
  l->item.limit = 1;
  l->g.items = &l->item;
  l->g.n = 1;
  l->g.ttl_ms = a->ttl_ms;
  l->refs = 1;
  l->client = c;
  l->generation = dlk_generation();
  l->timeout_ms = a->timeout_ms;
  l->renew = a->renew;
  l->max_hold_ms = a->max_hold_ms;
  l->no_wait = a->wait_ms <= 0;
  l->floor_ttl_ms = l->flying_ttl_ms = DLK_FOREVER;
  l->timer.fire = fire;
  l->task.run = step;
  return l;
}

dlock_op *dlock_acquire(dlock_client *c, const struct dlock_acquire *a) {
  char msg[DLOCK_MSG_MAX];
  enum dlock_err e = dlk_client_ready(c, msg);
  struct dlk_op *op = dlk_op_new(c, DLK_OP_ACQUIRE, a->blocking, a->bell);
  struct dlk_lock *l = op ? lock_new(c, a) : NULL;
  if (!l) {
    dlock_op_unref(op);
    return NULL;
  }
  dlk_enter();
  dlk_client_ref(c);
  op->lock = l;
  l->wait_until = dlk_after(dlk_now_ms(), dlk_max(a->wait_ms, 0));
  if (!e && c->closed)
    e = dlk_fail(msg, DLOCK_E_CLOSED, "the client is closed");
  if (!e && !(l->q = dlk_waitq_get(&c->waitq, l->item.name, l->item.len)))
    e = dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  if (!e && !dlk_engine_start())
    e = dlk_fail(msg, DLOCK_E_UNAVAILABLE, "no thread, memory or descriptors to keep a lock alive");
  if (!e && !dlk_due_reserve())
    e = dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  if (e) {
    if (l->q)
      dlk_waitq_tidy(&c->waitq, l->q);
    l->q = NULL;
    dlk_op_finish(op, e, "%s", msg);
    dlk_leave();
    return op;
  }
  l->acquire = op;
  op->refs++;
  begin_acquire(l, op, a->blocking);
  return op;
}

bool dlk_wake(struct dlk_client *c, const char *name, size_t len) {
  dlk_enter();
  struct dlk_queue *q = dlk_waitq_find(&c->waitq, name, len);
  struct dlk_lock *l = q && !q->holder ? q->first : NULL;
  if (l) {
    l->again = true;
    dlk_lock_poke(l);
  }
  dlk_leave();
  return l != NULL;
}

void dlk_wake_all(struct dlk_client *c) {
  dlk_enter();
  for (struct dlk_lock *l = c->locks; l; l = l->next)
    if (l->state == DLK_WAITING && is_contender(l)) {
      l->again = true;
      dlk_lock_poke(l);
    }
  dlk_leave();
}

/* ---- release and hand-over ---- */

static void released(struct dlk_lock *l, const char *msg) {
  struct dlk_client *c = l->client;
  if (!lock_to(l, DLK_RELEASED))
    return;
  l->unclean = l->unknown = false;
  c->stats.released++;
  dlk_event(c, DLOCK_EV_RELEASED, l, DLOCK_E_OK, msg);
  finish_until_lost(l);
  queue_leave(l);
  settle(l);
}

static void lost_at_release(struct dlk_lock *l, enum dlk_outcome out) {
  lose(l, out == DLK_TAKEN ? DLOCK_R_TAKEN : DLOCK_R_DELETED,
       out == DLK_TAKEN ? "the lock was lost before its release: somebody else has it"
                        : "the lock was lost before its release: it was not there any more");
}

static void release_open(struct dlk_lock *l, struct dlk_op *op, const struct dlk_call *call) {
  struct dlk_client *c = l->client;
  enum dlock_err e = call->err;
  if (!e && call->out[0] == DLK_DONE) {
    if (l->q)
      l->q->yield = call->woke;
    released(l, "");
    dlk_latency(&c->stats.release, dlk_now_us() - op->started_us);
    dlk_op_finish(op, DLOCK_E_OK, "%s", "");
  } else if (!e) {
    lost_at_release(l, call->out[0]);
    dlk_op_finish(op, DLOCK_E_LOST, "%s", l->why);
  } else {
    lose(l, DLOCK_R_NONE, "the outcome of the release is not known yet");
    dlk_op_finish(op, e, "the release goes on in the background: %s", call->msg);
  }
}

static struct dlk_lock *heir_of(const struct dlk_call *call) {
  return call->heir ? LOCK_OF(call->heir) : NULL;
}

/* The heir's side of a hand-over that ended. */
static void hand_over_end(struct dlk_lock *heir, struct dlk_call *call) {
  if (!call->in_flight)
    renewal_in(heir, call, 0);
  if (call->late && !call->in_flight) {
    acquire_late(heir, call);
    if (over(heir))
      dlk_lock_poke(heir);
    return;
  }
  /* Free to try for itself: its own value found there counts as granted. */
  heir->call = NULL;
  if (call->err) {
    note_unknown(heir, call);
  } else if (call->out[0] == DLK_DONE && heir->state == DLK_WAITING) {
    granted(heir, call->sent_ms, true);
  } else if (call->out[0] == DLK_DONE) {
    heir->unclean = true; /* it gave up meanwhile: it owns the key and must release it */
  }
  if (over(heir))
    dlk_lock_poke(heir); /* its clean-up waited for this */
}

static void release_done(struct dlk_call *call) {
  struct dlk_op *op = call->ctx;
  struct dlk_lock *l = LOCK_OF(call->grants[0]), *heir = heir_of(call);
  bool timed_out = call->in_flight;
  dlk_enter();
  if (heir)
    hand_over_end(heir, call);
  if (l->state == DLK_RELEASING)
    release_open(l, op, call);
  else if (call->late && !timed_out && over(l) && !call->err)
    l->unknown = false;
  dlk_leave();
  if (timed_out)
    return;
  dlk_enter();
  dlk_op_put(op);
  dlk_call_free(call);
  dlk_leave();
}

static struct dlk_lock *find_heir(const struct dlk_lock *l) {
  const struct dlk_queue *q = l->q;
  struct dlk_lock *h = q ? q->first : NULL;
  bool fits = h && (l->client->be->caps & DLK_CAP_HAND_OVER) && h->state == DLK_WAITING && !h->call &&
              h->g.ttl_ms == l->g.ttl_ms && h->item.mode == l->item.mode && !h->again &&
              (int)q->handed < l->client->cfg.local_handover && !l->client->closed;
  return fits ? h : NULL;
}

static void run_release(struct dlk_lock *l, struct dlk_op *op) {
  struct dlk_lock *heir = find_heir(l);
  struct dlk_call *call = dlk_call_new(l->client, heir ? DLK_HAND_OVER : DLK_RELEASE, 1);
  if (!call) {
    lose(l, DLOCK_R_NONE, "out of memory: the release goes on in the background");
    dlk_op_finish(op, DLOCK_E_NOMEM, "out of memory: the release goes on in the background");
    dlk_leave();
    return;
  }
  dlk_call_add(call, l);
  if (heir) {
    call->heir = &heir->g;
    heir->refs++;
    heir->call = call;
    renewal_out(heir);
    l->client->stats.handed_over++;
  }
  call->done = release_done;
  call->ctx = op;
  op->refs++;
  dlk_op_launch(op, call);
}

static enum dlock_err refuse(struct dlk_lock *l, char *msg) {
  if (l->generation == dlk_generation()) /* else the fork ended it */
    check_validity(l);
  if (l->state == DLK_LOST)
    return dlk_fail(msg, DLOCK_E_LOST, "%s", l->why);
  if (l->state != DLK_HELD)
    return dlk_fail(msg, DLOCK_E_NOT_HELD, "the lock is not held: it is %s", dlk_state_text(l->state));
  return DLOCK_E_OK;
}

static struct dlk_op *lock_op(dlock_lock *l, enum dlk_op_kind kind, const struct dlock_how *h) {
  struct dlk_op *op = dlk_op_new(l->client, kind, h->blocking, h->bell);
  if (!op)
    return NULL;
  op->timeout_ms = h->timeout_ms;
  op->lock = l;
  dlock_lock_ref(l);
  return op;
}

/* From HELD to RELEASING: no renewal from here on. */
static void begin_release(struct dlk_lock *l) {
  lock_to(l, DLK_RELEASING);
  drop_due(l);
  dlk_due_stop(&l->timer);
}

dlock_op *dlock_release(dlock_lock *l, const struct dlock_how *h) {
  char msg[DLOCK_MSG_MAX];
  struct dlk_op *op = lock_op(l, DLK_OP_RELEASE, h);
  if (!op)
    return NULL;
  struct dlk_client *c = l->client;
  dlk_enter();
  enum dlock_err e = refuse(l, msg);
  if (!e)
    begin_release(l);
  else
    dlk_op_finish(op, e, "%s", msg);
  dlk_leave();
  if (e)
    return op;
  if (l->guarded)
    c->be->guard(c->self, &l->g, false);
  dlk_enter();
  run_release(l, op);
  return op;
}

/* Nobody waits for the outcome: close, collected lock, end of the process. */
static void release_in_background(struct dlk_lock *l) {
  if (l->state != DLK_HELD)
    return;
  begin_release(l);
  l->background = true;
  dlk_lock_poke(l);
}

void dlock_lock_abandon(dlock_lock *l) {
  dlk_enter();
  if (l->generation == dlk_generation()) {
    check_validity(l);
    if (l->state == DLK_HELD) {
      l->client->stats.leaked++;
      dlk_event(l->client, DLOCK_EV_LEAKED, l, DLOCK_E_OK,
                "a held lock was collected: keep the value, or release it");
      release_in_background(l);
    }
  }
  dlk_leave();
}

void dlk_lock_close_all(struct dlk_client *c) {
  struct dlk_lock *next;
  for (struct dlk_lock *l = c->locks; l; l = next) {
    next = l->next; /* what follows takes nobody but l off the list */
    l->refs++;
    dlk_lock_cancel(l, DLOCK_E_CLOSED, "the client was closed");
    check_validity(l);
    release_in_background(l);
    dlk_lock_put(l);
  }
}

/* ---- renewal and extend ---- */

static void renewed(struct dlk_lock *l, int64_t sent) {
  l->renewing = l->renew_warned = false;
  l->client->stats.renewed++;
  int64_t until = validity(l, sent);
  l->valid_until = dlk_max(l->valid_until, until);
  l->expiry_ms = dlk_max(l->expiry_ms, dlk_after(sent, l->g.ttl_ms));
  l->renew_at = next_renewal(l, sent);
  hold_timer(l);
}

static void renew_failed(struct dlk_lock *l, const char *msg) {
  l->renewing = false;
  l->client->stats.renew_failed++;
  int64_t pause = dlk_max(dlk_min(effective_ttl(l) / (2 * RENEW_TRY_PART), 1000), 10);
  l->renew_at = l->renew ? dlk_after(dlk_now_ms(), pause) : DLK_FOREVER;
  if (!l->renew_warned) {
    l->renew_warned = true;
    dlk_event(l->client, DLOCK_EV_RENEW_FAILED, l, DLOCK_E_UNAVAILABLE, msg);
  }
  hold_timer(l);
}

static void gone_at_renewal(struct dlk_lock *l, enum dlk_outcome out) {
  lose(l, out == DLK_TAKEN ? DLOCK_R_TAKEN : DLOCK_R_DELETED,
       out == DLK_TAKEN ? "the lock was lost: somebody else has it" : "the lock was lost: it is not there any more");
}

/* What one answer means for one held lock. */
static void renew_result(struct dlk_lock *l, const struct dlk_call *call, size_t i) {
  if (call->err) {
    renew_failed(l, call->msg);
  } else if (call->out[i] == DLK_DONE) {
    check_validity(l); /* a late answer never revives it */
    if (l->state == DLK_HELD && call->ttl_ms[i] == l->g.ttl_ms)
      renewed(l, call->sent_ms);
    else if (l->state == DLK_HELD) {
      l->renewing = false; /* the ttl was changed meanwhile: renew by the new one */
      l->renew_at = dlk_now_ms();
      hold_timer(l);
    }
  } else {
    gone_at_renewal(l, call->out[i]);
  }
}

static void renew_done(struct dlk_call *call) {
  bool timed_out = call->in_flight;
  dlk_enter();
  for (size_t i = 0; i < call->n; i++) {
    struct dlk_lock *l = LOCK_OF(call->grants[i]);
    if (!timed_out)
      renewal_in(l, call, i);
    if (l->state == DLK_HELD && (!call->late || timed_out))
      renew_result(l, call, i);
  }
  if (!timed_out)
    dlk_call_free(call);
  dlk_leave();
}

/* NULL: no memory; those that it was for try again later. */
static struct dlk_call *next_batch(struct dlk_client *c, int64_t *limit) {
  struct dlk_call *call = dlk_call_new(c, DLK_RENEW, c->n_due < RENEW_BATCH ? c->n_due : RENEW_BATCH);
  *limit = c->cfg.timeout_ms;
  for (size_t n = 0; c->due && n < RENEW_BATCH; n++) {
    struct dlk_lock *l = c->due;
    c->due = l->next_due;
    c->n_due--;
    l->in_due = false;
    *limit = dlk_min(*limit, dlk_max(effective_ttl(l) / RENEW_TRY_PART, 10));
    if (call) {
      dlk_call_add(call, l);
      renewal_out(l);
    } else {
      renew_failed(l, "out of memory");
    }
  }
  if (call)
    call->done = renew_done;
  return call;
}

void dlk_lock_flush(struct dlk_task *t) {
  struct dlk_client *c = CLIENT_OF(t, flush);
  int64_t limit;
  dlk_enter();
  while (c->due) {
    struct dlk_call *call = next_batch(c, &limit);
    if (!call)
      continue;
    dlk_leave();
    dlk_call_start(call, NULL, limit);
    dlk_enter();
  }
  dlk_client_unref(c);
  dlk_leave();
}

static void extend_done(struct dlk_call *call) {
  struct dlk_op *op = call->ctx;
  struct dlk_lock *l = LOCK_OF(call->grants[0]);
  bool timed_out = call->in_flight;
  dlk_enter();
  if (!timed_out)
    renewal_in(l, call, 0);
  if (!call->late || timed_out) {
    if (l->state == DLK_HELD) {
      bool renewing = l->renewing;
      renew_result(l, call, 0);
      l->renewing = renewing && l->state == DLK_HELD;
    }
    if (call->err)
      dlk_op_finish(op, call->err, "%s", call->msg);
    else if (l->state == DLK_HELD)
      dlk_op_finish(op, DLOCK_E_OK, "%s", "");
    else
      dlk_op_finish(op, l->state == DLK_LOST ? DLOCK_E_LOST : DLOCK_E_NOT_HELD, "%s",
                    l->state == DLK_LOST ? l->why : "the lock was released meanwhile");
  }
  if (!timed_out) {
    dlk_op_put(op);
    dlk_call_free(call);
  }
  dlk_leave();
}

/* From now on ttl_ms is the lock's ttl. A shorter one counts from this moment:
 * the request may be applied as soon as it is sent. */
static void change_ttl(struct dlk_lock *l, int64_t ttl_ms) {
  if (!ttl_ms)
    return;
  l->g.ttl_ms = ttl_ms;
  l->valid_until = dlk_min(l->valid_until, validity(l, dlk_now_ms()));
  l->renew_at = dlk_min(l->renew_at, next_renewal(l, dlk_now_ms()));
  hold_timer(l);
}

dlock_op *dlock_extend(dlock_lock *l, int64_t ttl_ms, const struct dlock_how *h) {
  char msg[DLOCK_MSG_MAX];
  struct dlk_op *op = lock_op(l, DLK_OP_EXTEND, h);
  if (!op)
    return NULL;
  dlk_enter();
  enum dlock_err e = refuse(l, msg);
  struct dlk_call *call = e ? NULL : dlk_call_new(l->client, DLK_RENEW, 1);
  if (!e && !call)
    e = dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  if (e) {
    dlk_op_finish(op, e, "%s", msg);
    dlk_leave();
    return op;
  }
  change_ttl(l, ttl_ms);
  dlk_call_add(call, l);
  renewal_out(l);
  call->done = extend_done;
  call->ctx = op;
  op->refs++;
  dlk_op_launch(op, call);
  return op;
}

dlock_op *dlock_until_lost(dlock_lock *l, const struct dlock_how *h) {
  char msg[DLOCK_MSG_MAX];
  struct dlk_op *op = lock_op(l, DLK_OP_LOST, h);
  if (!op)
    return NULL;
  dlk_enter();
  enum dlock_err e = refuse(l, msg);
  if (e) {
    dlk_op_finish(op, e, "%s", msg);
  } else {
    op->next = l->until_lost;
    l->until_lost = op;
    op->refs++;
  }
  dlk_leave();
  return op;
}

/* ---- the next step on the loop ---- */

/* P3: at 0, 0.1, 0.3, 1, 3, 3 ... s until it is definite or has expired. */
static int64_t clean_pause(unsigned n) {
  static const int64_t ms[] = {100, 300, 1000, 3000};
  return ms[n < 4 ? n : 3];
}

static void cleaned(struct dlk_lock *l, const char *msg) {
  l->unclean = l->unknown = l->g.queued = false;
  if (l->state == DLK_RELEASING)
    released(l, msg);
  else if (l->state == DLK_LOST && l->reason == DLOCK_R_NONE)
    dlk_event(l->client, DLOCK_EV_RELEASED, l, DLOCK_E_OK, "the release that was open is done");
  if (!l->call) /* else its late answer is still to come, and pokes */
    retire(l);
}

static void clean_result(struct dlk_lock *l, const struct dlk_call *call) {
  bool answered = !call->err;
  bool definite = answered && (call->out[0] == DLK_DONE || !l->unknown || (call->behind && call->via == call->behind));
  if (definite && l->state == DLK_RELEASING && call->out[0] != DLK_DONE) {
    l->unclean = l->g.queued = false;
    lost_at_release(l, call->out[0]);
    return;
  }
  if (definite) {
    cleaned(l, "");
    return;
  }
  bool bound = l->client->be->caps & (DLK_CAP_PROCESS_BOUND | DLK_CAP_SESSION);
  int64_t now = dlk_now_ms(), end = bound ? DLK_FOREVER : dlk_after(l->expiry_ms, 1000);
  if (now >= end) {
    if (l->state == DLK_RELEASING)
      lose(l, DLOCK_R_NONE, "the outcome of the release is not known");
    cleaned(l, ""); /* by its own expiry */
    return;
  }
  dlk_due_set(&l->timer, dlk_min(end, dlk_after(now, clean_pause(l->cleans++))));
}

static void clean_done(struct dlk_call *call) {
  struct dlk_lock *l = LOCK_OF(call->grants[0]);
  bool timed_out = call->in_flight;
  dlk_enter();
  if (!call->late || timed_out)
    l->cleaning = false;
  /* A late answer from behind the acquire is definite, whatever was repeated since. */
  if (l->live && (!call->late || timed_out || (call->behind && !call->err)))
    clean_result(l, call);
  if (!timed_out)
    dlk_call_free(call);
  dlk_leave();
}

/* Mutex held; let go of for the call. */
static void clean(struct dlk_lock *l) {
  struct dlk_call *late = l->call;
  if (late && late->lane && !late->lane->adopted)
    return; /* its caller's thread still has it; the hand-over of the lane pokes */
  if (late && (!late->in_flight || (late->verb == DLK_HAND_OVER && !late->late)))
    return; /* its end pokes */
  struct dlk_call *call = dlk_call_new(l->client, DLK_RELEASE, 1);
  if (!call) {
    dlk_due_set(&l->timer, dlk_after(dlk_now_ms(), clean_pause(l->cleans)));
    return;
  }
  dlk_call_add(call, l);
  call->done = clean_done;
  l->cleaning = true;
  bool first = late && !l->followed;
  l->followed = l->followed || late;
  dlk_leave();
  if (late && !late->late)
    dlk_call_give_up(late);
  /* Behind the unanswered request, on its connection: there the order is certain.
   * When that one stays silent it may lead nowhere, so it is repeated over others. */
  call->behind = first && late->in_flight ? late->via : NULL;
  dlk_call_start(call, call->behind ? late->lane : NULL, l->timeout_ms);
  dlk_enter();
}

static void set_watch(struct dlk_lock *l, bool on) {
  struct dlk_client *c = l->client;
  l->watching = on;
  dlk_leave();
  c->be->watch(c->self, &l->g, on);
  dlk_enter();
}

static void step(struct dlk_task *t) {
  struct dlk_lock *l = LOCK_OF_TASK(t);
  dlk_enter();
  bool wants = (l->state == DLK_WAITING || l->state == DLK_ACQUIRING) && is_contender(l);
  if (l->generation == dlk_generation() && wants != l->watching && (l->state != DLK_ACQUIRING || !wants))
    set_watch(l, wants);
  if (l->state == DLK_HELD && l->guard_wanted) {
    struct dlk_client *c = l->client;
    l->guard_wanted = false;
    l->guarded = true;
    dlk_leave();
    c->be->guard(c->self, &l->g, true);
    dlk_enter();
  }
  if (l->state == DLK_WAITING && is_contender(l) && l->again && !l->call) {
    struct dlk_call *call = new_try(l);
    int64_t limit = try_limit(l);
    if (call && lock_to(l, DLK_ACQUIRING)) {
      dlk_leave();
      dlk_call_start(call, NULL, limit);
      dlk_enter();
    } else if (!call) {
      acquire_end(l, DLK_FAILED, DLOCK_E_NOMEM, "out of memory");
    }
  } else if ((over(l) || (l->state == DLK_RELEASING && l->background)) && l->live) {
    if (l->cleaning || l->timer.at)
      ; /* its answer, or the next try, comes by itself */
    else if (l->call || l->unclean || l->g.queued)
      clean(l);
    else
      retire(l);
  }
  dlk_lock_put(l);
  dlk_leave();
}

/* ---- reading ---- */

bool dlock_is_held(dlock_lock *l) {
  dlk_enter();
  char msg[DLOCK_MSG_MAX];
  bool held = !refuse(l, msg);
  dlk_leave();
  return held;
}

int64_t dlock_remaining(dlock_lock *l) {
  dlk_enter();
  char msg[DLOCK_MSG_MAX];
  int64_t left = 0;
  if (!refuse(l, msg)) {
    int64_t until = dlk_min(valid_until(l), l->hold_until);
    left = until == DLK_FOREVER ? DLK_FOREVER : dlk_max(until - dlk_now_ms(), 0);
  }
  dlk_leave();
  return left;
}

enum dlock_reason dlock_lost_reason(dlock_lock *l) {
  dlk_enter();
  char msg[DLOCK_MSG_MAX];
  refuse(l, msg);
  enum dlock_reason r = l->state == DLK_LOST ? l->reason : DLOCK_R_NONE;
  dlk_leave();
  return r;
}

uint64_t dlock_token(const dlock_lock *l) { return l->item.token; }

const char *dlock_owner(const dlock_lock *l) {
  size_t n;
  return dlk_owner_label(l->g.owner, l->g.owner_len, &n);
}

int64_t dlock_ttl(dlock_lock *l) {
  dlk_enter();
  bool none = (l->client->be->caps & DLK_CAP_PROCESS_BOUND) && l->renew;
  int64_t ttl = none ? DLK_FOREVER : l->g.ttl_ms;
  dlk_leave();
  return ttl;
}

const char *dlock_state_name(dlock_lock *l) {
  dlk_enter();
  char msg[DLOCK_MSG_MAX];
  refuse(l, msg);
  const char *s = dlk_state_text(l->state);
  dlk_leave();
  return s;
}

int dlock_hold_fd(dlock_lock *l) {
  dlk_enter();
  char msg[DLOCK_MSG_MAX];
  int fd = l->client->be->hold_fd && !refuse(l, msg) ? l->client->be->hold_fd(&l->g) : -1;
  dlk_leave();
  return fd;
}

/* ---- fork and exit ---- */

static void forked(struct dlk_lock *l) {
  bool pending = l->state == DLK_ACQUIRING || l->state == DLK_WAITING;
  l->state = pending ? DLK_CANCELED : DLK_LOST;
  l->reason = DLOCK_R_FORKED;
  snprintf(l->why, sizeof l->why, "the lock belongs to the process that forked this one");
  l->live = false;
  dlk_due_unreserve();
  l->q = NULL;
  l->q_link = NULL;
  if (l->acquire)
    dlk_op_finish(l->acquire, DLOCK_E_CANCELED, "canceled by a fork");
  l->acquire = NULL;
  for (struct dlk_op *op = l->until_lost; op; op = op->next)
    dlk_op_finish(op, DLOCK_E_LOST, "%s", l->why);
  l->until_lost = NULL;
}

void dlk_lock_after_fork(void) {
  for (struct dlk_client *c = dlk_clients; c; c = c->next) {
    for (struct dlk_lock *l = c->locks; l; l = l->next)
      forked(l);
    dlk_waitq_destroy(&c->waitq);
    c->locks = c->due = NULL;
    c->lanes = NULL;
    c->busy = 0;
    c->n_due = 0;
    c->closing = NULL;
    c->stats.held = c->stats.waiting = 0;
  }
}

bool dlk_lock_exit_begin(void) {
  bool any = false;
  for (struct dlk_client *c = dlk_clients; c; c = c->next) {
    any = any || c->locks;
    dlk_lock_close_all(c);
  }
  return any;
}

bool dlk_lock_exit_busy(void) {
  for (struct dlk_client *c = dlk_clients; c; c = c->next)
    if (c->locks)
      return true;
  return false;
}
