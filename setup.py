"""The metadata of hwaware.

Requirements stay loose: hwaware lives inside other people's environments and must not move their versions. The pinned
environment for the demo and the tests is requirements/*.txt; CONTRIBUTING.md says why each library was chosen.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "hwaware" / "_version.py").read_text()).group(1)

setup(
    name="hwaware",
    version=VERSION,
    description="Places the pipeline stages of a JAX model on the machines of a heterogeneous cluster, inside Alpa.",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.8",
    packages=find_packages(include=["hwaware", "hwaware.*"]),
    package_data={"hwaware": ["py.typed", "bench/scenarios/*.toml"]},
    install_requires=[
        "msgspec>=0.18",
        "numpy>=1.21",
        "numba>=0.53",
        "scipy>=1.5",
        "click>=8.0",
        "rich>=12.0",
        "xxhash>=2.0",
        'tomli>=1.1; python_version < "3.11"',
    ],
    # Alpa is none of them: it pins jax and ray, so it is installed with --no-deps (see docs/alpa.md).
    extras_require={
        "encrypt": ["cryptography>=3.1"],
        "jax": ["jax>=0.3.22", "jaxlib>=0.3.22"],
        "gradient": ["jax>=0.3.22", "jaxlib>=0.3.22", "optax"],
        "models": ["jax>=0.3.22", "jaxlib>=0.3.22", "flax", "optax"],
        "plots": ["matplotlib>=3.6"],
        "ray": ["ray>=2.1"],
        "testbed": ["pyroute2>=0.7"],
        # By CUDA's version. No wheel is for Python 3.8 or other systems: there, arrays pass through the hosts' memory.
        "ucx": ['libucx-cu13>=1.19; python_version >= "3.9" and sys_platform == "linux"'],
        "ucx-cu12": ['libucx-cu12>=1.19; python_version >= "3.9" and sys_platform == "linux"'],
    },
    entry_points={"console_scripts": ["hwaware = hwaware.cli:main"]},
)
