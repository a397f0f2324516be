# PersistentVolumes on disks of the machine: an empty disk that is formatted, one as a block device, and one whose file system grows.

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
    objects pods > /tmp/objects || return 1
    jq -r --arg name "$1" '[.items[] | select(.metadata.name == $name).metadata.name] | join(" ")' /tmp/objects > /tmp/names || return 1
    cat /tmp/names
    ! grep -q . /tmp/names
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

# has_mebibytes LEAST MOST: the size of the file system that grows.
has_mebibytes() {
    set -- "$1" "$2" $(stat -f -c '%b %S' /var/lib/kubelet/plugins/kubernetes.io/local-volume/mounts/pv-grows)
    size=$(($3 * $4 / 1048576))
    echo "$size MiB, want $1 to $2"
    [ "$size" -ge "$1" ] && [ "$size" -le "$2" ]
}

has_size() {
    request GET "/api/v1/namespaces/default/persistentvolumeclaims/$1" | jq -r .status.capacity.storage
    [ "$(request GET "/api/v1/namespaces/default/persistentvolumeclaims/$1" | jq -r .status.capacity.storage)" = "$2" ]
}

grows() {
    mkfs.ext4 -q /dev/vde 64M
    claim grows Filesystem '{"local": {"path": "/dev/vde", "fsType": "ext4"}}'
    pod grows "$(with_claim grows 'echo kept > /data/file; sync; sleep 1000000')"
    becomes 300 "pod with a small file system on a larger disk runs" is_ready_pod grows
    becomes 10 "the file system is smaller than the disk" has_mebibytes 32 64
    process=$(process_of grows)
    # The part of the controller manager. The growth of a mounted ext4 needs CAP_SYS_RESOURCE.
    request PATCH /api/v1/persistentvolumes/pv-grows '{"spec": {"capacity": {"storage": "256Mi"}}}' > /dev/null
    becomes 300 "the file system grows while its pod runs" has_mebibytes 200 256
    becomes 60 "the claim has the new size" has_size grows 256Mi
    check "the pod kept its process and its file" "pid $process" test "$(process_of grows)" = "$process" -a "$(inside grows 'cat /data/file')" = kept
    delete_pod grows
    becomes 60 "the disk that grew is unmounted" unmounted /dev/vde
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
    grows
    becomes 60 "first pod stays" stays
}
