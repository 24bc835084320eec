"""HWAWARE_PROFILE with the script untouched: nothing at start-up, on at the first `import alpa`, one message if not."""

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders import cluster, device

import hwaware
from hwaware import autoload
from hwaware.errors import UnusableInputError

ROOT = Path(hwaware.__file__).parent.parent
LOADED = "import sys; print(sorted(n for n in ('hwaware', 'jax', 'ray', 'alpa', 'numpy') if n in sys.modules))"
MISSPELT = autoload.VARIABLE[:-1]
# Stands for the real thing: enables by importing Alpa itself, as hwaware does on stock JAX.
PRETEND = """
import sys, types
activation = types.ModuleType("hwaware.activation")
def enable(profile):
    import alpa
    alpa.enabled_with = profile
activation.enable = enable
sys.modules["hwaware.activation"] = activation
"""


def run(code, folder, profile=None, name="train.py", **more):
    """Run a script in a fresh Python that found hwaware's sitecustomize; returns the finished process."""
    environment = {key: value for key, value in os.environ.items() if key != autoload.VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    environment.update({autoload.VARIABLE: str(profile)} if profile else {}, **more)
    script = folder / name
    script.write_text(textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=60, cwd=folder
    )


@pytest.fixture
def folder(tmp_path):
    """Switched on, with a package that stands for Alpa."""
    autoload.switch_on(str(tmp_path))
    (tmp_path / "alpa").mkdir()
    (tmp_path / "alpa" / "__init__.py").write_text("imports = globals().get('imports', 0) + 1\nfrom alpa import util\n")
    (tmp_path / "alpa" / "util.py").write_text("")
    return tmp_path


def test_nothing_at_start_up_without_the_variable(folder):
    done = run("import alpa\n" + LOADED, folder)
    assert (done.stdout, done.stderr) == ("['alpa']\n", "")


def test_a_variable_of_a_similar_name_is_told_once_alpa_is_imported(folder):
    done = run("import alpa\n" + LOADED, folder, **{MISSPELT: "cluster.json"})
    assert done.stdout == "['alpa', 'hwaware']\n"
    assert done.stderr.startswith(f"hwaware stays off: HWAWARE_PROFILE is not set, but {MISSPELT} is. To fix: ")
    done = run(LOADED, folder, **{MISSPELT: "cluster.json"})
    assert (done.stdout, done.stderr) == ("['hwaware']\n", "")


@pytest.mark.parametrize("text", [autoload.PTH, autoload.SITECUSTOMIZE])
def test_what_the_version_before_wrote_is_hwawares(tmp_path, text):
    new = f"any(name.startswith({autoload.VARIABLE[:-3]!r}) for name in os.environ)"
    path = tmp_path / "sitecustomize.py"
    path.write_text(text.replace(new, "os.environ.get('HWAWARE_PROFILE')"))
    assert new in text
    assert autoload.switch_off(str(tmp_path)) == str(path)
    assert not path.exists()


def test_nothing_heavy_at_start_up_with_the_variable(folder):
    assert run(LOADED, folder, "cluster.json").stdout == "['hwaware']\n"


@pytest.mark.parametrize(
    "statement", ["import alpa", "import alpa.util; import alpa", "from alpa import util; import alpa"]
)
def test_enabled_at_the_first_import(folder, statement):
    check = "print(alpa.imports, alpa.enabled_with, alpa.__spec__.name, type(alpa.__spec__.loader).__name__, alpa.util)"
    done = run(f"{PRETEND}\nimport os; os.chdir('/')\n{statement}\n{check}", folder, "cluster.json")
    assert done.returncode == 0, done.stderr
    times, profile, name, loader, *_ = done.stdout.split()
    assert (times, name, loader) == ("1", "alpa", "SourceFileLoader")
    assert Path(profile) == folder / "cluster.json"


def test_a_profile_that_cannot_be_used_is_one_message(folder):
    done = run("try:\n    import alpa\nexcept Exception:\n    print('caught')", folder, "none.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: ")
    assert "none.json" in done.stderr
    assert "To fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_notebook_imports_alpa_again_once_the_profile_is_there(folder):
    again = """
    try:
        import alpa
    except SystemExit:
        open("cluster.json", "w").close()
    import alpa
    print(alpa.enabled_with)
    """
    pretend = PRETEND.replace("import alpa\n", "open(profile).close()\n    import alpa\n").replace(
        "def enable", "from hwaware.errors import RecordError\ndef enable"
    )
    pretend = pretend.replace(
        "    open(profile).close()",
        "    import os\n    if not os.path.exists(profile): raise RecordError('No file.', 'write it.')",
    )
    done = run(pretend + textwrap.dedent(again), folder, "cluster.json")
    assert done.stdout == f"{folder / 'cluster.json'}\n", done.stderr
    assert done.stderr.startswith("Error: No file. To fix: write it.")


def test_processes_that_the_program_starts_elsewhere_read_the_same_file(folder):
    child = "import subprocess, sys, os; os.chdir('/'); subprocess.run([sys.executable, '-c', %r])"
    shown = run(child % "import os; print(os.environ['HWAWARE_PROFILE'])", folder, "cluster.json").stdout
    assert shown == f"{folder / 'cluster.json'}\n"


@pytest.mark.parametrize("is_needed", [True, False])
def test_only_alpas_own_jaxlib_runs_without_hwaware(folder, is_needed):
    stock = f"import sys, types\njax = types.ModuleType('stock_jax'); jax.is_needed = lambda: {is_needed}\n"
    stock += "sys.modules['hwaware.patching.stock_jax'] = jax\n"
    stock += PRETEND.replace("import alpa\n", "from hwaware import errors; raise errors.AlpaError('Old.', 'update.')\n")
    done = run(stock + "import alpa", folder, "none.json")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: Old. To fix: update.\n")
    assert ("To run without hwaware: unset HWAWARE_PROFILE." in done.stderr) == (not is_needed)


def test_looking_for_alpa_enables_nothing(folder):
    look = "import importlib.util, sys; print(bool(importlib.util.find_spec('alpa')), 'alpa' in sys.modules)"
    assert run(look, folder, "none.json").stdout == "True False\n"


def test_without_alpa_the_import_fails_as_ever(folder):
    (folder / "alpa" / "util.py").unlink()
    (folder / "alpa" / "__init__.py").unlink()
    (folder / "alpa").rmdir()
    hidden = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
    assert "ModuleNotFoundError: No module named 'alpa'" in run(hidden + "import alpa", folder, "none.json").stderr


def test_a_program_that_enables_by_itself_decides(folder):
    code = "import hwaware.autoload as a; a.cancel(); import alpa; print(hasattr(alpa, 'enabled_with'))"
    assert run(PRETEND + code, folder, "cluster.json").stdout == "False\n"


def test_an_option_that_imports_alpa_first_leaves_the_profile_in_force(tmp_path):
    if find_spec("alpa") is None:
        pytest.skip("needs Alpa")
    autoload.switch_on(str(tmp_path))
    cluster([device("here:0", 1.0)]).save(tmp_path / "cluster.json")
    code = "import hwaware; hwaware.HardwareAwareStageOption('cluster.json'); import alpa\n"
    code += "from hwaware.patching import stage_option; print(stage_option.has_default())"
    for profile, expected in (("cluster.json", "True\n"), (None, "False\n")):
        done = run(code, tmp_path, profile, JAX_PLATFORMS="cpu")
        assert done.stdout == expected, done.stderr


def test_workers_of_ray_are_not_enabled(folder):
    stock = "jax = types.ModuleType('stock_jax'); jax.install = lambda: print('installed')\n"
    stock += "sys.modules['hwaware.patching.stock_jax'] = jax\n"
    code = PRETEND + stock + "import alpa; print(alpa.imports, hasattr(alpa, 'enabled_with'))"
    done = run(code, folder, "none.json", "default_worker.py")
    assert (done.stdout, done.stderr) == ("installed\n1 False\n", "")


def test_a_hidden_sitecustomize_runs_too(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "sitecustomize.py").write_text("import builtins; builtins.hidden_ran = True\n")
    path = os.pathsep.join([str(folder), str(ROOT), str(other)])
    assert run("print(hidden_ran)", folder, PYTHONPATH=path).stdout == "True\n"


def test_two_that_run_what_they_hide_do_not_run_each_other_again(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    text = (Path(hwaware.__file__).parent / "bench" / "testbed" / "born" / "sitecustomize.py").read_text()
    (other / "sitecustomize.py").write_text(f"{text}\nprint('other')\n")
    for first, second in ((folder, other), (other, folder)):
        path = os.pathsep.join(map(str, (first, ROOT, second)))
        done = run("print('done')", folder, folder / "none.json", PYTHONPATH=path)
        assert (done.stdout, done.stderr) == ("other\ndone\n", "")


def test_the_line_of_an_environment(folder):
    """A .pth file, as `on` writes it into site-packages."""
    site = folder / "site"
    site.mkdir()
    (site / autoload.PTH_NAME).write_text(autoload.PTH)
    (folder / "sitecustomize.py").unlink()
    code = f"import site; site.addsitedir({str(site)!r}); "
    assert run(code + LOADED, folder).stdout == "[]\n"
    assert run(code + LOADED, folder, "cluster.json").stdout == "['hwaware']\n"


def test_on_and_off(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path)})
    assert autoload.main(["status"]) == 0
    assert autoload.main(["on"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [autoload.PTH_NAME]
    assert autoload.main(["off"]) == 0
    assert list(tmp_path.iterdir()) == []
    assert autoload.main(["off"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines() ] == [
        "off", "on", "Start programs with", "off", "off",
    ]  # fmt: skip


def test_somebody_elses_file_stays(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("pass\n")
    with pytest.raises(UnusableInputError, match="not hwaware's"):
        autoload.switch_on(str(tmp_path))
    assert autoload.switch_off(str(tmp_path)) is None
    assert (tmp_path / "sitecustomize.py").exists()


def test_where_nothing_can_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert autoload.main(["on", "--folder", str(tmp_path / "file" / "below")]) == 2
    assert "To fix: python -m hwaware.autoload on --folder DIR" in capsys.readouterr().err


def test_the_script_in_patches(tmp_path):
    script = Path(__file__).parents[2] / "patches" / "autoload.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), "status", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=True)
    assert done.stdout == f"off: no {tmp_path / 'sitecustomize.py'}\n"


def refused(folder, words, capsys):
    """`on` and `off` change nothing; `on` says why in one message, `status` says off."""
    assert autoload.main(["on", "--folder", str(folder)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("Error: ")
    assert words in message
    assert "To fix:" in message
    autoload.main(["off", "--folder", str(folder)])
    autoload.main(["status", "--folder", str(folder)])
    assert "on:" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [
    b"import hwaware.autoload\nprint('mine')\n",  # mentions it
    autoload.SITECUSTOMIZE.encode() + b"print('mine')\n",  # somebody added to it
    b"\xff\xfe not UTF-8 \x00", "# caf\xe9 hwaware.autoload".encode("latin-1"), b"",
])  # fmt: skip
def test_a_file_that_is_not_exactly_hwawares_stays(content, tmp_path, capsys):
    path = tmp_path / "sitecustomize.py"
    path.write_bytes(content)
    refused(tmp_path, "is not hwaware's", capsys)
    assert path.read_bytes() == content


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_written_through_a_link(exists, tmp_path, capsys):
    target, folder = tmp_path / "target.py", tmp_path / "folder"
    folder.mkdir()
    if exists:
        target.write_text(autoload.SITECUSTOMIZE)
    (folder / "sitecustomize.py").symlink_to(target)
    refused(folder, "is not hwaware's", capsys)
    assert (folder / "sitecustomize.py").is_symlink()
    assert target.exists() == exists


def test_a_pipe_or_folder_in_its_place_stays(tmp_path, capsys):
    for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "sitecustomize.py")
        refused(tmp_path / name, "is not hwaware's", capsys)
        assert (tmp_path / name / "sitecustomize.py").exists()


def test_another_name_of_the_same_file_keeps_its_content(tmp_path):
    """A hard link: the file is replaced, not written into."""
    path, other = tmp_path / "sitecustomize.py", tmp_path / "other.py"
    autoload.switch_on(str(tmp_path))
    os.link(path, other)
    autoload.switch_on(str(tmp_path))
    assert not path.samefile(other)


def test_what_the_system_refuses_is_one_message(tmp_path, capsys, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    autoload.switch_on(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, "remove", denied)
        assert autoload.main(["off", "--folder", str(tmp_path)]) == 2
        assert "sitecustomize.py cannot be removed: Permission denied." in capsys.readouterr().err
        patched.setattr(os, "lstat", denied)
        assert autoload.main(["status", "--folder", str(tmp_path)]) == 2
        assert "sitecustomize.py cannot be read: Permission denied." in capsys.readouterr().err
    assert (tmp_path / "sitecustomize.py").exists()
