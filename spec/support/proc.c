/* What specs need from the kernel and Lua does not have: processes with a
 * bounded wait, pipes and sockets with deadlines, a clock. Tests only. Calls
 * return nil, message, errno on failure. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <lauxlib.h>
#include <lua.h>

extern char **environ;

/* The runner preloads a sanitizer for the interpreter, not for its children. */
__attribute__((constructor)) static void pr_unpreload(void) {
  if (getenv("DLOCK_PRELOAD")) unsetenv("LD_PRELOAD");
}

static int pr_fail(lua_State *L) {
  int e = errno;
  lua_pushnil(L);
  lua_pushstring(L, strerror(e));
  lua_pushinteger(L, e);
  return 3;
}

static int pr_result(lua_State *L, long r) {
  if (r < 0) return pr_fail(L);
  lua_pushinteger(L, (lua_Integer)r);
  return 1;
}

static int64_t pr_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_BOOTTIME, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int64_t pr_end(lua_State *L, int arg, lua_Number deflt_ms) {
  return pr_now() + (int64_t)(luaL_optnumber(L, arg, deflt_ms) * 1e6);
}

/* Polls until the deadline; 1 ready, 0 not, -1 error. */
static int pr_poll(int fd, short events, int64_t end) {
  for (;;) {
    int64_t left = end - pr_now();
    struct pollfd p = {fd, events, 0};
    int r = poll(&p, 1, left > 0 ? (int)((left + 999999) / 1000000) : 0);
    if (r >= 0 || errno != EINTR) return r;
  }
}

static int l_now(lua_State *L) {
  lua_pushnumber(L, (lua_Number)pr_now() / 1e6);
  return 1;
}

static int l_pause(lua_State *L) {
  int64_t end = pr_end(L, 1, 1);
  while (pr_poll(-1, 0, end) < 0) continue;
  return 0;
}

/* ---- processes ---- */

struct pr_plan {
  char **argv, **env;
  const char *cwd;
  int fd[3];
  bool setsid, tty, orphan;
};

/* The strings stay in the Lua table, which stays on the stack. */
static char **pr_strings(lua_State *L, int table) {
  size_t n = 0;
  for (;; n++) {
    lua_rawgeti(L, table, (int)n + 1);
    bool end = lua_isnil(L, -1);
    lua_pop(L, 1);
    if (end) break;
  }
  char **v = lua_newuserdata(L, (n + 1) * sizeof *v);
  for (size_t i = 0; i < n; i++) {
    lua_rawgeti(L, table, (int)i + 1);
    v[i] = (char *)lua_tostring(L, -1);
    if (!v[i]) luaL_error(L, "item %d must be a string", (int)i + 1);
    lua_pop(L, 1);
  }
  v[n] = NULL;
  return v;
}

static int pr_opt_fd(lua_State *L, const char *name) {
  lua_getfield(L, 1, name);
  int fd = (int)luaL_optinteger(L, -1, -1);
  lua_pop(L, 1);
  return fd;
}

static bool pr_opt_flag(lua_State *L, const char *name) {
  lua_getfield(L, 1, name);
  bool on = lua_toboolean(L, -1);
  lua_pop(L, 1);
  return on;
}

static void pr_child(const struct pr_plan *p, pid_t parent) {
  if (!p->orphan) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
  }
  if (p->setsid || p->tty) setsid();
  if (p->tty) ioctl(p->fd[0], TIOCSCTTY, 0);
  for (int i = 0; i < 3; i++)
    if (p->fd[i] == i) fcntl(i, F_SETFD, 0);
    else if (p->fd[i] >= 0) dup2(p->fd[i], i);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  if (p->cwd && chdir(p->cwd) != 0) _exit(127);
  environ = p->env;
  execvp(p->argv[0], p->argv);
  dprintf(2, "cannot run %s: %s\n", p->argv[0], strerror(errno));
  _exit(127);
}

/* spawn{ "prog", "arg" ..., env = { "NAME=value" ... }, cwd =, stdin =, stdout =,
 * stderr = (descriptors), setsid =, tty = (stdin becomes the controlling
 * terminal), orphan = (may outlive us) } -> pid */
static int l_spawn(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  lua_settop(L, 1);
  struct pr_plan p = {.env = environ};
  p.argv = pr_strings(L, 1);
  if (!p.argv[0]) return luaL_error(L, "spawn: no program");
  lua_getfield(L, 1, "env");
  if (lua_istable(L, -1)) p.env = pr_strings(L, lua_gettop(L));
  lua_getfield(L, 1, "cwd");
  p.cwd = lua_tostring(L, -1);
  p.fd[0] = pr_opt_fd(L, "stdin");
  p.fd[1] = pr_opt_fd(L, "stdout");
  p.fd[2] = pr_opt_fd(L, "stderr");
  p.setsid = pr_opt_flag(L, "setsid");
  p.tty = pr_opt_flag(L, "tty");
  p.orphan = pr_opt_flag(L, "orphan");
  pid_t me = getpid();
  pid_t pid = fork();
  if (pid == 0) pr_child(&p, me);
  return pr_result(L, pid);
}

static int l_fork(lua_State *L) { return pr_result(L, fork()); }

static int l_exit_now(lua_State *L) { _exit((int)luaL_optinteger(L, 1, 0)); }

static int l_kill(lua_State *L) {
  return pr_result(L, kill((pid_t)luaL_checkinteger(L, 1), (int)luaL_checkinteger(L, 2)));
}

/* wait(pid, ms) -> "exited", code | "signaled", signal | "running" */
static int l_wait(lua_State *L) {
  pid_t pid = (pid_t)luaL_checkinteger(L, 1);
  int64_t end = pr_end(L, 2, 0);
  const char *under = getenv("DLOCK_UNDER"); /* valgrind warns of calls that it does not know */
  bool plain = under && strcmp(under, "valgrind") == 0;
  int fd = plain ? -1 : (int)syscall(SYS_pidfd_open, pid, 0);
  int status = 0;
  pid_t r;
  while ((r = waitpid(pid, &status, WNOHANG)) == 0 && pr_now() < end)
    pr_poll(fd, POLLIN, fd >= 0 ? end : pr_now() + 1000000);
  int e = errno;
  if (fd >= 0) close(fd);
  errno = e;
  if (r < 0) return pr_fail(L);
  lua_pushstring(L, r == 0 ? "running" : WIFEXITED(status) ? "exited" : "signaled");
  if (r == 0) return 1;
  lua_pushinteger(L, WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  return 2;
}

static int l_pid(lua_State *L) {
  lua_pushinteger(L, getpid());
  return 1;
}

static int l_subreaper(lua_State *L) {
  return pr_result(L, prctl(PR_SET_CHILD_SUBREAPER, lua_toboolean(L, 1)));
}

static int l_getenv_all(lua_State *L) {
  lua_newtable(L);
  for (int i = 0; environ[i]; i++) {
    lua_pushstring(L, environ[i]);
    lua_rawseti(L, -2, i + 1);
  }
  return 1;
}

/* ---- descriptors ---- */

static int l_pipe(lua_State *L) {
  int fd[2];
  if (pipe2(fd, O_CLOEXEC) != 0) return pr_fail(L);
  lua_pushinteger(L, fd[0]);
  lua_pushinteger(L, fd[1]);
  return 2;
}

/* openpty() -> our end, the terminal */
static int l_openpty(lua_State *L) {
  int ours, theirs;
  if (openpty(&ours, &theirs, NULL, NULL, NULL) != 0) return pr_fail(L);
  fcntl(ours, F_SETFD, FD_CLOEXEC);
  fcntl(theirs, F_SETFD, FD_CLOEXEC);
  lua_pushinteger(L, ours);
  lua_pushinteger(L, theirs);
  return 2;
}

static int l_open(lua_State *L) {
  int flags = O_CLOEXEC;
  switch (luaL_optstring(L, 2, "r")[0]) {
  case 'w': flags |= O_WRONLY | O_CREAT | O_TRUNC; break;
  case 'a': flags |= O_WRONLY | O_CREAT | O_APPEND; break;
  default: flags |= O_RDONLY;
  }
  return pr_result(L, open(luaL_checkstring(L, 1), flags, 0600));
}

static int l_close(lua_State *L) { return pr_result(L, close((int)luaL_checkinteger(L, 1))); }

/* read(fd, ms) -> bytes, "" at the end | nil, "timeout" */
static int l_read(lua_State *L) {
  static char buf[65536];
  int fd = (int)luaL_checkinteger(L, 1);
  int r = pr_poll(fd, POLLIN, pr_end(L, 2, 5000));
  if (r < 0) return pr_fail(L);
  if (r == 0) {
    lua_pushnil(L);
    lua_pushliteral(L, "timeout");
    return 2;
  }
  ssize_t n = read(fd, buf, sizeof buf);
  if (n < 0 && errno == EIO) n = 0; /* a terminal whose other end is gone */
  if (n < 0) return pr_fail(L);
  lua_pushlstring(L, buf, (size_t)n);
  return 1;
}

static int l_write(lua_State *L) {
  int fd = (int)luaL_checkinteger(L, 1);
  size_t n, done = 0;
  const char *s = luaL_checklstring(L, 2, &n);
  while (done < n) {
    ssize_t r = send(fd, s + done, n - done, MSG_NOSIGNAL);
    if (r < 0 && errno == ENOTSOCK) r = write(fd, s + done, n - done);
    if (r < 0 && errno != EINTR) return pr_fail(L);
    if (r > 0) done += (size_t)r;
  }
  return pr_result(L, (long)n);
}

/* connect("/path") or connect(port) */
static int l_connect(lua_State *L) {
  struct sockaddr_un un = {.sun_family = AF_UNIX};
  struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  bool tcp = lua_type(L, 1) == LUA_TNUMBER;
  if (tcp) in.sin_port = htons((uint16_t)lua_tointeger(L, 1));
  else strncpy(un.sun_path, luaL_checkstring(L, 1), sizeof un.sun_path - 1);
  int fd = socket(tcp ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return pr_fail(L);
  const struct sockaddr *to = tcp ? (struct sockaddr *)&in : (struct sockaddr *)&un;
  if (connect(fd, to, tcp ? sizeof in : sizeof un) != 0) {
    int e = errno;
    close(fd);
    errno = e;
    return pr_fail(L);
  }
  return pr_result(L, fd);
}

/* A loopback port that was free just now. */
static int l_free_port(lua_State *L) {
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof a;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  bool ok = fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0 &&
            getsockname(fd, (struct sockaddr *)&a, &len) == 0;
  if (fd >= 0) close(fd);
  return ok ? pr_result(L, ntohs(a.sin_port)) : pr_fail(L);
}

/* ---- files ---- */

static int l_mkdtemp(lua_State *L) {
  const char *tmp = getenv("TMPDIR");
  char path[4096];
  snprintf(path, sizeof path, "%s/dlock-spec-XXXXXX", tmp ? tmp : "/tmp");
  if (!mkdtemp(path)) return pr_fail(L);
  lua_pushstring(L, path);
  return 1;
}

static int l_list(lua_State *L) {
  DIR *d = opendir(luaL_checkstring(L, 1));
  if (!d) return pr_fail(L);
  lua_newtable(L);
  int n = 0;
  for (struct dirent *e; (e = readdir(d));) {
    if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
    if (strncmp(lua_tostring(L, 1), "/proc/self/fd", 13) == 0 && atoi(e->d_name) == dirfd(d))
      continue;
    lua_pushstring(L, e->d_name);
    lua_rawseti(L, -2, ++n);
  }
  closedir(d);
  return 1;
}

static int l_readlink(lua_State *L) {
  char buf[4096];
  ssize_t n = readlink(luaL_checkstring(L, 1), buf, sizeof buf);
  if (n < 0) return pr_fail(L);
  lua_pushlstring(L, buf, (size_t)n);
  return 1;
}

static const luaL_Reg functions[] = {
    {"now", l_now},           {"pause", l_pause},         {"spawn", l_spawn},
    {"fork", l_fork},         {"exit_now", l_exit_now},   {"kill", l_kill},
    {"wait", l_wait},         {"pid", l_pid},             {"subreaper", l_subreaper},
    {"environ", l_getenv_all}, {"pipe", l_pipe},          {"openpty", l_openpty},
    {"open", l_open},         {"close", l_close},         {"read", l_read},
    {"write", l_write},       {"connect", l_connect},     {"free_port", l_free_port},
    {"mkdtemp", l_mkdtemp},   {"list", l_list},           {"readlink", l_readlink},
    {NULL, NULL}};

__attribute__((visibility("default"))) int luaopen_dlkproc(lua_State *L);
int luaopen_dlkproc(lua_State *L) {
  lua_newtable(L);
  for (const luaL_Reg *f = functions; f->name; f++) {
    lua_pushcfunction(L, f->func);
    lua_setfield(L, -2, f->name);
  }
  return 1;
}
