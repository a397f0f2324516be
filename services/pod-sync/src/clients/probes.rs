//! Targets for probe-service's instances, and what they remember.
//!
//! Instances are found as sockets in one directory and asked for their health once a second; `shards` decides which of them
//! probes which pod. A pod moves in three steps: its instance is asked to release it, answers with the final memory, and the
//! other instance gets the pod with that memory and the next generation. What the first one reports of a lower generation
//! after that is dropped.

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
use super::Wakes;

/// Pause between two questions to an instance.
const ASK: Duration = Duration::from_secs(1);
/// An answer that takes longer makes an instance count as silent since the question.
const ANSWER: Duration = Duration::from_millis(500);
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
    place: Place,
    // Of the pass that made the target.
    trace: Option<Trace>,
}

impl Assigned {
    /// Assigns the pod to an instance. What is assigned for the first time has its first generation already.
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

/// What was sent on one stream.
#[derive(Debug, Default)]
struct Sent {
    targets: HashMap<PodUid, wire::PodTarget>,
    /// Generations of the pods that the instance was asked to release.
    releases: HashMap<PodUid, u64>,
}

/// Drives every instance of probe-service.
#[derive(Debug)]
pub struct Probes {
    dir: PathBuf,
    desired: RwLock<Desired>,
    memory: Mutex<HashMap<PodUid, PodMemory>>,
    bells: Mutex<HashMap<String, Arc<Notify>>>,
    // An instance began or stopped to answer.
    turned: Notify,
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
            turned: Notify::new(),
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
        let (generation, place) = match desired.pods.get(uid) {
            Some(have) => (have.target.generation, have.place.clone()),
            None => {
                let best = desired.instances.best(uid, Instant::now());
                (1, best.map_or(Place::Nowhere, |id| Place::At(id.to_owned())))
            }
        };
        target.generation = generation;
        fill_memory(&mut target, &memory);
        if desired.pods.get(uid).is_some_and(|have| same_view(&have.target, &target)) {
            return;
        }
        let instance = place.instance().map(str::to_owned);
        let trace = quintlet_telemetry::propagate::current_trace();
        desired.pods.insert(uid.clone(), Assigned { target, place, trace });
        drop(desired);
        self.ring(instance.as_deref());
    }

    /// Stops probing a pod and forgets what was remembered.
    pub fn remove(&self, uid: &PodUid) {
        let gone = self.desired.write().pods.remove(uid);
        self.memory.lock().remove(uid);
        if let Some(gone) = gone {
            self.ring(gone.place.instance());
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
            let pending = self.is_pending();
            let again = if pending || watcher.is_none() { RETRY } else { Duration::from_secs(5) };
            // The directory is read as a whole after any of these.
            tokio::select! {
                () = stop.cancelled() => return,
                _ = woken.recv() => {}
                () = self.turned.notified() => {}
                () = tokio::time::sleep(again) => {}
            }
        }
    }

    /// Whether time alone may change the place of a pod.
    fn is_pending(&self) -> bool {
        let desired = self.desired.read();
        desired.instances.is_pending(Instant::now())
            || desired.pods.values().any(|a| matches!(a.place, Place::Leaving { .. }))
    }

    fn update_instances(&self, present: &BTreeSet<String>) {
        let now = Instant::now();
        let mut rung = BTreeSet::new();
        {
            let mut desired = self.desired.write();
            let Desired { pods, instances } = &mut *desired;
            instances.found(present, now);
            for (instance, live) in instances.turned(now) {
                let pods = pods.values().filter(|a| a.place.instance() == Some(instance.as_str())).count();
                if live {
                    tracing::info!(instance, pods, "probe-service instance serves");
                } else {
                    tracing::warn!(instance, pods, "probe-service instance does not answer");
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
                        rung.insert(instance.clone());
                        assigned.assign(instance);
                    }
                }
                rung.extend(before);
            }
        }
        for instance in &rung {
            self.ring(Some(instance));
        }
    }

    /// An instance has stopped probing a pod and has told its final memory: the pod goes to the instance it belongs to.
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
        self.ring(Some(&instance));
    }

    async fn drive(self: Arc<Self>, id: String, bell: Arc<Notify>, stop: CancellationToken) {
        let path = self.dir.join(format!("{id}.sock"));
        let channel = quintlet_kit::socket::channel(path);
        let streams = async {
            loop {
                // A cut stream loses nothing: targets are sent again, memory is replayed.
                if let Err(status) = self.stream(&id, &bell, ProbeClient::new(channel.clone())).await {
                    tracing::debug!(instance = id, error = status.message(), "probe stream ended");
                }
                tokio::time::sleep(RETRY).await;
            }
        };
        // None of them ends by itself.
        tokio::select! {
            () = stop.cancelled() => {}
            () = streams => {}
            () = self.ask(&id, HealthClient::new(channel.clone())) => {}
        }
    }

    /// Asks an instance for its health again and again: one whose process is stopped has its socket and its streams as before.
    async fn ask(&self, id: &str, mut health: HealthClient<Channel>) {
        loop {
            let asked = Instant::now();
            let mut check = std::pin::pin!(health.check(HealthCheckRequest::default()));
            let answer = match tokio::time::timeout(ANSWER, &mut check).await {
                Ok(answer) => answer,
                Err(_) => {
                    self.silent(id, asked);
                    // A process that goes on answers at once; a connection that is cut is an answer too.
                    check.await
                }
            };
            if answer.is_ok() {
                if self.desired.write().instances.answered(id) {
                    self.turned.notify_one();
                }
                tokio::time::sleep(ASK).await;
            } else {
                self.silent(id, asked);
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    fn silent(&self, id: &str, asked: Instant) {
        if self.desired.write().instances.silent(id, asked) {
            self.turned.notify_one();
        }
    }

    async fn stream(
        &self,
        id: &str,
        bell: &Notify,
        mut client: ProbeClient<Channel>,
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

    /// What an instance is to be told so that it probes what is assigned to it. `sent` has what it was told on this stream.
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

    /// What the stream of an instance would be told, in words.
    fn told(probes: &Probes, id: &str, sent: &mut Sent) -> Vec<String> {
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
    async fn a_pod_that_moves_is_released_and_takes_its_final_memory_along() {
        let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
        let uid = PodUid::parse("u").unwrap();
        let (first, other) = two(&probes, &uid);
        probes.update_instances(&ids(&[&other]));
        tokio::time::advance(GONE).await;
        probes.update_instances(&ids(&[&other]));
        assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(other.clone()), 2));
        let (mut to_first, mut to_other) = (Sent::default(), Sent::default());
        assert_eq!(told(&probes, &other, &mut to_other), ["target 2 seed None"]);
        probes.result(reported(2, 5));
        // The instance that the pod belongs to is back.
        probes.update_instances(&ids(&["a", "b"]));
        assert!(matches!(place(&probes, &uid), Place::Leaving { from, .. } if from == other));
        assert_eq!(told(&probes, &other, &mut to_other), ["release 2"]);
        assert_eq!(told(&probes, &other, &mut to_other), [""; 0], "it is asked once");
        assert_eq!(told(&probes, &first, &mut to_first), [""; 0], "nobody probes it until then");
        let released = wire::Released { uid: "u".into(), generation: 2, memory: vec![reported(2, 7)] };
        let report = wire::drive_report::Report::Released(released);
        probes.report(wire::DriveReport { report: Some(report), trace: None });
        assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(first.clone()), 3));
        assert_eq!(told(&probes, &first, &mut to_first), ["target 3 seed Some(7)"]);
        assert_eq!(told(&probes, &other, &mut to_other), [""; 0]);
        probes.result(reported(2, 99));
        assert_eq!(counter(&probes, &uid), Some(7), "a lower generation is dropped");
    }

    #[tokio::test(start_paused = true)]
    async fn a_release_without_an_answer_is_given_up_after_two_seconds() {
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
    async fn an_instance_that_does_not_answer_loses_its_pods_and_drops_them_when_it_goes_on() {
        let (probes, _rx) = Probes::new("/nowhere".into(), Arc::default());
        let uid = PodUid::parse("u").unwrap();
        let (first, other) = two(&probes, &uid);
        let mut to_first = Sent::default();
        assert_eq!(told(&probes, &first, &mut to_first), ["target 1 seed None"]);
        probes.result(reported(1, 4));
        probes.silent(&first, Instant::now());
        tokio::time::advance(Duration::from_millis(1900)).await;
        probes.update_instances(&ids(&["a", "b"]));
        assert_eq!(place(&probes, &uid), Place::At(first.clone()), "it has 2 s");
        tokio::time::advance(Duration::from_millis(200)).await;
        probes.update_instances(&ids(&["a", "b"]));
        assert_eq!((place(&probes, &uid), generation(&probes, &uid)), (Place::At(other.clone()), 2));
        assert_eq!(told(&probes, &other, &mut Sent::default()), ["target 2 seed Some(4)"]);
        assert_eq!(told(&probes, &first, &mut to_first), ["remove 1"]);
        probes.result(reported(1, 50));
        assert_eq!(counter(&probes, &uid), Some(4), "what it says when it goes on is of a lower generation");
    }

    #[tokio::test(start_paused = true)]
    async fn the_only_instance_keeps_its_pods_however_long_it_is_away() {
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
