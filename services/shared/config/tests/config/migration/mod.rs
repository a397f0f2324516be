//! Generates `docs/migration.md` from the table of fields. A test compares the file with the result.

use std::fmt::Write as _;

use quintlet_config::table::{Document, FLAGS, FieldSupport, FlagSupport, Row, Service};

/// Returns the content of the page.
pub(crate) fn page() -> String {
    let mut out = String::from(
        "# Migration from the kubelet: flags and fields\n\n\
         This page is generated from the table in `services/shared/config/src/table`. All services read the same file\n\
         (`--config FILE`, drop-ins with `--config-dir DIR`). `SERVICE --print-config` prints each value with its origin.\n\n\
         - **honoured**: the field has its effect; [a test shows it](#tests-of-honoured-fields).\n\
         - **ignored**: a value other than the default causes a warning.\n\
         - **refused**: a value other than the default is an error; no service starts.\n\n\
         Durations have Go's format (`1m30s`, `1.5h`). Zero and empty values stand for the default, as in the kubelet, except in\n\
         fields marked with °.\n",
    );
    fields(&mut out);
    own(&mut out);
    flags(&mut out);
    tests(&mut out);
    out
}

/// Lists the tests of fixtures/effects.txt. Tests that a value arrives where it is used are left out.
fn tests(out: &mut String) {
    out.push_str(
        "\n## Tests of honoured fields\n\nEach of these tests fails without the effect of the field.\n\n| field | tests |\n|---|---|\n",
    );
    let mut rows: Vec<_> = crate::table::shown_by().into_iter().collect();
    rows.sort_by_key(|((document, field), _)| (*document, field.to_lowercase()));
    for ((_, field), names) in rows {
        let names: Vec<String> = names
            .into_iter()
            .filter(|name| crate::table::shows_effect(name))
            .map(|name| format!("`{name}`"))
            .collect();
        let _ = writeln!(out, "| `{field}` | {} |", names.join(", "));
    }
}

fn fields(out: &mut String) {
    out.push_str(
        "\n## Fields of KubeletConfiguration\n\n\
         | kubelet flag | field | default | Quintlet |\n|---|---|---|---|\n",
    );
    let mut rows: Vec<&Row> = Document::Kubelet.rows().iter().collect();
    rows.sort_by_key(|r| r.field.to_lowercase());
    for row in rows {
        let flag = row.kubelet_flag.map_or_else(|| "–".to_owned(), |f| format!("`--{f}`"));
        let mark = if row.zero_counts { " °" } else { "" };
        let _ = writeln!(out, "| {flag} | `{}`{mark} | {} | {} |", row.field, default(row), support(row));
    }
}

fn own(out: &mut String) {
    out.push_str(
        "\n## Fields of QuintletConfiguration\n\n\
         `apiVersion: quintlet.dev/v1alpha1`, a second document in the same file. It has the settings that are flags only in the\n\
         kubelet, and the settings of Quintlet itself.\n\n\
         | kubelet flag | field | default | Quintlet |\n|---|---|---|---|\n",
    );
    for row in Document::Quintlet.rows() {
        let flag = row.kubelet_flag.map_or_else(|| "–".to_owned(), |f| format!("`--{f}`"));
        let _ = writeln!(out, "| {flag} | `{}` | {} | {} |", row.field, default(row), support(row));
    }
}

fn flags(out: &mut String) {
    out.push_str("\n## Kubelet flags without a field\n\n| kubelet flag | Quintlet |\n|---|---|\n");
    for row in FLAGS {
        let support = match row.support {
            FlagSupport::Same => "the same, on every service".to_owned(),
            FlagSupport::Instead(what) => format!("instead: {what}"),
            FlagSupport::Refused(why) => format!("refused: {why}"),
            FlagSupport::Ignored(why) => format!("ignored: {why}"),
        };
        let _ = writeln!(out, "| `--{}` | {support} |", row.name);
    }
}

fn default(row: &Row) -> String {
    if row.default.is_empty() { "–".to_owned() } else { format!("`{}`", row.default) }
}

fn support(row: &Row) -> String {
    match row.support {
        FieldSupport::Honoured { effect, services } => {
            let services: Vec<&str> = services.iter().map(|s| s.name()).collect();
            let who = if services.len() == Service::ALL.len() {
                "all services".to_owned()
            } else {
                services.join(", ")
            };
            let flag = row.flag().filter(|f| Some(*f) != row.kubelet_flag);
            let flag = flag.map(|f| format!(", `--{f}`")).unwrap_or_default();
            format!("honoured: {effect} ({who}{flag})")
        }
        FieldSupport::Refused { why } => format!("refused: {why}"),
        FieldSupport::Ignored { why, .. } => format!("ignored: {why}"),
    }
}
