# What kubectl asks of a node, through the API server and the hardened units: logs, a command, and files of the machine's log directory.

# answers PATH TEXT: the node's answer has a line that is this text.
answers() {
    request GET "/api/v1/$1" > /tmp/answer || { cat /tmp/answer; return 1; }
    tail -n 1 /tmp/answer
    grep -qxF "$2" /tmp/answer
}

# prints POD COMMAND OUTPUT: a command in the container, run by the node.
prints() {
    request POST "/api/v1/nodes/$node/proxy/run/default/$1/main?cmd=$2" | tee /tmp/output
    [ "$(cat /tmp/output)" = "$3" ]
}

run() {
    pod access "$(jq -nc --argjson c "$(script "trap 'exit 0' TERM; echo said; while :; do sleep 1 & wait; done")" '{containers: [$c]}')"
    becomes 300 "a pod is Ready" is_ready_pod access
    becomes 60 "its log has its line" answers namespaces/default/pods/access/log said
    becomes 60 "a command runs in it" prints access echo%20done done
    echo written > /var/log/quintlet-vm.log
    becomes 60 "a file of the log directory is served" answers "nodes/$node/proxy/logs/quintlet-vm.log" written
    becomes 60 "nothing outside of it" refuses "nodes/$node/proxy/logs/../../etc/shadow"
    rm /var/log/quintlet-vm.log
    request DELETE /api/v1/namespaces/default/pods/access > /dev/null
}

# refuses PATH: the answer is an error, and no content of a file.
refuses() {
    curl -sS --insecure --path-as-is -o /tmp/answer -w '%{http_code}' "$api/api/v1/$1" | tee /tmp/code
    grep -qE '^(301|4..)$' /tmp/code && ! grep -q root: /tmp/answer
}
