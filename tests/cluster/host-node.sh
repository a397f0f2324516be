# A node with a kubelet and a containerd of its own, for the scripts of this folder; read with `.` after control-plane.sh. It has no systemd.
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

# cgroups NAME: its cgroups in each hierarchy.
cgroups() {
    find /sys/fs/cgroup -depth -type d -path "/sys/fs/cgroup*/$1*" 2> /dev/null || true
}

# make_cgroup NAME: one in each hierarchy, with the processors and memory of the parent.
make_cgroup() {
    for tree in /sys/fs/cgroup /sys/fs/cgroup/*; do
        [ -f "$tree/cgroup.procs" ] || continue
        mkdir -p "$tree/$1"
        for file in cpuset.cpus cpuset.mems; do
            [ ! -f "$tree/$1/$file" ] || [ -s "$tree/cgroup.controllers" ] || cat "$tree/$file" > "$tree/$1/$file"
        done
    done
}

# start_host_node NAME: starts the node's containerd and its kubelet.
start_host_node() {
    start_runtime host 10.88.0.0/24
    certificate "node-$1" "/O=system:nodes/CN=system:node:$1" clientAuth
    kubeconfig "$work/host/kubelet.conf" "node-$1"
    make_cgroup "$cgroup"
    # The machine is small and may have a cgroup v1.
    cat > "$work/host/kubelet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: { x509: { clientCAFile: $pki/ca.crt } }
cgroupDriver: cgroupfs
cgroupRoot: /$cgroup
containerRuntimeEndpoint: unix://$runtime
failCgroupV1: false
failSwapOn: false
evictionHard: { memory.available: 50Mi }
imageGCHighThresholdPercent: 100
localStorageCapacityIsolation: false
registerNode: true
END
    start kubelet "$kubernetes/kubelet" --config "$work/host/kubelet.yaml" --kubeconfig "$work/host/kubelet.conf" --hostname-override "$1" \
        --root-dir "$work/host/kubelet" --cert-dir "$work/host/kubelet/pki" --node-ip "$address"
    wait_for 60 kubectl wait --for=condition=Ready "node/$1" --timeout=1s
}
