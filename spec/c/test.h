/* The smallest test frame that does: CHECK counts, DONE prints the line that
 * the test runner reads. */
#ifndef DLK_TEST_H
#define DLK_TEST_H

#include <stdio.h>

static int test_passed, test_failed;

#define CHECK(cond)                                                       \
  do {                                                                    \
    if (cond) {                                                           \
      test_passed++;                                                      \
    } else {                                                              \
      test_failed++;                                                      \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #cond);  \
    }                                                                     \
  } while (0)

#define DONE() (printf("%d passed, %d failed\n", test_passed, test_failed), test_failed != 0)

#endif
