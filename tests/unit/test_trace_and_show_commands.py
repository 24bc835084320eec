"""hwaware trace and hwaware show: wrong words end in one message and exit code 2."""

import json
import sys

import pytest
from builders import layer, workload
from click.testing import CliRunner

from hwaware.cli import main


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def workload_file(tmp_path):
    workload([layer(1e6, 1e6, name="only")], 4, "m").save(tmp_path / "workload.json")
    return str(tmp_path / "workload.json")


def test_show_prints_the_table_of_what_the_file_is(workload_file):
    result = run("show", workload_file)
    assert result.exit_code == 0
    assert "Workload m" in result.stdout
    assert "only" in result.stdout


def test_show_json_is_the_document(workload_file):
    result = run("show", workload_file, "--json")
    assert json.loads(result.stdout)["schema"] == "hwaware.workload"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "not valid JSON"),
        ('{"schema": "other"}', "expected one of hwaware.cluster, hwaware.workload, hwaware.plan, hwaware.timeline"),
        ('{"schema": ["hwaware.plan"]}', "expected one of"),
        ('{"schema": "hwaware.workload", "schema_version": 99}', "too new"),
    ],
)
def test_show_refuses_what_is_none_of_its_files(tmp_path, content, message):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    result = run("show", str(path))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "To fix:" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gtp"], "did you mean 'gpt'?"),
        (["mlp", "--heads", "4"], "'mlp' has no option 'heads'"),
        (["mlp", "--hidden", "0"], "hidden is 0, expected a whole number"),
        (["gpt", "--hidden", "30", "--heads", "4"], "hidden is 30, expected a multiple of heads = 4"),
        (["no.such.module:function"], "cannot be imported"),
        (["json:nothing"], "cannot be imported"),
        (["json:dumps", "--hidden", "8"], "--hidden is an option of the built-in models"),
        (["string:digits"], "expected (train_step, state, batch)"),
        (["json:dumps"], "json:dumps raised TypeError"),
    ],
)
def test_trace_refuses_what_it_cannot_trace(arguments, message):
    result = run("trace", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "To fix:" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("mistake", ["undefined_name", "def f(:"])
def test_a_module_that_cannot_be_run_is_named_with_the_place(mistake, tmp_path, monkeypatch):
    (tmp_path / "a_module_with_a_mistake.py").write_text(mistake + "\n")
    monkeypatch.chdir(tmp_path)
    result = run("trace", "a_module_with_a_mistake:step")
    assert result.exit_code == 2
    assert "a_module_with_a_mistake, which is imported for step, raised " in result.stderr
    assert "To fix:" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("program", ["def step(): raise SystemExit", "import sys; step = 1; sys.exit(0)"])
def test_a_module_that_is_a_program_is_refused(program, tmp_path, monkeypatch):
    (tmp_path / "a_program.py").write_text(program + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "a_program", raising=False)
    result = run("trace", "a_program:step", "-o", "workload.json")
    assert result.exit_code == 2
    assert "raised SystemExit" in result.stderr
    assert '__name__ == "__main__"' in result.stderr


def test_a_model_whose_batch_holds_lists_is_refused_in_few_words(tmp_path, monkeypatch):
    batch = {"ids": [[1] * 1024] * 64, "mask": "MASK"}
    (tmp_path / "with_lists.py").write_text(
        f"import numpy\ndef model():\n    return (lambda state, batch: (state, 0.0)), {{}}, {batch!r}\n".replace(
            "'MASK'", "numpy.ones((64, 3))"
        )
    )
    monkeypatch.chdir(tmp_path)
    result = run("trace", "with_lists:model")
    assert result.exit_code == 2
    assert "The arrays of the batch (65,537 arrays) have shapes [(), (64, 3)], expected" in result.stderr
    assert len(result.stderr) < 1000


def test_a_model_whose_module_imports_alpa(tmp_path, monkeypatch):
    """Alpa does not run on stock JAX by itself; a traced model needs JAX alone."""
    (tmp_path / "alpa").mkdir()
    (tmp_path / "alpa" / "__init__.py").write_text("from jax import no_such_name\n")
    (tmp_path / "imports_alpa.py").write_text("import alpa\n")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "alpa"]:
        monkeypatch.delitem(sys.modules, name)
    done = CliRunner().invoke(main, ["trace", "imports_alpa:example"])
    assert done.exit_code == 2
    assert "To fix: move the function to a module that does not import Alpa" in done.stderr
