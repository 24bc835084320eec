"""Results with one row a sample: the microbatches' rows are joined, in training as Alpa does it in inference."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

from hwaware.compat.jaxprs import is_literal, variables


def get_full_batch_apply_grad(original: Any) -> Callable[..., Tuple[List[bool], Any, Any]]:
    """Alpa's own, but rows of samples are joined beside an update too; Alpa knows that only without an update.

    `hwaware.patching.steps.tidied` has refused updates that read such rows.
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


def rewrite_global_outvars_post_concate(_original: Any) -> Callable[..., Tuple[List[Any], Dict[Any, Any]]]:
    """Instead of Alpa's: results are looked up under the name that a layer gives them.

    In training, Alpa has already replaced the gradient marker's names by the layers' ones; in inference they are equal.
    """

    def replacement(
        global_outvars: Sequence[Any], reduction_vector: Sequence[bool], bound: Any, whole: Any, gensym_func: Any
    ) -> Tuple[List[Any], Dict[Any, Any]]:
        rows = [index for index, reduced in enumerate(reduction_vector) if not reduced]
        made = {bound.invars[index]: whole.outvars[index].aval for index in rows}
        joined = {v: gensym_func(aval) for v, aval in made.items() if v in set(variables(global_outvars))}
        results = [v if is_literal(v) else joined.get(v, v) for v in global_outvars]
        return results, {new: v for v, new in joined.items()}

    return replacement


def add_pipeline_marks_for_sliced_eqns(original: Any) -> Callable[..., Any]:
    """Alpa's own; the first layer copies arguments, and what the step made before, if the loss returns them."""

    def replacement(closed_jaxpr: Any, sliced_eqns: Sequence[Any]) -> Any:
        from alpa.util import clone_jaxpr, new_jaxpr_eqn

        from hwaware.compat.programs import copy_p, gensym

        jaxpr = closed_jaxpr.jaxpr
        given = {*jaxpr.invars, *jaxpr.constvars}
        new = gensym([jaxpr])
        copies = {v: new(v.aval) for v in dict.fromkeys(variables(jaxpr.outvars)) if v in given}
        if not copies:
            return original(closed_jaxpr, sliced_eqns)
        equations = [new_jaxpr_eqn([v], [copy], copy_p, {}) for v, copy in copies.items()]
        slices = [[*sliced_eqns[0], *equations], *sliced_eqns[1:]]
        results = [v if is_literal(v) else copies.get(v, v) for v in jaxpr.outvars]
        flat = [equation for equations in slices for equation in equations]
        return original(clone_jaxpr(closed_jaxpr, outvars=results, eqns=flat), slices)

    return replacement
