# The beginning of the scripts of this folder: each reads this file with `.` first. It runs in network and mount namespaces of its own.
#
#   KUBERNETES=DIR  a folder with the programs of Kubernetes
#   BIN_DIR=DIR     directory of the built services (target/quick)
#   WORK=DIR        a folder for all files, which is left in place (default: a temporary one)
#
# A script may define `at_end`, which runs when everything has stopped, and `more_cgroups`, the names of cgroups that are removed, too.
set -eu

[ "${QUINTLET_CLUSTER_INSIDE:-}" = yes ] || QUINTLET_CLUSTER_INSIDE=yes exec unshare --mount --net --propagation private "$0" "$@"

script=$(basename "$0" .sh)
kubernetes=$(cd "${KUBERNETES:?a folder with the programs of Kubernetes}" && pwd)
bin_dir=${BIN_DIR:-$repo/target/quick}
work=${WORK:-$(mktemp -d "/tmp/quintlet-$script.XXXXXX")}
address=10.99.0.2
cgroup=quintlet-$script-$$
more_cgroups=
mkdir -p "$work"
# Services without root have their sockets below.
chmod 0755 "$work"
for part in control-plane machine host-node images; do
    . "$repo/tests/cluster/$part.sh"
done

# need TOOL...: fails if one is not installed.
need() {
    for tool in "$@"; do
        command -v "$tool" > /dev/null || { say "$tool is needed"; exit 1; }
    done
}

at_end() {
    :
}

clean() {
    trap - EXIT INT TERM
    clean_machine "$cgroup" $more_cgroups
    at_end
    [ -n "${WORK:-}" ] || rm -rf "$work"
}
trap 'status=$?; clean; exit $status' EXIT
trap 'exit 130' INT TERM
