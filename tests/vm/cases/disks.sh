# PersistentVolumes on disks of the machine: an empty disk that is formatted, and one as a block device.

# claim NAME MODE SOURCE: a bound claim.
claim() {
    uid=$(request POST /api/v1/namespaces/default/persistentvolumeclaims "$(jq -nc --arg name "$1" --arg mode "$2" '
        {metadata: {name: $name}, spec: {accessModes: ["ReadWriteOnce"], volumeMode: $mode, volumeName: "pv-\($name)", resources: {requests: {storage: "64Mi"}}}}')" | jq -r .metadata.uid)
    request POST /api/v1/persistentvolumes "$(jq -nc --arg name "$1" --arg mode "$2" --arg uid "$uid" --argjson source "$3" '
        {metadata: {name: "pv-\($name)"}, spec: ({accessModes: ["ReadWriteOnce"], volumeMode: $mode, capacity: {storage: "64Mi"},
         claimRef: {namespace: "default", name: $name, uid: $uid}} + $source)}')" > /dev/null
    request PATCH "/api/v1/namespaces/default/persistentvolumeclaims/$1/status" '{"status": {"phase": "Bound", "accessModes": ["ReadWriteOnce"], "capacity": {"storage": "64Mi"}}}' > /dev/null
}

# with_claim CLAIM COMMAND: a pod that mounts a claim at /data.
with_claim() {
    jq -nc --argjson c "$(script "$2" '{"volumeMounts": [{"name": "data", "mountPath": "/data"}]}')" --arg claim "$1" '
        {containers: [$c], volumes: [{name: "data", persistentVolumeClaim: {claimName: $claim}}]}'
}

# unmounted TEXT: no mount has this text.
unmounted() {
    grep -F "$1" /proc/self/mountinfo | head -n 1
    ! grep -qF "$1" /proc/self/mountinfo
}

no_pod() {
    objects pods | jq -r --arg name "$1" '.items[] | select(.metadata.name == $name).metadata.name' | grep . && return 1
    return 0
}

delete_pod() {
    request DELETE "/api/v1/namespaces/default/pods/$1" > /dev/null
    becomes 300 "pod $1 is gone" no_pod "$1"
}

# reads_again NAME CLAIM: two pods, one after the other, of which the second reads the file of the first.
reads_again() {
    pod "$1-first" "$(with_claim "$2" 'echo kept > /data/file; sync; sleep 1000000')"
    becomes 300 "$1: first pod runs" is_ready_pod "$1-first"
    delete_pod "$1-first"
    pod "$1-second" "$(with_claim "$2" 'grep -qx kept /data/file && sleep 1000000')"
    becomes 300 "$1: second pod reads the file of the first" is_ready_pod "$1-second"
    delete_pod "$1-second"
}

run() {
    claim disk Filesystem '{"local": {"path": "/dev/vdc", "fsType": "ext4"}}'
    reads_again disk disk
    becomes 60 "disk is unmounted" unmounted /dev/vdc
    claim block Block '{"local": {"path": "/dev/vdd"}}'
    pod block "$(jq -nc --argjson c "$(script 'head -c 4096 /dev/zero > /dev/data && sleep 1000000' '{"volumeDevices": [{"name": "data", "devicePath": "/dev/data"}]}')" '
        {containers: [$c], volumes: [{name: "data", persistentVolumeClaim: {claimName: "block"}}]}')"
    becomes 300 "pod writes to a block device" is_ready_pod block
    delete_pod block
    becomes 60 "first pod stays" stays
}
