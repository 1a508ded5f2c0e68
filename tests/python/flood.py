"""Holds many connections to ports that send nothing, or one byte a second, or a body that does not end.

Usage: flood.py KIND COUNT PER_SECOND ADDRESS...

KIND is `silent`, `head` (a byte of a head each second), `body` (a head, then a byte of a body each second), or
`unfinished` (a head and all of an 8 MiB body but its last byte). At each address, COUNT connections are opened,
PER_SECOND in a second. One that the server closes is opened again, 10 s after its last opening at the earliest; an
unfinished body is not sent again. It prints a line when every connection has been open, and runs until it is killed.
"""

import collections
import errno
import itertools
import resource
import select
import socket
import sys
import time

AGAIN_S = 10
BODY_BYTES = 8 << 20
PIECE = b" " * (1 << 16)
HEAD = b"GET /live HTTP/1.1\r\nhost: x\r\nx-more: " + b"a" * 1000 + b"\r\n\r\n"
BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % BODY_BYTES

DRIPS = {"head": HEAD, "body": b" " * 3600}

# Each source address has ephemeral ports of its own.
SOURCES = itertools.cycle(f"127.0.1.{last}" for last in range(1, 9))


class Connection:
    """One place at one address: a connection, or the time of the next one."""

    def __init__(self, kind, address):
        self.kind, self.address = kind, address
        self.socket = None
        self.opened_at = 0.0
        self.was_open = False
        self.first = b"" if kind in ("silent", "head") else BODY
        self.drip = DRIPS.get(kind, b"")

    def open(self, poll):
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.socket.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        self.socket.bind((next(SOURCES), 0))
        self.opened_at = time.monotonic()
        self.unsent, self.n_sent = self.first, 0
        self.n_pieces = BODY_BYTES // len(PIECE) - 1 if self.kind == "unfinished" else 0
        code = self.socket.connect_ex(self.address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, "connect")
        poll.register(self.socket, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP)

    def close(self, poll):
        poll.unregister(self.socket)
        self.socket.close()
        self.socket = None

    def write(self):
        """Sends what is due. Returns whether more is to be sent at once."""
        self.was_open = True
        while self.unsent or self.n_pieces:
            if not self.unsent:
                self.unsent, self.n_pieces = PIECE, self.n_pieces - 1
            try:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
            except BlockingIOError:
                return True
        return False

    def tick(self):
        """Sends the byte of this second."""
        if self.socket and self.was_open and self.n_sent < len(self.drip) and not self.unsent:
            self.socket.send(self.drip[self.n_sent : self.n_sent + 1], socket.MSG_DONTWAIT)
            self.n_sent += 1


def main():
    kind, count, per_second = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    addresses = [(host, int(port)) for host, port in (address.rsplit(":", 1) for address in sys.argv[4:])]
    connections = [Connection(kind, address) for _ in range(count) for address in addresses]
    closed = collections.deque(connections)
    by_fd, poll = {}, select.epoll()
    n_opened, n_never_open, began, ticked = 0, len(connections), time.monotonic(), time.monotonic()
    while True:
        now = time.monotonic()
        may_open = int((now - began) * per_second * len(addresses)) - n_opened
        # What was not opened in time is not caught up with in a burst.
        if may_open > 64:
            began += (may_open - 64) / (per_second * len(addresses))
        for _ in range(min(may_open, 64)):
            if not closed or (closed[0].opened_at and now < closed[0].opened_at + AGAIN_S):
                break
            one = closed.popleft()
            one.open(poll)
            by_fd[one.socket.fileno()] = one
            n_opened += 1
        for fd, events in poll.poll(0.01, 256):
            one, is_new = by_fd[fd], not by_fd[fd].was_open
            try:
                if events & (select.EPOLLERR | select.EPOLLHUP | select.EPOLLRDHUP):
                    raise ConnectionError
                if events & select.EPOLLIN and not one.socket.recv(1 << 16):
                    raise ConnectionError
                if events & select.EPOLLOUT and not one.write():
                    poll.modify(fd, select.EPOLLIN | select.EPOLLRDHUP)
            except ConnectionError:
                one.was_open = one.was_open or not events & select.EPOLLERR
                del by_fd[fd]
                one.close(poll)
                if kind != "unfinished":
                    closed.append(one)
            if is_new and one.was_open:
                n_never_open -= 1
                if not n_never_open:
                    print("open", flush=True)
        if now >= ticked + 1:
            ticked = now
            for one in connections if kind in DRIPS else []:
                try:
                    one.tick()
                except (BlockingIOError, ConnectionError):
                    pass  # The poll says that it is closed.


main()
