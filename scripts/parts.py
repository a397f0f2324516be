#!/usr/bin/env python3
"""Fails for a type that has grown over too many files, and for what would let its parts grow together again.

- No type has `impl` blocks in more than FILES files.
- The types in METHODS have fewer methods of their own than the number there.
- A pod's record is changed in its own file only (RECORD_FILES), which writes the change before it returns.
- No public function of the product is there for tests alone.

Tests do not count as product: `#[cfg(test)]`, `tests.rs`, directories `tests`. Names are compared as text, so a function that shares its
name with one in use is not found. There are no exceptions.
"""

import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from blocking import closing, lex

ROOT = Path(__file__).resolve().parent.parent
FILES = 3
METHODS = {("pod-sync/worker", "Worker"): 25}
# The type of the record, and the part of the worker that keeps and writes it.
RECORD_FILES = ("records.rs", "record.rs")
RECORD_CRATES = ("services/pod-sync/worker/", "services/pod-sync/src/")
# Methods that change what they are called on.
CHANGES = {
    "insert", "remove", "retain", "clear", "push", "pop", "entry", "take", "replace", "extend", "append", "drain", "truncate", "get_mut",
    "get_or_insert_with", "get_or_insert", "iter_mut", "values_mut", "as_mut", "as_deref_mut", "remove_entry", "sort", "dedup",
}  # fmt: skip
# Files for the fuzz targets in tests/fuzz: another crate must reach what they call.
FOR_TESTS = ("fuzzing.rs",)
LEAST = 4000

# A planted fault of each kind. This check must find just these.
SAMPLE = {
    "services/pod-sync/worker/src/mod.rs": """
        pub struct Wide; struct Worker { record: R }
        impl Wide { pub fn used(&self) {} pub(crate) fn bad_test_only() {} }
        #[cfg(test)] mod tests { fn a_test() { super::Wide::bad_test_only() } }
    """,
    "services/pod-sync/worker/src/a.rs": "impl Wide { fn a(&self) { self.used() } }",
    "services/pod-sync/worker/src/b.rs": "impl<T> Show<T> for Wide { fn b(&self) { self.record.fine == 1; self.record.update(|record| record.fine = 1); } fn d(record: &mut PodRecord) { record.fine = 1; } }",
    "services/pod-sync/worker/src/c.rs": """
        impl Wide { fn c(&self) { self.record.bad = 1; self.record.bad.deep += 2; record.bad.insert(3); let bad = &mut self.record.bad; } }
        #[cfg(test)] impl Wide { fn test(&self) { record.good = 1; } }
        #[cfg(test)] fn generic<A, B>(a: A) { record.good = 1; }
    """,
    "services/pod-sync/worker/src/record.rs": "fn own(&mut self) { self.record.good = 1; }",
    "services/pod-sync/worker/src/tests.rs": "impl Narrow { fn t(&self) { record.good = 1; } }",
    "services/pod-sync/worker/src/methods.rs": "impl Worker { " + " ".join(f"async fn m{n}(&self) {{}}" for n in range(25)) + " }",
    "services/pod-sync/base/other/src/lib.rs": "pub struct Narrow; impl Narrow { fn n(&self) {} } struct Wide; impl Wide {}",
}
PLANTED = {
    ("impl", "pod-sync/worker Wide"): 4,
    ("methods", "pod-sync/worker Worker"): 25,
    ("record", "pod-sync/worker"): 4,
    ("test-only", "pod-sync/worker"): 1,
}


def is_test_file(name):
    return "/tests/" in name or name.endswith(("/tests.rs", "_tests.rs", "build.rs"))


def without_tests(tokens):
    """The tokens without the items that exist in tests only."""
    out, i = [], 0
    while i < len(tokens):
        if tokens[i][1] == "#" and i + 1 < len(tokens) and tokens[i + 1][1] == "[":
            close = closing(tokens, i + 1)
            words = [t[1] for t in tokens[i + 2 : close]]
            if words[:2] == ["cfg", "("] and "test" in words and "not" not in words:
                i = after_item(tokens, close + 1)
                continue
        out.append(tokens[i])
        i += 1
    return out


def after_item(tokens, i):
    """The index behind the item, field or statement at `i`."""
    angles = 0
    while i < len(tokens):
        kind, value = tokens[i][:2]
        angles += (kind == "m") * ((value == "<") - (value == ">"))
        if kind == "m" and value == "{":
            return closing(tokens, i) + 1
        if kind == "m" and value in "([":
            i = closing(tokens, i)
        elif kind == "m" and (value == ";" or value == "," and not angles):
            return i + 1
        elif kind == "m" and value in ")]}":
            return i
        i += 1
    return i


class Source:
    """What this check needs of one file of the product."""

    def __init__(self, path, text):
        self.path, self.crate = path, path.split("/src/")[0].removeprefix("services/")
        # The feature is on in tests/fuzz only.
        self.tokens = without_tests(lex(text.replace('cfg(feature = "fuzzing")', "cfg(test)"))[0])
        self.types = {self.value(i + 1) for i, t in enumerate(self.tokens) if t[:2] in (("w", "struct"), ("w", "enum"))}
        self.impls = list(self.find_impls())

    def value(self, i):
        return self.tokens[i][1] if 0 <= i < len(self.tokens) else ""

    def find_impls(self):
        """Yields the type of each `impl` block, and its number of methods unless the block is that of a trait."""
        for i, token in enumerate(self.tokens):
            # `impl Trait` in a type follows something.
            if token[:2] != ("w", "impl") or self.value(i - 1) not in ("", ";", "}", "]", "{", "unsafe"):
                continue
            j, depth, words = i + 1, 0, []
            while j < len(self.tokens) and self.value(j) not in ("{", ";"):
                depth += (self.value(j) == "<") - (self.value(j) == ">")
                if depth == 0 and self.tokens[j][0] == "w":
                    words.append(self.value(j))
                j += 1
            words = words[: words.index("where")] if "where" in words else words
            if not words or self.value(j) != "{":
                continue
            end, methods, k = closing(self.tokens, j), 0, j + 1
            while k < end:
                if self.value(k) == "fn":
                    methods += 1
                    k = after_item(self.tokens, k)
                    continue
                k += 1
            yield words[-1], 0 if "for" in words else methods

    def changes_of_record(self):
        """The lines that change a field of a record."""
        if not self.path.startswith(RECORD_CRATES) or self.path.endswith(tuple("/" + name for name in RECORD_FILES)):
            return
        for i, token in enumerate(self.tokens):
            if token[:2] != ("w", "record"):
                continue
            begin = i
            while self.value(begin - 1) == "." and self.tokens[begin - 2][0] == "w":
                begin -= 2
            end = i + 1
            while self.value(end) == "." and self.tokens[end + 1][0] == "w":
                end += 2
            is_field = end > i + 1
            is_borrowed = is_field and (self.value(begin - 2), self.value(begin - 1)) == ("&", "mut")
            is_changed = is_field and self.value(end) == "(" and self.value(end - 1) in CHANGES
            at = end + 1 if self.value(end) in ("+", "-", "|", "&") else end
            is_assigned = is_field and self.value(at) == "=" and self.value(at + 1) != "="
            if (is_borrowed or is_changed or is_assigned) and not (begin == i and self.is_given(i)):
                yield token[2]

    def is_given(self, i):
        """Whether the local `record` at `i` is what `update` gives: the parameter of a closure, or a `&mut PodRecord`."""
        while i > 0 and self.tokens[i][:2] != ("w", "fn"):
            i -= 1
            words = [self.value(i + k) for k in range(5)]
            if words[:3] == ["|", "record", "|"] or words == ["record", ":", "&", "mut", "PodRecord"]:
                return True
        return False

    def public_functions(self):
        for i, token in enumerate(self.tokens):
            if token[:2] != ("w", "fn"):
                continue
            j = i - 1
            while self.value(j) in ("async", "const", "unsafe", "extern", '""'):
                j -= 1
            if self.value(j) == ")":
                while self.value(j) != "(":
                    j -= 1
                j -= 1
            if self.value(j) == "pub":
                yield self.value(i + 1), token[2]


def common(a, b):
    """The number of directories that two paths share."""
    return next((n for n, (x, y) in enumerate(zip(a.split("/"), b.split("/"))) if x != y), 99)


def faults(sources):
    """Returns the number of each kind of fault by its subject, and the places."""
    count, places = defaultdict(int), defaultdict(list)
    homes, files, methods = defaultdict(list), defaultdict(set), defaultdict(int)
    for source in sources:
        for name in source.types:
            homes[source.crate, name].append(source.path)
    for source in sources:
        for name, own in source.impls:
            if found := homes.get((source.crate, name)):
                home = max(found, key=lambda path: common(path, source.path))
                files[source.crate, name, home].add(source.path)
                methods[source.crate, name] += own
    for (crate, name, _), where in files.items():
        if len(where) > FILES:
            subject = ("impl", f"{crate} {name}")
            count[subject], places[subject] = len(where), sorted(where)
    for (crate, name), least in METHODS.items():
        if methods[crate, name] >= least:
            count["methods", f"{crate} {name}"] = methods[crate, name]
    words, defined = defaultdict(int), defaultdict(list)
    for source in sources:
        for line in source.changes_of_record():
            count["record", source.crate] += 1
            places["record", source.crate].append(f"{source.path}:{line}")
        for i, token in enumerate(source.tokens):
            if token[0] == "w" and source.value(i - 1) != "fn" and not source.path.endswith(FOR_TESTS):
                words[token[1]] += 1
        for name, line in source.public_functions():
            if not source.path.endswith(FOR_TESTS):
                defined[name].append((source, line))
    for name, where in defined.items():
        if not words[name] and name != "main":
            for source, line in where:
                count["test-only", source.crate] += 1
                places["test-only", source.crate].append(f"{source.path}:{line}: {name}")
    return dict(count), places


def check_itself():
    """Fails if a planted fault is not found, or if something else is."""
    found, _ = faults([Source(path, text) for path, text in SAMPLE.items() if not is_test_file(path)])
    assert found == PLANTED, f"found {found} in the sample"


def main():
    check_itself()
    names = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard", "services/*.rs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = [n for n in sorted(set(filter(None, names.split("\0")))) if "/src/" in n and not is_test_file(n) and (ROOT / n).is_file()]
    sources = [Source(name, (ROOT / name).read_text()) for name in paths]
    count, places = faults(sources)
    failures = []
    for subject in sorted(count):
        failures.append(f"{': '.join(subject)}: {count[subject]}")
        failures += [f"  {place}" for place in places[subject]]
    for failure in failures:
        print(failure, file=sys.stderr)
    functions = sum(t[1] == "fn" for source in sources for t in source.tokens)
    methods = sum(own for source in sources for name, own in source.impls if (source.crate, name) in METHODS)
    print(f"parts: {functions} functions, {methods} methods of the types in METHODS, {len(failures)} failures")
    return 1 if failures or functions < LEAST else 0


if __name__ == "__main__":
    sys.exit(main())
