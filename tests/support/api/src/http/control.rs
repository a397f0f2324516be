//! The control paths of the test API server.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::Method;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::faults::Faults;
use crate::reply::ok;
use crate::server::Server;

/// Serves the control paths, which only this server has: received requests and injected faults.
pub(super) fn control(server: &Server, method: &Method, path: &str, body: &Bytes) -> Option<Response> {
    let path = path.strip_prefix("/testapi/")?;
    let body: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
    Some(match (method.as_str(), path) {
        ("GET", "counts") => axum::Json(server.traffic.counts()).into_response(),
        ("DELETE", "counts") => {
            server.traffic.reset();
            ok(200, &json!({}))
        }
        ("DELETE", "faults") => {
            server.faults.clear();
            ok(200, &json!({}))
        }
        ("POST", "compact") => {
            server.store.compact();
            server.faults.cut_watches_as_expired();
            ok(200, &json!({}))
        }
        ("POST", "faults") => match add_fault(&server.faults, &body) {
            Ok(()) => ok(200, &json!({})),
            Err(error) => ApiError::bad_request(error).into_response(),
        },
        _ => ApiError::new(404, "NotFound", "testapi serves counts, faults and compact").into_response(),
    })
}

/// `{"requests": "patch pods/status", "times": 3, "failure": "internal"}`, or `"latencyMs": 50`, or
/// `"block": true`.
fn add_fault(faults: &Faults, body: &Value) -> Result<(), String> {
    let requests = body["requests"].as_str().unwrap_or("*");
    if let Some(ms) = body["latencyMs"].as_u64() {
        faults.latency(requests, Duration::from_millis(ms));
    }
    if body["block"] == json!(true) {
        faults.block(requests);
    }
    if !body["failure"].is_null() {
        let failure = serde_json::from_value(body["failure"].clone()).map_err(|e| e.to_string())?;
        let times = body["times"].as_u64().unwrap_or(1);
        faults.fail(requests, usize::try_from(times).unwrap_or(usize::MAX), failure);
    }
    Ok(())
}
