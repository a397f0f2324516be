//! What stands in the way of a RemoveContainer: a task that containerd kept of a StartContainer that was cut.
//!
//! containerd 1.6 gives a start up when its caller's connection dies. Its clean-up may run with the same dead context:
//! then the CRI's record says that the container ended, the task runs on, and RemoveContainer fails for ever with
//! "cannot delete running task". Nobody but the runtime's owner can end such a task.
use std::time::Duration;

use bytes::Bytes;
use containerd_client::services::v1::tasks_client::TasksClient;
use containerd_client::services::v1::{DeleteTaskRequest, GetRequest, KillRequest, WaitRequest};
use k8s_cri::v1::RemoveContainerRequest;
use prost::Message as _;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Code, Request, Status};

use crate::upstream::Upstream;

/// SIGKILL, the exit, and its clean-up take containerd some tens of milliseconds.
const TIMEOUT: Duration = Duration::from_secs(10);

const SIGKILL: u32 = 9;

/// Ends tasks through containerd's own service.
#[derive(Debug, Clone)]
pub struct Repair {
    upstream: Upstream,
    /// None where the name is no header value: then nothing is repaired.
    namespace: Option<MetadataValue<Ascii>>,
}

impl Repair {
    /// For tasks of one containerd namespace.
    #[must_use]
    pub fn new(upstream: Upstream, namespace: &str) -> Self {
        Self { upstream, namespace: namespace.parse().ok() }
    }

    /// After a RemoveContainer that the runtime answered with an error: true if a task was in its way and is gone now.
    ///
    /// The CRI stops what it knows to run before it removes it, so that a task which is there afterwards is one it has
    /// lost. Judged by the task, not by the error's text. On a runtime that is not containerd nothing is done.
    pub async fn after_failed_removal(&self, request: &Bytes) -> bool {
        let Ok(request) = RemoveContainerRequest::decode(request.clone()) else { return false };
        let id = request.container_id;
        match tokio::time::timeout(TIMEOUT, self.end_task(&id)).await {
            Ok(Ok(ended)) => ended,
            Ok(Err(status)) => {
                tracing::warn!(container.id = id, error = status.message(), "a lost task cannot be ended");
                false
            }
            Err(_) => {
                tracing::warn!(container.id = id, "a lost task did not end within {} s", TIMEOUT.as_secs());
                false
            }
        }
    }

    async fn end_task(&self, id: &str) -> Result<bool, Status> {
        let Some(namespace) = &self.namespace else { return Ok(false) };
        let mut tasks = TasksClient::new(self.upstream.clone());
        let container_id = id.to_owned();
        let asked = GetRequest { container_id: container_id.clone(), ..GetRequest::default() };
        match tasks.get(within(namespace, asked)).await {
            Ok(_) => {}
            // Unimplemented: another runtime.
            Err(status) if matches!(status.code(), Code::NotFound | Code::Unimplemented) => return Ok(false),
            Err(status) => return Err(status),
        }
        tracing::warn!(container.id = id, "the runtime lost a task of this container: it is ended");
        let kill = KillRequest {
            container_id: container_id.clone(),
            signal: SIGKILL,
            all: true,
            ..Default::default()
        };
        // One that has ended meanwhile only has to be deleted.
        gone_is_fine(tasks.kill(within(namespace, kill)).await)?;
        let wait = WaitRequest { container_id: container_id.clone(), ..Default::default() };
        gone_is_fine(tasks.wait(within(namespace, wait)).await)?;
        gone_is_fine(tasks.delete(within(namespace, DeleteTaskRequest { container_id })).await)?;
        Ok(true)
    }
}

fn gone_is_fine<T>(answer: Result<T, Status>) -> Result<(), Status> {
    match answer {
        Ok(_) => Ok(()),
        Err(status) if status.code() == Code::NotFound => Ok(()),
        Err(status) => Err(status),
    }
}

fn within<T>(namespace: &MetadataValue<Ascii>, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", namespace.clone());
    request
}
