#!/usr/bin/env bash
# Set up the environment once, and run the tests: bash tests/run.sh [--full] [pytest arguments]
# Without a GPU the gfx942 and gfx950 code objects run in the emulator, and vLLM on the CPU.
# --full: every op on more chips (tests/ops/op_tests.py), the longer tests of marks.py, and then planted mistakes (tests/mutations).
set -euo pipefail
full=
if [ "${1-}" = --full ]; then full=1; shift; fi
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ -z "$full" ] || "$python" csrc/build.py --arch sm_90 >/dev/null
# A worker per core, up to 8, and one more, as starting engines wait. The tests of a file stay together, as they share slow fixtures, and
# files start in conftest.py's order.
workers=$(nproc)
# A worker that dies ends the run, as --dist loadfile gives what it had left to nobody. pyproject.toml limits a test, $limit all of them.
limit=$([ -n "$full" ] && echo 86400 || echo 10800)
spare=$([ -n "$full" ] && echo 0 || echo 20)  # for pace.py, which judges the default tests alone
[ -z "$full" ] || export PYTEST_ADDOPTS="-o faulthandler_timeout=7300 ${PYTEST_ADDOPTS-}"  # as the longest of its tests has more time
FULL_TESTS=$full "$python" -m pytest -q -n $((workers < 8 ? workers + 1 : 9)) --dist loadfile --no-loadscope-reorder \
  --max-worker-restart 0 --session-timeout "$limit" --spare-seconds "$spare" "$@"
[ -z "$full" ] || exec "$python" tests/mutations
