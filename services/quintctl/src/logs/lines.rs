//! The CRI's form of a log.

/// Turns the lines of a CRI log into what the container wrote.
#[derive(Debug, Default)]
pub struct Lines {
    /// With the time before each line.
    pub timestamps: bool,
    /// The beginning of a line whose end has not come.
    rest: Vec<u8>,
}

impl Lines {
    /// Lines with their times, or without.
    #[must_use]
    pub fn new(timestamps: bool) -> Self {
        Self { timestamps, rest: Vec::new() }
    }

    /// What complete lines in `bytes` (and those begun before) say.
    pub fn decode(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.rest.extend_from_slice(bytes);
        let Some(end) = self.rest.iter().rposition(|b| *b == b'\n') else { return Vec::new() };
        let rest = self.rest.split_off(end + 1);
        let complete = std::mem::replace(&mut self.rest, rest);
        let mut out = Vec::with_capacity(complete.len());
        for line in complete.split_inclusive(|b| *b == b'\n') {
            self.line(line, &mut out);
        }
        out
    }

    /// What is left when nothing more comes.
    pub fn end(&mut self) -> Vec<u8> {
        let rest = std::mem::take(&mut self.rest);
        let mut out = Vec::new();
        if !rest.is_empty() {
            self.line(&rest, &mut out);
        }
        out
    }

    /// `<time> <stdout|stderr> <F|P>[:…] <text>\n`; P has no newline of its own.
    fn line(&self, line: &[u8], out: &mut Vec<u8>) {
        let mut fields = line.splitn(4, |b| *b == b' ');
        let (Some(time), Some(b"stdout" | b"stderr"), Some(tags), Some(text)) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            // Not the CRI's form: as it is.
            out.extend_from_slice(line);
            return;
        };
        if self.timestamps {
            out.extend_from_slice(time);
            out.push(b' ');
        }
        let is_part = tags.split(|b| *b == b':').next() == Some(b"P");
        let text = if is_part { text.strip_suffix(b"\n").unwrap_or(text) } else { text };
        out.extend_from_slice(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_log_become_what_the_container_wrote() {
        let mut lines = Lines::default();
        let log = "2026-11-21T02:31:07.1Z stdout F one\n2026-11-21T02:31:07.2Z stderr P two, \n2026-11-21T02:31:07.3Z stderr F three\n2026-11-21T02:31:07.4Z stdout F \n";
        // However the reads fall.
        for size in 1..log.len() {
            let out: Vec<u8> = log.as_bytes().chunks(size).flat_map(|c| lines.decode(c)).collect();
            assert_eq!(String::from_utf8(out).unwrap(), "one\ntwo, three\n\n", "blocks of {size}");
        }
        assert_eq!(lines.decode(b"2026-11-21T02:31:07.4Z stdout F cut"), b"");
        assert_eq!(lines.end(), b"cut");
        assert_eq!(lines.decode(b"no form at all\n"), b"no form at all\n");
        lines.timestamps = true;
        assert_eq!(lines.decode(b"T1 stdout F \xff\n"), b"T1 \xff\n");
    }
}
