"""The text form of an action, and the one rule that says what it waits for."""

import pytest

from slipstream.schedule import Action, Key, Op, requires


@pytest.mark.parametrize("text", ["2F5@v3", "0B0@v0", "11U127@v4", "1E7@v2"])
def test_an_action_reads_back_from_its_text(text):
    assert str(Action.parse(text)) == text


def test_an_action_prints_as_it_is_spoken():
    assert str(Action(2, Op.FORWARD, 5, 3)) == "2F5@v3"


@pytest.mark.parametrize("text", ["", "F5@v3", "2G5@v3", "2F5", "2F-1@v0", "2F5@v3 1"])
def test_a_text_that_is_no_action_is_named_in_the_error(text):
    with pytest.raises(ValueError, match="is not an action") as error:
        Action.parse(text)
    assert repr(text) in str(error.value)


def test_only_an_evaluation_keeps_its_version_in_the_key():
    assert str(Action.parse("2F5@v3").key) == "2F5"
    assert str(Action.parse("2E5@v3").key) == "2E5@v3"
    assert Action.parse("2E5@v3").key != Action.parse("2E5@v4").key


@pytest.mark.parametrize(
    ("text", "waits_for"),
    [
        ("0F5@v0", []),
        ("2F5@v0", ["1F5"]),
        ("0E1@v4", []),
        ("2E1@v4", ["1E1@v4"]),
        ("3B5@v0", ["3F5"]),
        ("2B5@v0", ["2F5", "3B5"]),
    ],
)
def test_data_flows_forward_and_gradients_flow_back(text, waits_for):
    for global_update in (False, True):
        required = requires(Action.parse(text), num_stages=4, global_update=global_update)
        assert [str(key) for key in required] == waits_for


def test_an_update_waits_for_its_own_stage_or_for_a_sum_over_all():
    update = Action.parse("1U7@v2")
    assert requires(update, num_stages=3, global_update=False) == [Key(1, Op.BACKWARD, 7)]
    assert [str(key) for key in requires(update, num_stages=3, global_update=True)] == ["0B7", "1B7", "2B7"]
