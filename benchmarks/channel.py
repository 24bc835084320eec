"""The cost of greetings, admission and digests on the channel between workers, over loopback.

    python benchmarks/channel.py -o channel.json         (a minute on an idle machine)

Three kinds of connections take turns, one message each, and the order rotates from round to round:

- bare: any message from a greeted peer is let in; nothing but the greeting protects it.
- default: as in training, each message has to belong to a channel, in its order.
- digests: default, with a keyed digest of every message.

For each size the benchmark prints the median time of a message, and the median ratio to "bare" in the same round with
its 95 % interval. "admission_s" is the processor time that the default adds to a message. "share_of_step" is the share
of a step of `--step` seconds with `--messages`, by default of `fast-and-slow` in the README. The greeting comes once a
connection, not once a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from typing import Any, Callable, Dict, Iterator, List

from hwaware.bench.statistics import median_interval
from hwaware.greeting import Credentials, new_secret
from hwaware.runtime.channels import Incoming, channel
from hwaware.transport import Connection, Mailbox

SIZES = (1, 64 << 10, 1 << 20, 16 << 20)
KINDS = ("bare", "default", "digests")
LIMIT_S = 60.0
# Of the small GPT in four stages and eight microbatches: three links, each there and back. The receiver's side counts.
STEP_MESSAGES, STEP_S = 3 * 2 * 8, 1.41


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--step", type=float, default=STEP_S, help="seconds of a step")
    parser.add_argument("--messages", type=int, default=STEP_MESSAGES, help="messages of a step")
    arguments = parser.parse_args()
    results = {"greeting_s": greeting_s(arguments.rounds), "messages": [row(size, arguments.rounds) for size in SIZES]}
    admission_s = admit_s(1000 * arguments.rounds)
    results["admission_s"] = admission_s
    results["share_of_step"] = arguments.messages * admission_s / arguments.step
    text = json.dumps(results, indent=1)
    print(text)
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as stream:
            stream.write(f"{text}\n")
    return 0


@contextlib.contextmanager
def sender(kind: str) -> Iterator[Callable[[Any], float]]:
    """A connection of a kind, as a function that sends a message and returns the seconds until it is taken."""
    credentials = Credentials(new_secret(), "benchmark", digests=kind == "digests")
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


if __name__ == "__main__":
    sys.exit(main())
