#!/bin/sh
# Installs what building, testing, the demo and the benchmarks need on Debian 12, and nothing that
# is there already. A shell script because the rest of the task runner is Rust, which needs a C
# linker, which this script installs. Says and does nothing when everything is in place.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

# Build: C linker, the BPF compiler and its headers, the zig linker's Python, patchelf.
# RDMA: headers, and libclang and pkg-config to read them; programs do not link these libraries.
# Load tests: musl. The rest: unmodified programs that tests, demo and benchmarks run.
packages="
  make gcc libc6-dev binutils clang llvm libbpf-dev linux-libc-dev patchelf ca-certificates
  libibverbs-dev librdmacm-dev libclang-dev pkg-config
  python3.11 python3.11-venv libpython3.11-testsuite
  musl musl-tools
  redis-server redis-tools nginx-light wrk iperf3 sockperf curl
  iproute2 iptables procps
"

missing=
for p in $packages; do
  [ "$(dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null || true)" = installed ] || missing="$missing $p"
done

if [ -n "$missing" ]; then
  echo "installing:$missing"
  root=
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "not root and no sudo; please install:$missing" >&2; exit 1; }
    root=sudo
  fi
  # Debian starts services when it installs them; these packages are wanted for their programs only.
  policy=/usr/sbin/policy-rc.d
  if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' | $root tee $policy >/dev/null
    $root chmod 755 $policy
    # shellcheck disable=SC2064
    trap "$root rm -f $policy" EXIT
  fi
  export DEBIAN_FRONTEND=noninteractive
  install() { $root apt-get install -y -q --no-install-recommends $missing </dev/null; }
  log=$(mktemp)
  # The package lists may be absent or old: refresh them only when the first try fails.
  if ! install >"$log" 2>&1; then
    if ! { $root apt-get update -q </dev/null && install; } >>"$log" 2>&1; then
      cat "$log" >&2
      echo "apt-get could not install:$missing" >&2
      exit 1
    fi
  fi
  rm -f "$log"
fi

# The zig linker makes one shared object that loads from glibc 2.17 on and under musl.
wanted=tools/requirements.txt
venv=$target/venv
if ! cmp -s $wanted "$venv/installed.txt" 2>/dev/null; then
  echo "installing the zig linker into $venv"
  rm -rf "$venv"
  mkdir -p "$target"
  /usr/bin/python3.11 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: -r $wanted
  cp $wanted "$venv/installed.txt"
fi

command -v cargo >/dev/null || { echo "Rust is missing: see https://rustup.rs" >&2; exit 1; }
