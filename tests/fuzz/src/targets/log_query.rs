//! Log queries (`/logs/?query=`), up to the command line of journalctl.

use node_api::fuzzing::{self, Journal};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::Target;
use crate::bytes::{self, TargetInputs};

/// See [`Target`].
pub const TARGET: Target = Target { name: "log_query", inputs, check, planted };

type Query = fn(&str) -> Result<Option<Journal>, String>;

fn inputs() -> TargetInputs {
    let service = prop_oneof![3 => "[a-z@.-]{1,8}", 1 => bytes::text(), 1 => select(vec!["--file=/etc/shadow", "-D", "a b"]).prop_map(str::to_owned)];
    let number = select(vec![
        "0",
        "-1",
        "1",
        "100000",
        "100001",
        "9223372036854775807",
        "-9223372036854775808",
        "x",
        "",
    ]);
    let time = select(vec![
        "2026-11-21T02:03:04Z",
        "9999-12-31T23:59:59Z",
        "-009999-01-01T00:00:00Z",
        "yesterday",
        "0000-01-01T00:00:00+23:59",
    ]);
    let pair = prop_oneof![
        4 => service.prop_map(|s| ("query", s)),
        1 => number.clone().prop_map(|n| ("tailLines", n.to_owned())),
        1 => number.prop_map(|n| ("boot", n.to_owned())),
        1 => (select(vec!["sinceTime", "untilTime"]), time).prop_map(|(name, t)| (name, t.to_owned())),
        1 => option::of(bytes::text()).prop_map(|p| ("pattern", p.unwrap_or_else(|| "(a+)+b".to_owned()))),
    ];
    let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let shape = vec(pair, 0..6)
        .prop_map(move |pairs| {
            let pairs = pairs.iter().map(|(name, value)| format!("{name}={}", encoded(value)));
            pairs.collect::<Vec<_>>().join("&").into_bytes()
        })
        .boxed();
    TargetInputs {
        shape,
        words: &["query=", "&", "tailLines=", "pattern=", "%00", "%0a", "%2d", "--", "+", "="],
    }
}

fn check(input: &[u8]) -> Result<(), String> {
    against(fuzzing::log_query, input)
}

fn planted(input: &[u8]) -> Result<(), String> {
    // A planted bug: a service name that begins with a dash becomes an option.
    fn bare(form: &str) -> Result<Option<Journal>, String> {
        let mut parsed = fuzzing::log_query(form)?;
        for argument in parsed.iter_mut().flat_map(|journal| &mut journal.arguments) {
            if let Some(name) = argument.strip_prefix("--unit=").filter(|name| name.starts_with('-')) {
                *argument = name.to_owned();
            }
        }
        Ok(parsed)
    }
    against(bare, input)
}

/// Options of queries, and options of every call.
const OPTIONS: [&str; 9] = [
    "--utc",
    "--no-pager",
    "--output=short-precise",
    "--since=",
    "--until=",
    "--lines=",
    "--boot=",
    "--grep=",
    "--case-sensitive=false",
];

fn against(query: Query, input: &[u8]) -> Result<(), String> {
    let form = String::from_utf8_lossy(input);
    let Ok(Some(Journal { services, arguments })) = query(&form) else { return Ok(()) };
    if services.is_empty() || services.len() > 4 {
        return Err(format!("{} services", services.len()));
    }
    let units: Vec<&str> = arguments.iter().filter_map(|a| a.strip_prefix("--unit=")).collect();
    if units != services {
        return Err(format!("services {services:?} become {units:?}"));
    }
    for argument in &arguments {
        let known =
            OPTIONS.iter().any(|o| if o.ends_with('=') { argument.starts_with(o) } else { argument == o });
        if !known && !argument.starts_with("--unit=") {
            return Err(format!("the argument {argument:?} is none of a query"));
        }
        if argument.contains('\0') && !argument.starts_with("--grep=") {
            return Err(format!("the argument {argument:?} ends early"));
        }
        if let Some(lines) = argument.strip_prefix("--lines=")
            && !lines.parse::<u32>().is_ok_and(|n| n <= 100_000)
        {
            return Err(format!("{lines} lines"));
        }
    }
    // The same query, built from the parsed one.
    let written: Vec<String> =
        services.iter().map(|s| format!("query={}", utf8_percent_encode(s, NON_ALPHANUMERIC))).collect();
    match query(&written.join("&")) {
        Ok(Some(again)) if again.services == services => Ok(()),
        other => Err(format!("{services:?} written again is {other:?}")),
    }
}
