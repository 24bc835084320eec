"""Answer questions beside plans, by formulas: `hwaware estimate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import click

from hwaware.cli._run import NumberRange, json_option, print_document, print_json, reports_errors
from hwaware.errors import UnusableInputError
from hwaware.records import save_or_keep

if TYPE_CHECKING:
    from hwaware.report.fitting import Column


@click.group()
def command() -> None:
    """Estimate gradient sums, ZeRO's memory, iteration times, drifts from a profile, and gains of placing again."""


@command.command("sync", short_help="Ways to sum gradients, fastest first.")
@click.argument("cluster", type=click.Path(dir_okay=False))
@click.option("--bytes", "size", required=True, metavar="SIZE", help="Bytes of the gradients, as 500MB or 1GiB.")
@click.option("--workers", multiple=True, metavar="NAME", help="Host or device that trains. Repeatable. [all devices]")
@click.option("--servers", type=click.IntRange(0, 100_000), help="Spare hosts that sum. [hosts without workers]")
@click.option("--dtype", default="float32", show_default=True, help="Type that measured collectives should have.")
@json_option
@reports_errors
def sync(cluster: str, size: str, workers: Tuple[str, ...], servers: Optional[int], dtype: str, as_json: bool) -> None:
    """Compare the ways to sum gradients of the workers: a ring, parameter servers, BytePS and reduction servers.

    The ring has the price that `hwaware evaluate` uses. The runtime trains with rings; the other ways are estimates.

    \b
    Example:
        hwaware estimate sync cluster.json --bytes 500MB --servers 2
    """  # noqa: D301
    from hwaware.cluster import ClusterProfile
    from hwaware.costs.synchronisation import compare_syncs
    from hwaware.formatting import BYTES_PER_S, SECONDS, counted, text
    from hwaware.report.tables import number_column

    nbytes = _bytes(size, "--bytes")
    profile = ClusterProfile.load(cluster)
    devices = _devices(profile, workers)
    if servers is None:
        servers = len({device.host for device in profile.devices} - {profile.device(name).host for name in devices})
    found = compare_syncs(profile, nbytes, devices, servers, dtype)
    fastest = next(iter(found.seconds))
    document = {"bytes": nbytes, "workers": devices, "servers": servers, "fastest": fastest, **found._asdict()}
    if as_json:
        print_json(document)
        return
    times = list(found.seconds.values())
    ring = "measured collectives" if found.is_measured else "links"
    caption = f"The price of the ring comes from {ring}. Workers send {text(found.worker_bytes_per_s, BYTES_PER_S)}" + (
        f", servers {text(found.server_bytes_per_s, BYTES_PER_S)}." if servers else "."
    )
    ratios = [f"{seconds / times[0]:.2f}x" if times[0] else "-" for seconds in times]
    title = counted(len(devices), "worker") + (f", {counted(servers, 'server')}" if servers else "")
    columns = [number_column("time", times, SECONDS), ("of the fastest", ratios)]
    _print_table(title, [("way", list(found.seconds))], columns, caption)


@command.command("memory", short_help="Memory of a stage under ZeRO and offloading.")
@click.argument("workload", type=click.Path(dir_okay=False))
@click.option("--cluster", type=click.Path(dir_okay=False), help="Profile whose devices share the stage.")
@click.option("--devices", type=click.IntRange(1, 100_000), help="Number of devices that share the stage. [1]")
@click.option("--layers", metavar="A-B", help="First and last layer of the stage. [all]")
@click.option(
    "--microbatches", type=click.IntRange(1, 10**9), default=1, show_default=True, help="Microbatches per step."
)
@click.option(
    "--later-stages", type=click.IntRange(0, 10**6), default=0, show_default=True, help="Stages behind this one."
)
@click.option("--host-rate", metavar="SIZE", help="Bytes per second between a device and its host, as 12GB.")
@json_option
@reports_errors
def memory(
    workload: str,
    cluster: Optional[str],
    devices: Optional[int],
    layers: Optional[str],
    microbatches: int,
    later_stages: int,
    host_rate: Optional[str],
    as_json: bool,
) -> None:
    """Compare the memory of a stage that data parallelism spreads over devices: ZeRO 0 to 3, with and without offload.

    Level 0 is what `hwaware evaluate` counts. The runtime has no ZeRO; the other levels are estimates.

    \b
    Example:
        hwaware estimate memory workload.json --cluster cluster.json --layers 0-3 --microbatches 8
    """  # noqa: D301
    from hwaware.cluster import ClusterProfile
    from hwaware.costs.zero import LEVELS, ZeroStage, zero_cost
    from hwaware.formatting import BYTES, SECONDS, counted
    from hwaware.report.tables import number_column
    from hwaware.workload import Workload

    if cluster is not None and devices is not None:
        raise UnusableInputError("--cluster and --devices both say how many devices.", "leave one of them out.")
    model = Workload.load(workload)
    profile = ClusterProfile.load(cluster) if cluster is not None else None
    rate = None if host_rate is None else _bytes(host_rate, "--host-rate", least=1.0)
    count = len(profile.devices) if profile is not None else devices or 1
    stage = ZeroStage(model, _range(layers, len(model.layers)), count, microbatches, later_stages)
    kinds = sorted({device.kind for device in profile.devices}) if profile is not None else [""]
    rows: List[Dict[str, Any]] = []
    for level in LEVELS:
        for offload in (False, True):
            of_kinds = {kind: zero_cost(stage, level, offload, kind, rate) for kind in kinds}
            fullest = max(of_kinds.values(), key=lambda cost: cost.memory_bytes)
            row: Dict[str, Any] = {"level": level, "offload": offload, **fullest._asdict()}
            if profile is not None:
                row["fits"] = sum(of_kinds[one.kind].memory_bytes <= one.memory_bytes for one in profile.devices)
            rows.append(row)
    if as_json:
        print_json({"layers": list(stage.layers), "devices": count, "microbatches": microbatches, "levels": rows})
        return
    columns = [
        number_column(name, [row[f"{name}_bytes"] for row in rows], BYTES) for name in ("memory", "state", "sent")
    ]
    if rate is not None:
        columns.append(number_column("offload", [row["offload_s"] for row in rows], SECONDS))
    if profile is not None:
        columns.append(("fits on", [f"{row['fits']} of {count}" for row in rows]))
    _print_table(
        f"Layers {stage.layers[0]}-{stage.layers[1]} on {counted(count, 'device')}, "
        f"{counted(microbatches, 'microbatch')}",
        [("ZeRO", [f"{row['level']}{' + offload' if row['offload'] else ''}" for row in rows])],
        columns,
        "Of the fullest device. State: parameters, gradients, optimizer state. Sent: by each device in a step.",
    )


@command.command("iterations", short_help="Iteration times of GPT, from measured ones.")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option(
    "--at",
    "asked",
    multiple=True,
    metavar="NAME=VALUE[,...]",
    help="Configuration to predict, as layers=48,tensor_parallel=4. Repeatable. Columns that FILE holds one value of "
    "may be left out.",
)
@json_option
@reports_errors
def iterations(file: str, asked: Tuple[str, ...], as_json: bool) -> None:
    """Fit a model of GPT training to measured iterations in FILE, and predict other configurations.

    FILE is a CSV file. A hundred rows are enough. These columns describe a configuration:

    \b
        global_batch, micro_batch, hidden_size, attention_heads, layers,
        sequence_length, tensor_parallel, data_parallel, pipeline_parallel

    The column iteration_s, or iteration_ms, has the measured time.

    \b
    Example:
        hwaware estimate iterations measured.csv --at layers=48,tensor_parallel=4
    """  # noqa: D301
    import msgspec

    from hwaware.costs.iterations import COLUMNS, check_iterations, fit_iterations, read_iterations
    from hwaware.formatting import SECONDS, percent
    from hwaware.report.tables import number_column

    configurations, seconds = read_iterations(file)
    wanted = [_configuration(words, configurations, COLUMNS) for words in asked]
    model = fit_iterations(configurations, seconds)
    checked = check_iterations(configurations, seconds)
    predicted = model.predict_s(wanted).tolist() if wanted else []
    if as_json:
        print_json(
            {
                "rows": len(seconds),
                "model": msgspec.to_builtins(model),
                "errors": None if checked is None else checked._asdict(),
                "predicted": [{**one, "iteration_s": each} for one, each in zip(wanted, predicted)],
            }
        )
        return
    error = "Ten rows or more would tell the error."
    if checked is not None:
        error = (
            f"Error of rows that the fit did not see: {percent(checked.mean)} on average, "
            f"at most {percent(checked.p90)} for nine in ten."
        )
    title = f"Fitted to {len(seconds)} rows"
    if wanted:
        columns = [(name, [f"{one[name]:g}" for one in wanted]) for name in COLUMNS]
        _print_table(title, [], [*columns, number_column("iteration", predicted, SECONDS)], error)
        return
    parameters = {name: f"{value:.4g}" for name, value in msgspec.to_builtins(model).items()}
    _print_table(title, [("parameter", list(parameters))], [("value", list(parameters.values()))], error)


@command.command("refit", short_help="Correct a profile by the steps of a result.")
@click.argument("result", type=click.Path(dir_okay=False))
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Corrected profile to write (cluster.json).")
@click.option(
    "--workload",
    "workload_output",
    type=click.Path(dir_okay=False),
    help="Corrected workload to write (workload.json).",
)
@json_option
@reports_errors
def refit(result: str, output: Optional[str], workload_output: Optional[str], as_json: bool) -> None:
    """Find factors by which a cluster differs from its profile, from the measured steps of RESULT.

    RESULT is a file of `hwaware bench` or `hwaware demo`. Each kind of device has a factor for its computations, and
    all messages share one. If the workload has measured layers, write it too, because the factors correct them.

    \b
    Example:
        hwaware estimate refit results/fast-and-slow-gpt.json -o cluster.json --workload workload.json
    """  # noqa: D301
    import msgspec

    from hwaware.costs import evaluate
    from hwaware.costs import refit as fit
    from hwaware.formatting import percent
    from hwaware.result import BenchmarkResult

    measured = BenchmarkResult.load(result)
    if measured.workload is None or measured.profile is None:
        raise UnusableInputError(
            f"{result} lacks the workload or the profile of its run.", "give a result of a newer hwaware bench."
        )
    model, profile = measured.workload, measured.profile
    # A mapping with a reference of its own ran before the cluster changed, and the profile is of after that.
    mappings = [one for one in measured.mappings if one.profile_reference_s is None]
    observed = [(one.plan, one.typical(one.predictable_s)) for one in mappings]

    def error(inputs: Tuple[Any, Any], steps: Sequence[Tuple[Any, float]]) -> float:
        return sum(abs(evaluate(plan, *inputs).step_s / seconds - 1) for plan, seconds in steps) / len(steps)

    found = fit(observed, model, profile)
    corrected = found.applied(model, profile)
    errors = {"before": error((model, profile), observed), "after": error(corrected, observed)}
    for path, record in ((workload_output, corrected[0]), (output, corrected[1])):
        if path is not None:
            save_or_keep(record, path, print_document)
    if as_json:
        print_json({**msgspec.to_builtins(found), "errors": errors, "mappings": len(observed)})
        return
    factors = {**found.compute, "messages": found.communication}
    caption = f"Mean error of {len(observed)} predicted steps: {percent(errors['before'])}, corrected "
    caption += f"{percent(errors['after'])}. The fit saw these steps."
    columns = [("factor", [f"{factor:.3f}" for factor in factors.values()])]
    _print_table("Measured over predicted time", [("kind of device", list(factors))], columns, caption)


@command.command("adapting", short_help="Policies that place again as devices slow down.")
@click.argument("cluster", type=click.Path(dir_okay=False))
@click.argument("workload", type=click.Path(dir_okay=False))
@click.option(
    "--microbatches", type=click.IntRange(1, 10**9), default=16, show_default=True, help="Microbatches per step."
)
@click.option("--load", type=click.Path(dir_okay=False), help="Load trace to play. [random ones of each kind]")
@click.option("--seeds", type=click.IntRange(1, 1000), default=2, show_default=True, help="Random traces of each kind.")
@click.option("--steps", type=click.IntRange(1), default=1000, show_default=True, help="Steps of each random trace.")
@click.option(
    "--noise",
    type=NumberRange(0.0, 1.0),
    default=0.08,
    show_default=True,
    help="Noise of times in random traces: standard deviation of their logarithms.",
)
@click.option(
    "--compile",
    "compile_s",
    type=NumberRange(0.0, 1e9),
    default=10.0,
    show_default=True,
    help="Seconds to compile a new placement.",
)
@json_option
@reports_errors
def adapting(
    cluster: str, workload: str, microbatches: int, load: Optional[str], seeds: int, steps: int, noise: float,
    compile_s: float, as_json: bool,
) -> None:  # fmt: skip
    """Play load traces against policies that place WORKLOAD again on CLUSTER, and compare their total times.

    Each number is a policy's time over that of somebody who knows the future, and the number of its switches. "ours"
    sees noisy times of passes and messages alone. All other policies see the true load, `malleus` with a little noise.

    \b
    Example:
        hwaware estimate adapting cluster.json workload.json --microbatches 8
    """  # noqa: D301
    from hwaware.adapting import POLICIES, LoadTrace, Stand, play, random_trace, ratios
    from hwaware.adapting.loads import KINDS
    from hwaware.cluster import ClusterProfile
    from hwaware.errors import InfeasibleError
    from hwaware.placement import plan
    from hwaware.workload import Workload

    profile, model = ClusterProfile.load(cluster), Workload.load(workload)
    placed = plan(model, profile, num_microbatches=microbatches)
    if placed.status == "infeasible":
        raise InfeasibleError(f"{model.name} fits on no placement of {cluster}.", "see `hwaware plan`.")
    if load is not None:
        traces = {(load, 0): LoadTrace.load(load)}
    elif len(profile.hosts) < 2:
        raise UnusableInputError(f"{cluster} has one host, expected two or more.", "give a trace by --load.")
    else:
        traces = {
            (kind, seed): random_trace(profile, kind, seed, steps, noise) for kind in KINDS for seed in range(seeds)
        }
    rows = []
    for (name, seed), trace in traces.items():
        stand = Stand(model, profile, placed, trace, compile_s=compile_s, seed=seed)
        played = [play(stand, policy) for policy in POLICIES]
        rows.append((name, seed, played, ratios(played)))
    if as_json:
        loads = [
            {"load": name, "seed": seed, "policies": [{**one._asdict(), "ratio": r[one.policy]} for one in played]}
            for name, seed, played, r in rows
        ]
        print_json({"microbatches": microbatches, "loads": loads})
        return
    columns = [
        (policy, [f"{r[policy]:.2f} ({one[index].switches})" for _, _, one, r in rows])
        for index, policy in enumerate(POLICIES)
        if policy != "clairvoyant"
    ]
    _print_table(
        f"workload {model.name}, {microbatches} microbatches: time over the least possible (switches)",
        [("load", [name for name, *_ in rows]), ("seed", [str(seed) for _, seed, *_ in rows])],
        columns,
        "Least possible: the best choice of placements by somebody who knows the load beforehand.",
    )


def _print_table(title: str, names: Sequence[Column], columns: Sequence[Column], caption: str) -> None:
    from hwaware.report.console import make_console
    from hwaware.report.fitting import build_table

    make_console().print(build_table(title, names, columns, caption))


def _bytes(words: str, option: str, least: float = 0.0) -> float:
    from hwaware.formatting import parse_bytes

    try:
        found = parse_bytes(words)
        if not least <= found < 1e18:
            raise ValueError(f"{words!r} is no amount from {least:g} bytes to 1e18")
    except ValueError as error:
        raise UnusableInputError(f"{option}: {error}.", f"give for example {option} 500MB.") from None
    return found


def _devices(profile: Any, names: Sequence[str]) -> List[str]:
    """Return the ids of the named devices and of all devices of the named hosts, each once."""
    by_host: Dict[str, List[str]] = {}
    for device in profile.devices:
        by_host.setdefault(device.host, []).append(device.id)
        by_host[device.id] = [device.id]
    unknown = [name for name in names if name not in by_host]
    if unknown:
        hosts = ", ".join(host.name for host in profile.hosts)
        raise UnusableInputError(
            f"--workers names {', '.join(unknown)}, but the cluster has the hosts {hosts}.",
            "name hosts or devices of the profile.",
        )
    chosen = names or [device.id for device in profile.devices]
    return list(dict.fromkeys(device for name in chosen for device in by_host[name]))


def _range(layers: Optional[str], count: int) -> Tuple[int, int]:
    if layers is None:
        return 0, count - 1
    first, _, last = layers.partition("-")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise UnusableInputError(
            f"--layers is {layers!r}, expected the first and the last layer.", "give for example --layers 0-3."
        ) from None


def _configuration(words: str, configurations: Sequence[Dict[str, float]], columns: Sequence[str]) -> Dict[str, float]:
    """Return the asked configuration, completed by the columns that have one value in all rows."""
    from hwaware.costs.iterations import require_configuration

    given: Dict[str, float] = {}
    for word in words.split(","):
        name, _, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name.strip() not in columns or not 0 < number < 1e15:
            raise UnusableInputError(
                f"--at has {word!r}, expected NAME=VALUE with a number above 0.", f"choose from {', '.join(columns)}."
            )
        if given.setdefault(name.strip(), number) != number:
            raise UnusableInputError(f"--at {words!r} gives {name.strip()} two values.", "leave one of them out.")
    values = {name: {row[name] for row in configurations} for name in columns}
    same = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    missing = [name for name in columns if name not in {**same, **given}]
    if missing:
        raise UnusableInputError(
            f"--at {words!r} lacks {', '.join(missing)}, and the rows of the file differ there.", "add them to --at."
        )
    asked = {name: {**same, **given}[name] for name in columns}
    require_configuration(asked, f"--at {words}")
    return asked
