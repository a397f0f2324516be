#!/bin/sh
# Runs in the virtual machine of run.sh, as root and from systemd. Rows of the result go to the second serial line.
set -u

result=/dev/ttyS1
units="cri-proxy pleg-service probe-service status-reporter node-api pod-sync"
failed=0
here=/payload

# row NAME ok|FAILED DETAIL
row() {
    echo "row|$1|$2|$3" | tr '\n' ' ' > $result
    echo > $result
    echo "== $1: $2 $3"
    [ "$2" = ok ] || failed=1
}

# check NAME DETAIL COMMAND...: a row that is ok when the command succeeds.
check() {
    name=$1 detail=$2
    shift 2
    if "$@"; then row "$name" ok "$detail"; else row "$name" FAILED "$detail"; fi
}

# until SECONDS COMMAND...: waits for the command to succeed.
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
    limit_of_row=$1 name=$2
    shift 2
    verdict=ok
    until_true "$limit_of_row" "$@" || verdict=FAILED
    row "$name" $verdict "$(tail -n 1 /tmp/last | tr '|' ' ')"
}

end() {
    if [ $failed != 0 ]; then
        {
            systemctl --no-pager --full status 'quintlet-*' containerd
            quintctl health
            quintctl pods
            journalctl --no-pager -o short-monotonic -u 'quintlet-*' -n 300
        } 2>&1 | grep -v '^$' | sed 's/^/log|/' > $result
        echo 'end|FAILED' > $result
    else
        echo 'end|ok' > $result
    fi
    # Waits until the serial lines are written.
    sleep 1
    exit $failed
}

property() {
    systemctl show -P "$2" "quintlet-$1.service"
}

is_active() {
    [ "$(property "$1" ActiveState)" = active ] && echo "user $(property "$1" User), pid $(property "$1" MainPID)"
}

# The process of the pod's only container, which is not the sandbox's.
pod_process() {
    ctr -n k8s.io containers ls -q "labels.io.kubernetes.container.name==main" | while read -r id; do
        ctr -n k8s.io tasks ls | while read -r task pid status; do
            [ "$task" != "$id" ] || [ "$status" != RUNNING ] || echo "$pid"
        done
    done
}

# Ready, and never restarted.
is_ready() {
    quintctl pods > /tmp/pods && grep -E '^vm-quintlet-vm +1/1 +Running +0 ' /tmp/pods
}

# image NAME TREE CONFIG: an image of one layer for containerd.
image() {
    mkdir -p /tmp/image
    rm -rf /tmp/image/*
    tar -C "$2" -cf /tmp/image/layer.tar .
    layer=$(sha256sum /tmp/image/layer.tar | cut -d ' ' -f 1)
    printf '{"architecture":"amd64","os":"linux","config":%s,"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' "$3" "$layer" > /tmp/image/config.json
    printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$1" > /tmp/image/manifest.json
    tar -C /tmp/image -cf /tmp/image.tar manifest.json config.json layer.tar
    ctr -n k8s.io images import /tmp/image.tar
}

# The machine: an address, a runtime, images, an API server.
ip link add uplink type dummy && ip addr add 192.0.2.10/24 dev uplink && ip link set uplink up && ip route add default via 192.0.2.1
install -D -m 0644 $here/containerd.toml /etc/containerd/config.toml
install -D -m 0644 $here/quintlet.conflist /etc/cni/net.d/10-quintlet.conflist
systemctl start containerd
until_true 300 ctr version
mkdir -p /tmp/tree/bin /tmp/tree/tmp /tmp/tree/etc
cp /bin/busybox /tmp/tree/bin/busybox
for applet in sh sleep test grep touch cat head; do ln -s busybox /tmp/tree/bin/$applet; done
image localhost/busybox:1 /tmp/tree '{"Env":["PATH=/bin"],"Cmd":["sh"]}'
image registry.k8s.io/pause:3.10 /tmp/tree '{"Entrypoint":["/bin/sleep","1000000"]}'
check "runtime has the images" "$(ctr -n k8s.io images ls -q | grep -c :) references" sh -c 'ctr -n k8s.io images ls -q | grep -q "^localhost/busybox:1$"'
mkdir -p /etc/quintlet /etc/kubernetes/manifests
systemd-run --quiet --unit=testapi $here/bin/testapi --listen 127.0.0.1:8081 --kubeconfig /etc/quintlet/kubeconfig
until_true 120 test -s /etc/quintlet/kubeconfig

# Steps of a package installation.
install -m 0755 $here/bin/quintlet /usr/bin/quintlet
for name in cri-proxy pleg-service probe-service status-reporter node-api pod-sync quintctl; do ln -sf quintlet /usr/bin/$name; done
install -m 0644 $here/systemd/*.service $here/systemd/*.target /usr/lib/systemd/system/
install -m 0644 $here/systemd/quintlet.sysusers /usr/lib/sysusers.d/quintlet.conf
install -m 0644 $here/systemd/quintlet.tmpfiles /usr/lib/tmpfiles.d/quintlet.conf
install -m 0644 $here/systemd/quintlet.env /etc/default/quintlet
systemd-sysusers quintlet.conf
systemd-tmpfiles --create quintlet.conf
# Steps of the operator, from docker/systemd/quintlet.env.
chgrp quintlet-watch /etc/quintlet/kubeconfig
chmod 0640 /etc/quintlet/kubeconfig
cp $here/manifest.yaml /etc/kubernetes/manifests/vm.yaml
install -D -m 0644 $here/config.yaml /etc/quintlet/config.yaml
sed -i 's|^QUINTLET_CONFIG_ARGS=.*|QUINTLET_CONFIG_ARGS=--config /etc/quintlet/config.yaml|' /etc/default/quintlet
dd if=/dev/zero of=/swap bs=1M count=256 2> /dev/null && chmod 0600 /swap && mkswap -q /swap && swapon /swap
# Not what pods rely on.
echo 0 > /proc/sys/vm/overcommit_memory
systemctl daemon-reload
systemctl enable --quiet quintlet.target
systemctl start --no-block quintlet.target

# Every unit starts and notifies systemd.
for unit in $units; do
    becomes 180 "$unit starts hardened" is_active "$unit"
    pid=$(property "$unit" MainPID)
    check "$unit runs under seccomp" "" grep -q '^Seccomp:.*2' "/proc/$pid/status"
    check "$unit leaves no core file" "" grep -Eq '^Max core file size +0 +0 ' "/proc/$pid/limits"
done
becomes 300 "quintctl health: all serve" quintctl health

same_mounts() {
    [ "$(readlink "/proc/$(property pod-sync MainPID)/ns/mnt")" = "$(readlink /proc/1/ns/mnt)" ]
}
check "pod-sync mounts where the runtime sees it" "" same_mounts
sees_no_identity() {
    [ -z "$(nsenter -m -t "$(property "$1" MainPID)" cat /etc/quintlet/kubeconfig 2> /dev/null)" ]
}
for unit in cri-proxy pleg-service probe-service; do
    check "$unit does not see the node's kubeconfig" "" sees_no_identity $unit
done
# The check above can fail: a service with the identity sees it.
sees_identity() {
    ! sees_no_identity "$1"
}
check "status-reporter sees the node's kubeconfig" "" sees_identity status-reporter

# A pod with a Secret.
becomes 600 "pod with a Secret is Ready" is_ready
process=$(pod_process)
check "pod has a process" "pid $process" test -n "$process"

# Cgroups of the node, made by systemd and read back.
cgroups=/sys/fs/cgroup
pods=$cgroups/kubepods.slice
memory=$(($(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo) * 1024))

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
of_slice() {
    echo "$2 of $1 is $(systemctl show -P "$2" "$1"), want about $3"
    [ "$(systemctl show -P "$2" "$1")" -le "$3" ] && [ "$(systemctl show -P "$2" "$1")" -ge "$(($3 - 4096))" ]
}
becomes 60 "kubepods.slice leaves the reservation" near $pods/memory.max $((memory - 268435456))
becomes 10 "systemd knows the limit of kubepods.slice" of_slice kubepods.slice MemoryMax $((memory - 268435456))
becomes 10 "system.slice has the weight of its reservation" has $cgroups/system.slice/cpu.weight 8
becomes 10 "besteffort pods have the least weight" has $pods/kubepods-besteffort.slice/cpu.weight 1
becomes 10 "a kernel tunable is set" has /proc/sys/vm/overcommit_memory 1
# A limit that someone else changes is written again.
echo max > $pods/memory.max
becomes 150 "kubepods.slice is limited again" near $pods/memory.max $((memory - 268435456))

# Pods that use too much, one after the other. The first pod must not notice.
container() {
    quintctl pods > /tmp/pods
    for scope in $pods/*/*/cri-containerd-*.scope; do
        id=${scope##*/cri-containerd-}
        ! ctr -n k8s.io containers info "${id%.scope}" 2> /dev/null | grep -q "\"io.kubernetes.container.name\": \"$1\"" || echo "$scope"
    done
}
has_container() {
    scope=$(container "$1")
    test -n "$scope" && echo "$scope"
}
cp $here/pressure/throttled.yaml /etc/kubernetes/manifests/
becomes 300 "burstable container runs" has_container throttled
scope=$(container throttled)
becomes 10 "memory.max is its limit" has "$scope/memory.max" 134217728
# 64Mi + 0.5 * (128Mi - 64Mi)
becomes 10 "memory.high is between request and limit" has "$scope/memory.high" 100663296
becomes 10 "memory.low is its request" has "$scope/memory.low" 67108864
# Static pods are critical, and critical pods do not swap.
becomes 10 "memory.swap.max of a static pod is 0" has "$scope/memory.swap.max" 0
becomes 10 "memory.low of burstable pods is their request" has $pods/kubepods-burstable.slice/memory.low 67108864
# Half of the request is reserved.
becomes 60 "memory.max of besteffort pods leaves half of it" near $pods/kubepods-besteffort.slice/memory.max $((memory - 268435456 - 33554432))
is_throttled() {
    sed -n 's/^high //p' "$1/memory.events" && [ "$(sed -n 's/^high //p' "$1/memory.events")" -gt 0 ]
}
becomes 300 "memory above memory.high is throttled" is_throttled "$scope"
rm /etc/kubernetes/manifests/throttled.yaml

cp $here/pressure/oom.yaml /etc/kubernetes/manifests/
is_killed() {
    quintctl explain "$1" > /tmp/explained && grep -m 1 -o 'OOMKilled.*' /tmp/explained
}
becomes 300 "container above its limit is OOMKilled" is_killed oom-quintlet-vm
rm /etc/kubernetes/manifests/oom.yaml

cp $here/pressure/forks.yaml /etc/kubernetes/manifests/
is_bounded() {
    scope=$(container forks)
    pod=$(dirname "$scope")
    echo "$(cat "$pod/pids.current") of $(cat "$pod/pids.max") processes"
    [ "$(cat "$pod/pids.max")" = 60 ] && [ "$(cat "$pod/pids.current")" = 60 ]
}
becomes 300 "fork bomb is bounded by podPidsLimit" is_bounded
rm /etc/kubernetes/manifests/forks.yaml
has_no_others() {
    quintctl pods > /tmp/pods && ! grep -E 'throttled|oom|forks' /tmp/pods
}
becomes 300 "pods that used too much are gone" has_no_others

# The pod is not affected by restarts of services.
stays() {
    is_ready && [ "$(pod_process)" = "$process" ]
}
becomes 300 "pod stays beside the others" stays
for unit in $units; do
    before=$(property "$unit" MainPID)
    systemctl restart "quintlet-$unit.service"
    becomes 180 "$unit restarted" is_active "$unit"
    check "$unit is another process" "pid $before before" test "$(property "$unit" MainPID)" != "$before"
    becomes 300 "pod stays over a restart of $unit" stays
done

# A pod-sync that hangs.
before=$(property pod-sync MainPID)
restarts=$(property pod-sync NRestarts)
kill -STOP "$before"
is_restarted() {
    [ "$(property pod-sync NRestarts)" -gt "$restarts" ] && is_active pod-sync
}
becomes 300 "stopped pod-sync is ended and restarted" is_restarted
check "it was the watchdog" "" sh -c 'journalctl --no-pager -o cat -u quintlet-pod-sync | grep -q "Watchdog timeout"'
becomes 300 "pod stays over the watchdog's kill" stays

# No service was denied an operation that it needs.
for unit in $units; do
    complaints=$(journalctl --no-pager -o cat -u "quintlet-$unit" | grep -cE 'Operation not permitted|Permission denied|EPERM|EACCES')
    check "$unit was refused nothing" "$complaints lines" test "$complaints" = 0
done
end
