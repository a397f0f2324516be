//! The audit log: one line per request that acts on a container, with its user and result. The target of the
//! lines is `audit`, which no log filter disables.

use std::net::SocketAddr;

use http::StatusCode;

use node_api_access::User;
use node_api_base::uri::segments_after_first;

/// The decision about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AccessDecision {
    /// The request was not authenticated or not authorized.
    Refused,
    /// The request was allowed. The status code says whether it succeeded.
    Allowed,
}

/// An action on a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodAction {
    action: &'static str,
    namespace: String,
    pod: String,
    container: String,
}

impl PodAction {
    /// Returns the action that a path names, if it acts on a pod.
    pub(crate) fn from_path(path: &str) -> Option<Self> {
        let action = match path.split('/').nth(1)? {
            "exec" => "exec",
            "attach" => "attach",
            "portForward" => "portforward",
            "run" => "run",
            "checkpoint" => "checkpoint",
            _ => return None,
        };
        let mut parts = segments_after_first(path).into_iter();
        let mut next = || parts.next().unwrap_or_default();
        let (namespace, pod) = (next(), next());
        let container = if action == "portforward" { None } else { parts.next_back() };
        Some(Self { action, namespace, pod, container: container.unwrap_or_default() })
    }

    pub(crate) fn log(
        &self,
        user: &User,
        client: Option<SocketAddr>,
        code: StatusCode,
        decision: AccessDecision,
    ) {
        let decision = match decision {
            AccessDecision::Refused => "refused",
            AccessDecision::Allowed if code == StatusCode::SWITCHING_PROTOCOLS || code.is_success() => {
                "allowed"
            }
            AccessDecision::Allowed => "failed",
        };
        tracing::info!(
            target: "audit",
            user = user.name,
            groups = user.groups.join(","),
            action = self.action,
            namespace = self.namespace,
            pod = self.pod,
            container = self.container,
            from = client.map(|f| f.to_string()).unwrap_or_default(),
            code = code.as_u16(),
            verdict = decision,
            "audit"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_acts_on_a_pod_names_the_action_and_its_target() {
        let action = |action, container: &str| {
            let [namespace, pod, container] = ["ns", "p", container].map(str::to_owned);
            Some(PodAction { action, namespace, pod, container })
        };
        for (path, want) in [
            ("/exec/ns/p/c", action("exec", "c")),
            ("/exec/ns/p/uid/c", action("exec", "c")),
            ("/attach/ns/p/c", action("attach", "c")),
            ("/run/ns/p/c", action("run", "c")),
            ("/run/ns/p", action("run", "")),
            ("/checkpoint/ns/p/c", action("checkpoint", "c")),
            ("/portForward/ns/p", action("portforward", "")),
            ("/portForward/ns/p/uid", action("portforward", "")),
            ("/containerLogs/ns/p/c", None),
            ("/pods", None),
            ("/", None),
        ] {
            assert_eq!(PodAction::from_path(path), want, "{path}");
        }
        assert!(PodAction::from_path("/exec").is_some(), "a path without a pod is audited, too");
    }
}
