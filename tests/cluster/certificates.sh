#!/bin/sh
# Runs pods with certificates of their own and with trust bundles on a node of Quintlet, at a real API server: what it checks of the node's requests
# (the authorizer and the admission of nodes, the proof of the key, the validation of each version) is in no test API server. A signer of this script
# issues, denies and fails requests. Not part of `make test`, since it needs programs of Kubernetes:
#
#   KUBERNETES=DIR  a folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kubectl, of 1.36 or newer
#   BIN_DIR=DIR     directory of the built services (target/quick)
#   WORK=DIR        a folder for all files, which is left in place (default: a temporary one)
#
# Needs root, openssl, containerd, CNI plugins, busybox-static, bash, curl, cc and python3. It runs in network and mount namespaces of its own.
repo=$(cd "$(dirname "$0")/../.." && pwd)
. "$repo/tests/cluster/preamble.sh"
need openssl containerd busybox bash curl cc python3
signer=example.com/signer

# fail WHAT: ends the test with what is of use after a failure.
fail() {
    say "failed: $*"
    kubectl get pods,podcertificaterequests,clustertrustbundles -o wide >&2 || true
    kubectl get events --sort-by=.lastTimestamp 2> /dev/null | tail -n 20 >&2 || true
    grep -i 'certificate\|bundle' "$work/logs/quintlet.log" | tail -n 20 >&2 || true
    exit 1
}

# requests POD: the requests of a pod that wait for the signer.
requests() {
    kubectl get podcertificaterequests -o json > "$work/requests.json"
    python3 - "$work/requests.json" "$1" <<'PYTHON'
import json, sys
for item in json.load(open(sys.argv[1]))["items"]:
    if item["spec"]["podName"] == sys.argv[2] and not item.get("status", {}).get("conditions"):
        print(item["metadata"]["name"])
PYTHON
}
has_request() {
    requests "$1" | grep .
}

# condition NAME TYPE REASON MESSAGE [FIELDS]: the verdict of the signer.
condition() {
    kubectl patch podcertificaterequest "$1" --subresource=status --type=merge -p "{\"status\": {${5:-} \"conditions\": [{\"type\": \"$2\",
        \"status\": \"True\", \"reason\": \"$3\", \"message\": \"$4\", \"lastTransitionTime\": \"$(date -u +%FT%TZ)\"}]}}" > "$work/last"
}

# issue NAME: signs the request, for the key that it has proved.
issue() {
    kubectl get podcertificaterequest "$1" -o jsonpath='{.spec.stubPKCS10Request}' | base64 -d > "$work/request.der"
    openssl req -inform DER -in "$work/request.der" -verify -noout 2> "$work/last" || fail "the request does not prove its key"
    openssl req -inform DER -in "$work/request.der" -pubkey -noout > "$work/key.pub"
    openssl x509 -new -force_pubkey "$work/key.pub" -subj "/CN=$1" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -days 1 -out "$work/issued.crt" 2> "$work/last"
    fields=$(python3 - "$work/issued.crt" <<'PYTHON'
import datetime, json, subprocess, sys
chain = open(sys.argv[1]).read()
dates = subprocess.check_output(["openssl", "x509", "-in", sys.argv[1], "-noout", "-dates"], text=True)
begin, end = (datetime.datetime.strptime(line.split("=")[1], "%b %d %H:%M:%S %Y %Z") for line in dates.splitlines())
stamp = lambda time: time.strftime("%Y-%m-%dT%H:%M:%SZ")
fields = {"certificateChain": chain, "notBefore": stamp(begin), "notAfter": stamp(end), "beginRefreshAt": stamp(begin + datetime.timedelta(hours=12))}
print(json.dumps(fields)[1:-1] + ",")
PYTHON
    )
    condition "$1" Issued Signed signed "$fields" || fail "the API server refuses the certificate of the signer"
}

# decided POD: waits for the pod's request, whose name is then in $request.
decided() {
    wait_for 60 has_request "$1" || fail "$1 has no request"
    request=$(requests "$1" | head -n 1)
}

# event POD REASON: the event has been recorded.
event() {
    kubectl get events --field-selector "involvedObject.name=$1,reason=$2" -o jsonpath='{.items[*].message}' | grep .
}

is_ready() {
    kubectl wait --for=condition=Ready "pod/$1" --timeout=1s
}

# inside POD FILE: a file of the pod's volume, as the node has it.
inside() {
    cat "$work/host/quintlet/root/pods/$(kubectl get pod "$1" -o jsonpath='{.metadata.uid}')/volumes/kubernetes.io~projected/v/$2"
}

# pod NAME SOURCE: with one projected volume.
pod() {
    cat <<YAML
---
apiVersion: v1
kind: Pod
metadata: { name: $1 }
spec:
  terminationGracePeriodSeconds: 1
  containers: [{ name: main, image: "busybox:1", command: [sh, -c, "trap 'exit 0' TERM; while :; do sleep 1 & wait; done"],
    volumeMounts: [{ name: v, mountPath: /v }] }]
  volumes: [{ name: v, projected: { sources: [$2] } }]
YAML
}

make_machine
say "control plane"
# The gates of 1.36 are off; `v1` comes with 1.37.
start_control_plane --feature-gates PodCertificateRequest=true,ClusterTrustBundle=true,ClusterTrustBundleProjection=true \
    --runtime-config certificates.k8s.io/v1beta1=true
kubectl api-versions | grep '^certificates'
say "a node with Quintlet"
start_quintlet_node node
make_layers
stand_ins registry.k8s.io/pause:3.10 docker.io/library/busybox:1
ctr --address "$runtime" -n k8s.io images import "$work/images.tar" > "$work/logs/import.log"

say "each key type that the API has gets a certificate for its key"
for type in ED25519 ECDSAP256 ECDSAP384 ECDSAP521 RSA3072 RSA4096; do
    name=$(echo "$type" | tr A-Z a-z)
    pod "$name" "{ podCertificate: { signerName: $signer, keyType: $type, credentialBundlePath: bundle.pem, maxExpirationSeconds: 86400 } }" |
        kubectl apply -f - > "$work/last"
    decided "$name"
    issue "$request"
    wait_for 60 is_ready "$name" || fail "$name is not Ready"
    inside "$name" bundle.pem > "$work/bundle.pem"
    openssl x509 -in "$work/bundle.pem" -pubkey -noout > "$work/public.crt"
    openssl pkey -in "$work/bundle.pem" -pubout > "$work/public.key"
    cmp -s "$work/public.crt" "$work/public.key" || fail "$name has a certificate of another key"
    say "$type: $(kubectl get podcertificaterequest "$request" -o jsonpath='{.spec.podName} {.spec.serviceAccountName} {.spec.nodeName}')"
done

say "a request that is denied, and one that fails"
for verdict in Denied Failed; do
    name=$(echo "$verdict" | tr A-Z a-z)
    pod "$name" "{ podCertificate: { signerName: $signer, keyType: ED25519, credentialBundlePath: bundle.pem } }" | kubectl apply -f - > "$work/last"
    decided "$name"
    condition "$request" "$verdict" Policy "not for this pod" || fail "the API server refuses the verdict"
    wait_for 60 event "$name" "$verdict" || fail "$name has no event"
    ! is_ready "$name" > "$work/last" 2>&1 || fail "$name is Ready without a certificate"
done

say "trust bundles by name and by signer follow a change"
# anchor NAME: a certificate authority.
anchor() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "$work/anchor.key" -subj "/CN=$1" -days 2 \
        -addext keyUsage=critical,keyCertSign -out "$work/$1.anchor" 2> /dev/null
}
# bundle NAME SIGNER ANCHOR...: creates or replaces a trust bundle.
bundle() {
    name=$1 of=$2
    shift 2
    for each in "$@"; do anchor "$each"; cat "$work/$each.anchor"; done > "$work/anchors.pem"
    python3 - "$name" "$of" "$work/anchors.pem" <<'PYTHON' | kubectl apply -f - > "$work/last"
import json, sys
name, signer, anchors = sys.argv[1:]
spec = {"trustBundle": open(anchors).read()} | ({"signerName": signer} if signer else {})
print(json.dumps({"apiVersion": "certificates.k8s.io/v1beta1", "kind": "ClusterTrustBundle",
                  "metadata": {"name": name, "labels": {"live": "yes"}}, "spec": spec}))
PYTHON
}
# anchors POD FILE COUNT: as many certificates are in the file.
anchors() {
    count=$(inside "$1" "$2" | grep -c 'BEGIN CERTIFICATE' || true)
    echo "$count anchors"
    [ "$count" = "$3" ]
}
bundle by-name "" one
bundle "$(echo "$signer" | tr / :):first" "$signer" two
pod bundles "{ clusterTrustBundle: { name: by-name, path: name.pem } }, { clusterTrustBundle: { signerName: $signer, labelSelector: { matchLabels: { live: 'yes' } }, path: signer.pem } }, { clusterTrustBundle: { name: none, optional: true, path: none.pem } }" |
    kubectl apply -f - > "$work/last"
pod without-bundle "{ clusterTrustBundle: { name: missing, path: missing.pem } }" | kubectl apply -f - > "$work/last"
wait_for 60 is_ready bundles || fail "bundles is not Ready"
anchors bundles name.pem 1 || fail "not the bundle by name"
anchors bundles signer.pem 1 || fail "not the bundle of the signer"
anchors bundles none.pem 0 || fail "an optional bundle that does not exist has certificates"
bundle by-name "" one three
bundle "$(echo "$signer" | tr / :):second" "$signer" four
# A kubelet looks at the volumes of a pod once in 60 to 90 s.
wait_for 120 anchors bundles name.pem 2 || fail "the bundle by name is old"
wait_for 120 anchors bundles signer.pem 2 || fail "the bundles of the signer are old"
wait_for 60 event without-bundle FailedMount || fail "a pod without its bundle has no event"
bundle missing "" five
wait_for 180 is_ready without-bundle || fail "a pod is not Ready although its bundle is there"

say "each service is killed, and no pod changes"
pods() {
    kubectl get pods -o jsonpath='{range .items[*]}{.metadata.name} {.status.phase} {.status.containerStatuses[0].containerID} {.status.containerStatuses[0].restartCount}{"\n"}{end}'
}
before=$(pods)
for name in pod-sync cri-proxy pleg-service probe-service status-reporter node-api; do
    kill -KILL "$(pgrep -P "$pid_quintlet" -x "$name")"
done
# The node observes its pods anew.
wait_for 60 pgrep -P "$pid_quintlet" -x pod-sync
# The key of a request is in memory. So the certificates are requested anew, and the old ones stay until then.
has_subject() {
    inside "$1" bundle.pem | openssl x509 -noout -subject -nameopt RFC2253 | grep -x "subject=CN=$2"
}
decided ed25519
issue "$request"
wait_for 120 has_subject ed25519 "$request" || fail "the certificate that was requested anew does not reach the file"
for name in ed25519 rsa4096 bundles; do wait_for 60 is_ready "$name" || fail "$name is not Ready after the kills"; done
[ "$before" = "$(pods)" ] || fail "pods changed: before $before, now $(pods)"

say "warnings of the node:"
grep ' WARN \|"WARN"' "$work/logs/quintlet.log" | cut -c1-300 | sort | uniq -c | head -n 20 || true
kubectl delete pods --all --wait > "$work/last"
say "all passed"
