/// What the command `dlock run` needs of the system: the keeper, signals, poll.
// Not a public interface.
// @module dlock.core.run
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"
#include "lua_dlock.h"
#include "run.h"

#define MT_KEEPER "dlock.keeper"

/* Rounded down: a lease that ends later than it does would be a broken promise. */
static int64_t check_ms(lua_State *L, int at) {
  double ms = luaL_checknumber(L, at) * 1000;
  if (!(ms > 0)) return 0;
  return ms >= 9e15 ? DLK_FOREVER : (int64_t)floor(ms);
}

static int fail(lua_State *L, int err) {
  lua_pushnil(L);
  lua_pushstring(L, strerror(err));
  lua_pushinteger(L, err);
  return 3;
}

/* ---- class dlock.keeper ---- */

static struct dlk_keeper *keeper_check(lua_State *L) {
  struct dlk_keeper *k = luaL_checkudata(L, 1, MT_KEEPER);
  luaL_argcheck(L, k->fd >= 0, 1, "the keeper is closed");
  return k;
}

/*** Fork the keeper. Before anything of ours has a socket or a thread.
@function keeper
@tparam table argv the command and its arguments
@treturn[1] userdata keeper
@treturn[2] nil
@treturn[2] string message */
static int run_lua_keeper(lua_State *L) {
  luaL_checktype(L, 1, LUA_TTABLE);
  int n = 0;
  for (;; n++) {
    lua_rawgeti(L, 1, n + 1);
    if (lua_isnil(L, -1)) break;
    luaL_argcheck(L, lua_type(L, -1) == LUA_TSTRING, 1, "arguments must be strings");
    lua_pop(L, 1);
  }
  luaL_argcheck(L, n > 0, 1, "no command");
  struct dlk_keeper *k = lua_newuserdatauv(L, sizeof *k, 0);
  *k = (struct dlk_keeper){.pid = -1, .fd = -1};
  luaL_setmetatable(L, MT_KEEPER);
  /* The strings stay alive in the table, and in the keeper's copy of it. */
  char **argv = lua_newuserdatauv(L, sizeof *argv * ((size_t)n + 1), 0);
  for (int i = 0; i < n; i++) {
    lua_rawgeti(L, 1, i + 1);
    argv[i] = (char *)(uintptr_t)lua_tostring(L, -1);
    lua_pop(L, 1);
  }
  argv[n] = NULL;
  int err = dlk_keeper_fork(argv, k);
  if (err) return fail(L, err);
  lua_pop(L, 1);
  return 1;
}

static int sent(lua_State *L, int err) {
  if (err) return fail(L, err);
  lua_pushboolean(L, 1);
  return 1;
}

/*** @function keeper:start
@tparam number until end of the lease on `now()`, seconds; `math.huge`: none
@tparam number grace seconds between SIGTERM and SIGKILL
@tparam number margin seconds before `until` by which all must be gone
@tparam string env assignments `NAME=value`, each with a NUL behind it
@tparam[opt] number fd the kernel lock's descriptor; the caller still closes its own */
static int keeper_lua_start(lua_State *L) {
  struct dlk_keeper *k = keeper_check(L);
  struct dlk_run_msg m = {.what = DLK_RUN_START};
  m.at = check_ms(L, 2);
  m.grace_ms = check_ms(L, 3);
  m.margin_ms = check_ms(L, 4);
  size_t len;
  const char *env = luaL_checklstring(L, 5, &len);
  int fd = (int)luaL_optinteger(L, 6, -1);
  return sent(L, dlk_keeper_send(k, &m, env, len, fd));
}

/*** @function keeper:alive
@tparam number until as in start */
static int keeper_lua_alive(lua_State *L) {
  struct dlk_run_msg m = {.what = DLK_RUN_ALIVE, .at = check_ms(L, 2)};
  return sent(L, dlk_keeper_send(keeper_check(L), &m, NULL, 0, -1));
}

/*** End the command and all that it started.
@function keeper:kill
@tparam number grace seconds between SIGTERM, which goes out now, and SIGKILL */
static int keeper_lua_kill(lua_State *L) {
  struct dlk_run_msg m = {.what = DLK_RUN_KILL, .grace_ms = check_ms(L, 2)};
  return sent(L, dlk_keeper_send(keeper_check(L), &m, NULL, 0, -1));
}

/*** Pass a signal on to the command.
@function keeper:signal
@tparam number n */
static int keeper_lua_signal(lua_State *L) {
  struct dlk_run_msg m = {.what = DLK_RUN_SIGNAL, .n = (int32_t)luaL_checkinteger(L, 2)};
  return sent(L, dlk_keeper_send(keeper_check(L), &m, NULL, 0, -1));
}

static const char *const whats[] = {[DLK_RUN_STARTED] = "started", [DLK_RUN_FAILED] = "failed",
                                    [DLK_RUN_STOPPED] = "stopped",
                                    [DLK_RUN_CONTINUED] = "continued",
                                    [DLK_RUN_EXITED] = "exited",   [DLK_RUN_DONE] = "done"};
static const char *const whys[] = {[DLK_RUN_NOT] = "itself",        [DLK_RUN_LEFT] = "left",
                                   [DLK_RUN_ASKED] = "asked",       [DLK_RUN_DEADLINE] = "deadline",
                                   [DLK_RUN_ORPHAN] = "orphan"};

/*** The next message of the keeper.
@function keeper:receive
@treturn ?string nil: none yet; `started`, pid; `failed`, errno, text; `stopped`, signal;
  `continued`; `exited` and `done`, exit status or nil, signal or nil, why; `gone` */
static int keeper_lua_receive(lua_State *L) {
  struct dlk_run_msg m;
  int got = dlk_keeper_recv(keeper_check(L), &m);
  if (got == 0) return 0;
  bool known = got > 0 && m.what < sizeof whats / sizeof *whats && whats[m.what];
  lua_pushstring(L, known ? whats[m.what] : "gone");
  if (!known) return 1;
  if (m.what != DLK_RUN_EXITED && m.what != DLK_RUN_DONE) {
    lua_pushinteger(L, m.n);
    lua_pushstring(L, m.what == DLK_RUN_FAILED ? strerror(m.n) : NULL);
    return 3;
  }
  lua_pushnil(L);
  lua_pushnil(L);
  if (WIFSIGNALED(m.n))
    lua_pushinteger(L, WTERMSIG(m.n));
  else
    lua_pushinteger(L, WEXITSTATUS(m.n));
  lua_replace(L, WIFSIGNALED(m.n) ? -2 : -3);
  lua_pushstring(L, whys[m.why < sizeof whys / sizeof *whys ? m.why : 0]);
  return 4;
}

/*** @function keeper:fd
@treturn number readable when `receive` has something */
static int keeper_lua_fd(lua_State *L) {
  lua_pushinteger(L, keeper_check(L)->fd);
  return 1;
}

/*** Close and wait until the keeper is gone; a command that still runs is ended.
@function keeper:close
@tparam[opt=false] boolean kill by SIGKILL to the keeper, which answers no more */
static int keeper_lua_close(lua_State *L) {
  dlk_keeper_collect(luaL_checkudata(L, 1, MT_KEEPER), lua_toboolean(L, 2));
  return 0;
}

/* Without waiting: a collection may come at any time. */
static int keeper_lua_gc(lua_State *L) {
  dlk_keeper_close(luaL_checkudata(L, 1, MT_KEEPER));
  return 0;
}

/* ---- the process ---- */

/*** @function now
@treturn number seconds on CLOCK_BOOTTIME */
static int run_lua_now(lua_State *L) {
  lua_pushnumber(L, (double)dlk_now_ms() / 1000);
  return 1;
}

/*** SIGKILL for every process below this one, once the keeper is gone.
@function kill_descendants
@treturn boolean whether any is still there */
static int run_lua_kill_descendants(lua_State *L) {
  lua_pushboolean(L, dlk_run_kill_descendants());
  return 1;
}

/*** Block the signals that the wrapper answers itself.
@function catch_signals
@treturn[1] number descriptor for `next_signal`
@treturn[2] nil
@treturn[2] string message */
static int run_lua_catch_signals(lua_State *L) {
  int fd = dlk_run_catch_signals();
  if (fd < 0) return fail(L, errno);
  lua_pushinteger(L, fd);
  return 1;
}

/*** @function next_signal
@tparam number fd
@treturn[1] number signal
@treturn[1] boolean sent by a process, not by the terminal
@treturn[2] nil none is waiting */
static int run_lua_next_signal(lua_State *L) {
  bool by_process = false;
  int n = dlk_run_next_signal((int)luaL_checkinteger(L, 1), &by_process);
  if (!n) return 0;
  lua_pushinteger(L, n);
  lua_pushboolean(L, by_process);
  return 2;
}

/*** Stop this process as Ctrl-Z does, until it is continued.
@function stop */
static int run_lua_stop(lua_State *L) {
  (void)L;
  dlk_run_stop();
  return 0;
}

/*** Put /dev/null on standard descriptors that are closed.
@function plug */
static int run_lua_plug(lua_State *L) {
  (void)L;
  dlk_run_plug();
  return 0;
}

/*** Wait until a descriptor is readable.
@function wait
@tparam number timeout seconds; `math.huge`: for ever
@tparam number ... descriptors
@treturn boolean whether one is */
static int run_lua_wait(lua_State *L) {
  struct pollfd p[8];
  int64_t ms = check_ms(L, 1);
  int n = lua_gettop(L) - 1;
  luaL_argcheck(L, n <= 8, 10, "too many descriptors");
  for (int i = 0; i < n; i++)
    p[i] = (struct pollfd){.fd = (int)luaL_checkinteger(L, i + 2), .events = POLLIN};
  /* Rounded down to 0 it would spin; in days it would not fit. */
  int wait = ms == DLK_FOREVER ? -1 : (int)dlk_min(dlk_max(ms, 1), 86400000);
  lua_pushboolean(L, poll(p, (nfds_t)n, wait) > 0);
  return 1;
}

/*** Write all of a string.
@function write
@tparam number fd
@tparam string text
@treturn[1] boolean true
@treturn[2] nil
@treturn[2] string message */
static int run_lua_write(lua_State *L) {
  int fd = (int)luaL_checkinteger(L, 1);
  size_t len, at = 0;
  const char *s = luaL_checklstring(L, 2, &len);
  while (at < len) {
    ssize_t n = write(fd, s + at, len - at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) {
      struct pollfd p = {.fd = fd, .events = POLLOUT};
      poll(&p, 1, -1);
      continue;
    }
    if (n < 0) return fail(L, errno);
    at += (size_t)n;
  }
  lua_pushboolean(L, 1);
  return 1;
}

/*** Keep a descriptor of the caller's from the command (above the standard ones).
@function keep_private
@tparam number fd
@treturn[1] boolean true
@treturn[2] nil
@treturn[2] string message: it is not open for writing */
static int run_lua_keep_private(lua_State *L) {
  int fd = (int)luaL_checkinteger(L, 1);
  int mode = fcntl(fd, F_GETFL);
  if (mode < 0) return fail(L, errno);
  if ((mode & O_ACCMODE) == O_RDONLY) return fail(L, EBADF);
  if (fd > 2) fcntl(fd, F_SETFD, FD_CLOEXEC);
  lua_pushboolean(L, 1);
  return 1;
}

/*** Close a descriptor.
@function close
@tparam number fd */
static int run_lua_close(lua_State *L) {
  close((int)luaL_checkinteger(L, 1));
  return 0;
}

/*** @function leads_session
@treturn boolean this process is the leader of its session */
static int run_lua_leads_session(lua_State *L) {
  lua_pushboolean(L, getsid(0) == getpid());
  return 1;
}

/*** @function signal_text
@tparam number signal
@treturn string for people */
static int run_lua_signal_text(lua_State *L) {
  lua_pushstring(L, strsignal((int)luaL_checkinteger(L, 1)));
  return 1;
}

static const luaL_Reg keeper_meta[] = {{"__gc", keeper_lua_gc}, {"__close", keeper_lua_gc},
                                       {NULL, NULL}};
static const luaL_Reg keeper_methods[] = {{"start", keeper_lua_start},
                                          {"alive", keeper_lua_alive},
                                          {"kill", keeper_lua_kill},
                                          {"signal", keeper_lua_signal},
                                          {"receive", keeper_lua_receive},
                                          {"fd", keeper_lua_fd},
                                          {"close", keeper_lua_close},
                                          {NULL, NULL}};
static const luaL_Reg run_functions[] = {{"keeper", run_lua_keeper},
                                         {"now", run_lua_now},
                                         {"kill_descendants", run_lua_kill_descendants},
                                         {"catch_signals", run_lua_catch_signals},
                                         {"next_signal", run_lua_next_signal},
                                         {"stop", run_lua_stop},
                                         {"plug", run_lua_plug},
                                         {"wait", run_lua_wait},
                                         {"write", run_lua_write},
                                         {"keep_private", run_lua_keep_private},
                                         {"close", run_lua_close},
                                         {"leads_session", run_lua_leads_session},
                                         {"signal_text", run_lua_signal_text},
                                         {NULL, NULL}};

static const struct {
  const char *name;
  int n;
} signals[] = {{"HUP", SIGHUP},   {"INT", SIGINT},   {"QUIT", SIGQUIT}, {"TERM", SIGTERM},
               {"TSTP", SIGTSTP}, {"CONT", SIGCONT}};

/*** Fields: `HUP`, `INT`, `QUIT`, `TERM`, `TSTP`, `CONT`, the numbers of these
signals; `ENOENT`.
@table run */
int dlk_lua_open_run(lua_State *L) {
  luaL_newmetatable(L, MT_KEEPER);
  luaL_setfuncs(L, keeper_meta, 0);
  lua_newtable(L);
  luaL_setfuncs(L, keeper_methods, 0);
  lua_setfield(L, -2, "__index");
  lua_pop(L, 1);
  lua_newtable(L);
  luaL_setfuncs(L, run_functions, 0);
  for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
    lua_pushinteger(L, signals[i].n);
    lua_setfield(L, -2, signals[i].name);
  }
  lua_pushinteger(L, ENOENT);
  lua_setfield(L, -2, "ENOENT");
  return 1;
}
