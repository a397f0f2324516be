#!/bin/sh
# Checks docker/Dockerfile without a Docker Engine: the order of its stages, and the users, the version and the sources that other files name, too.
set -eu

cd "$(dirname "$0")/.."
file=docker/Dockerfile
users=$(mktemp)
trap 'rm -f "$users"' EXIT INT TERM
failed=0

fail() {
    echo "dockerfile: $*" >&2
    failed=1
}

# The classic builder runs all stages before its target and knows neither RUN --mount nor TARGETARCH.
first=$(grep -m 1 '^FROM ' $file)
[ "$first" = "FROM scratch AS prebuilt" ] || fail "the first stage is '$first', not the one for the classic builder"
# Without --target, a build makes the last stage.
last=$(grep '^FROM ' $file | tail -n 1)
[ "$last" = "FROM services AS quintlet" ] || fail "the last stage is '$last', not the image with all services"

# stage NAME: the lines of a stage
stage() {
    awk -v name="$1" '/^FROM / { on = $NF == name } on' $file
}

# The users are those of docs/design/sockets.md, as for tests/chart.sh.
awk '/^\| service \| user and group/ { on = 1; next } on && !/^\|/ { exit } on && !/^\|-/ { print $2, $6 }' docs/design/sockets.md > "$users"
[ "$(wc -l < "$users")" = 7 ] || fail "docs/design/sockets.md: not the expected table"
while read -r service id; do
    [ "$service" != – ] || continue
    stage "$service" | grep -qxF "ENTRYPOINT [\"$service\"]" || fail "no stage $service with its program"
    if [ "$id" = 0 ]; then
        ! stage "$service" | grep '^USER' || fail "$service needs root"
    else
        stage "$service" | grep -qxF "USER $id:$id" || fail "$service is not user $id"
    fi
done < "$users"

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
grep -qxF "ARG VERSION=$version" $file || fail "the version is not $version, that of Cargo.toml"
oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
grep -qxF "ARG BUILDER=rust:$oldest-bookworm" $file || fail "the builder is not Rust $oldest, the oldest of Cargo.toml"
# A workspace does not build without one of its members, nor with a file that the context leaves out.
for member in $(sed -n '/^members = \[/,/^\]/s/^ *"\([^"/]*\).*/\1/p' Cargo.toml | sort -u) Cargo.toml Cargo.lock clippy.toml docker; do
    grep -qxF "!$member" $file.dockerignore || fail "$file.dockerignore leaves out $member"
done

[ $failed = 0 ] && echo "dockerfile: ok"
exit $failed
