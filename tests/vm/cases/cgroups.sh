# Cgroups of the node, made by systemd and read back.

of_slice() {
    echo "$2 of $1 is $(systemctl show -P "$2" "$1"), want about $3"
    [ "$(systemctl show -P "$2" "$1")" -le "$3" ] && [ "$(systemctl show -P "$2" "$1")" -ge "$(($3 - 4096))" ]
}

has_cpus() {
    echo "AllowedCPUs of $1 is $(systemctl show -P AllowedCPUs "$1")"
    [ "$(systemctl show -P AllowedCPUs "$1")" = "$(cat /sys/devices/system/cpu/online)" ]
}

run() {
    becomes 60 "kubepods.slice leaves the reservation" near $pods/memory.max $((memory - 268435456))
    becomes 10 "systemd knows the limit of kubepods.slice" of_slice kubepods.slice MemoryMax $((memory - 268435456))
    becomes 10 "system.slice has the weight of its reservation" has $cgroups/system.slice/cpu.weight 8
    becomes 10 "besteffort pods have the least weight" has $pods/kubepods-besteffort.slice/cpu.weight 1
    becomes 10 "a kernel tunable is set" has /proc/sys/vm/overcommit_memory 1
    becomes 10 "all pods have the CPUs of the machine" has $pods/cpuset.cpus "$(cat /sys/devices/system/cpu/online)"
    becomes 10 "systemd knows the CPUs of kubepods.slice" has_cpus kubepods.slice
    # systemd disables controllers that no unit needs.
    systemctl daemon-reload
    becomes 10 "cpuset stays enabled for pods over a reload of systemd" grep -w cpuset $pods/cgroup.controllers
    # A limit that someone else changes is written again.
    echo max > $pods/memory.max
    becomes 150 "kubepods.slice is limited again" near $pods/memory.max $((memory - 268435456))
}
