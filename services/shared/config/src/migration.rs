//! Generates `docs/migration.md` from the table of fields. A test compares the file with the result.

use std::fmt::Write as _;

use crate::table::{Document, FLAGS, FlagVerdict, Row, Service, Verdict};

/// Returns the content of the page.
#[must_use]
pub fn page() -> String {
    let mut out = String::from(
        "# From the kubelet to Quintlet: flags and fields\n\n\
         Generated from the table in `services/shared/config/src/table`; a test compares. Every service reads the same file\n\
         (`--config FILE`, drop-ins with `--config-dir DIR`); `SERVICE --print-config` shows each value with its origin.\n\n\
         - **honoured**: has its effect, shown by a test.\n\
         - **not yet**: read and checked; listed in one warning at start if it asks for something that is missing.\n\
         - **ignored**: a warning if it is not the default.\n\
         - **refused**: an error; no service starts.\n\n\
         Duration fields take Go's form (`1m30s`, `1.5h`). Zero or an empty value means the default, as with the kubelet, except in\n\
         fields marked °.\n",
    );
    fields(&mut out);
    own(&mut out);
    flags(&mut out);
    out
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
        let _ = writeln!(out, "| {flag} | `{}`{mark} | {} | {} |", row.field, default(row), verdict(row));
    }
}

fn own(out: &mut String) {
    out.push_str(
        "\n## Fields of QuintletConfiguration\n\n\
         `apiVersion: quintlet.dev/v1alpha1`, a second document in the same file. It has what the kubelet has as flags only,\n\
         and what only Quintlet has.\n\n\
         | kubelet flag | field | default | Quintlet |\n|---|---|---|---|\n",
    );
    for row in Document::Quintlet.rows() {
        let flag = row.kubelet_flag.map_or_else(|| "–".to_owned(), |f| format!("`--{f}`"));
        let _ = writeln!(out, "| {flag} | `{}` | {} | {} |", row.field, default(row), verdict(row));
    }
}

fn flags(out: &mut String) {
    out.push_str("\n## Other flags of the kubelet\n\n| kubelet flag | Quintlet |\n|---|---|\n");
    for row in FLAGS {
        let verdict = match row.verdict {
            FlagVerdict::Same => "the same, on every service".to_owned(),
            FlagVerdict::Instead(what) => format!("instead: {what}"),
            FlagVerdict::NotYet(until) => format!("not yet: {until}"),
            FlagVerdict::Refused(why) => format!("refused: {why}"),
        };
        let _ = writeln!(out, "| `--{}` | {verdict} |", row.name);
    }
}

fn default(row: &Row) -> String {
    if row.default.is_empty() { "–".to_owned() } else { format!("`{}`", row.default) }
}

fn verdict(row: &Row) -> String {
    match row.verdict {
        Verdict::Honoured { effect, by, .. } => {
            let services: Vec<&str> = by.iter().map(|s| s.name()).collect();
            let who =
                if by.len() == Service::ALL.len() { "all services".to_owned() } else { services.join(", ") };
            let flag = row.flag().filter(|f| Some(*f) != row.kubelet_flag);
            let flag = flag.map(|f| format!(", `--{f}`")).unwrap_or_default();
            format!("honoured: {effect} ({who}{flag})")
        }
        Verdict::NotYet { now: Some(now), .. } => format!("not yet: as with `{now}`"),
        Verdict::NotYet { now: None, .. } => "not yet".to_owned(),
        Verdict::Refused { why } => format!("refused: {why}"),
        Verdict::Ignored { why, .. } => format!("ignored: {why}"),
    }
}
