//! Compares the table with the kubelet's fields, with the tests that it names, and with the generated page.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use quintlet_config::diagnostics::Diagnostic;
use quintlet_config::table::{Document, FLAGS, FieldSupport, GATES, KUBELET, Row, SETTABLE};

fn lines(text: &'static str) -> BTreeSet<&'static str> {
    text.lines().filter(|l| !l.is_empty() && !l.starts_with('#')).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

fn all_rows() -> impl Iterator<Item = &'static Row> {
    Document::ALL.into_iter().flat_map(Document::rows)
}

#[test]
fn every_field_of_the_kubelet_has_one_row() {
    let wanted = lines(include_str!("../fixtures/kubelet-fields.txt"));
    let rows: Vec<&str> = KUBELET.iter().map(|r| r.field).collect();
    let unique: BTreeSet<&str> = rows.iter().copied().collect();
    assert_eq!(rows.len(), unique.len(), "a field has two rows");
    let missing: Vec<_> = wanted.difference(&unique).collect();
    let invented: Vec<_> = unique.difference(&wanted).collect();
    assert!(missing.is_empty() && invented.is_empty(), "without a row: {missing:?}; no field: {invented:?}");
}

#[test]
fn every_kubelet_flag_without_a_field_has_a_verdict() {
    let rows: BTreeSet<&str> =
        FLAGS.iter().map(|f| f.name).chain(all_rows().filter_map(|r| r.kubelet_flag)).collect();
    let missing: Vec<_> =
        lines(include_str!("../fixtures/kubelet-flags.txt")).difference(&rows).copied().collect();
    assert!(missing.is_empty(), "without a verdict: {missing:?}");
    let names: BTreeSet<&str> = FLAGS.iter().map(|f| f.name).collect();
    assert_eq!(names.len(), FLAGS.len(), "a flag has two rows");
}

#[test]
fn every_row_has_a_complete_verdict() {
    for row in all_rows() {
        let whole = match row.support {
            FieldSupport::Honoured { effect, services } => {
                !effect.is_empty() && !services.is_empty() && row.flag().is_some()
                    || row.field == "logging.verbosity"
            }
            FieldSupport::Refused { why } | FieldSupport::Ignored { why, .. } => !why.is_empty(),
        };
        assert!(whole, "{}", row.field);
    }
}

#[test]
fn defaults_are_valid_values_of_their_fields() {
    for row in all_rows() {
        let Some(default) = row.default_node() else { continue };
        let mut diagnostics: Vec<Diagnostic> = Vec::new();
        row.kind.check(&default, row.field, &mut diagnostics);
        assert!(diagnostics.is_empty(), "{diagnostics:?}");
        assert!(row.kind.canonical(default.clone()).equals(&default), "{}", row.field);
    }
}

#[test]
fn feature_gates_are_sorted_and_unique() {
    let names: Vec<&str> = GATES.iter().map(|g| g.name).collect();
    assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
    let in_both: Vec<&str> =
        SETTABLE.iter().map(|gate| gate.name).filter(|name| names.contains(name)).collect();
    assert_eq!(in_both, Vec::<&str>::new(), "a gate is either fixed or can be set");
}

/// Returns the names of the tests that show the effect of each honoured field, by document and field.
pub(crate) fn shown_by() -> BTreeMap<(&'static str, &'static str), Vec<&'static str>> {
    lines(include_str!("../fixtures/effects.txt"))
        .into_iter()
        .map(|line| {
            let mut words = line.split(' ');
            let mut next = || words.next().expect("a line has a document and a field");
            ((next(), next()), words.collect())
        })
        .collect()
}

/// Returns whether a test shows the effect of a value, and not only that the value arrives where it is used.
pub(crate) fn shows_effect(test: &str) -> bool {
    !["_arrive", "_arrives", "_become_arguments"].iter().any(|end| test.ends_with(end))
}

/// Fails if a test that fixtures/effects.txt names is renamed or removed.
#[test]
fn each_honoured_field_has_tests_that_show_its_effect() {
    let mut source = String::new();
    let mut dirs = vec![root().join("services"), root().join("tests")];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(&dir).expect("a directory of sources").flatten() {
            let path = entry.path();
            let name = entry.file_name();
            if path.is_dir() && name != "target" {
                dirs.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                source.push_str(&std::fs::read_to_string(&path).expect("a source"));
            }
        }
    }
    let mut shown_by = shown_by();
    for (document, rows) in [("kubelet", Document::Kubelet.rows()), ("quintlet", Document::Quintlet.rows())] {
        for row in rows.iter().filter(|row| matches!(row.support, FieldSupport::Honoured { .. })) {
            let tests = shown_by.remove(&(document, row.field)).unwrap_or_default();
            assert!(tests.iter().any(|test| shows_effect(test)), "{}: no test shows its effect", row.field);
            for test in tests {
                let defined = source.contains(&format!("fn {test}("));
                assert!(defined, "{}: no test {test}", row.field);
            }
        }
    }
    assert!(shown_by.is_empty(), "not honoured: {:?}", shown_by.keys());
}

#[test]
fn the_migration_page_is_made_from_the_table() {
    let path = root().join("docs/migration.md");
    let page = crate::migration::page();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &page).expect("written");
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        there == page,
        "docs/migration.md differs: UPDATE=1 cargo nextest run -p quintlet-config migration"
    );
    for row in KUBELET {
        assert!(page.contains(&format!("`{}`", row.field)), "{}", row.field);
        if let Some(flag) = row.kubelet_flag {
            assert!(page.contains(&format!("| `--{flag}` |")), "{flag}");
        }
    }
}
