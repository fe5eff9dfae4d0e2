"""Documents in one row that do not see each other."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from harness import EXPERTS, Task, largest_difference, run_pipeline, run_reference
from torch import Tensor, nn

from slipstream import Group, Muon
from slipstream.model.adapters import PartlyTrained
from slipstream.model.decoder import ModelConfig, decoder, initialise, next_token_loss
from slipstream.model.documents import _bounds, attend, document_starts, max_documents
from slipstream.model.registry import Decoder
from slipstream.optim.groups import is_matrix

END = 0
CONFIG = ModelConfig(
    vocab_size=29,
    sequence_length=16,
    dim=16,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    hidden_dim=24,
    document_separator=END,
)


def made(config: ModelConfig) -> nn.Sequential:
    model = decoder(config).double()
    initialise(model, config, seed=0)
    with torch.no_grad():  # larger than usual, so that a neighbour shows
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def row(*documents: int, seed: int = 0) -> Tensor:
    """One row of documents of these lengths. All but the first begin with the separator."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 29, (sum(documents),), generator=generator)
    for length in torch.tensor(documents).cumsum(0)[:-1]:
        tokens[length] = END
    return tokens.unsqueeze(0)


def test_starts_are_those_of_the_separators():
    tokens = torch.tensor([[5, 6, END, 7, END, END, 8], [END, 1, 2, 3, 4, 5, END]])
    assert document_starts(tokens, END).tolist() == [[0, 0, 2, 2, 4, 5, 5], [0, 0, 0, 0, 0, 0, 6]]


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_document_has_the_logits_that_it_has_alone(experts):
    model = made(replace(CONFIG, **experts))
    tokens = row(5, 1, 3, 7)
    together, start = model(tokens), 0
    for length in (5, 1, 3, 7):
        alone = model(tokens[:, start : start + length])
        torch.testing.assert_close(together[:, start : start + length], alone, atol=1e-12, rtol=0)
        start += length


def test_a_neighbour_changes_neither_logits_nor_gradients():
    model = made(CONFIG)
    tokens = row(6, 10)
    other = torch.cat((row(6, seed=1), tokens[:, 6:]), dim=1)
    assert torch.equal(model(tokens)[:, 6:], model(other)[:, 6:])
    assert not torch.equal(model(tokens)[:, :6], model(other)[:, :6])
    embedded, starts = model.embedding(tokens)
    embedded = embedded.detach().requires_grad_()
    model[1:]((embedded, starts))[:, 6:].sum().backward()
    assert embedded.grad is not None
    assert embedded.grad[:, :6].eq(0).all()
    assert embedded.grad[:, 6:].ne(0).any()


def test_a_model_of_which_a_part_is_trained_keeps_them_apart_too():
    fields = asdict(replace(CONFIG, document_separator=None))
    spec = PartlyTrained(Decoder(**fields), freeze=("embedding.*",)).separating(END)
    layers = spec.layers().double()
    spec.initialise(layers, seed=0)
    tokens = row(6, 10)
    torch.testing.assert_close(layers(tokens)[:, 6:], layers(tokens[:, 6:]), atol=1e-12, rtol=0)


def test_without_a_separator_in_the_row_it_is_the_plain_model():
    model, plain = made(CONFIG), made(replace(CONFIG, document_separator=None))
    torch.testing.assert_close(model(row(16)), plain(row(16)), atol=1e-12, rtol=0)
    assert (model(row(6, 10)) - plain(row(6, 10))).abs().max() > 1e-3


def test_documents_beyond_the_limit_count_as_one():
    length = 128
    starts = document_starts(torch.full((2, length), END), END)
    most = max_documents(length)
    assert most == 18
    assert starts[0].tolist() == [*range(most), *[most - 1] * (length - most)]
    assert _bounds(starts).tolist() == [*range(most), *range(length, length + most), 2 * length]


def test_bounds_are_padded_with_the_number_of_tokens():
    starts = document_starts(torch.cat((row(5, 11), row(16))), END)
    bounds = _bounds(starts)
    assert bounds.dtype == torch.int32
    assert bounds[:3].tolist() == [0, 5, 16]
    assert len(bounds) == 2 * max_documents(16) + 1
    assert bounds[3:].eq(32).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_for_varying_lengths_equals_the_mask():
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, 4, 300, 64)
    tokens = torch.randint(0, 40, (2, 300), generator=generator, device="cuda")
    starts = document_starts(tokens, END)
    made = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in made[:3]]
        output = attend(*inputs, starts)
        output.backward(made[3].to(dtype))
        results.append([output, *(tensor.grad for tensor in inputs)])
    for fast, exact in zip(*results, strict=True):
        assert (fast.float() - exact).norm() <= 0.01 * exact.norm()


def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    tokens = torch.randint(29, (2, 17), generator=generator)
    tokens[tokens < 5] = END
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def groups() -> list[Group]:
    muon = partial(Muon, lr=0.02, ns_dtype=torch.float64)
    rest = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
    return [
        Group("matrices", muon, lambda name, p: is_matrix(name, p), error_feedback=1.0),
        Group("rest", rest, error_feedback=1.0),
    ]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's tracer does it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("stages", "options"),
    [(2, {}), (3, {"recompute": ["block0", "block2"]}), (3, {"threads": False}), (2, {"compile": "eager"})],
    ids=["two stages", "recomputed", "processes", "compiled"],
)
def test_a_pipeline_follows_the_oracle(stages, options):
    model = made(replace(CONFIG, tied_embeddings=True))
    task = Task(model, data, lambda logits, targets: next_token_loss(logits, targets) / targets.numel())
    shared = {"num_microbatches": 3, "num_steps": 8}
    expected, _ = run_reference(task, groups(), delays=[1], **shared)
    outcome = run_pipeline(task, stages, groups(), **shared, **options)
    assert largest_difference(outcome.weights, expected) <= 1e-12
    plain = Task(made(replace(CONFIG, tied_embeddings=True, document_separator=None)), data, task.loss)
    other, _ = run_reference(plain, groups(), delays=[1], **shared)
    assert largest_difference(other, expected) > 1e-3
