# The loss of power in a burst of pods: run.sh ends the machine by SIGKILL at random points. After each, the node boots and runs the pods of its
# manifests, and nothing exists twice. What the machine had written is on its disk; what it had not is lost.

changing="one two three"

# manifest NAME NUMBER: a static pod, replaced by each call: its variable differs.
manifest() {
    jq -nc --arg name "$1" --argjson c "$(script "trap 'exit 0' TERM; while :; do sleep 1 & wait; done" "{\"env\": [{\"name\": \"NUMBER\", \"value\": \"$2\"}]}")" \
        '{apiVersion: "v1", kind: "Pod", metadata: {name: $name}, spec: {terminationGracePeriodSeconds: 1, containers: [$c]}}' > $state/manifest
    mv $state/manifest "$manifests/$1.yaml"
}

# runs_manifest NAME: its pod is Ready with what the file says now.
runs_manifest() {
    is_ready_pod "$1-$node" || return 1
    number=$(inside "$1-$node" 'echo $NUMBER')
    echo "runs number $number of $(jq -r '.spec.containers[0].env[0].value' "$manifests/$1.yaml")"
    [ "$number" = "$(jq -r '.spec.containers[0].env[0].value' "$manifests/$1.yaml")" ]
}

# running: a line per running container of the runtime: pod, container, "sandbox" for that of a sandbox.
running() {
    ctr -n k8s.io tasks ls | while read -r id pid status; do
        [ "$status" != RUNNING ] || ctr -n k8s.io containers info "$id" | jq -r '.Labels | "\(.["io.kubernetes.pod.name"]) \(.["io.kubernetes.container.name"] // "sandbox")"'
    done | sort > $state/running
}

# exactly_once: two tasks run for each static pod, and none else.
exactly_once() {
    for name in vm $changing; do echo "$name-$node main"; echo "$name-$node sandbox"; done | sort > /tmp/wanted
    running
    diff /tmp/wanted $state/running > /tmp/differ && { echo "$(wc -l < $state/running) tasks"; return; }
    grep '^[<>]' /tmp/differ | xargs
    return 1
}

# addresses: each pod has its own.
addresses() {
    objects pods | jq -r '.items[].status.podIP' | sort > /tmp/addresses
    xargs < /tmp/addresses
    [ "$(uniq -d < /tmp/addresses)" = "" ]
}

# Pods of the API server come and go, and those of the manifests change, until the power is cut.
burst() {
    echo power > $state/reboots
    sync
    echo "armed|$boots" > $result
    round=0
    while :; do
        round=$((round + 1))
        for each in 1 2 3; do pod "burst-$round-$each" "$(jq -nc --argjson c "$(script 'sleep 100000')" '{containers: [$c]}')"; done
        for name in $changing; do manifest "$name" "$boots-$round"; done
        [ $round = 1 ] || for each in 1 2 3; do request DELETE "/api/v1/namespaces/default/pods/burst-$((round - 1))-$each" > /dev/null; done
        sleep 5
    done
}

run() {
    for name in $changing; do manifest "$name" 0; done
    for name in $changing; do becomes 300 "pod of the manifest $name runs" runs_manifest "$name"; done
    becomes 300 "each exists once" exactly_once
    burst
}

rebooted() {
    cut=$((boots - 1))
    becomes 600 "cut $cut: the services start" quintctl health
    for name in $changing; do becomes 600 "cut $cut: pod of the manifest $name runs" runs_manifest "$name"; done
    becomes 600 "cut $cut: the first pod is Ready" is_ready_pod "vm-$node"
    becomes 300 "cut $cut: each exists once, and no other pod" exactly_once
    check "cut $cut: each has its own address" "$(addresses)" addresses
    process_of "vm-$node" > $state/process
    [ "$cut" -ge "$(cat $here/kills)" ] || burst
}
