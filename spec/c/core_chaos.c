/* Random life: threads acquire, extend, release, cancel, drop and close on a few
 * keys, over a server that delays, forgets to answer, breaks connections and does
 * what was sent long after (spec/c/fake.h). Whatever comes of it: a lock that says
 * it is held is the server's, every wait ends, and in the end nothing is left,
 * neither here nor there. `time limit: 200 s` */
#include <dirent.h>
#include <stdio.h>

#include "fake.h"
#include "test.h"

enum { THREADS = 8, KEYS = 5, HOLD_MAX = 3, LONG_MS = 60000 };

static double number(const char *name, double otherwise) {
  const char *s = getenv(name);
  return s ? atof(s) : otherwise;
}
static int64_t slack_ms(int64_t ms) { return (int64_t)((double)ms * number("DLOCK_SLACK", 1)); }

static const char *const keys[KEYS] = {"a", "b", "c", "d", "e"};
static int64_t stop_at;
static bool calm;
static unsigned plan_seed = 1;

/* ---- what the server does to a request (fk.m held) ---- */

static unsigned pick(unsigned n) { return (unsigned)rand_r(&plan_seed) % n; }

static void plan(struct fk_req *r) {
  int64_t now = dlk_now_ms();
  if (calm)
    return;
  unsigned what = pick(100);
  r->apply_at = now + pick(4);
  r->reply_at = r->apply_at + pick(4);
  if (what < 3) { /* done, but the answer is lost with the connection */
    r->broken = true;
  } else if (what < 6) { /* the connection breaks first, it is done later */
    r->broken = true;
    r->reply_at = now + pick(3);
    r->apply_at = r->reply_at + 10 + pick(500);
  } else if (what < 9) { /* slow beyond every time limit */
    r->apply_at = now + pick(900);
    r->reply_at = r->apply_at + pick(900);
  } else if (what < 18) { /* slow */
    r->apply_at = now + pick(100);
    r->reply_at = r->apply_at + pick(100);
  }
}

static bool unsent(const struct dlk_call *c) {
  (void)c;
  return !calm && pick(100) < 3;
}

/* ---- one thread ---- */

struct life {
  pthread_t t;
  unsigned seed;
  struct dlk_client *client;
  dlock_bell *bell;
  dlock_lock *held[HOLD_MAX];
  const char *key[HOLD_MAX];
  uint64_t n, granted, wrong, late;
};

static unsigned any(struct life *me, unsigned n) { return (unsigned)rand_r(&me->seed) % n; }

static void look(struct life *me, int i) {
  dlock_lock *l = me->held[i];
  bool ours = fk_holds(me->key[i], l->g.owner);
  if (!ours && dlock_is_held(l)) {
    me->wrong++;
    fk_lock();
    fprintf(stderr, "believed to be held for %lld ms more, floor %lld flying %lld; at the server: %s\n",
            (long long)dlock_remaining(l), (long long)l->floor_ttl_ms, (long long)l->flying_ttl_ms,
            fk_entry(me->key[i])->owner);
    fk_unlock();
  }
}

static void look_all(struct life *me) {
  for (int i = 0; i < HOLD_MAX; i++)
    if (me->held[i])
      look(me, i);
}

/* Waits, gives up, or drops the operation. True: done. */
static bool wait_for(struct life *me, dlock_op *op, int64_t bound) {
  int64_t start = dlk_now_ms(), end = start + slack_ms(bound + 700);
  int64_t patience = any(me, 6) ? INT64_MAX : start + any(me, 30);
  while (!dlock_op_wait(op, any(me, 20))) {
    look_all(me);
    if (dlk_now_ms() > patience) {
      if (any(me, 2))
        dlock_op_cancel(op);
      return false;
    }
    if (dlk_now_ms() > end) {
      me->late++;
      fprintf(stderr, "a wait (kind %d) of %lld ms did not end\n", (int)op->kind, (long long)bound);
      end = INT64_MAX;
    }
  }
  return true;
}

static int64_t any_ttl(struct life *me) {
  static const int64_t ttl[] = {150, 300, 600, 2000};
  return ttl[any(me, 4)];
}

static struct dlock_how how(struct life *me) {
  struct dlock_how h = {.timeout_ms = 50 + any(me, 200), .blocking = any(me, 2)};
  h.bell = h.blocking || any(me, 3) ? NULL : me->bell;
  return h;
}

static void do_acquire(struct life *me, int i) {
  const char *key = me->key[i] = keys[any(me, KEYS)];
  struct dlock_how h = how(me);
  struct dlock_acquire a = {.key = key, .key_len = strlen(key), .ttl_ms = any_ttl(me),
                            .wait_ms = any(me, 3) ? any(me, 150) : 0, .max_hold_ms = any(me, 6) ? 0 : 1 + any(me, 500),
                            .timeout_ms = h.timeout_ms, .renew = any(me, 4) > 0, .blocking = h.blocking, .bell = h.bell};
  dlock_op *op = dlock_acquire(me->client, &a);
  bool done = wait_for(me, op, a.wait_ms + a.timeout_ms + 100);
  if (done && !dlock_op_err(op) && any(me, 10))
    me->held[i] = dlock_op_lock(op);
  dlock_op_unref(op);
  me->granted += me->held[i] != NULL;
}

static void do_extend(struct life *me, int i) {
  struct dlock_how h = how(me);
  dlock_op *op = dlock_extend(me->held[i], any(me, 4) == 0 ? LONG_MS : any(me, 3) ? any_ttl(me) : 0, &h);
  wait_for(me, op, h.timeout_ms);
  dlock_op_unref(op);
}

static void do_release(struct life *me, int i) {
  dlock_lock *l = me->held[i];
  struct dlock_how h = how(me);
  me->held[i] = NULL;
  if (any(me, 8)) {
    dlock_op *op = dlock_release(l, &h);
    wait_for(me, op, h.timeout_ms);
    dlock_op_unref(op);
  } else {
    dlock_lock_abandon(l);
  }
  dlock_lock_unref(l);
}

static void do_other(struct life *me, int i) {
  struct dlock_how h = how(me);
  unsigned what = any(me, 3);
  if (what && !me->held[i])
    return;
  dlock_op *op = what ? dlock_until_lost(me->held[i], &h)
                      : dlock_ask(me->client, any(me, 40) ? DLOCK_INSPECT : DLOCK_PING, "a", 1, &h);
  if (what)
    dlock_op_wait(op, any(me, 30));
  else
    wait_for(me, op, h.timeout_ms);
  dlock_op_unref(op);
}

static void events(struct life *me) {
  struct dlock_event ev;
  while (dlock_next_event(me->client, &ev)) {
    if (strstr(ev.msg, "internal")) {
      fprintf(stderr, "%s\n", ev.msg);
      me->wrong++;
    }
    free(ev.key);
  }
}

static void leave(struct life *me) {
  for (int i = 0; i < HOLD_MAX; i++) {
    if (me->held[i])
      dlock_lock_unref(me->held[i]);
    me->held[i] = NULL;
  }
  events(me);
  dlock_client_unref(me->client);
}

static void new_client(struct life *me) {
  dlock_op *op = dlock_client_close(me->client, NULL);
  dlock_op_wait(op, any(me, 100));
  look_all(me);
  dlock_op_unref(op);
  leave(me);
  me->client = fk_client(any(me, 3) ? "fake:" : "fakeloop:");
}

static void *live(void *arg) {
  struct life *me = arg;
  while (dlk_now_ms() < stop_at) {
    int i = (int)any(me, HOLD_MAX);
    unsigned what = any(me, 100);
    me->n++;
    if (what < 2)
      new_client(me);
    else if (what < 10)
      do_other(me, i);
    else if (!me->held[i])
      do_acquire(me, i);
    else if (what < 40)
      do_extend(me, i);
    else
      do_release(me, i);
    look_all(me);
    if (any(me, 4) == 0)
      usleep(any(me, 8000));
    look_all(me);
    if (any(me, 50) == 0)
      events(me);
  }
  return NULL;
}

/* ---- all ---- */

static size_t count(const char *dir) {
  size_t n = 0;
  DIR *d = opendir(dir);
  while (d && readdir(d))
    n++;
  if (d)
    closedir(d);
  return n;
}

static bool quiet(void) {
  bool yes = true;
  for (int i = 0; i < KEYS; i++)
    yes = yes && fk_is_free(keys[i]);
  fk_lock();
  yes = yes && !fk.pending && !fk.reqs;
  fk_unlock();
  dlk_enter();
  yes = yes && !dlk_clients;
  dlk_leave();
  return yes;
}

static void tell(void) {
  dlk_enter();
  for (struct dlk_client *c = dlk_clients; c; c = c->next) {
    fprintf(stderr, "client %p refs %d closed %d busy %zu held %llu waiting %llu\n", (void *)c, c->refs, c->closed,
            c->busy, (unsigned long long)c->stats.held, (unsigned long long)c->stats.waiting);
    for (struct dlk_lock *l = c->locks; l; l = l->next)
      fprintf(stderr, "  %s %s refs %d unclean %d unknown %d call %p cleaning %d timer %zu %s\n", l->item.name,
              dlk_state_text(l->state), l->refs, l->unclean, l->unknown, (void *)l->call, l->cleaning, l->timer.at,
              l->g.owner);
  }
  dlk_leave();
  fk_lock();
  for (int i = 0; i < KEYS; i++)
    fprintf(stderr, "%s: %s\n", keys[i], fk_entry(keys[i])->owner);
  fk_unlock();
}

int main(int argc, char **argv) {
  static struct life life[THREADS];
  double seconds = number("DLOCK_SCALE", 0.05) * 60;
  unsigned seed = argc > 1 ? (unsigned)atoi(argv[1]) : (unsigned)dlk_now_ms();
  fprintf(stderr, "seed %u\n", seed);
  plan_seed = seed;
  size_t fds = count("/proc/self/fd");
  fk.plan = plan;
  fk.unsent = unsent;
  struct dlk_client *shared = fk_client("fake:");
  dlock_op *op = dlock_ask(shared, DLOCK_PING, "", 0, &(struct dlock_how){.timeout_ms = 10});
  dlock_op_wait(op, 100);
  dlock_op_unref(op);
  stop_at = dlk_now_ms() + (int64_t)(1000 * (argc > 2 ? atof(argv[2]) : seconds < 3 ? 3 : seconds));
  for (int i = 0; i < THREADS; i++) {
    life[i] = (struct life){.seed = seed + (unsigned)i, .client = shared, .bell = dlock_bell_new()};
    dlk_enter();
    dlk_client_ref(shared);
    dlk_leave();
    pthread_create(&life[i].t, NULL, live, &life[i]);
  }
  dlock_client_unref(shared);
  uint64_t n = 0, granted = 0, wrong = 0, late = 0;
  for (int i = 0; i < THREADS; i++) {
    pthread_join(life[i].t, NULL);
    n += life[i].n;
    granted += life[i].granted;
    wrong += life[i].wrong;
    late += life[i].late;
  }
  fk_lock();
  calm = true;
  fk_unlock();
  for (int i = 0; i < THREADS; i++) {
    op = dlock_client_close(life[i].client, NULL);
    CHECK(dlock_op_wait(op, 0) || wait_for(&life[i], op, 12000) || 1);
    dlock_op_unref(op);
    leave(&life[i]);
    dlock_bell_unref(life[i].bell);
  }
  for (int64_t end = dlk_now_ms() + slack_ms(12000); !quiet() && dlk_now_ms() < end;)
    usleep(10000);
  CHECK(quiet());
  if (!quiet())
    tell();
  CHECK(count("/proc/self/fd") == fds + 3); /* epoll, its timer, the wake-up */
  fprintf(stderr, "%llu steps, %llu grants\n", (unsigned long long)n, (unsigned long long)granted);
  CHECK(granted > 20);
  CHECK(wrong == 0);
  CHECK(late == 0);
  return DONE();
}
