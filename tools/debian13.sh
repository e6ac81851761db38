#!/bin/sh
# `tools/debian13.sh check ARGUMENTS` runs cargo with Debian 13's Rust compiler, for x86-64 or for
# aarch64-unknown-linux-gnu. It is unpacked under target/debian13 and not installed: 150 MB, from the archive that apt
# here uses for Debian 12, with the signatures checked. The compiler runs with that release's C library; what it
# compiles is linked with the C library and the linker of this system. Delete target/debian13 to get newer packages.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
root=$(readlink -f "$target")/debian13

# The compiler, what it links to, and the standard libraries.
packages="
  rustc libstd-rust-1.85 libstd-rust-dev libstd-rust-dev:arm64
  libllvm19 libc6 libgcc-s1 libstdc++6 zlib1g libz3-4 libzstd1 libxml2 liblzma5 libedit2 libffi8 libtinfo6 libbsd0
  libmd0
"

unpack() {
  new=$(mktemp -d "$target/debian13-XXXXXX")
  new=$(readlink -f "$new")
  # shellcheck disable=SC2086
  tools/unpack.sh trixie "$new" $packages
  # Paths are absolute in it: the tree may not be moved.
  cat >"$new/rustc" <<EOF
#!/bin/sh
exec $root/usr/lib64/ld-linux-x86-64.so.2 --library-path $root/usr/lib/x86_64-linux-gnu $root/usr/bin/rustc \
  --sysroot $root/usr "\$@"
EOF
  chmod 755 "$new" "$new/rustc"
  rm -rf "$root"
  mv "$new" "$root"
}

if [ ! -x "$root/rustc" ] || ! "$root/rustc" -V >/dev/null 2>&1; then
  echo "unpacking Debian 13's Rust compiler into $root"
  unpack
fi
"$root/rustc" -V

# It is older than `rust-version` in Cargo.toml; those who call this choose crates that do with it.
RUSTFLAGS="-D warnings" RUSTC=$root/rustc CARGO_TARGET_DIR=$root/build exec cargo "$@" --ignore-rust-version
