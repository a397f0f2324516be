//! TokenReview and SubjectAccessReview, with the tokens and permissions of users.

use std::collections::HashMap;

use axum::response::{IntoResponse, Response};
use http::{Method, StatusCode};
use parking_lot::Mutex;
use serde_json::{Value, json};

const TOKENS: &str = "tokenreviews";

/// Returns the review that is created at a path, if any.
pub(crate) fn resource(path: &str) -> Option<&'static str> {
    match path {
        "/apis/authentication.k8s.io/v1/tokenreviews" => Some(TOKENS),
        "/apis/authorization.k8s.io/v1/subjectaccessreviews" => Some("subjectaccessreviews"),
        _ => None,
    }
}

/// Users by token, and permissions. Without a rule nothing is permitted.
#[derive(Debug, Default)]
pub(crate) struct Access {
    users: Mutex<HashMap<String, Value>>,
    rights: Mutex<Vec<Right>>,
    requested: Mutex<Vec<Value>>,
}

#[derive(Debug, Clone)]
struct Right {
    user: String,
    verb: String,
    what: String,
}

impl Access {
    pub(crate) fn set_token(&self, token: &str, user: &str, groups: &[&str]) {
        self.users.lock().insert(token.to_owned(), json!({"username": user, "groups": groups}));
    }

    pub(crate) fn remove_token(&self, token: &str) {
        self.users.lock().remove(token);
    }

    pub(crate) fn allow(&self, user: &str, verb: &str, what: &str) {
        let right = Right { user: user.to_owned(), verb: verb.to_owned(), what: what.to_owned() };
        self.rights.lock().push(right);
    }

    pub(crate) fn forbid_all(&self, user: &str) {
        self.rights.lock().retain(|r| r.user != user);
    }

    pub(crate) fn requested(&self) -> Vec<Value> {
        self.requested.lock().clone()
    }

    /// Executes a review.
    pub(crate) fn answer(&self, method: &Method, path: &str, body: &[u8]) -> Response {
        let decide = if resource(path) == Some(TOKENS) { Self::whose } else { Self::may };
        if *method != Method::POST {
            return StatusCode::METHOD_NOT_ALLOWED.into_response();
        }
        let Ok(mut review) = serde_json::from_slice::<Value>(body) else {
            return StatusCode::BAD_REQUEST.into_response();
        };
        self.requested.lock().push(review.clone());
        review["status"] = decide(self, &review["spec"]);
        (StatusCode::CREATED, axum::Json(review)).into_response()
    }

    fn whose(&self, spec: &Value) -> Value {
        let token = spec["token"].as_str().unwrap_or_default();
        match self.users.lock().get(token) {
            Some(user) => json!({"authenticated": true, "user": user}),
            None => json!({"authenticated": false, "error": "token not known"}),
        }
    }

    fn may(&self, spec: &Value) -> Value {
        let attribute =
            |field: &str| spec["resourceAttributes"][field].as_str().unwrap_or_default().to_owned();
        let what = format!("{}/{}", attribute("resource"), attribute("subresource"));
        let fits = |wanted: &str, given: &str| wanted == "*" || wanted == given;
        let user = spec["user"].as_str().unwrap_or_default();
        let groups: Vec<&str> =
            spec["groups"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let allowed = self.rights.lock().iter().any(|r| {
            (r.user == user || groups.contains(&r.user.as_str()))
                && fits(&r.verb, &attribute("verb"))
                && fits(&r.what, &what)
        });
        json!({"allowed": allowed})
    }
}
