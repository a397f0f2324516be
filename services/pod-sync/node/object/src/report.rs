//! Reports of the Node object to status-reporter.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ContainerImage, Node, NodeCondition, NodeStatus};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use pod_sync_clients::{Pleg, Statuses};
use pod_sync_layout::{ExtendedResources, NodeSettings, RuntimeState};
use pod_sync_node_decisions::admission::PressureCondition;
use quintlet_kit::clock::Clock;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_kit::task::{self, blocking};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument as _, Span};

use crate::object::{addresses, managed_node};
use crate::status;

/// Longest interval between reports; status-reporter treats a report as stale after 30 s.
const REPORT_PERIOD: Duration = Duration::from_secs(10);
/// Interval between reports while the node is not ready, since any of the reasons may end at any time.
const NOT_READY_PERIOD: Duration = Duration::from_millis(500);
/// Longest wait for the files of the machine and the size of its disk. A disk may not answer, and the reports
/// keep the Node Ready: this wait and [`REPORT_PERIOD`] are less than the 30 s of status-reporter.
const READ: Duration = Duration::from_secs(10);
/// Reason against Ready while the machine shuts down (pkg/kubelet/nodeshutdown).
const SHUTTING_DOWN: &str = "node is shutting down";

/// State of the node that changes while pod-sync runs.
#[derive(Debug)]
pub struct NodeChannels {
    /// Identity and conditions of the container runtime.
    pub runtime: watch::Receiver<RuntimeState>,
    /// Whether the machine is about to shut down.
    pub shutting_down: watch::Receiver<bool>,
    /// Images of the runtime; `None` until they are listed.
    pub images: watch::Receiver<Option<Vec<ContainerImage>>>,
    /// Addresses of the node; `None` until they are found.
    pub ips: watch::Receiver<Option<Vec<IpAddr>>>,
    /// Pressure conditions that are true.
    pub pressure: watch::Receiver<BTreeSet<PressureCondition>>,
    /// Extended resources of device plugins.
    pub devices: watch::Receiver<ExtendedResources>,
}

/// Reads what the Node shows of the machine.
struct Machine<R> {
    read: Arc<R>,
    // A read that has not ended. No other one begins meanwhile.
    reading: Option<JoinHandle<Node>>,
    // The read in progress took longer than [`READ`]. No report waits for it.
    hangs: bool,
    last: Option<Node>,
}

impl<R: Fn(&RuntimeState) -> Node + Send + Sync + 'static> Machine<R> {
    fn new(read: R) -> Self {
        Self { read: Arc::new(read), reading: None, hangs: false, last: None }
    }

    /// Returns the Node. While the machine does not answer, that is the last one that was read; `None` if
    /// there is none.
    async fn node(&mut self, state: &RuntimeState) -> Option<Node> {
        let reading = self.reading.get_or_insert_with(|| {
            let (read, state) = (Arc::clone(&self.read), state.clone());
            task::spawn("read-machine", blocking(move || read(&state)))
        });
        let limit = if self.hangs { Duration::ZERO } else { READ };
        match timeout(limit, reading).await {
            Ok(read) => {
                (self.reading, self.hangs) = (None, false);
                // A panic of the read ends the process.
                self.last = read.ok().or(self.last.take());
            }
            Err(_) if self.hangs => {}
            Err(_) => {
                self.hangs = true;
                tracing::warn!("the disk of the node does not answer, its Node shows what was read last");
            }
        }
        self.last.clone()
    }
}

/// Reports the Node to status-reporter on every change and at least every 10 s, until `stop`.
pub async fn report_node(
    settings: NodeSettings,
    labels: BTreeMap<String, String>,
    channels: NodeChannels,
    pleg: Arc<Pleg>,
    statuses: Arc<Statuses>,
    clock: Clock,
    stop: CancellationToken,
) {
    let NodeChannels { mut runtime, mut shutting_down, mut images, mut ips, mut pressure, mut devices } =
        channels;
    let settings = Arc::new(settings);
    let read = Arc::clone(&settings);
    // Blocks: `Machine` calls it on a blocking thread.
    let mut machine = Machine::new(move |state: &RuntimeState| managed_node(&read, &labels, state));
    let mut wait = Duration::ZERO;
    // The last report that status-reporter has taken.
    let mut reported: Option<(Node, Vec<String>)> = None;
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
            Ok(()) = devices.changed() => {}
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
        let Some(mut node) = machine.node(&state).await else {
            wait = NOT_READY_PERIOD;
            continue;
        };
        let node_status = node.status.get_or_insert_default();
        // `None` leaves the addresses that the API server has.
        node_status.addresses =
            ips.borrow_and_update().as_ref().map(|ips| addresses(&settings.node_name, ips));
        node_status.conditions = conditions(&pressure.borrow_and_update());
        set_extended_resources(node_status, &devices.borrow_and_update());
        status::set_runtime_status(node_status, &state, images.borrow_and_update().clone(), &settings);
        let is_ready = not_ready.is_empty();
        let report = (node, not_ready);
        // An unchanged report has no span.
        let span = if reported.as_ref() == Some(&report) {
            Span::none()
        } else {
            tracing::info_span!(parent: None, "report node", k8s.node.name = settings.node_name)
        };
        let (node, not_ready) = &report;
        let taken = statuses.report_node(node, not_ready.clone(), clock.boot()).instrument(span).await;
        wait = match taken {
            Ok(()) => {
                reported = Some(report);
                if is_ready { REPORT_PERIOD } else { NOT_READY_PERIOD }
            }
            Err(error) => {
                tracing::debug!(error = quintlet_kit::error_chain(&error), "node report failed, retrying");
                CONNECT_INTERVAL
            }
        };
    }
}

/// Adds the extended resources of device plugins (`pkg/kubelet/nodestatus: MachineInfo`). status-reporter
/// keeps the resources of others.
fn set_extended_resources(node: &mut NodeStatus, resources: &ExtendedResources) {
    for (name, count) in resources {
        let quantity = |count: usize| Quantity(count.to_string());
        node.capacity.get_or_insert_default().insert(name.clone(), quantity(count.capacity));
        node.allocatable.get_or_insert_default().insert(name.clone(), quantity(count.allocatable));
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use parking_lot::Mutex;
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn extended_resources_are_beside_those_of_the_machine() {
        let quantity = |text: &str| Quantity(text.to_owned());
        let mut node = NodeStatus {
            capacity: Some([("cpu".to_owned(), quantity("2"))].into()),
            ..NodeStatus::default()
        };
        let count = |capacity, allocatable| pod_sync_layout::ResourceCount { capacity, allocatable };
        let devices = [("a.com/gpu".to_owned(), count(3, 1)), ("a.com/gone".to_owned(), count(0, 0))];
        set_extended_resources(&mut node, &devices.into());
        let capacity = node.capacity.unwrap();
        assert_eq!((&capacity["cpu"], &capacity["a.com/gpu"]), (&quantity("2"), &quantity("3")));
        let expected = [("a.com/gone".to_owned(), quantity("0")), ("a.com/gpu".to_owned(), quantity("1"))];
        assert_eq!(node.allocatable, Some(expected.into()));
    }

    #[tokio::test]
    async fn a_disk_that_hangs_delays_one_report_and_holds_one_thread() {
        quintlet_virtual_time::start();
        let (answer, answers) = mpsc::channel::<&'static str>();
        let answers = Mutex::new(answers);
        let reads = Arc::new(Mutex::new(0));
        let counted = Arc::clone(&reads);
        let mut machine = Machine::new(move |_: &RuntimeState| {
            *counted.lock() += 1;
            let name = answers.lock().recv().unwrap_or_default().to_owned();
            Node { metadata: ObjectMeta { name: Some(name), ..ObjectMeta::default() }, ..Node::default() }
        });
        let state = RuntimeState::default();
        let name = |node: Option<Node>| node.and_then(|node| node.metadata.name);
        assert_eq!(machine.node(&state).await, None, "nothing was read yet");
        for (number, (next, last)) in [("first", None), ("second", Some("first"))].into_iter().enumerate() {
            let began = Instant::now();
            for _ in 0..20 {
                assert_eq!(name(machine.node(&state).await).as_deref(), last, "the last one");
            }
            // The first report after an answer waits for the read that hangs.
            let waits = READ.saturating_mul(u32::try_from(number).unwrap());
            assert!(began.elapsed() >= waits && began.elapsed() < waits + READ, "{:?}", began.elapsed());
            assert_eq!(*reads.lock(), number + 1, "a second read while one hangs");
            answer.send(next).unwrap();
            let answered = async {
                while name(machine.node(&state).await).as_deref() != Some(next) {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            };
            timeout(READ, answered).await.expect("the disk answers again");
        }
    }
}
