/* Backend URLs, cut into their parts. What a part means (a database number, a
 * directory) is for the backend to say; here only the shape is checked.
 *
 * A user who forgot to escape a password gets an error about some other part,
 * so no message repeats any of it: places are named by number. */
#include "url.h"

#include <stdlib.h>
#include <string.h>

/* A stretch of the input that is not copied yet. */
struct span {
  const char *p;
  size_t n;
};

static struct span ur_before(struct span s, const char *stop) {
  return (struct span){s.p, (size_t)(stop - s.p)};
}

static struct span ur_after(struct span s, const char *sep) {
  return (struct span){sep + 1, s.n - (size_t)(sep - s.p) - 1};
}

/* The first of the bytes in `set`, or the end. */
static const char *ur_find(struct span s, const char *set) {
  size_t i = 0;
  while (i < s.n && !strchr(set, s.p[i])) i++;
  return s.p + i;
}

static bool ur_is_alpha(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }
static bool ur_is_digit(char c) { return c >= '0' && c <= '9'; }

static int ur_hex(char c) {
  if (ur_is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

static enum dlock_err ur_nomem(char *msg) {
  return dlk_fail(msg, DLOCK_E_NOMEM, "out of memory");
}

static enum dlock_err ur_copy(struct span s, char **out, char *msg) {
  *out = strndup(s.p, s.n);
  return *out ? DLOCK_E_OK : ur_nomem(msg);
}

/* Copies with percent-escapes undone. A zero byte would cut the C string short
 * (and make two different URLs equal), so it is refused. */
static enum dlock_err ur_unescape(struct span s, const char *what, char **out, char *msg) {
  char *to = calloc(1, s.n + 1); /* terminated wherever we stop: a password is wiped by strlen */
  if (!to) return ur_nomem(msg);
  *out = to;
  for (size_t i = 0; i < s.n; i++) {
    if (s.p[i] != '%') {
      *to++ = s.p[i];
      continue;
    }
    bool whole = i + 2 < s.n;
    int hi = whole ? ur_hex(s.p[i + 1]) : -1;
    int lo = whole ? ur_hex(s.p[i + 2]) : -1;
    if (hi < 0 || lo < 0)
      return dlk_fail(msg, DLOCK_E_PROTOCOL,
                      "a %% in the %s must be followed by two hex digits", what);
    if (hi == 0 && lo == 0)
      return dlk_fail(msg, DLOCK_E_PROTOCOL, "%%00 is not allowed in the %s", what);
    *to++ = (char)(hi * 16 + lo);
    i += 2;
  }
  return DLOCK_E_OK;
}

static enum dlock_err ur_scheme(struct span *rest, struct dlk_url *u, char *msg) {
  const char *colon = ur_find(*rest, ":/?#@[");
  struct span s = ur_before(*rest, colon);
  bool ok = s.n < rest->n && *colon == ':' && s.n > 0 && ur_is_alpha(s.p[0]);
  for (size_t i = 0; ok && i < s.n; i++)
    ok = ur_is_alpha(s.p[i]) || ur_is_digit(s.p[i]) || strchr("+-.", s.p[i]);
  if (!ok)
    return dlk_fail(msg, DLOCK_E_PROTOCOL,
                    "must begin with a scheme, as in local: or redis://host:6379");
  *rest = ur_after(*rest, colon);
  enum dlock_err e = ur_copy(s, &u->scheme, msg);
  for (char *c = u->scheme; !e && *c; c++)
    if (*c >= 'A' && *c <= 'Z') *c = (char)(*c - 'A' + 'a');
  return e;
}

/* user[:password]@ up to the last "@", so that an unescaped one in a password
 * still works. An empty user (":password@") counts as not given. */
static enum dlock_err ur_userinfo(struct span *authority, struct dlk_url *u, char *msg) {
  const char *at = memrchr(authority->p, '@', authority->n);
  if (!at) return DLOCK_E_OK;
  struct span info = ur_before(*authority, at);
  *authority = ur_after(*authority, at);
  const char *colon = ur_find(info, ":");
  struct span user = ur_before(info, colon);
  enum dlock_err e = DLOCK_E_OK;
  if (user.n) e = ur_unescape(user, "user", &u->user, msg);
  if (!e && user.n < info.n) e = ur_unescape(ur_after(info, colon), "password", &u->password, msg);
  return e;
}

static enum dlock_err ur_port(struct span s, size_t nth, int *port, char *msg) {
  int v = 0;
  bool ok = s.n > 0 && s.n <= 5;
  for (size_t i = 0; ok && i < s.n; i++) {
    ok = ur_is_digit(s.p[i]);
    v = v * 10 + (s.p[i] - '0');
  }
  if (!ok || v < 1 || v > 65535)
    return dlk_fail(msg, DLOCK_E_PROTOCOL,
                    "the port of host %zu must be a number in 1 .. 65535 "
                    "(in a password write / as %%2F, ? as %%3F)", nth);
  *port = v;
  return DLOCK_E_OK;
}

static bool ur_name_ok(struct span s, const char *more) {
  for (size_t i = 0; i < s.n; i++)
    if (!ur_is_alpha(s.p[i]) && !ur_is_digit(s.p[i]) && !strchr(more, s.p[i])) return false;
  return s.n > 0;
}

/* host, host:port, [v6] or [v6]:port */
static enum dlock_err ur_host(struct span s, size_t nth, struct dlk_host *h, char *msg) {
  struct span name, tail;
  bool ok;
  if (s.n && s.p[0] == '[') {
    const char *end = ur_find(s, "]");
    ok = end < s.p + s.n;
    name = ok ? (struct span){s.p + 1, (size_t)(end - s.p) - 1} : s;
    tail = ok ? ur_after(s, end) : s;
    ok = ok && ur_name_ok(name, ":.%-_") && (!tail.n || tail.p[0] == ':');
  } else {
    const char *colon = ur_find(s, ":");
    name = ur_before(s, colon);
    tail = (struct span){colon, s.n - name.n};
    ok = ur_name_ok(name, "-._");
  }
  if (!ok)
    return dlk_fail(msg, DLOCK_E_PROTOCOL,
                    "host %zu is empty or has a character that host names cannot have "
                    "(in a user or password write it as %%XX)", nth);
  enum dlock_err e = ur_copy(name, &h->name, msg);
  if (!e && tail.n) e = ur_port(ur_after(tail, tail.p), nth, &h->port, msg);
  return e;
}

static enum dlock_err ur_hosts(struct span list, struct dlk_url *u, char *msg) {
  while (list.n || u->n_hosts) {
    if (u->n_hosts == DLK_URL_HOSTS)
      return dlk_fail(msg, DLOCK_E_PROTOCOL, "more than %d hosts", DLK_URL_HOSTS);
    const char *comma = ur_find(list, ",");
    struct span one = ur_before(list, comma);
    size_t nth = ++u->n_hosts;
    enum dlock_err e = ur_host(one, nth, &u->hosts[nth - 1], msg);
    if (e || one.n == list.n) return e;
    list = ur_after(list, comma);
  }
  return DLOCK_E_OK;
}

static enum dlock_err ur_authority(struct span *rest, struct dlk_url *u, char *msg) {
  if (rest->n < 2 || memcmp(rest->p, "//", 2) != 0) return DLOCK_E_OK;
  u->authority = true;
  struct span s = {rest->p + 2, rest->n - 2};
  struct span authority = ur_before(s, ur_find(s, "/?"));
  *rest = (struct span){authority.p + authority.n, s.n - authority.n};
  enum dlock_err e = ur_userinfo(&authority, u, msg);
  return e ? e : ur_hosts(authority, u, msg);
}

static enum dlock_err ur_path_and_query(struct span rest, struct dlk_url *u, char *msg) {
  const char *mark = ur_find(rest, "?");
  struct span path = ur_before(rest, mark);
  if (path.n && path.p[0] != '/')
    return dlk_fail(msg, DLOCK_E_PROTOCOL,
                    "after the scheme comes //, a path that begins with /, or nothing");
  enum dlock_err e = ur_unescape(path, "path", &u->path, msg);
  if (!e && path.n < rest.n) e = ur_copy(ur_after(rest, mark), &u->query, msg);
  return e;
}

static enum dlock_err ur_parts(struct span s, struct dlk_url *u, char *msg) {
  for (size_t i = 0; i < s.n; i++)
    if ((unsigned char)s.p[i] < 0x20 || s.p[i] == 0x7f)
      return dlk_fail(msg, DLOCK_E_PROTOCOL, "has a control character at byte %zu", i + 1);
  enum dlock_err e = ur_scheme(&s, u, msg);
  if (!e) e = ur_authority(&s, u, msg);
  if (!e) e = ur_path_and_query(s, u, msg);
  return e;
}

enum dlock_err dlk_url_parse(const char *s, struct dlk_url *out, char *msg) {
  *out = (struct dlk_url){0};
  enum dlock_err e = ur_parts((struct span){s, strlen(s)}, out, msg);
  if (e) dlk_url_free(out);
  return e;
}

void dlk_url_free(struct dlk_url *u) {
  if (u->password) explicit_bzero(u->password, strlen(u->password));
  for (size_t i = 0; i < u->n_hosts; i++) free(u->hosts[i].name);
  free(u->scheme);
  free(u->user);
  free(u->password);
  free(u->path);
  free(u->query);
  *u = (struct dlk_url){0};
}
