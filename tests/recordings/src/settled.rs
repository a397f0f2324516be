//! Detects that all requests of a pod's start were made.

use quintlet_testkit::fake_runtime::{Call, FakeRuntime, Method};
use serde_json::Value;

use crate::fixture::Then;
use crate::{schema, wire};

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

/// Checks that a pod, as in the API server, has started completely.
///
/// # Errors
/// Returns a description of the missing step.
pub fn settled(runtime: &FakeRuntime, pod: &Value) -> Result<(), String> {
    let status = &pod["status"];
    let phase = status["phase"].as_str().unwrap_or("none");
    let over = ["Succeeded", "Failed"].contains(&phase);
    if phase != "Running" && !over {
        return Err(format!("phase {phase}"));
    }
    for (spec, statuses) in [("initContainers", "initContainerStatuses"), ("containers", "containerStatuses")]
    {
        let was_called = |name: &Value| {
            let state = list(status, statuses).find(|s| s["name"] == *name).map(|s| &s["state"]);
            state.is_some_and(|s| s["running"].is_object() || s["terminated"].is_object())
        };
        if let Some(late) = list(&pod["spec"], spec).find(|c| !was_called(&c["name"])) {
            return Err(format!("container {}", late["name"]));
        }
    }
    let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
    let ran = commands(runtime, uid);
    let all = list(&pod["spec"], "containers").chain(list(&pod["spec"], "initContainers"));
    for container in all.filter(|_| !over) {
        for at in ["/startupProbe", "/readinessProbe", "/livenessProbe", "/lifecycle/postStart"] {
            let command = container.pointer(at).map(|p| &p["exec"]["command"]).filter(|c| c.is_array());
            if let Some(command) = command
                && !ran.contains(command)
            {
                return Err(format!("{at} of {}", container["name"]));
            }
        }
    }
    Ok(())
}

/// Checks that the requests for an event after the start were made.
///
/// # Errors
/// Returns a description of the missing step.
pub fn answered(runtime: &FakeRuntime, pod: &Value, then: &Then) -> Result<(), String> {
    let status = &pod["status"];
    let running =
        |list: &Value| list.as_array().is_some_and(|l| l.iter().all(|s| s["state"]["running"].is_object()));
    let done = match then {
        Then::Exit(name) | Then::Restarted(name) => {
            let status_of_container = list(status, "containerStatuses").find(|s| s["name"] == name.as_str());
            status_of_container.is_some_and(|s| s["restartCount"].as_i64() >= Some(1))
                && running(&status["containerStatuses"])
        }
        Then::Patch { subresource, .. } if subresource == "resize" => {
            let uid = pod["metadata"]["uid"].as_str().unwrap_or_default();
            let ids = ids(runtime, uid);
            let about = |c: &Call| c.subjects.iter().any(|s| ids.contains(s));
            runtime.calls_of(Method::UpdateContainerResources).iter().any(about)
                && !list(status, "conditions").any(|c| c["type"] == "PodResizeInProgress")
        }
        Then::Patch { .. } => running(&status["ephemeralContainerStatuses"]),
    };
    if done { Ok(()) } else { Err(format!("no answer to {then:?}: {status}")) }
}

/// Returns the IDs of a pod's containers.
fn ids(runtime: &FakeRuntime, uid: &str) -> Vec<String> {
    runtime.containers().into_iter().filter(|c| c.pod_uid() == uid).map(|c| c.id().to_owned()).collect()
}

/// Returns the commands that were run in a pod.
fn commands(runtime: &FakeRuntime, uid: &str) -> Vec<Value> {
    let ids = ids(runtime, uid);
    let table = schema::request(Method::ExecSync).unwrap_or_default();
    let calls = runtime.calls_of(Method::ExecSync);
    let requests = calls.iter().filter_map(|call| wire::decode(table, call.raw()).ok());
    requests
        .filter(|r| r["container_id"].as_str().is_some_and(|id| ids.iter().any(|i| i == id)))
        .map(|mut r| r["cmd"].take())
        .collect()
}
