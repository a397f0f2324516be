#!/usr/bin/env python3
"""Prints a filter of cargo-nextest for the tests of the crates that depend on what has changed: `scripts/changed.py [BASE]`.

What has changed: the commits since BASE (by default where the branch left `main`, or the last commit on `main` itself), and what is not
committed. A file outside of all crates, such as Cargo.lock or a page in docs/ that tests compare with the code, changes everything. A file
that no test reads changes nothing.
"""

import json
import subprocess
import sys
from pathlib import Path, PurePath

ROOT = Path(__file__).resolve().parent.parent
# Tests that run the binary of all services, and therefore depend on each of its crates.
RUN_THE_BINARY = ["quintlet-e2e", "quintlet-hostile"]
# Files that no test reads; `make check` does.
UNTESTED = (".github/", "LICENSE", "README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def run(*command):
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def changed_files(base):
    committed = run("git", "diff", "--name-only", "-z", base).split("\0")
    untracked = run("git", "ls-files", "-z", "--others", "--exclude-standard").split("\0")
    return {file for file in committed + untracked if file}


def expression(files, crates, parts_of_binary):
    """The filter for these files. `crates` has the directory of each crate, `parts_of_binary` the crates of the binary."""
    changed = set()
    for file in files:
        if file.startswith(UNTESTED):
            continue
        path = PurePath(file)
        owner = next((crates[str(parent)] for parent in path.parents if str(parent) in crates), None)
        if owner is None:
            return "all()"
        changed.add(owner)
    wanted = [f"rdeps(={crate})" for crate in sorted(changed)]
    if changed & parts_of_binary:
        wanted += [f"package(={crate})" for crate in RUN_THE_BINARY]
    return " | ".join(wanted) or "none()"


def main():
    if len(sys.argv) > 2:
        print(__doc__, file=sys.stderr)
        return 64
    base = sys.argv[1] if len(sys.argv) == 2 else run("git", "merge-base", "HEAD", "main").strip()
    metadata = json.loads(run("cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"))
    packages = metadata["packages"]
    crates = {str(Path(p["manifest_path"]).parent.relative_to(ROOT)): p["name"] for p in packages}
    depends = {p["name"]: {d["name"] for d in p["dependencies"] if d["kind"] is None} for p in packages}
    parts, rest = set(), ["quintlet"]
    while rest:
        crate = rest.pop()
        if crate in depends and crate not in parts:
            parts.add(crate)
            rest += depends[crate]
    missing = set(RUN_THE_BINARY) - depends.keys()
    if missing:
        print(f"no such crate: {missing}", file=sys.stderr)
        return 1
    print(expression(changed_files(base), crates, parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
