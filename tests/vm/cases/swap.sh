# LimitedSwap: Burstable pods that are not critical swap a share of the swap that is their share of the memory.

run() {
    swap=$(($(sed -n 's/^SwapTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo) * 1024))
    pod burstable "$(jq -nc --argjson c "$(script 'sleep 1000000' '{"resources": {"requests": {"memory": "128Mi"}, "limits": {"memory": "256Mi"}}}')" '{containers: [$c]}')"
    pod guaranteed "$(jq -nc --argjson c "$(script 'sleep 1000000' '{"resources": {"limits": {"memory": "64Mi", "cpu": "50m"}}}')" '{containers: [$c]}')"
    pod besteffort "$(jq -nc --argjson c "$(script 'sleep 1000000')" '{containers: [$c]}')"
    becomes 300 "burstable container runs" has_container burstable
    share=$(awk "BEGIN { printf \"%d\", 134217728 / $memory * $swap }")
    becomes 10 "memory.swap.max of a burstable container is its share" near "$(scope_of burstable)/memory.swap.max" "$share"
    becomes 300 "guaranteed container runs" has_container guaranteed
    becomes 10 "memory.swap.max of a guaranteed container is 0" has "$(scope_of guaranteed)/memory.swap.max" 0
    becomes 10 "memory.min of a guaranteed container is its request" has "$(scope_of guaranteed)/memory.min" 67108864
    becomes 10 "memory.high of a guaranteed container is not set" has "$(scope_of guaranteed)/memory.high" max
    becomes 300 "besteffort container runs" has_container besteffort
    becomes 10 "memory.swap.max of a besteffort container is 0" has "$(scope_of besteffort)/memory.swap.max" 0
    becomes 120 "Node reports its swap" swap_of_node "$swap"
}

swap_of_node() {
    request GET /api/v1/nodes/$node | jq -r .status.nodeInfo.swap.capacity
    [ "$(request GET /api/v1/nodes/$node | jq -r .status.nodeInfo.swap.capacity)" = "$1" ]
}
