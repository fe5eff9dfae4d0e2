"""Files that are cut, flipped, exchanged or made up: one sentence each, and the checkpoint before is taken."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_samples import make_part, mark_of, no_damage, restamp, write_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.checkpoint import CheckpointError, Store

pytestmark = pytest.mark.usefixtures("quick_disk")
FILES = ["manifest.json", "stage-0.json", "stage-1.safetensors"]


@pytest.fixture
def folder(tmp_path: Path, quick_disk: None) -> Path:
    """Two checkpoints, of which the newer will be harmed."""
    store = Store(tmp_path / "checkpoints")
    write_all(store, 1, 1)
    write_all(store, 2, 2)
    return tmp_path / "checkpoints"


def sentence_about(folder: Path) -> str:
    """What is said of the newer one, while the older one is taken."""
    said: list[str] = []
    store = Store(folder)
    checkpoint = store.newest(said.append)
    assert checkpoint.step == 1 and mark_of(checkpoint) == 1
    assert len(said) == 1 and "\n" not in said[0] and "step-00000002" in said[0], said
    with pytest.raises(CheckpointError) as error:
        store.open(2)
    assert str(error.value) == said[0]
    return said[0]


def refused(folder: Path) -> bool:
    """Or else it is read as it was."""
    try:
        checkpoint = Store(folder).open(2)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return True
    assert mark_of(checkpoint) == 2
    return False


# ---- accidents


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_byte_is_found(folder, name):
    path = folder / "step-00000002" / name
    intact = path.read_bytes()
    for position in range(len(intact)):
        flipped = bytearray(intact)
        flipped[position] ^= 1 << (position * 5 + 1) % 8
        path.write_bytes(flipped)
        assert refused(folder), f"{name} with byte {position} flipped"
    path.write_bytes(intact)
    assert not refused(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_any_other_length_is_found(folder, name):
    path = folder / "step-00000002" / name
    intact = path.read_bytes()
    for length in range(len(intact)):
        path.write_bytes(intact[:length])
        assert refused(folder), f"{name} with {length} bytes"
    path.write_bytes(intact + b"\0")
    assert refused(folder)


@pytest.mark.parametrize("name", FILES)
def test_the_sentence_names_the_file(folder, name):
    path = folder / "step-00000002" / name
    text = path.read_bytes()
    path.write_bytes(bytes([text[0] ^ 255]) + text[1:])
    assert f"step-00000002/{name} is" in sentence_about(folder)
    path.write_bytes(text[:-1])
    assert f"step-00000002/{name}" in sentence_about(folder)
    path.unlink()
    assert f"step-00000002/{name} cannot be read (No such file or directory)" in sentence_about(folder)


def test_a_part_of_another_checkpoint_is_found(folder):
    for suffix in ("json", "safetensors"):
        source = folder / "step-00000001" / f"stage-0.{suffix}"
        (folder / "step-00000002" / source.name).write_bytes(source.read_bytes())
    assert "stage-0.json is damaged: its bytes have another sha256 than manifest.json says" in sentence_about(folder)
    restamp(folder / "step-00000002")
    assert "stage-0.json belongs to another checkpoint" in sentence_about(folder)


def test_a_folder_of_another_step_is_found(folder):
    (folder / "step-00000002").rename(folder / "step-00000007")
    said: list[str] = []
    assert Store(folder).newest(said.append).step == 1
    assert len(said) == 1 and "step-00000007/manifest.json is of step 2" in said[0]


def test_when_none_is_intact_there_is_none(folder):
    for step in (1, 2):
        (folder / f"step-0000000{step}" / "manifest.json").unlink()
    said: list[str] = []
    assert Store(folder).newest(said.append) is None and len(said) == 2


def test_a_file_that_changes_after_it_was_opened_is_found(folder):
    checkpoint = Store(folder).open(2)
    path = folder / "step-00000002" / "stage-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"stage-0\.safetensors has changed since it was opened"):
        checkpoint.read(["stage-0/step"])


def test_without_verification_lengths_and_headers_are_checked_all_the_same(folder):
    store, path = Store(folder), folder / "step-00000002" / "stage-0.safetensors"
    text = path.read_bytes()
    path.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    assert store.open(2, verify=False).step == 2
    path.write_bytes(text[:-1])
    with pytest.raises(CheckpointError, match=r"bytes, and manifest\.json says otherwise"):
        store.open(2, verify=False)


# ---- what is no checkpoint, although all digests are right


class Bomb:
    def __reduce__(self):
        return os._exit, (3,)


def test_a_pickle_is_not_opened(folder):
    path = folder / "step-00000002" / "stage-0.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    restamp(folder / "step-00000002")
    assert "stage-0.safetensors is no safetensors file: its header claims" in sentence_about(folder)
    torch.save({"w": torch.zeros(3)}, path)
    restamp(folder / "step-00000002")
    assert "stage-0.safetensors is no safetensors file: its header claims" in sentence_about(folder)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/b", "..", ".", "", "\0", "manifest", ".x", "ü", "x" * 201, "a\n"]
)
def test_names_that_lead_elsewhere_are_refused(folder, name):
    path = folder / "step-00000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["parts"][name] = manifest["parts"].pop("stage-0")
    path.write_text(json.dumps(manifest))
    assert "manifest.json has a part named " in sentence_about(folder)


@pytest.mark.parametrize("name", FILES)
def test_links_pipes_and_folders_are_refused(folder, name, tmp_path):
    path = folder / "step-00000002" / name
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    assert f"{name} is a link" in sentence_about(folder)
    for target in ("/dev/zero", "/nonexistent", str(path)):
        path.unlink()
        path.symlink_to(target)
        assert f"{name} is a link" in sentence_about(folder)
    path.unlink()
    os.mkfifo(path)
    assert f"{name} is no plain file" in sentence_about(folder)
    path.unlink()
    path.mkdir()
    assert f"{name} is no plain file" in sentence_about(folder)


def test_a_folder_that_is_a_link_is_refused(folder, tmp_path):
    (folder / "step-00000002").rename(tmp_path / "elsewhere")
    (folder / "step-00000002").symlink_to(tmp_path / "elsewhere")
    assert "step-00000002/manifest.json cannot be read (Not a directory)" in sentence_about(folder)
    write_all(Store(folder, keep_last=1), 3, 3)
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir())[0] == "manifest.json"


def test_a_link_in_the_place_of_a_part_is_not_written_through(tmp_path):
    store = Store(tmp_path / "checkpoints", attempt="a")
    (tmp_path / "checkpoints" / "step-00000000.a.partial").mkdir(parents=True)
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "checkpoints" / "step-00000000.a.partial" / "stage-0.safetensors.tmp").symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointError):
        store.write(0, make_part("stage-0", 0), 1)
    assert (tmp_path / "victim").read_text() == "mine"


def entry(dtype: object = "U8", shape: object = (4,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS = [
    (b"", "is damaged, or no file of a checkpoint (JSONDecodeError"),
    (b"\xff\xfe{\0}\0", "is damaged, or no file of a checkpoint"),
    (b"[" * 50_000, "is damaged, or no file of a checkpoint"),
    ([], "is damaged, or no file of a checkpoint"),
    ({}, "accounts for"),
    ({"w": []}, "is damaged, or no file of a checkpoint"),
    ({"w": {"dtype": "U8"}}, "(KeyError: 'shape')"),
    ({"w": entry(dtype="F31")}, "(KeyError: 'F31')"),
    ({"w": entry(dtype="F64")}, "tensor 'w' of "),
    ({"w": entry(offsets=[0])}, "is damaged, or no file of a checkpoint"),
    ({"w": entry(offsets=[4, 0])}, "has -4 bytes for (4,)"),
    ({"w": entry(shape=[2**40], offsets=[0, 2**40])}, "accounts for"),
]


def put_header(folder: Path, header: object, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = (len(text) if length is None else length).to_bytes(8, "little") + text + b"\0" * 4
    (folder / "step-00000002" / "stage-0.safetensors").write_bytes(data)
    restamp(folder / "step-00000002")


@pytest.mark.parametrize(("header", "sentence"), HEADERS, ids=range(len(HEADERS)))
def test_an_impossible_header_is_one_sentence(folder, header, sentence):
    put_header(folder, header)
    said = sentence_about(folder)
    assert sentence in said and len(said) < 1000
    said.encode()


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 200_000_000, 1000])
def test_an_impossible_length_of_the_header_is_one_sentence(folder, length):
    put_header(folder, {"w": entry()}, length)
    assert f"its header claims {length:,} of " in sentence_about(folder)


def keep_sides(change: Callable[[dict], None]) -> Callable[[dict], object]:
    def changed(value: dict) -> object:
        change(value)
        return value

    return changed


JSONS = [
    ("manifest.json", lambda value: [], "is damaged, or no file of a checkpoint"),
    ("manifest.json", lambda value: value | {"format": 2}, "is of format 2, and this version reads 1"),
    ("manifest.json", lambda value: value | {"step": 3}, "is of step 3"),
    ("manifest.json", lambda value: value | {"parts": {"stage-0": 1}}, "is damaged, or no file of a checkpoint"),
    ("manifest.json", keep_sides(lambda value: value["parts"].pop("stage-1")), "belongs to another checkpoint"),
    ("stage-0.json", lambda value: value | {"num_parts": 3}, "belongs to another checkpoint"),
    ("stage-0.json", lambda value: value | {"step": 3}, "belongs to another checkpoint"),
    ("stage-0.json", lambda value: value | {"format": -1}, "is of format -1, and this version reads 1"),
]


@pytest.mark.parametrize(("name", "change", "sentence"), JSONS, ids=range(len(JSONS)))
def test_an_impossible_record_is_one_sentence(folder, name, change, sentence):
    path = folder / "step-00000002" / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    if name != "manifest.json":
        restamp(path.parent)
    assert sentence in sentence_about(folder)


def test_a_record_too_large_to_be_one_is_not_read(folder):
    path = folder / "step-00000002" / "manifest.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "manifest.json has 1,099,511,627,776 bytes, more than any checkpoint's" in sentence_about(folder)


# ---- chance


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(FILES)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4)
CHANCE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def changes(draw) -> Callable[[object], object]:
    """Somewhere in a JSON value, another; or a key more, or fewer."""
    choices = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    other, kind = draw(VALUES), draw(st.sampled_from(["replace", "remove", "add"]))

    def change(value: object) -> object:
        inner, steps = value, list(choices)
        while isinstance(inner, (dict, list)) and inner:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            key = keys[steps.pop() % len(keys)]
            if not steps or not isinstance(inner[key], (dict, list)) or not inner[key]:
                if kind == "remove":
                    del inner[key]
                elif kind == "replace" or isinstance(inner, list):
                    inner[key] = other
                else:
                    inner[str(other)] = other
                return value
            inner = inner[key]
        return other

    return change


def assert_one_sentence_or_tensors(folder: Path) -> None:
    store = Store(folder)
    try:
        checkpoint = store.open(2)
        checkpoint.read(checkpoint.names())
    except CheckpointError as error:
        assert "\n" not in str(error)
    assert store.newest(lambda sentence: None) is not None


@CHANCE
@given(change=changes())
def test_any_change_of_the_manifest_is_one_sentence_or_harmless(folder, change):
    path = folder / "step-00000002" / "manifest.json"
    intact = path.read_bytes()
    path.write_text(json.dumps(change(json.loads(intact))))
    assert_one_sentence_or_tensors(folder)
    path.write_bytes(intact)


@CHANCE
@given(data=st.binary(max_size=200))
def test_any_bytes_are_one_sentence(folder, data):
    (folder / "step-00000002" / "stage-0.safetensors").write_bytes(data)
    restamp(folder / "step-00000002")
    assert_one_sentence_or_tensors(folder)


def test_the_fixture_itself_is_intact(folder):
    assert mark_of(Store(folder).newest(no_damage)) == 2
