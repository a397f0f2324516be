//! Formats of names, paths and addresses (`k8s.io/apimachinery/pkg/util/validation`).
//!
//! Each function returns the rules that a text violates.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::errors::Errors;

type Broken = Vec<&'static str>;

pub(super) const NOT_NEGATIVE: &str = "must be greater than or equal to 0";
pub(super) const POSITIVE: &str = "must be greater than zero";
pub(super) const IN_DEADLINE: &str = "must be between 1 and 2147483647, inclusive";
pub(super) const PORT: &str = "must be between 1 and 65535, inclusive";
pub(super) const ID: &str = "must be between 0 and 2147483647, inclusive";
pub(super) const MODE: &str = "must be a number between 0 and 0777 (octal), both inclusive";
const LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const SUBDOMAIN_WITH_UNDERSCORE: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character or '_' (e.g. 'example.com')";

fn is_lower(b: u8) -> bool {
    b.is_ascii_lowercase() || b.is_ascii_digit()
}

/// Begins and ends with `edge`, and has `edge` or one of `inner` in between.
fn is_word(text: &str, edge: impl Fn(u8) -> bool, inner: &[u8]) -> bool {
    let bytes = text.as_bytes();
    bytes.first().is_some_and(|b| edge(*b))
        && bytes.last().is_some_and(|b| edge(*b))
        && bytes.iter().all(|b| edge(*b) || inner.contains(b))
}

fn rules<const N: usize>(all: [(bool, &'static str); N]) -> Broken {
    all.into_iter().filter(|(is_broken, _)| *is_broken).map(|(_, rule)| rule).collect()
}

// apimachinery/pkg/apis/meta/v1/validation: ValidateLabels
pub(super) fn labels(labels: Option<&BTreeMap<String, String>>, path: &str, errors: &mut Errors) {
    for (key, value) in labels.into_iter().flatten() {
        errors.format(path, key, qualified(key));
        errors.format(path, value, label_value(value));
    }
}

/// `IsDNS1123Label`
pub(super) fn dns_label(text: &str) -> Broken {
    rules([(text.len() > 63, "must be no more than 63 bytes"), (!is_word(text, is_lower, b"-"), LABEL)])
}

/// `IsDNS1123Subdomain`
pub(super) fn dns_subdomain(text: &str) -> Broken {
    let is_domain = text.split('.').all(|label| is_word(label, is_lower, b"-"));
    rules([(text.len() > 253, "must be no more than 253 bytes"), (!is_domain, SUBDOMAIN)])
}

/// `IsDNS1123SubdomainWithUnderscore`
pub(super) fn dns_subdomain_with_underscore(text: &str) -> Broken {
    let edge = |b| is_lower(b) || b == b'_';
    let is_domain = text.split('.').all(|label| is_word(label, edge, b"-"));
    rules([(text.len() > 253, "must be no more than 253 bytes"), (!is_domain, SUBDOMAIN_WITH_UNDERSCORE)])
}

/// `IsQualifiedName`
pub(super) fn qualified(text: &str) -> Broken {
    let (prefix, name) = match text.split_once('/') {
        None => (None, text),
        Some((prefix, name)) => (Some(prefix), name),
    };
    if name.contains('/') {
        return vec![
            "a qualified name must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')",
        ];
    }
    let is_domain = prefix.is_none_or(|p| p.is_empty() || dns_subdomain(p).is_empty());
    let is_name = is_word(name, |b| b.is_ascii_alphanumeric(), b"-_.");
    rules([
        (prefix == Some(""), "prefix part must be non-empty"),
        (
            !is_domain,
            "prefix part a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')",
        ),
        (name.is_empty(), "name part must be non-empty"),
        (name.len() > 63, "name part must be no more than 63 bytes"),
        (
            !is_name,
            "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')",
        ),
    ])
}

/// `IsValidLabelValue`
pub(super) fn label_value(text: &str) -> Broken {
    let is_value = text.is_empty() || is_word(text, |b| b.is_ascii_alphanumeric(), b"-_.");
    rules([
        (text.len() > 63, "must be no more than 63 bytes"),
        (
            !is_value,
            "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')",
        ),
    ])
}

/// `IsRelaxedEnvVarName`
pub(super) fn variable(text: &str) -> Broken {
    let is_printable = text.bytes().all(|b| (b' '..=b'~').contains(&b) && b != b'=');
    rules([
        (text.is_empty(), "environment variable name must be non-empty"),
        (
            !is_printable,
            "a valid environment variable name must consist only of printable ASCII characters other than '='",
        ),
    ])
}

/// `IsConfigMapKey`
pub(super) fn config_map_key(text: &str) -> Broken {
    let is_key = !text.is_empty()
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    rules([
        (text.len() > 253, "must be no more than 253 bytes"),
        (
            !is_key,
            "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or 'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')",
        ),
        (text == ".", "must not be '.'"),
        (text == "..", "must not be '..'"),
        (text.starts_with("..") && text.len() > 2, "must not start with '..'"),
    ])
}

/// `IsHTTPHeaderName`
pub(super) fn http_header(text: &str) -> Broken {
    let is_name = !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    rules([(
        !is_name,
        "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex used for validation is '[-A-Za-z0-9]+')",
    )])
}

/// `IsValidPortName`
pub(super) fn port_name(text: &str) -> Broken {
    let is_charset = !text.is_empty() && text.bytes().all(|b| is_lower(b) || b == b'-');
    rules([
        (text.len() > 15, "must be no more than 15 characters"),
        (!is_charset, "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)"),
        (!text.bytes().any(|b| b.is_ascii_lowercase()), "must contain at least one letter (a-z)"),
        (text.contains("--"), "must not contain consecutive hyphens"),
        (text.starts_with('-') || text.ends_with('-'), "must not begin or end with a hyphen"),
    ])
}

/// `IsValidSysctlName`
pub(super) fn sysctl(text: &str) -> Broken {
    let edge = |b| is_lower(b);
    let is_name = text.len() <= 253 && text.split(['.', '/']).all(|segment| is_word(segment, edge, b"-_"));
    rules([(
        !is_name,
        "must have at most 253 characters and match regex ^([a-z0-9]([-_a-z0-9]*[a-z0-9])?[\\./])*[a-z0-9]([-_a-z0-9]*[a-z0-9])?$",
    )])
}

/// `IsValidIP`, with leading zeros allowed in IPv4 addresses.
pub(super) fn ip(text: &str) -> Broken {
    let without_zeros = |octet: &str| {
        let short = octet.trim_start_matches('0');
        if short.is_empty() && !octet.is_empty() { "0".to_owned() } else { short.to_owned() }
    };
    // No address is this long.
    let is_ip = text.len() < 64 && {
        let octets: Vec<String> = text.split('.').map(without_zeros).collect();
        text.parse::<IpAddr>().is_ok() || octets.join(".").parse::<std::net::Ipv4Addr>().is_ok()
    };
    rules([(!is_ip, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")])
}

/// `validatePathNoBacksteps`
pub(super) fn path_without_backsteps(text: &str) -> Broken {
    rules([(text.split('/').any(|part| part == ".."), "must not contain '..'")])
}

/// `validateLocalDescendingPath`
pub(super) fn descending_path(text: &str) -> Broken {
    let mut broken = rules([(text.starts_with('/'), "must be a relative path")]);
    broken.extend(path_without_backsteps(text));
    broken
}

/// `ValidateLocalNonReservedPath`
pub(super) fn unreserved_path(text: &str) -> Broken {
    let mut broken = descending_path(text);
    let is_reserved = text.starts_with("..") && !text.starts_with("../");
    broken.extend(rules([(is_reserved, "must not start with '..'")]));
    broken
}

const SIGNALS: &str = "SIGABRT SIGALRM SIGBUS SIGCHLD SIGCLD SIGCONT SIGFPE SIGHUP SIGILL SIGINT SIGIO SIGIOT SIGKILL \
    SIGPIPE SIGPOLL SIGPROF SIGPWR SIGQUIT SIGSEGV SIGSTKFLT SIGSTOP SIGSYS SIGTERM SIGTRAP SIGTSTP SIGTTIN SIGTTOU \
    SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIGRTMIN SIGRTMAX";

/// Returns whether a Linux container may have this stop signal: a signal name, SIGRTMIN+1 to +15, or
/// SIGRTMAX-1 to -14.
pub(super) fn is_signal(text: &str) -> bool {
    let is_number = |number: &str, most: u8| {
        !number.starts_with(['0', '+']) && number.parse::<u8>().is_ok_and(|n| (1..=most).contains(&n))
    };
    match (text.strip_prefix("SIGRTMIN+"), text.strip_prefix("SIGRTMAX-")) {
        (Some(above), _) => is_number(above, 15),
        (_, Some(below)) => is_number(below, 14),
        (None, None) => SIGNALS.split_whitespace().any(|name| name == text),
    }
}
