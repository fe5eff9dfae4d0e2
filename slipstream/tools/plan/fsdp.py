"""Predicts the step time of fully sharded data parallelism (FSDP) on the same devices. The trainer does not have FSDP,
torchtitan does. Every plan includes it, because a pipeline must be faster than FSDP to be useful.

Every device holds a part of masters, gradients and optimizer state. It gathers the weights of a layer shortly before
they are needed, in the forward and again in the backward, and sends the layer's gradient to its owners. Communication
overlaps computation, except for the weights of the first layer and the gradient of the last one. So forward and
backward each take as long as the longer of communication and computation.
"""

from __future__ import annotations

from ...precision import Precision
from .predict import Prediction, StageCosts

FSDP = "fsdp"


def fsdp_step(
    costs: StageCosts,
    num_layers: int,
    num_parameters: int,
    num_devices: int,
    bandwidth: float,
    dtypes: Precision,
    num_microbatches: int,
) -> Prediction:
    """Predicts a step. costs: the whole model as one stage. bandwidth: bytes per second between replicas."""
    (forward,), (backward,), update = costs.forward, costs.backward, costs.update[0] / num_devices
    sent = (num_devices - 1) / num_devices * num_parameters / bandwidth
    gather, scatter = sent * dtypes.compute.itemsize, sent * dtypes.reduction.itemsize
    computing = num_microbatches * (forward + backward) + update
    step_time = num_microbatches * (max(forward, gather) + max(backward, gather + scatter))
    step_time += (gather + scatter) / num_layers + update
    return Prediction(step_time, (computing / step_time,), (1.0,), (1,), (0,), is_simulated=False)
