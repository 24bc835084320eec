"""Measure every scenario with every model, and write each result to a file as soon as it is there."""

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

from hwaware import ray_cluster
from hwaware.bench import testbed
from hwaware.bench.comparison import compare
from hwaware.bench.enumeration import compare_with_each, require_few
from hwaware.bench.environment import running_environment
from hwaware.bench.mappings import BEST_MEASURED
from hwaware.bench.midway import compare_midway
from hwaware.bench.profiling import profile
from hwaware.bench.task import Effort, Say, opened_task
from hwaware.bench.testbed.manager import Testbed
from hwaware.bench.testbed.scenarios import Scenario
from hwaware.cluster import ClusterProfile
from hwaware.errors import HwawareError, MeasurementError, UnusableInputError
from hwaware.models import ModelConfig, configure
from hwaware.records import decode_document, read_bytes, save_or_keep
from hwaware.result import BenchmarkResult

# Three sizes of the built-in GPT: options that differ from its defaults.
GPT_SIZES = {
    "gpt-small": {"hidden": 384, "heads": 6, "sequence": 64},
    "gpt-medium": {"hidden": 512, "heads": 8, "sequence": 128},
    "gpt-large": {"hidden": 768, "heads": 12, "sequence": 128},
}
MODELS = (*GPT_SIZES, "gpt", "mlp", "moe", "wresnet")
_ADDRESS = re.compile(r"auto|.+:\d+")
# Load average per core before the start above which other programs disturb the measurement.
_BUSY = 0.5
# Time reserved after the steps of each pair, and for the report. A pair still records one step of each mapping and ends
# their processes. The first pair also trains on a single device, which took 44 s on a slow machine.
_AFTER_STEPS_S, _REPORT_S = 20.0, 40.0
Place = Union[Scenario, str]


class NamedModel(NamedTuple):
    """A model to train, with its name in results."""

    name: str
    config: ModelConfig


class Failure(NamedTuple):
    """A pair of scenario and model that failed, with its error."""

    scenario: str
    model: str
    error: HwawareError


class Outcome(NamedTuple):
    """The outcome of a benchmark.

    Attributes:
        paths: The result files, in the order of writing.
        results: The records in these files.
        failures: The pairs that failed.
    """

    paths: Tuple[Path, ...]
    results: Tuple[BenchmarkResult, ...]
    failures: Tuple[Failure, ...]


def place(name: str) -> Place:
    """Return the scenario of that name or .toml file; return the address of a running Ray cluster unchanged.

    Raises:
        ScenarioError: The name is neither a scenario nor an address.
    """
    if _ADDRESS.fullmatch(name) and not name.endswith(".toml"):
        return name
    return testbed.load_scenario(name)


def named_model(name: str, options: Any) -> NamedModel:
    """Return the model of that name, one of `MODELS`, configured by those options that it knows.

    Raises:
        UnusableInputError: No such model exists, or it refuses a value.
    """
    if name not in MODELS:
        raise UnusableInputError(
            f"There is no built-in model {name!r}; there are {', '.join(MODELS)}.", "name one of these."
        )
    built_in = "gpt" if name in GPT_SIZES else name
    known = {key: value for key, value in options.items() if hasattr(configure(built_in, {}), key)}
    return NamedModel(name, configure(built_in, {**GPT_SIZES.get(name, {}), **known}))


class Benchmark:
    """Measures every place with every model, one pair after the other.

    Args:
        models: At least one model.
        effort: The effort for each pair; `num_layers` 0 means one layer per block of the model.
        output: Directory for the results.
        quick_profile: Profile clusters as `hwaware profile --quick` does.
        tell: Called with each line of progress.
        kind: Kind of the testbeds; see `testbed.up`.
        within_s: Time limit for all pairs, which share the remaining time equally; None for no limit.
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
        """Measure every model in every place, and list pairs that fail.

        Ctrl-C keeps the files written so far, and so does a testbed that cannot be taken down.

        Raises:
            TestbedError: A testbed could not be taken down.
        """
        from hwaware.activation import install_runtime

        install_runtime()
        self._load_before = os.getloadavg()[0]
        self._check(places)
        self._total = len(places) * len(self._models)
        for each in places:
            left = list(self._models)
            try:
                with self._cluster(each) as bed_or_address:
                    while left:
                        self._measure(each, bed_or_address, left[0])
                        left.pop(0)
            except HwawareError as error:  # the cluster itself failed, and with it the remaining models
                if not left:  # it could not be taken down, so other measurements would run beside it
                    raise
                for model in left:
                    self._fail(each, model, error)
        return Outcome(tuple(self._paths), tuple(self._results), tuple(self._failures))

    @property
    def _measures_each(self) -> bool:
        return BEST_MEASURED in self._effort.wanted.names

    def _layers(self, model: NamedModel) -> int:
        return self._effort.num_layers or model.config.blocks

    def _check(self, places: Sequence[Place]) -> None:
        """Refuse places that share a result file, and changing or large ones if every mapping is to run on them."""
        for each in places if self._measures_each else ():
            if not isinstance(each, Scenario):
                continue
            if each.later is not None:
                raise UnusableInputError(
                    f"{each.name} changes midway, so {BEST_MEASURED} has no single cluster to search.",
                    f"leave {BEST_MEASURED} out, or choose scenarios without `later`.",
                )
            for model in self._models:
                require_few(sum(map(each.devices_of, each.hosts())), self._layers(model))
        file_names([_name(each) for each in places])

    @contextlib.contextmanager
    def _cluster(self, each: Place) -> Iterator[Union[Testbed, str]]:
        """Connect to a place's cluster, and start a testbed first if the place is a scenario."""
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
        except ray_cluster.errors() as error:  # for example, a worker ended between two steps
            traceback.print_exc()
            what = f"Ray reports {type(error).__name__}: {error}"
            self._fail(each, model, MeasurementError(what, "see the traceback above; the other pairs go on."))
            return
        path = self._output / f"{_file_name(name)}-{model.name}.json"
        result = self._with_conditions(result, bed)
        save_or_keep(result, path)
        self._paths.append(path)
        self._results.append(result)
        self._done += 1
        say(f"{path} written.{self._time_left()}")

    def _result(self, each: Place, bed: Union[Testbed, str], model: NamedModel, say: Say) -> BenchmarkResult:
        import hwaware.models

        effort = self._effort._replace(num_layers=self._layers(model), deadline_s=self._deadline_s())
        if self._measures_each and isinstance(bed, str):  # `_check` could not know its devices
            require_few(sum(node.num_gpus for node in ray_cluster.nodes()), effort.num_layers)
        later = each.later if isinstance(each, Scenario) else None
        if later is not None and isinstance(bed, Testbed):
            for host in later.shares:  # an earlier model's run has slowed these hosts down
                bed.set_share(host, bed.scenario.shares[host])
        say("measuring the cluster ...")
        profile = self._profile(bed)
        with opened_task(hwaware.models.make(model.config), profile, effort, say) as task:
            if later is not None and isinstance(bed, Testbed):
                again = functools.partial(self._profile, bed)
                return compare_midway(task, bed, later, _name(each), model.name, again)
            compared = compare_with_each if self._measures_each else compare
            return compared(task, _name(each), model.name)

    def _deadline_s(self) -> Optional[float]:
        """Return the time by which the next pair's steps must end, in `time.monotonic`; None for no limit."""
        if self._end_s is None:
            return None
        now_s = time.monotonic()
        return now_s + (self._end_s - now_s) / (self._total - self._done) - _AFTER_STEPS_S

    def _with_conditions(self, result: BenchmarkResult, bed: Union[Testbed, str]) -> BenchmarkResult:
        """Return the result with the machine's load, the testbed's description and notes on both."""
        cores, notes = os.cpu_count() or 1, []
        if self._load_before > _BUSY * cores:
            notes.append(
                f"The machine was busy before the benchmark started: load average {self._load_before:.1f} on {cores} "
                "cores. Other programs may have disturbed the measurement."
            )
        about = {**result.environment, "load_average_before": round(self._load_before, 2)}
        if isinstance(bed, Testbed):
            described = bed.describe()
            about["testbed"] = {key: described[key] for key in ("kind", "shaped")}
            notes += bed.notes
            if described["shaped"]["cpu"]:
                total = sum(share * bed.scenario.devices_of(host) for host, share in bed.scenario.shares.items())
                notes.append(
                    f"The devices' shares add up to {total:.2f} of {cores} cores. No mapping can use more. The driver, "
                    "Ray and the network use the remaining cores."
                )
        return msgspec.structs.replace(result, environment=about, notes=(*result.notes, *notes))

    def _profile(self, bed: Union[Testbed, str]) -> ClusterProfile:
        address = bed if isinstance(bed, str) else bed.address
        return profile(address, quick=self._quick, say=self._say)

    def _fail(self, each: Place, model: NamedModel, error: HwawareError) -> None:
        self._failures.append(Failure(_name(each), model.name, error))
        self._done += 1
        self._say(f"{_name(each)}, {model.name}: FAILED. {error}{self._time_left()}")

    def _say(self, message: str) -> None:
        self._tell(f"{time.monotonic() - self._start_s:5.0f} s  {message}")

    def _time_left(self) -> str:
        """Return how many pairs are done, and an estimate of the time for the others from their mean."""
        left_s = (time.monotonic() - self._start_s) / self._done * (self._total - self._done)
        if self._done == self._total:
            return ""
        return f" {self._done} of {self._total} done; about {max(1, round(left_s / 60))} min left."


def _name(each: Place) -> str:
    return each if isinstance(each, str) else each.name


def file_names(scenarios: Sequence[str]) -> List[str]:
    """Return the part of each scenario's name or address that names its result file.

    Raises:
        UnusableInputError: Two are the same.
    """
    names = [_file_name(name) for name in scenarios]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UnusableInputError(
            f"Two scenarios are called {twice}: the second result would replace the first.",
            "rename one of their files, or write their results into two folders.",
        )
    return names


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def load_results(directory: Path) -> List[Tuple[Path, BenchmarkResult]]:
    """Return the results in a directory, sorted by file name, and skip files with another schema.

    Raises:
        UnusableInputError: The directory holds no results, or a file cannot be read.
    """
    files = {path: read_bytes(path) for path in sorted(directory.glob("*.json"))}
    objects = {path: data for path, data in files.items() if data.lstrip().startswith(b"{")}
    documents = {path: decode_document(data, str(path)) for path, data in objects.items()}
    paths = [path for path, document in documents.items() if document.get("schema") == BenchmarkResult.SCHEMA]
    if not paths:
        raise UnusableInputError(f"{directory} holds no results.", "measure first: hwaware bench -o DIRECTORY.")
    return [(path, BenchmarkResult.load(path)) for path in paths]
