#!/bin/bash
# A Ray cluster on hosts that are reached by ssh, profiled:
#
#     profiling/launch/by_hand.sh cluster.json HEAD HOST [HOST ...]
#
# Python, Ray, JAX and NumPy of the same versions must be installed on every host, hwaware only here: run it on HEAD.
# GPUS=N says how many devices each host offers; without it, Ray counts the GPUs. On hosts without GPUs, GPUS=1 makes
# the processor the device. The Ray that it starts is stopped again, and only that one.

set -euo pipefail

if [ $# -lt 2 ]; then
    echo "usage: $0 cluster.json HEAD [HOST ...]" >&2
    exit 2
fi
output=$1
head=$2
shift 2
port=${RAY_PORT:-6379}
gpus=${GPUS:+--num-gpus=$GPUS}
export RAY_ENABLE_AUTO_CONNECT=0

if (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; then
    echo "Something answers at $head:$port already. To fix: choose another port (RAY_PORT=...)." >&2
    exit 2
fi
stop() {
    # --block ends with its shell: the nodes were started in the background of this script.
    kill $(jobs -p) 2>/dev/null || true
    wait || true
}
trap stop EXIT

ray start --head --node-ip-address="$head" --port="$port" $gpus --block >/dev/null &
for _ in $(seq 60); do
    if (exec 3<>"/dev/tcp/$head/$port") 2>/dev/null; then break; fi
    sleep 1
done
for host in "$@"; do
    ssh -tt "$host" "ray start --address=$head:$port $gpus --block" >/dev/null &
done
for _ in $(seq 60); do
    joined=$(ray status --address="$head:$port" 2>/dev/null | grep -c "node_" || true)
    if [ "$joined" -gt $# ]; then break; fi
    sleep 1
done

hwaware profile --address "$head:$port" -o "$output"
hwaware show "$output"
