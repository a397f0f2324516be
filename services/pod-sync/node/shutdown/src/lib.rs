//! Graceful node shutdown: terminates pods before the machine shuts down (pkg/kubelet/nodeshutdown).
//!
//! [`run`] is a future that the caller spawns. It holds a delay inhibitor of logind, so that a shutdown waits
//! for it. On a shutdown it publishes `true` on a `watch` channel, terminates the pods group by group, and
//! releases the inhibitor. When a shutdown is cancelled, groups that have not begun to terminate are kept,
//! and the inhibitor is taken again.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod logind;
mod times;

pub use crate::logind::{Login, LoginError, Session, SystemBus};

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use pod_sync_clients::{EventType, Events};
use pod_sync_metrics::PodMetrics;
use pod_sync_node_decisions::shutdown::{ShutdownGroup, ShutdownPlan};
use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::{Clock, FAR, bounded};
use quintlet_kit::task::blocking;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::times::Times;

/// Interval between attempts to connect to logind.
const RETRY: Duration = Duration::from_secs(1);
/// First wait for logind to reload its configuration, doubled each time (pkg/kubelet/nodeshutdown).
const RELOAD: Duration = Duration::from_millis(100);
const RELOAD_TRIES: u32 = 5;

/// The pods of the node.
#[async_trait]
pub trait Pods: Send + Sync {
    /// A pod of the node.
    type Pod: Clone + Send + Sync;

    /// Returns the active pods with their priorities.
    fn active(&self) -> Vec<(Option<i32>, Self::Pod)>;

    /// Terminates a pod within `group_seconds`. Returns when its containers have stopped, or after a limit.
    async fn kill(&self, pod: &Self::Pod, group_seconds: u64);

    /// Waits until the volumes of a pod are unmounted.
    async fn wait_unmounted(&self, pod: &Self::Pod);
}

/// The node, for records of shutdowns.
#[derive(Debug, Clone)]
pub struct ShutdownContext {
    /// Name of the Node object.
    pub name: String,
    /// Root directory of the kubelet, with the record of the last shutdown.
    pub root_dir: PathBuf,
    /// Gets the events about the node.
    pub events: Events,
    /// Gets the start and end of shutdowns.
    pub metrics: PodMetrics,
    /// Wall time and CLOCK_BOOTTIME.
    pub clock: Clock,
}

/// Terminates the groups one after another, each within its time.
async fn kill_groups<P: Pods>(pods: &P, groups: Vec<ShutdownGroup<P::Pod>>) {
    for ShutdownGroup { seconds, pods: members } in groups {
        let kills = members.iter().map(|pod| async move {
            pods.kill(pod, seconds).await;
            pods.wait_unmounted(pod).await;
        });
        let all = futures::future::join_all(kills);
        if tokio::time::timeout(bounded(Duration::from_secs(seconds)), all).await.is_err() {
            tracing::warn!(
                seconds,
                pods = members.len(),
                "pods did not terminate within the time of their group"
            );
        }
    }
}

/// Delays shutdowns of the machine and terminates pods before them, until `stop`. Publishes on
/// `shutting_down` whether the machine is shutting down.
pub async fn run<P: Pods>(
    pods: P,
    node: ShutdownContext,
    plan: ShutdownPlan,
    login: Box<dyn Login>,
    shutting_down: watch::Sender<bool>,
    stop: CancellationToken,
) {
    if plan.is_disabled() {
        return;
    }
    let mut is_logged = false;
    let (root_dir, metrics) = (node.root_dir.clone(), node.metrics.clone());
    let mut times = blocking(move || Times::load(&root_dir, metrics)).await;
    loop {
        let session = session(&pods, &node, &plan, login.as_ref(), &shutting_down, &mut times);
        // Dropping a session releases the inhibitor.
        let ended = tokio::select! {
            () = stop.cancelled() => return,
            ended = session => ended,
        };
        // Logged once, since a machine without logind never gets one.
        match ended {
            Ok(()) => is_logged = false,
            Err(error) if is_logged => {
                tracing::debug!(error = quintlet_kit::error_chain(&error), "failed to use logind, retrying");
            }
            Err(error) => {
                is_logged = true;
                let error = quintlet_kit::error_chain(&error);
                tracing::warn!(error, "failed to use logind, shutdowns do not wait for pods; retrying");
            }
        }
        // Each branch only waits.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

/// Runs from a connection to logind until it breaks.
async fn session<P: Pods>(
    pods: &P,
    node: &ShutdownContext,
    plan: &ShutdownPlan,
    login: &dyn Login,
    shutting_down: &watch::Sender<bool>,
    times: &mut Times,
) -> Result<(), LoginError> {
    let mut session = login.connect().await?;
    // There is no signal for a shutdown that has already begun.
    let (mut lock, mut next) = if session.is_preparing().await? {
        // logind may refuse an inhibitor during a shutdown.
        (session.inhibit().await.ok(), Some(true))
    } else {
        shutting_down.send_replace(false);
        allow_delay(session.as_ref(), plan.total()).await?;
        let lock = session.inhibit().await?;
        tracing::info!(seconds = plan.total().as_secs(), "took shutdown inhibitor");
        (Some(lock), session.prepare_for_shutdown().await)
    };
    while let Some(starts) = next {
        let text = if starts {
            "Shutdown manager detected shutdown event"
        } else {
            "Shutdown manager detected shutdown cancellation"
        };
        node.events.node(&node.name, EventType::Normal, "Shutdown", text);
        tracing::info!(starts, "machine shutdown started or cancelled");
        shutting_down.send_replace(starts);
        if !starts {
            lock = Some(session.inhibit().await?);
            next = session.prepare_for_shutdown().await;
            continue;
        }
        times.begin(node.clock.wall()).await;
        let killing = kill_groups(pods, plan.groups(pods.active()));
        // The dropped branch is either a cancelled termination, or a wait for a signal, which loses nothing.
        next = tokio::select! {
            () = killing => {
                times.end(node.clock.wall()).await;
                drop(lock.take());
                tracing::info!("terminated pods, released shutdown inhibitor");
                session.prepare_for_shutdown().await
            }
            next = session.prepare_for_shutdown() => next,
        };
    }
    Ok(())
}

// logind ends a delay after InhibitDelayMaxSec, even if the inhibitor is held.
async fn allow_delay(session: &dyn Session, requested: Duration) -> Result<(), LoginError> {
    if session.max_delay().await? >= requested {
        return Ok(());
    }
    session.raise_max_delay(requested).await?;
    let mut backoff = Backoff::new(RELOAD, 2.0, FAR);
    let mut now = session.max_delay().await?;
    for _ in 0..RELOAD_TRIES {
        if now >= requested {
            return Ok(());
        }
        tokio::time::sleep(backoff.next_wait()).await;
        now = session.max_delay().await?;
    }
    if now >= requested { Ok(()) } else { Err(LoginError::TooShort { requested, now }) }
}

#[cfg(test)]
mod tests;
