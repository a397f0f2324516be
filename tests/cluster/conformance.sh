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
repo=$(cd "$(dirname "$0")/../.." && pwd)
. "$repo/tests/cluster/preamble.sh"
agent=${AGENT:-quintlet}
out=${OUT:-$repo/target/conformance/$agent}
mkdir -p "$out"
need openssl containerd iptables busybox bash curl cc
at_end() {
    cp "$work"/logs/*.log "$out/" || true
}
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
