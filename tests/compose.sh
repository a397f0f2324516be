#!/bin/sh
# Starts docker/compose.yaml with three instances of probe-service and a follower of pleg-service until pods are Ready, and removes
# everything again, on a private Docker Engine. Two programs of the profile `observe` run, too: Prometheus, as the binary of
# scripts/install.sh in place of its image, and the receiver of spans of the tests in place of the collector.
#
#   BIN_DIR=target/debug tests/compose.sh
#
# OTLP_RECEIVER is the receiver of spans (default: otlp-receiver in BIN_DIR).
# Needs root, dockerd, docker, docker-compose, containerd, runc, CNI plugins, busybox-static and cc; no registry, and no
# network of the host is touched.
set -eu

repo=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d /tmp/quintlet-compose.XXXXXX)
name=quintlet-compose-$$
project=qc$$

export DOCKER_HOST="unix://$work/docker.sock"
export COMPOSE_PROJECT_NAME="$project" COMPOSE_FILE="$repo/docker/compose.yaml"
export QUINTLET_ROOT="$work/root" QUINTLET_MANIFESTS="$work/manifests" QUINTLET_CGROUP_ROOT="/$name" TAG=test
# The engine has no network. Images of a registry are not there.
export QUINTLET_NETWORK_MODE=none COMPOSE_PROFILES=probes,follower
export QUINTLET_PROMETHEUS_IMAGE=prometheus:test QUINTLET_COLLECTOR_IMAGE=otlp-receiver:test
export BIN_DIR="${BIN_DIR:-$repo/target/debug}"
dockerd=

say() {
    echo "compose: $*" >&2
}

# until SECONDS COMMAND...: waits for the command to succeed.
until_true() {
    limit=$(($(date +%s) + $1))
    shift
    until "$@" > "$work/last" 2>&1; do
        [ "$(date +%s)" -lt "$limit" ] || { say "gave up on: $*; last:"; cat "$work/last" >&2; return 1; }
        sleep 0.2
    done
}

mounts_below() {
    cut -d ' ' -f 2 /proc/mounts | grep "^$1/" | sort -r || true
}

gone() {
    ! kill -0 "$1" 2>/dev/null
}

cgroups() {
    find /sys/fs/cgroup -depth -type d -path "/sys/fs/cgroup*/$name*" 2>/dev/null || true
}

# Stops everything that this script started, in any state.
clean() {
    trap - EXIT INT TERM
    if [ -n "$dockerd" ] && ! gone "$dockerd"; then
        docker-compose down -v --timeout 20 > /dev/null 2>&1 || true
        kill -TERM "$dockerd" 2>/dev/null || true
        until_true 60 gone "$dockerd" || kill -KILL "$dockerd" 2>/dev/null || true
    fi
    for point in $(mounts_below "$work"); do
        umount -l "$point" || true
    done
    cgroups | while read -r tree; do
        rmdir "$tree" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap 'status=$?; clean; exit $status' EXIT
trap 'exit 130' INT TERM

mkdir "$work/root" "$work/manifests"
cp "$repo/examples/web.yaml" "$work/manifests/"
# Mounts of pod-sync must propagate to containerd; most machines have / shared.
mount --bind "$work/root" "$work/root"
mount --make-shared "$work/root"

say "starting a Docker Engine"
setsid dockerd --host "$DOCKER_HOST" --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/pid" \
    --bridge none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --cgroup-parent "/$name" \
    > "$work/dockerd.log" 2>&1 &
dockerd=$!
until_true 60 docker version || { cat "$work/dockerd.log" >&2; exit 1; }

say "building the images"
! MAX_SIZE_MB=5 "$repo/docker/build-image.sh" services > "$work/build.log" 2>&1 || { say "an image of more than the limit passes"; exit 1; }
grep -q 'quintlet:test has [0-9]* MB, more than 5 MB' "$work/build.log" || { cat "$work/build.log" >&2; exit 1; }
# The binary of `make quick` has no optimization. The limit of a release is the default.
MAX_SIZE_MB=${MAX_SIZE_MB:-180} "$repo/docker/build-image.sh" > "$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }

prometheus=${CARGO_TARGET_DIR:-$repo/target}/tools/prometheus/usr/bin/prometheus
[ -x "$prometheus" ] || { say "no $prometheus; run scripts/install.sh test"; exit 1; }
receiver=${OTLP_RECEIVER:-$BIN_DIR/otlp-receiver}
[ -x "$receiver" ] || { say "no $receiver; run cargo build -p quintlet-e2e --bin otlp-receiver"; exit 1; }
# program_image IMAGE PROGRAM: an image that runs a program of this machine, with the libraries that it loads and a directory of its user.
program_image() {
    program=$(basename "$2")
    mkdir -p "$work/image/bin" "$work/image/tmp"
    install -m 0755 "$(readlink -f "$2")" "$work/image/bin/$program"
    for library in $(ldd "$2" 2>/dev/null | grep -o '/[^ ]*' | sort -u); do
        install -D -m 0755 "$(readlink -f "$library")" "$work/image$library"
    done
    install -d -o 65534 -g 65534 "$work/image/$program"
    tar -C "$work/image" -cf "$work/tree.tar" .
    printf 'FROM scratch\nADD tree.tar /\nUSER 65534:65534\nENTRYPOINT ["/bin/%s"]\n' "$program" > "$work/Dockerfile"
    tar -C "$work" -c Dockerfile tree.tar | docker build -q -t "$1" - > "$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
    rm -rf "$work/image" "$work/tree.tar"
}
program_image prometheus:test "$prometheus"
strip -o "$work/otlp-receiver" "$receiver"
program_image otlp-receiver:test "$work/otlp-receiver"

say "docker-compose up"
docker-compose up -d > "$work/up.log" 2>&1 || { cat "$work/up.log" >&2; exit 1; }

pods() {
    docker-compose exec -T pod-sync quintctl pods
}
web_is_ready() {
    pods | tee "$work/pods" | grep -Eq '^web[^ ]* +1/1 +Running' || { cat "$work/pods"; false; }
}
logs() {
    docker-compose ps >&2 || true
    for service in network containerd cri-proxy pleg-service pleg-follower probe-service probe-service-1 status-reporter pod-sync \
        prometheus collector; do
        docker-compose logs --no-color --tail 30 "$service" >&2 || true
    done
}
until_true 60 web_is_ready || { logs; exit 1; }
cat "$work/pods"

# The pod web and pods like it under other names.
pod_named() {
    sed "s/^  name: web\$/  name: $1/; s/quintlet.dev\/expect: .*/quintlet.dev\/expect: Ready/" "$repo/examples/web.yaml"
}
ready() {
    pods | tee "$work/pods" | grep -Eq "^$1[^ ]* +1/1 +Running" || { cat "$work/pods"; false; }
}
# The follower is not well while its leader is away.
healthy() {
    docker-compose exec -T pod-sync quintctl health &&
        docker-compose exec -T pleg-follower quintctl --run-dir /run/quintlet/followers/1 health pleg-service
}
until_true 60 healthy || { logs; exit 1; }
for instance in probe-0 probe-1 probe-2; do
    grep -q "^probe-service $instance  *serving" "$work/last" || { say "no instance $instance:"; cat "$work/last" >&2; exit 1; }
done

# query EXPRESSION RESULT: whether Prometheus, in the network namespace of all containers, gives a number.
query() {
    docker-compose exec -T containerd wget -q -O - "http://127.0.0.1:9090/api/v1/query?query=$1" | tee "$work/answer"
    grep -q "\"$2\"\]}\]" "$work/answer"
}
say "Prometheus of the profile observe"
docker-compose up -d prometheus > "$work/up.log" 2>&1 || { cat "$work/up.log" >&2; exit 1; }
# By the names that the dashboard and the alerts use.
until_true 60 query 'count(quintlet_service_up{job="quintlet",node="quintlet"}==1)' 5 || { logs; exit 1; }
until_true 60 query 'count(quintlet_cri_connected{service="cri-proxy"}==1)' 1 || { logs; exit 1; }
docker-compose exec -T containerd wget -q -O - http://127.0.0.1:9090/api/v1/rules > "$work/rules"
[ "$(grep -o '"type":"alerting"' "$work/rules" | wc -l)" = "$(grep -c '^ *- alert:' "$repo/charts/quintlet/files/alerts.yaml")" ] ||
    { say "Prometheus has not all alerts:"; cat "$work/rules" >&2; exit 1; }

say "spans of the services at the collector's address"
docker-compose up -d collector > "$work/up.log" 2>&1 || { cat "$work/up.log" >&2; exit 1; }
pod_named traced > "$work/manifests/traced.yaml"
until_true 60 ready traced || { logs; exit 1; }
spans_of() {
    docker-compose logs --no-color collector | tee "$work/answer"
    grep -q "spans of $1\$" "$work/answer"
}
# status-reporter has spans of writes to an API server only.
for service in cri-proxy pleg-service probe-service pod-sync; do
    until_true 60 spans_of $service || { logs; exit 1; }
done
rm "$work/manifests/traced.yaml"

# The IDs of the sandboxes and containers of the pod web.
web_containers() {
    docker-compose exec -T containerd ctr --address /run/quintlet/runtime/containerd.sock -n k8s.io \
        containers list -q 'labels."io.kubernetes.pod.name"~="^web-"' | sort
}
web_containers > "$work/created"
[ -s "$work/created" ] || { say "containerd lists no container of the pod"; exit 1; }

say "killing each service; it serves again, a new pod becomes Ready, and the first one stays as it is"
for service in cri-proxy pleg-service probe-service status-reporter pod-sync; do
    container=$(docker-compose ps -q $service)
    docker kill --signal KILL "$container" > /dev/null
    # The conditions below do not hold yet.
    ! healthy > "$work/last" 2>&1 || { say "$service was killed and all are healthy"; cat "$work/last" >&2; exit 1; }
    docker start "$container" > /dev/null
    until_true 60 healthy || { logs; exit 1; }
    pod_named "after-$service" > "$work/manifests/after-$service.yaml"
    until_true 60 ready "after-$service" || { logs; exit 1; }
    until_true 60 web_is_ready || { logs; exit 1; }
    rm "$work/manifests/after-$service.yaml"
done
grep -Eq '^web[^ ]* +1/1 +Running +0( |$)' "$work/pods" || { say "the pod was restarted:"; cat "$work/pods" >&2; logs; exit 1; }
web_containers > "$work/kept"
cmp -s "$work/created" "$work/kept" || { say "the pod was created again:"; diff "$work/created" "$work/kept" >&2; logs; exit 1; }

say "killing containerd with its pods; the probes reach their successors"
container=$(docker-compose ps -q containerd)
docker kill --signal KILL "$container" > /dev/null
until_true 60 sh -c "! docker-compose exec -T pod-sync quintctl health" || { logs; exit 1; }
docker start "$container" > /dev/null
until_true 60 healthy || { logs; exit 1; }
# This pod is Ready only if probe-service is in the network namespace in which containerd created the pod.
pod_named after-containerd > "$work/manifests/after-containerd.yaml"
until_true 60 ready after-containerd || { logs; exit 1; }
until_true 90 web_is_ready || { logs; exit 1; }
rm "$work/manifests/after-containerd.yaml"

say "docker-compose down"
docker-compose down -v --timeout 20 > "$work/down.log" 2>&1 || { cat "$work/down.log" >&2; exit 1; }
left=$(docker ps -aq; docker volume ls -q; mounts_below "$work/root"; cgroups | grep -v "/$name\$" || true)
[ -z "$left" ] || { say "left over:"; echo "$left" >&2; exit 1; }
kill -TERM "$dockerd"
until_true 60 gone "$dockerd"
clean
left=$(cgroups; cut -d ' ' -f 2 /proc/mounts | grep "^$work" || true)
[ -z "$left" ] || { say "left over:"; echo "$left" >&2; exit 1; }
say "ok"
