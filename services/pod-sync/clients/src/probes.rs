//! Probe targets of the instances of probe-service, and the memory of their probes.
//!
//! Instances are the sockets in one directory. Their health is checked once a second, and `shards` assigns pods to them. A pod
//! moves in three steps: its instance is asked to release the pod, the instance answers with the final memory, and the other
//! instance gets the pod with that memory and the next generation. Later reports of a lower generation are dropped.

mod shards;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use notify::Watcher as _;
use parking_lot::{Mutex, RwLock};
use quintlet_model::convert;
use quintlet_model::ids::PodUid;
use quintlet_model::probe::{ProbeMemory, ProbeType};
use quintlet_proto::common::v1::Trace;
use quintlet_proto::probe::v1 as wire;
use quintlet_proto::probe::v1::probe_client::ProbeClient;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use self::shards::{Instances, Place, Step};
use crate::WorkerWakeups;

/// Interval between health checks of an instance.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);
/// An instance whose health check takes longer counts as unresponsive since the check was sent.
const HEALTH_TIMEOUT: Duration = Duration::from_millis(500);
/// Interval between attempts to connect to an instance.
const RETRY: Duration = Duration::from_millis(100);
/// Messages that wait in a stream. The differences are computed from the whole set of targets, so a full stream only delays them.
const STREAM: usize = 256;
/// Failed probes that wait to become events.
const FAILURES: usize = 1000;

/// Memory of the probes of one pod, by container name and probe.
pub type PodMemory = BTreeMap<(String, ProbeType), ProbeMemory>;

/// A probe that failed.
#[derive(Debug, Clone)]
pub struct ProbeFailure {
    pub uid: PodUid,
    pub container: String,
    /// Reason of the event.
    pub reason: String,
    /// Message of the event.
    pub message: String,
}

#[derive(Debug, Clone)]
struct Assigned {
    target: wire::PodTarget,
    place: Place,
    // Trace of the sync that produced the target.
    trace: Option<Trace>,
}

impl Assigned {
    /// Assigns the pod to an instance. A pod that had no instance keeps its generation, which is the first.
    fn assign(&mut self, instance: String) {
        if self.place != Place::Nowhere {
            self.target.generation = self.target.generation.saturating_add(1);
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
    targets: HashMap<PodUid, wire::PodTarget>,
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
    failures: mpsc::Sender<ProbeFailure>,
    wakes: Arc<WorkerWakeups>,
}

impl Probes {
    /// Creates a client of the instances whose sockets are in `dir`; there need not be any yet. The receiver gets failed probes.
    #[must_use]
    pub fn new(dir: PathBuf, wakes: Arc<WorkerWakeups>) -> (Arc<Self>, mpsc::Receiver<ProbeFailure>) {
        let (failures, rx) = mpsc::channel(FAILURES);
        let me = Self {
            dir,
            desired: RwLock::default(),
            memory: Mutex::default(),
            drivers: Mutex::default(),
            health_changed: Notify::new(),
            failures,
            wakes,
        };
        (Arc::new(me), rx)
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

    /// Sets the initial memory of a probe of a new container. Newer memory of the same container stays.
    pub fn seed(&self, uid: &PodUid, container: &str, probe: ProbeType, memory: ProbeMemory) {
        let mut all = self.memory.lock();
        merge(all.entry(uid.clone()).or_default(), container, probe, memory);
    }

    /// Sets the probe target of a pod. Its memory and generation are filled in.
    pub fn set_target(&self, uid: &PodUid, mut target: wire::PodTarget) {
        let memory = self.memory(uid);
        let mut desired = self.desired.write();
        let (generation, place) = match desired.pods.get(uid) {
            Some(have) => (have.target.generation, have.place.clone()),
            None => {
                let best = desired.instances.best(uid, Instant::now());
                (1, best.map_or(Place::Nowhere, |id| Place::At(id.to_owned())))
            }
        };
        target.generation = generation;
        fill_memory(&mut target, &memory);
        if desired.pods.get(uid).is_some_and(|have| is_same_target(&have.target, &target)) {
            return;
        }
        let instance = place.instance().map(str::to_owned);
        let trace = quintlet_telemetry::propagate::current_trace();
        desired.pods.insert(uid.clone(), Assigned { target, place, trace });
        drop(desired);
        self.wake_driver(instance.as_deref());
    }

    /// Stops probing a pod and drops its probe memory.
    pub fn remove(&self, uid: &PodUid) {
        let gone = self.desired.write().pods.remove(uid);
        self.memory.lock().remove(uid);
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
        let (wake, mut woken) = mpsc::channel::<()>(1);
        let mut watcher = None;
        let mut running: BTreeSet<String> = BTreeSet::new();
        loop {
            if watcher.is_none() {
                watcher = watch(&self.dir, wake.clone());
            }
            let present = sockets(&self.dir);
            self.update_instances(&present);
            for instance in present.difference(&running) {
                let changed = Arc::new(Notify::new());
                self.drivers.lock().insert(instance.clone(), Arc::clone(&changed));
                let me = Arc::clone(&self);
                let (id, stop) = (instance.clone(), stop.clone());
                quintlet_kit::task::spawn("probe-driver", async move { me.drive(id, changed, stop).await });
            }
            running.extend(present);
            let pending = self.is_pending();
            let again = if pending || watcher.is_none() { RETRY } else { Duration::from_secs(5) };
            // Each branch only wakes the loop, which reads the whole directory.
            tokio::select! {
                () = stop.cancelled() => return,
                _ = woken.recv() => {}
                () = self.health_changed.notified() => {}
                () = tokio::time::sleep(again) => {}
            }
        }
    }

    /// Returns whether the passing of time alone may change an assignment.
    fn is_pending(&self) -> bool {
        let desired = self.desired.read();
        desired.instances.is_pending(Instant::now())
            || desired.pods.values().any(|a| matches!(a.place, Place::Leaving { .. }))
    }

    fn update_instances(&self, present: &BTreeSet<String>) {
        let now = Instant::now();
        let mut changed = BTreeSet::new();
        {
            let mut desired = self.desired.write();
            let Desired { pods, instances } = &mut *desired;
            instances.found(present, now);
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
                    Step::Stay => continue,
                    Step::Release => {
                        let from = before.clone().unwrap_or_default();
                        assigned.place = Place::Leaving { from, since: now };
                    }
                    Step::Assign(instance) => {
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
            let Place::Leaving { from, .. } = &assigned.place else { return };
            if generation != assigned.target.generation {
                return;
            }
            let instance = instances.best(uid, now).unwrap_or(from).to_owned();
            assigned.assign(instance.clone());
            instance
        };
        self.wake_driver(Some(&instance));
    }

    async fn drive(self: Arc<Self>, id: String, changed: Arc<Notify>, stop: CancellationToken) {
        let path = self.dir.join(format!("{id}.sock"));
        let channel = quintlet_kit::socket::channel(path);
        let streams = async {
            loop {
                // A broken stream loses nothing: the next one sends all targets and replays the memory.
                if let Err(status) = self.stream(&id, &changed, ProbeClient::new(channel.clone())).await {
                    tracing::debug!(instance = id, error = status.message(), "probe stream ended");
                }
                tokio::time::sleep(RETRY).await;
            }
        };
        // `streams` and the health checks end only by being dropped, which loses nothing.
        tokio::select! {
            () = stop.cancelled() => {}
            () = streams => {}
            () = self.check_health(&id, HealthClient::new(channel.clone())) => {}
        }
    }

    /// Checks the health of an instance in a loop. The socket and the streams do not show that its process is suspended.
    async fn check_health(&self, id: &str, mut health: HealthClient<Channel>) {
        loop {
            let asked = Instant::now();
            let mut check = std::pin::pin!(health.check(HealthCheckRequest::default()));
            let answer = match tokio::time::timeout(HEALTH_TIMEOUT, &mut check).await {
                Ok(answer) => answer,
                Err(_) => {
                    self.silent(id, asked);
                    // A resumed process answers at once, and a broken connection returns an error.
                    check.await
                }
            };
            if answer.is_ok() {
                if self.desired.write().instances.answered(id) {
                    self.health_changed.notify_one();
                }
                tokio::time::sleep(HEALTH_INTERVAL).await;
            } else {
                self.silent(id, asked);
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    fn silent(&self, id: &str, asked: Instant) {
        if self.desired.write().instances.silent(id, asked) {
            self.health_changed.notify_one();
        }
    }

    async fn stream(
        &self,
        id: &str,
        changed: &Notify,
        mut client: ProbeClient<Channel>,
    ) -> Result<(), tonic::Status> {
        let (tx, rx) = mpsc::channel(STREAM);
        let _ = tx.try_send(request(wire::drive_request::Request::Hello(quintlet_proto::hello()), None));
        let mut reports = client.drive(ReceiverStream::new(rx)).await?.into_inner();
        // The instance replays its memory first, so that no target carries older memory.
        while let Some(report) = reports.next().await {
            let report = report?;
            if matches!(report.report, Some(wire::drive_report::Report::ReplayEnd(_))) {
                break;
            }
            self.report(report);
        }
        let write = async {
            let mut sent = Sent::default();
            let mut first = true;
            loop {
                for (message, trace) in self.difference(id, &mut sent) {
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
        // When one half ends, both are dropped; the next stream starts anew.
        tokio::select! {
            () = write => Ok(()),
            ended = read => ended,
        }
    }

    /// Returns the messages that bring an instance up to date, and adds them to `sent`.
    fn difference(&self, id: &str, sent: &mut Sent) -> Vec<(wire::drive_request::Request, Option<Trace>)> {
        let desired = self.desired.read();
        let is_mine = |a: &Assigned| matches!(&a.place, Place::At(at) if at == id);
        let is_leaving = |a: &Assigned| matches!(&a.place, Place::Leaving { from, .. } if from == id);
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
            if sent.targets.get(uid).is_some_and(|have| *have == assigned.target) {
                continue;
            }
            sent.targets.insert(uid.clone(), assigned.target.clone());
            let mut target = assigned.target.clone();
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
                let _ = self.failures.try_send(ProbeFailure {
                    uid,
                    container: u.container,
                    reason: u.reason,
                    message: u.message,
                });
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
            // A lower generation is from the previous assignment. Memory of a pod that is not desired yet is kept for it.
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

// Keeps the higher counter of the same container; memory of another container replaces.
fn merge(memory: &mut PodMemory, container: &str, probe: ProbeType, new: ProbeMemory) -> bool {
    match memory.get(&(container.to_owned(), probe)) {
        Some(have) if have.container_id == new.container_id && have.counter >= new.counter => false,
        Some(_) | None => {
            memory.insert((container.to_owned(), probe), new);
            true
        }
    }
}

fn fill_memory(target: &mut wire::PodTarget, memory: &PodMemory) {
    for container in &mut target.containers {
        for spec in &mut container.probes {
            let Ok(probe) = convert::probe_type(spec.r#type) else { continue };
            spec.memory = memory
                .get(&(container.name.clone(), probe))
                .filter(|m| m.container_id.as_str() == container.container_id)
                .map(Into::into);
        }
    }
}

// Compares targets without their memory, which comes from the instance itself.
fn is_same_target(a: &wire::PodTarget, b: &wire::PodTarget) -> bool {
    let strip = |t: &wire::PodTarget| {
        let mut t = t.clone();
        for spec in t.containers.iter_mut().flat_map(|c| c.probes.iter_mut()) {
            spec.memory = None;
        }
        t
    };
    strip(a) == strip(b)
}

fn request(request: wire::drive_request::Request, trace: Option<Trace>) -> wire::DriveRequest {
    wire::DriveRequest { request: Some(request), trace }
}

fn sockets(dir: &Path) -> BTreeSet<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return BTreeSet::new() };
    entries
        .flatten()
        .filter_map(|e| e.file_name().to_str().and_then(|n| n.strip_suffix(".sock")).map(str::to_owned))
        .collect()
}

fn watch(dir: &Path, wake: mpsc::Sender<()>) -> Option<notify::RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        if !event.is_ok_and(|e| e.kind.is_access()) {
            let _ = wake.try_send(());
        }
    })
    .ok()?;
    watcher.watch(dir, notify::RecursiveMode::NonRecursive).ok()?;
    Some(watcher)
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_model::ids::ContainerId;
    use quintlet_model::probe::ProbeResult;

    fn memory(id: &str, counter: u64) -> ProbeMemory {
        ProbeMemory {
            container_id: ContainerId::parse(id).unwrap(),
            counter,
            result: Some(ProbeResult::Success),
            last: ProbeResult::Success,
            run: 1,
            on_hold: false,
        }
    }

    #[test]
    fn the_higher_counter_wins_and_a_new_instance_replaces() {
        let mut all = PodMemory::new();
        for (id, counter, changed) in
            [("c1", 3, true), ("c1", 2, false), ("c1", 3, false), ("c1", 4, true), ("c2", 0, true)]
        {
            assert_eq!(
                merge(&mut all, "a", ProbeType::Liveness, memory(id, counter)),
                changed,
                "{id} {counter}"
            );
        }
    }

    const GONE: Duration = Duration::from_millis(2100);

    /// Instances a and b, with a pod; the instance that has the pod and the other one.
    fn two(probes: &Probes, uid: &PodUid) -> (String, String) {
        probes.update_instances(&ids(&["a", "b"]));
        probes.set_target(uid, target());
        let at = place(probes, uid).instance().unwrap().to_owned();
        let other = if at == "a" { "b" } else { "a" };
        (at, other.to_owned())
    }

    fn ids(ids: &[&str]) -> BTreeSet<String> {
        ids.iter().map(|id| (*id).to_owned()).collect()
    }

    fn place(probes: &Probes, uid: &PodUid) -> Place {
        probes.desired.read().pods[uid].place.clone()
    }

    fn generation(probes: &Probes, uid: &PodUid) -> u64 {
        probes.desired.read().pods[uid].target.generation
    }

    fn target() -> wire::PodTarget {
        let probe = wire::ProbeSpec { r#type: wire::ProbeType::Liveness as i32, ..Default::default() };
        let container = wire::ContainerTarget {
            name: "a".into(),
            container_id: "c1".into(),
            probes: vec![probe],
            ..Default::default()
        };
        wire::PodTarget { uid: "u".into(), containers: vec![container], ..Default::default() }
    }

    /// A report of the pod's only probe.
    fn reported(generation: u64, counter: u64) -> wire::Result {
        wire::Result {
            uid: "u".into(),
            generation,
            container: "a".into(),
            r#type: wire::ProbeType::Liveness as i32,
            memory: Some((&memory("c1", counter)).into()),
            output: String::new(),
        }
    }

    fn counter(probes: &Probes, uid: &PodUid) -> Option<u64> {
        probes.memory(uid).get(&("a".to_owned(), ProbeType::Liveness)).map(|m| m.counter)
    }

    /// Messages that the stream of an instance would send, as text.
    fn messages(probes: &Probes, id: &str, sent: &mut Sent) -> Vec<String> {
        use wire::drive_request::Request as Said;
        let all = probes.difference(id, sent);
        let word = |(request, _)| match request {
            Said::Target(t) => {
                let seed = t.containers[0].probes[0].memory.as_ref().map(|m| m.counter);
                format!("target {} seed {seed:?}", t.generation)
            }
            Said::Release(r) => format!("release {}", r.generation),
            Said::Remove(r) => format!("remove {}", r.generation),
            Said::Hello(_) | Said::Complete(_) => "other".to_owned(),
        };
        all.into_iter().map(word).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_moved_pod_is_released_and_keeps_its_final_memory() {
        let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
        let uid = PodUid::parse("u").unwrap();
        let (first, other) = two(&probes, &uid);
        probes.update_instances(&ids(&[&other]));
        tokio::time::advance(GONE).await;
        probes.update_instances(&ids(&[&other]));
        assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(other.clone()), 2));
        let (mut to_first, mut to_other) = (Sent::default(), Sent::default());
        assert_eq!(messages(&probes, &other, &mut to_other), ["target 2 seed None"]);
        probes.result(reported(2, 5));
        // The instance that the pod belongs to is back.
        probes.update_instances(&ids(&["a", "b"]));
        assert!(matches!(place(&probes, &uid), Place::Leaving { from, .. } if from == other));
        assert_eq!(messages(&probes, &other, &mut to_other), ["release 2"]);
        assert_eq!(messages(&probes, &other, &mut to_other), [""; 0], "the release is sent once");
        assert_eq!(
            messages(&probes, &first, &mut to_first),
            [""; 0],
            "no instance probes the pod until the release"
        );
        let released = wire::Released { uid: "u".into(), generation: 2, memory: vec![reported(2, 7)] };
        let report = wire::drive_report::Report::Released(released);
        probes.report(wire::DriveReport { report: Some(report), trace: None });
        assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(first.clone()), 3));
        assert_eq!(messages(&probes, &first, &mut to_first), ["target 3 seed Some(7)"]);
        assert_eq!(messages(&probes, &other, &mut to_other), [""; 0]);
        probes.result(reported(2, 99));
        assert_eq!(counter(&probes, &uid), Some(7), "a lower generation is dropped");
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_without_a_reply_is_abandoned_after_two_seconds() {
        let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
        let uid = PodUid::parse("u").unwrap();
        let (first, other) = two(&probes, &uid);
        probes.update_instances(&ids(&[&other]));
        tokio::time::advance(GONE).await;
        probes.update_instances(&ids(&[&other]));
        probes.update_instances(&ids(&["a", "b"]));
        tokio::time::advance(Duration::from_millis(1900)).await;
        probes.update_instances(&ids(&["a", "b"]));
        assert!(matches!(place(&probes, &uid), Place::Leaving { .. }));
        tokio::time::advance(Duration::from_millis(200)).await;
        probes.update_instances(&ids(&["a", "b"]));
        assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(first.clone()), 3));
        // The answer comes all the same: it is of a lower generation.
        probes.released(&uid, 2);
        probes.result(reported(2, 9));
        assert_eq!((generation(&probes, &uid), counter(&probes, &uid)), (3, None));
    }

    #[tokio::test(start_paused = true)]
    async fn an_unresponsive_instance_loses_its_pods_and_drops_them_when_it_resumes() {
        let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
        let uid = PodUid::parse("u").unwrap();
        let (first, other) = two(&probes, &uid);
        let mut to_first = Sent::default();
        assert_eq!(messages(&probes, &first, &mut to_first), ["target 1 seed None"]);
        probes.result(reported(1, 4));
        probes.silent(&first, Instant::now());
        tokio::time::advance(Duration::from_millis(1900)).await;
        probes.update_instances(&ids(&["a", "b"]));
        assert_eq!(place(&probes, &uid), Place::At(first.clone()), "it has 2 s");
        tokio::time::advance(Duration::from_millis(200)).await;
        probes.update_instances(&ids(&["a", "b"]));
        assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(other.clone()), 2));
        assert_eq!(messages(&probes, &other, &mut Sent::default()), ["target 2 seed Some(4)"]);
        assert_eq!(messages(&probes, &first, &mut to_first), ["remove 1"]);
        probes.result(reported(1, 50));
        assert_eq!(counter(&probes, &uid), Some(4), "what it says when it goes on is of a lower generation");
    }

    #[tokio::test(start_paused = true)]
    async fn the_only_instance_keeps_its_pods_however_long_it_is_absent() {
        let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
        let uid = PodUid::parse("u").unwrap();
        probes.update_instances(&ids(&["a"]));
        probes.set_target(&uid, target());
        probes.update_instances(&ids(&[]));
        tokio::time::advance(GONE).await;
        probes.update_instances(&ids(&[]));
        probes.update_instances(&ids(&["a"]));
        assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At("a".to_owned()), 1));
    }

    #[tokio::test(start_paused = true)]
    async fn an_instance_back_within_two_seconds_keeps_its_pods() {
        let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
        let both = ids(&["a", "b"]);
        let uid = PodUid::parse("u").unwrap();
        let (first, other) = two(&probes, &uid);
        let owner = || place(&probes, &uid).instance().unwrap().to_owned();
        let others = ids(&[&other]);
        probes.update_instances(&others);
        tokio::time::advance(Duration::from_millis(1900)).await;
        probes.update_instances(&both);
        assert_eq!(owner(), first);
        probes.update_instances(&others);
        tokio::time::advance(Duration::from_millis(2100)).await;
        probes.update_instances(&others);
        assert_ne!(owner(), first);
        assert_eq!(generation(&probes, &uid), 2);
    }
}
