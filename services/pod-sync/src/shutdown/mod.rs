//! Ends the pods before the machine shuts down (`pkg/kubelet/nodeshutdown`).
//!
//! One task holds a delay inhibitor of logind, so that a shutdown waits; when it is told of one, it says so to whoever
//! admits pods and to the Node, ends the pods group by group, and lets go. A shutdown that is called off is over at once:
//! groups that have not begun to end stay, and the inhibitor is taken again.

pub mod logind;
mod times;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::core::v1::Pod;
use pod_sync_clients::EventType;
use quintlet_kit::clock::bounded;
use quintlet_model::ids::PodUid;
use quintlet_model::pod as pods;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::context::Context;
use crate::view::View;
use pod_sync_decisions::shutdown::{ShutdownGroup, ShutdownPlan, pod_grace};
use pod_sync_decisions::status::{KillCause, KillOverride};
use pod_sync_decisions::worker::{KillPodOptions, PodFacts};

use self::logind::{Login, LoginError, Session};
use self::times::Times;

/// Message of a pod's status and of its DisruptionTarget condition.
const MESSAGE: &str = "Pod was terminated in response to imminent node shutdown.";
/// Until logind is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// How often a pod is looked at that is to be unmounted.
const LOOK: Duration = Duration::from_millis(100);
/// First wait for logind to have read its configuration anew, doubled each time (pkg/kubelet/nodeshutdown).
const RELOAD: Duration = Duration::from_millis(100);
const RELOAD_TRIES: u32 = 5;

/// The pods, as the order of ending them needs them.
#[async_trait]
pub(crate) trait Pods: Sync {
    /// A pod.
    type Pod: Clone + Send + Sync;
    /// Ends one within so many seconds, and returns when its containers have stopped or are not waited for any more.
    async fn end(&self, pod: &Self::Pod, group_seconds: u64);
    /// Nothing of it is mounted any more.
    async fn unmounted(&self, pod: &Self::Pod);
}

/// Ends group after group. No group takes longer than its time.
async fn end_all<P: Pods>(pods: &P, groups: Vec<ShutdownGroup<P::Pod>>) {
    for ShutdownGroup { seconds, pods: members } in groups {
        let ends = members.iter().map(|pod| async move {
            pods.end(pod, seconds).await;
            pods.unmounted(pod).await;
        });
        let all = futures::future::join_all(ends);
        if tokio::time::timeout(bounded(Duration::from_secs(seconds)), all).await.is_err() {
            tracing::warn!(
                seconds,
                pods = members.len(),
                "pods did not end within their share of the shutdown"
            );
        }
    }
}

type Running = (PodUid, Arc<Pod>);

struct RealPods(Arc<Context>);

#[async_trait]
impl Pods for RealPods {
    type Pod = Running;

    async fn end(&self, (uid, pod): &Self::Pod, group_seconds: u64) {
        let Ok(pod_ref) = pods::pod_ref(pod) else { return };
        let kill = KillPodOptions {
            evict: false,
            grace: Some(pod_grace(pods::spec(pod).termination_grace_period_seconds, group_seconds)),
            killed_as: Some(KillOverride {
                cause: KillCause::NodeShutdown,
                message: MESSAGE.to_owned(),
                disruption: Some(MESSAGE.to_owned()),
            }),
            ..KillPodOptions::default()
        };
        if let Err(error) = self.0.pod_workers.kill(uid, PodFacts::of(pod, pod_ref.full_name()), kill).await {
            tracing::info!(pod.uid = %uid, %error, "a pod is not waited for any more");
        }
    }

    async fn unmounted(&self, (uid, _): &Self::Pod) {
        while self.0.pod_workers.read(|w| w.is_known(uid) && !w.should_be_finished(uid)) {
            tokio::time::sleep(LOOK).await;
        }
    }
}

/// Runs until told to stop. `shutting_down` is what others are told.
pub async fn run(
    ctx: Arc<Context>,
    plan: ShutdownPlan,
    login: Box<dyn Login>,
    shutting_down: watch::Sender<bool>,
    stop: CancellationToken,
) {
    if plan.is_disabled() {
        return;
    }
    let mut told = false;
    let mut times = Times::load(&ctx.node.root_dir, ctx.metrics.clone());
    loop {
        let session = session(&ctx, &plan, login.as_ref(), &shutting_down, &mut times);
        // Dropping a session lets go of the inhibitor.
        let ended = tokio::select! {
            () = stop.cancelled() => return,
            ended = session => ended,
        };
        // Once: a machine without logind stays without.
        match ended {
            Ok(()) => told = false,
            Err(error) if told => tracing::debug!(error = quintlet_kit::error_chain(&error), "no logind"),
            Err(error) => {
                told = true;
                let error = quintlet_kit::error_chain(&error);
                tracing::warn!(error, "a shutdown of the machine will not wait for pods; trying on");
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
}

// From a connection to logind until it breaks.
async fn session(
    ctx: &Arc<Context>,
    plan: &ShutdownPlan,
    login: &dyn Login,
    shutting_down: &watch::Sender<bool>,
    times: &mut Times,
) -> Result<(), LoginError> {
    let mut session = login.connect().await?;
    // What began before this process did, or while nobody listened, is not told of again.
    let (mut lock, mut next) = if session.is_preparing().await? {
        // An inhibitor may not be given any more.
        (session.inhibit().await.ok(), Some(true))
    } else {
        shutting_down.send_replace(false);
        allow_delay(session.as_ref(), plan.total()).await?;
        let lock = session.inhibit().await?;
        tracing::info!(seconds = plan.total().as_secs(), "a shutdown of the machine waits for pods");
        (Some(lock), session.prepare_for_shutdown().await)
    };
    while let Some(starts) = next {
        let text = if starts {
            "Shutdown manager detected shutdown event"
        } else {
            "Shutdown manager detected shutdown cancellation"
        };
        ctx.events.node(&ctx.node.node_name, EventType::Normal, "Shutdown", text);
        tracing::info!(starts, "the machine shuts down, or does not after all");
        shutting_down.send_replace(starts);
        if !starts {
            lock = Some(session.inhibit().await?);
            next = session.prepare_for_shutdown().await;
            continue;
        }
        times.begin(ctx.clock.wall());
        let real = RealPods(Arc::clone(ctx));
        let ending = end_all(&real, plan.groups(active(ctx)));
        // What is dropped in either arm: an order that is called off, or a wait that is begun again below.
        next = tokio::select! {
            () = ending => {
                times.end(ctx.clock.wall());
                drop(lock.take());
                tracing::info!("pods have ended, the machine may shut down");
                session.prepare_for_shutdown().await
            }
            next = session.prepare_for_shutdown() => next,
        };
    }
    Ok(())
}

// Pods that run or are to run, by priority.
fn active(ctx: &Context) -> Vec<(Option<i32>, Running)> {
    let over = |view: &View| {
        let status = view.status.as_deref().or(view.pod.status.as_ref());
        pods::is_terminal_phase(status.and_then(|s| s.phase.as_deref()))
    };
    // One without a worker has nothing to stop.
    let all = ctx.views.all().into_iter().filter(|v| !v.worker.is_empty());
    let all = all.filter(|v| !over(v) && !ctx.is_over(&v.pod_ref.uid));
    all.map(|v| (pods::spec(&v.pod).priority, (v.pod_ref.uid.clone(), Arc::clone(&v.pod)))).collect()
}

// logind ends a delay after InhibitDelayMaxSec, whoever still holds on.
async fn allow_delay(session: &dyn Session, wanted: Duration) -> Result<(), LoginError> {
    if session.max_delay().await? >= wanted {
        return Ok(());
    }
    session.raise_max_delay(wanted).await?;
    let mut wait = RELOAD;
    let mut now = session.max_delay().await?;
    for _ in 0..RELOAD_TRIES {
        if now >= wanted {
            return Ok(());
        }
        tokio::time::sleep(wait).await;
        wait = wait.saturating_mul(2);
        now = session.max_delay().await?;
    }
    if now >= wanted { Ok(()) } else { Err(LoginError::TooShort { wanted, now }) }
}

#[cfg(test)]
mod tests;
