/* Lua 5.4 and LuaJIT 2.1 behind one set of names. Everything that differs is
 * here, so that the lua_*.c files are written once, against 5.4. */
#ifndef DLK_COMPAT_H
#define DLK_COMPAT_H

#ifndef __linux__
/* cppcheck-suppress preprocessorErrorDirective */
#error "dlock needs Linux (OFD locks, epoll, timerfd, inotify)"
#endif

#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>

/* LuaJIT says 501 like plain Lua 5.1; its lualib.h alone tells them apart. */
#ifdef LUA_JITLIBNAME
#define lua_newuserdatauv(L, size, values) lua_newuserdata((L), (size))
#elif LUA_VERSION_NUM < 504
/* cppcheck-suppress preprocessorErrorDirective */
#error "dlock needs Lua 5.4 or LuaJIT 2.1"
#endif

#endif
