//! Responses in the form of Go's HTTP server.

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};

/// Content type of the Prometheus text format.
pub const METRICS_TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// A response of the node API.
pub type Answer = Response<Body>;

/// Returns a response with a body of the given content type.
pub fn with_type(code: StatusCode, kind: &'static str, body: impl Into<Body>) -> Answer {
    let mut answer = Response::new(body.into());
    *answer.status_mut() = code;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// Returns plain text.
pub fn text(code: StatusCode, body: impl Into<String>) -> Answer {
    with_type(code, "text/plain; charset=utf-8", body.into())
}

/// Returns a line of plain text with `X-Content-Type-Options: nosniff` (Go: `net/http.Error`).
pub fn error(code: StatusCode, message: impl std::fmt::Display) -> Answer {
    let mut answer = text(code, format!("{message}\n"));
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

/// Returns a response with the content type `application/json`.
pub fn json(body: impl Into<Body>) -> Answer {
    with_type(StatusCode::OK, "application/json", body)
}

/// Returns 404, as for a path without a route.
pub fn not_found() -> Answer {
    error(StatusCode::NOT_FOUND, "404 page not found")
}

/// Returns 405, as for a disabled endpoint.
pub fn disabled(what: &str) -> Answer {
    error(StatusCode::METHOD_NOT_ALLOWED, what)
}
