//! Parses files of environment variables (`fileKeyRef`) with lines `KEY='value'`.

use std::collections::BTreeMap;

/// Returns the variables of a file. The last value of a key applies.
///
/// Allowed are blanks before a key, comment lines, values over several lines, and a comment after a value. Not allowed are a
/// blank before `=` and a value without single quotes. A blank after `=` is an empty value.
///
/// # Errors
/// Returns the number of the malformed line, from 1.
pub fn parse(text: &str) -> Result<BTreeMap<String, String>, usize> {
    let mut found = BTreeMap::new();
    let mut rest = text;
    let mut line = 1_usize;
    while !rest.is_empty() {
        let current = rest.split('\n').next().unwrap_or_default();
        let trimmed = current.trim_start_matches([' ', '\t', '\r']);
        if trimmed.trim_end().is_empty() || trimmed.starts_with('#') {
            rest = rest.get(current.len().saturating_add(1)..).unwrap_or_default();
            line = line.saturating_add(1);
            continue;
        }
        let (name, after) = trimmed.split_once('=').ok_or(line)?;
        if name.is_empty() || name.contains([' ', '\t']) {
            return Err(line);
        }
        let value_at = current.len().saturating_sub(after.len());
        let from = &rest[value_at..];
        let value;
        let tail;
        if let Some(quoted) = from.strip_prefix('\'') {
            let end = quoted.find('\'').ok_or(line)?;
            value = &quoted[..end];
            tail = quoted.get(end.saturating_add(1)..).unwrap_or_default();
        } else if after.is_empty() || after.starts_with([' ', '\t', '\r']) {
            value = "";
            tail = from;
        } else {
            return Err(line);
        }
        line = line.saturating_add(value.matches('\n').count());
        let end_of_line = tail.split('\n').next().unwrap_or_default();
        let remark = end_of_line.trim();
        if !remark.is_empty() && !remark.starts_with('#') {
            return Err(line);
        }
        found.insert(name.to_owned(), value.to_owned());
        rest = tail.get(end_of_line.len().saturating_add(1)..).unwrap_or_default();
        line = line.saturating_add(1);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_file_is_parsed_by_its_rules() {
        let text = "# comment\n\n  A='1'\nB='two\nlines' # why\nC= \nD=''\nA='last'\n";
        for (key, want) in
            [("A", Some("last")), ("B", Some("two\nlines")), ("C", Some("")), ("D", Some("")), ("E", None)]
        {
            assert_eq!(parse(text).unwrap().get(key).map(String::as_str), want, "{key}");
        }
        for (bad, line) in
            [("A=1", 1), ("A ='1'", 1), ("\nA='1", 2), ("A", 1), ("='1'", 1), ("A='1' x", 1), ("A=\"1\"", 1)]
        {
            assert_eq!(parse(bad), Err(line), "{bad}");
        }
        assert_eq!(parse("A='1'"), Ok([("A".to_owned(), "1".to_owned())].into()));
    }
}
