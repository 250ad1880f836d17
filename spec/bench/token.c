/* token PORT SHARE HOLD_US: the floor of a hand-off. A token that a list
 * holds is passed from one process to the next by BLPOP and LPUSH: no lease, no
 * owner, nothing that a lock needs beyond waking one. Each line of input, a
 * number of milliseconds, is one turn; the answer is `done N`. */
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>

#include "share.h"

#define LIST "bench:token"

static redisReply *ask(redisContext *c, const char *command) {
  redisReply *r = redisCommand(c, command);
  if (r && r->type != REDIS_REPLY_ERROR) return r;
  fprintf(stderr, "%s: %s\n", command, r ? r->str : c->errstr);
  exit(1);
}

static bool take(redisContext *c, int64_t until_ns) {
  double left = (double)(until_ns - share_now_ns()) / 1e9;
  char command[64];
  snprintf(command, sizeof command, "BLPOP " LIST " %.3f", left < 0.001 ? 0.001 : left);
  redisReply *r = ask(c, command);
  bool got = r->type == REDIS_REPLY_ARRAY;
  freeReplyObject(r);
  return got;
}

static int turn(redisContext *c, struct share *s, long hold_us, int64_t until_ns) {
  int n = 0;
  while (share_now_ns() < until_ns && take(c, until_ns)) {
    share_enter(s);
    share_nap_us(hold_us);
    int64_t grants = share_leave(s);
    freeReplyObject(ask(c, "LPUSH " LIST " 1"));
    share_after_you(s, grants, until_ns);
    n++;
  }
  return n;
}

int main(int argc, char **argv) {
  if (argc != 4) return 64;
  redisContext *c = redisConnect("127.0.0.1", atoi(argv[1]));
  int fd = open(argv[2], O_RDWR | O_CLOEXEC);
  struct share *s = fd < 0 ? NULL : share_map(fd);
  if (!c || c->err || !s) return 1;
  char line[64];
  while (fgets(line, sizeof line, stdin)) {
    int n = turn(c, s, atol(argv[3]), share_now_ns() + atoll(line) * 1000000);
    printf("done %d\n", n);
    fflush(stdout);
  }
  return 0;
}
