#!/bin/sh
# Makes the files of an image below TREE. build-image.sh runs this for images without a base, the Dockerfile in its stages.
#
#   docker/tree.sh services TREE BINARY     the services, from the program of `make build`
#   docker/tree.sh containerd TREE          a runtime to try them with, and images for its pods; from the programs of this machine
#
# LIBRARIES  no: without the shared libraries of the services, which the base of the image has (default: yes)
# STRIP      the program that removes debug symbols (default: strip)
set -eu

here=$(cd "$(dirname "$0")" && pwd)
repo=$(dirname "$here")
# Users of the services without root, each with a group of the same ID, and the group of services that watch others.
pleg=65530 probe=65531 reporter=65532 node_api=65533 watch=65529

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

# add PROGRAM [PLACE]: adds a program and the libraries that it loads, at the paths where it looks for them.
add() {
    program=$(readlink -f "$1")
    install -D -m 0755 "$program" "$tree${2:-/usr/local/bin/$(basename "$1")}"
    for library in $( (ldd "$program" 2>/dev/null || true) | grep -o '/[^ ]*' | sort -u); do
        [ -e "$tree$library" ] || install -D -m 0755 "$(readlink -f "$library")" "$tree$library"
    done
}

find_program() {
    PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v "$1" || {
        echo "tree.sh: $1 is needed; try: apt-get install $2" >&2
        exit 1
    }
}

# The users, added to those of the base of the image if TREE has them.
base() {
    mkdir -p "$tree/etc" "$tree/var" "$tree/run" "$tree/tmp" "$tree/root"
    chmod 1777 "$tree/tmp"
    [ -e "$tree/etc/passwd" ] || printf 'root:x:0:0:root:/root:/bin/sh\n' > "$tree/etc/passwd"
    [ -e "$tree/etc/group" ] || printf 'root:x:0:\n' > "$tree/etc/group"
    echo "quintlet-watch:x:$watch:" >> "$tree/etc/group"
    for user in pleg:$pleg probe:$probe reporter:$reporter node-api:$node_api; do
        id=${user#*:} name=quintlet-${user%:*}
        echo "$name:x:$id:$id:$name:/:/bin/false" >> "$tree/etc/passwd"
        echo "$name:x:$id:" >> "$tree/etc/group"
    done
}

services_tree() {
    base
    if [ "${LIBRARIES:-yes}" = no ]; then
        install -D -m 0755 "$1" "$tree/usr/local/bin/quintlet"
    else
        add "$1" /usr/local/bin/quintlet
    fi
    "${STRIP:-strip}" "$tree/usr/local/bin/quintlet"
    for name in cri-proxy pleg-service probe-service status-reporter node-api pod-sync quintctl; do
        ln -s quintlet "$tree/usr/local/bin/$name"
    done
    # Named volumes start as copies of these directories: sockets in them get the group of the directory.
    while read -r dir owner group mode; do
        install -d -m "$mode" -o "$owner" -g "$group" "$tree/run/quintlet/$dir"
    done <<END
runtime 0 0 0700
cri/admin 0 0 0700
cri/sync 0 0 0700
cri/read 0 $pleg 2750
cri/node-api 0 $node_api 2750
cri/probe 0 $probe 2750
podsync 0 $watch 2750
pleg $pleg $watch 2750
followers/1/pleg $pleg $watch 2750
probe $probe $node_api 2750
status $reporter $node_api 2750
node-api $node_api $node_api 0700
state 0 0 0700
keys 0 0 0700
END
}

containerd_tree() {
    base
    busybox=$(find_program busybox busybox-static)
    install -D -m 0755 "$busybox" "$tree/bin/busybox"
    for applet in $("$busybox" --list); do
        [ "$applet" = busybox ] || ln -s busybox "$tree/bin/$applet"
    done
    for program in containerd containerd-shim-runc-v2 ctr; do
        add "$(find_program $program containerd)"
    done
    add "$(find_program runc runc)"
    for dir in /usr/lib/cni /opt/cni/bin /usr/libexec/cni; do
        for plugin in bridge host-local loopback; do
            [ ! -x "$dir/$plugin" ] || add "$dir/$plugin" "/opt/cni/bin/$plugin"
        done
    done
    [ -x "$tree/opt/cni/bin/bridge" ] || { echo "tree.sh: no CNI plugins; try: apt-get install containernetworking-plugins" >&2; exit 1; }
    install -D -m 0644 "$here/containerd/config.toml" "$tree/etc/containerd/config.toml"
    install -D -m 0644 "$here/containerd/quintlet.conflist" "$tree/etc/cni/net.d/10-quintlet.conflist"
    install -D -m 0755 "$here/containerd/entrypoint.sh" "$tree/usr/local/bin/entrypoint.sh"
    pod_images "$tree/usr/share/quintlet/images.tar"
}

# pod_images ARCHIVE: images for pods on nodes without a registry, pause and busybox, in the form of `docker save`.
pod_images() {
    mkdir -p "$work/pause" "$work/busybox/etc" "$work/busybox/tmp" "$work/busybox/var/www" "$work/images" "$(dirname "$1")"
    cc -static -Os -s -o "$work/pause/pause" "$repo/services/shared/localnode/src/pause.c"
    cp -a "$tree/bin" "$work/busybox/bin"
    cp "$tree/etc/passwd" "$tree/etc/group" "$work/busybox/etc/"
    pod_image pause registry.k8s.io/pause:3.10 '{"User":"65535:65535","Entrypoint":["/pause"]}'
    pod_image busybox localhost/busybox:1 '{"Env":["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],"Cmd":["sh"]}'
    echo "[$(cat "$work/images/pause.entry"),$(cat "$work/images/busybox.entry")]" > "$work/images/manifest.json"
    rm "$work/images/"*.entry
    tar -C "$work/images" --owner=0 --group=0 --numeric-owner -cf "$1" .
}

# pod_image NAME REFERENCE SETTINGS: the layer and the configuration of an image with the files in $work/NAME.
pod_image() {
    case $(uname -m) in aarch64) architecture=arm64 ;; *) architecture=amd64 ;; esac
    mkdir "$work/images/$1"
    tar -C "$work/$1" --owner=0 --group=0 --numeric-owner -cf "$work/images/$1/layer.tar" .
    id=$(sha256sum "$work/images/$1/layer.tar" | cut -d ' ' -f 1)
    echo "{\"architecture\":\"$architecture\",\"os\":\"linux\",\"config\":$3,\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[\"sha256:$id\"]}}" \
        > "$work/images/$1.json"
    echo "{\"Config\":\"$1.json\",\"RepoTags\":[\"$2\"],\"Layers\":[\"$1/layer.tar\"]}" > "$work/images/$1.entry"
}

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 64
}

kind=${1:-}
tree=${2:-}
[ -n "$tree" ] || usage
mkdir -p "$tree"
case $kind in
    services) [ -x "${3:-}" ] || { echo "tree.sh: no program ${3:-}" >&2; exit 1; }; services_tree "$3" ;;
    containerd) containerd_tree ;;
    *) usage ;;
esac
