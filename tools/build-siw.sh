#!/bin/sh
# Builds `siw`, iWARP in software, for the kernel of the lab that lies unpacked in the given
# directory: Debian's kernel package does not contain it. Its sources and everything needed to build it
# come from the packages of exactly that kernel, unpacked in a scratch directory; none is installed.
# Ends with 3 where the archive does not have them (any more).
set -eu
root=$(readlink -f "$1")
modules=$(echo "$root"/lib/modules/*)
release=${modules##*/} # 6.12.1+deb12-amd64
base=${release%-amd64}
series=$(echo "$release" | cut -d. -f1,2)
image=linux-image-$release-unsigned
# The name of a kernel stays the same when it is only packaged anew.
version=$(gzip -dc "$root/usr/share/doc/$image/changelog.Debian.gz" | sed -n '1s/.*(\(.*\)).*/\1/p')

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM
cd "$scratch"

fetch() {
  apt-get download -q "linux-source-$series=$version" "linux-kbuild-$base=$version" \
    "linux-headers-$base-common=$version" "linux-headers-$release=$version" </dev/null >log 2>&1
}
echo "building the module siw for the lab's kernel $release"
fetch || {
  as_root=
  [ "$(id -u)" = 0 ] || as_root=sudo
  $as_root apt-get update -q </dev/null >/dev/null
  fetch
} || {
  cat log >&2
  echo "apt has no sources or headers of the kernel $release, package version $version" >&2
  exit 3
}

for p in linux-headers-*.deb linux-kbuild-*.deb; do
  dpkg-deb -x "$p" .
done
siw=drivers/infiniband/sw/siw
dpkg-deb --fsys-tarfile linux-source-*.deb |
  tar -xO "./usr/src/linux-source-$series.tar.xz" |
  tar -xJ --strip-components=1 "linux-source-$series/$siw"
headers=usr/src/linux-headers-$release
sed -i "s|/usr/src/|$scratch/usr/src/|" "$headers/Makefile"
# Type information that modules get where it is there, by a program that is not.
rm -f "$headers/vmlinux"

# Nothing of the environment: what `make` tells the programs that it starts is not for this one.
env -i PATH="$PATH" make -s -j "$(nproc)" -C "$headers" "M=$scratch/$siw" CONFIG_RDMA_SIW=m \
  modules >log 2>&1 || {
  cat log >&2
  echo "the module siw could not be built" >&2
  exit 1
}
strip --strip-debug "$siw/siw.ko"

mkdir -p "$modules/extra"
cp "$siw/siw.ko" "$modules/extra/siw.new"
mv "$modules/extra/siw.new" "$modules/extra/siw.ko"
/sbin/depmod -b "$root" "$release"
