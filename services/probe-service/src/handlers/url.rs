//! URLs of probes, with the rules of Go's `net/url`.

use std::fmt;

use super::dial::join_host_port;

/// A `Location` header that cannot be followed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LocationError {
    /// A percent sign is not followed by two hexadecimal digits.
    #[error("failed to parse Location header {0:?}: invalid URL escape")]
    InvalidEscape(String),
    /// The host has characters that a host cannot have.
    #[error("failed to parse Location header {0:?}: invalid host")]
    InvalidHost(String),
    /// The scheme is neither `http` nor `https`.
    #[error("unsupported protocol scheme {0:?}")]
    UnsupportedScheme(String),
}

/// An absolute http or https URL without a fragment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Url {
    pub(super) tls: bool,
    /// Host and port as in the URL.
    pub(super) authority: String,
    /// Host without brackets.
    pub(super) host: String,
    /// The port, or the default of the scheme.
    pub(super) port: u16,
    /// Escaped path and query. Begins with a slash.
    pub(super) target: String,
}

impl Url {
    /// Returns the URL of a probe. `path` may have a query. A `path` that is no valid reference is escaped as
    /// a path.
    pub(super) fn of_probe(tls: bool, host: &str, port: u16, path: &str) -> Self {
        let target = if has_bad_escape(path) { escape(path, b"%?#") } else { escape(before(path, '#'), b"") };
        Self {
            tls,
            authority: join_host_port(host, port),
            host: host.to_owned(),
            port,
            target: rooted(target),
        }
    }

    /// Resolves the header `Location` against this URL.
    ///
    /// # Errors
    /// The header is invalid, or its scheme is not HTTP.
    pub(super) fn join(&self, location: &str) -> Result<Self, LocationError> {
        if has_bad_escape(location) {
            return Err(LocationError::InvalidEscape(location.to_owned()));
        }
        let location = before(location, '#');
        let (tls, rest) = match scheme(location) {
            Some(("http", rest)) => (false, rest),
            Some(("https", rest)) => (true, rest),
            Some((other, _)) => return Err(LocationError::UnsupportedScheme(other.to_owned())),
            None => (self.tls, location),
        };
        if let Some(rest) = rest.strip_prefix("//") {
            let end = rest.find(['/', '?']).unwrap_or(rest.len());
            let (authority, target) = rest.split_at(end);
            let (host, port) =
                split_authority(authority).ok_or_else(|| LocationError::InvalidHost(location.to_owned()))?;
            let port = port.unwrap_or(if tls { 443 } else { 80 });
            let target = without_dots(&escape(target, b""));
            return Ok(Self { tls, authority: authority.to_owned(), host, port, target });
        }
        let path = before(&self.target, '?');
        let target = if rest.starts_with('/') {
            escape(rest, b"")
        } else if rest.is_empty() {
            self.target.clone()
        } else if rest.starts_with('?') {
            format!("{path}{}", escape(rest, b""))
        } else {
            let directory = path.rfind('/').map_or("/", |at| &path[..=at]);
            format!("{directory}{}", escape(rest, b""))
        };
        Ok(Self { target: without_dots(&target), ..self.clone() })
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", if self.tls { "https" } else { "http" }, self.authority, self.target)
    }
}

/// Reports whether `location` has a scheme.
pub(super) fn is_absolute(location: &str) -> bool {
    scheme(location).is_some()
}

fn scheme(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once(':')?;
    let fits = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b));
    fits.then_some(())?;
    match scheme {
        s if s.eq_ignore_ascii_case("http") => Some(("http", rest)),
        s if s.eq_ignore_ascii_case("https") => Some(("https", rest)),
        other => Some((other, rest)),
    }
}

fn split_authority(authority: &str) -> Option<(String, Option<u16>)> {
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            // Brackets enclose an IPv6 address with an optional zone, and only a port may follow
            // (`net/url: parseHost`).
            before(host, '%').parse::<std::net::Ipv6Addr>().ok()?;
            (host, if rest.is_empty() { rest } else { rest.strip_prefix(':')? })
        }
        None if authority.contains(['[', ']']) => return None,
        None => authority.split_once(':').unwrap_or((authority, "")),
    };
    if !port.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let port = if port.is_empty() { None } else { Some(port.parse().ok()?) };
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

fn before(text: &str, end: char) -> &str {
    text.split(end).next().unwrap_or(text)
}

fn rooted(target: String) -> String {
    if target.starts_with('/') { target } else { format!("/{target}") }
}

fn has_bad_escape(text: &str) -> bool {
    let bytes = text.as_bytes();
    let hex = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_hexdigit);
    bytes
        .iter()
        .enumerate()
        .any(|(at, &b)| b == b'%' && !(hex(at.saturating_add(1)) && hex(at.saturating_add(2))))
}

/// Escapes the bytes that are not allowed in a request line, and those in `also`.
fn escape(text: &str, also: &[u8]) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        let plain = byte.is_ascii_graphic() && !b"\"<>\\^`{|}".contains(&byte) && !also.contains(&byte);
        if plain {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// Resolves `.` and `..` in the path of `target`.
fn without_dots(target: &str) -> String {
    let (path, query) = match target.find('?') {
        Some(at) => target.split_at(at),
        None => (target, ""),
    };
    let mut kept: Vec<&str> = Vec::new();
    let segments: Vec<&str> = path.split('/').skip(usize::from(path.starts_with('/'))).collect();
    for (at, segment) in segments.iter().enumerate() {
        let last = at.saturating_add(1) == segments.len();
        match *segment {
            "." | ".." => {
                if *segment == ".." {
                    kept.pop();
                }
                if last {
                    kept.push("");
                }
            }
            other => kept.push(other),
        }
    }
    format!("/{}{query}", kept.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_path_is_a_reference_or_else_a_path() {
        for (path, target) in [
            ("", "/"),
            ("/healthz", "/healthz"),
            ("healthz?a=b#frag", "/healthz?a=b"),
            ("/a b", "/a%20b"),
            ("/ü%41", "/%C3%BC%41"),
            ("/100%?x#y", "/100%25%3Fx%23y"),
        ] {
            assert_eq!(Url::of_probe(false, "10.0.0.1", 80, path).target, target, "{path:?}");
        }
        assert_eq!(Url::of_probe(true, "fd00::1", 8443, "/x").to_string(), "https://[fd00::1]:8443/x");
    }

    #[test]
    fn a_location_is_resolved_against_the_request() {
        let base = Url::of_probe(false, "10.0.0.1", 8080, "/a/b?q=1");
        for (location, expected) in [
            ("/c", "http://10.0.0.1:8080/c"),
            ("c?d", "http://10.0.0.1:8080/a/c?d"),
            ("../c/./d", "http://10.0.0.1:8080/c/d"),
            ("?r=2", "http://10.0.0.1:8080/a/b?r=2"),
            ("//other/x", "http://other/x"),
            ("https://10.0.0.1/x#f", "https://10.0.0.1/x"),
            ("http://[fd00::1]:81", "http://[fd00::1]:81/"),
        ] {
            assert_eq!(base.join(location).map(|u| u.to_string()), Ok(expected.to_owned()), "{location:?}");
        }
        assert_eq!(base.join("http://[fd00::1]:81/").unwrap().host, "fd00::1");
        assert_eq!(base.join("ftp://x/").unwrap_err().to_string(), "unsupported protocol scheme \"ftp\"");
        for location in [
            "http://:80/",
            "http://[fd00::1]80/",
            "http://[fd]/",
            "http://a[fd00::1]/",
            "http://10.0.0.1:+80/",
        ] {
            assert!(base.join(location).is_err(), "{location:?}");
        }
        assert!(base.join("/%zz").is_err());
    }
}
