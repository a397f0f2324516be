//! Redirects of HTTP responses, followed as Go's `net/http` does.

use http::uri::InvalidUri;
use http::{Response, Uri, header};

/// Limit of requests for one response, redirects included (Go's `net/http`).
pub const MAX_REQUESTS: usize = 10;

/// Percent-encodes the bytes that Go encodes in a path; the others stay as they are.
#[must_use]
pub fn encoded(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            0..=b' ' | 0x7f.. | b'"' | b'<' | b'>' | b'\\' | b'^' | b'`' | b'{' | b'|' | b'}' => {
                out.push_str(&format!("%{byte:02X}"));
            }
            _ => out.push(char::from(byte)),
        }
    }
    out
}

/// The Location header of a redirect is no URL.
#[derive(Debug, thiserror::Error)]
#[error("failed to parse Location header: {0}")]
pub struct RedirectError(InvalidUri);

/// Returns the URL of the next request; none where `response` is no redirect.
///
/// # Errors
/// The Location header is no URL.
pub fn next<B>(from: &Uri, response: &Response<B>) -> Option<Result<Uri, RedirectError>> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    let location = response.headers().get(header::LOCATION)?;
    let text = encoded(&String::from_utf8_lossy(location.as_bytes()));
    let absolute = if text.contains("://") {
        text
    } else {
        let authority = from.authority().map_or("", |a| a.as_str());
        let base = format!("{}://{authority}", from.scheme_str().unwrap_or("http"));
        if text.starts_with("//") {
            format!("{}:{text}", from.scheme_str().unwrap_or("http"))
        } else if text.starts_with('/') {
            format!("{base}{text}")
        } else {
            let directory = from.path().rsplit_once('/').map_or("", |(d, _)| d);
            format!("{base}{directory}/{text}")
        }
    };
    Some(absolute.parse().map_err(RedirectError))
}
