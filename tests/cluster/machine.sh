# The machine of a cluster in mount and network namespaces of its own, for the scripts of this folder; read with `.` after control-plane.sh.
#
#   address  its address
#   cgroup   the name of a cgroup for all that runs

# make_machine: one network interface, and empty /run, /var/lib and /var/log, all on shared mounts, as on most machines.
make_machine() {
    ip link set lo up
    ip link add eth0 type veth peer name wire
    ip link set wire up
    ip address add "$address/24" dev eth0
    ip link set eth0 up
    # It leads nowhere.
    ip route add default via "${address%.*}.1"
    mount --make-rshared /
    mkdir -p "$work/machine/etc" "$work/machine/etc-work" "$work/machine/run" "$work/machine/var/lib" "$work/machine/var/log"
    mount -t overlay -o "lowerdir=/etc,upperdir=$work/machine/etc,workdir=$work/machine/etc-work" overlay /etc
    for dir in /run /var/lib /var/log; do
        mount --bind "$work/machine$dir" "$dir"
    done
}

# below DIR: the mounts below a directory, the innermost first.
below() {
    awk -v dir="$1/" 'index($2, dir) == 1 { print $2 }' /proc/mounts | sort -r
}

# cgroups NAME: the cgroups of this name in each hierarchy, with those below.
cgroups() {
    for tree in "/sys/fs/cgroup/$1" /sys/fs/cgroup/*/"$1"; do
        [ ! -d "$tree" ] || find "$tree" -depth -type d 2> /dev/null || true
    done
}

# make_cgroup NAME: one in each hierarchy, with the processors and memory of the parent.
make_cgroup() {
    for tree in /sys/fs/cgroup /sys/fs/cgroup/*; do
        [ -f "$tree/cgroup.procs" ] || continue
        mkdir -p "$tree/$1"
        for file in cpuset.cpus cpuset.mems; do
            [ ! -f "$tree/$1/$file" ] || [ -f "$tree/cgroup.controllers" ] || cat "$tree/$file" > "$tree/$1/$file"
        done
    done
}

# clean_machine CGROUP...: stops what was started, in any state, and removes it.
clean_machine() {
    stop_all
    for shim in $(pgrep -f "^[^ ]*containerd-shim.*-address $work/" || true); do
        kill -KILL "$shim" 2> /dev/null || true
    done
    for name in "$@"; do
        for try in 1 2 3 4 5; do
            cgroups "$name" | while read -r dir; do
                while read -r process; do kill -KILL "$process" 2> /dev/null || true; done < "$dir/cgroup.procs" || true
                rmdir "$dir" 2> /dev/null || true
            done
            [ -n "$(cgroups "$name")" ] || break
            sleep 0.2
        done
    done
    for point in $(below "$work"); do umount -l "$point" || true; done
}
