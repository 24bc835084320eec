"""Make the programs of a pipeline's stages, split over the devices of their meshes, as StableHLO."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

from hwaware.compiler import deferral, layerwise, splitting
from hwaware.compiler.layouts import Layout, alpa_spec, spec_of, stacked_spec
from hwaware.compiler.programs import SplitProgram, StageProgram, lower
from hwaware.compiler.sharding import Mesh, Spec, StageFunction, batch_dims, choose, whole
from hwaware.errors import AlpaError


class MeshPlan(NamedTuple):
    """Describe how one mesh splits its arrays.

    Attributes:
        shape: (DP, TP).
        specs: The spec of each argument and result of its programs; an array without a spec is whole.
        apart: Argument -> result of each accumulator that every replica keeps for itself until the update.
    """

    shape: Mesh
    specs: Dict[Any, Spec]
    apart: Dict[Any, Any]

    def is_apart(self, variable: Any) -> bool:
        """Return True if each replica has its own sum under this name."""
        return variable in self.apart or variable in self.apart.values()

    def spec(self, variable: Any) -> Spec:
        """Return the spec of an array."""
        return self.specs.get(variable, whole(variable.aval.shape))

    def layout(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Optional[Layout]:
        """Return the shardings of a program's arguments and results; None on one device."""
        if self.shape == (1, 1):
            return None
        return Layout(self.shape[0] * self.shape[1], *(tuple(map(self._alpa_spec, each)) for each in (inputs, outputs)))

    def _alpa_spec(self, variable: Any) -> Any:
        spec = self.spec(variable)
        return stacked_spec(spec, self.shape) if spec and self.is_apart(variable) else alpa_spec(spec, self.shape)


def plan_meshes(
    stages: Sequence[Any], schedule: Any, shapes: Sequence[Any], batch: Sequence[Any], accumulators: Any, parts: int,
    given: Sequence[Dict[Any, Any]] = (),
) -> List[MeshPlan]:  # fmt: skip
    """Return the MeshPlan of each mesh.

    Args:
        stages: Alpa's stages; each comes after those whose results it uses.
        schedule: Alpa's schedule.
        shapes: The logical shape of each mesh.
        batch: The arguments that Alpa cuts into microbatches.
        accumulators: Argument that holds a sum of gradients -> result that holds it with one more.
        parts: The number of microbatches.
        given: For each mesh, Alpa's sharding specs that arguments and results must have. A spec that these devices
            cannot hold is of another mesh, and does not count.

    Raises:
        AlpaError: A microbatch cannot be cut into the equal parts that a stage's replicas work on.
    """
    meshes = [(int(shape[0]), int(shape[1])) for shape in shapes]
    if all(mesh == (1, 1) for mesh in meshes):
        return [MeshPlan(mesh, {}, {}) for mesh in meshes]
    for number, (replicas, _) in enumerate(meshes):
        _require_equal_parts(number, replicas, batch)
    owners = [next(iter(schedule.stage_placement(index))) for index in range(len(stages))]
    functions = _functions(stages, owners, set(schedule.apply_grad_placement))
    dims = batch_dims(functions, batch)
    plans = []
    for number, mesh in enumerate(meshes):
        mine = [function for function, owner in zip(functions, owners) if owner == number]
        fixed = _fixed(given[number], mesh) if number < len(given) else {}
        specs = choose(mine, dims, accumulators, mesh, fixed)
        local = _local(accumulators, functions, owners, number) if parts > 1 else {}
        plans.append(MeshPlan(mesh, specs, deferral.deferred(mine, specs, local, mesh)))
    return plans


def _fixed(given: Dict[Any, Any], mesh: Mesh) -> Dict[Any, Spec]:
    """Return Alpa's given sharding specs as Specs, without those of other meshes."""
    specs = {variable: spec_of(spec, len(variable.aval.shape), mesh) for variable, spec in given.items()}
    return {variable: spec for variable, spec in specs.items() if spec is not None}


def _functions(stages: Sequence[Any], owners: Sequence[int], updates: Set[int]) -> List[StageFunction]:
    seen: Set[int] = set()
    functions = []
    for index, (stage, owner) in enumerate(zip(stages, owners)):
        kind = "update" if index in updates else "backward" if owner in seen else "forward"
        seen.add(owner)
        functions.append(StageFunction(stage.closed_jaxpr().jaxpr, list(stage.invars), list(stage.outvars), kind))
    return functions


def _require_equal_parts(number: int, replicas: int, batch: Sequence[Any]) -> None:
    for variable in batch:
        if variable.aval.shape[0] % replicas:
            raise AlpaError(
                f"Stage {number} has {replicas} replicas, but a microbatch has {variable.aval.shape[0]} samples.",
                "choose a microbatch that the number of replicas divides, or a plan with fewer replicas.",
            )


def _local(accumulators: Any, functions: Sequence[StageFunction], owners: Sequence[int], number: int) -> Dict[Any, Any]:
    """Return the accumulators that nothing but the update of this mesh reads."""
    readers: Dict[Any, Set[Tuple[int, str]]] = {}
    for function, owner in zip(functions, owners):
        for variable in function.invars:
            readers.setdefault(variable, set()).add((owner, function.kind))
    return {before: after for before, after in accumulators.items() if readers.get(after) == {(number, "update")}}


def lowered(
    stage: Any, donated: Sequence[bool], plan: MeshPlan, microbatched: bool
) -> Union[StageProgram, SplitProgram]:
    """Lower a stage, layer by layer where that is possible.

    Args:
        stage: Alpa's stage.
        donated: True for each input that gives its memory to the output of the same position.
        plan: The MeshPlan of the stage's mesh.
        microbatched: True if the stage runs once a microbatch, not once a step.
    """
    function = StageFunction(stage.closed_jaxpr().jaxpr, list(stage.invars), list(stage.outvars), "backward")
    reduces = splitting.has_reductions(stage.closed_jaxpr())
    alone = plan.shape == (1, 1)
    if not reduces and (alone or microbatched):  # replicas' sums are added up before the update's first layer
        split = None if alone else _LayerSplitter(plan, stage)
        by_layer = layerwise.lower_by_layer(stage, donated, microbatched, split)
        if by_layer is not None:
            return by_layer
    closed_jaxpr = _with_sums_apart(stage.closed_jaxpr(), function, plan)
    names = dict(zip(closed_jaxpr.jaxpr.invars, stage.invars))

    def layout_of(inputs: Sequence[Any], outputs: Sequence[Any]) -> Optional[Layout]:
        return plan.layout([names.get(variable, variable) for variable in inputs], outputs)

    if reduces:
        return splitting.lower_in_parts(closed_jaxpr, stage.name, donated, layout_of)
    pairs = {index: index for index, given in enumerate(donated) if given}
    return lower(closed_jaxpr, stage.name, pairs, plan.layout(stage.invars, stage.outvars), microbatched)


class _LayerSplitter:
    """Split a stage's layers, one after the other, over the devices of a mesh.

    Args:
        plan: The MeshPlan for the stage's arguments and results. The specs of values between layers follow from it.
        stage: Alpa's stage.
    """

    def __init__(self, plan: MeshPlan, stage: Any) -> None:
        self._plan = plan
        self._outside = {*stage.invars, *stage.outvars}

    def __call__(
        self, closed_jaxpr: Any, given: Sequence[Any], made: Sequence[Any]
    ) -> Optional[Tuple[Any, Optional[Layout]]]:
        """Return a layer as devices run it, with its layout; None if the sums of its replicas are made elsewhere."""
        function = StageFunction(closed_jaxpr.jaxpr, list(given), list(made), "backward")
        specs = {variable: self._plan.spec(variable) for variable in given}
        flat, parts = deferral.parts_of(function, specs, self._plan.shape)
        known = {v: parts.specs.get(value) for v, value in zip(made, flat.outputs) if v not in self._outside}
        between = {variable: spec for variable, spec in known.items() if spec is not None}
        self._plan = self._plan._replace(specs={**self._plan.specs, **between})
        pairs = deferral.accumulator_places(function, self._plan.apart)
        apart = {variable for variable in (*given, *made) if self._plan.is_apart(variable)}
        sums = parts.accumulators(pairs)
        if len(apart) != 2 * len(sums):
            return None
        if sums:
            closed_jaxpr = deferral.apart(closed_jaxpr, sums, parts, flat, self._plan.shape)
        return closed_jaxpr, self._plan.layout(given, made)


def _with_sums_apart(closed_jaxpr: Any, function: StageFunction, plan: MeshPlan) -> Any:
    """Return a stage's jaxpr. If replicas have sums of their own, it adds to these, or adds these up."""
    pairs = deferral.accumulator_places(function, plan.apart)
    if pairs:
        flat, parts = deferral.parts_of(function, {v: plan.spec(v) for v in function.invars}, plan.shape)
        return deferral.apart(closed_jaxpr, parts.accumulators(pairs), parts, flat, plan.shape)
    ends = set(plan.apart.values())
    places = {place for place, variable in enumerate(function.invars) if variable in ends}
    return deferral.added_up(closed_jaxpr, places, plan.shape) if places else closed_jaxpr
