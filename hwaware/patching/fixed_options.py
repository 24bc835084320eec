"""Check stage options by which a program fixes its stages. Alpa refuses those that do not fit with bare assertions."""

from __future__ import annotations

import math
from typing import Any, Sequence

from hwaware.errors import AlpaError
from hwaware.patching import unequal

_AUTO = 'or let hwaware choose the stages: stage_option="auto".'


def require_fits(option: Any, num_layers: int, virtual_mesh: Any) -> None:
    """Refuse a ManualStageOption or a UniformStageOption that does not fit the layers or the devices.

    Args:
        option: Alpa's stage option of any kind.
        num_layers: The number of the loss's layers.
        virtual_mesh: Alpa's mesh of the devices.

    Raises:
        AlpaError: The stages do not use each layer and each device once.
    """
    from alpa.pipeline_parallel.stage_construction import ManualStageOption, UniformStageOption

    given = virtual_mesh.launched_physical_mesh_group is not None
    devices = sum(map(len, virtual_mesh.devices))
    if given and isinstance(option, (ManualStageOption, UniformStageOption)):
        require_launched(option, num_layers, len(virtual_mesh.launched_physical_mesh_group.meshes))
    if isinstance(option, ManualStageOption):
        require_manual(option, num_layers, None if given or unequal.is_unequal(virtual_mesh) else devices)
    elif isinstance(option, UniformStageOption) and not given:
        require_uniform(option, num_layers, devices, virtual_mesh.num_devices_per_host)


def require_launched(option: Any, num_layers: int, meshes: int) -> None:
    """Refuse a function whose number of stages is not `meshes`, the number of groups of workers that run already."""
    layers = getattr(option, "forward_stage_layer_ids", None)
    stages = getattr(option, "num_stages", None) or num_layers if layers is None else len(layers)
    if stages != meshes:
        raise AlpaError(
            f"The function has {stages} stages, but workers for {meshes} stages run already, of a function that was "
            "compiled before.",
            f"give both functions as many stages, call alpa.shutdown() and alpa.init() between them, {_AUTO}",
            found=stages,
            expected=meshes,
        )


def require_manual(option: Any, num_layers: int, devices: Any) -> None:
    """Refuse a ManualStageOption whose stages miss or repeat layers, or do not use all devices.

    Allow any number of devices if `devices` is None.
    """
    stages = [list(layers) for layers in option.forward_stage_layer_ids]
    found = [layer for layers in stages for layer in layers]
    if found != list(range(num_layers)):
        raise AlpaError(
            f"ManualStageOption has the stages {stages}, but the loss has the layers 0 to {num_layers - 1}.",
            "name each layer once, in order; ManualLayerOption makes a layer more than the program has calls of "
            f"mark_pipeline_boundary; {_AUTO}",
            found=found,
            expected=list(range(num_layers)),
        )
    lists = (option.submesh_physical_shapes, option.submesh_logical_shapes, option.submesh_autosharding_option_dicts)
    for name, values in zip(("physical shapes", "logical shapes", "auto-sharding options"), lists):
        if values is not None and len(values) != len(stages):
            raise AlpaError(
                f"ManualStageOption has {len(stages)} stages and {len(values)} {name}.",
                f"give one for each stage, {_AUTO}",
                found=len(values),
                expected=len(stages),
            )
    sizes = [math.prod(shape) for shape in option.submesh_physical_shapes]
    logical = [math.prod(shape) for shape in option.submesh_logical_shapes or option.submesh_physical_shapes]
    for number, (size, size_too) in enumerate(zip(sizes, logical)):
        if size != size_too:
            raise AlpaError(
                f"Stage {number} of ManualStageOption has {size} devices by its physical shape, and {size_too} by its "
                "logical shape.",
                f"give shapes of equally many devices, {_AUTO}",
                found=size_too,
                expected=size,
            )
    if devices is not None and sum(sizes) != devices:
        raise AlpaError(
            f"The stages of ManualStageOption use {_count(sizes)} devices, but there are {devices}.",
            f"change the shapes so that the stages use all devices, give the stages' devices to PipeshardParallel, "
            f"{_AUTO}",
            found=sum(sizes),
            expected=devices,
        )


def _count(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes)) + (f" = {sum(sizes)}" if len(sizes) > 1 else "")


def require_uniform(option: Any, num_layers: int, devices: int, per_host: int) -> None:
    """Refuse a UniformStageOption that cannot give equally many devices to each stage."""
    stages = option.num_stages or num_layers
    if option.submesh_physical_shape is None:
        if stages != num_layers:
            raise AlpaError(
                f"UniformStageOption has {stages} stages, but the loss has {num_layers} layers. Without "
                "submesh_physical_shape, each layer is a stage.",
                f"give submesh_physical_shape and submesh_logical_shape as well, {_AUTO}",
                found=stages,
                expected=num_layers,
            )
        width = devices // stages
        if devices % stages == 0 and (width % per_host == 0 or per_host % width == 0):
            return
        fitting = [
            n
            for n in range(1, devices + 1)
            if devices % n == 0 and 0 in (devices // n % per_host, per_host % (devices // n))
        ]
        raise AlpaError(
            f"UniformStageOption gives equally many devices to each of {stages} stages, but there are {devices} "
            f"devices, {per_host} on a host.",
            f"use one of these numbers of layers, one stage for each: {', '.join(map(str, fitting))}; {_AUTO}",
            found=stages,
            expected=fitting,
        )
    if option.submesh_logical_shape is None:
        raise AlpaError(
            f"UniformStageOption has the physical shape {tuple(option.submesh_physical_shape)} and no logical shape.",
            "give submesh_logical_shape, (replicas, devices of each), as well.",
        )
    size = math.prod(option.submesh_logical_shape)
    if size * stages != devices or size != math.prod(option.submesh_physical_shape):
        raise AlpaError(
            f"UniformStageOption has {stages} stages of the shapes {tuple(option.submesh_physical_shape)} and "
            f"{tuple(option.submesh_logical_shape)}, but there are {devices} devices.",
            f"choose stages and shapes whose product is {devices}, {_AUTO}",
            found=size * stages,
            expected=devices,
        )
    if stages > num_layers:
        raise AlpaError(
            f"UniformStageOption has {stages} stages, but the loss has only {num_layers} layers.",
            f"make at least {stages} layers, {_AUTO}",
            found=stages,
            expected=num_layers,
        )
