"""How close a training step on hwaware's runtime comes to what its arithmetic and its links allow.

    python benchmarks/runtime.py -o benchmarks/results/runtime.json       (root; about ten minutes)

On testbeds, with stages balanced by hand. Four measurements:

- measured / ideal for stages of about 20, 60 and 200 ms. Ideal is a lower bound: the slowest stage's programs, timed
  alone under the same CPU share in turns with the measured steps, or the busiest link's bytes over its set rate,
  whichever takes longer, filled and drained. Both at one speed of the machine, by the reference kernel around each.
- overlapped sends against Alpa's own blocking order, the same plan, step by step in turn, where the busiest link takes
  between half and all of the slowest stage's time.
- what recording a step costs, recorded and other steps in turn.
- steps with samples to send over steps whose samples are there before. The driver sends them microbatch by microbatch,
  or as a whole as Alpa does. The slowest host has the first stage. No link of the driver is limited.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import hwaware
from hwaware import profiler, ray_cluster
from hwaware.activation import install_runtime
from hwaware.bench import testbed
from hwaware.bench.environment import environment, running_environment
from hwaware.bench.harness import measure
from hwaware.bench.statistics import median_interval, ratio_interval
from hwaware.bench.training import TrainingRun
from hwaware.cli._run import cleaning_up_when_terminated
from hwaware.patching import batches
from hwaware.plans import Plan, Replica, Stage
from hwaware.reference_kernel import kernel_reference, processors_reference_s
from hwaware.runtime import settings
from hwaware.timeline import Sends

MEASUREMENTS = ["ideal", "overlap", "recording", "samples"]
HIDDEN = 1024
NUM_MICROBATCHES = 16
# Dense blocks of each host, in proportion to its share.
BLOCKS = {"fast-and-slow": (4, 2, 2, 1), "four-equal": (1, 1, 1, 1)}
# Samples per microbatch for stages of about this many seconds: a stage gets as many blocks as that takes here and now.
SAMPLES = {0.02: 16, 0.06: 40, 0.2: 176}
# Units of blocks and samples where the slowest link matters, and the numbers per sample that the search begins with: a
# message over that link is to take between half and all of the slowest stage's time.
OVERLAP_UNITS, OVERLAP_SAMPLES, OVERLAP_HIDDEN = 1, 288, 832
OVERLAP_GOAL, OVERLAP_RANGE, OVERLAP_TRIES = 0.7, (0.5, 1.0), 4


class Bed(NamedTuple):
    """A testbed that is up, and its profile."""

    name: str
    scenario: Any
    profile: Any


@cleaning_up_when_terminated()
def main() -> int:
    """Run the measurements; writes the results and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default="runtime.json")
    parser.add_argument("--rounds", type=int, default=4, help="of stages alone and two steps")
    parser.add_argument("--only", choices=MEASUREMENTS, action="append")
    arguments = parser.parse_args()
    wanted = arguments.only or MEASUREMENTS
    install_runtime()
    results: Dict[str, Any] = {name: [] for name in MEASUREMENTS}
    for name in BLOCKS:
        for bed in started(name):
            results.setdefault("environment", environment(kernel_reference(bed.profile.environment)))
            if "ideal" in wanted:
                results["ideal"] += [tell(against_ideal(bed, goal, arguments.rounds)) for goal in SAMPLES]
            if name == "fast-and-slow" and "overlap" in wanted:
                results["overlap"].append(tell(against_blocking(bed, 3 * arguments.rounds)))
            if name == "fast-and-slow" and "samples" in wanted:
                results["samples"].append(tell(cost_of_samples(bed, 6 * arguments.rounds)))
            if name == "four-equal" and "recording" in wanted:
                results["recording"].append(tell(cost_of_recording(bed, 12 * arguments.rounds)))
            results["load_average_after"] = list(os.getloadavg())
    with open(arguments.output, "w") as stream:
        json.dump(results, stream, indent=1)
        stream.write("\n")
    return 0


def tell(row: Dict[str, Any]) -> Dict[str, Any]:
    """Print a result as it comes."""
    print(json.dumps(row), flush=True)
    return row


def started(name: str) -> Iterator[Bed]:
    """A testbed, for as long as it is used."""
    with testbed.running(name) as bed, running_environment(bed.driver_environment()):
        bed.enter()
        with ray_cluster.connect(bed.address):
            yield Bed(name, bed.scenario, profiler.profile(bed.address, quick=True))


def make_run(
    bed: Bed, name: str, units: int, microbatch_size: int, hidden: int = HIDDEN, order: int = 1
) -> TrainingRun:
    """A program whose stages are in proportion to the hosts' shares, one a host, in their order; -1 turns it around."""
    import hwaware.models

    blocks = BLOCKS[bed.name][::order]
    model = hwaware.models.make(hwaware.models.MlpConfig(blocks=units * sum(blocks), hidden=hidden))
    ends = [sum(blocks[: index + 1]) for index in range(len(blocks))]
    stages = [
        Stage(layers=(end - count, end - 1), replicas=(Replica(devices=(device.id,)),))
        for end, count, device in zip(ends, blocks, bed.profile.devices[::order])
    ]
    plan = Plan(num_microbatches=NUM_MICROBATCHES, stages=tuple(stages))
    run = TrainingRun(name, model, bed.profile, sum(blocks), NUM_MICROBATCHES, microbatch_size, plan)
    run.wait_until_compiled()
    for _ in range(3):
        run.step()
    return run


def slowest_stage_s(run: TrainingRun) -> float:
    """Forward and backward of the slowest stage, alone."""
    return max(forward + backward for forward, backward, _ in run.alone_s())


def sized_run(bed: Bed, goal_s: float) -> TrainingRun:
    """A program whose slowest stage takes about that long: the number of its blocks follows from one unit of them."""
    run = make_run(bed, "measured", 1, SAMPLES[goal_s])
    try:
        units = max(1, round(goal_s / slowest_stage_s(run)))
    except BaseException:
        run.close()
        raise
    if units == 1:
        return run
    run.close()
    return make_run(bed, "measured", units, SAMPLES[goal_s])


class Beside(NamedTuple):
    """What was measured, and the reference kernel's time around it [s]."""

    measured: Any
    reference_s: float


def beside_reference(work: Callable[[], Any]) -> Beside:
    """Run the work with the reference kernel before and after it."""
    before_s = processors_reference_s()
    measured = work()
    return Beside(measured, (before_s + processors_reference_s()) / 2)


def stages_alone(run: TrainingRun) -> List[Beside]:
    """The programs of each stage alone, each stage with a reference of its own: together they take many seconds."""
    stages = run.alone_s()
    return [beside_reference(lambda: next(stages)) for _ in run.plan.stages]


def usual_times(stage: Sequence[Beside], usual_s: float) -> List[float]:
    """The median of each program of a stage, as if the reference kernel had always taken `usual_s`."""
    scaled = ([seconds * usual_s / one.reference_s for seconds in one.measured] for one in stage)
    return [statistics.median(times) for times in zip(*scaled)]


def against_ideal(bed: Bed, goal_s: float, rounds: int) -> Dict[str, Any]:
    """Measured and ideal step of one size, both as the machine's usual speed would have them."""
    microbatch_size = SAMPLES[goal_s]
    run = sized_run(bed, goal_s)
    alone: List[List[Beside]] = []
    steps: List[Beside] = []
    try:
        for _ in range(rounds):
            alone.append(stages_alone(run))
            steps += [beside_reference(run.step) for _ in range(2)]
        alone.append(stages_alone(run))
    finally:
        run.close()
    usual_s = statistics.median(one.reference_s for one in (*itertools.chain(*alone), *steps))
    programs = [usual_times(stage, usual_s) for stage in zip(*alone)]
    links = link_times_s(bed, 4 * HIDDEN * microbatch_size)
    bound = ideal_s(programs, links)
    ratios = [step.measured * usual_s / step.reference_s / bound for step in steps]
    return {
        "scenario": bed.name,
        "goal_stage_s": goal_s,
        "stages_s": [forward + backward for forward, backward, _ in programs],
        "updates_s": [update for _, _, update in programs],
        "links_s": links,
        "ideal_s": bound,
        "reference_s": usual_s,
        "alone": [[stage._asdict() for stage in one] for one in alone],
        "steps": [one._asdict() for one in steps],
        "ratio": statistics.median(ratios),
        "ratio_interval": median_interval(ratios)._asdict(),
    }


def link_times_s(bed: Bed, nbytes: int) -> List[float]:
    """Seconds for a message from each host to the next at the set rates."""
    hosts = bed.scenario.hosts()
    rates = [bed.scenario.rate_mbit(source, target) for source, target in zip(hosts, hosts[1:])]
    return [nbytes * 8 / (rate * 1e6) for rate in rates]


def ideal_s(programs: Sequence[Sequence[float]], links_s: Sequence[float]) -> float:
    """What no 1F1B step can beat.

    A stage or link has all microbatches to go through it; before the first one, and after the last one, a microbatch
    passes everything before it, forward and backward. The first stage's update comes last.

    Args:
        programs: (forward, backward, update) of each stage, alone [s].
        links_s: A message over each link between neighbours; links carry both directions at once.
    """
    passed_s, bounds_s = 0.0, []
    for index, (forward_s, backward_s, _) in enumerate(programs):
        bounds_s.append(passed_s + NUM_MICROBATCHES * (forward_s + backward_s))
        passed_s += forward_s + backward_s
        if index < len(links_s):
            bounds_s.append(passed_s + (NUM_MICROBATCHES + 1) * links_s[index])
            passed_s += 2 * links_s[index]
    return max([*bounds_s, passed_s]) + programs[0][2]


def against_blocking(bed: Bed, repeats: int) -> Dict[str, Any]:
    """Alpa's order over overlapped sends, the same plan."""
    width = overlap_width(bed)
    runs: List[TrainingRun] = []
    orders: Tuple[Sends, ...] = ("overlapped", "blocking")
    try:
        for sends in orders:
            with settings.runtime_settings(sends=sends):
                runs.append(make_run(bed, sends, OVERLAP_UNITS, OVERLAP_SAMPLES, width))
        slowest_s = slowest_stage_s(runs[0])
        predicted_s: Dict[str, float] = {
            sends: hwaware.simulate(run.plan, run.workload, bed.profile, sends=sends).step_s
            for sends, run in zip(orders, runs)
        }
        mappings = measure(runs, repeats, 1, kernel_reference(bed.profile.environment), predicted_s)
    finally:
        for run in runs:
            run.close()
    overlapped, blocking = mappings
    return {
        "scenario": bed.name,
        "hidden": width,
        "link_over_stage": overlap_link_s(bed, width) / slowest_s,
        "simulated_step_s": predicted_s,
        "overlapped_step_s": overlapped.step_s,
        "blocking_step_s": blocking.step_s,
        "blocking_over_overlapped": ratio_interval(blocking.relative_steps, overlapped.relative_steps)._asdict(),
    }


def overlap_link_s(bed: Bed, width: int) -> float:
    """A message of that many numbers per sample over the slowest link."""
    return max(link_times_s(bed, 4 * OVERLAP_SAMPLES * width))


def overlap_width(bed: Bed) -> int:
    """Numbers per sample with which the slowest link takes between half and all of the slowest stage's time.

    A message grows with the width and a stage with its square: the wider, the less the link takes of it.
    """
    width, seen = OVERLAP_HIDDEN, []
    for _ in range(OVERLAP_TRIES):
        run = make_run(bed, "overlapped", OVERLAP_UNITS, OVERLAP_SAMPLES, width)
        try:
            seen.append((width, overlap_link_s(bed, width) / slowest_stage_s(run)))
        finally:
            run.close()
        low, high = OVERLAP_RANGE
        if low * 1.1 <= seen[-1][1] <= high * 0.9:
            return width
        width = max(64, round(width * seen[-1][1] / OVERLAP_GOAL / 64) * 64)
    raise SystemExit(f"The link takes {seen} of the stage (by width), never within {OVERLAP_RANGE}.")


def cost_of_recording(bed: Bed, repeats: int) -> Dict[str, Any]:
    """Steps that are recorded over steps that are not: pairs, either one first in turn, as the machine drifts."""
    run = sized_run(bed, 0.06)
    steps: Dict[bool, List[float]] = {False: [], True: []}
    try:
        for pair in range(repeats):
            for records in (pair % 2 == 1, pair % 2 == 0):
                with run.recorded([]) if records else contextlib.nullcontext():
                    steps[records].append(run.step())
    finally:
        run.close()
    return {
        "scenario": bed.name,
        "plain": median_interval(steps[False])._asdict(),
        "recorded": median_interval(steps[True])._asdict(),
        "recorded_over_plain": median_interval([a / b for a, b in zip(steps[True], steps[False])])._asdict(),
    }


def cost_of_samples(bed: Bed, rounds: int) -> Dict[str, Any]:
    """Steps with their samples to send over steps without; the three kinds in turn, each round in another order."""
    samples = SAMPLES[0.06]
    run = make_run(bed, "samples", 1, samples, order=-1)
    steps: Dict[str, List[float]] = {"there": [], "microbatches": [], "whole": []}
    orders = itertools.cycle(itertools.permutations(steps))
    usual_bytes = batches.LEAST_BYTES
    try:
        for order in itertools.islice(orders, rounds):
            for kind in order:
                batches.LEAST_BYTES = math.inf if kind == "whole" else usual_bytes
                steps[kind].append(run.step(loaded=kind == "there"))
    finally:
        batches.LEAST_BYTES = usual_bytes
        run.close()
    return {
        "scenario": bed.name,
        "array_bytes": 4 * HIDDEN * samples * NUM_MICROBATCHES,  # one for the first stage, one for the last
        "there": median_interval(steps["there"])._asdict(),
        **{
            f"{kind}_over_there": median_interval([a / b for a, b in zip(steps[kind], steps["there"])])._asdict()
            for kind in ("microbatches", "whole")
        },
    }


if __name__ == "__main__":
    sys.exit(main())
