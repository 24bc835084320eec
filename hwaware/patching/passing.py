"""Pass results of a step on: unchanged arguments, values that another stage needs next, and joined rows of samples."""

from __future__ import annotations

import logging
import traceback
from typing import Any, Callable, Dict, Iterable, List, Sequence, Tuple

import numpy

from hwaware.compat.jaxprs import is_literal, renamed, variables
from hwaware.errors import HwawareError, WorkerFailedError
from hwaware.patching import batches, creating, failures, observing, rescue

LOG = logging.getLogger("hwaware")


def trace_jaxpr_with_micro_batch(original: Any) -> Callable[..., Tuple[Any, Any]]:
    """Wrap Alpa's function: the update copies what a step returns unchanged (a key, frozen weights).

    Alpa knows the places only of values that some stage computes, and stops at others with an IndexError. If tracing
    fails, `jax.random` and arrays become JAX's own again. Alpa would leave its replacements in place.
    """

    def replacement(*args: Any, **kwargs: Any) -> Tuple[Any, Any]:
        from alpa.monkey_patch import restore_random
        from alpa.util import restore_jaxarray

        try:
            closed_jaxpr, size = original(*args, **kwargs)
        except BaseException as error:
            restore_random()
            restore_jaxarray()
            if isinstance(error, (TypeError, ValueError)) and not isinstance(error, HwawareError) and args[2] > 1:
                LOG.warning(
                    "The step failed while Alpa traced it with one microbatch: Alpa cuts only the arguments that "
                    "batch_argnums names, by default argument 1. If the error below is about sizes, let batch_argnums "
                    "name all arguments with samples, counted from 0."
                )
            raise
        return _copied(creating.prepared(closed_jaxpr)), size

    return replacement


def _copied(closed_jaxpr: Any) -> Any:
    from alpa.pipeline_parallel.apply_grad import jaxpr_have_apply_grad
    from alpa.util import clone_jaxpr

    jaxpr = closed_jaxpr.jaxpr
    passed = [variable for variable in variables(jaxpr.outvars) if variable in jaxpr.invars]
    if not passed or not jaxpr_have_apply_grad(closed_jaxpr):
        return closed_jaxpr
    equations, results = copies_in(jaxpr, passed)
    return clone_jaxpr(closed_jaxpr, outvars=results, eqns=[*jaxpr.eqns, *equations])


def copies_in(jaxpr: Any, values: Iterable[Any]) -> Tuple[List[Any], List[Any]]:
    """Return operations that copy values of a program, and the program's results with the copies in their place."""
    from alpa.util import new_jaxpr_eqn

    from hwaware.compat.programs import copy_p, gensym

    new = gensym([jaxpr])
    copies = {id(value): (value, new(value.aval)) for value in values}  # numbers have no hash
    results = [copies.get(id(value), (value, value))[1] for value in jaxpr.outvars]
    return [new_jaxpr_eqn([value], [copy], copy_p, {}) for value, copy in copies.values()], results


def launch_on_driver(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: before any stage starts, fetch what has to move between stages through the driver.

    Alpa fetches it while the first stages already run. A stage that waits for another one cannot answer before that one
    starts, so the step would never end. Before the step, also delete arrays that nothing refers to. Alpa waits until it
    has fifty such arrays. Memory would then hold a state of few large arrays several times, if no step donates it.
    """

    def launch(self: Any, *args: Any) -> Any:
        from alpa.device_mesh import DistributedArray

        failures.require_workers(self.mesh_group)
        args = _apart(self, args)
        batches.catch_up(self.mesh_group)
        for mesh, indices in zip(self.mesh_group, self.mesh_arg_indices):
            _delete_unused(mesh)
            for array in (batches.on_mesh(args[index], mesh) for index in indices):
                if isinstance(array, DistributedArray):
                    failures.require_kept(array.remote_ref)
                    if array.device_mesh is not mesh:
                        _ = array._value  # the array keeps the value
        try:
            return original(self, *args)
        except BaseException as error:
            if not isinstance(error, WorkerFailedError) and _has_begun(error):
                failures.end_program(self.mesh_group, _interrupted(error))
            raise

    def replacement(self: Any, *args: Any) -> Any:
        with observing.a_call_of(self):
            run = rescue.run_of(self.mesh_group)
            return launch(self, *args) if run is None else run.call(self, args, launch)

    return replacement


def _has_begun(error: BaseException) -> bool:
    """Return True if a stage has begun the step in which Alpa's function failed; later stages then lack it."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    alpas = (frame for frame in frames if "output_uuids" in frame.f_locals and "physical_mesh" in frame.f_locals)
    return any(uuids is not None for frame in alpas for uuids in frame.f_locals["output_uuids"])


def _interrupted(error: BaseException) -> WorkerFailedError:
    return WorkerFailedError(
        "the driver",
        f"a step was interrupted while the driver started it, by {type(error).__name__}: some stages have begun the "
        "step, and others never will.",
        "start the program again, from its newest checkpoint if it has one.",
    )


def _apart(executable: Any, args: Sequence[Any]) -> Tuple[Any, ...]:
    """Return the arguments, with copies of a donated array that has several places, such as weights and their average.

    The step takes over the array's memory at one place. The others would find it deleted.
    """
    if len({*map(id, args)}) == len(args):  # as a rule, at every step
        return tuple(args)
    plans = zip(executable.mesh_arg_indices, executable.delete_after_shard)
    donated = {id(args[index]) for plan in plans for index, flag in zip(*plan) if flag}
    found, first = list(args), set()
    for place, arg in enumerate(args):
        if id(arg) in first and hasattr(arg, "_value"):
            found[place] = numpy.asarray(arg._value)
        elif id(arg) in donated:
            first.add(id(arg))
    return tuple(found)


def _delete_unused(mesh: Any) -> None:
    """Tell the workers of a mesh to delete the arrays that Alpa has listed for deletion."""
    unused, mesh.to_delete_remote_refs, mesh.to_delete_remote_ref_ct = mesh.to_delete_remote_refs, [], 0
    if unused:
        for worker in mesh.workers:
            worker.delete_buffers.remote(numpy.array(unused))


def get_full_batch_apply_grad(original: Any) -> Callable[..., Tuple[List[bool], Any, Any]]:
    """Wrap Alpa's function: also join rows of samples if the step has an update. Alpa joins them only without one.

    `hwaware.patching.refusals` has refused updates that read such rows.
    """

    def replacement(
        closed_jaxpr: Any, microbatch_bound: Any, num_microbatch: int, inference_mode: bool, batch_dim: int = 0
    ) -> Tuple[List[bool], Any, Any]:
        from alpa.pipeline_parallel.apply_grad import split_compute_grad_and_apply_grad

        from hwaware.compat.programs import gensym

        if num_microbatch == 1 or inference_mode:
            return original(closed_jaxpr, microbatch_bound, num_microbatch, inference_mode, batch_dim)  # type: ignore[no-any-return]
        new = gensym([closed_jaxpr.jaxpr])
        *_, update, bound = split_compute_grad_and_apply_grad(closed_jaxpr, new, num_microbatch, inference_mode)
        pairs = zip(microbatch_bound.outvars, bound.outvars)
        return [part.aval.shape == whole.aval.shape for part, whole in pairs], bound, update

    return replacement


def apply_grad_get_mean(original: Any) -> Callable[..., Tuple[Any, Any]]:
    """Wrap Alpa's function: copy bools, which only a step of one microbatch returns, instead of dividing them by 1."""

    def replacement(*args: Any) -> Tuple[Any, Any]:
        from alpa.util import clone_jaxpr, new_jaxpr_eqn

        from hwaware.compat.programs import copy_p

        update, results = original(*args)
        equations = [
            new_jaxpr_eqn(equation.invars[:1], equation.outvars, copy_p, {})
            if equation.primitive.name == "div" and equation.outvars[0].aval.dtype == bool
            else equation
            for equation in update.eqns
        ]
        return clone_jaxpr(update, eqns=equations), results

    return replacement


def rewrite_global_outvars_post_concate(_original: Any) -> Callable[..., Tuple[List[Any], Dict[Any, Any]]]:
    """Replace Alpa's function: look results up under the name that a layer gives them.

    In training, Alpa has already replaced the gradient marker's names by the layers' ones. In inference they are equal.
    """

    def replacement(
        global_outvars: Sequence[Any], reduction_vector: Sequence[bool], bound: Any, whole: Any, gensym_func: Any
    ) -> Tuple[List[Any], Dict[Any, Any]]:
        rows = [index for index, reduced in enumerate(reduction_vector) if not reduced]
        made = {bound.invars[index]: whole.outvars[index].aval for index in rows}
        joined = {v: gensym_func(aval) for v, aval in made.items() if v in set(variables(global_outvars))}
        results = renamed(global_outvars, joined)
        return results, {new: v for v, new in joined.items()}

    return replacement


def add_pipeline_marks_for_sliced_eqns(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: the first layer copies arguments, numbers and earlier values that the loss returns."""

    def replacement(closed_jaxpr: Any, sliced_eqns: Sequence[Any]) -> Any:
        from alpa.util import clone_jaxpr

        jaxpr = closed_jaxpr.jaxpr
        given = [v for v in jaxpr.outvars if is_literal(v) or v in {*jaxpr.invars, *jaxpr.constvars}]
        if not given:
            return original(closed_jaxpr, sliced_eqns)
        equations, results = copies_in(jaxpr, given)
        slices = [[*sliced_eqns[0], *equations], *sliced_eqns[1:]]
        flat = [equation for equations in slices for equation in equations]
        return original(clone_jaxpr(closed_jaxpr, outvars=results, eqns=flat), slices)

    return replacement
