#!/bin/sh
# Records the state that a kubelet leaves on a node, for the end-to-end test recorded_node (tests/recordings/README.md). Replaces
# tests/recordings/node/state.json.
#
#   KUBERNETES=DIR  a folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl
#   RECORDER=FILE   the built tool (target/debug/record-node)
#   WORK=DIR        a folder for all files, which is left in place (default: a temporary one)
#
# Needs root and openssl. It runs in network and mount namespaces of its own.
repo=$(cd "$(dirname "$0")/../.." && pwd)
. "$repo/tests/cluster/preamble.sh"
recorder=${RECORDER:-$repo/target/debug/record-node}
need openssl
make_machine
start_control_plane
certificate node "/O=system:nodes/CN=system:node:sim-node" clientAuth
kubeconfig "$work/node.conf" node
# On a shared mount, a kubelet makes none for its root directory.
mount --make-rprivate /
timeout 300 "$recorder" --kubelet "$kubernetes/kubelet" --kubeconfig "$work/admin.conf" --node-kubeconfig "$work/node.conf"
