"""Note the calls of a program, and name the arrays that it holds, so that calls can be made again."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware.compiler.layouts import alpa_spec
from hwaware.compiler.sharding import whole
from hwaware.survival import recipes
from hwaware.survival.arrays import is_deleted, is_distributed, one
from hwaware.survival.pieces import Name
from hwaware.survival.points import Point

# Kept on the program's arrays: their names.
_NAME = "hwaware_name"


class Call(NamedTuple):
    """A call of a compiled function: its arguments are names of arrays, or values of their own."""

    number: int
    executable: Any
    arguments: Tuple[Any, ...]


class Named(NamedTuple):
    """An argument that is an array on workers."""

    name: Name


class _Origin(NamedTuple):
    """The source of an array's placement: the function that made or took the array, and the array's place there."""

    executable: Any
    is_input: bool
    place: int


def name_of(array: Any) -> Optional[Name]:
    """Return the name that an array was given; None without one."""
    found: Optional[Name] = vars(array).get(_NAME)
    return found


class Calls:
    """The noted calls of one program, and its arrays.

    Attributes:
        group: Alpa's launched group of meshes, as it is now.
        number: Number of the newest call.
        log: The calls that may have to be made again.
        pending: The call that is being launched, if any: a launch that fails late has taken its arguments.
        executables: The compiled functions.
        functions: Number of a call -> its function, while the program has a result of the call.
    """

    def __init__(self) -> None:
        self.group: Any = None
        self.number = 0
        self.log: List[Call] = []
        self.pending: List[Call] = []
        self.executables: Any = weakref.WeakSet()
        self.functions: Dict[int, Any] = {}
        self._launch: Any = None
        self._brought = 0
        self._made: Dict[Name, Any] = {}
        self._origins: Dict[Name, Optional[_Origin]] = {}
        self._avals: Dict[Name, Any] = {}

    def recipe(self) -> Optional[recipes.Recipe]:
        """Return the recipe of the program's compilation; None before it."""
        return next(filter(None, map(recipes.of, self.executables)), None)

    def begin(self, executable: Any, args: Sequence[Any], launch: Callable[..., Any]) -> Tuple[Call, bool]:
        """Return a call that is about to be made, and True if it brings arrays that no noted call made."""
        self.executables.add(executable)
        self._launch = launch
        has_new = self._named(executable, args)
        return Call(self.number + 1, executable, tuple(map(self.kept, args))), has_new

    def launched(self, executable: Any, args: Sequence[Any]) -> Any:
        """Launch a function on the meshes as they are now, and return its outputs."""
        recipes.follow(executable, self.group)
        return self._launch(executable, *args)

    def note(self, call: Call, outs: Sequence[Any]) -> None:
        """Note a call that was made."""
        self.number = call.number
        self.log.append(call)
        self.functions[call.number] = call.executable
        for place, out in enumerate(outs):
            self._name(out, (call.number, place), _Origin(call.executable, False, place))

    def _name(self, array: Any, name: Name, origin: Optional[_Origin]) -> None:
        setattr(array, _NAME, name)
        self._made[name] = weakref.ref(array)
        self._origins[name], self._avals[name] = origin, array.aval

    def _named(self, executable: Any, args: Sequence[Any]) -> bool:
        """Name arguments that have no name yet, and note who reads them; return True for any without a name."""
        has_new = False
        for place, arg in enumerate(args):
            if not self.is_own(arg):
                continue
            name = name_of(arg)
            if name is None:
                has_new = True
                self.bring([arg])
                name = name_of(arg)
                assert name is not None
            spec = _specs(executable, True, place)
            if spec is not None and spec.aval.shape == arg.aval.shape:  # that of a batch is a microbatch's
                self._origins[name] = _Origin(executable, True, place)
        return has_new

    def bring(self, arrays: Iterable[Any]) -> None:
        """Name arrays that the program has made without a call, such as those of a restored checkpoint."""
        for array in arrays:
            self._brought += 1
            self._name(array, (0, self._brought), None)

    def is_own(self, array: Any) -> bool:
        """Tell if an argument is an array on the workers of this program, and not of another one."""
        return is_distributed(array) and one(array).device_mesh in self.group.meshes

    def kept(self, arg: Any) -> Any:
        """Return an argument's name, or a copy, because the program may write the next batch into the argument."""
        import jax
        import numpy

        if self.is_own(arg):
            return Named(vars(arg)[_NAME])
        if is_distributed(arg):
            return arg._value  # calls that read the same array share its value, into which nobody writes
        return numpy.array(arg) if isinstance(arg, (numpy.ndarray, jax.Array)) else arg

    def forget(self, number: int) -> None:
        """Forget the calls up to a number."""
        self.log = [call for call in self.log if call.number > number]

    def live(self) -> Dict[Name, Any]:
        """Return the arrays that the program holds and that no call has taken."""
        found, read = {}, _read([*self.log, *self.pending])
        for name, reference in list(self._made.items()):
            array = reference()
            if array is None:
                if name not in read:
                    del self._made[name]
                    self._origins.pop(name, None)
                    self._avals.pop(name, None)
            elif not is_deleted(array):
                found[name] = array
        kept = {number for number, _ in self._made} | {call.number for call in self.log}
        self.functions = {number: function for number, function in self.functions.items() if number in kept}
        return found

    def needed(self, point: Point) -> Set[Name]:
        """Return the arrays that a point has to give: those that repeated calls read, and those of the program."""
        read = _read([call for call in [*self.log, *self.pending] if call.number > point.number])
        return {name for name in read | set(self.live()) if name[0] <= point.number}

    def spec(self, name: Name) -> Any:
        """Return an array's placement now: by the function that reads or made it, or else on the first stage."""
        origin = self._origins[name]
        found = None if origin is None else _specs(*origin)
        if found is not None:
            return found
        from alpa.parallel_plan import PlacementSpec

        aval, width = self._avals[name], self.group.meshes[0].num_devices
        return PlacementSpec(aval, (0,), (alpa_spec(whole(aval.shape), (width, 1)),))

    def become(self, name: Name, new: Any) -> Any:
        """Let the program's own array become the new one, if the program still has it; return the array to use."""
        reference = self._made.get(name)
        old = None if reference is None else reference()
        if old is None:
            setattr(new, _NAME, name)
            return new
        for part in getattr(old, "_mesh_array_map", {}).values():  # Alpa may just wait for one
            part.__dict__ = dict(vars(one(new)))
        old.__class__ = new.__class__
        old.__dict__ = {**vars(new), _NAME: name}
        return old

    def make_again(self, arrays: Dict[Name, Any]) -> int:
        """Make the noted calls again, and return their number; keep of `arrays` only those that later calls read."""
        newest = {arg.name: call.number for call in self.log for arg in call.arguments if isinstance(arg, Named)}
        for call in self.log:
            given = [arrays[arg.name] if isinstance(arg, Named) else arg for arg in call.arguments]
            for place, out in enumerate(self.launched(call.executable, given)):
                name = (call.number, place)
                arrays[name] = self.become(name, out)
                self._made[name] = weakref.ref(arrays[name])
            # The program holds its own; workers have no room for the results of all calls.
            for name in [name for name in arrays if newest.get(name, 0) <= call.number]:
                del arrays[name]
        return len(self.log)


def _specs(executable: Any, is_input: bool, place: int) -> Any:
    """Return the placement of a function's argument or result; None for an argument that it never reads.

    Return None, too, for a function that follows another one: the followed function has these arrays, too.
    """
    if recipes.of(executable) is None:
        return None
    return (executable.input_placement_specs if is_input else executable.output_placement_specs)[place]


def _read(log: Sequence[Call]) -> Set[Name]:
    """Return the arrays that calls read."""
    return {arg.name for call in log for arg in call.arguments if isinstance(arg, Named)}
