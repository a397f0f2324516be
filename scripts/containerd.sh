#!/bin/sh
# Downloads the containerd of another Debian release without installing it, and prints the path of the binary.
#
#   QUINTLET_CONTAINERD=$(scripts/containerd.sh trixie) cargo nextest run -p quintlet-e2e
#
# trixie: Debian 13, containerd 1.7; sid: unstable, containerd 2. apt downloads the package from the mirror of this machine and verifies it
# with the signed lists of that release. A second run downloads only a newer package.
# CACHE_DIR: directory of lists and packages (default: target/containerd). runc is this machine's: the runc of another release needs
# the C library of that release.
set -eu

suite=${1:?usage: scripts/containerd.sh SUITE}
repo=$(cd "$(dirname "$0")/.." && pwd)
cache=${CACHE_DIR:-$repo/target/containerd}/$suite
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 2>/dev/null | grep -m 1 '/debian/$' || true)

mkdir -p "$cache/lists/partial" "$cache/archives/partial"
# Lists of sid expire within days, and mirrors may be older.
echo "deb [check-valid-until=no signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror:-http://deb.debian.org/debian/} $suite main" > "$cache/sources.list"

# get COMMAND...: apt-get with lists and packages of this release alone.
get() {
    apt-get -q -o Dir::Etc::SourceList="$cache/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::State::Lists="$cache/lists" -o Dir::Cache::PkgCache= -o Dir::Cache::SrcPkgCache= \
        -o Dir::Cache::Archives="$cache/archives" -o APT::Sandbox::User=root -o Acquire::Languages=none \
        -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false "$@" >&2
}

cd "$cache"
get update
get download containerd
package=$(ls -t containerd_*.deb | head -n 1)
root=$cache/${package%.deb}
if [ ! -d "$root" ]; then
    rm -rf "$root.new"
    dpkg-deb -x "$package" "$root.new"
    mv "$root.new" "$root"
fi
echo "$root/usr/bin/containerd"
