"""Memory: ZeRO's shares of parameters, gradients and optimizer state, and what they send."""

import pytest

from hwaware.costs.memory import offload_traffic_s, zero_resident_bytes, zero_traffic_bytes
from hwaware.errors import UnusableInputError


def test_zero_keeps_less_and_sends_as_much_until_level_three():
    kept = [zero_resident_bytes(4.0, 4.0, 8.0, 8, level) for level in (0, 1, 2, 3)]
    assert kept == [16, 9, 5.5, 2]
    sent = [zero_traffic_bytes(4.0, 4.0, 8, level) for level in (0, 1, 2, 3)]
    assert sent == [7, 7, 7, 10.5]
    assert zero_resident_bytes(4.0, 4.0, 8.0, 1, 3) == 16
    assert offload_traffic_s(1e9, 1e9, 2e9) == 1
    with pytest.raises(UnusableInputError, match="ZeRO level 4"):
        zero_resident_bytes(1, 1, 1, 1, 4)
