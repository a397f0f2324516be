//! Checks docs/pod-fields.md: it has a verdict for each field of a pod and names a test that exists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use quintlet_testkit::fields::{self, Field};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Honoured,
    Refused,
    Warned,
    NotTheNodes,
}

#[derive(Debug)]
struct Row {
    verdict: Verdict,
    text: String,
}

impl Row {
    /// Returns the texts between backticks that have the form of a test's name.
    fn tests(&self) -> Vec<&str> {
        let quoted = self.text.split('`').skip(1).step_by(2);
        quoted
            .filter(|t| {
                t.contains('_') && t.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
            })
            .collect()
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../..")
}

/// Returns the rows of the page, by `Type.field`.
fn page() -> BTreeMap<String, Row> {
    let text = std::fs::read_to_string(root().join("docs/pod-fields.md")).unwrap();
    let mut rows = BTreeMap::new();
    let mut owner = "";
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            owner = heading.trim();
        }
        let Some(cells) = line.strip_prefix("| `").filter(|_| !owner.is_empty()) else { continue };
        let cells: Vec<&str> = cells.split(" | ").collect();
        let [names, verdict, text] = cells[..] else { panic!("{owner}: not three cells: {line}") };
        let verdict = match verdict.trim() {
            "honoured" => Verdict::Honoured,
            "refused" => Verdict::Refused,
            "warned" => Verdict::Warned,
            "not the node's" => Verdict::NotTheNodes,
            other => panic!("{owner}: {other:?} is no verdict"),
        };
        for name in names.split('`').filter(|n| !n.is_empty() && *n != ", ") {
            let row = Row { verdict, text: text.trim_end_matches([' ', '|']).to_owned() };
            let before = rows.insert(format!("{owner}.{name}"), row);
            assert!(before.is_none(), "{owner}.{name} has two rows");
        }
    }
    rows
}

/// Returns the tests of the tree by name, each with the text of the files that have a test of that name.
fn tests() -> BTreeMap<String, Vec<String>> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut dirs = vec![root().join("services"), root().join("tests")];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            if path.extension().is_none_or(|e| e != "rs") {
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let mut is_test = false;
            for line in text.lines().map(str::trim) {
                if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
                    is_test = true;
                } else if !line.starts_with("#[") {
                    let name = line.strip_prefix("async ").unwrap_or(line).strip_prefix("fn ");
                    if let Some((name, _)) = name.filter(|_| is_test).and_then(|n| n.split_once('(')) {
                        found.entry(name.to_owned()).or_default().push(text.clone());
                    }
                    is_test = false;
                }
            }
        }
    }
    found
}

/// Returns a JSON name in snake case: `hostIPC` becomes `host_ipc`.
fn rust_name(name: &str) -> String {
    let mut out = String::new();
    let letters: Vec<char> = name.chars().collect();
    for (i, c) in letters.iter().enumerate() {
        if c.is_ascii_uppercase() && i > 0 && !letters[i - 1].is_ascii_uppercase() {
            out.push('_');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

fn has_word(text: &str, word: &str) -> bool {
    let of_name = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        !text[..at].ends_with(of_name)
            && !text[at + word.len()..].trim_start_matches('_').starts_with(of_name)
    })
}

#[test]
fn every_field_of_a_pod_has_a_verdict_and_every_test_named_exists() {
    let (rows, tests) = (page(), tests());
    let verdict = |field: &Field| rows.get(&field.owner).map(|row| row.verdict);
    // Fields below a field that is rejected or not the node's need no verdict. They follow it in the list.
    let mut closed: Option<String> = None;
    let all: Vec<Field> = fields::of_pod()
        .into_iter()
        .filter(|field| {
            let below = closed.as_deref().and_then(|path| field.path.strip_prefix(path));
            if below.is_some_and(|rest| rest.starts_with(['.', '[', '{'])) {
                return false;
            }
            let is_open = matches!(verdict(field), Some(Verdict::Honoured | Verdict::Warned) | None);
            closed = (!is_open).then(|| field.path.clone());
            !field.is_item()
        })
        .collect();
    let mut wrong = BTreeSet::new();
    for field in &all {
        if verdict(field).is_none() {
            wrong.insert(format!("{} ({}): no verdict", field.owner, field.path));
        }
    }
    let known: BTreeSet<String> = all.iter().map(|field| field.owner.clone()).collect();
    for (field, row) in &rows {
        if !known.contains(field) {
            wrong.insert(format!(
                "{field}: no such field, or only below one that is refused or not the node's"
            ));
        }
        let named = row.tests();
        if named.is_empty() && row.verdict != Verdict::NotTheNodes {
            wrong.insert(format!("{field}: names no test"));
        }
        if matches!(row.verdict, Verdict::Refused | Verdict::Warned) && !row.text.contains("event") {
            wrong.insert(format!("{field}: names no event"));
        }
        for test in &named {
            if !tests.contains_key(*test) {
                wrong.insert(format!("{field}: there is no test {test}"));
            }
        }
        let name = field.split_once('.').unwrap().1;
        let mut files = named.iter().filter_map(|t| tests.get(*t)).flatten();
        let shown = |text: &String| has_word(text, name) || has_word(text, &rust_name(name));
        if row.verdict == Verdict::Honoured && !files.any(shown) {
            wrong.insert(format!("{field}: no test file contains its name"));
        }
    }
    assert!(wrong.is_empty(), "docs/pod-fields.md:\n{}", wrong.into_iter().collect::<Vec<_>>().join("\n"));
    assert!(all.len() > 600 && known.len() > 300, "{} paths, {} fields", all.len(), known.len());
}
