#!/usr/bin/env python3
"""Measures bursts of pods on a node of a real cluster, for cost.sh.

usage: cost.py measure ADDRESS PKI NODE PID AGENT MODE PODS ROUNDS   prints a line of JSON
       cost.py table FIGURES OUT                                    prints a table, and writes all figures

PID is the agent; its descendants count with it. Containers are children of the runtime.
"""

import http.client
import json
import os
import ssl
import statistics
import sys
import threading
import time
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PODS_PATH = "/api/v1/namespaces/default/pods"
# Time without a change before and after a burst, so that each burst begins on a node at rest.
REST = 10
IDLE = 60
LIMIT = 300


class Cluster:
    """Connections to the API server as an administrator."""

    def __init__(self, address, pki):
        self.address = address
        self.context = ssl.create_default_context(cafile=f"{pki}/ca.crt")
        self.context.load_cert_chain(f"{pki}/admin.crt", f"{pki}/admin.key")

    def connect(self):
        return http.client.HTTPSConnection(self.address, 6443, context=self.context, timeout=LIMIT)

    def call(self, connection, method, path, body=None):
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        data = json.loads(reply.read())
        if reply.status >= 300:
            raise RuntimeError(f"{method} {path}: {reply.status} {data.get('message')}")
        return data


class Watch:
    """Times at which pods became Ready and were gone, as a watch shows them."""

    def __init__(self, cluster):
        self.ready, self.gone, self.changed = {}, {}, threading.Condition()
        version = cluster.call(cluster.connect(), "GET", PODS_PATH)["metadata"]["resourceVersion"]
        connection = cluster.connect()
        connection.request("GET", f"{PODS_PATH}?watch=1&resourceVersion={version}")
        threading.Thread(target=self.read, args=(connection.getresponse(),), daemon=True).start()

    def read(self, reply):
        for line in reply:
            now, event = time.monotonic(), json.loads(line)
            name = event["object"]["metadata"]["name"]
            conditions = event["object"].get("status", {}).get("conditions", [])
            with self.changed:
                if event["type"] == "DELETED":
                    self.gone.setdefault(name, now)
                elif any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                    self.ready.setdefault(name, now)
                self.changed.notify_all()

    def wait(self, times, names):
        """Returns the times of all names, in order."""
        with self.changed:
            if not self.changed.wait_for(lambda: all(name in times for name in names), LIMIT):
                raise RuntimeError(f"missing: {[name for name in names if name not in times][:5]}")
            return sorted(times[name] for name in names)


def pod(name, node):
    script = "trap 'exit 0' TERM; sleep 100000 & wait"
    container = {"name": "main", "image": "busybox:1", "command": ["sh", "-c", script]}
    spec = {"nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 5, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def processes(root):
    """The process and its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [root]
    for process in found:
        found.extend(parents.get(process, []))
    return found


def processor_seconds(root):
    total = 0
    for process in processes(root):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        # Of the process, and of its children that have ended.
        total += sum(int(field) for field in fields[11:15])
    return total / TICK


def memory(root):
    """Proportional set size in bytes."""
    total = 0
    for process in processes(root):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def measure(address, pki, node, agent, name, mode, pods, rounds):
    cluster = Cluster(address, pki)
    watch = Watch(cluster)
    figures = {"agent": name, "mode": mode, "pods": pods, "rounds": []}
    # One pod first: images are unpacked, and connections are made.
    for number in range(rounds + 1):
        names = [f"{node}-{number}-{index}" for index in range(pods if number else 1)]
        time.sleep(REST)
        # The API server closes a connection that is idle for a minute and a half.
        connection = cluster.connect()
        before, begin = processor_seconds(agent), time.monotonic()
        for pod_name in names:
            cluster.call(connection, "POST", PODS_PATH, pod(pod_name, node))
        ready = watch.wait(watch.ready, names)
        time.sleep(REST)
        figure = {"half_ready_s": ready[len(ready) // 2] - begin, "ready_s": ready[-1] - begin}
        if number == rounds:
            idle = processor_seconds(agent)
            time.sleep(IDLE)
            figures["idle_percent"] = (processor_seconds(agent) - idle) / IDLE * 100
            figures["memory_bytes"] = memory(agent)
        figure["start_cpu_ms"] = (processor_seconds(agent) - before) / len(names) * 1000
        if number == rounds:
            figure["start_cpu_ms"] -= figures["idle_percent"] / 100 * IDLE / len(names) * 1000
        connection = cluster.connect()
        before, begin = processor_seconds(agent), time.monotonic()
        for pod_name in names:
            cluster.call(connection, "DELETE", f"{PODS_PATH}/{pod_name}")
        figure["gone_s"] = watch.wait(watch.gone, names)[-1] - begin
        time.sleep(REST)
        figure["end_cpu_ms"] = (processor_seconds(agent) - before) / len(names) * 1000
        if number:
            figures["rounds"].append(figure)
    print(json.dumps(figures))


def table(lines, out):
    figures = [json.loads(line) for line in Path(lines).read_text().splitlines()]
    Path(out).write_text(json.dumps(figures, indent=1) + "\n")

    def spread(values, digits=1):
        return ", ".join(f"{value:.{digits}f}" for value in values)

    print("| agent | processors | half Ready, s | all Ready, s | all gone, s | CPU per pod life, ms | CPU at rest, % of a core | memory (PSS), MiB |")
    print("|---|---|---|---|---|---|---|---|")
    for each in figures:
        rounds = each["rounds"]
        columns = [spread([r[key] for r in rounds]) for key in ("half_ready_s", "ready_s", "gone_s")]
        life = statistics.median(r["start_cpu_ms"] + r["end_cpu_ms"] for r in rounds)
        columns += [f"{life:.0f}", f"{each['idle_percent']:.2f}", f"{each['memory_bytes'] / 2**20:.0f}"]
        print(f"| {each['agent']} | {each['mode']} | {' | '.join(columns)} |")


if __name__ == "__main__":
    if sys.argv[1] == "measure":
        address, pki, node, agent, name, mode, pods, rounds = sys.argv[2:]
        measure(address, pki, node, int(agent), name, mode, int(pods), int(rounds))
    else:
        table(*sys.argv[2:])
