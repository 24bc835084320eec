#!/bin/bash
# Pack what benchmarks/gpu.sh needs beside JAX into one file of 30 MB, for a GPU machine that can fetch nothing:
#
#     benchmarks/gpu_bundle.sh BUNDLE.tar.xz [PYTHON]        (PYTHON has pip and is as new as the machine's: python3.12)
#
# On that machine, which has JAX with its CUDA plugin and the packages that JAX's users have (NumPy, SciPy, numba, Flax,
# optax, pytest, click, rich, matplotlib):
#
#     mkdir site; tar -xJf BUNDLE.tar.xz -C site; PYTHONPATH=$PWD/site benchmarks/gpu.sh OUTPUT
set -eu
bundle=$(realpath -m "${1:?To fix: name the file to write.}")
python=${2:-python3.12}
cd "$(dirname "$0")/.."
site=$(mktemp -d)
trap 'rm -rf "$site" "$site.txt"' EXIT
names=(alpa ray msgspec xxhash pyroute2 PuLP jsonschema jsonschema-specifications referencing rpds-py)
pinned=$(printf -- '-e ^%s== ' "${names[@]}")
# shellcheck disable=SC2086  # one word for each name
cat requirements/alpa.txt requirements/pinned.txt | grep -i $pinned > "$site.txt"
"$python" -m pip install -q --no-deps --no-compile --only-binary=:all: --target "$site" -r "$site.txt"
rm -r "$site"/bin "$site"/ray/{jars,rllib,tune,llm,serve,dashboard/client} # the runtime loads none of these
find "$site/pulp/solverdir/cbc" -mindepth 1 -maxdepth 1 ! -name linux -exec rm -r {} +
strip --strip-unneeded "$site"/ray/_raylet.so "$site"/ray/core/src/ray/{gcs/gcs_server,raylet/raylet}
XZ_OPT=-T0 tar -C "$site" -cJf "$bundle" .
echo "$bundle has $(du -h "$bundle" | cut -f 1)"
