#!/usr/bin/env python3
"""Fails for a library or program without tests that cargo compiles as a test, and for tests that it does not compile.

Cargo compiles and links each library and program a second time for its unit tests, unless the target has `test = false` in Cargo.toml.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST = re.compile(r"^\s*#\[(?:\w+::)*test\b|^\s*proptest! ", re.M)


def sources(package, target):
    """The files whose tests belong to a target: those of a program are in its file, those of a library beside it."""
    path = Path(target["src_path"])
    if target["kind"] == ["bin"]:
        return [path]
    root = Path(package["manifest_path"]).parent / "src"
    programs = {Path(other["src_path"]) for other in package["targets"] if other["kind"] == ["bin"]}
    return [file for file in root.rglob("*.rs") if file not in programs]


def main():
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"]
    metadata = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    targets = failures = 0
    for package in metadata["packages"]:
        for target in package["targets"]:
            if not {"lib", "bin", "proc-macro"} & set(target["kind"]):
                continue
            targets += 1
            has_tests = any(TEST.search(file.read_text()) for file in sources(package, target))
            if has_tests == target["test"]:
                continue
            failures += 1
            manifest = Path(package["manifest_path"]).relative_to(ROOT)
            kind = "lib" if "bin" not in target["kind"] else "bin"
            wanted = "has tests and `test = false`" if has_tests else "has no tests and needs `test = false`"
            print(f"{manifest}: {kind} {target['name']} {wanted}", file=sys.stderr)
    print(f"test targets: {targets} libraries and programs, {failures} with the wrong `test`")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
