//! Replies without an error.

use axum::response::{IntoResponse as _, Response};
use http::StatusCode;
use serde_json::Value;

/// Returns a reply with this status and body.
pub(crate) fn ok(code: u16, body: &Value) -> Response {
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::OK);
    (code, axum::Json(body)).into_response()
}
