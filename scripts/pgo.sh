#!/bin/sh
# Builds the release optimized by a profile of itself: target/pgo/release/quintlet, with a link per service. `make pgo` calls it.
#
# Builds the program twice. The first one counts what it executes during the life of pods on a runtime in memory (`make bench-scale`);
# the second one is laid out by these counts. Needs root, llvm-profdata of the compiler (a component of rustup, or LLVM_PROFDATA), and
# about three times as long as a release.
set -eu

cd "$(dirname "$0")/.."
pgo=$PWD/target/pgo
host=$(rustc -vV | sed -n 's/^host: //p')
llvm_profdata=${LLVM_PROFDATA:-$(rustc --print target-libdir)/../bin/llvm-profdata}
[ -x "$llvm_profdata" ] || rustup component add llvm-tools

# build DIR FLAG: with a target, so that scripts and macros of the build are compiled without the flag.
build() {
    CARGO_TARGET_DIR=$1 RUSTFLAGS=$2 cargo build --locked --release --target "$host" -p quintlet
    for bin in cri-proxy pleg-service probe-service status-reporter node-api pod-sync quintctl; do
        ln -sf quintlet "$1/$host/release/$bin"
    done
}

rm -rf "$pgo/counts" "$pgo/merged.profdata"
build "$pgo/counting" "-Cprofile-generate=$pgo/counts"
cargo build --locked --release -p quintlet-e2e --bin scale
QUINTLET_BIN_DIR=$pgo/counting/$host/release target/release/scale --only-node > /dev/null
"$llvm_profdata" merge -o "$pgo/merged.profdata" "$pgo/counts"
build "$pgo" "-Cprofile-use=$pgo/merged.profdata"
ln -sfn "$host/release" "$pgo/release"
scripts/shipped-names.py "$pgo/release/quintlet"
