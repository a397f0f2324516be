#!/usr/bin/env python3
"""Fails for a test with tokio's paused clock that depends on work outside of its runtime.

A paused clock advances once its own runtime has nothing to do, whatever other threads and processes do meanwhile: which of the two is
first depends on the machine. Such a test takes `quintlet_virtual_time::start()` instead, whose clock waits for the whole process.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAUSED = re.compile(r"start_paused\s*=\s*true|\btime::pause\(\)")
FUNCTION = re.compile(r"^(\s*)(?:pub(?:\([^)]*\))? )?(?:async )?fn (\w+)")
OUTSIDE = re.compile(r"\bthread::(?:sleep|spawn|scope|Builder)\b|\bspawn_blocking\b|\bCommand::new\b")
# The least number of tests with a paused clock: a check that reads nothing finds nothing.
LEAST = 100


def functions(lines):
    """The functions of a file: name, first line, attributes and body, body alone."""
    attributes = []
    for number, line in enumerate(lines):
        if line.strip().startswith("#["):
            attributes.append(line)
        elif function := FUNCTION.match(line):
            end = next((n for n in range(number, len(lines)) if lines[n].rstrip() == function[1] + "}"), len(lines) - 1)
            yield function[2], number + 1, "\n".join(attributes), "\n".join(lines[number : end + 1])
            attributes = []
        elif line.strip():
            attributes = []


def check(text):
    """The tests of a file that mix both, and how many have a paused clock."""
    found, paused = [], 0
    every = list(functions(text.splitlines()))
    # Helpers of tests that have work outside of the runtime; `task::blocking`, which the product uses, keeps the clock.
    helpers = {name for name, _, attributes, body in every if "test" not in attributes and OUTSIDE.search(body)}
    for name, line, attributes, body in every:
        if not PAUSED.search(attributes + body):
            continue
        paused += 1
        used = OUTSIDE.search(body)
        called = [helper for helper in helpers if helper != name and re.search(rf"(?<![\w.:]){helper}\(", body)]
        if used or called:
            found.append((line, name, used[0] if used else f"{called[0]}()"))
    return found, paused


def main():
    files = subprocess.run(["git", "ls-files", "-z", "*.rs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    total, failures = 0, 0
    for file in filter(None, files.split("\0")):
        if not (ROOT / file).is_file():
            continue
        found, paused = check((ROOT / file).read_text())
        total += paused
        for line, name, used in found:
            failures += 1
            print(f"{file}:{line}: {name} has a paused clock and {used}: use quintlet_virtual_time::start()", file=sys.stderr)
    if total < LEAST:
        print(f"only {total} tests with a paused clock were found", file=sys.stderr)
        return 1
    print(f"paused clock: {total} tests, {failures} with work outside of their runtime")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
