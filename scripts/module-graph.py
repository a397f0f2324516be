#!/usr/bin/env python3
"""Checks the structure of the crates below services/, proto/ and tests/support/; with --show, prints it, too.

- The files of a crate have no import cycle, lib.rs included. A re-export (`pub use`) is no import.
- Crates depend in one direction: services, then services/shared, then proto. No service depends on another service, and no
  product code on a crate below tests/. Below pod-sync, a crate depends on its own group and on the groups to its left in POD_SYNC.
- No crate has more than 9,000 lines outside of its tests.

There are no exceptions. Imports are read as text: `crate`, `super`, `self` and names of modules in paths and use declarations.
"""

import re
import sys
import tempfile
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 9_000

# Files of a crate for the check of this check. `a`, `b` and `lib` are in a cycle; `c` imports one of them and is not.
PLANTED = {
    "lib.rs": "mod a;\nmod b;\nmod c;\nmod d;\npub use d::Shown;\nuse a::A;\npub struct Root(A);\n",
    "a.rs": "pub struct A;\nfn f() { super::b::g(); }\n",
    "b.rs": "use crate::Root;\npub fn g() -> Option<Root> { None }\n",
    "c.rs": "use super::a::A;\n#[cfg(test)]\nmod tests {\n    use crate::d::Shown;\n}\n",
    "d.rs": "pub struct Shown;\n#[cfg(test)]\nmod tests {\n    use crate::c;\n}\n",
}

# Every program in one file.
ALL_IN_ONE = "quintlet"
# Another command line of the same supervisor.
SUPERVISOR = ("quintlet-kubelet", "quintctl")
# The groups of crates below pod-sync, which are directories. One depends on those to its left.
POD_SYNC = ["base", "volumes", "cluster", "node", "resources", "worker", "src"]


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


# A use declaration, with its indent and its visibility.
USE = re.compile(r"^([ \t]*)(pub(?:\([^)]*\))?\s+)?use ([^;]+);", re.M)
# A path in an expression or a type.
PATH = re.compile(r"(?<![\w:])((?:crate|self|(?:super::)*super|[a-z_]\w*)(?:::\w+)+)")


def leaves(tree):
    """The paths of a use tree, without `as` names."""
    tree = re.sub(r" as \w+", "", tree).strip()
    head, brace, rest = tree.partition("{")
    if not brace:
        yield [part.strip() for part in tree.split("::")]
        return
    prefix = [part.strip() for part in head.split("::") if part.strip()]
    depth, part = 0, ""
    for char in rest[: rest.rindex("}")] + ",":
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            if part.strip():
                yield from (prefix + leaf for leaf in leaves(part))
            part = ""
        else:
            part += char


class Crate:
    def __init__(self, manifest):
        self.dir = manifest.parent
        data = tomllib.loads(manifest.read_text())
        self.name = data["package"]["name"]
        self.dependencies = set(data.get("dependencies", {}))
        self.lines = 0
        # The text of each module that has a file, by its path in the crate.
        self.modules = {}
        src = self.dir / "src"
        for file, whole in product_files(src).items():
            text = product(whole)
            self.lines += text.count("\n")
            parts = file.relative_to(src).with_suffix("").parts
            module = () if parts in (("lib",), ("main",)) else parts[:-1] if parts[-1] == "mod" else parts
            self.modules.setdefault(module, without_comments(text))
        # What a name in a module stands for, by its use declarations.
        self.names = defaultdict(dict)
        for module, text in self.modules.items():
            for path, _ in self.used(module, text):
                self.names[module][path[-1]] = path
        self.edges = {module: self.imports(module) for module in self.modules}

    def absolute(self, module, path, inner=False):
        """A path from the root of the crate, or None for one that leads out of it."""
        path = list(path)
        if path[0] == "crate":
            return path[1:]
        if path[0] == "self":
            return [*module, *path[1:]]
        if path[0] == "super":
            at = list(module)
            # In a module within a file, the first `super` is the file.
            if inner:
                path = path[1:]
            while path and path[0] == "super" and at:
                at, path = at[:-1], path[1:]
            return at + path
        return [*module, *path] if (*module, path[0]) in self.modules else None

    def used(self, module, text):
        for indent, visibility, tree in USE.findall(text):
            for leaf in leaves(tree):
                path = self.absolute(module, leaf, inner=bool(indent))
                if path:
                    path = path[:-1] if path[-1] == "self" else path
                    yield path, bool(visibility)

    def owner(self, path, depth=0):
        """The module whose file has the item of an absolute path."""
        module, rest = (), list(path)
        while rest and (*module, rest[0]) in self.modules:
            module, rest = (*module, rest[0]), rest[1:]
        target = self.names[module].get(rest[0]) if rest else None
        if target and depth < 8 and target != [*module, rest[0]]:
            return self.owner(target + rest[1:], depth + 1)
        return module

    def imports(self, module):
        text = self.modules[module]
        found = [path for path, exported in self.used(module, text) if not exported]
        paths = (self.absolute(module, path.split("::")) for path in PATH.findall(USE.sub("", text)))
        return {self.owner(path) for path in [*found, *filter(None, paths)]} - {module}

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

        return sorted("::".join(module) or "lib" for module in self.edges if module in reachable(module))


def layer(crate):
    path = crate.dir.relative_to(ROOT).parts
    return path[0] if path[0] in ("proto", "tests") else "shared" if path[1] == "shared" else path[1]


def group(crate):
    """The place of a crate in the order of the groups below pod-sync; that of a shared crate is before all."""
    parts = (*crate.dir.relative_to(ROOT).parts, "src")
    return POD_SYNC.index(parts[2]) if parts[1] == "pod-sync" else -1


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
            elif other == "proto" or crate.name == ALL_IN_ONE or (crate.name, name) == SUPERVISOR:
                continue
            elif own == "proto" or own == "shared" and other != "shared":
                yield f"{crate.name} ({own}) depends on {name} ({other})"
            elif other not in ("shared", own):
                yield f"the service {crate.name} depends on the service {name}"
            elif own == "pod-sync" and group(by_name[name]) > group(crate):
                yield f"{crate.name} depends on {name}, which is in a group to its right"


def check_itself():
    """Fails if the planted cycle is not found, or if something else is."""
    with tempfile.TemporaryDirectory() as directory:
        src = Path(directory) / "src"
        src.mkdir()
        manifest = Path(directory) / "Cargo.toml"
        manifest.write_text('[package]\nname = "planted"\n')
        for name, text in PLANTED.items():
            (src / name).write_text(text)
        found = Crate(manifest).cycle()
        assert found == ["a", "b", "lib"], f"found {found} in the planted cycle"


def main():
    check_itself()
    manifests = [*(ROOT / "services").rglob("Cargo.toml"), ROOT / "proto" / "Cargo.toml", *(ROOT / "tests").rglob("Cargo.toml")]
    crates = sorted((Crate(m) for m in manifests), key=lambda c: c.name)
    failures = list(arrows(crates))
    groups = {c.dir.relative_to(ROOT).parts[2] for c in crates if layer(c) == "pod-sync" and c.name != "pod-sync"}
    failures += [f"services/pod-sync/{name}: not in the order of the groups" for name in sorted(groups - set(POD_SYNC))]
    for crate in crates:
        cycle = crate.cycle()
        if "--show" in sys.argv:
            print(f"{crate.name}: {crate.lines} lines, {len(cycle)} files in a cycle")
            for module, imported in sorted(crate.edges.items()):
                names = ["::".join(m) or "lib" for m in (module, *sorted(imported))]
                print(f"  {names[0]} -> {', '.join(names[1:]) or '-'}")
        if cycle:
            failures.append(f"{crate.name}: an import cycle of {len(cycle)} files: {', '.join(cycle)}")
        if crate.lines > MOST_LINES:
            failures.append(f"{crate.name}: {crate.lines} lines outside of tests, {MOST_LINES} allowed")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
