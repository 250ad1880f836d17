# dlock: GNU make, Linux. `make help` lists the targets.
#
# Everything lands in build/: build/$(VARIANT)/dlock/core.so and objects in
# build/obj-$(VARIANT), where VARIANT is the Lua (5.4, luajit), with the sanitizer before it
# if there is one (asan-5.4 ...), so that no two builds share an object.

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VERSION := $(shell sed -n 's/^#define DLOCK_VERSION "\(.*\)"$$/\1/p' csrc/dlock.h)

# ---- which Lua ----
# LUA=5.4 or luajit; another value in the environment is somebody else's variable.
# LuaRocks names a header directory instead, which decides.
LUA ?= 5.4
ifeq ($(origin LUA)$(filter $(LUA),5.4 luajit),environment)
  LUA := 5.4
endif
ifdef LUA_INCDIR
  override LUA := $(if $(wildcard $(LUA_INCDIR)/luajit.h),luajit,5.4)
  ifeq ($(LUA),5.4)
    ifneq ($(shell awk '$$2 == "LUA_VERSION_NUM" {print $$3}' '$(LUA_INCDIR)/lua.h'),504)
      $(error $(LUA_INCDIR) has the headers of neither Lua 5.4 nor LuaJIT)
    endif
  endif
  VARIANT := rock-$(LUA)
endif
ifeq ($(filter $(LUA),5.4 luajit),)
  $(error LUA=$(LUA): must be 5.4 or luajit)
endif

PKG_CONFIG ?= pkg-config
pc = $(firstword $(foreach p,$(1),$(if $(shell $(PKG_CONFIG) --exists $(p) 2>&1 || echo no),,$(p))))
ifeq ($(LUA),5.4)
  LUA_ABI := 5.4
  LUA_BIN ?= lua5.4
  LUA_PC := $(call pc,lua5.4 lua-5.4 lua54)
else
  LUA_ABI := 5.1
  LUA_BIN ?= luajit
  LUA_PC := $(call pc,luajit)
endif
ifdef LUA_INCDIR
  LUA_CFLAGS := -isystem '$(LUA_INCDIR)'
else ifneq ($(LUA_PC),)
  LUA_CFLAGS := $(patsubst -I%,-isystem %,$(shell $(PKG_CONFIG) --cflags $(LUA_PC)))
  LUA_LIBS := $(shell $(PKG_CONFIG) --libs $(LUA_PC))
endif

# ---- flags ----
VARIANT ?= $(if $(SAN),$(SAN)-)$(LUA)
OUT := build/$(VARIANT)
OBJ := build/obj-$(VARIANT)

ifneq ($(filter default undefined,$(origin CC)),)
  CC := $(if $(SAN),gcc,cc)
endif
CFLAGS ?= -O2 -g
WERROR ?= -Werror
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wwrite-strings -Wundef \
	-Wpointer-arith
SANFLAGS_asan := -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANFLAGS_tsan := -fsanitize=thread
ifdef SAN
  SANFLAGS := $(or $(SANFLAGS_$(SAN)),$(error SAN=$(SAN): must be asan or tsan)) -fno-omit-frame-pointer
  override CFLAGS := -O1 -g
endif

LIBS := -lcrypto
SRC := $(wildcard csrc/*.c)

# ---- optional backends ----
# $(call backend,NAME,header,libraries,sources,Debian package): built when the
# client library is there. WITH_NAME=1 insists on it, WITH_NAME=0 leaves it out.
hash := \#
probe = $(shell printf '%s\n' '$(hash)include <stdio.h>' '$(hash)include <$(1)>' \
	'int main(void) { return 0; }' | $(CC) $(CPPFLAGS) -x c - $(LDFLAGS) -x none $(2) -o /dev/null \
	2>/dev/null && echo 1 || echo 0)
define backend
  have := $$(call probe,$(2),$(3))
  WITH_$(up) ?= $$(have)
  ifeq ($$(WITH_$(up)):$$(have),1:0)
    $$(error WITH_$(up)=1, but <$(2)> or $(3) is missing. Debian: apt-get install $(5))
  endif
  ifeq ($$(WITH_$(up)),1)
    DEFS += -DDLK_WITH_$(up)
    LIBS += $(3)
  else ifeq ($$(WITH_$(up)),0)
    SRC := $$(filter-out $(4:%=csrc/%.c),$$(SRC))
    LEFT_OUT += $(1)
  else
    $$(error WITH_$(up)=$$(WITH_$(up)): must be 0 or 1)
  endif
endef
upper = $(shell echo $(1) | tr a-z A-Z)
use = $(foreach up,$(call upper,$(1)),$(eval $(call backend,$(1),$(2),$(3),$(4),$(5))))

ifneq ($(filter-out clean deps deps-test help,$(or $(MAKECMDGOALS),all)),)
  $(call use,redis,hiredis/hiredis.h,-lhiredis,redis redis_link,libhiredis-dev)
  $(call use,zookeeper,zookeeper/zookeeper.h,-lzookeeper_mt,zookeeper zk_name zk_open zk_session zk_query,libzookeeper-mt-dev)
endif

# LuaRocks says where it found libcrypto.
CRYPTO_FLAGS = $(if $(CRYPTO_INCDIR),-isystem '$(CRYPTO_INCDIR)')
CRYPTO_LDFLAGS = $(if $(CRYPTO_LIBDIR),-L'$(CRYPTO_LIBDIR)')

DLK_CFLAGS = -std=gnu11 -D_GNU_SOURCE $(CPPFLAGS) $(CRYPTO_FLAGS) -fPIC -fvisibility=hidden -pthread \
	$(WARN) $(WERROR) $(SANFLAGS) $(DEFS) -MMD -MP
DLK_LDFLAGS = -pthread $(SANFLAGS) $(CRYPTO_LDFLAGS) $(LDFLAGS)

# ---- the module ----
LUA_SRC := $(wildcard csrc/lua_*.c)
CORE_OBJ := $(patsubst csrc/%.c,$(OBJ)/%.o,$(filter-out $(LUA_SRC),$(SRC)))
LUA_OBJ := $(patsubst csrc/%.c,$(OBJ)/%.o,$(LUA_SRC))
MODULE := $(OUT)/dlock/core.so
COMMAND := $(OUT)/bin/dlock

.PHONY: all
all: $(MODULE) $(COMMAND)

# Changed flags rebuild everything: the stamp's time moves only with its text.
STAMP := $(OBJ)/flags
FLAGS = $(CC) $(DLK_CFLAGS) $(CFLAGS) $(LUA_CFLAGS) $(DLK_LDFLAGS) $(LIBS)
$(STAMP): FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(subst ','\'',$(FLAGS))' > $@.new
	@cmp -s $@.new $@ || { $(call check-header,lua.h,$(LUA_CFLAGS)); \
		$(call check-header,openssl/evp.h,$(CRYPTO_FLAGS)); mv $@.new $@; }
check-header = echo '$(hash)include <$(1)>' | $(CC) $(CPPFLAGS) $(2) -E - > /dev/null 2>&1 || \
	{ echo '<$(1)> is missing: make deps$(if $(LUA:5.4=), LUA=$(LUA)) installs what is needed' >&2; exit 1; }
.PHONY: FORCE
FORCE:

$(LUA_OBJ): EXTRA = $(LUA_CFLAGS)
$(OBJ)/%.o: csrc/%.c $(STAMP)
	$(CC) $(DLK_CFLAGS) $(CFLAGS) $(EXTRA) -c $< -o $@

# nodelete: the watchdog thread must never run in unmapped code.
$(MODULE): $(CORE_OBJ) $(LUA_OBJ) $(if $(SAN),$(OBJ)/sanitized.o)
	@mkdir -p $(@D)
	$(CC) -shared $(DLK_LDFLAGS) -Wl,-z,nodelete -Wl,-z,relro,-z,now $^ $(LIBS) -o $@
	@if nm -u $@ | grep -E ' U (dlk|dlock)_'; then rm $@; echo 'undefined in $@' >&2; exit 1; fi
	@$(foreach b,$(LEFT_OUT),echo 'left out: the $(b) backend (switched off, or no client library: see make deps)' >&2;)

# Changes no environment variable, since the command that it runs would see it.
$(COMMAND): Makefile
	@mkdir -p $(@D)
	@printf '%s\n' '#!/bin/sh' \
	  'root="$$(CDPATH= cd -- "$$(dirname -- "$$(readlink -f -- "$$0")")/../../.." && pwd)"' \
	  '$(if $(SAN),export LD_PRELOAD="$$DLOCK_PRELOAD")' \
	  'exec $(LUA_BIN) -e "package.path=[[$$root/lua/?.lua;$$root/lua/?/init.lua;]]..package.path package.cpath=[[$$root/$(OUT)/?.so;]]..package.cpath" "$$root/lua/bin/dlock" "$$@"' > $@
	@chmod 755 $@

-include $(wildcard $(OBJ)/*.d)

# ---- for the tests: C programs, and a small module for processes ----
CTEST_DIR := build/c-$(VARIANT)
CTESTS := $(patsubst spec/c/%.c,$(CTEST_DIR)/%,$(wildcard spec/c/*.c))
PROC := $(OUT)/spec/dlkproc.so

# As an archive, so that a program may bring its own of what it watches.
CORE_LIB := $(OBJ)/libdlk.a
$(CORE_LIB): $(CORE_OBJ)
	@rm -f $@
	ar rcs $@ $^

$(CTEST_DIR)/%: spec/c/%.c $(CORE_LIB)
	@mkdir -p $(@D)
	$(CC) $(DLK_CFLAGS) $(CFLAGS) -Icsrc $(if $(filter lua_%,$*),$(LUA_CFLAGS)) $< $(CORE_LIB) \
		$(DLK_LDFLAGS) $(LIBS) $(if $(filter lua_%,$*),$(LUA_LIBS)) -lm -o $@
-include $(wildcard $(CTEST_DIR)/*.d)

$(PROC): spec/support/proc.c $(STAMP)
	@mkdir -p $(@D)
	$(CC) $(filter-out -MMD -MP -fsanitize=%,$(DLK_CFLAGS)) $(CFLAGS) -Icsrc $(LUA_CFLAGS) -shared $< -lutil -o $@

$(OBJ)/sanitized.o: spec/support/sanitized.c $(STAMP)
	$(CC) $(DLK_CFLAGS) $(CFLAGS) -c $< -o $@

.PHONY: parts
parts: all $(PROC) $(CTESTS)

# ---- using the tree ----
.PHONY: env demo
env: all
	@printf "export LUA_PATH='%s/lua/?.lua;%s/lua/?/init.lua;'\"\$${LUA_PATH:-;}\"\n" '$(CURDIR)' '$(CURDIR)'
	@printf "export LUA_CPATH='%s/$(OUT)/?.so;'\"\$${LUA_CPATH:-;}\"\n" '$(CURDIR)'
	@printf "export PATH='%s/$(OUT)/bin':\"\$$PATH\"\n" '$(CURDIR)'

demo:
	@LUA=$(LUA) .ci/deps build
	@$(MAKE) -s --no-print-directory all
	@eval "$$($(MAKE) -s --no-print-directory env)" && exec $(LUA_BIN) examples/01-guarded-counter.lua $(ARGS)

# examples/nginx, until Ctrl-C. OpenResty's nginx brings the modules.
NGINX ?= nginx
NGINX_MODULES ?= /usr/lib/nginx/modules
NGINX_DEMO := build/nginx-demo
.PHONY: nginx-demo
nginx-demo:
	@LUA=luajit .ci/deps build nginx
	@$(MAKE) -s --no-print-directory LUA=luajit all
	@mkdir -p $(NGINX_DEMO)/tmp && ln -sfn $(CURDIR)/examples/nginx/lua $(NGINX_DEMO)/app
	@sed -n 's/^#   //p' examples/nginx/nginx.conf
	@exec $(NGINX) -p $(CURDIR)/$(NGINX_DEMO) -c $(CURDIR)/examples/nginx/nginx.conf -e stderr \
		-g '$(foreach m,ndk_http ngx_http_lua,$(if $(wildcard $(NGINX_MODULES)/$(m)_module.so),load_module $(NGINX_MODULES)/$(m)_module.so;)) $(NGINX_GLOBALS)'

.PHONY: deps deps-test
deps:
	@LUA=$(LUA) .ci/deps build
deps-test:
	@.ci/deps build luas test lint

# ---- tests ----
# SPEC="spec/01-unit spec/c" and LUAS=5.4 narrow them down.
LUAS ?= 5.4 luajit
TEST = spec/support/runner.py $(LUAS:%=--lua %) $(if $(SAN),--under $(SAN)) $(SPEC)

.PHONY: test soak check-asan check-tsan check-valgrind bench
test soak check-asan check-tsan: export PYTHON = $(shell .ci/python)
test:
	@.ci/deps build luas test
	@$(MAKE) --no-print-directory run-tests

soak: export DLOCK_SCALE := 1
soak: test

check-asan check-tsan:
	@.ci/deps build luas test lint
	@$(MAKE) --no-print-directory run-tests SAN=$(@:check-%=%)

# LuaJIT's machine code is beyond valgrind.
check-valgrind: export PYTHON = $(shell .ci/python)
check-valgrind:
	@.ci/deps build luas test lint
	@$(MAKE) --no-print-directory LUA=5.4 parts
	@spec/support/runner.py --lua 5.4 --under valgrind $(or $(SPEC),spec/c spec/01-unit spec/02-contract)

.PHONY: run-tests
run-tests:
	@set -e; for lua in $(LUAS); do $(MAKE) -s --no-print-directory LUA=$$lua SAN=$(SAN) parts; done
	@$(TEST)

# Programs go to build/bench; lua_NAME.c is a Lua module, NAME.
BENCH := $(patsubst spec/bench/%.c,build/bench/%,$(filter-out spec/bench/lua_%,$(wildcard spec/bench/*.c)))
BENCH += $(patsubst spec/bench/lua_%.c,$(OUT)/bench/%.so,$(wildcard spec/bench/lua_*.c))
build/bench/%: spec/bench/%.c $(STAMP)
	@mkdir -p $(@D)
	$(CC) $(DLK_CFLAGS) $(CFLAGS) -Icsrc $< $(DLK_LDFLAGS) $(LIBS) -lm -o $@
$(OUT)/bench/%.so: spec/bench/lua_%.c $(STAMP)
	@mkdir -p $(@D)
	$(CC) $(DLK_CFLAGS) $(CFLAGS) -Icsrc $(LUA_CFLAGS) -shared $< $(DLK_LDFLAGS) $(LIBS) -lm -o $@
-include $(wildcard build/bench/*.d $(OUT)/bench/*.d)
.PHONY: benches
benches: all $(PROC) $(BENCH)

bench:
	@.ci/deps build luas test
	@set -e; for lua in $(LUAS); do $(MAKE) -s --no-print-directory LUA=$$lua benches; done
	@PYTHON="$$(.ci/python)" spec/support/runner.py --bench $(LUAS:%=--lua %) $(SPEC)

# ---- checks without running ----
.PHONY: lint lint-syntax
lint:
	@.ci/deps build luas lint
	luacheck -q --no-color $(wildcard lua spec examples lua/bin/dlock) rockspec/*.rockspec
	cppcheck -q --std=c11 -D_GNU_SOURCE -D__linux__ -DDLK_WITH_REDIS -DDLK_WITH_ZOOKEEPER \
		--inline-suppr --enable=warning,performance,portability --suppress=missingIncludeSystem \
		--suppress=identicalInnerCondition --error-exitcode=1 csrc
	@set -e; for cc in gcc clang; do for lua in 5.4 luajit; do \
		$(MAKE) -s --no-print-directory CC=$$cc LUA=$$lua lint-syntax; done; done
	.ci/layers

lint-syntax:
	@set -e; for f in $(SRC) $(wildcard spec/c/*.c spec/bench/*.c) spec/support/proc.c; do \
		$(CC) $(filter-out -MMD -MP,$(DLK_CFLAGS)) -O2 -Icsrc $(LUA_CFLAGS) -fsyntax-only $$f; done

.PHONY: doc
doc:
	@.ci/deps lint
	@rm -rf build/ldoc build/doc && mkdir -p build/ldoc
	@cat csrc/lua_core.c $$(grep -L '@module' $(LUA_SRC)) > build/ldoc/core.c
	@cp $$(grep -l '@module' $(filter-out csrc/lua_core.c,$(LUA_SRC))) build/ldoc
	ldoc -c .config.ld .

# ---- install ----
PREFIX ?= /usr/local
INST_LIBDIR ?= $(PREFIX)/lib/lua/$(LUA_ABI)
INST_LUADIR ?= $(PREFIX)/share/lua/$(LUA_ABI)
INST_BINDIR ?= $(PREFIX)/bin
INST_BIN ?= 1

.PHONY: install
install: all
	install -d '$(DESTDIR)$(INST_LIBDIR)/dlock'
	install -m 755 $(MODULE) '$(DESTDIR)$(INST_LIBDIR)/dlock/core.so'
	cd lua && find dlock -name '*.lua' -exec install -D -m 644 {} '$(abspath $(DESTDIR)$(INST_LUADIR))/{}' \;
ifeq ($(INST_BIN),1)
	install -d '$(DESTDIR)$(INST_BINDIR)'
	sed '1s|.*|#!/usr/bin/env $(LUA_BIN)|' lua/bin/dlock > '$(DESTDIR)$(INST_BINDIR)/dlock'
	chmod 755 '$(DESTDIR)$(INST_BINDIR)/dlock'
endif

# A folder that luarocks can install from:
#   luarocks --lua-version 5.4 install dlock --only-server=build/rocks
ROCKS ?= build/rocks
ROCK := dlock-$(VERSION)
.PHONY: rock
rock:
	@rm -rf '$(ROCKS)' && mkdir -p '$(ROCKS)'
	@tar czf '$(ROCKS)/$(ROCK).tar.gz' --transform='s|^|$(ROCK)/|' \
		csrc lua rockspec Makefile README.md CHANGELOG.md LICENSE
	@sed 's|url = "|url = "file://$(abspath $(ROCKS))/|' rockspec/$(ROCK)-1.rockspec \
		> '$(ROCKS)/$(ROCK)-1.rockspec'
	cd '$(ROCKS)' && luarocks --lua-version 5.4 pack $(ROCK)-1.rockspec
	cd '$(ROCKS)' && luarocks-admin --lua-version 5.4 make_manifest .

.PHONY: clean help
clean:
	rm -rf build

help:
	@printf '%s\n' \
	  'make [LUA=luajit]      build into build/ (Lua 5.4 by default); WITH_REDIS=0|1 WITH_ZOOKEEPER=0|1' \
	  'make demo [ARGS=...]   see it work' \
	  'make nginx-demo        the same in nginx: examples/nginx' \
	  'make test              both Luas; SPEC=spec/01-unit LUAS=5.4 narrow it down' \
	  'make soak              the same at full length' \
	  'make check-asan check-tsan check-valgrind' \
	  'make lint doc bench' \
	  'make -s env            export lines for using the tree: eval "$$(make -s env)"' \
	  'make install           DESTDIR= PREFIX=/usr/local' \
	  'make rock              build/rocks: a folder that luarocks can install from' \
	  'make deps deps-test    install what building (testing) needs' \
	  'make clean'
