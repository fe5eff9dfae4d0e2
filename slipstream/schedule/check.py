"""Checks that a schedule has the properties it promises, before it runs and without torch.

    report = check(Schedule("two_bw", num_stages=4, num_microbatches=4, num_steps=3))

`check` raises a ScheduleError that names the wrong action, or returns what it has observed. `play` is the only function
that runs through all stages together; the simulator uses it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .action import Action, Key, Op, requires
from .schedule import Schedule, ScheduleError


@dataclass(frozen=True)
class Report:
    """The properties of a checked schedule, for every stage."""

    delays: tuple[tuple[int, int] | None, ...]
    """Smallest and largest number of updates between the weights that a batch ran on and those that its own update is
    applied to. The synchronous start and the first `delay` batches after it are not counted, because their delay is
    smaller. None means that no batch is left."""
    live_versions: tuple[int, ...]
    """Largest number of weight versions held at the same time."""
    peak_in_flight: tuple[int, ...]
    """Largest number of microbatches between their forward and their backward."""
    num_actions: int
    max_drift: int
    """Largest number of updates between the forward and the backward of any microbatch."""


def check(schedule: Schedule) -> Report:
    return check_actions(schedule, bounded_actions(schedule))


def check_actions(schedule: Schedule, actions_by_stage: Sequence[Sequence[Action]]) -> Report:
    """Checks actions from any source against the properties of `schedule`.

    The order of the checks matters, because each relies on those before it.
    """
    if schedule.num_steps is None or len(actions_by_stage) != schedule.num_stages:
        raise ScheduleError(
            f"{len(actions_by_stage)} sequences of actions cannot be checked against "
            f"{schedule.num_stages} stages and {schedule.num_steps} steps"
        )
    for stage, actions in enumerate(actions_by_stage):
        _check_complete(schedule, schedule.num_steps, stage, actions)
    for upstream, downstream in pairwise(actions_by_stage):
        _check_messages(sender=upstream, receiver=downstream, ops=(Op.FORWARD, Op.EVALUATE))
        _check_messages(sender=downstream, receiver=upstream, ops=(Op.BACKWARD,))
    for actions in actions_by_stage:
        _check_order(actions)
    drifts = [_check_versions(schedule, stage, actions) for stage, actions in enumerate(actions_by_stage)]
    live = [_check_live_versions(schedule, stage, actions) for stage, actions in enumerate(actions_by_stage)]
    for _ in play(actions_by_stage, schedule.global_update):
        pass
    return Report(
        delays=tuple(_delays(schedule, stage, actions) for stage, actions in enumerate(actions_by_stage)),
        live_versions=tuple(live),
        peak_in_flight=tuple(peak_in_flight(actions) for actions in actions_by_stage),
        num_actions=sum(len(actions) for actions in actions_by_stage),
        max_drift=max(drifts),
    )


def bounded_actions(schedule: Schedule) -> list[list[Action]]:
    """Returns all actions of all stages. Raises a ScheduleError for a schedule that never ends."""
    if schedule.num_steps is None:
        raise ScheduleError(f"{schedule.name} without num_steps never ends: give the number of steps")
    return [list(schedule.actions(stage)) for stage in range(schedule.num_stages)]


def play(actions_by_stage: Sequence[Sequence[Action]], global_update: bool) -> Iterator[tuple[Action, list[Key]]]:
    """Yields every action and the actions it requires, in an order in which they can happen. Each stage keeps its own
    order.

    Why this detects every deadlock: a finished action stays finished, so playing an action never blocks another stage.
    If all stages are blocked here, no other order gets further.
    """
    num_stages = len(actions_by_stage)
    position = [0] * num_stages
    finished: set[Key] = set()
    waiting: dict[Key, list[int]] = {}
    ready = list(range(num_stages))
    while ready:
        stage = ready.pop()
        actions = actions_by_stage[stage]
        while position[stage] < len(actions):
            action = actions[position[stage]]
            required = requires(action, num_stages, global_update)
            missing = [key for key in required if key not in finished]
            if missing:
                waiting.setdefault(missing[0], []).append(stage)
                break
            yield action, required
            position[stage] += 1
            key = action.key
            finished.add(key)
            if key in waiting:
                ready += waiting.pop(key)
    if waiting:
        stuck = sorted((stage, key) for key, stages in waiting.items() for stage in stages)
        waits = [f"{actions_by_stage[stage][position[stage]]} waits for {key}" for stage, key in stuck]
        raise ScheduleError(f"the schedule deadlocks: {', '.join(waits)}")


def peak_in_flight(actions: Sequence[Action]) -> int:
    """Returns the largest number of microbatches that one stage holds between their forward and their backward."""
    peak = now = 0
    for action in actions:
        if action.op is Op.FORWARD:
            now += 1
            peak = max(peak, now)
        elif action.op is Op.BACKWARD:
            now -= 1
    return peak


def _check_complete(schedule: Schedule, num_steps: int, stage: int, actions: Sequence[Action]) -> None:
    """Checks that every forward, backward, update and evaluation occurs exactly once, and nothing else.

    The expected actions are enumerated here, not taken from the generators, because these are being checked.
    """
    m, first = schedule.num_microbatches, schedule.first_step
    evaluated = [step for step in sorted(set(schedule.evaluate_after)) if first - 1 <= step < num_steps]
    expected = [Key(stage, op, k) for op in (Op.FORWARD, Op.BACKWARD) for k in range(first * m, num_steps * m)]
    expected += [Key(stage, Op.UPDATE, (step + 1) * m - 1) for step in range(first, num_steps)]
    expected += [Key(stage, Op.EVALUATE, k, step + 1) for step in evaluated for k in range(schedule.num_evaluations)]
    played = dict.fromkeys(expected, False)
    for action in actions:
        key = action.key
        if key not in played:
            raise ScheduleError(f"{action} does not belong to stage {stage} of this schedule")
        if played[key]:
            raise ScheduleError(f"{action} is played twice")
        played[key] = True
    missing = next((key for key, done in played.items() if not done), None)
    if missing is not None:
        raise ScheduleError(f"{missing} is missing from stage {stage}")


def _check_messages(sender: Sequence[Action], receiver: Sequence[Action], ops: tuple[Op, ...]) -> None:
    """Checks that two stages expect their messages in the same order. Messages have no tags: the first sent is the
    first received."""
    sent = [action for action in sender if action.op in ops]
    received = [action for action in receiver if action.op in ops]
    for one, other in zip(sent, received, strict=True):
        if _message(one) != _message(other):
            raise ScheduleError(
                f"{other} receives what {one} sends: stage {other.stage} expects the messages of "
                f"stage {one.stage} in another order"
            )


def _message(action: Action) -> tuple[bool, int, int]:
    """Returns what identifies the message of an action on its edge. It also orders the actions of one kind."""
    is_evaluation = action.op is Op.EVALUATE
    return is_evaluation, action.version if is_evaluation else 0, action.microbatch


def _check_order(actions: Sequence[Action]) -> None:
    """Checks that forwards, backwards, updates and evaluations are each in ascending order."""
    latest: dict[Op, Action] = {}
    for action in actions:
        before = latest.get(action.op, action)
        if _message(action) < _message(before):
            raise ScheduleError(f"{before} comes before {action}, but microbatches pass in ascending order")
        latest[action.op] = action


def _check_versions(schedule: Schedule, stage: int, actions: Sequence[Action]) -> int:
    """Checks that every version is written once, and read by the actions that the schedule promises. Returns the
    largest drift."""
    newest = schedule.first_step
    largest_drift = 0
    max_drift = schedule.max_drift(stage)
    forward_version: dict[int, int] = {}
    for action in actions:
        version = action.version
        if action.op is Op.UPDATE:
            if version != newest + 1:
                raise ScheduleError(f"{action} writes out of turn: version {newest + 1} comes next")
            newest = version
        elif action.op is Op.EVALUATE:
            if version != newest and not schedule.traits.steps_alone:
                raise ScheduleError(f"{action} runs after {newest} updates of its stage, not after {version}")
        else:
            if version > newest:
                raise ScheduleError(f"{action} reads version {version} before its stage has written it")
            if action.op is Op.FORWARD:
                forward_version[action.microbatch] = version
            elif action.microbatch not in forward_version:
                raise ScheduleError(f"{action} comes before the forward of its microbatch")
            else:
                drift = version - forward_version.pop(action.microbatch)
                if not 0 <= drift <= max_drift:
                    raise ScheduleError(
                        f"{action} reads version {version}, but the forward read version {version - drift}: "
                        f"stage {stage} allows a drift of {max_drift}"
                    )
                largest_drift = max(largest_drift, drift)
            promised = _promised_version(schedule, action, newest)
            if version != promised:
                raise ScheduleError(f"{action} does not read version {promised}, which its batch runs on")
    return largest_drift


def _promised_version(schedule: Schedule, action: Action, newest: int) -> int:
    step, start = action.microbatch // schedule.num_microbatches, schedule.sync_start_steps
    if step < start:
        return step
    return newest if schedule.traits.drifts else max(start, step - schedule.delay(action.stage))


def _check_live_versions(schedule: Schedule, stage: int, actions: Sequence[Action]) -> int:
    """Checks and returns the largest number of versions held at the same time: the newest, and all that are still to be
    read."""
    blind = (Op.UPDATE, Op.EVALUATE) if schedule.traits.steps_alone else (Op.UPDATE,)
    last_read = {action.version: index for index, action in enumerate(actions) if action.op not in blind}
    num_versions = schedule.num_versions(stage)
    oldest = max(min(schedule.sync_start_steps, schedule.first_step), schedule.first_step - num_versions + 1)
    live = list(range(oldest, schedule.first_step + 1))
    most = 1
    for index, action in enumerate(actions):
        if action.op is Op.UPDATE:
            still_read = [version for version in live if last_read.get(version, -1) > index]
            if len(still_read) >= num_versions:
                raise ScheduleError(
                    f"{action} writes a version too many: stage {stage} has room for {num_versions} "
                    f"and has yet to read {' and '.join(f'v{version}' for version in still_read)}"
                )
            live = [*still_read, action.version]
            most = max(most, len(live))
    return most


def _delays(schedule: Schedule, stage: int, actions: Sequence[Action]) -> tuple[int, int] | None:
    first = (schedule.sync_start_steps + schedule.delay(stage)) * schedule.num_microbatches
    delays = {
        action.microbatch // schedule.num_microbatches - action.version
        for action in actions
        if action.op is Op.FORWARD and action.microbatch >= first
    }
    return (min(delays), max(delays)) if delays else None
