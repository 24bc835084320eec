"""Parts of an array on disk: what is missing is said, and is not whatever lay in memory."""

import numpy as np
import pytest

from hwaware.errors import RecordError
from hwaware.runtime.checkpoints import load_parts, save_parts

WHOLE = np.arange(12, dtype=np.float32).reshape(4, 3)
UPPER, LOWER = (slice(0, 2), slice(None)), (slice(2, 4), slice(None))


def test_parts_of_two_workers_are_read_as_one(tmp_path):
    for host, index in enumerate((UPPER, LOWER)):
        save_parts(str(tmp_path / "a"), None, host, [WHOLE[index]], [index], WHOLE.shape)
    columns = (slice(None), slice(1, 2))
    found = load_parts(str(tmp_path / "a"), [..., columns], WHOLE.shape, np.dtype("float32"))
    np.testing.assert_array_equal(found[0], WHOLE)
    np.testing.assert_array_equal(found[1], WHOLE[columns])


def test_an_array_of_which_a_part_is_missing_is_refused(tmp_path):
    for host in (1, 2):  # twice the same one
        save_parts(str(tmp_path / "a"), None, host, [WHOLE[LOWER]], [LOWER], WHOLE.shape)
    with pytest.raises(RecordError, match=r"holds 6 of the 12 numbers of its array.*To fix: "):
        load_parts(str(tmp_path / "a"), [...], WHOLE.shape, np.dtype("float32"))
