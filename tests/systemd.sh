#!/bin/sh
# Checks the hardening of the systemd units: the exposure level that systemd-analyze computes, options that pod-sync must not
# have, and options that every unit must have. Needs systemd-analyze (Debian package systemd); no running systemd.
#
#   UNITS=DIR  directory of the units (docker/systemd)
set -eu

units=${UNITS:-$(cd "$(dirname "$0")/../docker/systemd" && pwd)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
failed=0

fail() {
    echo "systemd: $*" >&2
    failed=1
}

# level SERVICE LIMIT [DIR]: LIMIT in tenths, as an argument of systemd-analyze; DIR has the unit.
level() {
    unit=${3:-$units}/quintlet-$1.service
    if ! systemd-analyze security --offline=true --no-pager --threshold="$2" "$unit" > "$work/table" 2> "$work/errors"; then
        sed -n 's/^→ //p' "$work/table" "$work/errors" >&2
        fail "$1: exposure level above $2 tenths: systemd-analyze security --offline=true $unit"
    fi
    grep -q '^→ Overall exposure level' "$work/table" || fail "$1: no exposure level: $(cat "$work/errors")"
    # A misspelt option protects nothing. systemd before 254 lacks the two named here.
    grep -F "/quintlet-$1.service:" "$work/errors" | grep -v "'RestartSteps'\|'RestartMaxDelaySec'" > "$work/unknown" || true
    [ ! -s "$work/unknown" ] || fail "$1: $(cat "$work/unknown")"
}

level pleg-service 20
level probe-service 20
level status-reporter 20
level node-api 20
# An instance of the template.
instance=$work/quintlet-probe-service@1.service
cp "$units/quintlet-probe-service@.service" "$instance"
level probe-service@1 20 "$work"
level cri-proxy 35
level pod-sync 50

for unit in "$units"/*.service; do
    name=${unit##*/quintlet-}
    for option in Type=notify WatchdogSec= TimeoutAbortSec= LimitCORE=0 LimitNOFILE= UMask= NoNewPrivileges=yes CapabilityBoundingSet= \
        SystemCallFilter= RestrictNamespaces=yes; do
        grep -q "^$option" "$unit" || fail "$name lacks $option"
    done
    # systemd answers openat2 with ENOSYS then, by which files are opened beneath a directory: those of `kubectl logs`.
    ! grep '^RestrictSUIDSGID=' "$unit" || fail "$name cannot call openat2"
    case $name in
        # A separate mount namespace would hide its mounts from the runtime. ProtectClock creates none.
        pod-sync.service)
            if grep -E '^(Protect|Private|[A-Za-z]*Paths|Bind|Root|TemporaryFileSystem|Mount|Dynamic|(Runtime|State|Cache|Logs)Directory|ProcSubset)' "$unit" |
                grep -v '^ProtectClock='; then
                fail "pod-sync.service has an option that makes a mount namespace"
            fi
            grep -q '^CapabilityBoundingSet=.*CAP_SYS_RESOURCE' "$unit" || fail "pod-sync cannot enlarge a mounted ext4"
            grep -q '^CapabilityBoundingSet=.*CAP_NET_ADMIN' "$unit" || fail "pod-sync cannot make chains of iptables"
            ;;
        *)
            # node-api reads statistics of the machine and of processes of other users.
            proc=invisible
            if [ "$name" = node-api.service ]; then
                proc=default
                ! grep -E '^(ProcSubset=pid|PrivatePIDs=|PrivateUsers=)' "$unit" || fail "node-api cannot see the network of pods"
            fi
            for option in InaccessiblePaths= "ProtectProc=$proc" ProtectSystem=strict; do
                grep -q "^$option" "$unit" || fail "$name lacks $option"
            done
            ;;
    esac
done

# pod-sync distinguishes a crash of these from a kill by the exit note of systemd.
for service in cri-proxy pod-sync; do
    grep -q "^ExecStopPost=.*/run/quintlet/exits/$service'" "$units/quintlet-$service.service" ||
        fail "$service does not note how it ended"
done

# Instances of probe-service differ from the unit without an instance in their ID only.
own_lines() {
    grep -vE '^(Description|ExecStart|ExecCondition)=|^# The unit without an instance' "$1"
}
own_lines "$units/quintlet-probe-service.service" > "$work/one"
own_lines "$units/quintlet-probe-service@.service" > "$work/instance"
cmp -s "$work/one" "$work/instance" || fail "probe-service@: $(diff "$work/one" "$work/instance")"
grep -q '^ExecStart=/usr/bin/probe-service --id %i ' "$units/quintlet-probe-service@.service" || fail "probe-service@ has not the ID of its instance"
grep -q '^ExecCondition=/usr/bin/test %i != 0$' "$units/quintlet-probe-service@.service" || fail "probe-service@0 would take the socket of probe-service"
# systemd expands the name of the instance, in a path and in an argument.
systemd-analyze verify --man=no "$instance" 2> "$work/errors" || true
grep -F "quintlet-probe-service@1.service" "$work/errors" | grep -v "'RestartSteps'\|'RestartMaxDelaySec'\|is not executable" > "$work/unknown" || true
[ ! -s "$work/unknown" ] || fail "probe-service@1: $(cat "$work/unknown")"

# A service sees the node's identity only if it is started with one.
for service in cri-proxy pleg-service probe-service; do
    grep -q '^InaccessiblePaths=.*-/etc/quintlet/kubeconfig' "$units/quintlet-$service.service" ||
        fail "$service can read /etc/quintlet/kubeconfig"
done

# The unit in the place of kubelet.service: systemd knows each option, and each variable of kubeadm's drop-in is set and used.
kubelet=$units/kubeadm/kubelet.service
mkdir "$work/verify"
sed 's#/usr/bin/kubelet#/bin/true#' "$kubelet" > "$work/verify/kubelet.service"
systemd-analyze verify --man=no "$work/verify/kubelet.service" > "$work/verified" 2>&1 || fail "kubelet.service: $(cat "$work/verified")"
! grep -F "$work/verify/kubelet.service:" "$work/verified" || fail "kubelet.service has an unknown option"
for variable in KUBELET_KUBECONFIG_ARGS KUBELET_CONFIG_ARGS KUBELET_KUBEADM_ARGS KUBELET_EXTRA_ARGS; do
    grep -q "^ExecStart=/usr/bin/kubelet .*\$$variable" "$kubelet" || fail "kubelet.service does not use $variable"
done
for file in /var/lib/kubelet/kubeadm-flags.env /etc/default/kubelet /etc/sysconfig/kubelet; do
    grep -q "^EnvironmentFile=-$file\$" "$kubelet" || fail "kubelet.service does not read $file"
done
for service in cri-proxy pleg-service probe-service status-reporter node-api pod-sync; do
    grep -q "^Conflicts=.*\bquintlet-$service.service\b" "$kubelet" || fail "kubelet.service runs beside quintlet-$service.service"
done

[ $failed = 0 ] && echo "systemd: ok"
exit $failed
