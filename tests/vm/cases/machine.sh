# Requirements of the configuration that the machine does not meet: pod-sync does not start, with the kubelet's texts. Pods stay.

says() {
    journalctl --no-pager -o cat -u quintlet-pod-sync | grep -oF "$1" | tail -n 1 | grep .
}

run() {
    cp /etc/quintlet/config.yaml /tmp/config.yaml
    sed -i 's/^failSwapOn: .*/failSwapOn: true/' /etc/quintlet/config.yaml
    systemctl restart --no-block quintlet-pod-sync
    becomes 180 "failSwapOn refuses a machine that swaps" says 'running with swap on is not supported, please disable swap or set --fail-swap-on flag to false'
    cp /tmp/config.yaml /etc/quintlet/config.yaml
    echo 'protectKernelDefaults: true' >> /etc/quintlet/config.yaml
    echo 0 > /proc/sys/vm/overcommit_memory
    systemctl restart --no-block quintlet-pod-sync
    becomes 180 "protectKernelDefaults refuses another kernel tunable" says 'invalid kernel flag: vm/overcommit_memory, expected value: 1, actual value: 0'
    becomes 10 "the tunable stays" has /proc/sys/vm/overcommit_memory 0
    echo 1 > /proc/sys/vm/overcommit_memory
    # systemd tries again by itself. Other tunables may have any value at the boot.
    cp /tmp/config.yaml /etc/quintlet/config.yaml
    becomes 180 "pod-sync starts once its configuration is met" is_active pod-sync
    becomes 300 "the pod is Ready, with the same process" stays
}
