"""Check the messages that users meet first, word for word, and the quotes of them in docs/troubleshooting.md.

Each section of that page quotes a message in a block of text. Every quote is compared with the message that the code
raises.
"""

import contextlib
import itertools
import json
import re
import sys
import types
from importlib import metadata
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner

from hwaware import ucx
from hwaware.cli import main
from hwaware.encryption import new_identity
from hwaware.errors import MeasurementError, UnusableInputError
from hwaware.greeting import Credentials, new_secret
from hwaware.runtime import settings
from hwaware.runtime.channels import Incoming
from hwaware.transport import Connection, Mailbox

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parents[1] / "data"
CLUSTER, WORKLOAD, PLAN = (
    json.loads((DATA / name).read_text())
    for name in ("cluster_three.json", "workload_six_layers.json", "plan_by_hand.json")
)


def changed(document, **changes):
    return {**json.loads(json.dumps(document)), **changes}


def first(document, key, **changes):
    """The document with the first entry of one of its lists changed."""
    entries = document[key]
    return changed(document, **{key: [{**entries[0], **changes}, *entries[1:]]})


def without(document, key, field):
    head, *tail = document[key]
    return changed(document, **{key: [{name: value for name, value in head.items() if name != field}, *tail]})


GOOD = {"cluster.json": CLUSTER, "workload.json": WORKLOAD, "plan.json": PLAN}
EVALUATE = ("evaluate", "cluster.json", "workload.json", "plan.json")
FIND = ("plan", "cluster.json", "workload.json", "-o", "out.json", "--microbatches", "8")
INVALID = "To fix: correct the named value (`$` is the whole document), or write the file again with hwaware."

IPERF3 = {"start": {"connected": []}, "end": {"sum_received": {"bits_per_second": 8e9}}}


def nccl_log(ranks, program=""):
    """The output of nccl-tests for one size."""
    lines = [f"# Collective test starting: {program}", "# nThread 1 nGpus 1"]
    lines += [f"# Rank {rank} Group 0 Pid 7 on h{rank} device 0 [0000:04:00] Some GPU" for rank in range(ranks)]
    lines += ["# size count type redop root time algbw busbw #wrong", "1024 256 float sum -1 10.00 0.10 0.15 0"]
    return "\n".join([*lines, "# Out of bounds values : 0 OK", ""])


# name -> (files beside the good ones, command, message)
CASES = {
    "a file that is not there": (
        {},
        ("show", "none.json"),
        "none.json cannot be read: No such file or directory. To fix: check the path and its permissions.",
    ),
    "an input is too large": (
        {"workload.json": changed(WORKLOAD, layers=WORKLOAD["layers"][:1] * 10_001)},
        ("show", "workload.json"),
        "workload.json has 10,001 layers, expected at most 10,000. "
        "To fix: join neighbouring layers, such as those of a block.",
    ),
    "not JSON": (
        {"cluster.json": '{"latency_s": NaN}'},
        ("show", "cluster.json"),
        "cluster.json is not valid JSON: JSON is malformed: invalid character (byte 14). "
        "To fix: give a JSON file of hwaware, such as cluster.json. If it is one, the file is damaged or incomplete: "
        "copy it or make it again. JSON has no NaN or Infinity.",
    ),
    "files in the wrong order": (
        {},
        ("evaluate", "workload.json", "cluster.json", "plan.json"),
        "workload.json has schema 'hwaware.workload', expected 'hwaware.cluster'. To fix: give a hwaware.cluster file.",
    ),
    "results of another program": (
        {"iperf3.json": {"start": {}, "end": {}}},
        ("plan", "iperf3.json", "workload.json", "-o", "out.json", "--microbatches", "8"),
        "iperf3.json has no \"schema\", expected 'hwaware.cluster'. To fix: give a hwaware.cluster file. "
        "`hwaware import` reads the results of other programs.",
    ),
    "not a file of hwaware": (
        {"other.json": {"answer": 42}},
        ("show", "other.json"),
        'other.json has no "schema", expected one of hwaware.cluster, hwaware.workload, hwaware.plan, '
        "hwaware.timeline, hwaware.benchmark, hwaware.history, hwaware.partial_cluster, hwaware.load. "
        "To fix: give a file with one of these schemas; `hwaware import` reads other programs' files.",
    ),
    "too new": (
        {"cluster.json": changed(CLUSTER, schema_version=2)},
        EVALUATE,
        "cluster.json has schema_version 2, this hwaware reads up to 1: the file is too new. "
        "To fix: update hwaware (pip install --upgrade hwaware).",
    ),
    "too old": (
        {"cluster.json": changed(CLUSTER, schema_version=0)},
        EVALUATE,
        "cluster.json has schema_version 0, this hwaware reads 1: the file is too old. To fix: write it again with "
        "this hwaware; the changes between versions are listed in CHANGELOG.md.",
    ),
    "a negative value": (
        {"cluster.json": first(CLUSTER, "links", latency_s=-1.0)},
        EVALUATE,
        "cluster.json is not a valid hwaware.cluster file: latency_s of link 'fast' -> 'middle' is -1.0, expected a "
        f"finite number, at least 0 - at `$.links[0]`. {INVALID}",
    ),
    "a value beyond sense": (
        {"workload.json": first(WORKLOAD, "layers", output_bytes=1.7e308)},
        EVALUATE,
        "workload.json is not a valid hwaware.workload file: output_bytes of layer 'layer 0' is 1.7e+308, expected "
        f"at most 1e+21: no model has that - at `$.layers[0]`. {INVALID}",
    ),
    "a value of the wrong type": (
        {"cluster.json": changed(CLUSTER, environment={"reference_s": "slow"})},
        EVALUATE,
        "cluster.json is not a valid hwaware.cluster file: environment.reference_s: Expected `float | null`, "
        f"got `str`. {INVALID}",
    ),
    "too many microbatches to simulate": (
        {"plan.json": changed(PLAN, num_microbatches=10**9)},
        ("simulate", "cluster.json", "workload.json", "plan.json", "-o", "out.json"),
        "the step of 1000000000 microbatches on 3 stages has 10000000000 passes and messages, the simulator runs at "
        "most 300000. To fix: simulate a plan of at most 30000 microbatches; `hwaware evaluate` prices any number.",
    ),
    "a missing value": (
        {"workload.json": without(WORKLOAD, "layers", "forward_flops")},
        EVALUATE,
        "workload.json is not a valid hwaware.workload file: Object missing required field `forward_flops` - at "
        f"`$.layers[0]`. {INVALID}",
    ),
    "devices without links": (
        {"cluster.json": changed(CLUSTER, links=CLUSTER["links"][:1])},
        EVALUATE,
        "cluster.json is not a valid hwaware.cluster file: devices ('slow:0',) are unconnected to 'fast:0': no link "
        f"leads there. {INVALID}",
    ),
    "an unknown device": (
        {"plan.json": first(PLAN, "stages", replicas=[{"devices": ["mars:0"]}])},
        EVALUATE,
        (
            "stage 0 of the plan names unknown device 'mars:0'; the cluster has fast:0, middle:0, slow:0. To fix: "
            "correct the device id, or give the profile of the plan's own cluster."
        ),
    ),
    "another number of layers": (
        {"plan.json": changed(PLAN, stages=PLAN["stages"][:2])},
        EVALUATE,
        (
            "the plan covers 5 layers, but the workload 'six layers' has 6. To fix: end the last stage with layer "
            "5, or give the plan's own workload."
        ),
    ),
    "a data type that was not measured": (
        {"workload.json": changed(WORKLOAD, dtype="bfloat16")},
        EVALUATE,
        (
            "device 'fast:0' has no throughput curve for bfloat16, only for ['float32']. To fix: measure it "
            "(hwaware profile --dtype bfloat16), or use a data type that was measured."
        ),
    ),
    "nowhere to write the plan": (
        {},
        ("plan", "cluster.json", "workload.json", "--microbatches", "8"),
        "There is nowhere to write the plan to. To fix: give -o plan.json, or --json.",
    ),
    "no microbatches": (
        {},
        (*FIND[:-1], "0"),
        "--microbatches is '0', expected a number of at least 1, or open. To fix: give for example --microbatches 16.",
    ),
    "an unknown host to exclude": (
        {},
        (*FIND, "--exclude", "mars"),
        (
            "cannot exclude 'mars': the cluster has no such host or device. To fix: choose among fast, middle, "
            "slow, fast:0, middle:0, slow:0."
        ),
    ),
    "a reserve that no device can keep": (
        {},
        (*FIND, "--reserve", "2TB"),
        (
            "The reserve of memory cannot be kept: reserve_bytes (--reserve) is 2e+12, and device 'slow:0' has 5e+08 "
            "bytes, expected less than that. To fix: reserve less, or exclude that device."
        ),
    ),
    "a reserve that is no number": (
        {},
        (*FIND, "--reserve", "much"),
        "--reserve: 'much' is no number of bytes. To fix: give for example --reserve 2GB.",
    ),
    "all hosts excluded": (
        {},
        (*FIND, "--exclude", "fast", "--exclude", "middle", "--exclude", "slow"),
        (
            "without fast, middle, slow, the cluster has no devices. To fix: exclude fewer hosts, or measure the "
            "missing links."
        ),
    ),
    "an unknown model": (
        {},
        ("trace", "bert", "-o", "out.json"),
        (
            "There is no built-in model 'bert'; there are mlp, gpt, moe, wresnet. To fix: name one of these, or "
            "package.module:function."
        ),
    ),
    "a module that is not there": (
        {},
        ("trace", "mypackage.training:example", "-o", "out.json"),
        (
            "mypackage.training:example cannot be imported: No module named 'mypackage'. To fix: name it as "
            "package.module:function, from a directory that has it."
        ),
    ),
    "an unknown scenario": (
        {},
        ("testbed", "up", "slow-and-fast"),
        (
            "There is no scenario 'slow-and-fast'. To fix: give one of directed, … or the path of a .toml file "
            "like those."
        ),
    ),
    "no such testbed": (
        {},
        ("testbed", "down", "mine-never-made"),
        "There is no testbed 'mine-never-made'. To fix: the testbeds are: … (`hwaware testbed list`).",
    ),
    "no Ray at the address": (
        {},
        ("profile", "--address", "127.0.0.1:1", "-o", "out.json"),
        (
            "No Ray cluster answers at 127.0.0.1:1: [Errno 111] Connection refused. To fix: start Ray there (ray "
            "start --head), or give the HOST:PORT that `ray start` printed on the head node."
        ),
    ),
    "a text that is not an address": (
        {},
        ("profile", "--address", "nowhere", "-o", "out.json"),
        (
            "'nowhere' is not the address of a Ray cluster, expected HOST:PORT or auto. To fix: give the "
            "HOST:PORT that `ray start` printed on the head node, or `hwaware testbed list` for a testbed."
        ),
    ),
    "a data type that cannot be measured": (
        {},
        ("profile", "--address", "local", "--dtype", "int8", "-o", "out.json"),
        (
            "Data types 'int8' cannot be measured, expected some of float32, bfloat16, float16. To fix: give "
            "--dtype float32, or several separated by commas."
        ),
    ),
    "a picture of an unknown kind": (
        {},
        ("show", "cluster.json", "--plot", "cluster.bmp"),
        (
            "cluster.bmp cannot be written as a picture: Format 'bmp' is not supported (supported formats: …). To "
            "fix: end the name in .png or .svg."
        ),
    ),
    "a picture that needs more files": (
        {},
        ("show", "plan.json", "--picture", "timeline", "--plot", "out.png"),
        (
            "There is no picture 'timeline' of this hwaware.plan, only plan. To fix: for a plan's timeline or "
            "sensitivity give --cluster and --workload too, for its map --cluster."
        ),
    ),
    "files of two kinds": (
        {},
        ("compare", "cluster.json", "plan.json"),
        (
            "A hwaware.cluster and a hwaware.plan cannot be compared, expected two results, two profiles or two plans. "
            "To fix: give two hwaware.benchmark, two hwaware.cluster or two hwaware.plan files."
        ),
    ),
    "the output of another program": (
        {"node.json": IPERF3},
        ("import", "nccl-tests", "node.json", "-o", "out.json"),
        (
            "node.json is the output of iperf3, expected that of nccl-tests. To fix: run `hwaware import iperf3` with "
            "the other arguments of your command."
        ),
    ),
    "output without an operation": (
        {"run.log": nccl_log(2)},
        ("import", "nccl-tests", "run.log", "-o", "out.json"),
        (
            "run.log is not usable alone: it names 0 programs of nccl-tests, so its operation is unknown. To fix: add "
            "--op all-reduce, or another of all-reduce, all-gather, reduce-scatter, all-to-all, send."
        ),
    ),
    "several tables of one operation": (
        {"run.log": nccl_log(2, "all_reduce_perf") + nccl_log(2, "all_reduce_perf")},
        ("import", "nccl-tests", "run.log", "-o", "out.json"),
        (
            "run.log has several tables of all-reduce on the same devices, as of unlike settings: table 1 (line 5), "
            "table 2 (line 12). To fix: choose one: --table NUMBER."
        ),
    ),
    "processes that measured alone": (
        {"run.log": nccl_log(2, "all_reduce_perf").replace("Rank 1", "Rank 0")},
        ("import", "nccl-tests", "run.log", "-o", "out.json"),
        (
            "run.log is not usable: 2 processes say Rank 0 in table 1 (line 5). So nccl-tests was built without MPI, "
            "and each process measured its own devices alone. To fix: build nccl-tests with MPI=1, and run it again."
        ),
    ),
    "a host without a name": (
        {"rates.json": IPERF3},
        ("import", "iperf3", "rates.json", "--into", "cluster.json", "-o", "out.json"),
        "rates.json does not name its client; the profile has fast, middle, slow. To fix: add --client NAME.",
    ),
}


def told(files, command, folder, monkeypatch):
    """The message of a command that runs in a folder with the good files and these."""
    for name, content in {**GOOD, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    outcome = CliRunner().invoke(main, list(command))
    assert outcome.exit_code == 2, outcome.output
    assert outcome.stdout == ""
    assert not (folder / "out.json").exists()
    return outcome.stderr.splitlines()[-1]


# Without these, another message comes first: what to install.
NEEDS = {
    "no Ray at the address": "ray",
    "a text that is not an address": "ray",
    "a picture of an unknown kind": "matplotlib",
}


def matches(quote, text):
    """Return True if the text is the quote, in which … stands for anything."""
    return re.fullmatch(".*".join(re.escape(part) for part in quote.split("…")), text) is not None


def quotes(heading):
    """Return the messages that a section of the troubleshooting page quotes, each on one line."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sections = dict(re.findall(r"^## (.*)\n((?:(?!^## ).*\n?)*)", page, re.MULTILINE))
    return [" ".join(block.split()) for block in re.findall(r"```text\n(.*?)```", sections[heading], re.DOTALL)]


def assert_quoted(heading, message):
    """Check that the section quotes this message up to "To fix:"."""
    what = message.partition(" To fix:")[0]
    assert any(matches(quote, what) for quote in quotes(heading)), f"{heading}: {quotes(heading)} is not {what!r}"


def heading_of(name):
    return name[0].upper() + name[1:]


@pytest.mark.parametrize("name", CASES)
def test_message(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    files, command, message = CASES[name]
    found = told(files, command, tmp_path, monkeypatch)
    # … stands for what depends on this machine or on what is added to hwaware.
    assert matches(f"Error: {message}", found), found
    assert_quoted(heading_of(name), found[len("Error: ") :])


def test_there_are_at_least_twenty():
    assert len(CASES) >= 20
    assert all(message.count("To fix:") == 1 for _, _, message in CASES.values())


def test_every_quote_of_the_page_is_checked():
    """Each section has one quote, which a test of this file compares; two have several, the last has none."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    counts = {heading: len(quotes(heading)) for heading in re.findall(r"^## (.*)$", page, re.MULTILINE)}
    expected = dict.fromkeys([*map(heading_of, CASES), *OTHER_SECTIONS], 1)
    several = {"The profile is of another cluster": 3, "A slow link": 2}
    assert counts == {**expected, **several, "A prediction is far off": 0}
    assert page.count("```text") == sum(counts.values())


# Sections whose messages come from other places than a command that cannot start; the tests below raise them.
OTHER_SECTIONS = (
    "A step takes several gradients",
    "A function takes no gradient",
    "A result is computed from samples after the gradient",
    "Layers that cannot be cut",
    "Stages that do not fit the devices",
    "Alpa stopped while it compiled",
    "A loss is a sum over the samples",
    "A loss divides one sum by another",
    "An address that the host does not have",
    "Another program answers",
    "An unexpected message",
    "No certificate for encryption",
    "UCX that does not run",
    "Digests neither on nor off",
    "Alpa is missing or of another version",
    "Alpa was changed",
    "A version of JAX that does not fit",
    "cannot import name 'linear_util'",
    "The model fits nowhere",
    "Devices in use",
    "A host is left out",
    "No host answers",
    "A host of the plan is gone",
    "A slow link",
    "A link went down",
    "Ray has ended on a host",
    "A process was stopped",
    "A host stands still",
    "A worker process ended",
    "A damaged checkpoint",
    "A checkpoint that cannot be written",
)


def version_of_alpa(found):
    """Return a stand-in for `metadata.version` that finds this version of Alpa, or none."""

    def version(name):
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    return version


@pytest.mark.parametrize(("found", "words"), [(None, "Alpa is not installed"), ("0.1.7", "Alpa 0.1.7 is installed")])
def test_alpa_that_does_not_fit(found, words, monkeypatch):
    from hwaware.errors import AlpaError
    from hwaware.patching import stock_jax

    monkeypatch.setattr(metadata, "version", version_of_alpa(found))
    with pytest.raises(AlpaError) as caught:
        stock_jax.install()
    runs_on = "hwaware runs Alpa 0.2.3 on stock JAX from 0.4.13 on (seen: 0.4.13, 0.4.30, "
    assert str(caught.value).startswith(f"{words}, expected version 0.2.3. {runs_on}")
    assert str(caught.value).endswith(" To fix: pip install --no-deps alpa==0.2.3")
    assert (caught.value.found, caught.value.expected, caught.value.exit_code) == (found, "0.2.3", 2)
    if found is None:
        assert_quoted("Alpa is missing or of another version", str(caught.value))


def test_jax_that_does_not_fit(monkeypatch):
    from hwaware.errors import AlpaError
    from hwaware.patching import stock_jax

    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(__version__="0.4.7"))
    monkeypatch.setattr(stock_jax, "is_needed", lambda: True)
    monkeypatch.setattr(metadata, "version", version_of_alpa("0.2.3"))
    monkeypatch.setattr(stock_jax, "_installed", False)
    with pytest.raises(AlpaError) as caught:
        stock_jax.install()
    assert caught.value.found == "0.4.7"
    assert_quoted("A version of JAX that does not fit", str(caught.value))


def test_alpa_without_hwaware():
    pytest.importorskip("jax")
    with pytest.raises(ImportError) as caught:
        from jax import linear_util  # noqa: F401
    assert_quoted("cannot import name 'linear_util'", str(caught.value))


def test_alpa_that_was_changed():
    from hwaware.errors import AlpaError
    from hwaware.patching.mechanism import Patch, Target

    with pytest.raises(AlpaError) as caught:
        Patch(Target("json", "dumps", ("0" * 16,)), lambda original: original).check()
    assert_quoted("Alpa was changed", str(caught.value))


def test_a_model_that_fits_nowhere(tmp_path, monkeypatch):
    small = changed(CLUSTER, devices=[{**device, "memory_bytes": 1 << 20} for device in CLUSTER["devices"]])
    for name, document in {**GOOD, "cluster.json": small}.items():
        (tmp_path / name).write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, list(FIND))
    assert outcome.exit_code == 0, outcome.output
    assert_quoted("The model fits nowhere", outcome.stderr.splitlines()[-1])


def operation(kind, outvars=(), invars=()):
    """Return a stand-in for one of Alpa's markers, or for another operation."""
    name = "add" if kind is None else "pipeline_marker"
    value = {"primitive": types.SimpleNamespace(name=name), "params": {"mark_type": kind}}
    return types.SimpleNamespace(invars=list(invars), outvars=list(outvars), **value)


def traced_step(*equations, invars=(), outvars=()):
    """Return a stand-in for a traced step."""
    return types.SimpleNamespace(
        jaxpr=types.SimpleNamespace(eqns=list(equations), invars=list(invars), outvars=list(outvars), constvars=[])
    )


class Variable:
    """A value of a traced step."""

    def __init__(self, *shape):
        self.aval = types.SimpleNamespace(shape=shape, dtype=numpy.dtype("float32"))


def test_steps_that_alpa_cannot_cut():
    from hwaware.errors import AlpaError
    from hwaware.patching import steps

    two, none = traced_step(operation("grad"), operation("grad")), traced_step()
    for program, heading in ((two, "A step takes several gradients"), (none, "A function takes no gradient")):
        with pytest.raises(AlpaError) as caught:
            steps.tidied(program, None, [], 1, "1f1b", steps.Names())
        assert_quoted(heading, str(caught.value))
    samples, result = Variable(4, 2), Variable()
    step = traced_step(operation("grad"), operation(None, [result], [samples]), invars=[samples], outvars=[result])
    with pytest.raises(AlpaError) as caught:
        steps.tidied(step, step, [True], 2, "1f1b", steps.Names(["argument [1]['x']"], ["Result [1]['accuracy']"]))
    assert_quoted("A result is computed from samples after the gradient", str(caught.value))


def test_layers_and_stages_that_do_not_fit():
    from hwaware.errors import AlpaError
    from hwaware.patching import even_layers, fixed_options

    jaxpr = types.SimpleNamespace(eqns=[None] * 5)
    products = numpy.array([1, 0, 1, 0, 0])
    costs = (products, numpy.zeros((6, 6), numpy.float32), products.astype(float))
    with pytest.raises(AlpaError) as caught:
        even_layers.cluster_jaxpr_by_cost(None)(jaxpr, 9, 0.5, costs, "flops")
    assert_quoted("Layers that cannot be cut", str(caught.value))
    option = types.SimpleNamespace(num_stages=None, submesh_physical_shape=None)
    with pytest.raises(AlpaError) as caught:
        fixed_options.require_uniform(option, 4, 3, 3)
    assert_quoted("Stages that do not fit the devices", str(caught.value))


def test_an_error_of_alpa():
    pytest.importorskip("jax")
    alpa = pytest.importorskip("importlib.util").find_spec("alpa")
    if alpa is None:
        pytest.skip("Alpa is not installed")
    from hwaware.patching import compiling, stock_jax

    stock_jax.install()
    frame = types.SimpleNamespace(filename=alpa.origin, name="cluster_layers_and_slice_mesh", lineno=719)
    error = compiling.explained(AssertionError("No enough devices"), [frame], "train_step")
    assert_quoted("Alpa stopped while it compiled", str(error))


@pytest.mark.parametrize(
    ("warning", "heading"),
    [("SUM", "A loss is a sum over the samples"), ("RATIO", "A loss divides one sum by another")],
)
def test_warnings_of_losses(warning, heading):
    from hwaware.patching import scaling

    assert_quoted(heading, getattr(scaling, warning).format(parts=4))


def test_a_damaged_checkpoint(tmp_path):
    from hwaware.errors import DamagedCheckpointError
    from hwaware.runtime.manifests import Manifest

    good = Manifest(step=7, folder=f"step_7.{0:016x}", files=(), arrays=()).to_json()
    with pytest.raises(DamagedCheckpointError) as caught:
        Manifest.from_file(good.replace(b'"step":7', b'"step":6'), "folder/checkpoint_7")
    assert_quoted("A damaged checkpoint", str(caught.value))


def test_a_checkpoint_that_cannot_be_written():
    import errno
    import os

    from hwaware.errors import CheckpointError
    from hwaware.patching.checkpoints import _saved
    from hwaware.runtime.checkpoints import attempt

    def fill():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/0.bin")

    with pytest.raises(CheckpointError) as caught:
        _saved(attempt(fill, "stage 1 on host 10.0.0.2, device 0"), "Saving step 7 to /data")
    assert_quoted("A checkpoint that cannot be written", str(caught.value))


@pytest.mark.parametrize("address", ["10.0.0.9", None])
def test_a_profile_of_another_cluster(address):
    from hwaware import ClusterProfile
    from hwaware.errors import ProfileMismatchError
    from hwaware.patching import meshes

    document = changed(CLUSTER, hosts=[{"name": host["name"], "address": address} for host in CLUSTER["hosts"]])
    running = types.SimpleNamespace(num_hosts=1, host_info=[{"NodeManagerAddress": "10.0.0.1"}], devices=[[0]])
    with pytest.raises(ProfileMismatchError) as caught:
        meshes.restrict(ClusterProfile.from_json(json.dumps(document)), running)
    assert_quoted("The profile is of another cluster", str(caught.value))


def test_a_profile_of_another_cluster_with_the_same_addresses(monkeypatch, caplog):
    """Kinds are compared on measured hosts that declare one; hosts that the cluster lacks are told once."""
    from hwaware import ClusterProfile
    from hwaware.errors import ProfileMismatchError
    from hwaware.patching import stage_option

    def require(*kinds, exclude=(), **changes):
        document = changed(CLUSTER, hosts=hosts, environment={"hosts": {"fast": {}}}, **changes)
        settings = stage_option.PlacementSettings(ClusterProfile.from_json(json.dumps(document)), exclude=exclude)
        monkeypatch.setattr(stage_option, "settings_of", lambda _: settings)
        resources = {"GPU": 1.0, **{f"hwaware-kind:{kind}": 1.0 for kind in kinds}}
        info = [{"NodeManagerAddress": "10.0.0.1", "Resources": resources}]
        stage_option.require_profile("auto", types.SimpleNamespace(num_hosts=1, host_info=info, devices=[[0]]))

    hosts = [{"name": host["name"], "address": f"10.0.0.{k}"} for k, host in enumerate(CLUSTER["hosts"], 1)]
    kind = CLUSTER["devices"][0]["kind"]
    require(exclude=[host["name"] for host in hosts[1:]])
    assert caplog.messages == []
    require(kind)
    own_kinds = [{**device, "kind": f"{device['kind']} like a:0 as {device['id']}"} for device in CLUSTER["devices"]]
    require(kind, devices=own_kinds)  # as `hwaware.last_profile` names devices that have become slower
    require()
    lacking = ", ".join(host["name"] for host in hosts[1:])
    assert caplog.messages == [
        f"The profile also has {lacking}, which this program's cluster lacks: no stage runs there."
    ]
    with pytest.raises(ProfileMismatchError) as caught:
        require("cpu-0.50", devices=[{**CLUSTER["devices"][0], "kind": "cpu-0.80"}, *CLUSTER["devices"][1:]])
    assert (caught.value.found, caught.value.expected) == ("cpu-0.50", "cpu-0.80")
    assert_quoted("The profile is of another cluster", str(caught.value))
    monkeypatch.setitem(hosts[0], "name", "renamed")  # a host that nobody measured
    names = json.loads(json.dumps(CLUSTER).replace('"fast"', '"renamed"'))
    require("cpu-0.50", devices=names["devices"], links=names["links"])


def test_faults_of_hosts_and_jobs(monkeypatch):
    """The causes by which these messages are chosen: test_watch.py, test_ray_jobs.py and test_reservation.py."""
    from hwaware import ray_cluster, ray_jobs
    from hwaware.errors import ClusterUnreachableError
    from hwaware.patching import reservation
    from hwaware.runtime import watch
    from hwaware.runtime.heartbeat import Silence

    node = ray_cluster.Node("n1", "10.0.0.2", "h1", {"GPU": 1.0}, 1)
    monkeypatch.setattr(ray_jobs, "at", lambda addresses: [node])
    monkeypatch.setattr(ray_jobs, "silent", lambda nodes: {node: "timed out"})
    monkeypatch.setattr(ray_jobs, "_drivers", lambda: {"02000000": "python train.py, process 4711 on 10.0.0.1"})
    assert_quoted("Devices in use", str(ray_jobs.in_use({"02000000": ("10.0.0.2",)})))
    assert_quoted("A host is left out", ray_jobs.left_out("10.0.0.2", "timed out"))
    with pytest.raises(ClusterUnreachableError) as caught:
        ray_jobs.reachable_hosts([node])
    assert_quoted("No host answers", str(caught.value))
    monkeypatch.setitem(sys.modules, "alpa", types.SimpleNamespace(device_mesh=None))
    with pytest.raises(ClusterUnreachableError) as caught:
        reservation.require_hosts(["10.0.0.2"])
    assert_quoted("A host of the plan is gone", str(caught.value))

    member = watch.Member(None, "stage 1 on host 10.0.0.2, device 0", None, "10.0.0.2", 4711)
    monkeypatch.setattr(watch, "on_host", lambda *_: None)
    monkeypatch.setattr(watch, "_wait_shortly", lambda _: None)
    monkeypatch.setattr(watch, "_how_it_ended", lambda _: "The actor died")
    assert_quoted("A process was stopped", str(watch._silent(member, Silence(0, True))))
    assert_quoted("A host stands still", str(watch._silent(member, Silence(0, False))))
    for heading, error in {
        "A link went down": TimeoutError("timed out"),
        "Ray has ended on a host": ConnectionRefusedError("refused"),
        "A worker process ended": None,
    }.items():
        monkeypatch.setattr(ray_jobs, "daemon_fails", lambda _, error=error: error)
        assert_quoted(heading, str(watch._lost(member, "its process ended")))


def test_a_slow_link():
    from builders import device, link

    from hwaware.profiler.flags import all_flags

    links = [link(a, b, 1e8 if {a, b} == {"a", "b"} else 1e9) for a, b in itertools.permutations("abc", 2)]
    assert_quoted("A slow link", all_flags([], links, [])[0].what)
    alike = [device(f"{host}:0") for host in "abc"]
    assert_quoted("A slow link", all_flags(alike, links, [])[0].what)


def test_errors_carry_what_was_found_and_expected(tmp_path):
    from hwaware import ClusterProfile, HwawareError

    (tmp_path / "cluster.json").write_text(json.dumps(changed(CLUSTER, schema_version=2)))
    with pytest.raises(HwawareError) as caught:
        ClusterProfile.load(tmp_path / "cluster.json")
    assert (caught.value.found, caught.value.expected) == (2, 1)
    assert caught.value.fix in str(caught.value)


CREDENTIALS = Credentials(new_secret(), "test")


def test_an_address_that_the_host_does_not_have():
    with pytest.raises(MeasurementError) as caught:
        Mailbox("192.0.2.1", CREDENTIALS)
    assert_quoted("An address that the host does not have", str(caught.value))


def test_another_program_answers():
    with contextlib.closing(Mailbox("127.0.0.1", CREDENTIALS)) as box:
        with pytest.raises(MeasurementError) as caught:
            Connection(("127.0.0.1", box.port), Credentials(new_secret(), "test"), timeout_s=0.5)
    assert_quoted("Another program answers", str(caught.value))


def test_an_unexpected_message():
    with contextlib.closing(Mailbox("127.0.0.1", CREDENTIALS)) as box:
        box.admit = Incoming(blocking=False).admit
        with contextlib.closing(Connection(("127.0.0.1", box.port), CREDENTIALS, name="stage 0")) as peer:
            peer.send("h|0.0>1.0#1", b"")
            with pytest.raises(MeasurementError) as caught:
                box.take("never", 10.0)
    assert_quoted("An unexpected message", str(caught.value))


def test_no_certificate_for_encryption(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UnusableInputError) as caught:
        new_identity()
    message = str(caught.value).replace(
        "import of cryptography halted; None in sys.modules", "No module named 'cryptography'"
    )
    assert_quoted("No certificate for encryption", message)


def test_ucx_that_does_not_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "libucx", None)
    ucx._library.cache_clear()
    with pytest.raises(UnusableInputError) as caught:
        ucx.wire_for("ucx", CREDENTIALS, [types.SimpleNamespace(platform="cpu")], "127.0.0.1")
    ucx._library.cache_clear()
    message = str(caught.value).replace("import of libucx halted; None in sys.modules", "No module named 'libucx'")
    assert_quoted("UCX that does not run", message)


def test_digests_neither_on_nor_off(monkeypatch):
    monkeypatch.setenv("HWAWARE_MESSAGE_DIGESTS", "yes")
    with pytest.raises(UnusableInputError) as caught:
        settings.current()
    assert_quoted("Digests neither on nor off", str(caught.value))
