//! Matches pull secrets to images: one line with the key, one with the image's repository.

use pod_sync_images::credentials::keyring::matches;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::Target;
use crate::bytes::TargetInputs;

/// See [`Target`].
pub const TARGET: Target = Target { name: "pull_secret", inputs, check, planted };

fn inputs() -> TargetInputs {
    let piece = select(vec![
        "a", "b", "*", "*a", "?", "[a-b]", "[^a]", "[", "]", "\\", "\\*", "-", "[a", "[]a]", "[b-a]",
    ]);
    let part = prop_oneof![
        6 => vec(piece, 0..6).prop_map(|pieces| pieces.concat()),
        1 => (1_usize..60).prop_map(|n| format!("{}b", "*a".repeat(n))),
    ];
    let host = vec(part, 1..4).prop_map(|parts| parts.join("."));
    let key = (host, select(vec!["", ":5000", ":1"]), select(vec!["", "/team", "/team/app"]))
        .prop_map(|(host, port, path)| format!("{host}{port}{path}"));
    let letters = prop_oneof![4 => "[ab]{0,6}", 1 => (1_usize..250).prop_map(|n| "a".repeat(n))];
    let host = vec(letters, 1..4).prop_map(|parts| parts.join("."));
    let repository = (host, select(vec!["", ":5000"]), select(vec!["/team", "/team/app", "/other"]))
        .prop_map(|(host, port, path)| format!("{host}{port}{path}"));
    let shape = (key, repository).prop_map(|(key, repository)| format!("{key}\n{repository}").into_bytes());
    TargetInputs {
        shape: shape.boxed(),
        words: &["*", "?", "[", "]", "\\", "-", "^", ":5000", ".", "/", "*a*a*a"],
    }
}

fn check(input: &[u8]) -> Result<(), String> {
    against(matches, input)
}

fn planted(input: &[u8]) -> Result<(), String> {
    // A planted bug: a star matches at least one character.
    fn greedy(key: &str, repository: &str) -> bool {
        matches(&key.replace('*', "?*"), repository)
    }
    against(greedy, input)
}

fn against(matches: fn(&str, &str) -> bool, input: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(input);
    let Some((key, repository)) = text.split_once('\n') else { return Ok(()) };
    // Repositories are ASCII, so other characters of a key match nothing.
    if !text.is_ascii() {
        let _no_matter = matches(key, repository);
        return Ok(());
    }
    let (got, want) = (matches(key, repository), reference(key, repository));
    if got == want { Ok(()) } else { Err(format!("{key:?} for {repository:?}: {got} in place of {want}")) }
}

/// `URLsMatch` of the kubelet (pkg/credentialprovider), with a matcher that fills a table.
fn reference(key: &str, repository: &str) -> bool {
    let split = |text: &str| {
        let (host, path) = text.split_at(text.find('/').unwrap_or(text.len()));
        let (host, port) = host.rsplit_once(':').unwrap_or((host, ""));
        (host.split('.').map(str::to_owned).collect::<Vec<_>>(), port.to_owned(), path.to_owned())
    };
    let (globs, key_port, key_path) = split(key);
    let (parts, port, path) = split(repository);
    let mut both = globs.iter().zip(&parts);
    key_port == port
        && globs.len() == parts.len()
        && path.starts_with(&key_path)
        && both.all(|(g, p)| part(g, p))
}

enum Token {
    Any,
    One,
    Class(bool, Vec<(u8, u8)>),
    Byte(u8),
}

/// Go's `path.Match`. A malformed pattern matches nothing.
fn part(glob: &str, text: &str) -> bool {
    let Some(tokens) = tokens(glob.as_bytes()) else { return false };
    let mut can = vec![false; text.len() + 1];
    can[0] = true;
    for token in tokens {
        let mut next = vec![false; text.len() + 1];
        for (at, byte) in text.bytes().enumerate() {
            next[at + 1] = match &token {
                Token::Any => false,
                Token::One => can[at],
                Token::Byte(b) => can[at] && *b == byte,
                Token::Class(negated, ranges) => {
                    can[at] && ranges.iter().any(|(low, high)| (*low..=*high).contains(&byte)) != *negated
                }
            };
        }
        if matches!(token, Token::Any) {
            let first = can.iter().position(|c| *c).unwrap_or(can.len());
            next.iter_mut().skip(first).for_each(|c| *c = true);
        }
        can = next;
    }
    can[text.len()]
}

fn tokens(glob: &[u8]) -> Option<Vec<Token>> {
    let mut out = Vec::new();
    let mut rest = glob;
    while let Some((first, tail)) = rest.split_first() {
        rest = tail;
        out.push(match first {
            b'*' => Token::Any,
            b'?' => Token::One,
            b'\\' => {
                let (byte, tail) = rest.split_first()?;
                rest = tail;
                Token::Byte(*byte)
            }
            b'[' => {
                let negated = rest.first() == Some(&b'^');
                rest = &rest[usize::from(negated)..];
                let mut ranges = Vec::new();
                loop {
                    if let (Some((b']', tail)), false) = (rest.split_first(), ranges.is_empty()) {
                        rest = tail;
                        break;
                    }
                    let low = class_byte(&mut rest)?;
                    let mut high = low;
                    if let Some((b'-', tail)) = rest.split_first() {
                        rest = tail;
                        high = class_byte(&mut rest)?;
                    }
                    ranges.push((low, high));
                }
                Token::Class(negated, ranges)
            }
            byte => Token::Byte(*byte),
        });
    }
    Some(out)
}

/// `getEsc`: a character of a class, which may not be the last of the pattern.
fn class_byte(rest: &mut &[u8]) -> Option<u8> {
    let (mut byte, mut tail) = rest.split_first()?;
    if matches!(byte, b'-' | b']') {
        return None;
    }
    if *byte == b'\\' {
        (byte, tail) = tail.split_first()?;
    }
    *rest = tail;
    (!tail.is_empty()).then_some(*byte)
}
