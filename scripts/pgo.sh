#!/bin/sh
# Builds the release optimized by a profile of itself: target/pgo/bin/quintlet, with a link per service. `make pgo` calls it.
#
# Builds the program twice. The first one counts what it executes during the life of pods on a runtime in memory, relists, and probes
# (`make bench-scale`, with smaller numbers); the second one is optimized by these counts. Needs root, and llvm-profdata of the compiler,
# a component of rustup.
#
#   BINS="A B"          names of the links
#   LLVM_PROFDATA=FILE  llvm-profdata of the compiler's LLVM version (rustup's, which is installed if it is missing)
#   PROFILE=NAME        profile of cargo (release)
#   PODS=N              pods of the counted run, after which as many restart (100)
#   PROFDATA=FILE       a merged profile of an earlier run, which repeats its build: counts nothing. Each run keeps target/pgo/merged.profdata
set -eu

cd "$(dirname "$0")/.."
pgo=$PWD/target/pgo
profile=${PROFILE:-release}
pods=${PODS:-100}
host=$(rustc -vV | sed -n 's/^host: //p')
llvm_profdata=${LLVM_PROFDATA:-$(rustc --print target-libdir)/../bin/llvm-profdata}
# The places of the sources differ between builders, and debug information and panics name them.
remap="--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo --remap-path-prefix=$PWD=/quintlet"

# build DIR FLAG: with a target, so that the build's own scripts and macros are compiled without the flag.
build() {
    CARGO_TARGET_DIR=$1 RUSTFLAGS="$2 $remap" cargo build --locked --profile "$profile" --target "$host" -p quintlet
    for bin in ${BINS:?names of the services, as make pgo sets them}; do
        ln -sf quintlet "$1/$host/$profile/$bin"
    done
}

# count: the merged profile of a build that counts.
count() {
    [ -x "$llvm_profdata" ] || rustup component add llvm-tools
    rm -rf "$pgo/counts" "$pgo/merged.profdata"
    build "$pgo/counting" "-Cprofile-generate=$pgo/counts"
    cargo build --locked --profile "$profile" -p quintlet-e2e --bin scale
    QUINTLET_BIN_DIR=$pgo/counting/$host/$profile "target/$profile/scale" \
        --node-pods "$pods" --flapping "$pods" --pods "$((10 * pods))" --relists 3 --exits "$pods" --probes "$pods" --probe-seconds 10 \
        --watchers 5 --probe-watchers 5 > "$pgo/counted.json"
    "$llvm_profdata" merge -o "$pgo/merged.profdata" "$pgo/counts"
}

if [ -n "${PROFDATA:-}" ]; then
    mkdir -p "$pgo"
    [ "$(realpath "$PROFDATA")" = "$pgo/merged.profdata" ] || cp "$PROFDATA" "$pgo/merged.profdata"
else
    count
fi
build "$pgo" "-Cprofile-use=$pgo/merged.profdata"
# The directory release has what ran during the build.
ln -sfn "$host/$profile" "$pgo/bin"
scripts/shipped-names.py "$pgo/bin/quintlet"
scripts/shipped-flags.sh "$pgo/bin/quintlet"
