//! Errors as kube-apiserver writes them.

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use crate::resources::Resource;

/// A `Status` with its HTTP code.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// HTTP status code.
    pub code: u16,
    /// Reason, such as `NotFound` or `Conflict`.
    pub reason: String,
    /// Message that kubectl prints.
    pub message: String,
    details: Option<Value>,
    retry_after: Option<u64>,
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}: {}", self.code, self.reason, self.message)
    }
}

impl std::error::Error for ApiError {}

impl ApiError {
    pub(crate) fn new(code: u16, reason: &str, message: impl Into<String>) -> Self {
        Self { code, reason: reason.to_owned(), message: message.into(), details: None, retry_after: None }
    }

    fn about(mut self, resource: &Resource, name: &str) -> Self {
        let mut details = json!({ "kind": resource.plural });
        if !name.is_empty() {
            details["name"] = json!(name);
        }
        if !resource.group.is_empty() {
            details["group"] = json!(resource.group);
        }
        self.details = Some(details);
        self
    }

    pub(crate) fn not_found(resource: &Resource, name: &str) -> Self {
        Self::new(404, "NotFound", format!("{} {name:?} not found", resource.qualified()))
            .about(resource, name)
    }

    pub(crate) fn already_exists(resource: &Resource, name: &str) -> Self {
        Self::new(409, "AlreadyExists", format!("{} {name:?} already exists", resource.qualified()))
            .about(resource, name)
    }

    pub(crate) fn conflict(resource: &Resource, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} {name:?}: {why}", resource.qualified());
        Self::new(409, "Conflict", message).about(resource, name)
    }

    pub(crate) fn modified(resource: &Resource, name: &str) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(resource, name, why)
    }

    pub(crate) fn forbidden(resource: &Resource, name: &str, why: &str) -> Self {
        Self::new(403, "Forbidden", format!("{} {name:?} is forbidden: {why}", resource.qualified()))
            .about(resource, name)
    }

    /// 403: no object is created in a namespace that is being terminated
    /// (k8s.io/apiserver/pkg/admission/plugin/namespace/lifecycle).
    pub(crate) fn terminating(resource: &Resource, name: &str) -> Self {
        let why = "unable to create new content in namespace default because it is being terminated";
        let mut error = Self::forbidden(resource, name, why);
        let cause = json!({
            "reason": "NamespaceTerminating", "field": "metadata.namespace",
            "message": "namespace default is being terminated",
        });
        if let Some(details) = &mut error.details {
            details["causes"] = json!([cause]);
        }
        error
    }

    /// 422: one or more fields are invalid. Each cause is (reason, field, message).
    pub(crate) fn invalid(resource: &Resource, name: &str, causes: &[(&str, String, String)]) -> Self {
        let all: Vec<String> =
            causes.iter().map(|(_, field, message)| format!("{field}: {message}")).collect();
        let text = if all.len() == 1 { all.concat() } else { format!("[{}]", all.join(", ")) };
        let mut error = Self::new(422, "Invalid", format!("{} {name:?} is invalid: {text}", resource.kind));
        let causes: Vec<Value> = causes
            .iter()
            .map(|(reason, field, message)| json!({"reason": reason, "field": field, "message": message}))
            .collect();
        error.details =
            Some(json!({"name": name, "kind": resource.kind, "group": resource.group, "causes": causes}));
        error
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message)
    }

    pub(crate) fn expired(version: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {version} ({oldest})"))
    }

    pub(crate) fn too_many_requests(retry_after_seconds: u64) -> Self {
        let mut error = Self::new(429, "TooManyRequests", "Too many requests, please try again later.");
        error.retry_after = Some(retry_after_seconds);
        error.details = Some(json!({ "retryAfterSeconds": retry_after_seconds }));
        error
    }

    /// Returns the `Status` object of the error.
    #[must_use]
    pub fn body(&self) -> Value {
        let mut body = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
        });
        if let Some(details) = &self.details {
            body["details"] = details.clone();
        }
        body
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let code = StatusCode::from_u16(self.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (code, axum::Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
