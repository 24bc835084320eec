"""What is said of a worker's exception."""

import pytest

from hwaware.ray_cluster import last_line

JAX_FOOTER = (
    "\n--------------------\nFor simplicity, JAX has removed its internal frames from the traceback of the following "
    "exception. Set JAX_TRACEBACK_FILTERING=off to include these."
)


@pytest.mark.parametrize("footer", ["", JAX_FOOTER])
def test_the_reason_is_the_exceptions_line_without_jaxs_footer(footer):
    report = (
        f"Traceback (most recent call last):\n  File ...\nXlaRuntimeError: RESOURCE_EXHAUSTED: out of memory.{footer}"
    )
    assert last_line(RuntimeError(report)) == "XlaRuntimeError: RESOURCE_EXHAUSTED: out of memory"


def test_an_exception_without_words_is_named():
    assert last_line(KeyError()) == "KeyError"
