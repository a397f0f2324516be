//! Targets for probe-service's instances, and what they remember.
//!
//! Instances are found as sockets in one directory. A pod belongs to the live instance with the highest hash of (uid,
//! instance), so one more or less moves only its own share. An instance that vanished keeps its share for 2 s.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hasher as _;
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

use super::Wakes;

/// An instance that is back within this time keeps its pods.
const ABSENT: Duration = Duration::from_secs(2);
/// Local sockets are tried again this often.
const RETRY: Duration = Duration::from_millis(100);
/// Targets written to a stream and not yet taken; the difference is made again from the whole set when there is room.
const STREAM: usize = 256;
/// Failing evaluations waiting to become events.
const UNHEALTHY: usize = 1000;

/// What probes of one pod remember.
pub type PodMemory = BTreeMap<(String, ProbeType), ProbeMemory>;

/// One evaluation that did not succeed.
#[derive(Debug, Clone)]
pub struct Unhealthy {
    /// Pod.
    pub uid: PodUid,
    /// Container name.
    pub container: String,
    /// Event reason.
    pub reason: String,
    /// Event message.
    pub message: String,
}

#[derive(Debug, Clone)]
struct Assigned {
    target: wire::PodTarget,
    instance: Option<String>,
    // Of the pass that made the target.
    trace: Option<Trace>,
}

#[derive(Debug, Default)]
struct Desired {
    pods: HashMap<PodUid, Assigned>,
    // Live instances, and those gone since less than ABSENT.
    instances: BTreeMap<String, Option<Instant>>,
}

/// Drives every instance of probe-service.
#[derive(Debug)]
pub struct Probes {
    dir: PathBuf,
    desired: RwLock<Desired>,
    memory: Mutex<HashMap<PodUid, PodMemory>>,
    bells: Mutex<HashMap<String, Arc<Notify>>>,
    unhealthy: mpsc::Sender<Unhealthy>,
    wakes: Arc<Wakes>,
}

impl Probes {
    /// Uses the instances in `dir`; there need not be any yet. Failing evaluations come out of the receiver.
    #[must_use]
    pub fn new(dir: PathBuf, wakes: Arc<Wakes>) -> (Arc<Self>, mpsc::Receiver<Unhealthy>) {
        let (unhealthy, rx) = mpsc::channel(UNHEALTHY);
        let me = Self {
            dir,
            desired: RwLock::default(),
            memory: Mutex::default(),
            bells: Mutex::default(),
            unhealthy,
            wakes,
        };
        (Arc::new(me), rx)
    }

    /// Puts back what an earlier run of pod-sync remembered.
    pub fn restore(&self, uid: &PodUid, memory: PodMemory) {
        self.memory.lock().insert(uid.clone(), memory);
    }

    /// What is remembered of a pod's probes.
    #[must_use]
    pub fn memory(&self, uid: &PodUid) -> PodMemory {
        self.memory.lock().get(uid).cloned().unwrap_or_default()
    }

    /// Remembers something decided here: a seed for a new container instance. Newer memory of the same instance stays.
    pub fn seed(&self, uid: &PodUid, container: &str, probe: ProbeType, memory: ProbeMemory) {
        let mut all = self.memory.lock();
        merge(all.entry(uid.clone()).or_default(), container, probe, memory);
    }

    /// Wants a pod probed as `target` says; memory and generation are filled in here.
    pub fn set_target(&self, uid: &PodUid, mut target: wire::PodTarget) {
        let memory = self.memory(uid);
        let mut desired = self.desired.write();
        let (generation, instance) = match desired.pods.get(uid) {
            Some(have) => (have.target.generation, have.instance.clone()),
            None => (1, pick(uid, desired.instances.keys())),
        };
        target.generation = generation;
        fill_memory(&mut target, &memory);
        if desired.pods.get(uid).is_some_and(|have| same_view(&have.target, &target)) {
            return;
        }
        desired.pods.insert(
            uid.clone(),
            Assigned {
                target,
                instance: instance.clone(),
                trace: quintlet_telemetry::propagate::current_trace(),
            },
        );
        drop(desired);
        self.ring(instance.as_deref());
    }

    /// Stops probing a pod and forgets what was remembered.
    pub fn remove(&self, uid: &PodUid) {
        let gone = self.desired.write().pods.remove(uid);
        self.memory.lock().remove(uid);
        if let Some(gone) = gone {
            self.ring(gone.instance.as_deref());
        }
    }

    fn ring(&self, instance: Option<&str>) {
        if let Some(bell) = instance.and_then(|i| self.bells.lock().get(i).cloned()) {
            bell.notify_one();
        }
    }

    /// Finds instances and drives each until told to stop.
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
                let bell = Arc::new(Notify::new());
                self.bells.lock().insert(instance.clone(), Arc::clone(&bell));
                let me = Arc::clone(&self);
                let (id, stop) = (instance.clone(), stop.clone());
                quintlet_kit::task::spawn("probe-driver", async move { me.drive(id, bell, stop).await });
            }
            running.extend(present);
            let pending = self.desired.read().instances.values().any(Option::is_some);
            let again = if pending || watcher.is_none() { RETRY } else { Duration::from_secs(5) };
            // The directory is read as a whole after any of these.
            tokio::select! {
                () = stop.cancelled() => return,
                _ = woken.recv() => {}
                () = tokio::time::sleep(again) => {}
            }
        }
    }

    fn update_instances(&self, present: &BTreeSet<String>) {
        let now = Instant::now();
        let mut moved = BTreeSet::new();
        {
            let mut desired = self.desired.write();
            let Desired { pods, instances } = &mut *desired;
            for id in present {
                instances.insert(id.clone(), None);
            }
            for (id, gone) in instances.iter_mut() {
                if !present.contains(id) {
                    gone.get_or_insert(now);
                }
            }
            instances.retain(|_, gone| gone.is_none_or(|t| now.duration_since(t) < ABSENT));
            for (uid, assigned) in pods.iter_mut() {
                let best = pick(uid, instances.keys());
                if best != assigned.instance {
                    moved.extend(assigned.instance.take());
                    moved.extend(best.clone());
                    assigned.instance = best;
                    assigned.target.generation += 1;
                }
            }
        }
        for instance in &moved {
            self.ring(Some(instance));
        }
    }

    async fn drive(self: Arc<Self>, id: String, bell: Arc<Notify>, stop: CancellationToken) {
        let path = self.dir.join(format!("{id}.sock"));
        let channel = quintlet_kit::socket::channel(path);
        while !stop.is_cancelled() {
            // A cut stream loses nothing: targets are sent again, memory is replayed.
            tokio::select! {
                () = stop.cancelled() => return,
                ended = self.stream(&id, &bell, ProbeClient::new(channel.clone())) => if let Err(status) = ended {
                    tracing::debug!(instance = id, error = status.message(), "probe stream ended");
                },
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    async fn stream(
        &self,
        id: &str,
        bell: &Notify,
        mut client: ProbeClient<tonic::transport::Channel>,
    ) -> Result<(), tonic::Status> {
        let (tx, rx) = mpsc::channel(STREAM);
        let _ = tx.try_send(request(wire::drive_request::Request::Hello(quintlet_proto::hello()), None));
        let mut reports = client.drive(ReceiverStream::new(rx)).await?.into_inner();
        // What the instance remembers comes first, so that a target never carries older memory than it has.
        while let Some(report) = reports.next().await {
            let report = report?;
            if matches!(report.report, Some(wire::drive_report::Report::ReplayEnd(_))) {
                break;
            }
            self.report(report);
        }
        let write = async {
            let mut sent: HashMap<PodUid, wire::PodTarget> = HashMap::new();
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
                bell.notified().await;
            }
        };
        let read = async {
            while let Some(report) = reports.next().await {
                self.report(report?);
            }
            Ok(())
        };
        // Either end closes both.
        tokio::select! {
            () = write => Ok(()),
            ended = read => ended,
        }
    }

    fn difference(
        &self,
        id: &str,
        sent: &mut HashMap<PodUid, wire::PodTarget>,
    ) -> Vec<(wire::drive_request::Request, Option<Trace>)> {
        let desired = self.desired.read();
        let mine = |a: &&Assigned| a.instance.as_deref() == Some(id);
        let mut out = Vec::new();
        sent.retain(|uid, target| {
            let keep = desired.pods.get(uid).as_ref().is_some_and(mine);
            if !keep {
                let gone = wire::RemovePod { uid: uid.to_string(), generation: target.generation };
                out.push((wire::drive_request::Request::Remove(gone), None));
            }
            keep
        });
        for (uid, assigned) in desired.pods.iter().filter(|(_, a)| mine(a)) {
            if sent.get(uid).is_some_and(|have| *have == assigned.target) {
                continue;
            }
            sent.insert(uid.clone(), assigned.target.clone());
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
            }
            Some(wire::drive_report::Report::Unhealthy(u)) => {
                let Ok(uid) = PodUid::parse(&u.uid) else { return };
                // Full: the event is one of very many that say the same.
                let _ = self.unhealthy.try_send(Unhealthy {
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
            // A pod this run does not know yet is one whose memory is welcome; a lower generation is an old owner's.
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

// Of two memories of one instance the higher counter wins; another instance replaces.
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

// Memory flows back from the prober; a target that differs in nothing else is no news to it.
fn same_view(a: &wire::PodTarget, b: &wire::PodTarget) -> bool {
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

fn pick<'a>(uid: &PodUid, instances: impl Iterator<Item = &'a String>) -> Option<String> {
    instances
        .max_by_key(|id| {
            let mut hash = std::hash::DefaultHasher::new();
            hash.write(uid.as_str().as_bytes());
            hash.write(id.as_bytes());
            hash.finish()
        })
        .cloned()
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

    #[test]
    fn one_instance_more_moves_only_its_own_share() {
        let two: Vec<String> = vec!["a".into(), "b".into()];
        let three: Vec<String> = vec!["a".into(), "b".into(), "c".into()];
        let mut moved = 0;
        for i in 0..300 {
            let uid = PodUid::parse(&format!("pod-{i}")).unwrap();
            let (before, after) = (pick(&uid, two.iter()), pick(&uid, three.iter()));
            if before != after {
                assert_eq!(after.as_deref(), Some("c"));
                moved += 1;
            }
        }
        assert!((50..150).contains(&moved), "{moved}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_instance_back_within_two_seconds_keeps_its_pods() {
        let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
        let both: BTreeSet<String> = ["a".to_owned(), "b".to_owned()].into();
        probes.update_instances(&both);
        let uid = PodUid::parse("u").unwrap();
        probes.set_target(&uid, wire::PodTarget::default());
        let owner = || probes.desired.read().pods[&uid].instance.clone().unwrap();
        let first = owner();
        let others: BTreeSet<String> = both.iter().filter(|i| **i != first).cloned().collect();
        probes.update_instances(&others);
        tokio::time::advance(Duration::from_millis(1900)).await;
        probes.update_instances(&both);
        assert_eq!(owner(), first);
        probes.update_instances(&others);
        tokio::time::advance(Duration::from_millis(2100)).await;
        probes.update_instances(&others);
        assert_ne!(owner(), first);
        assert_eq!(probes.desired.read().pods[&uid].target.generation, 2);
    }
}
