/* Keys to paths and back, and the shapes of contenders.
 *
 * The path of a key is "/" and the key, unless it begins with "/" itself; its
 * parts are escaped so that no two keys share a path but those two spellings:
 * %XX for bytes that ZooKeeper refuses, for "%" itself, for "." and "..", for
 * what would look like a contender of the lock above, and "%" alone for an
 * empty part. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "zk.h"

/* ---- the line ---- */

static const char *const markers[] = {"lock-", "__lock__", "__rlock__", "__READ__", "__WRIT__"};

bool zk_contender(const char *name, int32_t *seq) {
  size_t n = strlen(name), digits = 0;
  while (digits < 10 && digits < n && name[n - 1 - digits] >= '0' && name[n - 1 - digits] <= '9')
    digits++;
  if (digits < 10)
    return false;
  size_t end = n - 10;
  int64_t v = strtoll(name + end, NULL, 10);
  if (v > INT32_MAX + (int64_t)1)
    return false;
  for (int sign = 0; sign < 2; sign++) {
    if (sign && (!end || name[--end] != '-'))
      return false;
    for (size_t i = 0; i < sizeof markers / sizeof *markers; i++) {
      size_t m = strlen(markers[i]);
      if (end >= m && !memcmp(name + end - m, markers[i], m) && v <= INT32_MAX + (int64_t)sign) {
        *seq = (int32_t)(sign ? -v : v);
        return true;
      }
    }
  }
  return false;
}

bool zk_before(const char *a, int32_t seq_a, const char *b, int32_t seq_b) {
  if (seq_a == seq_b)
    return strcmp(a, b) < 0;
  return (int32_t)((uint32_t)seq_a - (uint32_t)seq_b) < 0;
}

/* ---- escaping ---- */

/* The length of the UTF-8 sequence at s if ZooKeeper takes its character, or 0. */
static size_t accepted(const unsigned char *s, size_t left) {
  if (s[0] < 0x20 || s[0] == 0x7f)
    return 0;
  if (s[0] < 0x80)
    return 1;
  size_t n = s[0] >= 0xc2 && s[0] < 0xe0 ? 2 : s[0] >= 0xe0 && s[0] < 0xf0 ? 3 : 0;
  if (!n || n > left || (s[1] & 0xc0) != 0x80 || (n == 3 && (s[2] & 0xc0) != 0x80))
    return 0;
  unsigned c = n == 2 ? (s[0] & 0x1fu) << 6 | (s[1] & 0x3fu)
                      : (s[0] & 0x0fu) << 12 | (s[1] & 0x3fu) << 6 | (s[2] & 0x3fu);
  bool refused = c < 0xa0 || (n == 3 && c < 0x800) || (c >= 0xd800 && c <= 0xf8ff) || c >= 0xfff0;
  return refused ? 0 : n;
}

static char *put_escaped(char *to, unsigned char c) {
  static const char hex[] = "0123456789ABCDEF";
  *to++ = '%';
  *to++ = hex[c >> 4];
  *to++ = hex[c & 15];
  return to;
}

static char *put_part(char *to, const char *part, size_t len, bool top) {
  char *start = to;
  int32_t seq;
  if (!len) {
    *to++ = '%';
    return to;
  }
  bool dots = part[0] == '.' && (len == 1 || (len == 2 && part[1] == '.'));
  bool reserved = top && len == 9 && !memcmp(part, "zookeeper", 9);
  for (size_t i = 0; i < len;) {
    size_t n = dots || (reserved && !i) || part[i] == '%'
                   ? 0
                   : accepted((const unsigned char *)part + i, len - i);
    if (n) {
      memcpy(to, part + i, n);
      to += n;
    } else {
      to = put_escaped(to, (unsigned char)part[i]);
    }
    i += n ? n : 1;
  }
  *to = 0;
  if (zk_contender(start, &seq))
    to = put_escaped(to - 1, (unsigned char)to[-1]);
  return to;
}

char *zk_dir(const char *root, const char *key, size_t len) {
  char *path = malloc(strlen(root) + 3 * len + 8);
  if (!path)
    return NULL;
  char *to = stpcpy(path, root);
  bool top = !*root;
  if (len && *key == '/') {
    key++;
    len--;
  }
  for (;;) {
    const char *slash = memchr(key, '/', len);
    size_t n = slash ? (size_t)(slash - key) : len;
    *to++ = '/';
    to = put_part(to, key, n, top);
    top = false;
    if (!slash)
      break;
    key = slash + 1;
    len -= n + 1;
  }
  *to = 0;
  return path;
}

static int unhex(char c) {
  if (c >= '0' && c <= '9')
    return c - '0';
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

char *zk_unescape(char *to, const char *part) {
  if (!strcmp(part, "%"))
    return to;
  while (*part) {
    int hi = part[0] == '%' ? unhex(part[1]) : -1;
    int lo = hi >= 0 ? unhex(part[2]) : -1;
    if (lo >= 0) {
      *to++ = (char)(hi * 16 + lo);
      part += 3;
    } else {
      *to++ = *part++;
    }
  }
  return to;
}

char *zk_join(const char *dir, const char *name) {
  char *path = NULL;
  if (asprintf(&path, "%s/%s", dir, name) < 0)
    return NULL;
  return path;
}

/* ---- lists of names ---- */

void zk_names_free(struct zk_names *names) {
  for (size_t i = 0; i < names->n; i++)
    free(names->v[i]);
  free(names->v);
  *names = (struct zk_names){0};
}

bool zk_names_copy(struct zk_names *to, const struct String_vector *from) {
  size_t n = from && from->count > 0 ? (size_t)from->count : 0;
  *to = (struct zk_names){.v = calloc(n + 1, sizeof *to->v)};
  if (!to->v)
    return false;
  for (size_t i = 0; i < n; i++) {
    to->v[i] = strdup(from->data[i]);
    if (!to->v[i]) {
      zk_names_free(to);
      return false;
    }
    to->n++;
  }
  return true;
}

static int by_place(const void *a, const void *b) {
  const char *x = *(char *const *)a, *y = *(char *const *)b;
  int32_t sx = 0, sy = 0;
  zk_contender(x, &sx);
  zk_contender(y, &sy);
  return zk_before(x, sx, y, sy) ? -1 : zk_before(y, sy, x, sx);
}

void zk_names_line(struct zk_names *names) {
  size_t n = 0;
  int32_t seq;
  for (size_t i = 0; i < names->n; i++)
    if (zk_contender(names->v[i], &seq))
      names->v[n++] = names->v[i];
    else
      free(names->v[i]);
  names->n = n;
  if (n > 1)
    qsort(names->v, n, sizeof *names->v, by_place);
}
