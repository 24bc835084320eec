"""Read the matrix of `nvidia-smi topo -m`: how the devices of a host are connected, without any speed.

On a profile that has links between the devices, the kind of connection becomes a note of the link. No number changes.
Where a profile has no such link, hwaware assumes the nominal rate of the connection and says so:

- NV# is a bond of # NVLinks, 25 GB/s each in one direction. That is NVLink 2 to 4 (Volta to Hopper); NVLink 1 has
  20 GB/s, NVLink 5 has 50 GB/s.
- PIX, PXB, PHB, NODE and SYS are paths over PCIe. The matrix names neither generation nor width, so hwaware takes
  PCIe 3.0 x16.

Source: the legend that nvidia-smi prints; NVIDIA's white papers on the V100, A100 and H100.
"""

from __future__ import annotations

import re
from typing import Dict, List

from hwaware.errors import RecordError
from hwaware.interop.merging import PCIE_BYTES_PER_S
from hwaware.interop.readings import End, FoundDevice, FoundLink, Reading, lines

PROGRAM = "nvidia-smi topo -m"
_FIX = "give the output of: nvidia-smi topo -m."
_NVLINK_BYTES_PER_S = 25e9
_GPU = re.compile(r"GPU(\d{1,4})")
# The end of a launcher's prefix, as in [1,0]<stdout>:GPU0.
_GLUED = re.compile(r"([:>|\])])(?=GPU\d)")
_KIND = re.compile(r"X|SYS|SOC|NODE|PHB|PXB|PIX|PSB|NV(\d{1,2})")
_PATHS = {
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PSB": "one PCIe switch",
    "PHB": "a PCIe host bridge",
    "NODE": "PCIe host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
    "SOC": "the link between sockets",
}


def read(path: str, text: str) -> Reading:
    """Return the connections between the GPUs of one host.

    Raises:
        RecordError: The file has no such matrix of at least two GPUs.
    """
    columns: Dict[int, int] = {}
    kinds: Dict[int, List[str]] = {}
    for line in lines(text):
        words = _GLUED.sub(r"\1 ", line).split()
        first = next((k for k, word in enumerate(words) if _GPU.fullmatch(word)), None)
        if first is None:
            continue
        label = int(words[first][3:])
        if len(words) > first + 1 and _KIND.fullmatch(words[first + 1]):
            if label in kinds:
                raise RecordError(f"{path} has several matrices.", "give one file for each host.")
            kinds[label] = words[first + 1 :]
        elif not columns:
            columns = {int(word[3:]): k for k, word in enumerate(words[first:]) if _GPU.fullmatch(word)}
    found = {
        (source, target): row[place]
        for source, row in kinds.items()
        for target, place in columns.items()
        if source != target and target in kinds and place < len(row) and _KIND.fullmatch(row[place])
    }
    if not found:
        raise RecordError(f"{path} has no matrix of connections between GPUs.", _FIX)
    links = tuple(
        FoundLink(
            End(device=source),
            End(device=target),
            nominal_bytes_per_s=_nominal(kind),
            facts={"connection": _words(kind), "topology_file": path},
        )
        for (source, target), kind in sorted(found.items())
        if kind != "X"
    )
    remarks = (f"{path} has kinds of connections, no speeds; hwaware assumed nominal rates for links without others.",)
    return Reading(PROGRAM, path, tuple(FoundDevice(End(device=k)) for k in sorted(kinds)), links, remarks=remarks)


def _nominal(kind: str) -> float:
    bonded = _KIND.fullmatch(kind)
    number = int(bonded.group(1) or 0) if bonded is not None else 0
    return number * _NVLINK_BYTES_PER_S if number else PCIE_BYTES_PER_S


def _words(kind: str) -> str:
    return f"{kind}: {_PATHS.get(kind, 'NVLink')}"
