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
import time
from typing import Any, Dict, List

from hwaware.bench import testbed
from hwaware.bench.testbed.state import State, state_path

STEPS_A_ROUND = 4
NEVER = 1 << 30


def on_testbed(scenario: str, rounds: int, kills: int) -> Dict[str, Any]:
    """Measure on a testbed of its own; return all times.

    Args:
        scenario: The testbed's scenario: its name, or the path of its file.
        rounds: Number of rounds with copies, and of rounds without.
        kills: Number of processes to kill.
    """
    with testbed.running(scenario) as bed:
        line = [sys.executable, "-m", "hwaware.bench.faults", bed.address, str(rounds), str(kills)]
        environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: Dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"scenario": scenario, **found}


def measured(address: str, rounds: int, kills: int) -> Dict[str, Any]:
    """Train on a running testbed, and return all times."""
    bed = testbed.find(address)
    bed.enter()
    import ray

    ray.init(address=address, _node_ip_address=bed.head_address, log_to_driver=False, logging_level="error")
    from hwaware import models
    from hwaware.activation import enable
    from hwaware.bench.profiling import profile as measured_profile

    profile = measured_profile(address, quick=True, say=lambda *_: None)
    enable(profile, survive=True)
    import alpa

    from hwaware.patching import rescue, stage_option

    alpa.init(cluster="ray")
    model = models.make(models.GptConfig(blocks=8, hidden=192, heads=6, sequence=64))
    method = alpa.PipeshardParallel(
        num_micro_batches=8, layer_option=alpa.AutoLayerOption(layer_num=8), stage_option="auto"
    )

    def train_step(state: Any, batch: Any) -> Any:
        return model.train_step(state, batch, value_and_grad=alpa.value_and_grad)

    step = alpa.parallelize(train_step, method=method)
    state, number, losses = model.initial_state(0), 0, []

    def train() -> float:
        nonlocal state, number
        batch = model.batch(number, 32)
        start_s = time.perf_counter()
        state, loss = step(state, batch)
        losses.append(float(loss._value))
        number += 1
        return time.perf_counter() - start_s

    train()
    run = rescue.run_of(step.get_last_executable().mesh_group)
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
    processes = len(run.copies.events)
    lost = next(
        host for host in bed.hosts if bed.hosts[host] == run.calls.group.meshes[-1].host_info[0]["NodeManagerAddress"]
    )
    import pyroute2

    with pyroute2.IPRoute() as route:
        veth = State.load(state_path(bed.name)).veth(lost)
        route.link("set", index=route.link_lookup(ifname=veth)[0], state="down")
    down_s = time.perf_counter()
    train()
    whole_s = time.perf_counter() - down_s
    after = [train() for _ in range(5)]
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
        "losses": losses,
    }


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
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(measured(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))), flush=True)
