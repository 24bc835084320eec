"""The profiler on a real Ray with three nodes on this machine: workers start, measure and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hwaware import ray_cluster
from hwaware.cluster import ClusterProfile, LinkTable
from hwaware.errors import ClusterUnreachableError, MeasurementError, UnusableInputError
from hwaware.profiler import crew as crews
from hwaware.profiler import profile
from hwaware.profiler.policy import QUICK

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

POLICY = QUICK._replace(sizes=(64, 128), product_s=0.05, heat_s=0.0, message_bytes=(1024,), tiny_repeats=3, repeats=2)


WITHOUT_HWAWARE = """
import sys

class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "hwaware":
            raise ImportError("hwaware is not installed here")

sys.meta_path.insert(0, Without)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head without GPUs, a node with two and a node with one, in one process tree that ends with the module."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_ENABLE_AUTO_CONNECT="0", RAY_USAGE_STATS_ENABLED="0", JAX_PLATFORMS="cpu", NPROC="1")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=1, num_gpus=2)
    made.add_node(num_cpus=1, num_gpus=1)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def quick_policy(monkeypatch):
    monkeypatch.setattr("hwaware.profiler.QUICK", POLICY)


def gpus_free(address, timeout_s=20.0):
    """Whether all three GPU resources come back."""
    import ray

    with ray_cluster.connect(address):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if ray.available_resources().get("GPU") == 3.0:
                return True
            time.sleep(0.2)
    return False


def test_every_gpu_is_profiled_and_freed_where_hosts_have_no_hwaware(cluster, quick_policy, monkeypatch, tmp_path):
    """The worker's code travels: a host where `import hwaware` fails measures all the same."""
    # Ray puts this process's directory on the workers' path: only a finder of their own keeps them from hwaware.
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_HWAWARE)
    plain = crews._actor

    def without_hwaware(node, secret):
        import ray

        real = ray.remote
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "remote", lambda cls: _WithEnvironment(real(cls), {"PYTHONPATH": str(tmp_path)}))
            return plain(node, secret)

    monkeypatch.setattr(crews, "_actor", without_hwaware)
    found = profile(cluster.address, quick=True)
    assert len(found.hosts) == 2, "the head offers no device"
    assert sorted(device.id.rpartition(":")[2] for device in found.devices) == ["0", "0", "1"]
    table = LinkTable(found)
    ids = [device.id for device in found.devices]
    assert all(table.between(a, b) is not None for a in ids for b in ids if a != b)
    assert ClusterProfile.from_json(found.to_json()) == found
    assert found.environment["versions"]["ray"]
    assert gpus_free(cluster.address)


class _WithEnvironment:
    def __init__(self, remote_class, environment):
        self._class = remote_class
        self._environment = environment

    def options(self, **options):
        return self._class.options(runtime_env={"env_vars": self._environment}, **options)


@pytest.mark.parametrize("inside", [True, False], ids=["connected", "afterwards"])
def test_a_process_that_is_terminated_still_cleans_up(cluster, inside):
    script = f"""
import os, signal, sys, time
from hwaware import ray_cluster
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
def end():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)
try:
    with ray_cluster.connect({cluster.address!r}):
        if {inside}:
            end()
    end()
finally:
    print("cleaned up")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (143, "cleaned up\n")


def test_a_wrong_name_is_refused_before_any_worker_starts(cluster, monkeypatch):
    monkeypatch.setattr(crews, "_start", None)
    with pytest.raises(
        UnusableInputError, match=r"--only names nobody, which the cluster does not have\. To fix: name "
    ):
        profile(cluster.address, quick=True, only=["a device", "nobody+nobody"])


def test_a_failing_worker_is_named_and_nothing_stays(cluster, quick_policy):
    with pytest.raises(MeasurementError, match=r"measure on device 0 of host .* failed: .*identify\(\) comes before"):
        with crews.on_ray(cluster.address) as crew:
            crew.collect([crew.begin(crew.members[0], "measure", "float32", 64, 0.01)], 30)
    assert gpus_free(cluster.address)


def test_a_worker_that_dies_is_named(cluster):
    import ray

    with crews.on_ray(cluster.address) as crew:
        ray.kill(crew.members[0].worker, no_restart=True)
        with pytest.raises(MeasurementError, match=r"The worker of device 0 of host .* died during load\. To fix: "):
            crew.collect([crew.begin(member, "load") for member in crew.members], 30)


def test_work_that_takes_too_long_is_named(cluster):
    with pytest.raises(MeasurementError, match=r"Not done within 0\.5 s: answer on device 0 of host .* To fix: "):
        with crews.on_ray(cluster.address) as crew, socket.create_server(("127.0.0.1", 0)) as silent:
            crew.collect([crew.begin(crew.members[0], "answer", "a>b", silent.getsockname(), 5.0)], 0.5)


HOLDER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
if sys.argv[2] == "group":
    group = ray.util.placement_group([{"GPU": 1}])
    assert group.wait(30)
else:
    class Holder:
        def ready(self):
            return True
    actor = ray.remote(num_cpus=0, num_gpus=1)(Holder).remote()
    assert ray.get(actor.ready.remote(), timeout=30)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["group", "actor"])
def test_another_job_that_holds_a_gpu_is_named_at_once(cluster, kind):
    line = [sys.executable, "-c", HOLDER, cluster.address, kind]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout.readline() == "held\n"
            start = time.monotonic()
            with pytest.raises(ClusterUnreachableError, match=rf"in use by Ray job 0\w+ \(.*process {job.pid} on "):
                profile(cluster.address, quick=True)
            assert time.monotonic() - start < crews.START_LIMIT_S / 2
        finally:
            job.kill()
    assert gpus_free(cluster.address)


def test_a_gpu_that_this_program_holds_is_named(cluster, monkeypatch, caplog):
    import ray

    monkeypatch.setattr(crews, "START_LIMIT_S", 4.0)
    with ray_cluster.connect(cluster.address):
        holder = ray.remote(num_gpus=2, num_cpus=0)(_Holder).remote()
        ray.get(holder.ready.remote(), timeout=60)
        with pytest.raises(ClusterUnreachableError, match=r"device \d of host .* within 4 s: a task of this "):
            profile(cluster.address, quick=True)
        assert any(line.startswith("Waiting for at most 4 s: a task of this program or ") for line in caplog.messages)
        ray.kill(holder)


class _Holder:
    def ready(self):
        return True


def test_an_open_connection_is_used_and_kept(cluster):
    import ray

    with ray_cluster.connect(cluster.address):
        with ray_cluster.connect("10.255.255.1:1"):
            assert sum(node.num_gpus for node in ray_cluster.nodes()) == 3
        assert ray.is_initialized()
    assert not ray.is_initialized()


def run_cli(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", "from hwaware.cli import main; main()", *arguments],
        capture_output=True, text=True, timeout=90, check=False, **options,
    )  # fmt: skip


def refused(address, message):
    start = time.monotonic()
    done = run_cli("profile", "--address", address, "--json")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "To fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert time.monotonic() - start < 30
    return done


def test_nobody_at_the_address_is_one_quick_message():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    refused(f"127.0.0.1:{port}", f"Error: No Ray cluster answers at 127.0.0.1:{port}")


def test_something_else_at_the_address_is_one_quick_message():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        port = deaf.getsockname()[1]
        refused(
            f"127.0.0.1:{port}", f"Error: The program that answers at 127.0.0.1:{port} is not a healthy Ray cluster"
        )


@pytest.mark.thorough
def test_a_cluster_without_devices_is_one_quick_message(tmp_path):
    script = tmp_path / "head.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            from ray.cluster_utils import Cluster
            head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
            made = Cluster(initialize_head=True, head_node_args=head)
            print(made.address, flush=True)
            sys.stdin.read()
            made.shutdown()
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as head:  # fmt: skip
        try:
            refused(head.stdout.readline().strip(), "none has the resource GPU")
        finally:
            head.stdin.close()
            head.wait(timeout=60)


def test_ctrl_c_ends_in_one_line_and_leaves_no_worker(cluster):
    with subprocess.Popen(
        [sys.executable, "-c", "from hwaware.cli import main; main()",
         "profile", "--address", cluster.address, "--no-runtime", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as command:  # fmt: skip
        watchdog = threading.Timer(90, command.kill)
        watchdog.start()
        for line in command.stderr:
            if line.startswith("Timing devices"):
                command.send_signal(signal.SIGINT)
                break
        rest = command.stderr.read()
        watchdog.cancel()
    assert command.returncode == 130, rest
    assert rest.strip().endswith("Interrupted.")
    assert "Traceback" not in rest
    assert gpus_free(cluster.address)
