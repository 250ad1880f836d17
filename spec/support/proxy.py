#!/usr/bin/env python3
"""A TCP proxy and canned-answer server for fault specs; spec/support/proxy.lua
drives it. Commands are lines of JSON on stdin, each answered by one line of
JSON on stdout; it ends with its stdin.

What happens to traffic is decided by a mode for what is in flight and by rules
for single requests. A request is one whole RESP array from the client (with
"raw": true one read). Requests are counted over all connections.
"""
import asyncio
import json
import sys

BLOCK = 65536


class Broken(Exception):
    """The connection is to be closed without a word."""


def cut_requests(buf):
    """Takes whole RESP arrays off the front of buf: [bytes], rest."""
    done, at = [], 0
    while True:
        end = request_end(buf, at)
        if end is None:
            return done, buf[at:]
        done.append(buf[at:end])
        at = end


def request_end(buf, at):
    line = buf.find(b"\r\n", at)
    if line < 0:
        return None
    if buf[at:at + 1] != b"*":
        return line + 2
    end = line + 2
    for _ in range(int(buf[at + 1:line])):
        line = buf.find(b"\r\n", end)
        if line < 0:
            return None
        end = line + 2 + int(buf[end + 1:line]) + 2
        if len(buf) < end:
            return None
    return end


class Proxy:
    def __init__(self):
        self.target = None
        self.canned = None
        self.raw = False
        self.mode = "pass"
        self.delay = 0.0
        self.rules = []
        self.pairs = set()
        self.go = asyncio.Event()
        self.go.set()
        self.n = {"connections": 0, "requests": 0, "dropped": 0, "hit": 0, "open": 0}

    # ---- commands ----

    async def start(self, target=None, canned=None, raw=False):
        """target: port or socket path; canned: see answer()."""
        self.target, self.canned, self.raw = target, canned, raw
        server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        return {"port": server.sockets[0].getsockname()[1]}

    def answers(self, canned):
        """Other answers, for connections from now on."""
        self.canned = canned

    def set(self, mode="pass", delay=0.0):
        """pass; hold: nothing is forwarded either way until the next set, then
        all of it; mute: requests go through, replies are thrown away; refuse:
        new connections are closed at once."""
        self.mode, self.delay = mode, delay
        self.go.clear() if mode == "hold" else self.go.set()

    def rule(self, action, match="", skip=0, times=1):
        """For requests that contain `match`, after the first `skip` of them, as
        often as `times` says. lose: forward it, throw the reply away and all
        that follows on that connection; dead: the same, and nothing more is
        forwarded on it; cut: forward it, close both sides when
        the reply is there; eat: do not forward it; late: forward it (and what
        follows on that connection) 0.1 s later; close: close both sides
        instead of forwarding."""
        self.rules.append({"action": action, "match": match.encode("latin-1"),
                           "skip": skip, "times": times})

    def clear(self):
        self.rules.clear()
        self.set()

    def cut(self):
        """Closes every connection there is, with a reset."""
        for writer in list(self.pairs):
            writer.transport.abort()

    def stats(self):
        return dict(self.n)

    # ---- traffic ----

    async def accept(self, reader, writer):
        self.n["connections"] += 1
        self.n["open"] += 1
        self.pairs.add(writer)
        try:
            if self.mode == "refuse":
                return
            if self.canned is not None:
                await self.answer(reader, writer)
            else:
                await self.relay(reader, writer)
        except (OSError, Broken, asyncio.IncompleteReadError):
            pass
        finally:
            self.n["open"] -= 1
            self.pairs.discard(writer)
            writer.close()

    async def answer(self, reader, writer):
        """canned: {"hello": bytes sent at once, "replies": [one per request; the
        last repeats], "close": after how many replies, "each": seconds between
        single bytes}. Strings are latin-1."""
        c = self.canned
        await self.drip(writer, c.get("hello", ""))
        replies, sent, buf = c.get("replies", []), 0, b""
        if c.get("close") == 0:
            return
        while data := await reader.read(BLOCK):
            requests, buf = ([data], b"") if self.raw else cut_requests(buf + data)
            for _ in requests:
                self.n["requests"] += 1
                if replies:
                    await self.drip(writer, replies[min(sent, len(replies) - 1)])
                sent += 1
                if c.get("close") is not None and sent >= c["close"]:
                    return

    async def drip(self, writer, text):
        data = text.encode("latin-1")
        pause = self.canned.get("each")
        pieces = [data] if not pause else [data[i:i + 1] for i in range(len(data))]
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if pause:
                await asyncio.sleep(pause)

    async def relay(self, reader, writer):
        to = self.target
        up = await (asyncio.open_unix_connection(to) if isinstance(to, str)
                    else asyncio.open_connection("127.0.0.1", to))
        link = {"lose": False, "cut": False, "dead": False}
        tasks = [asyncio.ensure_future(self.requests(reader, up[1], link)),
                 asyncio.ensure_future(self.replies(up[0], writer, link))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for t in done:
                t.exception()
        finally:
            for t in tasks:
                t.cancel()
            up[1].close()

    def verdict(self, request):
        for r in self.rules:
            if r["times"] > 0 and r["match"] in request:
                if r["skip"] > 0:
                    r["skip"] -= 1
                else:
                    r["times"] -= 1
                    self.n["hit"] += 1
                    return r["action"]
        return None

    async def requests(self, reader, up, link):
        buf = b""
        while data := await reader.read(BLOCK):
            whole, buf = ([data], b"") if self.raw else cut_requests(buf + data)
            for request in whole:
                await self.go.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                self.n["requests"] += 1
                action = "eat" if link["dead"] else self.verdict(request)
                if action == "close":
                    raise Broken
                if action in link:
                    link[action] = True
                if action == "late":
                    await asyncio.sleep(0.1)
                if action != "eat":
                    up.write(request)
                    await up.drain()

    async def replies(self, reader, writer, link):
        while data := await reader.read(BLOCK):
            await self.go.wait()
            if link["cut"]:
                raise Broken
            if link["lose"] or link["dead"] or self.mode == "mute":
                self.n["dropped"] += 1
                continue
            writer.write(data)
            await writer.drain()


async def main():
    proxy = Proxy()
    loop = asyncio.get_running_loop()
    stdin = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    while line := await stdin.readline():
        order = json.loads(line)
        try:
            result = getattr(proxy, order.pop("do"))(**order)
            if asyncio.iscoroutine(result):
                result = await result
            print(json.dumps(result or {}), flush=True)
        except Exception as e:  # told to the spec, which fails
            print(json.dumps({"error": repr(e)}), flush=True)


asyncio.run(main())
