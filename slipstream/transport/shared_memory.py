"""Links between processes of one machine: a message is in shared memory, and a byte over a socket announces it.

A gloo message wakes two threads on its way, one of gloo and that of the stage, and is copied through the kernel. Here
the sender copies the message into a slot of memory that the receiver has mapped too, and the byte wakes the receiver
directly. The number of messages taken is stored in the shared memory too. The sender reads it when it runs out of
slots. There are enough slots, so the sender waits for one only if more messages are in progress than the schedule
plans.

Vectors from every stage to every stage go through the first stage: see `Assembly`.

Two neighbours find each other through the store. The lower stage opens a socket in a temporary folder and publishes its
path. If the higher stage can connect to it, the two share a machine. Otherwise they use gloo.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .link import Link, Message, Spec, Waiting, peer_lost

_ALIGNMENT = 64
_NUMBER = struct.Struct("q")
_SENT, _FLUSHED = b"s", b"f"
_PATIENCE = 0.0002
"""Number of seconds between two checks for a free slot."""
_MAX_PACKET = 65536
"""Maximum size of a packet in bytes. A socket buffers three packets of this size before the sender has to wait."""


class _Wire:
    """One end of a socket connection."""

    def __init__(self, end: socket.socket, stage: int, peer: int | None, timeout_seconds: float) -> None:
        """`peer` is the stage that error messages name when the connection is closed or silent. None means that they
        name none."""
        self.socket = end
        self._stage, self._peer, self._timeout_seconds = stage, peer, timeout_seconds
        # The kernel checks the time-out: with a time-out set in Python, every receive would need a second system call.
        whole, fraction = divmod(max(timeout_seconds, 1e-6), 1)
        limit = struct.pack("ll", int(whole), int(fraction * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def tell(self, word: bytes) -> None:
        """Sends bytes. A peer that is gone does not raise an error here. It raises one in a later wait, where the
        message can say what the stage waited for."""
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                self.socket.send(word)
        except BlockingIOError as error:  # the socket is full, and the peer takes nothing
            waiting = lambda: "its messages to be taken"  # noqa: E731
            raise peer_lost(self._stage, self._peer, self._timeout_seconds, waiting) from error

    def check(self, waiting: Waiting, is_silent: bool) -> None:
        """Raises PeerLost if the peer is gone, or if `is_silent`. It only peeks at the socket: the peer sends nothing
        in this direction meanwhile."""
        try:
            is_gone = not self.socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
        except BlockingIOError:
            is_gone = False
        except ConnectionResetError:  # it exited without taking all messages
            is_gone = True
        if is_gone:
            raise peer_lost(self._stage, self._peer, None, waiting)
        if is_silent:
            raise peer_lost(self._stage, self._peer, self._timeout_seconds, waiting)

    def hear(self, size: int, waiting: Waiting, descriptors: list[int] | None = None) -> bytes:
        """Waits for at least one byte and returns at most `size` bytes. Adds received file descriptors to
        `descriptors`."""
        try:
            if descriptors is None:
                heard = self.socket.recv(size)
            else:
                heard, received, _, _ = socket.recv_fds(self.socket, size, 1)
                descriptors += received
        except BlockingIOError as error:
            raise peer_lost(self._stage, self._peer, self._timeout_seconds, waiting) from error
        except ConnectionResetError as error:
            raise peer_lost(self._stage, self._peer, None, waiting) from error
        if not heard:
            raise peer_lost(self._stage, self._peer, None, waiting)
        return heard


# ---- a link


@dataclass
class _Ring:
    """The slots for one kind of message, as one end sees them."""

    spec: Spec
    memory: mmap.mmap
    """Shared memory with the number of messages taken, followed by the slots."""
    slots: list[Message]
    """Tensors of each slot, as views of the memory."""
    num_passed: int = 0
    """Number of messages that this end has sent or taken so far."""
    num_freed: int = 0
    """Number of messages that the sender knows to be taken."""

    def next_slot(self) -> Message:
        slot = self.slots[self.num_passed % len(self.slots)]
        self.num_passed += 1
        return slot

    def tell_freed(self, number: int) -> None:
        """Publishes the number of messages that the receiver has taken. Call it only after a system call has followed
        the copy of the last of them: another core must not see the number before the copy is done."""
        _NUMBER.pack_into(self.memory, 0, number)

    def is_full(self) -> bool:
        """Tells the sender whether all slots hold messages that are not taken yet."""
        if self.num_passed - self.num_freed < len(self.slots):
            return False
        (self.num_freed,) = _NUMBER.unpack_from(self.memory)
        return self.num_passed - self.num_freed >= len(self.slots)


def _map(spec: Spec, num_slots: int, descriptor: int) -> _Ring:
    """Maps the shared memory behind `descriptor` into slots. Closes the descriptor, because the mapping outlives it."""
    lengths = [shape.numel() * dtype.itemsize for dtype, shape in spec.tensors]
    strides = [-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths]
    try:
        size = _ALIGNMENT + num_slots * sum(strides)
        os.posix_fallocate(descriptor, 0, size)  # allocate all pages now, not one by one during the first steps
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    slots, offset = [], _ALIGNMENT
    for _ in range(num_slots):
        message = []
        for (dtype, shape), length, stride in zip(spec.tensors, lengths, strides, strict=True):
            message.append(flat[offset : offset + length].view(dtype).view(shape))
            offset += stride
        slots.append(tuple(message))
    return _Ring(spec, memory, slots)


class SharedMemoryLink(Link):
    """The sender's or the receiver's end of a link through shared memory."""

    def __init__(
        self, end: socket.socket, stage: int, peer: int, timeout_seconds: float, max_under_way: Callable[[], int]
    ) -> None:
        self._wire = _Wire(end, stage, peer, timeout_seconds)
        self._timeout_seconds, self._max_under_way = timeout_seconds, max_under_way
        self._rings: dict[str, _Ring] = {}
        self._expected: deque[str] = deque()
        """Kinds of the messages that the receiver expects, in order."""
        self._is_sender = False

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        ring = self._rings.get(kind)
        if ring is None:
            ring = self._rings[kind] = self._open(Spec.of(message))
        else:
            ring.spec.check(kind, message)
        if ring.is_full():
            self._await_slot(ring, waiting)
        for place, tensor in zip(ring.next_slot(), message, strict=True):
            place.copy_(tensor)
        self._wire.tell(_SENT)

    def _await_slot(self, ring: _Ring, waiting: Waiting) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        while ring.is_full():
            self._wire.check(waiting, is_silent=time.monotonic() > deadline)
            time.sleep(_PATIENCE)

    def _open(self, spec: Spec) -> _Ring:
        self._is_sender = True
        # One more slot, for a message that is taken while the sender does not know it yet.
        num_slots = self._max_under_way() + 1
        memory = os.memfd_create("slipstream")
        ring = _map(spec, num_slots, os.dup(memory))
        numbers = [num_slots, *spec.encode()]
        with suppress(BrokenPipeError, ConnectionResetError):  # for the reason given in _Wire.tell
            head = b"".join(map(_NUMBER.pack, [len(numbers), *numbers]))
            socket.send_fds(self._wire.socket, [head], [memory])
        os.close(memory)
        return ring

    def expect(self, kind: str) -> None:
        self._expected.append(kind)

    def take(self, waiting: Waiting) -> Message:
        kind = self._expected.popleft()
        ring = self._rings.get(kind)
        if ring is None:
            ring = self._rings[kind] = self._receive_ring(waiting)
        self._wire.hear(1, waiting)
        ring.tell_freed(ring.num_passed)
        return tuple([tensor.clone() for tensor in ring.next_slot()])

    def _receive_ring(self, waiting: Waiting) -> _Ring:
        descriptors: list[int] = []
        (length,) = _NUMBER.unpack(self._wire.hear(_NUMBER.size, waiting, descriptors))
        rest = b""
        while len(rest) < length * _NUMBER.size:
            rest += self._wire.hear(length * _NUMBER.size - len(rest), waiting)
        num_slots, *spec = (number for (number,) in _NUMBER.iter_unpack(rest))
        return _map(Spec.decode(spec), num_slots, descriptors[0])

    def flush(self) -> None:
        """Waits until everything sent is taken. Later messages may have other shapes. Both ends call it."""
        if self._rings and self._is_sender:
            self._wire.hear(1, lambda: "its last messages to be taken")
        elif self._rings:
            self._wire.tell(_FLUSHED)
        self._rings.clear()

    def close(self) -> None:
        self._wire.socket.close()


# ---- gather over all stages


class Assembly:
    """Gathers vectors through the first stage, which ends a batch last and so finds those of the others already
    waiting.

    gloo passes vectors around a ring, in as many rounds as there are stages, and every round wakes a thread of every
    stage. Here every stage is woken once.
    """

    MAX_BYTES = 2**20
    """Maximum size of the vectors of all stages together, in bytes. Larger ones are faster over gloo."""

    def __init__(self, ends: Sequence[socket.socket], stage: int, timeout_seconds: float) -> None:
        """`ends` on the first stage are its sockets to the other stages, in order. On the others it is one socket, to
        the first."""
        self._is_first = stage == 0
        # The other stages receive only from the first one, whichever stage is late. So their error messages name no
        # stage.
        peers = range(1, len(ends) + 1) if self._is_first else [None]
        self._wires = [_Wire(end, stage, peer, timeout_seconds) for end, peer in zip(ends, peers, strict=True)]

    def gather(self, tensor: Tensor, num_stages: int, waiting: Waiting) -> list[Tensor]:
        own = tensor.flatten().view(torch.uint8).numpy().tobytes()
        size = _MAX_PACKET // num_stages
        rounds = [self._exchange(own[start : start + size], waiting) for start in range(0, len(own), size)]
        together = bytearray().join(part for parts in zip(*rounds, strict=True) for part in parts)
        return list(torch.frombuffer(together, dtype=tensor.dtype).view(num_stages, *tensor.shape))

    def _exchange(self, own: bytes, waiting: Waiting) -> list[bytes]:
        """Sends a packet of this stage and returns those of all stages. All have the same size."""
        if self._is_first:
            packets = [own, *(wire.hear(_MAX_PACKET, waiting) for wire in self._wires)]
            together = b"".join(packets)
            for wire in self._wires:
                wire.tell(together)
            return packets
        self._wires[0].tell(own)
        together = self._wires[0].hear(_MAX_PACKET, waiting)
        return [together[start : start + len(own)] for start in range(0, len(together), len(own))]

    def close(self) -> None:
        for wire in self._wires:
            wire.socket.close()


# ---- neighbours on the same machine

Ends = tuple[socket.socket, socket.socket]
"""Two sockets of an edge: for forward messages and for backward messages."""


def connect(store: dist.Store, stage: int, num_stages: int, timeout_seconds: float) -> dict[int, Ends]:
    """Connects this stage with those neighbours that share its machine, and returns the sockets by edge. Edge e is
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
    return ends


def shared_edges(store: dist.Store, num_stages: int) -> list[bool]:
    """Returns for every edge of a pipeline whether its two stages share a machine, as `connect` found out."""
    return [store.get(f"shared/{edge}") == b"yes" for edge in range(num_stages - 1)]


def assemble(store: dist.Store, stage: int, num_stages: int, timeout_seconds: float) -> list[socket.socket]:
    """Returns this stage's sockets for an Assembly. All stages call it, and all must share a machine."""
    if stage > 0:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.connect(store.get("assembly").decode())
        end.send(_NUMBER.pack(stage))
        return [end]
    ends: dict[int, socket.socket] = {}
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder, listener:
        path = f"{folder}/all"  # no longer than the path of an edge, which was short enough for a socket
        listener.bind(path)
        listener.listen(num_stages)
        listener.settimeout(timeout_seconds)
        store.set("assembly", path)
        while len(ends) < num_stages - 1:
            end, _ = listener.accept()
            end.settimeout(timeout_seconds)
            (other,) = _NUMBER.unpack(end.recv(_NUMBER.size))
            end.setblocking(True)
            ends[other] = end
    return [ends[other] for other in sorted(ends)]


def _listen(listener: socket.socket, path: str) -> str:
    """Starts to listen and returns the path of the socket. The path is empty if this machine does not support it."""
    if not hasattr(os, "memfd_create"):
        return ""
    try:
        listener.bind(path)
        listener.listen(2)
    except OSError:  # the path is too long for a socket, or the file system does not support sockets
        return ""
    return path


def _join(path: str) -> Ends | None:
    """Connects to the path of a neighbour. None means that no socket is there, so the neighbour is on another
    machine."""
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
