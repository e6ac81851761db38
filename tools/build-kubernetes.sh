#!/bin/sh
# Builds Kubernetes' server and kubelet into target/kubernetes, for `make cluster`: from the sources of Debian 12's package
# `kubernetes`, the last one that has the server in it (1.20.2), with that release's Go, both unpacked under target and not
# installed. Six minutes on two cores, and nothing when it is there already.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
target=$(readlink -f "$target")
out=$target/kubernetes
programs="kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl"
[ ! -e "$out/complete" ] || exit 0

echo "building Kubernetes in $out"
rm -rf "$out"
mkdir -p "$out/src/k8s.io" "$out/go"
tools/unpack.sh bookworm "$out/go" golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
tools/unpack.sh bookworm "$out/src" src:kubernetes
tar xzf "$out"/src/kubernetes_*.orig.tar.gz -C "$out/src/k8s.io"
source=$out/src/k8s.io/kubernetes
mv "$out"/src/k8s.io/kubernetes-* "$source"
cd "$source"

# The vendored reflect2 crashes when it is built with Go 1.18 or newer.
reflect=vendor/github.com/modern-go/reflect2
rm "$reflect"/*.go "$reflect"/*.s
cp "$out"/go/usr/share/gocode/src/github.com/modern-go/reflect2/*.go \
  "$out"/go/usr/share/gocode/src/github.com/modern-go/reflect2/*.s "$reflect/"
rm -f "$reflect"/*_test.go

# (Debian's Go has its sources elsewhere, by links that lead out of the tree.)
goroot=$out/go/usr/lib/go-1.19
for link in "$goroot"/*; do
  [ ! -L "$link" ] || [ -e "$link" ] || ln -sfn "../../share/go-1.19/$(basename "$link")" "$link"
done
export PATH="$goroot/bin:$PATH" GOROOT="$goroot" GOPATH="$out" GOCACHE="$out/cache" HOME="$out"
export GO111MODULE=off GOPROXY=off GOFLAGS= CGO_ENABLED=0

# The server describes its API with code that is generated from these directories.
vendor=k8s.io/kubernetes/vendor/k8s.io
go build -o "$out/openapi-gen" "$vendor/kube-openapi/cmd/openapi-gen"
described=$(grep -rl --include='*.go' -E '^// ?\+k8s:openapi-gen=' pkg staging/src/k8s.io | xargs -n1 dirname | sort -u |
  grep -vE '_examples|sample-apiserver|testdata|code-generator' |
  sed -e "s#^staging/src/k8s.io#$vendor#" -e 's#^pkg/#k8s.io/kubernetes/pkg/#' | paste -sd,)
"$out/openapi-gen" --logtostderr -i "$described" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h hack/boilerplate/boilerplate.generatego.txt -r /dev/null --output-base "$out/src" >"$out/log" 2>&1 ||
  { cat "$out/log" >&2; exit 1; }

flags="-s -w"
for package in component-base/version client-go/pkg/version; do
  flags="$flags -X $vendor/$package.gitVersion=v1.20.2 -X $vendor/$package.gitMajor=1 -X $vendor/$package.gitMinor=20"
done
for program in $programs; do
  go build -ldflags "$flags" -o "$out/bin/$program" "k8s.io/kubernetes/cmd/$program"
done
chmod -R u+w "$out"
rm -rf "$out/src" "$out/go" "$out/cache" "$out/pkg" "$out/openapi-gen" "$out/log"
touch "$out/complete"
