//! The state of the container runtime, polled from its Status.

use std::collections::BTreeMap;
use std::time::Duration;

use pod_sync_clients::{CallError, Runtime};
use pod_sync_layout::{HandlerFeatures, RuntimeState};
use quintlet_cgroups::Cgroups;
use quintlet_kit::clock::Clock;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::node_cgroups::{EnforcementError, NodeCgroups};

/// Interval between polls of the runtime's Status (pkg/kubelet/kubelet.go: updateRuntimeUp).
const STATUS_PERIOD: Duration = Duration::from_secs(5);
/// Interval between polls while the runtime does not answer.
const STATUS_RETRY: Duration = Duration::from_millis(100);
/// The runtime is down if it has not answered for this long (pkg/kubelet/runtime.go).
const DOWN_AFTER: Duration = Duration::from_secs(30);
/// Time after the start during which a runtime that is not ready is polled every [`STATUS_RETRY`]
/// (pkg/kubelet/kubelet.go: fastStatusUpdateOnce).
const FAST_START: Duration = Duration::from_secs(120);

/// Polls the runtime's Status until `stop`, and sets up the cgroups of the node before the first Status is
/// published.
///
/// # Errors
/// The configuration asks for limits of a cgroup that cannot be limited. No Status is published then.
pub async fn poll_runtime(
    runtime: Runtime,
    clock: Clock,
    state: watch::Sender<RuntimeState>,
    cgroups: NodeCgroups,
    stop: CancellationToken,
) -> Result<(), EnforcementError> {
    let mut good: Option<Duration> = None;
    let mut cgroups = Some(cgroups);
    let started = clock.boot();
    let mut was_ready = false;
    loop {
        let read = {
            let read = async {
                // No pod starts before the cgroups are set up with the runtime's cgroup driver.
                if let Some(groups) = &cgroups {
                    set_driver(&runtime, groups.cgroups()).await?;
                    if let Err(error) = groups.set_up().await {
                        return Ok(Err(error));
                    }
                }
                read_runtime(&runtime).await.map(Ok)
            };
            let mut read = std::pin::pin!(read);
            let age = good.map_or(Duration::ZERO, |at| clock.boot().saturating_sub(at));
            match tokio::time::timeout(DOWN_AFTER.saturating_sub(age), &mut read).await {
                Ok(read) => read,
                Err(_) => {
                    // The runtime hangs: report it as down, and keep waiting for its answer.
                    publish_down(&state, good);
                    tokio::select! {
                        () = stop.cancelled() => return Ok(()),
                        read = read => read,
                    }
                }
            }
        };
        if read.is_ok() {
            cgroups = None;
        }
        let next = match read {
            Ok(Err(error)) => return Err(error),
            Ok(Ok(new)) => {
                good = Some(clock.boot());
                was_ready |= new.is_ready();
                state.send_if_modified(|old| {
                    let changed = *old != new;
                    *old = new;
                    changed
                });
                // A node rollout waits for the first Ready, and the network plugin often starts after the
                // node.
                if was_ready || clock.boot().saturating_sub(started) > FAST_START {
                    STATUS_PERIOD
                } else {
                    STATUS_RETRY
                }
            }
            Err(error) => {
                tracing::debug!(%error, "runtime status failed, retrying");
                if good.is_none_or(|at| clock.boot().saturating_sub(at) > DOWN_AFTER) {
                    publish_down(&state, good);
                }
                STATUS_RETRY
            }
        };
        // Dropping the sleep ends the loop.
        tokio::select! {
            () = stop.cancelled() => return Ok(()),
            () = quintlet_kit::timers::pause(next) => {}
        }
    }
}

fn publish_down(state: &watch::Sender<RuntimeState>, good: Option<Duration>) {
    let text = match good {
        None => "container runtime status check may not have completed yet",
        Some(_) => "container runtime is down",
    };
    state.send_if_modified(|old| {
        let changed = old.not_ready.as_deref() != Some(text);
        old.not_ready = Some(text.to_owned());
        changed
    });
}

// The cgroup driver of the runtime overrides the configured one. A runtime without RuntimeConfig leaves it.
async fn set_driver(runtime: &Runtime, cgroups: &Cgroups) -> Result<(), CallError> {
    if let Some(driver) = runtime.cgroup_driver().await?
        && cgroups.set_driver(driver)
    {
        tracing::info!(?driver, "using cgroup driver of the runtime");
    }
    Ok(())
}

async fn read_runtime(runtime: &Runtime) -> Result<RuntimeState, CallError> {
    let (status, version) = tokio::try_join!(runtime.status(), runtime.version())?;
    let conditions = status.status.unwrap_or_default().conditions;
    let failing = |name: &str| match conditions.iter().find(|c| c.r#type == name) {
        Some(c) if c.status => None,
        Some(c) => Some(format!("{}={} reason:{} message:{}", c.r#type, c.status, c.reason, c.message)),
        None => Some(format!("{name}=false reason: message:")),
    };
    let policy = status.features.as_ref().map(|f| f.supplemental_groups_policy);
    let mount_options = status.features.as_ref().is_some_and(|f| f.mount_options);
    let handlers: BTreeMap<String, HandlerFeatures> = status
        .runtime_handlers
        .iter()
        .map(|h| {
            let f = h.features.unwrap_or_default();
            let features = HandlerFeatures {
                recursive_read_only_mounts: f.recursive_read_only_mounts,
                user_namespaces: f.user_namespaces,
                supplemental_groups_policy: policy == Some(true),
                mount_options,
            };
            (h.name.clone(), features)
        })
        .collect();
    Ok(RuntimeState {
        name: version.runtime_name,
        version: version.runtime_version,
        not_ready: failing("RuntimeReady").map(|c| format!("container runtime not ready: {c}")),
        network_not_ready: failing("NetworkReady")
            .map(|c| format!("container runtime network not ready: {c}")),
        handlers,
        supplemental_groups_policy: policy,
        mount_options,
    })
}
