/* Which backends this build has. The Makefile defines DLK_WITH_NAME for each
 * optional one whose client library it found; nothing else names a backend. */
#include "backend.h"

#include <string.h>

const struct dlk_backend *const dlk_backends[] = {
    &dlk_local_backend,
#ifdef DLK_WITH_REDIS
    &dlk_redis_backend,
#endif
#ifdef DLK_WITH_ZOOKEEPER
    &dlk_zookeeper_backend,
#endif
    NULL,
};

#define LATER "comes with a later version of dlock"

/* Consulted only for a scheme that no backend above has claimed. */
static const struct {
  const char *scheme, *needs;
} known[] = {
    {"redis", "needs dlock built with hiredis (Debian: libhiredis-dev; WITH_REDIS=1)"},
    {"redis+unix", "needs dlock built with hiredis (Debian: libhiredis-dev; WITH_REDIS=1)"},
    {"rediss", LATER},
    {"redis-sentinel", LATER},
    {"redis-cluster", LATER},
    {"redlock", LATER},
    {"zookeeper", "needs dlock built with libzookeeper (Debian: libzookeeper-mt-dev; WITH_ZOOKEEPER=1)"},
    {"zookeepers", "TLS is not supported for ZooKeeper: run a TLS tunnel (stunnel, socat) on this "
                   "machine and use zookeeper:// to it"},
    {"etcd", LATER},
    {"etcds", LATER},
};

const char *dlk_scheme_missing(const char *scheme) {
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (strcmp(known[i].scheme, scheme) == 0) return known[i].needs;
  return NULL;
}
