//! Spans of requests, by the semantic conventions of OpenTelemetry for HTTP servers and for Kubernetes.
//!
//! A request has a span once it is authorized, so that no other client fills the ring or decides which traces
//! are exported. The span ends when the request is no longer in flight: with an upgraded connection, or with
//! the last byte of a log.

use http::{Method, StatusCode};
use node_api_base::uri::segments_after_first;
use tracing::{Span, field};

/// Pages whose path has the namespace and name of a pod.
pub(crate) const OF_PODS: [&str; 6] = ["containerLogs", "exec", "attach", "portForward", "run", "checkpoint"];

/// Longest name of an object, in bytes. A longer text names none.
const MAX_NAME: usize = 253;

/// Creates the span of a request. `route` is its label in metrics.
pub(crate) fn request_span(method: &Method, route: &'static str, path: &str) -> Span {
    let method_name = known_method(method);
    let span = tracing::info_span!(
        "request",
        otel.name = format!("{method_name} /{route}"),
        otel.kind = "server",
        otel.status_code = field::Empty,
        error = field::Empty,
        "error.type" = field::Empty,
        http.request.method = method_name,
        http.route = format!("/{route}"),
        http.response.status_code = field::Empty,
        k8s.namespace.name = field::Empty,
        k8s.pod.name = field::Empty,
        k8s.pod.uid = field::Empty,
        k8s.container.name = field::Empty,
    );
    if OF_PODS.contains(&route) {
        let parts = segments_after_first(path);
        let container = parts.last().filter(|_| parts.len() > 2 && route != "portForward");
        let names = [
            ("k8s.namespace.name", parts.first()),
            ("k8s.pod.name", parts.get(1)),
            ("k8s.container.name", container),
        ];
        for (key, name) in names {
            if let Some(name) = name.filter(|name| name.len() <= MAX_NAME) {
                span.record(key, name);
            }
        }
    }
    span
}

/// Records the response of a request. A server error makes the span an error.
pub(crate) fn record_answer(span: &Span, code: StatusCode) {
    span.record("http.response.status_code", i64::from(code.as_u16()));
    if code.is_server_error() {
        span.record("otel.status_code", "ERROR");
        span.record("error.type", code.as_str());
    }
}

/// Returns the method, or `_OTHER` for one that HTTP does not define.
fn known_method(method: &Method) -> &'static str {
    const KNOWN: [&str; 9] = ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"];
    KNOWN.into_iter().find(|known| *known == method.as_str()).unwrap_or("_OTHER")
}
