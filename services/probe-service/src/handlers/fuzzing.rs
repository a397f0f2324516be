//! Private functions for `tests/fuzz`.

use super::url::{LocationError, Url};

/// The parts of a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parts {
    /// The whole URL.
    pub text: String,
    /// Whether the scheme is `https`.
    pub tls: bool,
    /// Host without port and brackets.
    pub host: String,
    /// Port, with the default of the scheme.
    pub port: u16,
    /// The target in the request line.
    pub target: String,
}

fn parts(url: &Url) -> Parts {
    let Url { tls, host, port, target, .. } = url.clone();
    Parts { text: url.to_string(), tls, host, port, target }
}

/// Builds the URL of an HTTP probe.
#[must_use]
pub fn of_probe(tls: bool, host: &str, port: u16, path: &str) -> Parts {
    parts(&Url::of_probe(tls, host, port, path))
}

/// Resolves the header `Location` against the URL of a probe.
///
/// # Errors
/// The header is invalid.
pub fn redirected(
    tls: bool,
    host: &str,
    port: u16,
    path: &str,
    location: &str,
) -> Result<Parts, LocationError> {
    Url::of_probe(tls, host, port, path).join(location).map(|url| parts(&url))
}
