//! Decides whether a pod needs another sandbox (`pkg/kubelet/kuberuntime/util: PodSandboxChanged`).

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::ids::SandboxId;
use quintlet_model::pod;
use quintlet_model::runtime::{PodRuntime, SandboxState};

/// Whether the newest sandbox serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SandboxDecision {
    /// It serves.
    Keep {
        /// Its id.
        id: SandboxId,
        /// Its attempt.
        attempt: u32,
    },
    /// A new one is needed.
    Create {
        /// Attempt of the new one.
        attempt: u32,
        /// The one replaced, for the SandboxChanged event.
        replaces: Option<SandboxId>,
        /// Why.
        why: SandboxChange,
    },
}

/// Why a sandbox does not serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SandboxChange {
    /// There is none.
    None,
    /// More than one is ready.
    SeveralReady,
    /// The newest is not ready.
    NotReady,
    /// Its network mode is not the spec's.
    NetworkMode,
    /// It reported a network without an address.
    NoAddress,
}

/// Decides on the sandbox (pkg/kubelet/kuberuntime/util: PodSandboxChanged).
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
