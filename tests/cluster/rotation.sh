#!/bin/sh
# Runs a node of Quintlet whose client and serving certificates live for a minute, at a real API server that verifies both, until each was rotated three
# times, under an open `kubectl exec`, `logs -f`, `port-forward` and the node's own watches. Fails if one of them ends or misses a second, if a pod that is
# created meanwhile is not Ready, or if a service warns. Not part of `make test`, since it needs programs of Kubernetes:
#
#   KUBERNETES=DIR  a folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kubectl
#   BIN_DIR=DIR     directory of the built services (target/quick)
#   WORK=DIR        a folder for all files, which is left in place (default: a temporary one)
#   LIFE=SECONDS    life of the certificates (60)
#   ROTATIONS=N     rotations of each certificate (3)
#
# Needs root, openssl, containerd, CNI plugins, busybox-static, bash, curl, cc and python3. It runs in network and mount namespaces of its own.
repo=$(cd "$(dirname "$0")/../.." && pwd)
. "$repo/tests/cluster/preamble.sh"
need openssl containerd busybox bash curl cc python3
life=${LIFE:-60}
rotations=${ROTATIONS:-3}
# The signer of the cluster dates certificates back by minutes, so that this script signs.
controllers='*,-certificatesigningrequest-signing-controller'

# fail WHAT: ends the test with what is of use after a failure.
fail() {
    say "failed: $*"
    kubectl get csr,pods,nodes -o wide >&2 || true
    tail -n 20 "$work/logs/agent.log" "$work"/logs/services/*.log >&2 || true
    exit 1
}

# sign NAME SIGNER: issues the certificate of a request that the API server has accepted.
sign() {
    kubectl certificate approve "$1" > "$work/approved"
    kubectl get csr "$1" -o jsonpath='{.spec.request}' | base64 -d > "$work/request.pem"
    usage=clientAuth
    [ "$2" = kubernetes.io/kube-apiserver-client-kubelet ] || usage=serverAuth
    sed "s/@USAGE@/$usage/" "$work/ca.cnf" > "$work/ca-used.cnf"
    now=$(date +%s)
    openssl ca -batch -notext -config "$work/ca-used.cnf" -in "$work/request.pem" -out "$work/issued.pem" \
        -startdate "$(date -u -d "@$now" +%y%m%d%H%M%SZ)" -enddate "$(date -u -d "@$((now + life))" +%y%m%d%H%M%SZ)" 2> "$work/logs/ca.log"
    kubectl patch csr "$1" --subresource=status --type=merge -p "{\"status\": {\"certificate\": \"$(base64 -w 0 "$work/issued.pem")\"}}" > "$work/patched"
}

# sign_all: signs each request, until it is ended.
sign_all() {
    while :; do
        kubectl get csr -o jsonpath='{range .items[*]}{.metadata.name} {.spec.signerName} {.status.certificate}{"\n"}{end}' > "$work/requests" || continue
        while read -r request signer signed; do
            [ -n "$signed" ] || sign "$request" "$signer" || say "failed to sign $request"
        done < "$work/requests"
        sleep 0.5
    done
}

# current NAME: the file that the link of a certificate names.
current() {
    readlink "$root/pki/kubelet-$1-current.pem"
}
is_other() {
    [ "$(current "$1")" != "$2" ] && openssl x509 -in "$root/pki/kubelet-$1-current.pem" -noout -checkend 0
}

# serves: the node API has the current serving certificate.
serves() {
    openssl s_client -connect "$address:10250" < /dev/null 2> "$work/s_client" | openssl x509 -noout -serial > "$work/served"
    [ -s "$work/served" ] && openssl x509 -in "$root/pki/kubelet-server-current.pem" -noout -serial | diff "$work/served" -
}
is_ready() {
    kubectl wait --for=condition=Ready "pod/$1" --timeout=1s
}
has_lines() {
    [ "$(wc -l < "$work/logs/$1.log")" -ge "$2" ]
}

# consecutive NAME: the lines of a stream are the numbers from the first to the last one.
consecutive() {
    awk 'NR > 1 && $1 != last + 1 { print "after " last ": " $1; exit 1 } { last = $1 }' "$work/logs/$1.log"
}

make_machine
say "control plane"
start_control_plane --kubelet-certificate-authority "$pki/ca.crt"
kubectl create clusterrolebinding bootstrap --clusterrole=system:node-bootstrapper --group=system:bootstrappers > "$work/last"
certificate bootstrap /O=system:bootstrappers/CN=system:bootstrap:test clientAuth
kubeconfig "$work/bootstrap.conf" bootstrap
mkdir -p "$work/ca"
: > "$work/ca/index"
cat > "$work/ca.cnf" <<END
[ca]
default_ca = own
[own]
database = $work/ca/index
new_certs_dir = $work/ca
rand_serial = yes
unique_subject = no
default_md = sha256
certificate = $pki/ca.crt
private_key = $pki/ca.key
policy = any
copy_extensions = copy
x509_extensions = of_nodes
[any]
organizationName = optional
commonName = supplied
[of_nodes]
extendedKeyUsage = @USAGE@
END
sign_all &
started="$! $started"

say "a node that joins, with certificates of $life s"
start_runtime host 10.88.0.0/24
make_cgroup "$cgroup"
make_layers
stand_ins registry.k8s.io/pause:3.10 docker.io/library/busybox:1
ctr --address "$runtime" -n k8s.io images import "$work/images.tar" > "$work/logs/import.log"
root=$work/host/kubelet
mkdir -p "$root"
node_settings
{ for_kubelet; echo 'clusterDNS: [10.96.0.10]'; echo 'rotateCertificates: true'; echo 'serverTLSBootstrap: true'; } > "$work/host/kubelet.yaml"
start agent "$bin_dir/quintlet" kubelet --config "$work/host/kubelet.yaml" --bootstrap-kubeconfig "$work/bootstrap.conf" \
    --kubeconfig "$work/host/node.conf" --hostname-override node --root-dir "$root" --cert-dir "$root/pki" --node-ip "$address" \
    --log-dir "$work/logs/services"
wait_for 60 kubectl wait --for=condition=Ready node/node --timeout=1s || fail "the node is not Ready"
wait_for 60 serves || fail "the node API does not serve the certificate of the cluster"
kubectl apply -f - > "$work/last" <<'YAML'
apiVersion: v1
kind: Pod
metadata: { name: web }
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: web
    image: "busybox:1"
    command: [sh, -c, "nc -ll -p 8080 -e cat & i=0; while :; do i=$((i + 1)); echo $i; sleep 1; done"]
    readinessProbe: { tcpSocket: { port: 8080 }, periodSeconds: 1 }
YAML
wait_for 60 is_ready web || fail "web is not Ready"

say "streams"
start exec "$kubernetes/kubectl" --kubeconfig "$work/admin.conf" exec web -- sh -c 'i=0; while :; do i=$((i + 1)); echo $i; sleep 1; done'
start logs "$kubernetes/kubectl" --kubeconfig "$work/admin.conf" logs --follow web
start forward "$kubernetes/kubectl" --kubeconfig "$work/admin.conf" port-forward pod/web 18080:8080
wait_for 20 grep -q Forwarding "$work/logs/forward.log" || fail "no forwarded port"
start echo python3 -u -c '
import socket, time
stream = socket.create_connection(("127.0.0.1", 18080), timeout=5)
reader = stream.makefile()
for number in range(1, 100000):
    stream.sendall(f"{number}\n".encode())
    print(reader.readline().strip())
    time.sleep(1)'
for stream in exec logs echo; do
    wait_for 20 has_lines "$stream" 2 || fail "no $stream"
done

for number in $(seq "$rotations"); do
    for name in client server; do
        before=$(current "$name")
        wait_for $((2 * life)) is_other "$name" "$before" || fail "the $name certificate is not rotated"
        say "rotation $number: $(basename "$(current "$name")")"
    done
    wait_for 20 serves || fail "the node API serves an old certificate"
    kubectl run "pod-$number" --image=busybox:1 --restart=Never --command -- sleep 100000 > "$work/last"
    wait_for 30 is_ready "pod-$number" || fail "a pod after rotation $number is not Ready"
    kubectl exec "pod-$number" -- true || fail "a new command after rotation $number"
done
# The first certificates have expired, and the streams go on.
seconds=$(wc -l < "$work/logs/exec.log")
sleep 5
for stream in exec logs echo; do
    has_lines "$stream" $((seconds + 3)) || fail "$stream has ended"
    consecutive "$stream" || fail "$stream has a gap"
done
say "$seconds s of exec, logs and port-forward without a gap"
problems=$(grep -h '"level":"\(WARN\|ERROR\|warn\|error\)"\| WARN \| ERROR ' "$work"/logs/services/*.log | grep -v 'CAP_SYS_RESOURCE\|MissingClusterDNS' || true)
[ -z "$problems" ] || { echo "$problems" >&2; fail "services warn"; }
kubectl delete pods --all --grace-period=0 > "$work/last"
say "all passed"
