"""A cable with faults: forwards Ethernet frames between two interfaces with delay, loss and a rate, or in one direction.

It also works in kernels without netem. Offloads must be off at the sender (see `plain` below). Then a frame is complete,
with its checksums, as on a real cable.

Usage: cable.py carry NEAR FAR DELAY_MS LOSS BYTES_PER_SECOND SEED DIRECTION
       cable.py plain INTERFACE
BYTES_PER_SECOND 0 is no limit. DIRECTION is both, or out: then no frame goes from FAR to NEAR.
"""

import ctypes
import fcntl
import heapq
import random
import select
import socket
import struct
import sys
import time

ETH_P_ALL = 3
PACKET_OUTGOING = 4
# The capacity of a switch's port. Further frames are dropped.
BACKLOG_MAX_S = 0.5

SIOCETHTOOL = 0x8946
TX_CHECKSUMS, SEGMENTS, MERGED = 0x17, 0x1F, 0x24


def plain(interface):
    """Turns off the offloads of an interface: the kernel then computes checksums and cuts frames itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in (TX_CHECKSUMS, SEGMENTS, MERGED):
            value = ctypes.create_string_buffer(struct.pack("II", command, 0), 8)
            fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP", interface.encode(), ctypes.addressof(value)))


class Direction:
    """Frames in transit in one direction."""

    def __init__(self, source, sink, delay_s, loss, rate, draw):
        self.source, self.sink = source, sink
        self.delay_s, self.loss, self.rate, self.draw = delay_s, loss, rate, draw
        self.free_at = 0.0

    def due(self, frame, now):
        """The arrival time of a frame; None if it is lost."""
        if self.draw.random() < self.loss:
            return None
        start = max(now, self.free_at)
        if start - now > BACKLOG_MAX_S:
            return None
        self.free_at = start + (len(frame) / self.rate if self.rate else 0.0)
        return self.free_at + self.delay_s


def opened(interface):
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.bind((interface, ETH_P_ALL))
    end.setblocking(False)
    return end


def carry(near, far, delay_ms, loss, rate, seed, direction):
    near, far, draw = opened(near), opened(far), random.Random(int(seed))
    shape = (float(delay_ms) / 1e3, float(loss), float(rate), draw)
    ways = {near: Direction(near, far, *shape), far: Direction(far, near, *shape)}
    if direction == "out":
        ways[far].loss = 1.1
    under_way, n_taken = [], 0
    print("carrying", flush=True)
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(list(ways), [], [], wait)[0]:
            frame, sender = end.recvfrom(65536)
            due = None if sender[2] == PACKET_OUTGOING else ways[end].due(frame, time.monotonic())
            if due is not None:
                n_taken += 1
                heapq.heappush(under_way, (due, n_taken, ways[end].sink, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, sink, frame = heapq.heappop(under_way)
            try:
                sink.send(frame)
            except OSError as error:
                # The port is down or full: the frame is lost.
                print(error, file=sys.stderr)


if __name__ == "__main__":
    {"carry": carry, "plain": plain}[sys.argv[1]](*sys.argv[2:])
