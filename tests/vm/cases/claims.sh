# A claim of a device, over the loss of power: its driver, which comes late, prepares it again. The API server begins with the objects that it had.

driver=cdi.example.com
claims=/apis/resource.k8s.io/v1/namespaces/default/resourceclaims

# claimed NAME: a pod with a claim that is allocated as a scheduler does.
claimed() {
    request POST $claims "$(jq -nc --arg name "$1" '{metadata: {name: $name}, spec: {devices: {}}}')" > /dev/null
    request POST /api/v1/namespaces/default/pods "$(jq -nc --arg name "$1" \
        --argjson c "$(script "trap 'exit 0' TERM; while :; do sleep 1 & wait; done" '{"resources": {"claims": [{"name": "device"}]}}')" '
        {apiVersion: "v1", kind: "Pod", metadata: {name: $name, namespace: "default"},
         spec: {terminationGracePeriodSeconds: 1, automountServiceAccountToken: false, resourceClaims: [{name: "device", resourceClaimName: $name}], containers: [$c]}}')" > /tmp/pod
    request PATCH "$claims/$1/status" "$(jq -c --arg driver $driver '.metadata |
        {status: {reservedFor: [{resource: "pods", name, uid}], allocation: {devices: {results: [{driver: $driver, pool: "pool", device: .name, request: "r"}]}}}}' /tmp/pod)" > /dev/null
    request POST "/api/v1/namespaces/default/pods/$1/binding" "$(jq -nc --arg node $node '{target: {kind: "Node", name: $node}}')" > /dev/null
}

# stored PATH RESOURCE: the objects of a resource, as the API server begins with them.
stored() {
    request GET "$1/$2" | jq -c --arg resource "$2" '.items[] | {resource: $resource, namespace: (.metadata.namespace // ""), object: .}'
}

is_unprepared() {
    ls /run/cdi
    [ -z "$(ls /run/cdi)" ]
}

run() {
    install -m 0755 $here/bin/quintlet-dra-driver /usr/local/bin/dra-driver
    # The CDI files do not outlive the boot.
    cat > /etc/systemd/system/dra-driver.service <<END
[Service]
ExecStart=/bin/sh -c 'until [ -e /run/dra-driver-may-start ]; do sleep 0.2; done; exec /usr/local/bin/dra-driver /var/lib/kubelet $driver /run/cdi'
[Install]
WantedBy=multi-user.target
END
    systemctl daemon-reload
    touch /run/dra-driver-may-start
    systemctl enable --now --no-block --quiet dra-driver
    claimed claimed
    pod plain "$(jq -nc --argjson c "$(script "trap 'exit 0' TERM; while :; do sleep 1 & wait; done")" '{containers: [$c]}')"
    becomes 300 "a pod with a claim is Ready" is_ready_pod claimed
    becomes 300 "so is one without" is_ready_pod plain
    check "the container has its device" "$(inside claimed 'echo "$CDI_CLAIM"')" test "$(inside claimed 'echo "$CDI_CLAIM"')" = claimed
    { stored /api/v1 nodes; stored /api/v1 pods; stored /apis/resource.k8s.io/v1 resourceclaims; } | jq -s . > $state/objects.json
    mkdir -p /etc/systemd/system/testapi.service.d
    printf '[Service]\nExecStart=\nExecStart=%s --objects %s\n' "$(sed -n 's/^ExecStart=//p' /etc/systemd/system/testapi.service)" $state/objects.json \
        > /etc/systemd/system/testapi.service.d/objects.conf
    of_pod claimed .metadata.uid > $state/uid
    echo claims > $state/reboots
    cat /proc/sys/kernel/random/boot_id > $state/boot-id
    sync
    # No service and no pod ends before.
    systemctl reboot --force --force
}

rebooted() {
    check "machine has rebooted" "$(cat /proc/sys/kernel/random/boot_id)" sh -c "! cmp -s $state/boot-id /proc/sys/kernel/random/boot_id"
    rm -r /etc/systemd/system/testapi.service.d
    systemctl daemon-reload
    check "the API server has the pod that it had" "$(of_pod claimed .metadata.uid)" test "$(of_pod claimed .metadata.uid)" = "$(cat $state/uid)"
    becomes 900 "the pod with a claim waits for its driver" has_event claimed FailedPrepareDynamicResources
    becomes 900 "the other pod is Ready meanwhile" restarted plain
    check "without its device, it does not start" "$(process_of claimed)" test -z "$(process_of claimed)"
    touch /run/dra-driver-may-start
    becomes 900 "it is Ready again" restarted claimed
    check "with the device that it had" "$(inside claimed 'echo "$CDI_CLAIM"')" test "$(inside claimed 'echo "$CDI_CLAIM"')" = claimed
    check "in the same pod" "$(of_pod claimed .metadata.uid)" test "$(of_pod claimed .metadata.uid)" = "$(cat $state/uid)"
    request DELETE /api/v1/namespaces/default/pods/claimed > /dev/null
    becomes 300 "its claim is unprepared once it is deleted" is_unprepared
    process_of vm-$node > $state/process
}

# restarted POD: the pod is Ready with a container of this boot.
restarted() {
    is_ready_pod "$1" && [ -n "$(process_of "$1")" ]
}
