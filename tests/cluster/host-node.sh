# A node with a kubelet and a containerd of its own, for the scripts of this folder; read with `.` after machine.sh. It has no systemd.
#
#   kubernetes  also has kubelet
#   runtime     set here: the socket of the node's containerd

runtime=$work/host/containerd.sock

# start_runtime NAME SUBNET: starts a containerd with the socket $work/NAME/containerd.sock.
start_runtime() {
    mkdir -p "$work/$1/cni"
    cat > "$work/$1/cni/10-$1.conflist" <<END
{ "cniVersion": "1.0.0", "name": "$1", "plugins": [{ "type": "bridge", "bridge": "$1", "isGateway": true,
  "ipam": { "type": "host-local", "dataDir": "$work/$1/ipam", "ranges": [[{ "subnet": "$2" }]], "routes": [{ "dst": "0.0.0.0/0" }] } }] }
END
    cat > "$work/$1/containerd.toml" <<END
version = 2
root = "$work/$1/root"
state = "$work/$1/state"
[grpc]
address = "$work/$1/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "registry.k8s.io/pause:3.10"
disable_tcp_service = true
stream_server_address = "127.0.0.1"
stream_server_port = "0"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "$work/$1/cni"
END
    start "$1-containerd" containerd --config "$work/$1/containerd.toml"
    wait_for 30 ctr --address "$work/$1/containerd.sock" version
}

# node_settings: the settings that each agent has, $work/node.yaml. The machine is small and may have a cgroup v1.
node_settings() {
    cat > "$work/node.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: { x509: { clientCAFile: $pki/ca.crt } }
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
evictionHard: { memory.available: 50Mi }
imageGCHighThresholdPercent: 100
END
}

# prepare_node NAME: starts the node's containerd, and makes its kubeconfig, its cgroup, and its settings.
prepare_node() {
    start_runtime host 10.88.0.0/24
    certificate "node-$1" "/O=system:nodes/CN=system:node:$1" clientAuth
    kubeconfig "$work/host/node.conf" "node-$1"
    make_cgroup "$cgroup"
    node_settings
}

# for_kubelet: the settings that a kubelet needs on this node; `quintctl up` has options for them.
for_kubelet() {
    cat "$work/node.yaml" - <<END
cgroupRoot: /$cgroup
containerRuntimeEndpoint: unix://$runtime
END
}

# start_host_node NAME: starts the node's containerd and its kubelet.
start_host_node() {
    prepare_node "$1"
    { for_kubelet; echo "localStorageCapacityIsolation: false"; } > "$work/host/kubelet.yaml"
    start kubelet "$kubernetes/kubelet" --config "$work/host/kubelet.yaml" --kubeconfig "$work/host/node.conf" --hostname-override "$1" \
        --root-dir "$work/host/kubelet" --cert-dir "$work/host/kubelet/pki" --node-ip "$address"
    wait_for 60 kubectl wait --for=condition=Ready "node/$1" --timeout=1s
}

# start_quintlet_node NAME: starts the node's containerd, and Quintlet as its agent.
start_quintlet_node() {
    prepare_node "$1"
    { cat "$work/node.yaml"; echo "clusterDNS: [10.96.0.10]"; } > "$work/host/quintlet.yaml"
    start quintlet "$bin_dir/quintctl" up --config "$work/host/quintlet.yaml" --kubeconfig "$work/host/node.conf" --node-name "$1" \
        --base "$work/host/quintlet" --runtime-endpoint "unix://$runtime" --cgroup-root "/$cgroup"
    wait_for 60 kubectl wait --for=condition=Ready "node/$1" --timeout=1s
}
