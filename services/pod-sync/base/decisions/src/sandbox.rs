//! Decides whether a pod needs a new sandbox (`pkg/kubelet/kuberuntime/util: PodSandboxChanged`).

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::ids::SandboxId;
use quintlet_model::pod;
use quintlet_model::runtime::{PodRuntime, SandboxState};

/// Whether the pod keeps its sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SandboxDecision {
    /// The newest sandbox is usable.
    Keep {
        /// ID of the newest sandbox.
        id: SandboxId,
        /// Attempt of the newest sandbox.
        attempt: u32,
    },
    /// A new sandbox is needed.
    Create {
        /// Attempt of the new sandbox.
        attempt: u32,
        /// The replaced sandbox, for the SandboxChanged event.
        replaces: Option<SandboxId>,
        /// Reason, which the logs and the SandboxChanged event give.
        why: SandboxChange,
    },
}

/// Reason why a new sandbox is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SandboxChange {
    /// There is no sandbox.
    None,
    /// More than one sandbox is ready.
    SeveralReady,
    /// The newest sandbox is not ready.
    NotReady,
    /// The sandbox's network mode differs from the spec.
    NetworkMode,
    /// The sandbox has a network without an address.
    NoAddress,
}

/// Decides whether the newest sandbox is kept (`pkg/kubelet/kuberuntime/util: PodSandboxChanged`).
#[must_use]
pub fn sandbox_decision(pod: &Pod, runtime: &PodRuntime) -> SandboxDecision {
    let Some(newest) = runtime.sandboxes.first() else {
        return SandboxDecision::Create { attempt: 0, replaces: None, why: SandboxChange::None };
    };
    let create =
        |replaces, why| SandboxDecision::Create { attempt: newest.attempt.saturating_add(1), replaces, why };
    let host_network = pod::host_network(pod);
    if runtime.sandboxes.iter().filter(|s| s.state == SandboxState::Ready).count() > 1 {
        return create(Some(newest.id.clone()), SandboxChange::SeveralReady);
    }
    if newest.state != SandboxState::Ready {
        return create(Some(newest.id.clone()), SandboxChange::NotReady);
    }
    if newest.host_network != host_network {
        return create(None, SandboxChange::NetworkMode);
    }
    if !host_network && newest.has_network && newest.ips.is_empty() {
        return create(Some(newest.id.clone()), SandboxChange::NoAddress);
    }
    SandboxDecision::Keep { id: newest.id.clone(), attempt: newest.attempt }
}
