"""Change valid files and messages at random, let hwaware read them, and keep each that breaks a reader.

    make fuzz FUZZ=100000              # so many cases, from seed 0
    make fuzz FUZZ=600s SEED=1000000   # for 600 seconds, from another seed

Case number N is the same everywhere: it depends on its number alone. A reader breaks if it ends by an exception
instead of a message, takes more than 10 s or more than 1 GiB of memory, or runs what a file names.

Three kinds of readers take turns:

- hwaware's commands read changed files.
- hwaware's `alpa.restore_checkpoint` reads folders with one changed file, in hwaware's format and in Alpa's.
- A worker's mailbox hears changed bytes of a valid connection. The caller knows the program's secret, or does not.

Workers are forked from one process that has imported and compiled everything. They run the commands inside, without a
program for each. A worker that hangs is ended from outside, since a loop in C obeys no signal.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import importlib.util
import io
import json
import multiprocessing
import os
import pickle
import pickletools
import random
import resource
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from hwaware import greeting, transport
from hwaware.errors import RecordError
from hwaware.runtime.channels import Incoming

MOST_CPU_S = 10.0
MOST_BYTES = 1 << 30
ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "fuzz"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Events of the interpreter that tell that a file ran something.
_RUNNING = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "pickle.find_class",
}

NUMBERS = [
    0, -1, 1, 2, 1e-300, 5e-324, -1e-9, 1e-15, 1e-3, 1e6, 1e8, 1e9, 10**9, 10**9 + 1, 1e21, 1e30, 1e50, 1e299,
    1e308, -1e308, 1.7e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**400, -(10**400), 0.1 + 0.2, -0.0,
]  # fmt: skip
OTHERS = [
    None, True, False, "", "a:0", "a", "x" * 5000, "\x00", "\x1b[2J", "\ud800", "é" * 10, "NaN", "1e9", "[/]", "[bold]",
    "{0}", "%s", "../../x", [], {}, [[]], [None], {"": None}, {"a": {"a": 1}}, [1e308],
    "dance", "all-reduce", "float32", "1,1", "0,0",
]  # fmt: skip


def nasty(random: random.Random) -> Any:
    """A value that few readers expect."""
    kind = random.random()
    if kind < 0.5:
        return random.choice(NUMBERS)
    if kind < 0.9:
        return copy.deepcopy(random.choice(OTHERS))
    value: Any = 1
    for _ in range(random.choice((10, 31, 33, 200, 900))):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def places(value: Any, path: Tuple[Any, ...] = ()) -> List[Tuple[Any, ...]]:
    """Every place inside the document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: List[Tuple[Any, ...]] = []
    for key, inner in items:
        found.append((*path, key))
        found.extend(places(inner, (*path, key)))
    return found


def change_document(document: Any, random: random.Random) -> None:
    """Change one place of a document of lists and dictionaries."""
    path = random.choice(places(document) or [()])
    if not path:
        return
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    key, value = path[-1], holder[path[-1]]
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    how = random.randrange(8)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        holder.extend(copy.deepcopy(value) for _ in range(random.choice((1, 2, 50))))
    elif how == 2 and numeric and abs(value) < 1e200:
        holder[key] = value * 10.0 ** random.randint(-40, 40)
    elif how == 3 and numeric:
        holder[key] = -value
    elif how == 4:
        other = random.choice(places(document))
        inner = document
        for step in other:
            inner = inner[step]
        holder[key] = copy.deepcopy(inner)
    elif how == 5 and isinstance(holder, dict):
        holder[random.choice((str(key) * 2, "", "samples", "environment", "reference_s"))] = holder.pop(key)
    elif numeric and how == 6:
        holder[key] = random.choice(NUMBERS)
    else:
        holder[key] = nasty(random)


def change_bytes(data: bytes, random: random.Random) -> bytes:
    """Change some bytes, without regard to what they mean."""
    at, length = random.randrange(len(data) + 1), random.choice((0, 1, 2, 8, 100))
    new = random.choice((b"", b"\x00", b"1e999", b"-", b"9" * 400, b"[" * 2000, b"\xff\xfe", b"\n", b" ", b"\xf0\x9f"))
    return random.choice((data[:at] + new + data[at + length :], data[:at], data + data[:at]))


def changed_json(document: Any, random: random.Random) -> bytes:
    """The document as JSON with one to four changes."""
    changed = copy.deepcopy(document)
    for _ in range(random.randint(1, 4)):
        change_document(changed, random)
    data = json.dumps(changed).encode()
    return change_bytes(data, random) if random.random() < 0.1 else data


def changed_text(text: str, random: random.Random) -> bytes:
    """The text with changed words, lines or bytes."""
    lines = text.splitlines()
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(lines)) if lines else 0
        how = random.randrange(5)
        if not lines or how == 0:
            lines.insert(at, str(nasty(random)).replace("\n", " ")[:2000])
        elif how == 1:
            del lines[at]
        elif how == 2:
            lines[at:at] = [lines[at]] * random.choice((1, 2, 1000))
        else:
            words = lines[at].split(" ")
            value = nasty(random)
            words[random.randrange(len(words))] = (
                str(value)[:1000] if not isinstance(value, int) or abs(value) < 1e99 else "9" * 400
            )
            lines[at] = " ".join(words)
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return change_bytes(data, random) if random.random() < 0.2 else data


def _opcodes() -> List[bytes]:
    """Pieces of pickles that try to run, to reserve, or never to end."""
    long = (1 << 62).to_bytes(8, "little")
    return [
        b"cfuzz_sentinel\nran\n)R", b"cfuzz_sentinel\nran\n)\x81", b"(ifuzz_sentinel\nran\n",
        b"(cfuzz_sentinel\nran\no", b"cos\nsystem\n(X\x04\x00\x00\x00truetR",
        b"\x8c\x0dfuzz_sentinel\x8c\x03ran\x93)R", b"Q", b"Px\n", b"\x82\x01", b"\x8b\xff\xff\xff\x7f",
        b"\x95" + long, b"\x8e" + long, b"\x8d" + long, b"\x96" + long, b"r\xff\xff\xff\x7f", b"0", b"1", b"("
        * 100, b"]" * 1000, b"\x85" * 1000, b"q\x00h\x00\x86" * 40, b"}", b"u", b"s", b"b", b"R", b"\x81",
        b"t", b"l", b"d", b"e", b"I" + b"9" * 5000 + b"\n", b"ccollections\ndefaultdict\n",
        b"cnumpy\ndtype\n", b"calpa.mesh_profiling\nMeshProfilingResult\n",
        b"cnumpy.core.multiarray\nscalar\n", b"N", b"K\x01", b"G\x7f\xf0\x00\x00\x00\x00\x00\x00", b"\x8f",
        b"\x94", b"2", b"h\x00", b"h\x01",
    ]  # fmt: skip


def changed_pickle(entries: Any, random: random.Random) -> bytes:
    """A database with changed values, or with changed opcodes."""
    if random.random() < 0.5:
        changed = copy.deepcopy(entries)
        table = random.choice(list(changed.values()))
        name = random.choice(list(vars(table)))
        value: Any = nasty(random)
        held = getattr(table, name)
        if isinstance(held, dict) and held and random.random() < 0.8:
            key = random.choice(list(held))
            how = random.randrange(4)
            if how == 0:
                held[key] = value
            elif how == 1 and held[key]:
                held[key][random.randrange(len(held[key]))] = (random.choice(NUMBERS), random.choice(NUMBERS))
            elif how == 2:
                held[((0, 0),), "f32"] = held.pop(key)
            else:
                held[tuple((k,) for k in range(random.choice((0, 1, 3)))), random.choice(("f32", "x"))] = held[key]
        else:
            setattr(table, name, value)
        shape = random.choice([(1, 1), (1, 2), (2, 2), (4096, 1), (10**9, 1), (-1, -1), (512, 8), ("1", 1), (1,)])
        if random.random() < 0.3:
            changed["default", shape] = table
        return pickle.dumps(changed, protocol=random.choice((0, 1, 2, 3, 4, 5)))
    return changed_opcodes(pickle.dumps(entries, protocol=random.choice((0, 1, 2, 4))), random)


def changed_opcodes(data: bytes, random: random.Random) -> bytes:
    """Change the opcodes of a pickle."""
    starts = [at for _, _, at in pickletools.genops(data)]
    pieces = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)])]
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(pieces))
        how = random.randrange(4)
        if how == 0:
            pieces.insert(at, random.choice(_opcodes()))
        elif how == 1:
            del pieces[at]
            pieces = pieces or [b"."]
        elif how == 2:
            pieces[at:at] = pieces[at : at + random.choice((1, 5, 50))] * random.choice((1, 3, 100))
        else:
            pieces[at] = change_bytes(pieces[at], random)
    return b"".join(pieces)


def changed_pieces(pieces: List[bytes], random: random.Random) -> bytes:
    """Change one to three pieces of what a caller sends: their bytes, lengths, order and number."""
    pieces = list(pieces)
    for _ in range(random.randint(1, 3)):
        at, how = random.randrange(len(pieces)), random.randrange(6)
        if how == 0:
            pieces[at] = change_bytes(pieces[at], random)
        elif how == 1:
            pieces[at:at] = pieces[random.randrange(len(pieces)) :][: random.choice((1, 3, 6))]
        elif how == 2:
            del pieces[at : at + random.choice((1, 3))]
            pieces = pieces or [b""]
        elif how == 3:
            pieces[at] = random.randbytes(len(pieces[at]))
        elif how == 4:
            lengths = [0, 1, 2**16, 2**16 + 1, 2**26 - 2000, 2**31, 2**32 - 1, 2**38, 2**38 + 1, 2**63, 2**64 - 1]
            pieces[at] = struct.pack("<IQ", random.choice((0, 1, 8, 12, 2**16, 2**32 - 1)), random.choice(lengths))
        else:
            key = random.choice(
                (b"!failure", b"!bye", b"g|0.0>1.0#1", b"g|0.0>1.0#9", b"ready|g|0.0>1.0#1", b"\xff", b"")
            )
            payload = random.choice((b"", b"x" * 70000, bytes(8), b"\x1b[2J\xff"))
            pieces.insert(at, struct.pack("<IQ", len(key), len(payload)) + key + payload)
    return b"".join(pieces)


class MeshProfilingResult:
    """As Alpa's, for pickles that name it."""


def _database() -> Dict[Any, MeshProfilingResult]:
    made = {}
    for shape, groups in (((1, 1), []), ((2, 2), [((0, 1, 2, 3),), ((0, 1), (2, 3))])):
        table = MeshProfilingResult()
        for op in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"):
            curves = collections.defaultdict(list)
            for group in groups:
                curves[group, "f32"] = [(0, 1e-5), (1024, 2e-5), (1 << 20, 1e-3), (1 << 30, float("inf"))]
            setattr(table, f"{op}_cost_dict", curves)
        table.dot_cost_dict = {((), "f32"): [(0, 0.0), (1e9, 1e-3), (1e12, 1.0)]}
        table.available_memory_per_device = 1 << 34
        made["default", shape] = table
    return made


NCCL = """# nThread 1 nGpus 2 minBytes 1024 maxBytes 2048 step: 2(factor) warmup iters: 5 iters: 20
# Collective test starting: all_reduce_perf
# Using devices
#  Rank  0 Group  0 Pid 6899 on a device  0 [0000:04:00] Some GPU
#  Rank  1 Group  0 Pid 6900 on b device  0 [0000:05:00] Some GPU
#                                                out-of-place                    in-place
#       size         count    type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256   float     sum      -1    10.00    0.10    0.15      0    11.00    0.09    0.14      0
        2048           512   float     sum      -1    12.50    0.16    0.25      0    13.00    0.16    0.24      0
# Out of bounds values : 0 OK
"""


class Seeds(NamedTuple):
    """Valid files, by kind, as documents."""

    documents: Dict[str, Any]
    database: Any
    texts: Dict[str, List[str]]


def seeds() -> Seeds:
    """Make a valid document of each kind, with all optional fields that a reader uses."""
    from builders import card, chain, cluster, workload

    from hwaware import evaluate, simulate
    from hwaware.cluster import Collective, LinkSample
    from hwaware.records import rebuilt

    profile = cluster({"a": 2, "b": 1}, cards=(card("a:0", "a:1"),), memory_bytes=1 << 34, kind="cpu")
    points = (LinkSample(bytes=1e3, seconds=1e-3), LinkSample(bytes=1e6, seconds=0.5))
    profile = rebuilt(
        profile, collectives=(Collective(op="all-reduce", devices=("a:0", "b:0"), dtype="float32", points=points),)
    )
    model, placed = workload(3), chain("a:0", "a:1", "b:0")
    made = {
        "cluster": json.loads(profile.to_json()),
        "workload": json.loads(model.to_json()),
        "plan": json.loads(placed.to_json()),
        "timeline": json.loads(simulate(placed, model, profile).to_json()),
        "trace": simulate(placed, model, profile).trace(),
    }
    made["cluster"]["environment"] = {
        "reference_s": 0.025,
        "reference_kernel": "x",
        "hosts": {"a": {"busy": 0.1}},
        "command": ["x"],
    }
    made["cluster"]["devices"][0].update(pass_s=1e-4, sum_bytes_per_s=1e9, head_start_s=1e-3, samples={"x": [1.0]})
    made["cluster"]["links"][0].update(samples=[{"bytes": 10.0, "seconds": 1e-3}], evidence={"x": 1})
    made["cluster"]["flags"] = [{"kind": "slow", "subjects": ["a", "b"], "what": "slow", "only": ["a+b"]}]
    layer = made["workload"]["layers"][0]
    times = {"forward_s": 0.1, "backward_s": 0.2, "update_s": 0.1, "deviation_s": 0.01, "memory_bytes": 1e6}
    layer.update(
        measured={"cpu": {"1,1": times, "2,1": times}}, gradient_bytes=8.0, optimizer_bytes=8.0, batch_bytes=8.0
    )
    layer.update(temporary_bytes=8.0, tensor_parallel_bytes=8.0, tensor_parallel_collectives=2.0, parameter_bytes=8.0)
    made["plan"].update(
        objective_s=10.0, bound_s=9.0, search_s=1.0, predicted_step_s=evaluate(placed, model, profile).step_s
    )
    stage = {"compute_s": 1.0, "receive_s": -0.1, "gradient_sync_s": 0.0, "memory_bytes": 1e6}
    made["plan"]["stages"][0].update(stage)
    mapping = {
        "plan": made["plan"],
        "predicted_step_s": 9.0,
        "step_s": [9.0] * 7,
        "loss": [2.0, 1.0],
        "reference_s": [0.1] * 7,
    }
    mapping.update(
        slowdowns={"cpu": [1.0] * 7}, pipeline_s=[8.0] * 7, starts=[1] * 4 + [2] * 3, timeline=made["timeline"]
    )
    about = {
        "time": "t",
        "profile_reference_s": 0.1,
        "load_average_during": [1.0],
        "versions": {"x": "1"},
        "testbed": {"shaped": {"a": True}},
    }
    result = {"schema": "hwaware.benchmark", "schema_version": 1, "environment": about, "scenario": "s", "model": "m"}
    result.update(
        num_microbatches=4,
        repeats=4,
        mappings=[{"name": "hwaware", **mapping}, {"name": "alpa", "hosts": ["a"], **mapping}],
    )
    result.update(
        unmeasured=[{"name": "even", "reason": "r"}], alpa_orders=[{"hosts": ["a", "b"], "predicted_step_s": 9.0}]
    )
    result.update(
        single_device_loss=[2.0, 1.0], profile=made["cluster"], workload=made["workload"], ideal_step_s=8.0, notes=["n"]
    )
    made["result"] = result
    made["partial"] = {**made["cluster"], "schema": "hwaware.partial_cluster"}
    return Seeds(made, _database(), _samples())


Change = Callable[[random.Random], bytes]


class Case(NamedTuple):
    """One changed file and the command that reads it."""

    kind: str
    data: bytes
    command: List[str]


# Kind of file -> commands; FILE is the changed file, GOOD/x.json a valid one, OUT a file to write.
COMMANDS: Dict[str, List[str]] = {
    "cluster": [
        "show FILE", "show FILE --json", "compare GOOD/cluster.json FILE", "compare FILE GOOD/cluster.json",
        "export alpa-db FILE -o OUT",
        "evaluate FILE GOOD/workload.json GOOD/plan.json", "simulate FILE GOOD/workload.json GOOD/plan.json -o OUT",
        "simulate FILE GOOD/workload.json GOOD/plan.json -o OUT --sends blocking",
        "plan FILE GOOD/workload.json --microbatches 4 --solver even -o OUT",
        "import nccl-tests GOOD/nccl.txt --into FILE -o OUT",
        "plan FILE GOOD/workload.json --microbatches 4 --time-limit 0.2 -o OUT",
        "plan FILE GOOD/workload.json --microbatches open --global-batch 8 --time-limit 0.2 -o OUT",
    ],
    "workload": [
        "show FILE", "show FILE --json", "evaluate GOOD/cluster.json FILE GOOD/plan.json",
        "simulate GOOD/cluster.json FILE GOOD/plan.json -o OUT",
        "plan GOOD/cluster.json FILE --microbatches 4 --solver even -o OUT",
        "plan GOOD/cluster.json FILE --microbatches 4 --solver alpa -o OUT",
        "plan GOOD/cluster.json FILE --microbatches 4 --time-limit 0.2 -o OUT",
        "plan GOOD/cluster.json FILE --microbatches open --global-batch 8 --time-limit 0.2 -o OUT",
    ],
    "plan": [
        "show FILE", "show FILE --json", "evaluate GOOD/cluster.json GOOD/workload.json FILE",
        "simulate GOOD/cluster.json GOOD/workload.json FILE -o OUT",
        "simulate GOOD/cluster.json GOOD/workload.json FILE -o OUT --sends blocking",
    ],
    "result": [
        "show FILE", "show FILE --json", "compare FILE GOOD/result.json", "compare GOOD/result.json FILE --json",
    ],
    "timeline": ["show FILE", "show FILE --json"],
    "trace": ["show FILE", "show FILE --json"],
    "partial": ["show FILE", "show FILE --json"],
}  # fmt: skip
# Pictures take half a second each.
RARE: Dict[str, List[str]] = {
    "cluster": ["show FILE --plot OUT.svg"],
    "workload": ["show FILE --plot OUT.svg"],
    "plan": ["show FILE --plot OUT.svg --cluster GOOD/cluster.json --workload GOOD/workload.json --picture timeline"],
    "result": ["show FILE --html OUT.html", "show FILE --plot OUT.svg"],
    "timeline": ["show FILE --plot OUT.svg"],
}
_RARELY = 0.01


def importers() -> Dict[str, bool]:
    """Every command of `hwaware import`, and True for those that add to a profile (--into)."""
    import importlib

    group = importlib.import_module("hwaware.cli.import").command
    return {name: any(one.name == "into" for one in found.params) for name, found in group.commands.items()}


class Fuzzer:
    """Make and run cases; `good` is a folder for valid files and for the changed one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seeds = seeds()
        for name, document in self.seeds.documents.items():
            (folder / f"{name}.json").write_text(json.dumps(document))
        (folder / "nccl.txt").write_text(NCCL)
        self._name_alpas_class()
        self.folders = {}
        for name, make in CHECKPOINTS.items():
            shutil.rmtree(folder / name, ignore_errors=True)
            self.folders[name] = make(folder / name)
        (folder / SECRET).write_text("of nobody's business")
        self.kinds = [*COMMANDS, *(f"import {name}" for name in importers()), *CHECKPOINTS, *CALLERS]

    @staticmethod
    def _name_alpas_class() -> None:
        """Let pickle write the name that Alpa's files have, and watch for files that run something."""
        alpa, sentinel = types.ModuleType("alpa.mesh_profiling"), types.ModuleType("fuzz_sentinel")
        MeshProfilingResult.__module__ = "alpa.mesh_profiling"
        alpa.MeshProfilingResult = MeshProfilingResult  # type: ignore[attr-defined]
        sentinel.ran = lambda *_: _ran.append("fuzz_sentinel.ran")  # type: ignore[attr-defined]
        sys.modules.setdefault("alpa", types.ModuleType("alpa"))
        sys.modules["alpa.mesh_profiling"], sys.modules["fuzz_sentinel"] = alpa, sentinel

    def case(self, number: int) -> Case:
        """Return the case of that number."""
        usual = sys.getrecursionlimit()
        sys.setrecursionlimit(10_000)  # to copy deep values; commands run with the usual limit
        try:
            return self._case(random.Random(number))
        finally:
            sys.setrecursionlimit(usual)

    def _case(self, chance: random.Random) -> Case:
        kind = chance.choice(self.kinds)
        if kind in CALLERS:  # the connection decides what there is to change
            return Case(kind, b"%d" % chance.getrandbits(64), [])
        if kind in CHECKPOINTS:
            name = chance.choice(sorted(self.folders[kind]))
            return Case(kind, changed_part(kind, name, self.folders[kind][name], chance), [name])
        if not kind.startswith("import "):
            rarely = chance.random() < _RARELY and kind in RARE
            command = chance.choice((RARE if rarely else COMMANDS)[kind])
            return Case(kind, changed_json(self.seeds.documents[kind], chance), self._words(command))
        name = kind.partition(" ")[2]
        into = " --into GOOD/cluster.json" if importers()[name] and chance.random() < 0.3 else ""
        return Case(kind, self._foreign(name, chance), self._words(f"import {name} FILE{into} -o OUT"))

    def _foreign(self, name: str, chance: random.Random) -> bytes:
        if name == "alpa-db":
            return changed_pickle(self.seeds.database, chance)
        text = chance.choice(self.seeds.texts[name])
        if text.lstrip()[:1] == "{" and chance.random() < 0.7:
            return changed_json(json.loads(text), chance)
        return changed_text(text, chance)

    def _words(self, command: str) -> List[str]:
        places = {"FILE": str(self.folder / "changed"), "OUT": str(self.folder / "out"), "GOOD/": f"{self.folder}/"}
        words = []
        for word in command.split():
            for short, place in places.items():
                word = word.replace(short, place) if short in word else word
            words.append(word)
        return words

    def run(self, case: Case) -> Optional[str]:
        """Run a case in this process; return what broke, or None."""
        if case.kind in CALLERS:
            chance = random.Random(case.data)
            return call(case.kind, lambda pieces: changed_pieces(pieces, chance))
        if case.kind in CHECKPOINTS:
            return self._restore(case)
        from click.testing import CliRunner

        from hwaware.cli import main

        (self.folder / "changed").write_bytes(case.data)
        _ran.clear()
        _watching[:] = [case.kind == "import alpa-db"]
        outcome = CliRunner().invoke(main, case.command)
        _watching[:] = [False]
        if _ran:
            return f"ran {_ran[0]}"
        if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
            return "".join(traceback.format_exception(*outcome.exc_info))
        if outcome.exit_code not in (0, 1, 2):
            return f"exit code {outcome.exit_code}: {outcome.output[-2000:]}"
        if outcome.exit_code and ("To fix:" not in outcome.output or "Traceback" in outcome.output):
            return f"no remedy: {outcome.output[-2000:]}"
        if len(outcome.output) > 2_000_000:
            return f"{len(outcome.output)} characters of output"
        return None

    def _restore(self, case: Case) -> Optional[str]:
        """Restore the whole state from a folder with one changed file."""
        from hwaware.patching.checkpoints import restored

        folder, (name,) = self.folder / case.kind, case.command
        (folder / name).write_bytes(case.data)
        _ran.clear()
        _watching[:] = [True]
        try:
            restored(str(folder), STEP, STATE, keep_unread=True)
        except RecordError as error:
            if "To fix:" not in str(error):
                return f"no remedy: {error}"
        finally:
            _watching[:] = [False]
            (folder / name).write_bytes(self.folders[case.kind][name])
        return f"ran {_ran[0]}" if _ran else None


STEP, STATE = 4, {"w": None, "v": {"rate": None, "name": None}, "b": None, "e": {}}
SECRET = "secret"


def _hwawares(folder: Path) -> Dict[str, bytes]:
    """Write a checkpoint in hwaware's format; return its files, by their names in the folder."""
    import numpy

    from hwaware.runtime import checkpoint_folder
    from hwaware.runtime.checkpoints import box_of, write_arrays
    from hwaware.runtime.manifests import Manifest, Part, SavedArray, SavedValue, ShardFile

    unfinished = checkpoint_folder.begin(str(folder), STEP)
    # The same name each time: a case depends on its number alone.
    os.rename(unfinished.path, folder / f"step_{STEP}.{0:016x}")
    unfinished = unfinished._replace(name=f"step_{STEP}.{0:016x}")
    whole = numpy.arange(12, dtype="float32").reshape(4, 3)
    files, arrays = [], []
    for path, dtype, rows in (("w", "float32", (slice(0, 2), slice(2, 4))), ("b", "bfloat16", (slice(0, 4),))):
        parts = []
        for row in rows:
            block = whole[row] if dtype == "float32" else whole[row].astype("uint16")
            name, box = f"{len(files)}.bin", box_of((row, slice(None)), whole.shape)
            (written,) = write_arrays(os.path.join(unfinished.path, name), [block])
            files.append(ShardFile(name=name, bytes=written.bytes))
            parts.append(Part(file=name, start=box.start, shape=box.shape, **written._asdict()))
        arrays.append(SavedArray(path=(path,), dtype=dtype, shape=whole.shape, parts=tuple(parts)))
    values = (SavedValue.of(("v", "rate"), 0.5), SavedValue.of(("v", "name"), "a"))
    manifest = Manifest(
        step=STEP, folder=unfinished.name, files=tuple(files), arrays=tuple(arrays), values=values, empty=(("e",),)
    )
    checkpoint_folder.commit(unfinished, manifest)
    return _files(folder)


def _alpas(folder: Path) -> Dict[str, bytes]:
    """Write a checkpoint in Alpa's format; return its files, by their names in the folder."""
    import msgpack
    import numpy

    whole = numpy.arange(12, dtype="float32").reshape(4, 3)
    for name, rows in (("state.w", (slice(0, 2), slice(2, 4))), ("state.b", (slice(0, 4),))):
        (folder / name).mkdir(parents=True)
        for worker, row in enumerate(rows):
            said = {"global_shape": whole.shape, "dtype": whole.dtype, "shard_names": [f"shard_{worker}.0"]}
            said["shard_indices"] = None if len(rows) == 1 else [(row, slice(None))]
            numpy.save(folder / name / f"shard_{worker}.0.npy", whole[row])
            os.rename(folder / name / f"shard_{worker}.0.npy", folder / name / f"shard_{worker}.0")
            (folder / name / f"metadata_{worker}").write_bytes(pickle.dumps(said))
    state = {"w": "state.w", "b": "state.b", "v": {"rate": 0.5, "name": b"a"}, "e": {}}
    (folder / f"checkpoint_{STEP}").write_bytes(msgpack.packb(state))
    return _files(folder)


CHECKPOINTS = {"checkpoint of hwaware": _hwawares, "checkpoint of Alpa": _alpas}


def _files(folder: Path) -> Dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed_part(kind: str, name: str, data: bytes, random: random.Random) -> bytes:
    """Change a file of a checkpoint, mostly as somebody does who knows its format."""
    if random.random() < 0.2:
        return change_bytes(data, random)
    if "metadata" in name:
        said = pickle.loads(data)
        key = random.choice(list(said))
        if random.random() < 0.5:
            return changed_opcodes(pickle.dumps(said, protocol=random.choice((0, 2, 4))), random)
        names = [f"../../{SECRET}", "none", "shard_0.0", "metadata_0", ".", "", "\x00", 5]
        indices = [slice(0, 2), slice(None), slice(-(10**30), 10**30), slice("a", None), ..., 7, slice(0, 4, 3)]
        said[key] = random.choice((
            nasty(random), tuple(random.choice(NUMBERS) for _ in range(random.randrange(4))),
            [random.choice(names) for _ in range(random.randrange(3))],
            [tuple(random.choice(indices) for _ in range(random.randrange(4)))],
        ))  # fmt: skip
        return pickle.dumps(said)
    if not name.startswith("checkpoint"):
        header = (b"(2, 3)", b"(4, 3)", b"'<f4'", b"False")
        values = (b"(10**9,)", b"(-1, -3)", b"'|O'", b"'<f8'", b"True", b"(999999999999, 3)", b"None", b"__import__")
        return data.replace(random.choice(header), random.choice(values))
    if kind == "checkpoint of Alpa":
        import msgpack

        state = msgpack.unpackb(data)
        change_document(state, random)
        try:
            return bytes(msgpack.packb(state))
        except (ValueError, TypeError, OverflowError):  # what no msgpack holds
            return change_bytes(data, random)
    from hwaware.runtime.manifests import digest_of

    document = json.loads(data)
    document["digest"] = "0" * 64
    changed = changed_json(document, random)
    return changed.replace(b"0" * 64, digest_of(changed).encode(), 1)


CALLERS = {"a stranger calls": (False, False), "a member calls": (True, False), "a member calls, digests": (True, True)}
HOST, CALL_LIMIT_S, MOST_WAITING_BYTES = "127.0.0.1", 10.0, 64 << 20


def _exchange(credentials: Any, address: Tuple[str, int], nonce: bytes) -> Tuple[List[bytes], Dict[str, bytes]]:
    """Return the pieces of all that a caller sends, and its messages by their keys."""
    name, own = b"stage 0", b"n" * greeting.NONCE_BYTES
    fields = greeting._fields(address, nonce, own, name)
    pieces = [greeting.MAGIC, own, struct.pack("<H", len(name)), name, credentials.proof(greeting._CALLER, fields)]
    seal = greeting._seal(credentials, fields)
    messages = {f"g|0.0>1.0#{number}": bytes([number]) * size for number, size in ((1, 8), (2, 0), (3, 5000))}
    for key, payload in [*messages.items(), ("!bye", b"")]:
        head = struct.pack("<IQ", len(key), len(payload))
        pieces += [head, key.encode(), payload]
        if seal is not None:
            pieces.append(seal.digest(memoryview(head + key.encode()), memoryview(payload)))
    return pieces, messages


def call(kind: str, change: Callable[[List[bytes]], bytes]) -> Optional[str]:
    """Say changed bytes to a mailbox as training uses it; return what broke, or None."""
    knows, digests = CALLERS[kind]
    credentials = greeting.Credentials(greeting.new_secret(), "fuzz", digests)
    raised: List[str] = []
    hook, threading.excepthook = threading.excepthook, lambda given: raised.append(repr(given.exc_value))
    full_s, transport._FULL_LIMIT_S = transport._FULL_LIMIT_S, 0.1
    box = transport.Mailbox(HOST, credentials, bound=8, peers_stay=True, most_bytes=MOST_WAITING_BYTES)
    try:
        incoming = Incoming(blocking=False)
        incoming.join("g", 1, 2)
        box.admit = incoming.admit
        with box.patiently(), socket.create_connection((HOST, box.port), CALL_LIMIT_S) as caller:
            nonce = caller.recv(1000)[len(greeting.MAGIC) :]
            own = credentials if knows else greeting.Credentials(bytes(32), "fuzz", digests)
            pieces, messages = _exchange(own, (HOST, box.port), nonce)
            said = change(pieces)
            try:
                caller.sendall(said)
                caller.shutdown(socket.SHUT_WR)
                while caller.recv(1 << 16):
                    pass
            except socket.timeout:
                return f"the mailbox did not hang up within {CALL_LIMIT_S:g} s"
            except OSError:  # it had heard enough
                pass
        # A receiver that an error ends hangs up before it reports the error.
        for thread in threading.enumerate():
            if thread.name == "hwaware-receive":
                thread.join(CALL_LIMIT_S)
        failure = box.failure or ""
        if raised or "allocate" in failure:
            return f"{raised} {failure}"
        if not knows:
            if failure or box.pending():
                return f"a stranger's words count: {failure!r}, {box.pending()} messages"
            with contextlib.closing(transport.Connection((HOST, box.port), credentials, CALL_LIMIT_S)) as member:
                member.send("g|0.0>1.0#1", b"1")
            box.take("g|0.0>1.0#1", CALL_LIMIT_S, 1)
        found = {key: bytes(payload) for key, (payload, _) in box._messages.items()}
        if digests and not found.items() <= messages.items():
            return "a changed message has passed"
        if knows and said == b"".join(pieces) and (failure, found) != ("", messages):
            return f"a valid message has not arrived: {failure!r}"
        return None
    finally:
        box.close()
        threading.excepthook, transport._FULL_LIMIT_S = hook, full_s


_BROKE = 3
_ran: List[str] = []
_watching: List[bool] = [False]


def _samples() -> Dict[str, List[str]]:
    """Valid files of each importer of text, as the tests of the importers have them."""
    spec = importlib.util.spec_from_file_location("samples", ROOT / "tests" / "unit" / "test_import_measurements.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.TEXTS)


def _watch(event: str, arguments: Any) -> None:
    if _watching[0] and (event in _RUNNING or (event == "open" and str(arguments[0]).endswith(f"/{SECRET}"))):
        _ran.append(f"{event} {arguments!r:.100}")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _work(
    make: Callable[[Path], Fuzzer], at: Any, first: int, last: Optional[int], until: float, step: int, results: Any
) -> None:
    """Run every `step`-th case in a forked worker; `at` tells the parent which one runs."""
    warnings.simplefilter("ignore")
    sys.stderr = sys.stdout = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = make(Path(folder))
        sys.addaudithook(_watch)
        _limit_memory()
        number, broken = first, None
        while (last is None or number < last) and time.monotonic() < until:
            at.value = number
            case = fuzzer.case(number)
            try:
                broken = fuzzer.run(case)
            except BaseException as error:  # noqa: BLE001  # what a command does not catch is what is sought
                broken = f"{type(error).__name__}: {error}"
            if broken is not None:
                results.put((number, broken))
                break  # a fresh worker goes on: this one may have little memory left
            number += step
        at.value = number
    results.close()
    results.join_thread()
    os._exit(0 if broken is None else _BROKE)


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


class Outcome(NamedTuple):
    """How many cases ran, and number and report of those that broke."""

    cases: int
    broken: List[Tuple[int, str]]


def fuzz(
    count: Optional[int],
    seed: int = 0,
    limit_s: float = 1e9,
    say: Callable[[str], None] = lambda _: None,
    processes: int = 2,
) -> Outcome:
    """Run `count` cases, or as many as fit into the time, in forked workers."""
    context = multiprocessing.get_context("fork")
    results, broken, until = context.Queue(), [], time.monotonic() + limit_s
    last = None if count is None else seed + count
    workers = []

    def begin(first: int) -> Tuple[Any, Any, List[float]]:
        at = context.Value("q", first)
        process = context.Process(target=_work, args=(Fuzzer, at, first, last, until, processes, results), daemon=True)
        process.start()
        return process, at, [first - 1, 0.0]

    def note(number: int, report: str) -> None:
        broken.append((number, report))
        say(f"case {number}: {report.strip().splitlines()[-1][:200]}")

    workers = [begin(seed + k) for k in range(processes)]
    done = 0
    while workers:
        time.sleep(0.1)
        while not results.empty():
            note(*results.get())
        for index, (process, at, (seen, since_s)) in enumerate(list(workers)):
            number, cpu_s = at.value, _cpu_s(process.pid)
            if number != seen:
                workers[index][2][:] = [number, cpu_s]
            hangs = number == seen and cpu_s - since_s > MOST_CPU_S
            if process.is_alive() and not hangs:
                continue
            if hangs or process.exitcode != 0:
                process.kill()
                number = at.value
                if hangs:
                    note(number, f"computed for more than {MOST_CPU_S:g} s")
                elif process.exitcode != _BROKE:
                    note(number, f"the worker ended: {process.exitcode}")
                number += processes
                if (last is None or number < last) and time.monotonic() < until:
                    workers[index] = begin(number)
                    continue
            process.join()
            done = max(done, number - seed)
            workers[index] = None  # type: ignore[call-overload]
        workers = [one for one in workers if one is not None]
    while not results.empty():
        note(*results.get())
    return Outcome(done if count is None else count, sorted(broken))


def warm_up() -> None:
    """Import and compile in the parent what workers need, and require that every reader accepts what is valid."""
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder))
        for kind, files in fuzzer.folders.items():
            for name, data in files.items():
                report = fuzzer.run(Case(kind, data, [name]))
                if report is not None:
                    raise AssertionError(f"{name} of a {kind}: {report}")
        for kind in CALLERS:
            report = call(kind, b"".join)
            if report is not None:
                raise AssertionError(f"{kind}: {report}")
        for kind in [*COMMANDS, *(f"import {name}" for name in importers())]:
            name = kind.partition(" ")[2]
            if name == "alpa-db":
                data = pickle.dumps(fuzzer.seeds.database)
            elif name:
                data = fuzzer.seeds.texts[name][0].encode()
            else:
                data = json.dumps(fuzzer.seeds.documents[kind]).encode()
            for command in [f"import {name} FILE -o OUT"] if name else COMMANDS[kind]:
                report = fuzzer.run(Case(kind, data, fuzzer._words(command)))
                if report is not None:
                    raise AssertionError(f"{command} of a valid file: {report}")


def keep(numbers: List[int], folder: Path = KEPT) -> None:
    """Write the files of these cases, with the command to run."""
    for number in numbers:
        place = folder / str(number)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        case = Fuzzer(place).case(number)
        (place / "changed").write_bytes(case.data)
        words = (
            ["hwaware", *case.command] if case.kind in COMMANDS or "import" in case.kind else [case.kind, *case.command]
        )
        (place / "command").write_text(" ".join(words) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("amount", help="number of cases, or seconds such as 600s")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--processes", type=int, default=2, help="workers that run cases")
    given = parser.parse_args()
    timed = given.amount.endswith("s")
    warm_up()
    start = time.monotonic()
    found = fuzz(
        None if timed else int(given.amount),
        given.seed,
        float(given.amount[:-1]) if timed else 1e9,
        say=lambda text: print(text, flush=True),
        processes=given.processes,
    )
    keep([number for number, _ in found.broken])
    for number, report in found.broken:
        (KEPT / str(number) / "report").write_text(report)
    elapsed = time.monotonic() - start
    print(f"{found.cases} cases from number {given.seed} in {elapsed:.0f} s: {len(found.broken)} broke a reader")
    if found.broken:
        print(f"their files and reports: {KEPT}")
    return bool(found.broken)


if __name__ == "__main__":
    sys.exit(main())
