"""A process may be killed, and a disk may fail, at any operation: what was committed stays, and a mix never is."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_samples import in_child, interrupt, kill_me, mark_of, no_damage, write_all

from slipstream.checkpoint import CheckpointError, Store

pytestmark = pytest.mark.usefixtures("quick_disk")
MAX_OPERATIONS = 200


@pytest.fixture
def first_two(tmp_path: Path) -> Path:
    store = Store(tmp_path / "first", attempt="first")
    write_all(store, 1, 1)
    write_all(store, 2, 2)
    return tmp_path / "first"


def assert_old_or_new(folder: Path, new_step: int) -> bool:
    """Whether it is the new one, whose mark is 3."""
    checkpoint = Store(folder).newest(no_damage)
    mark = mark_of(checkpoint)
    assert (checkpoint.step, mark) in {(2, 2), (new_step, 3)}
    return mark == 3


def assert_next_launch_goes_well(folder: Path, step: int) -> None:
    store = Store(folder, attempt="next")
    store.clean()
    assert_old_or_new(folder, step)
    assert all(path.suffix == "" for path in folder.iterdir())
    write_all(store, step, 4)
    assert mark_of(store.newest(no_damage)) == 4
    wanted = ["step-00000002", "step-00000003"] if step == 3 else ["step-00000001", "step-00000002"]
    assert sorted(path.name for path in folder.iterdir()) == wanted


@pytest.mark.parametrize("step", [3, 2], ids=["a new step", "a step anew"])
def test_killed_at_any_operation(tmp_path, first_two, step):
    outcomes = []
    for at in range(MAX_OPERATIONS):
        folder = tmp_path / str(at)
        shutil.copytree(first_two, folder)

        def write(folder: Path = folder, at: int = at) -> None:
            interrupt(lambda name, function: setattr(os, name, function), at, kill_me)
            write_all(Store(folder, attempt="second"), step, 3)

        exitcode = in_child(write)
        outcomes.append(assert_old_or_new(folder, step))
        assert_next_launch_goes_well(folder, step)
        if exitcode == 0:
            break
        assert exitcode == -9
    # Old at first, new from some operation on, and not before most of the work is done.
    assert outcomes == sorted(outcomes) and outcomes[-1] and 20 < outcomes.index(True) < len(outcomes) < MAX_OPERATIONS


def fail(number: int) -> Callable[[], None]:
    def happens() -> None:
        raise OSError(number, os.strerror(number))

    return happens


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    ("step", "number"), [(3, errno.ENOSPC), (2, errno.EROFS)], ids=["a new step, no space", "a step anew, read-only"]
)
def test_a_disk_that_fails_at_any_operation_is_one_sentence(tmp_path, first_two, monkeypatch, step, number, forever):
    num_failures = 0
    for at in range(MAX_OPERATIONS):
        folder = tmp_path / str(at)
        shutil.copytree(first_two, folder)
        reached = []

        def happens(reached: list[int] = reached) -> None:
            reached.append(1)
            fail(number)()

        said = None
        with monkeypatch.context() as patch:
            interrupt(lambda name, function: patch.setattr(os, name, function), at, happens, forever)
            try:
                write_all(Store(folder, attempt="second"), step, 3)
            except CheckpointError as error:
                said = str(error)
        new = assert_old_or_new(folder, step)
        if said is None:
            assert new
        else:
            num_failures += 1
            assert "\n" not in said and str(folder) in said
            assert not forever or os.strerror(number) in said
        if not forever and not new:
            assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
        assert_next_launch_goes_well(folder, step)
        if not reached:
            break
    assert 20 < num_failures < at < MAX_OPERATIONS - 1
