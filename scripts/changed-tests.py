#!/usr/bin/env python3
"""Prints a filter of cargo-nextest for the test functions that were added or changed since a commit: `scripts/changed-tests.py BASE`.

A test is changed if a line of its function is: the nearest `fn` above the line, if it has an attribute of a test.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HUNK = re.compile(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@")
FUNCTION = re.compile(r"^\s*(?:pub(?:\([^)]*\))? )?(?:async )?fn (\w+)")
TEST = re.compile(r"#\[(?:\w+::)?test\b")


def changed_lines(base):
    """The numbers of the lines that were added, by file."""
    diff = subprocess.run(
        ["git", "diff", "--unified=0", "--find-renames", base, "--", "*.rs"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    lines, file = {}, None
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line[6:] if line.startswith("+++ b/") else None
        elif (hunk := HUNK.match(line)) and file:
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines.setdefault(file, set()).update(range(first, first + count))
    return lines


def tests_of(text, wanted):
    """The tests whose function has one of the lines."""
    found, name, is_test = set(), None, False
    for number, line in enumerate(text.splitlines(), 1):
        if TEST.search(line):
            is_test, name = True, None
        elif function := FUNCTION.match(line):
            name, is_test = (function[1] if is_test else None), False
        if name and number in wanted:
            found.add(name)
    return found


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 64
    found = set()
    for file, wanted in changed_lines(sys.argv[1]).items():
        found |= tests_of((ROOT / file).read_text(), wanted)
    print(" | ".join(f"test(/(^|::){name}$/)" for name in sorted(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
