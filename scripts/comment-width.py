#!/usr/bin/env python3
"""Fails for a comment of a Rust file that is wider than WIDTH columns. `--fix` fills its paragraph anew.

A paragraph is a run of whole-line comments with one indentation and one marker (`//`, `///` or `//!`). Lists keep their markers and their
indentation. Code blocks, tables, headings, definitions of links and blank lines stay as they are, and so does a word, a link or a piece
of code that is itself too wide. Only paragraphs with a line that is too wide change.
"""

import re
import subprocess
import sys
from pathlib import Path

from blocking import TOKEN

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 110
COMMENT = re.compile(r"(\s*)(//[/!]?)(?!/)(.*)$")
FENCE = re.compile(r"\s*(```|~~~)")
# Lines that are no running text: headings, tables, definitions of links, quotes, rules, HTML.
FIXED = re.compile(r"\s*(#+ |\||\[[^\]]*\]: |>|<|(?:[-=*_] ?){3,}$)")
ITEM = re.compile(r"(\s*(?:[-*+]|\d{1,3}[.)]) +)(?=\S)")
# A word; text with spaces in a link or in a piece of code belongs to it.
WORD = re.compile(r"(?:`[^`]*`|\[(?:`[^`]*`|[^\]`])*\](?:\([^)]*\)|\[[^\]]*\])?|\S)+")
# What Markdown would take for a list, a heading, a table or a quote at the start of a line.
STRUCTURE = re.compile(r"(?:[-*+>#|=].{0,2}|#+|\d{1,3}[.)]|[|>].*|<.*|```.*|~~~.*|\[[^\]]*\]:.*)$")
LEAST = 10_000

# Text, and what `--fix` makes of it with 40 columns.
SAMPLES = [
    ("/// One two three four five six seven eight nine.\n", "/// One two three four five six seven\n/// eight nine.\n"),
    ("    // Short.\n    // Also short.\n", "    // Short.\n    // Also short.\n"),
    ("//! One two three four five six seven eight\n//! nine.\n//!\n//! # Errors\n//! Ten.\n", "//! One two three four five six seven\n//! eight nine.\n//!\n//! # Errors\n//! Ten.\n"),
    ("/// ```\n/// let a = b; // a line of code that is much too wide\n/// ```\n", None),
    ("/// ~~~text\n/// a line of text that is much too wide for it\n/// ~~~\n", None),
    ("/// | a table | with a line | that is much too wide |\n", None),
    ("/// # A heading that is much too wide for this page\n", None),
    ("/// [link]: https://example.com/a/very/long/address\n", None),
    ("/// https://example.com/a/very/long/address/of/a/page\n", None),
    ("///     a line of code by indentation, much too wide\n", None),
    ("/// - one two three four five six seven eight nine\n/// - ten\n", "/// - one two three four five six seven\n///   eight nine\n/// - ten\n"),
    ("/// 1. one two three four five six seven eight\n///    nine\n", "/// 1. one two three four five six seven\n///    eight nine\n"),
    ("/// See the page of [`a long name`](https://example.com) here.\n", "/// See the page of\n/// [`a long name`](https://example.com)\n/// here.\n"),
    ("/// One two three four five six seven `eight nine`.\n", "/// One two three four five six seven\n/// `eight nine`.\n"),
    ("/// One two three four five six seven 8 - 9 is it.\n", "/// One two three four five six seven\n/// 8 - 9 is it.\n"),
    ("/// One two three four five six sevens89 # nine.\n", "/// One two three four five six\n/// sevens89 # nine.\n"),
    ("// One two three four five six seven eight nine.\n/// Of the item.\n", "// One two three four five six seven\n// eight nine.\n/// Of the item.\n"),
    ('let a = "\n// a line of a text that is much too wide for it";\n', None),
    ('let a = r#"\n/// a line of a text that is much too wide for it"#;\n', None),
    ("//// A row of slashes is a plain comment, left alone.\n", None),
    ("let a = 1; // a comment behind code, much too wide\n", None),
]  # fmt: skip
# Lines that the check reports with 40 columns, of the samples: by index.
REPORTED = {0, 2, 10, 11, 12, 13, 14, 15, 16, 20}


def comment_lines(text):
    """The numbers of the lines that have a line comment, from 0, and whether it is the whole line."""
    found, line = {}, 0
    for m in TOKEN.finditer(text):
        if m["comment"] and m["comment"].startswith("//"):
            begin = text.rfind("\n", 0, m.start()) + 1
            found[line] = not text[begin : m.start()].strip()
        line += m.group().count("\n")
    return found


def words_of(text):
    """The words of a paragraph. What may not begin a line has the word before it."""
    words = []
    for word in WORD.findall(text):
        if words and STRUCTURE.match(word):
            words[-1] += " " + word
        else:
            words.append(word)
    return words


def fill(first, rest, words, width):
    lines, line = [], first
    for word in words:
        if line.strip() and line not in (first, rest) and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = rest
        line += word if line in (first, rest) else " " + word
    return [*lines, line]


def paragraphs(lines, whole):
    """Yields the paragraphs of a file: first and last line, the prefix of the first and of the other lines, and the text."""
    i, fence = 0, None
    while i < len(lines):
        m = COMMENT.match(lines[i]) if whole.get(i) else None
        if not m:
            i, fence = i + 1, None
            continue
        lead, text = m[1] + m[2], m[3]
        if FENCE.match(text):
            mark = FENCE.match(text)[1]
            fence = mark if fence is None else None if fence == mark else fence
            i += 1
            continue
        item = ITEM.match(text)
        if fence or not text.strip() or not text.startswith(" ") or FIXED.match(text) or (text.startswith("     ") and not item):
            i += 1
            continue
        begin, body, indent = i, [text[len(item[1]) :] if item else text.strip()], None
        while whole.get(i + 1) and not lines[i].endswith(("  ", "\\")):
            n = COMMENT.match(lines[i + 1])
            if not n or n[1] + n[2] != lead or not n[3].strip() or FENCE.match(n[3]) or FIXED.match(n[3]) or ITEM.match(n[3]):
                break
            spaces = len(n[3]) - len(n[3].lstrip())
            if spaces == 0 or (not item and spaces > 4) or (indent is not None and spaces != indent):
                break
            indent = spaces
            body.append(n[3].strip())
            i += 1
        first = lead + (item[1] if item else text[: len(text) - len(text.lstrip())])
        rest = lead + " " * (indent if indent is not None else len(item[1]) if item else len(first) - len(lead))
        yield begin, i, first, rest, " ".join(body)
        i += 1


def check(text, width=WIDTH):
    """Returns the numbers of lines that are too wide, and the text with their paragraphs filled anew."""
    lines = text.split("\n")
    whole = comment_lines(text)
    wide = {i for i, is_whole in whole.items() if not is_whole and len(lines[i]) > width}
    changes = []
    for begin, end, first, rest, body in paragraphs(lines, whole):
        own = {i for i in range(begin, end + 1) if len(lines[i]) > width}
        if own:
            filled = fill(first, rest, words_of(body), width)
            if filled != lines[begin : end + 1]:
                wide |= own
                changes.append((begin, end, filled))
    for begin, end, filled in reversed(changes):
        lines[begin : end + 1] = filled
    return sorted(wide), "\n".join(lines)


def check_itself():
    """Fails if a planted text is not filled as it must be, loses a word, or is changed by a second pass."""
    for i, (text, wanted) in enumerate(SAMPLES):
        wide, fixed = check(text, 40)
        assert fixed == (wanted or text), f"sample {i} became\n{fixed}"
        assert bool(wide) == (i in REPORTED), f"sample {i}: lines {wide}"
        assert re.sub(r"[\s/!]", "", fixed) == re.sub(r"[\s/!]", "", text), f"sample {i} has other words"
        assert check(fixed, 40)[1] == fixed, f"sample {i} changes again"


def main():
    check_itself()
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard", "*.rs"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    count = faults = 0
    for name in sorted(set(filter(None, listed.split("\0")))):
        path = ROOT / name
        if not path.is_file():
            continue
        text = path.read_text()
        wide, fixed = check(text)
        count += text.count("//")
        if "--fix" in sys.argv and fixed != text:
            path.write_text(fixed)
            wide, _ = check(fixed)
        faults += len(wide)
        for line in wide:
            print(f"{name}:{line + 1}: a comment wider than {WIDTH} columns", file=sys.stderr)
    print(f"width of comments: {faults} lines too wide")
    return 1 if faults or count < LEAST else 0


if __name__ == "__main__":
    sys.exit(main())
