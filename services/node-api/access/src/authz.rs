//! Authorization: the permission that a request needs (`pkg/kubelet/server: NodeRequestAttributesGetter`),
//! and whether the user has it.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use tokio::time::Instant;

use crate::cache::Cache;
use crate::digest::{self, Digest};
use crate::review::{Question, ReviewError, Reviewer};
use crate::user::User;

/// The permission that a request needs: a verb on one of these subresources of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequiredPermission {
    /// `get`, `create`…; empty for other methods.
    pub verb: &'static str,
    /// Checked in this order; one suffices.
    pub subresources: &'static [&'static str],
}

const RULES: &[(&str, &[&str])] = &[
    ("/pods", &["pods", "proxy"]),
    ("/runningpods", &["pods", "proxy"]),
    ("/allocatedPods", &["pods", "proxy"]),
    ("/healthz", &["healthz", "proxy"]),
    ("/configz", &["configz", "proxy"]),
    ("/stats", &["stats"]),
    ("/metrics", &["metrics"]),
    ("/logs", &["log"]),
    ("/checkpoint", &["checkpoint"]),
    ("/statusz", &["statusz"]),
    ("/flagz", &["configz"]),
];

/// Returns the permission that a request needs. A rule covers its path and the paths below it.
#[must_use]
pub fn required_permission(method: &Method, path: &str) -> RequiredPermission {
    let verb = match *method {
        Method::POST => "create",
        Method::GET => "get",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    };
    let is_at =
        |rule: &str| path.strip_prefix(rule).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let rule = RULES.iter().find(|(rule, _)| is_at(rule));
    RequiredPermission { verb, subresources: rule.map_or(&["proxy"], |(_, subresources)| subresources) }
}

/// The reason to refuse a request.
#[derive(Debug)]
pub enum AuthorizationError {
    /// The user has none of the permissions.
    Denied,
    /// The API server did not answer.
    Review {
        /// The subresource that was being checked.
        subresource: &'static str,
        /// The cause.
        source: ReviewError,
    },
}

/// Authorizes requests.
#[derive(Debug)]
pub enum Authorizer {
    /// Allows every authenticated request (`authorization.mode: AlwaysAllow`).
    AlwaysAllow,
    /// Asks the API server (`authorization.mode: Webhook`).
    Webhook(Webhook),
}

/// Authorizes by SubjectAccessReviews, with a cache.
#[derive(Debug)]
pub struct Webhook {
    /// Sends the reviews.
    pub reviewer: Arc<Reviewer>,
    /// How long an allowed review is cached.
    pub allow_ttl: Duration,
    /// How long a denied review is cached.
    pub deny_ttl: Duration,
    /// Results of reviews by question: whether the request is allowed.
    pub known: Cache<bool>,
}

impl Authorizer {
    /// Checks whether `user` has the permission.
    ///
    /// # Errors
    /// Fails if the user lacks it, or if the API server does not answer.
    pub async fn check(
        &self,
        user: &User,
        required: RequiredPermission,
        node: &str,
    ) -> Result<(), AuthorizationError> {
        let Self::Webhook(webhook) = self else { return Ok(()) };
        for subresource in required.subresources {
            let question = Question { user, verb: required.verb, node, subresource };
            match webhook.is_allowed(&question).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(source) => return Err(AuthorizationError::Review { subresource, source }),
            }
        }
        Err(AuthorizationError::Denied)
    }
}

impl Webhook {
    async fn is_allowed(&self, question: &Question<'_>) -> Result<bool, ReviewError> {
        let key = question_key(question);
        if let Some(known) = self.known.get(&key, Instant::now()) {
            return Ok(known);
        }
        let allowed = self.reviewer.access(question).await?;
        self.known.put(key, allowed, Instant::now(), if allowed { self.allow_ttl } else { self.deny_ttl });
        Ok(allowed)
    }
}

fn question_key(question: &Question<'_>) -> Digest {
    let Question { user, verb, node, subresource } = question;
    let groups = user.groups.len().to_le_bytes();
    let mut parts: Vec<&[u8]> = vec![
        verb.as_bytes(),
        node.as_bytes(),
        subresource.as_bytes(),
        user.name.as_bytes(),
        user.uid.as_bytes(),
    ];
    parts.push(&groups);
    parts.extend(user.groups.iter().map(String::as_bytes));
    let extra: Vec<u8> = serde_json::to_vec(&user.extra).unwrap_or_default();
    parts.push(&extra);
    digest::of_parts(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_needs_the_permission_of_its_rule() {
        for (path, want) in [
            ("/pods", &["pods", "proxy"][..]),
            ("/pods/", &["pods", "proxy"]),
            ("/podsx", &["proxy"]),
            ("/runningpods/", &["pods", "proxy"]),
            ("/allocatedPods", &["pods", "proxy"]),
            ("/allocatedPods/default/web", &["pods", "proxy"]),
            ("/allocatedpods", &["proxy"]),
            ("/healthz/ping", &["healthz", "proxy"]),
            ("/configz", &["configz", "proxy"]),
            ("/stats/summary", &["stats"]),
            ("/metrics", &["metrics"]),
            ("/metrics/resource", &["metrics"]),
            ("/logs/syslog", &["log"]),
            ("/checkpoint/a/b/c", &["checkpoint"]),
            ("/statusz", &["statusz"]),
            ("/flagz", &["configz"]),
            ("/exec/a/b/c", &["proxy"]),
            ("/containerLogs/a/b/c", &["proxy"]),
            ("/run/a/b/c", &["proxy"]),
            ("/debug/pprof/", &["proxy"]),
            ("/%70ods", &["proxy"]),
            ("//pods", &["proxy"]),
            ("/", &["proxy"]),
        ] {
            assert_eq!(required_permission(&Method::GET, path).subresources, want, "{path}");
        }
    }

    #[test]
    fn the_verb_follows_the_method() {
        for (method, want) in [
            (Method::GET, "get"),
            (Method::POST, "create"),
            (Method::PUT, "update"),
            (Method::PATCH, "patch"),
            (Method::DELETE, "delete"),
            (Method::HEAD, ""),
            (Method::OPTIONS, ""),
        ] {
            assert_eq!(required_permission(&method, "/exec/a/b/c").verb, want, "{method}");
        }
    }

    #[test]
    fn users_that_differ_in_any_field_do_not_share_cache_entries() {
        let user = |name: &str, groups: &[&str]| User {
            name: name.to_owned(),
            groups: groups.iter().map(|g| (*g).to_owned()).collect(),
            ..User::default()
        };
        let users =
            [user("a", &[]), user("a", &["b"]), user("a", &["b", "c"]), user("a", &["bc"]), user("ab", &[])];
        let mut keys: Vec<Digest> = users
            .iter()
            .flat_map(|user| {
                ["get", "create"]
                    .map(|verb| question_key(&Question { user, verb, node: "n", subresource: "proxy" }))
            })
            .collect();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 2 * users.len());
    }
}
