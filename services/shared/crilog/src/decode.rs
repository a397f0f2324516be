//! Decodes a log file into the output of the container, filtered by [`Options`].

use crate::{Format, Splitter, Stream, nine_digits};

/// Whether to continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Continue with the next bytes.
    More,
    /// Stop: the limit is reached.
    Full,
}

/// Selects the output of a [`Decoder`].
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Puts its time before each line.
    pub timestamps: bool,
    /// Drops lines before this time.
    pub since: Option<jiff::Timestamp>,
    /// Limits the output to this many bytes.
    pub limit_bytes: Option<u64>,
    /// Selects one stream.
    pub stream: Option<Stream>,
}

/// The first line of a file has an unknown format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported(pub String);

impl std::fmt::Display for Unsupported {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "failed to get parse function: unsupported log format: {:?}", self.0)
    }
}

impl std::error::Error for Unsupported {}

/// Decodes the lines of a log file.
#[derive(Debug, Default)]
pub struct Decoder {
    options: Options,
    lines: Splitter,
    format: Option<Format>,
    /// The previous entry was a partial line.
    in_line: bool,
    given: u64,
    skipped: u64,
}

impl Decoder {
    /// Creates a decoder that starts at the beginning of a file or of a line.
    #[must_use]
    pub fn new(options: Options) -> Self {
        Self { options, ..Self::default() }
    }

    /// Returns the number of lines that were skipped because their format is unknown.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Appends the output of the complete lines in `bytes` to `out`. An incomplete last line is kept for the
    /// next call.
    ///
    /// # Errors
    /// The first line of the file has an unknown format.
    pub fn decode(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Result<Flow, Unsupported> {
        let mut lines = std::mem::take(&mut self.lines);
        let mut bad = None;
        let flow = lines.split(bytes, |line| {
            self.line(line, out).unwrap_or_else(|error| {
                bad = Some(error);
                Flow::Full
            })
        });
        self.lines = lines;
        bad.map_or(Ok(flow), Err)
    }

    /// Appends the output of a last line that has no newline. Call it at the end of the file.
    ///
    /// # Errors
    /// The line is the first of the file and has an unknown format.
    pub fn end(&mut self, out: &mut Vec<u8>) -> Result<(), Unsupported> {
        let rest = self.lines.end();
        if !rest.is_empty() {
            self.line(&rest, out)?;
        }
        Ok(())
    }

    fn line(&mut self, line: &[u8], out: &mut Vec<u8>) -> Result<Flow, Unsupported> {
        let format = match self.format {
            Some(format) => format,
            None => {
                let format = Format::of(line);
                let shown = || String::from_utf8_lossy(&line[..line.len().min(256)]).into_owned();
                *self.format.insert(format.ok_or_else(|| Unsupported(shown()))?)
            }
        };
        let Some(entry) = format.parse(line) else {
            self.skipped = self.skipped.saturating_add(1);
            return Ok(Flow::More);
        };
        let begins = !std::mem::replace(&mut self.in_line, entry.is_part());
        if self.options.stream.is_some_and(|wanted| wanted != entry.stream) {
            return Ok(Flow::More);
        }
        let is_early = |since| entry.time.parse::<jiff::Timestamp>().is_ok_and(|time| time < since);
        if self.options.since.is_some_and(is_early) {
            return Ok(Flow::More);
        }
        if self.options.timestamps && begins {
            let mut prefix = nine_digits(&entry.time);
            prefix.push(' ');
            if self.give(prefix.as_bytes(), out) == Flow::Full {
                return Ok(Flow::Full);
            }
        }
        Ok(self.give(&entry.text, out))
    }

    fn give(&mut self, bytes: &[u8], out: &mut Vec<u8>) -> Flow {
        let left = self.options.limit_bytes.map_or(u64::MAX, |limit| limit.saturating_sub(self.given));
        let taken = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        out.extend_from_slice(&bytes[..taken]);
        self.given = self.given.saturating_add(taken as u64);
        if self.options.limit_bytes == Some(self.given) { Flow::Full } else { Flow::More }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LOG: &str = "2026-11-21T02:31:07.1Z stdout F one\n\
                       2026-11-21T02:31:07.2Z stderr P two, \n\
                       2026-11-21T02:31:07.3Z stderr F three\n\
                       2026-11-21T02:31:07.4Z stdout F \n";

    fn decoded(options: Options, log: &str) -> String {
        // However the reads fall.
        let mut all: Vec<String> = (1..=log.len())
            .map(|size| {
                let mut decoder = Decoder::new(options.clone());
                let mut out = Vec::new();
                let full =
                    log.as_bytes().chunks(size).any(|c| decoder.decode(c, &mut out).unwrap() == Flow::Full);
                if !full {
                    decoder.end(&mut out).unwrap();
                }
                String::from_utf8(out).unwrap()
            })
            .collect();
        all.dedup();
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    #[test]
    fn log_lines_are_decoded_to_the_containers_output() {
        assert_eq!(decoded(Options::default(), LOG), "one\ntwo, three\n\n");
        let cut = LOG.trim_end_matches(['\n', ' ']);
        assert_eq!(decoded(Options::default(), &cut[..LOG.find("three").unwrap() + 3]), "one\ntwo, thr");
    }

    #[test]
    fn a_timestamp_precedes_each_line_and_not_its_parts() {
        let want = "2026-11-21T02:31:07.100000000Z one\n2026-11-21T02:31:07.200000000Z two, three\n\
                    2026-11-21T02:31:07.400000000Z \n";
        assert_eq!(decoded(Options { timestamps: true, ..Options::default() }, LOG), want);
    }

    #[test]
    fn output_is_truncated_at_exactly_the_byte_limit_including_timestamps() {
        for limit in 1..40 {
            let options = Options { timestamps: true, limit_bytes: Some(limit), ..Options::default() };
            let all = decoded(Options { timestamps: true, ..Options::default() }, LOG);
            assert_eq!(decoded(options, LOG), all[..usize::try_from(limit).unwrap()]);
        }
    }

    #[test]
    fn lines_before_the_start_time_or_of_the_other_stream_are_skipped() {
        let since = Some("2026-11-21T02:31:07.2Z".parse().unwrap());
        assert_eq!(decoded(Options { since, ..Options::default() }, LOG), "two, three\n\n");
        let stream = Some(Stream::Stdout);
        assert_eq!(decoded(Options { stream, ..Options::default() }, LOG), "one\n\n");
    }

    #[test]
    fn a_malformed_first_line_is_an_error_and_a_later_one_is_skipped() {
        let mut decoder = Decoder::default();
        let error = decoder.decode(b"hello\n", &mut Vec::new()).unwrap_err();
        assert_eq!(error.to_string(), "failed to get parse function: unsupported log format: \"hello\\n\"");
        let log = LOG.replacen("2026-11-21T02:31:07.2Z stderr", "junk stderr", 1);
        assert_eq!(decoded(Options::default(), &log), "one\nthree\n\n");
    }

    proptest! {
        #[test]
        fn no_file_causes_a_panic_or_more_output_than_the_limit(
            lines in proptest::collection::vec("(2026-11-21T02:31:07(\\.[0-9]{1,9})?Z (stdout|stderr) [FP](:[a-z])? )?[^\n]{0,40}\n", 0..20),
            limit in 1u64..200,
            timestamps: bool,
        ) {
            let options = Options { timestamps, limit_bytes: Some(limit), ..Options::default() };
            let mut decoder = Decoder::new(options);
            let mut out = Vec::new();
            for line in &lines {
                if decoder.decode(line.as_bytes(), &mut out) != Ok(Flow::More) {
                    break;
                }
            }
            prop_assert!(out.len() as u64 <= limit);
        }

        /// Bytes that begin as a log and continue arbitrarily decode to the same output however they are
        /// split.
        #[test]
        fn any_bytes_decode_to_the_same_output_however_they_are_split(
            head in "((2026-11-21T02:31:07Z|2026-02-30T99:00:00Z) (stdout|stderr|stdin) [FPX](:[a-z])? [a-z]{0,9}\n){0,3}",
            tail: Vec<u8>,
            cut in 1usize..40,
            timestamps: bool,
        ) {
            let bytes = [head.as_bytes(), &tail].concat();
            let read = |cut: usize| {
                let mut decoder = Decoder::new(Options { timestamps, ..Options::default() });
                let mut out = Vec::new();
                let blocks = bytes.chunks(cut.max(1));
                let bad = blocks.map(|b| decoder.decode(b, &mut out)).find_map(Result::err);
                let bad = bad.or_else(|| decoder.end(&mut out).err());
                (out, bad.map(|b| b.to_string()), decoder.skipped())
            };
            prop_assert_eq!(read(cut), read(bytes.len()));
        }

        /// Containers' output is decoded unchanged, except for lines that the options exclude.
        #[test]
        fn the_decoded_output_equals_what_containers_wrote(
            pieces in proptest::collection::vec((0u32..50, any::<bool>(), any::<bool>(), "[^\n]{0,30}"), 0..20),
            since in proptest::option::of(0u32..50),
            stream in proptest::option::of(any::<bool>()),
        ) {
            let names = |out: bool| if out { "stdout" } else { "stderr" };
            let (mut log, mut want) = (String::new(), String::new());
            for (second, out, part, text) in &pieces {
                let tag = if *part { "P" } else { "F" };
                log.push_str(&format!("2026-11-21T02:31:{second:02}Z {} {tag} {text}\n", names(*out)));
                if since.is_none_or(|s| *second >= s) && stream.is_none_or(|s| s == *out) {
                    want.push_str(text);
                    want.push_str(if *part { "" } else { "\n" });
                }
            }
            let options = Options {
                since: since.map(|s| format!("2026-11-21T02:31:{s:02}Z").parse().unwrap()),
                stream: stream.map(|out| if out { Stream::Stdout } else { Stream::Stderr }),
                ..Options::default()
            };
            let (mut decoder, mut out) = (Decoder::new(options), Vec::new());
            prop_assert_eq!(decoder.decode(log.as_bytes(), &mut out), Ok(Flow::More));
            prop_assert_eq!(String::from_utf8(out).unwrap(), want);
            prop_assert_eq!(decoder.skipped(), 0);
        }
    }
}
