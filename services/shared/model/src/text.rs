//! Lengths of the texts that Quintlet makes from a tenant's input: waiting messages, events, log fields,
//! output of probes.
//!
//! The input may have megabytes, such as the name of an image, and a text is copied into statuses, events and
//! logs of the whole node.

/// Longest message of a waiting container, of a condition and of a pod's status, in bytes.
pub const MESSAGE: usize = 4 << 10;

/// Longest sum of the messages of all waiting containers of a pod, in bytes. Each container has an equal
/// share, and [`MESSAGE`] at most.
pub const MESSAGES: usize = 128 << 10;

/// Longest message of an event, in bytes: the output of a probe (10 KiB, `pkg/probe/exec: maxReadLength`) and
/// the text around it.
pub const EVENT: usize = 12 << 10;

/// Longest output of a hook in the message of its failure, in bytes per stream.
pub const HOOK_OUTPUT: usize = 1 << 10;

/// Returns the longest prefix of `text` that has at most `max` bytes and ends on a character.
#[must_use]
pub fn cut(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// Shortens `text` as [`cut`] does.
pub fn shorten(text: &mut String, max: usize) {
    text.truncate(text.floor_char_boundary(max));
    // A text of a few KiB keeps no memory of megabytes.
    text.shrink_to(max);
}

/// Returns `text`, shortened as by [`cut`].
#[must_use]
pub fn shortened(mut text: String, max: usize) -> String {
    shorten(&mut text, max);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_on_a_character() {
        for (text, max, want) in [
            ("aé", 0, ""),
            ("aé", 1, "a"),
            ("aé", 2, "a"),
            ("aé", 3, "aé"),
            ("aé", usize::MAX, "aé"),
            ("", 3, ""),
            ("\u{10FFFF}", 3, ""),
        ] {
            assert_eq!(cut(text, max), want, "{text:?} {max}");
            assert_eq!(shortened(text.to_owned(), max), want, "{text:?} {max}");
        }
        let long = shortened("x".repeat(1 << 20), MESSAGE);
        assert!(long.len() == MESSAGE && long.capacity() < 2 * MESSAGE);
    }
}
