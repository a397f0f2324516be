# The pod is not affected by restarts of services, nor by a pod-sync that hangs.

is_restarted() {
    [ "$(property pod-sync NRestarts)" -gt "$restarts" ] && is_active pod-sync
}

run() {
    for unit in $units; do
        before=$(property "$unit" MainPID)
        systemctl restart "quintlet-$unit.service"
        becomes 180 "$unit restarted" is_active "$unit"
        check "$unit is another process" "pid $before before" test "$(property "$unit" MainPID)" != "$before"
        becomes 300 "pod stays over a restart of $unit" stays
    done
    before=$(property pod-sync MainPID)
    restarts=$(property pod-sync NRestarts)
    kill -STOP "$before"
    becomes 300 "stopped pod-sync is ended and restarted" is_restarted
    check "it was the watchdog" "" sh -c 'journalctl --no-pager -o cat -u quintlet-pod-sync | grep -q "Watchdog timeout"'
    becomes 300 "pod stays over the watchdog's kill" stays
}
