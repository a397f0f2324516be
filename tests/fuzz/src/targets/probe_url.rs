//! URLs of probes: one line with the path of the probe, one with the Location header of a response.

use http::Uri;
use probe_service::handlers::fuzzing::{Parts, of_probe, redirected};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::Target;
use crate::bytes::{self, TargetInputs};

/// See [`Target`].
pub const TARGET: Target = Target { name: "probe_url", inputs, check, planted };

const HOST: &str = "10.0.0.1";
const PORT: u16 = 8080;

fn inputs() -> TargetInputs {
    let piece = prop_oneof![
        4 => select(vec!["/", "..", ".", "a", "%41", "%zz", "%", "?", "#", "&x=y", " ", "é", "\\", "//", ":", "@"]).prop_map(str::to_owned),
        1 => bytes::text(),
    ];
    let path = vec(piece, 0..8).prop_map(|pieces| pieces.concat());
    let host = select(vec![
        "10.0.0.1",
        "[fd00::1]",
        "evil.test",
        "u:p@10.0.0.1",
        "10.0.0.1@evil.test",
        "",
        "[fd00::1",
        "a b",
        "10.0.0.1\\",
    ]);
    let port = select(vec!["", ":80", ":", ":65536", ":-1", ":0", ":x"]);
    let scheme = select(vec!["http://", "https://", "HTTP://", "//", "ftp://", "http:", "javascript:"]);
    let absolute = (scheme, host, port, path.clone()).prop_map(|(s, h, po, pa)| format!("{s}{h}{po}{pa}"));
    let location = prop_oneof![1 => path.clone(), 1 => absolute];
    let shape =
        (path, location).prop_map(|(path, location)| format!("{path}\n{location}").into_bytes()).boxed();
    TargetInputs {
        shape,
        words: &["/", "../", "./", "%", "%2e", "?", "#", "://", "@", ":", "[", "]", "\r", " "],
    }
}

fn check(input: &[u8]) -> Result<(), String> {
    against(|parts| parts, input)
}

fn planted(input: &[u8]) -> Result<(), String> {
    // A planted bug: the host is the name before the `@`.
    against(
        |mut parts| {
            if let Some((_, rest)) = parts.text.split_once("://")
                && let Some((user, _)) = rest.split('/').next().unwrap_or_default().split_once('@')
            {
                parts.host = user.to_owned();
            }
            parts
        },
        input,
    )
}

fn against(seen: fn(Parts) -> Parts, input: &[u8]) -> Result<(), String> {
    let text = String::from_utf8_lossy(input);
    // The second URL parser has a length limit.
    if text.len() > 16 << 10 {
        return Ok(());
    }
    let (path, location) = text.split_once('\n').unwrap_or((&text, ""));
    let first = seen(of_probe(false, HOST, PORT, path));
    target(&first)?;
    if (first.host.as_str(), first.port) != (HOST, PORT) {
        return Err(format!("the path {path:?} leads to {first:?}"));
    }
    // Escaped characters are not escaped again.
    let again = of_probe(false, HOST, PORT, &first.target);
    if again.target != first.target {
        return Err(format!("{:?} becomes {:?}", first.target, again.target));
    }
    let Ok(next) = redirected(false, HOST, PORT, path, location) else { return Ok(()) };
    let next = seen(next);
    target(&next)?;
    let path_of_next = next.target.split('?').next().unwrap_or_default();
    if path_of_next.split('/').any(|part| part == "." || part == "..") && !location.is_empty() {
        return Err(format!("{location:?} leads to {:?}, with dots", next.target));
    }
    // If the second URL parser accepts the URL, both results are equal.
    if let Ok(uri) = next.text.parse::<Uri>() {
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let port = uri.port_u16().unwrap_or(if next.tls { 443 } else { 80 });
        if !host.eq_ignore_ascii_case(&next.host) || port != next.port {
            return Err(format!("{location:?} leads to {next:?}; http says {host:?} and {port}"));
        }
    }
    Ok(())
}

/// Checks that a request target has only allowed characters.
fn target(parts: &Parts) -> Result<(), String> {
    let target = &parts.target;
    if !target.starts_with('/') || !target.bytes().all(|b| b.is_ascii_graphic()) || target.contains('#') {
        return Err(format!("{target:?} cannot be asked for"));
    }
    match target.parse::<Uri>() {
        Ok(uri) if uri.path_and_query().is_some_and(|p| p.as_str() == target) => Ok(()),
        other => Err(format!("{target:?} is {other:?}")),
    }
}
