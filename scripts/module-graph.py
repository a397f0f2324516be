#!/usr/bin/env python3
"""Checks the structure of the crates below services/, proto/ and tests/support/; with --show, prints it, too.

- The top-level modules of a crate have no import cycle.
- Crates depend in one direction: services, then services/shared, then proto. No service depends on another service, and no
  product code on a crate below tests/.
- No crate has more than 9,000 lines outside of its tests.

ALLOWED lists what does not hold yet, with the number of today. A number may only go down.
Imports are read as text: `crate::module` and `super::module` in paths and use declarations.
"""

import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 9_000

# Crate: modules that are in an import cycle, lines outside of tests.
ALLOWED = {
}

# Every program in one file.
ALL_IN_ONE = "quintlet"
# The crates below pod-sync, lowest first: one may depend on those before it.
POD_SYNC = [
    f"pod-sync-{name}"
    for name in (
        "decisions",
        "eviction",
        "metrics",
        "cri-config",
        "clients",
        "objects",
        "plugins",
        "csi",
        "volume-manager",
        "volumes",
        "certificates",
        "in-tree",
        "images",
        "sources",
        "volume-tasks",
        "views",
        "state",
        "containment",
        "node",
        "logs",
        "shutdown",
        "storage",
        "evictor",
        "worker",
    )
]


def product(text):
    """The text of a file without its tests."""
    cut = re.search(r"^#\[cfg\(test\)\]\nmod \w+ \{", text, re.M)
    return text[: cut.start()] if cut else text


def tests_of(file, text):
    """The files and directories of the modules that a file declares for tests."""
    directory = file.parent if file.name in ("lib.rs", "main.rs", "mod.rs") else file.with_suffix("")
    for path, name in re.findall(r'^#\[cfg\(test\)\]\n(?:#\[path = "(.+?)"\]\n)?(?:pub(?:\(\w+\))? )?mod (\w+);', text, re.M):
        yield from [file.parent / path] if path else [directory / f"{name}.rs", directory / name]


def product_files(src):
    texts = {file: file.read_text() for file in sorted(src.rglob("*.rs"))}
    tests = {path for file, text in texts.items() for path in tests_of(file, text)}
    # A module of a test is a test.
    while more := {p for file in tests & texts.keys() for p in nested(file, texts[file])} - tests:
        tests |= more
    return {f: t for f, t in texts.items() if f not in tests and not tests & set(f.parents)}


def nested(file, text):
    directory = file.parent if file.name == "mod.rs" else file.with_suffix("")
    for path, name in re.findall(r'^(?:#\[path = "(.+?)"\]\n)?(?:pub(?:\(\w+\))? )?mod (\w+);', text, re.M):
        yield from [file.parent / path] if path else [directory / f"{name}.rs", directory / name]


def without_comments(text):
    return re.sub(r"//.*", "", text)


def imported(text, depth):
    """The top-level modules that a file at this depth below the crate's root names."""
    root = r"(?:\bcrate|(?<![:\w])" + "::".join(["super"] * depth) + r"(?!::super))::"
    for match in re.finditer(root + r"(\w+|\{[^;]*\})", text):
        names = match.group(1)
        if names.startswith("{"):
            inner = re.sub(r"\{[^{}]*\}", "", names[1:-1])
            while "{" in inner:
                inner = re.sub(r"\{[^{}]*\}", "", inner)
            yield from re.findall(r"(?:^|,)\s*(\w+)", inner)
        else:
            yield names


class Crate:
    def __init__(self, manifest):
        self.dir = manifest.parent
        data = tomllib.loads(manifest.read_text())
        self.name = data["package"]["name"]
        self.dependencies = set(data.get("dependencies", {}))
        self.lines = 0
        self.edges = defaultdict(set)
        src = self.dir / "src"
        files = product_files(src)
        tops = {f.relative_to(src).parts[0].removesuffix(".rs") for f in files} - {"lib", "main"}
        for file, whole in files.items():
            text = product(whole)
            self.lines += text.count("\n")
            parts = file.relative_to(src).with_suffix("").parts
            if parts[-1] == "mod":
                parts = parts[:-1]
            top = parts[0]
            if top in ("lib", "main"):
                continue
            names = set(imported(without_comments(text), len(parts)))
            self.edges[top] |= (names & tops) - {top}

    def cycle(self):
        """The modules that can reach themselves."""
        def reachable(start):
            seen, todo = set(), list(self.edges[start])
            while todo:
                module = todo.pop()
                if module not in seen:
                    seen.add(module)
                    todo.extend(self.edges[module])
            return seen

        return sorted(module for module in list(self.edges) if module in reachable(module))


def layer(crate):
    path = crate.dir.relative_to(ROOT).parts
    return path[0] if path[0] in ("proto", "tests") else "shared" if path[1] == "shared" else path[1]


def arrows(crates):
    """Dependencies against the layering."""
    by_name = {c.name: c for c in crates}
    for crate in crates:
        own = layer(crate)
        for name in sorted(crate.dependencies & by_name.keys()):
            other = layer(by_name[name])
            if own == "tests":
                continue
            if other == "tests":
                yield f"{crate.name} depends on {name}, which is for tests"
            elif other == "proto" or crate.name == ALL_IN_ONE:
                continue
            elif own == "proto" or own == "shared" and other != "shared":
                yield f"{crate.name} ({own}) depends on {name} ({other})"
            elif other not in ("shared", own):
                yield f"the service {crate.name} depends on the service {name}"
            elif name in POD_SYNC and crate.name in POD_SYNC and POD_SYNC.index(name) > POD_SYNC.index(crate.name):
                yield f"{crate.name} depends on {name}, which is above it"


def main():
    manifests = [*(ROOT / "services").rglob("Cargo.toml"), ROOT / "proto" / "Cargo.toml", *(ROOT / "tests").rglob("Cargo.toml")]
    crates = sorted((Crate(m) for m in manifests), key=lambda c: c.name)
    failures = list(arrows(crates))
    known = {c.name for c in crates}
    below = {c.name for c in crates if c.dir.parent.name == "pod-sync"}
    failures += [f"{name}: not in the order of the crates below pod-sync" for name in sorted(below - set(POD_SYNC))]
    failures += [f"ALLOWED names {name}, which is no crate" for name in ALLOWED if name not in known]
    for crate in crates:
        cycle, (most_cycle, most_lines) = crate.cycle(), ALLOWED.get(crate.name, (0, MOST_LINES))
        if "--show" in sys.argv:
            print(f"{crate.name}: {crate.lines} lines, {len(cycle)} modules in a cycle")
            for module in sorted(crate.edges):
                print(f"  {module} -> {', '.join(sorted(crate.edges[module])) or '-'}")
        if len(cycle) > most_cycle:
            failures.append(f"{crate.name}: an import cycle of {len(cycle)} modules ({most_cycle} allowed): {', '.join(cycle)}")
        if crate.lines > most_lines:
            failures.append(f"{crate.name}: {crate.lines} lines outside of tests, {most_lines} allowed")
        if len(cycle) < most_cycle:
            failures.append(f"{crate.name}: write {len(cycle)} for {most_cycle} modules in a cycle into ALLOWED")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
