#!/bin/sh
# Builds the binary of another commit, as `make quick` does, and puts it with its links into DIR: `scripts/other-binary.sh DIR [COMMIT]`.
# The default is the commit at which the branch left main, or the last but one on main itself.
#
# The work tree is below target/. The target folder is that of this version, whose dependencies need no second build; crates of two work
# trees have different names there. The binary is copied, since the next build of this version takes its place.
set -eu
cd "$(dirname "$0")/.."
dir=$1
commit=${2:-}
if [ -z "$commit" ]; then
    commit=$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main)
    [ "$commit" != "$(git rev-parse HEAD)" ] || commit=HEAD^
fi
commit=$(git rev-parse --verify "$commit^{commit}")
tree=target/skew/tree
mkdir -p "$dir" target/skew
if [ "$(cat "$dir/commit" 2>/dev/null)" = "$commit" ]; then
    exit 0
fi
if [ -e "$tree/.git" ]; then
    git -C "$tree" checkout --quiet --detach "$commit"
else
    git worktree add --quiet --force --detach "$tree" "$commit"
fi
target=$PWD/target
# Versions before 2026-12 have no crate of features.
features=
[ ! -e "$tree/tests/support/features" ] || features="-p quintlet-test-features"
# shellcheck disable=SC2086 # two words
(cd "$tree" && CARGO_PROFILE_DEV_OVERFLOW_CHECKS=false CARGO_PROFILE_DEV_DEBUG_ASSERTIONS=false CARGO_TARGET_DIR=$target \
    "${CARGO:-cargo}" build --locked -p quintlet $features)
rm -f "$dir/quintlet"
cp target/debug/quintlet "$dir/quintlet"
for bin in cri-proxy pleg-service probe-service status-reporter node-api pod-sync quintctl; do
    ln -sf quintlet "$dir/$bin"
done
echo "$commit" > "$dir/commit"
