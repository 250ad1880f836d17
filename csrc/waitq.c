#include <stdlib.h>
#include <string.h>

#include "lock.h"

/* FNV-1a, 64 bit: spreads names over buckets, nothing more depends on it. */
static uint64_t hash(const char *s, size_t n) {
  uint64_t h = 14695981039346656037u;
  for (size_t i = 0; i < n; i++)
    h = (h ^ (unsigned char)s[i]) * 1099511628211u;
  return h;
}

static struct dlk_queue **slot(const struct dlk_waitq *w, const char *name, size_t len) {
  struct dlk_queue **p = &w->bucket[hash(name, len) % w->n_buckets];
  while (*p && ((*p)->len != len || memcmp((*p)->name, name, len)))
    p = &(*p)->next;
  return p;
}

struct dlk_queue *dlk_waitq_find(const struct dlk_waitq *w, const char *name, size_t len) {
  return w->n_buckets ? *slot(w, name, len) : NULL;
}

static bool grow(struct dlk_waitq *w) {
  size_t n = w->n_buckets ? w->n_buckets * 2 : 16;
  struct dlk_queue **v = calloc(n, sizeof *v);
  if (!v)
    return w->n_buckets > 0; /* fuller buckets are slower, not wrong */
  for (size_t i = 0; i < w->n_buckets; i++)
    while (w->bucket[i]) {
      struct dlk_queue *q = w->bucket[i];
      struct dlk_queue **to = &v[hash(q->name, q->len) % n];
      w->bucket[i] = q->next;
      q->next = *to;
      *to = q;
    }
  free(w->bucket);
  w->bucket = v;
  w->n_buckets = n;
  return true;
}

struct dlk_queue *dlk_waitq_get(struct dlk_waitq *w, const char *name, size_t len) {
  if (w->n >= w->n_buckets && !grow(w))
    return NULL;
  struct dlk_queue **p = slot(w, name, len);
  if (*p)
    return *p;
  struct dlk_queue *q = calloc(1, sizeof *q);
  if (!q || !(q->name = malloc(len + 1))) {
    free(q);
    return NULL;
  }
  memcpy(q->name, name, len);
  q->name[len] = 0;
  q->len = len;
  q->last = &q->first;
  w->n++;
  return *p = q;
}

void dlk_waitq_push(struct dlk_queue *q, struct dlk_lock *l) {
  l->q = q;
  l->q_next = NULL;
  l->q_link = q->last;
  *q->last = l;
  q->last = &l->q_next;
}

void dlk_waitq_remove(struct dlk_queue *q, struct dlk_lock *l) {
  if (!l->q_link)
    return;
  *l->q_link = l->q_next;
  if (l->q_next)
    l->q_next->q_link = l->q_link;
  else
    q->last = l->q_link;
  l->q_link = NULL;
}

void dlk_waitq_tidy(struct dlk_waitq *w, struct dlk_queue *q) {
  if (q->holder || q->first)
    return;
  struct dlk_queue **p = slot(w, q->name, q->len);
  *p = q->next;
  w->n--;
  free(q->name);
  free(q);
}

void dlk_waitq_destroy(struct dlk_waitq *w) {
  for (size_t i = 0; i < w->n_buckets; i++)
    while (w->bucket[i]) {
      struct dlk_queue *q = w->bucket[i];
      w->bucket[i] = q->next;
      free(q->name);
      free(q);
    }
  free(w->bucket);
  memset(w, 0, sizeof *w);
}
