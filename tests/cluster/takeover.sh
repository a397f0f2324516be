#!/bin/sh
# Exchanges the agent of a node with pods of many kinds, from a kubelet to Quintlet and back, and restarts both. Fails if a pod changes by it, if a
# container is created, or if what the kubelet made is not removed by Quintlet at the end. Not part of `make test`, since it needs programs of Kubernetes:
#
#   KUBERNETES=DIR  a folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl
#   BIN_DIR=DIR     directory of the built services (target/quick)
#   CSI_DRIVER=FILE the CSI driver of the tests (target/debug/csi-driver)
#   CONTAINERD=FILE the node's containerd (that of PATH); one of 2.1 and later also has a pod with an image as a volume
#   WORK=DIR        a folder for all files, which is left in place (default: a temporary one)
#
# Needs root, openssl, containerd, CNI plugins, busybox-static, bash, curl, cc and python3. It runs in network and mount namespaces of its own.
repo=$(cd "$(dirname "$0")/../.." && pwd)
. "$repo/tests/cluster/preamble.sh"
driver=${CSI_DRIVER:-$repo/target/debug/csi-driver}
[ -z "${CONTAINERD:-}" ] || PATH=$(dirname "$CONTAINERD"):$PATH
need openssl containerd busybox bash curl cc python3

# fail WHAT: ends the test with what is of use after a failure.
fail() {
    say "failed: $*"
    kubectl get pods -A -o wide >&2 || true
    tail -n 40 "$work/logs/agent.log" >&2 || true
    exit 1
}

# agent PROGRAM...: starts an agent with the node's command line, which is that of a kubelet.
agent() {
    start agent "$@" --config "$work/host/kubelet.yaml" --kubeconfig "$work/host/node.conf" --hostname-override taken --root-dir "$root" \
        --cert-dir "$root/pki" --node-ip "$address"
    wait_for 60 kubectl wait --for=condition=Ready node/taken --timeout=1s
}

# mark AGENT PHASE: what comes next in the watch belongs to this phase.
mark() {
    echo "$(stat -L -c %s "$work/watch") $1 $2" >> "$work/marks"
}

# exchange PHASE AGENT: ends the agent, starts the other one, and lets it work.
exchange() {
    say "$1"
    end "$pid_agent"
    # The last writes of the former agent are its own.
    sleep 1
    mark "$2" "$1"
    mv "$work/logs/agent.log" "$work/logs/agent-before-$1.log"
    case $2 in
        kubelet) agent "$kubernetes/kubelet" ;;
        quintlet) agent "$bin_dir/quintlet" kubelet --log-dir "$work/logs/$1" ;;
    esac
    sleep "${SETTLE:-60}"
    [ "$(kubectl exec volumes -- cat /settings/color)" = blue ] || fail "$1: exec"
    ! has_image_volumes || kubectl exec image-volume -- /image/bin/busybox true || fail "$1: exec in an image volume"
    kubectl logs web-probe > /dev/null || fail "$1: logs"
    has_session || fail "$1: the session of the runtime has ended"
    containers > "$work/containers-$1"
    same_containers "$work/containers" "$work/containers-$1" || fail "$1: other containers"
}

# open_session: runs a command in a container through the runtime alone, as an operator with crictl or a debugger does.
open_session() {
    containers > "$work/containers"
    session=$(sed -n 's/ web-probe web-probe RUNNING$//p' "$work/containers")
    ctr --address "$runtime" -n k8s.io tasks exec --detach --exec-id session "$session" sleep 100000
}

has_session() {
    ctr --address "$runtime" -n k8s.io tasks ps "$session" | grep -q session
}

# has_image_volumes: the runtime mounts images as volumes.
has_image_volumes() {
    [ "$(printf '%s\n2.1\n' "$(containerd --version | awk '{ print $3 }' | tr -d v)" | sort -V | head -n 1)" = 2.1 ]
}

# containers: the containers of the runtime with their state, without those of pods that change by themselves.
containers() {
    ctr --address "$runtime" -n k8s.io tasks list > "$work/tasks"
    touch "$work/names"
    ctr --address "$runtime" -n k8s.io containers list -q | sort > "$work/ids"
    # The names of a container do not change, and a process for each takes its time.
    cut -d ' ' -f 1 "$work/names" | sort | comm -13 - "$work/ids" | while read -r id; do
        # One may be removed meanwhile.
        ctr --address "$runtime" -n k8s.io containers info "$id" 2> /dev/null | python3 -c '
import json, sys
info = sys.stdin.read()
labels = json.loads(info)["Labels"] if info else sys.exit()
print(sys.argv[1], labels.get("io.kubernetes.pod.name"), labels.get("io.kubernetes.container.name", "sandbox"))' "$id"
    done >> "$work/names"
    python3 - "$work/names" "$work/ids" "$work/tasks" <<'PYTHON'
import sys
names, ids, tasks = (open(path).read().splitlines() for path in sys.argv[1:])
names = dict(line.split(maxsplit=1) for line in names)
running = {task.split()[0] for task in tasks if task.split()[2:] == ["RUNNING"]}
for id in ids:
    pod, name = names.get(id, " ").split(" ")
    if name and (pod not in ("crashing", "no-image", "no-settings") or name == "sandbox"):
        print(id, pod, name, "RUNNING" if id in running else "ENDED")
PYTHON
}

# same_containers BEFORE AFTER: none was created, and those that ran still run. What has ended may be removed.
same_containers() {
    created=$(cut -d ' ' -f 1 "$1" | grep -v -F -f - "$2" || true)
    ended=$(grep RUNNING "$1" | grep -v -x -F -f "$2" || true)
    [ -z "$created$ended" ] || { say "created: $created"; say "ended: $ended"; return 1; }
}

# settled: all pods are as they stay.
settled() {
    kubectl wait --for=jsonpath='{.status.readyReplicas}'=3 --timeout=1s deployment/web || return 1
    kubectl wait --for=jsonpath='{.status.readyReplicas}'=2 --timeout=1s statefulset/db || return 1
    kubectl wait --for=jsonpath='{.status.numberReady}'=1 --timeout=1s daemonset/agent || return 1
    kubectl wait --for=condition=Complete job/done --timeout=1s || return 1
    kubectl wait --for=condition=Failed job/failed --timeout=1s || return 1
    kubectl wait --for=condition=Ready --timeout=15s pod/sidecar pod/restarted pod/resized pod/debugged pod/host-port pod/volumes pod/csi \
        pod/secured pod/guaranteed pod/pod-level pod/terminating pod/stopping-hook pod/finalizer pod/web-probe pod/plain-taken || return 1
    kubectl wait --for=condition=Ready --timeout=1s -n kube-system pod/etcd-taken || return 1
    kubectl get pods | grep -q '^never .*1/2 ' || return 1
    kubectl get pods | grep -q '^half-done .*1/2 ' || return 1
    kubectl get pods | grep -q '^unready .*1/2 .*Running' || return 1
    kubectl get pods | grep -q '^rejected .*NodeAffinity' || return 1
    kubectl get pods | grep -q '^waiting-init .*Init:0/1' || return 1
    ! has_image_volumes || kubectl wait --for=condition=Ready --timeout=1s pod/image-volume || return 1
}

# nothing_left: neither in the API server, nor in the runtime, nor on the disk.
nothing_left() {
    [ -z "$(kubectl get pods -A -o name)" ] || { kubectl get pods -A; return 1; }
    [ -z "$(ctr --address "$runtime" -n k8s.io containers list -q)" ] || { ctr --address "$runtime" -n k8s.io containers list; return 1; }
    [ -z "$(ls "$root/pods")" ] || { find "$root/pods"; return 1; }
    [ -z "$(ls /var/log/pods)" ] || { find /var/log/pods; return 1; }
    ! grep "$root/p[lo][ud]" /proc/mounts || return 1
}

make_machine
say "control plane"
start_control_plane
prepare_node taken
root=$work/host/kubelet
mkdir -p "$root" "$work/host/manifests" /var/lib/local-volume
make_layers
stand_ins registry.k8s.io/pause:3.10 docker.io/library/busybox:1
ctr --address "$runtime" -n k8s.io images import "$work/images.tar" > "$work/logs/import.log"
cp "$repo"/tests/cluster/takeover/manifests/*.yaml "$work/host/manifests"
{
    for_kubelet
    echo "clusterDNS: [10.96.0.10]"
    echo "clusterDomain: cluster.local"
    echo "staticPodPath: $work/host/manifests"
} > "$work/host/kubelet.yaml"

say "pods of a kubelet"
start csi-driver "$driver" --root "$root" --state "$work/csi" --node-id node
agent "$kubernetes/kubelet"
kubectl apply -f "$repo/tests/cluster/takeover/pods.yaml" > "$work/logs/apply.log"
! has_image_volumes || kubectl apply -f "$repo/tests/cluster/takeover/image-volume.yaml" >> "$work/logs/apply.log"
kubectl run web-probe --image=busybox:1 --command -- sh -c 'echo started; exec sleep infinity'
wait_for 180 settled || fail "the pods do not settle"
kubectl patch pod resized --subresource resize -p '{"spec":{"containers":[{"name":"main","resources":{"requests":{"cpu":"70m"},"limits":{"cpu":"120m"}}}]}}'
kubectl debug debugged --image=busybox:1 --container=debugger -- sleep infinity
kubectl delete pod terminating stopping-hook finalizer --wait=false
wait_for 60 sh -c "$kubernetes/kubectl --kubeconfig $work/admin.conf get pod resized -o jsonpath='{.status.containerStatuses[0].resources.limits.cpu}' | grep -q 120m"
wait_for 60 sh -c "$kubernetes/kubectl --kubeconfig $work/admin.conf get pod debugged -o jsonpath='{.status.ephemeralContainerStatuses[0].state}' | grep -q running"
# Deleted pods stop to be Ready by then, and the crashing one waits for its back-off.
sleep "${SETTLE:-60}"
start watch "$kubernetes/kubectl" --kubeconfig "$work/admin.conf" get pods -A --watch --output-watch-events -o json
ln -s "$work/logs/watch.log" "$work/watch"
sleep 5
open_session
[ "$(wc -l < "$work/containers")" -gt 60 ] || fail "too few containers"
: > "$work/marks"
# The differences that a kubelet makes without a change of the agent.
exchange kubelet-restarts kubelet
exchange to-quintlet quintlet
exchange quintlet-restarts quintlet
exchange to-kubelet kubelet
exchange to-quintlet-again quintlet
exchange to-kubelet-again kubelet
exchange to-quintlet-for-good quintlet
# The watch has seen everything.
mark test end
kubectl annotate pod web-probe takeover=over
wait_for 20 grep -q '"takeover": *"over"' "$work/watch" || fail "the watch has ended"
python3 "$repo/tests/cluster/takeover/differences.py" "$work/watch" "$work/marks" || fail "pods changed"

say "all pods are deleted"
rm "$work"/host/manifests/*.yaml
kubectl patch pod finalizer --type=json -p '[{"op":"remove","path":"/metadata/finalizers"}]'
kubectl delete deployment,statefulset,daemonset,job --all --wait=false > /dev/null
kubectl delete pod --all --grace-period=2 --wait=false > /dev/null
wait_for 120 nothing_left || fail "something of the pods is left"
