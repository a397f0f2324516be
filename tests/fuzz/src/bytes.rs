//! Inputs of a target: structured ones, and mutations of the corpus.

use std::path::{Path, PathBuf};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// Inputs of a target.
#[derive(Debug, Clone)]
pub struct TargetInputs {
    /// Generates structured inputs.
    pub shape: BoxedStrategy<Vec<u8>>,
    /// Words that mutations insert into inputs.
    pub words: &'static [&'static str],
}

#[derive(Debug, Clone)]
enum Mutation {
    Insert(Index, Vec<u8>),
    Delete(Index, u8),
    Double(Index, u16),
    Flip(Index, u8),
    Splice(Index, Index),
}

impl TargetInputs {
    /// Returns a strategy: two of three inputs are structured, the others are mutations of the corpus of
    /// `target`.
    pub fn strategy(&self, target: &str) -> BoxedStrategy<Vec<u8>> {
        let corpus: Vec<Vec<u8>> = corpus(target).into_iter().map(|(_, bytes)| bytes).collect();
        let words: Vec<Vec<u8>> = self.words.iter().map(|w| w.as_bytes().to_vec()).collect();
        let word = prop_oneof![3 => select(words), 1 => vec(any::<u8>(), 0..8)];
        let mutation = prop_oneof![
            3 => (any::<Index>(), word).prop_map(|(at, word)| Mutation::Insert(at, word)),
            1 => (any::<Index>(), any::<u8>()).prop_map(|(at, n)| Mutation::Delete(at, n)),
            1 => (any::<Index>(), any::<u16>()).prop_map(|(at, n)| Mutation::Double(at, n)),
            1 => (any::<Index>(), any::<u8>()).prop_map(|(at, bits)| Mutation::Flip(at, bits)),
            1 => (any::<Index>(), any::<Index>()).prop_map(|(at, source)| Mutation::Splice(at, source)),
        ];
        let mutations = vec(mutation, 0..6);
        let of_shape = (self.shape.clone(), mutations.clone()).prop_map(|(bytes, m)| mutated(bytes, &m));
        let of_corpus = (select(corpus), mutations.clone()).prop_map(|(bytes, m)| mutated(bytes, &m));
        prop_oneof![3 => self.shape.clone(), 1 => of_shape, 2 => of_corpus].boxed()
    }
}

/// Longest input that mutations generate.
const LONGEST: usize = 1 << 17;

fn mutated(mut bytes: Vec<u8>, mutations: &[Mutation]) -> Vec<u8> {
    for mutation in mutations {
        let place = |at: &Index| at.index(bytes.len() + 1);
        match mutation {
            Mutation::Insert(at, word) => {
                let at = place(at);
                bytes.splice(at..at, word.iter().copied());
            }
            Mutation::Delete(at, n) => {
                let at = place(at);
                let end = bytes.len().min(at + usize::from(*n));
                bytes.drain(at..end);
            }
            Mutation::Double(at, n) => {
                let at = place(at);
                let end = bytes.len().min(at + usize::from(*n));
                let part = bytes[at..end].to_vec();
                bytes.splice(end..end, part);
            }
            Mutation::Flip(at, bits) => {
                let at = place(at);
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= bits;
                }
            }
            Mutation::Splice(at, source) => {
                let (at, source) = (place(at), place(source));
                let part = bytes[source..].to_vec();
                bytes.truncate(at);
                bytes.extend(part);
            }
        }
        bytes.truncate(LONGEST);
    }
    bytes
}

/// Returns the directory of a target's corpus.
#[must_use]
pub fn corpus_dir(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

/// Returns the corpus of a target, by file.
///
/// # Panics
/// Panics if there is none.
#[must_use]
pub fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = corpus_dir(target);
    let files = std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut all: Vec<(String, Vec<u8>)> = files
        .map(|file| {
            let path = file.expect("the corpus can be listed").path();
            let bytes = std::fs::read(&path).expect("a file of the corpus can be read");
            (path.display().to_string(), bytes)
        })
        .collect();
    all.sort();
    assert!(!all.is_empty(), "{} is empty", dir.display());
    all
}

/// Generates text with characters that are special to parsers.
pub fn text() -> BoxedStrategy<String> {
    let odd = select(vec![
        "", " ", "\t", "\r", "\n", "'", "\"", "\\", "#", "=", "%", "é", "\u{0}", "\u{202e}", "\u{feff}",
    ]);
    vec(prop_oneof![3 => "[a-zA-Z0-9._/-]{0,8}", 1 => odd.prop_map(str::to_owned)], 0..8)
        .prop_map(|parts| parts.concat())
        .boxed()
}
