# A real kubelet is the agent of a machine with the .deb. Quintlet takes its place, is restarted and upgraded, and gives the node back. The pods keep
# their containers and processes throughout. The machine has the kubelet (run.sh), so set_up has installed the package and has started nothing of it.

client=/var/lib/kubelet/pki/kubelet-client-current.pem
drop_in=/etc/systemd/system/kubelet.service.d/zz-quintlet.conf
journal=/var/lib/quintlet/install.json
ca=/etc/kubernetes/pki/ca.crt

# kubelet_files: the unit of the package kubelet, and the files that kubeadm join writes. The API server has no protobuf.
kubelet_files() {
    install -m 0755 $here/bin/kubelet /usr/bin/kubelet
    mkdir -p /usr/lib/systemd/system/kubelet.service.d /var/lib/kubelet /etc/kubernetes/pki
    cat > /usr/lib/systemd/system/kubelet.service << 'END'
[Unit]
Description=kubelet: The Kubernetes Node Agent
Documentation=https://kubernetes.io/docs/

[Service]
ExecStart=/usr/bin/kubelet
Restart=always
StartLimitInterval=0
RestartSec=10

[Install]
WantedBy=multi-user.target
END
    cat > /usr/lib/systemd/system/kubelet.service.d/10-kubeadm.conf << 'END'
# Note: This dropin only works with kubeadm and kubelet v1.11+
[Service]
Environment="KUBELET_KUBECONFIG_ARGS=--bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf"
Environment="KUBELET_CONFIG_ARGS=--config=/var/lib/kubelet/config.yaml"
EnvironmentFile=-/var/lib/kubelet/kubeadm-flags.env
EnvironmentFile=-/etc/default/kubelet
ExecStart=
ExecStart=/usr/bin/kubelet $KUBELET_KUBECONFIG_ARGS $KUBELET_CONFIG_ARGS $KUBELET_KUBEADM_ARGS $KUBELET_EXTRA_ARGS
END
    cat > /var/lib/kubelet/config.yaml << END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication:
  anonymous:
    enabled: false
  webhook:
    enabled: true
  x509:
    clientCAFile: $ca
authorization:
  mode: Webhook
cgroupDriver: systemd
clusterDNS:
- 10.96.0.10
clusterDomain: cluster.local
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
contentType: application/json
failSwapOn: false
healthzBindAddress: 127.0.0.1
healthzPort: 10248
rotateCertificates: true
staticPodPath: $manifests
END
    echo 'containerRuntimeEndpoint: unix:///run/containerd/containerd.sock' > /var/lib/kubelet/instance-config.yaml
    echo 'KUBELET_KUBEADM_ARGS=""' > /var/lib/kubelet/kubeadm-flags.env
    jq -r '.clusters[0].cluster["certificate-authority-data"]' /etc/quintlet/kubeconfig | base64 -d > $ca
    bootstrap_kubeconfig
    # A kubelet creates no pod without it.
    [ -s /etc/resolv.conf ] || echo 'nameserver 192.0.2.1' > /etc/resolv.conf
    systemctl daemon-reload
}

# joined: what kubeadm join does once the node has its certificate. The signer of the API server is the authority of clients.
joined() {
    rm /etc/kubernetes/bootstrap-kubelet.conf
    awk '/BEGIN CERT/ { number++ } number == 2 { print } /END CERT/ && number == 2 { exit }' $client >> $ca
}

static_pod() {
    jq -nc --argjson main "$(script 'exec sleep 1000000')" \
        '{apiVersion: "v1", kind: "Pod", metadata: {name: "static"}, spec: {terminationGracePeriodSeconds: 1, containers: [$main]}}' \
        > $manifests/static.yaml
}

# pod_of NAME: a pod with a file of a ConfigMap, which is Ready while it can read the file.
pod_of() {
    main=$(script 'exec sleep 1000000' '{
        "readinessProbe": {"exec": {"command": ["grep", "-qx", "blue", "/settings/color"]}, "periodSeconds": 5, "timeoutSeconds": 60, "failureThreshold": 10},
        "volumeMounts": [{"name": "settings", "mountPath": "/settings"}, {"name": "scratch", "mountPath": "/scratch"}]}')
    pod "$1" "$(jq -nc --argjson main "$main" '{containers: [$main],
        volumes: [{name: "settings", configMap: {name: "settings"}}, {name: "scratch", emptyDir: {medium: "Memory"}}]}')"
}

# runs PROGRAM: the unit of the kubelet runs this program.
runs() {
    readlink "/proc/$(systemctl show -P MainPID kubelet.service)/exe" | tee /tmp/program
    [ "$(systemctl is-active kubelet.service)" = active ] && [ "$(cat /tmp/program)" = "$1" ]
}

# is_ready_node VERSION: the Node is Ready and has the version of this agent.
is_ready_node() {
    request GET /api/v1/nodes/$node | jq -r '.status | "\(.nodeInfo.kubeletVersion) \(.conditions[] | select(.type == "Ready") | "\(.status) \(.message)")"' |
        tee /tmp/node
    grep -q "^$1 True " /tmp/node
}

# remember NAME...: the containers and processes of these pods.
remember() {
    for name in "$@"; do echo "$name $(container "$name")"; done > $state/containers
    cat $state/containers
    ! grep -qvE '^[^ ]+ [0-9a-f]+ [0-9]+$' $state/containers
}

# same_containers: the pods have the containers and processes that were remembered, and no others.
same_containers() {
    cut -d ' ' -f 1 $state/containers | while read -r name; do echo "$name $(container "$name")"; done > /tmp/containers
    tr '\n' ' ' < /tmp/containers
    cmp -s $state/containers /tmp/containers
}

# pods_are_ready: all pods that were remembered are Ready. The state of each is printed, that of the failing one last.
pods_are_ready() {
    for each in $(cut -d ' ' -f 1 $state/containers); do is_ready_pod "$each" || return 1; done
}

# of_agent NAME PROGRAM VERSION: rows that hold under each agent.
of_agent() {
    becomes 600 "$1: the Node is Ready" is_ready_node "$3"
    becomes 600 "$1: pods are Ready" pods_are_ready
    check "$1: kubelet.service runs it" "$(readlink "/proc/$(systemctl show -P MainPID kubelet.service)/exe")" runs "$2"
    check "$1: pods keep their containers and processes" "$(same_containers)" same_containers
}

# is_not_removed: the package refuses its removal in plain words and keeps its programs.
is_not_removed() {
    ! dpkg --remove quintlet > /tmp/removal 2>&1 || return 1
    grep 'quintctl uninstall' /tmp/removal && [ -x /usr/bin/quintlet ]
}

run() {
    kubelet_files
    static_pod
    request POST /api/v1/namespaces/default/configmaps '{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"color": "blue"}}' > /dev/null
    theirs=$(/usr/bin/kubelet --version | cut -d ' ' -f 2)
    ours=$(/usr/bin/quintlet kubelet --version | cut -d ' ' -f 2)
    systemctl enable --now --quiet kubelet.service
    becomes 900 "kubelet: the Node is Ready" is_ready_node "$theirs"
    becomes 300 "kubelet: it has a certificate" test -s $client
    joined
    pod_of before
    becomes 900 "kubelet: its static pod is Ready" is_ready_pod "static-$node"
    becomes 900 "kubelet: a pod of the API server is Ready" is_ready_pod before
    check "pods have containers" "$(remember "static-$node" before | xargs)" remember "static-$node" before
    cksum < "$(readlink -f $client)" > $state/client
    kubelet_pid=$(systemctl show -P MainPID kubelet.service)

    # Only its text.
    quintctl install --replace-kubelet --dry-run > /tmp/steps 2>&1
    check "a dry run shows the steps" "$(tail -n 1 /tmp/steps)" grep -q "write $drop_in and reload systemd" /tmp/steps
    check "it writes no file" "" test ! -e $drop_in -a ! -e $journal
    check "the kubelet is the same process" "pid $kubelet_pid" test "$(systemctl show -P MainPID kubelet.service)" = "$kubelet_pid"
    check "a dry run keeps containers and processes" "$(same_containers)" same_containers

    quintctl install --replace-kubelet --timeout 900 > /tmp/install 2>&1
    check "Quintlet takes the place of the kubelet" "$(tail -n 1 /tmp/install)" grep -q '^Quintlet is installed' /tmp/install
    of_agent installed /usr/bin/quintlet "$ours"
    systemctl --no-pager status kubelet.service > /tmp/status 2>&1
    check "systemctl status shows it" "$(head -n 1 /tmp/status)" grep -q 'Quintlet in the place of the kubelet' /tmp/status
    check "the certificate is that of the kubelet" "$(cat $state/client)" test "$(cksum < "$(readlink -f $client)")" = "$(cat $state/client)"
    pod_of during
    becomes 600 "installed: a new pod is Ready" is_ready_pod during
    check "installed: the new pod has a container" "$(remember "static-$node" before during | xargs)" remember "static-$node" before during
    check "the package is not removed meanwhile" "$(is_not_removed | tail -n 1)" is_not_removed

    systemctl restart kubelet.service
    becomes 900 "restarted: all services serve" quintctl health
    of_agent restarted /usr/bin/quintlet "$ours"

    # Another file of the same version: what follows an ELF file is not read.
    cp /usr/bin/quintlet /root/quintlet-next && echo next >> /root/quintlet-next
    quintctl upgrade /root/quintlet-next --timeout 600 > /tmp/upgrade 2>&1
    check "all services are upgraded" "$(tail -n 1 /tmp/upgrade)" grep -q '^All services run the new binary' /tmp/upgrade
    check "the new binary is installed" "$(tail -n 1 /tmp/upgrade)" cmp -s /root/quintlet-next /usr/bin/quintlet
    becomes 600 "upgraded: the Node is Ready" is_ready_node "$ours"
    becomes 600 "upgraded: pods are Ready" pods_are_ready
    check "upgraded: pods keep their containers and processes" "$(same_containers)" same_containers

    quintctl uninstall > /tmp/uninstall 2>&1
    check "Quintlet gives the node back" "$(tail -n 1 /tmp/uninstall)" grep -q '^Quintlet is uninstalled' /tmp/uninstall
    check "its drop-in and its journal are gone" "" test ! -e $drop_in -a ! -e $journal
    of_agent "handed back" /usr/bin/kubelet "$theirs"
    pod_of after
    becomes 900 "handed back: a new pod is Ready" is_ready_pod after

    dpkg --purge quintlet > /tmp/purge 2>&1
    check "the package is purged" "$(tail -n 1 /tmp/purge)" test ! -e /usr/bin/quintlet
    check "the kubelet runs on" "" runs /usr/bin/kubelet
    check "purged: pods keep their containers and processes" "$(same_containers)" same_containers

    for each in before during after; do request DELETE /api/v1/namespaces/default/pods/$each > /dev/null; done
    becomes 600 "the kubelet removes the pods of both agents" no_pods
}

# The kubelet has no pod left but the static one.
tidy() {
    :
}
