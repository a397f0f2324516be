# A pod that leaks memory is evicted, and no other.

is_evicted() {
    of_pod "$1" '"\(.status.reason): \(.status.message)"'
    [ "$(of_pod "$1" .status.reason)" = Evicted ]
}

condition() {
    request GET /api/v1/nodes/$node | jq -r --arg type "$1" '.status.conditions[] | select(.type == $type) | "\(.type) \(.status) \(.reason)"'
    [ "$(request GET /api/v1/nodes/$node | jq -r --arg type "$1" '.status.conditions[] | select(.type == $type).status')" = "$2" ]
}

# shows_condition NAME: quintctl says since when the condition is true.
shows_condition() {
    quintctl pressure > /tmp/pressure && grep -E "^$1 +True, threshold last crossed|^$1 +True *\$" /tmp/pressure
}

refused() {
    of_pod "$1" '"\(.status.phase) \(.status.reason): \(.status.message)"' > /tmp/refused
    cat /tmp/refused
    grep -qF 'Failed Evicted: Pod was rejected: The node had condition: [MemoryPressure]. ' /tmp/refused
}

run() {
    swapoff /swap
    pod neighbour "$(jq -nc --argjson c "$(script 'sleep 1000000' '{"resources": {"requests": {"memory": "32Mi"}, "limits": {"memory": "64Mi"}}}')" '{containers: [$c]}')"
    becomes 300 "neighbour runs" is_ready_pod neighbour
    neighbour=$(process_of neighbour)
    pod leak "$(jq -nc --argjson c "$(script 'i=0; while :; do head -c 16777216 /dev/zero > /leak/$i; i=$((i+1)); sleep 1; done' '{"volumeMounts": [{"name": "leak", "mountPath": "/leak"}]}')" '
        {containers: [$c], volumes: [{name: "leak", emptyDir: {medium: "Memory"}}]}')"
    becomes 600 "pod that leaks memory is evicted" is_evicted leak
    becomes 60 "Node has MemoryPressure" condition MemoryPressure True
    becomes 60 "quintctl pressure shows the condition" shows_condition MemoryPressure
    pod late "$(jq -nc --argjson c "$(script 'sleep 1000000')" '{containers: [$c]}')"
    becomes 60 "a besteffort pod is refused meanwhile" refused late
    becomes 600 "MemoryPressure ends" condition MemoryPressure False
    check "neighbour stays" "pid $neighbour" test -n "$neighbour" -a "$(process_of neighbour)" = "$neighbour"
    becomes 60 "first pod stays" stays
    swapon /swap
}
