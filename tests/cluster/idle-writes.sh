#!/bin/sh
# Measures what a node at rest writes to its disk: ten pods with an HTTP and an exec probe each, and `/run` in memory as on an installed node. The
# thresholds of the disk are off, since the disk of this machine may be full. Prints the bytes of each process from /proc/PID/io, and each file that
# changed. Fails if all processes together would write 1 MiB or more in a day. Not part of `make test`, since it takes real time:
#
#   KUBERNETES=DIR    a folder with etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kubectl
#   BIN_DIR=DIR       directory of the built services (target/quick)
#   WORK=DIR          a folder for all files, on a disk, which is left in place (default: a temporary one)
#   STANDALONE=yes    static pods without an API server
#   MINUTES=NUMBER    duration of the measurement (20)
#
# Needs root, openssl, containerd, CNI plugins, busybox-static, bash, curl, cc and python3. It runs in network and mount namespaces of its own.
repo=$(cd "$(dirname "$0")/../.." && pwd)
. "$repo/tests/cluster/preamble.sh"
need openssl containerd busybox bash curl cc python3
minutes=${MINUTES:-20}
base=$work/host/quintlet

# fail WHAT: ends the test with what is of use after a failure.
fail() {
    say "failed: $*"
    "$bin_dir/quintctl" --run-dir "$base/run" pods >&2 || true
    tail -n 20 "$work/logs/quintlet.log" >&2 || true
    exit 1
}

# manifests DIR: writes the manifests of ten pods.
manifests() {
    for number in 0 1 2 3 4 5 6 7 8 9; do
        cat > "$1/probed-$number.yaml" <<END
apiVersion: v1
kind: Pod
metadata: { name: probed-$number, namespace: default }
spec:
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 1
  containers:
    - name: main
      image: busybox:1
      command: [httpd, -f, -p, "8080", -h, /etc]
      livenessProbe: { httpGet: { port: 8080, path: /passwd }, periodSeconds: 10 }
      readinessProbe: { exec: { command: ["true"] }, periodSeconds: 10 }
END
    done
}

# all_ready: ten pods are Ready.
all_ready() {
    if [ -z "${STANDALONE:-}" ]; then
        [ "$(kubectl get pods | tee "$work/list" | grep -c '^probed-.* 1/1 ')" = 10 ]
    else
        [ "$("$bin_dir/quintctl" --run-dir "$base/run" pods | tee "$work/list" | grep -c 'probed-.* 1/1 ')" = 10 ]
    fi
}

# counters: the name and the process of each service, the bytes that it wrote, and those of pages that were dropped before they were written.
counters() {
    for process in "$pid_quintlet" $(pgrep -P "$pid_quintlet"); do
        echo "$(cat "/proc/$process/comm") $process $(awk '$1 == "write_bytes:" || $1 == "cancelled_write_bytes:" { print $2 }' "/proc/$process/io" | tr '\n' ' ')"
    done
}

make_machine
if [ -z "${STANDALONE:-}" ]; then
    say "control plane"
    start_control_plane
fi
mkdir -p "$base/run" "$base/manifests"
mount -t tmpfs tmpfs "$base/run"
if [ -z "${STANDALONE:-}" ]; then
    start_quintlet_node idle
else
    start_runtime host 10.88.0.0/24
    make_cgroup "$cgroup"
    cat > "$work/host/quintlet.yaml" <<END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
failCgroupV1: false
evictionHard: { memory.available: 50Mi }
imageGCHighThresholdPercent: 100
END
    start quintlet "$bin_dir/quintctl" up --config "$work/host/quintlet.yaml" --base "$base" --runtime-endpoint "unix://$runtime" --cgroup-root "/$cgroup"
fi
make_layers
stand_ins registry.k8s.io/pause:3.10 docker.io/library/busybox:1
ctr --address "$runtime" -n k8s.io images import "$work/images.tar" > "$work/logs/import.log"
if [ -z "${STANDALONE:-}" ]; then
    mkdir "$work/pods"
    manifests "$work/pods"
    kubectl apply -f "$work/pods" > "$work/logs/apply.log"
else
    manifests "$base/manifests"
fi
wait_for 180 all_ready || fail "the pods are not Ready"
say "the pods are Ready; waiting for ${SETTLE:-180} s"
sleep "${SETTLE:-180}"
counters > "$work/before"
touch "$work/mark"
say "measuring for $minutes minutes"
sleep "$((minutes * 60))"
counters > "$work/after"
all_ready || fail "the pods are not Ready any more"
for dir in "$base" /var/lib /var/log; do
    find "$dir" -newer "$work/mark" -type f -printf '%p %s bytes, changed at %TT\n'
done | sort -u > "$work/changed"
say "files that changed, of which those below run are in memory:"
cat "$work/changed" >&2
python3 - "$work/before" "$work/after" "$minutes" <<'PYTHON'
import sys
def read(path):
    rows = (line.split() for line in open(path))
    return {(name, process): (int(written), int(dropped)) for name, process, written, dropped in rows}
before, after, minutes = read(sys.argv[1]), read(sys.argv[2]), int(sys.argv[3])
if before.keys() != after.keys():
    sys.exit(f"a process was restarted: {before.keys() ^ after.keys()}")
total = 0
for key in sorted(before):
    written, dropped = (now - then for now, then in zip(after[key], before[key]))
    print(f"{key[0]:16} {written:8} bytes written, {dropped:8} of them dropped")
    total += written
day = total * 24 * 60 // minutes
print(f"all              {total:8} bytes in {minutes} minutes, {day} a day")
sys.exit(day >= 1 << 20 and "1 MiB a day or more")
PYTHON
