# A control plane of one machine, for the scripts of this folder, which read this file with `.`:
#
#   work        a folder for certificates, state and logs
#   kubernetes  a folder with kube-apiserver, kube-controller-manager, kube-scheduler, kubectl and etcd
#   address     the address of the API server, on an interface of this network namespace
#   controllers the controllers to run, as kube-controller-manager takes them (all)
#
# Everything listens on loopback or on that address. `stop_all` stops what was started, by its process.

pki=$work/pki
server=https://$address:6443
started=

say() {
    echo "$(basename "$0" .sh): $*" >&2
}

# start NAME COMMAND...: starts a program in the background, with its output in $work/logs/NAME.log.
start() {
    name=$1
    shift
    mkdir -p "$work/logs"
    setsid "$@" > "$work/logs/$name.log" 2>&1 &
    started="$! $started"
    eval "pid_$(echo "$name" | tr - _)=$!"
}

# is_own PID: the process runs in the mount namespace of this script. Another process may have the number of one that has ended.
is_own() {
    [ "$(readlink "/proc/$1/ns/mnt")" = "$(readlink /proc/self/ns/mnt)" ]
}

gone() {
    ! is_own "$1" 2> /dev/null
}

# end PID: ends a process within 20 s, or kills it.
end() {
    is_own "$1" 2> /dev/null || return 0
    kill -TERM "$1" 2> /dev/null || return 0
    wait_for 20 gone "$1" 2> /dev/null || kill -KILL "$1" 2> /dev/null || true
}

# stop_all: in the reverse order of the starts.
stop_all() {
    for process in $started; do
        end "$process"
    done
    started=
}

# wait_for SECONDS COMMAND...: waits for the command to succeed; its last output is in $work/last.
wait_for() {
    limit=$(($(date +%s) + $1))
    shift
    until "$@" > "$work/last" 2>&1; do
        [ "$(date +%s)" -lt "$limit" ] || { say "gave up on: $*; last:"; tail -n 20 "$work/last" >&2; return 1; }
        sleep 0.3
    done
}

kubectl() {
    "$kubernetes/kubectl" --kubeconfig "$work/admin.conf" "$@"
}

# certificate NAME SUBJECT USAGE [ALTERNATIVE NAMES]: a certificate of the cluster's CA.
certificate() {
    openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "$pki/$1.key" -subj "$2" -out "$pki/$1.csr" 2> /dev/null
    {
        echo "keyUsage=critical,digitalSignature"
        echo "extendedKeyUsage=$3"
        [ -z "${4:-}" ] || echo "subjectAltName=$4"
    } > "$pki/$1.ext"
    openssl x509 -req -in "$pki/$1.csr" -CA "$pki/ca.crt" -CAkey "$pki/ca.key" -CAcreateserial -days 2 -extfile "$pki/$1.ext" \
        -out "$pki/$1.crt" 2> /dev/null
}

# kubeconfig FILE NAME: a kubeconfig with the certificate NAME.
kubeconfig() {
    cat > "$1" <<END
apiVersion: v1
kind: Config
clusters: [{ name: c, cluster: { server: "$server", certificate-authority: $pki/ca.crt } }]
users: [{ name: u, user: { client-certificate: $pki/$2.crt, client-key: $pki/$2.key } }]
contexts: [{ name: x, context: { cluster: c, user: u } }]
current-context: x
END
}

control_plane_pki() {
    mkdir -p "$pki"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "$pki/ca.key" -subj /CN=kubernetes -days 2 \
        -addext keyUsage=critical,keyCertSign,cRLSign -out "$pki/ca.crt" 2> /dev/null
    openssl genrsa -out "$pki/sa.key" 2048 2> /dev/null
    openssl rsa -in "$pki/sa.key" -pubout -out "$pki/sa.pub" 2> /dev/null
    certificate apiserver /CN=kube-apiserver serverAuth \
        "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:localhost,IP:10.96.0.1,IP:127.0.0.1,IP:$address"
    certificate admin /O=system:masters/CN=admin clientAuth
    certificate to-nodes /O=system:masters/CN=kube-apiserver-kubelet-client clientAuth
    for part in controller-manager scheduler; do
        certificate $part /CN=system:kube-$part clientAuth
        kubeconfig "$work/$part.conf" $part
    done
    kubeconfig "$work/admin.conf" admin
}

# start_control_plane [ARGUMENTS OF THE API SERVER]
start_control_plane() {
    for program in kube-apiserver kube-controller-manager kube-scheduler kubectl etcd; do
        [ -x "$kubernetes/$program" ] || { say "no $kubernetes/$program"; return 1; }
    done
    control_plane_pki
    # Nothing of it survives the test.
    start etcd "$kubernetes/etcd" --data-dir "$work/etcd" --unsafe-no-fsync --listen-client-urls http://127.0.0.1:2379 \
        --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380 --log-level warn
    start kube-apiserver "$kubernetes/kube-apiserver" --etcd-servers http://127.0.0.1:2379 --advertise-address "$address" \
        --secure-port 6443 --tls-cert-file "$pki/apiserver.crt" --tls-private-key-file "$pki/apiserver.key" --client-ca-file "$pki/ca.crt" \
        --service-account-key-file "$pki/sa.pub" --service-account-signing-key-file "$pki/sa.key" \
        --service-account-issuer https://kubernetes.default.svc --service-cluster-ip-range 10.96.0.0/16 --authorization-mode Node,RBAC \
        --enable-admission-plugins NodeRestriction --allow-privileged --enable-bootstrap-token-auth \
        --kubelet-preferred-address-types InternalIP,ExternalIP,Hostname \
        --kubelet-client-certificate "$pki/to-nodes.crt" --kubelet-client-key "$pki/to-nodes.key" "$@"
    wait_for 120 kubectl get --raw /readyz
    start kube-controller-manager "$kubernetes/kube-controller-manager" --kubeconfig "$work/controller-manager.conf" \
        --use-service-account-credentials --service-account-private-key-file "$pki/sa.key" --root-ca-file "$pki/ca.crt" \
        --cluster-signing-cert-file "$pki/ca.crt" --cluster-signing-key-file "$pki/ca.key" --leader-elect=false --bind-address 127.0.0.1 ${controllers:+--controllers "$controllers"}
    start kube-scheduler "$kubernetes/kube-scheduler" --kubeconfig "$work/scheduler.conf" --leader-elect=false --bind-address 127.0.0.1
    wait_for 60 kubectl get serviceaccount default
    wait_for 60 kubectl get --raw /openapi/v2
}
