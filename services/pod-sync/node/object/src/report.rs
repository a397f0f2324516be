//! Reports of the Node object to status-reporter.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerImage, NodeCondition};
use pod_sync_clients::{Pleg, Statuses};
use pod_sync_layout::NodeSettings;
use pod_sync_node_decisions::admission::PressureCondition;
use quintlet_kit::clock::Clock;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::object::{addresses, managed_node};
use crate::status;
use pod_sync_layout::RuntimeState;

/// Longest interval between reports; status-reporter treats a report as stale after 30 s.
const REPORT_PERIOD: Duration = Duration::from_secs(10);
/// Interval between reports while the node is not ready, since any of the reasons may end at any time.
const NOT_READY_PERIOD: Duration = Duration::from_millis(500);
/// Interval between attempts while status-reporter does not take the report.
const RETRY: Duration = Duration::from_millis(100);
/// Reason against Ready while the machine shuts down (pkg/kubelet/nodeshutdown).
const SHUTTING_DOWN: &str = "node is shutting down";

/// State of the node that changes while pod-sync runs.
#[derive(Debug)]
pub struct NodeInputs {
    pub runtime: watch::Receiver<RuntimeState>,
    /// Whether the machine is about to shut down.
    pub shutting_down: watch::Receiver<bool>,
    /// Images of the runtime; `None` until they are listed.
    pub images: watch::Receiver<Option<Vec<ContainerImage>>>,
    /// Addresses of the node; `None` until they are found.
    pub ips: watch::Receiver<Option<Vec<IpAddr>>>,
    /// Pressure conditions that are true.
    pub pressure: watch::Receiver<BTreeSet<PressureCondition>>,
}

/// Reports the Node to status-reporter on every change and at least every 10 s, until `stop`.
pub async fn report_node(
    settings: NodeSettings,
    labels: BTreeMap<String, String>,
    inputs: NodeInputs,
    pleg: Arc<Pleg>,
    statuses: Arc<Statuses>,
    clock: Clock,
    stop: CancellationToken,
) {
    let NodeInputs { mut runtime, mut shutting_down, mut images, mut ips, mut pressure } = inputs;
    let mut wait = Duration::ZERO;
    loop {
        // Each branch only wakes the loop, which reads all inputs again.
        tokio::select! {
            () = stop.cancelled() => return,
            () = quintlet_kit::timers::pause(wait) => {}
            changed = runtime.changed() => if changed.is_err() { return },
            // Without logind the sender of this channel is dropped early.
            Ok(()) = shutting_down.changed() => {}
            Ok(()) = images.changed() => {}
            Ok(()) = ips.changed() => {}
            Ok(()) = pressure.changed() => {}
        }
        let state = runtime.borrow_and_update().clone();
        let mut not_ready: Vec<String> = state.not_ready.iter().cloned().collect();
        if let Err(error) = pleg.check_health().await {
            not_ready.push(format!("PLEG is not healthy: {error}"));
        }
        not_ready.extend(state.network_not_ready.iter().cloned());
        if *shutting_down.borrow_and_update() {
            not_ready.push(SHUTTING_DOWN.to_owned());
        }
        let mut node = managed_node(&settings, &labels, &state);
        let node_status = node.status.get_or_insert_default();
        // `None` leaves the addresses that the API server has.
        node_status.addresses =
            ips.borrow_and_update().as_ref().map(|ips| addresses(&settings.node_name, ips));
        node_status.conditions = conditions(&pressure.borrow_and_update());
        status::set_runtime_status(
            node_status,
            &state,
            images.borrow_and_update().clone(),
            settings.node_api_port != 0,
        );
        let is_ready = not_ready.is_empty();
        wait = match statuses.report_node(&node, not_ready, clock.boot()).await {
            Ok(()) if is_ready => REPORT_PERIOD,
            Ok(()) => NOT_READY_PERIOD,
            Err(error) => {
                tracing::debug!(error = quintlet_kit::error_chain(&error), "node report failed, retrying");
                RETRY
            }
        };
    }
}

// status-reporter adds texts and times, and the conditions that are false.
fn conditions(pressure: &BTreeSet<PressureCondition>) -> Option<Vec<NodeCondition>> {
    let condition = |kind: &PressureCondition| NodeCondition {
        type_: kind.as_str().to_owned(),
        status: "True".to_owned(),
        ..NodeCondition::default()
    };
    (!pressure.is_empty()).then(|| pressure.iter().map(condition).collect())
}
