//! Prints a configuration as YAML, each value with its origin. The output parses to the same configuration.

use std::fmt::Write as _;

use crate::config::Config;
use crate::node::{Data, LocatedValue, Origin};
use crate::table::{Document, Row};

/// Placeholder for a secret value.
pub const MASKED: &str = "<masked>";

/// Returns both documents as YAML, each with its fields in alphabetical order.
#[must_use]
pub fn print(config: &Config) -> String {
    let mut out = String::new();
    for document in Document::ALL {
        if !out.is_empty() {
            out.push_str("---\n");
        }
        let _ = writeln!(out, "apiVersion: {}\nkind: {}", document.api_version(), document.kind());
        let mut fields: Vec<(&Row, &LocatedValue)> = document
            .rows()
            .iter()
            .filter_map(|row| Some((row, config.value(document, row.field)?)))
            .collect();
        fields.sort_by_key(|(row, _)| row.field);
        let mut open: Vec<&str> = Vec::new();
        for (row, value) in fields {
            let keys: Vec<&str> = row.field.split('.').collect();
            let (name, parents) = keys.split_last().unwrap_or((&"", &[]));
            let same = open.iter().zip(parents).take_while(|(a, b)| a == b).count();
            open.truncate(same);
            for parent in &parents[same..] {
                let _ = writeln!(out, "{}{parent}:", indent(open.len()));
                open.push(parent);
            }
            entry(&mut out, open.len(), name, value, &value.origin, row.secret);
        }
    }
    out
}

fn indent(level: usize) -> String {
    "  ".repeat(level)
}

/// Prints a key with its value. `origin` is printed for a scalar or empty value.
fn entry(out: &mut String, level: usize, key: &str, value: &LocatedValue, origin: &Origin, secret: bool) {
    let _ = write!(out, "{}{}:", indent(level), word(key));
    below(out, level, value, origin, secret);
}

fn below(out: &mut String, level: usize, value: &LocatedValue, origin: &Origin, secret: bool) {
    match &value.data {
        Data::Map(entries) if !entries.is_empty() => {
            out.push('\n');
            for e in entries {
                entry(out, level.saturating_add(1), &e.key, &e.value, &e.value.origin, secret);
            }
        }
        Data::List(elements) if !elements.is_empty() => {
            out.push('\n');
            for element in elements {
                let _ = write!(out, "{}-", indent(level));
                match &element.data {
                    Data::Map(entries) if !entries.is_empty() => object(out, level, entries, secret),
                    _ => below(out, level.saturating_add(1), element, &element.origin, secret),
                }
            }
        }
        data => {
            let text = if secret { word(MASKED) } else { scalar(data) };
            let _ = writeln!(out, " {text}   # {origin}");
        }
    }
}

/// Prints a map that is an element of a list. Its first key follows the dash.
fn object(out: &mut String, level: usize, entries: &[crate::node::MapEntry], secret: bool) {
    for (at, e) in entries.iter().enumerate() {
        let lead = if at == 0 { " ".to_owned() } else { indent(level.saturating_add(1)) };
        let _ = write!(out, "{lead}{}:", word(&e.key));
        below(out, level.saturating_add(1), &e.value, &e.value.origin, secret);
    }
}

fn scalar(data: &Data) -> String {
    match data {
        Data::Text(text) => word(text),
        Data::List(_) => "[]".to_owned(),
        Data::Map(_) => "{}".to_owned(),
        // A whole number of type float keeps its fraction, so that its type is preserved.
        Data::Float(number) => format!("{number:?}"),
        Data::Null | Data::Bool(_) | Data::Int(_) => data.to_string(),
    }
}

/// Formats text as a scalar, in quotes unless the plain text parses to the same text.
fn word(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-' | '%');
    let first = text.chars().next();
    let bare = first.is_some_and(|c| c.is_ascii_alphanumeric() || c == '/')
        && text.chars().all(plain)
        && matches!(crate::yaml::plain(text), Data::Text(_));
    if bare { text.to_owned() } else { quoted(text) }
}

/// Formats text in double quotes with YAML's escape sequences.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() || matches!(c, '\u{feff}' | '\u{2028}' | '\u{2029}') => {
                let _ = write!(out, "\\U{:08X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
