#!/bin/bash
# Measure hwaware on three unlike parts of this machine's GPU, in one call of at most nine minutes:
#
#     benchmarks/gpu.sh OUTPUT [KIND]        (root; the Python of PYTHON, or python3, has hwaware's requirements)
#
# KIND is gpu, or root for a rehearsal on a machine without a GPU. Each step has a limit and a log of its own, and the
# next steps run also after one that fails. OUTPUT gets all results, and all logs as logs.tar.gz. For a machine that can
# fetch nothing, benchmarks/gpu_bundle.sh packs Ray, Alpa and the like.
set -u
output=$(realpath -m "${1:?To fix: name a folder for the results.}")
kind=${2:-gpu}
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
logs=$(mktemp -d)
mkdir -p "$output"
cd "$root" || exit 1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" RAY_ENABLE_AUTO_CONNECT=0 RAY_USAGE_STATS_ENABLED=0
export XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_DEFAULT_MATMUL_PRECISION=float32
LIMIT_S=520 # the step that it ends has ten seconds more, and then the logs are packed
failed=0
patience=$([ "$kind" = gpu ] && echo 1 || echo 3) # a rehearsal's processors also compute what the GPU would

keep_logs() { # FOLDER: what Ray's workers and NVIDIA's MPS say goes with the testbed
  local folder
  mkdir -p "$1"
  for folder in /tmp/hw-*; do
    find "$folder" \( -path '*/mps-log/*' -o -name 'worker-*.err' -o -name 'raylet.err' \) -size -2048k -size +0 \
      -exec cp --parents -t "$1" {} + 2> /dev/null
  done
}

step() { # NAME LIMIT_S COMMAND...
  local name=$1 limit_s=$(($2 * patience)) left_s=$((LIMIT_S * patience - SECONDS)) begin=$SECONDS rc keeper
  shift 2
  limit_s=$((limit_s < left_s ? limit_s : left_s))
  [ $limit_s -gt 0 ] || { echo "$name: left out, because the earlier steps took $SECONDS s"; failed=1; return 1; }
  while sleep 5; do keep_logs "$logs/$name"; done &
  keeper=$!
  timeout --kill-after=10 "$limit_s" "$@" > "$logs/$name.log" 2>&1
  rc=$?
  kill "$keeper"
  echo "$name: $([ $rc = 0 ] && echo passed || echo "failed ($rc)") in $((SECONDS - begin)) s"
  [ $rc = 0 ] || { failed=1; tail -n 5 "$logs/$name.log" | cut -c 1-300; }
  return $rc
}

bench() { # MODEL OPTIONS...
  JAX_PLATFORMS=cpu exec "$python" -m hwaware bench benchmarks/gpu-three.toml --kind "$kind" --max-devices-per-stage 1 \
    --orders 1 --repeats 5 --mappings hwaware,alpa --output "$output" --model "$@"
}
export -f bench
export kind output python

command -v nvidia-smi > /dev/null && step machine 10 nvidia-smi -q
step versions 20 "$python" -m pip list
step doctor 30 "$python" -m hwaware doctor
step whole 45 "$python" benchmarks/gpu_whole.py "$output/whole.json"
if [ "$kind" = gpu ]; then
  # The kernel of a small virtual machine may lack bridges, or queues that shape links.
  step links 60 "$python" -m hwaware testbed up benchmarks/gpu-three.toml --kind gpu --name gpu-links || kind=gpu-loopback
  timeout 20 "$python" -m hwaware testbed down gpu-links >> "$logs/links.log" 2>&1
  gpt=(gpt --blocks 12 --hidden 1024 --heads 16 --sequence 256 --microbatch-size 8)
  mlp=(mlp --blocks 12 --hidden 2048 --microbatch-size 512)
else
  gpt=(gpt --blocks 6 --hidden 128 --heads 4 --sequence 64 --microbatch-size 1)
  mlp=(mlp --blocks 6 --hidden 128 --microbatch-size 16)
fi
step mlp 110 bash -c 'bench "$@"' - "${mlp[@]}"
step gpt 110 bash -c 'bench "$@"' - "${gpt[@]}"
# Hosts on the loopback have no link that could go down.
[ "$kind" = gpu-loopback ] || step faults 150 env JAX_PLATFORMS=cpu "$python" -m hwaware bench benchmarks/gpu-three.toml --kind "$kind" --faults \
  --quick --output "$output"
[ "$kind" = root ] || step alpa 80 env JAX_PLATFORMS=cuda,cpu \
  HWAWARE_TESTS_GPU="$(nvidia-smi --query-gpu=uuid --format=csv,noheader | head -n 1)" \
  "$python" -m pytest -q -n 4 tests/alpa/test_{training,mixed_precision,donation,checkpoints,randomness,reductions,recording}.py
tar -C "$logs" -czf "$output/logs.tar.gz" . && rm -rf "$logs"
echo "all steps took $SECONDS s; results and logs.tar.gz are in $output"
exit $failed
