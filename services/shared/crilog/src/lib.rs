//! Reads container logs on disk: splits lines, decodes entries, finds the last lines, and follows a file
//! through rotations.
//!
//! A CRI runtime writes `<time> <stdout|stderr> <tags> <text>\n`, where the tag `P` says that the text
//! continues in the next line. Docker's JSON lines are supported, too. Everything works on bytes, since the
//! output of a container need not be text.
//!
//! ```
//! use quintlet_crilog::{Decoder, Options, Stream};
//!
//! let log = b"2026-01-02T03:04:05.6Z stdout P hello, \n\
//!     2026-01-02T03:04:05.7Z stderr F an error\n\
//!     2026-01-02T03:04:05.8Z stdout F world\n";
//! let mut decoder = Decoder::new(Options { stream: Some(Stream::Stdout), ..Options::default() });
//! let mut text = Vec::new();
//! decoder.decode(log, &mut text)?;
//! decoder.end(&mut text)?;
//! assert_eq!(text, b"hello, world\n");
//! # Ok::<(), quintlet_crilog::Unsupported>(())
//! ```

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod decode;
pub mod follow;
mod tail;

use std::borrow::Cow;

pub use decode::{Decoder, Flow, Options, Unsupported};
pub use tail::tail_start;

/// Longest line, in bytes. A longer line is dropped.
pub const MAX_LINE: usize = 8 << 20;

/// The output stream of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl Stream {
    fn parse(text: &[u8]) -> Option<Self> {
        match text {
            b"stdout" => Some(Self::Stdout),
            b"stderr" => Some(Self::Stderr),
            _ => None,
        }
    }
}

/// One line of a log file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine<'a> {
    /// Time in RFC 3339, as in the file.
    pub time: Cow<'a, str>,
    /// The stream of the text.
    pub stream: Stream,
    /// Output of the container. It ends with a newline unless the line continues.
    pub text: Cow<'a, [u8]>,
}

impl LogLine<'_> {
    /// Reports whether the line continues in the next entry.
    #[must_use]
    pub fn is_part(&self) -> bool {
        !self.text.ends_with(b"\n")
    }
}

/// The format of a log file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The format of CRI runtimes.
    Cri,
    /// Docker's `json-file`.
    Docker,
}

impl Format {
    /// Detects the format from the first line of a file.
    #[must_use]
    pub fn of(line: &[u8]) -> Option<Self> {
        [Self::Cri, Self::Docker].into_iter().find(|form| form.parse(line).is_some())
    }

    /// Parses a line, with or without its newline. Returns none if it is invalid.
    #[must_use]
    pub fn parse(self, line: &[u8]) -> Option<LogLine<'_>> {
        match self {
            Self::Cri => cri(line),
            Self::Docker => docker(line),
        }
    }
}

/// Parses `<time> <stdout|stderr> <F|P>[:…] <text>\n`. With the tag P, the newline is not part of the text.
fn cri(line: &[u8]) -> Option<LogLine<'_>> {
    let mut fields = line.splitn(4, |b| *b == b' ');
    let time = std::str::from_utf8(fields.next()?).ok().filter(|t| is_time(t))?;
    let stream = Stream::parse(fields.next()?)?;
    let tags = fields.next().filter(|tags| !tags.is_empty())?;
    let text = fields.next()?;
    let is_part = tags.split(|b| *b == b':').next() == Some(b"P");
    let text = if is_part { text.strip_suffix(b"\n").unwrap_or(text) } else { text };
    Some(LogLine { time: Cow::Borrowed(time), stream, text: Cow::Borrowed(text) })
}

#[derive(serde::Deserialize)]
struct Docker {
    #[serde(default)]
    log: String,
    #[serde(default)]
    stream: String,
    time: String,
}

fn docker(line: &[u8]) -> Option<LogLine<'_>> {
    let Docker { log, stream, time } = serde_json::from_slice(line).ok()?;
    let stream = Stream::parse(stream.as_bytes())?;
    is_time(&time).then(|| LogLine { time: Cow::Owned(time), stream, text: Cow::Owned(log.into_bytes()) })
}

fn is_time(text: &str) -> bool {
    text.as_bytes().get(10) == Some(&b'T') && text.parse::<jiff::Timestamp>().is_ok()
}

/// Formats a time with nine fractional digits, as `kubectl logs --timestamps` does.
#[must_use]
pub fn nine_digits(time: &str) -> String {
    let (seconds, rest) = time.split_at_checked(19).unwrap_or((time, ""));
    let digits = rest.strip_prefix('.').unwrap_or("");
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    let zone = if rest.starts_with('.') { &digits[end..] } else { rest };
    let zone = if zone == "+00:00" || zone == "-00:00" { "Z" } else { zone };
    format!("{seconds}.{:0<9.9}{zone}", &digits[..end])
}

/// Splits blocks of any size into lines.
#[derive(Debug, Default)]
pub struct Splitter {
    /// The beginning of an incomplete line.
    rest: Vec<u8>,
    /// The rest of a line is dropped because the line is too long.
    skipping: bool,
}

impl Splitter {
    /// Passes each complete line, with its newline, to `take`, until that returns [`Flow::Full`].
    pub fn split(&mut self, mut bytes: &[u8], mut take: impl FnMut(&[u8]) -> Flow) -> Flow {
        while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
            let (line, after) = bytes.split_at(end.saturating_add(1));
            bytes = after;
            let flow = if std::mem::take(&mut self.skipping) {
                Flow::More
            } else if self.rest.is_empty() {
                take(line)
            } else {
                self.rest.extend_from_slice(line);
                let flow = take(&self.rest);
                self.rest.clear();
                flow
            };
            if flow == Flow::Full {
                return flow;
            }
        }
        if self.rest.len().saturating_add(bytes.len()) > MAX_LINE {
            self.rest = Vec::new();
            self.skipping = true;
        } else if !self.skipping {
            self.rest.extend_from_slice(bytes);
        }
        Flow::More
    }

    /// Returns the incomplete last line.
    pub fn end(&mut self) -> Vec<u8> {
        self.skipping = false;
        std::mem::take(&mut self.rest)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_last_lines_are_found_from_the_end() {
        let long = "x".repeat(100_000);
        let text = format!("first\n{long}\nthird\nlast\n");
        for (lines, want) in
            [(0, ""), (1, "last\n"), (2, "third\nlast\n"), (4, text.as_str()), (9, text.as_str())]
        {
            let at = tail_start(&mut Cursor::new(text.as_bytes()), lines).unwrap();
            assert_eq!(&text[usize::try_from(at).unwrap()..], want, "{lines} lines");
        }
        for (text, lines, want) in
            [("a\nunfinished", 1, 2), ("a\nunfinished", 0, 2), ("unfinished", 0, 0), ("", 3, 0), ("", 0, 0)]
        {
            let at = tail_start(&mut Cursor::new(text.as_bytes()), lines).unwrap();
            assert_eq!(at, want, "{lines} lines of {text:?}");
        }
    }

    #[test]
    fn entries_of_both_formats_are_parsed_and_others_rejected() {
        let cri = b"2026-11-21T02:31:07.1Z stderr P:x one \n";
        let entry = Format::Cri.parse(cri).unwrap();
        assert_eq!(
            (entry.stream, entry.text.as_ref(), entry.is_part()),
            (Stream::Stderr, &b"one "[..], true)
        );
        let docker = br#"{"log":"two\n","stream":"stdout","time":"2026-11-21T02:31:07.1+01:00"}"#;
        assert_eq!(Format::of(docker), Some(Format::Docker));
        assert_eq!(Format::Docker.parse(docker).unwrap().text.as_ref(), b"two\n");
        for bad in [
            "",
            "\n",
            "2026-11-21T02:31:07.1Z stdin F x\n",
            "yesterday stdout F x\n",
            "{}",
            "2026-11-21T02:31:07Z stdout  x",
        ] {
            assert_eq!(Format::of(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn timestamps_get_nine_digits_and_keep_their_zone() {
        for (time, want) in [
            ("2026-11-21T02:31:07Z", "2026-11-21T02:31:07.000000000Z"),
            ("2026-11-21T02:31:07.5Z", "2026-11-21T02:31:07.500000000Z"),
            ("2026-11-21T02:31:07.123456789+02:00", "2026-11-21T02:31:07.123456789+02:00"),
            ("2026-11-21T02:31:07.12+00:00", "2026-11-21T02:31:07.120000000Z"),
        ] {
            assert_eq!(nine_digits(time), want);
        }
    }

    #[test]
    fn an_endless_line_is_dropped_and_the_next_one_is_read() {
        let mut splitter = Splitter::default();
        let mut lines = Vec::new();
        for _ in 0..=(MAX_LINE >> 20) {
            splitter.split(&vec![b'x'; 1 << 20], |_| unreachable!("no newline came"));
            assert!(splitter.rest.len() <= MAX_LINE);
        }
        splitter.split(b"xxx\nnext\n", |line| {
            lines.push(line.to_vec());
            Flow::More
        });
        assert_eq!(lines, [b"next\n"]);
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic_and_no_line_is_lost(bytes: Vec<u8>, cut in 1usize..64) {
            let mut splitter = Splitter::default();
            let mut all = Vec::new();
            for block in bytes.chunks(cut) {
                splitter.split(block, |line| {
                    assert_eq!(line.iter().filter(|b| **b == b'\n').count(), 1);
                    let _ = Format::of(line);
                    all.extend_from_slice(line);
                    Flow::More
                });
            }
            all.extend(splitter.end());
            prop_assert_eq!(all, bytes);
        }

        #[test]
        fn a_written_entry_is_parsed_to_the_same_entry(text in "[^\n]{0,80}", part: bool, stream in 0..2, nanos in 0i128..4_000_000_000_000_000_000) {
            let time = jiff::Timestamp::from_nanosecond(nanos).unwrap();
            let name = ["stdout", "stderr"][usize::try_from(stream).unwrap()];
            let line = format!("{time} {name} {} {text}\n", if part { "P" } else { "F" });
            let entry = Format::Cri.parse(line.as_bytes()).unwrap();
            prop_assert_eq!(entry.is_part(), part);
            let want = if part { text } else { format!("{text}\n") };
            prop_assert_eq!(entry.text.as_ref(), want.as_bytes());
            let shown = nine_digits(&entry.time);
            prop_assert_eq!(shown.parse::<jiff::Timestamp>().unwrap(), time);
            prop_assert_eq!(shown.len(), "2026-11-21T02:31:07.123456789Z".len());
        }

        #[test]
        fn the_tail_has_the_requested_number_of_lines(text in "[ab\n]{0,400}", lines in 0u64..20) {
            let at = usize::try_from(tail_start(&mut Cursor::new(text.as_bytes()), lines).unwrap()).unwrap();
            let all: Vec<&str> = text.split_inclusive('\n').collect();
            let skip = all.len().saturating_sub(usize::try_from(lines).unwrap());
            // A limit of zero lines still includes a line that is being written.
            let want = if lines == 0 { text.rsplit('\n').next().unwrap().to_owned() } else { all[skip..].concat() };
            prop_assert_eq!(&text[at..], want);
        }
    }
}
