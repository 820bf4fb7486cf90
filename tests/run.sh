#!/usr/bin/env bash
# Sets up all that the tests need, once, and runs them: bash tests/run.sh [pytest arguments]
# Without a GPU the kernels' gfx942 and gfx950 code runs in the emulator; vLLM runs on the CPU.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$python" -m pytest -q "$@"
