//! Bodies of requests and replies. Functions of serde_json that are not generic parse and write them: they
//! are optimized in tests, too, while a generic function is compiled in this crate.

use axum::response::{IntoResponse as _, Response};
use http::{StatusCode, header};
use serde_json::Value;

/// Returns a reply with this status and body.
pub(crate) fn ok(code: u16, body: &Value) -> Response {
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::OK);
    (code, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

/// Parses the body of a request.
pub(crate) fn parse(body: &[u8]) -> serde_json::Result<Value> {
    match std::str::from_utf8(body) {
        Ok(text) => text.parse(),
        // The parser names the byte.
        Err(_) => serde_json::from_slice(body),
    }
}
