/* A client of ZooKeeper, from its URL and options; no I/O. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zk.h"

enum {
  PORT = 2181,
  FLOOR_MS = 1000 /* shorter sessions never get connected */
};

static enum dlock_err parse_query(struct zk *z, const char *query, char *msg) {
  static const char *const names[] = {"curator", "kazoo", "both"};
  const char *name = "zk_dialect=";
  if (!query || !*query)
    return DLOCK_E_OK;
  if (!strncmp(query, name, strlen(name)))
    for (int i = 0; i < 3; i++)
      if (!strcmp(query + strlen(name), names[i])) {
        z->dialect = (enum zk_dialect)i;
        return DLOCK_E_OK;
      }
  return dlk_fail(msg, DLOCK_E_PROTOCOL,
                  "zookeeper: after ? comes zk_dialect=curator, kazoo or both, and nothing else");
}

/* Shuffled, so that the clients of an ensemble spread over it. */
static char *host_list(const struct dlk_url *url) {
  size_t order[DLK_URL_HOSTS], room = 1;
  unsigned char r[DLK_URL_HOSTS];
  dlk_random(r, sizeof r);
  for (size_t i = 0; i < url->n_hosts; i++) {
    size_t j = r[i] % (i + 1);
    order[i] = order[j];
    order[j] = i;
    room += strlen(url->hosts[i].name) + 12;
  }
  char *list = malloc(room), *to = list;
  for (size_t i = 0; list && i < url->n_hosts; i++) {
    const struct dlk_host *h = &url->hosts[order[i]];
    bool v6 = strchr(h->name, ':') != NULL;
    to += sprintf(to, "%s%s%s%s:%d", i ? "," : "", v6 ? "[" : "", h->name, v6 ? "]" : "",
                  h->port ? h->port : PORT);
  }
  return list;
}

static enum dlock_err parse_root(struct zk *z, const char *path, char *msg) {
  size_t n = strlen(path);
  while (n && path[n - 1] == '/')
    n--;
  z->root = strndup(path, n);
  if (!z->root)
    return dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  for (const char *s = z->root; *s; s++) {
    size_t part = strcspn(s + 1, "/");
    bool dots = s[1] == '.' && (part == 1 || (part == 2 && s[2] == '.'));
    if (*s == '/' && (!part || dots))
      return dlk_fail(msg, DLOCK_E_PROTOCOL, "zookeeper: the path has an empty part, or . or ..");
  }
  return DLOCK_E_OK;
}

static enum dlock_err parse_auth(struct zk *z, const struct dlk_url *url,
                                 const struct dlock_config *cfg, char *msg) {
  const char *user = cfg->username ? cfg->username : url->user;
  const char *password = cfg->password ? cfg->password : url->password;
  if (!user || !*user)
    return DLOCK_E_OK;
  if (strchr(user, ':'))
    return dlk_fail(msg, DLOCK_E_PROTOCOL, "zookeeper: a user name cannot have a colon");
  if (asprintf(&z->auth, "%s:%s", user, password ? password : "") < 0) {
    z->auth = NULL;
    return dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  }
  return DLOCK_E_OK;
}

enum dlock_err zk_open(struct dlk_client *c, const struct dlk_url *url,
                              const struct dlock_config *cfg, void **self, char *msg) {
  if (!url->n_hosts)
    return dlk_fail(msg, DLOCK_E_PROTOCOL, "zookeeper: no host; zookeeper://host:2181/path");
  struct zk *z = calloc(1, sizeof *z);
  if (!z)
    return dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  z->client = c;
  z->ask_ms = dlk_max(cfg->ttl_ms, FLOOR_MS);
  z->connect_ms = cfg->connect_timeout_ms;
  z->dialect = (enum zk_dialect)cfg->zk_dialect;
  z->hosts = host_list(url);
  enum dlock_err e = z->hosts ? parse_root(z, url->path, msg)
                              : dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
  if (!e)
    e = parse_query(z, url->query, msg);
  if (!e)
    e = parse_auth(z, url, cfg, msg);
  z->slot = zk_slot_take(z);
  if (e) {
    zk_session_close(z);
    return e;
  }
  *self = z;
  return DLOCK_E_OK;
}
