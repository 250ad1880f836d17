#include "error.h"

#include <stdio.h>

static const struct {
  const char *code, *text;
} errors[DLOCK_E_COUNT] = {
#define X(id, code, text) [DLOCK_E_##id] = {code, text},
    DLOCK_ERRORS(X)
#undef X
};

const char *dlock_err_code(enum dlock_err e) {
  return (unsigned)e < DLOCK_E_COUNT ? errors[e].code : "protocol";
}

const char *dlock_err_text(enum dlock_err e) {
  return (unsigned)e < DLOCK_E_COUNT ? errors[e].text : "unknown error";
}

enum dlock_err dlk_fail(char *msg, enum dlock_err e, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(msg, DLOCK_MSG_MAX, fmt, ap);
  va_end(ap);
  return e;
}
