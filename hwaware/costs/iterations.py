"""Predict iteration times of GPT training where nobody profiled layers, from measured iterations of any sharding."""

from __future__ import annotations

import csv
import math
from typing import Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import msgspec
import numpy as np

from hwaware.costs.curves import FloatArray, fit_positive
from hwaware.errors import RecordError, UnusableInputError
from hwaware.records import PathLike, Record, read_bytes

# GPT-2's vocabulary as Megatron-LM pads it.
VOCABULARY = 51200
COLUMNS = (
    "global_batch", "micro_batch", "hidden_size", "attention_heads", "layers", "sequence_length", "tensor_parallel",
    "data_parallel", "pipeline_parallel",
)  # fmt: skip
# Units of a measured time, by the name of its column.
TIMES = {"iteration_s": 1.0, "iteration_ms": 1e-3}
# Parts of the measurements that take turns in being predicted, and the fewest measurements for that.
FOLDS, LEAST_CHECKED = 5, 10


class IterationModel(Record, frozen=True, kw_only=True):
    """Hold the parameters of a machine; made by `fit_iterations`.

    The defaults are where fits start: orders of magnitude of an A100, not measurements of this project.

    Attributes:
        flops_per_s: Rate of matrix products.
        memory_bytes_per_s: Rate of memory-bound operators.
        launch_s: Time to launch one layer's kernels, forward and backward.
        overlap: q - 1; the larger, the better launches hide behind kernels.
        group_launch_s: Extra launch time of a layer for each further device of its tensor-parallel group.
        tensor_bytes_per_s, data_bytes_per_s: Rate of all-reduces in tensor-parallel groups and of gradients.
        microbatch_s, hop_s, iteration_s: Once per microbatch, per hop between stages, per iteration.
    """

    flops_per_s: float = 1.5e14
    memory_bytes_per_s: float = 1e12
    launch_s: float = 2.5e-3
    overlap: float = 1.5
    group_launch_s: float = 3e-4
    tensor_bytes_per_s: float = 1e11
    data_bytes_per_s: float = 1e11
    microbatch_s: float = 1e-3
    hop_s: float = 1e-3
    iteration_s: float = 3e-3

    def predict_s(self, configurations: Sequence[Mapping[str, float]]) -> FloatArray:
        """Return the seconds of one iteration of each configuration (mappings with the keys `COLUMNS`).

            T = p s + u + (B - 1) (s + u) + (B + p - 1) hop + 4 P (d - 1) / d / W_d + t_it,     s = (L / p) l
            l = (k^q + a^q)^(1/q):  kernels k = F / R + Y / M + C / W_t beside launches a = a_1 + a_t (t - 1)
            u = 6 m S h V / t / R + t_mb:  logits, on the last stage, and time once per microbatch

            One layer, forward and backward, for a microbatch of m sequences of S tokens of width h (2 bytes each):
            F = 72 m S h^2 (1 + S / 6 h) / t    FLOPs
            Y = 2 m S h (20 + 14 / t) + 10 m heads S^2 / t    bytes of memory traffic
            C = 8 m S h  2 (t - 1) / t    bytes of all-reduces
            P = (12 h^2 L / p + V h) / t    parameters of a device;     B = global batch / (m d)    microbatches

        t, d and p are the tensor, data and pipeline parallel sizes.

        Example:
            >>> gpt = dict(global_batch=8, micro_batch=1, hidden_size=1024, attention_heads=16, layers=24,
            ...            sequence_length=1024, tensor_parallel=1, data_parallel=1, pipeline_parallel=2)
            >>> slow, fast = IterationModel(flops_per_s=1e13), IterationModel(flops_per_s=1e14)
            >>> bool(slow.predict_s([gpt])[0] > 3 * fast.predict_s([gpt])[0])
            True

        Source: the form of l is this project's. FLOPs and activation traffic: Narayanan et al., "Efficient large-scale
        language model training on GPU clusters using Megatron-LM", 2021. Also Korthikanti et al., 2022.
        """
        batch, micro, h, heads, layers, length, t, d, p = (
            np.array([float(configuration[name]) for configuration in configurations]) for name in COLUMNS
        )
        microbatches, tokens, layers = batch / (micro * d), micro * length, layers / p
        flops = 72 * tokens * h * h * (1 + length / (6 * h)) / t
        moved = 2 * tokens * h * (20 + 14 / t) + 10 * tokens * heads * length / t
        reduced = 8 * tokens * h * 2 * (t - 1) / t
        kernels = flops / self.flops_per_s + moved / self.memory_bytes_per_s + reduced / self.tensor_bytes_per_s
        launches = self.launch_s + self.group_launch_s * (t - 1)
        q = 1 + self.overlap
        seconds = layers * (kernels**q + launches**q) ** (1 / q)
        head = 6 * tokens * h * VOCABULARY / t / self.flops_per_s + self.microbatch_s
        pipeline = p * seconds + head + (microbatches - 1) * (seconds + head)
        hops = np.where(p > 1, (microbatches + p - 1) * self.hop_s, 0.0)
        parameters = (12 * h * h * layers + VOCABULARY * h) / t
        gradients = 4 * parameters * (d - 1) / d / self.data_bytes_per_s
        result: FloatArray = pipeline + hops + gradients + self.iteration_s
        return result


def fit_iterations(configurations: Sequence[Mapping[str, float]], seconds: Iterable[float]) -> IterationModel:
    """Fit an `IterationModel` to measured iterations by relative error, as `fit_positive` does; a hundred are enough.

    Configurations are mappings with the keys `COLUMNS`. The function ignores further keys.

    Raises:
        UnusableInputError: The configurations have no times, or a time is not above 0.

    Example:
        >>> gpt = dict(global_batch=8, micro_batch=1, hidden_size=1024, attention_heads=16, layers=24,
        ...            sequence_length=1024, tensor_parallel=1, data_parallel=1, pipeline_parallel=1)
        >>> cases = [{**gpt, "layers": layers} for layers in (4, 8, 16, 24)]
        >>> model = fit_iterations(cases, [0.05, 0.1, 0.2, 0.3])
        >>> [round(float(t), 2) for t in model.predict_s(cases)]
        [0.05, 0.1, 0.2, 0.3]
    """
    measured = np.array(list(seconds), dtype=np.float64)
    if not len(measured) or len(measured) != len(configurations) or not np.all(measured > 0):
        raise UnusableInputError(
            f"{len(configurations)} configurations with {len(measured)} times, expected as many times above 0.",
            "give the seconds of one iteration for each configuration.",
        )
    start = np.array(msgspec.structs.astuple(IterationModel()))

    def model_of(values: FloatArray) -> IterationModel:
        return IterationModel(**dict(zip(IterationModel.__struct_fields__, values.tolist())))

    return model_of(fit_positive(lambda values: model_of(values).predict_s(configurations), measured, start))


class Checked(NamedTuple):
    """Hold the absolute relative errors of iterations that the model was not fitted to."""

    mean: float
    p90: float


def check_iterations(configurations: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> Optional[Checked]:
    """Predict each fifth of the measurements from the others; None for fewer than ten measurements."""
    if len(seconds) < LEAST_CHECKED:
        return None
    order, measured = np.random.default_rng(0).permutation(len(seconds)), np.array(seconds)
    errors: List[float] = []
    for part in np.array_split(order, FOLDS):
        rest = np.setdiff1d(order, part)
        model = fit_iterations([configurations[int(k)] for k in rest], measured[rest])
        errors += np.abs(model.predict_s([configurations[int(k)] for k in part]) / measured[part] - 1).tolist()
    return Checked(float(np.mean(errors)), float(np.quantile(errors, 0.9)))


def read_iterations(path: PathLike) -> Tuple[List[Dict[str, float]], List[float]]:
    """Read configurations and seconds for `fit_iterations` from a CSV file; lines that start with # are comments.

    The header names `COLUMNS`, and iteration_s or iteration_ms. hwaware ignores further columns.

    Raises:
        RecordError: The file cannot be read, or lacks a column, or a value is no number above 0.
    """
    try:
        lines = read_bytes(path).decode("utf-8-sig").splitlines()
        rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise RecordError(f"{path} is no CSV file: {error}.", "give a text file with commas, one row a line.") from None
    named = rows[0] if rows else {}
    times = [name for name in TIMES if name in named]
    missing = [name for name in COLUMNS if name not in named] + ([] if times else ["iteration_s"])
    if missing:
        raise RecordError(
            f"{path} has no rows, or lacks the columns {', '.join(missing)}.",
            f"give a CSV file with the columns {', '.join(COLUMNS)} and iteration_s.",
        )
    made = [{name: _number(row[name], name, k, path) for name in (*COLUMNS, times[0])} for k, row in enumerate(rows)]
    for k, row in enumerate(made):
        require_configuration(row, f"row {k + 1} of {path}")
    return made, [row.pop(times[0]) * TIMES[times[0]] for row in made]


def _number(word: Optional[str], name: str, row: int, path: PathLike) -> float:
    try:
        value = float(word or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0 < value < 1e15):
        raise RecordError(
            f"row {row + 1} of {path} has {name} {(word or '')[:40]!r}, expected a number above 0.", "correct it."
        )
    return value


def require_configuration(configuration: Mapping[str, float], where: str) -> None:
    """Check that a configuration has at least one microbatch, and at least one device and layer a stage.

    Raises:
        RecordError: It has not.
    """
    c = configuration
    microbatches = c["global_batch"] / (c["micro_batch"] * c["data_parallel"])
    least = min(c["tensor_parallel"], c["data_parallel"], c["pipeline_parallel"], c["layers"] / c["pipeline_parallel"])
    if microbatches < 1 or least < 1:
        raise RecordError(
            f"{where} has {microbatches:g} microbatches, {c['layers']:g} layers and parallel sizes "
            f"{c['tensor_parallel']:g}, {c['data_parallel']:g}, {c['pipeline_parallel']:g}, expected at least one "
            "microbatch, one layer a stage, and sizes of at least 1.",
            "correct the numbers; microbatches = global_batch / (micro_batch x data_parallel).",
        )
