"""What the unit tests share: a crew of workers with declared speeds, for the profiler."""

from __future__ import annotations

from typing import NamedTuple

import hypothesis
import pytest
from builders import ALL_CASES

from hwaware.greeting import new_secret
from hwaware.profiler.crew import Crew, Failure, Member, Pending, died, too_slow
from hwaware.profiler.messages import LinkEnd

# No example is timed: machines are busy, and the first one may load or compile something. The same examples run every
# time and leave no files, so that no run depends on an earlier one; with HWAWARE_ALL_CASES=1 they are new each time.
hypothesis.settings.register_profile(
    "hwaware", deadline=None, derandomize=not ALL_CASES, database=None, max_examples=100 if ALL_CASES else 20
)
hypothesis.settings.load_profile("hwaware")

LATENCY_S = 1e-4


@pytest.fixture(autouse=True)
def _waits_say_nothing(monkeypatch):
    """Let no slow machine add a line to what a command prints; the test of that line sets its own time."""
    from hwaware.cli import _run

    monkeypatch.setattr(_run, "_SILENT_S", 600.0)


class Spec(NamedTuple):
    host: str
    flops_per_s: float
    machine: str = ""
    declared: bool = False
    kind: str = "fake"
    uuid: str = None


class FakeCrew(Crew):
    """Workers that know their speed; no time passes. `batches` is what ran at the same time."""

    latency_s = LATENCY_S

    def __init__(self, specs, bytes_per_s=lambda source, target: 1e8, reference_s=lambda n: 0.025):
        counts = {}
        members = []
        for spec in specs:
            index = counts[spec.host] = counts.get(spec.host, -1) + 1
            members.append(Member(spec.host, f"address of {spec.host}", index, spec))
        self.members = tuple(members)
        self.bytes_per_s = bytes_per_s
        self.reference_s = reference_s
        self.measured = 0
        self.batches = []

    def begin(self, member, method, *arguments):
        return Pending(member, method, arguments)

    def gather(self, pending, limit_s):
        assert limit_s > 0
        self.batches.append([(one.method, str(one.member), one.result) for one in pending])
        return [self.outcome(one, limit_s) for one in pending]

    def outcome(self, one, limit_s):
        return getattr(self, one.method)(one.member, *one.result)

    def identify(self, member):
        spec = member.worker
        index = self.members.index(member)
        return {
            "index": member.device_index,
            "declared_id": f"{spec.host}/{member.device_index}" if spec.declared else None,
            "kind": spec.kind,
            "is_processor": True,
            "is_share": False,
            "declared_memory_bytes": 1 << 20 if spec.declared else None,
            "device_memory_bytes": None,
            "host_memory_bytes": 8 << 30,
            "uuid": spec.uuid,
            "port": 1000 + index,
            "machine": spec.machine or spec.host,
            "versions": {"jax": "0", "platform": "fake"},
        }

    def compile(self, member, dtype, policy, memory_bytes, copy_bytes):
        return [edge for edge in policy.sizes if 2 * edge**3 / member.worker.flops_per_s < policy.longest_product_s]

    def heat(self, member, dtype, edge, seconds):
        return None

    def measure(self, member, dtype, shape, minimum_s, before_s=None):
        self.measured += 1
        batch, m, n, k = shape
        one_s = 2 * batch * m * n * k / self.flops_per_s(member)
        calls = max(1, round(minimum_s / one_s))
        reference_s = self.reference_s(self.measured)
        return {"calls": calls, "seconds": calls * one_s, "laps_s": [calls * one_s], "reference_s": reference_s}

    def flops_per_s(self, member):
        return member.worker.flops_per_s

    def copy(self, member, minimum_s):
        return {"bytes_per_s": 5e9, "launch_s": 1e-5}

    def rest(self, member, dtype, count):
        return [[0.04, 0.04, 0.04]] * count

    def load(self, member):
        return {"load": 0.5, "busy": 0.01}

    def reopen(self, member):
        return 2000 + self.members.index(member)

    def answer(self, member, name, source, limit_s):
        return 1

    def time_messages(self, member, name, target, policy, limit_s):
        rate = self.bytes_per_s(*(end.split(":")[0] for end in name.split(">")))
        return {
            "tiny_s": [2 * LATENCY_S],
            "messages": [(n, [LATENCY_S + n / rate]) for n in policy.message_bytes],
        }

    def exchange(self, member, name, role, target, out_bytes, in_bytes, count, limit_s):
        ends = [end.split(":")[0] for end in name.split(" ")[2:4]]
        if member.host == ends[1]:
            ends = ends[::-1]
        there, back = self.bytes_per_s(*ends), self.bytes_per_s(*ends[::-1])
        return {"seconds": count * max(out_bytes / there, in_bytes / back), "corrupt": [], "clock_jumps_s": []}

    def collective(self, member, name, rank, addresses, limit_s, op, nbytes, repeats):
        slowest = min(self.bytes_per_s(a, b) for a in {member.host} for b in {member.host})
        return {"bytes": nbytes, "seconds": [LATENCY_S + nbytes / slowest] * repeats, "clock_jumps_s": []}


class Fakes:
    """What tests need to make crews: `fakes.crew([fakes.spec("a", 1e10)])`."""

    crew = FakeCrew
    spec = Spec
    died = staticmethod(died)
    too_slow = staticmethod(too_slow)
    failure = Failure
    latency_s = LATENCY_S


@pytest.fixture(autouse=True)
def quick_reference(request, monkeypatch):
    """Where a crew is faked, no time passes in this process either."""
    if "profiler" in request.node.nodeid:
        for module in ("hwaware.profiler.measurement", "hwaware.profiler.links"):
            monkeypatch.setattr(f"{module}.reference_s", lambda repeats=3: 0.025)


@pytest.fixture
def ends():
    """Both ends of a link, in this process."""
    secret = new_secret()
    pair = LinkEnd("127.0.0.1", secret), LinkEnd("127.0.0.1", secret)
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def fakes():
    """The classes, for tests that make crews of their own."""
    return Fakes
