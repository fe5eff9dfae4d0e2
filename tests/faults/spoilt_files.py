"""Spoilt files for faults/fuzz.py: shards, mixtures, texts, tables, tokenizers, studies, profiles, checkpoints."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from .fuzz import Case, play
from .spoilt_configs import BASE, TEXT, options

STUDY = """
name = "small"
[config.model]
dim = 16
num_layers = 1
num_heads = 2
num_kv_heads = 1
hidden_dim = 32
sequence_length = 16
[config.data]
sources = ["../text.txt"]
[config.pipeline]
stages = 1
microbatches = 1
[config.train]
steps = 2
microbatch_size = 1
[config.evaluation]
every_steps = 1
batches = 1
[modes.half]
delays = [1, 0]
pipeline.stages = 2
pipeline.microbatches = 2
[[grid]]
mode = ["sync", "ef"]
optimizer.name = "adamw"
train.seed = 0
"""

SMALL = {path: BASE[path] for path in BASE if path.startswith("model.")}
STEPS = 3
"""That the template run has made, with a checkpoint of each."""


def make_templates(folder: Path) -> None:
    """Made by the program itself, and spoilt one copy at a time."""
    here = folder / "here"
    here.mkdir(parents=True)
    (folder / "home").mkdir()
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    settings = BASE | {"train.steps": STEPS, "checkpoint.every_steps": 1, "checkpoint.keep_last": STEPS}
    commands = [
        ["train", *options(settings | {"run.name": "base", "checkpoint.at_end": True})],
        ["prepare", "../text.txt", "--output", "web"],
        ["profile", *options(SMALL | {"train.microbatch_size": 1}), "--output", "profile.json"],
    ]
    for number, command in enumerate(commands):
        outcome = play(Case("template", command, timeout=120.0), folder)
        shutil.rmtree(folder.with_suffix(".tmp"))
        if outcome.code:
            raise SystemExit(f"template {number} cannot be made: {outcome.out}{outcome.err}")
    _make_tokenizer(here / "tokenizer.json")


def _make_tokenizer(path: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(path))


def make_file(dice: random.Random, folder: Path, templates: Path) -> Case:
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    recipes: list[tuple[Callable[[random.Random, Path, Path], Case], int]] = [
        (_shard, 18),
        (_megatron, 14),
        (_weights, 8),
        (_text, 10),
        (_parquet, 14),
        (_tokenizer, 5),
        (_study, 10),
        (_profile, 10),
        (_run, 17),
        (_checkpoint, 30),
    ]
    make = dice.choices([recipe for recipe, _ in recipes], [weight for _, weight in recipes])[0]
    return make(dice, folder, templates / "here")


# ---- ways to spoil a file


def _spoil_bytes(dice: random.Random, data: bytes) -> tuple[str, bytes]:
    changed = bytearray(data)
    how = dice.choice(["flip", "flips", "cut", "cut one", "add", "zeros", "empty", "random", "insert", "repeat"])
    place = dice.randrange(len(data)) if data else 0
    if how.startswith("flip") and data:
        for _ in range(1 if how == "flip" else 30):
            changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif how == "cut":
        del changed[place:]
    elif how == "cut one":
        del changed[-1:]
    elif how == "add":
        changed += dice.randbytes(dice.choice([1, 3, 100]))
    elif how == "zeros":
        changed[place : place + 64] = bytes(len(changed[place : place + 64]))
    elif how == "empty":
        changed.clear()
    elif how == "random":
        changed = bytearray(dice.randbytes(len(data)))
    elif how == "insert":
        changed[place:place] = dice.choice([b"\0", b"\xff\xfe", b"\n", b'"', b"{", b"]", b"\xed\xa0\x80"])
    elif how == "repeat":
        changed *= 2
    return how, bytes(changed)


def _spoil_kind(dice: random.Random, path: Path) -> str:
    """What is no file any more."""
    how = dice.choice(["folder", "loop", "pipe", "no permission", "endless", "gone", "dangling"])
    aside = path.with_name(path.name + ".aside")
    if how == "no permission":
        path.chmod(0)
        return how
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if how == "folder":
        path.mkdir()
    elif how == "loop":
        path.symlink_to(path)
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "endless":
        path.symlink_to("/dev/zero")
    elif how == "dangling":
        path.symlink_to(aside)
    return how


JSON_VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.5, 1e308, float("nan"), float("inf")),
    *("", "x", "1", "-1", "\ud800", "\0", "../x", "x" * 10000, [], {}, [[]], [None], [1, 2], {"a": 1}, {"": {}}),
]


def _spoil_json(dice: random.Random, tree: Any) -> tuple[str, bytes]:
    """Still JSON, mostly, but not what it was."""
    words, is_deep = [], False
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        holder, key = _somewhere(dice, tree)
        how = dice.choice(["replace", "replace", "replace", "delete", "rename", "add", "nest", "copy"])
        words.append(f"{how} {key!r:.60}")
        if holder is None:
            tree = deepcopy(dice.choice(JSON_VALUES))
            break
        if how == "replace":
            holder[key] = deepcopy(dice.choice(JSON_VALUES))
        elif how == "delete":
            del holder[key]
        elif how == "rename" and isinstance(holder, dict):
            holder[dice.choice(["", "x", f"{key}x", "stage"])] = holder.pop(key)
        elif how == "add" and isinstance(holder, list):
            holder.insert(key, deepcopy(dice.choice(JSON_VALUES)))
        elif how == "add":
            holder["unheard_of"] = deepcopy(dice.choice(JSON_VALUES))
        elif how == "nest":
            value = holder[key]
            depth = dice.choice([1, 5, 600])
            for _ in range(1 if is_deep else depth):  # twice as deep, and no JSON would be written
                value = [value]
            is_deep |= depth > 5
            holder[key] = value
        elif isinstance(holder, dict):
            holder[key] = dice.choice(list(holder.values()))
    return ", ".join(words), json.dumps(tree).encode()


def _somewhere(dice: random.Random, tree: Any) -> tuple[Any, Any]:
    """A place in a tree, all depths alike: the holder and its key."""
    places: list[list[tuple[Any, Any]]] = []
    level = [tree]
    while level:
        here: list[tuple[Any, Any]] = []
        for holder in level:
            keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else []
            here += [(holder, key) for key in keys]
        if here:
            places.append(here)
        level = [holder[key] for holder, key in here]
    if not places or dice.random() < 0.03:
        return None, None
    return dice.choice(dice.choice(places))


def _spoil(dice: random.Random, path: Path) -> str:
    """Any file: its kind, its bytes, or its JSON if it is some."""
    how = dice.random()
    if how < 0.2:
        return _spoil_kind(dice, path)
    data = path.read_bytes()
    if path.suffix == ".json" and how < 0.75:
        words, data = _spoil_json(dice, json.loads(data))
    elif path.suffix == ".jsonl" and how < 0.75:
        lines = data.splitlines()
        place = dice.randrange(len(lines))
        words, lines[place] = _spoil_json(dice, json.loads(lines[place]))
        data = b"\n".join(lines) + b"\n"
    else:
        words, data = _spoil_bytes(dice, data)
    path.write_bytes(data)
    return words


# ---- what the commands are given


def _train(settings: dict[str, Any]) -> list[str]:
    return ["train", *options(BASE | settings)]


def _shard(dice: random.Random, folder: Path, templates: Path) -> Case:
    here = folder / "here"
    names = ["web.train.00000.bin", "web.train.00000.bin", "web.train.00000.json", "web.validation.00000.json"]
    for name in {*names, "web.validation.00000.bin"}:
        shutil.copyfile(templates / name, here / name)
    path = here / dice.choice(names)
    words = _spoil(dice, path)
    settings: dict[str, Any] = {"data.sources": [dice.choice(["web.train.00000.bin", "*.bin", "."])]}
    if dice.random() < 0.3:
        for sidecar in here.glob("*.json"):
            if sidecar.is_file():
                sidecar.unlink()
        settings["data.token_dtype"] = dice.choice(["uint8", "uint16", "uint32"])
    if dice.random() < 0.5:
        settings["data.validation_sources"] = ["web.validation.00000.bin"]
        settings["data.sources"] = ["web.train.00000.bin"]
    if dice.random() < 0.2:
        settings["model.vocab_size"] = dice.choice([1, 100, 256])
    return Case(f"shard: {path.name}, {words}", _train(settings), may_last=True)


def _megatron(dice: random.Random, folder: Path, templates: Path) -> Case:
    """An index of Megatron's and its shard: whole, with another number in one of its fields, or with spoilt bytes."""
    here, code = folder / "here", dice.choice([1, 2, 3, 4, 5, 8, 8])
    dtype = np.dtype({1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[code])
    lengths = np.array([dice.choice([0, 1, 7, 100, 300]) for _ in range(dice.choice([0, 1, 9, 9, 9, 9]))], dtype="<i4")
    ids = np.array([dice.choice([0, 1, 100, 127]) for _ in range(lengths.sum())], dtype=dtype)
    pointers = ((np.cumsum(lengths) - lengths) * dtype.itemsize).astype("<i8")
    documents = np.arange(len(lengths) + 1, dtype="<i8")
    header: list[Any] = [b"MMIDIDX\0\0", 1, code, len(lengths), len(documents)]
    how = dice.choice(["whole", "header", "header", "lengths", "pointers", "ids", "file", "file", "modes", "sidecar"])
    number = dice.choice([0, 1, 6, 7, 9, 255, 2**31 - 1, 2**32, 2**62, 2**63, 2**64 - 1])
    words = f"{how}, {dtype.name}"
    if how == "header":
        place = dice.randrange(1, 5)
        header[place] = number % 256 if place == 2 else number
        words = f"header {place} is {header[place]}"
    elif how in ("lengths", "pointers", "ids"):
        values = {"lengths": lengths, "pointers": pointers, "ids": ids}[how]
        if len(values):
            bounds = np.iinfo(values.dtype)
            values[dice.randrange(len(values))] = dice.choice([0, 1, bounds.max, bounds.min])
    index = struct.pack("<9sQBQQ", *header) + lengths.tobytes() + pointers.tobytes() + documents.tobytes()
    index += bytes(len(lengths)) if how == "modes" else b""
    (here / "web.idx").write_bytes(index)
    (here / "web.bin").write_bytes(ids.tobytes())
    if how == "file":
        path = here / dice.choice(["web.idx", "web.idx", "web.bin"])
        words = f"{path.name}, {_spoil(dice, path)}"
    elif how == "sidecar":
        (here / "web.json").write_text("{}")
    settings: dict[str, Any] = {"data.sources": [dice.choice(["web.bin", "*.bin", "."])]}
    settings["data.validation_fraction"] = 0.3
    if dice.random() < 0.1:
        settings["data.token_dtype"] = dice.choice(["uint8", "uint16", "uint32"])
    if dice.random() < 0.3:
        settings["model.vocab_size"] = dice.choice([1, 128, 256])
    return Case(f"megatron: {words}", _train(settings), may_last=True)


def _weights(dice: random.Random, folder: Path, templates: Path) -> Case:
    """Several sources and weights that may or may not fit them."""
    names = [f"part{number}.txt" for number in range(dice.choice([1, 2, 2, 3, 5]))]
    for name in names:
        (folder / "here" / name).write_text(TEXT[: dice.choice([*[4000] * 12, 400, 40, 17, 16, 0])])
    if dice.random() < 0.2:
        names.append(dice.choice([names[0], "part*.txt", ".", "gone.txt", "builtin"]))
    likely = [0.1, 0.3, 0.7, 1, 2, 7]
    odd = [1 / 3, 0, -1, "nan", "inf", "-inf", 1e-320, 1e308, 1e-9, 123456.789, "", "x", "1_0", 2**70]
    weights = [dice.choice(odd if dice.random() < 0.1 else likely) for _ in names]
    if dice.random() < 0.15:
        weights = dice.choice([weights[1:], [*weights, 1], weights * 300])
    settings: dict[str, Any] = {"data.sources": names, "data.weights": weights}
    settings["data.validation_fraction"] = dice.choice([0.05, 0.05, 0.05, 0.5, 0, 0.999])
    settings["evaluation.batches"] = dice.choice([1, 1, 0, 40])
    return Case(f"weights: {str(weights)[:60]} of {len(names)} sources", _train(settings), may_last=True)


def _parquet(dice: random.Random, folder: Path, templates: Path) -> Case:
    """A table with text, with something else, with nothing, or with spoilt bytes."""
    import pyarrow
    from pyarrow import parquet

    num_rows = dice.choice([0, 1, 5, 200, 200])
    lines = [dice.choice(["", "one line", "zwei ß\n<|endoftext|>\n", "\0", "x" * 3000]) for _ in range(num_rows)]
    columns: dict[str, Callable[[], Any]] = {
        "text": lambda: pyarrow.array(lines, pyarrow.string()),
        "large text": lambda: pyarrow.array(lines, pyarrow.large_string()),
        "dictionary": lambda: pyarrow.array(lines, pyarrow.string()).dictionary_encode(),
        "some nulls": lambda: pyarrow.array([dice.choice([line, None]) for line in lines], pyarrow.string()),
        "nulls": lambda: pyarrow.nulls(num_rows),
        "null texts": lambda: pyarrow.nulls(num_rows, pyarrow.string()),
        "dictionary with nulls": lambda: pyarrow.array([None] * num_rows, pyarrow.string()).dictionary_encode(),
        "numbers": lambda: pyarrow.array(range(num_rows), pyarrow.int64()),
        "bytes": lambda: pyarrow.array([line.encode() for line in lines], pyarrow.binary()),
        "no UTF-8": lambda: pyarrow.array([b"\xff" for _ in lines], pyarrow.binary()).view(pyarrow.string()),
        "lists": lambda: pyarrow.array([[line] for line in lines], pyarrow.list_(pyarrow.string())),
        "structures": lambda: pyarrow.array(
            [{"text": line} for line in lines], pyarrow.struct([("text", pyarrow.string())])
        ),
        "times": lambda: pyarrow.array([0] * num_rows, pyarrow.timestamp("us")),
        "truths": lambda: pyarrow.array([True] * num_rows, pyarrow.bool_()),
    }
    kind = dice.choice([*columns, *["text"] * 10])
    table = pyarrow.table({dice.choice([*["text"] * 8, "body", ""]): columns[kind]()})
    if dice.random() < 0.2:
        table = table.append_column("text", columns["text"]())  # perhaps a second one of that name
    if dice.random() < 0.05:
        table = pyarrow.table({})
    path = folder / "here" / "some.parquet"
    parquet.write_table(table, path, row_group_size=dice.choice([1, 7, 1000]))
    words = f"{kind}, {num_rows} rows"
    if dice.random() < 0.35:
        words += f", {_spoil(dice, path)}"
    command = ["prepare", dice.choice([path.name, "*.parquet", "."]), "--output", "out/web"]
    command += ["--text-field", dice.choice(["body", "", "text.text"])] if dice.random() < 0.2 else []
    command += ["--max-tokens", dice.choice(["1", "1e3", "0", "nan", "-1", "1e400"])] if dice.random() < 0.2 else []
    return Case(f"parquet: {words}", command, ("here/out",), may_last=True)


def _text(dice: random.Random, folder: Path, templates: Path) -> Case:
    path = folder / "here" / dice.choice(["some.txt", "some.jsonl"])
    lines = TEXT.splitlines()
    path.write_text(TEXT if path.suffix == ".txt" else "".join(json.dumps({"text": line}) + "\n" for line in lines))
    words = _spoil(dice, path)
    sources = dice.choice([["some.txt"], ["some.jsonl"], ["."], ["*"]]) if dice.random() < 0.1 else [path.name]
    if dice.random() < 0.3:
        command = ["prepare", *sources, "--output", "out/web", "--shard-tokens", str(dice.choice([1000, 10, 10**30]))]
        return Case(f"text: prepare, {path.name}, {words}", command, ("here/out",))
    return Case(f"text: {path.name}, {words}", _train({"data.sources": sources}))


def _tokenizer(dice: random.Random, folder: Path, templates: Path) -> Case:
    path = folder / "here" / "tokenizer.json"
    shutil.copyfile(templates / "tokenizer.json", path)
    words = _spoil(dice, path)
    return Case(f"tokenizer: {words}", _train({"data.tokenizer": "tokenizer.json"}))


def _study(dice: random.Random, folder: Path, templates: Path) -> Case:
    path = folder / "grid.toml"
    text = STUDY
    how = dice.choice(["bytes", "kind", "line", "line", "line", "lines"])
    words = how
    if how == "bytes":
        words, data = _spoil_bytes(dice, STUDY.encode())
        path.write_bytes(data)
    elif how == "kind":
        path.write_text(text)
        words = _spoil_kind(dice, path)
    else:
        lines = text.strip().splitlines()
        for _ in range(1 if how == "line" else 3):
            place = dice.randrange(len(lines))
            name = lines[place].partition(" = ")[0]
            value = dice.choice(
                ["[]", "{}", "-1", "0", "1e400", "nan", '""', '"x"', "[[]]", "[1, 'x']", "true", "[-1, 7]", "{a = {}}"]
            )
            lines[place] = dice.choice([f"{name} = {value}", "", lines[place] * 2, f"{name}.x = {value}"])
        words = lines[place]
        path.write_text("\n".join(lines))
    return Case(f"study: {words}", ["study", "../grid.toml", "--jobs", "1"], timeout=120.0, may_last=True)


def _profile(dice: random.Random, folder: Path, templates: Path) -> Case:
    path = folder / "here" / "profile.json"
    shutil.copyfile(templates / "profile.json", path)
    words = _spoil(dice, path)
    if dice.random() < 0.5:
        return Case(f"profile: train, {words}", _train({"pipeline.profile": "profile.json"}))
    return Case(f"profile: plan, {words}", ["plan", *options(SMALL), "--devices", "2", "--profile", "profile.json"], ())


def _run(dice: random.Random, folder: Path, templates: Path) -> Case:
    run = folder / "here" / "runs" / "base"
    shutil.copytree(templates / "runs" / "base", run, ignore=shutil.ignore_patterns("checkpoints"))
    command = dice.choice(["report", "timeline"])
    names = ["trace.json"] * 6 if command == "timeline" else ["config.toml", "metrics.jsonl", "summary.json"]
    path = run / dice.choice([*names, "trace.json", "summary.json", "."])
    words = _spoil_kind(dice, run) if path == run else _spoil(dice, path)
    if command == "report":
        return Case(
            f"run: report, {path.name}, {words}", ["report", "runs/base", "--output", "page.html"], ("here/page.html",)
        )
    return Case(f"run: timeline, {path.name}, {words}", ["timeline", "runs/base"], ("here/timeline.svg",))


# ---- checkpoints


def _checkpoint(dice: random.Random, folder: Path, templates: Path) -> Case:
    run = folder / "here" / "runs" / "base"
    shutil.copytree(templates / "runs" / "base", run)
    settings: dict[str, Any] = {"run.name": "base", "checkpoint.resume": True, "train.steps": STEPS + 1}
    command = _train(settings)
    newest = run / "checkpoints" / f"step-{STEPS:08d}"
    words = _damage(dice, newest)
    # None that is damaged is taken: it is named, and the one before it is gone on from.
    return Case(f"checkpoint: damaged, {words}", command, codes=(0,), must_say="resuming from the checkpoint of step")


def _damage(dice: random.Random, newest: Path) -> str:
    how = dice.choice(["file", "file", "file", "swap", "older", "lost", "kind"])
    files = sorted(newest.iterdir())
    path = dice.choice(files)
    if how == "swap":
        other = dice.choice([file for file in files if file != path])
        path.rename(newest / "aside")
        other.rename(path)
        (newest / "aside").rename(other)
        return f"{path.name} for {other.name}"
    # A busy machine may have left one out.
    older = sorted(other for other in newest.parent.glob("step-*") if other != newest and (other / path.name).exists())
    if how == "older" and older:
        shutil.copyfile(older[-1] / path.name, path)
        return f"an older {path.name}"
    if how == "lost":
        path.unlink()
        return f"{path.name} lost"
    if how == "kind":
        return f"the folder: {_spoil_kind(dice, newest)}"
    return f"{path.name}: {_spoil(dice, path)}"
