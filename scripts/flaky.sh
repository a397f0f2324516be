#!/bin/sh
# Runs each test that is new or was changed since BASE many times beside a load, to find those that depend on the machine.
#
#   BASE=COMMIT   where the change begins (default: where the branch left main, or the last commit of main itself)
#   COUNT=20      how often each test runs
#   LOAD=2        busy loops beside the tests
#   TESTS=FILTER  a filter of cargo-nextest, in place of the tests that were changed
set -eu

cd "$(dirname "$0")/.."
base=${BASE:-$(git merge-base HEAD main)}
filter=${TESTS:-$(scripts/changed-tests.py "$base")}
[ -n "$filter" ] || { echo "flaky.sh: no test was changed since $base"; exit 0; }
pids=
# shellcheck disable=SC2086
trap 'kill $pids 2>/dev/null || true' EXIT INT TERM
for _ in $(seq "${LOAD:-2}"); do
    sh -c 'while :; do :; done' &
    pids="$pids $!"
done
cargo nextest run --workspace --locked --no-fail-fast --stress-count "${COUNT:-20}" -E "$filter"
