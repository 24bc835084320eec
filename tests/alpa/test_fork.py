"""The source change for an Alpa of one's own: applied to Alpa's file, and refused for any other."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hwaware
from hwaware.errors import AlpaError
from hwaware.patching import fork, stage_option

pytestmark = pytest.mark.alpa
ROOT = Path(hwaware.__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("write_diff", ROOT / "patches" / "write_diff.py")
write_diff = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(write_diff)


@pytest.fixture
def checkout(tmp_path):
    """A folder with the file that is changed."""
    installed = Path(importlib.util.find_spec("alpa").submodule_search_locations[0]).parent
    (tmp_path / write_diff.FILE).parent.mkdir(parents=True)
    shutil.copy(installed / write_diff.FILE, tmp_path / write_diff.FILE)
    return tmp_path


def write(checkout):
    command = [sys.executable, str(ROOT / "patches" / "write_diff.py"), str(checkout)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def test_the_change_applies_and_can_be_taken_back(checkout):
    before = (checkout / write_diff.FILE).read_text()
    done = write(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    (checkout / "hwaware.diff").write_text(done.stdout)
    subprocess.run(["git", "apply", "hwaware.diff"], cwd=checkout, check=True, timeout=60)
    assert (checkout / write_diff.FILE).read_text() == before + write_diff.ADDED
    compile((checkout / write_diff.FILE).read_text(), write_diff.FILE, "exec")
    again = write(checkout)
    assert again.returncode == 2
    assert "is changed already. To fix:" in again.stderr
    subprocess.run(["git", "apply", "-R", "hwaware.diff"], cwd=checkout, check=True, timeout=60)
    assert (checkout / write_diff.FILE).read_text() == before


def test_another_alpa_is_refused(checkout):
    path = checkout / write_diff.FILE
    path.write_text(path.read_text().replace('timers("stage-construction").start()', "pass"))
    with pytest.raises(AlpaError, match=r"source digest.*To fix:.*0\.2\.3"):
        write_diff.diff(checkout)
    with pytest.raises(AlpaError, match="cannot be read"):
        write_diff.diff(checkout / "none")


def test_the_changed_function_obeys_the_variable(tmp_path, profile, monkeypatch):
    seen = []

    def original(stage_option, virtual_mesh):
        return "Alpa's"

    def placed(inner):
        def replacement(*args):
            seen.append(stage_option._Default.settings)
            return inner(*args)

        return replacement

    monkeypatch.setattr(stage_option, "hardware_aware", placed)
    monkeypatch.setattr(stage_option._Default, "settings", None)
    changed = fork.hardware_aware(original)
    assert changed(None, None) == "Alpa's"
    profile.save(tmp_path / "cluster.json")
    monkeypatch.setenv("HWAWARE_PROFILE", str(tmp_path / "cluster.json"))
    assert changed(None, None) == "Alpa's"
    assert seen[0] is None
    assert seen[1].profile == profile
    assert not stage_option.has_default()
