#!/usr/bin/env python3
"""Checks the documentation: links, named files and tests, and make targets. Prints each problem and exits 1 if there is one.

- Every relative link of a page leads to a file, and to a heading of it.
- Every file and test in a column "shown by", "test", "found by" or "reproduced by" exists in the crate that the cell names before it.
- Every path in backticks that begins at the root of the repository exists.
- The code map in ARCHITECTURE.md names directories that exist, and has every crate.
- Every `make TARGET` is a target of the Makefile.
- README.md stays short.
- No committed file refers to a document that is not in the repository.
"""

import functools
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# The least number of names that the checks must find: a check that reads nothing finds no problem.
LEAST_LINKS = 40
LEAST_NAMES = 250
LEAST_REFERENCES = 100
# Columns that name files and tests.
TEST_COLUMNS = {"shown by", "test", "found by", "reproduced by"}
# README.md says what a newcomer needs; everything else has a page in docs/.
README_BYTES = 8192

problems = []


def tracked():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    ).stdout.decode()
    return [path for path in listed.split("\0") if path and (ROOT / path).is_file()]


FILES = tracked()


@functools.cache
def text(path):
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def without_code(page):
    """The page without fenced blocks; lines stay where they are."""
    return re.sub(r"^( *)```.*?^\1```", lambda block: "\n" * block[0].count("\n"), page, flags=re.S | re.M)


def problem(path, number, message):
    problems.append(f"{path}:{number}: {message}")


@functools.cache
def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", without_code(text(path)), flags=re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", heading).replace(" ", "-"))
    return found


def check_links(path):
    count = 0
    for number, line in enumerate(without_code(text(path)).splitlines(), 1):
        for link in re.findall(r"\]\(([^()\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", link):
                continue
            count += 1
            file, _, anchor = link.partition("#")
            target = (ROOT / path).parent.joinpath(file).resolve() if file else ROOT / path
            if not target.exists():
                problem(path, number, f"no file {link}")
            elif anchor and anchor not in anchors(str(target.relative_to(ROOT))):
                problem(path, number, f"no heading {link}")
    return count


def crates():
    """Name and directory of each crate."""
    found = {}
    for path in FILES:
        if path.endswith("Cargo.toml") and (name := re.search(r'^name = "(.+)"$', text(path), flags=re.M)):
            found[name[1]] = pathlib.PurePath(path).parent
    return found


CRATES = crates()


@functools.cache
def beneath(crate):
    """Files of the crate, without those of crates in directories below it."""
    nested = [other for other in CRATES.values() if crate in other.parents]
    return [
        path
        for path in FILES
        if crate in (above := pathlib.PurePath(path).parents) and not any(other in above for other in nested)
    ]


@functools.cache
def names_of_tests(crate):
    code = "\n".join(text(path) for path in beneath(crate) if path.endswith(".rs"))
    return set(re.findall(r"\bfn (\w+)\(", code))


def has_path(crate, name):
    """Whether the crate has that file or directory: `src/` may be left out, and directories below `tests/`."""
    return any(f"/{path}/".find(f"/{name.rstrip('/')}/") >= 0 for path in beneath(crate))


def check_cell(path, number, cell):
    """A cell has "`CRATE` FILE `TEST`, FILE; `CRATE` …; SCRIPT"."""
    count = 0
    for part in cell.split(";"):
        crate = None
        for word in re.findall(r"`[^`]+`|[\w./-]+/[\w./-]+|\btests\b", part):
            name = word.strip("`").rstrip(".")
            if word.startswith("`") and name in CRATES:
                crate = CRATES[name]
                continue
            if word.startswith("`") and not re.fullmatch(r"\w+(_\w+){2,}", name):
                continue
            count += 1
            if word.startswith("`"):
                # Pages of one crate leave its name out.
                if not any(name in names_of_tests(c) for c in ([crate] if crate else CRATES.values())):
                    problem(path, number, f"no test {name} in {crate or 'any crate'}")
            elif crate is None:
                if not (ROOT / name).exists():
                    problem(path, number, f"no file {name}")
            elif not has_path(crate, name):
                problem(path, number, f"no file {name} in {crate}")
    return count


def check_names(path):
    count = 0
    columns = None
    for number, line in enumerate(text(path).splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("|"):
            columns = None
            for name, file in re.findall(r"`([\w-]+)` ((?:src|tests)/[\w./-]*\w)", line):
                count += 1
                if name not in CRATES:
                    problem(path, number, f"no crate {name}")
                elif not has_path(CRATES[name], file):
                    problem(path, number, f"no file {file} in {CRATES[name]}")
        elif columns is None:
            columns = [i for i, cell in enumerate(cells) if cell in TEST_COLUMNS]
        elif not line.startswith("|-"):
            count += sum(check_cell(path, number, cells[i]) for i in columns if i < len(cells))
    return count


def check_targets(path):
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), flags=re.M))
    for number, line in enumerate(text(path).splitlines(), 1):
        for target in re.findall(r"(?:`|^)make ([a-z][\w-]*)", line):
            if target not in targets:
                problem(path, number, f"no target {target} in the Makefile")


def check_paths(path):
    for number, line in enumerate(without_code(text(path)).splitlines(), 1):
        for name in re.findall(r"`((?:services|tests|scripts|docker|docs|proto|charts|examples)/[\w./*-]*)`", line):
            if not any(any(place.glob(name.rstrip("/"))) for place in (ROOT, (ROOT / path).parent)):
                problem(path, number, f"no file {name}")


def check_code_map():
    """Lines of the map: `DIR/  …` at the root, `  DIR/  DIR/  …` below the directory named last at the root."""
    page = text("ARCHITECTURE.md")
    block = re.search(r"^## Code map\n+```\n(.*?)^```", page, flags=re.S | re.M)
    first = page[: block.start(1)].count("\n") + 1
    named, root = set(), pathlib.PurePath()
    for number, line in enumerate(block[1].splitlines(), first):
        names = re.match(r" *((?:(?:[\w-]+/)+(?:\s+|$))*)", line)[1].split()
        if not names:
            continue
        if not line.startswith(" "):
            root = pathlib.PurePath(names[0])
        for directory in names if not line.startswith(" ") else [root / name for name in names]:
            named.add(pathlib.PurePath(directory))
            if not (ROOT / directory).is_dir():
                problem("ARCHITECTURE.md", number, f"no directory {directory}")
    for name, directory in CRATES.items():
        if directory not in named:
            problem("ARCHITECTURE.md", first, f"the code map lacks the crate {name} in {directory}")


# Section signs and names of documents that this repository never had.
FOREIGN = re.compile("\u00a7|\\bDESIG[N]\\b|\\bCONVENTION[S]\\b|\\bEXPERIENC[E]\\b")
NAMED = re.compile(r"(?<![\w*/$}.-])[\w./-]*\w\.md\b|(?<![\w/.-])docs/[\w./-]*\w")


def check_references(path):
    """Fixtures and corpora are data, not text of ours."""
    if re.search(r"/(corpus|fixtures)/|\.(svg|lock|binpb)$", path):
        return 0
    count = 0
    for number, line in enumerate(text(path).splitlines(), 1):
        line = re.sub(r"[a-z]+://[^\s)>`\"]+", "", line)
        if found := FOREIGN.search(line):
            problem(path, number, f"refers to a document that is not in the repository: {found[0]}")
        for name in NAMED.findall(line):
            count += 1
            if not any(place.exists() for place in (ROOT / name, (ROOT / path).parent / name)):
                problem(path, number, f"refers to a document that is not in the repository: {name}")
    return count


def main():
    pages = [path for path in FILES if path.endswith(".md")]
    links = sum(check_links(path) for path in pages)
    names = sum(check_names(path) for path in pages)
    for path in pages:
        check_targets(path)
        check_paths(path)
    check_code_map()
    references = sum(check_references(path) for path in FILES)
    if references < LEAST_REFERENCES:
        problems.append(f"only {references} references to documents found, at least {LEAST_REFERENCES} expected")
    if (size := (ROOT / "README.md").stat().st_size) > README_BYTES:
        problems.append(f"README.md has {size} bytes, {README_BYTES} at most")
    if links < LEAST_LINKS:
        problems.append(f"only {links} links found, at least {LEAST_LINKS} expected")
    if names < LEAST_NAMES:
        problems.append(f"only {names} names of files and tests found, at least {LEAST_NAMES} expected")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    print(f"docs: ok, {len(pages)} pages, {links} links, {names} files and tests, {references} references")
    return 0


sys.exit(main())
