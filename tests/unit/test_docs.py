"""What the documentation says can be run runs, what it shows is what comes out, and what it links to is there.

A block that is not run says why in a comment above it: `<!-- not run: ... -->`.
"""

import dataclasses
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import hwaware
from hwaware import plans, result, timeline, workload
from hwaware.cli import COMMANDS, main
from hwaware.cli.show import RECORDS, load_any

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
WORDS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
BLOCK = re.compile(r"(<!-- not run: [^>]+ -->\n)?```(\w+)\n(.*?)```(?:\n+prints\n+```text\n(.*?)```)?", re.DOTALL)
GENERATOR = ROOT / "docs" / "generate.py"


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code that a page says can be run."""

    page: str
    language: str
    code: str
    prints: str


def blocks(language):
    found = [
        Block(page.name, match[2], match[3], match[4])
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        if match[1] is None and match[2] == language
    ]
    assert found
    return found


def generated():
    spec = importlib.util.spec_from_file_location("generate", GENERATOR)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A directory that looks like the root of a clone and may be written into."""
    for name in ("profiling", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", sorted({block.page for block in blocks("sh")}))
def test_commands_run(page, clone):
    lines = [line for block in blocks("sh") if block.page == page for line in block.code.splitlines() if line]
    if any("--plot" in line or "--html" in line for line in lines):
        pytest.importorskip("matplotlib")
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        if program == "cp":
            shutil.copy(*arguments)
            continue
        assert program == "hwaware", f"{page}: {line}"
        outcome = CliRunner().invoke(main, arguments)
        assert outcome.exit_code == 0, f"{page}: {line}\n{outcome.output}"


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.page)
def test_python_runs_and_prints_what_the_page_says(block):
    command = [sys.executable, "-c", block.code]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120)
    assert block.prints is not None, f"{block.page} does not say what the block prints"
    assert done.stdout == block.prints


@pytest.mark.parametrize("block", blocks("json"), ids=lambda block: block.page)
def test_files_can_be_read(block, tmp_path):
    (tmp_path / "file.json").write_text(block.code)
    record = load_any(str(tmp_path / "file.json"))
    assert json.loads(record.to_json())["schema"] == json.loads(block.code)["schema"]


def test_the_policies_of_the_page_print_what_it_shows(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "adapting.md").read_text()
    command, shown = re.search(r"```bash\nhwaware (.*?)\n```.*?```text\n(.*?)```", text, re.DOTALL).groups()
    (load,) = (block for block in blocks("json") if block.page == "adapting.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    shutil.copy(ROOT / "profiling" / "recorded" / "fast-and-slow.json", "cluster.json")
    shutil.copy(ROOT / "profiling" / "recorded" / "gpt-8-layers.json", "workload.json")
    (tmp_path / "load.json").write_text(load.code)
    outcome = CliRunner().invoke(main, shlex.split(command))
    assert outcome.exit_code == 0, outcome.output
    assert [line for line in shown.splitlines() if line not in outcome.stdout.splitlines()] == []


@pytest.mark.parametrize("block", [one for one in blocks("toml") if one.page == "laptop.md"], ids=lambda one: one.page)
def test_the_scenario_of_the_page_uses_every_key_of_its_table(block):
    from hwaware.bench.testbed.scenarios import Scenario, scenario_from_toml

    text = (ROOT / "docs" / "laptop.md").read_text()
    keys = {key for key in Scenario.__struct_fields__ if re.search(rf"^{key} = ", block.code, re.MULTILINE)}
    assert keys == {*Scenario.__struct_fields__} - {"name"}
    assert [key for key in Scenario.__struct_fields__ if f"| `{key}` |" not in text] == []
    assert scenario_from_toml(block.code.encode(), "mine", block.page).rate_mbit("h2", "h0") == 100


@pytest.mark.parametrize("page", WORDS, ids=lambda page: page.name)
def test_local_links_resolve(page):
    known = set(generated().GENERATED)
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()) if "://" not in link]
    assert [link for link in links if link not in known and not (page.parent / link).exists()] == []


def test_every_command_and_option_is_in_the_generated_page():
    page = generated().commands_page()
    for name in COMMANDS:
        assert f"\n## hwaware {name}\n" in page
    for option in ("--time-limit", "--max-devices-per-stage", "--kind", "--address", "--html", "--microbatch-size"):
        assert option in page


def test_every_public_name_is_in_the_generated_page():
    page = generated().python_page()
    missing = [name for name in hwaware.__all__ if f"\n## {name}\n" not in page]
    assert missing == ["__version__"]


def test_every_key_of_every_file_is_documented():
    """Also those of records inside records; they are the same words in all files."""
    text = (ROOT / "docs" / "files.md").read_text()
    records = [plans.Plan, plans.Stage, plans.Replica, workload.Workload, workload.Layer, workload.MeasuredTime]
    records += [timeline.Timeline, timeline.Event, result.BenchmarkResult, result.Mapping]
    records += [result.Unmeasured, result.HostOrder]
    from hwaware import cluster

    records += [cluster.ClusterProfile, cluster.Host, cluster.Device, cluster.Link, cluster.LinkSample]
    records += [cluster.SharedCard, cluster.ConcurrentRate, cluster.Collective, cluster.MatrixProduct]
    keys = {key for record in records for key in record.__struct_fields__}
    assert sorted(key for key in keys if not re.search(rf'[`"]{key}["`]', text)) == []
    assert [schema for schema in RECORDS if f"## {schema}" not in text] == []


def test_the_site_builds_strictly(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "site").glob("*.html")}
    assert {f"{page.stem}.html" for page in PAGES} | {"commands.html", "python.html"} <= names
    for path in (tmp_path / "site").glob("*.html"):
        # Nothing is fetched from elsewhere: links may lead there, pictures, scripts and styles may not.
        assert not re.search(r'<(script|img|link)[^>]+(src|href)="https?://', path.read_text()), path.name
