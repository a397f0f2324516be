//! The probes of this instance, its driver and its observers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures::FutureExt as _;
use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use quintlet_model::probe::{ProbeKey, ProbeType};
use quintlet_proto::common::v1::Trace;
use quintlet_proto::probe::v1 as wire;
use quintlet_proto::probe::v1::drive_report::Report;
use tokio::task::JoinHandle;

use crate::decide;
use crate::evaluations::Evaluations;
use crate::handlers::Attempts;
use crate::mailbox::Mailbox;
use crate::metrics::Metrics;
use crate::shared::{JitterSource, Shared};
use crate::slot::Slot;
use crate::subscribe::ProbeJournal;
use crate::target::{Pod, Target};
use crate::worker;

/// The probes of this instance. Clones share them.
#[derive(Debug, Clone)]
pub struct Prober {
    shared: Arc<Shared>,
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    pods: HashMap<PodUid, Entry>,
    /// Generations of pods that this driver has released: its earlier targets of these pods are stale.
    released: HashMap<PodUid, u64>,
}

#[derive(Debug)]
struct Entry {
    generation: u64,
    workers: BTreeMap<(Arc<str>, ProbeType), Worker>,
}

#[derive(Debug)]
struct Worker {
    slot: Arc<Slot>,
    task: JoinHandle<()>,
}

/// Another driver has replaced this one, whose requests are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("replaced by another driver")]
pub struct Replaced;

impl Prober {
    /// Creates a prober without probes. `jitter` spreads the probes of a node after a start.
    #[must_use]
    pub fn new(attempts: Arc<dyn Attempts>, clock: Clock, metrics: Metrics, jitter: JitterSource) -> Self {
        let service_started = clock.boot();
        // CLOCK_BOOTTIME grows over the runs of one boot, and no observer keeps a cursor over a boot.
        let epoch = u64::try_from(service_started.as_nanos()).unwrap_or(u64::MAX).max(1);
        let evaluations = Evaluations::new(epoch);
        let (driver, journal) = (Mutex::new(None), OnceLock::new());
        let shared =
            Shared { attempts, clock, service_started, metrics, jitter, driver, evaluations, journal };
        Self { shared: Arc::new(shared), table: Arc::default() }
    }

    /// Replaces the driver. The mailbox of the new one holds all memory, then the end of the replay.
    #[must_use]
    pub fn attach(&self) -> Arc<Mailbox> {
        let mailbox = Arc::new(Mailbox::new(self.shared.metrics.dropped.clone()));
        let mut table = self.table.lock();
        table.released.clear();
        // Each driver numbers its assignments from one.
        table.pods.values_mut().for_each(|entry| entry.generation = 0);
        if let Some(old) = self.shared.driver.lock().replace(Arc::clone(&mailbox)) {
            old.replaced.cancel();
        }
        for worker in table.workers() {
            let key = worker.slot.key.clone();
            worker.slot.replay(|report| mailbox.result(key, report, None));
        }
        mailbox.answer(Report::ReplayEnd(wire::ReplayEnd {}));
        mailbox
    }

    /// Removes the driver. Probes continue.
    pub fn detach(&self, driver: &Arc<Mailbox>) {
        let mut current = self.shared.driver.lock();
        if current.as_ref().is_some_and(|c| Arc::ptr_eq(c, driver)) {
            *current = None;
        }
    }

    /// Adds a pod or updates its probes. Ignores a generation that is lower than the current one.
    ///
    /// # Errors
    /// `driver` has been replaced.
    pub fn set(&self, driver: &Arc<Mailbox>, pod: Pod, trace: Option<&Trace>) -> Result<(), Replaced> {
        let mut table = self.lock_for(driver)?;
        let Table { pods, released } = &mut *table;
        let uid = &pod.pod.uid;
        if released.get(uid).is_some_and(|given| pod.generation <= *given) {
            return Ok(());
        }
        let entry = pods
            .entry(uid.clone())
            .or_insert_with(|| Entry { generation: pod.generation, workers: BTreeMap::new() });
        if pod.generation < entry.generation {
            return Ok(());
        }
        entry.generation = pod.generation;
        let wanted: HashSet<_> =
            pod.probes.iter().map(|t| (Arc::clone(&t.container), t.probe.kind)).collect();
        let gone: Vec<_> = entry.workers.keys().filter(|k| !wanted.contains(*k)).cloned().collect();
        for key in gone {
            if let Some(worker) = entry.workers.remove(&key) {
                self.end(worker);
            }
        }
        for target in &pod.probes {
            let key = (Arc::clone(&target.container), target.probe.kind);
            match entry.workers.get_mut(&key) {
                Some(worker) => worker.slot.update(&self.shared, target, pod.generation, trace),
                None => {
                    entry.workers.insert(key, self.start(&pod, target, trace));
                }
            }
        }
        self.count(&table);
        Ok(())
    }

    /// Removes a pod with its probes.
    ///
    /// # Errors
    /// `driver` has been replaced.
    pub fn remove(&self, driver: &Arc<Mailbox>, uid: &PodUid, generation: u64) -> Result<(), Replaced> {
        let mut table = self.lock_for(driver)?;
        if table.pods.get(uid).is_some_and(|e| generation >= e.generation) {
            self.forget(&mut table, uid);
        }
        Ok(())
    }

    /// Removes a pod with its probes, and reports its final memory to the driver.
    ///
    /// # Errors
    /// `driver` has been replaced.
    pub fn release(&self, driver: &Arc<Mailbox>, uid: &PodUid, generation: u64) -> Result<(), Replaced> {
        let mut table = self.lock_for(driver)?;
        if table.pods.get(uid).is_some_and(|e| generation < e.generation) {
            return Ok(());
        }
        let memory = table
            .pods
            .get(uid)
            .map(|e| e.workers.values().filter_map(|w| w.slot.report()).collect())
            .unwrap_or_default();
        self.forget(&mut table, uid);
        table.released.insert(uid.clone(), generation);
        driver.answer(Report::Released(wire::Released { uid: uid.to_string(), generation, memory }));
        Ok(())
    }

    /// Removes all pods but `wanted`, after the driver has sent all its targets.
    ///
    /// # Errors
    /// `driver` has been replaced.
    pub fn complete(&self, driver: &Arc<Mailbox>, wanted: &HashSet<PodUid>) -> Result<(), Replaced> {
        let mut table = self.lock_for(driver)?;
        let gone: Vec<_> = table.pods.keys().filter(|uid| !wanted.contains(*uid)).cloned().collect();
        for uid in gone {
            self.forget(&mut table, &uid);
        }
        if let Some(journal) = self.shared.journal.get() {
            journal.set_primed();
        }
        Ok(())
    }

    /// Keeps the states of the probes for subscribers from now on; call it before the first driver. They are
    /// complete once a driver has sent all its targets.
    pub(crate) fn keep_states(&self) -> Arc<ProbeJournal> {
        let journal = self.shared.journal.get_or_init(|| Arc::new(ProbeJournal::new(&self.shared.clock)));
        Arc::clone(journal)
    }

    /// Returns the stream of evaluations, which drivers subscribe to.
    #[must_use]
    pub fn evaluations(&self) -> &Evaluations {
        &self.shared.evaluations
    }

    /// Counts evaluations that a subscriber missed because it was slow.
    pub fn count_missed(&self, missed: u64) {
        self.shared.metrics.missed.inc_by(missed);
    }

    /// Stops all workers. Attempts in progress have no result.
    pub fn shutdown(&self) {
        let mut table = self.table.lock();
        let all: Vec<_> = table.pods.keys().cloned().collect();
        for uid in all {
            self.forget(&mut table, &uid);
        }
    }

    fn lock_for(&self, driver: &Arc<Mailbox>) -> Result<parking_lot::MutexGuard<'_, Table>, Replaced> {
        let table = self.table.lock();
        let current = self.shared.driver.lock();
        if current.as_ref().is_some_and(|c| Arc::ptr_eq(c, driver)) { Ok(table) } else { Err(Replaced) }
    }

    fn start(&self, pod: &Pod, target: &Target, trace: Option<&Trace>) -> Worker {
        let key = ProbeKey {
            uid: pod.pod.uid.clone(),
            container: target.container.to_string(),
            probe: target.probe.kind,
        };
        let slot = Arc::new(Slot::new(key, pod.pod.clone(), target));
        slot.update(&self.shared, target, pod.generation, trace);
        let Shared { service_started, clock, jitter, .. } = &*self.shared;
        let handed_over =
            target.seed.as_ref().is_some_and(|s| Some(&s.container_id) == target.view.container_id.as_ref());
        let (started, now) = (*service_started, clock.boot());
        let jitter = decide::jitter(&target.probe, &target.view, handed_over, started, now, jitter());
        // The first tick of the worker replaces the wake-up by the first update.
        let _ = slot.wake.notified().now_or_never();
        let task = self.spawn(&slot, jitter);
        Worker { slot, task }
    }

    fn spawn(&self, slot: &Arc<Slot>, jitter: Duration) -> JoinHandle<()> {
        task::spawn("probe", worker::run(Arc::clone(&self.shared), Arc::clone(slot), jitter))
    }

    fn forget(&self, table: &mut Table, uid: &PodUid) {
        for worker in table.pods.remove(uid).into_iter().flat_map(|e| e.workers.into_values()) {
            self.end(worker);
        }
        self.count(table);
    }

    fn end(&self, worker: Worker) {
        worker.slot.end(&self.shared);
        worker.task.abort();
    }

    fn count(&self, table: &Table) {
        self.shared.metrics.workers.set(i64::try_from(table.workers().count()).unwrap_or(i64::MAX));
    }
}

impl Table {
    fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.pods.values().flat_map(|e| e.workers.values())
    }
}

#[cfg(test)]
mod tests;
