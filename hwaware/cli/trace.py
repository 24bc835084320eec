"""Count what a model computes, stores and sends, layer by layer: `hwaware trace`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import sys
import traceback
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, TypeVar

import click

from hwaware.cli._run import json_option, print_document, reports_errors, say, waiting
from hwaware.cluster import ClusterProfile
from hwaware.errors import UnusableInputError
from hwaware.formatting import counted
from hwaware.models import CONFIGS, configure
from hwaware.records import save_or_keep

DEFAULT_LAYERS = 8
F = TypeVar("F", bound=Callable[..., Any])


def model_options(function: F) -> F:
    """Add an option for every field of any built-in model's configuration."""
    meanings: Dict[str, str] = {}
    defaults: Dict[str, List[str]] = {}
    for name, config in CONFIGS.items():
        for field in dataclasses.fields(config):
            meanings.setdefault(field.name, field.metadata["help"])
            defaults.setdefault(field.name, []).append(f"{name} {field.default}")
    for option in reversed(list(meanings)):  # decorators apply from the last to the first
        shown = f"{meanings[option]} [{', '.join(defaults[option])}]"
        function = click.option(f"--{option}", type=int, metavar="N", help=shown)(function)
    return function


@click.command()
@click.argument("model")
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="File to write, such as workload.json.")
@click.option("--layers", type=int, help="Layers to cut the model into. [a built-in's blocks, else 8]")
@click.option("--microbatch-size", type=int, default=4, show_default=True, help="Samples per microbatch.")
@click.option(
    "--measure",
    type=click.Path(),
    metavar="CLUSTER",
    help="Also time every layer on this machine's device, for all kinds of devices in this profile (cluster.json).",
)
@click.option(
    "--donate/--no-donate",
    default=True,
    show_default=True,
    help="Whether the new state takes over the memory of the old one. Alpa donates a flax TrainState by itself.",
)
@model_options
@json_option
@reports_errors
def command(
    model: str,
    output: Optional[str],
    layers: Optional[int],
    microbatch_size: int,
    measure: Optional[str],
    donate: bool,
    as_json: bool,
    **options: Optional[int],
) -> None:
    """Count what a model computes, stores and sends, layer by layer; run nothing without --measure.

    MODEL is a built-in (mlp, gpt, moe, wresnet) or package.module:function. The options that list built-ins set the
    sizes of these. Your function() returns (train_step, state, batch). Its train_step(state, batch) calls jax.grad or
    jax.value_and_grad, and returns the new state.

    \b
    Built-in models:
        hwaware trace gpt -o workload.json --blocks 12 --hidden 512 --heads 8
        hwaware trace gpt -o workload.json --measure cluster.json

    \b
    Your own model:
        hwaware trace mypackage.training:example -o workload.json --layers 16
    """  # noqa: D301
    given = {name: value for name, value in options.items() if value is not None}
    profile = None if measure is None else ClusterProfile.load(measure)
    with waiting("Tracing (JAX starts first) ..."), _sizes_judged(model):
        train_step, state, batch, name, blocks = _load(model, given)
        from hwaware.tracing.function import trace_programs

        count = blocks if layers is None else layers
        workload, functions = trace_programs(train_step, state, batch, count, microbatch_size, name, donate)
    if profile is not None:
        from hwaware.cli._measuring import measured_here

        with waiting("Timing the layers ..."):
            workload = measured_here(workload, functions, profile)
    if output is not None:
        save_or_keep(workload, output, print_document)
        say(f"{output}: {counted(len(workload.layers), 'layer')}.")
    if as_json:
        print_document(workload.to_json().decode())
    else:
        from hwaware.report.tables import show

        show(workload)


@contextlib.contextmanager
def _sizes_judged(model: str) -> Iterator[None]:
    """Refuse sizes of a built-in model that are beyond NumPy, this machine's memory or a workload."""
    try:
        yield
    except (MemoryError, OverflowError, ValueError) as error:
        if ":" in model:  # its own code has failed
            raise
        what = f"A model {model} of these sizes cannot be traced: {str(error).rstrip('.')}."
        raise UnusableInputError(what, "choose smaller sizes.") from error


def _load(model: str, options: Dict[str, int]) -> Tuple[Any, Any, Any, str, int]:
    """Return train step, state, batch, name and number of layers of the model named on the command line."""
    if ":" in model:
        if options:
            raise UnusableInputError(
                f"--{next(iter(options))} is an option of the built-in models, and {model} is not built in.",
                "leave it out; the function decides on its model's size.",
            )
        return (*_call(model), model.rpartition(":")[2], DEFAULT_LAYERS)
    from hwaware.models import make

    built = make(configure(model, options))
    # Tracing sets the size of the batch itself.
    return built.train_step, built.abstract_state(), built.batch(step=0, size=1), model, built.config.blocks


def _call(model: str) -> Tuple[Any, Any, Any]:
    module_name, _, function_name = model.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does, to find a module in the current directory
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        fix = "name it as package.module:function, from a directory that has it."
        frames = traceback.extract_tb(error.__traceback__)
        if any(f"{os.sep}alpa{os.sep}" in frame.filename for frame in frames):  # Alpa runs on stock JAX only enabled
            fix = "move the function to a module that does not import Alpa; it needs only JAX."
        raise UnusableInputError(f"{model} cannot be imported: {error}.", fix) from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and may be a program
        raise _raised(f"{module_name}, which is imported for {function_name},", error) from error
    try:
        found = function() if callable(function) else function
    except (Exception, SystemExit) as error:  # and so may a user's function
        raise _raised(model, error) from error
    if not isinstance(found, tuple) or len(found) != 3 or not callable(found[0]):
        raise UnusableInputError(
            f"{model} gives a {type(found).__name__}, expected (train_step, state, batch).",
            "let the function return these three.",
        )
    return found


def _raised(what: str, error: BaseException) -> UnusableInputError:
    """Wrap an error of the user's code as an error of input, with its place."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    # A syntax error names its own place: no frame of that module ran.
    place = "" if isinstance(error, SyntaxError) else f" ({frame.filename}, line {frame.lineno})"
    fix = "run it by itself and fix the error."
    if isinstance(error, SystemExit):
        fix = 'put what the module runs as a program below `if __name__ == "__main__":`.'
    return UnusableInputError(f"{what} raised {type(error).__name__}: {error}{place}.", fix)
