//! Pod CIDRs for the runtime, which may write its network configuration from them.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use pod_sync_clients::Runtime;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Code;

/// Interval between attempts while the runtime does not take the CIDRs.
const RETRY: Duration = Duration::from_secs(1);

/// Sends each new value of the Node's `podCIDRs` to the runtime, until `stop`.
pub async fn follow_pod_cidrs(
    mut node: watch::Receiver<Option<Arc<Node>>>,
    runtime: Runtime,
    stop: CancellationToken,
) {
    let mut sent = String::new();
    loop {
        let wanted = node.borrow_and_update().as_deref().map(joined).unwrap_or_default();
        // If the Node loses its CIDRs, the runtime keeps the last ones.
        let retry = !wanted.is_empty() && wanted != sent && {
            let failed = !send(&runtime, &wanted).await;
            if !failed {
                sent = wanted;
            }
            failed
        };
        // Each branch only waits.
        tokio::select! {
            () = stop.cancelled() => return,
            changed = node.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(RETRY), if retry => {}
        }
    }
}

/// Sends the configured CIDR of a node without an API server to the runtime. Retries until it succeeds or
/// until `stop`.
pub async fn set_pod_cidrs(cidr: String, runtime: Runtime, stop: CancellationToken) {
    while !send(&runtime, &cidr).await {
        // Each branch only waits.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

fn joined(node: &Node) -> String {
    let cidrs = node.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_deref()).unwrap_or_default();
    cidrs.join(",")
}

/// Returns whether the runtime took the CIDRs or does not support them.
async fn send(runtime: &Runtime, cidrs: &str) -> bool {
    match runtime.update_config(cidrs).await {
        Ok(()) => {
            tracing::info!(cidrs, "sent pod CIDRs to the runtime");
            true
        }
        Err(e) if e.is_refused_by_runtime() && e.code == Code::Unimplemented => true,
        Err(e) => {
            tracing::debug!(cidrs, error = %e, "failed to send pod CIDRs to the runtime, retrying");
            false
        }
    }
}
