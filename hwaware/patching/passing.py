"""Values that a training step returns as it got them, and values that the next step needs on another stage."""

from __future__ import annotations

from typing import Any, Callable, Tuple

from hwaware.compat.jaxprs import is_literal, variables
from hwaware.patching import observing, rescue


def trace_jaxpr_with_micro_batch(original: Any) -> Callable[..., Tuple[Any, Any]]:
    """Alpa's own, and what a step returns unchanged (a key, frozen weights) is copied by the update.

    Alpa knows only where values are that some stage computes, and stops at others with an IndexError.
    Where tracing fails, `jax.random` and arrays are JAX's own again: Alpa would leave its replacements in place.
    """

    def replacement(*args: Any, **kwargs: Any) -> Tuple[Any, Any]:
        from alpa.monkey_patch import restore_random
        from alpa.util import restore_jaxarray

        try:
            closed_jaxpr, size = original(*args, **kwargs)
        except BaseException:
            restore_random()
            restore_jaxarray()
            raise
        return _copied(closed_jaxpr), size

    return replacement


def _copied(closed_jaxpr: Any) -> Any:
    from alpa.pipeline_parallel.apply_grad import jaxpr_have_apply_grad
    from alpa.util import clone_jaxpr, new_jaxpr_eqn

    from hwaware.compat.programs import copy_p, gensym

    jaxpr = closed_jaxpr.jaxpr
    passed = [variable for variable in variables(jaxpr.outvars) if variable in jaxpr.invars]
    if not passed or not jaxpr_have_apply_grad(closed_jaxpr):
        return closed_jaxpr
    new = gensym([jaxpr])
    copies = {variable: new(variable.aval) for variable in passed}
    equations = [new_jaxpr_eqn([variable], [copy], copy_p, {}) for variable, copy in copies.items()]
    outvars = [v if is_literal(v) else copies.get(v, v) for v in jaxpr.outvars]
    return clone_jaxpr(closed_jaxpr, outvars=outvars, eqns=[*jaxpr.eqns, *equations])


def launch_on_driver(original: Any) -> Callable[..., Any]:
    """Alpa's own, but what has to move from stage to stage through the driver is fetched before any stage starts.

    Alpa fetches it while the first stages already run: a stage that waits for one not yet started cannot answer, and
    the step would never end. Arrays that nothing refers to are deleted before the step: Alpa waits until there are
    fifty, and a state of few large arrays that is not donated would lie there several times.
    """

    def launch(self: Any, *args: Any) -> Any:
        from alpa.device_mesh import DistributedArray

        for mesh, indices in zip(self.mesh_group, self.mesh_arg_indices):
            _delete_unused(mesh)
            for array in (args[index] for index in indices):
                if isinstance(array, DistributedArray) and array.device_mesh is not mesh:
                    _ = array._value  # kept by the array
        return original(self, *args)

    def replacement(self: Any, *args: Any) -> Any:
        with observing.a_call_of(self):
            run = rescue.run_of(self.mesh_group)
            return launch(self, *args) if run is None else run.call(self, args, launch)

    return replacement


def _delete_unused(mesh: Any) -> None:
    """Tell the workers of a mesh to delete the arrays that Alpa has noted down for that."""
    import numpy

    unused, mesh.to_delete_remote_refs, mesh.to_delete_remote_ref_ct = mesh.to_delete_remote_refs, [], 0
    if unused:
        for worker in mesh.workers:
            worker.delete_buffers.remote(numpy.array(unused))
