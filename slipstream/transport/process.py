"""Implements `ProcessTransport`: one stage per process, over torch.distributed.

On CPUs it uses gloo, and shared memory between processes of one machine (shared_memory.py). Between GPUs it uses NCCL,
with the rules in nccl.py that prevent deadlocks. Each gloo link has a process group of its own, so messages only need
to be in order within a link.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .base import Exchange, Gathering, Transport
from .buckets import Bucket, make_buckets, on_host
from .collectives import AssemblyGathering, CircleGathering, ProcessGathering, ReplicaExchange, present
from .failures import leave_failure, read_failure
from .host_staging import StagedLink
from .link import PeerLost, Waiting, peer_lost
from .mesh import Mesh
from .nccl import LINK_BLOCKS, Circle, NcclLink, prepare_environment
from .nccl import new_group as new_nccl_group
from .process_link import BrokenWork, ProcessLink
from .shared_memory import Assembly, Ends, SharedMemoryLink, assemble, connect, shared_edges
from .watchdog import Watchdog
from .wire import Wire, open_wire

_POLL_SECONDS = 0.0005


class ProcessTransport(Transport):
    """The transport of one stage of one replica, which has a process of its own.

    Where stages share a machine and compute on CPUs, torch.distributed is not initialised until replicas or tied
    weights need it: every gloo group has a thread that wakes up a hundred times a second.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        mesh: Mesh,
        device: torch.device,
        timeout_seconds: float,
        shared_memory: bool = True,
        backend: str = "auto",
        is_staged: bool | None = None,
        failures: dist.Store | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """Connects this stage with the others.

        backend    "auto": NCCL between GPUs and gloo between CPUs
        is_staged  send messages through host memory; None means: if the backend cannot access the memory of a GPU
        failures   the store in which to record failures; None means `store`
        """
        self._watchdog = watchdog
        self._backend = ("nccl" if device.type == "cuda" else "gloo") if backend == "auto" else backend
        self._is_staged = (device.type == "cuda" and self._backend == "gloo") if is_staged is None else is_staged
        self.store, self._failures, self._rank, self._mesh = store, failures or store, rank, mesh
        self.replica, self.stage = mesh.place(rank)
        self.num_replicas, self.num_stages = mesh.num_replicas, mesh.num_stages
        self.device, self.timeout_seconds = device, timeout_seconds
        self._timeout = timedelta(seconds=timeout_seconds)
        self._num_joined = self._num_told = 0
        self._links: list[ProcessLink | SharedMemoryLink | StagedLink | NcclLink] = []
        self._groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self._circles: dict[tuple[int, ...], Circle] = {}
        """Groups for collectives over NCCL, by the stages that hold the same tied weights."""
        self._turn = threading.Lock()
        """Lock of this rank for launches over NCCL (rule 4 in nccl.py)."""
        self._assembly: Assembly | None = None
        self._replicas: dist.ProcessGroup | Circle | None = None
        self._sharing: dist.ProcessGroup | Circle | None = None
        if self._backend == "nccl":
            prepare_environment()
            self._join()
        is_local = shared_memory and device.type == "cpu"
        ends: dict[int, Ends] = {}
        if is_local:
            ends = connect(self._store_of(self.replica), self.stage, self.num_stages, timeout_seconds)
        with self.limit(lambda: "the making of its connections with the other stages"):
            for replica in range(mesh.num_replicas):
                self._open_edges(replica, ends, is_local)
            if mesh.num_replicas > 1:
                self._replicas = self._group_of_replicas()
            self._meet_all("the others to make their connections")

    def _group_of_replicas(self) -> dist.ProcessGroup | Circle:
        """Creates the groups of replicas of all stages, as every process must. Returns that of this stage."""
        groups = []
        for stage in range(self.num_stages):
            ranks = tuple(self._mesh.rank(replica, stage) for replica in range(self.num_replicas))
            groups.append(self._new_circle(ranks) if self._backend == "nccl" else self._new_group(ranks, self._backend))
        return present(groups[self.stage])

    def _new_circle(self, ranks: tuple[int, ...], max_blocks: int | None = None) -> Circle | None:
        """Creates a Circle. None means that this process is not among the ranks."""
        hosts = self._new_group(ranks, "gloo")
        group = new_nccl_group(ranks, self.device, max_blocks)
        if self._rank not in ranks:
            return None
        circle = Circle(group, hosts, self._turn, ranks, self._rank, self.stage, self.device, self.timeout_seconds)
        circle.connect()
        return circle

    def _store_of(self, replica: int) -> dist.Store:
        return dist.PrefixStore(f"replica {replica}", self.store)

    def _open_edges(self, replica: int, ends: dict[int, Ends], is_local: bool) -> None:
        """Opens the links of a replica, and its gather over all stages. Every process does so for every replica,
        because all processes must take part in creating a process group."""
        store, is_own = self._store_of(replica), replica == self.replica
        is_shared = shared_edges(store, self.num_stages) if is_local else [False] * (self.num_stages - 1)
        # Order the edges so that edges without a common stage can be opened at the same time.
        for edge in sorted(range(self.num_stages - 1), key=lambda edge: edge % 2):
            ranks = self._mesh.rank(replica, edge), self._mesh.rank(replica, edge + 1)
            is_end = is_own and self.stage in (edge, edge + 1)
            peer = 2 * edge + 1 - self.stage
            links: Sequence[ProcessLink | SharedMemoryLink | StagedLink | NcclLink]
            if self._backend == "nccl":
                links = self._open_nccl_edge(ranks, peer, is_end)
            elif is_shared[edge]:
                links = [
                    SharedMemoryLink(end, self.stage, peer, self.timeout_seconds, self._max_under_way)
                    for end in (ends[edge] if is_end else ())
                ]
            else:
                groups = [self._new_group(ranks, self._backend) for _ in range(2)]
                links = [self._link(peer, group) for group in groups if is_end]
            if not is_end:
                continue
            forward, backward = links
            self._links += links
            if self.stage == edge:
                self.forward_out, self.backward_in = forward, backward
            else:
                self.forward_in, self.backward_out = forward, backward
        is_assembled = is_local and all(is_shared)
        if is_assembled and is_own:
            meeting = assemble(store, self.stage, self.num_stages, self.timeout_seconds)
            self._assembly = Assembly(meeting, self.stage, self.timeout_seconds)
        if not is_assembled or self.num_replicas > 1:
            self._open(replica, tuple(range(self.num_stages)), "gloo")

    def _open_nccl_edge(self, ranks: tuple[int, int], peer: int, is_end: bool) -> Sequence[NcclLink]:
        groups = [new_nccl_group(ranks, self.device, LINK_BLOCKS) for _ in range(2)]
        if not is_end:
            return []
        links, rank = [], self.rank_of(peer)
        for direction, group in enumerate(groups):
            is_sender = (self.stage < peer) == (direction == 0)
            wire = self._open_wire(peer, f"wire/{min(self.stage, peer)}/{direction}", listens=self._rank > rank)
            link = NcclLink(
                group,
                wire,
                self._turn,
                self.stage,
                peer,
                rank,
                is_lower=self._rank < rank,
                device=self.device,
                timeout_seconds=self.timeout_seconds,
                sends=is_sender,
            )
            link.connect()
            links.append(link)
        return links

    def _open_wire(self, peer: int, name: str, listens: bool) -> Wire:
        try:
            return open_wire(self._store_of(self.replica), name, listens, self.timeout_seconds)
        except OSError as error:
            silent_seconds, reason = self.timeout_seconds if isinstance(error, TimeoutError) else None, str(error)
            raise peer_lost(self.stage, peer, silent_seconds, lambda: f"a connection with it ({reason})") from error

    def _link(self, peer: int, group: dist.ProcessGroup) -> ProcessLink | StagedLink:
        if not self._is_staged:
            return self._process_link(peer, group, self.device, pinned=False)
        host = torch.device("cpu")
        return StagedLink(self._process_link(peer, group, host, self.device.type == "cuda"), self.device)

    def _process_link(self, peer: int, group: dist.ProcessGroup, device: torch.device, pinned: bool) -> ProcessLink:
        wait = partial(self.wait, peer=peer)
        return ProcessLink(group, self.rank_of(peer), wait, self._max_under_way, device, pinned)

    def rank_of(self, stage: int) -> int:
        """Returns the rank of a stage in this replica."""
        return self._mesh.rank(self.replica, stage)

    def _join(self) -> None:
        self._num_joined += 1
        dist.init_process_group(
            "gloo",
            # The store still holds the entries of the previous group.
            store=dist.PrefixStore(f"group {self._num_joined}", self.store),
            rank=self._rank,
            world_size=self._mesh.size,
            timeout=self._timeout,
        )

    @contextmanager
    def process_group(self) -> Iterator[None]:
        """Initialises torch.distributed for the duration of the block, for code that needs it. All stages must call it
        together."""
        if dist.is_initialized():
            yield
            return
        self._join()
        try:
            yield
        finally:
            dist.destroy_process_group()

    def _max_under_way(self) -> int:
        return self.max_under_way

    def _new_group(self, ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
        """Creates a process group. Every rank creates every group, in the same order, whether or not it is a member:
        torch requires that."""
        if not dist.is_initialized():
            self._join()
        return dist.new_group(list(ranks), backend=backend, timeout=self._timeout)

    def open_group(self, stages: tuple[int, ...]) -> None:
        for replica in range(self.num_replicas):
            if self._backend != "nccl":
                self._open(replica, stages, self._backend)
                continue
            circle = self._new_circle(tuple(self._mesh.rank(replica, stage) for stage in stages), LINK_BLOCKS)
            if circle is not None:
                self._circles[stages] = circle
        self._meet_all("the others to connect stages with tied weights")

    def _open(self, replica: int, stages: tuple[int, ...], backend: str) -> None:
        group = self._new_group(tuple(self._mesh.rank(replica, stage) for stage in stages), backend)
        if replica == self.replica:
            self._groups[stages, backend] = group

    def gather(self, tensor: Tensor, stages: tuple[int, ...]) -> Gathering:
        if tensor.is_cuda and self._backend == "nccl":
            return CircleGathering(self._circles[stages], tensor, len(stages))
        backend = "gloo"
        if len(stages) == self.num_stages:
            if self._assembly is not None and tensor.nbytes * self.num_stages <= Assembly.MAX_BYTES:
                return AssemblyGathering(self._assembly, tensor, self.num_stages)
            if (stages, backend) not in self._groups:  # happens only with one replica
                self._open(0, stages, backend)
        group, device = self._groups[stages, backend], tensor.device
        if tensor.is_cuda:
            tensor = on_host(tensor)
        gathered = [torch.empty_like(tensor) for _ in stages]
        work = present(dist.all_gather(gathered, tensor, group=group, async_op=True))
        return ProcessGathering(self.wait, work, tensor, gathered, device)

    def wait(self, work: dist.Work | BrokenWork, waiting: Waiting, peer: int | None = None) -> None:
        """Blocks until `work`, over gloo, is done."""
        started = time.monotonic()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            is_silent = time.monotonic() - started >= self.timeout_seconds
            raise peer_lost(self.stage, peer, self.timeout_seconds if is_silent else None, waiting) from error

    def add_replicas(self, tensors: Sequence[Tensor], owners: Sequence[int] | None = None) -> Exchange:
        group, circle = _group_and_circle(self._replicas)

        def start(bucket: Bucket) -> Any:
            if bucket.owner is None:
                return dist.all_reduce(bucket.flat, group=group, async_op=True)
            owner = self._mesh.rank(bucket.owner, self.stage)
            return dist.reduce(bucket.flat, owner, group=group, async_op=True)

        buckets = make_buckets(tensors, owners or [None] * len(tensors), self._is_staged)
        return ReplicaExchange(self.wait, self.replica, buckets, start, receives=False, circle=circle)

    def open_sharing(self) -> None:
        if self._sharing is None:
            self._sharing = self._group_of_replicas()
            self._meet_all("the others to connect replicas")

    def share(self, tensors: Sequence[Tensor], owners: Sequence[int], aside: bool = False) -> Exchange:
        group, circle = _group_and_circle(self._sharing if aside else self._replicas)

        def start(bucket: Bucket) -> Any:
            assert bucket.owner is not None
            return dist.broadcast(bucket.flat, self._mesh.rank(bucket.owner, self.stage), group=group, async_op=True)

        return ReplicaExchange(
            self.wait, self.replica, make_buckets(tensors, owners, self._is_staged), start, receives=True, circle=circle
        )

    def tell_first(self, numbers: Sequence[int]) -> None:
        self._num_told += 1
        self._store_of(self.replica).set(f"told {self._num_told}", json.dumps(list(numbers)))

    def hear_last(self, waiting: Waiting) -> list[int]:
        self._num_told += 1
        store, key = self._store_of(self.replica), f"told {self._num_told}"
        deadline = time.monotonic() + self.timeout_seconds
        try:
            # Not store.wait: other threads could not use the store meanwhile, for example to record a failure.
            while not store.check([key]):
                if (failure := read_failure(self._failures)) is not None:
                    raise PeerLost(f"{failure}: stage {self.stage} was waiting for {waiting()}")
                if time.monotonic() > deadline:
                    raise peer_lost(self.stage, self.num_stages - 1, self.timeout_seconds, waiting)
                time.sleep(_POLL_SECONDS)
            told: list[int] = json.loads(store.get(key))
            store.delete_key(key)
        except dist.DistError as error:
            raise peer_lost(self.stage, None, None, waiting) from error
        return told

    def fail(self, message: str) -> str:
        if self.num_replicas > 1:
            message = f"replica {self.replica}: {message}"
        return leave_failure(self._failures, message)

    def _meet_all(self, what: str) -> None:
        """Waits for all ranks, over NCCL only: there all ranks create and destroy connections together, and do nothing
        else meanwhile."""
        if self._backend == "nccl":
            self.wait(present(dist.all_reduce(torch.zeros(1), async_op=True)), lambda: what)

    def limit(self, what: Waiting) -> AbstractContextManager[None]:
        # The waits in Python time out a little earlier, with a message of their own.
        return nullcontext() if self._watchdog is None else self._watchdog.limit(self.timeout_seconds + 2, what)

    def flush(self) -> None:
        for link in self._links:
            link.flush()

    def close(self) -> None:
        for link in self._links:
            link.close()
        if self._assembly is not None:
            self._assembly.close()
        if dist.is_initialized():
            self._meet_all("the others to leave")  # all members of a communicator must destroy it together
            dist.destroy_process_group()


def _group_and_circle(group: dist.ProcessGroup | Circle | None) -> tuple[dist.ProcessGroup, Circle | None]:
    return (group.group, group) if isinstance(group, Circle) else (present(group), None)
