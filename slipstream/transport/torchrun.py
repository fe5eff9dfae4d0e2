"""Joins the processes that torchrun started, or that were started by hand with its environment variables."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from ..errors import PipelineError, StageFailure
from .environment import first_address, is_first_process, world_size
from .failures import leave_failure
from .link import PeerLost
from .stage_main import GRACE_SECONDS, LaunchOptions, Result, WorldWorker, run_stage
from .store_watch import StoreWatch
from .watchdog import GRACE_SECONDS as WATCHDOG_SECONDS

Identity = tuple[int, str, str]
MEETING_PAUSE = 0.01
"""Number of seconds between two checks of the first process for the others."""
KILL_SECONDS = WATCHDOG_SECONDS + 1
"""Number of seconds after a failure in which a process may end by itself. Rank 0 waits for the others, and a watchdog
for its process, both for less."""


def join_torchrun(worker: WorldWorker[Result], options: LaunchOptions) -> Result:
    size = world_size()
    if size != options.size:
        raise StageFailure(f"WORLD_SIZE = {size} processes were started and not {options.size}: make the two the same")
    _await_first_process(options.timeout_seconds)
    watch = None
    if not is_first_process() and not _launcher_keeps_store():
        watch = StoreWatch(int(os.environ["RANK"]), options.timeout)
    try:
        # -1: the store does not wait for the others. `meet` does, and knows which of them are missing.
        store, rank, _ = next(iter(dist.rendezvous("env://?world_size=-1", timeout=options.timeout)))
    except (OSError, RuntimeError, ValueError) as error:
        if is_first_process() and not _launcher_keeps_store():
            host, port = first_address()
            raise StageFailure(
                f"rank 0 cannot listen at MASTER_ADDR:MASTER_PORT = {host}:{port} ({error}): give its own "
                "address, and a port that nothing else uses"
            ) from None
        raise StageFailure(f"stage {os.environ['RANK']} does not find the others: {error}") from error
    try:
        word = meet(store, rank, size, options.timeout_seconds)
    except StageFailure:
        raise
    except (RuntimeError, ValueError) as error:
        raise StageFailure(f"stage {rank} does not find the others: {error}") from error
    own_store = dist.PrefixStore(word, store)
    own_store.set(f"process/{rank}", json.dumps(_identity(os.getpid())))
    if watch is not None:
        _end_first_too(watch, word)
    keeps_store = rank == 0 and not _launcher_keeps_store()
    is_done, seconds = False, options.timeout_seconds
    try:
        result = run_stage(worker, own_store, rank, options.on_gpu(int(os.environ.get("LOCAL_RANK", "0"))))
        is_done = True
        return result
    except PipelineError as error:  # another stage failed, and the others are about to notice
        is_done, seconds = True, GRACE_SECONDS
        if isinstance(error.__cause__, PeerLost) and error.__cause__.is_silent:
            with suppress(RuntimeError, ValueError):  # the store may be gone
                _end_later(_identities(own_store, set(range(size)) - {rank}), KILL_SECONDS)
        raise
    finally:
        if watch is not None:
            watch.close()
        if is_done:
            _take_leave(own_store, rank, range(1, size) if keeps_store else (), seconds)


def _await_first_process(timeout_seconds: float) -> None:
    """Waits until the process with rank 0 can be reached. torch would try twice as long, and print its stack."""
    if is_first_process() or _launcher_keeps_store():
        return
    (host, port), deadline = first_address(), time.monotonic() + timeout_seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise StageFailure(
                    f"stage {os.environ['RANK']} does not reach rank 0 at MASTER_ADDR:MASTER_PORT = {host}:{port} "
                    f"within {timeout_seconds:g} s ({error}): start rank 0, or correct the address"
                ) from None
        time.sleep(MEETING_PAUSE)


def _take_leave(store: dist.Store, rank: int, others: Iterable[int], timeout_seconds: float) -> None:
    """Marks this process as finished. The process that hosts the store waits for the others and leaves last, because
    they may still write to the store or read from it. `others` is empty if this process does not host the store."""
    deadline = time.monotonic() + timeout_seconds
    with suppress(RuntimeError, ValueError):  # the store may be gone nevertheless
        store.set(f"left/{rank}", "")
        missing = set(others)
        while missing and time.monotonic() < deadline:
            missing = {other for other in missing if not store.check([f"left/{other}"])}
            time.sleep(MEETING_PAUSE)


def _end_first_too(watch: StoreWatch, word: str) -> None:
    """Arranges that a stopped rank 0 is killed: its store cannot be asked who it is any more."""
    first: list[Identity] = []

    def ask(store: dist.Store) -> None:
        first[:] = _identities(dist.PrefixStore(word, store), {0})

    watch.ask, watch.before_end = ask, lambda: _end_later(first, GRACE_SECONDS)


def _launcher_keeps_store() -> bool:
    """Returns whether torchrun keeps the store. Otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _end_later(processes: Collection[Identity], seconds: float) -> None:
    """Arranges that processes of a failed run on this machine are killed after some seconds if they do not end by
    themselves: a stopped process (SIGSTOP) never notices the failure. A separate process does this, because this one
    must end so that the others notice."""
    own = _identity(os.getpid())
    here = [f"{pid}:{start}" for pid, start, boot in processes if own and boot == own[-1]]
    with suppress(OSError):
        command = [sys.executable, "-c", _ENDER, str(seconds), *here]
        subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


_ENDER = """
import os, signal, sys, time
time.sleep(float(sys.argv[1]))
for pid, start in (word.split(":") for word in sys.argv[2:]):
    try:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[19] == start:
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""


def _identity(pid: int) -> Identity | None:
    """Returns the process id, its start time and the boot id of the machine. The process id alone may belong to another
    process by now. None means that the system does not provide this information."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return pid, started, Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _identities(store: dist.Store, ranks: Collection[int]) -> list[Identity]:
    """Returns what the store knows of these ranks."""
    found = [json.loads(store.get(f"process/{rank}")) for rank in ranks if store.check([f"process/{rank}"])]
    return [tuple(identity) for identity in found if identity]


def meet(store: dist.Store, rank: int, world_size: int, timeout_seconds: float) -> str:
    """Returns a token that all processes of this start share and that no other start has.

    torchrun's store outlives its restarts, and keeps what earlier processes wrote to it: their addresses and their
    failures. The restart counter distinguishes the starts on one node, but every node has its own counter. So every
    process publishes a random token of its own, which no earlier process knew. The first process answers each of them
    with its own token, and all use that one.
    """
    own = secrets.token_hex(8)
    if rank > 0:
        store.set(f"meeting/{rank}", own)
        word = store.get(f"meeting/answer to {own}").decode()
        store.set(f"meeting/{word}/{rank}", "here")
        return word
    missing, answered = set(range(1, world_size)), set[bytes]()
    deadline = time.monotonic() + timeout_seconds
    while missing:
        for other in sorted(missing):
            if store.check([f"meeting/{own}/{other}"]):
                missing.discard(other)
            elif store.check([f"meeting/{other}"]) and (theirs := store.get(f"meeting/{other}")) not in answered:
                # This may be the token of an earlier process, which does not read the answer any more. Then a later
                # check finds the token of the new process.
                store.set(f"meeting/answer to {theirs.decode()}", own)
                answered.add(theirs)
        if missing and time.monotonic() > deadline:
            host, port = first_address()
            message = (
                f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))} did not come to "
                f"MASTER_ADDR:MASTER_PORT = {host}:{port} within {timeout_seconds:g} s: start all {world_size} ranks "
                "with this address, or correct WORLD_SIZE"
            )
            common_store = dist.PrefixStore(own, store)
            leave_failure(dist.PrefixStore("slipstream", common_store), message)  # those that came say the same
            _take_leave(common_store, rank, set(range(1, world_size)) - missing, GRACE_SECONDS)
            raise StageFailure(message)
        time.sleep(MEETING_PAUSE)
    return own
