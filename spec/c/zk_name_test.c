/* Keys to paths, shapes of contenders, and the order of a line. */
#include "test.h"

#ifndef DLK_WITH_ZOOKEEPER
int main(void) { return DONE(); }
#else
#include <stdlib.h>
#include <string.h>

#include "zk.h"

static bool maps(const char *root, const char *key, size_t len, const char *path) {
  char *dir = zk_dir(root, key, len);
  bool same = dir && !strcmp(dir, path);
  if (!same)
    fprintf(stderr, "%s, not %s\n", dir ? dir : "none", path);
  free(dir);
  return same;
}

#define MAPS(key, path) CHECK(maps("", key, sizeof(key) - 1, path))

static void test_paths(void) {
  MAPS("a", "/a");
  MAPS("/a", "/a");
  MAPS("a/b", "/a/b");
  MAPS("a/", "/a/%");
  MAPS("a//b", "/a/%/b");
  MAPS("/", "/%");
  MAPS("//a", "/%/a");
  MAPS(".", "/%2E");
  MAPS("../a", "/%2E%2E/a");
  MAPS("...", "/...");
  MAPS("%", "/%25");
  MAPS("a b:c", "/a b:c");
  MAPS("a\0b\n", "/a%00b%0A");
  MAPS("h\xc3\xb6", "/h\xc3\xb6");
  MAPS("\xc2\x80", "/%C2%80");             /* U+0080: refused */
  MAPS("\xee\x80\x80", "/%EE%80%80");      /* U+E000: refused */
  MAPS("\xff\xc3", "/%FF%C3");             /* no UTF-8 */
  MAPS("\xe2\x82\xac", "/\xe2\x82\xac");
  MAPS("zookeeper/x", "/%7Aookeeper/x");
  MAPS("a/zookeeper", "/a/zookeeper");
  MAPS("a/_c_x-lock-0000000001", "/a/_c_x-lock-000000000%31");
  CHECK(maps("/root", "zookeeper", 9, "/root/zookeeper"));
}

static void test_back(void) {
  char out[64];
  *zk_unescape(out, "a%2Fb%") = 0;
  CHECK(!strcmp(out, "a/b%"));
  CHECK(zk_unescape(out, "%") == out);
  CHECK(zk_unescape(out, "%00") == out + 1 && !out[0]);
}

static int32_t sequence(const char *name) {
  int32_t seq = 12345;
  CHECK(zk_contender(name, &seq));
  return seq;
}

static void test_contenders(void) {
  static const char *const others[] = {"", "x", "lock-", "0000000001", "lock-000000001", "-lock-00000000x1",
                                       "x-123-0000000001", "lock-9999999999", "lock--2147483649",
                                       "lease-0000000001", "_c_x-lock-00000000011"};
  int32_t seq;
  CHECK(sequence("_c_1-lock-0000000007") == 7);
  CHECK(sequence("lock-0000000007") == 7);
  CHECK(sequence("ab__lock__0000000008") == 8);
  CHECK(sequence("ab__rlock__0000000008") == 8);
  CHECK(sequence("_c_1-__READ__0000000009") == 9);
  CHECK(sequence("_c_1-__WRIT__0000000009") == 9);
  CHECK(sequence("lock-2147483647") == INT32_MAX);
  CHECK(sequence("lock--2147483648") == INT32_MIN);
  CHECK(sequence("a__lock__-2147483647") == -INT32_MAX);
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    CHECK(!zk_contender(others[i], &seq));
}

/* The counter is a signed 32-bit number and goes round. */
static void test_order(void) {
  static const char *const line[] = {"lock-2147483646", "a-lock-2147483647", "lock--2147483648",
                                     "a__lock__-2147483647"};
  struct zk_names names = {.v = calloc(8, sizeof *names.v)};
  names.v[names.n++] = strdup(line[3]);
  names.v[names.n++] = strdup("config");
  names.v[names.n++] = strdup(line[1]);
  names.v[names.n++] = strdup(line[2]);
  names.v[names.n++] = strdup(line[0]);
  zk_names_line(&names);
  CHECK(names.n == 4);
  for (size_t i = 0; i < names.n; i++)
    CHECK(!strcmp(names.v[i], line[i]));
  zk_names_free(&names);
  CHECK(zk_before("a", 5, "b", 5) && !zk_before("b", 5, "a", 5));
}

int main(void) {
  test_paths();
  test_back();
  test_contenders();
  test_order();
  return DONE();
}
#endif
