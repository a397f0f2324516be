#!/usr/bin/env python3
"""Fails for blocking work on an async thread.

A file system, a cgroup or systemd may not answer for minutes. What waits for them on a thread of tokio stops every task of that
thread, so it belongs into `kit::task::blocking`. clippy sees a call, not who calls its caller, so this script follows the calls:

- A call of `std::fs`, of `rustix::fs` and of the other functions in PRIMITIVES blocks.
- A function without `async` that calls what blocks does so, too. Calls are resolved by name: by the type or module of a path, and for
  a method by its name and the type of its receiver, as far as fields, parameters and results of functions tell it (see `Index.types`).
- What an argument of `blocking(…)` or of a new thread calls does not count, nor a closure that is given to it by its name.
- An `async fn` or block that calls what blocks is a fault.

A comment `// Blocks: REASON` above the call, above a function or among the first lines of a file says why that is right there: no
caller of the function counts. A comment that has no effect is a fault as well.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Not services: the operator's tool, and a containerd for tests.
SKIPPED = ("services/quintctl/", "services/shared/localnode/", "services/quintlet/")
TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>b?r(?P<hash>#*)".*?"(?P=hash)|[bc]?"(?:[^"\\]|\\.)*"|b?'(?:[^'\\\n]|\\(?:u\{\w+\}|x\w\w|.))')"""
    r"""|(?P<life>'\w+)|(?P<word>[A-Za-z_]\w*)|(?P<mark>::|->|=>|\S)|(?P<space>\s+)""",
    re.S,
)
# Paths, without arguments, whose calls block. `fs::` is `std::fs::` wherever it is imported.
PRIMITIVES = re.compile(
    r"(?:(?:std|rustix)::)?(?:unix::)?fs::\w+$|(?:^|::)os::unix::fs::\w+$|(?:^|::)File::(?:open|create|create_new|options)$"
    r"|(?:^|::)rustix::(?:fs|mount)::\w+(?:::\w+)?$|^(?:nix::)?(?:mount|statvfs|sys::statvfs)::\w+$|(?:^|::)(?:User|Group)::from_\w+$"
    r"|(?:^|::)thread::sleep$|(?:^|::)blocking::Connection\w*::\w+$|^procfs::.*|(?:^|::)getaddrinfo$|(?:^|::)to_socket_addrs$"
    r"|(?:^|::)Mount(?:Infos|Entries)?::from_\w+$|(?:^|::)RecommendedWatcher::new$|(?:^|::)Kubeconfig::read_from$|(?:^|::)thread::scope$|(?:^|::)from_custom_kubeconfig$"
)
HARMLESS = re.compile(r"(?:^|::)(?:Permissions|PermissionsExt|MetadataExt|Mode|OFlags|AtFlags|Access|FileType|StatVfsMountFlags|StatxFlags)::\w+$")
METHODS = {
    "canonicalize", "exists", "try_exists", "is_dir", "is_file", "is_symlink", "symlink_metadata", "read_dir", "read_link",
    "block_on", "sync_all", "sync_data", "set_len", "to_socket_addrs", "set_permissions", "set_modified",
}  # fmt: skip
# Methods of std that types of this repository have, too: without a known type of the receiver, std's is meant.
STD = set("""
    open read write get get_mut set remove insert add new list load save run step take next all of clear retain begin end close flush push pop
    find check update len apply call start stop send record create delete make watch walk entry parse limit pass mount unmount sync text name
    path dir file stat info count reset wait append kill drop version clone parent size link map token usage refresh measure allocate forget
    claim poll lines fmt matches tick status output spawn split join replace escape_default is_empty contains iter keys values position first last
    extend merge finish done from into is not any max min sum fold product rev skip chain zip query cursor node escape expect unwrap held
    register lock load store swap ends_with starts_with reserve resize truncate drain filter as_str as_ref display to_string into_iter advance
    is_some is_none ok err and or ok_or then bytes chars trim index default borrow changed notified cancel cancelled subscribe log
    labels key value id uid time now elapsed after before difference union intersection state exit code kind source context
""".split())
PRIMITIVE_METHODS_OF = {"output": "Command", "status": "Command", "spawn": "Command"}
# Functions that run their argument on a blocking thread, and receivers whose method `run` does.
OFFLOADS = {"blocking", "on_blocking_thread", "run_one", "on_files", "write_state"}
OFFLOADING = {"stalls", "measurements", "with_files", "without_files"}
KEYWORDS = {"if", "while", "for", "match", "return", "in", "loop", "move", "let", "else", "fn", "as", "async", "unsafe", "await", "mut", "ref"}
LEAST = 4000
# A planted fault of each kind, in a function whose name begins with `bad`; this check must find just these.
SAMPLE = """
use std::fs;
use quintlet_kit::task::blocking;
struct Disk { dir: PathBuf }
impl Disk {
    fn save(&self) { fs::write(&self.dir, "") }
    fn deep(&self) { self.save() }
    // Blocks: for a reason.
    fn memory(&self) { fs::write(&self.dir, "") }
}
struct Owner { disk: Arc<Disk> }
impl Owner {
    async fn bad_directly(&self) { let _ = fs::read("a"); }
    async fn bad_deeply(&self) { self.disk.deep(); }
    fn bad_block(&self) { spawn(async move { disk.exists(); }) }
    async fn bad_function(&self) { helper(&self.disk) }
    async fn bad_generic<F: Fn(u8) -> Option<Vec<u8>>>(disk: &Disk, f: F) { disk.save() }
    async fn bad_beside(&self) { blocking(|| ()).await; self.disk.save(); }
    async fn good_blocking(&self) { blocking(move || self.disk.deep()).await }
    async fn good_closure(&self) { let read = move || fs::read("a"); blocking(read).await }
    async fn good_memory(&self) { self.disk.memory() }
    async fn good_text(&self) { "fs::read(a)"; /* fs::read("a") */ }
    fn good_sync(&self) { self.disk.save() }
}
fn helper(disk: &Disk) { disk.save() }
"""


def lex(text):
    """The tokens of a source text, and the comments `// Blocks:` by line."""
    tokens, notes, line = [], {}, 1
    for m in TOKEN.finditer(text):
        kind, value = m.lastgroup, m.group()
        if m["comment"]:
            if note := re.match(r"//[/!]? Blocks: (\S.*)", value):
                notes[line] = note[1]
        elif m["string"]:
            tokens.append(("s", '""', line))
        elif m["word"] or m["mark"]:
            tokens.append(("w" if m["word"] else "m", value, line))
        line += value.count("\n")
    return tokens, notes


def closing(tokens, at):
    """The index of the bracket that closes the one at `at`."""
    depth, i = 0, at
    while i < len(tokens):
        if tokens[i][1] in "([{" and tokens[i][0] == "m":
            depth += 1
        elif tokens[i][1] in ")]}" and tokens[i][0] == "m":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return len(tokens) - 1


class Function:
    def __init__(self, file, name, owner, line, is_async, is_method):
        self.file, self.name, self.owner, self.line = file, name, owner, line
        self.is_async, self.is_method = is_async, is_method
        self.types = {}  # of parameters and variables: words of the type
        self.returns = set()
        self.calls = []  # (path or method, receiver or None, line, in async code, in blocking work)
        self.blocks = None

    def __str__(self):
        return f"{self.owner}::{self.name}" if self.owner else self.name


class File:
    def __init__(self, path, text):
        self.path = path
        self.crate = path.split("/src/")[0].rsplit("/", 1)[-1]
        stem = Path(path).stem
        self.module = Path(path).parent.name if stem == "mod" else self.crate if stem in ("lib", "main") else stem
        self.tokens, self.notes = lex(text)
        self.used = set()
        self.head = next((line for line in self.notes if line <= 40 and not any(t[2] <= line for t in self.tokens[:1])), None)
        self.imports = set()
        self.fields = defaultdict(set)  # (type, field): words of its type
        self.traits = defaultdict(set)  # trait: types with an impl
        self.functions = []
        self.items(0, len(self.tokens), None)

    def value(self, i):
        return self.tokens[i][1] if 0 <= i < len(self.tokens) else ""

    def items(self, i, end, owner):
        is_test = False
        while i < end:
            v = self.value(i)
            if v == "#" and self.value(i + 1) in "[!":
                at = i + 1 if self.value(i + 1) == "[" else i + 2
                close = closing(self.tokens, at)
                words = [t[1] for t in self.tokens[at:close]]
                is_test |= words[1:4] == ["cfg", "(", "test"] or (words[1:3] == ["cfg", "("] and "test" in words and "not" not in words)
                i = close + 1
                continue
            if v == "use":
                while self.value(i) != ";":
                    self.imports.add(self.value(i))
                    i += 1
            elif v in ("mod", "trait", "impl") and self.tokens[i][0] == "w":
                j, name = i + 1, None
                depth, words = 0, []
                while self.value(j) not in "{;" or not self.value(j):
                    w = self.value(j)
                    depth += (w == "<") - (w == ">")
                    if depth == 0 and self.tokens[j][0] == "w":
                        words.append(w)
                    j += 1
                if v == "impl" and "where" in words:
                    words = words[: words.index("where")]
                every = words
                if v == "impl" and "for" in words:
                    words = words[words.index("for") + 1 :]
                if v == "impl" and "for" in every and every.index("for"):
                    self.traits[every[every.index("for") - 1]].add(words[-1] if words else "")
                name = words[-1] if v == "impl" and words else words[0] if words else None
                if self.value(j) == "{":
                    close = closing(self.tokens, j)
                    if not is_test:
                        self.items(j + 1, close, owner if v == "mod" else name)
                    i = close
                else:
                    i = j
                is_test = False
            elif v == "struct":
                name, j = self.value(i + 1), i + 2
                while self.value(j) not in ("{", ";", "("):
                    j += 1
                close = closing(self.tokens, j)
                if self.value(j) == "{":
                    self.pairs(j + 1, close, lambda field, words: self.fields[name, field].update(words))
                i = close if self.value(j) != ";" else j
                is_test = False
            elif v == "fn" and self.tokens[i][0] == "w" and self.tokens[i + 1][0] == "w":
                i = self.function(i, owner, is_test)
                is_test = False
            elif v == "macro_rules":
                while self.value(i) != "{":
                    i += 1
                i = closing(self.tokens, i)
            elif v == "{":
                i = closing(self.tokens, i)
                is_test = False
            elif v == ";":
                is_test = False
            i += 1

    def pairs(self, i, end, found):
        """Calls `found` with the names and types of `name: Type, name: Type`."""
        name, words, depth = None, set(), 0
        while i < end:
            kind, v, _ = self.tokens[i]
            if v == "#":
                i = closing(self.tokens, i + 1)
            elif v == "," and depth == 0:
                if name:
                    found(name, words)
                name, words = None, set()
            elif v == ":" and name is None and self.tokens[i - 1][0] == "w":
                name = self.value(i - 1)
            elif name and kind == "w":
                words.add(v)
            depth += (v in "<([{" and kind == "m") - (v in ">)]}" and kind == "m")
            i += 1
        if name:
            found(name, words)

    def function(self, i, owner, is_test):
        name, line = self.value(i + 1), self.tokens[i][2]
        is_async = self.value(i - 1) == "async" or self.value(i - 2) == "async"
        # Bounds of type parameters have brackets, too: `F: Fn(A) -> B`.
        begin, depth = i + 2, 0
        while depth > 0 or self.value(begin) != "(":
            depth += (self.value(begin) == "<") - (self.value(begin) == ">")
            begin += 1
        close = closing(self.tokens, begin)
        is_method = "self" in [t[1] for t in self.tokens[begin : begin + 6]]
        first = j = close
        while self.value(j) not in ("{", ";"):
            j += 1
        if self.value(j) == ";":
            return j
        end = closing(self.tokens, j)
        if not is_test:
            function = Function(self, name, owner, line, is_async, is_method)
            self.functions.append(function)
            function.returns = {t[1] for t in self.tokens[first:j] if t[0] == "w"} - {"where", "Send", "Sync"}
            if "Self" in function.returns and owner:
                function.returns.add(owner)
            self.pairs(begin + 1, close, function.types.__setitem__)
            self.body(function, j, end)
        return end

    def body(self, function, start, end):
        """Finds the calls of a function: with the async blocks that they are in, and those in blocking work."""
        off, on_async, closures = [], [], {}
        named = set()
        for i in range(start, end):
            v = self.value(i)
            if self.tokens[i][0] == "w" and self.value(i + 1) == "(" and (
                v in OFFLOADS or (v == "run" and self.value(i - 2) in OFFLOADING) or (v in ("spawn", "scope") and self.value(i - 1) in ("::", ".") and "thread" in (self.value(i - 2), self.value(i - 3)))
                or (v == "spawn" and "Builder" in [t[1] for t in self.tokens[max(i - 16, start) : i]])
            ):
                close = closing(self.tokens, i + 1)
                off.append((i + 1, close))
                named |= {t[1] for t in self.tokens[i + 2 : close] if t[0] == "w"}
            if v == "async" and self.value(i + 1) in ("{", "move"):
                at = i + 1 if self.value(i + 1) == "{" else i + 2
                if self.value(at) == "{":
                    on_async.append((at, closing(self.tokens, at)))
            if v == "let" and self.tokens[i][0] == "w":
                k = i + 1
                n, words, names = k, set(), []
                while self.value(n) not in ("=", ";", "{") and n < end:
                    if self.tokens[n][0] == "w" and self.value(n)[0].islower():
                        names.append(self.value(n))
                    n += 1
                stop = n
                while self.value(stop) not in (";", "{") and stop < end:
                    stop += 1
                words = set()
                for w in range(n, stop):
                    # `Type::new()` is a `Type`; of other functions, the result counts.
                    if self.tokens[w][0] == "w" and not (self.value(w - 1) == "::" and self.value(w - 2)[:1].isupper()):
                        words.add(self.value(w))
                for name in names:
                    function.types.setdefault(name, set()).update(words)
                if self.value(k) == "mut":
                    k += 1
                if self.value(k + 1) == "=" and self.value(k + 2) in ("move", "|"):
                    # To the end of the statement.
                    n = k + 2
                    while self.value(n) != ";":
                        n = closing(self.tokens, n) + 1 if self.value(n) in ("(", "[", "{") else n + 1
                    closures[self.value(k)] = (k, n)
        off += [closures[name] for name in named if name in closures]
        inside = lambda ranges, i: any(a < i < b for a, b in ranges)
        for i in range(start, end):
            kind, v, line = self.tokens[i]
            if kind != "w" or v in KEYWORDS:
                continue
            at = i + 1
            if self.value(at) == "::" and self.value(at + 1) == "<":
                depth, at = 0, at + 1
                while True:
                    depth += (self.value(at) == "<") - (self.value(at) == ">")
                    at += 1
                    if depth == 0:
                        break
            is_value = False
            if self.value(at) != "(":
                # A path that is given to a function: `.map(Dir::open)`.
                if self.value(i - 1) == "::" and v[0].islower() and self.value(at) in (",", ")"):
                    is_value = True
                else:
                    continue
            if self.value(i - 1) == "fn" or self.value(at) == "!" :
                continue
            receiver = None
            path = [v]
            k = i - 1
            if self.value(k) == ".":
                receiver = self.receiver(k - 1, start)
            else:
                while self.value(k) == "::":
                    if self.tokens[k - 1][0] != "w":
                        break
                    path.insert(0, self.value(k - 1))
                    k -= 2
                if path == [v] and v[0].isupper():
                    continue
            awaited = not is_value and self.value(closing(self.tokens, at) + 1) == "." and self.value(closing(self.tokens, at) + 2) == "await"
            function.calls.append((path, receiver, line, inside(on_async, i), inside(off, i), awaited))

    def receiver(self, k, start):
        """The last names of the expression before a dot: `self.ctx.records` gives [`records`, `ctx`]."""
        names = []
        while k > start and len(names) < 3:
            if self.value(k) == ")":
                depth = 0
                while k > start:
                    depth += (self.value(k) == ")") - (self.value(k) == "(")
                    k -= 1
                    if depth == 0:
                        break
                if self.tokens[k][0] != "w":
                    break
            if self.value(k) in "?)]":
                k -= 1
                continue
            if self.tokens[k][0] != "w":
                break
            names.append(self.value(k))
            if self.value(k - 1) in (".", "::"):
                k -= 2
            else:
                break
        return names

    def note(self, line):
        """The comment that stands above a line, if any."""
        lines = self.notes
        has_code = {t[2] for t in self.tokens}
        at = max((n for n in lines if n <= line), default=None)
        # Attributes, a doc comment and the beginning of the statement may be between.
        if at is None or line - at > 6 or len([n for n in has_code if at < n < line]) > 3:
            return None
        return at


def reachable():
    """The crates that each crate can call, by the name of its directory."""
    direct = {}
    for manifest in [*ROOT.glob("services/**/Cargo.toml")]:
        text = manifest.read_text().split("[dev-dependencies]")[0]
        names = re.findall(r"^(quintlet-\w[\w-]*|pod-sync-\w[\w-]*)[ .=]", text, re.M)
        direct[manifest.parent.name] = {name.removeprefix("quintlet-").removeprefix("pod-sync-") for name in names}
    every = {}
    for crate in direct:
        seen, todo = set(), [crate]
        while todo:
            if (at := todo.pop()) not in seen:
                seen.add(at)
                todo += direct.get(at, ())
        every[crate] = seen
    return every


class Index:
    def __init__(self, files):
        self.files = files
        self.by_name = defaultdict(list)
        self.by_field, self.traits, self.returns = defaultdict(set), defaultdict(set), defaultdict(set)
        self.reachable = reachable()
        for f in files:
            for (_, field), words in f.fields.items():
                self.by_field[field] |= words
            for trait, types in f.traits.items():
                self.traits[trait] |= types
            for function in f.functions:
                self.returns[function.name] |= {w for w in function.returns if w[0].isupper()}
            for function in f.functions:
                self.by_name[function.name].append(function)

    def types(self, function, receiver):
        """The words of the type of a receiver; empty if unknown."""
        if not receiver:
            return set()
        name = receiver[0]
        if name == "self":
            return {function.owner}
        words = set()
        if receiver[1:2] == ["self"] and (own := function.file.fields.get((function.owner, name))):
            words |= own
        elif len(receiver) == 1:
            words |= function.types.get(name, set())
            for word in [w for w in words if w[0].islower() and w not in STD and w not in KEYWORDS]:
                words |= self.returns.get(word, set()) | self.by_field.get(word, set())
        if not words:
            words |= self.by_field.get(name, set()) | self.returns.get(name, set())
        return words

    def candidates(self, function, path, receiver):
        return [f for f in self.named(function, path, receiver) if f.file.crate in self.reachable[function.file.crate]]

    def named(self, function, path, receiver):
        name = path[-1]
        every = self.by_name.get(name, [])
        if receiver is not None:
            found = [f for f in every if f.is_method]
            if types := self.types(function, receiver):
                types = types | {t for word in types for t in self.traits.get(word, ())}
                fitting = [f for f in found if f.owner in types]
                if fitting or receiver[:1] == ["self"]:
                    return fitting
            if name in STD or len({f.owner for f in found}) > 1:
                return []
            return found
        if len(path) > 1:
            qualifier = function.owner if path[-2] == "Self" else path[-2]
            if qualifier and qualifier[0].isupper():
                return [f for f in every if f.owner == qualifier]
            if qualifier in ("self", "super", "crate"):
                own = [f for f in every if not f.owner and f.file.crate == function.file.crate]
                return [f for f in own if f.file is function.file] or own
            q = qualifier.removeprefix("quintlet_").replace("_", "-")
            same = [f for f in every if not f.owner and f.file.module == qualifier]
            near = [f for f in same if f.file.crate == function.file.crate]
            return near or same or [f for f in every if not f.owner and f.file.crate in (q, q.removeprefix("pod-sync-"))]
        free = [f for f in every if not f.owner]
        if own := [f for f in free if f.file is function.file]:
            return own
        near = [f for f in free if f.file.crate == function.file.crate]
        return (near or free) if name in function.file.imports else []

    def primitive(self, function, path, receiver):
        text = "::".join(path)
        if receiver is not None:
            if path[-1] in PRIMITIVE_METHODS_OF and "process" in function.file.imports and "Command" in function.file.imports:
                return "Command" in receiver or "command" in receiver
            if path[-1] == "metadata" and len(receiver) and re.search(r"file|path|dir|entry|log|from", receiver[0]):
                return True
            if path[-1] == "open" and receiver and "options" in receiver[0].lower():
                return True
            if path[-1] in METHODS and not self.by_name.get(path[-1]):
                return True
            return path[-1] in METHODS and not self.candidates(function, path, receiver)
        if HARMLESS.search(text) or not PRIMITIVES.search(text):
            return False
        return not text.startswith("tokio::") and not (text.startswith("fs::") and "tokio" in function.file.imports and "std" not in function.file.imports)

    def blocks(self, function, seen=()):
        """The chain of calls from a function without `async` to a primitive, or None."""
        if function.blocks is None:
            function.blocks = ()
            for path, receiver, line, on_async, off, awaited in function.calls:
                if off or on_async or awaited:
                    continue
                chain = self.reaches(function, path, receiver)
                if not chain:
                    continue
                note = function.file.note(line) or function.file.note(function.line) or function.file.head
                if note:
                    function.file.used.add(note)
                    continue
                function.blocks = (f"{function} ({function.file.path}:{line})", *chain)
                break
        return function.blocks

    def reaches(self, function, path, receiver):
        if self.primitive(function, path, receiver):
            return ("::".join(path) if receiver is None else "." + path[-1],)
        for candidate in self.candidates(function, path, receiver):
            if not candidate.is_async and candidate is not function:
                if chain := self.blocks(candidate):
                    return chain
        return None

    def faults(self):
        for f in self.files:
            for function in f.functions:
                for path, receiver, line, on_async, off, awaited in function.calls:
                    if off or awaited or not (on_async or function.is_async):
                        continue
                    if chain := self.reaches(function, path, receiver):
                        note = f.note(line) or f.note(function.line) or f.head
                        if note:
                            f.used.add(note)
                            continue
                        yield f.path, line, str(function), chain


def check_itself():
    """Fails if a planted fault is not found, or if something else is."""
    sample = File("services/shared/kit/src/sample.rs", SAMPLE)
    found = {function.split("::")[-1] for _, _, function, _ in Index([sample]).faults()}
    planted = {function.name for function in sample.functions if function.name.startswith("bad")}
    assert found == planted and planted, f"found {sorted(found)} in the sample"


def main():
    check_itself()
    names = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard", "services/*.rs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = []
    for name in sorted(set(filter(None, names.split("\0")))):
        path = ROOT / name
        is_test = "/tests/" in name or path.name == "tests.rs" or path.name.endswith("_tests.rs") or path.name == "build.rs"
        if not is_test and path.is_file() and "/src/" in name and not name.startswith(SKIPPED):
            files.append(File(name, path.read_text()))
    index = Index(files)
    faults = list(index.faults())
    for path, line, function, chain in faults:
        print(f"{path}:{line}: {function} blocks: {' > '.join(chain)}")
    unused = [(f.path, line) for f in files for line in f.notes if line not in f.used]
    for path, line in unused:
        print(f"{path}:{line}: this comment `Blocks:` has no effect")
    total = sum(len(f.functions) for f in files)
    print(f"blocking work: {total} functions, {len(faults)} faults")
    return 1 if faults or unused or total < LEAST else 0


if __name__ == "__main__":
    sys.exit(main())
