#!/usr/bin/env python3
"""Runs what the tests are made of, each piece in a process of its own with a
time limit: spec files (busted), which run the examples too, and C programs
(spec/c). Two for each core run at a time.
The last line is `N passed, N failed`, summed over everything.

A file may ask for more time in one of its first lines: `time limit: 300 s`; or
for one Lua: `only on luajit`.
"""
import argparse
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
# Under valgrind a leak is found by its text and not by the exit status, since a
# forked child, which is silent, loses its parent's memory on purpose.
LOST = re.compile(r"^==\d+== .*definitely lost in loss record", re.M)
COUNTS = re.compile(r"^#counts (\d+) (\d+) (\d+)$", re.M)
PASSED = re.compile(r"^(\d+) passed, (\d+) failed$", re.M)
SLACK = {None: 1, "asan": 3, "tsan": 4, "valgrind": 12}
# Specs wait for most of their time: four at once keep two cores half busy.
JOBS = max(2, min(8, 2 * len(os.sched_getaffinity(0))))
SCALE = float(os.environ.get("DLOCK_SCALE", "0.05"))


class Job:
    """One process to run; `lua` is None for a C program without Lua."""

    def __init__(self, path, lua, kind, build):
        self.path, self.lua, self.kind, self.build = path, lua, kind, build
        self.passed = self.failed = self.skipped = 0
        self.why, self.output, self.seconds = "", "", 0.0

    def add(self, why):
        self.why += ("; " if self.why else "") + why

    def name(self):
        return self.path + (f" ({self.lua})" if self.lua else "")


def interpreter(lua):
    return {"5.4": "lua5.4", "luajit": "luajit"}[lua]


def command(job, under):
    out = f"{ROOT}/build/{job.build}"
    if job.kind == "spec":
        argv = [interpreter(job.lua), shutil.which("busted"), job.path]
    elif job.kind == "c":
        name = os.path.basename(job.path)[:-2]
        argv = [f"{ROOT}/build/c-{job.build}/{name}"]
    else:
        argv = [interpreter(job.lua), job.path]
    if under == "valgrind":
        argv = ["valgrind", "-q", "--error-exitcode=99", "--leak-check=full",
                "--errors-for-leak-kinds=none", "--show-leak-kinds=definite",
                "--child-silent-after-fork=yes",
                f"--suppressions={ROOT}/spec/support/valgrind.supp"] + argv
    return argv, out


def environment(job, under, out):
    env = dict(os.environ)
    for name in list(env):
        if re.match(r"LUA_(C?PATH|INIT)|DLOCK_URL|LD_PRELOAD|MAKEFLAGS|MFLAGS|MAKELEVEL", name):
            del env[name]
    env["LUA_PATH"] = f"{ROOT}/?.lua;{ROOT}/lua/?.lua;{ROOT}/lua/?/init.lua;;"
    env["LUA_CPATH"] = f"{out}/?.so;{out}/spec/?.so;{out}/bench/?.so;;"
    env["PATH"] = f"{out}/bin:" + env["PATH"]
    env["DLOCK_BUILD"] = out
    env["DLOCK_UNDER"] = under or ""
    env["DLOCK_SLACK"] = str(SLACK[under])
    env["DLOCK_SCALE"] = str(SCALE)
    env.setdefault("PYTHON", "python3")
    if job.lua:
        env["DLOCK_LUA"] = interpreter(job.lua)
    if under in ("asan", "tsan"):
        leaks = 0 if job.lua == "luajit" else 1  # its heap is out of LeakSanitizer's sight
        env["ASAN_OPTIONS"] = f"detect_leaks={leaks}:exitcode=66:detect_stack_use_after_return=0"
        env["LSAN_OPTIONS"] = (f"exitcode=66:print_suppressions=0"
                               f":suppressions={ROOT}/spec/support/lsan.supp")
        env["UBSAN_OPTIONS"] = "print_stacktrace=1"
        env["TSAN_OPTIONS"] = (f"exitcode=66:die_after_fork=0:atexit_sleep_ms=50"
                               f":suppressions={ROOT}/spec/support/tsan.supp")
        if job.kind != "c" or job.lua:
            lib = subprocess.run(["gcc", f"-print-file-name=lib{under}.so"], text=True,
                                 capture_output=True, check=True).stdout.strip()
            env["LD_PRELOAD"] = env["DLOCK_PRELOAD"] = lib
    return env


def head(path):
    with open(f"{ROOT}/{path}", errors="replace") as f:
        return "".join(f.readline() for _ in range(8))


def time_limit(job, under):
    asked = re.search(r"time limit: (\d+) s", head(job.path))
    base = int(asked.group(1)) if asked else 120
    return base * SLACK[under] * (20 if SCALE > 0.5 else 1)


def session_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return int(fields[3]), fields[0]
    except (OSError, IndexError):
        return None, None


def left_behind(sid):
    """Live processes of the job's session: {pid: command line}."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        session, state = session_of(pid)
        if session == sid and state != "Z" and int(pid) != sid:
            try:
                with open(f"/proc/{pid}/cmdline", "rb") as f:
                    found[int(pid)] = f.read().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                pass
    return found


def end_session(sid):
    for pid in [sid, *left_behind(sid)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def orphans(sid):
    """What is still there a moment after the job's end (a dying child needs one)."""
    end = time.monotonic() + 3
    while left_behind(sid) and time.monotonic() < end:
        time.sleep(0.05)
    return left_behind(sid)


def run(job, under, running):
    tmp = tempfile.mkdtemp(prefix="dlock-")
    try:
        run_in(tmp, job, under, running)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def run_in(tmp, job, under, running):
    argv, out = command(job, under)
    limit = time_limit(job, under)
    start = time.monotonic()
    env = dict(environment(job, under, out), TMPDIR=tmp)
    with tempfile.TemporaryFile() as log:
        p = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                             stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        running[p.pid] = p
        try:
            p.wait(limit)
        except subprocess.TimeoutExpired:
            job.add(f"took longer than {limit} s; the last test above is the one that hung")
            end_session(p.pid)
            p.wait()
        job.seconds = time.monotonic() - start
        left = {} if job.why else orphans(p.pid)
        if left:
            job.add("left processes behind: " + ", ".join(f"{k} {v}" for k, v in left.items()))
            end_session(p.pid)
        del running[p.pid]
        log.seek(0)
        job.output = log.read().decode(errors="replace")
    judge(job, p.returncode)


def judge(job, rc):
    """Counts: a file that says nothing about its tests counts as one test."""
    counted = COUNTS.findall(job.output) or [(*t, 0) for t in PASSED.findall(job.output)]
    if counted:
        job.passed, job.failed, job.skipped = map(int, counted[-1])
    elif job.kind != "spec" and rc == 0 and not job.why:
        job.passed = 1
    if LOST.search(job.output):
        job.add("lost memory")
    if rc < 0 and "took longer" not in job.why:
        job.add(f"killed by {signal.Signals(-rc).name}")
    elif rc > 0 and not job.failed:
        job.add(f"ended with status {rc}")
    elif rc == 0 and job.kind == "spec" and not counted:
        job.add("ended before its tests did")
    elif job.passed + job.failed + job.skipped == 0 and not job.why:
        if job.kind == "c":
            job.skipped = 1  # its backend is not in this build
        else:
            job.add("has no test")
    if job.why:
        job.failed += 1


def report(job, verbose):
    state = "FAIL" if job.failed else "ok"
    skips = f", {job.skipped} skipped" if job.skipped else ""
    counts = f"{job.passed} passed, {job.failed} failed{skips}"
    print(f"{state:4}  {job.name()}: {counts}  [{job.seconds:.1f} s]")
    if job.failed or verbose:
        print("\n".join("    | " + x for x in job.output.splitlines()))
        if job.why:
            print(f"    {job.why}")
    elif job.skipped:
        skip = re.findall(r"^skip  .*\n.*", job.output, re.M)
        print("\n".join("    " + line for s in skip for line in s.splitlines()))
    sys.stdout.flush()


def discover(luas, under, only):
    def wanted(path):
        return not only or any(path == o or path.startswith(o.rstrip("/") + "/") for o in only)

    def found(pattern):
        return [p for p in sorted(glob.glob(pattern, root_dir=ROOT, recursive=True)) if wanted(p)]

    prefix = f"{under}-" if under in ("asan", "tsan") else ""
    jobs = []
    for path in found("spec/c/*.c"):
        own = luas if os.path.basename(path).startswith("lua_") else luas[:1]
        jobs += [Job(path, lua if own is luas else None, "c", prefix + lua) for lua in own]
    for path in found("spec/0*/**/*_spec.lua"):
        only_on = re.search(r"only on (luajit|5\.4)", head(path))
        jobs += [Job(path, lua, "spec", prefix + lua) for lua in luas
                 if not only_on or lua == only_on.group(1)]
    return jobs


def run_all(jobs, args):
    todo, lock, running = list(jobs), threading.Lock(), {}

    def worker():
        while True:
            with lock:
                if not todo:
                    return
                job = todo.pop(0)
            try:
                run(job, args.under, running)
            except OSError as e:
                job.failed, job.why = 1, str(e)
            with lock:
                report(job, args.verbose)

    threads = [threading.Thread(target=worker, daemon=True) for _ in range(args.jobs)]
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    except KeyboardInterrupt:
        for pid in list(running):
            end_session(pid)
        sys.exit(130)


def again(jobs, args):
    """DLOCK_AGAIN: what failed beside others gets one more try, alone. Time bounds
    are missed on a small machine that does too much at once; a fault fails twice.
    Both results are printed, and what only passed alone is named at the end."""
    first = [job for job in jobs if job.failed]
    if not first or len(first) > 8 or not os.environ.get("DLOCK_AGAIN"):
        return
    print(f"again, alone: {len(first)}", flush=True)
    for job in first:
        job.passed = job.failed = job.skipped = 0
        job.why = ""
    run_all(first, argparse.Namespace(**{**vars(args), "jobs": 1}))
    for job in first:
        if not job.failed:
            print(f"passed only alone: {job.name()}")


def bench(luas, only):
    for path in only or sorted(glob.glob("spec/bench/*.lua", root_dir=ROOT)):
        for lua in luas:
            job = Job(path, lua, "bench", lua)
            argv, out = command(job, None)
            print(f"== {job.name()}", flush=True)
            with tempfile.TemporaryDirectory(prefix="dlock-") as tmp:
                env = dict(environment(job, None, out), TMPDIR=tmp)
                env["DLOCK_BENCH"] = f"{ROOT}/build/bench"
                if subprocess.run(argv, cwd=ROOT, env=env, check=False).returncode != 0:
                    sys.exit(f"{job.name()} failed")


def unignore_signals():
    """What was started in the background or by nohup ignores some signals, and so
    would everything that is tested; a handler is not inherited over exec."""
    for s in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGTSTP):
        if signal.getsignal(s) == signal.SIG_IGN:
            signal.signal(s, lambda *_: None)


def main():
    unignore_signals()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lua", action="append", choices=["5.4", "luajit"])
    parser.add_argument("--under", choices=["asan", "tsan", "valgrind"])
    parser.add_argument("--jobs", type=int, default=int(os.environ.get("DLOCK_JOBS", JOBS)))
    parser.add_argument("--bench", action="store_true")
    parser.add_argument("--verbose", "-v", action="store_true")
    parser.add_argument("only", nargs="*", help="files or folders")
    args = parser.parse_args()
    luas = args.lua or ["5.4", "luajit"]
    if args.bench:
        bench(luas, args.only)
        return
    jobs = discover(luas, args.under, args.only)
    if not jobs:
        sys.exit("nothing to run")
    run_all(jobs, args)
    again(jobs, args)
    passed, failed = sum(j.passed for j in jobs), sum(j.failed for j in jobs)
    skipped = sum(j.skipped for j in jobs)
    if skipped:
        print(f"{skipped} skipped")
    if skipped and os.environ.get("DLOCK_NO_SKIP"):
        print("DLOCK_NO_SKIP is set: a skip is a failure")
        failed += skipped
    for job in jobs:
        if job.failed:
            print(f"failed: {job.name()}")
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
