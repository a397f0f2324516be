#!/bin/sh
# Builds the images quintlet:$TAG (the services) and quintlet-containerd:$TAG (a runtime to try them with) from binaries of this
# machine. Needs no registry.
#
#   BIN_DIR=target/release docker/build-image.sh [services|containerd]...
#
# BIN_DIR      directory of the built services (default: target/debug)
# TAG          tag of the images (default: dev)
# DOCKER_HOST  the Docker Engine, as the docker client reads it
set -eu

here=$(cd "$(dirname "$0")" && pwd)
repo=$(dirname "$here")
bin_dir=${BIN_DIR:-$repo/target/debug}
tag=${TAG:-dev}
# Users of the services without root, each with a group of the same ID, and the group of services that watch others.
pleg=65530 probe=65531 reporter=65532 node_api=65533 watch=65529

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

# add TREE PROGRAM [PLACE]: adds a program and the libraries that it loads, at the paths where it looks for them.
add() {
    program=$(readlink -f "$2")
    place=${3:-/usr/local/bin/$(basename "$2")}
    install -D -m 0755 "$program" "$1$place"
    for library in $( (ldd "$program" 2>/dev/null || true) | grep -o '/[^ ]*' | sort -u); do
        [ -e "$1$library" ] || install -D -m 0755 "$(readlink -f "$library")" "$1$library"
    done
}

find_program() {
    PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v "$1" || {
        echo "build-image: $1 is needed; try: apt-get install $2" >&2
        exit 1
    }
}

# build NAME TREE: builds from an archive, since copying a tree into an image loses the owners of files.
build() {
    mkdir "$2.context"
    tar -C "$2" -cf "$2.context/tree.tar" .
    docker build -q -t "$1" -f "$here/Dockerfile" "$2.context" > /dev/null
    echo "$1"
}

base() {
    mkdir -p "$1/etc" "$1/var" "$1/run" "$1/tmp" "$1/root"
    chmod 1777 "$1/tmp"
    printf 'root:x:0:0:root:/root:/bin/sh\n' > "$1/etc/passwd"
    printf 'root:x:0:\nquintlet-watch:x:%s:\n' $watch > "$1/etc/group"
    for user in pleg:$pleg probe:$probe reporter:$reporter node-api:$node_api; do
        id=${user#*:} name=quintlet-${user%:*}
        echo "$name:x:$id:$id:$name:/:/bin/false" >> "$1/etc/passwd"
        echo "$name:x:$id:" >> "$1/etc/group"
    done
}

image_services() {
    tree=$work/services
    base "$tree"
    [ -x "$bin_dir/quintlet" ] || { echo "build-image: no $bin_dir/quintlet" >&2; exit 1; }
    # A build of the whole workspace has the failpoints of tests.
    "$repo/scripts/shipped-names.py" "$bin_dir/quintlet"
    add "$tree" "$bin_dir/quintlet"
    strip "$tree/usr/local/bin/quintlet" 2>/dev/null || true
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
probe $probe $node_api 2750
status $reporter $node_api 2750
node-api $node_api $node_api 0700
state 0 0 0700
keys 0 0 0700
END
    build "quintlet:$tag" "$tree"
}

image_containerd() {
    tree=$work/containerd
    base "$tree"
    busybox=$(find_program busybox busybox-static)
    install -D -m 0755 "$busybox" "$tree/bin/busybox"
    for applet in $("$busybox" --list); do
        [ "$applet" = busybox ] || ln -s busybox "$tree/bin/$applet"
    done
    for program in containerd containerd-shim-runc-v2 ctr; do
        add "$tree" "$(find_program $program containerd)"
    done
    add "$tree" "$(find_program runc runc)"
    for dir in /usr/lib/cni /opt/cni/bin /usr/libexec/cni; do
        for plugin in bridge host-local loopback; do
            [ ! -x "$dir/$plugin" ] || add "$tree" "$dir/$plugin" "/opt/cni/bin/$plugin"
        done
    done
    [ -x "$tree/opt/cni/bin/bridge" ] || { echo "build-image: no CNI plugins; try: apt-get install containernetworking-plugins" >&2; exit 1; }
    install -D -m 0644 "$here/containerd/config.toml" "$tree/etc/containerd/config.toml"
    install -D -m 0644 "$here/containerd/quintlet.conflist" "$tree/etc/cni/net.d/10-quintlet.conflist"
    install -D -m 0755 "$here/containerd/entrypoint.sh" "$tree/usr/local/bin/entrypoint.sh"
    pod_images "$tree/usr/share/quintlet/images.tar" "$tree"
    build "quintlet-containerd:$tag" "$tree"
}

# Images for pods on nodes without a registry: pause and busybox.
pod_images() {
    mkdir -p "$work/pause" "$work/busybox" "$(dirname "$1")"
    cc -static -Os -s -o "$work/pause/pause" "$repo/services/shared/localnode/src/pause.c"
    printf 'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n' > "$work/pause.Dockerfile"
    docker build -q -t registry.k8s.io/pause:3.10 -f "$work/pause.Dockerfile" "$work/pause" > /dev/null
    cp -a "$2/bin" "$work/busybox/bin"
    mkdir -p "$work/busybox/etc" "$work/busybox/tmp" "$work/busybox/var/www"
    cp "$2/etc/passwd" "$2/etc/group" "$work/busybox/etc/"
    printf 'FROM scratch\nCOPY . /\nENV PATH=/usr/sbin:/usr/bin:/sbin:/bin\nCMD ["sh"]\n' > "$work/busybox.Dockerfile"
    docker build -q -t localhost/busybox:1 -f "$work/busybox.Dockerfile" "$work/busybox" > /dev/null
    docker save -o "$1" registry.k8s.io/pause:3.10 localhost/busybox:1
}

[ $# -gt 0 ] || set -- services containerd
for image in "$@"; do
    case $image in
        services | containerd) "image_$image" ;;
        *) echo "build-image: no image $image; there are services and containerd" >&2; exit 64 ;;
    esac
done
