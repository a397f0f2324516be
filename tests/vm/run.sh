#!/bin/sh
# Boots a virtual machine with systemd as PID 1 and cgroup v2, installs the built binaries and the units of docker/systemd in it
# as a package would, and runs guest.sh there. Prints a table; exits 1 if a row is not ok. `make vm` runs this.
#
#   BIN_DIR=DIR  directory of quintlet and testapi (target/debug)
#   UNITS=DIR    directory of the units (docker/systemd)
#   VM_DIR=DIR   directory of the machine's disk, kept between runs (target/vm)
#   ACCEL=NAME   tcg, which works everywhere, or kvm, which is several times as fast (tcg)
#
# Needs root, qemu-system-x86_64 and mmdebstrap (scripts/install.sh vm). The machine has no network.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
bin_dir=${BIN_DIR:-${CARGO_TARGET_DIR:-$repo/target}/debug}
vm=${VM_DIR:-${CARGO_TARGET_DIR:-$repo/target}/vm}
# The guest runs binaries that were linked here.
suite=$(. /etc/os-release && echo "${VERSION_CODENAME:?not a Debian release}")
packages=ca-certificates,systemd,systemd-sysv,dbus,udev,kmod,linux-image-cloud-amd64,initramfs-tools,containerd,runc,containernetworking-plugins,iproute2,iptables,busybox-static
# A run under tcg takes about 320 s on two cores that are in use otherwise.
limit=${LIMIT:-2400}

say() {
    echo "vm: $*" >&2
}

# The disk: a Debian without anything of Quintlet. It is rebuilt when its inputs change.
want="$suite $packages $(cat "$here/quintlet-vm.service" | sha256sum)"
mkdir -p "$vm"
if [ "$(cat "$vm/stamp" 2>/dev/null || true)" != "$want" ]; then
    say "making the disk, once"
    rm -rf "$vm/stamp" "$vm/rootfs"
    # The sources of this machine, since it may have a mirror.
    sources=$(ls /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null | head -n 1)
    mmdebstrap --quiet --variant=minbase --include="$packages" "$suite" "$vm/rootfs" "$sources"
    install -m 0644 "$here/quintlet-vm.service" "$vm/rootfs/etc/systemd/system/quintlet-vm.service"
    ln -sf /etc/systemd/system/quintlet-vm.service "$vm/rootfs/etc/systemd/system/multi-user.target.wants/quintlet-vm.service"
    # The first boot is not interactive, and starts no runtime before it is configured.
    rm -f "$vm/rootfs/etc/systemd/system/multi-user.target.wants/containerd.service"
    echo quintlet-vm > "$vm/rootfs/etc/hostname"
    cp -L "$vm/rootfs/vmlinuz" "$vm/vmlinuz"
    cp -L "$vm/rootfs/initrd.img" "$vm/initrd.img"
    rm -f "$vm/root.ext4"
    mke2fs -q -t ext4 -L root -d "$vm/rootfs" "$vm/root.ext4" 4G
    rm -rf "$vm/rootfs"
    echo "$want" > "$vm/stamp"
fi

# Files of the package and of the test.
payload=$vm/payload
rm -rf "$payload"
mkdir -p "$payload/bin" "$payload/systemd"
cp -r "$here"/guest.sh "$here"/manifest.yaml "$here"/config.yaml "$here"/pressure "$here"/containerd.toml "$payload/"
cp "$repo"/docker/containerd/quintlet.conflist "$payload/"
cp "${UNITS:-$repo/docker/systemd}"/* "$payload/systemd/"
for binary in quintlet testapi; do
    [ -x "$bin_dir/$binary" ] || { say "no $bin_dir/$binary"; exit 1; }
    strip -o "$payload/bin/$binary" "$bin_dir/$binary"
done
tar -C "$payload" -cf "$vm/payload.tar" .
# A disk has whole sectors.
truncate -s %1M "$vm/payload.tar"

accel=${ACCEL:-tcg}
cpu=max
[ "$accel" = tcg ] || cpu=host,-arch-capabilities

: > "$vm/result"
say "booting with $accel; console in $vm/console"
status=0
timeout -k 10 "$limit" qemu-system-x86_64 -accel "$accel" -cpu "$cpu" -smp 2 -m 2048 -no-reboot -display none -monitor none -nic none \
    -kernel "$vm/vmlinuz" -initrd "$vm/initrd.img" -append "root=/dev/vda rw console=ttyS0 quiet panic=-1 systemd.show_status=no systemd.mask=serial-getty@ttyS0.service systemd.journald.forward_to_console=1" \
    -drive "file=$vm/root.ext4,if=virtio,format=raw,snapshot=on" -drive "file=$vm/payload.tar,if=virtio,format=raw,readonly=on" \
    -serial "file:$vm/console" -serial "file:$vm/result" < /dev/null || status=$?
[ "$status" = 0 ] || say "qemu ended with $status (124: not done after $limit s)"

# Rows are `row|NAME|ok or FAILED|DETAIL`, the last line is `end|ok or FAILED`.
tr -d '\r' < "$vm/result" > "$vm/lines"
awk -F '|' '$1 == "row" { printf "%-52s %-7s %s\n", $2, $3, $4 }' "$vm/lines"
if ! grep -q '^end|ok$' "$vm/lines" || grep -q '^row|[^|]*|FAILED' "$vm/lines"; then
    grep '^log|' "$vm/lines" | cut -d '|' -f 2- >&2 || true
    say "FAILED; console in $vm/console, result in $vm/result"
    exit 1
fi
echo "vm: ok"
