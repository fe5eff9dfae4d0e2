"""pipeline.profile: a run's stages balanced by what its layers were measured to cost."""

from dataclasses import asdict
from pathlib import Path

import pytest

from slipstream.config.models import model_of
from slipstream.config.schema import Config, ModelSection, PipelineSection
from slipstream.errors import ConfigError, UsageError
from slipstream.model.registry import Decoder
from slipstream.train.build import build_components
from slipstream.train.layer_profile import Profile, Row, read_profile, write_profile

SLICE = Path(__file__).parents[2] / "benchmarks" / "gpu_pipeline_h200_2026-11-17" / "slice.json"


def config(profile: Path) -> Config:
    model = ModelSection(preset="tiny", num_layers=6, dim=16, hidden_dim=32, num_heads=2, num_kv_heads=2)
    return Config(model=model, pipeline=PipelineSection(stages=2, profile=str(profile)))


def write(path: Path, head_seconds: float, **changes: object) -> None:
    def row(kind: str, num_layers: int, seconds: float) -> Row:
        return Row(kind, num_layers, 1, seconds, seconds, seconds, 0.0, 1)

    model = model_of(config(path), 256)
    values = asdict(model) | changes
    rows = (row("embedding", 1, 0.0), row("block", 6, 1.0), row("head", 1, head_seconds))
    write_profile(Profile("cpu", "2", 1, "muon", "float32", 1, type(model)(**values), 1, rows), path)


@pytest.mark.parametrize(("head_seconds", "cut"), [(0.0, [4, 4]), (2.0, [5, 3]), (6.0, [7, 1])])
def test_a_dear_head_leaves_its_stage_fewer_blocks(tmp_path, head_seconds, cut):
    write(tmp_path / "profile.json", head_seconds)
    assert build_components(config(tmp_path / "profile.json")).layers_per_stage == cut


def test_a_profile_that_is_older_than_a_field_of_the_model_is_taken_where_the_field_is_off():
    profile = read_profile(SLICE)
    assert "qk_norm" not in profile.model
    fields = {name: value for name, value in profile.model.items() if name != "num_layers"}
    assert len(profile.layer_costs(Decoder(**fields, num_layers=3), SLICE)) == 5
    with pytest.raises(UsageError, match="qk_norm is None there and True here"):
        profile.layer_costs(Decoder(**fields, num_layers=3, qk_norm=True), SLICE)


def test_a_profile_of_another_model_is_refused(tmp_path):
    write(tmp_path / "profile.json", 1.0, dim=32)
    with pytest.raises(ConfigError, match=r"pipeline\.profile = .* dim is 32 there and 16 here: run slipstream"):
        build_components(config(tmp_path / "profile.json"))


@pytest.mark.parametrize("content", [None, "{}", "no json"])
def test_a_file_that_is_no_profile_is_one_sentence(tmp_path, content):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"^pipeline\.profile = .*profile\.json' (cannot be read|is no profile)"):
        build_components(config(path))
