"""Projection and cross entropy in chunks: the same loss and the same gradients as from all logits, in less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from slipstream.model.chunked_loss import chunked_next_token_loss, decoder_and_loss
from slipstream.model.decoder import IGNORE, ModelConfig, decoder, initialise, next_token_loss
from slipstream.tools.plan.live import LiveBytes

TOKENS, DIM, VOCABULARY = 21, 6, 40


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states in three rows, the weight, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, TOKENS // 3, DIM, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (3, TOKENS // 3), generator=generator)
    targets[0, :4] = IGNORE
    targets[2, -1] = IGNORE
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def gradients(loss: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.autograd.grad(loss, (hidden, weight))


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


# ---- the same numbers


@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 20, 21, 1000])
def test_chunks_give_the_loss_and_the_gradients_of_all_logits(chunk_tokens):
    hidden, weight, targets = inputs()
    scale = 0.37  # as a batch's tokens would scale it
    expected = next_token_loss(hidden @ weight.t(), targets) * scale
    loss = chunked_next_token_loss((hidden, weight), targets, chunk_tokens) * scale
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)
    for found, wanted in zip(gradients(loss, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert difference(found, wanted) <= 1e-13


@pytest.mark.parametrize("tied", [False, True])
def test_every_gradient_of_the_model_is_that_of_the_plain_loss(tied):
    config = ModelConfig(40, 8, 16, 2, 4, 2, 24, tied_embeddings=tied)
    plain = decoder(config).double()
    initialise(plain, config, seed=0)
    lean, loss = decoder_and_loss(config, chunk_tokens=5)
    lean.double().load_state_dict(plain.state_dict())
    tokens = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = next_token_loss(plain(tokens[:, :-1]), tokens[:, 1:])
    found = loss(lean(tokens[:, :-1]), tokens[:, 1:])
    expected.backward()
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-14)
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert len(wanted) == len(list(lean.parameters()))
    for name, parameter in lean.named_parameters():
        assert difference(parameter.grad, wanted[name]) <= 1e-12, name


def test_without_chunks_it_is_the_plain_loss_of_logits():
    config = ModelConfig(40, 8, 16, 2, 4, 2, 24)
    model, loss = decoder_and_loss(config)
    assert loss is next_token_loss
    assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 40)


def test_float16_formats_are_added_up_in_float32():
    """Of a weight's gradient over many chunks no more is lost than over one."""
    hidden, weight, targets = inputs()
    exact = gradients(next_token_loss(hidden @ weight.t(), targets), hidden, weight)
    coarse = inputs(torch.bfloat16)[:2]
    loss = chunked_next_token_loss(coarse, targets, 1)
    assert loss.dtype is torch.float32
    for found, wanted in zip(gradients(loss, *coarse), exact, strict=True):
        assert found.dtype is torch.bfloat16
        assert difference(found.double(), wanted) < 0.02


def test_ignored_positions_count_for_nothing_whatever_they_hold():
    hidden, weight, targets = inputs()
    poisoned = hidden.detach().clone()
    poisoned[0, 0] = torch.nan
    poisoned.requires_grad_()
    loss = chunked_next_token_loss((poisoned, weight), targets, 4)
    assert loss.item() == pytest.approx(chunked_next_token_loss((hidden, weight), targets, 4).item(), rel=1e-14)
    nothing = chunked_next_token_loss((hidden, weight), torch.full_like(targets, IGNORE), 4)
    assert nothing.item() == 0
    assert all(not gradient.any() for gradient in gradients(nothing, hidden, weight))


def test_what_is_frozen_gets_no_gradient():
    hidden, weight, targets = inputs()
    expected = gradients(next_token_loss(hidden @ weight.t(), targets), hidden, weight)
    (alone,) = torch.autograd.grad(chunked_next_token_loss((hidden, weight.detach()), targets, 4), [hidden])
    assert difference(alone, expected[0]) <= 1e-13
    (alone,) = torch.autograd.grad(chunked_next_token_loss((hidden.detach(), weight), targets, 4), [weight])
    assert difference(alone, expected[1]) <= 1e-13


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in its compiler
def test_a_compiled_loss_is_the_same():
    hidden, weight, targets = inputs()
    compiled = torch.compile(chunked_next_token_loss, backend="aot_eager")
    for found, wanted in zip(
        gradients(compiled((hidden, weight), targets, 8) * 0.5, hidden, weight),
        gradients(chunked_next_token_loss((hidden, weight), targets, 8) * 0.5, hidden, weight),
        strict=True,
    ):
        assert difference(found, wanted) <= 1e-13


# ---- weights that change


def test_the_gradient_is_made_of_the_weights_of_its_forward():
    hidden, weight, targets = inputs()
    expected = gradients(next_token_loss(hidden @ weight.t(), targets), hidden, weight)
    loss = chunked_next_token_loss((hidden, weight), targets, 4)
    with torch.no_grad():
        weight.zero_()
    for found, wanted in zip(gradients(loss, hidden, weight), expected, strict=True):
        assert difference(found, wanted) <= 1e-13


def test_a_second_backward_through_one_graph_raises():
    """The gradients are scaled in place, and would be scaled twice."""
    hidden, weight, targets = inputs()
    loss = chunked_next_token_loss((hidden, weight), targets, 4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- less memory


def watched(chunk_tokens: int) -> tuple[int, int]:
    """Bytes at the peak of forward and backward, and of a forward in an evaluation."""
    tokens, dim, vocabulary = 512, 8, 4096
    hidden = torch.randn(tokens, dim).requires_grad_()
    weight = torch.randn(vocabulary, dim).requires_grad_()
    targets = torch.zeros(tokens, dtype=torch.int64)

    def loss() -> Tensor:
        if not chunk_tokens:
            return next_token_loss(hidden @ weight.t(), targets)
        return chunked_next_token_loss((hidden, weight), targets, chunk_tokens)

    training, evaluation = LiveBytes(), LiveBytes()
    with training.watch():
        loss().backward()
    with evaluation.watch(), torch.no_grad():
        loss()
    return training.peak, evaluation.peak


def test_two_chunks_of_logits_are_the_most_that_ever_lives():
    logits, chunk = 512 * 4096 * 4, 32 * 4096 * 4
    weight = 4096 * 8 * 4
    plain, plain_evaluation = watched(0)
    lean, lean_evaluation = watched(32)
    assert plain >= 2 * logits and plain_evaluation >= 2 * logits
    assert lean < 2 * chunk + 4 * weight  # a chunk and its softmax, the gradient of the weight and of the states
    assert lean_evaluation < 2 * chunk + weight


def test_parameters_are_named_and_initialised_alike():
    config = ModelConfig(40, 8, 16, 2, 4, 2, 24)
    plain, (lean, _) = decoder(config), decoder_and_loss(config, 4)
    initialise(plain, config, seed=3)
    initialise(lean, config, seed=3)
    trained = copy.deepcopy(plain)
    trained.load_state_dict(lean.state_dict())  # what is trained in chunks is used with logits
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name))
