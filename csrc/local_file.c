#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "local_file.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { LF_ESCAPED_MAX = 200 }; /* longer ones are hashed; file systems allow 255 */
#define LF_HASHED "%sha256-"

/* ---- kernel locks ---- */

/* Modes other than exclusive are ranges of the same file: see design, Local. */
static int lf_setlk(int fd, short type, off_t start, off_t len) {
  struct flock l = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = len};
  if (!fcntl(fd, F_OFD_SETLK, &l)) return 0;
  return errno == EACCES ? EAGAIN : errno;
}

int dlk_file_lock(int fd) { return lf_setlk(fd, F_WRLCK, 0, 0); }
void dlk_file_unlock(int fd) { lf_setlk(fd, F_UNLCK, 0, 0); }

int dlk_file_is_locked(int fd) {
  struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
  if (fcntl(fd, F_OFD_GETLK, &l)) return -1;
  return l.l_type != F_UNLCK;
}

static const struct {
  unsigned long magic;
  const char *name;
} lf_foreign[] = {
    {0x6969, "NFS"},          {0x517B, "SMB"},      {0xFF534D42, "CIFS"},   {0xFE534D42, "SMB2"},
    {0x65735546, "FUSE"},     {0x01021997, "9p"},   {0x00C36400, "Ceph"},   {0x5346414F, "AFS"},
    {0x6B414653, "AFS"},      {0x73757245, "Coda"}, {0x0BD00BD0, "Lustre"}, {0x47504653, "GPFS"},
    {0x7461636F, "OCFS2"},    {0x01161970, "GFS2"}, {0x19830326, "BeeGFS"}, {0xAAD7AAEA, "PanFS"},
    {0x20030528, "PVFS2"},    {0x564C, "NCP"},      {0x786F4256, "vboxsf"}, {0xBACBACBC, "vmhgfs"},
    {0xBEEFDEAD, "StorNext"}, {0x414A, "WekaFS"},
};

const char *dlk_file_foreign_fs(int fd) {
  struct statfs fs;
  if (fstatfs(fd, &fs)) return NULL;
  for (size_t i = 0; i < sizeof lf_foreign / sizeof *lf_foreign; i++)
    if (((unsigned long)fs.f_type & 0xFFFFFFFF) == lf_foreign[i].magic) return lf_foreign[i].name;
  return NULL;
}

static bool lf_plain(unsigned char c, size_t at) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '-' || (c == '.' && at > 0);
}

/* Length of the escaped key, or something over LF_ESCAPED_MAX. */
static size_t lf_escape(const char *key, size_t len, char out[DLK_FILE_NAME_MAX + 1]) {
  static const char hex[] = "0123456789ABCDEF";
  size_t n = 0;
  for (size_t i = 0; i < len && n <= LF_ESCAPED_MAX; i++) {
    unsigned char c = (unsigned char)key[i];
    bool plain = lf_plain(c, i);
    out[n++] = plain ? (char)c : '%';
    if (!plain) {
      out[n++] = hex[c >> 4];
      out[n++] = hex[c & 15];
    }
  }
  out[n] = 0;
  return n;
}

/* A hash is fine here: two keys with one name would share a lock, which excludes
 * more, not less; and the record holds the whole key, so it would show (`foreign`).
 * "%s" never begins an escape, so neither these names nor our own files can equal an
 * escaped key. */
static bool lf_hash(const char *key, size_t len, char *out) {
  unsigned char md[EVP_MAX_MD_SIZE];
  unsigned n = 0;
  OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, NULL);
  if (!EVP_Digest(key, len, md, &n, EVP_sha256(), NULL)) return false;
  out = stpcpy(out, LF_HASHED);
  for (unsigned i = 0; i < n; i++) out += sprintf(out, "%02x", md[i]);
  return true;
}

/* The file name of a key; "%" alone stands for the empty one. */
bool dlk_file_name(const char *key, size_t len, char out[DLK_FILE_NAME_MAX + 1]) {
  if (lf_escape(key, len, out) > LF_ESCAPED_MAX) return lf_hash(key, len, out);
  if (len == 0) strcpy(out, "%");
  return true;
}

/* ---- the record ---- */

static bool lf_digits(const char **p, size_t n, uint64_t *out) {
  uint64_t v = 0;
  for (size_t i = 0; i < n; i++) {
    unsigned d = (unsigned)((*p)[i] - '0');
    if (d > 9 || v > (UINT64_MAX - d) / 10) return false;
    v = v * 10 + d;
  }
  *p += n + 1;
  *out = v;
  return (*p)[-1] == ' ';
}

static bool lf_parse(struct dlk_record *r, size_t n) {
  uint64_t owner_len, key_len;
  const char *p = r->buf + 7;
  r->empty = n == 0;
  if (r->empty) return true;
  if (n < DLK_FILE_HEAD + DLK_FILE_OWNER + 1 || memcmp(r->buf, "dlock1 ", 7) ||
      !lf_digits(&p, 20, &r->token) || !lf_digits(&p, 20, &r->taken) ||
      !lf_digits(&p, 3, &owner_len) || !lf_digits(&p, 4, &key_len))
    return false;
  if (r->token > DLK_FILE_TOKEN_MAX || owner_len > DLK_FILE_OWNER || key_len > DLOCK_KEY_MAX)
    return false;
  r->owner = p;
  r->owner_len = (size_t)owner_len;
  for (size_t i = r->owner_len; i <= DLK_FILE_OWNER; i++)
    if (p[i] != ' ') return false;
  r->key = p + DLK_FILE_OWNER + 1;
  r->key_len = (size_t)key_len;
  size_t rest = n - (size_t)(r->key - r->buf);
  r->key_there = rest < r->key_len ? rest : r->key_len;
  return rest <= r->key_len || (rest == r->key_len + 1 && r->key[r->key_len] == '\n');
}

enum dlock_err dlk_record_read(int fd, struct dlk_record *r) {
  ssize_t n = pread(fd, r->buf, sizeof r->buf, 0);
  r->token = r->taken = 0;
  r->owner = r->key = r->buf;
  r->owner_len = r->key_len = r->key_there = 0;
  if (n < 0) return DLOCK_E_UNAVAILABLE;
  return lf_parse(r, (size_t)n) ? DLOCK_E_OK : DLOCK_E_FOREIGN;
}

bool dlk_record_is_key(const struct dlk_record *r, const char *key, size_t len) {
  return r->empty || (r->key_len == len && !memcmp(r->key, key, r->key_there));
}

bool dlk_record_is_file(const struct dlk_record *r, const char *file) {
  char name[DLK_FILE_NAME_MAX + 1];
  return !r->empty && r->key_there == r->key_len && dlk_file_name(r->key, r->key_len, name) &&
         !strcmp(name, file);
}

int dlk_record_write(int fd, const struct dlk_record *r) {
  char buf[DLK_FILE_MAX + 1];
  int head =
      snprintf(buf, sizeof buf, "dlock1 %020llu %020llu %03zu %04zu ", (unsigned long long)r->token,
               (unsigned long long)dlk_wall_100us(), r->owner_len, r->key_len);
  if (head != DLK_FILE_HEAD || r->owner_len > DLK_FILE_OWNER || r->key_len > DLOCK_KEY_MAX)
    return EOVERFLOW;
  char *p = buf + head;
  memset(p, ' ', DLK_FILE_OWNER + 1);
  memcpy(p, r->owner, r->owner_len);
  p += DLK_FILE_OWNER + 1;
  memcpy(p, r->key, r->key_len);
  p += r->key_len;
  *p++ = '\n';
  ssize_t n = p - buf, w;
  do w = pwrite(fd, buf, (size_t)n, 0);
  while (w < 0 && errno == EINTR);
  if (w < 0) return errno;
  return w == n ? 0 : ENOSPC; /* cut short: a full disk, or a quota */
}
