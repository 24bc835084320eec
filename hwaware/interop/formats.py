"""Recognise measurement files of other programs, and read each by its importer."""

from __future__ import annotations

import re
from typing import Any, Dict, NamedTuple, Optional, Pattern

from hwaware.errors import RecordError
from hwaware.interop import iperf3, nccl_tests, nvbandwidth, p2p_test, perftest, topo
from hwaware.interop.readings import Documents, Reading, documents, read_text


class Format(NamedTuple):
    """A kind of file: the program that writes it, and a pattern that only its files have."""

    program: str
    pattern: Pattern[str]


# Name of the command -> its format. Where a log has several, the command decides.
FORMATS: Dict[str, Format] = {
    "nccl-tests": Format(
        "nccl-tests",
        re.compile(
            r"#\s+Rank\s+\d+\s[^\n]{0,300}\bdevice\s|Out of bounds values|\b(?:size|bytes)\s+(?:count|N)\s+type\s"
            r"|\b(?:all_reduce|all_gather|reduce_scatter|alltoall|sendrecv|broadcast|reduce)_perf|\"device_hex\"|\"nccl_version\""
        ),
    ),
    "p2p": Format(
        "p2pBandwidthLatencyTest", re.compile(r"P2P \(Peer-to-Peer\) GPU Bandwidth|D\\D|P2P=(?:En|Dis)abled")
    ),
    "nvbandwidth": Format(
        "nvbandwidth", re.compile(r"nvbandwidth Version|\"nvbandwidth\"|Running (?:benchmark )?\w*(?:memcpy|latency)_")
    ),
    "iperf3": Format(
        "iperf3",
        re.compile(
            r"\"(?:sum_received|sum_sent|connecting_to|accepted_connection|test_start|connected)\"|\[ ID\] Interval"
        ),
    ),
    "ib": Format(
        "perftest (ib_write_bw and others)",
        re.compile(
            r"#\s*bytes\s+#\s*iterations|\"test_info\"|\b(?:RDMA_(?:Write|Read)|Send) [\w ]{0,40}(?:BW|Latency) Test"
        ),
    ),
    "topo": Format("nvidia-smi topo -m", re.compile(r"\bGPU\d+[ \t]+(?:X|SYS|NODE|PHB|PXB|PIX|NV\d+)[ \t\n]")),
}


# What the commands need that write the files.
_OPTIONS = {
    "iperf3": " --json",
    "nvbandwidth": ", as text or with --format json",
    "nccl-tests": " (all_reduce_perf and others)",
}


def recognised(text: str) -> Optional[str]:
    """Return the command that reads such a file; None if no importer knows it.

    Example:
        >>> recognised(" #bytes     #iterations    BW peak[MB/sec]"), recognised("hello")
        ('ib', None)
    """
    if re.match(r"\ufffd[\x02-\x05]", text):  # the first bytes of a pickle
        return "alpa-db"
    return next((name for name, one in FORMATS.items() if one.pattern.search(text)), None)


def read(name: str, path: str, op: Optional[str] = None, only: Optional[int] = None) -> Reading:
    """Read one file.

    Args:
        name: A key of `FORMATS`.
        path: The file.
        op: For nccl-tests: the operation, where the file does not say it.
        only: For nccl-tests: the number of the table to take.

    Raises:
        RecordError: The file is of another format, or has nothing that can be used; the message says why.
    """
    text = read_text(path)
    path = path.encode("utf-8", "replace").decode()  # a name that is no text has no place in a profile
    if not FORMATS[name].pattern.search(text):
        _refuse(name, path, text)
    try:
        return _read(name, path, text, op, only)
    except ValueError as error:
        raise RecordError(
            f"{path} has a number that no hardware reaches: {error}.", f"give the output of {FORMATS[name].program}."
        ) from error


def _refuse(name: str, path: str, text: str) -> None:
    """Say which command reads the file."""
    program = FORMATS[name].program
    found = recognised(text)
    if found is not None:
        writer = FORMATS[found].program if found in FORMATS else "Alpa's profiler"
        raise RecordError(
            f"{path} is the output of {writer}, expected that of {program}.",
            f"run `hwaware import {found}` with the other arguments of your command.",
        )
    if '"hwaware.' in text[:200]:
        raise RecordError(
            f"{path} is a file of hwaware itself, expected the output of {program}.",
            "give it to --into, or to hwaware show.",
        )
    written = f"{program}{_OPTIONS.get(name, '')}"
    raise RecordError(f"{path} is not the output of {program}.", f"give the output of {written}.")


def _read(name: str, path: str, text: str, op: Optional[str], only: Optional[int]) -> Reading:
    if name == "nccl-tests":
        return nccl_tests.read(path, text, _documents(text), op, only)
    if name in ("p2p", "topo"):
        importer: Any = p2p_test if name == "p2p" else topo
        return importer.read(path, text)  # type: ignore[no-any-return]
    with_json: Dict[str, Any] = {"nvbandwidth": nvbandwidth, "iperf3": iperf3, "ib": perftest}
    return with_json[name].read(path, text, _documents(text))  # type: ignore[no-any-return]


def _documents(text: str) -> Documents:
    return documents(text) if "{" in text else Documents(())
