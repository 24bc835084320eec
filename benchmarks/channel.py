"""The cost of greetings, admission, digests and encryption on the channel between workers.

    python benchmarks/channel.py -o channel.json         (a minute on an idle machine, over loopback)
    python benchmarks/channel.py --testbed               (root; also trains on a testbed; about five minutes)

Four kinds of connections take turns, one message each, and the order rotates from round to round:

- bare: any message from a greeted peer is let in; nothing but the greeting protects it.
- default: as in training, each message has to belong to a channel, in its order.
- digests: default, with a keyed digest of every message.
- encrypted: default, with TLS.

For each size the benchmark prints the median time of a message, and the median ratio to "bare" in the same round with
its 95 % interval. "admission_s" is the processor time that the default adds to a message. The greeting comes once a
connection, not once a step.

With `--testbed`, the small GPT of the README trains on `fast-and-slow` with the default, digests and encryption, a
step each in turns. "digests_over_default" is the median ratio of steps with its 95 % interval. Training cannot go
without greetings and admission, so "share_of_step" is computed: `admission_s` of all messages of a step, as if the
slowest host admitted all, over the measured step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from typing import Any, Callable, Dict, Iterator, List

from hwaware.bench.statistics import median_interval, ratio_interval
from hwaware.cli._run import cleaning_up_when_terminated
from hwaware.encryption import Encryption, new_identity
from hwaware.greeting import Credentials, new_secret
from hwaware.runtime.channels import Incoming, channel
from hwaware.transport import Connection, Mailbox

SIZES = (1, 64 << 10, 1 << 20, 16 << 20)
KINDS = ("bare", "default", "digests", "encrypted")
LIMIT_S = 60.0
SCENARIO, NUM_LAYERS, NUM_MICROBATCHES, MICROBATCH_SIZE = "fast-and-slow", 8, 8, 2
SETTINGS: Dict[str, Dict[str, Any]] = {
    "default": {},
    "digests": {"message_digests": True},
    "encrypted": {"encrypt": True},
}


@cleaning_up_when_terminated()
def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--testbed", action="store_true", help=f"also train on the testbed {SCENARIO}")
    parser.add_argument("--steps", type=int, default=40, help="steps of each kind on the testbed")
    arguments = parser.parse_args()
    results = {"greeting_s": greeting_s(arguments.rounds), "messages": [row(size, arguments.rounds) for size in SIZES]}
    admission_s = admit_s(1000 * arguments.rounds)
    results["admission_s"] = admission_s
    if arguments.testbed:
        results["testbed"] = on_testbed(admission_s, arguments.steps)
    text = json.dumps(results, indent=1)
    print(text)
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as stream:
            stream.write(f"{text}\n")
    return 0


@contextlib.contextmanager
def sender(kind: str) -> Iterator[Callable[[Any], float]]:
    """A connection of a kind, as a function that sends a message and returns the seconds until it is taken."""
    encryption = Encryption(new_identity()) if kind == "encrypted" else None
    credentials = Credentials(new_secret(), "benchmark", kind == "digests", encryption)
    with contextlib.closing(Mailbox("127.0.0.1", credentials, bound=8)) as mailbox:
        if kind != "bare":
            incoming = Incoming(blocking=False)
            incoming.join("g", 1, 2)
            mailbox.admit = incoming.admit
        with contextlib.closing(Connection(("127.0.0.1", mailbox.port), credentials)) as connection:
            keys = (f"{channel('g', (0, 0), (1, 0))}#{number}" for number in range(1, 1 << 30))

            def send(payload: Any) -> float:
                key = next(keys)
                start = time.perf_counter()
                connection.send(key, payload)
                mailbox.take(key, LIMIT_S, len(payload))
                return time.perf_counter() - start

            yield send


def row(size: int, rounds: int) -> Dict[str, Any]:
    """Times of one size, the kinds in turn."""
    payload = bytes(size)
    times: Dict[str, List[float]] = {kind: [] for kind in KINDS}
    with contextlib.ExitStack() as stack:
        senders = {kind: stack.enter_context(sender(kind)) for kind in KINDS}
        for number in range(-5, rounds):
            for place in range(len(KINDS)):
                kind = KINDS[(number + place) % len(KINDS)]
                seconds = senders[kind](payload)
                if number >= 0:
                    times[kind].append(seconds)
    ratios = {kind: [a / b for a, b in zip(times[kind], times["bare"])] for kind in KINDS[1:]}
    return {
        "bytes": size,
        "median_s": {kind: statistics.median(found) for kind, found in times.items()},
        "over_bare": {kind: median_interval(found)._asdict() for kind, found in ratios.items()},
    }


def greeting_s(rounds: int) -> float:
    """Median time to connect and greet."""
    credentials = Credentials(new_secret(), "benchmark")
    times = []
    with contextlib.closing(Mailbox("127.0.0.1", credentials)) as mailbox:
        for _ in range(rounds):
            start = time.perf_counter()
            connection = Connection(("127.0.0.1", mailbox.port), credentials)
            times.append(time.perf_counter() - start)
            connection.close()
    return statistics.median(times)


def admit_s(count: int) -> float:
    """Processor time to admit a message, alone: it does not vary with what else the machine does."""
    incoming, peer = Incoming(blocking=False), object()
    incoming.join("g", 1, 2)
    keys = [f"{channel('g', (0, 0), (1, 0))}#{number}" for number in range(1, count + 1)]
    start = time.process_time()
    for key in keys:
        incoming.admit(key, 4096, peer)
    return (time.process_time() - start) / count


def on_testbed(admission_s: float, steps: int) -> Dict[str, Any]:
    """Train with every setting in turns, and compare the steps."""
    from hwaware import models, profiler, ray_cluster, runtime_settings
    from hwaware.activation import install_runtime
    from hwaware.bench import testbed
    from hwaware.bench.environment import running_environment
    from hwaware.bench.harness import measure
    from hwaware.bench.training import TrainingRun
    from hwaware.reference_kernel import kernel_reference

    install_runtime()
    model = models.make(models.GptConfig(hidden=384, heads=6, sequence=64))
    with testbed.running(SCENARIO) as bed, running_environment(
        bed.driver_environment()
    ), contextlib.ExitStack() as stack:
        bed.enter()
        stack.enter_context(ray_cluster.connect(bed.address))
        profile = profiler.profile(bed.address, quick=True)
        runs: List[TrainingRun] = []
        for name, chosen in SETTINGS.items():
            with runtime_settings(**chosen):
                plan = runs[0].plan if runs else None
                run = TrainingRun(name, model, profile, NUM_LAYERS, NUM_MICROBATCHES, MICROBATCH_SIZE, plan)
            runs.append(stack.enter_context(contextlib.closing(run)))
            run.wait_until_compiled()
        reference = kernel_reference(profile.environment)
        found = measure(runs, steps, 2, reference, dict.fromkeys(SETTINGS, 1.0))
        slowest = min(bed.scenario.shares.values())
    messages = 2 * (len(runs[0].plan.stages) - 1) * NUM_MICROBATCHES
    default = found[0]
    return {
        "step_s": statistics.median(default.step_s),
        "messages": messages,
        "share_of_step": messages * admission_s / slowest / statistics.median(default.step_s),
        **{
            f"{one.name}_over_default": ratio_interval(one.relative_steps, default.relative_steps)._asdict()
            for one in found[1:]
        },
        "losses_equal": all(run.losses == runs[0].losses for run in runs),
    }


if __name__ == "__main__":
    sys.exit(main())
