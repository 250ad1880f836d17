/* Error codes: one table gives the enum, the stable code strings and the
 * default texts. Codes are part of the public API and never change meaning;
 * texts are for people and may change. */
#ifndef DLK_ERROR_H
#define DLK_ERROR_H

#include <stdarg.h>
#include <stddef.h>

#define DLOCK_ERRORS(X)                                                        \
  X(OK, "ok", "no error")                                                      \
  X(HELD, "held", "somebody else holds the lock")                              \
  X(TIMEOUT, "timeout", "the wait ran out")                                    \
  X(LOST, "lost", "the lock was lost")                                         \
  X(NOT_HELD, "not_held", "the lock is not held")                              \
  X(UNAVAILABLE, "unavailable", "the backend cannot be reached")               \
  X(INDETERMINATE, "indeterminate", "the request was sent and never answered") \
  X(AUTH, "auth", "the backend refused the credentials")                       \
  X(FOREIGN, "foreign", "the key holds something that is not this kind of lock") \
  X(PROTOCOL, "protocol", "the backend answered nonsense")                     \
  X(UNSUPPORTED, "unsupported", "this backend or build cannot do it")          \
  X(CANCELED, "canceled", "the operation was canceled")                        \
  X(CLOSED, "closed", "the client is closed")                                  \
  X(NOMEM, "nomem", "out of memory")

enum dlock_err {
#define X(id, code, text) DLOCK_E_##id,
  DLOCK_ERRORS(X)
#undef X
      DLOCK_E_COUNT
};

/* Longest message, with its NUL; longer ones are cut. */
#define DLOCK_MSG_MAX 384

const char *dlock_err_code(enum dlock_err e);
const char *dlock_err_text(enum dlock_err e);

/* Fills msg and returns e, so that "return dlk_fail(...)" reads well. */
enum dlock_err dlk_fail(char *msg, enum dlock_err e, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#endif
