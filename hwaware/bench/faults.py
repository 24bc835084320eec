"""Measure what it costs to survive, and how long recoveries take, against a restart from a checkpoint on disk.

A small GPT trains on a scenario's hosts. First, rounds of steps with copies and rounds without them take turns. Then
workers are killed, one stage after the other, and at the end the link of a host goes down. A recovery's time is from
the driver's notice until all interrupted calls are made again.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Sequence

from hwaware.bench import testbed
from hwaware.bench.testbed.kinds import best_kind
from hwaware.bench.testbed.scenarios import Scenario
from hwaware.bench.testbed.state import State, state_path
from hwaware.errors import MeasurementError, UnusableInputError
from hwaware.formatting import counted

STEPS_A_ROUND, STEPS_AFTER = 4, 16
NEVER = 1 << 30
PROFILE = "cluster.json"
_PROGRAM_LIMIT_S = 3600.0


def require_links(scenarios: Sequence[Scenario], kind: str) -> None:
    """Refuse testbeds without a link to take down, before anything starts.

    Raises:
        UnusableInputError: A scenario has one host, or the kind of testbed has no links of its own.
    """
    works = best_kind(kind)
    for scenario in scenarios:
        if len(scenario.hosts()) < 2 or works.endswith("loopback"):
            raise UnusableInputError(
                f"{scenario.name} has {counted(len(scenario.hosts()), 'host')}, of kind {works}, expected a link that "
                "can go down between two hosts.",
                "choose a scenario with several hosts, and run as root without --kind.",
            )


def on_testbed(scenario: str, rounds: int, kills: int, kind: str = "auto") -> Dict[str, Any]:
    """Measure on a testbed of its own; return all times.

    Args:
        scenario: The testbed's scenario: its name, or the path of its file.
        rounds: Number of rounds with copies, and of rounds without.
        kills: Number of processes to kill.
        kind: How to build the testbed.
    """
    kind = best_kind(kind)  # as for `require_links`: other processes enter the testbed, not this one with its threads
    with testbed.running(scenario, kind=kind) as bed, tempfile.TemporaryDirectory(prefix="hwaware") as folder:
        found = _inside(bed, "measure", bed.address, str(rounds), str(kills), folder)
        start_s = time.monotonic()
        restart = _inside(bed, "restart", bed.address, folder)
        restart["took_s"] = restart.pop("end_s") - start_s
    return {"scenario": scenario, **found, "restart": restart}


def _inside(bed: Any, *arguments: str) -> Dict[str, Any]:
    """Run a part in a process of its own on the testbed; return what it prints."""
    environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-m", "hwaware.bench.faults", *arguments]
    try:
        done = subprocess.run(
            line, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=_PROGRAM_LIMIT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise MeasurementError(
            f"The training on {bed.name} ended early: {error}", "see what it has printed on standard error."
        ) from error
    # Ray may print more after the part's own line.
    found: Dict[str, Any] = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line[:1] == "{"))
    return found


class _Program:
    """A small GPT that trains on a running testbed.

    Attributes:
        bed: The testbed.
        losses: Those of all steps so far.
        state: The newest.
        step: Alpa's function.
    """

    def __init__(self, address: str, survives: bool, profile: Any = None) -> None:
        self.bed = testbed.find(address)
        assert self.bed is not None
        self.bed.enter()
        import ray

        ray.init(address=address, _node_ip_address=self.bed.head_address, log_to_driver=False, logging_level="error")
        from hwaware import models
        from hwaware.activation import enable
        from hwaware.bench.profiling import profile as measured_profile

        self.profile = profile or measured_profile(address, quick=True, say=lambda *_: None)
        enable(self.profile, survive=survives)
        import alpa

        alpa.init(cluster="ray")
        model = models.make(models.GptConfig(blocks=8, hidden=192, heads=6, sequence=64))
        method = alpa.PipeshardParallel(
            num_micro_batches=8, layer_option=alpa.AutoLayerOption(layer_num=8), stage_option="auto"
        )

        def train_step(state: Any, batch: Any) -> Any:
            return model.train_step(state, batch, value_and_grad=alpa.value_and_grad)

        self.step = alpa.parallelize(train_step, method=method)
        self.state: Any = model.initial_state(0)
        self.losses: List[float] = []
        self._model = model

    def batch_of(self, number: int) -> Any:
        """Return the batch of a step."""
        return self._model.batch(number, 32)

    def train(self) -> float:
        """Make a step; return its seconds."""
        batch = self.batch_of(len(self.losses))
        start_s = time.perf_counter()
        self.state, loss = self.step(self.state, batch)
        self.losses.append(float(loss._value))
        return time.perf_counter() - start_s


def measured(address: str, rounds: int, kills: int, folder: str) -> Dict[str, Any]:
    """Train on a running testbed, and return all times; leave a checkpoint and the profile in a folder."""
    program = _Program(address, survives=True)
    import alpa
    import ray

    from hwaware.patching import rescue, stage_option

    train = program.train
    train()
    run: Any = rescue.run_of(program.step.get_last_executable().mesh_group)
    for _ in range(3):
        train()
    plan = stage_option.last_plan()
    assert plan is not None
    times: Dict[str, List[float]] = {"with copies": [], "without": []}
    for _ in range(rounds):
        for kind, every in (("with copies", 1), ("without", NEVER)):
            run.copies.every = every
            train()  # the first may still wait for copies of the other kind
            times[kind] += [train() for _ in range(STEPS_A_ROUND)]
    run.copies.every = None
    copies = run.history()
    for kill in range(kills):
        for _ in range(3):
            train()
        workers = [worker for mesh in run.calls.group.meshes for worker in mesh.workers]
        pids = ray.get([worker.process_id.remote() for worker in workers], timeout=30)
        os.kill(pids[kill % len(pids)], signal.SIGKILL)
    for _ in range(3):
        train()
    program.profile.save(os.path.join(folder, PROFILE))
    alpa.save_checkpoint(folder, program.state, len(program.losses))
    processes = len(run.copies.events)
    _take_down(program.bed, run.calls.group.meshes[-1].host_info[0]["NodeManagerAddress"])
    down_s = time.perf_counter()
    train()
    whole_s = time.perf_counter() - down_s
    after = [train() for _ in range(STEPS_AFTER)]
    history = run.history()
    return {
        "stages": [[list(stage.layers), list(stage.devices)] for stage in plan.stages],
        "step_s": times,
        "copied_bytes_a_point": copies.copied_bytes / max(1, copies.points),
        "copy_s_a_point": copies.copy_s / max(1, copies.points),
        "processes": [event_of(event) for event in history.events[:processes]],
        "hosts": [event_of(event) for event in history.events[processes:]],
        "host_down_to_finished_s": whole_s,
        "step_after_host_s": after,
        "losses": program.losses,
    }


def restarted(address: str, folder: str) -> Dict[str, Any]:
    """Start the program again from its checkpoint, on the hosts that are left.

    Returns:
        The seconds of each phase, the time at which the first step ended, and the program's mapping. Then the times of
        more steps, which a placement from the start takes on these hosts.
    """
    from hwaware.cluster import ClusterProfile

    ends = [time.monotonic()]
    program = _Program(address, survives=False, profile=ClusterProfile.load(os.path.join(folder, PROFILE)))
    ends.append(time.monotonic())
    from hwaware.patching import choosing, stage_option
    from hwaware.patching.restoring import restore_newest

    program.state, first = restore_newest(folder, program.step, program.state, program.batch_of(0))
    program.losses = [0.0] * first
    ends.append(time.monotonic())
    program.train()
    ends.append(time.monotonic())
    plan = stage_option.last_plan()
    assert plan is not None
    return {
        "phases": {name: last - begin for name, begin, last in zip(("start", "restore", "step"), ends, ends[1:])},
        "end_s": ends[-1],
        "mapping": choosing.mapping_of(plan),
        "step_s": [program.train() for _ in range(STEPS_AFTER)],
    }


def _take_down(bed: Any, address: str) -> None:
    """Take the link of a host down."""
    import pyroute2

    lost = next(host for host in bed.hosts if bed.hosts[host] == address)
    with pyroute2.IPRoute() as route:
        veth = State.load(state_path(bed.name)).veth(lost)
        route.link("set", index=route.link_lookup(ifname=veth)[0], state="down")


def event_of(event: Any) -> Dict[str, Any]:
    """Return a recovery's figures."""
    return {"took_s": event.took_s, "phases": event.phases, "made_again": event.made_again, "mapping": event.mapping}


def summary(found: Dict[str, Any]) -> str:
    """Return the figures as text."""
    on, off = (statistics.median(found["step_s"][kind]) for kind in ("with copies", "without"))
    lines = [
        f"step with copies {on:.4f} s, without {off:.4f} s (medians): {100 * (on / off - 1):+.2f} %; "
        f"{found['copied_bytes_a_point'] / 1e6:.1f} MB a point, {1e3 * found['copy_s_a_point']:.1f} ms to copy"
    ]
    for kind in ("processes", "hosts"):
        events = [event for event in found[kind] if event["phases"]]
        if not events:
            continue
        phases = {name: statistics.median(event["phases"][name] for event in events) for name in events[0]["phases"]}
        words = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items())
        took = [event["took_s"] for event in events]
        lines.append(
            f"{kind}: {len(events)} lost, median {statistics.median(took):.2f} s, most {max(took):.2f} s ({words})"
        )
    lines.append(f"host's link down to finished step: {found['host_down_to_finished_s']:.1f} s, the notice included")
    words = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found["restart"]["phases"].items())
    lines.append(f"started again from a checkpoint instead: {found['restart']['took_s']:.1f} s ({words})")
    after, fresh = (statistics.median(steps) for steps in (found["step_after_host_s"], found["restart"]["step_s"]))
    lines.append(
        f"step after the host's loss {after:.4f} s, placed from the start on the hosts that are left {fresh:.4f} s "
        f"(medians): {fresh / after:.3f} of that throughput ({found['restart']['mapping']})"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    part, *given = sys.argv[1:]
    if part == "measure":
        print(json.dumps(measured(given[0], int(given[1]), int(given[2]), given[3])), flush=True)
    else:
        print(json.dumps(restarted(given[0], given[1])), flush=True)
