//! A line for whatever acts on containers: who wanted what, and what became of it. Its target is `audit`, which no log filter
//! leaves out.

use std::net::SocketAddr;

use http::StatusCode;

use crate::auth::User;
use crate::uri::segments_after_first;

/// How it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nobody who may; it was not tried.
    Refused,
    /// They may. Whether it worked, the code tells.
    Allowed,
}

/// What somebody wants to do to a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Act {
    action: &'static str,
    namespace: String,
    pod: String,
    container: String,
}

impl Act {
    /// What a path means; none if nothing is done to a pod.
    pub(crate) fn of(path: &str) -> Option<Self> {
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

    /// Writes the line.
    pub(crate) fn write(&self, user: &User, from: Option<SocketAddr>, code: StatusCode, verdict: Verdict) {
        let verdict = match verdict {
            Verdict::Refused => "refused",
            Verdict::Allowed if code == StatusCode::SWITCHING_PROTOCOLS || code.is_success() => "allowed",
            Verdict::Allowed => "failed",
        };
        tracing::info!(
            target: "audit",
            user = user.name,
            groups = user.groups.join(","),
            action = self.action,
            namespace = self.namespace,
            pod = self.pod,
            container = self.container,
            from = from.map(|f| f.to_string()).unwrap_or_default(),
            code = code.as_u16(),
            verdict,
            "audit"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_act_on_a_pod_say_on_which() {
        let act = |action, container: &str| {
            let [namespace, pod, container] = ["ns", "p", container].map(str::to_owned);
            Some(Act { action, namespace, pod, container })
        };
        for (path, want) in [
            ("/exec/ns/p/c", act("exec", "c")),
            ("/exec/ns/p/uid/c", act("exec", "c")),
            ("/attach/ns/p/c", act("attach", "c")),
            ("/run/ns/p/c", act("run", "c")),
            ("/run/ns/p", act("run", "")),
            ("/checkpoint/ns/p/c", act("checkpoint", "c")),
            ("/portForward/ns/p", act("portforward", "")),
            ("/portForward/ns/p/uid", act("portforward", "")),
            ("/containerLogs/ns/p/c", None),
            ("/pods", None),
            ("/", None),
        ] {
            assert_eq!(Act::of(path), want, "{path}");
        }
        assert!(Act::of("/exec").is_some(), "a path that names nothing is told of, too");
    }
}
