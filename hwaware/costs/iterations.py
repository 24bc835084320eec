"""Iteration times of GPT training from a few parameters of the machine, fitted to a few measured iterations.

For a cluster where nobody profiled layers: some measured iterations, of any sharding, price all others.
"""

from __future__ import annotations

from typing import Iterable, Mapping, Sequence

import numpy as np

from hwaware.costs.curves import FloatArray
from hwaware.costs.fitting import fit_positive
from hwaware.errors import UnusableInputError
from hwaware.records import Record

# GPT-2's vocabulary as Megatron-LM pads it.
VOCABULARY = 51200
COLUMNS = (
    "global_batch", "micro_batch", "hidden_size", "attention_heads", "layers", "sequence_length", "tensor_parallel",
    "data_parallel", "pipeline_parallel",
)  # fmt: skip


class IterationModel(Record, frozen=True, kw_only=True):
    """What a machine takes for the parts of an iteration; made by `fit_iterations`.

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
        """Time of one iteration of each configuration (mappings with the keys `COLUMNS`).

        T = p s + u + (B - 1) (s + u) + (B + p - 1) hop + 4 P (d - 1) / d / W_d + t_it,     s = (L / p) l

        l = (k^q + a^q)^(1/q): kernels k = F / R + Y / M + C / W_t beside launches a = a_1 + a_t (t - 1).
        u = 6 m S h V / t / R + t_mb: logits, on the last stage, and what is once per microbatch.

        One layer, forward and backward, for a microbatch of m sequences of S tokens of width h (2 bytes each):
        F = 72 m S h^2 (1 + S / 6 h) / t FLOPs; Y = 2 m S h (20 + 14 / t) + 10 m heads S^2 / t bytes of memory traffic;
        C = 8 m S h  2 (t - 1) / t bytes of all-reduces. P = (12 h^2 L / p + V h) / t parameters of a device;
        B = global batch / (m d) microbatches; t, d, p: tensor, data and pipeline parallel sizes.

        Example:
            >>> gpt = dict(global_batch=8, micro_batch=1, hidden_size=1024, attention_heads=16, layers=24,
            ...            sequence_length=1024, tensor_parallel=1, data_parallel=1, pipeline_parallel=2)
            >>> slow, fast = IterationModel(flops_per_s=1e13), IterationModel(flops_per_s=1e14)
            >>> bool(slow.predict_s([gpt])[0] > 3 * fast.predict_s([gpt])[0])
            True

        Source: FLOPs and activation traffic as in Narayanan et al., "Efficient large-scale language model training on
        GPU clusters using Megatron-LM", 2021, and Korthikanti et al., 2022; the form of l is this project's.
        """
        table = {name: np.array([float(c[name]) for c in configurations]) for name in COLUMNS}
        return _iterations_s(self, table)


def fit_iterations(configurations: Sequence[Mapping[str, float]], seconds: Iterable[float]) -> IterationModel:
    """The model that explains measured iterations best, by relative error; a hundred or more are enough.

    Args:
        configurations: Mappings with the keys `COLUMNS`; further keys are ignored.
        seconds: The measured time of each.

    Raises:
        UnusableInputError: There are no measurements, or not one time for each configuration, or times that are not
            above 0.

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
    table = {name: np.array([float(c[name]) for c in configurations]) for name in COLUMNS}
    names = IterationModel.__struct_fields__
    start = np.array([getattr(IterationModel(), name) for name in names])

    def model_of(values: FloatArray) -> IterationModel:
        return IterationModel(**{name: float(value) for name, value in zip(names, values)})

    return model_of(fit_positive(lambda values: _iterations_s(model_of(values), table), measured, start))


def _iterations_s(model: IterationModel, table: Mapping[str, FloatArray]) -> FloatArray:
    h, length = table["hidden_size"], table["sequence_length"]
    t, d, p = table["tensor_parallel"], table["data_parallel"], table["pipeline_parallel"]
    microbatches = table["global_batch"] / (table["micro_batch"] * d)
    tokens = table["micro_batch"] * length
    layers = table["layers"] / p
    seconds = layers * _layer_s(model, tokens, table)
    head = 6 * tokens * h * VOCABULARY / t / model.flops_per_s + model.microbatch_s
    pipeline = p * seconds + head + (microbatches - 1) * (seconds + head)
    hops = np.where(p > 1, (microbatches + p - 1) * model.hop_s, 0.0)
    parameters = (12 * h * h * layers + VOCABULARY * h) / t
    gradients = 4 * parameters * (d - 1) / d / model.data_bytes_per_s
    result: FloatArray = pipeline + hops + gradients + model.iteration_s
    return result


def _layer_s(model: IterationModel, tokens: FloatArray, table: Mapping[str, FloatArray]) -> FloatArray:
    h, length, t = table["hidden_size"], table["sequence_length"], table["tensor_parallel"]
    flops = 72 * tokens * h * h * (1 + length / (6 * h)) / t
    moved = 2 * tokens * h * (20 + 14 / t) + 10 * tokens * table["attention_heads"] * length / t
    reduced = 8 * tokens * h * 2 * (t - 1) / t
    kernels = flops / model.flops_per_s + moved / model.memory_bytes_per_s + reduced / model.tensor_bytes_per_s
    launches = model.launch_s + model.group_launch_s * (t - 1)
    q = 1 + model.overlap
    result: FloatArray = (kernels**q + launches**q) ** (1 / q)
    return result
