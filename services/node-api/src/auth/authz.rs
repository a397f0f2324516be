//! Authorization: which right a request needs (pkg/kubelet/server/auth.go), and whether its user has it.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use tokio::time::Instant;

use super::User;
use super::cache::Cache;
use super::review::{Question, ReviewError, Reviewer};
use crate::digest::{self, Digest};

/// What a request needs: a verb on any one of these subresources of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needed {
    /// `get`, `create`…; empty for methods that have none.
    pub verb: &'static str,
    /// Tried in this order.
    pub subresources: &'static [&'static str],
}

const RULES: &[(&str, &[&str])] = &[
    ("/pods", &["pods", "proxy"]),
    ("/runningpods", &["pods", "proxy"]),
    ("/healthz", &["healthz", "proxy"]),
    ("/configz", &["configz", "proxy"]),
    ("/stats", &["stats"]),
    ("/metrics", &["metrics"]),
    ("/logs", &["log"]),
    ("/checkpoint", &["checkpoint"]),
    ("/statusz", &["statusz"]),
    ("/flagz", &["configz"]),
];

/// What a request needs. A path is below another only from a `/` on.
#[must_use]
pub fn needed(method: &Method, path: &str) -> Needed {
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
    Needed { verb, subresources: rule.map_or(&["proxy"], |(_, subresources)| subresources) }
}

/// Why a request is not let in.
#[derive(Debug)]
pub enum Refusal {
    /// The user has none of the rights.
    Denied,
    /// It cannot be found out.
    Unknown {
        /// The right that was asked about.
        subresource: &'static str,
        /// Why not.
        source: ReviewError,
    },
}

/// Decides who may.
#[derive(Debug)]
pub enum Authorizer {
    /// Everybody may.
    AlwaysAllow,
    /// The API server knows.
    Webhook(Webhook),
}

/// Rights, and what the API server said of them.
#[derive(Debug)]
pub struct Webhook {
    /// Asks.
    pub reviewer: Arc<Reviewer>,
    /// How long a yes counts.
    pub allow_ttl: Duration,
    /// How long a no counts.
    pub deny_ttl: Duration,
    /// What was answered.
    pub known: Cache<bool>,
}

impl Authorizer {
    /// Whether `user` may do what is `needed` at the node.
    ///
    /// # Errors
    /// They may not, or it cannot be found out.
    pub async fn check(&self, user: &User, needed: Needed, node: &str) -> Result<(), Refusal> {
        let Self::Webhook(webhook) = self else { return Ok(()) };
        for subresource in needed.subresources {
            let question = Question { user, verb: needed.verb, node, subresource };
            match webhook.may(&question).await {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(source) => return Err(Refusal::Unknown { subresource, source }),
            }
        }
        Err(Refusal::Denied)
    }
}

impl Webhook {
    async fn may(&self, question: &Question<'_>) -> Result<bool, ReviewError> {
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
    fn each_path_needs_the_rights_of_its_row() {
        for (path, want) in [
            ("/pods", &["pods", "proxy"][..]),
            ("/pods/", &["pods", "proxy"]),
            ("/podsx", &["proxy"]),
            ("/runningpods/", &["pods", "proxy"]),
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
            assert_eq!(needed(&Method::GET, path).subresources, want, "{path}");
        }
    }

    #[test]
    fn the_verb_is_that_of_the_method() {
        for (method, want) in [
            (Method::GET, "get"),
            (Method::POST, "create"),
            (Method::PUT, "update"),
            (Method::PATCH, "patch"),
            (Method::DELETE, "delete"),
            (Method::HEAD, ""),
            (Method::OPTIONS, ""),
        ] {
            assert_eq!(needed(&method, "/exec/a/b/c").verb, want, "{method}");
        }
    }

    #[test]
    fn users_that_differ_in_anything_have_answers_of_their_own() {
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
