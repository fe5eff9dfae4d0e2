"""Does a run end where the oracle does?

    slipstream train --train.dtype float64 --optimizer.newton-schulz-dtype float64 --train.steps 20 --run.name exact
    python experiments/oracle.py runs/exact

Makes the steps of a run again in one process that knows no stages, replicas or messages (slipstream.reference_run), and
prints the largest difference of a parameter between that and the run's newest checkpoint, relative to the parameter's
largest entry.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor

from slipstream import reference_run
from slipstream.checkpoint import Store
from slipstream.config.rules import schedule_of
from slipstream.config.toml import load_toml
from slipstream.errors import ConfigError
from slipstream.model.chunked_loss import decoder_and_loss
from slipstream.model.decoder import initialise
from slipstream.train.build import build_components


def largest_difference(folder: Path, device: torch.device | str = "cpu") -> float:
    """device: where the oracle computes."""
    config = load_toml(folder / "config.toml")
    components = build_components(config)
    found = Store(folder / "checkpoints").newest(print)
    if found is None or found.step != config.train.steps:
        raise SystemExit(f"{folder} has no checkpoint of step {config.train.steps}: let it end first")
    model, loss = decoder_and_loss(components.model, config.train.loss_chunk_tokens)
    model.to(getattr(torch, config.train.dtype))
    initialise(model, components.model, config.train.seed)
    model.to(device)
    schedule = schedule_of(config)
    num_stages, is_paci = schedule.num_stages, schedule.name == "paci"
    expected, _ = reference_run(
        model,
        data=lambda step, microbatch: tuple(part.to(device) for part in components.batches(step, microbatch)),
        loss=loss,
        groups=components.groups,
        num_microbatches=config.pipeline.microbatches * config.pipeline.replicas,
        num_steps=config.train.steps,
        delays=[schedule.delay(stage) for stage in range(num_stages)],
        layers_per_stage=components.layers_per_stage,
        drift_warmups=[(num_stages - 1 - s) * config.pipeline.replicas for s in range(num_stages)] if is_paci else None,
        sync_start_steps=schedule.sync_start_steps,
        learning_rate=components.learning_rate,
        loss_scale=lambda step: 1 / components.batches.num_tokens(step),
    )

    def difference(name: str, weight: Tensor) -> float:
        saved = found.read([f"master/{name}"])[f"master/{name}"].to(device)
        return float((saved - weight).abs().max() / weight.abs().max())

    return max(difference(name, weight) for name, weight in expected.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+", help="folder of a run")
    torch.set_num_threads(os.cpu_count() or 1)
    for folder in parser.parse_args().run:
        try:
            print(f"{folder}: {largest_difference(folder):.1e}", flush=True)
        except ConfigError as error:
            raise SystemExit(f"{folder}: {error}") from error


if __name__ == "__main__":
    main()
