"""Files that a user names."""

import os

import pytest

from slipstream.config.files import read_plain_file


def test_a_folder_is_an_error_that_names_it_and_leaves_no_descriptor_open(tmp_path):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    with pytest.raises(IsADirectoryError) as caught:
        read_plain_file(tmp_path)
    assert caught.value.filename == str(tmp_path)
    assert before is None or len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no plain file"):
        read_plain_file(tmp_path / "pipe")
