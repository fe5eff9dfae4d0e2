"""Mixed sources: every count is within one sample of its share, and nothing depends on how a run is divided."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from settings import changed

from slipstream.config.schema import Config, DataConfig
from slipstream.data import Batches, Corpus, DataError, Source, Tokens, corpus_of, load_corpus, validation_batches
from slipstream.data.mixture import MAX_PERIOD, turns
from slipstream.errors import ConfigError
from slipstream.model.decoder import IGNORE
from slipstream.train.build import build_components, read_corpus
from slipstream.train.describe import describe
from slipstream.train.trainer import train


def mixed(sizes: dict[float, int], microbatch_size: int = 2, num_microbatches: int = 3, seed: int = 0) -> Batches:
    """Sources by weight with so many tokens each, in windows of 10. Token i of all of them is i."""
    tokens = Tokens((np.arange(sum(sizes.values()), dtype=np.uint32),))
    sources = tuple(Source(f"source {weight}", weight, size) for weight, size in sizes.items())
    return Batches(tokens, 10, microbatch_size, num_microbatches, seed, sources)


def first_tokens(batches: Batches, num_steps: int) -> list[int]:
    return [
        int(row[0])
        for step in range(num_steps)
        for microbatch in range(batches.num_microbatches)
        for row in batches(step, microbatch)[0]
    ]


# ---- the rule


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_after_any_number_of_samples_every_count_is_within_one_of_its_share(weights: list[int]) -> None:
    order = turns(tuple(map(float, weights)))
    num_samples = np.arange(1, 2 * len(order.sources) + 1)
    sources, ranks = order.of(0, len(num_samples))
    for source, weight in enumerate(weights):
        counts = np.cumsum(sources == source)
        bound = 1 - 1 / (2 * len(weights) - 2) if len(weights) > 1 else 0
        assert np.abs(counts - num_samples * weight / sum(weights)).max() <= bound + 1e-9 < 1
        assert ranks[sources == source].tolist() == list(range(counts[-1]))


def test_the_order_of_the_sources_is_pinned() -> None:
    """A resumed run must go on in the order it began with, whatever release it is resumed with."""
    assert turns((0.7, 0.3)).sources.tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]
    assert turns((0.5, 0.3, 0.2)).sources.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 1, 0]
    batches = mixed({0.5: 301, 0.3: 201, 0.2: 101})
    assert [window for m in range(3) for window in batches.windows(0, m)] == [8, 38, 4, 56, 1, 32]


def test_weights_are_a_proportion_of_decimal_numbers() -> None:
    for weights in ((0.7, 0.3), (7.0, 3.0), (0.07, 0.03), (2.1, 0.9)):
        assert turns(weights).sources.tolist() == turns((0.7, 0.3)).sources.tolist()
    assert len(turns((1.0, 2.0)).sources) == 3


@pytest.mark.parametrize("num_samples", [0, 1, 9, 10, 23, 10**12 + 3])
def test_counts_after_many_samples_are_known_without_counting(num_samples: int) -> None:
    counts = turns((0.5, 0.3, 0.2)).num_samples(num_samples)
    assert sum(counts) == num_samples
    assert all(abs(count - num_samples * share) < 1 for count, share in zip(counts, (0.5, 0.3, 0.2), strict=True))
    sources, ranks = turns((0.5, 0.3, 0.2)).of(num_samples, 1)
    assert ranks[0] == counts[sources[0]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((0.5, 0.0), r"data\.weights has the weight 0\.0: give a number above 0, or leave the source out"),
        ((0.5, -1.0), r"data\.weights has the weight -1\.0: "),
        ((0.5, math.nan), r"data\.weights has the weight nan: "),
        ((0.5, math.inf), r"data\.weights has the weight inf: "),
        (
            (1 / 3, 0.5),
            rf"takes whole numbers with a sum above {MAX_PERIOD:,}: round them, for example to \[0\.4, 0\.6",
        ),
        ((1e300, 1e-300), r"round them, for example to \[1\.0, 0\.0001\]"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        turns(weights)


# ---- batches


def test_a_mixture_of_one_source_is_that_source() -> None:
    tokens = Tokens((np.arange(731, dtype=np.uint16),))
    alone, one = (Batches(tokens, 10, 3, 5, 3, sources) for sources in ((), (Source("a", 0.2, 731),)))
    assert first_tokens(alone, 50) == first_tokens(one, 50)


def test_every_source_is_read_by_its_weight_and_each_of_its_epochs_visits_every_window_once() -> None:
    batches = mixed({0.7: 2001, 0.3: 95}, microbatch_size=5, num_microbatches=4)  # 200 and 9 windows
    read = first_tokens(batches, 15)  # 210 and 90 samples
    first, second = [t for t in read if t < 2001], [t for t in read if t >= 2001]
    assert len(first) == 210 and len(second) == 90
    assert sorted(first[:200]) == list(range(0, 2000, 10))
    epochs = [second[start : start + 9] for start in range(0, 90, 9)]
    assert all(sorted(epoch) == list(range(2001, 2091, 10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 10  # each in another order
    assert batches.epochs(15) == [2100 / 2001, 900 / 95]
    inputs, targets = batches(3, 1)
    assert torch.equal(targets, inputs + 1)


def test_no_window_reaches_into_the_next_source() -> None:
    batches = mixed({0.5: 28, 0.25: 11, 0.125: 19, 0.126: 30})  # 2, 1, 1 and 2 windows, and tokens that fill none
    assert set(first_tokens(batches, 40)) == {0, 10, 28, 39, 58, 68}
    assert batches.num_windows == 6


def test_sources_of_one_size_have_different_orders() -> None:
    read = first_tokens(mixed({1.0: 1001, 2.0: 1001, 3.0: 1001}), 60)
    orders = [[t - start for t in read if start <= t < start + 1001][:60] for start in (0, 1001, 2002)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize(("microbatch_size", "num_microbatches"), [(1, 24), (8, 3), (24, 1)])
def test_a_mixed_step_reads_the_same_windows_however_it_is_divided(microbatch_size: int, num_microbatches: int) -> None:
    sizes = {0.55: 4001, 0.25: 777, 0.2: 51}
    whole = mixed(sizes, 6, 4, seed=5)
    divided = mixed(sizes, microbatch_size, num_microbatches, seed=5)
    assert first_tokens(divided, 9) == first_tokens(whole, 9)
    assert mixed(sizes, microbatch_size, num_microbatches, seed=5).windows(8, 0) == divided.windows(8, 0)


def test_sources_that_do_not_fit_the_tokens_are_refused() -> None:
    tokens = Tokens((np.arange(100, dtype=np.uint16),))
    with pytest.raises(DataError, match="sources have 90 tokens, but there are 100: name all of them"):
        Batches(tokens, 10, 1, 1, 0, (Source("a", 1, 90),))


def test_the_first_validation_batches_are_mixed_and_all_of_them_hold_every_window_once() -> None:
    tokens = Tokens((np.arange(1000, dtype=np.uint16),))
    sources = (Source("a", 0.75, 1, 905), Source("none", 1.0, 1, 0), Source("b", 0.25, 1, 95))  # 90 and 9 windows
    batches = validation_batches(tokens, 10, 8, 99, sources)
    starts = [int(i[0]) for n in range(len(batches)) for i, t in zip(*batches(n), strict=True) if t[0] != IGNORE]
    assert Counter(starts) == Counter([*range(0, 900, 10), *range(905, 995, 10)])
    few = validation_batches(tokens, 10, 8, 2, sources)
    assert len(few) == 2
    own = [int(inputs[0]) for n in range(2) for inputs in few(n)[0]]
    assert own == starts[:16] and sum(start < 905 for start in own) == 12


# ---- corpora


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "web.txt").write_text("w" * 7999)
    (tmp_path / "code.txt").write_text("c" * 999)
    return str(tmp_path / "web.txt"), str(tmp_path / "code.txt")


def test_each_weighted_source_holds_out_its_own_end(texts: tuple[str, str]) -> None:
    corpus = load_corpus(DataConfig(texts, weights=(0.6, 0.4), validation_fraction=0.1))
    assert corpus.sources == (Source(texts[0], 0.6, 7200, 800), Source(texts[1], 0.4, 900, 100))
    assert bytes(corpus.train.read(0, 8100).tolist()) == b"w" * 7200 + b"c" * 900
    assert bytes(corpus.validation.read(0, 900).tolist()) == b"w" * 799 + b"\0" + b"c" * 99 + b"\0"


def test_named_validation_is_not_mixed(texts: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("held")
    corpus = load_corpus(DataConfig(texts, (str(tmp_path / "held.txt"),), (0.6, 0.4)))
    assert bytes(corpus.validation.read(0, 5).tolist()) == b"held\0"
    assert [(source.num_tokens, source.num_held_out) for source in corpus.sources] == [(8000, 0), (1000, 0)]


def test_without_weights_all_sources_are_one_text(texts: tuple[str, str]) -> None:
    corpus = load_corpus(DataConfig(texts, validation_fraction=0.1))
    assert corpus.sources == () and len(corpus.train) == 8100
    assert bytes(corpus.train.read(7998, 8001).tolist()) == b"w\0c"


def test_weights_that_do_not_fit_the_sources_are_refused_before_anything_is_read(
    texts: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("")
    for sources, weights, message in [
        (
            ("gone.txt", "gone too.txt"),
            (1.0,),
            "data.weights has 1 weights for the 2 entries of data.sources: give one",
        ),
        (("gone.txt",), (-1.0,), r"data\.weights has the weight -1\.0"),
        ((*texts, texts[0]), (1.0, 1.0, 1.0), r"data\.sources names .*web\.txt' under two weights: leave it in one"),
        ((*texts, str(tmp_path / "empty.txt")), (1.0, 1.0, 1.0), r"data\.sources is \[.*empty\.txt'\], which holds no"),
    ]:
        with pytest.raises(DataError, match=message):
            load_corpus(DataConfig(sources, weights=weights))


def load_one(config: DataConfig) -> Corpus:
    tokens = Tokens((np.arange(100, dtype=np.uint8),))
    sources = tuple(Source(name, weight, 50) for name, weight in zip(config.sources, config.weights, strict=True))
    return Corpus(tokens, Tokens(()), 256, "bytes", sources=() if "none" in config.sources else sources)


def test_a_loader_of_your_own_may_return_sources_and_must_where_weights_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("slipstream.data.loaders.find", lambda *_: load_one)
    config = DataConfig(("a", "b"), weights=(1.0, 2.0), loader="mine.load")
    assert [source.name for source in corpus_of(config).sources] == ["a", "b"]
    with pytest.raises(
        DataError, match=r"data\.weights = \[1\.0, 2\.0\] has no effect with data\.loader = 'mine\.load'"
    ):
        corpus_of(DataConfig(("a", "none"), weights=(1.0, 2.0), loader="mine.load"))


def test_a_loader_of_your_own_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config: DataConfig) -> Corpus:
        raise OSError("no route\n\n  to the\nserver")

    monkeypatch.setattr("slipstream.data.loaders.find", lambda *_: fail)
    with pytest.raises(DataError) as caught:
        corpus_of(DataConfig(loader="mine.load"))
    said = "data.loader = 'mine.load' failed (OSError: no route to the server): change the function"
    assert str(caught.value) == said


# ---- runs


def test_a_run_tells_how_often_it_reads_each_source(tiny: Config, texts: tuple[str, str]) -> None:
    config = changed(tiny, data__sources=texts, data__weights=(0.25, 0.75))
    told = describe(config, build_components(config), Path("runs/tiny")).splitlines()[-1]
    # 6 steps x 4 microbatches x 2 sequences x 16 tokens, of 7,600 and 950 to train on
    assert told.endswith(f"reads 2.5% of the 7,600 tokens of {texts[0]}, 60.6% of the 950 tokens of {texts[1]}")
    train(config)
    summary = json.loads(Path(config.run.folder, config.run.name, "summary.json").read_text())
    assert summary["sources"] == [
        {"name": texts[0], "weight": 0.25, "tokens": 7600, "epochs": 192 / 7600},
        {"name": texts[1], "weight": 0.75, "tokens": 950, "epochs": 576 / 950},
    ]


def test_a_mixed_run_resumes_exactly_in_another_layout(tiny: Config, texts: tuple[str, str]) -> None:
    Path(texts[0]).write_text("".join(f"{i} plus {i} makes {2 * i}.\n" for i in range(300)))
    Path(texts[1]).write_text("".join(f"def f{i}(): return {i}\n" for i in range(50)))
    config = changed(tiny, data__sources=texts, data__weights=(0.6, 0.4), train__dtype="float64")
    config = changed(config, optimizer__horizon_steps=6, train__compute_dtype="float64")

    def weights_after(name: str, *parts: dict[str, object]) -> tuple[list[float], list[dict[str, object]]]:
        for part in parts:
            train(changed(config, run__name=name, **part))
        folder = Path(config.run.folder, name)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if row.get("loss") is not None], json.loads(
            (folder / "summary.json").read_text()
        )["sources"]

    whole = weights_after("whole", {})
    other = {"checkpoint__resume": True, "pipeline__microbatches": 2, "pipeline__replicas": 2}
    parted = weights_after("parted", {"train__steps": 3}, other)
    assert parted[0] == pytest.approx(whole[0], rel=1e-9) and parted[1] == whole[1]


def test_a_run_that_goes_on_with_other_weights_or_another_source_says_so(
    tiny: Config, texts: tuple[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "last.txt").write_text("l" * 999)
    sources = (*texts, str(tmp_path / "last.txt"))
    config = changed(tiny, data__sources=sources, data__weights=(0.6, 0.2, 0.2))
    train(config)
    Path(texts[1]).write_text("d" * 999)  # the middle one: the ends and the length of all tokens stay the same
    read_corpus.cache_clear()  # a process reads a corpus once
    capsys.readouterr()
    train(changed(config, data__weights=(0.5, 0.25, 0.25), train__steps=8, checkpoint__resume=True))
    said = capsys.readouterr().out
    assert "data.weights was [0.6, 0.2, 0.2] until step 6, and is [0.5, 0.25, 0.25] from here on" in said
    assert "the corpus is another than until step 6" in said


def test_a_source_shorter_than_a_sequence_is_refused_by_name(tiny: Config, texts: tuple[str, str]) -> None:
    Path(texts[1]).write_text("short")
    with pytest.raises(
        ConfigError, match=r"there are 6 for training in '.*code\.txt': shorten it, or give that source"
    ):
        build_components(changed(tiny, data__sources=texts, data__weights=(0.6, 0.4)))
