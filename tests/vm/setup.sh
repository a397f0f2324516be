# set_up: the machine, the package and its configuration. Everything is a unit or a file, so that it is there after a reboot. With packages, they
# are installed and the node joins by a token; otherwise their files are copied.

# image NAME TREE CONFIG: an image of one layer for containerd.
image() {
    mkdir -p /tmp/image
    rm -rf /tmp/image/*
    tar -C "$2" -cf /tmp/image/layer.tar .
    layer=$(sha256sum /tmp/image/layer.tar | cut -d ' ' -f 1)
    printf '{"architecture":"amd64","os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' "$3" "$layer" > /tmp/image/config.json
    printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$1" > /tmp/image/manifest.json
    tar -C /tmp/image -cf /tmp/image.tar manifest.json config.json layer.tar
    ctr -n k8s.io images import /tmp/image.tar
}

# The steps of a package installation, of files.
install_files() {
    install -m 0755 $here/bin/quintlet /usr/bin/quintlet
    for name in cri-proxy pleg-service probe-service status-reporter node-api pod-sync quintctl; do ln -sf quintlet /usr/bin/$name; done
    install -m 0644 $here/systemd/*.service $here/systemd/*.target /usr/lib/systemd/system/
    install -m 0644 $here/systemd/quintlet.sysusers /usr/lib/sysusers.d/quintlet.conf
    install -m 0644 $here/systemd/quintlet.tmpfiles /usr/lib/tmpfiles.d/quintlet.conf
    install -m 0644 $here/systemd/quintlet.env /etc/default/quintlet
    systemd-sysusers quintlet.conf
    systemd-tmpfiles --create quintlet.conf
}

is_nothing_enabled() {
    systemctl list-unit-files 'quintlet*' --no-legend --no-pager | tee /tmp/unit-files
    grep -q 'quintlet.target' /tmp/unit-files && ! grep -q ' enabled ' /tmp/unit-files && [ ! -e /run/quintlet/cri/admin/socket ]
}

# The steps of docs/installing.md and docs/joining.md.
install_packages() {
    dpkg -i $here/packages/quintlet_*.deb > /tmp/last 2>&1
    check "the .deb is installed" "$(tail -n 1 /tmp/last)" dpkg-query -W quintlet
    check "it enables and starts nothing" "" is_nothing_enabled
    sed -i "s|^ExecStart=.*|& --tls --certificate /var/lib/vm/testapi.pem --sign|" /etc/systemd/system/testapi.service
}

# bootstrap_kubeconfig: has a token that the API server does not check.
bootstrap_kubeconfig() {
    jq '.users[0].user = {token: "abcdef.0123456789abcdef"}' /etc/quintlet/kubeconfig > /etc/kubernetes/bootstrap-kubelet.conf
    chmod 0600 /etc/kubernetes/bootstrap-kubelet.conf
}

join() {
    bootstrap_kubeconfig
    of_pod_sync="--bootstrap-kubeconfig /etc/kubernetes/bootstrap-kubelet.conf --kubeconfig /etc/kubernetes/kubelet.conf"
    sed -i -e "/^POD_SYNC_ARGS=/s|--kubeconfig /etc/quintlet/kubeconfig|$of_pod_sync|" \
        -e 's|--kubeconfig /etc/quintlet/kubeconfig|--kubeconfig /run/quintlet/credentials/kubeconfig|' /etc/default/quintlet
}

set_up() {
    # An address, and swap.
    cp $here/network/* /etc/systemd/network/
    systemctl enable --now --quiet systemd-networkd
    dd if=/dev/zero of=/swap bs=1M count=256 2> /dev/null && chmod 0600 /swap && mkswap -q /swap
    echo '/swap none swap sw 0 0' >> /etc/fstab
    swapon /swap
    # A journal that outlives a boot.
    mkdir -p /var/log/journal && systemctl restart systemd-journald

    install -D -m 0644 $here/containerd.toml /etc/containerd/config.toml
    install -D -m 0644 $here/quintlet.conflist /etc/cni/net.d/10-quintlet.conflist
    systemctl enable --now --quiet containerd
    until_true 300 ctr version
    mkdir -p /tmp/tree/bin /tmp/tree/tmp /tmp/tree/etc /tmp/tree/root
    cp /bin/busybox /tmp/tree/bin/busybox
    /bin/busybox --list | grep -vx busybox | while read -r applet; do ln -s busybox "/tmp/tree/bin/$applet"; done
    printf 'root:x:0:0:root:/root:/bin/sh\n' > /tmp/tree/etc/passwd
    image localhost/busybox:1 /tmp/tree '{"Env":["PATH=/bin"],"Cmd":["sh"]}'
    image registry.k8s.io/pause:3.10 /tmp/tree '{"Entrypoint":["/bin/sleep","1000000"]}'
    check "runtime has the images" "$(containerd --version | cut -d ' ' -f 3), $(runc --version | head -n 1), Linux $(uname -r)" \
        sh -c 'ctr -n k8s.io images ls -q | grep -q "^localhost/busybox:1$"'

    mkdir -p /etc/quintlet $manifests
    install -m 0755 $here/bin/testapi /usr/local/bin/testapi
    install -m 0644 $here/testapi.service /etc/systemd/system/testapi.service
    systemd-analyze --version > /dev/null

    if [ -d $here/packages ]; then install_packages; else install_files; fi
    # Steps of the operator, from docker/systemd/quintlet.env.
    systemctl daemon-reload
    systemctl enable --now --quiet testapi
    until_true 120 test -s /etc/quintlet/kubeconfig
    # The case replace starts a kubelet instead.
    [ ! -e $here/bin/kubelet ] || { touch $state/set-up; return; }
    [ ! -d $here/packages ] || join
    cp $here/pods/vm.yaml $manifests/vm.yaml
    install -D -m 0644 $here/config.yaml /etc/quintlet/config.yaml
    sed -i 's|^QUINTLET_CONFIG_ARGS=.*|QUINTLET_CONFIG_ARGS=--config /etc/quintlet/config.yaml|' /etc/default/quintlet
    # Not what pods rely on.
    echo 0 > /proc/sys/vm/overcommit_memory
    systemctl enable --quiet quintlet.target
    systemctl start --no-block quintlet.target
    # All cases need the first pod.
    becomes 900 "pod with a Secret is Ready" is_ready
    process_of vm-quintlet-vm > $state/process
    check "pod has a process" "pid $(cat $state/process)" grep -q . $state/process
    touch $state/set-up
}
