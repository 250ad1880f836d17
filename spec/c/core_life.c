/* Lock life against a scripted backend: each test is one order of events that
 * once went wrong. The story stands above each. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include "fake.h"
#include "test.h"

enum { BOUND_MS = 8000 };

static int64_t slack_ms(int64_t ms) {
  const char *s = getenv("DLOCK_SLACK");
  return (int64_t)((double)ms * (s ? atof(s) : 1));
}

#define EVENTUALLY(cond)                                                      \
  do {                                                                        \
    int64_t end_ = dlk_now_ms() + slack_ms(BOUND_MS);                         \
    while (!(cond) && dlk_now_ms() < end_)                                    \
      usleep(1000);                                                            \
    CHECK(cond);                                                              \
  } while (0)

/* ---- plans: which requests are held back, until fk_let ---- */

static unsigned hold_apply, hold_reply, broken_ones, unsent_ones; /* bits of verbs */

static void plan(struct fk_req *r) {
  if (hold_apply >> r->verb & 1)
    r->apply_at = DLK_FOREVER;
  if ((hold_apply | hold_reply) >> r->verb & 1)
    r->reply_at = DLK_FOREVER;
  r->broken = broken_ones >> r->verb & 1;
}

static bool unsent(const struct dlk_call *c) { return unsent_ones >> c->verb & 1; }

static struct fk_req *held(enum dlk_verb v) {
  for (struct fk_req *r = fk.reqs; r; r = r->next)
    if (r->verb == v && (!r->applied || !r->over) && (r->reply_at == DLK_FOREVER || r->apply_at == DLK_FOREVER))
      return r;
  return NULL;
}

static bool is_held_back(enum dlk_verb v) {
  fk_lock();
  bool yes = held(v) != NULL;
  fk_unlock();
  return yes;
}

/* The one that is held back, if any, was done by the server. */
static bool is_applied(enum dlk_verb v) {
  fk_lock();
  struct fk_req *r = held(v);
  bool yes = !r || r->applied;
  fk_unlock();
  return yes;
}

static void let(enum dlk_verb v, bool apply, bool answer, bool broken) {
  fk_lock();
  struct fk_req *r = held(v);
  CHECK(r != NULL);
  if (r && apply)
    r->apply_at = 0;
  if (r && answer)
    r->reply_at = 0;
  if (r && answer)
    r->broken = broken;
  pthread_cond_signal(&fk.more);
  fk_unlock();
}

static void plain(void) {
  fk_lock();
  hold_apply = hold_reply = broken_ones = unsent_ones = 0;
  fk.plan = plan;
  fk.unsent = unsent;
  fk_unlock();
}

/* ---- short names ---- */

static struct dlk_client *client;
static dlock_bell *bell;

static dlock_op *start_acquire(const char *key, int64_t ttl, int64_t wait, bool blocking) {
  struct dlock_acquire a = {.key = key, .key_len = strlen(key), .ttl_ms = ttl, .wait_ms = wait,
                            .timeout_ms = slack_ms(1000), .renew = false, .blocking = blocking, .bell = blocking ? NULL : bell};
  return dlock_acquire(client, &a);
}

static bool done_in(dlock_op *op, int64_t ms) {
  int64_t end = dlk_now_ms() + ms;
  while (!dlock_op_wait(op, 20))
    if (dlk_now_ms() > end)
      return false;
  return true;
}

static dlock_lock *acquire(const char *key, int64_t ttl) {
  dlock_op *op = start_acquire(key, ttl, 0, true);
  CHECK(done_in(op, slack_ms(BOUND_MS)));
  dlock_lock *l = dlock_op_lock(op);
  CHECK(l != NULL);
  dlock_op_unref(op);
  return l;
}

static enum dlock_err finish(dlock_op *op) {
  CHECK(done_in(op, slack_ms(BOUND_MS)));
  enum dlock_err e = dlock_op_err(op);
  dlock_op_unref(op);
  return e;
}

static struct dlock_how async(void) {
  return (struct dlock_how){.timeout_ms = slack_ms(1000), .bell = bell};
}
static struct dlock_how sync_how(void) {
  return (struct dlock_how){.timeout_ms = slack_ms(1000), .blocking = true};
}

static enum dlock_err release(dlock_lock *l) {
  struct dlock_how h = sync_how();
  return finish(dlock_release(l, &h));
}

static size_t clients(void) {
  size_t n = 0;
  dlk_enter();
  for (struct dlk_client *c = dlk_clients; c; c = c->next)
    n++;
  dlk_leave();
  return n;
}

static void begin(const char *url) {
  plain();
  client = fk_client(url);
  bell = dlock_bell_new();
}

/* Everything is let go of, and then nothing is left. */
static void end(void) {
  CHECK(finish(dlock_client_close(client, NULL)) == DLOCK_E_OK);
  dlock_client_unref(client);
  dlock_bell_unref(bell);
  EVENTUALLY(clients() == 0);
  fk_lock();
  CHECK(fk.pending == 0);
  fk_unlock();
}

/* ---- the stories ---- */

/* An asynchronous acquire was dropped before the loop came to it: the loop then
 * ran a task inside freed memory. */
static void test_dropped_at_once(const char *url) {
  begin(url);
  for (int i = 0; i < 300; i++) {
    dlock_op *op = start_acquire("k", 1000, 100, false);
    if (i % 3 == 1)
      usleep((useconds_t)(i % 7) * 10);
    dlock_op_unref(op);
  }
  EVENTUALLY(fk_is_free("k"));
  end();
}

/* A waiter gave up while the key was being handed over to it, and the hand-over
 * failed: nobody let go of the waiter any more, so the client never closed, and
 * what the request did later stayed on the server. */
static void test_heir_gives_up(bool answered) {
  begin("fake:");
  dlock_lock *l = acquire("k", 20000);
  dlock_op *heir = start_acquire("k", 20000, 5000, false);
  plain();
  fk_lock();
  hold_apply = 1u << DLK_HAND_OVER;
  fk_unlock();
  struct dlock_how h = async();
  dlock_op *rel = dlock_release(l, &h);
  EVENTUALLY(is_held_back(DLK_HAND_OVER));
  dlock_op_unref(heir);
  if (answered) {
    fk_lock();
    fk_entry("k")->owner[0] = 0; /* taken away by an administrator */
    fk_unlock();
    let(DLK_HAND_OVER, true, true, false);
    CHECK(finish(rel) == DLOCK_E_LOST);
  } else {
    fk_lock();
    unsent_ones = 1u << DLK_RELEASE;
    fk_unlock();
    let(DLK_HAND_OVER, false, true, true);
    CHECK(finish(rel) == DLOCK_E_INDETERMINATE);
    let(DLK_HAND_OVER, true, false, false);
    EVENTUALLY(is_applied(DLK_HAND_OVER));
  }
  plain();
  dlock_lock_unref(l);
  EVENTUALLY(fk_is_free("k"));
  end();
}

/* A hand-over was sent and not answered; the heir got the key by a try of its
 * own and extended it; then the server did the old hand-over, with the old ttl. */
static void test_late_hand_over(void) {
  begin("fake:");
  dlock_lock *l = acquire("k", 2000);
  dlock_op *wait = start_acquire("k", 2000, 60000, false);
  fk_lock();
  hold_apply = 1u << DLK_HAND_OVER;
  fk_unlock();
  struct dlock_how h = async();
  dlock_op *rel = dlock_release(l, &h);
  EVENTUALLY(is_held_back(DLK_HAND_OVER));
  CHECK(finish(rel) == DLOCK_E_INDETERMINATE);
  dlock_lock_unref(l);
  CHECK(done_in(wait, slack_ms(BOUND_MS)));
  dlock_lock *heir = dlock_op_lock(wait);
  CHECK(heir && fk_holds("k", heir->g.owner));
  dlock_op_unref(wait);
  h = sync_how();
  CHECK(finish(dlock_extend(heir, 60000, &h)) == DLOCK_E_OK);
  let(DLK_HAND_OVER, true, false, false);
  EVENTUALLY(is_applied(DLK_HAND_OVER));
  fk_lock();
  int64_t left = fk_entry("k")->expires - dlk_now_ms();
  fk_unlock();
  CHECK(left <= 2000 && dlock_remaining(heir) <= left);
  let(DLK_HAND_OVER, true, true, false);
  plain();
  CHECK(release(heir) == DLOCK_E_OK);
  dlock_lock_unref(heir);
  end();
}

struct extend_job {
  pthread_t t;
  dlock_lock *l;
  int64_t ttl;
  enum dlock_err e;
};

static void *extend_main(void *arg) {
  struct extend_job *j = arg;
  struct dlock_how h = sync_how();
  j->e = finish(dlock_extend(j->l, j->ttl, &h));
  return NULL;
}

/* Two threads extended one lock over two connections: the shorter one was sent
 * first and done last, and the lock was believed in for as long as the longer. */
static void test_extends_cross(void) {
  begin("fake:");
  dlock_lock *l = acquire("k", 5000);
  fk_lock();
  hold_apply = 1u << DLK_RENEW;
  fk_unlock();
  struct extend_job brief = {.l = l, .ttl = 1500}, lasting = {.l = l, .ttl = 60000};
  pthread_create(&brief.t, NULL, extend_main, &brief);
  EVENTUALLY(is_held_back(DLK_RENEW));
  fk_lock();
  hold_apply = 0;
  fk_unlock();
  pthread_create(&lasting.t, NULL, extend_main, &lasting);
  pthread_join(lasting.t, NULL);
  CHECK(lasting.e == DLOCK_E_OK);
  let(DLK_RENEW, true, false, false);
  EVENTUALLY(is_applied(DLK_RENEW));
  fk_lock();
  int64_t left = fk_entry("k")->expires - dlk_now_ms();
  fk_unlock();
  CHECK(left <= 1500 && dlock_remaining(l) <= left);
  let(DLK_RENEW, true, true, false);
  pthread_join(brief.t, NULL);
  CHECK(dlock_is_held(l));
  CHECK(release(l) == DLOCK_E_OK);
  dlock_lock_unref(l);
  end();
}

/* An extension to a long ttl was done but not answered; the release that followed
 * could not be sent, and its repetition stopped when the *old* ttl was over. */
static void test_clean_up_as_long_as_the_longest(void) {
  begin("fake:");
  dlock_lock *l = acquire("k", 1000);
  fk_lock();
  broken_ones = 1u << DLK_RENEW;
  fk_unlock();
  struct dlock_how h = sync_how();
  CHECK(finish(dlock_extend(l, 60000, &h)) == DLOCK_E_INDETERMINATE);
  fk_lock();
  fk_apply_one(&(struct fk_req){.verb = DLK_RENEW},
               &(struct fk_what){.name = (char *)"k", .ttl = 60000, .owner = ""});
  memcpy(fk_entry("k")->owner, l->g.owner, l->g.owner_len + 1);
  fk_entry("k")->expires = dlk_now_ms() + 60000;
  broken_ones = 0;
  unsent_ones = 1u << DLK_RELEASE;
  fk_unlock();
  CHECK(release(l) == DLOCK_E_UNAVAILABLE);
  dlock_lock_unref(l);
  usleep(5500 * 1000); /* a try after the first ttl and a second falls in here */
  plain();
  EVENTUALLY(fk_is_free("k"));
  end();
}

/* A forked child met operations of its parent: it drove their sockets, whose
 * numbers were other files by then, and rang a bell that was no bell any more. */
__attribute__((unused)) static void test_fork_with_operations(void) {
  begin("fake:");
  dlock_lock *l = acquire("k", 20000);
  fk_lock();
  hold_apply = 1u << DLK_RENEW | 1u << DLK_RELEASE;
  fk_unlock();
  struct dlock_how h = sync_how(), a = async();
  h.timeout_ms = a.timeout_ms = slack_ms(20000);
  dlock_op *on_lane = dlock_extend(l, 20000, &h);
  dlock_op *on_loop = dlock_extend(l, 20000, &a);
  EVENTUALLY(is_held_back(DLK_RENEW));
  pid_t pid = fork();
  if (pid == 0) {
    int p[2], spare[16], n = 0;
    alarm(20);
    if (pipe(p))
      _exit(2);
    for (; n < 16; n++) /* the numbers of what the fork handler closed */
      spare[n] = dup(p[0]);
    if (write(p[1], "0123456789", 10) != 10)
      _exit(3);
    /* A first use, so that the client is the child's. */
    dlock_op *mine = dlock_ask(client, DLOCK_PING, "", 0, &(struct dlock_how){.timeout_ms = 100, .blocking = true});
    dlock_op_wait(mine, 50);
    if (!dlock_op_wait(on_lane, 1000) || dlock_op_err(on_lane) != DLOCK_E_CANCELED)
      _exit(4);
    if (!dlock_op_wait(on_loop, 1000) || dlock_op_err(on_loop) != DLOCK_E_CANCELED)
      _exit(5);
    dlock_bell_drain(bell);
    dlock_op *rung = dlock_until_lost(l, &a);
    if (!dlock_op_wait(rung, 1000) || dlock_op_err(rung) != DLOCK_E_LOST)
      _exit(6);
    struct pollfd in = {.fd = dlock_bell_fd(bell), .events = POLLIN};
    if (poll(&in, 1, 1000) != 1)
      _exit(7);
    dlock_op_unref(rung);
    dlock_op_unref(on_lane);
    dlock_op_unref(on_loop);
    dlock_op_unref(mine);
    dlock_bell_unref(bell);
    char buf[32];
    if (read(p[0], buf, sizeof buf) != 10)
      _exit(8);
    for (int i = 0; i < n; i++)
      if (close(spare[i]))
        _exit(9);
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(pid, &status, 0) == pid);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  if (status)
    fprintf(stderr, "child: status %#x\n", (unsigned)status);
  let(DLK_RENEW, true, true, false);
  fk_lock();
  hold_apply = 0;
  fk_unlock();
  if (is_held_back(DLK_RENEW))
    let(DLK_RENEW, true, true, false);
  CHECK(finish(on_lane) == DLOCK_E_OK);
  CHECK(finish(on_loop) == DLOCK_E_OK);
  CHECK(release(l) == DLOCK_E_OK);
  dlock_lock_unref(l);
  end();
}

static bool stop_random;
static void *random_main(void *arg) {
  unsigned char buf[16];
  while (!__atomic_load_n(&stop_random, __ATOMIC_RELAXED))
    dlk_random(buf, sizeof buf);
  return arg;
}

/* A thread was taking random bytes when another forked: the child waited for
 * ever at its first acquire. */
static void test_fork_with_randomness(void) {
  pthread_t t;
  pthread_create(&t, NULL, random_main, NULL);
  int good = 0, n = 150;
  for (int i = 0; i < n; i++) {
    pid_t pid = fork();
    if (pid == 0) {
      unsigned char buf[16];
      alarm(3);
      dlk_random(buf, sizeof buf);
      _exit(0);
    }
    int status = -1;
    good += waitpid(pid, &status, 0) == pid && status == 0;
    if (good <= i)
      break;
  }
  CHECK(good == n);
  __atomic_store_n(&stop_random, true, __ATOMIC_RELAXED);
  pthread_join(t, NULL);
}

/* A caller that only polls its blocking operation drove nothing. */
static void test_poll_drives(void) {
  begin("fake:");
  dlock_op *op = start_acquire("k", 1000, 0, true);
  bool done = false;
  for (int i = 0; i < 2000 && !(done = dlock_op_wait(op, 0)); i++)
    usleep(1000);
  CHECK(done);
  dlock_op_unref(op);
  EVENTUALLY(fk_is_free("k"));
  end();
}

int main(int argc, char **argv) {
  int only = argc > 1 ? atoi(argv[1]) : 0;
  if (!only || only == 1) test_dropped_at_once("fakeloop:");
  if (!only || only == 2) test_dropped_at_once("fake:");
  if (!only || only == 3) test_heir_gives_up(true);
  if (!only || only == 4) test_heir_gives_up(false);
  if (!only || only == 5) test_late_hand_over();
  if (!only || only == 6) test_extends_cross();
  if (!only || only == 7) test_clean_up_as_long_as_the_longest();
#ifndef __SANITIZE_THREAD__ /* it knows no threads in a forked child */
  if (!only || only == 8) test_fork_with_operations();
#endif
  if (!only || only == 9) test_fork_with_randomness();
  if (!only || only == 10) test_poll_drives();
  return DONE();
}
