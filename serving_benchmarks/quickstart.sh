#!/usr/bin/env bash
# Set up the environment once, and benchmark decode with and without the plugin:
#   bash serving_benchmarks/quickstart.sh [options of latency.py]
# On a GPU: Llama-3.1-405B and DeepSeek-V3 at full width, with few layers. Without a GPU: a tiny model shows that vLLM loads the plugin, then
# follow both models' kernels on MI300X and their predicted steps (without_gpu.py); with options, tiny models run on the CPU.
set -euo pipefail
emulated=gfx942  # of the kernels that it lists
. "$(dirname "${BASH_SOURCE[0]}")/../tests/environment.sh"
"$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("vllm"))' ||
  die "vLLM not found. Install it for this GPU: https://docs.vllm.ai/en/latest/getting_started/installation/gpu/"
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  defaults=(--model llama-3.1-405b-fp8 deepseek-v3 --num-layers 4 --batch-size 1 8 32 --num-starts-warmup 1)
else
  # One thread suffices for a tiny model; more would make times noisy on a busy machine.
  export VLLM_ROCM_OPS_ON_CPU=1 VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  [ $# != 0 ] || exec "$python" serving_benchmarks/without_gpu.py
  defaults=(--model tiny-llama tiny-llama-fp8 tiny-deepseek-v3-fp8 --batch-size 1 8 --enforce-eager
    --output-len 32 --num-iters 5 --num-iters-warmup 1)
fi
exec "$python" serving_benchmarks/latency.py "${defaults[@]}" "$@"
