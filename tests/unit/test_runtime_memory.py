"""Accounting for device memory: different arrays once, the fullest device, one clear message."""

from types import SimpleNamespace

import pytest

from hwaware.errors import OutOfDeviceMemoryError
from hwaware.runtime.memory import MemoryAccount, ProgramMemory, live_bytes, program_memory


def array(nbytes):
    return SimpleNamespace(nbytes=nbytes)


def test_an_array_under_two_names_counts_once():
    shared = array(100)
    assert live_bytes([{1: [shared], 2: [array(10)]}, {3: [shared]}]) == 110


def test_the_fullest_device_counts():
    assert live_bytes([{1: [array(1), array(50)], 2: [array(2), None]}]) == 50
    assert live_bytes([]) == 0


@pytest.mark.parametrize(("limit", "fits"), [(175, True), (174, False)])
def test_the_limit_is_exact(limit, fits):
    account = MemoryAccount([limit, 1000])
    account.is_on = True
    needs = ProgramMemory(output_bytes=50, temporary_bytes=25)
    if fits:
        account.check("stage_0", needs, [{1: [array(100)]}])
        assert account.peak_bytes == 175
    else:
        with pytest.raises(OutOfDeviceMemoryError, match=r"stage_0 needs 175 B .*the device has 174 B.* To fix: "):
            account.check("stage_0", needs, [{1: [array(100)]}])


@pytest.mark.parametrize(("limits", "is_on"), [(None, True), ([1], False)])
def test_without_a_limit_nothing_is_refused(limits, is_on):
    account = MemoryAccount(limits)
    account.is_on = is_on
    account.check("stage_0", ProgramMemory(10, 10), [])
    assert account.peak_bytes == 0


def test_results_in_the_memory_of_donated_inputs_cost_nothing():
    stats = SimpleNamespace(output_size_in_bytes=100, alias_size_in_bytes=60, temp_size_in_bytes=5)
    compiled = SimpleNamespace(get_compiled_memory_stats=lambda: stats)
    assert program_memory(compiled) == ProgramMemory(output_bytes=40, temporary_bytes=5)
    assert program_memory(SimpleNamespace()) == ProgramMemory()
