# systemctl stop quintlet.target ends all services and no pod.

all_inactive() {
    for unit in $units; do [ "$(property "$unit" ActiveState)" = inactive ] || { echo "$unit is $(property "$unit" ActiveState)"; return 1; }; done
}

run() {
    systemctl stop quintlet.target
    becomes 120 "all services are stopped" all_inactive
    check "the pod's process goes on" "pid $(cat $state/process)" test -d "/proc/$(cat $state/process)"
    systemctl start --no-block quintlet.target
    for unit in $units; do becomes 180 "$unit starts again" is_active "$unit"; done
    becomes 300 "the pod is Ready, with the same process" stays
}
