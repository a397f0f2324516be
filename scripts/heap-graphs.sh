#!/bin/sh
# heap-graphs.sh BINARY DUMPS OUT: draws the newest heap profile of each service, from the dumps of jemalloc in the directory DUMPS.
# Writes OUT/SERVICE-heap.svg (bytes in use), OUT/SERVICE-allocations.svg (objects since the start), and the same as folded stacks.
set -eu

binary=$1
dumps=$2
out=$3
for pid in $(ls "$dumps" | sed -n 's/^dump\.\([0-9]*\)\..*/\1/p' | sort -u); do
    newest=$(ls "$dumps" | grep "^dump\.$pid\." | sort -t . -k 3,3n | tail -n 1)
    jeprof --collapsed --inuse_space "$binary" "$dumps/$newest" > "$dumps/$pid.heap" 2> /dev/null
    # All services are one file. The stacks of main have the name of its crate.
    service=$(grep -o -m 1 -E '(cri_proxy|node_api|pleg_service|pod_sync|probe_service|status_reporter)::(process::)?main' "$dumps/$pid.heap" | head -n 1 | sed 's/::.*//; s/_/-/')
    [ -n "$service" ] || { echo "heap-graphs: the service of process $pid is unknown" >&2; continue; }
    mv "$dumps/$pid.heap" "$out/$service-heap.folded"
    jeprof --collapsed --alloc_objects "$binary" "$dumps/$newest" > "$out/$service-allocations.folded" 2> /dev/null
    for kind in heap allocations; do
        inferno-flamegraph --title "$service, $kind" "$out/$service-$kind.folded" > "$out/$service-$kind.svg"
    done
    echo "$out/$service-heap.svg"
done
