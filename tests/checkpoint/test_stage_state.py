"""What a stage keeps of an optimizer."""

from functools import partial

import pytest
import torch
from torch import nn

from slipstream.checkpoint.stage_state import restore_parameter


@pytest.mark.parametrize(("optimizer", "device"), [
    (partial(torch.optim.AdamW, fused=False), "cpu"),
    (partial(torch.optim.AdamW, capturable=True), "meta"),
])  # fmt: skip
def test_step_counters_are_where_the_optimizer_wants_them(optimizer, device):
    """torch's fused and capturable optimizers count on the parameter's device, all others on the host."""
    parameter = nn.Parameter(torch.empty(2, 3, device="meta"))
    made = optimizer([parameter])
    state = {"step": torch.tensor(4.0), "exp_avg": torch.ones(2, 3)}
    restore_parameter(made, parameter, state, keeps=False)
    restored = made.state[parameter]
    assert restored["step"].device.type == device and restored["exp_avg"].device.type == "meta"
