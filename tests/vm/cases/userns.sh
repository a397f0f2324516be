# Pods with user namespaces, whose volumes are idmapped mounts.

in_namespace() {
    jq -nc --argjson c "$(script 'echo one > /disk/file; echo one > /memory/file; sleep 1000000' '{"volumeMounts": [
        {"name": "disk", "mountPath": "/disk"}, {"name": "memory", "mountPath": "/memory"}, {"name": "secret", "mountPath": "/secret"}]}')" '
        {hostUsers: false, containers: [$c], volumes: [
            {name: "disk", emptyDir: {}}, {name: "memory", emptyDir: {medium: "Memory"}},
            {name: "secret", configMap: {name: "userns"}}]}'
}

first_of_map() {
    awk '{ print $2 }' "/proc/$(process_of "$1")/uid_map"
}

mapped() {
    echo "uid 0 is $(first_of_map "$1") for $(awk '{ print $3 }' "/proc/$(process_of "$1")/uid_map") users"
    [ "$(first_of_map "$1")" -ge 65536 ] && [ "$(awk '{ print $3 }' "/proc/$(process_of "$1")/uid_map")" = 65536 ]
}

owner() {
    stat -c '%u:%g %n' "$1"
    [ "$(stat -c %u:%g "$1")" = "$2" ]
}

run() {
    request POST /api/v1/namespaces/default/configmaps '{"metadata": {"name": "userns"}, "data": {"key": "word"}}' > /dev/null
    pod userns-a "$(in_namespace)"
    pod userns-b "$(in_namespace)"
    becomes 300 "first pod has a user namespace" mapped userns-a
    becomes 300 "second pod has a user namespace" mapped userns-b
    check "they do not share users" "$(first_of_map userns-a), $(first_of_map userns-b)" test "$(first_of_map userns-a)" != "$(first_of_map userns-b)"
    volumes=/var/lib/kubelet/pods/$(of_pod userns-a .metadata.uid)/volumes
    becomes 60 "file in emptyDir belongs to root outside" owner "$volumes/kubernetes.io~empty-dir/disk/file" 0:0
    becomes 60 "file in memory belongs to root outside" owner "$volumes/kubernetes.io~empty-dir/memory/file" 0:0
    id=$(container userns-a | cut -d ' ' -f 1)
    for path in disk/file memory/file secret/key; do
        check "/$path belongs to root inside" "" sh -c "[ \"\$(ctr -n k8s.io tasks exec --exec-id userns-$(echo $path | tr / -) $id stat -L -c %u:%g /$path)\" = 0:0 ]"
    done
    check "process is not root outside" "uid $(awk '/^Uid/ { print $2 }' "/proc/$(process_of userns-a)/status")" \
        test "$(awk '/^Uid/ { print $2 }' "/proc/$(process_of userns-a)/status")" = "$(first_of_map userns-a)"
    becomes 60 "first pod of the node stays" stays
}
