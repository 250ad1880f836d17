#include "url.h"

#include <stdlib.h>
#include <string.h>

#include "test.h"

static struct dlk_url u;
static char msg[DLOCK_MSG_MAX];

static bool good(const char *s) {
  dlk_url_free(&u);
  msg[0] = '\0';
  bool ok = dlk_url_parse(s, &u, msg) == DLOCK_E_OK;
  if (!ok) fprintf(stderr, "%s: %s\n", s, msg);
  return ok;
}

/* Refused, with a message, with nothing left to free, with none of `secret` told. */
static bool bad(const char *s, const char *secret) {
  dlk_url_free(&u);
  msg[0] = '\0';
  bool refused = dlk_url_parse(s, &u, msg) == DLOCK_E_PROTOCOL;
  return refused && msg[0] && !u.scheme && !u.user && !u.password && !u.n_hosts && !u.path &&
         !(secret && strstr(msg, secret));
}

static bool is(const char *got, const char *want) {
  return want ? got && strcmp(got, want) == 0 : !got;
}

static bool host(size_t i, const char *name, int port) {
  return i < u.n_hosts && is(u.hosts[i].name, name) && u.hosts[i].port == port;
}

static void test_whole(void) {
  CHECK(good("redis://bob:s%3acret@db.example:6380/3?a=b%20c&d"));
  CHECK(is(u.scheme, "redis") && u.authority);
  CHECK(is(u.user, "bob") && is(u.password, "s:cret"));
  CHECK(u.n_hosts == 1 && host(0, "db.example", 6380));
  CHECK(is(u.path, "/3") && is(u.query, "a=b%20c&d"));
}

static void test_short_forms(void) {
  CHECK(good("local:") && is(u.scheme, "local") && !u.authority && is(u.path, "") && !u.query);
  CHECK(good("LOCAL:") && is(u.scheme, "local"));
  CHECK(good("local:/var/x") && !u.authority && is(u.path, "/var/x"));
  CHECK(good("local:///var/my%20locks") && u.authority && !u.n_hosts && is(u.path, "/var/my locks"));
  CHECK(good("redis://") && u.authority && !u.n_hosts && is(u.path, ""));
  CHECK(good("redis://h?q") && host(0, "h", 0) && is(u.path, "") && is(u.query, "q"));
  CHECK(good("redis://h/?") && is(u.path, "/") && is(u.query, ""));
}

static void test_hosts(void) {
  CHECK(good("etcd://a:1,b,[::1]:3,[fe80::1%eth0]"));
  CHECK(u.n_hosts == 4 && host(0, "a", 1) && host(1, "b", 0) && host(2, "::1", 3) &&
        host(3, "fe80::1%eth0", 0));
  CHECK(bad("etcd://a,", NULL));
  CHECK(bad("etcd://,a", NULL));
  CHECK(bad("etcd://a,,b", NULL));
  CHECK(bad("redis://:6379", NULL));
  CHECK(bad("redis://[::1", NULL));
  CHECK(bad("redis://[::1]x", NULL));
  CHECK(bad("redis://::1", NULL));
  CHECK(bad("redis://a b", NULL));
  CHECK(bad("redis://h:0", NULL));
  CHECK(bad("redis://h:65536", NULL));
  CHECK(bad("redis://h:", NULL));
  CHECK(bad("redis://h:99999999999999999999", NULL));
  CHECK(bad("redis://h:-1", NULL));
  char many[4 * DLK_URL_HOSTS + 16] = "etcd://h";
  for (int i = 1; i < DLK_URL_HOSTS; i++) strcat(many, ",h");
  CHECK(good(many) && u.n_hosts == DLK_URL_HOSTS);
  strcat(many, ",h");
  CHECK(bad(many, NULL));
}

static void test_userinfo(void) {
  CHECK(good("redis://:pw@h") && !u.user && is(u.password, "pw"));
  CHECK(good("redis://bob@h") && is(u.user, "bob") && !u.password);
  CHECK(good("redis://bob:@h") && is(u.password, ""));
  CHECK(good("redis://bob:p@ss@h") && is(u.password, "p@ss") && host(0, "h", 0));
  CHECK(good("redis://bob:a:b@h") && is(u.password, "a:b"));
  CHECK(good("redis+unix://bob:pw@/run/r.sock") && !u.n_hosts && is(u.path, "/run/r.sock"));
}

static void test_escapes(void) {
  CHECK(good("local:///%41%7a%C3%a4") && is(u.path, "/Az\xc3\xa4"));
  CHECK(bad("local:///%", NULL));
  CHECK(bad("local:///%4", NULL));
  CHECK(bad("local:///%4g", NULL));
  CHECK(bad("local:///%00", NULL));
  CHECK(bad("local:///a\nb", NULL));
  CHECK(bad("redis://bob:hunter%zz@h", "hunter"));
}

static void test_no_scheme(void) {
  CHECK(bad("", NULL));
  CHECK(bad(":", NULL));
  CHECK(bad("://h", NULL));
  CHECK(bad("127.0.0.1:6379", NULL));
  CHECK(bad("hunter2", "hunter"));
  CHECK(bad("local:relative", NULL));
}

/* Secrets with characters that should have been escaped end up in other parts. */
static void test_secrets_stay(void) {
  CHECK(bad("redis://bob:hunter/2@h", "hunter"));
  CHECK(bad("redis://bob:hunter?2@h", "hunter"));
  CHECK(bad("redis://bob:hun ter,x@h:y", "hun"));
  CHECK(bad("bob:hunter2@h", "hunter"));
  CHECK(bad("bob:hunter2@h", "bob"));
}

int main(void) {
  test_whole();
  test_short_forms();
  test_hosts();
  test_userinfo();
  test_escapes();
  test_no_scheme();
  test_secrets_stay();
  dlk_url_free(&u);
  return DONE();
}
