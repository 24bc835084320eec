"""Remember how a function was compiled, and compile it again for other devices."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

from hwaware.calibration.programs import LayerSource
from hwaware.cluster import ClusterProfile
from hwaware.device_places import device_places
from hwaware.errors import AlpaError
from hwaware.patching import meshes, stage_option
from hwaware.plans import Plan
from hwaware.runtime import settings as runtime
from hwaware.workload import Workload

# Attributes that hwaware sets: the recipe, on Alpa's handlers of outputs; on functions that follow another one's
# placement, a function that compiles them again.
_RECIPE, _FOLLOW = "hwaware_recipe", "hwaware_follow"
# Not empty while such a function is compiled.
_following: List[bool] = []


class Recipe(NamedTuple):
    """The recipe by which to compile a function again whose stages hwaware chose.

    Attributes:
        compiled: Compiles the function, given Alpa's arguments.
        arguments: Alpa's arguments of the first time.
        settings: Settings of its placement.
        workload, sources: Its layers with their times, and the sources of the programs that hwaware timed.
        plan: The newest plan.
        compile_s: Time that the driver took the first time.
    """

    compiled: Callable[[Dict[str, Any]], Any]
    arguments: Dict[str, Any]
    settings: stage_option.PlacementSettings
    workload: Workload
    sources: Sequence[LayerSource]
    plan: Plan
    compile_s: float

    @property
    def profile(self) -> ClusterProfile:
        """Return the profile of the cluster, with the hosts that have joined."""
        return meshes.whole(self.settings.profile, self.arguments["virtual_mesh"])

    @property
    def trains(self) -> bool:
        """Return True for a training step."""
        return bool(self.arguments["pipeline_schedule"] != "inference")


def of(executable: Any) -> Optional[Recipe]:
    """Return the recipe of a compiled function; None where hwaware did not choose its stages, or remembers nothing."""
    found: Optional[Recipe] = getattr(executable.outs_handler, _RECIPE, None)
    return found


def put(executable: Any, recipe: Optional[Recipe]) -> None:
    """Let a compiled function have this recipe from here on."""
    setattr(executable.outs_handler, _RECIPE, recipe)


def search_arguments(recipe: Recipe, virtual_mesh: Any) -> Dict[str, Any]:
    """Return the arguments with which Alpa would choose the stages of a function on a mesh."""
    return {
        **recipe.arguments, "num_micro_batches": recipe.arguments["num_microbatch"], "virtual_mesh": virtual_mesh,
    }  # fmt: skip


def require(arguments: Dict[str, Any]) -> None:
    """Refuse programs that could not be placed again.

    Raises:
        AlpaError: The program fixes its stages, or encrypts.
    """
    if stage_option.settings_of(arguments["stage_option"]) is None and not _following:
        raise AlpaError(
            f"survive=True needs stages that hwaware chooses, found {type(arguments['stage_option']).__name__}.",
            'use stage_option="auto" or hwaware.HardwareAwareStageOption, or leave survive out.',
        )
    if runtime.current().encrypt:
        raise AlpaError(
            "survive=True and encrypt=True exclude each other: copies that return from a vault travel in Ray's own "
            "connections, which stay plain.",
            "leave one of them out.",
        )


def remember(compiled: Any, arguments: Dict[str, Any], config: Any, took_s: float) -> None:
    """Remember how to compile a function again, and the time that it took."""
    chosen = stage_option.settings_of(arguments["stage_option"])
    workload, plan, recipe = stage_option.last_workload(), stage_option.last_plan(), None
    if chosen is not None and workload is not None and plan is not None:
        sources = stage_option.last_layer_sources()
        recipe = Recipe(compiled, dict(arguments), chosen, workload, sources, plan, took_s)
    setattr(config.outs_handler, _RECIPE, recipe)


def learn(executable: Any, workload: Workload) -> None:
    """Remember layers with times for new devices; a function with other layers keeps its own."""
    recipe = of(executable)
    names = [layer.name for layer in workload.layers]
    if recipe is not None and [layer.name for layer in recipe.workload.layers] == names:
        put(executable, recipe._replace(workload=workload))


def compile_executable(original: Any) -> Callable[..., Any]:
    """Call Alpa's own, of `CreateStateParallel` or `FollowParallel`; let the function remember how to follow again."""

    def replacement(self: Any, fun: Any, *arguments: Any) -> Any:
        def compile_now() -> Any:
            for store in fun.stores:  # as Alpa does before it traces a function
                if store is not None:
                    store.reset()
            _following.append(True)
            try:
                return original(self, fun, *arguments)
            finally:
                _following.pop()

        executable, followed = compile_now(), self.train_step if hasattr(self, "train_step") else self.src_func
        source = followed.get_last_executable()

        def compile_again() -> Any:
            newest, followed.last_executable = followed.last_executable, source  # of a smaller batch, by now
            try:
                return compile_now()
            finally:
                followed.last_executable = newest

        setattr(executable, _FOLLOW, compile_again)
        return executable

    return replacement


def follows(executable: Any) -> bool:
    """Tell if a function follows the placement of another one."""
    return _FOLLOW in vars(executable)


def creates(executable: Any) -> bool:
    """Tell if a function creates the state of another one."""
    return hasattr(executable, "target_placement_specs")


def follow(executable: Any, group: Any) -> None:
    """Compile a function again that follows another one, if that one has gone to another group of meshes."""
    if executable.mesh_group is not group and follows(executable):
        compile_again = vars(executable)[_FOLLOW]
        new = compile_again()
        # The other object takes the old state with it, and deletes nothing of the new one.
        executable.__dict__, new.__dict__ = {**vars(new), _FOLLOW: compile_again}, vars(executable)


def fits(recipe: Recipe, plan: Plan) -> bool:
    """Tell if a plan has as many layers and microbatches as a function."""
    expected = (len(recipe.workload.layers), recipe.plan.num_microbatches)
    return (plan.stages[-1].layers[1] + 1, plan.num_microbatches) == expected


def compile_again(
    executable: Any, recipe: Recipe, virtual_mesh: Any, plan: Optional[Plan], otherwise: Optional[Plan]
) -> Plan:
    """Compile a function for the devices that its mesh has now, and return the plan.

    Args:
        executable: Alpa's executable, which becomes the new one.
        recipe: The function's recipe.
        virtual_mesh: Alpa's mesh of all devices that are left.
        plan: The plan to use; None to keep the function's plan if the mesh has its devices.
        otherwise: The plan if the mesh lacks devices; None to search.
    """
    from alpa.pipeline_parallel.pipeshard_executable import PipeshardDriverExecutable

    plans = [plan, recipe.plan, otherwise]
    fitting = (one for one in plans if one is not None and fits(recipe, one))
    possible = (one for one in fitting if _is_possible(one, virtual_mesh, recipe.profile))
    known = stage_option.Known(recipe.workload, recipe.sources, next(possible, None))
    with stage_option.placed_again(known), _timers_stopped():
        config = recipe.compiled(recipe.arguments)
    found = stage_option.last_plan()
    assert found is not None
    setattr(config.outs_handler, _RECIPE, recipe._replace(plan=found))
    PipeshardDriverExecutable.__init__(
        executable,
        mesh_group=virtual_mesh.launched_physical_mesh_group,
        pipeshard_config=config,
        num_batch=executable.num_batch,
        layer_option=executable.pipeline_plan.layer_option,
        in_tree=executable.in_tree,
        out_tree=executable.out_tree,
        static_argnums=executable.static_argnums,
    )
    return found


def _is_possible(plan: Plan, virtual_mesh: Any, profile: ClusterProfile) -> bool:
    """Tell if the program has all devices of a plan."""
    places, available = device_places(profile), meshes.mesh_places(virtual_mesh)
    return all(places.get(device) in available for stage in plan.stages for device in stage.devices)


@contextlib.contextmanager
def _timers_stopped() -> Iterator[None]:
    """Stop Alpa's timers where compiling fails: Alpa would refuse to start them again."""
    from alpa.timer import timers

    try:
        yield
    except BaseException:
        for timer in timers.timers.values():
            timer.started = False
        raise
