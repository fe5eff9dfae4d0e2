"""Which checkpoints there are: after commits, replacements, failures and launches that ended early."""

import json
import math
import multiprocessing
import os
import resource
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoint_samples import NAMES, in_child, make_part, mark_of, no_damage, write_all

from slipstream.checkpoint import CheckpointError, Part, Store, files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- commit


def test_nothing_is_there_before_the_last_part_is(folder):
    store = Store(folder, attempt="a")
    assert store.steps() == [] and store.newest(no_damage) is None
    store.write(3, make_part("stage-0", 1), 2)
    assert listing(folder) == ["step-00000003.a.partial"]
    assert store.steps() == [] and store.newest(no_damage) is None
    store.write(3, make_part("stage-1", 1), 2)
    assert listing(folder) == ["step-00000003"]
    expected = ["manifest.json", "stage-0.json", "stage-0.safetensors", "stage-1.json", "stage-1.safetensors"]
    assert listing(folder / "step-00000003") == expected
    checkpoint = store.newest(no_damage)
    assert checkpoint.step == 3 and mark_of(checkpoint) == 1


def test_only_the_files_that_are_needed_are_opened(folder):
    store = Store(folder)
    write_all(store, 0, 5)
    checkpoint = store.open(0)
    (folder / "step-00000000" / "stage-1.safetensors").unlink()
    assert checkpoint.read(["stage-0/step"])["stage-0/step"] == 5
    with pytest.raises(CheckpointError, match=r"stage-1\.safetensors cannot be read \(No such file or directory\)"):
        checkpoint.read(["stage-1/step"])
    with pytest.raises(CheckpointError, match="step-00000000 has no tensor 'stage-2/step'"):
        checkpoint.read(["stage-2/step"])


def test_a_name_in_two_parts_is_refused(folder):
    store = Store(folder)
    for name in NAMES:
        store.write(0, Part(name, {"w": torch.zeros(1)}, {}), 2)
    with pytest.raises(CheckpointError, match="has tensor 'w' in both stage-0 and stage-1"):
        store.open(0)


def test_a_missing_step_says_which_there_are(folder):
    store = Store(folder)
    with pytest.raises(CheckpointError, match="step-00000004 does not exist: there are none"):
        store.open(4)
    write_all(store, 8, 0)
    with pytest.raises(CheckpointError, match=r"step-00000004 does not exist: there are \[8\]"):
        store.open(4)


def commit_together(folder: Path, name: str, num_parts: int, num_rounds: int, barrier) -> None:
    for attempt in ("a", "b"):
        store = Store(folder, attempt=attempt)
        for step in range(num_rounds):
            mark = step + (100 if attempt == "b" else 0)
            barrier.wait(60)
            store.write(step, make_part(name, mark), num_parts)
            barrier.wait(60)
            assert mark_of(store.open(step), tuple(f"stage-{i}" for i in range(num_parts))) == mark


def test_processes_that_finish_at_once_commit_once_and_replace_once(folder):
    context = multiprocessing.get_context("fork")
    num_parts, num_rounds = 6, 15
    barrier = context.Barrier(num_parts)
    processes = [
        context.Process(target=commit_together, args=(folder, f"stage-{i}", num_parts, num_rounds, barrier))
        for i in range(num_parts)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * num_parts
    # The second launch began anew, and the first one's last two are ahead of it until it gets there.
    assert listing(folder) == ["step-00000013", "step-00000014"]


def test_of_two_that_find_all_parts_one_commits(folder, monkeypatch):
    """Both have seen all parts when the first renames the folder."""
    store, other = Store(folder, attempt="a"), Store(folder, attempt="a")
    store.write(0, make_part("stage-0", 1), 2)
    rename = os.rename

    def second_comes_first(source, target):
        if str(target).endswith(".committing"):
            monkeypatch.setattr(os, "rename", rename)
            committing = other._claim(0, 2)
            if committing is not None:
                other._commit(0, committing, 2)
        rename(source, target)

    monkeypatch.setattr(os, "rename", second_comes_first)
    store.write(0, make_part("stage-1", 1), 2)
    assert mark_of(store.open(0)) == 1 and listing(folder) == ["step-00000000"]


# ---- launches


def test_parts_of_an_earlier_launch_do_not_count(folder):
    crashed = Store(folder, attempt="a")
    crashed.write(0, make_part("stage-0", 1), 2)
    store = Store(folder, attempt="b")
    store.write(0, make_part("stage-1", 2), 2)
    assert store.steps() == []
    store.write(0, make_part("stage-0", 2), 2)
    assert mark_of(store.open(0)) == 2
    assert listing(folder) == ["step-00000000", "step-00000000.a.partial"]
    store.clean()
    assert listing(folder) == ["step-00000000"]


def test_parts_that_disagree_on_their_number_are_not_committed(folder):
    store = Store(folder, attempt="a")
    store.write(0, make_part("stage-0", 1), 3)
    with pytest.raises(
        CheckpointError, match="has a part stage-0 that is one of 3 of step 0, and others that are of 2"
    ):
        store.write(0, make_part("stage-1", 1), 2)
    assert listing(folder) == []


def test_a_record_without_its_tensors_is_not_committed(folder):
    store = Store(folder, attempt="a")
    store.write(0, make_part("stage-0", 1), 2)
    (folder / "step-00000000.a.partial" / "stage-0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"stage-0\.safetensors is not what stage-0\.json says it was"):
        store.write(0, make_part("stage-1", 1), 2)
    assert listing(folder) == []


def test_a_step_is_replaced_by_a_later_launch(folder):
    write_all(Store(folder), 5, 1)
    store = Store(folder)
    write_all(store, 5, 2, ("only",))
    assert mark_of(store.open(5), ("only",)) == 2
    assert listing(folder) == ["step-00000005"]


def test_between_two_renames_the_replaced_one_is_found_and_then_put_back(folder):
    store = Store(folder)
    write_all(store, 5, 1)
    (folder / "step-00000005").rename(folder / "step-00000005.0a1b.replaced")
    assert store.steps() == [5] and mark_of(store.newest(no_damage)) == 1
    store.clean()
    assert listing(folder) == ["step-00000005"] and mark_of(store.open(5)) == 1


def test_cleaning_leaves_strangers_alone(folder):
    strangers = ["step-5", "step-0000000001", "step-00000001.partial", "notes.txt", "step-00000001.a.partial.txt"]
    for name in strangers:
        (folder / name).mkdir(parents=True)
    for name in ["step-00000001.a.partial", "step-00000001.a.committing", "step-00000001.a.deleted"]:
        (folder / name).mkdir()
    store = Store(folder)
    store.clean()
    assert listing(folder) == sorted(strangers) and store.steps() == []


# ---- which are kept


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, 0, [9]), (2, 0, [8, 9]), (2, 4, [0, 4, 8, 9]), (1, 3, [0, 3, 6, 9]), (20, 0, list(range(10)))],
)
def test_the_last_ones_and_every_so_many_are_kept(folder, keep_last, keep_every, kept):
    store = Store(folder, keep_last, keep_every)
    for step in range(10):
        write_all(store, step, step, ("only",))
    assert store.steps() == kept
    assert len(listing(folder)) == len(kept)


def test_going_back_to_an_earlier_step_deletes_neither_the_new_nor_the_later(folder):
    store = Store(folder, keep_last=2)
    for step in (100, 200, 300, 110, 120, 130):
        write_all(store, step, step, ("only",))
    assert store.steps() == [120, 130, 200, 300]


def test_what_cannot_be_deleted_is_not_counted(folder, monkeypatch):
    store = Store(folder, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda *args, **kwargs: (_ for _ in ()).throw(PermissionError(1, "no")))
        for step in range(3):
            write_all(store, step, step)
    assert store.steps() == [2]
    assert sum(name.endswith(".deleted") for name in listing(folder)) == 2
    store.clean()
    assert listing(folder) == ["step-00000002"]


@pytest.mark.parametrize(("keep_last", "keep_every"), [(0, 0), (1, -1)])
def test_rules_that_keep_nothing_are_refused(folder, keep_last, keep_every):
    with pytest.raises(ValueError, match="use at least 1 and 0"):
        Store(folder, keep_last, keep_every)


# ---- failures


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), b"bytes", {1, 2}, torch.zeros(1), [0] * 1000])
def test_facts_that_json_cannot_say_are_refused(folder, value, monkeypatch):
    monkeypatch.setattr("slipstream.checkpoint.records.MAX_JSON_BYTES", 1000)
    with pytest.raises(CheckpointError, match="has facts ") as refusal:
        Store(folder).write(0, Part("stage-0", {}, {"value": value}), 1)
    assert "\n" not in str(refusal.value) and listing(folder) == []


def test_too_little_space_is_said_before_anything_is_written(folder, monkeypatch):
    store = Store(folder)
    write_all(store, 0, 1)
    part = Part("stage-0", {"w": torch.zeros(300_000)}, {})
    assert 1_200_000 < store.needed_bytes(part) < 1_210_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=300_000))
    monkeypatch.setattr("slipstream.checkpoint.store.write_file", no_damage)
    sentence = "stage-0 needs 1.2 MB, .*/checkpoints has 300 kB left: make room, or keep fewer checkpoints"
    with pytest.raises(CheckpointError, match=sentence):
        store.write(1, part, 2)
    assert listing(folder) == ["step-00000000"]


def test_what_is_not_on_disk_as_it_was_meant_is_not_committed(folder, monkeypatch):
    store = Store(folder)
    write_all(store, 0, 1)
    fsync = os.fsync

    def flips_a_bit(descriptor: int) -> None:
        os.pwrite(descriptor, bytes([os.pread(descriptor, 1, 150)[0] ^ 4]), 150)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flips_a_bit)
    with pytest.raises(CheckpointError, match=r"stage-0\.safetensors is not on disk as it was written: check the disk"):
        store.write(1, make_part("stage-0", 2), 2)
    monkeypatch.undo()
    assert listing(folder) == ["step-00000000"] and mark_of(store.newest(no_damage)) == 1


def test_a_failed_part_takes_the_others_with_it_and_the_next_step_goes_well(folder, monkeypatch):
    """On a full disk, parts that will never be complete would keep it full."""
    store = Store(folder, attempt="a")
    store.write(1, make_part("stage-0", 1), 3)
    with pytest.raises(CheckpointError):
        store.write(1, Part("stage-1", {}, {"value": math.nan}), 3)
    assert listing(folder) == []
    store.write(1, make_part("stage-2", 1), 3)  # which has not heard of it
    assert listing(folder) == ["step-00000001.a.partial"]
    names = ("stage-0", "stage-1", "stage-2")
    write_all(store, 2, 2, names)
    assert listing(folder) == ["step-00000002"] and mark_of(store.open(2), names) == 2


def test_a_slower_process_is_waited_for(folder):
    """Another is two steps ahead; what it has written its part of stays until the slower one passes it by."""
    store = Store(folder, attempt="a")
    store.write(1, make_part("stage-0", 1), 2)
    store.write(2, make_part("stage-0", 2), 2)
    store.write(1, make_part("stage-1", 1), 2)
    assert store.steps() == [1]
    store.write(3, make_part("stage-1", 3), 2)
    assert listing(folder) == ["step-00000001", "step-00000003.a.partial"]


def test_a_checkpoint_given_up_meanwhile_is_said(folder, monkeypatch):
    store = Store(folder, attempt="a")

    def gone(path, chunks):
        files.discard(path.parent)
        return files.write_file(path, chunks)

    monkeypatch.setattr("slipstream.checkpoint.store.write_file", gone)
    with pytest.raises(CheckpointError, match=r"step-00000001\.a\.partial is gone: another process gave"):
        store.write(1, make_part("stage-0", 1), 2)
    assert listing(folder) == []


def test_a_limit_of_the_system_is_one_sentence_and_leaves_nothing(folder):
    """A real one, in the midst of a file: no file may be longer than 64 kB."""
    store = Store(folder)
    write_all(store, 0, 1)

    def write_too_much() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        with pytest.raises(CheckpointError, match=r"\.partial/stage-0\.\w+ cannot be written \(File too large\)"):
            store.write(1, Part("stage-0", {"w": torch.zeros(100_000)}, {}), 1)

    assert in_child(write_too_much) == 0
    assert listing(folder) == ["step-00000000"] and mark_of(store.newest(no_damage)) == 1


@pytest.fixture
def small_disk(tmp_path: Path):
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, timeout=10).returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True, timeout=10)


def test_a_full_disk_is_one_sentence_and_leaves_the_earlier_one(small_disk, monkeypatch):
    store = Store(small_disk)
    write_all(store, 0, 1)
    part = Part("stage-0", {"w": torch.zeros(100_000)}, {})
    with pytest.raises(CheckpointError, match=r"stage-0 needs 404 kB, .*small has .* kB left: make room"):
        store.write(1, part, 1)
    # Another process takes the space in between.
    monkeypatch.setattr(store, "_check_space", lambda part: None)
    with pytest.raises(CheckpointError, match=r"\.partial/stage-0\.\w+ cannot be written \(No space left on device\)"):
        store.write(1, part, 1)
    assert listing(small_disk) == ["step-00000000"] and mark_of(store.newest(no_damage)) == 1


def test_a_folder_that_cannot_be_written_to_is_one_sentence(folder, monkeypatch):
    def deny(path, *args, **kwargs):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(os, "mkdir", deny)
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written \(Read-only file system\)"):
        write_all(Store(folder), 0, 1)


def test_a_folder_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file")
    with pytest.raises(CheckpointError, match="file cannot be written"):
        write_all(store, 0, 1)
    with pytest.raises(CheckpointError, match=r"file cannot be read \(Not a directory\)"):
        store.newest(no_damage)


def test_the_manifest_says_what_the_files_are(folder):
    write_all(Store(folder), 12, 3)
    manifest = json.loads((folder / "step-00000012" / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], list(manifest["parts"])) == (1, 12, list(NAMES))
    record = json.loads((folder / "step-00000012" / "stage-1.json").read_text())
    assert record["tensors"] == manifest["parts"]["stage-1"]["tensors"]
    assert (record["format"], record["step"], record["num_parts"], record["facts"]["mark"]) == (1, 12, 2, 3)
