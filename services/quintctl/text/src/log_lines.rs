//! Decodes the CRI's log format.

use quintlet_crilog::{Flow, Format, Splitter};

/// Converts the lines of a CRI log to the container's output. A line in another format is passed through.
#[derive(Debug, Default)]
pub struct Lines {
    /// Print the time before each line.
    pub timestamps: bool,
    lines: Splitter,
}

impl Lines {
    /// Returns a decoder at the start of a line.
    #[must_use]
    pub fn new(timestamps: bool) -> Self {
        Self { timestamps, lines: Splitter::default() }
    }

    /// Decodes the lines that are complete after `bytes`. An incomplete line is kept for the next call.
    pub fn decode(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len());
        let timestamps = self.timestamps;
        self.lines.split(bytes, |line| {
            show(line, timestamps, &mut out);
            Flow::More
        });
        out
    }

    /// Decodes the incomplete line at the end of the log.
    pub fn end(&mut self) -> Vec<u8> {
        let rest = self.lines.end();
        let mut out = Vec::new();
        if !rest.is_empty() {
            show(&rest, self.timestamps, &mut out);
        }
        out
    }
}

fn show(line: &[u8], timestamps: bool, out: &mut Vec<u8>) {
    let Some(entry) = Format::Cri.parse(line) else {
        out.extend_from_slice(line);
        return;
    };
    if timestamps {
        out.extend_from_slice(entry.time.as_bytes());
        out.push(b' ');
    }
    out.extend_from_slice(&entry.text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_are_decoded_to_the_output_of_the_container() {
        let mut lines = Lines::default();
        let log = "2026-11-21T02:31:07.1Z stdout F one\n2026-11-21T02:31:07.2Z stderr P two, \n2026-11-21T02:31:07.3Z stderr F three\n2026-11-21T02:31:07.4Z stdout F \n";
        // Lines are split at every position.
        for size in 1..log.len() {
            let out: Vec<u8> = log.as_bytes().chunks(size).flat_map(|c| lines.decode(c)).collect();
            assert_eq!(String::from_utf8(out).unwrap(), "one\ntwo, three\n\n", "blocks of {size}");
        }
        assert_eq!(lines.decode(b"2026-11-21T02:31:07.4Z stdout F cut"), b"");
        assert_eq!(lines.end(), b"cut");
        assert_eq!(lines.decode(b"no form at all\n"), b"no form at all\n");
        lines.timestamps = true;
        let line = b"2026-11-21T02:31:07.4Z stdout F \xff\n";
        assert_eq!(lines.decode(line), b"2026-11-21T02:31:07.4Z \xff\n");
    }
}
