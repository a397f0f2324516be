#!/usr/bin/env python3
"""Prints what changed in pods while agents were exchanged, and fails for what Quintlet changed.

usage: differences.py WATCH MARKS

WATCH is the output of `kubectl get pods -A --watch --output-watch-events -o json`, MARKS has a line `OFFSET AGENT PHASE` for each phase: the
byte of WATCH at which it begins. Changes before the first phase do not count, nor do those of AGENT `test`. Differences are expected

- if KNOWN has them,
- in the status of pods with the label `changes`, which change by themselves,
- if a kubelet made them when it restarted (BASELINE), and a kubelet makes them again.
"""

import json
import re
import sys
from collections import Counter
from pathlib import Path

# The API server's own notes about a write.
NOTES = {("metadata", "resourceVersion"), ("metadata", "managedFields")}
# Path, and why Quintlet writes another value than the kubelet 1.36 of the test.
KNOWN = [
    (re.compile(r"status\.conditions\.PodReadyToStartContainers\.(message|reason)$"), "since Kubernetes 1.37"),
    (re.compile(r"status\.resources(\.limits\.memory)?$"), "a kubelet on cgroup v1 reports a cgroup without a limit as a limit of 8 EiB"),
]
# Of static pods: a kubelet that starts reports them as new, and without volumeMounts.
RESTORED = re.compile(r"status\.startTime$|status\.conditions\.\w+\.lastTransitionTime$|status\.containerStatuses\.\w+\.volumeMounts\.")
NO_LIMIT = "9007199254740988Ki"
BASELINE = "kubelet-restarts"
# The name of a list's item.
IDS = ("mountPath", "name", "type", "containerID", "ip", "uid")


def events(text):
    """Yields the offset of the end of each event, and the event."""
    decoder, at = json.JSONDecoder(), 0
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text):
            return
        event, at = decoder.raw_decode(text, at)
        yield at, event


def leaves(value, path=()):
    """The values of an object by their path; items of a list by their name."""
    if isinstance(value, dict) and value:
        return {k: v for key, part in value.items() for k, v in leaves(part, (*path, key)).items()}
    if isinstance(value, list) and value:
        names = [next((item[key] for key in IDS if key in item), n) if isinstance(item, dict) else n for n, item in enumerate(value)]
        names = [name if names.count(name) == 1 else f"{name}#{n}" for n, name in enumerate(names)]
        return {k: v for name, part in zip(names, value) for k, v in leaves(part, (*path, name)).items()}
    return {path: value}


def compare(before, after):
    """Yields path, old and new value of each difference."""
    before, after = leaves(before), leaves(after)
    for path in sorted(before.keys() | after.keys(), key=str):
        if path[:2] not in NOTES and before.get(path) != after.get(path):
            yield ".".join(map(str, path)), before.get(path), after.get(path)


def known(pod, path, old, new):
    """Why a difference is expected, if it is."""
    is_static = pod["metadata"].get("annotations", {}).get("kubernetes.io/config.source") == "file"
    if is_static and RESTORED.match(path) and (old is None or (new is not None and new < old)):
        return "as before a kubelet restarted"
    if "resources" in path and not {str(old), str(new)} <= {NO_LIMIT, "None", "{}"}:
        return None
    return next((why for pattern, why in KNOWN if pattern.match(path)), None)


def by_itself(pod, path, old, new):
    """Whether a pod that changes by itself may make this difference: it keeps its UID, and restarts are not forgotten."""
    if "changes" not in pod["metadata"].get("labels", {}) or not path.startswith("status."):
        return False
    return not path.endswith(".restartCount") or (isinstance(old, int) and isinstance(new, int) and old < new)


def main():
    # A character for each byte, as MARKS counts them.
    text = Path(sys.argv[1]).read_text(encoding="latin-1")
    marks = [line.split(maxsplit=2) for line in Path(sys.argv[2]).read_text().splitlines()]
    marks = [(int(offset), agent, phase) for offset, agent, phase in marks]
    pods, agent, phase, counts, baseline = {}, None, None, Counter(), set()
    for end, event in events(text):
        pod = event["object"]
        key = "/".join((pod["metadata"]["namespace"], pod["metadata"]["name"]))
        former, pods[key] = pods.get(key), pod
        while marks and end > marks[0][0]:
            _, agent, phase = marks.pop(0)
            print(f"== {phase}")
        if agent in (None, "test"):
            continue
        found = [("", event["type"], "")] if event["type"] != "MODIFIED" or former is None else list(compare(former, pod))
        for path, old, new in found or [("", "written without a change", "")]:
            why = "changes by itself" if by_itself(pod, path, old, new) else known(pod, path, old, new)
            if phase == BASELINE:
                baseline.add((key, path))
            if not why and agent == "kubelet" and (key, path) in baseline:
                why = "as a kubelet that restarts"
            counts["expected" if why else "differences"] += 1
            print(f"  {key} {path} {old!r} -> {new!r}{f' ({why})' if why else ''}")
    for _, _, phase in marks:
        print(f"== {phase}\n  nothing changed")
    print(f"takeover: {len(pods)} pods, {counts['differences']} differences, {counts['expected']} that are expected")
    return 1 if counts["differences"] or len(pods) < 30 or not baseline else 0


if __name__ == "__main__":
    sys.exit(main())
