//! pleg-service caches the runtime's state of all pods. It is the only such cache of a node.
//!
//! Tasks: `relist` lists all sandboxes and containers periodically, `hints` reads the hints of cri-proxy, and
//! `hint-resolver` finds the pods of IDs that are in no entry. These three only request inspections. Each pod
//! has a `pod-owner` task with a mailbox. The owner is the only writer of the pod's entry: it inspects the
//! pod and publishes changes to the `store`. `server` and `readers` serve `pleg.v1` from the store; a `Watch`
//! is a position in the order of changes, not a queue. `subscribe` serves the same order to programs that are
//! not part of Quintlet. `health` sets SERVING.
//!
//! A follower ([`start_following`]) has none of these tasks. Its `follower` task copies the Watch of another
//! pleg-service into the store, with the same positions, and serves it to readers of its own.
//!
//! This crate changes nothing in the runtime and writes no files. It reads the runtime through the traits of
//! [`traits`] only.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod args;
mod convert;
mod core;
pub mod cri;
mod entry;
mod expect;
mod follow;
mod health;
mod hints;
mod inspect;
mod mailbox;
mod metrics;
mod owner;
mod process;
mod readers;
mod relist;
mod removed;
mod server;
mod store;
mod subscribe;
pub mod traits;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::clock::Clock;
use quintlet_kit::server::{HealthHandle, RELIST_LOOP};
use quintlet_proto::pleg::v1::pleg_server::PlegServer;
use quintlet_proto::subscribe::v1::containers_server::ContainersServer;
use tokio_util::sync::CancellationToken;

pub use crate::core::Periods;
pub use crate::follow::Follower;
pub use crate::process::main;
pub use crate::server::PlegService;
pub use crate::subscribe::ContainersService;

use crate::core::Core;
use crate::readers::Readers;
use crate::store::{Store, TOMBSTONES};
use crate::traits::{ContainerRuntime, HintStream};

/// Name of the service in grpc.health.v1.
pub const SERVICE: &str = "quintlet.pleg.v1.Pleg";

/// The gRPC services of one store.
#[derive(Debug)]
pub struct Services<P> {
    /// For the services of Quintlet.
    pub pleg: PlegServer<P>,
    /// For subscribers.
    pub containers: ContainersServer<ContainersService>,
}

impl<P> Services<P> {
    fn new(pleg: P, readers: Readers, stop: &CancellationToken) -> Self {
        let containers = ContainersService::new(readers, stop.clone());
        Self { pleg: PlegServer::new(pleg), containers: ContainersServer::new(containers) }
    }
}

/// Starts the tasks, until `stop`. Returns the gRPC services.
#[must_use]
pub fn start(
    runtime: Arc<dyn ContainerRuntime>,
    hints: Arc<dyn HintStream>,
    clock: Clock,
    periods: Periods,
    health: HealthHandle,
    stop: &CancellationToken,
) -> Services<PlegService> {
    let core = Core::new(runtime, clock, periods);
    // The stream is opened before the first list, so that no change is missed between them.
    let hints = hints::run(Arc::clone(&core), hints);
    let relist = relist::run(Arc::clone(&core));
    let watch = core.heartbeat.clone().watch(RELIST_LOOP, stuck(periods), health.clone(), stop.clone());
    let report_health = report_health(Arc::clone(&core), health);
    quintlet_kit::task::spawn("hints", stop.clone().run_until_cancelled_owned(hints));
    quintlet_kit::task::spawn("watch-relist", watch);
    quintlet_kit::task::spawn("relist", stop.clone().run_until_cancelled_owned(relist));
    quintlet_kit::task::spawn("health", stop.clone().run_until_cancelled_owned(report_health));
    let readers = core.readers.clone();
    Services::new(PlegService::new(core, stop.clone()), readers, stop)
}

/// Starts a follower of the pleg-service at `leader`, until `stop`. Returns the gRPC services.
#[must_use]
pub fn start_following(
    leader: PathBuf,
    clock: Clock,
    periods: Periods,
    health: HealthHandle,
    stop: &CancellationToken,
) -> Services<Follower> {
    let readers = Readers::new(Store::following(TOMBSTONES), clock, periods.beat);
    let follower = Follower::new(leader, readers.clone(), stop.clone());
    let (run, report_health) = (follower.clone().run(), follower.clone().report_health(health));
    quintlet_kit::task::spawn("follower", stop.clone().run_until_cancelled_owned(run));
    quintlet_kit::task::spawn("health", stop.clone().run_until_cancelled_owned(report_health));
    Services::new(follower, readers, stop)
}

/// The relist loop is stuck after this long without progress, or longer (see [`stuck`]).
const STUCK: Duration = Duration::from_secs(300);

// A runtime that hangs must not restart this process: the limit is longer than that of a call.
fn stuck(periods: Periods) -> Duration {
    let longest = periods.call.max(periods.relist).max(periods.relist_live);
    longest.saturating_mul(2).max(STUCK)
}

/// A list expires when its age exceeds the threshold, not when it reaches it.
const EXPIRY_MARGIN: Duration = Duration::from_millis(1);

/// Sets SERVING after the first full list, and while lists succeed. Health changes only when a list ends or
/// the last one expires.
async fn report_health(core: Arc<Core>, health: HealthHandle) {
    let mut serving = None;
    loop {
        let now =
            core.store.is_primed() && health::problem(core.last_list_age(), core.periods.threshold).is_none();
        if serving != Some(now) {
            for name in ["", SERVICE] {
                if now {
                    health.set_serving(name).await;
                } else {
                    health.set_not_serving(name).await;
                }
            }
            if serving.is_some() {
                tracing::info!(serving = now, error = core.lists.lock().error.as_deref(), "health changed");
            }
            serving = Some(now);
        }
        let expires = core.periods.threshold.saturating_sub(core.last_list_age().unwrap_or_default());
        // Both arms only wait; a list that ends meanwhile leaves a permit.
        tokio::select! {
            () = core.list_ended.notified() => {}
            () = tokio::time::sleep(expires.saturating_add(EXPIRY_MARGIN)), if now => {}
        }
    }
}
