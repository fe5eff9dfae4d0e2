"""Links and sums between GPUs over NCCL, arranged so that they cannot deadlock.

A send, a receive or a collective of NCCL is a kernel on every rank that takes part. The kernel occupies multiprocessors
and spins until the kernels of the other ranks run. Meanwhile, several CUDA calls wait for the whole device and hold a
lock of the driver while they wait: the first launch of a kernel, the first product of cuBLAS, and freeing memory
(benchmarks/device_waits.py). So a rank can be kept from launching its side of an operation by its own device, because
the device spins in another operation, whose other side is blocked in the same way. This is a deadlock. Even a call that
has launched its kernel may be kept from returning, because it creates an event afterwards. Five rules exclude
deadlocks, no matter what is loaded, compiled, allocated or freed at any time:

1. Communicators are created and connected before the first action, in the same order on all ranks, because the hosts of
   all ranks must take part in both.
2. An operation is launched only when the inputs of every rank are ready on its device.
3. No stream waits for another rank. A thread of the host waits until a message has arrived or a sum is complete, and
   only then enqueues work that needs it. So a late rank never blocks a queue of the device.
4. A rank takes part in one launch at a time. Every rank has one lock, its turn. An operation acquires the turns of all
   its ranks, in ascending order of rank, before the first of them launches. A rank releases its turn when its own call
   has returned.
5. Messages between hosts, including those that coordinate turns, go over sockets and gloo, which need no device.

Why these rules suffice: let t(X) be the time at which operation X had acquired all its turns. Consider a rank A that
waits for its device. Either it waits for kernels whose other sides are launched; these end when their bytes are
transferred. Or it waits for some X that A has launched and B has not. B holds its turn for X at least until it has
launched. If B is blocked too, it is blocked by some Y that B launched and C did not. B got its turn for X after that
launch, so t(Y) < t(X). From rank to rank these times get earlier, so the waits cannot form a cycle. The last rank of
the chain has nothing to wait for: it launches, and then all the others finish one after the other. Turns are acquired
in one global order, so waiting for turns cannot form a cycle either. tests/pipeline/test_nccl_rules.py plays through
every order of events, with hosts that may be blocked at any moment, and finds the deadlocks that appear when rule 4 is
weakened.

The rules also keep multiprocessors free: an NCCL kernel runs only for as long as its transfer takes, and not for as
long as the slower stage computes.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist

from .link import Link, Message, Spec, Waiting, peer_lost
from .streams import await_device, borrow_stream, look_until
from .wire import Wire

FOREVER = timedelta(days=365)
"""Time-out of groups whose waits have a time limit elsewhere. If NCCL's own time-out expires, NCCL ends the process
with a core dump."""
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Gathers one tensor of every rank in one tensor. torch 2.13 has the first name and warns of the second."""
LINK_BLOCKS = 2
"""Number of thread blocks, and so the maximum number of multiprocessors, that one transfer between stages may
occupy."""
_END, _TAKE, _TAKEN = -1, -2, -3


def prepare_environment() -> None:
    """Sets environment variables of NCCL. They leave time-outs and errors to slipstream, and make NCCL connect all
    algorithms when a communicator is created. Variables that the user has set are kept. Call it before the first
    communicator."""
    for name, value in {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
        "NCCL_RUNTIME_CONNECT": "0",
    }.items():
        os.environ.setdefault(name, value)


def pretend_to_be_a_host(rank: int) -> None:
    """Lets several ranks share a GPU, which NCCL refuses within one host. Each rank claims to be a host of its own, so
    that they communicate over sockets. Call it before the first communicator."""
    os.environ["NCCL_HOSTID"] = f"slipstream-{rank}"
    for name, value in {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_NTHREADS": "2",  # these two settings make it 1.5 times as fast on one machine
        "NCCL_NSOCKS_PERTHREAD": "4",
    }.items():
        os.environ.setdefault(name, value)


def new_group(ranks: Sequence[int], device: torch.device | None, max_blocks: int | None) -> dist.ProcessGroup:
    """Creates a communicator. Given a device, it is connected when this returns, and otherwise at its first use. Every
    rank creates every group, in the same order."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_blocks is not None:
        options.config.max_ctas = max_blocks
    with warnings.catch_warnings():  # the options have a time-out too, but it has no public name and no effect
        warnings.filterwarnings("ignore", "backend_options._timeout was specified")
        return dist.new_group(list(ranks), backend="nccl", timeout=FOREVER, pg_options=options, device_id=device)


class NcclLink(Link):
    """One end of one direction between two neighbours. It has a thread that sends or receives."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        wire: Wire,
        turn: threading.Lock,
        stage: int,
        peer: int,
        peer_rank: int,
        is_lower: bool,
        device: torch.device,
        timeout_seconds: float,
        sends: bool,
    ) -> None:
        """`group` is a communicator of the two ranks, for this direction only. `turn` is the lock of this rank (rule
        4). `is_lower` says whether this rank is lower than the peer's."""
        self._group, self._wire, self._turn, self._device = group, wire, turn, device
        self._stage, self._peer, self._peer_rank, self._is_lower = stage, peer, peer_rank, is_lower
        self._timeout_seconds, self._sends = timeout_seconds, sends
        self._outgoing: SimpleQueue[tuple[Message, torch.cuda.Event] | None] = SimpleQueue()
        self._arrived: SimpleQueue[Message | Exception] = SimpleQueue()
        self._sent = threading.Condition()
        self._num_unsent = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run,
            args=(self._send_all if sends else self._receive_all,),
            name=f"{'to' if sends else 'from'} stage {peer}",
            daemon=True,
        )

    def connect(self) -> None:
        """Sends one number, so that both ends are connected, and starts the thread."""
        number = torch.zeros(1, device=self._device)
        operation = dist.isend if self._sends else dist.irecv
        work = operation(number, self._peer_rank, group=self._group)
        assert work is not None
        work.wait()
        await_device(self._stage, self._timeout_seconds, lambda: f"the connection with stage {self._peer}")
        self._thread.start()

    # ---- the stage's side

    def send(self, kind: str, message: Message, waiting: Waiting) -> None:
        self._check_sender(waiting)
        message = tuple(tensor.contiguous() for tensor in message)
        ready = torch.cuda.Event()
        ready.record()
        with self._sent:
            self._num_unsent += 1
        self._outgoing.put((message, ready))

    def expect(self, kind: str) -> None:
        """Does nothing: a message is received as soon as it is ready, announced or not. The schedule bounds the number
        of messages that can be waiting."""

    def take(self, waiting: Waiting) -> Message:
        try:
            message = self._arrived.get(timeout=self._timeout_seconds)
        except Empty:
            raise peer_lost(self._stage, self._peer, self._timeout_seconds, waiting) from None
        if isinstance(message, Exception):
            raise peer_lost(self._stage, self._peer, None, waiting) from message
        stream = torch.cuda.current_stream()
        for tensor in message:
            tensor.record_stream(stream)
        return message

    def flush(self) -> None:
        with self._sent:
            is_done = self._sent.wait_for(lambda: not self._num_unsent or self._error, self._timeout_seconds)
        waiting = lambda: "its last messages to be taken"  # noqa: E731
        self._check_sender(waiting)
        if not is_done:
            raise peer_lost(self._stage, self._peer, self._timeout_seconds, waiting)

    def _check_sender(self, waiting: Waiting) -> None:
        if self._error is not None:
            raise peer_lost(self._stage, self._peer, None, waiting) from self._error

    def close(self) -> None:
        """Ends the thread. Call it after a flush. The sending end notifies the receiving end."""
        if self._sends:
            self._outgoing.put(None)
        self._thread.join(self._timeout_seconds)
        self._wire.close()

    # ---- the thread's side

    def _run(self, work: Callable[[], None]) -> None:
        torch.cuda.set_device(self._device)
        try:
            with torch.cuda.stream(borrow_stream(self, self._device, priority=-1)):
                work()
        except Exception as error:  # the stage gets this error at its next call
            with self._sent:
                self._error = error
                self._sent.notify_all()
            self._arrived.put(error)

    def _send_all(self) -> None:
        while (item := self._outgoing.get()) is not None:
            message, ready = item
            look_until(ready)
            spec = Spec.of(message).encode()
            self._transfer(dist.isend, message, spec)
            del item, message  # free the memory of the message as soon as possible
            with self._sent:
                self._num_unsent -= 1
                self._sent.notify_all()
        self._wire.tell(_END)

    def _receive_all(self) -> None:
        while (word := self._wire.hear())[0] != _END:
            spec = Spec.decode(word)
            message = tuple(torch.empty(shape, dtype=dtype, device=self._device) for dtype, shape in spec.tensors)
            self._transfer(dist.irecv, message)
            self._arrived.put(message)
            del message

    def _transfer(self, operation: Callable[..., dist.Work | None], message: Message, spec: Sequence[int] = ()) -> None:
        """Launches this side when the turns of both ranks are acquired, and returns when the bytes are transferred.
        `spec` is given on the sender only. The sender starts the exchange by sending it to the receiver."""
        if self._is_lower:
            with self._turn:
                self._wire.tell(*(spec or (_TAKE,)))
                self._wire.hear()
                works = [operation(tensor, self._peer_rank, group=self._group) for tensor in message]
        else:
            if spec:
                self._wire.tell(*spec)
                self._wire.hear()
            with self._turn:
                self._wire.tell(_TAKEN)
                works = [operation(tensor, self._peer_rank, group=self._group) for tensor in message]
        for work in works:
            if work is not None:
                work.wait()
        over = torch.cuda.Event()
        over.record()
        look_until(over)


class Circle:
    """A group of ranks that run collectives, one after the other. Every call waits until its collective is complete."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hosts: dist.ProcessGroup,
        turn: threading.Lock,
        ranks: Sequence[int],
        rank: int,
        stage: int,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        """`group` is the communicator. `hosts` has the same ranks, over gloo. `turn` is the lock of this rank (rule
        4)."""
        self.group, self._hosts, self._turn, self._stage, self._device = group, hosts, turn, stage, device
        self._timeout_seconds, self._timeout = timeout_seconds, timedelta(seconds=timeout_seconds)
        members = sorted(ranks)
        place = members.index(rank)
        self._lower = members[place - 1] if place > 0 else None
        self._higher = members[place + 1] if place + 1 < len(members) else None
        self._first, self._size = members[0], len(members)

    def connect(self) -> None:
        """Runs every kind of collective once, so that nothing remains to be set up later."""
        number = torch.zeros(self._size, device=self._device)
        for post in (
            lambda: dist.all_reduce(number, group=self.group, async_op=True),
            lambda: dist.reduce(number, self._first, group=self.group, async_op=True),
            lambda: dist.broadcast(number, self._first, group=self.group, async_op=True),
            lambda: all_gather(number, number[:1].clone(), group=self.group, async_op=True),
        ):
            work = post()
            assert work is not None
            work.wait()
        await_device(self._stage, self._timeout_seconds, lambda: "the connections between replicas or tied stages")

    def run(self, launch: Callable[[], Sequence[dist.Work | None]], waiting: Waiting) -> None:
        """Launches a collective and returns when it is complete on this rank's device. All ranks call it, in the same
        order."""
        await_device(self._stage, self._timeout_seconds, waiting)
        self._meet(waiting)  # before any rank takes its turn, so that turns are held only briefly
        word = torch.zeros(1)
        if self._lower is not None:
            self._wait(dist.irecv(word, self._lower, group=self._hosts), waiting)
        with self._turn:
            if self._higher is not None:
                self._wait(dist.isend(word, self._higher, group=self._hosts), waiting)
            self._meet(waiting)
            works = launch()
        for work in works:
            if work is not None:
                work.wait()
        await_device(self._stage, self._timeout_seconds, waiting)

    def _meet(self, waiting: Waiting) -> None:
        """Returns when all ranks have called it."""
        self._wait(dist.all_reduce(torch.zeros(1), group=self._hosts, async_op=True), waiting)

    def _wait(self, work: dist.Work | None, waiting: Waiting) -> None:
        assert work is not None
        started = time.monotonic()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            is_silent = time.monotonic() - started >= self._timeout_seconds
            raise peer_lost(self._stage, None, self._timeout_seconds if is_silent else None, waiting) from error
