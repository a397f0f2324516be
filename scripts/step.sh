#!/bin/sh
# Runs a step of the gate: `scripts/step.sh NAME COMMAND...`. Appends a line `SECONDS BUSY NAME` to the file that QUINTLET_TIMES names, where
# BUSY is the percentage of the machine's processor time that was used meanwhile.
set -eu

# Prints ticks of all processors: idle ones and those for something (proc_stat(5)).
ticks() {
    awk '$1 == "cpu" { print $5 + $6, $2 + $3 + $4 + $7 + $8 }' /proc/stat
}

name=$1
shift
start=$(date +%s)
ticks=$(ticks)
status=0
"$@" || status=$?
if [ -n "${QUINTLET_TIMES:-}" ]; then
    busy=$(printf '%s\n%s\n' "$ticks" "$(ticks)" |
        awk 'NR == 1 { idle = $1; busy = $2 } NR == 2 { all = $1 + $2 - idle - busy; print all ? int(100 * ($2 - busy) / all) : 0 }')
    echo "$(($(date +%s) - start)) $busy $name" >> "$QUINTLET_TIMES"
fi
exit "$status"
