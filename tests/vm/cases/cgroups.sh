# Cgroups of the node, made by systemd and read back.

of_slice() {
    echo "$2 of $1 is $(systemctl show -P "$2" "$1"), want about $3"
    [ "$(systemctl show -P "$2" "$1")" -le "$3" ] && [ "$(systemctl show -P "$2" "$1")" -ge "$(($3 - 4096))" ]
}

run() {
    becomes 60 "kubepods.slice leaves the reservation" near $pods/memory.max $((memory - 268435456))
    becomes 10 "systemd knows the limit of kubepods.slice" of_slice kubepods.slice MemoryMax $((memory - 268435456))
    becomes 10 "system.slice has the weight of its reservation" has $cgroups/system.slice/cpu.weight 8
    becomes 10 "besteffort pods have the least weight" has $pods/kubepods-besteffort.slice/cpu.weight 1
    becomes 10 "a kernel tunable is set" has /proc/sys/vm/overcommit_memory 1
    # A limit that someone else changes is written again.
    echo max > $pods/memory.max
    becomes 150 "kubepods.slice is limited again" near $pods/memory.max $((memory - 268435456))
}
