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


def test_a_stage_of_two_devices_is_written_for_shardy_where_jax_has_it():
    recorded_programs.prepare()
    has_shardy = getattr(jax.config, "jax_use_shardy_partitioner", False)
    texts = [stage.program.stablehlo for stage in recorded_programs.stages_of(recorded_programs.CASES["bfloat16"])]
    for text in texts:
        assert ("sdy.sharding" in text, "mhlo.sharding" in text) == (has_shardy, not has_shardy)
    # Replicas keep their own losses, in a region of each device's own.
    assert any(("sdy.manual_computation" if has_shardy else "SPMDFullToShardShape") in text for text in texts)
