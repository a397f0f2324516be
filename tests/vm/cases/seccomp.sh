# Seccomp profiles, as a container sees them.

profile='{"defaultAction": "SCMP_ACT_ALLOW", "architectures": ["SCMP_ARCH_X86_64"], "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}]}'

with_profile() {
    jq -nc --argjson c "$(script "$2")" --argjson profile "$1" '{securityContext: {seccompProfile: $profile}, restartPolicy: "Never", containers: [$c]}'
}

mode() {
    pid=$(process_of "$1")
    [ -n "$pid" ] || return 1
    grep -E "^Seccomp:" "/proc/$pid/status" | tee /tmp/mode
    grep -q "$2" /tmp/mode
}

run() {
    mkdir -p /var/lib/kubelet/seccomp/profiles
    echo "$profile" > /var/lib/kubelet/seccomp/profiles/no-mkdir.json
    pod default "$(with_profile '{"type": "RuntimeDefault"}' 'sleep 1000000')"
    pod unconfined "$(with_profile '{"type": "Unconfined"}' 'sleep 1000000')"
    pod local "$(with_profile '{"type": "Localhost", "localhostProfile": "profiles/no-mkdir.json"}' 'mkdir /tmp/new; echo $?; sleep 1000000')"
    pod missing "$(with_profile '{"type": "Localhost", "localhostProfile": "profiles/missing.json"}' 'sleep 1000000')"
    becomes 300 "RuntimeDefault filters" mode default 2
    becomes 300 "Unconfined does not filter" mode unconfined 0
    becomes 300 "Localhost filters" mode local 2
    check "a system call of the profile is refused" "mkdir" sh -c "! ctr -n k8s.io tasks exec --exec-id seccomp-1 $(container local | cut -d ' ' -f 1) mkdir /tmp/other"
    check "another system call is not" "touch" ctr -n k8s.io tasks exec --exec-id seccomp-2 "$(container local | cut -d ' ' -f 1)" touch /tmp/other
    becomes 300 "a missing profile is an error of the container" waits_with missing CreateContainerError
    becomes 60 "first pod stays" stays
}
