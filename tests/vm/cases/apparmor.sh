# AppArmor profiles, as a container sees them.

with_profile() {
    jq -nc --argjson c "$(script 'sleep 1000000')" --argjson profile "$1" '{securityContext: {appArmorProfile: $profile}, containers: [$c]}'
}

confined() {
    pid=$(process_of "$1")
    [ -n "$pid" ] || return 1
    profile=$(cat "/proc/$pid/attr/apparmor/current")
    echo "$profile"
    [ "$profile" = "$2" ]
}

# Debian's profile of runc does not confine it and has the mode unconfined. Its children inherit it.
unconfined() {
    pid=$(process_of "$1")
    [ -n "$pid" ] || return 1
    profile=$(cat "/proc/$pid/attr/apparmor/current")
    echo "$profile"
    case "$profile" in
        unconfined | *" (unconfined)") ;;
        *) return 1 ;;
    esac
}

run() {
    cat > /tmp/profile <<'PROFILE'
#include <tunables/global>
profile quintlet-vm-deny flags=(attach_disconnected,mediate_deleted) {
  file,
  signal,
  deny /denied/** w,
  deny /denied w,
}
PROFILE
    check "machine has AppArmor" "$(cat /sys/module/apparmor/parameters/enabled)" apparmor_parser -r /tmp/profile
    pod default "$(with_profile '{"type": "RuntimeDefault"}')"
    pod unconfined "$(with_profile '{"type": "Unconfined"}')"
    pod local "$(with_profile '{"type": "Localhost", "localhostProfile": "quintlet-vm-deny"}')"
    pod missing "$(with_profile '{"type": "Localhost", "localhostProfile": "quintlet-vm-missing"}')"
    becomes 300 "RuntimeDefault confines" confined default 'cri-containerd.apparmor.d (enforce)'
    becomes 300 "Unconfined does not" unconfined unconfined
    becomes 300 "Localhost confines" confined local 'quintlet-vm-deny (enforce)'
    id=$(container local | cut -d ' ' -f 1)
    check "a directory of the profile cannot be written" "" sh -c "! ctr -n k8s.io tasks exec --exec-id apparmor-1 $id sh -c 'mkdir /denied && touch /denied/file'"
    check "another can" "" ctr -n k8s.io tasks exec --exec-id apparmor-2 "$id" sh -c 'mkdir /allowed && touch /allowed/file'
    becomes 300 "a profile that is not loaded is an error of the container" waits_with missing CreateContainerError
    becomes 60 "first pod stays" stays
}
