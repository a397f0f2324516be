//! The node's resolv.conf.

use pod_sync_cri_config::dns::{ResolvConf, parse_resolv_conf};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::Target;
use crate::bytes::{self, TargetInputs};

/// See [`Target`].
pub const TARGET: Target = Target { name: "resolv_conf", inputs, check, planted };

fn inputs() -> TargetInputs {
    let word = prop_oneof![
        2 => select(vec!["1.1.1.1", "fd00::1", "example.test", "example.test.", ".", "ndots:5", "ndots:1", "ndots", "rotate"])
            .prop_map(str::to_owned),
        1 => bytes::text(),
    ];
    let keyword =
        select(vec!["nameserver", "search", "options", "domain", "#", ";", " nameserver", "sortlist"]);
    let line = (keyword, select(vec![" ", "\t", "  ", ""]), vec(word, 0..6), select(vec!["\n", "\r\n", ""]))
        .prop_map(|(keyword, blank, words, end)| format!("{keyword}{blank}{}{end}", words.join(" ")));
    let many = (1_usize..4_000).prop_map(|n| {
        let options: Vec<String> = (0..n).map(|i| format!("option{i}:{i}")).collect();
        format!("options {}\n", options.join(" "))
    });
    let shape = prop_oneof![15 => vec(line, 0..12).prop_map(|lines| lines.concat()), 1 => many];
    TargetInputs {
        shape: shape.prop_map(String::into_bytes).boxed(),
        words: &["nameserver ", "search ", "options ", "\n", ".", " . ", "ndots:", ":", "#", "\u{a0}", "\r"],
    }
}

fn check(input: &[u8]) -> Result<(), String> {
    against(|text| parse_resolv_conf(text.as_bytes()).ok(), input)
}

fn planted(input: &[u8]) -> Result<(), String> {
    // A planted bug: search lines accumulate.
    against(
        |text| {
            let mut parsed = parse_resolv_conf(text.as_bytes()).ok()?;
            let mut lines = text.lines().map(str::trim).filter(|l| l.starts_with("search "));
            let first = lines.next().map(str::split_whitespace).into_iter().flatten().nth(1);
            if lines.next().is_some() {
                parsed.searches.extend(first.map(str::to_owned));
            }
            Some(parsed)
        },
        input,
    )
}

fn against(parse: impl Fn(&str) -> Option<ResolvConf>, input: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(input);
    let (got, want) = (parse(&text), reference(&text));
    if got == want { Ok(()) } else { Err(format!("{got:?} in place of {want:?}")) }
}

/// A second implementation of the kubelet's `parseResolvConf` (pkg/kubelet/network/dns).
fn reference(text: &str) -> Option<ResolvConf> {
    let (mut servers, mut searches) = (Vec::new(), Vec::new());
    let mut options: Vec<(String, String)> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for line in text.split('\n') {
        let line = line.trim();
        let words: Vec<&str> = line.split_whitespace().collect();
        match words.as_slice() {
            [first, ..] if first.starts_with('#') => {}
            ["nameserver"] => return None,
            ["nameserver", server, ..] => servers.push((*server).to_owned()),
            ["search", domains @ ..] => {
                let domains = domains.iter().filter(|d| **d != ".");
                searches = domains.map(|d| d.strip_suffix('.').unwrap_or(d).to_owned()).collect();
            }
            ["options", these @ ..] => {
                for option in these {
                    let name = option.split(':').next().unwrap_or_default().to_owned();
                    let place = *places.entry(name.clone()).or_insert(options.len());
                    if place == options.len() {
                        options.push((name, String::new()));
                    }
                    options[place].1 = (*option).to_owned();
                }
            }
            _ => {}
        }
    }
    let options = options.into_iter().map(|(_, option)| option).collect();
    Some(ResolvConf { servers, searches, options })
}
