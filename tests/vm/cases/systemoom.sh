# A process outside of pods that uses all memory is killed by the kernel: an event of the Node.

has_oom_event() {
    objects events | jq -r '.items[] | select(.reason == "SystemOOM").message' | tail -n 1 > /tmp/oom
    cat /tmp/oom
    grep -q '^System OOM encountered, victim process: tail, pid: [0-9]' /tmp/oom
}

run() {
    swapoff /swap
    systemd-run --quiet --unit=hog -p OOMScoreAdjust=1000 -p OOMPolicy=continue sh -c 'tail /dev/zero'
    becomes 600 "Node has the event SystemOOM" has_oom_event
    systemctl stop hog 2> /dev/null
    becomes 300 "first pod stays" stays
    swapon /swap
}
