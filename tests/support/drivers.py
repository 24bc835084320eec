"""Beginnings of the programs that tests run as drivers on a testbed; the first argument is its address."""

# Enter the testbed `bed`, and connect to its Ray.
ENTER = """
import sys, warnings
warnings.simplefilter("ignore")
from hwaware.bench import testbed
bed = testbed.find(sys.argv[1])
bed.enter()
import ray
ray.init(address=sys.argv[1], _node_ip_address=bed.head_address, log_to_driver=False, logging_level="error")
"""
# Then make `profile` and `plan` for a chain of two stages on the hosts a and b.
TWO_STAGES = (
    ENTER
    + """
import hwaware
import hwaware.models
from hwaware.activation import install_runtime
install_runtime()
from hwaware.bench.training import TrainingRun
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.plans import Plan, Replica, Stage

curve = {"float32": (MatrixProduct(flops=1e9, seconds=1.0),)}
profile = ClusterProfile(
    hosts=tuple(Host(name=host, address=bed.hosts[host]) for host in "ab"),
    devices=tuple(Device(id=h + ":0", host=h, kind="cpu", memory_bytes=1 << 30, throughput=curve) for h in "ab"),
    links=tuple(Link(source=x, target=y, latency_s=1e-3, bandwidth_bytes_per_s=1e7) for x in "ab" for y in "ab"),
)
stages = tuple(Stage(layers=(i, i), replicas=(Replica(devices=(h + ":0",)),)) for i, h in enumerate("ab"))
plan = Plan(num_microbatches=4, stages=stages)
"""
)
