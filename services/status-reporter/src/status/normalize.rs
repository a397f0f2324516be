//! Normalizes a status (`pkg/kubelet/status: normalizeStatus`).

use jiff::Timestamp;
use serde_json::Value;

use super::{list, text};

/// Largest sum of all termination messages of a pod, in bytes.
const MESSAGES_LIMIT: usize = 12 * 1024;

const STATUS_LISTS: [&str; 3] = ["initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses"];

/// Truncates times to seconds and messages to their share, and sorts lists that have no order.
pub fn normalize(status: &mut Value) {
    truncate(status, "startTime");
    if let Some(conditions) = status.get_mut("conditions").and_then(Value::as_array_mut) {
        for condition in conditions {
            truncate(condition, "lastProbeTime");
            truncate(condition, "lastTransitionTime");
        }
    }
    // Each container of the spec has a share.
    let containers: usize = STATUS_LISTS.iter().map(|l| list(status, l).len()).sum();
    let limit = MESSAGES_LIMIT.checked_div(containers).unwrap_or(MESSAGES_LIMIT);
    for name in STATUS_LISTS {
        let Some(statuses) = status.get_mut(name).and_then(Value::as_array_mut) else { continue };
        for container in statuses.iter_mut() {
            for field in ["state", "lastState"] {
                if let Some(state) = container.get_mut(field) {
                    normalize_state(state, limit);
                }
            }
        }
        if name != "initContainerStatuses" {
            statuses.sort_by(|a, b| text(a, "name").cmp(text(b, "name")));
        }
    }
}

fn normalize_state(state: &mut Value, limit: usize) {
    if let Some(running) = state.get_mut("running") {
        truncate(running, "startedAt");
    }
    if let Some(terminated) = state.get_mut("terminated") {
        truncate(terminated, "startedAt");
        truncate(terminated, "finishedAt");
        if let Some(Value::String(message)) = terminated.get_mut("message") {
            quintlet_model::text::shorten(message, limit);
        }
    }
}

fn truncate(object: &mut Value, field: &str) {
    if let Some(Value::String(time)) = object.get_mut(field)
        && let Ok(at) = time.parse::<Timestamp>()
    {
        *time = seconds(at);
    }
}

/// Formats a time as RFC 3339 in whole seconds, as the API server does.
#[must_use]
pub fn seconds(at: Timestamp) -> String {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn times_lose_their_fractions() {
        let mut status = json!({
            "startTime": "2026-01-01T00:00:00.999Z",
            "conditions": [{"type": "Ready", "lastTransitionTime": "2026-01-01T02:00:01.5+02:00", "lastProbeTime": null}],
            "containerStatuses": [{"name": "a", "state": {"running": {"startedAt": "2026-01-01T00:00:02.123456789Z"}},
                "lastState": {"terminated": {"startedAt": "2026-01-01T00:00:03.1Z", "finishedAt": "not a time"}}}],
        });
        normalize(&mut status);
        assert_eq!(
            status,
            json!({
                "startTime": "2026-01-01T00:00:00Z",
                "conditions": [{"type": "Ready", "lastTransitionTime": "2026-01-01T00:00:01Z", "lastProbeTime": null}],
                "containerStatuses": [{"name": "a", "state": {"running": {"startedAt": "2026-01-01T00:00:02Z"}},
                    "lastState": {"terminated": {"startedAt": "2026-01-01T00:00:03Z", "finishedAt": "not a time"}}}],
            })
        );
    }

    #[test]
    fn termination_messages_share_twelve_kibibytes() {
        let container =
            |name: &str| json!({"name": name, "state": {"terminated": {"message": "x".repeat(20_000)}}});
        let mut status = json!({"initContainerStatuses": [container("i")], "containerStatuses": [container("a"), container("b")]});
        normalize(&mut status);
        for list in ["initContainerStatuses", "containerStatuses"] {
            assert_eq!(
                status[list][0]["state"]["terminated"]["message"].as_str().unwrap().len(),
                4096,
                "{list}"
            );
        }
        let mut wide = json!({"containerStatuses": [{"name": "a", "state": {"terminated": {"message": "é".repeat(7000)}}}]});
        normalize(&mut wide);
        assert_eq!(
            wide["containerStatuses"][0]["state"]["terminated"]["message"].as_str().unwrap().len(),
            12288
        );
    }

    #[test]
    fn regular_containers_are_sorted_and_init_containers_keep_their_order() {
        let names = |names: &[&str]| -> Vec<Value> { names.iter().map(|n| json!({"name": n})).collect() };
        let mut status =
            json!({"containerStatuses": names(&["b", "a"]), "initContainerStatuses": names(&["z", "y"])});
        normalize(&mut status);
        assert_eq!(
            status,
            json!({"containerStatuses": names(&["a", "b"]), "initContainerStatuses": names(&["z", "y"])})
        );
    }
}
