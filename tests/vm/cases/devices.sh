# Devices, exclusive CPUs and memory of one NUMA node, over the loss of power, after which the plugin registers once a pod waits for it. The machine has
# two NUMA nodes (run.sh).

name=exclusive-$node
resource=example.com/device

# seen: what the container sees: its device, its CPUs and its NUMA node.
seen() {
    inside "$name" 'echo "$DEVICES"; ls /dev/ | grep "^d[01]$"; sed -n "s/^\(Cpus\|Mems\)_allowed_list:[[:space:]]*//p" /proc/self/status' | tr '\n' ' '
}

# cpus_of POD: the CPUs of its container, one a line.
cpus_of() {
    sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/$(process_of "$1")/status" | tr ',' '\n' | while IFS=- read -r first last; do
        seq "$first" "${last:-$first}"
    done
}

# are_apart POD POD: no CPU is of both.
are_apart() {
    { cpus_of "$1"; cpus_of "$2"; } | sort | uniq -d > /tmp/common
    echo "common: $(tr '\n' ' ' < /tmp/common)"
    [ ! -s /tmp/common ]
}

# assigned: what the state files have.
assigned() {
    jq -c '.Data.PodDeviceEntries' /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint
    jq -c '.entries' /var/lib/kubelet/cpu_manager_state /var/lib/kubelet/memory_manager_state
}

run() {
    check "machine has two NUMA nodes" "$(cat /sys/devices/system/node/online)" has /sys/devices/system/node/online 0-1
    systemctl stop quintlet-pod-sync
    # As much memory is reserved as by systemReserved and evictionHard.
    cat >> /etc/quintlet/config.yaml <<END
cpuManagerPolicy: static
memoryManagerPolicy: Static
reservedMemory:
  - numaNode: 0
    limits: { memory: 656Mi }
topologyManagerPolicy: single-numa-node
END
    rm -f /var/lib/kubelet/cpu_manager_state /var/lib/kubelet/memory_manager_state
    install -m 0755 $here/bin/quintlet-device-plugin /usr/local/bin/device-plugin
    cat > /etc/systemd/system/device-plugin.service <<END
[Service]
# Not ExecStartPre=: the start of the machine would wait for it, and this case for the start of the machine.
ExecStart=/bin/sh -c 'until [ -e /run/device-plugin-may-start ] && [ -S /var/lib/kubelet/device-plugins/kubelet.sock ]; do sleep 0.2; done; \
    exec /usr/local/bin/device-plugin /var/lib/kubelet $resource d0@0 d1@1'
[Install]
WantedBy=multi-user.target
END
    systemctl daemon-reload
    systemctl start quintlet-pod-sync
    touch /run/device-plugin-may-start
    systemctl enable --now --no-block --quiet device-plugin
    becomes 600 "Node has the devices" has_devices $resource 2
    # Its memory does not fit on the first node, beside what is reserved.
    limits="{\"cpu\": \"2\", \"memory\": \"500Mi\", \"$resource\": \"1\"}"
    jq -nc --argjson c "$(script "trap 'exit 0' TERM; while :; do sleep 1 & wait; done" "{\"resources\": {\"limits\": $limits}}")" \
        '{apiVersion: "v1", kind: "Pod", metadata: {name: "exclusive"}, spec: {terminationGracePeriodSeconds: 1, containers: [$c]}}' > $manifests/exclusive.yaml
    becomes 300 "pod with a device, CPUs and memory runs" is_ready_pod "$name"
    seen > $state/seen
    check "its device, CPUs and memory are on the second NUMA node" "$(cat $state/seen)" grep -qE '^d1 d1 [4-7](-|,)[4-7] 1 $' $state/seen
    becomes 30 "others do not have its CPUs" are_apart "$name" vm-$node
    assigned > $state/assigned
    echo devices > $state/reboots
    cat /proc/sys/kernel/random/boot_id > $state/boot-id
    sync
    # No service and no pod ends before.
    systemctl reboot --force --force
}

rebooted() {
    check "machine has rebooted" "$(cat /proc/sys/kernel/random/boot_id)" sh -c "! cmp -s $state/boot-id /proc/sys/kernel/random/boot_id"
    becomes 900 "a pod without devices is Ready meanwhile" is_ready_pod vm-$node
    becomes 300 "the pod with a device waits for its plugin" has_event "$name" WaitingForDevicePlugin
    touch /run/device-plugin-may-start
    becomes 900 "it is Ready again" is_ready_pod "$name"
    seen > /tmp/seen
    check "with the device, the CPUs and the memory that it had" "$(cat /tmp/seen)" cmp $state/seen /tmp/seen
    assigned > /tmp/assigned
    check "as the state files have them" "$(tr '\n' ' ' < /tmp/assigned | tr '|' ' ')" cmp $state/assigned /tmp/assigned
    process_of vm-$node > $state/process
}
