"""Programs are those that were recorded, byte for byte; tests/support/recorded_programs.py compares more of them."""

import jax
import pytest
import recorded_programs

pytestmark = pytest.mark.alpa


@pytest.fixture(scope="module")
def known():
    found = recorded_programs.prepare()
    if jax.__version__ != found["jax"]:
        pytest.skip(f"The programs were recorded with JAX {found['jax']}, and each version lowers in its own way.")
    return found


@pytest.mark.parametrize("name", recorded_programs.QUICK)
def test_stages_are_lowered_as_recorded(name, known):
    assert recorded_programs.stage_digests(name) == known["stages"][name]


def test_layers_are_lowered_as_recorded(known):
    assert recorded_programs.layer_digests() == known["layers"]
