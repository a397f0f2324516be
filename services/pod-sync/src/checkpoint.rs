//! Serves podsync.v1.Checkpoints: writes the state of a running container to a file
//! (`pkg/kubelet/kubelet.go: CheckpointContainer`).
//!
//! The runtime writes the file as root, to any path. Therefore node-api, which serves the network, names only
//! pod and container, and pod-sync, which owns the root directory, chooses the path.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use pod_sync_clients::CallError;
use quintlet_kit::clock::Clock;
use quintlet_kit::status_code;
use quintlet_model::ids::{ContainerId, PodRef, PodUid};
use quintlet_model::runtime::{ContainerState, PodRuntime};
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::checkpoints_server::Checkpoints;
use tonic::{Request, Response, Status};

use pod_sync_worker::context::{NodeConfig, Reporting, RuntimeAccess};

/// Upper limit of the timeout in a request.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Writes checkpoints of running containers.
#[derive(Debug)]
pub(crate) struct ContainerCheckpoints {
    pub(crate) clock: Clock,
    pub(crate) node: Arc<NodeConfig>,
    pub(crate) runtime: RuntimeAccess,
    pub(crate) reporting: Arc<Reporting>,
}

#[tonic::async_trait]
impl Checkpoints for ContainerCheckpoints {
    async fn checkpoint(
        &self,
        request: Request<wire::CheckpointRequest>,
    ) -> Result<Response<wire::CheckpointReply>, Status> {
        let request = request.into_inner();
        let uid = PodUid::parse(&request.pod_uid).map_err(|e| Status::invalid_argument(e.to_string()))?;
        let view = self.reporting.views.get(&uid).ok_or_else(|| Status::not_found("pod does not exist"))?;
        let seen = self.runtime.pleg.get(&uid);
        let id = seen.as_deref().and_then(|pod| running(pod, &request.container)).ok_or_else(|| {
            Status::failed_precondition(format!("container {} not found", request.container))
        })?;
        let timeout = timeout(request.timeout_seconds)?;
        let location =
            location(&self.node.settings.root_dir, &view.pod_ref, &request.container, self.clock.wall());
        let made = self.runtime.calls.checkpoint_container(&id, &location, timeout).await;
        made.map_err(|e| Status::new(e.code, error_text(&e)))?;
        tracing::info!(pod.uid = %uid, container.name = request.container, file = %location.display(), "checkpointed container");
        Ok(Response::new(wire::CheckpointReply { location: location.display().to_string() }))
    }
}

fn running(pod: &PodRuntime, container: &str) -> Option<ContainerId> {
    let mut instances = pod.instances(container);
    instances.find(|c| c.state == ContainerState::Running).map(|c| c.id.clone())
}

fn timeout(seconds: i64) -> Result<Duration, Status> {
    let seconds = u64::try_from(seconds)
        .map_err(|_| Status::invalid_argument("CheckpointContainer requires the timeout value to be > 0"))?;
    Ok(Duration::from_secs(seconds).min(LONGEST))
}

/// Returns `<root>/checkpoints/checkpoint-<pod>_<namespace>-<container>-<local time>.tar`.
fn location(root: &Path, pod: &PodRef, container: &str, now: Timestamp) -> PathBuf {
    let time = now.to_zoned(TimeZone::system()).strftime("%Y-%m-%dT%H:%M:%S%:z").to_string();
    // RFC 3339.
    let time = time.strip_suffix("+00:00").map_or_else(|| time.clone(), |utc| format!("{utc}Z"));
    root.join("checkpoints").join(format!("checkpoint-{}_{}-{container}-{time}.tar", pod.name, pod.namespace))
}

/// Maps the error of the call to the text of the kubelet. An answer of the runtime keeps its gRPC code.
fn error_text(error: &CallError) -> String {
    if !error.is_refused_by_runtime() {
        return error.to_string();
    }
    let code = status_code::go_name(error.code);
    format!("rpc error: code = {code} desc = {error}")
}

#[cfg(test)]
mod tests {
    use quintlet_model::outcome::Outcome;
    use tonic::Code;

    use super::*;

    #[test]
    fn the_file_is_named_by_pod_container_and_second() {
        let uid = PodUid::parse("u1").unwrap();
        let pod = PodRef { uid, namespace: "ns".into(), name: "web".into() };
        let now: Timestamp = "2026-11-21T20:15:16.789Z".parse().unwrap();
        let file = location(Path::new("/r"), &pod, "main", now).display().to_string();
        let time = file.strip_prefix("/r/checkpoints/checkpoint-web_ns-main-").unwrap();
        let time = time.strip_suffix(".tar").unwrap();
        assert_eq!(time.parse::<Timestamp>().unwrap(), "2026-11-21T20:15:16Z".parse().unwrap(), "{file}");
        assert!(!time.ends_with("+00:00"), "{time}");
    }

    #[test]
    fn an_error_of_the_runtime_keeps_its_code_and_a_call_that_never_reached_it_does_not() {
        let error = |outcome, code| CallError { method: "m", outcome, code, message: "no".into() };
        for (outcome, code, want) in [
            (Outcome::RuntimeError, Code::Unimplemented, "rpc error: code = Unimplemented desc = no"),
            (Outcome::RuntimeError, Code::Cancelled, "rpc error: code = Canceled desc = no"),
            (Outcome::NotDispatched, Code::Unavailable, "no"),
            (Outcome::Unknown, Code::DeadlineExceeded, "no"),
        ] {
            assert_eq!(error_text(&error(outcome, code)), want);
        }
    }

    #[test]
    fn a_timeout_is_bounded_and_never_negative() {
        assert_eq!(timeout(0).unwrap(), Duration::ZERO);
        assert_eq!(timeout(90).unwrap(), Duration::from_secs(90));
        assert_eq!(timeout(i64::MAX).unwrap(), LONGEST);
        assert!(timeout(-1).unwrap_err().message().contains("to be > 0"));
    }
}
