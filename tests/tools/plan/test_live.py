"""Bytes on the meta device, where repeated operations are looked up instead of computed."""

import pytest
import torch
from torch import Tensor

from slipstream.tools.plan.live import LiveBytes


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


OPERATIONS = {
    "product": lambda a: a @ a.mT,
    "strided": lambda a: a.mT * 2,
    "expanded": lambda a: a + a[:1],
    "mean and variance": lambda a: torch.var_mean(a, dim=1)[1],
    "largest": lambda a: a.topk(2).values,
    "copy": lambda a: a.double(),
    "norm": lambda a: torch.linalg.vector_norm(a, dim=1),
    "stack": lambda a: torch.stack([a, a]),
    "in place": lambda a: a.clone().lerp_(a, 0.5),
    "given memory": lambda a: torch.sub(a, a, alpha=2, out=torch.empty_like(a)),
    "view": lambda a: a.view(-1)[3:],
    "split": lambda a: a.split(2)[1],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_repeated_operation_returns_what_the_first_one_did(name: str) -> None:
    run, given = OPERATIONS[name], tensor(6, 8)
    expected = run(given)
    for _ in range(3):
        live = LiveBytes()
        with live.watch():
            result = run(given)
        assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert result.storage_offset() == expected.storage_offset()
        is_view = result.untyped_storage() is given.untyped_storage()
        assert is_view == (expected.untyped_storage() is given.untyped_storage())
        assert live.now == (0 if is_view else result.untyped_storage().nbytes())


def test_numbers_of_other_types_are_other_arguments() -> None:
    whole = tensor(4, dtype=torch.int64)
    with LiveBytes().watch():
        for number, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64), (1, torch.int64)):
            assert (whole * number).dtype == dtype


def test_an_operation_that_changes_its_input_is_not_looked_up() -> None:
    live = LiveBytes()
    with live.watch():
        for _ in range(2):
            changed = tensor(4)
            changed.resize_(8)
            assert changed.shape == (8,)


def test_an_operation_with_wrong_shapes_fails_each_time() -> None:
    with LiveBytes().watch():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                tensor(2, 3) @ tensor(2, 3)
