//! What pleg-service needs of others: the runtime's reads and its hints.

use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use quintlet_model::ids::{PodRef, PodUid};
use quintlet_model::runtime::{Container, ContainerState, Sandbox, SandboxState};
use quintlet_proto::common::v1::Trace;

/// Why the runtime's word on something could not be had.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ReadError {
    /// The call failed.
    #[error("{method}: {}", source.message())]
    Call {
        /// CRI method.
        method: &'static str,
        /// The runtime's, or cri-proxy's, answer.
        source: tonic::Status,
    },
    /// No answer in time.
    #[error("{what}: no answer from the runtime within {limit:?}")]
    Timeout {
        /// What was asked.
        what: &'static str,
        /// How long the wait was.
        limit: Duration,
    },
    /// The answer makes no sense; the path of the field is in the text.
    #[error("{0}")]
    Data(String),
}

impl ReadError {
    /// The runtime was reached and answered something unusable: asking again soon gives the same.
    #[must_use]
    pub fn is_data(&self) -> bool {
        match self {
            Self::Data(_) => true,
            Self::Call { .. } | Self::Timeout { .. } => false,
        }
    }
}

/// Which sandboxes or containers to list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Filter {
    /// All.
    All,
    /// Those with the label of this pod.
    Pod(PodUid),
    /// The one with this id.
    Id(String),
}

/// A sandbox in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedSandbox {
    /// Id.
    pub id: String,
    /// Pod by its labels; None where they name none.
    pub pod: Option<PodRef>,
    /// State.
    pub state: SandboxState,
}

/// A container in a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedContainer {
    /// Id.
    pub id: String,
    /// Its sandbox.
    pub sandbox_id: String,
    /// Pod by its labels; None where they name none.
    pub pod: Option<PodRef>,
    /// State.
    pub state: ContainerState,
}

/// The reads of the CRI. Each answer is of a call that was sent after the method was called.
#[async_trait]
pub trait ContainerRuntime: Send + Sync + 'static {
    /// ListPodSandbox.
    async fn sandboxes(&self, filter: Filter) -> Result<Vec<ListedSandbox>, ReadError>;
    /// ListContainers.
    async fn containers(&self, filter: Filter) -> Result<Vec<ListedContainer>, ReadError>;
    /// PodSandboxStatus; None: the runtime does not know it.
    async fn sandbox(&self, id: &str) -> Result<Option<(PodRef, Sandbox)>, ReadError>;
    /// ContainerStatus; None: the runtime does not know it. The CRI does not repeat the sandbox's id there.
    async fn container(&self, id: &str, sandbox_id: &str) -> Result<Option<Container>, ReadError>;
}

/// What a hint says may have happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HintKind {
    /// Made.
    Created,
    /// Its process started.
    Started,
    /// Its process ended.
    Exited,
    /// Removed.
    Deleted,
    /// Killed for memory.
    Oom,
}

impl HintKind {
    /// As a metric label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Started => "started",
            Self::Exited => "exited",
            Self::Deleted => "deleted",
            Self::Oom => "oom",
        }
    }
}

/// One message of the hint stream.
#[derive(Debug, Clone, PartialEq)]
pub enum HintEvent {
    /// Where hints come from and whether they do now.
    Source {
        /// `containerd`, `cri` or `none`.
        name: &'static str,
        /// They come.
        live: bool,
    },
    /// Look at this id.
    Hint {
        /// What may have happened.
        kind: HintKind,
        /// Container or sandbox id.
        id: String,
        /// Its pod, where the source knows it.
        pod: Option<PodUid>,
        /// Trace of what caused it.
        trace: Option<Trace>,
        /// When the runtime says it was, nanoseconds since 1970; 0: not told.
        at_unix_ns: i64,
    },
    /// This reader was too slow.
    Overrun {
        /// Hints lost.
        missed: u64,
    },
}

/// The hint stream of the runtime's owner.
#[async_trait]
pub trait HintStream: Send + Sync + 'static {
    /// Opens it. Hints begin at the latest when this returns.
    async fn open(&self) -> Result<BoxStream<'static, Result<HintEvent, tonic::Status>>, tonic::Status>;
}
