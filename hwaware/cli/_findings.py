"""Find out for `hwaware doctor` what works on this machine, and which commands fix the rest."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from hwaware import ucx as transfers
from hwaware._version import __version__
from hwaware.cli import _probes
from hwaware.compat.packages import ALPAS_JAXLIB, JAX_PACKAGES, XLA_PACKAGE
from hwaware.formatting import counted

_SMI_LIMIT_S = _UCX_LIMIT_S = 20.0
# How `ucx_info -d` names a transport.
_TRANSPORT = r"Transport: (\w+)"
# JAX's code for GPUs by CUDA's major version: the oldest driver (NVIDIA's release notes of CUDA), the oldest JAX.
_CUDAS = {"13": ((580,), (0, 7, 2)), "12": ((525,), (0, 4, 1))}


class Package(NamedTuple):
    """A package that hwaware or a part of it needs.

    Attributes:
        name: Its name for pip.
        needed_for: The commands that need it.
        install: The command that installs it.
        required: True if hwaware itself does not run without it.
    """

    name: str
    needed_for: str
    install: str
    required: bool = False


PACKAGES = (
    Package("msgspec", "everything", "pip install 'msgspec>=0.18'", True),
    Package("numpy", "everything", "pip install 'numpy>=1.21'", True),
    Package("click", "the command line", "pip install 'click>=8.0'", True),
    Package("rich", "the command line", "pip install 'rich>=12.0'", True),
    Package("numba", "plan", "pip install 'numba>=0.53'", True),
    Package("scipy", "bench, compare", "pip install 'scipy>=1.5'", True),
    Package("matplotlib", "pictures", "pip install matplotlib"),
    Package("jax", "trace, profile", "pip install jax"),
    Package(XLA_PACKAGE, "trace, profile", f"pip install {XLA_PACKAGE}"),
    Package("flax", "the built-in models, Alpa", "pip install flax"),
    Package("optax", "the built-in models", "pip install optax"),
    Package("ray", "profile a cluster, testbed, Alpa", "pip install ray"),
    Package("pyroute2", "testbed with shaped links", "pip install pyroute2"),
    Package("tqdm", "Alpa", "pip install tqdm"),
    Package("pulp", "Alpa", "pip install pulp"),
    Package("alpa", "training", "pip install --no-deps alpa==0.2.3"),
)


class Ability(NamedTuple):
    """A task that a user may want to run.

    Attributes:
        name: The task, in words.
        works: True if it runs here.
        found: The versions and devices that it uses, or the obstacle.
        fix: The command or change that helps; None if nothing is missing.
        broken: True if an installed part does not fit, or if a package that hwaware itself needs is missing.
    """

    name: str
    works: bool
    found: str
    fix: Optional[str] = None
    broken: bool = False


def examine(address: Optional[str]) -> Dict[str, Any]:
    """Return the whole report of `hwaware doctor`, ready for JSON.

    Args:
        address: The Ray cluster to ask, HOST:PORT or "auto"; None asks no cluster.
    """
    versions = {package.name: version(package.name) for package in PACKAGES}
    with ThreadPoolExecutor() as pool:
        jax = pool.submit(_probes.ask, "jax") if versions["jax"] else None
        alpa = pool.submit(_probes.ask, "alpa") if versions["alpa"] and versions["jax"] else None
        ray = pool.submit(_probes.ask, "ray", address) if versions["ray"] and address is not None else None
        document: Dict[str, Any] = {
            "hwaware": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": [
                {"name": p.name, "version": versions[p.name], "needed_for": p.needed_for, "install": p.install}
                for p in PACKAGES
            ],
            "gpus": gpus(),
            "cuda_plugins": {name: found for name in map(_plugin, _CUDAS) for found in [version(name)] if found},
            "ucx": ucx(),
            "ray": None if ray is None else {"address": address, **ray.result()},
            "jax": None if jax is None else jax.result(),
            "alpa": None if alpa is None else alpa.result(),
        }
    # They start processes, so the pool's threads must have ended.
    document["testbed"] = kinds_of_testbed(versions)
    document["gpu_testbed"] = kinds_of_gpu_testbed(versions) if document["gpus"] else None
    abilities = judge(document, versions)
    document["abilities"] = [ability._asdict() for ability in abilities]
    document["ok"] = abilities[0].works and not any(ability.broken for ability in abilities)
    return document


def version(name: str) -> Optional[str]:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpus() -> List[Dict[str, str]]:
    """Return name, memory and driver version of each NVIDIA GPU, as nvidia-smi prints them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # a driver that does not answer offers no GPU
    names = ("name", "memory", "driver")
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(",") == 2]
    return [dict(zip(names, row)) for row in rows]


def ucx() -> Dict[str, Any]:
    """Return UCX's version (None if it is absent) and its transports here; or why it does not run."""
    try:
        found = transfers.version()
        names = set() if found is None else set(re.findall(_TRANSPORT, _described()))
    except (OSError, subprocess.SubprocessError) as error:
        return {"version": None, "transports": [], "problem": str(error)}
    return {"version": found, "transports": sorted(names - {"self"})}


def _described() -> str:
    """Return what UCX's own program says of the devices and transports of this machine."""
    folder = os.path.dirname(importlib.import_module("libucx").__file__ or "")
    environment = {**os.environ, "LD_LIBRARY_PATH": os.path.join(folder, "lib")}
    command = [os.path.join(folder, "bin", "ucx_info"), "-d"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_UCX_LIMIT_S, check=True)
    return done.stdout


def kinds_of_testbed(versions: Dict[str, Optional[str]]) -> Dict[str, Any]:
    """Return the kinds of testbed that work here, best first, and notes on what the best one leaves unshaped."""
    if versions["ray"] is None:
        return {"kinds": [], "notes": []}
    from hwaware.bench.testbed.cgroups import find_cpu_groups
    from hwaware.bench.testbed.kinds import KINDS, notes_for

    works = _working(KINDS)
    has_groups = works[0] == "root" and find_cpu_groups("doctor") is not None
    return {"kinds": works, "notes": notes_for(works[0], has_groups)}


def kinds_of_gpu_testbed(versions: Dict[str, Optional[str]]) -> Optional[Dict[str, Any]]:
    """Return the working kinds of testbed on parts of a GPU, their notes, and True if MPS divides the GPU."""
    if versions["ray"] is None:
        return None
    from hwaware.bench.testbed import gpu
    from hwaware.bench.testbed.kinds import notes_for
    from hwaware.bench.testbed.state import GPU_KINDS

    works = _working(GPU_KINDS)
    return {"kinds": works, "notes": notes_for(works[0], False) if works else [], "mps": gpu.has_service()}


def _working(kinds: Sequence[str]) -> List[str]:
    from hwaware.bench.testbed.kinds import best_kind
    from hwaware.errors import UnusableInputError

    works = []
    for kind in kinds:
        with contextlib.suppress(UnusableInputError):
            works.append(best_kind(kind))
    return works


def judge(document: Dict[str, Any], versions: Dict[str, Optional[str]]) -> List[Ability]:
    """Return one ability for each task; the first one is hwaware itself."""
    return [
        _needs("plan, evaluate, simulate, show", versions, [p.name for p in PACKAGES if p.required], broken=True),
        _needs("pictures (show --plot, --html)", versions, ["matplotlib"]),
        _needs("trace a built-in model", versions, [*JAX_PACKAGES, "flax", "optax"]),
        _devices(document, versions),
        _cluster(document, versions),
        _testbed(document, versions),
        *([_gpu_testbed(document, versions)] if document["gpus"] else []),
        _ucx(document),
        _alpa(document, versions),
    ]


def _needs(name: str, versions: Dict[str, Optional[str]], packages: List[str], broken: bool = False) -> Ability:
    missing = [package for package in packages if versions[package] is None]
    if not missing:
        return Ability(name, True, ", ".join(f"{package} {versions[package]}" for package in packages))
    commands = " && ".join(package.install for package in PACKAGES if package.name in missing)
    return Ability(name, False, f"not installed: {', '.join(missing)}", commands, broken)


def _devices(document: Dict[str, Any], versions: Dict[str, Optional[str]]) -> Ability:
    name = "trace, profile --address local"
    needed = _needs(name, versions, [*JAX_PACKAGES])
    if not needed.works:
        return needed
    problem = document["jax"].get("problem")
    if problem:
        return Ability(name, False, f"JAX {versions['jax']} does not run: {problem}", _fix("jax"), True)
    seen = document["jax"]["devices"]
    words = ", ".join(f"{device['count']} {device['platform']} ({device['kind']})" for device in seen)
    found = f"JAX {versions['jax']} sees {words}"
    gpus = document["gpus"]
    if gpus and all(device["platform"] == "cpu" for device in seen):
        found += f", not {counted(len(gpus), 'GPU')} that the driver lists"
        plugins = document["cuda_plugins"].items()
        unfit = [f"{one} {own}, which needs JAX {own}" for one, own in plugins if own != versions["jax"]]
        found += "".join(f"; installed is {one}" for one in unfit)
        extra = _extra(str(versions["jax"]), gpus[0]["driver"])
        fix = f"pip install 'jax[{extra}]=={versions['jax']}' (and leave JAX_PLATFORMS unset)"
        return Ability(name, True, found, fix)
    return Ability(name, True, found)


def _plugin(cuda: str) -> str:
    """Return the package with JAX's code for that major version of CUDA."""
    return f"jax-cuda{cuda}-plugin"


def _extra(jax: str, driver: str) -> str:
    """Return the extra of the package `jax` for the newest CUDA that this JAX and this driver know.

    Example:
        >>> _extra("0.12.0.1", "580.65.06"), _extra("0.12.0.1", "550.54"), _extra("0.4.30", "580.65.06")
        ('cuda13', 'cuda12', 'cuda12')
    """
    numbers = [[int(one) for one in re.findall(r"\d+", text)] for text in (driver, jax)]
    fit = [cuda for cuda, oldest in _CUDAS.items() if all(has >= list(least) for has, least in zip(numbers, oldest))]
    return f"cuda{(fit or list(_CUDAS))[0 if fit else -1]}"


def _cluster(document: Dict[str, Any], versions: Dict[str, Optional[str]]) -> Ability:
    name = "profile a Ray cluster"
    needed = _needs(name, versions, ["ray", *JAX_PACKAGES])
    asked = document["ray"]
    if not needed.works:
        return needed
    if asked is None:
        return Ability(name, True, f"{needed.found}; name a cluster to ask it (--address HOST:PORT)")
    if "problem" in asked:
        return Ability(name, False, asked["problem"], asked.get("fix", _fix("ray")), True)
    usable = sum(host["gpus"] > 0 for host in asked["hosts"])
    nodes = counted(len(asked["hosts"]), "Ray node")
    found = f"{nodes} at {asked['address']}, {usable} with devices (Ray's resource GPU)"
    fix = None if usable else "start Ray on each training host with its devices: ray start --num-gpus=N ..."
    return Ability(name, usable > 0, found, fix, usable == 0)


def _testbed(document: Dict[str, Any], versions: Dict[str, Optional[str]]) -> Ability:
    name = "testbed, demo"
    needed = _needs(name, versions, ["ray", "pyroute2"])
    if versions["ray"] is None:
        return needed
    kinds, notes = document["testbed"]["kinds"], document["testbed"]["notes"]
    found = f"kind {kinds[0]}: " + (" ".join(notes) or "links and CPU shares are shaped")
    fix = needed.fix
    if needed.works and notes:
        from hwaware.bench.testbed.cgroups import CONTAINER_NEEDS

        fix = f"run as root on Linux ({CONTAINER_NEEDS})"
    return Ability(name, True, found, fix)


def _gpu_testbed(document: Dict[str, Any], versions: Dict[str, Optional[str]]) -> Ability:
    name = "testbed on parts of a GPU"
    needed = _needs(name, versions, ["ray", "pyroute2", *JAX_PACKAGES])
    if not needed.works:
        return needed
    found = document["gpu_testbed"]
    fix = None if found["mps"] else "install NVIDIA's Multi-Process Service (MPS), a part of NVIDIA's driver"
    return Ability(name, True, f"kind {found['kinds'][0]}: {' '.join(found['notes'])}", fix)


def _ucx(document: Dict[str, Any]) -> Ability:
    name = "arrays from GPU to GPU (UCX)"
    answer = document["ucx"]
    drivers = [re.findall(r"\d+", gpu["driver"]) for gpu in document["gpus"]]
    fits_13 = all([int(number) for number in driver] >= list(_CUDAS["13"][0]) for driver in drivers)
    fix = f"pip install libucx-cu{'13' if fits_13 else '12'}"
    if "problem" in answer:
        return Ability(name, False, f"UCX does not run: {answer['problem']}", f"{fix} --force-reinstall", True)
    if answer["version"] is None:
        return Ability(name, False, "not installed: libucx; arrays pass through the memory of hosts", fix)
    found = f"UCX {answer['version']} with {', '.join(answer['transports'])}"
    if "cuda_ipc" in answer["transports"]:
        return Ability(name, True, found)
    if document["gpus"]:
        return Ability(name, False, f"{found}, not cuda_ipc", f"{fix} --force-reinstall")
    return Ability(name, True, f"{found}; no GPU is here")


def _alpa(document: Dict[str, Any], versions: Dict[str, Optional[str]]) -> Ability:
    name = "train with Alpa"
    needed = _needs(name, versions, ["alpa", "flax", *JAX_PACKAGES, "pulp", "ray", "tqdm"])
    if not needed.works:
        return needed
    answer = document["alpa"]
    if "problem" in answer:
        return Ability(name, False, answer["problem"], answer.get("fix", _fix("alpa")), True)
    wanted = [override for override in answer["overrides"] if override["needed"]]
    unfit = [override["function"] for override in wanted if not override["fits"]]
    below = "stock JAX" if answer["on_stock_jax"] else ALPAS_JAXLIB
    found = f"Alpa {versions['alpa']} on {below} {versions['jax']}: {len(wanted) - len(unfit)} of {len(wanted)} "
    found += "overrides fit"
    if unfit:
        return Ability(name, False, f"{found}, not {', '.join(unfit)}", f"{_fix('alpa')} --force-reinstall", True)
    return Ability(name, True, found)


def _fix(name: str) -> str:
    return next(package.install for package in PACKAGES if package.name == name)
