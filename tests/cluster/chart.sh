#!/bin/sh
# Installs charts/quintlet with helm in a real cluster of this machine, as docs/helm.md says, and tries it: pods on the second Node, logs, exec,
# a deletion and a roll of each service, an upgrade, and an uninstallation that leaves nothing. Not part of `make test`, since it needs programs
# of Kubernetes:
#
#   KUBERNETES=DIR  a folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet and kubectl
#   BIN_DIR=DIR     directory of the built services (target/quick)
#   WORK=DIR        a folder for all files, which is left in place (default: a temporary one)
#
# Needs root, helm, openssl, curl, dockerd, containerd and CNI plugins. It runs in network and mount namespaces of its own.
repo=$(cd "$(dirname "$0")/../.." && pwd)
. "$repo/tests/cluster/preamble.sh"
more_cgroups=quintlet
need helm openssl curl dockerd docker containerd
make_machine

say "images"
export DOCKER_HOST="unix://$work/docker.sock"
start dockerd dockerd --host "$DOCKER_HOST" --data-root "$work/docker" --exec-root "$work/docker-exec" --pidfile "$work/docker.pid" \
    --bridge none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --cgroup-parent "/$cgroup"
wait_for 30 docker version
MAX_SIZE_MB=160 TAG=test BIN_DIR=$bin_dir "$repo/docker/build-image.sh" > "$work/logs/images.log" 2>&1 || { cat "$work/logs/images.log" >&2; exit 1; }
docker save -o "$work/images.tar" quintlet:test quintlet-containerd:test
container=$(docker create quintlet-containerd:test sh)
docker cp "$container:/usr/share/quintlet/images.tar" "$work/pod-images.tar" > /dev/null
end "$pid_dockerd"

say "control plane"
start_control_plane
say "a node with a kubelet"
start_host_node host
for archive in images pod-images; do
    ctr --address "$runtime" -n k8s.io images import "$work/$archive.tar" > "$work/logs/import-$archive.log"
done

certificate subscribers /CN=subscribers serverAuth "IP:$address"
certificate watcher /CN=watcher clientAuth
certificate other /CN=other clientAuth
chart=$repo/charts/quintlet
export KUBECONFIG="$work/admin.conf"

# fail WHAT: ends the test with what is of use after a failure.
fail() {
    say "$*"
    kubectl get nodes,csr -o wide >&2 || true
    kubectl -n quintlet get pods -o wide >&2 || true
    kubectl get pods -o wide >&2 || true
    kubectl get events --all-namespaces --sort-by=.lastTimestamp 2> /dev/null | tail -n 20 >&2 || true
    for log in /var/log/pods/quintlet_q-quintlet-*/*/*.log; do
        case $log in *-dirs/*) ;; *) echo "$log" >&2; tail -n 4 "$log" >&2 || true ;; esac
    done
    exit 1
}
# expect WHAT WANTED GOT
expect() {
    [ "$2" = "$3" ] || fail "$1: expected '$2', got '$3'"
}
pause() {
    [ "${PAUSE:-}" != "$1" ] || { say "paused at $1; go on by: rm $work/paused"; : > "$work/paused"; while [ -e "$work/paused" ]; do sleep 1; done; }
}
csr_is_there() {
    kubectl get csr | grep 'Pending$'
}
second_is_ready() {
    kubectl wait --for=condition=Ready nodes -l quintlet.dev/beside-kubelet --timeout=1s
}
# all_ready: each pod of the release is, in its newest version.
all_ready() {
    for set in $(kubectl -n quintlet get daemonset -o name); do
        kubectl -n quintlet rollout status "$set" --timeout=1s || return 1
    done
    kubectl -n quintlet wait --for=condition=Ready pod --all --timeout=1s
}
web_is_ready() {
    kubectl wait --for=jsonpath='{.status.readyReplicas}'="$1" deployment/web --timeout=1s
}
# parts: the DaemonSets of the release but for the runtime's.
parts() {
    kubectl -n quintlet get daemonset -o jsonpath='{range .items[*]}{.metadata.labels.app\.kubernetes\.io/component}{"\n"}{end}' | grep -v '^containerd$'
}
# identity: what must not change: the containers of the pods, their restarts, and when they became Ready.
identity() {
    kubectl get pod -l app=web -o jsonpath='{range .items[*]}{.metadata.uid} {.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount} {.status.conditions[?(@.type=="Ready")]}{"\n"}{end}' | sort
}
# unchanged WHAT: the pods are as before, and new requests work.
unchanged() {
    now=$(identity)
    expect "the pods after $1" "$before" "$now"
    expect "kubectl exec after $1" "good day" "$(kubectl exec "$pod" -- cat /words/greeting)"
    expect "kubectl logs after $1" "good day" "$(kubectl logs "$pod")"
}

cat > "$work/web.yaml" <<'END'
apiVersion: v1
kind: ConfigMap
metadata: { name: words }
data: { greeting: good day }
---
apiVersion: apps/v1
kind: Deployment
metadata: { name: web }
spec:
  replicas: 2
  selector: { matchLabels: { app: web } }
  template:
    metadata: { labels: { app: web } }
    spec:
      nodeSelector: { quintlet.dev/beside-kubelet: "true" }
      terminationGracePeriodSeconds: 1
      containers:
        - name: web
          image: localhost/busybox:1
          command: [sh, -c, 'cat /words/greeting; echo; mkdir /tmp/www; cp /words/greeting /tmp/www/; exec httpd -f -p 8080 -h /tmp/www']
          readinessProbe: { httpGet: { path: /greeting, port: 8080 }, periodSeconds: 1 }
          livenessProbe: { exec: { command: [test, -s, /words/greeting] }, periodSeconds: 2 }
          resources: { requests: { cpu: 10m, memory: 8Mi }, limits: { memory: 32Mi } }
          volumeMounts:
            - { name: words, mountPath: /words }
            - { name: scratch, mountPath: /scratch }
      volumes:
        - { name: words, configMap: { name: words } }
        - { name: scratch, emptyDir: {} }
END

# The disk of the machine may be full.
cat > "$work/quintlet.yaml" <<'END'
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
evictionHard: { memory.available: 50Mi }
imageGCHighThresholdPercent: 100
failCgroupV1: false
failSwapOn: false
END

# try_chart NAME [ARGUMENTS OF HELM INSTALL]: the life of a release, as docs/helm.md says.
try_chart() {
    case=$1
    shift
    say "$case: helm install"
    kubectl create namespace quintlet > "$work/last"
    kubectl label namespace quintlet pod-security.kubernetes.io/enforce=privileged > "$work/last"
    kubectl -n quintlet create secret generic subscribers --from-file=ca.crt="$pki/ca.crt" --from-file=tls.crt="$pki/subscribers.crt" \
        --from-file=tls.key="$pki/subscribers.key" > "$work/last"
    helm install q "$chart" --namespace quintlet --set images.services.tag=test --set images.containerd.tag=test \
        --set bootstrap.enabled=true --set "bootstrap.server=$server" --set nodeApi.clientCAFile="$pki/ca.crt" \
        --set subscribers.tls.listen=0.0.0.0:10270 --set subscribers.tls.secretName=subscribers --set 'subscribers.tls.names={watcher}' \
        --set-file config="$work/quintlet.yaml" "$@" > "$work/logs/install.log"
    wait_for 120 csr_is_there || fail "no request for a certificate"
    kubectl get csr -o name | xargs "$kubernetes/kubectl" certificate approve > "$work/last"
    wait_for 120 second_is_ready || fail "no second Node"
    wait_for 120 all_ready || fail "a pod of the release is not Ready"
    case $* in *bootstrap.servingCertificate=true*) wait_for 60 is_issued || fail "the node API has no certificate of the cluster" ;; esac
    node=$(kubectl get nodes -l quintlet.dev/beside-kubelet -o jsonpath='{.items[0].metadata.name}')
    pause "$case-installed"

    say "$case: pods on the second Node"
    kubectl apply -f "$work/web.yaml" > "$work/last"
    wait_for 60 web_is_ready 2 || fail "pods on the second Node are not Ready"
    kubectl get pods -o wide
    pod=$(kubectl get pod -l app=web -o name | head -n 1)
    wait_for 60 kubectl logs "$pod" || fail "kubectl logs"
    expect "kubectl logs" "good day" "$(kubectl logs "$pod")"
    expect "stdin of kubectl exec" "through" "$(echo through | kubectl exec -i "$pod" -- cat)"
    # What `kubectl top` shows comes from this page, by way of the metrics-server.
    wait_for 30 used || fail "no usage of the pods"
    # What evictions for disk space and `kubectl describe node` need.
    measured || fail "no file system of images in /stats/summary"
    for stream in Containers Probes Pods; do
        wait_for 20 subscribed watcher "$stream" || fail "no $stream for a subscriber over TCP"
    done
    ! subscribed other Pods || fail "a subscriber of another name"
    kubectl get --raw "/api/v1/nodes/$node/proxy/metrics" | grep -E '^quintlet_node_api_refused_subscribers_total\{.*reason="name".*\} 1$' || fail "it is not counted"
    problems=$(kubectl -n quintlet logs -l app.kubernetes.io/instance=q --all-containers --prefix --tail=-1 | grep '"level":"\(warn\|error\)"' |
        grep -v 'CAP_SYS_RESOURCE\|MissingClusterDNS' || true)
    expect "warnings of the services" "" "$problems"
    kubectl port-forward "$pod" 18080:8080 > "$work/logs/forward.log" 2>&1 &
    forward=$!
    wait_for 20 fetched || fail "nothing through a forwarded port"
    expect "kubectl port-forward" "good day" "$(cat "$work/last")"
    end "$forward"
    before=$(identity)

    for part in $(parts); do
        say "$case: the pod of $part is deleted"
        kubectl -n quintlet delete pod -l "app.kubernetes.io/component=$part" > "$work/last"
        wait_for 90 all_ready || fail "a pod of the release is not Ready"
        unchanged "a deletion of $part"
    done
    say "$case: a roll of all services"
    for part in $(parts); do
        kubectl -n quintlet rollout restart "daemonset/q-quintlet-$part" > "$work/last"
    done
    wait_for 180 all_ready || fail "a pod of the release is not Ready"
    unchanged "a roll"
    say "$case: an upgrade to more instances and followers"
    helm upgrade q "$chart" --namespace quintlet --reuse-values --set probeService.instances=2 --set plegService.followers=1 --set log.level=debug \
        --wait --timeout 3m > "$work/logs/upgrade.log" || fail "helm upgrade"
    wait_for 90 all_ready || fail "a pod of the release is not Ready"
    unchanged "an upgrade"
    kubectl scale deployment web --replicas=3 > "$work/last"
    wait_for 60 web_is_ready 3 || fail "a third pod is not Ready"
    pause "$case-upgraded"

    say "$case: helm uninstall"
    helm get notes q --namespace quintlet > "$work/notes"
    kubectl delete deployment web --wait > "$work/last"
    # The commands of the notes, the last one for the host.
    sed -n 's/^  \(kubectl drain\|helm uninstall\|kubectl delete nodes\|for dir in\)/\1/p' "$work/notes" > "$work/commands"
    expect "commands of the notes" 4 "$(wc -l < "$work/commands")"
    PATH=$kubernetes:$PATH sh -eu "$work/commands" > "$work/logs/uninstall.log" 2>&1 || { cat "$work/logs/uninstall.log" >&2; fail "the notes' commands"; }
    left=$(for dir in /run/quintlet /var/lib/quintlet /var/lib/quintlet-containerd /var/lib/quintlet-node-api /var/log/quintlet /etc/quintlet/kubeconfig \
        /etc/quintlet/pki; do
        find "$dir" -mindepth 1 2> /dev/null || true
    done; cgroups quintlet; ip -o link show quintlet0 2> /dev/null || true
    kubectl get clusterrole,clusterrolebinding,nodes -o name | grep quintlet || true)
    expect "what is left" "" "$left"
    kubectl delete namespace quintlet --wait > "$work/last"
    kubectl delete csr --all > "$work/last"
}
# subscribed NAME STREAM: a client with this name gets the pods of the test from a stream, by a call of gRPC with an empty message.
subscribed() {
    # A stream does not end.
    printf '\0\0\0\0\0' | curl -sS --http2 --max-time 2 --cacert "$pki/ca.crt" --cert "$pki/$1.crt" --key "$pki/$1.key" \
        -H 'content-type: application/grpc' -H 'te: trailers' --data-binary @- "https://$address:10270/quintlet.subscribe.v1.$2/Watch" > "$work/stream" || true
    grep -a web- "$work/stream"
}
fetched() {
    curl -fsS http://127.0.0.1:18080/greeting
}
is_issued() {
    openssl s_client -connect "$address:10350" < /dev/null 2> /dev/null | openssl x509 -noout -issuer | grep 'CN *= *kubernetes$'
}
measured() {
    kubectl get --raw "/api/v1/nodes/$node/proxy/stats/summary" | tee "$work/summary" | grep -A 9 '"imageFs"' | grep '"capacityBytes": *[1-9]'
}
used() {
    kubectl get --raw "/api/v1/nodes/$node/proxy/metrics/resource" | tee "$work/resource" | grep '^pod_cpu_usage_seconds_total.*pod="web-'
}

try_chart daemonsets
# One pod with all services, on another runtime of the host: the kubelet would end the pods if it were its own.
second=$work/second/containerd.sock
start_runtime second 10.89.0.0/24
ctr --address "$second" -n k8s.io images import "$work/pod-images.tar" > "$work/logs/import-second.log"
# The cluster approves client certificates, and issues serving ones.
try_chart pod --set mode=pod --set bootstrap.approve=true --set bootstrap.servingCertificate=true \
    --set containerd.enabled=false --set "containerd.socket=$second" --set "containerd.rootDir=$work/second/root"
say "all passed"
