"""Models of transformers, cut into layers: they follow the oracle and a plain loop, and are saved for transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import Task, largest_difference, run_pipeline, run_reference
from runs import folder_of, summary_of
from settings import changed
from torch import Tensor

from slipstream import Group, Muon
from slipstream.config.schema import Config, ModelSection
from slipstream.errors import ConfigError, UsageError
from slipstream.model.decoder import next_token_loss
from slipstream.optim.groups import is_matrix
from slipstream.tools.export import export
from slipstream.tools.generate import Sampling, generate
from slipstream.tools.loading import find_source, load
from slipstream.train.trainer import train

transformers = pytest.importorskip("transformers")
from slipstream.hf import HuggingFaceModel, cut, read_model  # noqa: E402

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES = {
    "Llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": False}),
    "Gemma": ("GemmaConfig", {"head_dim": 8}),
    "Gemma 3": ("Gemma3TextConfig", {"head_dim": 8} | WINDOWS),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "Qwen3 MoE": (
        "Qwen3MoeConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
LENGTH = 12


def save_config(folder: Path, family: str) -> Path:
    name, fields = FAMILIES[family]
    getattr(transformers, name)(**(SMALL | fields)).save_pretrained(folder)
    return folder


def data(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    tokens = torch.randint(61, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return next_token_loss(logits, targets) / targets.numel()


def task_of(spec: HuggingFaceModel) -> Task:
    layers = spec.layers().double()
    spec.initialise(layers, seed=0)
    return Task(layers, data, mean_loss)


def groups(error_feedback: float) -> list[Group]:
    """Without clipping: its norm is a sum over stages, and a difference in the last bit may become one of float32, in
    which the models of transformers compute their norms."""
    rest = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
    muon = partial(Muon, lr=0.02, ns_dtype=torch.float64)
    return [
        Group("matrices", muon, lambda name, p: is_matrix(name, p), error_feedback=error_feedback),
        Group("rest", rest, error_feedback=error_feedback),
    ]


@pytest.mark.parametrize(
    ("family", "stages", "num_steps"),
    [
        ("Llama", 2, 20),
        ("Llama", 3, 6),
        ("Qwen3", 2, 6),
        ("Gemma", 3, 6),
        ("Gemma 3", 2, 6),
        ("Mixtral", 2, 6),
        ("Qwen3 MoE", 3, 20),
    ],
)
def test_delayed_steps_follow_the_oracle(family, stages, num_steps, tmp_path):
    task = task_of(read_model(save_config(tmp_path, family), LENGTH))
    shared = {"num_microbatches": 3, "num_steps": num_steps}
    expected, losses = run_reference(task, groups(1.0), delays=[1], **shared)
    outcome = run_pipeline(task, stages, groups(1.0), **shared)
    assert largest_difference(outcome.weights, expected) <= 1e-12
    assert [report.loss for report in outcome.reports[-1]] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize(("family", "stages"), [("Llama", 2), ("Gemma 3", 3), ("Qwen3 MoE", 2)])
def test_documents_are_kept_apart(family, stages, tmp_path):
    spec = read_model(save_config(tmp_path, family), LENGTH)
    task = task_of(spec.separating(7))
    tokens = torch.tensor([[1, 2, 3, 7, 5, 6, 7, 8, 9, 10, 11, 12]])
    together, plain = task.model(tokens), task_of(spec).model
    for start, end in ((0, 3), (3, 6), (6, 12)):
        torch.testing.assert_close(together[:, start:end], plain(tokens[:, start:end]), atol=1e-6, rtol=0)
    assert (together - plain(tokens)).abs().max() > 1e-3
    shared = {"num_microbatches": 3, "num_steps": 6}
    expected, _ = run_reference(task, groups(1.0), delays=[1], **shared)
    assert largest_difference(run_pipeline(task, stages, groups(1.0), **shared).weights, expected) <= 1e-12


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma", "Mixtral"])
def test_synchronous_steps_equal_a_plain_loop_of_transformers(family, tmp_path):
    spec = read_model(save_config(tmp_path, family), LENGTH)
    task = task_of(spec)
    spec.save(dict(task.model.named_parameters()).__getitem__, tmp_path / "start")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "start", dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():  # a folder holds float32, and these are the weights that it was made of
        for name, parameter in cut(model).named_parameters():
            parameter.copy_(dict(task.model.named_parameters())[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        for microbatch in range(2):
            inputs, targets = data(step, microbatch)
            (mean_loss(model(inputs, use_cache=False).logits, targets) / 2).backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in cut(model).named_parameters()}
    plain = [Group("all", partial(torch.optim.SGD, lr=0.1))]
    outcome = run_pipeline(task, 2, plain, num_microbatches=2, num_steps=5, schedule="one_f_one_b")
    assert largest_difference(outcome.weights, expected) <= 1e-12


@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_a_saved_folder_loads_and_training_starts_from_it(family, tmp_path):
    spec = read_model(save_config(tmp_path / "config", family), LENGTH)
    layers = spec.layers()
    spec.initialise(layers, seed=3)
    spec.save(dict(layers.named_parameters()).__getitem__, tmp_path / "saved")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values())
    inputs, _ = data(0, 0)
    with torch.no_grad():
        torch.testing.assert_close(layers(inputs), theirs.eval()(inputs).logits, atol=1e-6, rtol=0)
    again = read_model(tmp_path / "saved", LENGTH)
    assert again.folder
    read = again.layers()
    again.initialise(read, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(read.parameters(), layers.parameters(), strict=True))


def test_a_cut_starts_with_the_weights_of_the_whole(tmp_path):
    spec = read_model(save_config(tmp_path, "Gemma"), LENGTH)
    whole, part = spec.layers(), spec.layers()[2:]
    spec.initialise(whole, seed=5)
    spec.initialise(part, seed=5)
    known = dict(whole.named_parameters()) | {"head.output.weight": whole.embedding.weight}
    assert all(torch.equal(parameter, known[name]) for name, parameter in part.named_parameters())


def test_the_command_trains_resumes_and_exports_it(tiny: Config, tmp_path):
    save_config(tmp_path / "model", "Qwen3")
    tree = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(tree | {"vocab_size": 256}))
    section = ModelSection(hf=str(tmp_path / "model"), sequence_length=16)
    config = changed(replace(tiny, model=section), train__steps=4, run__name="hf")
    train(config)
    train(changed(config, train__steps=6, checkpoint__resume=True))
    assert summary_of(config)["resumed_at"] == 4
    source = find_source(folder_of(config), None, print)
    export(source, tmp_path / "out", "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = load(source, torch.device("cpu"), torch.float32)
    inputs = torch.arange(10).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(ours(inputs), theirs.eval()(inputs).logits, atol=1e-6, rtol=0)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids == [97, 98]
    assert len(list(generate(ours, [1, 2], Sampling(5), length=16))) == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_gives_the_same_tokens(family, tmp_path):
    """Also those of sliding windows, which are shorter than the text."""
    spec = read_model(save_config(tmp_path, family))
    layers = spec.layers().double().requires_grad_(False)
    spec.initialise(layers, seed=0)
    for parameter in layers.parameters():
        parameter.mul_(8)  # far from uniform, so that a wrong position shows
    sampling = Sampling(20, seed=3)
    prompt = [1, 7, 2, 9, 4, 4, 8]
    plain = list(generate(layers, prompt, sampling, length=32, use_cache=False))
    assert list(generate(layers, prompt, sampling, length=32)) == plain
    assert len(set(plain)) > 2 and len(plain) == 20


def test_a_folder_of_another_architecture_generates_what_transformers_does(tmp_path):
    spec = read_model(save_config(tmp_path / "config", "Mixtral"))
    layers = spec.layers()
    spec.initialise(layers, seed=3)
    with pytest.raises(UsageError, match="has no weights"):
        find_source(tmp_path / "config", None, print)
    spec.save(dict(layers.named_parameters()).__getitem__, tmp_path / "saved")
    source = find_source(tmp_path / "saved", None, print)
    ours = load(source, torch.device("cpu"), torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    given = torch.tensor([[1, 7, 2]])
    said = theirs.generate(given, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(given))
    assert list(generate(ours, [1, 7, 2], Sampling(12, temperature=0), length=32)) == said[0, 3:].tolist()


REFUSED = {
    "no file": (None, {}, "cannot be read (No such file or directory)"),
    "unknown": ("Llama", {"model_type": "nonsense"}, "model_type = 'nonsense' is unknown to transformers"),
    "dropout": ("Llama", {"attention_dropout": 0.1}, "has attention_dropout = 0.1: set it to 0"),
    "another vocabulary": ("Llama", {}, "model.vocab_size = 61 is too small for a corpus of 256"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_model_that_cannot_be_trained_is_one_sentence(how, tiny, tmp_path):
    family, fields, sentence = REFUSED[how]
    if family is not None:
        save_config(tmp_path / "model", family)
        tree = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(json.dumps(tree | fields))
    config = replace(tiny, model=ModelSection(hf=str(tmp_path / "model"), sequence_length=16))
    with pytest.raises(ConfigError) as refused:
        train(config)
    assert sentence in str(refused.value)
    assert not folder_of(config).exists()


def test_a_model_whose_forward_does_more_than_its_plan_is_refused(tmp_path):
    transformers.GraniteConfig(**SMALL, logits_scaling=2.0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GraniteForCausalLM, whose forward does more than its pipeline plan says"):
        read_model(tmp_path, LENGTH)
