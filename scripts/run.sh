#!/bin/sh
# Runs the five services on this machine with a private containerd. `make run` calls it.
#
#   ONCE=1         end when all pods have settled; exit 1 if one differs from its annotation quintlet.dev/expect
#   MANIFESTS=DIR  directory of the manifests (examples)
#   CONFIG=FILE    configuration of the services
#   BIN_DIR=DIR    directory of the binaries (target/release)
set -eu

cd "$(dirname "$0")/.."
bin_dir=${BIN_DIR:-${CARGO_TARGET_DIR:-target}/release}
set -- "$bin_dir/quintctl" up --private-containerd --down --base .run --manifests "${MANIFESTS:-examples}"
[ -z "${CONFIG:-}" ] || set -- "$@" --config "$CONFIG"
[ -z "${ONCE:-}" ] || set -- "$@" --once
# Namespaces, mounts and cgroups need root.
[ "$(id -u)" = 0 ] || set -- sudo "$@"
exec "$@"
