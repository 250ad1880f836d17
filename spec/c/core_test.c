/* The parts of the core that need no backend: the lock's state table, the heap
 * of timers, pollers of both kinds, the line of local contenders. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lock.h"
#include "test.h"

/* Every arrow of the drawing in lock.h, written down a second time. */
static const char *const arrows[] = {
    "idle>acquiring",     "acquiring>waiting",  "acquiring>held",      "acquiring>failed",
    "acquiring>canceled", "acquiring>timed out", "waiting>acquiring",  "waiting>held",
    "waiting>failed",     "waiting>canceled",   "waiting>timed out",   "held>releasing",
    "held>lost",          "releasing>released", "releasing>lost",
};

static void test_states(void) {
  for (int from = 0; from < DLK_STATE_COUNT; from++)
    for (int to = 0; to < DLK_STATE_COUNT; to++) {
      char arrow[64];
      bool drawn = false;
      snprintf(arrow, sizeof arrow, "%s>%s", dlk_state_text((enum dlk_state)from), dlk_state_text((enum dlk_state)to));
      for (size_t i = 0; i < sizeof arrows / sizeof *arrows; i++)
        drawn = drawn || !strcmp(arrow, arrows[i]);
      CHECK(dlk_state_may((enum dlk_state)from, (enum dlk_state)to) == drawn);
    }
  CHECK(!dlk_state_may((enum dlk_state)99, DLK_HELD));
}

static void test_clock(void) {
  CHECK(dlk_after(10, 5) == 15);
  CHECK(dlk_after(10, DLK_FOREVER) == DLK_FOREVER);
  CHECK(dlk_after(DLK_FOREVER, 1) == DLK_FOREVER);
}

static void test_heap(void) {
  enum { N = 500 };
  static struct dlk_timer t[N];
  struct dlk_heap h = {0};
  unsigned seed = 7;
  for (int i = 0; i < N; i++)
    CHECK(dlk_heap_set(&h, &t[i], (int64_t)(rand_r(&seed) % 1000)));
  for (int i = 0; i < N; i += 3)
    dlk_heap_del(&h, &t[i]);
  for (int i = 1; i < N; i += 3)
    dlk_heap_set(&h, &t[i], (int64_t)(rand_r(&seed) % 1000));
  int64_t last = -1;
  size_t n = 0;
  while (h.n) {
    struct dlk_timer *first = h.v[0];
    CHECK(first->due >= last);
    last = first->due;
    dlk_heap_del(&h, first);
    CHECK(!first->at);
    n++;
  }
  CHECK(n == N - (N + 2) / 3);
  CHECK(dlk_heap_due(&h) == DLK_FOREVER);
  free(h.v);
}

static int fired, got_ready;
static void on_fire(struct dlk_timer *t) { (void)t, fired++; }
static void on_ready(struct dlk_source *s, unsigned got) {
  char c;
  if ((got & DLK_READ) && read(s->fd, &c, 1) == 1)
    got_ready++;
}

/* What a lane held goes on, on the loop, after the move. */
static void test_move(void) {
  struct dlk_poller lane, loop;
  int p[2];
  CHECK(!dlk_poller_init(&lane, false) && !dlk_poller_init(&loop, true));
  CHECK(!pipe2(p, O_CLOEXEC | O_NONBLOCK));
  struct dlk_source s = {.fd = p[0], .want = DLK_READ, .ready = on_ready};
  struct dlk_timer t = {.fire = on_fire};
  CHECK(!dlk_source_add(&lane, &s));
  dlk_timer_set(&lane, &t, dlk_now_ms() + 500);
  CHECK(write(p[1], "x", 1) == 1);
  dlk_poller_turn(&lane, dlk_now_ms() + 1000);
  CHECK(got_ready == 1 && fired == 0);
  dlk_poller_move(&lane, &loop);
  CHECK(s.on == &loop && t.on == &loop && !lane.sources && !lane.timers.n);
  CHECK(write(p[1], "x", 1) == 1);
  int64_t end = dlk_now_ms() + 20000;
  while ((got_ready < 2 || !fired) && dlk_now_ms() < end)
    dlk_poller_turn(&loop, end);
  CHECK(got_ready == 2 && fired == 1);
  int64_t before = dlk_now_ms();
  dlk_poller_turn(&loop, before + 30);
  CHECK(dlk_now_ms() - before >= 29);
  dlk_source_del(&s);
  dlk_poller_destroy(&lane);
  dlk_poller_destroy(&loop);
  close(p[0]);
  close(p[1]);
}

static struct dlk_source twin[2];
static void on_ready_delete(struct dlk_source *s, unsigned got) {
  (void)got;
  got_ready++;
  dlk_source_del(&twin[s == &twin[0]]);
}

/* Two sources are ready in one turn: whichever runs first deletes the other. */
static void test_delete_in_turn(bool epoll) {
  struct dlk_poller loop;
  int p[2];
  CHECK(!dlk_poller_init(&loop, epoll));
  CHECK(!pipe2(p, O_CLOEXEC | O_NONBLOCK) && write(p[1], "xy", 2) == 2);
  int other = fcntl(p[0], F_DUPFD_CLOEXEC, 0);
  twin[0] = (struct dlk_source){.fd = p[0], .want = DLK_READ, .ready = on_ready_delete};
  twin[1] = (struct dlk_source){.fd = other, .want = DLK_READ, .ready = on_ready_delete};
  CHECK(!dlk_source_add(&loop, &twin[0]) && !dlk_source_add(&loop, &twin[1]));
  got_ready = 0;
  dlk_poller_turn(&loop, dlk_now_ms() + 1000);
  CHECK(got_ready == 1);
  dlk_source_del(&twin[0]);
  dlk_source_del(&twin[1]);
  dlk_poller_destroy(&loop);
  close(other);
  close(p[0]);
  close(p[1]);
}

static void test_waitq(void) {
  struct dlk_waitq w = {0};
  static struct dlk_lock l[3];
  struct dlk_queue *q = dlk_waitq_get(&w, "a\0b", 3);
  CHECK(q && q == dlk_waitq_get(&w, "a\0b", 3) && q == dlk_waitq_find(&w, "a\0b", 3));
  CHECK(!dlk_waitq_find(&w, "a\0c", 3) && !dlk_waitq_find(&w, "a", 1));
  for (int i = 0; i < 3; i++)
    dlk_waitq_push(q, &l[i]);
  dlk_waitq_remove(q, &l[1]);
  dlk_waitq_remove(q, &l[1]);
  CHECK(q->first == &l[0] && l[0].q_next == &l[2] && !l[2].q_next);
  dlk_waitq_remove(q, &l[2]);
  dlk_waitq_push(q, &l[1]);
  CHECK(l[0].q_next == &l[1]);
  dlk_waitq_remove(q, &l[0]);
  dlk_waitq_tidy(&w, q);
  CHECK(w.n == 1);
  dlk_waitq_remove(q, &l[1]);
  dlk_waitq_tidy(&w, q);
  CHECK(w.n == 0);
  char name[16];
  for (int i = 0; i < 1000; i++) {
    snprintf(name, sizeof name, "k%d", i);
    CHECK(dlk_waitq_get(&w, name, strlen(name)));
  }
  CHECK(w.n == 1000 && dlk_waitq_find(&w, "k0", 2) && dlk_waitq_find(&w, "k999", 4));
  dlk_waitq_destroy(&w);
}

static void test_owner(void) {
  size_t n = 0;
  const char v[] = "dlock1:0123456789abcdef0123456789abcdef:host:7";
  const char *label = dlk_owner_label(v, sizeof v - 1, &n);
  CHECK(label && n == 6 && !memcmp(label, "host:7", 6));
  CHECK(!dlk_owner_label("dlock1:short:x", 14, &n));
  CHECK(!dlk_owner_label(v + 1, sizeof v - 2, &n));
  unsigned char a[16], b[16];
  dlk_random(a, sizeof a);
  dlk_random(b, sizeof b);
  CHECK(memcmp(a, b, sizeof a));
}

int main(void) {
  test_states();
  test_clock();
  test_heap();
  test_move();
  test_delete_in_turn(true);
  test_delete_in_turn(false);
  test_waitq();
  test_owner();
  return DONE();
}
