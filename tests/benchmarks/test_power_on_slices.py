"""benchmarks/power_on_slices.py: what slices that share a GPU take from each other."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from harness import forks

from slipstream import launch
from slipstream.tools.bench.workloads import GpuSetting

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NVIDIA_SMI = """#!{python}
import datetime, time
while True:
    now = datetime.datetime.now().strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
    print(f"{{now}}, 1980, 512.5, Not Active, 700.00", flush=True)
    print(f"{{now}}, [N/A], 512.5, Not Active, 700.00", flush=True)
    time.sleep(0.005)
"""


@pytest.fixture
def power(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "power_on_slices", raising=False)
    import power_on_slices

    return power_on_slices


def test_microbatches_are_told_apart_by_the_stages_that_compute_meanwhile(power):
    """Stage 1 computes during every second microbatch of stage 0, which then takes twice as long."""
    spans, now = [], 0.0
    for microbatch in range(40):
        length = 2.0 if microbatch % 2 else 1.0
        for kind, seconds in (("forward", length), ("backward", 2 * length)):
            spans.append(power.Span(0, kind, microbatch, now, now + seconds))
            if microbatch % 2:
                spans.append(power.Span(1, kind, microbatch, now, now + seconds))
            now += seconds
    readings = [power.Reading(float(t), 1980.0 - t, 600.0, t % 4 == 0, 700.0) for t in range(round(now))]
    setting, given = {"microbatches": 4}, {"two_bw": [vars(span) for span in spans]}
    [course] = power.courses({"setting": setting, "spans": given, "readings": list(map(vars, readings))})
    assert course.num_steps == 2 and course.end - course.start == pytest.approx(2 * (2 * 3 + 2 * 6))
    assert course.num_computing == pytest.approx((2 * 3 + 2 * 2 * 6) / (2 * 3 + 2 * 6))
    assert power.company(course) == pytest.approx({1: 3000.0, 2: 6000.0})
    *_, row = power.table([course]).splitlines()
    assert row.startswith("| two_bw | 18000 | 1.67 | 3000.0 | 6000.0 | ") and row.endswith(" | 600 | 700 | 27% |")


@forks
def test_it_measures_and_draws(power, monkeypatch, tmp_path, capsys):
    """With CPUs in place of slices, and a program in place of nvidia-smi."""
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(power, "sliced", lambda share: nullcontext())
    monkeypatch.setattr(power, "GpuSetting", partial(GpuSetting, sequence_length=4, blocks=2, vocabulary=32))
    on_cpus = {"device": "cpu", "share_gpu": False, "start_method": "fork"}
    monkeypatch.setattr(power, "launch", lambda worker, stages, **options: launch(worker, stages, **on_cpus))
    words = ["--stages", "2", "--microbatches", "2", "--steps", "10", "--dim", "128"]
    power.main([*words, "--output", str(tmp_path / "out")])
    first = capsys.readouterr().out
    assert "| one_f_one_b | " in first and "| two_bw | " in first and " | 1,980 | 512 | 700 | 0% |" in first
    (tmp_path / "out" / "timeline.png").unlink()
    power.main(["--draw", str(tmp_path / "out")])
    assert capsys.readouterr().out == first
    assert (tmp_path / "out" / "timeline.png").stat().st_size > 0


def test_a_mistake_is_one_sentence(power, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words, said in (
        ([], "torch finds none here"),
        (["--steps", "4"], "steps = 4 leaves no steady part"),
        (["--draw", str(tmp_path)], "measure first"),
    ):
        with pytest.raises(SystemExit):
            power.main(words)
        assert said in capsys.readouterr().err
