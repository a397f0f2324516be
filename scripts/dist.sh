#!/bin/sh
# Makes the packages of one binary: a tarball, three .deb, three .rpm, an SBOM and checksums.
#
#   scripts/dist.sh BINARY OUT      e.g. scripts/dist.sh target/pgo/bin/quintlet target/dist
#   ARCH=arm64                      the binary is for arm64; RUN=qemu-aarch64-static runs it
#   SOURCE_DATE_EPOCH=SECONDS       time of all files (default: the time of the checked-out commit)
#
# quintlet has the stripped binary, quintlet-dbgsym its symbols, quintlet-kubelet what puts it in the place of a kubelet. Two runs with one
# binary make equal files. Needs dpkg-deb, rpmbuild, objcopy, strip and python3: scripts/install.sh dist.
set -eu

[ $# = 2 ] || { echo "usage: scripts/dist.sh BINARY OUT" >&2; exit 64; }
root=$(cd "$(dirname "$0")/.." && pwd)
binary=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
[ -x "$binary" ] || { echo "dist.sh: $binary is not a program: build it" >&2; exit 69; }
cd "$root"

arch=${ARCH:-$(dpkg --print-architecture)}
case $arch in
    amd64) rpm_arch=x86_64; objcopy=objcopy ;;
    arm64) rpm_arch=aarch64; objcopy=aarch64-linux-gnu-objcopy ;;
    *) echo "dist.sh: no packages for $arch" >&2; exit 64 ;;
esac
command -v $objcopy >/dev/null || objcopy=objcopy
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export SOURCE_DATE_EPOCH LC_ALL=C TZ=UTC
umask 022

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
tree=$work/quintlet
symbols=$work/quintlet-dbgsym
kubelet=$work/quintlet-kubelet
programs="cri-proxy pleg-service probe-service status-reporter node-api pod-sync quintctl"

# The binary without symbols, and the symbols where debuggers find them by the build ID.
install -D -m 0755 "$binary" "$tree/usr/bin/quintlet"
id=$(readelf -n "$binary" | sed -n 's/.*Build ID: //p')
[ -n "$id" ] || { echo "dist.sh: $binary has no build ID" >&2; exit 65; }
debug=usr/lib/debug/.build-id/$(echo "$id" | cut -c1-2)/$(echo "$id" | cut -c3-).debug
mkdir -p "$symbols/$(dirname "$debug")"
$objcopy --only-keep-debug --compress-debug-sections "$binary" "$symbols/$debug"
chmod 0644 "$symbols/$debug"
$objcopy --strip-all --remove-section=.comment "$tree/usr/bin/quintlet"
for name in $programs; do ln -s quintlet "$tree/usr/bin/$name"; done

# Units, users, directories, configuration.
for unit in docker/systemd/*.service docker/systemd/*.target; do
    install -D -m 0644 "$unit" "$tree/usr/lib/systemd/system/$(basename "$unit")"
done
install -D -m 0644 docker/systemd/quintlet.sysusers "$tree/usr/lib/sysusers.d/quintlet.conf"
install -D -m 0644 docker/systemd/quintlet.tmpfiles "$tree/usr/lib/tmpfiles.d/quintlet.conf"
install -D -m 0644 docker/systemd/quintlet.env "$tree/etc/default/quintlet"
mkdir -p "$kubelet/usr/bin"
ln -s quintlet "$kubelet/usr/bin/kubelet"
install -D -m 0644 docker/systemd/kubeadm/kubelet.service "$kubelet/usr/lib/systemd/system/kubelet.service"

# What the program itself prints.
doc=$tree/usr/share/doc/quintlet
mkdir -p "$doc" "$tree/usr/share/man/man8" "$tree/usr/share/bash-completion/completions" \
    "$tree/usr/share/zsh/site-functions" "$tree/usr/share/fish/vendor_completions.d"
print() { ${RUN:-} "$binary" "$@"; }
print quintctl completions bash > "$tree/usr/share/bash-completion/completions/quintctl"
print quintctl completions zsh > "$tree/usr/share/zsh/site-functions/_quintctl"
print quintctl completions fish > "$tree/usr/share/fish/vendor_completions.d/quintctl.fish"
print quintctl config > "$doc/config.yaml"
mkdir -p "$tree/usr/share/quintlet"
print quintctl protos | tar -x --no-same-owner -C "$tree/usr/share/quintlet"
mv "$tree/usr/share/quintlet/quintlet-proto" "$tree/usr/share/quintlet/proto"
scripts/man.py "$binary" "$version" "$tree/usr/share/man/man8"
gzip -9n "$tree"/usr/share/man/man8/*.8
install -m 0644 LICENSE "$doc/copyright"
gzip -9nc CHANGELOG.md > "$doc/changelog.gz"
scripts/sbom.py > "$doc/sbom.cdx.json"
for package in "$symbols" "$kubelet"; do
    install -D -m 0644 LICENSE "$package/usr/share/doc/$(basename "$package")/copyright"
done
find "$work" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

rm -f "$out"/quintlet*
cp "$doc/sbom.cdx.json" "$out/quintlet-$version.cdx.json"

# The tarball has the tree of the first package.
tar --create --directory "$tree" --sort=name --owner=root:0 --group=root:0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" --format=gnu . |
    gzip -9n > "$out/quintlet-$version-linux-$arch.tar.gz"

# deb PACKAGE SUMMARY FIELDS: FIELDS are further lines of the control file.
deb() {
    dir=$work/$1
    mkdir -p "$dir/DEBIAN"
    {
        printf 'Package: %s\nVersion: %s\nArchitecture: %s\n' "$1" "$version" "$arch"
        printf 'Maintainer: The Quintlet authors <quintlet@localhost>\nSection: admin\nPriority: optional\n'
        printf 'Installed-Size: %s\n' "$(du --apparent-size -sk "$dir" | cut -f1)"
        [ -z "$3" ] || printf '%s\n' "$3"
        printf 'Description: %s\n' "$2"
    } > "$dir/DEBIAN/control"
    (cd "$dir" && find usr etc -type f 2>/dev/null | sort | xargs md5sum) > "$dir/DEBIAN/md5sums"
    [ ! -d "$dir/etc" ] || (cd "$dir" && find etc -type f | sort | sed 's#^#/#') > "$dir/DEBIAN/conffiles"
    for script in postinst prerm postrm; do
        [ ! -f "packaging/deb/$1.$script" ] || install -m 0755 "packaging/deb/$1.$script" "$dir/DEBIAN/$script"
    done
    find "$dir" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
    dpkg-deb --root-owner-group -Zxz --build "$dir" "$out/${1}_${version}_$arch.deb" > /dev/null
}

summary="the Kubernetes node agent in five services"
deb quintlet "$summary" "Depends: libc6 (>= 2.36), libgcc-s1, systemd, mount
Recommends: containerd (>= 1.7), containernetworking-plugins
Suggests: quintlet-dbgsym"
deb quintlet-dbgsym "debug symbols of quintlet" "Depends: quintlet (= $version)
Auto-Built-Package: debug-symbols
Build-Ids: $id"
deb quintlet-kubelet "$summary, in the place of a kubelet of kubeadm" "Depends: quintlet (= $version)
Provides: kubelet (= $(print kubelet --version | sed 's/.* v//'))
Conflicts: kubelet
Replaces: kubelet"

rm -rf "$work"/quintlet*/DEBIAN
# rpmbuild has no user's or system's configuration: its macros could change the packages.
for package in quintlet quintlet-dbgsym quintlet-kubelet; do
    HOME=$work rpmbuild -bb --quiet --target "$rpm_arch" --define "_topdir $work/rpm" --define "_rpmdir $work/rpms" \
        --define "_buildhost localhost" --define "source_tree $work/$package" --define "quintlet_version $version" \
        --define "use_source_date_epoch_as_buildtime 1" --define "clamp_mtime_to_source_date_epoch 1" \
        --define "kubelet_version $(print kubelet --version | sed 's/.* v//')" \
        "packaging/rpm/$package.spec" > "$work/rpm.log" 2>&1 || { cat "$work/rpm.log" >&2; exit 1; }
done
find "$work/rpms" -name '*.rpm' -exec mv {} "$out" \;

(cd "$out" && sha256sum quintlet* > "SHA256SUMS")
ls -l "$out"
