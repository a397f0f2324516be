//! Redirects of HTTP responses, followed as Go's `net/http` does.

use http::uri::InvalidUri;
use http::{Response, Uri, header};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// Limit of requests for one response, redirects included (Go's `net/http`).
pub const MAX_REQUESTS: usize = 10;

/// Bytes that Go encodes in a path, beside those that are not ASCII.
const ENCODED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'<')
    .add(b'>')
    .add(b'\\')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');

/// Percent-encodes a path as Go does. An encoded path is not changed.
#[must_use]
pub fn encode_path(path: &str) -> String {
    utf8_percent_encode(path, ENCODED).to_string()
}

/// The Location header of a redirect is no URL.
#[derive(Debug, thiserror::Error)]
#[error("failed to parse Location header: {0}")]
pub struct RedirectError(InvalidUri);

/// Returns the URL of the next request; none where `response` is no redirect.
///
/// # Errors
/// The Location header is no URL.
pub fn next<B>(uri: &Uri, response: &Response<B>) -> Option<Result<Uri, RedirectError>> {
    if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
        return None;
    }
    let location = response.headers().get(header::LOCATION)?;
    let text = encode_path(&String::from_utf8_lossy(location.as_bytes()));
    let absolute = if text.contains("://") {
        text
    } else {
        let authority = uri.authority().map_or("", |a| a.as_str());
        let base = format!("{}://{authority}", uri.scheme_str().unwrap_or("http"));
        if text.starts_with("//") {
            format!("{}:{text}", uri.scheme_str().unwrap_or("http"))
        } else if text.starts_with('/') {
            format!("{base}{text}")
        } else {
            let directory = uri.path().rsplit_once('/').map_or("", |(d, _)| d);
            format!("{base}{directory}/{text}")
        }
    };
    Some(absolute.parse().map_err(RedirectError))
}
