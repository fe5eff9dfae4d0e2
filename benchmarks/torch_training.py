"""Trains with a schedule of torch.distributed.pipelining: a contender of time_to_loss.py.

    python benchmarks/torch_training.py ScheduleZBVZeroBubble [CONFIG.toml] [--section.field value ...]

Everything but the schedule is what `slipstream train` makes of the same configuration: model and first weights, data
and their order, optimizers, precision, clipping, learning rate, evaluations. Writes metrics.jsonl into the run's
folder: a row for every evaluation, with the seconds of training since the one before; what evaluations take is not
counted. Weights are not tied, and nothing is saved.
"""

from __future__ import annotations

import json
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from slipstream import launch
from slipstream.cli.parse import parse
from slipstream.config.defaults import precision_of, settled
from slipstream.config.schema import Config
from slipstream.config.toml import load_toml
from slipstream.model.chunked_loss import decoder_and_loss
from slipstream.model.decoder import initialise, layer_costs
from slipstream.pipeline.compiled import Compiled
from slipstream.pipeline.partition import cut, partition
from slipstream.pipeline.update import Updater
from slipstream.pipeline.weight_versions import WeightVersions, weight_layout
from slipstream.tools.bench.contenders import TORCH_SHAPES, nccl_group
from slipstream.tools.bench.workloads import Placement
from slipstream.train.build import Components, build_components
from slipstream.train.run_folder import run_folder
from slipstream.transport.base import Transport
from slipstream.transport.process import ProcessTransport


@dataclass
class Chunk:
    """Layers that a process holds together."""

    module: nn.Sequential
    versions: WeightVersions
    updater: Updater

    def update(self, step: int, gradients: dict[str, Tensor], scales: list[float]) -> None:
        self.updater.apply(step, gradients, scales, horizon=0)
        self.versions.close_next()


class Trainer:
    def __init__(self, transport: ProcessTransport, name: str, config: Config) -> None:
        self.components: Components = build_components(config)
        self.config, self.transport = config, transport
        self.device = torch.device(config.train.device)
        self.precision = precision_of(config)
        self.placement = placement = Placement(config.pipeline.stages, TORCH_SHAPES[name])
        self.indices = indices = placement.chunks(transport.stage)
        self.has_first, self.has_last = 0 in indices, placement.num_chunks - 1 in indices
        with torch.device("meta"):
            model, self.loss = decoder_and_loss(self.components.model)
        sizes = self.components.layers_per_stage
        if placement.num_chunks != len(sizes):
            sizes = partition(
                layer_costs(self.components.model, self.components.model.sequence_length), placement.num_chunks
            )
        self.chunks = [self._chunk(cut(model, sizes, index)) for index in indices]
        group = nccl_group(transport) if self.device.type == "cuda" else None
        self.group = group
        stages = [
            PipelineStage(chunk.module, index, placement.num_chunks, self.device, group=group)
            for chunk, index in zip(self.chunks, indices, strict=True)
        ]
        tokens_per_step = self.components.batches.num_tokens(0)
        self.schedule: Any = getattr(pipelining, name)(
            stages[0] if placement.shape == "single" else stages,
            config.pipeline.microbatches,
            loss_fn=lambda outputs, targets: self.loss(outputs, targets) / tokens_per_step,
            scale_grads=False,
        )

    def _chunk(self, module: nn.Sequential) -> Chunk:
        train = self.config.train
        module.to(getattr(torch, train.dtype)).to_empty(device=self.device)
        initialise(module, self.components.model, train.seed)
        if train.compile:
            module = Compiled(OrderedDict(module.named_children()))
        versions = WeightVersions(
            module,
            weight_layout(1, is_mixed=self.precision.is_mixed),
            dtype=self.precision.compute,
            gradient_dtype=self.precision.gradient,
        )
        updater = Updater(versions, self.components.groups, {}, self.components.learning_rate, False, self.device)
        return Chunk(module, versions, updater)

    def run(self, rows: Path) -> None:
        began = time.perf_counter()
        for step in range(self.config.train.steps):
            pairs = [self.components.batches(step, index) for index in range(self.config.pipeline.microbatches)]
            inputs = (torch.cat([x for x, _ in pairs]).to(self.device),) if self.has_first else ()
            asked: dict[str, Any] = {}
            if self.has_last:
                asked = {"target": torch.cat([y for _, y in pairs]).to(self.device), "losses": []}
            self.schedule.step(*inputs, **asked, return_outputs=False)
            self._update(step)
            if step == 0:
                began = time.perf_counter()  # what the first step loads and compiles is not counted
            if (step + 1) % self.config.evaluation.every_steps == 0 or step + 1 == self.config.train.steps:
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - began
                loss = self._evaluate()
                began = time.perf_counter()
                if loss is not None:
                    with rows.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"step": step + 1, "val_loss": loss, "seconds": seconds}) + "\n")

    @torch.no_grad()
    def _update(self, step: int) -> None:
        groups = self.components.groups
        taken = [chunk.versions.take_gradients(chunk.versions.newest) for chunk in self.chunks]
        squares = torch.zeros(len(groups), dtype=torch.float64, device=self.device)
        for chunk, gradients in zip(self.chunks, taken, strict=True):
            for index in range(len(groups)):
                own = [gradient for name, gradient in gradients.items() if chunk.updater.group_of[name] == index]
                if own:
                    squares[index] += torch.nn.utils.get_total_norm(own).double() ** 2
        dist.all_reduce(squares, group=self.group)
        scales = [
            1.0 if group.clip_norm is None else min(1.0, group.clip_norm / (square**0.5 + 1e-6))
            for group, square in zip(groups, squares.tolist(), strict=True)
        ]
        for chunk, gradients in zip(self.chunks, taken, strict=True):
            chunk.update(step, gradients, scales)

    @torch.no_grad()
    def _evaluate(self) -> float | None:
        """The mean over all held-out tokens, where it is known. One batch after the other passes through the chunks,
        because torch's schedules with two chunks to a process cannot evaluate."""
        validation, shape = self.components.validation, self.components.model
        assert validation is not None
        total, num_tokens = 0.0, 0
        for index in range(len(validation)):
            inputs, targets = (tensor.to(self.device) for tensor in validation(index))
            for chunk in range(self.placement.num_chunks):
                if self.placement.process(chunk) != self.transport.stage:
                    continue
                if chunk > 0 and (source := self.placement.process(chunk - 1)) != self.transport.stage:
                    inputs = torch.empty(*targets.shape, shape.dim, dtype=self.precision.compute, device=self.device)
                    self._pass(dist.irecv, inputs, source)
                inputs = self.chunks[self.indices.index(chunk)].module(inputs)
                last = chunk + 1 == self.placement.num_chunks
                if not last and (target := self.placement.process(chunk + 1)) != self.transport.stage:
                    self._pass(dist.isend, inputs, target)
            if self.has_last:
                total += float(self.loss(inputs, targets))
                num_tokens += validation.num_tokens(index)
        return total / num_tokens if self.has_last else None

    def _pass(self, operation: Any, tensor: Tensor, peer: int) -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, self.group)]):
            work.wait()


def work(transport: Transport, name: str, config: Config) -> None:
    assert isinstance(transport, ProcessTransport)
    with transport.process_group():
        Trainer(transport, name, config).run(run_folder(config) / "metrics.jsonl")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit(__doc__)
    name, *arguments = sys.argv[1:]
    default = load_toml(Path(arguments.pop(0))) if arguments and not arguments[0].startswith("-") else Config()
    config = parse(Config, arguments, "torch_training.py SCHEDULE [CONFIG.toml]", __doc__ or "", default)
    config = settled(config)
    build_components(config)
    run_folder(config).mkdir(parents=True)
    launch(
        partial(work, name=name, config=config),
        config.pipeline.stages,
        device=config.train.device,
        timeout_seconds=config.pipeline.timeout_seconds,
        share_gpu=config.pipeline.share_gpu,
        shared_memory=False,
    )


if __name__ == "__main__":
    main()
