#!/bin/sh
# Runs the upstream NodeConformance specs on one node of a control plane of this machine, with Quintlet or with a kubelet as its agent. No
# registry is needed: the images are stand-ins.
#
#   KUBERNETES=DIR  a folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubectl, e2e.test, ginkgo and agnhost, and kubelet
#                   for AGENT=kubelet
#   AGENT           quintlet (default) or kubelet
#   BIN_DIR=DIR     directory of the built services (target/quick)
#   FOCUS, SKIP     regular expressions of specs (\[NodeConformance\]; nothing)
#   PROCS           specs at a time (8: most of them wait)
#   OUT=DIR         gets passed.txt, failed.txt, and the logs (default: target/conformance/AGENT)
#
# Needs root, openssl, containerd, CNI plugins, iptables, busybox-static, bash, curl and cc. It runs in network and mount namespaces of its own. Fails if a
# spec fails.
set -eu

[ "${QUINTLET_CLUSTER_INSIDE:-}" = yes ] || QUINTLET_CLUSTER_INSIDE=yes exec unshare --mount --net --propagation private "$0" "$@"

repo=$(cd "$(dirname "$0")/../.." && pwd)
kubernetes=$(cd "${KUBERNETES:?a folder with the programs of Kubernetes}" && pwd)
agent=${AGENT:-quintlet}
bin_dir=${BIN_DIR:-$repo/target/quick}
out=${OUT:-$repo/target/conformance/$agent}
work=$(mktemp -d /tmp/quintlet-conformance.XXXXXX)
address=10.99.0.2
cgroup=quintlet-conformance-$$
mkdir -p "$out"
# Services without root have their sockets below.
chmod 0755 "$work"
. "$repo/tests/cluster/control-plane.sh"
. "$repo/tests/cluster/machine.sh"
. "$repo/tests/cluster/host-node.sh"
. "$repo/tests/cluster/images.sh"
for tool in openssl containerd iptables busybox bash curl cc; do
    command -v $tool > /dev/null || { say "$tool is needed"; exit 1; }
done

clean() {
    trap - EXIT INT TERM
    clean_machine "$cgroup"
    cp "$work"/logs/*.log "$out/" || true
    rm -rf "$work"
}
trap 'status=$?; clean; exit $status' EXIT
trap 'exit 130' INT TERM
make_machine

say "control plane"
start_control_plane
# Without kube-proxy, pods reach the API server by the first address of Services.
iptables -t nat -A PREROUTING -d 10.96.0.1/32 -p tcp --dport 443 -j DNAT --to-destination "$address:6443"
iptables -t nat -A OUTPUT -d 10.96.0.1/32 -p tcp --dport 443 -j DNAT --to-destination "$address:6443"

say "a node with $agent"
case $agent in
    kubelet) start_host_node node ;;
    quintlet) start_quintlet_node node ;;
    *) say "no agent $agent"; exit 64 ;;
esac
make_layers
# Those of the suite, and that of sandboxes.
stand_ins $("$kubernetes/e2e.test" --list-images | sort -u) registry.k8s.io/pause:3.10
ctr --address "$runtime" -n k8s.io images import "$work/images.tar" > "$work/logs/import.log"

say "specs"
start specs "$kubernetes/ginkgo" --procs="${PROCS:-8}" --timeout=3h --no-color --focus="${FOCUS:-\\[NodeConformance\\]}" \
    --skip="${SKIP:-nothing is skipped}" "$kubernetes/e2e.test" -- --kubeconfig "$work/admin.conf" --provider skeleton --num-nodes 1 \
    --report-dir "$out" --kubectl-path "$kubernetes/kubectl"
# It fails if a spec fails; a signal ends the wait.
wait "$pid_specs" || true
python3 "$repo/tests/cluster/specs.py" "$out"
