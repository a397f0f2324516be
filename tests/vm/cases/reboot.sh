# `systemctl reboot` with logind: pods terminate before services and runtime, and start again at the next boot.

inhibits() {
    systemd-inhibit --list --no-pager --no-legend | grep -m 1 -i -E 'kubelet|quintlet|pod-sync'
}

is_ready_again() {
    quintctl pods > /tmp/pods && grep -E '^vm-quintlet-vm +1/1 +Running +[1-9]' /tmp/pods
}

run() {
    becomes 60 "pod-sync delays shutdowns" inhibits
    mkdir -p /var/lib/vm/ends
    for name in ordinary critical; do
        priority=0
        [ $name = ordinary ] || priority=2000000000
        pod "$name" "$(jq -nc --argjson priority $priority --argjson c "$(script "trap 'echo $name \$(cut -d . -f 1 /proc/uptime) >> /ends/lines; sleep 2; exit 0' TERM; while :; do sleep 0.2; done" '{"volumeMounts": [{"name": "ends", "mountPath": "/ends"}]}')" '
            {priority: $priority, terminationGracePeriodSeconds: 20, containers: [$c], volumes: [{name: "ends", hostPath: {path: "/var/lib/vm/ends"}}]}')"
        becomes 300 "$name pod runs" is_ready_pod "$name"
    done
    echo reboot > $state/reboots
    cat /proc/sys/kernel/random/boot_id > $state/boot-id
    sync
    systemctl reboot
}

rebooted() {
    check "machine has rebooted" "$(cat /proc/sys/kernel/random/boot_id)" sh -c "! cmp -s $state/boot-id /proc/sys/kernel/random/boot_id"
    check "pods were terminated by the shutdown" "$(tr '\n' ' ' < /var/lib/vm/ends/lines)" sh -c "[ \$(wc -l < /var/lib/vm/ends/lines) = 2 ]"
    check "the ordinary pod first" "" sh -c "head -n 1 /var/lib/vm/ends/lines | grep -q '^ordinary'"
    for unit in $units; do becomes 300 "$unit starts at boot" is_active "$unit"; done
    becomes 900 "the first pod is Ready again" is_ready_again
    process_of vm-quintlet-vm > $state/process
    becomes 120 "pods of the last boot leave no mounts" no_old_mounts
}

# Mounts below the directories of pods that exist now only.
no_old_mounts() {
    quintctl pods > /tmp/pods
    for uid in $(sed -n 's|.* /var/lib/kubelet/pods/\([^/]*\)/.*|\1|p' /proc/self/mountinfo | sort -u); do
        [ -d "/var/lib/kubelet/pods/$uid" ] || { echo "$uid"; return 1; }
    done
}
