"""What fully sharded data parallelism would do with the same devices. The trainer does not have it, torchtitan does; it
is the rival that a pipeline must beat, so no plan leaves it out.

Every device has its part of masters, gradients and optimizer state, gathers the weights of a layer shortly before they
are needed, in the forward and again in the backward, and hands the layer's gradient to its owners. All of it beside the
computing, but for the first layer's weights and the last layer's gradient: a step takes as long as the longer of both.
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
    """costs: of the whole model as one stage. bandwidth: bytes per second between replicas."""
    (forward,), (backward,), update = costs.forward, costs.backward, costs.update[0] / num_devices
    sent = (num_devices - 1) / num_devices * num_parameters / bandwidth
    gather, scatter = sent * dtypes.compute.itemsize, sent * dtypes.reduction.itemsize
    computing = num_microbatches * (forward + backward) + update
    step_time = num_microbatches * (max(forward, gather) + max(backward, gather + scatter))
    step_time += (gather + scatter) / num_layers + update
    return Prediction(FSDP, step_time, (computing / step_time,), 1 - computing / step_time, (1.0,), (1,), (0,), False)
