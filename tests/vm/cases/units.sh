# Every unit starts hardened, and each service has what it needs and no more.

sees_no_identity() {
    [ -z "$(nsenter -m -t "$(property "$1" MainPID)" cat /etc/quintlet/kubeconfig 2> /dev/null)" ]
}

# The check above can fail: a service with the identity sees it.
sees_identity() {
    ! sees_no_identity "$1"
}

same_mounts() {
    [ "$(readlink "/proc/$(property pod-sync MainPID)/ns/mnt")" = "$(readlink /proc/1/ns/mnt)" ]
}

run() {
    for unit in $units; do
        becomes 180 "$unit starts hardened" is_active "$unit"
        pid=$(property "$unit" MainPID)
        check "$unit runs under seccomp" "" grep -q '^Seccomp:.*2' "/proc/$pid/status"
        check "$unit leaves no core file" "" grep -Eq '^Max core file size +0 +0 ' "/proc/$pid/limits"
    done
    becomes 300 "quintctl health: all serve" quintctl health
    check "pod-sync mounts where the runtime sees it" "" same_mounts
    for unit in cri-proxy pleg-service probe-service; do
        check "$unit does not see the node's kubeconfig" "" sees_no_identity $unit
    done
    check "status-reporter sees the node's kubeconfig" "" sees_identity status-reporter
}
