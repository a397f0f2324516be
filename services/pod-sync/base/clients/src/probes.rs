//! Probe targets of the instances of probe-service, and the memory of their probes.
//!
//! Instances are the sockets in one directory. Their health is checked once a second, and `shards` assigns
//! pods to them. A pod moves in three steps: its instance is asked to release the pod, the instance answers
//! with the final memory, and the other instance gets the pod with that memory and the next generation. Later
//! reports of a lower generation are dropped.

mod discovery;
mod memory;
mod shards;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use parking_lot::{Mutex, RwLock};
use quintlet_kit::args::paths::socket_names;
use quintlet_kit::messages::{TooLarge, bounded_requests, count_left_out, fits};
use quintlet_kit::neighbour::{Neighbour, PeerFeature};
use quintlet_kit::queue;
use quintlet_kit::socket::CONNECT_INTERVAL;
use quintlet_model::convert;
use quintlet_model::ids::PodUid;
use quintlet_model::probe::{ProbeMemory, ProbeType};
use quintlet_proto::common::v1::Trace;
use quintlet_proto::probe::v1 as wire;
use quintlet_proto::probe::v1::probe_client::ProbeClient;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use self::discovery::watch;
pub use self::memory::PodMemory;
use self::memory::{clear_memory, fill_memory, merge};
use self::shards::{AssignmentDecision, Instances, Place};
use crate::WorkerWakeups;

/// Interval between health checks of an instance, while another one could take over its pods.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);
/// Interval between health checks of the only instance. The checks only write to the log.
const HEALTH_INTERVAL_ALONE: Duration = Duration::from_secs(10);
/// An instance whose health check takes longer counts as unresponsive since the check was sent.
const HEALTH_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest interval between scans of the directory, in case that its watch misses a socket.
const SCAN_INTERVAL: Duration = Duration::from_secs(5);
/// Messages that wait in a stream. The differences are computed from the whole set of targets, so a full
/// stream only delays them.
const STREAM: usize = 256;
/// Failed probes that wait to become events.
const FAILURES: usize = 1000;
/// Names of the queues.
const PROBE_TARGETS: &str = "probe-targets";
const PROBE_FAILURES: &str = "probe-failures";

/// Features without which an instance would run a probe in another way.
const FEATURES: &[PeerFeature] = &[PeerFeature::GrpcProbeTls, PeerFeature::HttpProbeH2c];

/// The stream of targets, in metrics.
const DRIVE: &str = "Probe.Drive";

/// A probe that failed.
#[derive(Debug, Clone)]
pub struct ProbeFailure {
    /// UID of the pod whose probe failed.
    pub uid: PodUid,
    /// Name of the container that the probe belongs to.
    pub container: String,
    /// Reason of the event.
    pub reason: String,
    /// Message of the event.
    pub message: String,
}

#[derive(Debug, Clone)]
struct Assigned {
    // Without memory, which comes from the instance itself and is filled in when the target is sent. Shared
    // with the streams, since a target may have megabytes.
    target: Arc<wire::PodTarget>,
    place: Place,
    // Trace of the sync that produced the target.
    trace: Option<Trace>,
}

impl Assigned {
    /// Assigns the pod to an instance. A pod that had no instance keeps its generation, which is the first.
    fn assign(&mut self, instance: String) {
        if self.place != Place::Nowhere {
            let target = Arc::make_mut(&mut self.target);
            target.generation = target.generation.saturating_add(1);
        }
        self.place = Place::At(instance);
    }
}

#[derive(Debug, Default)]
struct Desired {
    pods: HashMap<PodUid, Assigned>,
    instances: Instances,
}

/// Targets and releases that were sent on one stream.
#[derive(Debug, Default)]
struct Sent {
    targets: HashMap<PodUid, Arc<wire::PodTarget>>,
    /// Generations of the pods that the instance was asked to release.
    releases: HashMap<PodUid, u64>,
}

/// Client of all instances of probe-service. Holds the target and the probe memory of every pod.
#[derive(Debug)]
pub struct Probes {
    dir: PathBuf,
    desired: RwLock<Desired>,
    memory: Mutex<HashMap<PodUid, PodMemory>>,
    // Wakes the driver of each instance.
    drivers: Mutex<HashMap<String, Arc<Notify>>>,
    // An instance has become responsive or unresponsive.
    health_changed: Notify,
    // Wakes all health checks: the number of instances has changed.
    instances_changed: Notify,
    failures: mpsc::Sender<ProbeFailure>,
    wakes: Arc<WorkerWakeups>,
}

impl Probes {
    /// Creates a client of the instances whose sockets are in `dir`; there need not be any yet. The receiver
    /// gets failed probes.
    #[must_use]
    pub fn new(dir: PathBuf, wakes: Arc<WorkerWakeups>) -> (Arc<Self>, mpsc::Receiver<ProbeFailure>) {
        let (failures, rx) = queue::channel(PROBE_FAILURES, FAILURES);
        let probes = Self {
            dir,
            desired: RwLock::default(),
            memory: Mutex::default(),
            drivers: Mutex::default(),
            health_changed: Notify::new(),
            instances_changed: Notify::new(),
            failures,
            wakes,
        };
        (Arc::new(probes), rx)
    }

    /// Restores the probe memory that an earlier pod-sync saved.
    pub fn restore(&self, uid: &PodUid, memory: PodMemory) {
        self.memory.lock().insert(uid.clone(), memory);
    }

    /// Returns the memory of the probes of a pod.
    #[must_use]
    pub fn memory(&self, uid: &PodUid) -> PodMemory {
        self.memory.lock().get(uid).cloned().unwrap_or_default()
    }

    /// Sets the initial memory of a probe of a new container. A result of the same container that
    /// probe-service has stays.
    pub fn seed(&self, uid: &PodUid, container: &str, probe: ProbeType, memory: ProbeMemory) {
        let mut all = self.memory.lock();
        memory::seed(all.entry(uid.clone()).or_default(), container, probe, memory);
    }

    /// Sets the probe target of a pod, which has no memory. Its generation is filled in. A target that is too
    /// large stops the probes of the pod; their memory stays.
    ///
    /// # Errors
    /// The target is too large.
    pub fn set_target(&self, uid: &PodUid, mut target: wire::PodTarget) -> Result<(), TooLarge> {
        if let Some(have) = self.desired.read().pods.get(uid) {
            target.generation = have.target.generation;
            if *have.target == target {
                return Ok(());
            }
        }
        fill_memory(&mut target, &self.memory(uid));
        let fitting = fits(&target);
        clear_memory(&mut target);
        let mut desired = self.desired.write();
        if let Err(error) = fitting {
            let gone = desired.pods.remove(uid);
            drop(desired);
            count_left_out(DRIVE);
            if let Some(gone) = gone {
                self.wake_driver(gone.place.instance());
            }
            return Err(error);
        }
        let (generation, place) = match desired.pods.get(uid) {
            Some(have) => (have.target.generation, have.place.clone()),
            None => {
                let best = desired.instances.best(uid, Instant::now());
                (1, best.map_or(Place::Nowhere, |id| Place::At(id.to_owned())))
            }
        };
        target.generation = generation;
        let target = Arc::new(target);
        let instance = place.instance().map(str::to_owned);
        let trace = quintlet_telemetry::propagate::current_trace();
        desired.pods.insert(uid.clone(), Assigned { target, place, trace });
        drop(desired);
        self.wake_driver(instance.as_deref());
        Ok(())
    }

    /// Stops probing a pod and drops its probe memory.
    pub fn remove(&self, uid: &PodUid) {
        self.stop(uid);
        self.memory.lock().remove(uid);
    }

    /// Stops probing a pod and keeps its probe memory, from which its status is made.
    pub fn stop(&self, uid: &PodUid) {
        let gone = self.desired.write().pods.remove(uid);
        if let Some(gone) = gone {
            self.wake_driver(gone.place.instance());
        }
    }

    fn wake_driver(&self, instance: Option<&str>) {
        if let Some(driver) = instance.and_then(|i| self.drivers.lock().get(i).cloned()) {
            driver.notify_one();
        }
    }

    /// Discovers instances and spawns a driver for each, until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let (wake, mut woken) = queue::wakes();
        let mut watcher = None;
        let mut running: BTreeSet<String> = BTreeSet::new();
        loop {
            if watcher.is_none() {
                watcher = watch(&self.dir, wake.clone());
            }
            let present = socket_names(&self.dir);
            self.update_instances(&present);
            for instance in present.difference(&running) {
                let changed = Arc::new(Notify::new());
                self.drivers.lock().insert(instance.clone(), Arc::clone(&changed));
                let drive = Arc::clone(&self).drive(instance.clone(), changed, stop.clone());
                quintlet_kit::task::spawn("probe-driver", drive);
            }
            running.extend(present);
            let pending = self.is_pending();
            let again = if pending || watcher.is_none() { CONNECT_INTERVAL } else { SCAN_INTERVAL };
            // Each branch only wakes the loop, which reads the whole directory.
            tokio::select! {
                () = stop.cancelled() => return,
                _ = woken.recv() => {}
                () = self.health_changed.notified() => {}
                () = quintlet_kit::timers::pause(again) => {}
            }
        }
    }

    /// Returns whether the passing of time alone may change an assignment.
    fn is_pending(&self) -> bool {
        let desired = self.desired.read();
        desired.instances.is_pending()
            || desired.pods.values().any(|a| matches!(a.place, Place::Leaving { .. }))
    }

    fn update_instances(&self, present: &BTreeSet<String>) {
        let now = Instant::now();
        let mut changed = BTreeSet::new();
        {
            let mut desired = self.desired.write();
            let Desired { pods, instances } = &mut *desired;
            let before = instances.len();
            instances.found(present, now);
            if instances.len() != before {
                self.instances_changed.notify_waiters();
            }
            for (instance, live) in instances.liveness_changes(now) {
                let pods = pods.values().filter(|a| a.place.instance() == Some(instance.as_str())).count();
                if live {
                    tracing::info!(instance, pods, "probe-service instance is ready");
                } else {
                    tracing::warn!(instance, pods, "probe-service instance is unresponsive");
                }
            }
            for (uid, assigned) in pods.iter_mut() {
                let best = instances.best(uid, now);
                let step = shards::decide(&assigned.place, best, |id| instances.is_live(id, now), now);
                let before = assigned.place.instance().map(str::to_owned);
                match step {
                    AssignmentDecision::Stay => continue,
                    AssignmentDecision::Release => {
                        let instance = before.clone().unwrap_or_default();
                        assigned.place = Place::Leaving { instance, since: now };
                    }
                    AssignmentDecision::Assign(instance) => {
                        changed.insert(instance.clone());
                        assigned.assign(instance);
                    }
                }
                changed.extend(before);
            }
        }
        for instance in &changed {
            self.wake_driver(Some(instance));
        }
    }

    /// Assigns a pod that its instance has released to the best instance.
    fn released(&self, uid: &PodUid, generation: u64) {
        let now = Instant::now();
        let instance = {
            let mut desired = self.desired.write();
            let Desired { pods, instances } = &mut *desired;
            let Some(assigned) = pods.get_mut(uid) else { return };
            let Place::Leaving { instance: previous, .. } = &assigned.place else { return };
            if generation != assigned.target.generation {
                return;
            }
            let instance = instances.best(uid, now).unwrap_or(previous).to_owned();
            assigned.assign(instance.clone());
            instance
        };
        self.wake_driver(Some(&instance));
    }

    async fn drive(self: Arc<Self>, id: String, changed: Arc<Notify>, stop: CancellationToken) {
        let path = self.dir.join(format!("{id}.sock"));
        let channel = quintlet_kit::socket::channel(path);
        let peer = Neighbour::new(format!("probe-service {id}"), FEATURES);
        let streams = async {
            loop {
                // A broken stream loses nothing: the next one sends all targets and replays the memory.
                if let Err(status) =
                    self.stream(&id, &changed, &peer, ProbeClient::new(channel.clone())).await
                {
                    tracing::debug!(instance = id, error = status.message(), "probe stream ended");
                }
                tokio::time::sleep(peer.next_wait(CONNECT_INTERVAL)).await;
            }
        };
        // `streams` and the health checks end only by being dropped, which loses nothing.
        tokio::select! {
            () = stop.cancelled() => {}
            () = streams => {}
            () = self.check_health(&id, &peer, HealthClient::new(channel.clone())) => {}
        }
    }

    /// Checks the health of an instance in a loop. The socket and the streams do not show that its process is
    /// suspended. An instance that is refused counts as unresponsive, so that its pods move to another one.
    async fn check_health(&self, id: &str, peer: &Neighbour, mut health: HealthClient<Channel>) {
        loop {
            let sent_at = Instant::now();
            let mut check = std::pin::pin!(health.check(HealthCheckRequest::default()));
            let answer = match tokio::time::timeout(HEALTH_TIMEOUT, &mut check).await {
                Ok(answer) => answer,
                Err(_) => {
                    self.silent(id, sent_at);
                    // A resumed process answers at once, and a broken connection returns an error.
                    check.await
                }
            };
            if answer.is_ok() && peer.check().is_ok() {
                if self.desired.write().instances.answered(id) {
                    self.health_changed.notify_one();
                }
                let (more, alone) =
                    (self.instances_changed.notified(), self.desired.read().instances.len() < 2);
                let interval = if alone { HEALTH_INTERVAL_ALONE } else { HEALTH_INTERVAL };
                // Both arms only wait.
                tokio::select! {
                    () = more => {}
                    () = quintlet_kit::timers::pause(interval) => {}
                }
            } else {
                self.silent(id, sent_at);
                tokio::time::sleep(CONNECT_INTERVAL).await;
            }
        }
    }

    fn silent(&self, id: &str, sent_at: Instant) {
        if self.desired.write().instances.silent(id, sent_at) {
            self.health_changed.notify_one();
        }
    }

    async fn stream(
        &self,
        id: &str,
        changed: &Notify,
        peer: &Neighbour,
        mut client: ProbeClient<Channel>,
    ) -> Result<(), tonic::Status> {
        let (tx, rx) = queue::channel(PROBE_TARGETS, STREAM);
        let hello = request(wire::drive_request::Request::Hello(quintlet_proto::hello()), None);
        let _ = queue::offer(&tx, PROBE_TARGETS, hello);
        let mut reports = client.drive(bounded_requests(DRIVE, rx)).await?.into_inner();
        // The instance replays its memory first, so that no target carries older memory.
        while let Some(report) = reports.next().await {
            let report = report?;
            match report.report {
                Some(wire::drive_report::Report::ReplayEnd(_)) => break,
                Some(wire::drive_report::Report::Hello(hello)) => peer.greeted(&hello)?,
                report => self.report(wire::DriveReport { report, trace: None }),
            }
        }
        let write = async {
            let mut sent = Sent::default();
            let mut first = true;
            loop {
                for (mut message, trace) in self.difference(id, &mut sent) {
                    leave_out_unknown(&mut message, peer);
                    if tx.send(request(message, trace)).await.is_err() {
                        return;
                    }
                }
                if std::mem::take(&mut first)
                    && tx
                        .send(request(wire::drive_request::Request::Complete(wire::FullSetComplete {}), None))
                        .await
                        .is_err()
                {
                    return;
                }
                changed.notified().await;
            }
        };
        let read = async {
            while let Some(report) = reports.next().await {
                self.report(report?);
            }
            Ok(())
        };
        // When one half ends, both are dropped; the next stream starts again.
        tokio::select! {
            () = write => Ok(()),
            ended = read => ended,
        }
    }

    /// Returns the messages that bring an instance up to date, and adds them to `sent`.
    fn difference(&self, id: &str, sent: &mut Sent) -> Vec<(wire::drive_request::Request, Option<Trace>)> {
        let desired = self.desired.read();
        let is_mine = |a: &Assigned| matches!(&a.place, Place::At(at) if at == id);
        let is_leaving = |a: &Assigned| matches!(&a.place, Place::Leaving { instance, .. } if instance == id);
        let mut out = Vec::new();
        sent.releases.retain(|uid, _| desired.pods.get(uid).is_some_and(is_leaving));
        for (uid, assigned) in desired.pods.iter().filter(|(_, a)| is_leaving(a)) {
            let generation = assigned.target.generation;
            sent.targets.remove(uid);
            if sent.releases.insert(uid.clone(), generation) != Some(generation) {
                let release = wire::ReleasePod { uid: uid.to_string(), generation };
                out.push((wire::drive_request::Request::Release(release), None));
            }
        }
        sent.targets.retain(|uid, target| {
            let keep = desired.pods.get(uid).is_some_and(is_mine);
            if !keep {
                let gone = wire::RemovePod { uid: uid.to_string(), generation: target.generation };
                out.push((wire::drive_request::Request::Remove(gone), None));
            }
            keep
        });
        for (uid, assigned) in desired.pods.iter().filter(|(_, a)| is_mine(a)) {
            if sent.targets.get(uid).is_some_and(|have| Arc::ptr_eq(have, &assigned.target)) {
                continue;
            }
            let before = sent.targets.insert(uid.clone(), Arc::clone(&assigned.target));
            if before.is_some_and(|before| before == assigned.target) {
                continue;
            }
            let mut target = wire::PodTarget::clone(&assigned.target);
            fill_memory(&mut target, &self.memory(uid));
            out.push((wire::drive_request::Request::Target(target), assigned.trace.clone()));
        }
        out
    }

    fn report(&self, report: wire::DriveReport) {
        match report.report {
            Some(wire::drive_report::Report::Result(result)) => self.result(result),
            Some(wire::drive_report::Report::Released(released)) => {
                for result in released.memory {
                    self.result(result);
                }
                if let Ok(uid) = PodUid::parse(&released.uid) {
                    self.released(&uid, released.generation);
                }
            }
            Some(wire::drive_report::Report::Unhealthy(u)) => {
                let Ok(uid) = PodUid::parse(&u.uid) else { return };
                // Dropped if the queue is full: the next failure of the same probe gives the same event.
                let failure =
                    ProbeFailure { uid, container: u.container, reason: u.reason, message: u.message };
                let _ = queue::offer(&self.failures, PROBE_FAILURES, failure);
            }
            Some(wire::drive_report::Report::Hello(_) | wire::drive_report::Report::ReplayEnd(_)) | None => {}
        }
    }

    fn result(&self, result: wire::Result) {
        let Ok(uid) = PodUid::parse(&result.uid) else { return };
        let Ok(probe) = convert::probe_type(result.r#type) else { return };
        let Some(Ok(memory)) = result.memory.map(ProbeMemory::try_from) else { return };
        {
            let desired = self.desired.read();
            // A lower generation is from the previous assignment. Memory of a pod that is not desired yet is
            // kept for it.
            if desired.pods.get(&uid).is_some_and(|a| result.generation < a.target.generation) {
                return;
            }
        }
        let changed = {
            let mut all = self.memory.lock();
            merge(all.entry(uid.clone()).or_default(), &result.container, probe, memory)
        };
        if changed {
            self.wakes.wake(&uid);
        }
    }
}

/// Leaves out the probes that the instance would run in another way. The last result of such a probe stays.
fn leave_out_unknown(message: &mut wire::drive_request::Request, peer: &Neighbour) {
    use wire::probe_spec::Handler;
    let wire::drive_request::Request::Target(target) = message else { return };
    let (tls, h2c) = (peer.has(PeerFeature::GrpcProbeTls), peer.has(PeerFeature::HttpProbeH2c));
    for container in &mut target.containers {
        container.probes.retain(|probe| match &probe.handler {
            Some(Handler::Grpc(grpc)) => tls || !grpc.tls,
            Some(Handler::Http(http)) => h2c || !http.h2c,
            Some(Handler::Tcp(_) | Handler::Exec(_)) | None => true,
        });
    }
}

fn request(request: wire::drive_request::Request, trace: Option<Trace>) -> wire::DriveRequest {
    wire::DriveRequest { request: Some(request), trace }
}
