#!/bin/sh
# Runs pods with devices on a node of Quintlet, and kills each service 20 times with SIGKILL while other such pods come and go. The device plugin
# and the DRA driver are those of the Kubernetes project. Fails if a pod with a device changes, if a device is given to two pods, or if a device
# stays prepared without a pod. Not part of `make test`, since it needs programs of Kubernetes:
#
#   KUBERNETES=DIR  a folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubectl, sample-device-plugin (built from
#                   test/images/sample-device-plugin) and dra-test-driver (built from test/e2e/dra/test-driver)
#   BIN_DIR=DIR     directory of the built services (target/quick)
#   WORK=DIR        a folder for all files, which is left in place (default: a temporary one)
#   ROUNDS=NUMBER   kills of each service (20)
#
# Needs root, openssl, containerd, CNI plugins, busybox-static, bash, curl, cc and python3. It runs in network and mount namespaces of its own.
repo=$(cd "$(dirname "$0")/../.." && pwd)
. "$repo/tests/cluster/preamble.sh"
need openssl containerd busybox bash curl cc python3
# The plugin makes a file for each device below /tmp.
at_end() {
    rm -f /tmp/Dev-1 /tmp/Dev-2
}
root=$work/host/quintlet/root
services="pod-sync cri-proxy pleg-service probe-service status-reporter node-api"

# fail WHAT: ends the test with what is of use after a failure.
fail() {
    say "failed: $*"
    kubectl get pods,resourceclaims -o wide >&2 || true
    kubectl get events --sort-by=.lastTimestamp 2> /dev/null | tail -n 20 >&2 || true
    ls "$work/cdi" >&2 || true
    tail -n 20 "$work/logs/quintlet.log" >&2 || true
    exit 1
}

# service NAME: its process.
service() {
    pgrep -P "$pid_quintlet" -x "$1"
}

# is_new NAME PROCESS: the service has another process than this one.
is_new() {
    now=$(service "$1") && [ "$now" != "$2" ]
}

# kill_service NAME: by SIGKILL, and waits for the next process.
kill_service() {
    process=$(service "$1")
    kill -KILL "$process"
    wait_for 60 is_new "$1" "$process" || fail "$1 does not run again"
}

# keepers: the pods that stay, with their containers and restarts.
keepers() {
    kubectl get pods -l role=keeper -o jsonpath='{range .items[*]}{.metadata.name} {.metadata.uid} {.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}{"\n"}{end}'
}

# unchanged WHEN: they are as they were, and Ready.
unchanged() {
    now=$(keepers)
    [ "$before" = "$now" ] || fail "pods changed $1: before $before, now $now"
}
ready() {
    kubectl wait --for=condition=Ready pods -l role=keeper --timeout=1s
}

# settled: every pod that comes and goes is Ready, and none is being deleted.
settled() {
    for name in claims device; do
        kubectl rollout status "deployment/$name" --timeout=1s || return 1
    done
    [ "$(kubectl get pods -l role=guest -o name | wc -l)" = 4 ] || return 1
    kubectl wait --for=condition=Ready pods -l role=guest --timeout=1s || return 1
}

# distinct WHAT FILE: no line of a file stands twice in it.
distinct() {
    [ -z "$(sort "$2" | uniq -d)" ] || fail "$1 twice: $(cat "$2")"
}

# has_log POD: prints the log of a pod, which has a line.
has_log() {
    kubectl logs "$1" | grep .
}

# no_device_twice: as the containers see their devices, as the API server has their claims, and as the node has recorded them.
no_device_twice() {
    for pod in $(kubectl get pods -l uses=device -o name); do
        wait_for 30 has_log "$pod" || fail "no log of $pod"
        cat "$work/last"
    done > "$work/devices"
    [ "$(wc -l < "$work/devices")" = 2 ] || fail "not two devices: $(cat "$work/devices")"
    distinct "a device" "$work/devices"
    kubectl get resourceclaims -o jsonpath='{range .items[*]}{.status.allocation.devices.results[*].device}{"\n"}{end}' > "$work/allocated"
    distinct "an allocated device" "$work/allocated"
    wait_for 60 recorded 2 "$(wc -l < "$work/allocated")" || fail "not as many claims are recorded as are allocated"
}

# prepared COUNT: the driver has a file for each claim that it has prepared. A driver that has restarted leaves the earlier ones.
prepared() {
    files=$(find "$work/cdi" -name '*.json' | wc -l)
    echo "$files files"
    [ "$files" = "$1" ]
}

# recorded DEVICES CLAIMS: entries in the two checkpoints.
recorded() {
    python3 - "$root" "$1" "$2" <<'PYTHON'
import json, sys
root, devices, claims = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held = json.load(open(f"{root}/device-plugins/kubelet_internal_checkpoint"))["Data"]["PodDeviceEntries"] or []
prepared = json.loads(json.load(open(f"{root}/dra_manager_state"))["Data"])["ClaimInfoStateList"] or []
print([entry["PodUID"] for entry in held], [(claim["ClaimName"], list(claim["PodUIDs"])) for claim in prepared])
sys.exit(0 if (len(held), len(prepared)) == (devices, claims) else 1)
PYTHON
}

start_plugins() {
    start device-plugin "$kubernetes/sample-device-plugin"
    start driver "$kubernetes/dra-test-driver" --kubeconfig "$work/admin.conf" -v 4 kubelet-plugin --node-name node --cdi-dir "$work/cdi" \
        --plugin-registration-path "$root/plugins_registry" --datadir "$root/plugins" --num-devices 8
}

make_machine
say "control plane"
start_control_plane
say "a node with Quintlet"
# The plugin registers at the kubelet's own path.
# The driver makes its socket in a folder of its own.
mkdir -p "$root/plugins/test-driver.cdi.k8s.io" "$work/cdi"
ln -s "$root" /var/lib/kubelet
start_quintlet_node node
make_layers
stand_ins registry.k8s.io/pause:3.10 docker.io/library/busybox:1
ctr --address "$runtime" -n k8s.io images import "$work/images.tar" > "$work/logs/import.log"

say "device plugin and DRA driver"
wait_for 30 test -S /var/lib/kubelet/device-plugins/kubelet.sock
start_plugins
cat > "$work/objects.yaml" <<'YAML'
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: { name: example }
spec: { selectors: [{ cel: { expression: device.driver == "test-driver.cdi.k8s.io" } }] }
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: { name: one }
spec: { spec: { devices: { requests: [{ name: device, exactly: { deviceClassName: example } }], config: [{ opaque: { driver: test-driver.cdi.k8s.io, parameters: { a: b } } }] } } }
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: { name: shared }
spec: { devices: { requests: [{ name: device, exactly: { deviceClassName: example } }], config: [{ opaque: { driver: test-driver.cdi.k8s.io, parameters: { a: b } } }] } }
YAML
# pod_spec DEVICE|CLAIM: of a pod that stays until it is ended.
pod_spec() {
    claim=
    uses='claims: [{ name: c }]'
    case $1 in
        device) uses='limits: { example.com/resource: 1 }' ;;
        shared) claim='{ name: c, resourceClaimName: shared }' ;;
        template) claim='{ name: c, resourceClaimTemplateName: one }' ;;
    esac
    cat <<YAML
{ terminationGracePeriodSeconds: 1, resourceClaims: [$claim], containers: [{ name: main, image: "busybox:1",
  command: [sh, -c, "trap 'exit 0' TERM; ls /tmp; while :; do sleep 1 & wait; done"],
  resources: { $uses } }] }
YAML
}
# keeper NAME KIND, guests NAME KIND REPLICAS
keeper() {
    printf -- '---\napiVersion: v1\nkind: Pod\nmetadata: { name: %s, labels: { role: keeper, uses: %s } }\nspec: %s\n' "$1" "$2" "$(pod_spec "$2")"
}
guests() {
    printf -- '---\napiVersion: apps/v1\nkind: Deployment\nmetadata: { name: %s }\nspec: { replicas: %s, selector: { matchLabels: { role: guest, uses: %s } }, template: { metadata: { labels: { role: guest, uses: %s } }, spec: %s } }\n' \
        "$1" "$3" "$2" "$2" "$(pod_spec "$2")"
}
{
    keeper device-keeper device
    keeper claim-keeper template
    keeper sharer-1 shared
    keeper sharer-2 shared
    guests device device 1
    guests claims template 3
} >> "$work/objects.yaml"
kubectl apply -f "$work/objects.yaml" > "$work/logs/apply.log"
wait_for 120 ready || fail "the pods are not Ready"
wait_for 120 settled || fail "the pods that come and go are not Ready"
before=$(keepers)
no_device_twice
kubectl get pods -o wide

round=1
while [ "$round" -le "${ROUNDS:-20}" ]; do
    for name in $services; do
        # Starts and ends of pods are under way at the kill.
        kubectl delete pods -l role=guest --wait=false > "$work/last"
        sleep "$(python3 -c 'import random; print(random.uniform(0, 3))')"
        kill_service "$name"
        unchanged "after kill $round of $name"
    done
    wait_for 240 settled || fail "the pods that come and go are not Ready after round $round"
    wait_for 60 ready || fail "the pods that stay are not Ready after round $round"
    unchanged "after round $round"
    no_device_twice
    wait_for 60 prepared 5 || fail "not as many claims are prepared as are allocated after round $round"
    say "round $round: no pod lost, no device given twice"
    round=$((round + 1))
done

say "the checkpoints are torn while pod-sync is down"
kill -STOP "$pid_quintlet"
process=$(service pod-sync)
kill -KILL "$process"
for file in "$root/device-plugins/kubelet_internal_checkpoint" "$root/dra_manager_state"; do
    python3 -c 'import sys; path = sys.argv[1]; data = open(path).read(); open(path, "w").write(data[:len(data) // 2])' "$file"
done
kill -CONT "$pid_quintlet"
wait_for 60 is_new pod-sync "$process" || fail "pod-sync does not run again"
kubectl delete pods -l role=guest --wait=false > "$work/last"
sleep 2
wait_for 240 settled || fail "the pods that come and go are not Ready after the checkpoints were torn"
unchanged "after the checkpoints were torn"
no_device_twice

say "the pods that come and go are gone"
kubectl scale deployments --all --replicas=0 > "$work/last"
wait_for 120 recorded 1 2 || fail "pods that are gone are recorded"
wait_for 60 prepared 2 || fail "claims of pods that are gone are prepared"
unchanged "without the others"

say "the device plugin and the driver are killed"
for name in device-plugin driver; do
    eval "process=\$pid_$(echo "$name" | tr - _)"
    kill -KILL "$process"
done
start_plugins
kubectl scale deployment device --replicas=1 > "$work/last"
kubectl scale deployment claims --replicas=3 > "$work/last"
wait_for 240 settled || fail "the pods that come and go are not Ready after the kills of the plugins"
unchanged "after the kills of the plugins"
no_device_twice

say "all pods are deleted"
kubectl delete deployments --all > "$work/last"
kubectl delete pods --all --wait > "$work/last"
wait_for 120 recorded 0 0 || fail "pods that are gone are recorded"
say "all passed"
