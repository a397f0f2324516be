//! Answers as Go's server writes them.

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};

/// An answer.
pub type Answer = Response<Body>;

/// An answer with a body of this type.
pub fn with_type(code: StatusCode, kind: &'static str, body: impl Into<Body>) -> Answer {
    let mut answer = Response::new(body.into());
    *answer.status_mut() = code;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}

/// Text as it is.
pub fn text(code: StatusCode, body: impl Into<String>) -> Answer {
    with_type(code, "text/plain; charset=utf-8", body.into())
}

/// As Go's `http.Error`: a line of text that no browser takes for anything else.
pub fn error(code: StatusCode, message: impl std::fmt::Display) -> Answer {
    let mut answer = text(code, format!("{message}\n"));
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

/// JSON.
pub fn json(body: impl Into<Body>) -> Answer {
    with_type(StatusCode::OK, "application/json", body)
}

/// 404, as for a path that no route has.
pub fn not_found() -> Answer {
    error(StatusCode::NOT_FOUND, "404 page not found")
}

/// 405, as for a switch that is off.
pub fn disabled(what: &str) -> Answer {
    error(StatusCode::METHOD_NOT_ALLOWED, what)
}
