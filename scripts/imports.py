#!/usr/bin/env python3
"""Fails for a private import of another crate behind one of the own crate at the head of a Rust file. `--fix` moves it.

Imports are in three groups: the standard library, other crates, the own crate. rustfmt sorts within a group, and keeps what is in the wrong one.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORT = re.compile(r"(pub(?:\([^)]*\))? )?use (?:::)?(\w+)")
MODULE = re.compile(r"(?:pub(?:\([^)]*\))? )?mod (\w+)\s*[;{]")
# What may be between the imports at the head of a file.
HEAD = re.compile(r"(?:\s*//|#!?\[|\s*$)|" + MODULE.pattern.replace(r"[;{]", ";"))
STD = {"std", "core", "alloc"}
OWN = {"crate", "self", "super"}
LEAST = 500

# Text, and what `--fix` makes of it; `None`: nothing.
SAMPLES = [
    ("use std::io;\n\nuse a::A;\nuse b::B;\n\nuse crate::c;\n", None),
    ("use crate::c;\nuse b::B;\n", "use b::B;\n\nuse crate::c;\n"),
    ("use a::A;\n\nuse crate::c;\nuse b::{\n    B,\n    C,\n};\n", "use a::A;\nuse b::{\n    B,\n    C,\n};\n\nuse crate::c;\n"),
    ("mod d;\n\nuse crate::c;\nuse d::D;\n", None),
    ("use crate::c::Kind;\nuse Kind::{A, B};\n", None),
    ("pub use crate::c;\nuse b::B;\n", None),
    ("use a::A;\n\nuse super::*;\n#[cfg(x)]\nuse b::B;\n", "use a::A;\n#[cfg(x)]\nuse b::B;\n\nuse super::*;\n"),
    ("use crate::c;\n\nfn f() {\n    use b::B;\n}\n", None),
]  # fmt: skip


def imports(lines):
    """The imports at the head of a file: first and last line with attributes, whether it is private, and the first name."""
    i = 0
    while i < len(lines):
        if m := IMPORT.match(lines[i]):
            begin, end = i, i
            while begin > 0 and lines[begin - 1].startswith("#["):
                begin -= 1
            while end < len(lines) - 1 and not lines[end].rstrip().endswith(";"):
                end += 1
            yield begin, end, not m[1], m[2]
            i = end + 1
        elif HEAD.match(lines[i]):
            i += 1
        else:
            return


def check(text):
    """Returns the numbers of the lines with imports in the wrong group, and the text with these moved."""
    lines = text.split("\n")
    own = OWN | {m[1] for line in lines if (m := MODULE.match(line))}
    private = [found for found in imports(lines) if found[2]]
    is_own = lambda name: name in own or name[0].isupper()  # noqa: E731
    first_own = next((begin for begin, _, _, name in private if is_own(name)), len(lines))
    others = [found for found in private if not is_own(found[3]) and found[3] not in STD]
    late = [found for found in others if found[0] > first_own]
    moved = [line for begin, end, _, _ in late for line in lines[begin : end + 1]]
    for begin, end, _, _ in reversed(late):
        del lines[begin : end + 1]
    before = [end + 1 for _, end, _, _ in others if end < first_own]
    if before:
        lines[before[-1] : before[-1]] = moved
    elif late:
        lines[first_own:first_own] = [*moved, ""]
    return [begin for begin, *_ in late], "\n".join(lines)


def check_itself():
    """Fails if a planted fault is not found, is not moved as it must be, or is found again."""
    for text, wanted in SAMPLES:
        late, fixed = check(text)
        assert fixed == (wanted or text), f"{text!r} became {fixed!r}"
        assert bool(late) == bool(wanted) and not check(fixed)[0], text


def main():
    check_itself()
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard", "*.rs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    count = faults = 0
    for name in sorted(set(filter(None, listed.split("\0")))):
        path = ROOT / name
        if not path.is_file():
            continue
        count += 1
        late, fixed = check(path.read_text())
        if "--fix" in sys.argv and late:
            path.write_text(fixed)
            continue
        faults += len(late)
        for line in late:
            print(f"{name}:{line + 1}: another crate is imported behind the own one", file=sys.stderr)
    print(f"imports: {faults} in the wrong group")
    return 1 if faults or count < LEAST else 0


if __name__ == "__main__":
    sys.exit(main())
