"""Versions on which Alpa was never seen to run are refused with one message that names those on which it was."""

import pytest

pytestmark = pytest.mark.alpa


@pytest.fixture
def not_installed(monkeypatch):
    from hwaware.patching import stock_jax

    monkeypatch.setattr(stock_jax, "_installed", False)
    monkeypatch.setattr(stock_jax, "is_needed", lambda: True)
    return stock_jax


@pytest.mark.parametrize("version", ["0.4.12", "0.4.31", "0.4.31.dev20240801", "0.5.0rc1", "1.0"])
def test_another_jax(version, monkeypatch, not_installed):
    import jax

    from hwaware.errors import AlpaError

    monkeypatch.setattr(jax, "__version__", version)
    with pytest.raises(AlpaError) as caught:
        not_installed.install()
    message = str(caught.value)
    assert message.startswith(f"JAX {version} is installed")
    for part in ("Alpa 0.2.3", "JAX 0.4.13 to 0.4.30", "Python 3.9 and 3.11", "Ray 2.9", "To fix: pip install jax=="):
        assert part in message


@pytest.mark.parametrize("version", ["0.4.13", "0.4.20", "0.4.30"])
def test_a_jax_that_works(version, monkeypatch, not_installed):
    import jax

    monkeypatch.setattr(jax, "__version__", version)
    not_installed._require_known_jax()


@pytest.mark.parametrize("version", ["0.2.2", "1.0.0.dev0"])
def test_another_alpa(version, monkeypatch, not_installed):
    from importlib import metadata

    from hwaware.errors import AlpaError

    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(
        AlpaError, match=rf"Alpa {version} is installed.*Alpa 0\.2\.3 on stock JAX 0\.4\.13 to 0\.4\.30"
    ):
        not_installed.install()


def test_an_alpa_that_was_changed():
    from hwaware.errors import AlpaError
    from hwaware.patching.activation import install_runtime
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
