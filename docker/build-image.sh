#!/bin/sh
# Builds the images quintlet:$TAG (the services) and quintlet-containerd:$TAG (a runtime to try them with) from binaries of this
# machine. Needs no registry and no BuildKit; docker/Dockerfile says how to build them from the sources.
#
#   BIN_DIR=target/release docker/build-image.sh [services|containerd]...
#
# BIN_DIR      directory of the built services (default: target/debug)
# TAG          tag of the images (default: dev)
# MAX_SIZE_MB  fails if the image of the services is bigger (default: 60, the limit of a release)
# DOCKER_HOST  the Docker Engine, as the docker client reads it
set -eu

here=$(cd "$(dirname "$0")" && pwd)
repo=$(dirname "$here")
bin_dir=${BIN_DIR:-$repo/target/debug}
tag=${TAG:-dev}
max_size=${MAX_SIZE_MB:-60}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

# build IMAGE TREE: builds from an archive, since copying a tree into an image loses the owners of files.
build() {
    mkdir "$2.context"
    tar -C "$2" -cf "$2.context/tree.tar" .
    # The classic builder ends at its target, the first stage, and needs nothing of the others.
    DOCKER_BUILDKIT=0 docker build -q -t "$1" -f "$here/Dockerfile" --target prebuilt "$2.context" > /dev/null
    echo "$1"
}

image_services() {
    [ -x "$bin_dir/quintlet" ] || { echo "build-image: no $bin_dir/quintlet" >&2; exit 1; }
    # A build of the whole workspace has the failpoints of tests.
    "$repo/scripts/shipped-names.py" "$bin_dir/quintlet"
    "$here/tree.sh" services "$work/services" "$bin_dir/quintlet"
    build "quintlet:$tag" "$work/services"
    size=$(($(docker image inspect -f '{{.Size}}' "quintlet:$tag") / 1000000))
    [ "$size" -le "$max_size" ] || {
        echo "build-image: quintlet:$tag has $size MB, more than $max_size MB (MAX_SIZE_MB); is $bin_dir that of make build?" >&2
        exit 1
    }
}

image_containerd() {
    "$here/tree.sh" containerd "$work/containerd"
    build "quintlet-containerd:$tag" "$work/containerd"
}

[ $# -gt 0 ] || set -- services containerd
for image in "$@"; do
    case $image in
        services | containerd) "image_$image" ;;
        *) echo "build-image: no image $image; there are services and containerd" >&2; exit 64 ;;
    esac
done
