"""Settings of the runtime: one place, checked, restored."""

import pytest

import hwaware
from hwaware.errors import UnusableInputError
from hwaware.runtime import settings, step_recorder, timelines
from hwaware.runtime.settings import RuntimeSettings, current


def test_settings_hold_inside_the_block_also_after_an_exception():
    inside = []

    def fail():
        with hwaware.runtime_settings(sends="blocking"), hwaware.runtime_settings(step_limit_s=5.0):
            inside.append(current())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert inside == [RuntimeSettings(sends="blocking", step_limit_s=5.0)]
    assert current() == RuntimeSettings()


@pytest.mark.parametrize(
    "wrong",
    [
        {"sends": "later"},
        {"receive_limit_s": 0},
        {"step_limit_s": float("nan")},
        {"receive_limit_s": float("inf")},
        {"receive_limit_s": "60"},
        {"encrypt": "no"},
        {"message_digests": "0"},
        {"enforce_memory": 0},
    ],
)
def test_wrong_values_are_refused_at_once(wrong):
    with pytest.raises(UnusableInputError, match="To fix:"), hwaware.runtime_settings(**wrong):
        pass
    assert current() == RuntimeSettings()


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False)])
@pytest.mark.parametrize("name", ["message_digests", "encrypt"])
def test_protection_can_be_asked_for_in_the_environment(monkeypatch, name, value, expected):
    monkeypatch.setenv(f"HWAWARE_{name.upper()}", value)
    assert getattr(current(), name) is expected
    with hwaware.runtime_settings(**{name: not expected}):
        assert getattr(current(), name) is not expected
    with hwaware.runtime_settings(sends="blocking"):
        assert getattr(current(), name) is expected


def test_an_unknown_setting_is_refused():
    with pytest.raises(TypeError, match="send"):
        hwaware.runtime_settings(send="blocking")


def test_the_old_names_still_work_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"write hwaware\.runtime_settings"):
        using = settings.using
    with using(sends="blocking"):
        assert current().sends == "blocking"
    with pytest.warns(DeprecationWarning, match=r"write hwaware\.StepRecorder"):
        assert timelines.StepRecorder is step_recorder.StepRecorder is hwaware.StepRecorder
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = settings.nothing
