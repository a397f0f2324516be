#!/usr/bin/env python3
"""Prints how long the steps of a run took, why tests failed, the packages with the longest tests, and the tests that took longest.

usage: scripts/times.py TIMES [LOG]

TIMES has a line `SECONDS BUSY STEP` for each step (scripts/step.sh), LOG is the output of cargo-nextest. The last line is nextest's summary.
A step that keeps the processors less busy than others waits for something.
"""

import collections
import itertools
import re
import sys
from pathlib import Path

RESULT = re.compile(r"^\s+(PASS|FAIL|LEAK|TIMEOUT|SIG\w+) \[\s*([\d.]+)s\] \(\s*\d+/\d+\) (\S+)\s+(\S+)")
SUMMARY = re.compile(r"^\s+Summary \[")
PANIC = re.compile(r"^\s*thread '(.+)' .*panicked at (\S+):$")
SHOWN = 12
MESSAGE = 400


def clock(seconds):
    return f"{int(seconds) // 60:3}:{int(seconds) % 60:02}"


def panics(lines):
    """Returns the thread, the place and the beginning of the message of each panic of a failed test, once each."""
    found = {}
    is_failure = False
    for number, line in enumerate(lines):
        if match := RESULT.match(line):
            is_failure = match[1] != "PASS"
        elif is_failure and (match := PANIC.match(line)):
            message = itertools.takewhile(lambda text: "stack backtrace:" not in text, lines[number + 1 : number + 9])
            found.setdefault((match[1], match[2]), " ".join(text.strip() for text in message)[:MESSAGE])
    return found


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
    for (thread, place), message in panics(lines).items():
        print(f"\n{thread} at {place}:\n  {message}")
    # A failure is printed once more at the end.
    tests = {match[3] + " " + match[4]: float(match[2]) for match in map(RESULT.match, lines) if match}
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
