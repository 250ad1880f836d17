"""kazoo_lock.py HOST:PORT PATH: as Curator.java, with kazoo's own Lock as it comes."""
import logging
import sys
import time

from kazoo.client import KazooClient
from kazoo.exceptions import LockTimeout

logging.disable(logging.CRITICAL)
client = KazooClient(hosts=sys.argv[1])
client.start(timeout=20)
lock = client.Lock(sys.argv[2], "kazoo")
print("ready", flush=True)
for line in sys.stdin:
    if line.startswith("acquire "):
        try:
            held = lock.acquire(timeout=int(line[8:]) / 1000)
        except LockTimeout:
            held = False
        print("held" if held else "timeout", flush=True)
    elif line.startswith("bench "):
        n = int(line[6:])
        start = time.monotonic()
        for _ in range(n):
            lock.acquire()
            lock.release()
        print("took %d" % ((time.monotonic() - start) / n * 1e6), flush=True)
    elif line == "release\n":
        lock.release()
        print("released", flush=True)
client.stop()
client.close()
