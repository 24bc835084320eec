"""Explain errors while Alpa compiles: one message says what Alpa was doing, with Alpa's own error as the cause.

Errors of the program's own code, of hwaware and of Ray pass unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sysconfig
import traceback
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from hwaware.compat.packages import JAX_PACKAGES
from hwaware.errors import AlpaError, HwawareError, UnusableInputError
from hwaware.patching import failures, rescue, stage_option
from hwaware.patching.refusals import Names

# Function of Alpa -> words for what Alpa does in it. The one that was called last decides.
_DOES = {
    "cluster_jaxpr_by_cost": "grouped the operations of the loss into layers",
    "add_pipeline_marks_for_sliced_eqns": "marked the layers of the loss",
    "trace_jaxpr_with_micro_batch": "traced the step with one microbatch",
    "split_and_process_layers": "separated the layers, the gradient and the update",
    "slice_apply_grad_for_stage_construction": "divided the update among the layers",
    "cluster_layers_and_slice_mesh": "formed the stages",
    "process_apply_gradient": "divided the update among the stages",
    "split_donate_invars": "looked for memory that the step can use again",
    "gen_dependency_with_stages": "looked for the order of the stages",
    "shard_each_stage": "split the stages over their devices",
    "get_physical_mesh_group": "started the workers",
    "_establish_nccl_groups": "looked for the values that stages send to each other",
    "_compile_exec_one_tick": "wrote the workers' instructions",
    "_compile_collect_outputs": "looked for the stages that make the results",
}
# Functions of Alpa that call the program's own code: what JAX raises below them is about that code.
_CALLERS = ("ret", "wrapped", "trace_jaxpr_with_micro_batch")
# Packages that Alpa and hwaware call: an error below them is about what Alpa or hwaware asked for.
_CALLED = ("standard", *JAX_PACKAGES, "numpy", "scipy", "numba", "pulp", "ray", "opt_einsum", "msgspec")
_OWN = ("alpa", "hwaware")
# Attribute of Alpa's virtual meshes: the functions that have workers of their own there.
_FUNCTIONS = "hwaware_functions"
LOG = logging.getLogger("hwaware")
# Arguments of Alpa's compilation that belong to the method, and not to the call.
_OF_METHOD = ("stage_option", "num_microbatch", "pipeline_schedule")
_SCHEDULES = ("1f1b", "1f1b_overlap_friendly", "gpipe", "inference")


def compile_pipeshard_executable(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: check its arguments first, and explain each error that Alpa raises."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        stage_option.set_function(arguments["fun"])
        _require_method(arguments["pipeline_schedule"], arguments["num_microbatch"])
        stage_option.require_profile(arguments["stage_option"], arguments["virtual_mesh"])
        places = stage_option.settings_of(arguments["stage_option"]) is not None
        try:
            with _named(arguments["in_tree"], arguments["out_tree_thunk"]):
                executable = original(*args, **kwargs)
            rescue.compiled(executable)
            if places:
                _note_workers(executable.mesh_group, arguments)
            return executable
        except HwawareError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            if not is_alpas(error, [(frame.filename, frame.name) for frame in frames]):
                raise
            name = getattr(arguments["fun"], "__name__", "the function")
            raise explained(error, frames, name) from error

    return replacement


def _note_workers(group: Any, arguments: Dict[str, Any]) -> None:
    """Remember the function of new workers, and warn if it has other workers already by the same method."""
    functions, function = vars(group.parent).setdefault(_FUNCTIONS, []), arguments["fun"]
    method = [arguments[name] for name in _OF_METHOD]
    if any(one is function.f and how == method for one, how in functions):
        LOG.warning(
            "Alpa has compiled %s again, for arguments of other shapes or types, or with another value of a static "
            "argument. Its second set of workers has the same devices, and gets arrays through the driver. To fix: "
            "give all calls arguments of the same shapes and types. Drop or pad a smaller last batch. Python's own "
            "numbers are static: pass a number that changes as numpy.float32(number).",
            function.__name__,
        )
    functions.append((function.f, method))


def on_workers_of(name: str) -> Callable[[Any], Callable[..., Any]]:
    """Return a wrapper of Alpa's function: compile for the workers of a followed function, not for the newest workers.

    Args:
        name: The argument with the followed function.
    """

    def make(original: Any) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            followed = bound.arguments[name] = _Followed(bound.arguments[name])
            try:
                return original(*bound.args, **bound.kwargs)
            finally:
                followed.restore()

        return replacement

    return make


def follow_parallel(original: Any) -> Callable[..., None]:
    """Wrap Alpa's FollowParallel: say why Alpa's own placement specs cannot work, if a program gives none."""

    @functools.wraps(original)
    def replacement(
        self: Any, src_func: Any, num_micro_batches: Any = None, get_input_placement_specs: Any = None, *more: Any,
        **named: Any,
    ) -> None:  # fmt: skip
        specs = get_input_placement_specs or (lambda: _specs_of_training(src_func))
        original(self, src_func, num_micro_batches, specs, *more, **named)

    return replacement


def _specs_of_training(function: Any) -> Any:
    """Return what Alpa takes for the arguments of an evaluation: parameters and batch of a training step."""
    found = _compiled(function.get_last_executable()).get_input_placement_specs()
    if len(found) != 2 or not hasattr(found[0], "params"):
        kinds = ", ".join(type(one).__name__ for one in found)
        raise UnusableInputError(
            f"The function that FollowParallel follows has the arguments ({kinds}), expected a state with `params`, "
            "and a batch.",
            "give FollowParallel a get_input_placement_specs that returns the specs of the new function's arguments. "
            "`step.get_last_executable().get_input_placement_specs()` has those of `step`.",
        )
    return found[0].params, found[1]


def _compiled(executable: Any) -> Any:
    """Return the executable of a followed function; refuse None."""
    if executable is None:
        raise UnusableInputError(
            "The function that another one follows has no workers yet.",
            "call the followed function, or its get_executable, before the one that follows.",
        )
    return executable


class _Followed:
    """Stand for a followed function. Once Alpa has its executable, Alpa takes its workers for the newest ones."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._changed: List[Tuple[Any, Any]] = []

    def get_executable(self, *args: Any) -> Any:
        return self._found(self._function.get_executable(*args))

    def get_last_executable(self) -> Any:
        return self._found(self._function.get_last_executable())

    def _found(self, executable: Any) -> Any:
        group = _compiled(executable).mesh_group
        failures.require_workers(group, "call the followed function after alpa.init(), and then the one that follows.")
        self._changed.append((group.parent, group.parent.launched_physical_mesh_group))
        group.parent.launched_physical_mesh_group = group
        return executable

    def restore(self) -> None:
        for mesh, newest in self._changed:
            mesh.launched_physical_mesh_group = newest


def _require_method(schedule: str, microbatches: int) -> None:
    for name, found, is_known, expected in (
        ("pipeline_schedule", schedule, schedule in _SCHEDULES, ", ".join(_SCHEDULES)),
        ("num_micro_batches", microbatches, microbatches >= 1, "at least 1"),
    ):
        if not is_known:
            raise AlpaError(f"{name} is {found!r}, expected {expected}.", "correct alpa.PipeshardParallel.")


class _Context:
    """Hold the trees of arguments and results of the function that is being compiled."""

    trees: Tuple[Any, ...] = ()


@contextlib.contextmanager
def _named(*trees: Any) -> Iterator[None]:
    _Context.trees = trees
    try:
        yield
    finally:
        _Context.trees = ()


def names_of_step() -> Names:
    """Return the names of arguments and results of the function that Alpa compiles, once Alpa has traced it."""
    if not _Context.trees:
        return Names()
    in_tree, out_tree_thunk = _Context.trees
    out_tree = out_tree_thunk()
    return Names(
        [f"argument {path}" for path in _paths(in_tree)],
        [f"Result {path}" if path else "The result" for path in _paths(getattr(out_tree, "val", out_tree))],
    )


def _paths(tree: Any) -> Sequence[str]:
    """Return the path of each leaf; none if a class of the tree takes nothing but arrays."""
    from jax import tree_util

    try:
        flat, _ = tree_util.tree_flatten_with_path(tree_util.tree_unflatten(tree, range(tree.num_leaves)))
    except Exception:  # noqa: BLE001, whatever the class raises: only messages need these names
        return []
    return [str(tree_util.keystr(path)) for path, _ in flat]


def is_alpas(error: Exception, frames: Sequence[Tuple[str, str]]) -> bool:
    """Return True if Alpa or hwaware raised an error, and not the program's own code or Ray.

    Args:
        error: The error.
        frames: (file, function) of each call, from the outermost to the one that raised the error.
    """
    if type(error).__module__.split(".")[0] == "ray":
        return False
    packages = [_package(file) for file, _ in frames]
    own = [place for place, package in enumerate(packages) if package in _OWN]
    if not own:
        return False
    below = packages[own[-1] + 1 :]
    if any(package not in _CALLED for package in below):
        return False
    calls_program = packages[own[-1]] == "alpa" and frames[own[-1]][1] in _CALLERS
    return isinstance(error, (AssertionError, NotImplementedError)) or not calls_program


@functools.lru_cache(maxsize=None)
def _folders() -> Tuple[Tuple[str, str], ...]:
    """Return (package, folder) of Alpa, hwaware, other installed packages and the standard library."""
    import alpa

    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    packages = [("alpa", os.path.dirname(str(alpa.__file__))), ("hwaware", own)]
    paths = sysconfig.get_paths()
    libraries = [("site-packages", paths["purelib"]), ("site-packages", paths["platlib"])]
    return (*packages, *libraries, ("standard", paths["stdlib"]), ("standard", paths["platstdlib"]))


def _package(file: str) -> str:
    """Return the package of a file; an empty text for a file in no package."""
    if file.startswith("<"):
        return "standard"
    for name, folder in _folders():
        if file.startswith(folder + os.sep):
            inside = file[len(folder) + 1 :].split(os.sep)[0]
            return inside if name == "site-packages" else name
    return ""


def explained(error: Exception, frames: Any, function: str) -> AlpaError:
    """Return an AlpaError that explains an error of Alpa.

    Args:
        error: The error.
        frames: The calls, from the outermost to the one that raised the error.
        function: The name of the program's function that Alpa compiled.
    """
    own: List[Any] = [frame for frame in frames if _package(frame.filename) in _OWN]
    last = own[-1]
    if frames[-1].name == "trace_jaxpr_with_micro_batch":
        what = f"The batch of {function} cannot be cut into microbatches: {_text(error)}."
        return AlpaError(
            what,
            "give arrays of equally many samples, a multiple of num_micro_batches. Give arrays without samples, such "
            "as a random key, in an argument that batch_argnums does not name.",
        )
    does = next((_DOES[frame.name] for frame in reversed(own) if frame.name in _DOES), "compiled it")
    place = f"{last.name}, {os.path.basename(last.filename)}:{last.lineno}"
    return AlpaError(
        f"Alpa stopped at {function} while it {does}: {type(error).__name__}: {_text(error)} (in {place}).",
        "compare the step with docs/alpa.md#training-steps and docs/limits.md#training-steps, which say what a step "
        "may do. The error above this one is the cause, with its full traceback: add it to a report.",
    )


def _text(error: Exception) -> str:
    """Return the text of an error. If the error only holds a variable of JAX, describe its type, as it has no name."""
    first = error.args[0] if error.args else ""
    aval = getattr(first, "aval", None)
    if aval is not None:
        return f"nothing is known of a value of the type {aval.str_short()}"
    return str(error).strip().rstrip(".") or "no reason given"
