//! Kills tasks that containerd has orphaned and that keep a container from being removed.
//!
//! containerd 1.6 abandons a StartContainer when the connection of its caller ends. Its cleanup may run with
//! the same cancelled context. Then the CRI reports the container as exited while its task is still running,
//! and RemoveContainer fails forever with "cannot delete running task".
use std::time::Duration;

use bytes::Bytes;
use containerd_client::services::v1::tasks_client::TasksClient;
use containerd_client::services::v1::{DeleteTaskRequest, GetRequest, KillRequest, WaitRequest};
use prost::Message as _;
use quintlet_cri_api::v1::RemoveContainerRequest;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Code, Request, Status};

use crate::upstream::Upstream;

/// Time limit. containerd needs some tens of milliseconds for SIGKILL, the exit and its cleanup.
const TIMEOUT: Duration = Duration::from_secs(10);

const SIGKILL: u32 = 9;

/// Kills tasks through containerd's task service.
#[derive(Debug, Clone)]
pub(crate) struct OrphanedTasks {
    upstream: Upstream,
    /// The containerd namespace; `None` if its name is not a valid header value. Nothing is killed then.
    namespace: Option<MetadataValue<Ascii>>,
}

impl OrphanedTasks {
    /// Kills tasks of one containerd namespace.
    #[must_use]
    pub(crate) fn new(upstream: Upstream, namespace: &str) -> Self {
        Self { upstream, namespace: namespace.parse().ok() }
    }

    /// Kills the task of a container whose removal has failed. Returns true if there was one.
    ///
    /// The CRI stops a container that it knows to run before it removes it, so a task that still exists is
    /// orphaned. The decision is based on the task, not on the error text. On other runtimes than containerd,
    /// this does nothing.
    pub(crate) async fn kill_after_failed_removal(&self, request: &Bytes) -> bool {
        let Ok(request) = RemoveContainerRequest::decode(request.clone()) else { return false };
        let id = request.container_id;
        match tokio::time::timeout(TIMEOUT, self.kill_task(&id)).await {
            Ok(Ok(ended)) => ended,
            Ok(Err(status)) => {
                tracing::warn!(container.id = id, error = status.message(), "failed to kill orphaned task");
                false
            }
            Err(_) => {
                tracing::warn!(container.id = id, "a lost task did not end within {} s", TIMEOUT.as_secs());
                false
            }
        }
    }

    async fn kill_task(&self, id: &str) -> Result<bool, Status> {
        let Some(namespace) = &self.namespace else { return Ok(false) };
        let mut tasks = TasksClient::new(self.upstream.clone());
        let container_id = id.to_owned();
        let request = GetRequest { container_id: container_id.clone(), ..GetRequest::default() };
        match tasks.get(in_namespace(namespace, request)).await {
            Ok(_) => {}
            // Unimplemented: the runtime is not containerd.
            Err(status) if matches!(status.code(), Code::NotFound | Code::Unimplemented) => return Ok(false),
            Err(status) => return Err(status),
        }
        tracing::warn!(container.id = id, "killing orphaned task of container");
        let kill = KillRequest {
            container_id: container_id.clone(),
            signal: SIGKILL,
            all: true,
            ..Default::default()
        };
        // A task that has exited meanwhile only has to be deleted.
        ignore_not_found(tasks.kill(in_namespace(namespace, kill)).await)?;
        let wait = WaitRequest { container_id: container_id.clone(), ..Default::default() };
        ignore_not_found(tasks.wait(in_namespace(namespace, wait)).await)?;
        ignore_not_found(tasks.delete(in_namespace(namespace, DeleteTaskRequest { container_id })).await)?;
        Ok(true)
    }
}

fn ignore_not_found<T>(answer: Result<T, Status>) -> Result<(), Status> {
    match answer {
        Ok(_) => Ok(()),
        Err(status) if status.code() == Code::NotFound => Ok(()),
        Err(status) => Err(status),
    }
}

fn in_namespace<T>(namespace: &MetadataValue<Ascii>, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", namespace.clone());
    request
}
