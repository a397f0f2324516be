# Functions of the cases. Rows of the result go to the second serial line.

result=/dev/ttyS1
units="cri-proxy pleg-service probe-service status-reporter node-api pod-sync"
api=http://127.0.0.1:8081
[ ! -d $here/packages ] || api=https://127.0.0.1:8081
node=quintlet-vm
manifests=/etc/kubernetes/manifests
cgroups=/sys/fs/cgroup
pods=$cgroups/kubepods.slice
memory=$(($(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo) * 1024))

# row NAME ok|FAILED DETAIL
row() {
    echo "row|$1|$2|$3" | tr '\n' ' ' > $result
    echo > $result
    echo "== $1: $2 $3"
    [ "$2" = ok ] || touch $state/failed
}

# check NAME DETAIL COMMAND...: a row that is ok when the command succeeds.
check() {
    # The variables of cases are in the same shell.
    row_of_check=$1 detail_of_check=$2
    shift 2
    if "$@"; then row "$row_of_check" ok "$detail_of_check"; else row "$row_of_check" FAILED "$detail_of_check"; fi
}

# until_true SECONDS COMMAND...: waits for the command to succeed.
until_true() {
    limit=$(($(cut -d . -f 1 /proc/uptime) + $1))
    shift
    until "$@" > /tmp/last 2>&1; do
        [ "$(cut -d . -f 1 /proc/uptime)" -lt "$limit" ] || return 1
        sleep 0.5
    done
}

# becomes SECONDS NAME COMMAND...: a row that is ok once the command succeeds, with the last line of what it printed. Commands are
# not repeated for the row: on a slow machine the next result may be late again.
becomes() {
    limit_of_row=$1 row_of_wait=$2
    shift 2
    verdict=ok
    until_true "$limit_of_row" "$@" || verdict=FAILED
    row "$row_of_wait" $verdict "$(tail -n 1 /tmp/last | tr '|' ' ')"
}

# Ends the machine, with logs if a row failed.
end() {
    if [ -e $state/failed ]; then
        {
            systemctl --no-pager --full status 'quintlet-*' kubelet containerd
            quintctl health
            quintctl pods
            objects events | jq -r '.items[] | "\(.involvedObject.name) \(.reason) \(.message)"' | tail -n 80
            journalctl --no-pager -o short-monotonic -u 'quintlet-*' -u kubelet -n 400
        } 2>&1 | grep -v '^$' | sed 's/^/log|/' > $result
        echo 'end|FAILED' > $result
    else
        echo 'end|ok' > $result
    fi
    # Waits until the serial lines are written.
    sleep 1
    sync
    systemctl poweroff --force --force
}

property() {
    systemctl show -P "$2" "quintlet-$1.service"
}

is_active() {
    [ "$(property "$1" ActiveState)" = active ] && echo "user $(property "$1" User), pid $(property "$1" MainPID)"
}

# has FILE VALUE: the file has this value.
has() {
    echo "$(cat "$1") in $1, want $2"
    [ "$(cat "$1")" = "$2" ]
}

# near FILE VALUE: the file has this value or one up to a page below.
near() {
    echo "$(cat "$1") in $1, want about $2"
    [ "$(cat "$1")" -le "$2" ] && [ "$(cat "$1")" -ge "$(($2 - 4096))" ]
}

# request METHOD PATH [BODY]: a request to the API server; prints the reply, fails if it is an error.
request() {
    kind=application/json
    [ "$1" != PATCH ] || kind=application/merge-patch+json
    curl -sS --insecure --fail-with-body --max-time 60 -X "$1" -H "content-type: $kind" "$api$2" ${3:+--data-binary "$3"}
}

# create FILE: creates the objects of a JSON file with a list of {path, object}.
create() {
    jq -c '.[]' "$1" | while read -r each; do
        request POST "$(echo "$each" | jq -r .path)" "$(echo "$each" | jq -c .object)" > /dev/null || return 1
    done
}

# pod NAME SPEC: creates a pod of this node with the fields of SPEC.
pod() {
    request POST /api/v1/namespaces/default/pods "$(jq -nc --arg name "$1" --argjson spec "$2" --arg node $node '
        {apiVersion: "v1", kind: "Pod", metadata: {name: $name, namespace: "default"},
         spec: ({nodeName: $node, terminationGracePeriodSeconds: 1, automountServiceAccountToken: false} + $spec)}')" > /dev/null
}

# script COMMAND [FIELDS]: a container that runs a command of the shell.
script() {
    jq -nc --arg command "$1" --argjson more "${2:-{\}}" '
        {name: "main", image: "localhost/busybox:1", imagePullPolicy: "IfNotPresent", command: ["sh", "-c", $command]} + $more'
}

# objects RESOURCE: a list of the namespace default.
objects() {
    request GET "/api/v1/namespaces/default/$1"
}

# of_pod NAME FILTER: a value of a pod.
of_pod() {
    request GET "/api/v1/namespaces/default/pods/$1" | jq -r "$2"
}

is_ready_pod() {
    of_pod "$1" '[(.status.conditions[]? | select(.type == "Ready").status), .status.phase, .status.reason, (.status.containerStatuses[]?.state | tostring)] | join(" ")' > /tmp/ready
    cat /tmp/ready
    grep -q '^True ' /tmp/ready
}

# waits_with NAME REASON: a container of the pod waits with this reason.
waits_with() {
    of_pod "$1" '.status.containerStatuses[0].state.waiting | "\(.reason): \(.message)"'
    [ "$(of_pod "$1" '.status.containerStatuses[0].state.waiting.reason')" = "$2" ]
}

has_event() {
    objects events | jq -r --arg name "$1" --arg reason "$2" '.items[] | select(.involvedObject.name == $name and .reason == $reason).message' | grep . | tail -n 1 > /tmp/event
    cat /tmp/event
    [ -s /tmp/event ]
}

# has_devices RESOURCE COUNT: the Node has so many devices, all healthy.
has_devices() {
    request GET /api/v1/nodes/$node | jq -r --arg r "$1" '.status | "\(.capacity[$r]) of \(.allocatable[$r])"' | tee /tmp/devices
    grep -qx "$2 of $2" /tmp/devices
}

# The ID of a running container of a pod: container POD [NAME]
container() {
    ctr -n k8s.io containers ls -q "labels.io.kubernetes.pod.name==$1,labels.io.kubernetes.container.name==${2:-main}" | while read -r id; do
        ctr -n k8s.io tasks ls | while read -r task pid status; do
            [ "$task" != "$id" ] || [ "$status" != RUNNING ] || echo "$id $pid"
        done
    done
}

process_of() {
    set -- $(container "$@")
    echo "${2:-}"
}

# inside POD COMMAND: runs a command of the shell in the container main.
inside() {
    set -- "$1" "$2" $(container "$1")
    ctr -n k8s.io tasks exec --exec-id "vm-$$-$(cut -d ' ' -f 1 /proc/uptime)" "${3:-none}" sh -c "$2"
}

# The cgroup of a container: scope_of POD [NAME]
scope_of() {
    set -- "$(process_of "$@")"
    [ -n "$1" ] && echo "$cgroups$(sed -n 's/^0:://p' "/proc/$1/cgroup")"
}

has_container() {
    scope=$(scope_of "$@")
    test -n "$scope" && echo "$scope"
}

# delete_pods: deletes all pods of the API server and waits until they are gone.
no_pods() {
    objects pods | jq -r '[.items[] | select(.metadata.annotations["kubernetes.io/config.source"] != "file").metadata.name] | join(" ")' > /tmp/names
    cat /tmp/names
    ! grep -q . /tmp/names
}

tidy() {
    objects pods | jq -r '.items[] | select(.metadata.annotations["kubernetes.io/config.mirror"] == null).metadata.name' | while read -r name; do
        request DELETE "/api/v1/namespaces/default/pods/$name" > /dev/null
    done
    for name in $(ls $manifests | grep -vx vm.yaml); do rm "$manifests/$name"; done
    until_true 300 only_the_first || row "pods of the case are gone" FAILED "$(tail -n 1 /tmp/last)"
}

only_the_first() {
    quintctl pods > /tmp/pods && grep -E '^[^ ]+ +[0-9]+/[0-9]+ ' /tmp/pods | grep -v '^vm-quintlet-vm ' > /tmp/others
    tr '\n' ' ' < /tmp/others
    ! grep -q . /tmp/others
}

# The first pod: Ready, never restarted, with its first process.
is_ready() {
    quintctl pods > /tmp/pods && grep -E '^vm-quintlet-vm +1/1 +Running +0 ' /tmp/pods
}

stays() {
    is_ready && [ -s $state/process ] && [ "$(process_of vm-quintlet-vm)" = "$(cat $state/process)" ]
}
