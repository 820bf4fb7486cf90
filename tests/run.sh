#!/usr/bin/env bash
# Sets up all that the tests need, once, and runs them: bash tests/run.sh [--full] [pytest arguments]
# Without a GPU the kernels' gfx942 and gfx950 code runs in the emulator; vLLM runs on the CPU.
# --full: every op on more chips (test_ops.py), what marks.py has for it, and then what the tests catch of plausible
# mistakes (tests/bugs).
set -euo pipefail
full=
if [ "${1-}" = --full ]; then full=1; shift; fi
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ -z "$full" ] || env -u VLLM_ROCM_OPS_ARCHS "$python" csrc/build.py >/dev/null  # for NVIDIA, too
# A worker per core, up to 8, and one more, as engines that start wait; the tests of a file stay together, as they share what takes long
# to start, and files start in the order that conftest.py gives them. vLLM's threads would wait for each other on cores that others use.
workers=$(nproc)
export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
FULL_TESTS=$full "$python" -m pytest -q -n $((workers < 8 ? workers + 1 : 9)) --dist loadfile --no-loadscope-reorder "$@"
[ -z "$full" ] || exec "$python" tests/bugs
