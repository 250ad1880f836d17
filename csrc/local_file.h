/* What a lock file of the local backend is: its name, its record, the kernel's
 * lock on it. No policy: who may open, wait, sweep or replace one is local.c's. */
#ifndef DLK_LOCAL_FILE_H
#define DLK_LOCAL_FILE_H

#include "backend.h"

/* ---- kernel locks (open file descriptions) ---- */

int dlk_file_lock(int fd); /* exclusive, at once: 0, EAGAIN or another errno */
void dlk_file_unlock(int fd);
int dlk_file_is_locked(int fd); /* 1 by somebody, 0 free, -1 and errno; read-only will do */
/* The name of a file system that is not of this machine, or NULL. */
const char *dlk_file_foreign_fs(int fd);

/* ---- names ---- */

enum { DLK_FILE_NAME_MAX = 255 };

/* Names of our own; no key has a name that begins like these. */
#define DLK_FILE_BROKEN "%sbreak-"
#define DLK_FILE_SWEPT "%swept"

/* The file name of a key; false: it could not be hashed (memory). */
bool dlk_file_name(const char *key, size_t len, char out[DLK_FILE_NAME_MAX + 1]);

/* ---- the record ----
 * "dlock1 " token(20) " " taken(20, wall clock in 100 us) " " owner length(3) " "
 * key length(4) " " owner, padded with spaces to DLK_FILE_OWNER " " key "\n"
 * Every field of one key's file has a fixed place, so a newer record covers an
 * older one exactly, and one write that was cut (disk full, kill -9 between two
 * pages) leaves a whole counter behind. */

enum {
  DLK_FILE_HEAD = 7 + 21 + 21 + 4 + 5,
  DLK_FILE_OWNER = 7 + DLK_OWNER_HEX + 1 + DLOCK_LABEL_MAX
};
enum { DLK_FILE_MAX = DLK_FILE_HEAD + DLK_FILE_OWNER + 1 + DLOCK_KEY_MAX + 1 };

/* Tokens keep 14 digits: LuaJIT prints no more. */
#define DLK_FILE_TOKEN_MAX UINT64_C(99999999999999)

struct dlk_record {
  bool empty; /* a new file: counter 0 */
  uint64_t token, taken;
  const char *owner, *key;
  size_t owner_len, key_len;
  size_t key_there; /* bytes of the key that are really in the file */
  char buf[DLK_FILE_MAX + 1];
};

/* OK, FOREIGN when the content is no record of ours, UNAVAILABLE and errno. */
enum dlock_err dlk_record_read(int fd, struct dlk_record *r);
bool dlk_record_is_key(const struct dlk_record *r, const char *key, size_t len);
/* Whole, of a key whose file has this name. */
bool dlk_record_is_file(const struct dlk_record *r, const char *file);
/* Stamped with the time; 0 or errno. */
int dlk_record_write(int fd, const struct dlk_record *r);

#endif
