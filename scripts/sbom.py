#!/usr/bin/env python3
"""Prints the bill of materials of the binary as CycloneDX JSON: each crate that is linked into it, with its licence and checksum.

Reads Cargo.lock and `cargo metadata`; needs no network. Equal sources give equal output.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = "quintlet"
# A bill with fewer crates has lost some.
LEAST = 100


def metadata():
    target = os.environ.get("CARGO_BUILD_TARGET") or host()
    command = ["cargo", "metadata", "--locked", "--offline", "--format-version=1", f"--filter-platform={target}"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def host():
    version = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout
    return re.search(r"^host: (.+)$", version, flags=re.M)[1]


def linked(whole):
    """Ids of the crates that the program links, with their dependencies: neither build scripts nor tests."""
    nodes = {node["id"]: node for node in whole["resolve"]["nodes"]}
    start = next(package["id"] for package in whole["packages"] if package["name"] == PROGRAM)
    edges, todo = {}, [start]
    while todo:
        crate = todo.pop()
        if crate in edges:
            continue
        normal = [dep["pkg"] for dep in nodes[crate]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
        edges[crate] = sorted(normal)
        todo += normal
    return start, edges


def main():
    whole = metadata()
    start, edges = linked(whole)
    packages = {package["id"]: package for package in whole["packages"]}
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text())
    checksums = {(package["name"], package["version"]): package.get("checksum") for package in lock["package"]}

    def reference(crate):
        package = packages[crate]
        return f"pkg:cargo/{package['name']}@{package['version']}"

    def component(crate, kind):
        package = packages[crate]
        found = {
            "type": kind,
            "bom-ref": reference(crate),
            "name": package["name"],
            "version": package["version"],
            "purl": reference(crate),
        }
        if package.get("license"):
            found["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        if checksum := checksums.get((package["name"], package["version"])):
            found["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        return found

    crates = sorted((crate for crate in edges if crate != start), key=reference)
    if len(crates) < LEAST:
        print(f"sbom: only {len(crates)} crates, at least {LEAST} expected", file=sys.stderr)
        return 1
    when = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), timezone.utc)
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"timestamp": when.strftime("%Y-%m-%dT%H:%M:%SZ"), "component": component(start, "application")},
        "components": [component(crate, "library") for crate in crates],
        "dependencies": [
            {"ref": reference(crate), "dependsOn": [reference(other) for other in edges[crate]]} for crate in [start, *crates]
        ],
    }
    print(json.dumps(bill, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
