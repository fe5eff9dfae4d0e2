"""A run is exported, transformers loads it and computes the same, and training goes on from it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import folder_of, summary_of
from settings import changed

from slipstream.checkpoint import Store
from slipstream.checkpoint.hugging_face import INDEX, WeightFolder, write_weights
from slipstream.checkpoint.tensors import Description
from slipstream.cli.generate import main as generate_text
from slipstream.config.schema import Config, ModelSection
from slipstream.errors import UsageError
from slipstream.tools.export import export
from slipstream.tools.generate import Sampling, choose, codec_of, generate
from slipstream.tools.loading import find_source, load
from slipstream.train.trainer import train

transformers = pytest.importorskip("transformers")

KINDS = {
    "dense": {},
    "tied": {"model__tied_embeddings": True},
    "qwen2": {"model__qkv_bias": True},
    "qwen3": {"model__qk_norm": True, "model__head_dim": 16},
    "scaled": {"model__rope_scaling": (4.0, 1.0, 4.0, 8.0)},
    "experts": {
        "model__num_experts": 4,
        "model__experts_per_token": 2,
        "model__expert_dim": 16,
        "model__num_shared_experts": 1,
        "model__num_dense_layers": 1,
    },
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def make(tiny: Config, runs: Path):
    """Trains a run of that kind, unless there is one, and returns its folder."""

    def trained(kind: str) -> Path:
        config = changed(tiny, train__steps=3, evaluation__batches=0, run__folder=str(runs), run__name=kind)
        if not folder_of(config).exists():
            train(changed(config, **KINDS[kind]))
        return folder_of(config)

    return trained


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_what_the_run_does(kind, make, tmp_path):
    run = make(kind)
    source = find_source(run, None, print)
    export(source, tmp_path / "out", "float32")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    ours = load(source, CPU, torch.float32)
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs.eval()(ids).logits, atol=1e-5, rtol=0)
    greedy = list(generate(ours, ids[0, :4].tolist(), Sampling(8, temperature=0), length=16))
    expected = theirs.generate(ids[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert greedy == expected[0, 4:].tolist()
    again = load(find_source(tmp_path / "out", None, print), CPU, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_training_goes_on_from_a_folder_whatever_the_stages(kind, make, tiny, tmp_path):
    run = make(kind)
    export(find_source(run, None, print), tmp_path / "out", "float32")
    before = Store(run / "checkpoints").newest(print)
    checksums = []
    for stages in (1, 2):
        config = changed(
            replace(tiny, model=ModelSection(initial=str(tmp_path / "out"))),
            pipeline__stages=stages,
            train__steps=2,
            evaluation__batches=0,
            optimizer__learning_rate=1e-9,
            optimizer__adamw_learning_rate=1e-9,
            run__name=f"further{stages}",
        )
        train(config)
        after = Store(folder_of(config) / "checkpoints").newest(print)
        for name in (name for name in before.names() if name.startswith("master/") and "router.bias" not in name):
            torch.testing.assert_close(after.read([name])[name], before.read([name])[name], atol=1e-6, rtol=0)
        checksums.append(summary_of(config)["parameter_checksum"])
    shutil.rmtree(tmp_path / "out")  # the run's result does not need what it started from
    assert find_source(folder_of(config), None, print).model.num_parameters() == summary_of(config)["parameters"]
    assert checksums[0] == checksums[1]


def test_the_tokenizer_of_bytes_is_one_that_transformers_reads(make, tmp_path):
    run = make("dense")
    export(find_source(run, None, print), tmp_path / "out", "bfloat16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "two words, ünd\n模 \x00."
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == 0 and config["torch_dtype"] == "bfloat16"
    assert WeightFolder(tmp_path / "out").read("model.norm.weight").dtype == torch.bfloat16


def test_many_weights_are_written_in_shards_with_an_index(tmp_path):
    tensors = {f"t{i}": torch.full((3, i + 1), float(i)) for i in range(6)}
    entries = {name: Description(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    size, done = sum(tensor.nbytes for tensor in tensors.values()), []
    write_weights(tmp_path, entries, tensors.__getitem__, 100, progress=lambda now, total: done.append((now, total)))
    files = {path.name for path in tmp_path.iterdir()}
    assert INDEX in files and len(files) == 5 and done[-1] == (size, size)
    folder = WeightFolder(tmp_path)
    assert folder.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in tensors.items())
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == size and set(index["weight_map"].values()) == files - {INDEX}


def test_a_failed_export_leaves_nothing_behind(make, tmp_path):
    run = make("dense")
    source = find_source(run, None, print)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError):
        export(source, tmp_path / "out", "float32", progress=fail)
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*out*"))


def test_a_folder_in_use_is_not_overwritten_by_accident(make, tmp_path):
    run = make("dense")
    source, target = find_source(run, None, print), tmp_path / "out"
    target.mkdir()
    (target / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="is not empty: choose another, or give --overwrite"):
        export(source, target, "float32")
    with pytest.raises(UsageError, match=r"has no config\.json and is no model"):
        export(source, target, "float32", overwrite=True)
    (target / "mine.txt").rename(target / "config.json")
    export(source, target, "float32", overwrite=True)
    assert json.loads((target / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize(("text", "step", "sentence"), [
    ("nowhere", None, "has neither a config.toml nor a config.json"),
    ("run", 7, "step-00000007 does not exist: there are [3]"),
    ("out", 7, "is a folder of Hugging Face and has no steps: leave out @7"),
])  # fmt: skip
def test_what_is_no_model_is_one_sentence(text, step, sentence, make, tmp_path):
    run = make("dense")
    export(find_source(run, None, print), tmp_path / "out", "float32")
    path = {"run": run, "out": tmp_path / "out"}.get(text, tmp_path / text)
    with pytest.raises(UsageError) as refused:
        find_source(path, step, print)
    assert sentence in str(refused.value)


# ---- generation


@pytest.mark.parametrize("kind", ["dense", "qwen3", "experts"])
def test_a_cache_changes_no_token(kind, make):
    run = make(kind)
    layers = load(find_source(run, None, print), CPU, torch.float64)
    for sampling in (
        Sampling(12, temperature=0),
        Sampling(12, seed=3),
        Sampling(12, top_k=5, seed=4),
        Sampling(12, top_p=0.5),
    ):
        with_cache, without = (list(generate(layers, [1, 2, 3], sampling, 16, cache)) for cache in (True, False))
        assert with_cache == without and len(with_cache) == 12


def test_text_ends_where_the_positions_do_and_at_the_end_token(make):
    run = make("dense")
    layers = load(find_source(run, None, print), CPU, torch.float32)
    text = list(generate(layers, [1, 2, 3], Sampling(100, seed=1), length=16))
    assert len(text) == 13
    assert (
        list(generate(layers, [1, 2, 3], Sampling(100, seed=1, end=text[4]), length=16)) == text[: text.index(text[4])]
    )


def test_it_is_said_beforehand_where_the_positions_end(make, capsys):
    run = make("dense")
    generate_text([str(run), "--prompt", "abc", "--max-tokens", "100", "--device", "cpu"])
    assert "at most 13 tokens, because the model has 16 positions" in capsys.readouterr().err
    generate_text([str(run), "--prompt", "abc", "--max-tokens", "13", "--device", "cpu"])
    assert "positions" not in capsys.readouterr().err


def test_a_prompt_that_is_not_utf_8_is_one_sentence(make):
    with pytest.raises(UsageError, match=r"^prompt = '\\udcff' is not Unicode: write it in UTF-8$"):
        generate_text([str(make("dense")), "--prompt", "\udcff", "--device", "cpu"])


def test_top_k_and_top_p_draw_only_from_the_likely():
    logits, generator = torch.tensor([0.0, 3.0, 2.0, 1.0, -5.0]), torch.Generator().manual_seed(0)

    def drawn(**fields) -> set[int]:
        return {choose(logits, Sampling(**fields), generator) for _ in range(300)}

    assert drawn(temperature=0) == drawn(top_k=1) == drawn(top_p=0.01) == {1}
    assert drawn(top_k=3) == {1, 2, 3}
    assert drawn(top_p=0.8) == {1, 2}
    assert drawn(temperature=5.0) == {0, 1, 2, 3, 4}
    for wrong in (torch.nan, torch.inf):
        with pytest.raises(UsageError, match="outputs are inf or nan, because its training diverged: use an earlier"):
            choose(torch.tensor([0.0, wrong]), Sampling(temperature=0), generator)


def test_letters_of_several_tokens_come_out_whole(make):
    run = make("dense")
    codec = codec_of(find_source(run, None, print))
    pieces = list(codec.stream(iter(codec.encode("añ模b"))))
    assert "".join(pieces) == "añ模b" and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"max_tokens": 0}, "max_tokens = 0 makes no text"),
    ({"temperature": -1.0}, "temperature = -1.0 is no temperature"),
    ({"top_k": -1}, "top_k = -1 is too small"),
    ({"top_p": 0.0}, "top_p = 0.0 is no probability"),
    ({"seed": 10**20}, "seed = 100000000000000000000 has more than 64 bits"),
])  # fmt: skip
def test_sampling_that_makes_no_sense_is_one_sentence(fields, sentence):
    with pytest.raises(UsageError) as refused:
        Sampling(**fields)
    assert sentence in str(refused.value)
