#!/bin/sh
# Checks the size of an optimized binary without its symbols: `scripts/shipped-size.sh BINARY`. Images, packages and downloads are as big. With its shared
# libraries, 3 MB, it fits into an image of 60 MB (docker/build-image.sh).
set -eu
limit_mb=57
stripped=$(mktemp)
trap 'rm -f "$stripped"' EXIT
strip -o "$stripped" "$1"
size_mb=$(($(stat -c %s "$stripped") / 1000000))
echo "$1 has $size_mb MB without symbols"
[ "$size_mb" -lt "$limit_mb" ] || { echo "$0: the limit is $limit_mb MB" >&2; exit 1; }
