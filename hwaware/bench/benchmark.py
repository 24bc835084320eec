"""A benchmark: scenarios times models, each measured and written to a file of its own as soon as it is done."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
import traceback
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import msgspec

from hwaware import profiler, ray_cluster
from hwaware.bench import testbed
from hwaware.bench.comparison import compare
from hwaware.bench.enumeration import compare_with_each
from hwaware.bench.environment import running_environment
from hwaware.bench.kinds import by_speed
from hwaware.bench.mappings import BEST_MEASURED
from hwaware.bench.midway import compare_midway
from hwaware.bench.passes import with_runtime
from hwaware.bench.task import Effort, Say, opened_task
from hwaware.bench.testbed.manager import Testbed
from hwaware.bench.testbed.scenarios import Scenario
from hwaware.cluster import ClusterProfile
from hwaware.errors import HwawareError, MeasurementError, UnusableInputError
from hwaware.models import ModelConfig, configure
from hwaware.records import decode_document, read_bytes
from hwaware.result import BenchmarkResult

# GPTs of three sizes, by what they add to the defaults of the built-in.
GPT_SIZES = {
    "gpt-small": {"hidden": 384, "heads": 6, "sequence": 64},
    "gpt-medium": {"hidden": 512, "heads": 8, "sequence": 128},
    "gpt-large": {"hidden": 768, "heads": 12, "sequence": 128},
}
MODELS = (*GPT_SIZES, "gpt", "mlp", "moe", "wresnet")
_ADDRESS = re.compile(r"auto|.+:\d+")
# With this load average a core before anything is started, other programs disturb what is measured.
_BUSY = 0.5
# Kept for what comes after the steps of a pair, and after all pairs: another recorded step of each mapping, the end of
# its processes, the losses of a single device (44 s on a slow machine, but for the first pair alone); the report.
_AFTER_STEPS_S, _REPORT_S = 20.0, 40.0
Place = Union[Scenario, str]


class NamedModel(NamedTuple):
    """A model to train: what the result calls it, and its sizes."""

    name: str
    config: ModelConfig


class Failure(NamedTuple):
    """A pair of scenario and model that could not be measured."""

    scenario: str
    model: str
    error: HwawareError


class Outcome(NamedTuple):
    """What a benchmark has to show.

    Attributes:
        paths: The result files, in the order in which they were written.
        results: Their records.
        failures: What failed.
    """

    paths: Tuple[Path, ...]
    results: Tuple[BenchmarkResult, ...]
    failures: Tuple[Failure, ...]


def place(name: str) -> Place:
    """A scenario by its name or its file, or the address of a cluster as it stands.

    Raises:
        ScenarioError: It is none of them.
    """
    if _ADDRESS.fullmatch(name) and not name.endswith(".toml"):
        return name
    return testbed.load_scenario(name)


def named_model(name: str, options: Any) -> NamedModel:
    """A model by its name, with those of the options that it has.

    Raises:
        UnusableInputError: There is no such model, or a value does not fit.
    """
    built_in = "gpt" if name in GPT_SIZES else name
    known = {key: value for key, value in options.items() if hasattr(configure(built_in, {}), key)}
    return NamedModel(name, configure(built_in, {**GPT_SIZES.get(name, {}), **known}))


class Benchmark:
    """Runs scenarios and models one after the other.

    Args:
        models: At least one.
        effort: For each pair; `num_layers` 0 stands for as many as the model has blocks.
        output: Directory for the results.
        quick_profile: Whether clusters are profiled in the quick form.
        tell: Told a line at a time what goes on.
        kind: Of the testbeds; see `testbed.up`.
        within_s: How long all of it may take: each pair gets an equal part of what is left. None for no limit.
    """

    def __init__(
        self,
        models: Sequence[NamedModel],
        effort: Effort,
        output: Path,
        quick_profile: bool,
        tell: Say,
        kind: str = "auto",
        within_s: Optional[float] = None,
    ) -> None:
        self._models, self._effort, self._output, self._quick = models, effort, output, quick_profile
        self._tell, self._kind = tell, kind
        self._start_s = time.monotonic()
        self._end_s = None if within_s is None else self._start_s + within_s - _REPORT_S
        self._done, self._total = 0, 0
        self._load_before = 0.0
        self._paths: List[Path] = []
        self._results: List[BenchmarkResult] = []
        self._failures: List[Failure] = []

    def run(self, places: Sequence[Place]) -> Outcome:
        """Measure every model in every place. What fails is left out, with its error; Ctrl-C keeps what is done."""
        from hwaware.patching.activation import install_runtime

        install_runtime()
        self._load_before = os.getloadavg()[0]
        _check_places(places, self._effort)
        self._total = len(places) * len(self._models)
        for each in places:
            left = list(self._models)
            try:
                with self._cluster(each) as bed_or_address:
                    while left:
                        self._measure(each, bed_or_address, left[0])
                        left.pop(0)
            except HwawareError as error:  # the cluster itself could not be used
                for model in left:
                    self._fail(each, model, error)
        return Outcome(tuple(self._paths), tuple(self._results), tuple(self._failures))

    @contextlib.contextmanager
    def _cluster(self, each: Place) -> Iterator[Union[Testbed, str]]:
        """The cluster of a place, connected to: a testbed of its own for a scenario."""
        if isinstance(each, str):
            bed = testbed.find(each)
            with running_environment({} if bed is None else bed.driver_environment()):
                if bed is not None:
                    bed.enter()
                with ray_cluster.connect(each):
                    yield each
            return
        self._say(f"{each.name}: starting a testbed ...")
        with testbed.running(each, kind=self._kind) as bed, running_environment(bed.driver_environment()):
            for note in bed.notes:
                self._say(f"{each.name}: {note}")
            bed.enter()
            with ray_cluster.connect(bed.address):
                yield bed

    def _measure(self, each: Place, bed: Union[Testbed, str], model: NamedModel) -> None:
        name = _name(each)

        def say(message: str) -> None:
            self._say(f"{name}, {model.name}: {message}")

        try:
            result = self._result(each, bed, model, say)
        except HwawareError as error:
            self._fail(each, model, error)
            return
        except ray_cluster.errors() as error:  # a worker that ended between two steps, say
            traceback.print_exc()
            what = f"Ray reports {type(error).__name__}: {error}"
            self._fail(each, model, MeasurementError(what, "see the traceback above; the others are still measured."))
            return
        path = self._output / f"{_file_name(name)}-{model.name}.json"
        result = self._with_conditions(result, bed)
        result.save(path)
        self._paths.append(path)
        self._results.append(result)
        self._done += 1
        say(f"{path} written.{self._time_left()}")

    def _result(self, each: Place, bed: Union[Testbed, str], model: NamedModel, say: Say) -> BenchmarkResult:
        import hwaware.models

        layers = self._effort.num_layers or model.config.blocks
        effort = self._effort._replace(num_layers=layers, deadline_s=self._deadline_s())
        later = each.later if isinstance(each, Scenario) else None
        if later is not None and isinstance(bed, Testbed):
            for host in later.shares:  # an earlier model has slowed it down
                bed.set_share(host, bed.scenario.shares[host])
        say("measuring the cluster ...")
        profile = self._profile(bed)
        with opened_task(hwaware.models.make(model.config), profile, effort, say) as task:
            if later is not None and isinstance(bed, Testbed):
                again = functools.partial(self._profile, bed)
                return compare_midway(task, bed, later, _name(each), model.name, again)
            compared = compare_with_each if BEST_MEASURED in effort.wanted.names else compare
            return compared(task, _name(each), model.name)

    def _deadline_s(self) -> Optional[float]:
        """When the next pair's steps shall have been measured."""
        if self._end_s is None:
            return None
        now_s = time.monotonic()
        return now_s + (self._end_s - now_s) / (self._total - self._done) - _AFTER_STEPS_S

    def _with_conditions(self, result: BenchmarkResult, bed: Union[Testbed, str]) -> BenchmarkResult:
        """The result with what the machine was like: how busy before anything started, and how full by the testbed."""
        cores, notes = os.cpu_count() or 1, []
        if self._load_before > _BUSY * cores:
            notes.append(
                f"The machine was busy before the benchmark started: load average {self._load_before:.1f} on {cores} "
                "cores. Other programs disturbed the measurement."
            )
        about = {**result.environment, "load_average_before": round(self._load_before, 2)}
        if isinstance(bed, Testbed):
            described = bed.describe()
            about["testbed"] = {key: described[key] for key in ("kind", "shaped")}
            notes += bed.notes
            if described["shaped"]["cpu"]:
                total = sum(share * bed.scenario.devices_of(host) for host, share in bed.scenario.shares.items())
                notes.append(
                    f"The devices' shares add up to {total:.2f} of {cores} cores; the driver, Ray and the network have "
                    "the rest, and no mapping can use more than that."
                )
        return msgspec.structs.replace(result, environment=about, notes=(*result.notes, *notes))

    def _profile(self, bed: Union[Testbed, str]) -> ClusterProfile:
        address = bed if isinstance(bed, str) else bed.address
        return with_runtime(by_speed(profiler.profile(address, quick=self._quick)))

    def _fail(self, each: Place, model: NamedModel, error: HwawareError) -> None:
        self._failures.append(Failure(_name(each), model.name, error))
        self._done += 1
        self._say(f"{_name(each)}, {model.name}: FAILED. {error}{self._time_left()}")

    def _say(self, message: str) -> None:
        self._tell(f"{time.monotonic() - self._start_s:5.0f} s  {message}")

    def _time_left(self) -> str:
        """How long the other pairs will take if they take as long as those before."""
        left_s = (time.monotonic() - self._start_s) / self._done * (self._total - self._done)
        if self._done == self._total:
            return ""
        return f" {self._done} of {self._total} done, about {max(1, round(left_s / 60))} min left."


def _name(each: Place) -> str:
    return each if isinstance(each, str) else each.name


def _check_places(places: Sequence[Place], effort: Effort) -> None:
    """Every place has a result file of its own, and a cluster that stays as it is where every mapping is to run."""
    changing = next((each.name for each in places if isinstance(each, Scenario) and each.later is not None), None)
    if changing is not None and BEST_MEASURED in effort.wanted.names:
        raise UnusableInputError(
            f"{changing} changes midway: {BEST_MEASURED} has no one cluster to be the best of.",
            f"leave {BEST_MEASURED} out, or take scenarios without `later`.",
        )
    names = [_file_name(_name(each)) for each in places]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UnusableInputError(
            f"Two of the scenarios are called {twice}: the second result would replace the first.",
            "give one of their files another name, or measure them into two folders.",
        )


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def load_results(directory: Path) -> List[Tuple[Path, BenchmarkResult]]:
    """The results in a directory, by name; files of other schemas are none of them.

    Raises:
        UnusableInputError: There are none, or a file cannot be read.
    """
    files = {path: read_bytes(path) for path in sorted(directory.glob("*.json"))}
    objects = {path: data for path, data in files.items() if data.lstrip().startswith(b"{")}
    documents = {path: decode_document(data, str(path)) for path, data in objects.items()}
    paths = [path for path, document in documents.items() if document.get("schema") == BenchmarkResult.SCHEMA]
    if not paths:
        raise UnusableInputError(f"{directory} holds no results.", "measure first: hwaware bench -o DIRECTORY.")
    return [(path, BenchmarkResult.load(path)) for path in paths]
