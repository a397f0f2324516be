//! Environment files, which `fileKeyRef` reads.

use pod_sync_cri_config::env_file::EnvFile;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::Target;
use crate::bytes::{self, TargetInputs};

/// See [`Target`].
pub const TARGET: Target = Target { name: "env_file", inputs, check, planted };

type Find = fn(&str, &str) -> Result<Option<String>, usize>;

fn find(text: &str, key: &str) -> Result<Option<String>, usize> {
    let found = EnvFile::parse(text.as_bytes()).get(key)?.map(<[u8]>::to_vec);
    Ok(found.map(|value| String::from_utf8(value).expect("a part of a text between ASCII characters")))
}

fn inputs() -> TargetInputs {
    let name = select(vec!["A", "B", "LONG_NAME", "é", "A B", "", "#A"]).prop_map(str::to_owned);
    let line = prop_oneof![
        4 => (select(vec!["", " ", "\t"]), name, "[^']{0,12}", select(vec!["", " ", " # why", "x", "\r"]))
            .prop_map(|(indent, name, value, tail)| format!("{indent}{name}='{value}'{tail}\n")),
        1 => "#[^\n]{0,10}\n",
        1 => bytes::text(),
        1 => Just("A=\n".to_owned()),
    ];
    let shape = vec(line, 0..12).prop_map(|lines| lines.concat().into_bytes()).boxed();
    TargetInputs { shape, words: &["A=", "='", "'\n", "'", "#", "\r\n", "\n", "A='1'", "\u{0}"] }
}

fn check(input: &[u8]) -> Result<(), String> {
    against(find, input)
}

fn planted(input: &[u8]) -> Result<(), String> {
    // A planted bug: the last of two values is used.
    fn last(text: &str, key: &str) -> Result<Option<String>, usize> {
        let tail = text.rfind("\nA=").map_or(text, |at| &text[at + 1..]);
        match (find(text, key)?, find(tail, key)) {
            (Some(_), Ok(Some(last))) => Ok(Some(last)),
            (found, _) => Ok(found),
        }
    }
    against(last, input)
}

fn against(find: Find, input: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(input);
    let lines = text.matches('\n').count() + 1;
    // The carriage return before a line feed is no part of a value.
    let plain = text.replace("\r\n", "\n");
    for key in ["A", "LONG_NAME"] {
        let found = find(&text, key);
        match &found {
            Ok(Some(value)) if !value.is_empty() && !plain.contains(&format!("{key}='{value}'")) => {
                return Err(format!("{key} is {value:?}, which the file does not say"));
            }
            Ok(Some(value)) if value.contains('\'') => {
                return Err(format!("{key} is {value:?}, with a quote"));
            }
            Err(line) if !(1..=lines).contains(line) => {
                return Err(format!("line {line} of {lines} cannot be read"));
            }
            Ok(_) | Err(_) => {}
        }
        // A comment at the beginning changes only the line numbers.
        let shifted = find(&format!("# remark\n{text}"), key);
        if shifted != found.clone().map_err(|line| line + 1) {
            return Err(format!("{key}: {found:?}, and after a remark {shifted:?}"));
        }
        // The first value of a key is used, and what follows it is not judged.
        let more = find(&format!("{text}\n{key}='the last'\nno assignment\n"), key);
        let want = match &found {
            Ok(None) => Ok(Some("the last".to_owned())),
            found => found.clone(),
        };
        // A quote that is open at the end is closed by what follows.
        if found.is_ok() && more != want {
            return Err(format!("{key}: {found:?}, and with another value at the end {more:?}"));
        }
    }
    Ok(())
}
