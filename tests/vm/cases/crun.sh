# crun in place of runc, by a RuntimeClass: it needs a machine with cgroup v2 alone.

# runs_in RUNTIME POD: the container is that of this OCI runtime. Neither finds containers of the other.
runs_in() {
    set -- "$1" $(container "$2")
    "$1" --root /run/containerd/runc/k8s.io state "$2" | jq -c '[.status, .pid]' | tee /tmp/state
    [ "$(cat /tmp/state)" = "[\"running\",$3]" ]
}

# logs_of POD LINE: the log of the pod, through the API server and the node, is this line.
logs_of() {
    request GET "/api/v1/namespaces/default/pods/$1/log" | tee /tmp/log
    [ "$(cat /tmp/log)" = "$2" ]
}

# has_file POD FILE CONTENT: as a command in the container shows it, run by the node.
has_file() {
    request POST "/api/v1/nodes/$node/proxy/run/default/$1/main?cmd=cat%20$2" | tee /tmp/output
    [ "$(cat /tmp/output)" = "$3" ]
}

is_stopped() {
    of_pod "$1" '.status.containerStatuses[0] | "\(.restartCount) \(.lastState.terminated.exitCode)"' | tee /tmp/restarts
    grep -qx '1 3' /tmp/restarts
}

run() {
    request POST /apis/node.k8s.io/v1/runtimeclasses \
        '{"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "crun"}, "handler": "crun"}' > /dev/null
    mount='{"volumeMounts": [{"name": "work", "mountPath": "/work"}]}'
    probe='{"readinessProbe": {"exec": {"command": ["test", "-e", "/work/ready"]}, "periodSeconds": 5, "timeoutSeconds": 60, "failureThreshold": 100}}'
    limits='{"resources": {"requests": {"cpu": "100m", "memory": "32Mi"}, "limits": {"cpu": "500m", "memory": "64Mi"}}}'
    pod crun "$(jq -nc --argjson init "$(script 'echo prepared > /work/init' "$mount" | jq -c '.name = "init"')" \
        --argjson main "$(script "trap 'exit 0' TERM; echo started; sleep 1; touch /work/ready; until [ -e /work/exit ]; do sleep 1 & wait; done; rm /work/exit; exit 3" "$mount")" \
        --argjson probe "$probe" --argjson limits "$limits" '
        {runtimeClassName: "crun", initContainers: [$init], containers: [$main + $probe + $limits], volumes: [{name: "work", emptyDir: {}}]}')"
    becomes 300 "a pod with an init container and an exec probe is Ready with crun" is_ready_pod crun
    becomes 30 "its container runs in crun" runs_in crun crun
    becomes 30 "that of the first pod in runc" runs_in runc "vm-$node"
    becomes 30 "the init container's file is there for exec" has_file crun /work/init prepared
    becomes 30 "the log has its line" logs_of crun started
    check "memory.max of the container" "" has "$(scope_of crun)/memory.max" $((64 << 20))
    check "cpu.max of the container" "" has "$(scope_of crun)/cpu.max" "50000 100000"
    inside crun 'rm /work/ready; touch /work/exit'
    becomes 120 "a container that fails starts again" is_stopped crun
    becomes 120 "the pod is Ready again" is_ready_pod crun
    becomes 60 "summary has its memory" has_memory crun
    request DELETE /api/v1/namespaces/default/pods/crun > /dev/null
    becomes 120 "the pod terminates" has_no_pod crun
    request DELETE /apis/node.k8s.io/v1/runtimeclasses/crun > /dev/null
}

has_no_pod() {
    objects pods | jq -r --arg name "$1" '.items[] | select(.metadata.name == $name).metadata.name' | tee /tmp/left
    [ ! -s /tmp/left ]
}

has_memory() {
    request GET "/api/v1/nodes/$node/proxy/stats/summary" | jq --arg name "$1" '.pods[] | select(.podRef.name == $name).containers[0].memory.workingSetBytes' | tee /tmp/memory
    [ "$(cat /tmp/memory)" -gt 0 ]
}
