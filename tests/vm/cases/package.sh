# The .deb on a machine without any of it: installed, joined by a token, over a reboot, and removed. The machine has the packages (run.sh), so set_up
# has installed one and has joined.

client=/var/lib/kubelet/pki/kubelet-client-current.pem
requests=/apis/certificates.k8s.io/v1/certificatesigningrequests

subject_of() {
    awk '/BEGIN CERT/ { inside = 1 } inside { print } /END CERT/ { exit }' "$1" | openssl x509 -noout -subject -nameopt RFC2253 2>&1
}

# is_of_node FILE: the certificate has the subject of this node and no other part, in any order.
is_of_node() {
    subject_of "$1" | sed 's/^subject= *//' | tr ',' '\n' | sort | xargs | tee /tmp/subject
    [ "$(cat /tmp/subject)" = "CN=system:node:$node O=system:nodes" ]
}

# requested COUNT: as many certificates were requested of this API server, whose objects end with the machine.
requested() {
    request GET $requests | jq -r '[.items[] | "\(.spec.signerName) \(.spec.username // "")"] | length' | tee /tmp/requested
    [ "$(cat /tmp/requested)" = "$1" ]
}

# nothing_is_left: no file of the package, outside of directories with state. The other files are those of this test.
nothing_is_left() {
    find /usr /etc /run \( -name '*quintlet*' -o -name pod-sync -o -name quintctl \) ! -name 10-quintlet.conflist \
        ! -path '/etc/quintlet*' ! -path '/etc/apt/*' ! -path '/etc/initramfs-tools/*' ! -path '/run/systemd/*' -print | tee /tmp/left
    [ ! -s /tmp/left ]
}

all_stopped() {
    for exe in /proc/[0-9]*/exe; do
        case $(readlink "$exe") in /usr/bin/quintlet*) echo "$exe"; return 1 ;; esac
    done
}

run() {
    check "the package is installed" "$(dpkg-query -W -f '${Package} ${Version} ${Status}' quintlet)" sh -c "dpkg-query -W -f '\${Status}' quintlet | grep -qx 'install ok installed'"
    check "its files are as packaged" "$(dpkg --verify quintlet)" sh -c 'test -z "$(dpkg --verify quintlet | grep -v " c /etc/default/quintlet")"'
    for unit in $units; do becomes 180 "$unit runs" is_active "$unit"; done
    becomes 300 "quintctl health: all serve" quintctl health
    becomes 60 "one certificate was requested" requested 1
    check "its subject is the node" "$(subject_of $client)" is_of_node $client
    check "the current certificate is a link" "$(readlink $client)" test -L $client
    check "the kubeconfig has no token" "" sh -c '! grep -qi token /etc/kubernetes/kubelet.conf'
    cksum < "$(readlink -f $client)" > $state/client
    echo package > $state/reboots
    cat /proc/sys/kernel/random/boot_id > $state/boot-id
    sync
    systemctl reboot
}

rebooted() {
    check "machine has rebooted" "$(cat /proc/sys/kernel/random/boot_id)" sh -c "! cmp -s $state/boot-id /proc/sys/kernel/random/boot_id"
    for unit in $units; do becomes 300 "$unit starts at boot" is_active "$unit"; done
    becomes 900 "the pod is Ready again" is_ready_pod "vm-$node"
    check "with the certificate that the node had" "$(cat $state/client)" test "$(cksum < "$(readlink -f $client)")" = "$(cat $state/client)"
    becomes 10 "no certificate was requested" requested 0
    process_of "vm-$node" > $state/process

    # An installation of the same version restarts the services, and no pod.
    before=$(property pod-sync MainPID)
    dpkg -i $here/packages/quintlet_*.deb > /tmp/last 2>&1
    check "it is installed again" "$(tail -n 1 /tmp/last)" grep -q 'Setting up quintlet' /tmp/last
    for unit in $units; do becomes 180 "$unit runs after it" is_active "$unit"; done
    check "pod-sync is another process" "pid $before before" test "$(property pod-sync MainPID)" != "$before"
    check "/etc/default/quintlet is the operator's" "" grep -q bootstrap-kubeconfig /etc/default/quintlet
    becomes 300 "the pod keeps its process" has_process "vm-$node"

    check "the package is removed" "" dpkg --remove quintlet
    becomes 120 "no service runs" all_stopped
    check "the pod's process goes on" "pid $(cat $state/process)" test -d "/proc/$(cat $state/process)"
    check "configuration and state stay" "" test -e /etc/default/quintlet -a -e $client
    check "the package is purged" "" dpkg --purge quintlet
    check "nothing of it is left" "$(nothing_is_left | xargs)" nothing_is_left
    check "the state of the node stays" "" test -e $client -a -d /var/lib/kubelet/pods
    check "no unit has failed" "$(systemctl --failed --no-legend --plain 'quintlet*' | xargs)" sh -c \
        'test -z "$(systemctl --failed --no-legend --plain "quintlet*")"'
}

# No pod is left to wait for.
tidy() {
    :
}

has_process() {
    process_of "$1" | tee /tmp/now
    [ "$(cat /tmp/now)" = "$(cat $state/process)" ]
}
