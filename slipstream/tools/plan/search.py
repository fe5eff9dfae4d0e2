"""Searches the best schedule, number of stages and number of microbatches.

A device is a stage of one of several equal pipelines (replicas), which share the batch. For every number of stages, the
layers are cut so that the most expensive stage is as cheap as possible. For every schedule and every division of a
replica's sequences into microbatches, the search predicts the step time and counts the memory of each stage. It chooses
only among options that fit. Among options of nearly equal speed it prefers larger microbatches, because an estimate
does not include the loss of efficiency of small matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...config.schema import Config
from ...model.spec import ModelSpec
from ...pipeline import partition
from ...schedule import TRAITS
from .costs import ModelCosts
from .fsdp import FSDP, fsdp_step
from .memory import MemoryModel
from .orders import NUM_CHUNKS
from .predict import PLANNED, Prediction, StageCosts, endless, predict, traits_of, why_not
from .stage import Layers, Passes, Stage, StageMemory, layers_of

ALIKE = 0.02
"""Relative difference in speed below which options count as equally fast."""
IDLE = {"interleaved_1f1b": 0.5, "zero_bubble_h1": 1 / 3, "zero_bubble_v": 0.0}
"""Approximate idle time of a stage in each step, as a share of the time that a microbatch needs on all other stages.
Other flushing schedules idle for all of it."""
MAX_SIZES = 5
"""Number of microbatch sizes that are tried for each schedule and number of stages."""
MAX_EVERY_COUNT = 16
"""Number of devices up to which every number of stages is tried. With more devices, only those that leave no device
idle are tried."""
DATA_PARALLEL = "data parallel"
"""Name of a pipeline of one stage: every device has the whole model."""


@dataclass(frozen=True)
class Cluster:
    num_devices: int
    memory: float
    """Memory of one device that a run may use, in bytes."""
    latency: float
    """Latency of a link in seconds, for messages of any size."""
    bandwidth: float
    """Bandwidth between two devices of a node in one direction, in bytes per second."""
    node_size: int | None = None
    """Number of devices in a node. None means that all are in one node."""
    node_bandwidth: float = math.inf
    """Bandwidth of every device's link to other nodes, in bytes per second."""

    @property
    def is_one_node(self) -> bool:
        return self.node_size is None or self.num_devices <= self.node_size

    def between_stages(self, num_stages: int) -> float:
        """Returns the bandwidth of the slowest link between neighbouring stages. The stages of a replica are on
        consecutive devices."""
        is_inside = self.is_one_node or (self.node_size or 0) % num_stages == 0
        return self.bandwidth if is_inside else min(self.bandwidth, self.node_bandwidth)

    def between_replicas(self, num_stages: int) -> float:
        """Returns the bandwidth of a ring through all replicas of a stage. The replicas in one node use all their links
        to other nodes together."""
        if self.is_one_node:
            return self.bandwidth
        return min(self.bandwidth, max(1, (self.node_size or 0) // num_stages) * self.node_bandwidth)


@dataclass(frozen=True)
class Option:
    schedule: str
    """Name of a schedule, DATA_PARALLEL or FSDP."""
    num_stages: int
    num_replicas: int
    num_microbatches: int
    """Number of microbatches of one replica in a step."""
    microbatch_size: int
    layers_per_stage: tuple[int, ...]
    prediction: Prediction
    step_time: float
    """Seconds of a step, including the sum of gradients over replicas."""
    tokens_per_second: float
    memory: tuple[StageMemory, ...]
    """Memory of every stage."""
    fits: bool
    config: Config
    """Configuration of the option: that of the plan, with its memory savings."""
    is_free: bool = False
    """Whether no faster option was left out because of its memory."""

    @property
    def largest_stage(self) -> int:
        return max(range(self.num_stages), key=lambda stage: self.memory[stage].most)

    @property
    def bubble(self) -> float:
        """Returns the mean share of a step in which a device is idle."""
        busy = sum(self.prediction.utilisation) / self.num_stages * self.prediction.step_time
        return 1 - busy / self.step_time

    @property
    def num_devices(self) -> int:
        return self.num_stages * self.num_replicas

    @property
    def is_runnable(self) -> bool:
        """Returns whether the trainer supports this option."""
        return self.schedule not in (*PLANNED, FSDP)


@dataclass(frozen=True)
class Trial:
    """An option before its exact prediction."""

    layers: tuple[int, ...]
    num_replicas: int
    num_microbatches: int
    microbatch_size: int
    guess: float
    """Estimated tokens per second."""


@dataclass(frozen=True)
class Search:
    config: Config
    model: ModelSpec
    costs: ModelCosts
    cluster: Cluster
    batch_size: int
    """Number of sequences in a step, over all replicas."""
    memory_model: MemoryModel
    _cuts: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_parameters(self) -> int:
        (whole,) = self._stage_passes((self.model.num_layers + 2,))
        return whole.parameters + whole.frozen

    def best(self, schedule: str) -> Option | str:
        """Returns the fastest option of a schedule that fits. If none fits, it returns the one with the least memory.
        If there is no option, it returns the reason.

        A prediction is slow, so the numbers of stages are tried in the order of a rough estimate. If the smallest
        microbatches do not fit, larger ones do not either. If they fit, the largest that are equally fast and fit are
        chosen."""
        if schedule == FSDP:
            return self._best_sharded()
        trials, reason = self._trials(schedule)
        if not trials:
            return reason
        fastest: dict[tuple[int, ...], float] = {}
        for trial in trials:
            fastest[trial.layers] = max(fastest.get(trial.layers, 0.0), trial.guess)
        smallest: list[Option] = []
        for place, layers in enumerate(sorted(fastest, key=lambda layers: -fastest[layers])):
            sizes = [t for t in trials if t.layers == layers and t.guess >= (1 - ALIKE) * fastest[layers]]
            if self._keeps(layers) > self.cluster.memory and len(fastest) > 1 and layers != self._finest(fastest):
                continue
            smallest.append(self._predict(schedule, sizes[0]))
            if smallest[-1].fits:
                least = (1 - ALIKE) * smallest[-1].tokens_per_second
                possible = (trial for trial in reversed(sizes[1:]) if self._may_fit(smallest[-1], trial))
                larger = (self._predict(schedule, trial) for trial in possible)
                good = (option for option in larger if option.fits and option.tokens_per_second >= least)
                return replace(next(good, smallest[-1]), is_free=place == 0)
        return min(smallest, key=lambda option: option.memory[option.largest_stage].most)

    def _best_sharded(self) -> Option | str:
        num_devices, num_layers = self.cluster.num_devices, self.model.num_layers + 2
        per_device, rest = divmod(self.batch_size, num_devices)
        if rest or not per_device:
            return f"{self.batch_size} sequences cannot be shared by {num_devices} devices"
        options: list[Option] = []
        one = self.memory_model.fully_sharded(num_devices, 1)
        sizes = _sizes(per_device)
        possible = [size for size in sizes if size * one.activations <= self.cluster.memory] or sizes[:1]
        for size in reversed(possible):  # fewer microbatches need fewer gathers
            memory = self.memory_model.fully_sharded(num_devices, size)
            prediction = fsdp_step(
                self.costs.stages((num_layers,), size, 0.0),
                num_layers,
                self.num_parameters,
                num_devices,
                self.cluster.between_replicas(1),
                self.memory_model.dtypes,
                per_device // size,
            )
            trial = Trial((num_layers,), num_devices, per_device // size, size, 0.0)
            is_free = size == sizes[-1]
            options.append(self._option(FSDP, trial, prediction, prediction.step_time, (memory,), is_free))
            if options[-1].fits:
                return options[-1]
        return options[-1]

    def more_devices(self, schedule: str) -> Option | None:
        """Returns the first option that fits on more devices than there are, with one pipeline and two microbatches per
        stage."""
        most = self.model.num_layers + 2
        counts = [self.cluster.num_devices * 2**i for i in range(1, 12)]
        for num_stages in sorted({count for count in counts if count < most} | {most}):
            if num_stages <= self.cluster.num_devices or self._objection(schedule, num_stages, 2 * num_stages):
                continue
            layers = self._cut(num_stages)
            option = self._predict(schedule, Trial(layers, 1, 2 * num_stages, 1, 0.0))
            if option.fits:
                return option
        return None

    def _may_fit(self, smallest: Option, trial: Trial) -> bool:
        """Returns whether larger microbatches may fit. It computes a lower bound from the memory of smaller ones: with
        as many microbatches in flight, the activations grow in proportion to the size."""
        ratio = trial.microbatch_size / smallest.microbatch_size
        if max(smallest.prediction.in_flight) >= smallest.num_microbatches:  # all sequences are in flight, for any size
            ratio = 1.0
        least = (m.weights + m.gradients + m.optimizer + ratio * m.activations for m in smallest.memory)
        return max(least) <= self.cluster.memory

    def _finest(self, cuts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
        return max(cuts, key=len)

    def _trials(self, schedule: str) -> tuple[list[Trial], str]:
        """Returns all options that the schedule supports, smaller microbatches first, and the reason if there are
        none."""
        trials, reason = [], "there are no two devices"
        name = "one_f_one_b" if schedule == DATA_PARALLEL else schedule
        for num_stages in [1] if schedule == DATA_PARALLEL else self.stage_counts():
            num_replicas = self.cluster.num_devices // num_stages
            per_replica, rest = divmod(self.batch_size, num_replicas)
            if rest or not per_replica:
                reason = f"{self.batch_size} sequences cannot be shared by {num_replicas} replicas"
                continue
            layers = self._cut(num_stages)
            for size in _sizes(per_replica):
                objection = self._objection(name, num_stages, per_replica // size)
                if objection is None:
                    trials.append(self._guess(name, layers, num_replicas, per_replica // size, size))
                else:
                    reason = objection
        return trials, reason

    def _cut(self, num_stages: int) -> tuple[int, ...]:
        """Returns the layers per stage, which are the same for all schedules."""
        if num_stages not in self._cuts:
            self._cuts[num_stages] = tuple(partition([layer.compute for layer in self.costs.layers], num_stages))
        return self._cuts[num_stages]

    def unevenness(self, num_stages: int) -> float:
        """Returns the relative excess of the slowest stage's work over the mean."""
        costs = self.costs.stages(self._cut(num_stages), 1, 0.0)
        work = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
        return max(work) / (sum(work) / num_stages) - 1

    def _objection(self, name: str, num_stages: int, num_microbatches: int) -> str | None:
        traits = TRAITS.get(name)
        if traits is not None and traits.steps_alone and self.model.steps_tied_weights:
            return "its stages step at different times, and tied weights need first and last together"
        if traits is not None and traits.drifts and self.config.train.recompute_every:
            return "it overwrites the weights that recomputed blocks would need again"
        return why_not(name, num_stages, num_microbatches, self.model.num_layers + 2)

    def stage_counts(self) -> Iterator[int]:
        most = min(self.cluster.num_devices, self.model.num_layers + 2)
        for count in range(2, most + 1):
            if self.cluster.num_devices <= MAX_EVERY_COUNT or self.cluster.num_devices % count == 0:
                yield count

    def _guess(self, name: str, layers: tuple[int, ...], num_replicas: int, num_microbatches: int, size: int) -> Trial:
        """Estimates the speed: all microbatches pass through the slowest stage, and a share of filling and draining is
        idle. The estimate is exact only for equal stages."""
        costs = self.stage_costs(layers, size, num_replicas)
        sending = self._sending(name, len(layers), num_microbatches, size)
        slots = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
        # Links are hidden where more microbatches are in flight than there are stages.
        is_deep = name not in PLANNED and endless(name, len(layers), num_microbatches).max_in_flight > len(layers)
        steady = max(slots) + (0.0 if is_deep else 2 * costs.latency)
        # With too few microbatches to fill the pipeline, every schedule that drains is idle for some time.
        few = 1 - num_microbatches / (2 * len(layers))
        idle = max(IDLE.get(name, 1.0), few) * (sum(slots) - max(slots)) if traits_of(name).flushes else 0.0
        step_time = max(num_microbatches * steady + idle + max(costs.update), sending)
        tokens = num_replicas * num_microbatches * size * self.model.sequence_length
        guess = tokens / self._with_replicas(name, step_time, layers, num_replicas)
        return Trial(layers, num_replicas, num_microbatches, size, guess)

    def _predict(self, schedule: str, trial: Trial) -> Option:
        name = "one_f_one_b" if schedule == DATA_PARALLEL else schedule
        costs = self.stage_costs(trial.layers, trial.microbatch_size, trial.num_replicas)
        prediction = predict(name, costs, trial.num_microbatches)
        sending = self._sending(name, len(trial.layers), trial.num_microbatches, trial.microbatch_size)
        alone = max(prediction.step_time, sending)
        step_time = self._with_replicas(name, alone, trial.layers, trial.num_replicas)
        memory = tuple(
            self.memory_model.stage_memory(stage, trial.microbatch_size)
            for stage in _stages(name, trial.layers, prediction, trial.num_replicas)
        )
        return self._option(schedule, trial, prediction, step_time, memory)

    def _option(
        self,
        schedule: str,
        trial: Trial,
        prediction: Prediction,
        step_time: float,
        memory: tuple[StageMemory, ...],
        is_free: bool = False,
    ) -> Option:
        sequences = trial.num_replicas * trial.num_microbatches * trial.microbatch_size
        return Option(
            schedule=schedule,
            num_stages=len(trial.layers),
            num_replicas=trial.num_replicas,
            num_microbatches=trial.num_microbatches,
            microbatch_size=trial.microbatch_size,
            layers_per_stage=trial.layers,
            prediction=prediction,
            step_time=step_time,
            tokens_per_second=sequences * self.model.sequence_length / step_time,
            memory=memory,
            fits=max(stage.most for stage in memory) <= self.cluster.memory,
            config=self.config,
            is_free=is_free,
        )

    def stage_costs(self, layers: tuple[int, ...], microbatch_size: int, num_replicas: int) -> StageCosts:
        """Returns the costs of the stages. Replicas that share an optimizer divide its update. The replica with the
        most values to step determines the time. This is approximate, because owners are chosen by the cost of the
        update."""
        latency = self._latency(len(layers), microbatch_size) if len(layers) > 1 else 0.0
        costs = self.costs.stages(layers, microbatch_size, latency)
        shares = (self.memory_model.owned_share(stage, num_replicas) for stage in self._stage_layers(layers))
        update = tuple(share * seconds for share, seconds in zip(shares, costs.update, strict=True))
        return replace(costs, update=update)

    def _latency(self, num_stages: int, microbatch_size: int) -> float:
        return self.cluster.latency + self._message(microbatch_size) / self.cluster.between_stages(num_stages)

    def _sending(self, name: str, num_stages: int, num_microbatches: int, microbatch_size: int) -> float:
        """Returns how long a link is busy in a step, in one direction. A prediction allows messages on a link to
        overlap in time, so a schedule with many messages in flight would hide any link. But no step is shorter than
        this time."""
        if num_stages == 1:
            return 0.0
        passes = NUM_CHUNKS.get(name, 1)
        return passes * num_microbatches * self._message(microbatch_size) / self.cluster.between_stages(num_stages)

    def _message(self, microbatch_size: int) -> int:
        """Returns the bytes of a message."""
        bytes_each = self.memory_model.dtypes.compute.itemsize
        return microbatch_size * self.model.sequence_length * self.model.dim * bytes_each

    def _with_replicas(self, name: str, step_time: float, layers: tuple[int, ...], num_replicas: int) -> float:
        """Returns the step time with the sum of gradients over replicas. A ring sums the gradients of a stage, and
        every device sends nearly twice their size. The sum must end before a synchronous update can start, while two_bw
        has a whole step for it. If replicas share the optimizer, gradients are sent to their owners, and the second
        transfer has the new working copies."""
        if num_replicas == 1:
            return step_time
        largest = max(passes.parameters for passes in self._stage_passes(layers))
        dtypes = self.memory_model.dtypes
        bytes_each = 2 * dtypes.reduction.itemsize
        if self.config.optimizer.sharded:
            bytes_each = dtypes.reduction.itemsize + dtypes.compute.itemsize
        bandwidth = self.cluster.between_replicas(len(layers))
        ring = (num_replicas - 1) / num_replicas * largest * bytes_each / bandwidth
        return max(step_time, ring) if traits_of(name).has_slack else step_time + ring

    def _keeps(self, layers: tuple[int, ...]) -> float:
        """Returns the bytes that the largest stage keeps with any schedule: its weights and their gradients."""
        dtypes = self.memory_model.dtypes
        bytes_each = dtypes.compute.itemsize + dtypes.gradient.itemsize
        return bytes_each * max(passes.parameters for passes in self._stage_passes(layers))

    def _stage_layers(self, layers: tuple[int, ...]) -> list[Layers]:
        return [layers_of(self.model, sum(layers[:i]), size) for i, size in enumerate(layers)]

    def _stage_passes(self, layers: tuple[int, ...]) -> list[Passes]:
        return [self.memory_model.passes(stage, 1) for stage in self._stage_layers(layers)]


def best_of(searches: Sequence[Search], schedule: str) -> Option | str:
    """Returns the fastest option that fits. Among equally fast options it returns the one with the fewest memory
    savings. If none fits, it returns the one with the least memory. If there is no option, it returns the reason.
    searches: each saves more memory than the one before."""
    found: list[Option] = []
    reason = ""
    for search in searches:
        if found and found[-1].is_free and (found[-1].num_replicas == 1 or len(found) > 1 or schedule == FSDP):
            break  # more savings would only be slower, except that sharing the update among replicas may be faster
        option = search.best(schedule)
        if isinstance(option, str):
            reason = reason or option
        else:
            found.append(option)
    fitting = [option for option in found if option.fits]
    if not found or not fitting:
        return min(found, key=lambda option: option.memory[option.largest_stage].most, default=reason)
    most = max(option.tokens_per_second for option in fitting)
    return next(option for option in fitting if option.tokens_per_second >= (1 - ALIKE) * most)


def _stages(name: str, layers: tuple[int, ...], prediction: Prediction, num_replicas: int) -> list[Stage]:
    return [
        Stage(
            index=index,
            num_stages=len(layers),
            first_layer=sum(layers[:index]),
            num_layers=layers[index],
            versions=prediction.weight_versions[index],
            delay=prediction.delay[index],
            in_flight=prediction.in_flight[index],
            max_in_flight=max(prediction.in_flight),
            background_update=traits_of(name).has_slack,
            flushes=traits_of(name).flushes,
            num_replicas=num_replicas,
        )
        for index in range(len(layers))
    ]


def _sizes(num_sequences: int) -> list[int]:
    """Returns microbatch sizes that divide the number of sequences, smallest first."""
    sizes = []
    for size in range(1, num_sequences + 1):
        if num_sequences % size == 0:
            sizes.append(size)
        if len(sizes) == MAX_SIZES:
            break
    return sizes
