#!/bin/sh
# Checks the packages of scripts/dist.sh: two runs make equal files, and the .deb files install into a root of Debian. Needs root.
#
#   tests/dist.sh BINARY      the binary to package
#   DEBIAN_ROOT=DIR           a root of Debian with systemd, which is copied (default: made by debootstrap)
set -eu

[ $# = 1 ] || { echo "usage: tests/dist.sh BINARY" >&2; exit 64; }
binary=$(realpath "$1")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'umount "$work/root/proc" 2>/dev/null || true; rm -rf "$work"' EXIT INT TERM
failed=0

fail() {
    echo "dist: $*" >&2
    failed=1
}

scripts/dist.sh "$binary" "$work/one" > /dev/null
# Another directory, time and umask.
(umask 077 && cp "$binary" "$work/copy" && touch "$work/copy" && scripts/dist.sh "$work/copy" "$work/two" > /dev/null)
for file in "$work/one"/*; do
    cmp "$file" "$work/two/$(basename "$file")" || fail "two runs make different $(basename "$file")"
done
(cd "$work/one" && sha256sum --check --quiet SHA256SUMS) || fail "SHA256SUMS is wrong"
for kind in tar.gz deb rpm cdx.json; do
    [ -n "$(find "$work/one" -name "quintlet*.$kind")" ] || fail "there is no .$kind"
done

# The root, in which dpkg runs the scripts of the packages.
root=$work/root
if [ -n "${DEBIAN_ROOT:-}" ]; then
    cp -a "$DEBIAN_ROOT" "$root"
else
    debootstrap --variant=minbase --include=systemd bookworm "$root" > "$work/debootstrap" 2>&1 || { cat "$work/debootstrap" >&2; exit 1; }
fi
# systemd-tmpfiles needs it.
mount -t proc proc "$root/proc"
install() {
    dpkg --root="$root" --install "$@" > "$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; fail "dpkg fails to install $*"; }
}
install "$work/one"/quintlet_*.deb
install "$work/one"/quintlet-dbgsym_*.deb "$work/one"/quintlet-kubelet_*.deb

# attributes PATH WANTED: WANTED has type, mode, owner and group.
attributes() {
    found=$(stat --format='%F %a %u %g' "$root$1" 2>&1) || found=missing
    [ "$found" = "$2" ] || fail "$1: $found, expected $2"
}
id_of() {
    sed -n "s/^$1:[^:]*:\([0-9]*\):.*/\1/p" "$root/etc/$2"
}
attributes /usr/bin/quintlet "regular file 755 0 0"
for name in cri-proxy pleg-service probe-service status-reporter node-api pod-sync quintctl kubelet; do
    attributes "/usr/bin/$name" "symbolic link 777 0 0"
    version=$(chroot "$root" "/usr/bin/$name" --version) || fail "$name does not run"
    case $name:$version in
        kubelet:"Kubernetes v"*) ;;
        kubelet:*) fail "kubelet has the version $version" ;;
        *:"$name "*) ;;
        *) fail "$name has the version $version" ;;
    esac
    [ -s "$root/usr/share/man/man8/$name.8.gz" ] || fail "$name has no man page"
done
attributes /etc/default/quintlet "regular file 644 0 0"
grep -qx /etc/default/quintlet "$root/var/lib/dpkg/info/quintlet.conffiles" || fail "/etc/default/quintlet is overwritten by an upgrade"
attributes /usr/lib/sysusers.d/quintlet.conf "regular file 644 0 0"
attributes /usr/lib/tmpfiles.d/quintlet.conf "regular file 644 0 0"
for completion in bash-completion/completions/quintctl zsh/site-functions/_quintctl fish/vendor_completions.d/quintctl.fish; do
    grep -q quintctl "$root/usr/share/$completion" || fail "no completion in $completion"
done
[ -s "$root/usr/share/quintlet/proto/quintlet/subscribe/v1/subscribe.proto" ] || fail "the contract for subscribers is missing"
chroot "$root" quintctl config /usr/share/doc/quintlet/config.yaml > /dev/null || fail "the configuration in the documentation is not valid"

# The users and directories that the script of the package makes.
for user in quintlet-pleg quintlet-probe quintlet-reporter quintlet-node-api; do
    [ -n "$(id_of "$user" passwd)" ] || fail "there is no user $user"
done
attributes /run/quintlet/cri/read "directory 2750 0 $(id_of quintlet-pleg group)"
attributes /run/quintlet/node-api "directory 700 $(id_of quintlet-node-api passwd) $(id_of quintlet-node-api group)"
attributes /run/quintlet/keys "directory 700 0 0"

# The packaged programs survey the machine for an installation beside a kubelet: there is no runtime.
mkdir -p "$root/run/systemd/system"
if refused=$(chroot "$root" quintctl install --beside --runtime-endpoint unix:///run/absent.sock --dry-run 2>&1); then
    fail "quintctl installs without a runtime"
fi
case $refused in
    "quintctl: the runtime at unix:///run/absent.sock does not answer: "*) ;;
    *) fail "quintctl install --beside: $refused" ;;
esac
rmdir "$root/run/systemd/system"

# Units: valid, and only that of kubeadm is enabled.
verified=$(SYSTEMD_LOG_LEVEL=warning systemd-analyze verify --root="$root" --man=no quintlet.target kubelet.service 2>&1) || fail "units: $verified"
enabled=$(find "$root/etc/systemd/system" -name 'quintlet*' -o -name kubelet.service)
[ "$enabled" = "$root/etc/systemd/system/multi-user.target.wants/kubelet.service" ] || fail "enabled units: $enabled"

# No symbols in the binary, and those of the other package are of this binary.
! readelf -S "$root/usr/bin/quintlet" | grep -q '\.symtab\|\.debug_' || fail "the binary has symbols"
id=$(readelf -n "$root/usr/bin/quintlet" | sed -n 's/.*Build ID: //p')
debug=$root/usr/lib/debug/.build-id/$(echo "$id" | cut -c1-2)/$(echo "$id" | cut -c3-).debug
readelf -S "$debug" 2> /dev/null | grep -q '\.symtab' || fail "no symbols in $debug"

# The bill has crates with checksums, and the .rpm has the files of the .deb.
python3 - "$root/usr/share/doc/quintlet/sbom.cdx.json" << 'END' || fail "the bill of materials"
import json, sys
bill = json.load(open(sys.argv[1]))
hashed = {part["name"] for part in bill["components"] if "hashes" in part}
assert bill["bomFormat"] == "CycloneDX" and {"tokio", "rustls"} <= hashed and "proptest" not in hashed, len(hashed)
END
for package in quintlet quintlet-dbgsym quintlet-kubelet; do
    dpkg-deb --fsys-tarfile "$work/one/${package}"_*.deb | tar --list | sed 's#^\.##' | grep -v '/$' | sort > "$work/in-deb"
    rpm --query --list --package "$work/one/${package}"-[0-9]*.rpm | sort > "$work/in-rpm"
    for path in $(cat "$work/in-deb"); do grep -qx "$path" "$work/in-rpm" || fail "$package.rpm lacks $path"; done
done

# A kubelet and this package are not installed together.
dpkg-deb --field "$work/one"/quintlet-kubelet_*.deb Conflicts | grep -qx kubelet || fail "quintlet-kubelet does not conflict with kubelet"

# purge PACKAGE...
purge() {
    dpkg --root="$root" --purge "$@" > "$work/dpkg" 2>&1 || { cat "$work/dpkg" >&2; fail "dpkg fails to purge $*"; }
}
purge quintlet-kubelet quintlet-dbgsym
# While a unit of quintctl install runs the programs, the package is upgraded and not removed.
for file in /var/lib/quintlet/install.json /etc/systemd/system/kubelet.service.d/zz-quintlet.conf; do
    mkdir -p "$root$(dirname "$file")"
    : > "$root$file"
    for action in remove purge; do
        ! dpkg --root="$root" --$action quintlet > "$work/dpkg" 2>&1 || fail "dpkg --$action succeeds while $file exists"
        grep -q '^quintlet: .*: run quintctl uninstall first$' "$work/dpkg" || { cat "$work/dpkg" >&2; fail "dpkg --$action does not name quintctl uninstall"; }
        attributes /usr/bin/quintlet "regular file 755 0 0"
    done
    install "$work/one"/quintlet_*.deb
    rm "$root$file"
done
rmdir "$root/etc/systemd/system/kubelet.service.d"
purge quintlet
left=$(find "$root/usr" "$root/etc" "$root/run" -name '*quintlet*' -o -name kubelet.service -o -name kubelet)
[ -z "$left" ] || fail "left after a purge: $left"

[ $failed = 0 ] && echo "dist: ok, $(find "$work/one" -name 'quintlet*' | wc -l) files"
exit $failed
