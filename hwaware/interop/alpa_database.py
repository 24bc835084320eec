"""Turn Alpa's profiling database, prof_database.pkl, into a ClusterProfile and back.

The file is `{(cluster key, (hosts, devices per host)): tables}`. A table maps (replica groups, "f16" or "f32") to
`[(x, seconds)]`. Alpa's own profiler writes x in elements of the full array. Alpa's cost model, however, looks up the
bytes of one device's operand, and subtracts the point at x = 0. Databases
from hwaware hold x as that cost model reads it.
"""

from __future__ import annotations

import itertools
import math
import pickle
import reprlib
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hwaware.cluster import ClusterProfile, Collective, Device, Host, Link, LinkSample, MatrixProduct
from hwaware.dtypes import SHORT_NAMES
from hwaware.errors import RecordError, UnusableInputError
from hwaware.interop import restricted_pickle
from hwaware.interop.estimates import Estimates
from hwaware.records import (
    LEAST_SECONDS,
    MOST_FLOPS,
    MOST_SECONDS,
    PathLike,
    require,
    require_amount,
    require_finite,
    write_bytes,
)

Groups = Tuple[Tuple[int, ...], ...]
Shape = Tuple[int, int]
Points = Tuple[Tuple[float, float], ...]
Curves = Dict[Tuple[Groups, str], Points]

OPERATIONS = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
DTYPES = {short: SHORT_NAMES[short] for short in ("f16", "f32")}
_BYTES = {"f16": 2, "f32": 4}
CLUSTER_KEY = "default"
# hwaware writes this beside the tables to recognise its own files; Alpa ignores it.
_MARK, _OPERAND_BYTES = "hwaware_sizes", "operand bytes"
# Limits on a cluster, since a profile has a link for each pair of hosts, and each device has all products of its kind.
_MOST_DEVICES = 4096
_MOST_HOSTS = 512
_MOST_PRODUCTS = 500_000
# Limit on the sizes, times and ranks of a database; a file can name one list many times.
_MOST_NUMBERS = 4_000_000
# Alpa subtracts the point at 0 from all others. A real latency there would vanish from every price; a time of 0 would
# fail, because Alpa divides by it when it prints.
_NOTHING = (0, 1e-12)
# Sizes of written curves: each power of two from 1 KiB to 1 GiB of the full array.
_SIZES = tuple(1 << bit for bit in range(10, 31))
_FIX = "give a prof_database.pkl that Alpa or hwaware wrote."


class Mesh(NamedTuple):
    """Measurements of one submesh shape.

    Attributes:
        memory_bytes: Memory that each device may use; None if the database lacks it.
        products: Data type -> (FLOPs, seconds).
        collectives: Operation -> groups and data type -> (bytes of the full array, seconds).
    """

    memory_bytes: Optional[float]
    products: Dict[str, Points]
    collectives: Dict[str, Curves]


def read_database(path: PathLike, key: str = CLUSTER_KEY) -> Dict[Shape, Mesh]:
    """Read the tables of one cluster by mesh shape, without running any code in the file.

    Sizes become bytes of the full logical array.

    Raises:
        RecordError: The file is no such database, names anything but its tables, or lacks that cluster.
    """
    document = restricted_pickle.load(path)
    try:
        entries = list(_entries(document, key))
        numbers = sum(_numbers(table) for _, table in entries)
        require(numbers <= _MOST_NUMBERS, f"it holds {numbers} numbers, expected at most {_MOST_NUMBERS}")
        meshes = {shape: _mesh(table, shape) for shape, table in entries}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise RecordError(f"{path} is not a valid profiling database: {error}.", _FIX) from error
    if not meshes:
        raise RecordError(f"{path} holds no cluster called {key!r}.", "name the cluster (--key).")
    return meshes


def _entries(document: Any, key: str) -> Iterable[Tuple[Shape, Any]]:
    require(isinstance(document, dict), f"it holds a {type(document).__name__}, expected a dictionary")
    for name, table in document.items():
        cluster, shape = name
        if not isinstance(cluster, str) or not isinstance(shape, tuple):
            raise ValueError(f"the key {_shown(name)} is no cluster and shape")
        hosts, devices = (_whole(number) for number in shape)
        if not (0 < hosts <= _MOST_HOSTS and devices > 0 and hosts * devices <= _MOST_DEVICES):
            limits = f"expected at most {_MOST_HOSTS} hosts and {_MOST_DEVICES} devices"
            raise ValueError(f"the mesh shape {_shown(shape)} is not one of a cluster: {limits}")
        require(isinstance(table, restricted_pickle.Table), f"the entry of {hosts} x {devices} devices is no table")
        if cluster == key:
            yield (hosts, devices), table


def _numbers(table: Any) -> int:
    """Return how many sizes, times and ranks a table becomes, before any work on them."""
    curves = [vars(table).get(name) for name in ("dot_cost_dict", *map(_attribute, OPERATIONS))]
    return sum(
        sum(map(len, groups or ())) + 2 * len(points)
        for one in curves
        for (groups, _), points in dict(one or {}).items()
    )


def _mesh(table: Any, shape: Shape) -> Mesh:
    state = vars(table)
    in_bytes = state.get(_MARK) == _OPERAND_BYTES
    products = {dtype: points for (_, dtype), points in _curves(state.get("dot_cost_dict")).items()}
    collectives = {
        op: {
            # Drop hwaware's own point at 0, which is no measurement.
            (groups, dtype): tuple((x * _unit(op, groups, dtype, in_bytes), t) for x, t in points if x or not in_bytes)
            for (groups, dtype), points in _curves(state.get(_attribute(op))).items()
            if _is_of(groups, shape)
        }
        for op in OPERATIONS
    }
    memory = state.get("available_memory_per_device")
    if memory is not None:
        require_finite("available_memory_per_device", memory, exclusive=True)
    return Mesh(memory, products, collectives)


def _attribute(op: str) -> str:
    return f"{op.replace('-', '_')}_cost_dict"


def _curves(table: Any) -> Curves:
    found: Curves = {}
    for (groups, dtype), points in dict(table or {}).items():
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"data type {_shown(dtype)} is neither f16 nor f32")
        members = tuple(tuple(_whole(rank) for rank in group) for group in groups or ())
        curve = []
        for x, seconds in points:
            require_amount("a size", x, MOST_FLOPS)
            if math.isfinite(seconds):  # Alpa records a failed measurement as infinite
                require_amount("a time", seconds, MOST_SECONDS)
                curve.append((float(x), float(seconds)))
        found[members, dtype] = tuple(sorted(curve))
    return found


def _is_of(groups: Groups, shape: Shape) -> bool:
    ranks = [rank for group in groups for rank in group]
    count = shape[0] * shape[1]
    require(all(0 <= rank < count for rank in ranks), f"groups name devices that a mesh of {count} does not have")
    require(len(set(ranks)) == len(ranks), f"groups of a mesh of {count} name a device twice")
    require(all(groups), f"a group of a mesh of {count} is empty")
    return bool(groups)


def _unit(op: str, groups: Groups, dtype: str, in_bytes: bool) -> float:
    """Return the factor from x to bytes of the full array."""
    if not in_bytes:
        return _BYTES[dtype]
    return len(groups[0]) if op in ("all-gather", "all-to-all") else 1


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{_shown(value)} is not a whole number")
    return int(value)


class _Shown(reprlib.Repr):
    """Show a value in few words, however large it is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3

    def repr_instance(self, x: Any, level: int) -> str:
        return f"a {type(x).__name__}"

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 64 else "a number of many digits"

    repr_bool = repr_float = repr_NoneType = lambda self, x, level: repr(x)


def _shown(value: Any) -> str:
    return _Shown().repr(value)[:100]


def import_profile(meshes: Mapping[Shape, Mesh], kind: str = "unknown", source: str = "") -> ClusterProfile:
    """Turn the largest mesh into a cluster of identical hosts h0, h1, ...

    The database has no point-to-point times. Every link gets the rate that a ring over the largest group reached, which
    assumes identical hosts.

    Args:
        meshes: The result of `read_database`.
        kind: Model of the devices, which the database does not name.
        source: Origin to note in the profile's environment.

    Raises:
        RecordError: The mesh lacks matrix products, available memory, or collectives to derive links from.
    """
    shape = max(meshes, key=lambda one: (one[0] * one[1], one[0]))
    mesh = meshes[shape]
    hosts, per_host = shape
    ids = [f"h{host}:{index}" for host in range(hosts) for index in range(per_host)]
    points = sum(map(len, mesh.products.values())) * len(ids)
    if points > _MOST_PRODUCTS:
        raise RecordError(
            f"The database has {points // len(ids)} matrix products for each of {len(ids)} devices, expected at most "
            f"{_MOST_PRODUCTS} in all.",
            _FIX,
        )
    try:
        products = {
            DTYPES[dtype]: tuple(MatrixProduct(flops=x, seconds=t) for x, t in points if x > 0 and t > 0)
            for dtype, points in mesh.products.items()
        }
    except ValueError as error:
        raise RecordError(f"A matrix product of the database is not valid: {error}.", _FIX) from error
    products = {dtype: points for dtype, points in products.items() if points}
    if not products or mesh.memory_bytes is None:
        lacking = "matrix products" if not products else "available memory"
        raise RecordError(f"The database has no {lacking} of the mesh {shape}.", "profile this cluster with hwaware.")
    try:
        return ClusterProfile(
            hosts=tuple(Host(name=f"h{host}") for host in range(hosts)),
            devices=tuple(
                Device(
                    id=one,
                    host=one.partition(":")[0],
                    kind=kind,
                    memory_bytes=int(mesh.memory_bytes),
                    throughput=products,
                )
                for one in ids
            ),
            links=tuple(_links(mesh, hosts, per_host)),
            collectives=tuple(_collectives(mesh, ids)),
            environment={"source": source, "links": "derived from the collectives of a profiling database"},
        )
    except ValueError as error:
        raise RecordError(f"The database makes no valid cluster: {error}.", _FIX) from error


def _links(mesh: Mesh, hosts: int, per_host: int) -> Iterable[Link]:
    names = [f"h{host}" for host in range(hosts)]
    if per_host > 1:
        latency_s, rate = _ring(mesh, lambda groups: all(_host(group, per_host) is not None for group in groups))
        for name in names:
            yield Link(source=name, target=name, latency_s=latency_s, bandwidth_bytes_per_s=rate)
    if hosts > 1:
        latency_s, rate = _ring(mesh, lambda groups: len(groups) == 1 and len(groups[0]) == hosts * per_host)
        for source, target in itertools.permutations(names, 2):
            yield Link(source=source, target=target, latency_s=latency_s, bandwidth_bytes_per_s=rate)


def _host(group: Sequence[int], per_host: int) -> Optional[int]:
    """Return the index of the host of all members, or None if they are on several."""
    found = {rank // per_host for rank in group}
    return found.pop() if len(found) == 1 else None


def _ring(mesh: Mesh, fits: Callable[[Groups], bool]) -> Tuple[float, float]:
    """Return latency of one hop and rate of a ring: the best that any operation of the largest group reached.

    No operation outruns its links, so the fastest one tells most about them.
    """
    found: List[Tuple[int, float, float]] = []
    for op, laps in (("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)):
        for (groups, _), points in mesh.collectives[op].items():
            if fits(groups) and len(points) > 1 and len(groups[0]) > 1:
                hops = laps * (len(groups[0]) - 1)
                (_, first_s), (nbytes, last_s) = points[0], points[-1]
                if last_s < LEAST_SECONDS:
                    continue
                rate = nbytes / len(groups[0]) * hops / max(last_s - first_s, last_s / 10)
                found.append((len(groups[0]), rate, first_s / hops))
    if not found:
        raise RecordError("The database has no collective to derive a link from.", "profile this cluster with hwaware.")
    largest = [one for one in found if one[0] == max(found)[0]]
    return min(latency_s for _, _, latency_s in largest), max(rate for _, rate, _ in largest)


def _collectives(mesh: Mesh, ids: Sequence[str]) -> Iterable[Collective]:
    """Yield a record for each curve of a single group; a profile has none for several groups at once."""
    for op, curves in mesh.collectives.items():
        for (groups, dtype), points in curves.items():
            samples = tuple(LinkSample(bytes=x, seconds=t) for x, t in points if t > 0)
            if len(groups) == 1 and len(groups[0]) > 1 and samples:
                devices = tuple(ids[rank] for rank in groups[0])
                yield Collective(op=op, devices=devices, dtype=DTYPES[dtype], points=samples)


def export_profile(profile: ClusterProfile, path: PathLike) -> List[Shape]:
    """Write a cluster as a database that Alpa can load, and return its mesh shapes.

    Alpa's database knows shapes but no hosts, so hwaware prices each shape on the cluster's slowest devices and links.
    Alpa looks bfloat16 up as f32. The file omits data types that were not measured.

    Raises:
        UnusableInputError: The hosts have unequal numbers of devices, or neither float32 nor float16 was measured.
        RecordError: The file cannot be written.
    """
    counts = {host.name: sum(device.host == host.name for device in profile.devices) for host in profile.hosts}
    if len(set(counts.values())) != 1:
        raise UnusableInputError(
            f"Alpa's database needs hosts with equal numbers of devices, found {counts}.",
            "export a part of the cluster: remove hosts from the file.",
        )
    estimates = Estimates(profile)
    dtypes = [short for short, dtype in DTYPES.items() if estimates.has(dtype)]
    if not dtypes:
        raise UnusableInputError(
            "No device has a throughput curve for float32 or float16, the only types in Alpa's database.",
            "measure one (hwaware profile --dtype float32).",
        )
    shapes = _shapes(len(profile.hosts), next(iter(counts.values())))
    entries = [((CLUSTER_KEY, shape), _state(estimates, shape, dtypes)) for shape in shapes]
    write_bytes(path, _pickled(entries))
    return shapes


def _shapes(hosts: int, per_host: int) -> List[Shape]:
    """Return Alpa's submesh choices: powers of two of one host's devices, then whole hosts."""
    inside = [(1, 1 << bit) for bit in range(per_host.bit_length()) if 1 << bit <= per_host]
    return list(dict.fromkeys([*inside, *((count, per_host) for count in range(1, hosts + 1))]))


def _groups(shape: Shape) -> List[Groups]:
    """Return rows and columns of every logical mesh of this shape: all groups that Alpa's partitioner makes."""
    count = shape[0] * shape[1]
    found: List[Groups] = []
    for columns in range(1, count + 1):
        if count % columns == 0:
            rows = count // columns
            found.append(tuple(tuple(row * columns + c for c in range(columns)) for row in range(rows)))
            found.append(tuple(tuple(row * columns + c for row in range(rows)) for c in range(columns)))
    return list(dict.fromkeys(found))


def _state(estimates: Estimates, shape: Shape, dtypes: Sequence[str]) -> Dict[str, Any]:
    state: Dict[str, Any] = {
        "available_memory_per_device": estimates.memory_bytes(),
        "dot_cost_dict": {((), short): [_NOTHING, *estimates.products(DTYPES[short])] for short in dtypes},
        "conv_cost_dict": [],
        "op_cost_dict": [],
        _MARK: _OPERAND_BYTES,
    }
    for op in OPERATIONS:
        state[_attribute(op)] = {
            (groups, short): [_NOTHING, *_operand_points(estimates, op, groups, shape[1])]
            for groups in _groups(shape)
            for short in dtypes
        }
    return state


def _operand_points(estimates: Estimates, op: str, groups: Groups, per_host: int) -> List[Tuple[int, float]]:
    divisor = len(groups[0]) if op in ("all-gather", "all-to-all") else 1
    times = {nbytes: estimates.collective_s(op, groups, per_host, nbytes) for nbytes in _SIZES}
    return [(max(1, nbytes // divisor), max(seconds, _NOTHING[1])) for nbytes, seconds in times.items()]


def _pickled(entries: Sequence[Tuple[Any, Dict[str, Any]]]) -> bytes:
    """Return the pickle of {key: MeshProfilingResult}, assembled by hand so that Alpa need not be installed.

    The pickle module encodes plain values. The opcodes between them make objects of Alpa's class.
    """
    parts = [pickle.PROTO, bytes([2]), pickle.EMPTY_DICT]
    for key, state in entries:
        parts += [_fragment(key), b"calpa.mesh_profiling\nMeshProfilingResult\n", pickle.EMPTY_TUPLE, pickle.NEWOBJ]
        parts += [_fragment(state), pickle.BUILD, pickle.SETITEM]
    return b"".join([*parts, pickle.STOP])


def _fragment(value: Any) -> bytes:
    """Return the opcodes that push a plain value, without the frame of a whole pickle."""
    return pickle.dumps(value, protocol=2)[2:-1]
