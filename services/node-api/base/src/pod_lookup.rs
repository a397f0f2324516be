//! Selects the container and instance that a request names. Works on the JSON of the pod and does no I/O.

use serde_json::Value;

/// Lists of containers in a spec, with the lists of their statuses.
const LISTS: [(&str, &str); 3] = [
    ("containers", "containerStatuses"),
    ("initContainers", "initContainerStatuses"),
    ("ephemeralContainers", "ephemeralContainerStatuses"),
];

/// Returns a container of the spec: regular, init or ephemeral.
#[must_use]
pub fn spec<'a>(pod: &'a Value, container: &str) -> Option<&'a Value> {
    find(pod, "spec", LISTS.map(|(spec, _)| spec), container)
}

/// Returns the status of a container.
#[must_use]
pub fn status<'a>(pod: &'a Value, container: &str) -> Option<&'a Value> {
    find(pod, "status", LISTS.map(|(_, status)| status), container)
}

fn find<'a>(pod: &'a Value, part: &str, lists: [&str; 3], name: &str) -> Option<&'a Value> {
    let all = lists.into_iter().filter_map(|list| pod.get(part)?.get(list)?.as_array()).flatten();
    all.into_iter().find(|c| c["name"] == name)
}

/// Returns the ID of a running container, without the prefix of the runtime.
#[must_use]
pub fn running(pod: &Value, container: &str) -> Option<String> {
    let status = status(pod, container)?;
    status["state"]["running"].as_object()?;
    id(&status["containerID"]).map(|(_, id)| id)
}

fn id(text: &Value) -> Option<(String, String)> {
    let (runtime, id) = text.as_str()?.split_once("://")?;
    (!id.is_empty()).then(|| (runtime.to_owned(), id.to_owned()))
}

/// The instance of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// Name of the runtime: `containerd`, `cri-o`.
    pub runtime: String,
    /// ID that the runtime gave it.
    pub id: String,
}

/// A container has no log (`pkg/kubelet: Kubelet.validateContainerLogStatus`). The text is the kubelet's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoLog {
    container: String,
    pod: String,
    reason: NoLogReason,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum NoLogReason {
    NotAvailable,
    NoPrevious,
    Terminated,
    /// The reason of the container's waiting state; empty if there is none.
    Waiting(String),
}

impl std::error::Error for NoLog {}

impl std::fmt::Display for NoLog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { container, pod, reason } = self;
        let waiting = match reason {
            NoLogReason::NotAvailable => {
                return write!(f, "container {container:?} in pod {pod:?} is not available");
            }
            NoLogReason::NoPrevious => {
                return write!(f, "previous terminated container {container:?} in pod {pod:?} not found");
            }
            NoLogReason::Terminated => {
                return write!(f, "container {container:?} in pod {pod:?} is terminated");
            }
            NoLogReason::Waiting(waiting) => waiting,
        };
        write!(f, "container {container:?} in pod {pod:?} is waiting to start")?;
        match waiting.as_str() {
            "ErrImagePull" => f.write_str(": image can't be pulled"),
            "ImagePullBackOff" => f.write_str(": trying and failing to pull image"),
            "" => f.write_str(" - no logs yet"),
            reason => write!(f, ": {reason}"),
        }
    }
}

/// Selects the instance whose log is requested (`pkg/kubelet: Kubelet.validateContainerLogStatus`).
///
/// # Errors
/// Fails if the container has no such instance.
pub fn log_instance(pod: &Value, container: &str, previous: bool) -> Result<Instance, NoLog> {
    let error = |reason: NoLogReason| NoLog {
        container: container.to_owned(),
        pod: pod["metadata"]["name"].as_str().unwrap_or_default().to_owned(),
        reason,
    };
    let Some(status) = status(pod, container) else {
        return Err(error(NoLogReason::NotAvailable));
    };
    let instance = |found: Option<(String, String)>| found.map(|(runtime, id)| Instance { runtime, id });
    let state = &status["state"];
    let waiting = &state["waiting"];
    let running = &state["running"];
    let terminated = &state["terminated"];
    let last = instance(id(&status["lastState"]["terminated"]["containerID"]));
    if previous {
        return last.ok_or_else(|| error(NoLogReason::NoPrevious));
    }
    if running.is_object() {
        return instance(id(&status["containerID"])).ok_or_else(|| error(NoLogReason::NotAvailable));
    }
    if terminated.is_object() {
        return instance(id(&terminated["containerID"]))
            .or(last)
            .ok_or_else(|| error(NoLogReason::Terminated));
    }
    if let Some(last) = last {
        return Ok(last);
    }
    let waiting = waiting["reason"].as_str().unwrap_or_default().to_owned();
    Err(error(NoLogReason::Waiting(waiting)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_instance_is_selected_by_the_newest_status() {
        let running = json!({"running": {}});
        let ended = |id: &str| json!({"terminated": {"containerID": id}});
        let waiting = |reason: &str| json!({"waiting": {"reason": reason}});
        let none = json!({});
        for (state, last, previous, want) in [
            (&running, &none, false, Ok("now")),
            (&running, &ended("c://before"), false, Ok("now")),
            (&running, &ended("c://before"), true, Ok("before")),
            (&running, &none, true, Err("previous terminated container \"c\" in pod \"p\" not found")),
            (&ended("c://now"), &none, false, Ok("now")),
            (&ended(""), &ended("c://before"), false, Ok("before")),
            (&ended(""), &none, false, Err("container \"c\" in pod \"p\" is terminated")),
            (&waiting("CrashLoopBackOff"), &ended("c://before"), false, Ok("before")),
            (
                &waiting("ErrImagePull"),
                &none,
                false,
                Err("container \"c\" in pod \"p\" is waiting to start: image can't be pulled"),
            ),
            (
                &waiting("ImagePullBackOff"),
                &none,
                false,
                Err("container \"c\" in pod \"p\" is waiting to start: trying and failing to pull image"),
            ),
            (
                &waiting("ContainerCreating"),
                &none,
                false,
                Err("container \"c\" in pod \"p\" is waiting to start: ContainerCreating"),
            ),
            (&none, &none, false, Err("container \"c\" in pod \"p\" is waiting to start - no logs yet")),
        ] {
            let pod = json!({"metadata": {"name": "p"}, "status": {"containerStatuses": [
                {"name": "c", "containerID": "c://now", "state": state, "lastState": last}]}});
            let got = log_instance(&pod, "c", previous).map(|i| i.id).map_err(|e| e.to_string());
            assert_eq!(got.as_deref().map_err(String::as_str), want, "{pod}");
        }
        let got = log_instance(&json!({"metadata": {"name": "p"}}), "c", false);
        assert_eq!(got.unwrap_err().to_string(), "container \"c\" in pod \"p\" is not available");
    }

    #[test]
    fn only_a_running_container_is_selected_for_exec() {
        let pod = json!({"status": {"initContainerStatuses": [
            {"name": "i", "containerID": "containerd://a", "state": {"running": {}}},
            {"name": "e", "containerID": "containerd://b", "state": {"terminated": {}}}]}});
        assert_eq!(running(&pod, "i").as_deref(), Some("a"));
        assert_eq!(running(&pod, "e"), None);
        assert_eq!(running(&pod, "x"), None);
    }
}
