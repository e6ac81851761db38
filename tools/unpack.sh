#!/bin/sh
# `tools/unpack.sh RELEASE DIRECTORY PACKAGE...` unpacks packages of another release of Debian into a new directory; nothing is
# installed. A PACKAGE written `src:NAME` is a source package, whose files are only put there. They come from the archive that
# apt here uses for Debian 12, with the signatures checked. What they depend on is not added. Of the documentation the
# copyright files are kept; what each package is goes to var/lib/dpkg/status.d, where scanners of images without dpkg look.
set -eu
release=$1
new=$(readlink -f "$2")
shift 2

archive=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
  awk '$2 == "bookworm" && $3 == "main" { print $1; exit }')
[ -n "$archive" ] || { echo "apt here has no archive of Debian 12" >&2; exit 1; }
mkdir -p "$new/apt/lists/partial" "$new/apt/cache/archives/partial" "$new/apt/preferences.d" "$new/debs"
: >"$new/apt/status"
for kind in deb deb-src; do
  echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $release main"
done >"$new/apt/sources.list"
# apt with a state of its own: what is installed here, and from where, does not count. The lists of a release that is being
# made say that they are valid for a week only; those of a mirror that is behind are good enough here.
cat >"$new/apt/apt.conf" <<EOF
Dir::Etc "$new/apt";
Dir::Etc::SourceList "$new/apt/sources.list";
Dir::Etc::SourceParts "/dev/null";
Dir::State "$new/apt";
Dir::State::Status "$new/apt/status";
Dir::Cache "$new/apt/cache";
APT::Architectures { "amd64"; "arm64"; };
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Check-Valid-Until "false";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
EOF
export APT_CONFIG="$new/apt/apt.conf"
fetch() {
  for package in "$@"; do
    case $package in
      src:*) (cd "$new" && apt-get source -q --download-only "${package#src:}") ;;
      *) (cd "$new/debs" && apt-get download -q "$package") ;;
    esac || return
  done
}
if ! { apt-get update -q && fetch "$@"; } >"$new/log" 2>&1; then
  cat "$new/log" >&2
  exit 1
fi
mkdir -p "$new/var/lib/dpkg/status.d"
for deb in "$new"/debs/*.deb; do
  [ -e "$deb" ] || continue
  dpkg-deb -x "$deb" "$new"
  dpkg-deb -f "$deb" >"$new/var/lib/dpkg/status.d/$(dpkg-deb -f "$deb" Package)"
done
rm -rf "$new/apt" "$new/debs" "$new/log"
if [ -d "$new/usr/share" ]; then
  rm -rf "$new/usr/share/man" "$new/usr/share/locale" "$new/usr/share/lintian" "$new/usr/share/bug"
  find "$new/usr/share" -path '*/share/doc/*/*' ! -type d ! -name copyright -delete
  find "$new/usr/share" -depth -type d -empty -delete
fi
