#!/bin/sh
# Measures what a node agent costs beside a real control plane on this machine: Quintlet and a kubelet with its defaults, one after the other, each with
# a containerd and a root directory of its own. Prints a table; all figures are in $OUT. Needs an idle machine, and programs of Kubernetes:
#
#   KUBERNETES=DIR  a folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl
#   AGENTS="A…"     the agents: kubelet, or NAME=DIR for the services in a directory (release=target/release, pgo=target/pgo/bin if it is there, kubelet)
#   PODS=N          pods of a burst (100)
#   ROUNDS=N        bursts of each agent (3)
#   MODES="M…"      shared: everything runs on all processors; apart: the node on the first one, all else on the others (shared apart)
#   OUT=FILE        the figures as JSON (target/bench/cluster.json)
#   WORK=DIR        a folder for all files, which is left in place (default: a temporary one)
#
# Needs root, openssl, containerd, CNI plugins, busybox-static, bash, curl, cc and python3. It runs in network and mount namespaces of its own.
repo=$(cd "$(dirname "$0")/../.." && pwd)
. "$repo/tests/cluster/preamble.sh"
need openssl containerd busybox bash curl cc python3 taskset
out=${OUT:-$repo/target/bench/cluster.json}
agents="release=$repo/target/release"
[ ! -x "$repo/target/pgo/bin/quintlet" ] || agents="$agents pgo=$repo/target/pgo/bin"
agents=${AGENTS:-$agents kubelet}
last_processor=$(($(nproc) - 1))

fail() {
    say "failed: $*"
    kubectl get nodes,pods -o wide 2> /dev/null | tail -n 20 >&2 || true
    tail -n 20 "$work/logs/agent.log" >&2 || true
    exit 1
}

# measure MODE NAME [DIR]: starts a node, and writes its figures as a line.
measure() {
    say "$2, $1"
    node=$2-$1
    [ "$1" = shared ] || taskset --pid --cpu-list 0 $$ > "$work/last"
    start_runtime "$node" 10.88.0.0/24
    runtime=$work/$node/containerd.sock
    ctr --address "$runtime" -n k8s.io images import "$work/images.tar" > "$work/logs/import.log"
    certificate "node-$node" "/O=system:nodes/CN=system:node:$node" clientAuth
    kubeconfig "$work/$node/node.conf" "node-$node"
    mkdir -p "$work/$node/root"
    node_settings
    { for_kubelet; echo 'clusterDNS: [10.96.0.10]'; } > "$work/$node/kubelet.yaml"
    set -- "$1" "$2" "${3:-}" --config "$work/$node/kubelet.yaml" --kubeconfig "$work/$node/node.conf" --hostname-override "$node" \
        --root-dir "$work/$node/root" --cert-dir "$work/$node/pki" --node-ip "$address"
    mode=$1 title=$2 dir=$3
    shift 3
    if [ -n "$dir" ]; then
        start agent "$dir/quintlet" kubelet "$@" --log-dir "$work/logs/$node"
    else
        start agent "$kubernetes/kubelet" "$@"
    fi
    wait_for 60 kubectl wait --for=condition=Ready "node/$node" --timeout=1s || fail "$node is not Ready"
    [ "$mode" = shared ] || taskset --pid --cpu-list "1-$last_processor" $$ > "$work/last"
    python3 "$repo/tests/cluster/cost.py" measure "$address" "$pki" "$node" "$pid_agent" "$title" "$mode" "${PODS:-100}" "${ROUNDS:-3}" >> "$work/figures" ||
        fail "$node"
    taskset --pid --cpu-list "0-$last_processor" $$ > "$work/last"
    end "$pid_agent"
    kubectl delete node "$node" > "$work/last"
    eval "end \$pid_$(echo "$node" | tr - _)_containerd"
}

make_machine
make_cgroup "$cgroup"
say "control plane"
start_control_plane
make_layers
stand_ins registry.k8s.io/pause:3.10 docker.io/library/busybox:1
for mode in ${MODES:-shared apart}; do
    # The control plane is not confined while it starts.
    for process in $started; do
        processors=0-$last_processor
        [ "$mode" = shared ] || processors=1-$last_processor
        taskset --all-tasks --pid --cpu-list "$processors" "$process" > "$work/last" 2>&1 || true
    done
    for agent in $agents; do
        case $agent in
            kubelet) measure "$mode" kubelet ;;
            *=*) measure "$mode" "${agent%%=*}" "$(cd "${agent#*=}" && pwd)" ;;
            *) fail "no agent $agent" ;;
        esac
    done
done
mkdir -p "$(dirname "$out")"
python3 "$repo/tests/cluster/cost.py" table "$work/figures" "$out"
