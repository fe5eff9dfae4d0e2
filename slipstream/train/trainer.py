"""Implements `slipstream train`: checks a configuration, creates the run's folder, and launches its processes.

The trainer uses `Pipeline` and `launch_world` in the same way as any other program.
"""

from __future__ import annotations

import secrets
import sys
from contextlib import nullcontext
from functools import partial

import torch

from ..config.defaults import settled
from ..config.layout import Layout, check_layout_changes, layout_changes, num_processes
from ..config.models import with_model
from ..config.rules import validate
from ..config.schema import Config
from ..observe.console import Screen
from ..transport.environment import is_first_process, under_torchrun
from ..transport.launch import launch_world
from .build import build_components
from .checkpointing import SIGNALS, SignalRequests, checkpoint_store
from .describe import describe, notes
from .preflight import check_machine
from .process import LaunchFacts, train_process
from .reshape import check_layout
from .resume import changes, keep_configuration, newest
from .run_folder import check_folder, discard_unstarted, has_summary, make_folder, occupied, run_folder


def train(config: Config) -> None:
    """Checks the configuration, creates the run's folder, and launches the stages.

    Under torchrun every rank calls this function.
    """
    torch.set_num_threads(1)  # it computes nothing, and a process with one thread is safe to fork
    is_first = is_first_process()
    validate(config)
    unused = list(notes(config))
    config = settled(config)
    folder = run_folder(config)
    if is_first:
        check_folder(folder, config.run.overwrite, config.checkpoint.resume)
        with occupied(folder):
            pass
    is_new = is_first and not (folder / "config.toml").exists()
    components = build_components(config)
    config = with_model(config, components.model)
    check_layout_changes(config, partial(check_layout, config))  # can the model be cut so?
    check_machine(config)
    store = checkpoint_store(config, folder)
    # Only the first process decides. Another process might look while the first one removes the remains of a crash, and
    # might find another checkpoint.
    found = newest(store, config, components.model, Screen().print) if config.checkpoint.resume and is_first else None
    is_over = found is not None and found.step == config.train.steps and has_summary(folder, found.step)
    if is_over:
        Screen().print(f"{folder} has made its {config.train.steps} steps: raise train.steps to continue")
        if not under_torchrun():  # under torchrun the other processes must still be notified
            return
    elif is_first:
        changed = [] if found is None else list(changes(found, config, components))
        if found is not None and changed:
            keep_configuration(folder, found.step)
        make_folder(folder, config, components, keep=config.checkpoint.resume)
        store.clean()
        if found is not None:
            Screen().print("\n".join([f"resuming from the checkpoint of step {found.step}", *changed]))
        elif config.checkpoint.resume:
            Screen().print(f"{folder} has no checkpoint to resume from: starting at step 1")
        for line in [*unused, describe(config, components, folder)]:
            Screen().print(line)
    is_threaded = config.pipeline.transport == "thread"
    # Only the main thread of a process receives signals.
    signals = SignalRequests(config.checkpoint.every_minutes) if is_threaded else None
    facts = LaunchFacts(secrets.token_hex(8), None if found is None else found.step, is_over)
    layout = Layout.of(config)
    is_fixed = num_processes(config) == layout.size and not layout_changes(config)
    try:
        with occupied(folder) if is_first else nullcontext():
            were_interrupted = launch_world(
                partial(train_process, config=config, facts=facts, signals=signals),
                num_processes(config),
                mesh=layout.mesh(config) if is_fixed else None,
                threads=is_threaded,
                device=config.train.device,
                timeout_seconds=config.pipeline.timeout_seconds,
                shared_memory=config.pipeline.shared_memory,
                backend=config.pipeline.backend,
                share_gpu=config.pipeline.share_gpu,
                start_method="fork" if sys.platform == "linux" and config.train.device == "cpu" else None,
                forwarded=SIGNALS,
            )
    except BaseException as error:
        if is_new and error.__cause__ is None and not getattr(error, "details", ""):  # no traceback goes there
            discard_unstarted(folder)
        raise
    finally:
        if signals is not None:
            signals.close()
    if any(were_interrupted):
        raise KeyboardInterrupt
