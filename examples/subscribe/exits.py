#!/usr/bin/env python3
"""Counts the exits of containers by reason and exit code, and serves the counts for Prometheus.

    pip install grpcio grpcio-tools
    PYTHONPATH=proto examples/subscribe/exits.py --socket /run/quintlet/subscribe/pleg/subscribe.sock --listen 9490
"""

import argparse
import collections
import http.server
import threading
import time

import grpc

protos, services = grpc.protos_and_services("quintlet/subscribe/v1/subscribe.proto")
exits = collections.Counter()


def watch(socket):
    """Reads events for ever. After a lost connection it continues at the last cursor."""
    cursor, seen, first, present = None, set(), True, set()
    while True:
        try:
            # Without it, the path of the socket is the authority of each request. The services accept it; some proxies do not.
            options = [("grpc.default_authority", "localhost")]
            with grpc.insecure_channel(f"unix:{socket}", options) as channel:
                stub = services.ContainersStub(channel)
                for event in stub.Watch(protos.WatchContainersRequest(resume=cursor)):
                    if event.HasField("cursor"):
                        cursor = event.cursor
                    kind = event.WhichOneof("event")
                    if kind == "snapshot_begin":
                        present = set()
                    if kind == "snapshot_end":
                        # Pods that are not in a snapshot are gone.
                        first, seen = False, {key for key in seen if key[0] in present}
                    if kind == "gone":
                        seen = {key for key in seen if key[0] != event.gone.uid}
                        present.discard(event.gone.uid)
                    if kind == "pod":
                        present.add(event.pod.uid)
                        take(event.pod, seen, first)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", flush=True)
        time.sleep(1)


def take(pod, seen, first):
    """Counts each exit once. Those before the start of this program do not count."""
    for container in pod.containers:
        key = (pod.uid, container.name, container.restart_count)
        if container.state != protos.CONTAINER_STATE_EXITED or key in seen:
            continue
        seen.add(key)
        if not first:
            exits[pod.namespace, pod.name, container.name, container.reason, container.exit_code] += 1


class Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        labels = ("namespace", "pod", "container", "reason", "exit_code")
        lines = ["# TYPE container_exits_total counter"]
        for values, count in sorted(exits.items()):
            pairs = ",".join(f'{label}="{value}"' for label, value in zip(labels, values))
            lines.append(f"container_exits_total{{{pairs}}} {count}")
        body = ("\n".join(lines) + "\n").encode()
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--socket", default="/run/quintlet/subscribe/pleg/subscribe.sock")
    arguments.add_argument("--address", default="127.0.0.1")
    arguments.add_argument("--listen", type=int, default=9490)
    given = arguments.parse_args()
    threading.Thread(target=watch, args=[given.socket], daemon=True).start()
    http.server.ThreadingHTTPServer((given.address, given.listen), Metrics).serve_forever()
