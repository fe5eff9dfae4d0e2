"""Published laws by hand-computed values, and what level 0 makes of them."""

import math

import pytest
from settings import changed

from slipstream.config.models import model_of
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.model.presets import PRESETS
from slipstream.tools.tune.advice import (
    Size,
    batch_of,
    from_laws,
    law_rows,
    level_0,
    rate_factor,
    remarks,
    with_batch,
    with_rate,
)
from slipstream.tools.tune.laws import DEEPSEEK, POWER_LINES, STEP_LAW, measured_gap, weight_decay


def close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=2e-3)


def test_the_laws_at_a_billion_parameters_and_twenty_billion_tokens():
    n, d = 1e9, 2e10
    # 10^(lg 1.79 - 0.713 x 9 + 0.307 x 10.30103), and so on
    assert close(STEP_LAW.rate(n, d), 10 ** (0.25285 - 6.417 + 3.16242))
    assert close(STEP_LAW.batch(n, d), 10 ** (-0.23657 + 5.88189))
    assert close(DEEPSEEK.rate(n, d), 10 ** (-0.50612 - 0.125 * 20.07918))
    assert close(DEEPSEEK.batch(n, d), 10 ** (-0.53462 + 0.3271 * 20.07918))
    assert close(POWER_LINES.batch(n, d), 10 ** (3.31133 - 1.51428 + 0.383 * 10.30103))


def test_weight_decay_gives_the_timescale_of_power_lines():
    wd = weight_decay(1e9, 2e10, 5e5, 1e-3)
    assert close(5e5 / (1e-3 * wd * 2e10), 1.084 / 20**0.527)


def test_the_gap_is_the_line_through_what_was_measured():
    gap = measured_gap("adamw", True)
    assert close(gap(1000), 0.1055) and close(gap(3052), 0.0544)  # two points: the line meets both
    muon = measured_gap("muon", True)
    assert 1.0 < muon.exponent < 1.25
    assert all(abs(math.log(muon(steps) / value)) < 0.2 for steps, value in ((1000, 0.0694), (12207, 0.0043)))
    assert measured_gap("soap", True) == gap


def model(preset: str = "tiny", **changes):
    config = changed(Config(), model__preset=preset, **changes)
    return config, model_of(config, 0)


def test_a_size_counts_the_blocks_without_idle_experts():
    _, dense = model("135m")
    vocabulary = dense.vocab_size * dense.dim  # tied: once
    assert Size.of(dense).parameters == dense.num_parameters() - vocabulary - dense.dim  # and the norm of the head
    _, sparse = model("moe-2b")
    outside = 2 * sparse.vocab_size * sparse.dim + sparse.dim
    assert Size.of(sparse).parameters == sparse.num_active_parameters() - outside


@pytest.mark.parametrize(
    ("schedule", "stages", "depth", "replicas", "batch", "expected"),
    [
        ("two_bw", 4, "minimum", 1, 16 * 1024, (4, 16)),
        ("two_bw", 4, "minimum", 1, 4 * 1024, (4, 4)),  # as many microbatches as stages
        ("two_bw", 4, "minimum", 1, 2 * 1024, (2, 4)),  # a smaller microbatch keeps the pipeline full
        ("two_bw", 4, "double", 1, 2 * 1024, (1, 8)),  # double depth needs 7 of them
        ("two_bw", 4, "minimum", 1, 10, (1, 4)),  # the smallest possible batch
        ("two_bw", 4, "minimum", 4, 16 * 1024, (4, 4)),
        ("one_f_one_b", 4, "minimum", 1, 1024, (1, 4)),
        ("two_bw", 2, "minimum", 1, 5.4 * 1024, (4, 5)),
    ],
)
def test_a_batch_is_rounded_to_what_keeps_the_pipeline_full(schedule, stages, depth, replicas, batch, expected):
    config, _ = model(
        pipeline__schedule=schedule,
        pipeline__stages=stages,
        pipeline__depth=depth,
        pipeline__replicas=replicas,
        pipeline__microbatches=8,
        train__microbatch_size=4,
    )
    made = with_batch(config, 256, batch)
    assert (made.train.microbatch_size, made.pipeline.microbatches) == expected


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "soap", "lion"])
def test_level_0_configures_a_run_of_the_wanted_tokens(optimizer):
    config, small = model("small", optimizer__name=optimizer)
    size, tokens = Size.of(small), 5e8
    _, wanted = from_laws(config, size, tokens)
    made, _ = level_0(config, small, size, tokens)
    batch, section = batch_of(made, 512), made.optimizer
    assert abs(made.train.steps * batch / tokens - 1) < 0.01
    assert abs(math.log(batch / wanted)) < 0.2
    assert section.warmup_steps + section.decay_steps < made.train.steps
    rate = STEP_LAW.rate(size.parameters, tokens) * math.sqrt(batch / wanted)
    factor = {"muon": 0.2 * math.sqrt(512), "adamw": 1, "soap": 3, "lion": 0.1}[optimizer]
    assert close(section.learning_rate, rate * factor) or abs(section.learning_rate / rate / factor - 1) < 5e-3
    others = [section.adamw_learning_rate] if optimizer in ("muon", "soap") else []
    assert all(abs(other / rate - 1) < 5e-3 for other in others)
    assert section.adamw_learning_rate is None or others


def test_an_optimizer_without_a_law_is_refused():
    config, small = model(optimizer__name="torch.optim.SGD", optimizer__learning_rate=0.1)
    with pytest.raises(ConfigError, match=r"optimizer.name = 'torch.optim.SGD' has no law"):
        rate_factor(config, small.dim)


def test_the_remarks_name_what_is_uncertain():
    config, big = model("moe-10b", pipeline__stages=8, pipeline__microbatches=8, pipeline__replicas=16)
    size = Size.of(big)
    made = with_rate(with_batch(config, 4096, 1e5), size, 4096, 0.01, 1e9)
    said = " ".join(remarks(made, big, size, 1e9, 1e5))
    for part in (
        "outside the runs of Step Law",
        "1e+09 tokens are outside the runs of Step Law",
        "an assumption",
        "0.2 sqrt(dim) = 9.05",
        "5.2 times the 100,000",
    ):
        assert part in said
    assert "Warning" in said and "nats per byte" in said
    sync = changed(made, pipeline__schedule="one_f_one_b")
    assert "delay" not in " ".join(remarks(sync, big, size, 1e9, 1e5))


def test_the_check_against_our_own_sweep():
    """25M parameters on 33M bytes: the best rate of Muon at 8,192 and 32,768 bytes a step was 0.0068 and 0.0164, by
    parabolas through docs/results/delay.md. The line between them at the batch of the law is where its rate belongs."""
    config, small = model("small")
    rate, batch = from_laws(config, Size.of(small), 32.768e6)
    slope = math.log(0.0164 / 0.0068) / math.log(4)
    ours = 0.0068 * (batch / 8192) ** slope
    assert 8192 < batch < 32768
    assert abs(math.log(rate / ours)) < math.log(1.2)


@pytest.mark.parametrize("preset", ["135m", "1b", "8b", "moe-10b"])
def test_every_preset_has_a_setting(preset):
    config, big = model(preset)
    size = Size.of(big)
    rate, batch = from_laws(config, size, 20 * size.parameters)
    assert 1e-3 < rate < 0.02 and 5e4 < batch < 3e6
    assert len(law_rows(config, size, 20 * size.parameters)) == 3
    assert big.vocab_size == PRESETS[preset].vocab_size
