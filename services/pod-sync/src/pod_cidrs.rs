//! Tells the runtime which addresses the pods of this node are to have: runtimes make their network configuration of it.

use std::time::Duration;

use pod_sync_clients::Runtime;
use pod_sync_sources::api::SharedNode;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::Code;

/// After the runtime could not be told.
const RETRY: Duration = Duration::from_secs(1);

/// Hands each new value of the Node's `podCIDRs` to the runtime, until told to stop.
pub async fn follow(
    mut node: watch::Receiver<Option<SharedNode>>,
    runtime: Runtime,
    stop: CancellationToken,
) {
    let mut told = String::new();
    loop {
        let wanted = node.borrow_and_update().as_ref().map(joined).unwrap_or_default();
        // A Node that lost its range keeps what the runtime has: there is nothing to tell.
        let retry = !wanted.is_empty() && wanted != told && {
            let failed = !tell(&runtime, &wanted).await;
            if !failed {
                told = wanted;
            }
            failed
        };
        // All of them only wait.
        tokio::select! {
            () = stop.cancelled() => return,
            changed = node.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(RETRY), if retry => {}
        }
    }
}

/// Tells the runtime of a range that no API server gives, until it was told.
pub async fn tell_once(cidr: String, runtime: Runtime, stop: CancellationToken) {
    while !tell(&runtime, &cidr).await {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

fn joined(node: &SharedNode) -> String {
    let cidrs = node.spec.as_ref().and_then(|spec| spec.pod_cidrs.as_deref()).unwrap_or_default();
    cidrs.join(",")
}

/// True where there is nothing more to tell.
async fn tell(runtime: &Runtime, cidrs: &str) -> bool {
    match runtime.update_config(cidrs).await {
        Ok(()) => {
            tracing::info!(cidrs, "the runtime was told the pods' addresses");
            true
        }
        Err(e) if e.is_refused_by_runtime() && e.code == Code::Unimplemented => true,
        Err(e) => {
            tracing::debug!(cidrs, error = %e, "the runtime was not told the pods' addresses");
            false
        }
    }
}
