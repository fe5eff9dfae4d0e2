"""Configurations and command lines for faults/fuzz.py, made from the tree of dataclasses itself."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import string
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from slipstream.config.schema import Config
from slipstream.model.presets import PRESETS
from slipstream.optim.recipes import RECIPES

from .fuzz import Case

TEXT = "".join(f"{i} plus {i} makes {2 * i}.\n" for i in range(200))

BASE: dict[str, Any] = {
    "model.dim": 16,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.hidden_dim": 32,
    "model.sequence_length": 16,
    "data.sources": ["../text.txt"],
    "pipeline.transport": "thread",
    "pipeline.timeout_seconds": 60.0,
    "train.steps": 2,
    "train.microbatch_size": 1,
    "evaluation.batches": 1,
    "evaluation.every_steps": 0,
    "checkpoint.at_end": False,
    "run.name": "fuzzed",
}
"""The smallest run: a second."""


def fields_of(cls: Any, where: str = "") -> dict[str, Any]:
    """The type of every field, by its path."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        found |= fields_of(hint, f"{where}{name}.") if dataclasses.is_dataclass(hint) else {f"{where}{name}": hint}
    return found


FIELDS = fields_of(Config)

FITTING: dict[str, list[Any]] = {
    "model.num_layers": [1, 2, 3],
    "model.tied_embeddings": [False, True],
    "model.vocab_size": [256, 300],
    "pipeline.schedule": ["two_bw", "one_f_one_b", "gpipe", "pipedream", "paci"],
    "pipeline.stages": [1, 2, 3, 4],
    "pipeline.replicas": [1, 2, 3],
    "pipeline.placement": ["pipeline", "replica"],
    "pipeline.microbatches": [1, 2, 3, 4, 6, 8],
    "pipeline.depth": ["minimum", "double"],
    "pipeline.sync_start_steps": [0, 1, 2, 3],
    "pipeline.layers_per_stage": [[], [1, 3], [2, 2], [1, 1, 2], [4]],
    "pipeline.reshape": [[], ["1=4"], ["1=2", "2=1"], ["2=2x2"], ["1=1x4", "3=2/1,3"]],
    "pipeline.processes": [2, 4, 6],
    "pipeline.transport": ["thread", "thread", "thread", "process"],
    "pipeline.shared_memory": [True, False],
    "optimizer.name": ["muon", "adamw", "torch.optim.SGD", "torch.optim.RMSprop", *RECIPES],
    "optimizer.adamw_nesterov": [False, True],
    "optimizer.adamw_predictor": ["nesterov", "last"],
    "optimizer.nesterov": [False, True],
    "optimizer.lookahead": [0.0, 1.0, 2.0],
    "optimizer.newton_schulz_dtype": ["float64", "float32", "bfloat16"],
    "optimizer.weight_decay": [0.0, 0.1],
    "optimizer.clip_norm": [0.0, 1.0],
    "optimizer.sharded": [False, True],
    "optimizer.error_feedback": [0.0, 0.5, 1.0, 2.0],
    "optimizer.schedule": ["constant", "cosine", "linear", "wsd", "1-sqrt"],
    "optimizer.warmup_steps": [0, 1, 2],
    "optimizer.decay_steps": [0, 1, 2],
    "optimizer.balance_rate": [0.0, 0.01],
    "train.steps": [1, 2, 3, 12],
    "train.microbatch_size": [1, 2],
    "train.dtype": ["float32", "float64"],
    "train.compute_dtype": ["float64", "float32", "bfloat16"],
    "train.gradient_dtype": ["float64", "float32", "bfloat16"],
    "train.reduction_dtype": ["float64", "float32", "bfloat16"],
    "train.non_finite": ["raise", "skip"],
    "train.track_alignment": [False, True],
    "train.loss_chunk_tokens": [0, 1, 7, 1000],
    "train.recompute_every": [0, 1, 2, 5],
    "train.device": ["cpu", "cpu", "cpu", "cuda"],
    "evaluation.every_steps": [0, 1, 2],
    "evaluation.batches": [0, 1, 3],
    "evaluation.prompts": [["plus"], ["1 plus", "2"]],
    "evaluation.sample_tokens": [1, 3],
    "checkpoint.every_steps": [0, 1],
    "checkpoint.every_minutes": [0.0, 1e-9, 5.0],
    "checkpoint.at_end": [False, True],
    "checkpoint.keep_last": [1, 3],
    "checkpoint.keep_every": [0, 2],
    "checkpoint.resume": [False, True],
    "run.overwrite": [False, True],
    "run.trace_actions": [0, 1, 512],
    "run.profile_steps": ["", "1:1", "1:2"],
}
"""Values that are right each for itself, and may contradict one another."""

EXPERTS = {"model.num_experts": 4, "model.experts_per_token": 2, "model.expert_dim": 8, "model.num_dense_layers": 1}

INTEGERS = [-(2**63), -1, 0, 1, 2, 3, 5, 7, 64, 1000, 10**6, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**30]
FLOATS = [-1e308, -1.0, -0.0, 0.0, 5e-324, 1e-45, 1e-8, 0.5, 1.0, 1.5, 1e6, 1e38, 1e39, 1e308]
NOT_FINITE = [math.nan, math.inf, -math.inf]
STRINGS = [
    *("", " ", ".", "..", "/", "a/b", "~", "*", "%s", "{}", "\n", "a\nb", "\t", "-x", "--", "None", "nan", "true"),
    *("ü", "日本", "\u202e", "\u0301", "🚀", "x" * 300, "x" * 5000, "../text.txt", "here.toml", "builtin", "bytes"),
    *("torch.optim", "torch.optim.Adam", "slipstream.optim.Muon", ".x", "x.", "os.path", "0", "1e5", "\x7f", "\x1b[1m"),
]
UNDECODABLE = "\udcff\udc80"
"""What an argument of bytes that are no UTF-8 becomes."""
BOUNDLESS = 50
"""A count beyond it may keep a run busy for longer than anyone watches."""


class Raw(str):
    """TOML as it is."""


def make_config(dice: random.Random, folder: Path, templates: Path) -> Case:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    recipes: list[tuple[Callable[[random.Random, Path], Case], int]] = [
        (_fitting_alone, 3),
        (_combination, 20),
        (_extreme, 30),
        (_wrong_type, 14),
        (_broken_toml, 12),
        (_misplaced, 9),
        (_broken_command_line, 12),
    ]
    make = dice.choices([recipe for recipe, _ in recipes], [weight for _, weight in recipes])[0]
    return make(dice, folder)


# ---- what is right, and what contradicts itself


def _fitting_alone(dice: random.Random, folder: Path) -> Case:
    """One field, or one pair, that certainly runs."""
    settings = dict(BASE)
    path = dice.choice(sorted(SURE))
    settings[path] = dice.choice(SURE[path])
    return Case(f"right: {path} = {settings[path]!r}", _spoken(dice, settings, folder), codes=(0,))


NEED_OTHERS = {
    *("pipeline.stages", "pipeline.microbatches", "pipeline.depth", "pipeline.layers_per_stage", "pipeline.schedule"),
    *("pipeline.reshape", "pipeline.processes", "optimizer.balance_rate", "train.compute_dtype", "train.device"),
    *("optimizer.warmup_steps", "optimizer.decay_steps", "evaluation.prompts", "run.profile_steps"),
}
SURE = {path: values for path, values in FITTING.items() if path not in NEED_OTHERS}
SURE["pipeline.schedule"] = ["two_bw", "one_f_one_b", "gpipe", "pipedream"]
SURE["pipeline.stages"] = [1, 2, 3, 4]
SURE["train.compute_dtype"] = ["float32", "bfloat16"]


def _combination(dice: random.Random, folder: Path) -> Case:
    settings = dict(BASE)
    if dice.random() < 0.15:
        settings |= EXPERTS
    for path in dice.sample(sorted(FITTING), dice.randint(2, 9)):
        settings[path] = dice.choice(FITTING[path])
    # What most combinations break on is put right most of the time, so that others are met behind it.
    if dice.random() < 0.7 and settings.get("pipeline.schedule") == "paci":
        settings |= {"optimizer.error_feedback": 0.0, "train.recompute_every": 0, "checkpoint.resume": False}
    if dice.random() < 0.7 and settings.get("pipeline.stages", 2) > settings.get("pipeline.microbatches", 4):
        settings["pipeline.microbatches"] = 8
    if dice.random() < 0.02:
        settings |= {"train.compile": True, "pipeline.schedule": "paci"}
    return Case("combination: of fitting values", _spoken(dice, settings, folder))


# ---- what is out of range


def _extreme(dice: random.Random, folder: Path) -> Case:
    settings = dict(BASE)
    changed = dice.sample(sorted(FIELDS), dice.choice([1, 1, 1, 2, 3]))
    by_toml = dice.random() < 0.5
    for path in changed:
        settings[path] = _of_type(dice, FIELDS[path], by_toml)
        if "sources" in path:  # to look through the whole file system is what "/" asks for
            settings[path] = [each for each in settings[path] if each != "/"]
    what = ", ".join(f"{path} = {settings[path]!r:.60}" for path in changed)
    arguments = _as_toml(settings, folder) if by_toml else ["train", *options(settings)]
    return Case(f"extreme: {what}", arguments, _may_write(settings), may_last=_may_last(settings))


def _of_type(dice: random.Random, hint: Any, by_toml: bool) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _of_type(dice, next(a for a in arguments if a is not types.NoneType), by_toml)
    if origin is Literal:
        return dice.choice([*arguments, *arguments, *STRINGS[:8]])
    if origin is tuple:
        return [_of_type(dice, arguments[0], by_toml) for _ in range(dice.choice([0, 1, 1, 2, 3, 20]))]
    if origin is dict:
        names = dice.sample(["lr", "momentum", "eps", "betas", "", "x y", "weight_decay", "params"], dice.randint(0, 3))
        return {name: _of_type(dice, arguments[1], by_toml) for name in names}
    if hint is bool:
        return dice.choice([True, False])
    if hint is int:
        return dice.choice(INTEGERS)
    if hint is float:
        return dice.choice(FLOATS + NOT_FINITE)
    known = [*PRESETS, "two_bw", "paci", "cosine", "double"]
    return dice.choice([*STRINGS, *known, "a\0b" if by_toml else UNDECODABLE])


def _may_last(settings: Mapping[str, Any]) -> bool:
    """Some preset's models, and counts without bound."""
    if settings.get("model.preset", "tiny") != "tiny":
        return True
    is_boundless = any(type(value) is int and value > BOUNDLESS for value in settings.values())
    return is_boundless or settings.get("train.compile") is True  # for the compiler takes its time


def _may_write(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the run is, and nowhere else."""
    folder = os.path.normpath(Path("here", str(settings.get("run.folder", "runs"))))
    run = os.path.normpath(Path(folder, str(settings.get("run.name", "default"))))
    return (run,) if folder == os.curdir else (run, folder)


# ---- what is of another type, and where it does not belong


def _wrong_type(dice: random.Random, folder: Path) -> Case:
    settings = dict(BASE)
    path = dice.choice(sorted(FIELDS))
    settings[path] = dice.choice(
        [
            *("text", "", 3, -1, 10**40, 0.5, math.nan, math.inf, True, False, [], ["x"], [1, 2], [[1]], {}, {"a": 1}),
            *({"a": {"b": []}}, [True], [None], [1.5], ["\0"], ["../text.txt", 3]),
            *map(Raw, ("2026-01-01", "07:32:00", "1979-05-27T07:32:00Z", "0xff", "1_000", "+1", "-0.0", "1e400")),
            *map(Raw, ("'''a\nb'''", "01", "1.", "=", "'", "[", "{a=1", "inf.", "\\u0000", "9" * 5000, "[" * 3000)),
        ]
    )
    return Case(
        f"wrong type: {path} = {settings[path]!r:.80}",
        _as_toml(settings, folder),
        _may_write(settings),
        may_last=_may_last(settings),
    )


def _misplaced(dice: random.Random, folder: Path) -> Case:
    """Names that are almost right, sections that are none, values at the top."""
    text = _toml(BASE)
    section, name = dice.choice(sorted(FIELDS)).split(".")
    other = dice.choice(sorted({path.split(".")[0] for path in FIELDS}))
    misspelt = name[: max(1, len(name) // 2)] + dice.choice(string.ascii_letters) + name[len(name) // 2 :]
    change = dice.choice(
        [
            f"\n[{other}.{section}]\n{name} = 1\n",
            f"\n[[{section}_]]\n{name} = 1\n",
            f"\n[{misspelt}]\n",
            f"\n[run.{misspelt}]\na = 1\n",
            f"\n[run]\n{name} = 1\n",
            f'\n["{section}\\n"]\n',
            '\n["" ]\n"" = 1\n',
            f"\n[optimizer.arguments]\n{name} = 1\n",
        ]
    )
    head = dice.choice(["", "", f"{name} = 1\n", f"{section} = 3\n", f"{other} = []\n", f"{misspelt}.{name} = true\n"])
    _write(folder / "here.toml", (head + text + change).encode())
    return Case(f"misplaced: {(head + change)!r:.80}", ["train", "../here.toml"])


def _broken_toml(dice: random.Random, folder: Path) -> Case:
    data = bytearray(_toml(BASE).encode())
    how = dice.choice(["cut", "flip", "insert", "twice", "bytes", "nest", "empty", "shuffle", "whole"])
    place = dice.randrange(len(data))
    if how == "cut":
        del data[place:]
    elif how == "flip":
        for _ in range(dice.choice([1, 1, 3, 20])):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif how == "insert":
        data[place:place] = dice.choice(
            [b"\0", b"\xff\xfe", b"=", b"[", b"]", b'"', b"\n\n[", b"#", b"\r", "ü".encode()]
        )
    elif how == "twice":
        data += data[place : place + 60]
    elif how == "bytes":
        data = bytearray(dice.randbytes(dice.choice([1, 10, 1000])))
    elif how == "nest":
        depth = dice.choice([50, 1000, 20000])
        data += dice.choice(
            [b"\nx = " + b"[" * depth, b"\nx = " + b"{a=" * depth, b"\n[" + b".".join([b"a"] * depth) + b"]"]
        )
    elif how == "empty":
        data = bytearray(dice.choice([b"", b"\xef\xbb\xbf", b"\n", b"# nothing", b"\0" * 100]))
    elif how == "shuffle":
        lines = data.splitlines()
        dice.shuffle(lines)
        data = bytearray(b"\n".join(lines))
    _write(folder / "here.toml", bytes(data))
    # A file that is cut short may be right, and mean the default model: too large to wait for.
    rest = options({path: BASE[path] for path in BASE if path != "data.sources"}) if how in ("cut", "empty") else []
    rest += ["--data.sources", "../text.txt"] if rest else []
    return Case(f"broken TOML: {how}", ["train", "../here.toml", *rest], ("here/",), may_last=True)


def _broken_command_line(dice: random.Random, folder: Path) -> Case:
    _write(folder / "here.toml", _toml(BASE).encode())
    words = ["train", *options(BASE)]
    junk = [
        *("--train.steps", "--train.steps=", "--train.steps=1=2", "--", "-", "---", "--=", "=", "", " ", "-h "),
        *("--hlep", "--train", "--train.", "--.steps", "--TRAIN.STEPS", "--train.steps.x", "--no-train.compile"),
        *("--run.overwrite", "--run.no-overwrite", "--no-run.overwrite", "../here.toml", "no.toml", UNDECODABLE, "--ü"),
        *("--optimizer.arguments", "--optimizer.arguments a", "--pipeline.layers-per-stage", "1", "-1", "1e400"),
        *("None", "--train.compute-dtype None", "--version", "-v", "@file", "$HOME", "*", "\n", "--data.sources"),
        *("--train.compute_dtype", "--{train}.steps"),
    ]
    for _ in range(dice.choice([1, 1, 2, 4])):
        place = dice.randint(1 if dice.random() < 0.95 else 0, len(words))
        how = dice.choice(["junk", "junk", "drop", "twice", "swap"])
        if how == "junk":
            words[place:place] = dice.choice(junk).split(" ") if dice.random() < 0.5 else [dice.choice(junk)]
        elif how == "drop":
            del words[place : place + 1]
        elif how == "twice":
            words[place:place] = words[place : place + 2]
        elif len(words) > 2:
            i, j = dice.randrange(1, len(words)), dice.randrange(1, len(words))
            words[i], words[j] = words[j], words[i]
    return Case("command line: broken", words, ("here/",), may_last=True)


# ---- as TOML and as options


def _spoken(dice: random.Random, settings: Mapping[str, Any], folder: Path) -> list[str]:
    """In a file, as options, or some in each."""
    in_file = {path: value for path, value in settings.items() if dice.random() < 0.5}
    spoken = {path: value for path, value in settings.items() if path not in in_file}
    if not in_file:
        return ["train", *options(spoken)]
    return [*_as_toml(in_file, folder), *options(spoken)]


def options(settings: Mapping[str, Any]) -> list[str]:
    words = []
    for path, value in settings.items():
        section, _, name = path.partition(".")
        option = f"--{section}.{name.replace('_', '-')}"
        if isinstance(value, bool) and FIELDS[path] is bool:
            words.append(option if value else f"--{section}.no-{name.replace('_', '-')}")
        elif isinstance(value, dict):
            words += [option, *(str(item) for pair in value.items() for item in pair)]
        elif isinstance(value, list):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return words


def _as_toml(settings: Mapping[str, Any], folder: Path) -> list[str]:
    _write(folder / "here.toml", _toml(settings).encode())
    return ["train", "../here.toml"]


def _toml(settings: Mapping[str, Any]) -> str:
    sections: dict[str, list[str]] = {}
    for path, value in settings.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, []).append(f"{name} = {_literal(value)}")
    return "\n".join("\n".join([f"[{section}]", *lines, ""]) for section, lines in sections.items())


def _literal(value: Any) -> str:
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_literal(item)}" for key, item in value.items()) + "}"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
