"""Links between processes of one machine: a message lies in shared memory, and a byte through a socket says so.

A gloo message wakes two threads on its way, gloo's and the stage's, and is copied through the kernel. Here the sender
copies it into a slot that the receiver has mapped too, and the byte wakes the receiver itself. Another byte comes back
for every slot that is free again, and late: when the receiver has nothing better to do than to wait for its next
message. There are slots enough for that, so nobody waits for one unless more is under way than the schedule says.

Two neighbours find each other through the store: the lower one opens a socket in a folder of its own and says where; if
the higher one can connect to it, they share a machine, and otherwise the edge is left to gloo.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .link import Link, Message, Spec, Waiting, peer_lost

_ALIGNMENT = 64
_NUMBER = struct.Struct("q")
_SENT, _TAKEN = b"s", b"t"


# ---- a link


@dataclass
class _Ring:
    """The slots of one kind of message, as either end sees them."""

    spec: Spec
    slots: list[Message]
    """Views of the shared memory."""
    num_passed: int = 0
    """Messages sent or taken so far."""
    num_freed: int = 0
    """Sender: how many of them it knows to be taken."""

    @property
    def slot(self) -> Message:
        return self.slots[self.num_passed % len(self.slots)]


def _map(spec: Spec, num_slots: int, memory: int) -> _Ring:
    """memory: a descriptor, which is closed: the mapping outlives it."""
    lengths = [shape.numel() * dtype.itemsize for dtype, shape in spec.tensors]
    strides = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
    try:
        size = max(1, num_slots * sum(strides))
        os.posix_fallocate(memory, 0, size)  # now, and not page by page in the first steps
        flat = torch.frombuffer(mmap.mmap(memory, size), dtype=torch.uint8)
    finally:
        os.close(memory)
    slots, offset = [], 0
    for _ in range(num_slots):
        message = []
        for (dtype, shape), length, stride in zip(spec.tensors, lengths, strides, strict=True):
            message.append(flat[offset : offset + length].view(dtype).view(shape))
            offset += stride
        slots.append(tuple(message))
    return _Ring(spec, slots)


class SharedMemoryLink(Link):
    """The sender's or the receiver's end of it."""

    def __init__(
        self, end: socket.socket, stage: int, peer: int, timeout_seconds: float, max_under_way: Callable[[], int]
    ) -> None:
        self._socket, self._stage, self._peer = end, stage, peer
        self._timeout_seconds, self._max_under_way = timeout_seconds, max_under_way
        self._rings: dict[str, _Ring] = {}
        self._under_way: deque[str] = deque()
        """Sender: kinds of the messages not known to be taken."""
        self._expected: deque[str] = deque()
        """Receiver: kinds of those to come."""
        self._num_untold = 0
        """Receiver: messages taken that the sender does not know of."""
        # The kernel keeps the time: a socket with a time-out of Python's would ask twice for every byte.
        whole, fraction = divmod(max(timeout_seconds, 1e-6), 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(whole), int(fraction * 1e6)))

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        ring = self._rings.get(kind)
        if ring is None:
            ring = self._rings[kind] = self._open(Spec.of(message))
        else:
            ring.spec.check(kind, message)
        while ring.num_passed - ring.num_freed == len(ring.slots):
            self._free(waiting)
        for place, tensor in zip(ring.slot, message, strict=True):
            place.copy_(tensor)
        ring.num_passed += 1
        self._under_way.append(kind)
        self._tell(_SENT)

    def _open(self, spec: Spec) -> _Ring:
        num_slots = self._max_under_way() + 1  # and one whose message has been taken, unknown to the sender
        memory = os.memfd_create("slipstream")
        ring = _map(spec, num_slots, os.dup(memory))
        numbers = [num_slots, *spec.encode()]
        with suppress(BrokenPipeError, ConnectionResetError):  # see _tell
            head = b"".join(map(_NUMBER.pack, [len(numbers), *numbers]))
            socket.send_fds(self._socket, [head], [memory])
        os.close(memory)
        return ring

    def _free(self, waiting: Waiting) -> None:
        """Waits until something has been taken; messages are taken in order."""
        for _ in self._hear(len(self._under_way), waiting):
            self._rings[self._under_way.popleft()].num_freed += 1

    def expect(self, kind: str) -> None:
        self._expected.append(kind)

    def take(self, waiting: Waiting) -> Message:
        kind = self._expected.popleft()
        self._tell_taken()
        if kind not in self._rings:
            self._rings[kind] = self._receive_ring(waiting)
        ring = self._rings[kind]
        self._hear(1, waiting)
        message = tuple(tensor.clone() for tensor in ring.slot)
        ring.num_passed += 1
        self._num_untold += 1
        return message

    def _tell_taken(self) -> None:
        if self._num_untold:
            self._tell(_TAKEN * self._num_untold)
            self._num_untold = 0

    def _receive_ring(self, waiting: Waiting) -> _Ring:
        descriptors: list[int] = []
        (length,) = _NUMBER.unpack(self._hear(_NUMBER.size, waiting, descriptors))
        rest = b""
        while len(rest) < length * _NUMBER.size:
            rest += self._hear(length * _NUMBER.size - len(rest), waiting)
        num_slots, *spec = (number for (number,) in _NUMBER.iter_unpack(rest))
        return _map(Spec.decode(spec), num_slots, descriptors[0])

    def _tell(self, word: bytes) -> None:
        """A peer that is gone is no error yet: it is one for whoever waits, who can say what for."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.send(word)

    def _hear(self, size: int, waiting: Waiting, descriptors: list[int] | None = None) -> bytes:
        """At least one byte and at most `size`, with whatever descriptors come along."""
        try:
            if descriptors is None:
                heard = self._socket.recv(size)
            else:
                heard, received, _, _ = socket.recv_fds(self._socket, size, 1)
                descriptors += received
        except BlockingIOError as error:
            raise peer_lost(self._stage, self._peer, self._timeout_seconds, waiting) from error
        except ConnectionResetError as error:
            raise peer_lost(self._stage, self._peer, None, waiting) from error
        if not heard:
            raise peer_lost(self._stage, self._peer, None, waiting)
        return heard

    def flush(self) -> None:
        """Waits until all that was sent is taken; what follows may have other shapes. Both ends call it."""
        self._tell_taken()
        while self._under_way:
            self._free(lambda: "its last messages to be taken")
        self._rings.clear()

    def close(self) -> None:
        self._socket.close()


# ---- who shares a machine

Ends = tuple[socket.socket, socket.socket]
"""Of an edge: for forwards and for backwards."""


def connect(
    store: dist.Store, stage: int, num_stages: int, timeout_seconds: float
) -> tuple[dict[int, Ends], list[bool]]:
    """This stage's ends, by edge; and for every edge of the pipeline whether its two stages share a machine. Edge e is
    between stages e and e + 1. All stages call it."""
    ends: dict[int, Ends] = {}
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder, socket.socket(socket.AF_UNIX) as listener:
        if stage < num_stages - 1:
            store.set(f"place/{stage}", _listen(listener, f"{folder}/edge"))
        if stage > 0:
            found = _join(store.get(f"place/{stage - 1}").decode())
            store.set(f"shared/{stage - 1}", "yes" if found else "no")
            if found:
                ends[stage - 1] = found
        if stage < num_stages - 1 and store.get(f"shared/{stage}") == b"yes":
            listener.settimeout(timeout_seconds)
            forward, backward = listener.accept()[0], listener.accept()[0]
            ends[stage] = forward, backward
    for pair in ends.values():
        for end in pair:
            end.setblocking(True)
    return ends, [store.get(f"shared/{edge}") == b"yes" for edge in range(num_stages - 1)]


def _listen(listener: socket.socket, path: str) -> str:
    """Where; empty if this machine cannot."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        listener.bind(path)
        listener.listen(2)
    except OSError:  # a path too long for a socket, or a file system without them
        return ""
    return path


def _join(path: str) -> Ends | None:
    """None if there is nothing at that place: it is another machine's."""
    forward, backward = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    try:
        if not path:
            raise FileNotFoundError(path)
        forward.connect(path)
        backward.connect(path)
    except OSError:
        forward.close()
        backward.close()
        return None
    return forward, backward
