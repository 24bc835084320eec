#!/bin/bash
# A Ray cluster inside a Slurm job, profiled:  sbatch --nodes=4 profiling/launch/slurm.sh cluster.json
#
# One Ray node a Slurm node, with the GPUs that Slurm gave it; the job's own shell is the driver. Give the options that
# choose your hosts on the command line of sbatch (--partition, --constraint, --gpus-per-node), not here.
# Not run by this project's tests, which have no Slurm.
#SBATCH --job-name=hwaware-profile
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=00:20:00

set -euo pipefail

output=${1:?usage: sbatch --nodes=N profiling/launch/slurm.sh cluster.json}
port=${RAY_PORT:-6379}
gpus=${SLURM_GPUS_ON_NODE:-1}
# Nothing here may join a Ray that somebody else started on these hosts.
export RAY_ENABLE_AUTO_CONNECT=0

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
head_ip=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}')

srun --nodes=1 --ntasks=1 -w "$head" \
    ray start --head --node-ip-address="$head_ip" --port="$port" --num-gpus="$gpus" --block &
for _ in $(seq 60); do
    if (exec 3<>"/dev/tcp/$head_ip/$port") 2>/dev/null; then break; fi
    sleep 1
done
if [ ${#nodes[@]} -gt 1 ]; then
    srun --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --exclude="$head" \
        ray start --address="$head_ip:$port" --num-gpus="$gpus" --block &
fi
# Every host has to have joined: what comes later is not measured.
for _ in $(seq 120); do
    joined=$(ray status --address="$head_ip:$port" 2>/dev/null | grep -c "node_" || true)
    if [ "$joined" -ge "${#nodes[@]}" ]; then break; fi
    sleep 1
done

hwaware profile --address "$head_ip:$port" -o "$output"
hwaware show "$output"
