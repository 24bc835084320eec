"""Starting hwaware must stay light: no JAX, Ray, Alpa or matplotlib before they are needed."""

import subprocess
import sys

import pytest

HEAVY = ("jax", "jaxlib", "flax", "ray", "alpa", "matplotlib", "numba")

CHECK = """
import sys
{code}
print(",".join(sorted({{name.partition(".")[0] for name in sys.modules}} & set({heavy!r}))))
"""


def heavy_modules_after(code):
    """The heavy packages that a fresh interpreter has loaded after running `code`."""
    script = CHECK.format(code=code, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    found = done.stdout.strip().splitlines()[-1:]
    return [name for line in found for name in line.split(",") if name and name in HEAVY]


RUN = "from click.testing import CliRunner; from hwaware.cli import main; r = CliRunner().invoke(main, {!r}); "
RUN += "assert r.exit_code == 0, r.output"


@pytest.mark.parametrize(
    "code",
    [
        "import hwaware",
        "from hwaware import ClusterProfile, Plan, Workload",
        "from hwaware import compare, evaluate, explain, plan, profile, runtime_settings, simulate, trace",
        "from hwaware import HardwareAwareStageOption, StepRecorder, enable",
        "import hwaware.models",
        "import hwaware.tracing",
        RUN.format(["--help"]),
        RUN.format(["trace", "--help"]),
        RUN.format(["show", "--help"]),
    ],
)
def test_light(code):
    assert heavy_modules_after(code) == []


def loaded_of_hwaware(code):
    """Run `code` in a fresh interpreter, and return the modules of hwaware that it has loaded."""
    script = f"import sys\n{code}\nprint(*(name for name in sys.modules if name.partition('.')[0] == 'hwaware'))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_import_hwaware_loads_nothing_but_itself():
    assert loaded_of_hwaware("import hwaware; dir(hwaware)") == {"hwaware", "hwaware._version"}


def test_a_public_name_loads_what_it_needs_alone():
    records = {"hwaware.cluster", "hwaware.records", "hwaware.errors", "hwaware.output_files"}
    assert loaded_of_hwaware("from hwaware import ClusterProfile") == {"hwaware", "hwaware._version", *records}


def test_the_test_can_fail():
    assert heavy_modules_after("sys.modules['jax.numpy'] = sys") == ["jax"]
    assert heavy_modules_after("import numba") == ["numba"]


@pytest.mark.parametrize("name", ["costs.fit_collectives", "placement.training_dp"])
def test_rooms_with_public_names_are_there_without_being_imported(name):
    code = f"import hwaware; print(hwaware.{name}.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == name.partition(".")[2]
