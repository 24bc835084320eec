"""Hold the programs of a model's layers: on all samples of a microbatch, or on one replica's samples."""

from __future__ import annotations

from typing import Callable, List, NamedTuple, Optional, Tuple

from hwaware.calibration.timing import Repeated


class Part(NamedTuple):
    """Hold what one of several replicas runs of a layer, on its samples alone; see `hwaware.compiler.fewer_samples`.

    Attributes:
        replicas: Number of replicas that share the samples.
        forward, backward: Programs of one microbatch; None where the layer has none.
    """

    replicas: int
    forward: Optional[Repeated]
    backward: Optional[Repeated]

    def programs(self) -> List[Repeated]:
        """Return the programs that exist."""
        return [program for program in (self.forward, self.backward) if program is not None]


class LayerPrograms(NamedTuple):
    """Hold the programs of one layer; None where it has none, or none that runs alone.

    Attributes:
        forward, backward: Programs of one microbatch.
        update: Program of one step.
        parts: The same for one of several replicas.
    """

    forward: Optional[Repeated]
    backward: Optional[Repeated]
    update: Optional[Repeated]
    parts: Tuple[Part, ...] = ()

    def whole(self) -> List[Repeated]:
        """Return the programs that run on all samples."""
        return [program for program in (self.forward, self.backward, self.update) if program is not None]

    def with_part(self, replicas: int, forward: Optional[Repeated], backward: Optional[Repeated]) -> LayerPrograms:
        """Return the layer with one part more, unless a program of it could not be made."""
        pairs = ((self.forward, forward), (self.backward, backward))
        if any(whole is not None and part is None for whole, part in pairs):
            return self
        return self._replace(parts=(*self.parts, Part(replicas, forward, backward)))


class LayerSource(NamedTuple):
    """Name a layer's programs before they are lowered, which takes longer than to look up their times.

    Attributes:
        key: Digest of the layer's text; layers with equal keys run equal programs.
        make: Lowers the programs of whole layers; those of replicas' parts too, if its argument is true.
    """

    key: str
    make: Callable[[bool], LayerPrograms]
