"""What fully sharded data parallelism would do with the same devices. The trainer does not have it, torchtitan does; it
is the rival that a pipeline must beat, so no plan leaves it out.

Every device has its part of masters, gradients and optimizer state, gathers the weights of a layer shortly before they
are needed, in the forward and again in the backward, and hands the layer's gradient to its owners. All of it beside the
computing, but for the first layer's weights and the last layer's gradient: a step takes as long as the longer of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .predict import Prediction

if TYPE_CHECKING:
    from .search import Search

FSDP = "fsdp"


def fsdp_step(search: Search, microbatch_size: int, num_microbatches: int) -> Prediction:
    num_devices, layers = search.cluster.num_devices, (search.model.num_layers + 2,)
    costs = search.costs.stages(layers, microbatch_size, 0.0)
    dtypes = search.memory_model.dtypes
    sent = (num_devices - 1) / num_devices * search.num_parameters / search.cluster.between_replicas(1)
    gather, scatter = sent * dtypes.compute.itemsize, sent * dtypes.reduction.itemsize
    computing = num_microbatches * (costs.forward[0] + costs.backward[0]) + costs.update[0] / num_devices
    step_time = num_microbatches * (max(costs.forward[0], gather) + max(costs.backward[0], gather + scatter))
    step_time += (gather + scatter) / layers[0] + costs.update[0] / num_devices
    return Prediction(FSDP, step_time, (computing / step_time,), 1 - computing / step_time, (1.0,), (1,), (0,), False)
