"""Links and sums between GPUs over NCCL, arranged so that they cannot hang.

A send, a receive or a collective of NCCL is a kernel on every rank that takes part. It occupies multiprocessors and
spins until the kernels of the others are there. Meanwhile much of CUDA waits for the whole device and holds a lock of
the driver until then: the first launch of a kernel, the first product of cuBLAS, memory that is freed
(benchmarks/device_waits.py). So a rank can be kept from launching its side of an operation by its own device, which
spins in another operation, whose other side is kept back in the same way. Then nothing moves ever again. Even a call
that has launched its kernel may be kept from returning, because it makes an event afterwards. Five rules exclude this,
whatever is loaded, compiled, allocated or freed at any time:

1. Communicators are made and connected before the first action, in one order for all ranks, because both are meetings
   of the hosts.
2. An operation is launched only when what every rank gives to it is ready on its device.
3. No stream waits for another rank. A thread of the host waits until a message has arrived or a sum is there, and only
   then is work enqueued that needs it. So no queue of the device is ever blocked by a rank that is late.
4. A rank takes part in one launch at a time. It has one turn to give: an operation takes those of all its ranks, in
   ascending order, before the first of them launches. A rank gives it back when its own call has returned.
5. What hosts tell each other, and how they take turns, goes over sockets and gloo, which need no device.

Why they suffice: let t(X) be the moment at which operation X had all its turns. A rank A that waits for its device
waits for kernels whose other sides are launched, which end when their bytes have passed; or for some X that A has
launched and B has not. B holds its turn for X at least until it has launched. If B is held up too, it is by some Y
that B launched and C did not, and B got its turn for X after that launch: so t(Y) < t(X). From rank to rank the moments
lie further back, so the waits cannot close a circle; the last of them has nothing to wait for, launches, and all end
one after the other. Turns are taken in one order, so nobody waits in a circle for those.
tests/pipeline/test_nccl_rules.py plays this through every order of events, with hosts that may be held up at any
moment, and finds the deadlocks that appear once rule 4 is weakened.

The rules also keep multiprocessors free: a kernel of NCCL runs for as long as its bytes take, and not for as long as
the slower stage computes.
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
"""Time-out of groups whose waits are timed elsewhere: NCCL ends a process that exceeds its own with a core dump."""
LINK_BLOCKS = 2
"""Thread blocks, and so at most as many multiprocessors, that one transfer between stages may occupy."""
_END, _TAKE, _TAKEN = -1, -2, -3


def prepare_environment() -> None:
    """Leaves time-outs and errors to us, and connects all algorithms when a communicator is made. Settings of the user
    win. Call it before the first communicator."""
    for name, value in {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
        "NCCL_RUNTIME_CONNECT": "0",
    }.items():
        os.environ.setdefault(name, value)


def pretend_to_be_a_host(rank: int) -> None:
    """Lets several ranks share a GPU, which NCCL refuses within one host. They then reach each other over sockets, as
    hosts do. Call it before the first communicator."""
    os.environ["NCCL_HOSTID"] = f"slipstream-{rank}"
    for name, value in {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_NTHREADS": "2",  # with these two, half as fast again on one machine
        "NCCL_NSOCKS_PERTHREAD": "4",
    }.items():
        os.environ.setdefault(name, value)


def new_group(ranks: Sequence[int], device: torch.device, max_blocks: int | None) -> dist.ProcessGroup:
    """A communicator, connected when this returns. Every rank makes every group, in the same order."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_blocks is not None:
        options.config.max_ctas = max_blocks
    with warnings.catch_warnings():  # the options have a time-out too, which has no public name and does not count
        warnings.filterwarnings("ignore", "backend_options._timeout was specified")
        return dist.new_group(list(ranks), backend="nccl", timeout=FOREVER, pg_options=options, device_id=device)


class NcclLink(Link):
    """One end of one direction between two neighbours, with a thread of its own that sends, or receives."""

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
        """group: a communicator of the two, of this direction alone. turn: this rank's. is_lower: in rank, than the
        peer."""
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
        """Passes one number, so that both ends are connected, and starts to work."""
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
        """A message is received as soon as it is ready, whether or not it has been announced. The schedule bounds how
        many there can be."""

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
        """After a flush. The receiving end hears of it from the sending one."""
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
        except Exception as error:  # for the stage, when it next asks
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
            del item, message  # the sender keeps its memory no longer than it has to
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
        """Launches this side once both ranks have given it their turns, and returns when the bytes have passed. spec:
        of the sender, which tells it to the receiver, and so begins."""
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
    """Ranks that take part in collectives, one after the other. Whoever calls waits until each is over."""

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
        """group: the communicator. hosts: the same ranks, over gloo. turn: this rank's."""
        self.group, self._hosts, self._turn, self._stage, self._device = group, hosts, turn, stage, device
        self._timeout_seconds, self._timeout = timeout_seconds, timedelta(seconds=timeout_seconds)
        members = sorted(ranks)
        place = members.index(rank)
        self._lower = members[place - 1] if place > 0 else None
        self._higher = members[place + 1] if place + 1 < len(members) else None
        self._first, self._size = members[0], len(members)

    def connect(self) -> None:
        """Every kind of collective once, so that nothing is left to be set up later."""
        number = torch.zeros(self._size, device=self._device)
        for post in (
            lambda: dist.all_reduce(number, group=self.group, async_op=True),
            lambda: dist.reduce(number, self._first, group=self.group, async_op=True),
            lambda: dist.broadcast(number, self._first, group=self.group, async_op=True),
            lambda: dist.all_gather_into_tensor(number, number[:1].clone(), group=self.group, async_op=True),
        ):
            work = post()
            assert work is not None
            work.wait()
        await_device(self._stage, self._timeout_seconds, lambda: "the connections between replicas or tied stages")

    def run(self, launch: Callable[[], Sequence[dist.Work | None]], waiting: Waiting) -> None:
        """Returns when what was launched is over on this rank's device. All ranks call it, in the same order."""
        await_device(self._stage, self._timeout_seconds, waiting)
        self._meet(waiting)  # before anybody takes a turn, so that turns are held for a moment only
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
        """Returns when all ranks have come here."""
        self._wait(dist.all_reduce(torch.zeros(1), group=self._hosts, async_op=True), waiting)

    def _wait(self, work: dist.Work | None, waiting: Waiting) -> None:
        assert work is not None
        started = time.monotonic()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            is_silent = time.monotonic() - started >= self._timeout_seconds
            raise peer_lost(self._stage, None, self._timeout_seconds if is_silent else None, waiting) from error
