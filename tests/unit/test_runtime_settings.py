"""Settings of the runtime: one place, checked, restored."""

import pytest

from hwaware.errors import UnusableInputError
from hwaware.runtime.settings import RuntimeSettings, current, using


def test_settings_hold_inside_the_block_also_after_an_exception():
    inside = []

    def fail():
        with using(sends="blocking"), using(step_limit_s=5.0):
            inside.append(current())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert inside == [RuntimeSettings(sends="blocking", step_limit_s=5.0)]
    assert current() == RuntimeSettings()


@pytest.mark.parametrize("wrong", [{"sends": "later"}, {"receive_limit_s": 0}, {"step_limit_s": float("nan")}])
def test_wrong_values_are_refused_at_once(wrong):
    with pytest.raises(UnusableInputError, match="To fix:"), using(**wrong):
        pass
    assert current() == RuntimeSettings()
