# A device plugin that names its devices by the Container Device Interface (CDI): containerd 2 reads the files in /etc/cdi.

resource=example.com/device

run() {
    mkdir -p /etc/cdi
    jq -n --arg kind $resource '
        def device: {name: ., containerEdits: {env: ["CDI_DEVICE=of \(.)"], deviceNodes: [{path: "/dev/cdi-\(.)", hostPath: "/dev/zero"}],
            mounts: [{hostPath: "/etc/hostname", containerPath: "/cdi/hostname", options: ["bind", "ro"]}]}};
        {cdiVersion: "0.5.0", kind: $kind, devices: [("d0", "d1") | device]}' > /etc/cdi/example.json
    install -m 0755 $here/bin/quintlet-device-plugin /usr/local/bin/device-plugin
    systemd-run --quiet --unit=cdi-plugin /usr/local/bin/device-plugin --cdi /var/lib/kubelet $resource d0 d1
    becomes 300 "Node has the devices" has_devices $resource 2
    pod cdi "$(jq -nc --argjson c "$(script "trap 'exit 0' TERM; while :; do sleep 1 & wait; done" "{\"resources\": {\"limits\": {\"$resource\": \"1\"}}}")" '{containers: [$c]}')"
    becomes 300 "a pod with a device is Ready" is_ready_pod cdi
    device=$(inside cdi 'echo "$DEVICES"')
    check "the container has the variable of the device's CDI file" "$(inside cdi 'echo "$CDI_DEVICE"')" test "$(inside cdi 'echo "$CDI_DEVICE"')" = "of $device"
    check "its mount" "$(inside cdi 'cat /cdi/hostname')" test "$(inside cdi 'cat /cdi/hostname')" = "$(cat /etc/hostname)"
    # /dev/zero.
    check "and its device" "/dev/cdi-$device" test "$(inside cdi "stat -c %t:%T /dev/cdi-$device")" = 1:5
    rm /etc/cdi/example.json
    pod cdi-none "$(jq -nc --argjson c "$(script "sleep 100000" "{\"resources\": {\"limits\": {\"$resource\": \"1\"}}}")" '{containers: [$c]}')"
    becomes 300 "a device that no file describes keeps its own pod from starting" waits_for_cdi cdi-none
    systemctl stop cdi-plugin
}

waits_for_cdi() {
    waits_with "$1" CreateContainerError | tee /tmp/waiting
    grep -q 'unresolvable CDI devices' /tmp/waiting
}
