/* Calls (one exchange each) and lanes (a connection leased to one blocked
 * caller). A call whose time runs out is never torn down: it goes on as a late
 * call on the loop, with its lane, until the answer or the end of the
 * connection, because only then is its outcome known. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lock.h"

enum { LANE_IDLE_MS = 10000 };

#define CALL_OF(t) ((struct dlk_call *)((char *)(t)-offsetof(struct dlk_call, deadline)))
#define LANE_OF(t) ((struct dlk_lane *)((char *)(t)-offsetof(struct dlk_lane, step)))
#define LOCK_OF(x) ((struct dlk_lock *)((char *)(x)-offsetof(struct dlk_lock, g)))

static void expired(struct dlk_timer *t);

struct dlk_call *dlk_call_new(struct dlk_client *c, enum dlk_verb verb, size_t n) {
  size_t room = n ? n : 1;
  struct dlk_call *call = calloc(1, sizeof *call + room * (sizeof *call->grants + sizeof *call->ttl_ms +
                                                           sizeof *call->out));
  if (!call)
    return NULL;
  call->verb = verb;
  call->client = c;
  dlk_client_ref(c);
  c->busy++;
  call->ttl_ms = (int64_t *)(call + 1);
  call->grants = (struct dlk_grant **)(call->ttl_ms + room);
  call->out = (enum dlk_outcome *)(call->grants + room);
  call->holder_ttl_ms = -1;
  call->deadline.fire = expired;
  return call;
}

void dlk_call_add(struct dlk_call *call, struct dlk_lock *l) {
  call->ttl_ms[call->n] = l->g.ttl_ms;
  call->grants[call->n++] = &l->g;
  l->refs++;
}

void dlk_call_free(struct dlk_call *call) {
  for (size_t i = 0; i < call->n; i++)
    dlk_lock_put(LOCK_OF(call->grants[i]));
  if (call->heir)
    dlk_lock_put(LOCK_OF(call->heir));
  dlk_info_free(call->info);
  call->client->busy--;
  dlk_client_tidy(call->client);
  dlk_client_unref(call->client);
  free(call);
}

struct dlk_poller *dlk_call_poller(const struct dlk_call *call) {
  return call->lane && !call->lane->adopted ? &call->lane->p : dlk_loop();
}

void *dlk_call_lane(const struct dlk_call *call) { return call->lane ? call->lane->b : NULL; }

void dlk_call_start(struct dlk_call *call, struct dlk_lane *lane, int64_t timeout_ms) {
  struct dlk_client *c = call->client;
  __atomic_add_fetch(&c->requests, 1, __ATOMIC_RELAXED);
  call->in_flight = true;
  call->lane = lane;
  if (lane)
    lane->calls++;
  bool ok = !lane || lane->b || (lane->b = c->be->lane_open(c->self, &lane->p));
  if (ok && timeout_ms != DLK_FOREVER)
    ok = dlk_timer_set(dlk_call_poller(call), &call->deadline, dlk_after(dlk_now_ms(), timeout_ms));
  if (ok)
    c->be->start(c->self, call);
  else
    dlk_call_fail(call, DLOCK_E_NOMEM, "out of memory");
}

void dlk_call_done(struct dlk_call *call) {
  struct dlk_lane *lane = call->lane;
  dlk_timer_stop(&call->deadline);
  call->in_flight = false;
  if (lane) {
    lane->calls--;
    if (lane->call == call)
      lane->call = NULL;
    /* Not here: the backend is still on the stack of this connection. */
    if (lane->adopted && lane->calls == 0)
      dlk_post(&lane->step);
  }
  call->done(call);
}

void dlk_call_fail(struct dlk_call *call, enum dlock_err e, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(call->msg, sizeof call->msg, fmt, ap);
  va_end(ap);
  call->err = e;
  dlk_call_done(call);
}

void dlk_call_mark_late(struct dlk_call *call) {
  if (call->late)
    return;
  dlk_timer_stop(&call->deadline);
  call->late = true;
  call->err = call->sent_ms ? DLOCK_E_INDETERMINATE : DLOCK_E_UNAVAILABLE;
  snprintf(call->msg, sizeof call->msg, "%s",
           call->sent_ms ? "the request was sent, but no answer came in time" : "no connection in time");
}

/* From here on err and msg are the late answer's. */
static void late_on_loop(struct dlk_call *call) {
  call->err = DLOCK_E_OK;
  call->msg[0] = 0;
  call->client->be->give_up(call->client->self, call);
}

/* In a caller's lane only the mark is made: the lane can move to the loop only
 * after this turn of its poller is over (dlock_op_wait sees to it). */
static void expired(struct dlk_timer *t) {
  struct dlk_call *call = CALL_OF(t);
  dlk_call_mark_late(call);
  if (call->lane && !call->lane->adopted)
    return;
  call->done(call);
  late_on_loop(call);
}

void dlk_call_give_up(struct dlk_call *call) {
  if (call->late)
    return;
  dlk_call_mark_late(call);
  late_on_loop(call);
}

/* ---- lanes ---- */

static void lane_destroy(struct dlk_lane *lane) {
  if (lane->b)
    lane->client->be->lane_close(lane->b);
  dlk_poller_destroy(&lane->p);
  free(lane);
}

/* They may have wanted to clean up before, when the lane was not the loop's yet. */
static void poke_locks(const struct dlk_call *call) {
  dlk_enter();
  for (size_t i = 0; i < call->n; i++)
    dlk_lock_poke(LOCK_OF(call->grants[i]));
  dlk_leave();
}

/* First run: the loop takes the lane over. Second: nothing is left on it. */
static void lane_step(struct dlk_task *t) {
  struct dlk_lane *lane = LANE_OF(t);
  if (lane->adopted) {
    struct dlk_client *c = lane->client;
    lane_destroy(lane);
    dlk_enter();
    c->busy--;
    dlk_client_tidy(c);
    dlk_client_unref(c);
    dlk_leave();
    return;
  }
  dlk_poller_move(&lane->p, dlk_loop());
  lane->adopted = true;
  struct dlk_call *call = lane->call;
  lane->call = NULL;
  if (call) {
    poke_locks(call);
    late_on_loop(call);
  } else if (lane->calls == 0) {
    dlk_post(&lane->step);
  }
}

void dlk_lane_abandon(struct dlk_lane *lane) { dlk_post_locked(&lane->step); }

/* A lane in use holds a reference to its client, a spare one does not. */
struct dlk_lane *dlk_lane_take(struct dlk_client *c) {
  struct dlk_lane *lane = c->lanes;
  if (lane) {
    c->lanes = lane->next;
  } else {
    lane = calloc(1, sizeof *lane);
    if (!lane)
      return NULL;
    dlk_poller_init(&lane->p, false);
    lane->client = c;
    lane->step.run = lane_step;
  }
  dlk_client_ref(c);
  c->busy++;
  return lane;
}

#define CLIENT_OF(t, field) ((struct dlk_client *)((char *)(t)-offsetof(struct dlk_client, field)))

void dlk_lane_put(struct dlk_lane *lane) {
  struct dlk_client *c = lane->client;
  lane->idle_since = dlk_now_ms();
  lane->next = c->lanes;
  c->lanes = lane;
  /* The last one stays: a script that locks now and then keeps its connection. */
  if (lane->next && !c->idle.at)
    dlk_due_set(&c->idle, dlk_now_ms() + LANE_IDLE_MS);
  c->busy--;
  dlk_client_tidy(c);
  dlk_client_unref(c);
}

/* The spare lanes are a stack, so the ones at the bottom have idled longest. */
void dlk_lanes_tidy(struct dlk_task *t) {
  struct dlk_client *c = CLIENT_OF(t, tidy);
  int64_t now = dlk_now_ms();
  dlk_enter();
  struct dlk_lane **keep = c->lanes ? &c->lanes->next : &c->lanes, *old;
  while (*keep && (*keep)->idle_since + LANE_IDLE_MS > now)
    keep = &(*keep)->next;
  old = *keep;
  *keep = NULL;
  if (c->lanes && c->lanes->next)
    dlk_due_set(&c->idle, now + LANE_IDLE_MS);
  dlk_leave();
  while (old) {
    struct dlk_lane *next = old->next;
    lane_destroy(old);
    old = next;
  }
  dlk_enter();
  dlk_client_unref(c);
  dlk_leave();
}

void dlk_lanes_idle(struct dlk_timer *t) {
  struct dlk_client *c = CLIENT_OF(t, idle);
  dlk_client_post(c, &c->tidy);
}

void dlk_lanes_close(struct dlk_client *c) {
  while (c->lanes) {
    struct dlk_lane *lane = c->lanes;
    c->lanes = lane->next;
    lane_destroy(lane);
  }
}
