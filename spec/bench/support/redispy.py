"""redispy.py PORT SHARE HOLD_US: one of the processes of a hand-off run, with
redis-py's Lock as its users have it. The turns are those of token.c, the layout
of the shared page is that of share.h."""
import mmap
import os
import struct
import sys
import time

import redis

RELEASED, GRANTS, N, INSIDE, VIOLATIONS, SAMPLES = 0, 8, 16, 24, 28, 32
MOST = 1 << 16


class Share:
    def __init__(self, path):
        fd = os.open(path, os.O_RDWR)
        self.page = mmap.mmap(fd, SAMPLES + 8 * MOST)
        os.close(fd)

    def get(self, at, kind="q"):
        return struct.unpack_from("=" + kind, self.page, at)[0]

    def put(self, at, value, kind="q"):
        struct.pack_into("=" + kind, self.page, at, value)

    def enter(self):
        now = time.monotonic_ns()
        if self.get(INSIDE, "i"):
            self.put(VIOLATIONS, self.get(VIOLATIONS, "i") + 1, "i")
        self.put(INSIDE, 1, "i")
        released, n = self.get(RELEASED), self.get(N)
        if released and n < MOST:
            self.put(SAMPLES + 8 * n, now - released)
            self.put(N, n + 1)
        self.put(GRANTS, self.get(GRANTS) + 1)

    def leave(self):
        grants = self.get(GRANTS)
        self.put(INSIDE, 0, "i")
        self.put(RELEASED, time.monotonic_ns())
        return grants

    def after_you(self, grants, until):
        while self.get(GRANTS) == grants and time.monotonic() < until:
            time.sleep(0.0002)


def turn(server, share, hold, until):
    n = 0
    while (left := until - time.monotonic()) > 0:
        lock = server.lock("hand-off", timeout=10, blocking_timeout=left)
        if not lock.acquire():
            continue
        share.enter()
        time.sleep(hold)
        grants = share.leave()
        lock.release()
        share.after_you(grants, until)
        n += 1
    return n


def main():
    server = redis.Redis(host="127.0.0.1", port=int(sys.argv[1]))
    share, hold = Share(sys.argv[2]), int(sys.argv[3]) / 1e6
    for line in sys.stdin:
        n = turn(server, share, hold, time.monotonic() + int(line) / 1000)
        print(f"done {n}", flush=True)


main()
