"""Searches the best schedule, number of stages and number of microbatches.

A device is a stage of one of several equal pipelines (replicas), which share the batch. For every number of stages, the
layers are cut so that the most expensive stage is as cheap as possible. For every schedule and every division of a
replica's sequences into microbatches, the search predicts the step time and counts the memory of each stage. It chooses
only among options that fit. Among options of nearly equal speed it prefers larger microbatches, because an estimate
does not include the loss of efficiency of small matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ...config.schema import Config
from ...model.spec import ModelSpec
from ...pipeline import partition
from .costs import ModelCosts
from .fsdp import FSDP, fsdp_step
from .memory import MemoryModel
from .orders import NUM_CHUNKS
from .predict import PLANNED, Prediction, StageCosts, endless, predict, traits_of, why_not
from .price import token_price
from .stage import Layers, Stage, StageMemory, layers_of

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
class Division:
    """How devices are divided into stages and replicas, and the batch into microbatches."""

    layers_per_stage: tuple[int, ...]
    num_replicas: int
    num_microbatches: int
    """Number of microbatches of one replica in a step."""
    microbatch_size: int

    @property
    def num_stages(self) -> int:
        return len(self.layers_per_stage)

    @property
    def num_sequences(self) -> int:
        return self.num_replicas * self.num_microbatches * self.microbatch_size


@dataclass(frozen=True)
class Option:
    schedule: str
    """Name of a schedule, DATA_PARALLEL or FSDP."""
    division: Division
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
    def largest(self) -> StageMemory:
        """Returns the memory of the stage that needs the most."""
        return max(self.memory, key=lambda stage: stage.most)

    @property
    def bubble(self) -> float:
        """Returns the mean share of a step in which a device is idle."""
        busy = sum(self.prediction.utilisation) / self.division.num_stages * self.prediction.step_time
        return 1 - busy / self.step_time

    @property
    def token_price(self) -> float:
        """Returns how many times the tokens of a run without delay it needs to the same loss."""
        return token_price(self.config.optimizer, self.schedule, max(self.prediction.delay))

    @property
    def worth(self) -> float:
        """Returns the tokens per second, divided by their price."""
        return self.tokens_per_second / self.token_price

    @property
    def is_runnable(self) -> bool:
        """Returns whether the trainer supports this option."""
        return self.schedule not in (*PLANNED, FSDP)


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
        whole = self.memory_model.passes(layers_of(self.model, 0, self.model.num_layers + 2), 1)
        return whole.parameters + whole.frozen

    def best(self, schedule: str) -> Option | str:
        """Returns the fastest option of a schedule that fits. If none fits, it returns the one with the least memory.
        If there is no option, it returns the reason.

        A prediction is slow, so the numbers of stages are tried in the order of a rough estimate. If the smallest
        microbatches do not fit, larger ones do not either. If they fit, the largest that are equally fast and fit are
        chosen."""
        if schedule == FSDP:
            return self._best_sharded()
        guesses, reason = self._guesses(schedule)
        if not guesses:
            return reason
        fastest: dict[tuple[int, ...], float] = {}
        for division, guess in guesses.items():
            layers = division.layers_per_stage
            fastest[layers] = max(fastest.get(layers, 0.0), guess)
        finest = max(fastest, key=len)
        smallest: list[Option] = []
        for place, layers in enumerate(sorted(fastest, key=lambda layers: -fastest[layers])):
            if layers != finest and self._keeps(layers) > self.cluster.memory:
                continue
            fast = (division for division, guess in guesses.items() if guess >= (1 - ALIKE) * fastest[layers])
            sizes = [division for division in fast if division.layers_per_stage == layers]
            smallest.append(self._predict(schedule, sizes[0]))
            if smallest[-1].fits:
                least = (1 - ALIKE) * smallest[-1].tokens_per_second
                possible = (size for size in reversed(sizes[1:]) if self._may_fit(smallest[-1], size))
                larger = (self._predict(schedule, size) for size in possible)
                good = (option for option in larger if option.fits and option.tokens_per_second >= least)
                return replace(next(good, smallest[-1]), is_free=place == 0)
        return min(smallest, key=lambda option: option.largest.most)

    def _best_sharded(self) -> Option | str:
        num_devices, num_layers = self.cluster.num_devices, self.model.num_layers + 2
        per_device, rest = divmod(self.batch_size, num_devices)
        if rest or not per_device:
            return f"{self.batch_size} sequences cannot be shared by {num_devices} devices"
        one = self.memory_model.fully_sharded(num_devices, 1)
        sizes = _sizes(per_device)
        possible = [size for size in sizes if size * one.activations <= self.cluster.memory] or sizes[:1]
        for size in reversed(possible):  # fewer microbatches need fewer gathers
            division = Division((num_layers,), num_devices, per_device // size, size)
            prediction = fsdp_step(
                self.costs.stages((num_layers,), size, 0.0),
                num_layers,
                self.num_parameters,
                num_devices,
                self.cluster.between_replicas(1),
                self.memory_model.dtypes,
                division.num_microbatches,
            )
            memory = self.memory_model.fully_sharded(num_devices, size)
            option = self._option(FSDP, division, prediction, prediction.step_time, (memory,))
            if option.fits:
                break
        return replace(option, is_free=size == sizes[-1])

    def more_devices(self, schedule: str) -> Option | None:
        """Returns the first option that fits on more devices than there are, with one pipeline and two microbatches per
        stage."""
        most = self.model.num_layers + 2
        counts = [self.cluster.num_devices * 2**i for i in range(1, 12)]
        for num_stages in sorted({count for count in counts if count < most} | {most}):
            if num_stages <= self.cluster.num_devices or self._objection(schedule, num_stages, 2 * num_stages):
                continue
            option = self._predict(schedule, Division(self._cut(num_stages), 1, 2 * num_stages, 1))
            if option.fits:
                return option
        return None

    def _may_fit(self, smallest: Option, division: Division) -> bool:
        """Returns whether larger microbatches may fit. It computes a lower bound from the memory of smaller ones: with
        as many microbatches in flight, the activations grow in proportion to the size."""
        ratio = division.microbatch_size / smallest.division.microbatch_size
        if max(smallest.prediction.in_flight) >= smallest.division.num_microbatches:
            ratio = 1.0  # all sequences are in flight, for any size
        least = (m.weights + m.gradients + m.optimizer + ratio * m.activations for m in smallest.memory)
        return max(least) <= self.cluster.memory

    def _guesses(self, schedule: str) -> tuple[dict[Division, float], str]:
        """Returns all divisions that the schedule supports, smaller microbatches first, with estimates of their tokens
        per second, and the reason if there are none."""
        guesses, reason = {}, "there are no two devices"
        name = "one_f_one_b" if schedule == DATA_PARALLEL else schedule
        for num_stages in [1] if schedule == DATA_PARALLEL else self.stage_counts():
            num_replicas = self.cluster.num_devices // num_stages
            per_replica, rest = divmod(self.batch_size, num_replicas)
            if rest or not per_replica:
                reason = f"{self.batch_size} sequences cannot be shared by {num_replicas} replicas"
                continue
            for size in _sizes(per_replica):
                objection = self._objection(name, num_stages, per_replica // size)
                if objection is None:
                    division = Division(self._cut(num_stages), num_replicas, per_replica // size, size)
                    guesses[division] = self._guess(name, division)
                else:
                    reason = objection
        return guesses, reason

    def _cut(self, num_stages: int) -> tuple[int, ...]:
        """Returns the layers per stage, which are the same for all schedules."""
        if num_stages not in self._cuts:
            self._cuts[num_stages] = tuple(partition([layer.compute for layer in self.costs.layers], num_stages))
        return self._cuts[num_stages]

    def unevenness(self, num_stages: int) -> float:
        """Returns the relative excess of the slowest stage's work over the mean."""
        work = self.costs.stages(self._cut(num_stages), 1, 0.0).slot
        return max(work) / (sum(work) / num_stages) - 1

    def _objection(self, name: str, num_stages: int, num_microbatches: int) -> str | None:
        traits = traits_of(name)
        if traits.steps_alone and self.model.steps_tied_weights:
            return "its stages step at different times, and tied weights need first and last together"
        if traits.drifts and self.config.train.recompute_every:
            return "it overwrites the weights that recomputed blocks would need again"
        return why_not(name, num_stages, num_microbatches, self.model.num_layers + 2)

    def stage_counts(self) -> list[int]:
        num_devices = self.cluster.num_devices
        counts = range(2, min(num_devices, self.model.num_layers + 2) + 1)
        return [count for count in counts if num_devices <= MAX_EVERY_COUNT or num_devices % count == 0]

    def _guess(self, name: str, division: Division) -> float:
        """Estimates the tokens per second: all microbatches pass through the slowest stage, and a share of filling and
        draining is idle. The estimate is exact only for equal stages."""
        num_stages, num_microbatches = division.num_stages, division.num_microbatches
        costs = self.stage_costs(division)
        # Links are hidden where more microbatches are in flight than there are stages.
        is_deep = endless(name, num_stages, num_microbatches).max_in_flight > num_stages
        steady = max(costs.slot) + (0.0 if is_deep else 2 * costs.latency)
        # With too few microbatches to fill the pipeline, every schedule that drains is idle for some time.
        few = 1 - num_microbatches / (2 * num_stages)
        idle = max(IDLE.get(name, 1.0), few) * (sum(costs.slot) - max(costs.slot)) if traits_of(name).flushes else 0.0
        step_time = max(num_microbatches * steady + idle + max(costs.update), self._sending(name, division))
        tokens = division.num_sequences * self.model.sequence_length
        return tokens / self._with_replicas(name, step_time, division)

    def _predict(self, schedule: str, division: Division) -> Option:
        name = "one_f_one_b" if schedule == DATA_PARALLEL else schedule
        layers, traits = division.layers_per_stage, traits_of(name)
        prediction = predict(name, self.stage_costs(division), division.num_microbatches)
        alone = max(prediction.step_time, self._sending(name, division))
        stages = (
            Stage(
                index=index,
                num_stages=len(layers),
                first_layer=sum(layers[:index]),
                num_layers=layers[index],
                versions=prediction.weight_versions[index],
                delay=prediction.delay[index],
                in_flight=prediction.in_flight[index],
                max_in_flight=max(prediction.in_flight),
                traits=traits,
                num_replicas=division.num_replicas,
            )
            for index in range(len(layers))
        )
        memory = tuple(self.memory_model.stage_memory(stage, division.microbatch_size) for stage in stages)
        return self._option(schedule, division, prediction, self._with_replicas(name, alone, division), memory)

    def _option(
        self,
        schedule: str,
        division: Division,
        prediction: Prediction,
        step_time: float,
        memory: tuple[StageMemory, ...],
    ) -> Option:
        tokens_per_second = division.num_sequences * self.model.sequence_length / step_time
        fits = max(stage.most for stage in memory) <= self.cluster.memory
        return Option(schedule, division, prediction, step_time, tokens_per_second, memory, fits, self.config)

    def stage_costs(self, division: Division) -> StageCosts:
        """Returns the costs of the stages. Replicas that share an optimizer divide its update. The replica with the
        most values to step determines the time. This is approximate, because owners are chosen by the cost of the
        update."""
        layers, size = division.layers_per_stage, division.microbatch_size
        latency = self._latency(len(layers), size) if len(layers) > 1 else 0.0
        costs = self.costs.stages(layers, size, latency)
        shares = (self.memory_model.owned_share(s, division.num_replicas) for s in self._stage_layers(layers))
        update = tuple(share * seconds for share, seconds in zip(shares, costs.update, strict=True))
        return replace(costs, update=update)

    def _latency(self, num_stages: int, microbatch_size: int) -> float:
        message = self.memory_model.message(microbatch_size)
        return self.cluster.latency + message / self.cluster.between_stages(num_stages)

    def _sending(self, name: str, division: Division) -> float:
        """Returns how long a link is busy in a step, in one direction. A prediction allows messages on a link to
        overlap in time, so a schedule with many messages in flight would hide any link. But no step is shorter than
        this time."""
        if division.num_stages == 1:
            return 0.0
        num_messages = NUM_CHUNKS.get(name, 1) * division.num_microbatches
        bandwidth = self.cluster.between_stages(division.num_stages)
        return num_messages * self.memory_model.message(division.microbatch_size) / bandwidth

    def _with_replicas(self, name: str, step_time: float, division: Division) -> float:
        """Returns the step time with the sum of gradients over replicas. A ring sums the gradients of a stage, and
        every device sends nearly twice their size. The sum must end before a synchronous update can start, while two_bw
        has a whole step for it. If replicas share the optimizer, gradients are sent to their owners, and the second
        transfer has the new working copies."""
        num_replicas, dtypes = division.num_replicas, self.memory_model.dtypes
        if num_replicas == 1:
            return step_time
        returned = dtypes.compute if self.config.optimizer.sharded else dtypes.reduction
        bytes_each = dtypes.reduction.itemsize + returned.itemsize
        largest = self._most_parameters(division.layers_per_stage)
        bandwidth = self.cluster.between_replicas(division.num_stages)
        ring = (num_replicas - 1) / num_replicas * largest * bytes_each / bandwidth
        return max(step_time, ring) if traits_of(name).has_slack else step_time + ring

    def _keeps(self, layers: tuple[int, ...]) -> float:
        """Returns the bytes that the largest stage keeps with any schedule: its weights and their gradients."""
        dtypes = self.memory_model.dtypes
        return (dtypes.compute.itemsize + dtypes.gradient.itemsize) * self._most_parameters(layers)

    def _most_parameters(self, layers: tuple[int, ...]) -> int:
        return max(self.memory_model.passes(stage, 1).parameters for stage in self._stage_layers(layers))

    def _stage_layers(self, layers: tuple[int, ...]) -> list[Layers]:
        return [layers_of(self.model, sum(layers[:i]), size) for i, size in enumerate(layers)]


def best_of(searches: Sequence[Search], schedule: str) -> Option | str:
    """Returns the fastest option that fits. Among equally fast options it returns the one with the fewest memory
    savings. If none fits, it returns the one with the least memory. If there is no option, it returns the reason.
    searches: each saves more memory than the one before."""
    found: list[Option] = []
    reason = ""
    for search in searches:
        if found and found[-1].is_free and (found[-1].division.num_replicas == 1 or len(found) > 1 or schedule == FSDP):
            break  # more savings would only be slower, except that sharing the update among replicas may be faster
        option = search.best(schedule)
        if isinstance(option, str):
            reason = reason or option
        else:
            found.append(option)
    fitting = [option for option in found if option.fits]
    if not fitting:
        return min(found, key=lambda option: option.largest.most, default=reason)
    most = max(option.tokens_per_second for option in fitting)
    return next(option for option in fitting if option.tokens_per_second >= (1 - ALIKE) * most)


def _sizes(num_sequences: int) -> list[int]:
    """Returns microbatch sizes that divide the number of sequences, smallest first."""
    sizes = (size for size in range(1, num_sequences + 1) if num_sequences % size == 0)
    return list(islice(sizes, MAX_SIZES))
