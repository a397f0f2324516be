//! Calls to the API server with JSON objects, and their failures by the reaction that they need.

use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, header};
use quintlet_kit::rate::{Rate, Throttle};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};

use crate::clients::{Current, Purpose};

/// Limit of one call.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// Cause of a refusal (k8s.io/api/core/v1: NamespaceTerminatingCause).
const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";

/// Texts of etcd and of its client about an object that is too large. The API server answers with the code
/// 500 and no reason.
const TOO_LARGE_FOR_ETCD: [&str; 2] =
    ["etcdserver: request is too large", "trying to send message larger than max"];

const JSON: &str = "application/json";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";

/// An answer of the API server that is no success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorResponse {
    /// HTTP status code; none if this process made the failure.
    pub code: Option<u16>,
    /// Message of the Status object, or the start of the body if it is none.
    pub message: String,
}

impl std::fmt::Display for ErrorResponse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<String> for ErrorResponse {
    fn from(message: String) -> Self {
        Self { code: None, message }
    }
}

/// A failed call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ApiFailure {
    /// 404.
    #[error("not found: {0}")]
    NotFound(String),
    /// 409 on create.
    #[error("already exists: {0}")]
    AlreadyExists(String),
    /// 409: the version or the UID differs.
    #[error("conflict: {0}")]
    Conflict(String),
    /// 422: the object is invalid, or a policy forbids it.
    #[error("invalid: {0}")]
    Invalid(String),
    /// Another 4xx. The same call may succeed later: after a webhook, a policy or the API server has changed.
    #[error("refused: {0}")]
    Refused(ErrorResponse),
    /// 413, or etcd does not take the object: the request or the object is too large.
    #[error("too large: {0}")]
    TooLarge(ErrorResponse),
    /// 401 or 403, which may change with credentials, rules or policies.
    #[error("denied: {0}")]
    Denied(ErrorResponse),
    /// 403: the namespace is terminating, so no object can be created in it.
    #[error("the namespace is being terminated: {0}")]
    NamespaceEnding(String),
    /// 429.
    #[error("too many requests")]
    TooMany {
        /// `Retry-After` of the server.
        retry_after: Option<Duration>,
    },
    /// 5xx.
    #[error("server error: {0}")]
    Server(ErrorResponse),
    /// The server does not answer.
    #[error("unreachable: {0}")]
    Unreachable(String),
    /// The write of one object panicked in this process.
    #[error("status-reporter {0}")]
    Panicked(String),
}

impl ApiFailure {
    /// Reports whether the API server refuses the content of the call, so that a fast retry does not help.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::AlreadyExists(_)
            | Self::Invalid(_)
            | Self::Refused(_)
            | Self::TooLarge(_)
            | Self::NamespaceEnding(_) => true,
            Self::NotFound(_)
            | Self::Conflict(_)
            | Self::Denied(_)
            | Self::TooMany { .. }
            | Self::Server(_)
            | Self::Unreachable(_)
            | Self::Panicked(_) => false,
        }
    }

    /// Reports whether the API server understood the call and declined it, for a reason that a user may have
    /// to remove.
    #[must_use]
    pub fn is_declined(&self) -> bool {
        self.is_refusal() || matches!(self, Self::Denied(_))
    }

    /// Returns the HTTP status code of the answer; none without one.
    #[must_use]
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::NotFound(_) => Some(404),
            Self::AlreadyExists(_) | Self::Conflict(_) => Some(409),
            Self::Invalid(_) => Some(422),
            Self::NamespaceEnding(_) => Some(403),
            Self::TooMany { .. } => Some(429),
            Self::Refused(answer) | Self::TooLarge(answer) | Self::Denied(answer) | Self::Server(answer) => {
                answer.code
            }
            Self::Unreachable(_) | Self::Panicked(_) => None,
        }
    }

    /// Reports whether the failure is one of the server, not of one object.
    #[must_use]
    pub fn is_of_server(&self) -> bool {
        match self {
            Self::TooMany { .. } | Self::Unreachable(_) => true,
            Self::NotFound(_)
            | Self::AlreadyExists(_)
            | Self::Conflict(_)
            | Self::Invalid(_)
            | Self::Refused(_)
            | Self::TooLarge(_)
            | Self::Denied(_)
            | Self::NamespaceEnding(_)
            | Self::Server(_)
            | Self::Panicked(_) => false,
        }
    }

    /// Returns `Retry-After` of the server.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::TooMany { retry_after } => *retry_after,
            _ => None,
        }
    }
}

impl From<kube::Error> for ApiFailure {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => {
                let message = status.message.clone();
                let answer = || ErrorResponse { code: Some(status.code), message: message.clone() };
                let causes = status.details.iter().flat_map(|d| &d.causes);
                let ending = causes.into_iter().any(|c| c.reason == NAMESPACE_TERMINATING);
                match (status.code, status.reason.as_str()) {
                    (404, _) => Self::NotFound(message),
                    (409, "AlreadyExists") => Self::AlreadyExists(message),
                    (409 | 410, _) => Self::Conflict(message),
                    (422, _) => Self::Invalid(message),
                    (403, _) if ending => Self::NamespaceEnding(message),
                    (401 | 403, _) => Self::Denied(answer()),
                    (429, _) => {
                        let seconds =
                            status.details.as_ref().map(|d| d.retry_after_seconds).filter(|s| *s > 0);
                        Self::TooMany { retry_after: seconds.map(|s| Duration::from_secs(u64::from(s))) }
                    }
                    (413, _) => Self::TooLarge(answer()),
                    (400..=499, _) => Self::Refused(answer()),
                    (500..=599, _) if TOO_LARGE_FOR_ETCD.iter().any(|text| message.contains(text)) => {
                        Self::TooLarge(answer())
                    }
                    _ => Self::Server(answer()),
                }
            }
            other => Self::Unreachable(quintlet_kit::error_chain(&other)),
        }
    }
}

/// Returns the path of an object or a collection.
#[must_use]
pub fn pod_path(namespace: &str, name: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/pods/{name}")
}

/// Returns the path of a node.
#[must_use]
pub fn node_path(name: &str) -> String {
    format!("/api/v1/nodes/{name}")
}

#[derive(Clone)]
enum Source {
    Fixed(kube::Client),
    Followed(Current, Purpose),
}

/// A client for one purpose.
#[derive(Clone)]
pub struct ApiClient {
    source: Source,
    timeout: Duration,
    /// The rate limit, if any, which clones share.
    limiter: Option<Arc<Throttle>>,
}

impl ApiClient {
    /// Wraps a client, which must not retry by itself.
    #[must_use]
    pub fn new(client: kube::Client) -> Self {
        Self { source: Source::Fixed(client), timeout: CALL_TIMEOUT, limiter: None }
    }

    /// Uses the newest client of a kubeconfig that may change.
    #[must_use]
    pub fn following(clients: Current, purpose: Purpose) -> Self {
        Self { source: Source::Followed(clients, purpose), timeout: CALL_TIMEOUT, limiter: None }
    }

    /// Adds a rate limit.
    #[must_use]
    pub fn limited(self, rate: Option<Rate>) -> Self {
        Self { limiter: rate.map(|rate| Arc::new(Throttle::new(rate))), ..self }
    }

    fn client(&self) -> Result<kube::Client, ApiFailure> {
        match &self.source {
            Source::Fixed(client) => Ok(client.clone()),
            Source::Followed(clients, purpose) => match clients.borrow().as_ref() {
                Some(clients) => Ok(clients.of(*purpose)),
                None => Err(ApiFailure::Unreachable("there is no usable kubeconfig yet".to_owned())),
            },
        }
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Option<&Value>,
    ) -> Result<T, ApiFailure> {
        let refused = |error: &dyn std::fmt::Display| ApiFailure::Refused(format!("{path}: {error}").into());
        let body = body.map(serde_json::to_vec).transpose().map_err(|e| refused(&e))?.unwrap_or_default();
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::CONTENT_TYPE, content_type)
            .body(body)
            .map_err(|e| refused(&e))?;
        let client = self.client()?;
        if let Some(limiter) = &self.limiter {
            limiter.take().await;
        }
        match tokio::time::timeout(self.timeout, client.request(request)).await {
            Ok(answer) => answer.map_err(ApiFailure::from),
            Err(_) => Err(ApiFailure::Unreachable(format!("no answer within {} s", self.timeout.as_secs()))),
        }
    }

    /// GET.
    ///
    /// # Errors
    /// As [`ApiFailure`].
    pub async fn get(&self, path: &str) -> Result<Value, ApiFailure> {
        self.get_as(path).await
    }

    /// GET, of which only the fields of `T` are kept.
    ///
    /// # Errors
    /// As [`ApiFailure`].
    pub async fn get_as<T: DeserializeOwned>(&self, path: &str) -> Result<T, ApiFailure> {
        self.call(Method::GET, path, JSON, None).await
    }

    /// POST to a collection.
    ///
    /// # Errors
    /// As [`ApiFailure`].
    pub async fn create(&self, path: &str, object: &Value) -> Result<Value, ApiFailure> {
        self.create_as(path, object).await
    }

    /// POST to a collection. Only the fields of `T` of the answer are kept.
    ///
    /// # Errors
    /// As [`ApiFailure`].
    pub async fn create_as<T: DeserializeOwned>(&self, path: &str, object: &Value) -> Result<T, ApiFailure> {
        self.call(Method::POST, path, JSON, Some(object)).await
    }

    /// PUT.
    ///
    /// # Errors
    /// As [`ApiFailure`].
    pub async fn update(&self, path: &str, object: &Value) -> Result<Value, ApiFailure> {
        self.call(Method::PUT, path, JSON, Some(object)).await
    }

    /// Strategic merge patch.
    ///
    /// # Errors
    /// As [`ApiFailure`].
    pub async fn patch(&self, path: &str, patch: &Value) -> Result<Value, ApiFailure> {
        self.patch_as(path, patch).await
    }

    /// Strategic merge patch. Only the fields of `T` of the answer are kept.
    ///
    /// # Errors
    /// As [`ApiFailure`].
    pub async fn patch_as<T: DeserializeOwned>(&self, path: &str, patch: &Value) -> Result<T, ApiFailure> {
        self.call(Method::PATCH, path, STRATEGIC, Some(patch)).await
    }

    /// JSON merge patch. Lists are replaced as a whole.
    ///
    /// # Errors
    /// As [`ApiFailure`].
    pub async fn merge_patch(&self, path: &str, patch: &Value) -> Result<Value, ApiFailure> {
        self.call(Method::PATCH, path, MERGE, Some(patch)).await
    }

    /// Deletes the object with grace period 0 if it has this UID.
    ///
    /// # Errors
    /// As [`ApiFailure`].
    pub async fn delete_now(&self, path: &str, uid: &str) -> Result<(), ApiFailure> {
        let options = json!({
            "kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0, "preconditions": {"uid": uid},
        });
        self.call::<IgnoredAny>(Method::DELETE, path, JSON, Some(&options)).await.map(|_| ())
    }
}
