"""A JAX that is too old, or lacks names, is refused with one message; a newer one than any seen gets a warning."""

import pytest

pytestmark = pytest.mark.alpa


@pytest.fixture
def not_installed(monkeypatch):
    from hwaware.patching import stock_jax

    monkeypatch.setattr(stock_jax, "_installed", False)
    monkeypatch.setattr(stock_jax, "is_needed", lambda: True)
    return stock_jax


@pytest.mark.parametrize("version", ["0.4.12", "0.3.25"])
def test_a_jax_that_is_too_old(version, monkeypatch, not_installed):
    import jax

    from hwaware.errors import AlpaError

    monkeypatch.setattr(jax, "__version__", version)
    with pytest.raises(AlpaError) as caught:
        not_installed.install()
    message = str(caught.value)
    assert message.startswith(f"JAX {version} is installed. hwaware runs Alpa 0.2.3 on stock JAX from 0.4.13 on")
    known = f">={not_installed.SEEN[0]},<={not_installed.SEEN[-1]}"
    assert message.endswith(f"To fix: pip install 'jax{known}' 'jaxlib{known}'")


@pytest.mark.parametrize("version", ["0.4.13", "0.4.20", "0.4.31.dev20240801", "0.5.0rc1", "0.12.0.1"])
def test_a_jax_that_works(version, monkeypatch, not_installed, caplog):
    import jax

    monkeypatch.setattr(jax, "__version__", version)
    not_installed._require_known_jax()
    assert caplog.text == ""


def test_a_jax_newer_than_any_seen_runs_with_one_warning(monkeypatch, not_installed, caplog):
    import jax

    monkeypatch.setattr(jax, "__version__", "9.0.1")
    not_installed._require_known_jax()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"JAX 9.0.1 is newer than {not_installed.SEEN[-1]}, the newest")


def test_a_newer_jax_that_lacks_a_name_is_refused(monkeypatch, not_installed):
    import jax

    from hwaware.compat import facades
    from hwaware.errors import AlpaError

    monkeypatch.setattr(jax, "__version__", "9.0.1")
    monkeypatch.delattr(facades.module("jax.core"), "gensym")
    monkeypatch.delattr("jax._src.core.gensym")
    lacks = r"JAX 9.0.1 is installed. It lacks 2 names that Alpa or hwaware needs, e.g. jax._src.core.gensym \(hwaware"
    with pytest.raises(AlpaError, match=lacks):
        not_installed._require_known_jax()


def test_no_name_is_missing_and_only_alpa_sees_the_facades(capsys):
    import sys

    from hwaware.activation import install_runtime
    from hwaware.compat import scan

    install_runtime()
    import alpa.util
    import jax.interpreters.xla

    assert scan.main() == 0
    assert capsys.readouterr().out == f"JAX {jax.__version__} has all names that Alpa and hwaware need.\n"
    assert alpa.util.jax is not jax
    assert alpa.util.jnp is jax.numpy
    assert "jax.linear_util" not in sys.modules or hasattr(jax, "linear_util")
    assert getattr(jax, "xla", jax.interpreters.xla) is jax.interpreters.xla  # JAX 0.4.13 has it


@pytest.mark.parametrize("version", ["0.2.2", "1.0.0.dev0"])
def test_another_alpa(version, monkeypatch, not_installed):
    from importlib import metadata

    from hwaware.errors import AlpaError

    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(AlpaError, match=rf"Alpa {version} is installed.*Alpa 0\.2\.3 on stock JAX from 0\.4\.13 on"):
        not_installed.install()


def test_an_alpa_that_was_changed():
    from hwaware.activation import install_runtime
    from hwaware.errors import AlpaError
    from hwaware.patching.mechanism import Patch, Target

    install_runtime()
    with pytest.raises(AlpaError, match=r"source digest.*To fix:.*Alpa 0\.2\.3"):
        Patch(Target("alpa.util", "get_var_mapping", ("0" * 16,)), lambda original: original).check()


def test_which_overrides_fit_an_alpa_that_is_not_installed(tmp_path):
    import importlib.util
    import shutil
    import subprocess
    import sys
    from pathlib import Path

    import hwaware

    script = Path(__file__).resolve().parents[2] / "patches" / "check_alpa.py"
    where = str(Path(hwaware.__file__).parent.parent)
    installed = Path(importlib.util.find_spec("alpa").submodule_search_locations[0])
    shutil.copytree(installed, tmp_path / "alpa")

    def check(folder):
        command = [sys.executable, str(script), str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": where})

    done = check(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert last == f"{len(lines)} of {len(lines)} overrides fit."
    changed = tmp_path / "alpa" / "serialization.py"
    changed.write_text(changed.read_text().replace("def save_checkpoint(", "def save_other("))
    done = check(tmp_path)
    assert done.returncode == 1
    assert "alpa.serialization.save_checkpoint is missing" in done.stdout
    assert check(tmp_path / "none").returncode == 2
