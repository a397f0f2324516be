# Statistics of cgroups of version 2, as tools read them through the API server.

# shows PAGE FILTER: a filter of jq that ends in true or false, applied to a page of the node.
shows() {
    request GET "/api/v1/nodes/$node/proxy/$1" > /tmp/page || { head -c 500 /tmp/page; return 1; }
    jq -c "$2" /tmp/page
    [ "$(jq -c "$2" /tmp/page | tail -n 1)" = true ]
}

# of_main FILTER: the same, applied to the container of the first pod in the summary.
of_main() {
    shows stats/summary ".pods[] | select(.podRef.name == \"vm-$node\").containers[0] | $1"
}

# has_sample PAGE NAME [LABEL]: a page of metrics has a positive sample.
has_sample() {
    request GET "/api/v1/nodes/$node/proxy/$1" > /tmp/page || return 1
    grep "^$2[{ ]" /tmp/page | grep -F "${3:-}" | grep -E '[} ][0-9.e+-]*[1-9][0-9.e+-]*( [0-9]+)?$' | head -n 1 > /tmp/sample
    cat /tmp/sample
    [ -s /tmp/sample ]
}

run() {
    main="container=\"main\""
    becomes 120 "summary has CPU and memory of the machine" shows stats/summary '.node | .cpu.usageCoreNanoSeconds > 0 and .memory.workingSetBytes > 1048576'
    becomes 60 "summary has swap of the machine" shows stats/summary '.node.swap.swapAvailableBytes > 0'
    becomes 60 "summary has pressure of the machine" shows stats/summary '.node | .cpu.psi.some.total > 0 and (.memory.psi.full.total | type) == "number" and .io.psi.some.avg10 >= 0'
    becomes 60 "summary has CPU and memory of a container" of_main '.cpu.usageCoreNanoSeconds > 0 and .memory.workingSetBytes > 0 and .memory.pageFaults > 0'
    becomes 60 "summary has pressure of a container" of_main '(.cpu.psi.some.total | type) == "number" and (.memory.psi.full.total | type) == "number"'
    becomes 60 "summary has swap of a container" of_main '.swap.swapUsageBytes == 0'
    # One pod that sleeps may use less than a mebibyte.
    becomes 60 "services and pods are system containers" shows stats/summary '[.node.systemContainers[] | {(.name): .memory.workingSetBytes}] | add | keys == ["kubelet", "pods"] and .kubelet > 1048576 and .pods > 0'
    for name in container_cpu_usage_seconds_total container_memory_working_set_bytes container_memory_rss container_processes; do
        becomes 60 "/metrics/cadvisor has $name" has_sample metrics/cadvisor $name "$main"
    done
    becomes 60 "/metrics/cadvisor has pressure" has_sample metrics/cadvisor container_pressure_cpu_waiting_seconds_total
    becomes 60 "/metrics/resource has memory of a container" has_sample metrics/resource container_memory_working_set_bytes "$main"
    becomes 60 "/metrics/resource has CPU of the machine" has_sample metrics/resource node_cpu_usage_seconds_total
}
