/* http PORT PATH CONNECTIONS MS [EVERY_US]: sends GET PATH over that many kept-alive
 * connections for so long, and prints `requests p50_us p99_us failed`.
 *
 * Without EVERY_US each connection sends the next request when it has the answer.
 * With it, requests are due at fixed times, whatever the answers do, and latency
 * counts from the due time: a stall is seen in all the requests that it delayed. */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 1024, MAX_SAMPLES = 2000000 };

struct connection {
  char answer[4096];
  size_t got;
  int64_t due; /* of the request that is out; 0: none is */
};

static struct connection connections[MAX_CONNECTIONS];
static struct pollfd fds[MAX_CONNECTIONS];
static int64_t samples[MAX_SAMPLES];
static size_t n_samples, n_failed;
static char request[512];

static int64_t now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void die(const char *what) {
  perror(what);
  exit(1);
}

static int dial(int port) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
  if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) != 0)
    die("connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  return fd;
}

static void start(int i, int64_t due) {
  connections[i].due = due;
  connections[i].got = 0;
  if (send(fds[i].fd, request, strlen(request), MSG_NOSIGNAL) < 0)
    die("send");
}

/* Whether the whole answer is there; the server sends Content-Length. */
static int complete(struct connection *c) {
  c->answer[c->got] = 0;
  char *end = strstr(c->answer, "\r\n\r\n"), *length = strcasestr(c->answer, "\nContent-Length: ");
  if (!end)
    return 0;
  if (!length || length > end) {
    fprintf(stderr, "no Content-Length in: %s\n", c->answer);
    exit(1);
  }
  return c->got >= (size_t)(end + 4 - c->answer) + strtoul(length + 17, NULL, 10);
}

static void receive(int i) {
  struct connection *c = &connections[i];
  ssize_t n = recv(fds[i].fd, c->answer + c->got, sizeof c->answer - 1 - c->got, 0);
  if (n <= 0)
    die("recv");
  c->got += (size_t)n;
  if (!complete(c))
    return;
  if (strncmp(c->answer, "HTTP/1.1 200", 12))
    n_failed++;
  if (n_samples < MAX_SAMPLES)
    samples[n_samples++] = now_us() - c->due;
  c->due = 0;
}

static int compare(const void *a, const void *b) {
  int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
  return (x > y) - (x < y);
}

/* Requests that are due now go out over the connections that are free. */
static void open_loop(int n, int64_t *next, int64_t every, int64_t now) {
  for (int i = 0; i < n && *next <= now; i++)
    if (!connections[i].due) {
      start(i, *next);
      *next += every;
    }
}

static void closed_loop(int n, int64_t now) {
  for (int i = 0; i < n; i++)
    if (!connections[i].due)
      start(i, now);
}

static int busy(int n) {
  for (int i = 0; i < n; i++)
    if (connections[i].due)
      return 1;
  return 0;
}

int main(int argc, char **argv) {
  if (argc < 5)
    return 64;
  int n = atoi(argv[3]);
  int64_t every = argc > 5 ? atoi(argv[5]) : 0, next = now_us(), end = next + atoi(argv[4]) * (int64_t)1000;
  if (n < 1 || n > MAX_CONNECTIONS)
    return 64;
  snprintf(request, sizeof request, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", argv[2]);
  for (int i = 0; i < n; i++)
    fds[i] = (struct pollfd){.fd = dial(atoi(argv[1])), .events = POLLIN};
  for (int64_t now = next; now < end || busy(n); now = now_us()) {
    if (now < end && every)
      open_loop(n, &next, every, now);
    else if (now < end)
      closed_loop(n, now);
    struct timespec pause = {.tv_nsec = every ? 200000 : 10000000};
    if (ppoll(fds, (nfds_t)n, &pause, NULL) < 0)
      die("ppoll");
    for (int i = 0; i < n; i++)
      if (fds[i].revents)
        receive(i);
  }
  qsort(samples, n_samples, sizeof *samples, compare);
  printf("%zu %lld %lld %zu\n", n_samples, n_samples ? (long long)samples[n_samples / 2] : 0,
         n_samples ? (long long)samples[n_samples * 99 / 100] : 0, n_failed);
  return 0;
}
