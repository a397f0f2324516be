# Pods that use too much, one after the other. The first pod must not notice.

is_throttled() {
    sed -n 's/^high //p' "$1/memory.events" && [ "$(sed -n 's/^high //p' "$1/memory.events")" -gt 0 ]
}

is_killed() {
    quintctl explain "$1" > /tmp/explained
    grep -m 1 -o 'OOMKilled.*' /tmp/explained
}

is_bounded() {
    scope=$(scope_of forks-$node forks)
    pod=$(dirname "$scope")
    echo "$(cat "$pod/pids.current") of $(cat "$pod/pids.max") processes"
    [ "$(cat "$pod/pids.max")" = 60 ] && [ "$(cat "$pod/pids.current")" = 60 ]
}

run() {
    cp $here/pods/throttled.yaml $manifests/
    becomes 300 "burstable container runs" has_container throttled-$node throttled
    scope=$(scope_of throttled-$node throttled)
    becomes 10 "memory.max is its limit" has "$scope/memory.max" 134217728
    # 64Mi + 0.5 * (128Mi - 64Mi)
    becomes 10 "memory.high is between request and limit" has "$scope/memory.high" 100663296
    becomes 10 "memory.low is its request" has "$scope/memory.low" 67108864
    # Static pods are critical, and critical pods do not swap.
    becomes 10 "memory.swap.max of a static pod is 0" has "$scope/memory.swap.max" 0
    becomes 10 "memory.low of burstable pods is their request" has $pods/kubepods-burstable.slice/memory.low 67108864
    # Half of the request is reserved.
    becomes 60 "memory.max of besteffort pods leaves half of it" near $pods/kubepods-besteffort.slice/memory.max $((memory - 268435456 - 33554432))
    becomes 300 "memory above memory.high is throttled" is_throttled "$scope"
    rm $manifests/throttled.yaml

    cp $here/pods/oom.yaml $manifests/
    becomes 300 "container above its limit is OOMKilled" is_killed oom-$node
    rm $manifests/oom.yaml

    cp $here/pods/forks.yaml $manifests/
    becomes 300 "fork bomb is bounded by podPidsLimit" is_bounded
    rm $manifests/forks.yaml
    becomes 300 "first pod stays beside the others" stays
}
