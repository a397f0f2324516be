#!/usr/bin/env python3
"""Prints how long the steps of a run took, the packages with the longest tests, and the tests that took longest.

usage: scripts/times.py TIMES [LOG]

TIMES has a line `SECONDS BUSY STEP` for each step (scripts/step.sh), LOG is the output of cargo-nextest. The last line is nextest's summary.
A step that keeps the processors less busy than others waits for something.
"""

import collections
import re
import sys
from pathlib import Path

RESULT = re.compile(r"^\s+(?:PASS|FAIL|LEAK|TIMEOUT|SIG\w+) \[\s*([\d.]+)s\] \(\s*\d+/\d+\) (\S+)\s+(\S+)")
SUMMARY = re.compile(r"^\s+Summary \[")
SHOWN = 12


def clock(seconds):
    return f"{int(seconds) // 60:3}:{int(seconds) % 60:02}"


def main():
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 64
    total = 0
    print("\n min:s busy step")
    for line in Path(sys.argv[1]).read_text().splitlines():
        seconds, busy, step = line.split(" ", 2)
        total += int(seconds)
        print(clock(int(seconds)), f"{busy:>3}%", step)
    print(clock(total), "     all steps")
    log = Path(sys.argv[2]) if len(sys.argv) == 3 else None
    if log is None or not log.is_file():
        return 0
    lines = log.read_text(errors="replace").splitlines()
    # A failure is printed once more at the end.
    tests = {match[2] + " " + match[3]: float(match[1]) for match in map(RESULT.match, lines) if match}
    packages = collections.Counter()
    for name, seconds in tests.items():
        packages[name.split("::")[0].split(" ")[0]] += seconds
    print("\n min:s of tests, several at a time")
    for package, seconds in packages.most_common(SHOWN):
        print(clock(seconds), package)
    print("\n    s longest tests")
    for name, seconds in sorted(tests.items(), key=lambda test: -test[1])[:SHOWN]:
        print(f"{seconds:6.1f} {name}")
    for line in filter(SUMMARY.match, lines):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
