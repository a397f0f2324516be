//! Decoding of paths, queries and forms.

use std::sync::Arc;

use http::Request;
use percent_encoding::percent_decode_str;

/// The end of a request's query that is longer than its URI, an extension of the request.
#[derive(Debug, Clone)]
pub struct QueryEnd(pub Arc<str>);

/// Returns the parameters of a request's query, decoded, in order. A query may be longer than that of the
/// URI.
pub fn query<B>(request: &Request<B>) -> Vec<(String, String)> {
    let begin = request.uri().query().unwrap_or_default();
    match request.extensions().get::<QueryEnd>() {
        None => decode_form(begin),
        Some(QueryEnd(end)) => decode_form(&format!("{begin}{end}")),
    }
}

/// Returns the parameters of a form or query, decoded, in order.
#[must_use]
pub fn decode_form(text: &str) -> Vec<(String, String)> {
    let decode = |part: &str| percent_decode_str(&part.replace('+', " ")).decode_utf8_lossy().into_owned();
    text.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(key, value)| (decode(key), decode(value)))
        .collect()
}

/// Returns the segments of a path after the first, decoded.
#[must_use]
pub fn segments_after_first(path: &str) -> Vec<String> {
    path.split('/').skip(2).map(|part| percent_decode_str(part).decode_utf8_lossy().into_owned()).collect()
}
