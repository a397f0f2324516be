#!/usr/bin/env python3
"""Checks the words of the code: names that were replaced do not come back, and doc comments say more than the signature.

- REPLACED lists identifiers that were renamed, with the directories in which they must not occur.
- A doc comment of three words or fewer does not repeat the words of its item: remove it, or say what the signature does not.
- A doc comment is not a fragment such as "What it holds." or "None in standalone mode.": it names its subject.
- Comments and the names of tests use the words of the Kubernetes documentation: "report", not "tell".
- Identifiers follow the table "One noun per idea" of CONTRIBUTING.md: no variable is named by a preposition, no name has a word of
  PEOPLE, no type that other files see is named by a bare word of BARE, and no `let` binds three unrelated values as a tuple.

ALLOWED would list crates that still have such comments or names, with their number; there are none. PLANTED has a violation of each
class, which must be found, so that no class stops working unnoticed.

With --show, prints these comments and names, too. With --types, prints the types of the workspace by their last and first words.
"""

import re
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 3
def stems(text):
    """The words of an identifier or a text, without a plural's s."""
    return {word.lower().rstrip("s") for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)}


# Words that say nothing beside a signature.
EMPTY = stems(
    "a all an and any are at by for from had has have in is it its many more no none not of off on one or other own said that the "
    "their there they this those to was were what when where which who whom whose why will with call came back makes made return"
)

# Identifier, its replacement, and the directories or files in which it must not occur.
EVERYWHERE = ("services", "tests", "proto")
POD_SYNC = ("services/pod-sync",)
REPLACED = [
    (r"Fleet", "PodWorkers", EVERYWHERE),
    (r"Told", "NextWork", EVERYWHERE),
    (r"Table", "PodManager", POD_SYNC),
    (r"First", "StaticPodGate", POD_SYNC),
    (r"Unsure", "PendingAdmission", EVERYWHERE),
    (r"Halt::Cut", "Halt::Interrupted", EVERYWHERE),
    (r"Openers", "PullCredentials", POD_SYNC),
    (r"PullLanes", "PullLimits", POD_SYNC),
    (r"ProbeView", "ProbeResults", POD_SYNC),
    (r"Standing|Ledger", "WorkPermission, ContainmentRecords", POD_SYNC),
    (r"Occasion", "ReadTrigger", POD_SYNC),
    (r"GroupNow", "CgroupState", POD_SYNC),
    (r"Shortage", "InsufficientResource", POD_SYNC),
    (r"Outcome::(Cut|Again)", "Outcome::Interrupted, Outcome::Requeue", POD_SYNC),
    (r"Ended", "CompletedExecs", ("services/cri-proxy",)),
    (r"Terms", "FencingToken", EVERYWHERE),
    (r"Lacking", "UnsupportedListStreams", EVERYWHERE),
    (r"Nomination", "InspectionRequest", EVERYWHERE),
    (r"Raw|Why", "ProbeAttempt, IdleReason", ("services/probe-service",)),
    (r"patience(?=::|;)", "peer_startup", ("services/shared",)),
    (r"Mistake|mistakes", "Diagnostic, diagnostics", EVERYWHERE),
    (r"Judge", "functions of worker::policy", EVERYWHERE),
    (r"[Ss]eams?", "Failpoint, a trait's name", EVERYWHERE),
    (r"Watcher", "failpoint::Observer", ("services/shared/kit",)),
    (r"told|said|heard|lacking", "reported, response, received", EVERYWHERE),
]
# Replaced identifier: number of its occurrences that are left. A number may only go down.
LEFT = {}
# Files that were renamed.
REPLACED_FILES = {
    "foreign.rs": "unsupported_flags.rs",
    "newer.rs": "cri_extensions.rs",
    "seams.rs": "traits.rs",
    "seam.rs": "failpoint.rs",
    "patience.rs": "peer_startup.rs",
    "mistakes.rs": "diagnostics.rs",
}

# First words of doc comments without a subject.
FRAGMENT = re.compile(r"(?:What|Which|Who|Whoever|Whose|Why|Where|Those|Such|So|As|Of|None|Until|It|Its|Nobody|Nothing|Also)\b")
# Words of people, not of services and objects.
PERSONAL = (
    "anew|anybody|become of|begun with|goes? on|gone away|hears?|heard|hung up|in words|mend(?:ed|s)?|nobody|said|"
    "somebody|stands? in|tells?|told|whoever"
)
PERSONAL_WORDS = re.compile(rf"\b(?:{PERSONAL})\b", flags=re.I)
PERSONAL_NAMES = re.compile(rf"\bfn (?:\w+_)?(?:{PERSONAL.replace(' ', '_')})(?:_\w+)?\(")

# Words that mean many things, as the whole name of a type that other files see, and the file that may use each.
BARE = {
    "Entry": None,
    "Found": None,
    "Inputs": None,
    "Next": None,
    "Node": "tests/e2e/src/node.rs",
    "Outcome": "services/shared/model/src/outcome.rs",
    "Plan": None,
    "Settings": None,
    "State": None,
    "Step": None,
    "Verdict": None,
}
BARE_TYPE = re.compile(rf"^[ \t]*pub(?:\([^)]*\))?\s+(?:struct|enum|union|trait|type)\s+({'|'.join(BARE)})\b", flags=re.M)
# Prepositions as variables: not a field, a method, a path, a field of a macro such as `from = %address`, or a word of a macro's grammar.
PREPOSITION = re.compile(r"(?<![\w.$'#:])(?:of|by|from|to|but)\b(?!\s*(?:\(|!|::))")
# Words after which an identifier is a variable.
BEFORE_VARIABLE = {"let", "for", "mut", "ref", "in", "if", "match", "return", "move", "else", "while", "break", "as", "static", "const"}
# Words of people as a part of an identifier.
PEOPLE = {"asked", "judge", "judged", "judges", "patience", "said", "spoken", "tell", "tells", "told"}
NAME = re.compile(r"\b\w*(?:asked|judge|patience|said|spoken|tell|told)\w*", flags=re.I)
MOST_IN_LET = 2

# Class of comments or names: the crates that still have some, with their number.
ALLOWED = {}
PLANTED = {
    "repeats the signature": "/// The path.\npath: PathBuf,\n",
    "is a fragment": "/// What it holds.\npub content: Kind,\n",
    "has a word of people": "// The caller is told.\nfn reply() {}\n",
    "is a test name with a word of people": "#[test]\nfn a_caller_is_told_why() {}\n",
    "is a variable named by a preposition": "fn copy(from: &Path) {}\n",
    "is a name with a word of people": "const MOST_PATIENCE: u32 = 1;\n",
    "is a bare word as the name of a shared type": "pub(crate) enum Verdict {}\n",
    "is a let of three or more": "let (a, b, c) = (f(1, 2), [3, 4], 5);\n",
}
# Further violations and texts without one, by class.
FOUND_TOO = {
    "is a variable named by a preposition": [
        "items.map(|of| f(of))", "let mut to = 1;", "let by: u32 = 1;", "fn f() { let f = |a: A, from: B| a; }", "let Range { from, end } = r;",
        "Some((of, _)) => 1", "Copy { source, to }", "f(from, 1)", "for of in all {}",
    ],
    "is a name with a word of people": ["let asked_again = 1;", "struct TellAll;", "fn judge() {}"],
    "is a bare word as the name of a shared type": ["    pub type State = u32;", "pub struct Plan<'a> {"],
    "is a let of three or more": ["let (mut a, b, (c, d)) = (1, 2, g());", "let (\n    a,\n    b,\n    c,\n) = (1, 2, 3);"],
}
NOT_FOUND = {
    "is a variable named by a preposition": [
        "struct Copy { from: A, to: B }", "Copy { from: a, to: b }", "a.from", "A::from(b)", "fn of(a: A) {}", "#[from]", "of(a)", "info!(from = %a)",
        '"from"', "// from", "(@each $a:literal of $of:literal) => {}", "all![first 1 of 2]",
    ],
    "is a name with a word of people": ["let masked = 1;", "let unmasked_paths = 1;", "let bailout = toldo;"],
    "is a bare word as the name of a shared type": ["struct State {", "pub struct StateLabel {", "impl State {", "pub mod state;"],
    "is a let of three or more": ["let (a, b, c) = f();", "let (a, b) = (1, 2);", "if let (1, 2, 3) = (a, b, c) {}", "let (a, b) = (f(1, 2), 3);"],
}


def code(text):
    """The text without comments and literals."""
    literal = r"""//[^\n]*|b?r(#*)"[\s\S]*?"\1|"(?:\\[\s\S]|[^"\\])*"|b?'(?:\\[^'\n]+|\\'|[^'\\\n])'"""
    return re.sub(literal, lambda m: "\n" * m[0].count("\n"), text)


def repetitions(text):
    """Line and text of each doc comment of a few words that are all words of its item, or no words at all."""
    for block in re.finditer(r"(?:^[ \t]*///[^\n]*\n)+((?:\s*#\[[^\n]*\n)*)([^\n]*)", text, flags=re.M):
        comment = " ".join(re.findall(r"^[ \t]*///(.*)", block[0], flags=re.M)).strip()
        # A comment without a full stop is a help text of the command line.
        if len(comment.split()) > MOST_WORDS or re.search(r"[`\d]", comment) or not comment.endswith("."):
            continue
        if stems(comment) - EMPTY <= stems(block[2]):
            yield text.count("\n", 0, block.start()) + 1, f"{comment!r} of {block[2].strip()}"


def comments(text):
    """Line, marker and text of each block of comments."""
    for block in re.finditer(r"(?:^[ \t]*(//[/!]?)(?!/)[^\n]*\n)+", text, flags=re.M):
        words = " ".join(line.strip() for line in re.findall(r"^[ \t]*//[/!]?(.*)", block[0], flags=re.M)).strip()
        yield text.count("\n", 0, block.start()) + 1, block[1], words


def opened(text, at):
    """The position of the innermost bracket around a position, or -1, and the text between the two that is in no other bracket."""
    depth, outside, end = 0, "", at
    for close in reversed(list(re.finditer(r"[][(){};]", text[:at]))):
        if depth == 0:
            outside = text[close.end() : end] + outside
        mark = close[0]
        if mark == ";" and depth == 0:
            # Nothing before the statement matters, except for the bracket.
            outside = ";"
        elif mark in ")]}":
            depth += 1
        elif mark in "([{":
            if depth == 0:
                return close.start(), outside
            depth -= 1
        end = close.start()
    return -1, outside


def is_variable(text, match):
    """Whether a preposition is a variable or a parameter."""
    before, after = text[: match.start()].rstrip(), text[match.end() :].lstrip()
    if before.endswith(("#[", ".")) and not before.endswith(".."):
        return False
    if word := re.search(r"[\w']+$", before):
        return word[0] in BEFORE_VARIABLE
    if re.match(r"=[^=]", after) and before.endswith((",", "(")):
        bracket, _ = opened(text, match.start())
        return text[bracket : bracket + 1] != "(" or not text[:bracket].rstrip().endswith("!")
    if after.startswith(":") and not before.endswith(("|", "&")):
        bracket, outside = opened(text, match.start())
        # A field, unless it stands between the bars of a closure.
        return text[bracket : bracket + 1] != "{" or outside.split(";")[-1].count("|") % 2 == 1
    return True


def tuple_lets(text):
    """Position of each `let` of a tuple whose value is a tuple of more than MOST_IN_LET."""

    def tuple_at(at):
        """The end of the tuple that opens here, and its number of elements."""
        depth, commas, last = 0, 0, at
        for mark in re.finditer(r"[][(){},]", text[at:]):
            if mark[0] in "([{":
                depth += 1
            elif mark[0] in ")]}":
                depth -= 1
                if depth == 0:
                    end = at + mark.end()
                    return end, commas + bool(text[last + 1 : end - 1].strip())
            elif depth == 1:
                commas, last = commas + 1, at + mark.start()
        return len(text), 0

    for match in re.finditer(r"(?<![\w&])let\s*\(", text):
        if re.search(r"\b(?:if|while)\s*$|&&\s*$", text[: match.start()][-40:]):
            continue
        end, _ = tuple_at(match.end() - 1)
        value = re.match(r"\s*=\s*\(", text[end:])
        if value:
            end, count = tuple_at(end + value.end() - 1)
            if count > MOST_IN_LET and text[end:].lstrip().startswith(";"):
                yield match.start()


def names(text, path):
    """Class, position and text of each identifier that breaks the table of CONTRIBUTING.md, in a text without comments and literals."""
    for match in PREPOSITION.finditer(text):
        if is_variable(text, match):
            yield "is a variable named by a preposition", match.start(), match[0]
    for match in NAME.finditer(text):
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", match[0])}
        if words & PEOPLE:
            yield "is a name with a word of people", match.start(), match[0]
    for match in BARE_TYPE.finditer(text):
        if BARE[match[1]] != path:
            yield "is a bare word as the name of a shared type", match.start(), match[1]
    for at in tuple_lets(text):
        yield "is a let of three or more", at, " ".join(text[at : at + 60].split())


def violations(text, path=""):
    """Class, line and text of each comment or name that breaks a rule."""
    plain = code(text)
    for kind, at, name in names(plain, path):
        yield kind, plain.count("\n", 0, at) + 1, name
    for line, comment in repetitions(text):
        yield "repeats the signature", line, comment
    for line, marker, words in comments(text):
        if marker == "///" and words.endswith(".") and FRAGMENT.match(words):
            yield "is a fragment", line, repr(words)
        if PERSONAL_WORDS.search(words):
            yield "has a word of people", line, repr(words)
    for match in PERSONAL_NAMES.finditer(plain):
        yield "is a test name with a word of people", plain.count("\n", 0, match.start()) + 1, match[0]


def crates():
    """Directory and name of each crate, innermost first."""
    manifests = sorted((file for top in EVERYWHERE for file in (ROOT / top).rglob("Cargo.toml")), key=lambda m: -len(m.parts))
    return {m.parent: tomllib.loads(m.read_text())["package"]["name"] for m in manifests}


def print_types(sources):
    """Prints the number of types by their last and by their first word, and the names that several types have."""
    types = Counter()
    for file in sources:
        types.update(re.findall(r"^[ \t]*(?:pub(?:\([^)]*\))?\s+)?(?:struct|enum|union|trait|type)\s+([A-Z]\w*)", code(file.read_text()), flags=re.M))
    print(f"{types.total()} types, {len(types)} names")
    for title, at in (("last", -1), ("first", 0)):
        groups = defaultdict(Counter)
        for name, count in types.items():
            groups[re.findall(r"[A-Z][a-z0-9]*", name)[at]][name] += count
        for word, group in sorted(groups.items(), key=lambda g: (-g[1].total(), g[0])):
            if group.total() > 3:
                print(f"{title} word {word} {group.total()}: " + " ".join(f"{n}*{c}" if c > 1 else n for n, c in sorted(group.items())))


def main():
    failures = []
    sources = [file for top in EVERYWHERE for file in sorted((ROOT / top).rglob("*.rs"))]
    if "--types" in sys.argv:
        return print_types(sources)
    if len(sources) < 400:
        failures.append(f"only {len(sources)} sources")
    for kind, planted in PLANTED.items():
        if kind not in {found for found, _, _ in violations(planted)}:
            failures.append(f"the planted violation that {kind} is not found: {planted!r}")
    for kind, texts in FOUND_TOO.items():
        failures += [f"not found, although it {kind}: {text!r}" for text in texts if kind not in {found for found, _, _ in violations(text)}]
    for kind, texts in NOT_FOUND.items():
        failures += [f"found, although it is none that {kind}: {text!r}" for text in texts if kind in {found for found, _, _ in violations(text)}]
    by_dir = crates()
    found_in = defaultdict(Counter)
    occurrences = defaultdict(list)
    for file in sources:
        path, text = str(file.relative_to(ROOT)), file.read_text()
        if replacement := REPLACED_FILES.get(file.name):
            failures.append(f"{path}: the name was replaced by {replacement}")
        plain = code(text)
        for names, replacement, places in REPLACED:
            if not path.startswith(places):
                continue
            for match in re.finditer(rf"\b(?:{names})\b", plain):
                place = f"{path}:{plain.count(chr(10), 0, match.start()) + 1}"
                occurrences[match[0]].append(f"{place}: {match[0]} was replaced by {replacement}")
        crate = next((name for directory, name in by_dir.items() if directory in file.parents), None)
        if crate is None:
            continue
        for kind, line, comment in violations(text, path):
            found_in[kind][crate] += 1
            if "--show" in sys.argv:
                print(f"{path}:{line}: {kind}: {comment}")
    for name in sorted(occurrences.keys() | LEFT.keys()):
        found, left = occurrences[name], LEFT.get(name, 0)
        if len(found) > left:
            failures += found
        elif len(found) < left:
            failures.append(f"{name}: write {len(found)} for {left} into LEFT of scripts/words.py")
    for kind in PLANTED:
        allowed_in = ALLOWED.get(kind, {})
        for crate in sorted(found_in[kind].keys() | allowed_in.keys()):
            found, allowed = found_in[kind][crate], allowed_in.get(crate, 0)
            if found > allowed:
                failures.append(f"{crate}: {found} comments or names, {allowed} allowed: each {kind} (--show lists them)")
            elif found < allowed:
                failures.append(f"{crate}: write {found} for {allowed} into ALLOWED[{kind!r}] of scripts/words.py")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
