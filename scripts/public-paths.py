#!/usr/bin/env python3
"""Checks what the library crates of this repository show to others.

- A module is public (`pub mod`) only if another crate, or a program, test or benchmark of its package, names it. The others are private,
  and lib.rs exports their items (`pub use`).
- An item has one path: lib.rs exports no item of a module that is public itself.

There are no exceptions. Imports are read as text: names of crates and modules in paths and use declarations.
"""

import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Files of two crates for the check of this check. Nobody names `left`, and `Twice` has two paths.
PLANTED = {
    "a/src/lib.rs": "mod hidden;\npub mod left;\npub mod named;\npub mod twice;\npub use hidden::Shown;\npub use twice::{Once, Twice};\n",
    "a/src/left.rs": "use a::left::Never;\n",
    "b/src/lib.rs": "use a::{Shown, named::{Item, Other}};\nfn f() { a::twice::g(); }\n",
}
EXPECTED = ["a: module `left` is public, and nobody names it", "a: items of the public module `twice` have a second path in lib.rs"]


def without_comments(text):
    return re.sub(r"//.*", "", text)


def split(list_):
    """The members of a list of names, of which some are followed by a list in braces."""
    depth, member = 0, ""
    for char in list_ + ",":
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            yield member.strip()
            member = ""
        else:
            member += char


def paths_of(tree):
    """The paths in a use declaration."""
    head, brace, rest = tree.strip().partition("{")
    if not brace:
        yield re.sub(r"\s+as\s+\w+|\s", "", head)
        return
    for member in filter(None, split(rest.rsplit("}", 1)[0])):
        for path in paths_of(member):
            yield re.sub(r"\s", "", head) + path


def named_modules(text, crates):
    """The modules of other crates that a file names, as pairs of crate and module."""
    uses = [path for tree in re.findall(r"\buse\s+([^;]+);", text) for path in paths_of(tree)]
    paths = [path.split("::") for path in uses + re.findall(r"\b\w+(?:::\w+)+", re.sub(r"\buse\s+[^;]+;", "", text))]
    return {(path[0], path[1]) for path in paths if len(path) > 1 and path[0] in crates}


def check(crates, files):
    """`crates` maps names to the text of lib.rs. `files` are pairs of a file's own crate, if it belongs to its library, and its text."""
    named = defaultdict(set)
    for own, text in files:
        for crate, module in named_modules(without_comments(text), crates):
            if crate != own:
                named[crate].add(module)
    for crate, text in sorted(crates.items()):
        text = without_comments(text)
        exports = {re.sub(r"^(crate|self)::", "", path).split("::")[0]
                   for tree in re.findall(r"^pub use\s+([^;]+);", text, re.M) for path in paths_of(tree)}
        for module in re.findall(r"^pub mod (\w+)", text, re.M):
            if module in exports:
                yield f"{crate}: items of the public module `{module}` have a second path in lib.rs"
            elif module not in named[crate]:
                yield f"{crate}: module `{module}` is public, and nobody names it"


def listed(pattern):
    return [ROOT / name for name in subprocess.check_output(["git", "ls-files", "--", pattern], cwd=ROOT, text=True).splitlines()]


def repository():
    libraries = {}
    for manifest in listed("*Cargo.toml"):
        library = manifest.parent / "src/lib.rs"
        package = tomllib.loads(manifest.read_text()).get("package")
        if package and library.exists():
            libraries[library] = package["name"].replace("-", "_")
    sources = {library.parent: name for library, name in libraries.items()}
    files = []
    for file in listed("*.rs"):
        own = next((sources[parent] for parent in file.parents if parent in sources), None)
        is_program = file.name == "main.rs" or "bin" in file.parts
        files.append((None if is_program else own, file.read_text()))
    return {name: library.read_text() for library, name in libraries.items()}, files


def main():
    libraries = {name.split("/")[0]: text for name, text in PLANTED.items() if name.endswith("lib.rs")}
    planted = list(check(libraries, [(name.split("/")[0], text) for name, text in PLANTED.items()]))
    assert planted == EXPECTED, planted
    errors = list(check(*repository()))
    for error in errors:
        print(error, file=sys.stderr)
    sys.exit(1 if errors else 0)


main()
