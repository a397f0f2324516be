#!/bin/sh
# Boots a virtual machine of Debian 13 with systemd as PID 1 and cgroup v2, installs the built binaries and the units of docker/systemd
# in it as a package would, and runs the cases of cases/ there. Prints a row per check; exits 1 if a row is not ok. `make vm` runs this.
#
#   CASES="A B"  cases to run (all of cases/list)
#   FROM=CASE    the first case to run
#   NUMA=yes     a machine with two sockets and NUMA nodes, for the case devices
#   KILLS=N      times that the machine's power is cut in the case power (20)
#   SEED=N       seed of the times at which it is cut (random; printed)
#   WINDOW=N     longest time in seconds from the start of a burst to the cut (40)
#   BIN_DIR=DIR  directory of quintlet, testapi, quintlet-device-plugin and quintlet-dra-driver (target/release)
#   KUBELET=FILE  a static kubelet 1.35 or 1.36, for the case replace, which has a machine of its own
#   QUOTA_TEST=FILE  unit tests of pod-sync-direct-volumes, for the case quotas
#   UNITS=DIR    directory of the units (docker/systemd)
#   VM_DIR=DIR   directory of the machine's disks, kept between runs (target/vm)
#   ACCEL=NAME   tcg, which works everywhere, or kvm, which is several times as fast (tcg)
#   LIMIT=N      seconds after which a boot of the machine is ended (3600)
#
# Needs root and the packages of `scripts/install.sh vm`. The machine has no network.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
bin_dir=${BIN_DIR:-${CARGO_TARGET_DIR:-$repo/target}/release}
vm=${VM_DIR:-${CARGO_TARGET_DIR:-$repo/target}/vm}
# A kernel that can map users of tmpfs (6.3 and later), and the containerd and runc of Debian's unstable release, for user namespaces.
suite=trixie
packages=apparmor,ca-certificates,containerd,containernetworking-plugins,crun,curl,busybox-static,dbus,e2fsprogs,initramfs-tools,iproute2,iptables,jq,kmod,linux-image-amd64,nfs-kernel-server,open-iscsi,runc,systemd,systemd-sysv,tgt,udev,xfsprogs
limit=${LIMIT:-3600}

say() {
    echo "vm: $*" >&2
}

# The disk: a Debian without anything of Quintlet. It is rebuilt when its inputs change.
want="$suite $packages $(cat "$here/vm-cases.service" "$here/preferences" | sha256sum)"
mkdir -p "$vm"
if [ "$(cat "$vm/stamp" 2>/dev/null || true)" != "$want" ]; then
    say "making the disk, once"
    rm -rf "$vm/stamp" "$vm/rootfs"
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep -m 1 '/debian/$' || true)
    mirror=${mirror:-http://deb.debian.org/debian/}
    # Lists of sid expire within days, and mirrors may be older. The initial RAM disk has what the disk needs, so that it is unpacked fast.
    mmdebstrap --quiet --variant=minbase --include="$packages" \
        --setup-hook="mkdir -p \"\$1/etc/apt/preferences.d\" && cp '$here/preferences' \"\$1/etc/apt/preferences.d/quintlet\"" \
        --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d" && echo MODULES=list > "$1/etc/initramfs-tools/conf.d/quintlet"' \
        --essential-hook='printf "virtio_pci\nvirtio_blk\next4\n" > "$1/etc/initramfs-tools/modules"' \
        "$suite" "$vm/rootfs" "deb $mirror $suite main" "deb [check-valid-until=no] $mirror sid main"
    install -m 0644 "$here/vm-cases.service" "$vm/rootfs/etc/systemd/system/vm-cases.service"
    mkdir -p "$vm/rootfs/etc/systemd/system/multi-user.target.wants"
    ln -sf /etc/systemd/system/vm-cases.service "$vm/rootfs/etc/systemd/system/multi-user.target.wants/vm-cases.service"
    # Started by the cases that need them.
    for unit in containerd nfs-server nfs-client.target rpcbind iscsid open-iscsi tgt; do
        find "$vm/rootfs/etc/systemd/system" -name "$unit*" -type l -delete
    done
    echo quintlet-vm > "$vm/rootfs/etc/hostname"
    cp -L "$vm"/rootfs/boot/vmlinuz-* "$vm/vmlinuz"
    cp -L "$vm"/rootfs/boot/initrd.img-* "$vm/initrd.img"
    rm -f "$vm/root.ext4"
    mke2fs -q -t ext4 -L root -d "$vm/rootfs" "$vm/root.ext4" 4G
    rm -rf "$vm/rootfs"
    echo "$want" > "$vm/stamp"
fi

# Files of the package and of the test.
payload=$vm/payload
rm -rf "$payload"
mkdir -p "$payload/bin" "$payload/systemd"
cp -r "$here"/guest.sh "$here"/lib.sh "$here"/setup.sh "$here"/cases "$here"/pods "$here"/network "$here"/config.yaml "$here"/containerd.toml \
    "$here"/testapi.service "$payload/"
cp "$repo"/docker/containerd/quintlet.conflist "$payload/"
cp "${UNITS:-$repo/docker/systemd}"/quintlet* "$payload/systemd/"
for binary in quintlet testapi quintlet-device-plugin quintlet-dra-driver; do
    [ -x "$bin_dir/$binary" ] || { say "no $bin_dir/$binary"; exit 1; }
    strip -o "$payload/bin/$binary" "$bin_dir/$binary"
done
[ -z "${QUOTA_TEST:-}" ] || strip -o "$payload/bin/quota-test" "$QUOTA_TEST"
for case in ${CASES:-$(sed -n "/^${FROM:-.*}\$/,\$p" "$here/cases/list")}; do
    [ -e "$here/cases/$case.sh" ] || { say "no case $case"; exit 1; }
    echo "$case"
done > "$payload/list"
kills=0
if grep -qx power "$payload/list"; then kills=${KILLS:-20}; fi
echo "$kills" > "$payload/kills"
seed=${SEED:-$(date +%s)}
# The kubelet that Quintlet replaces.
if grep -qx replace "$payload/list"; then
    [ "$(wc -l < "$payload/list")" = 1 ] || { say "the case replace runs alone: CASES=replace"; exit 1; }
    [ -x "${KUBELET:-}" ] || { say "the case replace needs KUBELET=FILE, a kubelet that can be executed; it is '${KUBELET:-}'"; exit 1; }
    cp "$KUBELET" "$payload/bin/kubelet"
fi
# The .deb of the binary, for a node that it is installed on.
if grep -qx -e package -e replace "$payload/list"; then
    "$repo/scripts/dist.sh" "$bin_dir/quintlet" "$vm/packages" > /dev/null
    mkdir "$payload/packages"
    cp "$vm"/packages/quintlet_*.deb "$payload/packages/"
    rm "$payload/bin/quintlet"
fi
tar -C "$payload" -cf "$vm/payload.tar" .
# A disk has whole sectors.
truncate -s %1M "$vm/payload.tar"

accel=${ACCEL:-tcg}
cpu=max
[ "$accel" = tcg ] || cpu=host,-arch-capabilities

shape='-smp 2 -m 2048'
if [ "${NUMA:-}" = yes ]; then
    shape='-smp 8,sockets=2,cores=2,threads=2 -m 2048 -object memory-backend-ram,id=m0,size=1G -object memory-backend-ram,id=m1,size=1G'
    shape="$shape -numa node,nodeid=0,cpus=0-3,memdev=m0 -numa node,nodeid=1,cpus=4-7,memdev=m1"
fi

# The disk of this run outlives a reboot of the machine. Empty disks are for volumes.
rm -f "$vm/run.ext4" "$vm/disk1" "$vm/disk2" "$vm/disk3"
cp --sparse=always "$vm/root.ext4" "$vm/run.ext4"
truncate -s 256M "$vm/disk1" "$vm/disk2" "$vm/disk3"
disks=
for file in run.ext4 payload.tar disk1 disk2 disk3; do
    disks="$disks -drive file=$vm/$file,if=virtio,format=raw,cache=unsafe"
done

: > "$vm/result"
: > "$vm/console"
say "booting with $accel; console in $vm/console"
# Rows are `row|NAME|ok or FAILED|DETAIL`, beside `case|NAME|SECONDS`; the last line is `end|ok` or `end|FAILED`.

# The machine may be slower than the default limits of units allow.
slow="systemd.default_timeout_start_sec=1800 systemd.default_device_timeout_sec=1800"

# boot: runs the machine until it is powered off.
boot() {
    # shellcheck disable=SC2086
    timeout -k 10 "$limit" qemu-system-x86_64 -accel "$accel" -cpu "$cpu" $shape -display none -monitor none -nic none -pidfile "$vm/pid" \
        -kernel "$vm/vmlinuz" -initrd "$vm/initrd.img" -append "root=/dev/vda rw console=ttyS0 quiet psi=1 panic=-1 systemd.show_status=no systemd.mask=serial-getty@ttyS0.service systemd.journald.forward_to_console=1 $slow" \
        $disks -chardev "file,id=console,path=$vm/console,append=on" -serial chardev:console \
        -chardev "file,id=result,path=$vm/result,append=on" -serial chardev:result < /dev/null
}

# cut_power NUMBER: a time after the machine has begun its burst, ends it as a loss of power does. Fails if the machine ends before.
cut_power() {
    until grep -Eq "^armed\|$1[^0-9]*\$" "$vm/result"; do
        kill -0 "$machine" 2> /dev/null || return 1
        sleep 0.2
    done
    after=$(awk -v seed="$seed" -v number="$1" -v window="${WINDOW:-40}" 'BEGIN { srand(seed + number); printf "%.2f", rand() * window }')
    sleep "$after"
    say "cut $1 of $kills, $after s after the start of the burst"
    kill -KILL "$(cat "$vm/pid")"
    wait "$machine" || true
}

[ "$kills" = 0 ] || say "SEED=$seed KILLS=$kills"
status=0
ended=
for number in $(seq "$kills"); do
    boot &
    machine=$!
    cut_power "$number" && continue
    say "the machine ended before cut $number"
    ended=yes
    wait "$machine" || status=$?
    break
done
[ -n "$ended" ] || boot || status=$?
[ "$status" = 0 ] || say "qemu ended with $status (124: not done after $limit s)"

tr -d '\r' < "$vm/result" > "$vm/lines"
awk -F '|' '$1 == "case" { printf "\n%s (%s s)\n", $2, $3 } $1 == "row" { printf "  %-58s %-7s %s\n", $2, $3, $4 }' "$vm/lines"
while read -r case; do
    grep -q "^case|$case|" "$vm/lines" || { say "case $case did not run"; echo "row|$case|FAILED|did not run" >> "$vm/lines"; }
done < "$payload/list"
if ! grep -q '^end|ok$' "$vm/lines" || grep -q '^row|[^|]*|FAILED' "$vm/lines"; then
    grep '^log|' "$vm/lines" | cut -d '|' -f 2- >&2 || true
    say "FAILED; console in $vm/console, result in $vm/result"
    exit 1
fi
echo "vm: ok"
