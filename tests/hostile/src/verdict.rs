//! Reads the outcome of a pod from its status and events.

use serde_json::Value;

/// Outcome of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodOutcome {
    /// The pod is Ready or has succeeded.
    Good,
    /// The pod's status has a reason.
    Reason(String),
    /// The pod's status has no reason, but there is a Warning event. The pod may still become Ready.
    Warning(String),
}

/// Reasons that alternate while nothing changes, by the first.
const SAME: [(&str, &str); 2] = [("ImagePullBackOff", "ErrImagePull"), ("CrashLoopBackOff", "ended")];

/// Reasons of Warning events after which a pod is started all the same.
const HARMLESS: [&str; 2] = ["MissingClusterDNS", "FieldNotEnforced"];

/// Reason of the condition Ready while only readiness gates are missing.
const GATES: &str = "ReadinessGatesNotReady";

/// Reads the outcome of a pod; `None` as long as there is neither success nor a reason.
///
/// `warnings` are the reasons of its Warning events, oldest first.
#[must_use]
pub fn of(pod: &Value, warnings: &[String]) -> Option<PodOutcome> {
    let status = &pod["status"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |name: &str| status[name].as_array().cloned().unwrap_or_default();
    let is_ready = list("conditions").iter().any(|c| c["type"] == "Ready" && c["status"] == "True");
    if is_ready || status["phase"] == "Succeeded" {
        return Some(PodOutcome::Good);
    }
    if status["phase"] == "Failed" {
        return Some(PodOutcome::Reason(format!("Failed {}", text(&status["reason"]))));
    }
    let all = [list("initContainerStatuses"), list("containerStatuses")].concat();
    let waiting = all.iter().map(|c| text(&c["state"]["waiting"]["reason"]));
    let reason =
        waiting.into_iter().find(|r| !["", "ContainerCreating", "PodInitializing"].contains(&r.as_str()));
    if let Some(reason) = reason {
        let same = SAME.iter().find(|(later, _)| *later == reason);
        return Some(PodOutcome::Reason(same.map_or(reason, |(_, first)| (*first).to_owned())));
    }
    if all.iter().any(|c| c["state"]["terminated"].is_object() || c["lastState"]["terminated"].is_object()) {
        return Some(PodOutcome::Reason("ended".to_owned()));
    }
    if list("conditions").iter().any(|c| c["type"] == "Ready" && c["reason"] == GATES) {
        return Some(PodOutcome::Reason(GATES.to_owned()));
    }
    let first = warnings.iter().find(|reason| !HARMLESS.contains(&reason.as_str()));
    first.map(|reason| PodOutcome::Warning(reason.clone()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_verdict_is_the_reason_in_the_status_or_else_the_first_warning() {
        let waiting = |reason: &str| json!({"status": {"containerStatuses": [{"state": {"waiting": {"reason": reason}}}]}});
        let reason = |r: &str| Some(PodOutcome::Reason(r.to_owned()));
        for (pod, warnings, want) in [
            (json!({"status": {"phase": "Pending"}}), vec![], None),
            (waiting("ContainerCreating"), vec![], None),
            (waiting("ContainerCreating"), vec!["MissingClusterDNS"], None),
            (
                waiting("ContainerCreating"),
                vec!["MissingClusterDNS", "FailedMount", "x"],
                Some(PodOutcome::Warning("FailedMount".to_owned())),
            ),
            (waiting("ImagePullBackOff"), vec!["Failed"], reason("ErrImagePull")),
            (
                json!({"status": {"conditions": [{"type": "Ready", "status": "False", "reason": GATES}]}}),
                vec![],
                reason(GATES),
            ),
            (waiting("CreateContainerConfigError"), vec![], reason("CreateContainerConfigError")),
            (
                json!({"status": {"phase": "Failed", "reason": "UnexpectedAdmissionError"}}),
                vec![],
                reason("Failed UnexpectedAdmissionError"),
            ),
            (
                json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}}),
                vec!["Unhealthy"],
                Some(PodOutcome::Good),
            ),
        ] {
            let warnings: Vec<String> = warnings.into_iter().map(str::to_owned).collect();
            assert_eq!(of(&pod, &warnings), want, "{pod}");
        }
    }
}
