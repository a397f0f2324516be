#!/usr/bin/env python3
"""Checks the words of the code: names that were replaced do not come back, and doc comments say more than the signature.

- REPLACED lists identifiers that were renamed, with the directories in which they must not occur.
- A doc comment of three words or fewer does not repeat the words of its item: remove it, or say what the signature does not.
- A doc comment is not a fragment such as "What it holds." or "None in standalone mode.": it names its subject.
- Comments and the names of tests use the words of the Kubernetes documentation: "report", not "tell".

ALLOWED lists the crates that still have such comments, with their number of today. A number may only go down. PLANTED has a
violation of each class, which must be found, so that no class stops working unnoticed.

With --show, prints these comments, too.
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

# Class of comments, crate, and their number.
ALLOWED = {
    "repeats the signature": {},
    "is a fragment": {},
    "has a word of people": {},
    "is a test name with a word of people": {},
}
PLANTED = {
    "repeats the signature": "/// The path.\npath: PathBuf,\n",
    "is a fragment": "/// What it holds.\npub content: Kind,\n",
    "has a word of people": "// The caller is told.\nfn reply() {}\n",
    "is a test name with a word of people": "#[test]\nfn a_caller_is_told_why() {}\n",
}


def code(text):
    """The text without comments and literals."""
    return re.sub(r'//[^\n]*|r#*"(?:.|\n)*?"#*|"(?:\\.|[^"\\])*"', lambda m: "\n" * m[0].count("\n"), text)


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


def violations(text):
    """Class, line and text of each comment or name that breaks a rule."""
    for line, comment in repetitions(text):
        yield "repeats the signature", line, comment
    for line, marker, words in comments(text):
        if marker == "///" and words.endswith(".") and FRAGMENT.match(words):
            yield "is a fragment", line, repr(words)
        if PERSONAL_WORDS.search(words):
            yield "has a word of people", line, repr(words)
    for match in PERSONAL_NAMES.finditer(code(text)):
        yield "is a test name with a word of people", text.count("\n", 0, match.start()) + 1, match[0]


def crates():
    """Directory and name of each crate, innermost first."""
    manifests = sorted((file for top in EVERYWHERE for file in (ROOT / top).rglob("Cargo.toml")), key=lambda m: -len(m.parts))
    return {m.parent: tomllib.loads(m.read_text())["package"]["name"] for m in manifests}


def main():
    failures = []
    sources = [file for top in EVERYWHERE for file in sorted((ROOT / top).rglob("*.rs"))]
    if len(sources) < 400:
        failures.append(f"only {len(sources)} sources")
    for kind, planted in PLANTED.items():
        if kind not in {found for found, _, _ in violations(planted)}:
            failures.append(f"the planted comment that {kind} is not found: {planted!r}")
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
        for kind, line, comment in violations(text):
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
