#!/bin/sh
# Starts containerd with the images that pods need. On a stop signal, its containers end with the PID namespace. Their cgroups are in the
# host's tree and are removed here.
set -eu

cgroup_root=${CGROUP_ROOT:-/quintlet-compose}
export CONTAINERD_ADDRESS="${CONTAINERD_ADDRESS:-/run/quintlet/runtime/containerd.sock}"

# Docker mounts it read-only; the bridge plugin turns on forwarding in this network namespace. It is opened, since busybox's
# `test -w` is true for root whatever the mount says.
(: >> /proc/sys/net/ipv4/ip_forward) 2>/dev/null || mount -o remount,rw /proc/sys

stop() {
    trap '' TERM INT
    kill -TERM "$containerd" 2>/dev/null || true
    wait "$containerd" || true
    # In a PID namespace of our own what is left are shims and containers; in the host's it is everything else.
    [ $$ -ne 1 ] || kill -KILL -1 2>/dev/null || true
    for tree in "/sys/fs/cgroup$cgroup_root" "/sys/fs/cgroup/"*"$cgroup_root"; do
        for try in 1 2 3 4 5; do
            [ -d "$tree" ] || break
            find "$tree" -depth -type d -exec rmdir {} \; 2>/dev/null || true
            sleep 0.1
        done
    done
    # What pod-sync mounted for the pods is mounted on the host, too.
    if [ -n "${QUINTLET_ROOT:-}" ]; then
        for point in $(cut -d ' ' -f 2 /proc/mounts | grep "^$QUINTLET_ROOT/" | sort -r); do
            umount -l "$point" || true
        done
    fi
    exit 0
}
trap stop TERM INT

# start ADDRESS: starts containerd and waits until it answers at the address.
start() {
    containerd --address "$1" &
    containerd=$!
    until ctr --address "$1" version > /dev/null 2>&1; do
        kill -0 "$containerd" || exit 1
        sleep 0.1
    done
}

# Loads the images before the socket is visible: without them a sandbox would fail once and back off.
start /tmp/import.sock
ctr --address /tmp/import.sock -n k8s.io images import --snapshotter "${SNAPSHOTTER:-overlayfs}" /usr/share/quintlet/images.tar
kill -TERM "$containerd"
wait "$containerd" || true

start "$CONTAINERD_ADDRESS"
# A signal ends the wait before containerd has exited.
while kill -0 "$containerd" 2>/dev/null; do
    wait "$containerd" || true
done
exit 1
