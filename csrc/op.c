/* Operations: what a caller starts, waits for, cancels and reads. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lock.h"

/* A blocked caller looks up at least this often, so that a cancel by another
 * thread, and a language that wants to handle a signal, get their turn. */
enum { SLICE_MS = 100 };

#define OP_OF(t) ((struct dlk_op *)((char *)(t)-offsetof(struct dlk_op, task)))

static uint64_t last_id; /* mutex */

struct dlk_op *dlk_op_new(struct dlk_client *c, enum dlk_op_kind kind, bool blocking,
                          struct dlk_bell *bell) {
  struct dlk_op *op = calloc(1, sizeof *op);
  if (!op)
    return NULL;
  op->refs = 1;
  op->kind = kind;
  op->client = c;
  op->generation = dlk_generation();
  op->blocking = blocking;
  op->bell = bell;
  if (bell)
    dlk_bell_ref(bell);
  op->started_us = dlk_now_us();
  pthread_cond_init(&op->cond, NULL);
  dlk_enter();
  op->id = ++last_id;
  dlk_client_ref(c);
  dlk_leave();
  return op;
}

void dlk_op_put(struct dlk_op *op) {
  if (--op->refs > 0)
    return;
  if (op->lock)
    dlk_lock_put(op->lock);
  dlk_client_unref(op->client);
  dlk_info_free(op->info);
  if (op->bell)
    dlk_bell_forget(op->bell, op);
  dlock_bell_unref(op->bell);
  pthread_cond_destroy(&op->cond);
  free(op);
}

void dlk_op_finish(struct dlk_op *op, enum dlock_err e, const char *fmt, ...) {
  if (op->done)
    return;
  if (e) { /* success has no message */
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(op->msg, sizeof op->msg, fmt, ap);
    va_end(ap);
  }
  op->err = e;
  op->done = true;
  if (op->generation != dlk_generation())
    return; /* a forked child: those that wait are threads of the parent */
  pthread_cond_broadcast(&op->cond);
  if (op->bell)
    dlk_bell_ring(op->bell, op);
}

/* ---- running a call for an operation ---- */

/* The task has a reference to the operation, which its caller may have dropped. */
static void start_on_loop(struct dlk_task *t) {
  struct dlk_op *op = OP_OF(t);
  dlk_enter();
  struct dlk_call *call = op->call;
  int64_t timeout_ms = op->timeout_ms;
  op->call = NULL;
  /* Canceled before it got here. A release goes out all the same: nobody waits for it. */
  bool dead = op->done && op->kind != DLK_OP_RELEASE;
  dlk_op_put(op);
  dlk_leave();
  if (dead)
    dlk_call_fail(call, DLOCK_E_CANCELED, "canceled before it was sent");
  else
    dlk_call_start(call, NULL, timeout_ms);
}

/* Gives a finished call's lane back, or hands a late call's lane to the loop.
 * True when something was done. Mutex held; it is let go of for `done`, which
 * must be over before the loop gets the lane: the late answer comes there. */
static bool settle_lane(struct dlk_op *op) {
  struct dlk_lane *lane = op->lane;
  struct dlk_call *call = lane->call;
  if (op->driving || (call && !call->late && !op->done))
    return false;
  op->lane = NULL;
  if (!call) {
    dlk_lane_put(lane);
    return true;
  }
  dlk_call_mark_late(call);
  dlk_leave();
  call->done(call);
  dlk_enter();
  dlk_lane_abandon(lane);
  return true;
}

void dlk_op_launch(struct dlk_op *op, struct dlk_call *call) {
  struct dlk_lane *lane = NULL;
  if (op->blocking && (op->client->be->caps & DLK_CAP_LANES))
    lane = dlk_lane_take(op->client);
  if (!lane) {
    bool runs = dlk_engine_start();
    if (runs) {
      op->refs++;
      op->call = call;
      op->task.run = start_on_loop;
      dlk_post_locked(&op->task);
    }
    dlk_leave();
    if (!runs)
      dlk_call_fail(call, DLOCK_E_UNAVAILABLE, "no thread, memory or descriptors for dlock's own thread");
    return;
  }
  op->lane = lane;
  lane->call = call;
  call->lane = lane;
  op->refs++;
  dlk_leave();
  dlk_call_start(call, lane, op->timeout_ms);
  dlk_enter();
  if (op->lane && !lane->call)
    settle_lane(op);
  dlk_op_put(op);
  dlk_leave();
}

/* ---- waiting ---- */

/* Mutex held on entry and return. False: a signal came. */
static bool wait_once(struct dlk_op *op, int64_t until) {
  int64_t now = dlk_now_ms();
  until = dlk_min(until, now + SLICE_MS);
  if (op->lane) {
    struct dlk_lane *lane = op->lane;
    op->driving = true;
    dlk_leave();
    int r = dlk_poller_turn(&lane->p, until);
    dlk_enter();
    op->driving = false;
    return r != EINTR;
  }
  struct timespec t;
  dlk_cond_deadline(&t, dlk_max(until - now, 0));
  dlk_cond_wait(&op->cond, &t);
  return true;
}

/* In a forked child, with the mutex: the parent's lane, call and sockets stay
 * untouched. True: it is one of the parent's. */
static bool forked(struct dlk_op *op) {
  if (op->generation == dlk_generation())
    return false;
  op->lane = NULL;
  dlk_op_finish(op, DLOCK_E_CANCELED, "canceled by a fork");
  return true;
}

bool dlock_op_wait(dlock_op *op, int64_t ms) {
  int64_t until = dlk_after(dlk_now_ms(), ms);
  bool go = true, turned = false;
  dlk_enter();
  while (!forked(op) && (op->lane || !op->done)) {
    if (op->lane && settle_lane(op))
      continue;
    /* One turn at least: who only polls must drive its lane too. */
    if (!go || (dlk_now_ms() >= until && (turned || !op->lane)))
      break;
    go = wait_once(op, until);
    turned = true;
  }
  bool done = op->done;
  dlk_leave();
  return done;
}

static void unlink_lost(struct dlk_op *op) {
  for (struct dlk_op **p = &op->lock->until_lost; *p; p = &(*p)->next)
    if (*p == op) {
      *p = op->next;
      dlk_op_put(op);
      return;
    }
}

static void unlink_close(struct dlk_op *op) {
  for (struct dlk_op **p = &op->client->closing; *p; p = &(*p)->next)
    if (*p == op) {
      *p = op->next;
      dlk_op_put(op);
      return;
    }
}

static void cancel(struct dlk_op *op) {
  if (forked(op))
    return;
  op->refs++;
  if (!op->done) {
    if (op->kind == DLK_OP_LOST)
      unlink_lost(op);
    if (op->kind == DLK_OP_CLOSE)
      unlink_close(op);
    if (op->kind == DLK_OP_ACQUIRE)
      dlk_lock_cancel(op->lock, DLOCK_E_CANCELED, "canceled");
    dlk_op_finish(op, DLOCK_E_CANCELED, "canceled");
  }
  if (op->lane)
    settle_lane(op);
  dlk_op_put(op);
}

void dlock_op_cancel(dlock_op *op) {
  dlk_enter();
  cancel(op);
  dlk_leave();
}

void dlock_op_unref(dlock_op *op) {
  if (!op)
    return;
  dlk_enter();
  cancel(op);
  struct dlk_lock *leak = op->kind == DLK_OP_ACQUIRE && op->done && !op->err && !op->claimed ? op->lock : NULL;
  if (leak)
    leak->refs++;
  if (!forked(op)) /* the parent's memory is left as it is */
    dlk_op_put(op);
  dlk_leave();
  if (leak) {
    dlock_lock_abandon(leak);
    dlock_lock_unref(leak);
  }
}

uint64_t dlock_op_id(const dlock_op *op) { return op->id; }
enum dlock_err dlock_op_err(const dlock_op *op) { return op->err; }
const char *dlock_op_msg(const dlock_op *op) { return op->msg[0] ? op->msg : dlock_err_text(op->err); }
const struct dlk_info *dlock_op_info(const dlock_op *op) { return op->info; }

dlock_lock *dlock_op_lock(dlock_op *op) {
  dlk_enter();
  struct dlk_lock *l = op->kind == DLK_OP_ACQUIRE && op->done && !op->err && !op->claimed ? op->lock : NULL;
  if (l) {
    op->claimed = true;
    l->refs++;
  }
  dlk_leave();
  return l;
}
