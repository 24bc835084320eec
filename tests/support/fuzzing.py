"""Change valid files at random, run hwaware's commands on them, and keep each file that breaks one.

    make fuzz FUZZ=100000              # so many cases, from seed 0
    make fuzz FUZZ=600s SEED=1000000   # for 600 seconds, from another seed

Case number N is the same everywhere: it depends on its number alone. A command breaks if it ends by an exception
instead of a message, computes for more than 10 s, takes more than 1 GiB of memory, or runs what a file names.

Workers are forked from one process that has imported and compiled everything. They run the commands inside, without a
program for each. A worker that hangs is ended from outside, since a loop in C obeys no signal.
"""

from __future__ import annotations

import argparse
import collections
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
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

MOST_CPU_S = 10.0
MOST_BYTES = 1 << 30
ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "fuzz"
WORKERS = 2
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
    data = pickle.dumps(entries, protocol=random.choice((0, 1, 2, 4)))
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
        self.kinds = [*COMMANDS, *(f"import {name}" for name in importers())]

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
    if _watching[0] and event in _RUNNING:
        _ran.append(f"{event} {arguments!r:.100}")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _work(make: Callable[[Path], Fuzzer], at: Any, first: int, last: Optional[int], until: float, results: Any) -> None:
    """Run cases in a forked worker; `at` tells the parent which one runs."""
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
            number += WORKERS
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
    count: Optional[int], seed: int = 0, limit_s: float = 1e9, say: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Run `count` cases, or as many as fit into the time, in forked workers."""
    context = multiprocessing.get_context("fork")
    results, broken, until = context.Queue(), [], time.monotonic() + limit_s
    last = None if count is None else seed + count
    workers = []

    def begin(first: int) -> Tuple[Any, Any, List[float]]:
        at = context.Value("q", first)
        process = context.Process(target=_work, args=(Fuzzer, at, first, last, until, results), daemon=True)
        process.start()
        return process, at, [first - 1, 0.0]

    def note(number: int, report: str) -> None:
        broken.append((number, report))
        say(f"case {number}: {report.strip().splitlines()[-1][:200]}")

    workers = [begin(seed + k) for k in range(WORKERS)]
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
                number += WORKERS
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
    """Import and compile in the parent what workers need, and require that every command accepts the valid files."""
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder))
        for kind in fuzzer.kinds:
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
        (place / "command").write_text(" ".join(["hwaware", *case.command]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("amount", help="number of cases, or seconds such as 600s")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    given = parser.parse_args()
    timed = given.amount.endswith("s")
    warm_up()
    start = time.monotonic()
    found = fuzz(
        None if timed else int(given.amount),
        given.seed,
        float(given.amount[:-1]) if timed else 1e9,
        say=lambda text: print(text, flush=True),
    )
    keep([number for number, _ in found.broken])
    for number, report in found.broken:
        (KEPT / str(number) / "report").write_text(report)
    elapsed = time.monotonic() - start
    print(f"{found.cases} cases from number {given.seed} in {elapsed:.0f} s: {len(found.broken)} broke a command")
    if found.broken:
        print(f"their files and reports: {KEPT}")
    return bool(found.broken)


if __name__ == "__main__":
    sys.exit(main())
