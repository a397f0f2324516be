//! Traits of the runtime and the hint stream, which tests replace.

use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::runtime::{Container, ContainerState, Sandbox, SandboxState};
use quintlet_proto::common::v1::Trace;

/// A failed read of the runtime.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ReadError {
    /// The call failed.
    #[error("{method}: {}", source.message())]
    Call {
        /// Name of the method in the CRI.
        method: &'static str,
        /// Status of the runtime or of cri-proxy.
        source: tonic::Status,
    },
    /// The runtime did not answer in time.
    #[error("{what}: no answer from the runtime within {limit:?}")]
    Timeout {
        /// The read that had no answer.
        what: &'static str,
        /// The time that the runtime had.
        limit: Duration,
    },
    /// The answer is invalid. The text has the path of the field.
    #[error("{0}")]
    Data(String),
}

impl ReadError {
    /// Reports whether the runtime gave an invalid answer, which a retry would get again.
    #[must_use]
    pub fn is_data(&self) -> bool {
        match self {
            Self::Data(_) => true,
            Self::Call { .. } | Self::Timeout { .. } => false,
        }
    }
}

/// The sandboxes or containers to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Filter {
    /// Every object of the runtime, of this node agent or not.
    All,
    /// Selects by the label of the pod's UID.
    Pod(PodUid),
    /// The object with this ID.
    Id(String),
}

/// A sandbox in a list, which has fewer fields than a status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedSandbox {
    /// ID in the runtime.
    pub id: String,
    /// The pod in the labels, if any.
    pub pod: Option<PodRef>,
    /// State at the time of the list.
    pub state: SandboxState,
}

/// A container in a list, which has fewer fields than a status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedContainer {
    /// ID in the runtime.
    pub id: String,
    /// ID of its sandbox, which may have been removed.
    pub sandbox_id: String,
    /// The pod in the labels, if any.
    pub pod: Option<PodRef>,
    /// State at the time of the list.
    pub state: ContainerState,
}

/// The reads of the CRI. No answer is older than the call.
#[async_trait]
pub trait ContainerRuntime: Send + Sync + 'static {
    /// Calls ListPodSandbox.
    async fn sandboxes(&self, filter: Filter) -> Result<Vec<ListedSandbox>, ReadError>;
    /// Calls ListContainers.
    async fn containers(&self, filter: Filter) -> Result<Vec<ListedContainer>, ReadError>;
    /// Calls PodSandboxStatus. Returns none if the sandbox does not exist.
    async fn sandbox(&self, id: &str) -> Result<Option<(PodRef, Sandbox)>, ReadError>;
    /// Calls ContainerStatus, whose answer lacks the ID of the sandbox. Returns none if the container does
    /// not exist.
    async fn container(&self, id: &str, sandbox_id: &str) -> Result<Option<Container>, ReadError>;
}

/// The change that a hint reports. It may not be visible in the CRI yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HintKind {
    /// The container or sandbox exists.
    Created,
    /// The main process runs.
    Started,
    /// The main process exited, and an exit follows once the CRI is about to show it.
    Exiting,
    /// The main process exited.
    Exited,
    /// The container or sandbox is gone.
    Deleted,
    /// The OOM killer ended a process of the container.
    Oom,
}

impl HintKind {
    /// Returns the value of the metric label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Started => "started",
            Self::Exiting => "exiting",
            Self::Exited => "exited",
            Self::Deleted => "deleted",
            Self::Oom => "oom",
        }
    }
}

/// An element of the stream of hints.
#[derive(Debug, Clone, PartialEq)]
pub enum HintEvent {
    /// The source of hints.
    Source {
        /// `containerd`, `cri` or `none`.
        name: &'static str,
        /// Whether hints arrive; if not, only relists see changes.
        live: bool,
    },
    /// A change of a container or sandbox.
    Hint {
        /// The kind of the change.
        kind: HintKind,
        /// Container or sandbox id.
        id: String,
        /// UID of the pod, if the source knows it.
        pod: Option<PodUid>,
        /// Context of the span in cri-proxy that read the event.
        trace: Option<Trace>,
        /// Time of the event in nanoseconds since 1970, or 0.
        at_unix_ns: i64,
    },
    /// Hints were dropped because this reader was too slow.
    Overrun {
        /// Number of lost hints.
        missed: u64,
    },
}

/// The hint stream of cri-proxy.
#[async_trait]
pub trait HintStream: Send + Sync + 'static {
    /// Opens the stream. No hint is missed after this returns.
    async fn open(&self) -> Result<BoxStream<'static, Result<HintEvent, tonic::Status>>, tonic::Status>;
}
