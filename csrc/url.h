/* Backend URLs: scheme://[user[:password]@]host[:port][,host[:port]...][/path][?name=value&...]
 * and scheme:[path]. Percent-escapes are undone in user, password, path and
 * query. Messages never repeat the user part. */
#ifndef DLK_URL_H
#define DLK_URL_H

#include <stdbool.h>
#include <stddef.h>

#include "error.h"

#define DLK_URL_HOSTS 32

struct dlk_host {
  char *name; /* without the brackets of an IPv6 address */
  int port;   /* 0: not given */
};

struct dlk_url {
  char *scheme;
  char *user, *password; /* NULL: not given */
  struct dlk_host hosts[DLK_URL_HOSTS];
  size_t n_hosts;
  bool authority; /* there was a "//" */
  char *path;     /* from the first "/" on, "" if none */
  char *query;    /* raw, without "?", or NULL */
};

/* OK, or PROTOCOL with a message (the caller raises it as misuse). */
enum dlock_err dlk_url_parse(const char *s, struct dlk_url *out, char *msg);
void dlk_url_free(struct dlk_url *u);

#endif
