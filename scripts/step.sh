#!/bin/sh
# Runs a step of the gate: `scripts/step.sh NAME COMMAND...`. Appends its seconds to the file that QUINTLET_TIMES names.
set -eu

name=$1
shift
start=$(date +%s)
status=0
"$@" || status=$?
if [ -n "${QUINTLET_TIMES:-}" ]; then
    echo "$(($(date +%s) - start)) $name" >> "$QUINTLET_TIMES"
fi
exit "$status"
