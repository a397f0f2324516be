# Huge pages: a resource of the Node, limits of a pod and its container, and a volume.

has_pages() {
    request GET /api/v1/nodes/$node | jq -r '.status | "\(.capacity["hugepages-2Mi"]) of \(.allocatable["hugepages-2Mi"])"'
    [ "$(request GET /api/v1/nodes/$node | jq -r '.status.capacity["hugepages-2Mi"]')" = "$1" ]
}

is_huge() {
    grep " /huge " "/proc/$(process_of huge)/mountinfo" | grep -o 'hugetlbfs.*'
}

run() {
    echo 16 > /proc/sys/vm/nr_hugepages
    check "machine has huge pages" "$(cat /proc/sys/vm/nr_hugepages)" test "$(cat /proc/sys/vm/nr_hugepages)" = 16
    # Sizes and numbers are read at the start.
    systemctl restart quintlet-pod-sync
    becomes 300 "Node has the huge pages" has_pages 32Mi
    pod huge "$(jq -nc --argjson c "$(script 'sleep 1000000' '{"resources": {"limits": {"hugepages-2Mi": "8Mi", "memory": "32Mi", "cpu": "50m"}}, "volumeMounts": [{"name": "huge", "mountPath": "/huge"}]}')" '
        {containers: [$c], volumes: [{name: "huge", emptyDir: {medium: "HugePages"}}]}')"
    pod small "$(jq -nc --argjson c "$(script 'sleep 1000000' '{"resources": {"limits": {"memory": "32Mi", "cpu": "50m"}}}')" '{containers: [$c]}')"
    becomes 300 "pod with huge pages runs" is_ready_pod huge
    scope=$(scope_of huge)
    becomes 10 "hugetlb.2MB.max of its container" has "$scope/hugetlb.2MB.max" 8388608
    becomes 10 "hugetlb.2MB.max of the pod" has "$(dirname "$scope")/hugetlb.2MB.max" 8388608
    becomes 10 "its volume is of huge pages" is_huge
    becomes 300 "pod without huge pages runs" has_container small
    becomes 10 "hugetlb.2MB.max of another pod is 0" has "$(dirname "$(scope_of small)")/hugetlb.2MB.max" 0
    tidy
    echo 0 > /proc/sys/vm/nr_hugepages
    systemctl restart quintlet-pod-sync
    becomes 300 "Node has no huge pages after a restart" has_pages 0
    becomes 60 "first pod stays" stays
}
