"""Executes the actions of one stage, each with its handler.

The executor knows little of the schedule except the actions that it receives, in order. It looks a few actions ahead
only to announce the messages that they will need, so that the messages arrive while it computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError, PipelineError
from ..optim.correction import Alignment
from ..schedule import Action, Op, Schedule
from ..transport.base import Transport
from ..transport.host_staging import copy_to_host
from ..transport.link import Message, PeerLost, place_of
from ..transport.streams import Streams, await_device, fetch
from .clock import Activity, Clock
from .peak_memory import peak_memory
from .reduction import Finished, Requests
from .sampling import Sampler
from .task import Evaluation, EvaluationReport, StepReport, Task
from .update import Updater
from .update_step import OVERLAPPING, Place, UpdateMaker, UpdateStep
from .weight_versions import WeightVersions
from .zero1 import gather_masters

LOOKAHEAD = 6
"""Number of actions to look ahead: two and a half slots. That is enough for both directions, and needs no more buffers
than necessary."""

Result = TypeVar("Result")


@dataclass
class InFlight:
    """A microbatch between its forward and its backward."""

    microbatch: int
    version: int
    inputs: Message
    outputs: Message


class Executor:
    """Executes the actions of one stage."""

    def __init__(
        self,
        transport: Transport,
        schedule: Schedule,
        versions: WeightVersions,
        updater: Updater,
        task: Task,
        device: torch.device,
        owners: Mapping[str, int] | None = None,
        reduction_dtype: torch.dtype | None = None,
        first_trained: int = 0,
        backward_lock: AbstractContextManager[Any] | None = None,
        until: int | None = None,
    ) -> None:
        """`owners` maps every parameter to the replica that steps it. None means that all replicas do.
        `first_trained` is the first stage with a parameter that is not frozen. Gradients are sent down to it and no
        further. For `reduction_dtype` see Reducer, for `until` see Pipeline."""
        self._backward_lock = backward_lock or nullcontext()
        self._transport, self._schedule, self._versions, self._updater = transport, schedule, versions, updater
        self._task, self._device, self._owners = task, device, owners
        self._streams = Streams(device)
        self._is_first = transport.stage == 0
        self._is_last = transport.stage == transport.num_stages - 1
        self._sends_gradients = transport.stage > first_trained
        self._takes_gradients = first_trained <= transport.stage and not self._is_last
        self._handlers = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.UPDATE: self._update,
            Op.EVALUATE: self._evaluate,
        }
        self.clock = Clock(device, max(schedule.sync_start_steps, schedule.first_step), schedule.num_microbatches)
        self._update_maker = UpdateMaker(
            transport,
            schedule,
            versions,
            updater,
            self._streams,
            self.clock,
            owners,
            reduction_dtype,
            task.skip_non_finite,
        )
        self._update_step: UpdateStep | None = None
        """Update of the batch that has ended and whose update is not due yet."""
        self._in_flight: deque[InFlight] = deque()
        self._batch_loss: Tensor | None = None
        self._evaluation_losses: list[Tensor] = []
        """Loss of the evaluation set so far, and of each of its parts. Empty on all stages but the last."""
        self._evaluated: nn.Module | None = None
        self._sampler: Sampler | None = None
        self._last_evaluated = schedule.first_step - 2
        assert schedule.num_steps is not None, "a run has an end"
        self.end = schedule.num_steps if until is None else until
        """Number of steps after which the run ends. It is reduced when a stop or pause is requested."""
        self.stop_was_asked = False
        self._first_read: dict[int, int] = {}
        self.peak_in_flight = 0
        self.peak_versions = 1
        self.action: Action | None = None
        """Action that is being executed, for messages and monitoring."""

    def play(self, actions: Iterable[Action]) -> Iterator[StepReport | EvaluationReport]:
        try:
            with self._streams.running():
                for action in self._announced(actions):
                    self.action = action
                    with self._transport.limit(lambda: str(self.action)), self._streams.computing():
                        report = self._handlers[action.op](action)
                    if report is not None:
                        yield report
                    # A run that ends as planned plays on, because an evaluation may follow the last update.
                    if self.end != self._schedule.num_steps and self._versions.newest >= self.end:
                        break
                self._update_maker.later.finish()
                self._transport.flush()
            if self._device.type == "cuda":
                transport = self._transport
                await_device(transport.stage, transport.timeout_seconds, lambda: "the end of the run")
            self.clock.finish()
        except PeerLost as lost:
            raise PipelineError(self._transport.fail(str(lost))) from lost
        except NonFiniteError as error:
            if self._schedule.global_update:
                with suppress(PeerLost):
                    self._await_all_stages()
            self._transport.fail(str(error))
            raise
        except (Exception, SystemExit) as error:
            where = f"stage {self._transport.stage} failed at {self.action}"
            said = self._transport.fail(f"{where} with {type(error).__name__}: {error}{place_of(error)}")
            if isinstance(error, SystemExit):  # which would end this process without a word to the others
                raise RuntimeError(said) from error
            raise
        finally:
            self._update_maker.background.shutdown(wait=False, cancel_futures=True)

    def _await_all_stages(self) -> None:
        """Waits until all stages have seen the inf or nan. Every stage reaches the same verdict, but the last one to
        reach it may still need messages of the first one. So no stage may end earlier."""
        everyone = tuple(range(self._transport.num_stages))
        self._transport.gather(torch.zeros(1), everyone).wait(lambda: "the other stages to see the inf or nan too")

    def _announced(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Yields every action after the next LOOKAHEAD actions have been announced to the links."""
        ahead: deque[Action] = deque()
        for action in actions:
            is_batch = action.op is not Op.EVALUATE
            if is_batch and action.microbatch >= self.end * self._schedule.num_microbatches:
                if action.op is Op.UPDATE:  # all remaining actions come before it
                    break
                continue
            if not is_batch and self.end != self._schedule.num_steps and action.version >= self.end:
                continue  # the run that continues from this end makes the evaluation
            with self._streams.computing():
                if action.op is Op.BACKWARD and self._takes_gradients:
                    self._transport.backward_in.expect(self._kind(action))
                elif action.op in (Op.FORWARD, Op.EVALUATE) and not self._is_first:
                    self._transport.forward_in.expect(self._kind(action))
            ahead.append(action)
            if len(ahead) > LOOKAHEAD:
                yield ahead.popleft()
        yield from ahead

    # ---- ending early

    def _heed(self, step: int, requests: Requests) -> None:
        """Sets the end of the run if a stop or pause is requested. Every stage learns of the request with the sums of
        `step`. At that time no stage has begun, or announced to its neighbours, a batch beyond the last one that will
        be finished."""
        self.stop_was_asked = self.stop_was_asked or requests.stop
        if requests.stop or requests.pause:
            announced = -(-(LOOKAHEAD + 1) // (2 * self._schedule.num_microbatches))
            stages = range(self._schedule.num_stages)
            late = max(max(self._schedule.delay(stage), self._schedule.max_drift(stage)) for stage in stages)
            self.end = min(self.end, step + 1 + late + announced)  # a second request is later, so the first one counts

    def copy(self, tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Starts to copy tensors to the host, in parallel with the actions that follow. Returns a function that waits
        for the copies and returns them. `into` holds earlier copies, which are overwritten where they fit."""
        with self._streams.copying():
            copies = {name: copy_to_host(tensor.detach(), into.get(name)) for name, tensor in tensors.items()}
            done = self._streams.mark_copies()

        def take() -> dict[str, Tensor]:
            if done is not None:
                done.synchronize()
            return copies

        return take

    # ---- the four actions

    def _forward(self, action: Action) -> None:
        step, microbatch = divmod(action.microbatch, self._schedule.num_microbatches)
        if microbatch == 0:
            self._first_read[step] = action.version
            self._versions.remember_buffers(step)
        inputs, targets = self._read(action, lambda: self._task.data(step, microbatch))
        if self._sends_gradients:
            for tensor in _differentiable(inputs):
                tensor.requires_grad_()
        self._enter(Activity.FORWARD, action)
        outputs = self._versions.module(action.version)(_unpack(inputs))
        if self._is_last:
            loss = self._loss(outputs, targets) * self._task.loss_scale(step)
            self._batch_loss = loss.detach() if self._batch_loss is None else self._batch_loss + loss.detach()
            outputs = loss
        self.clock.enter(Activity.OTHER)
        message = _pack(outputs)
        self._send_on(action, message)
        self._in_flight.append(InFlight(action.microbatch, action.version, inputs, message))
        self.peak_in_flight = max(self.peak_in_flight, len(self._in_flight))

    def _backward(self, action: Action) -> None:
        flight = self._in_flight.popleft()
        assert flight.microbatch == action.microbatch, f"{action} finds microbatch {flight.microbatch} in flight"
        inputs, version = _differentiable(flight.inputs), flight.version
        pairs: list[tuple[Tensor, Tensor | None]] = [(flight.outputs[0], None)] if self._is_last else []
        if self._takes_gradients:
            self._enter(Activity.WAIT_GRADIENTS, action)
            gradients = self._transport.backward_in.take(lambda: f"the gradient of {action}")
            pairs = list(zip(_differentiable(flight.outputs), gradients, strict=True))
            del gradients
        self._enter(Activity.BACKWARD, action)
        pairs = [(output, gradient) for output, gradient in pairs if output.requires_grad]
        if pairs:
            with self._backward_lock:
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        del flight, pairs  # this also frees the graph, which takes longer than all that follows
        self.clock.enter(Activity.OTHER)
        if self._sends_gradients:
            message = tuple(torch.zeros_like(t) if t.grad is None else t.grad for t in inputs)
            self._transport.backward_out.send(
                self._kind(action), message, lambda: f"the gradient of {action} to be taken"
            )
        if (action.microbatch + 1) % self._schedule.num_microbatches == 0:
            self._begin_update(action.microbatch // self._schedule.num_microbatches, version)

    def _begin_update(self, step: int, version: int) -> None:
        """Creates the update of a finished batch."""
        assert self._update_step is None, "a batch ended before the update of the one before it"
        gradients = self._versions.take_gradients(version)
        for name, parameter in self._versions.parameters(version).items():
            # A sum needs a tensor from every member, and without a sum the update must be the same as with one.
            gradients.setdefault(name, torch.zeros_like(parameter, dtype=self._versions.gradient_dtype))
        finished = Finished(
            gradients,
            self._batch_loss,
            self._updater.products,
            self.clock.split().utilisation,
            peak_memory(self._device),
            self.clock.split_since_last(),
            self._task.requests(),
        )
        self._batch_loss = None
        self._update_step = UpdateStep(self._update_maker, step, finished, self._place_of_update(step))

    def _place_of_update(self, step: int) -> Place:
        if not self._schedule.traits.has_slack or step < self._schedule.sync_start_steps:
            return Place.FOREGROUND
        # An evaluation after the step before may still be to come. It needs the masters as they are.
        schedule, before = self._schedule, step - 1
        is_read = schedule.num_evaluations > 0 and before > self._last_evaluated and before in schedule.evaluate_after
        return Place.BACKGROUND if self._device.type in OVERLAPPING and not is_read else Place.SUMS_IN_BACKGROUND

    def _update(self, action: Action) -> StepReport:
        update, self._update_step = self._update_step, None
        assert update is not None, f"{action} comes before the end of its batch"
        update.start()
        self.clock.enter(Activity.WAIT_SUMS, action)
        sums = update.finish(action)
        self.clock.enter(Activity.OTHER)
        self._heed(update.step, sums.requests)
        self._versions.close_next()
        if self._versions.num_versions > 1:
            live = {self._versions.newest, *(flight.version for flight in self._in_flight)}
            self.peak_versions = max(self.peak_versions, len(live))
        names = [group.name for group in self._updater.groups]
        return StepReport(
            step=update.step,
            loss=sums.loss,
            utilisations=sums.utilisations,
            memory=sums.memory,
            splits=sums.splits,
            gradient_norms={name: square**0.5 for name, square in zip(names, sums.squared_norms, strict=True)},
            alignments=dict(zip(names, map(Alignment.from_products, sums.products), strict=True)),
            skipped=sums.non_finite is not None,
            save=sums.requests.save,
            busy=sums.requests.busy,
            delay=update.step - self._first_read.pop(update.step),
        )

    def _evaluate(self, action: Action) -> EvaluationReport | None:
        evaluation = self._task.evaluation
        assert evaluation is not None, f"{action} finds no evaluation set"
        index = action.microbatch - evaluation.num_batches  # of the token to draw, if it is not negative
        if index == 0 and evaluation.samples is not None and (self._is_first or self._is_last):
            self._sampler = Sampler(evaluation.samples, self._transport, self._device)
        if index < 0:
            inputs, targets = self._read(action, lambda: evaluation.data(action.microbatch))
        else:
            inputs, targets = self._read(action, lambda: (self._sequences(action, index), None))
        self._enter(Activity.EVALUATION, action)
        if action.microbatch == 0:
            self._evaluated = self._module_to_evaluate(action)
        assert self._evaluated is not None
        with torch.no_grad(), _evaluating(self._evaluated):
            outputs = self._evaluated(_unpack(inputs))
            if self._is_last and self._sampler is not None:
                self._sampler.draw(outputs, lambda: f"the logits of {action}")
            elif self._is_last:
                self._add_evaluated(evaluation, action.microbatch, self._loss(outputs, targets))
        self.clock.enter(Activity.OTHER)
        self._send_on(action, _pack(outputs))
        if action.microbatch < self._schedule.num_evaluations - 1:
            return None
        self._last_evaluated = action.version - 1
        self._evaluated = None
        losses, self._evaluation_losses = self._evaluation_losses, []
        sampler, self._sampler = self._sampler, None
        if not losses:
            return EvaluationReport(self._last_evaluated, None)
        waiting = lambda: f"the loss of {action}"  # noqa: E731
        fetched = fetch(torch.stack(losses).flatten(), self._transport.stage, self._transport.timeout_seconds, waiting)
        total, *parts = fetched.tolist()
        samples = () if sampler is None else sampler.continuations()
        return EvaluationReport(self._last_evaluated, total, tuple(parts), samples)

    def _add_evaluated(self, evaluation: Evaluation, index: int, loss: Tensor) -> None:
        """Adds the loss of a batch to that of the evaluation set, and to that of its part."""
        losses = self._evaluation_losses or [torch.zeros_like(loss) for _ in range(1 + len(evaluation.parts))]
        losses[0] = losses[0] + evaluation.scaled(loss)
        if evaluation.parts:
            number, summand = evaluation.scaled_in_part(loss, index)
            losses[1 + number] = losses[1 + number] + summand
        self._evaluation_losses = losses

    def _sequences(self, action: Action, index: int) -> Tensor | None:
        """Returns the inputs of an action that draws a token. The first stage waits for the token before."""
        if not self._is_first:
            return None
        assert self._sampler is not None, f"{action} finds no prompts"
        self._enter(Activity.WAIT_ACTIVATIONS, action)
        return self._sampler.inputs(index, lambda: f"the token before {action}")

    def _module_to_evaluate(self, action: Action) -> nn.Module:
        """Returns a module that computes with the masters. They do not change until the evaluation is over."""
        module = self._versions.master_module()
        if module is not None:
            return module
        dtypes = {name: parameter.dtype for name, parameter in self._versions.parameters(0).items()}
        waiting = lambda: f"the other replicas' masters for {action}"  # noqa: E731
        masters = gather_masters(self._transport, self._owners, self._versions, dtypes, waiting, aside=True)
        return self._versions.with_weights(masters)

    def _loss(self, outputs: Any, targets: Any) -> Tensor:
        loss = self._task.loss(outputs, targets)
        if loss.numel() != 1:
            raise ValueError(
                f"the loss function returns a tensor of shape {tuple(loss.shape)}: return one number, such as the mean"
            )
        return loss

    def _send_on(self, action: Action, outputs: Message) -> None:
        """Sends the outputs of an action to the next stage, if there is one."""
        if not self._is_last:
            message = tuple(tensor.detach() for tensor in outputs)
            waiting = lambda: f"the activations of {action} to be taken"  # noqa: E731
            self._transport.forward_out.send(self._kind(action), message, waiting)

    def _kind(self, action: Action) -> str:
        if action.op is not Op.EVALUATE:
            return "training"
        evaluation = self._task.evaluation
        return "evaluation" if evaluation is None or action.microbatch < evaluation.num_batches else "sample"

    # ---- clock, inputs and outputs

    def _enter(self, activity: Activity, action: Action) -> None:
        """Starts an activity in which the stage computes, reads or waits. So the background thread may use the core
        from now on."""
        if self._update_step is not None:
            self._update_step.start()
        self.clock.enter(activity, action)

    def _read(self, action: Action, data: Callable[[], tuple[Any, Any]]) -> tuple[Message, Any]:
        """Returns the inputs and targets of an action. The first stage takes the inputs from the data, and the others
        receive them from the previous stage. Only the last stage needs targets."""
        inputs, targets = (), None
        if self._is_first or self._is_last:
            self._enter(Activity.DATA, action)
            inputs, targets = data()
            inputs = self._on_device(inputs) if self._is_first else ()
            targets = self._on_device(targets) if self._is_last else None
        if self._is_first:
            return _pack(inputs), targets
        self._enter(Activity.WAIT_ACTIVATIONS, action)
        return self._transport.forward_in.take(lambda: f"the activations of {action}"), targets

    def _on_device(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._device, non_blocking=True)
        if isinstance(value, (tuple, list)):
            return tuple(self._on_device(item) for item in value)
        if isinstance(value, dict):
            return {key: self._on_device(item) for key, item in value.items()}
        return value


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a module into evaluation mode for the duration of the block. Then restores the mode of every submodule."""
    training = [child for child in module.modules() if child.training]
    module.eval()
    try:
        yield
    finally:
        for child in training:
            child.training = True


def _differentiable(message: Message) -> list[Tensor]:
    return [tensor for tensor in message if tensor.is_floating_point() or tensor.is_complex()]


def _pack(value: Tensor | Sequence[Tensor]) -> Message:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _unpack(message: Message) -> Tensor | Message:
    return message[0] if len(message) == 1 else message
