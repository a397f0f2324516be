//! Random histories of sources, a node and workers, which obey or misbehave.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;
use quintlet_model::ids::PodUid;

use super::super::{
    Effect, Input, KillPodOptions, PodFacts, PodGrace, PodSyncStatuses, Rule, SyncPodType, Termination, Work,
    WorkOutcome, WorkerPhase, WorkerTransition,
};
use super::faulty_policy::{self, Policy};
use super::invariants::Watcher;

pub(super) const RESYNC: Duration = Duration::from_secs(60);
/// UIDs below this are static pods with two full names; the others are pods of the API server.
const STATIC: u8 = 4;
pub(super) const PODS: u8 = 7;

/// An event of a history.
#[derive(Debug, Clone)]
pub(super) enum HistoryEvent {
    Add(u8),
    Change { pod: u8, grace: Option<i64>, delete: bool, terminal: bool },
    Removed(u8),
    // The source removed it without an update.
    Missed(u8),
    Kill { pod: u8, grace: Option<i64>, evict: bool },
    Rejected(u8),
    SeenInRuntime(u8),
    Housekeeping,
    Take(u8),
    Enter(u8),
    Done(u8, WorkOutcome),
    Panic(u8),
    // A worker reports the end of work that it never had.
    Rogue(u8),
    // pod-sync is killed and restarted.
    Restart,
    Time(u64),
}

pub(super) fn happens() -> impl Strategy<Value = HistoryEvent> {
    let pod = || 0..PODS;
    let grace = || prop_oneof![Just(None), (0..40_i64).prop_map(Some)];
    let outcome = prop_oneof![
        4 => Just(WorkOutcome::Advance),
        1 => Just(WorkOutcome::Requeue),
        2 => prop_oneof![Just(None), (0..90_u64).prop_map(|s| Some(Duration::from_secs(s)))].prop_map(WorkOutcome::Idle),
        1 => Just(WorkOutcome::NetworkNotReady),
        1 => prop_oneof![Just(None), Just(Some(Duration::from_secs(3)))].prop_map(WorkOutcome::Failed),
        2 => Just(WorkOutcome::Interrupted),
        1 => Just(WorkOutcome::Cancelled),
    ];
    prop_oneof![
        5 => pod().prop_map(HistoryEvent::Add),
        4 => (pod(), grace(), any::<bool>(), prop::bool::weighted(0.2)).prop_map(|(pod, grace, delete, terminal)| {
            HistoryEvent::Change { pod, grace, delete, terminal }
        }),
        2 => pod().prop_map(HistoryEvent::Removed),
        1 => pod().prop_map(HistoryEvent::Missed),
        2 => (pod(), grace(), any::<bool>()).prop_map(|(pod, grace, evict)| HistoryEvent::Kill { pod, grace, evict }),
        1 => pod().prop_map(HistoryEvent::Rejected),
        1 => pod().prop_map(HistoryEvent::SeenInRuntime),
        2 => Just(HistoryEvent::Housekeeping),
        10 => pod().prop_map(HistoryEvent::Take),
        2 => pod().prop_map(HistoryEvent::Enter),
        10 => (pod(), outcome).prop_map(|(pod, outcome)| HistoryEvent::Done(pod, outcome)),
        1 => pod().prop_map(HistoryEvent::Panic),
        1 => pod().prop_map(HistoryEvent::Rogue),
        1 => Just(HistoryEvent::Restart),
        2 => (1..50_u64).prop_map(HistoryEvent::Time),
    ]
}

pub(super) fn uid(pod: u8) -> PodUid {
    PodUid::parse(&format!("u{pod}")).unwrap()
}

/// The environment of the state machine: sources, records, and the work of each worker.
pub(super) struct World {
    pub(super) workers: PodSyncStatuses,
    pub(super) now: Duration,
    chance: f64,
    sources: BTreeMap<PodUid, PodFacts>,
    // Written as pod-sync does: when work is taken, before it begins.
    records: BTreeMap<PodUid, (PodFacts, Option<Termination>, bool)>,
    holding: BTreeMap<PodUid, Work>,
    pub(super) watcher: Watcher,
    pub(super) taken: BTreeMap<Rule, u32>,
    waiter: u64,
    tamper: Tamper,
}

/// Changes the result of a step, for faults that no single condition can cause.
pub(super) type Tamper = fn(&mut PodSyncStatuses, &Input, &mut WorkerTransition);

impl World {
    pub(super) fn new() -> Self {
        Self {
            tamper: |_, _, _| {},
            workers: PodSyncStatuses::new(RESYNC),
            now: Duration::from_secs(1000),
            chance: 0.0,
            sources: BTreeMap::new(),
            records: BTreeMap::new(),
            holding: BTreeMap::new(),
            watcher: Watcher::default(),
            taken: BTreeMap::new(),
            waiter: 0,
        }
    }

    fn facts(pod: u8) -> PodFacts {
        let is_static = pod < STATIC;
        PodFacts {
            full_name: if is_static { format!("s{}_n", pod / 2) } else { format!("p{pod}_n") },
            is_static,
            deleted: false,
            grace: PodGrace { deletion: None, termination: Some(30) },
            terminal: false,
        }
    }

    /// Applies one event. Returns the violated invariants.
    pub(super) fn happen(&mut self, what: &HistoryEvent) -> Vec<String> {
        // Covers all values and keeps a history repeatable.
        self.chance = (self.chance + 0.37).fract();
        match *what {
            HistoryEvent::Add(pod) => {
                let facts = Self::facts(pod);
                self.sources.insert(uid(pod), facts.clone());
                self.step(Input::Update { uid: uid(pod), facts, kind: SyncPodType::Create, quiet: true })
            }
            HistoryEvent::Change { pod, grace, delete, terminal } => {
                let facts = self.sources.entry(uid(pod)).or_insert_with(|| Self::facts(pod));
                let new = !self.workers.is_known(&uid(pod));
                // A deletion is never revoked, and its grace period never becomes longer.
                if delete && !facts.is_static {
                    facts.deleted = true;
                    facts.grace.deletion = Some(match (facts.grace.deletion, grace) {
                        (Some(old), Some(new)) => old.min(new),
                        (old, new) => old.or(new).unwrap_or(30),
                    });
                }
                facts.terminal |= terminal && !facts.is_static;
                let facts = facts.clone();
                let kind = if new { SyncPodType::Create } else { SyncPodType::Update };
                self.step(Input::Update { uid: uid(pod), facts, kind, quiet: true })
            }
            HistoryEvent::Removed(pod) => {
                self.sources.remove(&uid(pod));
                self.step(Input::Remove(uid(pod)))
            }
            HistoryEvent::Missed(pod) => {
                self.sources.remove(&uid(pod));
                Vec::new()
            }
            HistoryEvent::Kill { pod, grace, evict } => {
                let Some(facts) = self.sources.get(&uid(pod)).cloned() else { return Vec::new() };
                self.waiter += 1;
                let kill = KillPodOptions { evict, grace, waiter: Some(self.waiter), killed_as: None };
                self.watcher.waits(uid(pod), self.waiter);
                self.step(Input::Update { uid: uid(pod), facts, kind: SyncPodType::Kill(kill), quiet: false })
            }
            HistoryEvent::Rejected(pod) => match self.holding.get(&uid(pod)) {
                Some(Work::Sync) => {
                    let out = self.step(Input::Reject(uid(pod)));
                    self.record(&uid(pod));
                    out
                }
                _ => Vec::new(),
            },
            HistoryEvent::SeenInRuntime(pod) => match self.workers.is_known(&uid(pod)) {
                // Housekeeping reports pods without a worker, and pods that only the runtime has.
                true if self.sources.contains_key(&uid(pod)) || !self.workers.is_started(&uid(pod)) => {
                    Vec::new()
                }
                _ => {
                    let full_name = Self::facts(pod).full_name;
                    self.step(Input::Orphan { uid: uid(pod), full_name })
                }
            },
            HistoryEvent::Housekeeping => {
                let desired: BTreeSet<PodUid> = self.sources.keys().cloned().collect();
                let mut wrong = self.step(Input::SyncKnownPods(desired));
                // A static pod without a worker is added: its UID was used before.
                let unknown: Vec<(PodUid, PodFacts)> = self
                    .sources
                    .iter()
                    .filter(|(uid, f)| f.is_static && !self.workers.is_known(uid))
                    .map(|(uid, facts)| (uid.clone(), facts.clone()))
                    .collect();
                for (uid, facts) in unknown {
                    wrong.extend(self.step(Input::Update {
                        uid,
                        facts,
                        kind: SyncPodType::Create,
                        quiet: true,
                    }));
                }
                wrong
            }
            HistoryEvent::Take(pod) => {
                let out = self.step(Input::TakeWork(uid(pod)));
                self.record(&uid(pod));
                out
            }
            HistoryEvent::Enter(pod) => match self.holding.get(&uid(pod)) {
                Some(Work::Sync) => {
                    self.watcher.entered(uid(pod));
                    self.step(Input::RuntimeReached(uid(pod)))
                }
                _ => Vec::new(),
            },
            HistoryEvent::Done(pod, outcome) => {
                let Some(work) = self.holding.remove(&uid(pod)) else { return Vec::new() };
                let cannot = outcome == WorkOutcome::Cancelled && !matches!(work, Work::Sync | Work::Terminating)
                    // A pod whose status is still to be reported stays.
                    || outcome == WorkOutcome::Advance && work == (Work::Finished { clean: false })
                        && self.sources.get(&uid(pod)).is_some_and(|f| !f.deleted);
                let outcome = if cannot { WorkOutcome::Idle(None) } else { outcome };
                self.watcher.ends(&uid(pod), outcome, self.now);
                let out = self.step(Input::Done { uid: uid(pod), outcome });
                // Stopped containers and removed volumes are recorded before they are reported.
                if matches!(work, Work::Terminating | Work::Terminated) {
                    self.record(&uid(pod));
                }
                out
            }
            HistoryEvent::Panic(pod) => match self.holding.remove(&uid(pod)) {
                Some(_) => {
                    self.watcher.lost(&uid(pod));
                    self.step(Input::WorkerExited(uid(pod)))
                }
                None => Vec::new(),
            },
            HistoryEvent::Rogue(pod) => match self.holding.contains_key(&uid(pod)) {
                true => Vec::new(),
                false => self.step(Input::Done { uid: uid(pod), outcome: WorkOutcome::Advance }),
            },
            HistoryEvent::Restart => self.restart(),
            HistoryEvent::Time(seconds) => {
                self.now += Duration::from_secs(seconds);
                Vec::new()
            }
        }
    }

    fn record(&mut self, uid: &PodUid) {
        let (termination, started) = (self.workers.termination(uid).cloned(), self.workers.is_started(uid));
        if let Some(state) = self.workers.pods.get(uid).filter(|s| !s.is_runtime_only()) {
            self.records.insert(uid.clone(), (state.facts.clone(), termination, started));
        }
    }

    fn restart(&mut self) -> Vec<String> {
        self.workers = PodSyncStatuses::new(RESYNC);
        self.holding.clear();
        self.watcher.restarted();
        let mut out = Vec::new();
        for (uid, (facts, termination, started)) in self.records.clone() {
            out.extend(self.step(Input::Restore { uid, facts, termination, started }));
        }
        // Sources send their pods again; restored pods are not new.
        for (uid, facts) in self.sources.clone() {
            let kind =
                if self.records.contains_key(&uid) { SyncPodType::Update } else { SyncPodType::Create };
            out.extend(self.step(Input::Update { uid, facts, kind, quiet: false }));
        }
        let gone: Vec<PodUid> =
            self.records.keys().filter(|u| !self.sources.contains_key(*u)).cloned().collect();
        for uid in gone {
            out.extend(self.step(Input::Remove(uid)));
        }
        out
    }

    pub(super) fn step(&mut self, input: Input) -> Vec<String> {
        let before = self.workers.clone();
        let mut step = self.workers.step(input.clone(), self.now, self.chance);
        (self.tamper)(&mut self.workers, &input, &mut step);
        for rule in &step.rules {
            *self.taken.entry(*rule).or_default() += 1;
        }
        // The same input gives the same result: no clock and no randomness inside.
        let mut twin = before.clone();
        let mut again = twin.step(input.clone(), self.now, self.chance);
        (self.tamper)(&mut twin, &input, &mut again);
        let mut wrong = Vec::new();
        if (&twin, &again) != (&self.workers, &step) {
            wrong.push("7: one input gave two results".to_owned());
        }
        wrong.extend(self.watcher.look(&before, &self.workers, &input, &step, self.now, &self.sources));
        self.carry_out(&step);
        wrong
    }

    fn carry_out(&mut self, step: &WorkerTransition) {
        for effect in &step.effects {
            match effect {
                Effect::Work(uid, work) if !matches!(work, Work::WaitForFullName { .. }) => {
                    self.holding.insert(uid.clone(), work.clone());
                }
                Effect::Forget(uid) => {
                    self.holding.remove(uid);
                    self.records.remove(uid);
                }
                Effect::Spawn(_)
                | Effect::Wake(_)
                | Effect::Cancel(_)
                | Effect::Work(..)
                | Effect::Wait(..)
                | Effect::NotifyStopped(..)
                | Effect::Restart(_) => {}
            }
        }
    }

    /// Completes all remaining work without faults: every pod must run or be forgotten.
    pub(super) fn settle(&mut self) -> Vec<String> {
        let mut wrong = Vec::new();
        for _ in 0..40 {
            for pod in 0..PODS {
                wrong.extend(self.happen(&HistoryEvent::Take(pod)));
                let outcome = match self.holding.get(&uid(pod)) {
                    Some(Work::Sync) | None => WorkOutcome::Idle(None),
                    Some(_) => WorkOutcome::Advance,
                };
                wrong.extend(self.happen(&HistoryEvent::Done(pod, outcome)));
            }
            wrong.extend(self.happen(&HistoryEvent::Housekeeping));
        }
        for (uid, state) in &self.workers.pods {
            let wanted = self.sources.get(uid);
            let right = match state.phase() {
                WorkerPhase::Sync => wanted.is_some_and(|f| !f.deleted && !f.terminal),
                WorkerPhase::Terminating | WorkerPhase::Terminated => false,
                WorkerPhase::Finished => wanted.is_some(),
            };
            if !right || (state.phase() == WorkerPhase::Sync && !state.started && !self.is_held_up(state)) {
                wrong.push(format!("9: {uid} did not come to rest: {state:?}"));
            }
        }
        for (uid, _) in self.sources.iter().filter(|(u, f)| f.is_static && !self.workers.is_known(u)) {
            wrong.push(format!("9: {uid} is wanted and forgotten"));
        }
        wrong
    }

    // A running pod holds its name.
    fn is_held_up(&self, state: &super::super::PodSyncStatus) -> bool {
        let holder = self.workers.name_queue.holder(&state.facts.full_name);
        holder.and_then(|uid| self.workers.pods.get(uid)).is_some_and(|s| s.phase() < WorkerPhase::Finished)
    }
}

/// Plays a history. Returns the violated invariants and the rules that were taken.
pub(super) fn play(
    policy: &'static dyn Policy,
    history: &[HistoryEvent],
) -> (Vec<String>, BTreeMap<Rule, u32>) {
    play_spoilt(policy, |_, _, _| {}, history)
}

/// The same, with each step changed by `tamper`.
pub(super) fn play_spoilt(
    policy: &'static dyn Policy,
    tamper: Tamper,
    history: &[HistoryEvent],
) -> (Vec<String>, BTreeMap<Rule, u32>) {
    faulty_policy::with(policy, || {
        let mut world = World { tamper, ..World::new() };
        for happens in history {
            let wrong = world.happen(happens);
            if !wrong.is_empty() {
                return (wrong, world.taken);
            }
        }
        let wrong = world.settle();
        (wrong, world.taken)
    })
}
