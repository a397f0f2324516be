#!/usr/bin/env python3
"""Checks that a shipped binary has no failpoints, no planted bugs and no names of tests: `scripts/shipped-names.py BINARY`.

Failpoints are compiled with the cargo feature `failpoints` of quintlet-kit, which test crates enable. A build of the whole
workspace shares the features of all crates, so a binary that it makes is not one to ship.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAILPOINT = re.compile(r'failpoint::(?:file|work|around|reached|planted)!\(\s*(?:\w+,\s*){0,2}"([^"]+)"')
TEST = re.compile(r"#\[(?:\w+::)?test\b[^\n]*\]\n(?:\s*#\[[^\n]*\n)*\s*(?:async )?fn (\w+)\(")
# Failpoints have spaces and apostrophes.
TEXT = re.compile(rb"[A-Za-z0-9_' ]{8,}")
# The least number of names that the sources have: a check that reads nothing finds nothing.
LEAST_FAILPOINTS = 35
LEAST_TESTS = 1000
# A shorter name of a test can be a word of the product.
SHORTEST_TEST = 20


def names(pattern, *directories):
    sources = (file for directory in directories for file in (ROOT / directory).rglob("*.rs"))
    return {name for file in sources if "/kit/src/failpoint" not in str(file) for name in pattern.findall(file.read_text())}


def texts(binary):
    """The runs of bytes in which a name can stand, each once: symbols and strings without what is between them."""
    return b"\n".join(set(TEXT.findall(Path(binary).read_bytes())))


def found(wanted, content):
    """The names that the content contains, also in the middle of a symbol or beside another string."""
    with tempfile.NamedTemporaryFile() as patterns:
        patterns.write("\n".join(sorted(wanted)).encode())
        patterns.flush()
        grep = ["grep", "--text", "--only-matching", "--fixed-strings", f"--file={patterns.name}"]
        lines = subprocess.run(grep, input=content, capture_output=True, env={"LC_ALL": "C", "PATH": os.environ["PATH"]})
    if lines.returncode > 1:
        sys.exit(lines.stderr.decode())
    return sorted(set(lines.stdout.decode().splitlines()))


def main():
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} BINARY", file=sys.stderr)
        return 64
    binary = sys.argv[1]
    failpoints = names(FAILPOINT, "services")
    tests = {name for name in names(TEST, "services", "tests") if len(name) >= SHORTEST_TEST}
    if len(failpoints) < LEAST_FAILPOINTS or len(tests) < LEAST_TESTS:
        print(f"only {len(failpoints)} failpoints and {len(tests)} tests in the sources", file=sys.stderr)
        return 1
    content = texts(binary)
    failures = [f"failpoint {name!r}" for name in found(failpoints, content)]
    failures += [f"test {name!r}" for name in found(tests, content)]
    for failure in failures:
        print(f"{binary} has the {failure}: build it with `cargo build -p quintlet`", file=sys.stderr)
    print(f"shipped names: {len(failpoints)} failpoints and {len(tests)} tests, {len(failures)} in {binary}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
