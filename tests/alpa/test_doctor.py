"""doctor against the Alpa that is installed: every override fits, and asking changes nothing here."""

import pytest

from hwaware.activation import patches
from hwaware.cli import _probes

pytestmark = pytest.mark.alpa


def test_every_override_fits_and_none_is_applied():
    applied = [patch.applied for patch in patches()]
    answer = _probes.ask("alpa")
    assert answer.get("problem") is None
    names = [f"{patch.target.module}.{patch.target.name}" for patch in patches()]
    assert [override["function"] for override in answer["overrides"]] == names
    assert [one["problem"] for one in answer["overrides"] if one["needed"] and not one["fits"]] == []
    assert [patch.applied for patch in patches()] == applied


def test_the_devices_that_jax_sees():
    assert _probes.ask("jax")["devices"][0]["platform"] == "cpu"
