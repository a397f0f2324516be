//! Parses files of environment variables (`fileKeyRef`) with lines `KEY='value'`
//! (`pkg/kubelet/util/env: ParseEnv`).

use std::collections::BTreeMap;

/// Length of a line from which on it is malformed: the buffer of a `bufio.Scanner`.
const MAX_LINE: usize = 64 * 1024;

/// The variables of a file up to its first malformed line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvFile {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
    malformed: Option<usize>,
}

impl EnvFile {
    /// Parses a file.
    ///
    /// Allowed are spaces and tabs before a key, comment lines, values over several lines, and a comment
    /// after a value. Not allowed are a blank before `=` and a value without single quotes. A blank after `=`
    /// is an empty value, whatever follows. A carriage return before a line feed belongs to the line feed.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let mut lines = Lines { rest: Some(bytes).filter(|b| !b.is_empty()), number: 0 };
        let mut values = BTreeMap::new();
        let malformed = loop {
            match next_variable(&mut lines) {
                Ok(Some((key, value))) => {
                    values.entry(key).or_insert(value);
                }
                Ok(None) => break None,
                Err(line) => break Some(line),
            }
        };
        Self { values, malformed }
    }

    /// Returns the first value of a key. Lines after that value are not judged.
    ///
    /// # Errors
    /// The key has no value before the first malformed line, whose number is returned, from 1.
    pub fn get(&self, key: &str) -> Result<Option<&[u8]>, usize> {
        match (self.values.get(key.as_bytes()), self.malformed) {
            (Some(value), _) => Ok(Some(value)),
            (None, Some(line)) => Err(line),
            (None, None) => Ok(None),
        }
    }
}

/// Lines without their end (`bufio.ScanLines`).
struct Lines<'a> {
    rest: Option<&'a [u8]>,
    /// Number of the line that was returned last.
    number: usize,
}

impl<'a> Lines<'a> {
    fn next(&mut self) -> Result<Option<&'a [u8]>, usize> {
        let Some(rest) = self.rest else { return Ok(None) };
        self.number = self.number.saturating_add(1);
        let (line, behind) =
            split_at(rest, b'\n').map_or((rest, None), |(line, behind)| (line, Some(behind)));
        if line.len() >= MAX_LINE {
            return Err(self.number);
        }
        self.rest = behind.filter(|b| !b.is_empty());
        Ok(Some(line.strip_suffix(b"\r").unwrap_or(line)))
    }
}

fn split_at(text: &[u8], byte: u8) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|b| *b == byte)?;
    Some((text.get(..at)?, text.get(at.saturating_add(1)..)?))
}

fn trim_left(text: &[u8]) -> &[u8] {
    let at = text.iter().position(|b| !matches!(b, b' ' | b'\t')).unwrap_or(text.len());
    text.get(at..).unwrap_or_default()
}

type Variable = (Vec<u8>, Vec<u8>);

fn next_variable(lines: &mut Lines<'_>) -> Result<Option<Variable>, usize> {
    while let Some(line) = lines.next()? {
        let line = trim_left(line);
        if line.is_empty() || line.starts_with(b"#") {
            continue;
        }
        let bad = lines.number;
        let (key, value) = split_at(line, b'=').ok_or(bad)?;
        if key.is_empty() || key.ends_with(b" ") || key.ends_with(b"\t") {
            return Err(bad);
        }
        if value.starts_with(b" ") || value.starts_with(b"\t") {
            return Ok(Some((key.to_vec(), Vec::new())));
        }
        let quoted = value.strip_prefix(b"'").ok_or(bad)?;
        return Ok(Some((key.to_vec(), quoted_value(quoted, lines)?)));
    }
    Ok(None)
}

fn quoted_value(first: &[u8], lines: &mut Lines<'_>) -> Result<Vec<u8>, usize> {
    let (mut value, mut line) = (Vec::new(), first);
    let began = lines.number;
    loop {
        if let Some((end, behind)) = split_at(line, b'\'') {
            value.extend_from_slice(end);
            let behind = trim_left(behind);
            let ends = behind.is_empty() || behind.starts_with(b"#");
            return if ends { Ok(value) } else { Err(lines.number) };
        }
        value.extend_from_slice(line);
        value.push(b'\n');
        line = lines.next()?.ok_or(began)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_its_first_value_and_lines_after_it_are_not_checked() {
        for (file, key, want) in [
            ("# first\n\n \tA='1'\n", "A", Ok(Some("1"))),
            ("A='1'\nA='2'\n", "A", Ok(Some("1"))),
            ("A='1'\nthis is no assignment\n", "A", Ok(Some("1"))),
            ("A='1'\nthis is no assignment\nB='2'\n", "B", Err(2)),
            ("A='1'\nB=x\n", "C", Err(2)),
            ("A='one\ntwo' # why\nB='3'", "A", Ok(Some("one\ntwo"))),
            ("A='one\ntwo' # why\nB='3'", "B", Ok(Some("3"))),
            ("A='one\r\ntwo'\r\n", "A", Ok(Some("one\ntwo"))),
            ("A= '1'\n", "A", Ok(Some(""))),
            ("A=\t1 2 3\nB='2'", "B", Ok(Some("2"))),
            ("A=''\n", "A", Ok(Some(""))),
            ("A B='1'\n", "A B", Ok(Some("1"))),
            ("A='x=#'\t#y", "A", Ok(Some("x=#"))),
            ("", "A", Ok(None)),
            ("\n\n", "A", Ok(None)),
            ("A ='1'", "A", Err(1)),
            ("A\t='1'", "A", Err(1)),
            ("\rA='1'", "A", Ok(None)),
            ("A=", "A", Err(1)),
            ("A=1", "A", Err(1)),
            ("A=\"1\"", "A", Err(1)),
            ("='1'", "A", Err(1)),
            ("A", "A", Err(1)),
            ("\nA='1\nB", "A", Err(2)),
            ("A='1' x", "A", Err(1)),
            ("A='1\n2'x", "A", Err(2)),
            ("A='1'\u{a0}", "A", Err(1)),
            ("\u{a0}A='1'", "A", Ok(None)),
        ] {
            let got = EnvFile::parse(file.as_bytes());
            let want = want.map(|value| value.map(str::as_bytes));
            assert_eq!(got.get(key), want, "{key} in {file:?}");
        }
    }

    #[test]
    fn a_value_is_bytes_and_a_line_is_shorter_than_64_kib() {
        let file = EnvFile::parse(b"A='\xff\xfe'\n");
        assert_eq!(file.get("A"), Ok(Some(&b"\xff\xfe"[..])));
        let line = |length: usize| format!("A='{}'", "x".repeat(length - 4));
        let length_of_a = |text: String| EnvFile::parse(text.as_bytes()).get("A").map(|v| v.map(<[u8]>::len));
        assert_eq!(length_of_a(line(MAX_LINE - 1)), Ok(Some(MAX_LINE - 5)));
        assert_eq!(length_of_a(format!("B='1'\n{}", line(MAX_LINE))), Err(2));
    }
}
