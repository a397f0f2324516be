//! Checks the invariants of ARCHITECTURE.md, by their numbers there, from inputs and effects only,
//! independently of the transition function.
//!
//! 4, 8 and 11 hold by construction: no effect opens a socket or writes an object, no input has a credential
//! or the readiness of a service. Here it is only checked that effects concern known pods. 2 is checked in
//! `mutants`. 7 is enforced by clippy's disallowed methods; here it is checked that one input gives one
//! result.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quintlet_model::ids::PodUid;

use super::super::{
    Effect, Input, PodFacts, PodSyncStatuses, SyncPodType, Termination, Work, WorkOutcome, WorkerPhase,
    WorkerTransition,
};
use super::history::RESYNC;

/// Remembers which work was given to which worker.
#[derive(Debug, Default)]
pub(super) struct Watcher {
    live: BTreeSet<PodUid>,
    working: BTreeMap<PodUid, Work>,
    // Static pods that have containers, by full name. A restart of pod-sync stops none of them.
    runs: BTreeMap<String, BTreeSet<PodUid>>,
    entered: BTreeSet<PodUid>,
    // The last termination of each pod, and the last recorded one.
    ends: BTreeMap<PodUid, Termination>,
    recorded: BTreeMap<PodUid, Termination>,
    waiting: BTreeMap<u64, PodUid>,
    // Pods with an input that arrived during their work.
    superseded: BTreeSet<PodUid>,
    last: Option<(PodUid, WorkOutcome, Work)>,
}

impl Watcher {
    pub(super) fn waits(&mut self, uid: PodUid, waiter: u64) {
        self.waiting.insert(waiter, uid);
    }

    pub(super) fn entered(&mut self, uid: PodUid) {
        self.entered.insert(uid);
    }

    pub(super) fn lost(&mut self, uid: &PodUid) {
        self.live.remove(uid);
        self.working.remove(uid);
        self.entered.remove(uid);
        self.superseded.remove(uid);
    }

    pub(super) fn restarted(&mut self) {
        self.live.clear();
        self.working.clear();
        self.entered.clear();
        self.waiting.clear();
        self.superseded.clear();
        self.ends.clone_from(&self.recorded);
    }

    pub(super) fn ends(&mut self, uid: &PodUid, outcome: WorkOutcome, _now: Duration) {
        self.entered.remove(uid);
        if let Some(work) = self.working.remove(uid) {
            self.last = Some((uid.clone(), outcome, work));
        }
    }

    /// Returns all violations of one step.
    pub(super) fn look(
        &mut self,
        before: &PodSyncStatuses,
        after: &PodSyncStatuses,
        input: &Input,
        step: &WorkerTransition,
        now: Duration,
        sources: &BTreeMap<PodUid, PodFacts>,
    ) -> Vec<String> {
        let mut wrong = Vec::new();
        self.isolation(before, after, input, step, &mut wrong);
        self.progress(before, after, input, now, sources, &mut wrong);
        self.heed(before, after, input, step, &mut wrong);
        for effect in &step.effects {
            self.effect(after, effect, step, &mut wrong);
        }
        self.recordings(after, input);
        bounds(after, &mut wrong);
        self.last = None;
        wrong.iter().map(|w| format!("{w} — after {input:?}: {step:?}")).collect()
    }

    // 6: an input for one pod changes no other pod, except the next one in the queue for its full name.
    fn isolation(
        &self,
        before: &PodSyncStatuses,
        after: &PodSyncStatuses,
        input: &Input,
        step: &WorkerTransition,
        wrong: &mut Vec<String>,
    ) {
        let Some(subject) = subject(input) else { return };
        for (uid, state) in &before.pods {
            if uid != subject && after.pods.get(uid) != Some(state) {
                wrong.push(format!("6: {uid} changed by an input for {subject}"));
            }
        }
        for effect in &step.effects {
            let (pod, is_wake) = about(effect);
            if pod != subject && !is_wake {
                wrong.push(format!("6: an effect on {pod}"));
            }
            let known = before.is_known(pod) || after.is_known(pod);
            let may = matches!(effect, Effect::Forget(_) | Effect::Restart(_) | Effect::NotifyStopped(..));
            if !known && !may {
                wrong.push(format!("4: an effect on {pod}, which is unknown"));
            }
        }
    }

    // 3: a termination never ends, and its deadline never moves later.
    fn progress(
        &mut self,
        before: &PodSyncStatuses,
        after: &PodSyncStatuses,
        input: &Input,
        now: Duration,
        sources: &BTreeMap<PodUid, PodFacts>,
        wrong: &mut Vec<String>,
    ) {
        for (uid, state) in &after.pods {
            let termination = state.termination.as_ref();
            if let Some(last) = self.ends.get(uid) {
                match termination {
                    None => wrong.push(format!("3: the termination of {uid} was lost")),
                    Some(e) => {
                        if e.deadline > last.deadline || e.grace_seconds > last.grace_seconds {
                            wrong.push(format!("3: the grace of {uid} grew"));
                        }
                        if WorkerPhase::of(termination) < WorkerPhase::of(Some(last)) {
                            wrong.push(format!("3: {uid} returned to an earlier phase"));
                        }
                    }
                }
            }
            let old = before.pods.get(uid).map(|s| s.phase());
            self.pace(uid, old, state.phase(), input, wrong);
            if let Some(e) = termination {
                if e.grace_seconds < 1 || e.since > now {
                    wrong.push(format!("3: an invalid termination of {uid}: {e:?}"));
                }
                self.ends.insert(uid.clone(), e.clone());
            }
            // 10: housekeeping terminates only pods that are not desired.
            let wanted = sources.get(uid).is_some_and(|f| !f.deleted && !f.terminal);
            if matches!(input, Input::SyncKnownPods(_)) && wanted && old != Some(state.phase()) {
                wrong.push(format!("10: {uid} is desired and was terminated"));
            }
        }
    }

    // A phase ends only with completed work of that phase; no phase is skipped.
    fn pace(
        &self,
        uid: &PodUid,
        old: Option<WorkerPhase>,
        new: WorkerPhase,
        input: &Input,
        wrong: &mut Vec<String>,
    ) {
        let Some(old) = old else { return };
        if old == new {
            return;
        }
        let advanced = |work: &Work| {
            self.last.as_ref().is_some_and(|(u, o, w)| u == uid && *o == WorkOutcome::Advance && w == work)
        };
        let right = match (old, new) {
            (WorkerPhase::Sync, WorkerPhase::Terminating) => true,
            (WorkerPhase::Terminating, WorkerPhase::Terminated) => advanced(&Work::Terminating),
            (WorkerPhase::Terminated, WorkerPhase::Finished) => advanced(&Work::Terminated),
            (WorkerPhase::Sync, WorkerPhase::Finished) => matches!(input, Input::Reject(_)),
            // A static pod that never got its full name.
            (WorkerPhase::Terminating, WorkerPhase::Finished) => {
                matches!(input, Input::TakeWork(_)) && !self.runs.values().any(|runs| runs.contains(uid))
            }
            _ => false,
        };
        if !right {
            wrong.push(format!("1: {uid} went from {old:?} to {new:?}"));
        }
    }

    // 10: a requested termination begins at once; a sync that has not reached the runtime is cancelled.
    fn heed(
        &self,
        before: &PodSyncStatuses,
        after: &PodSyncStatuses,
        input: &Input,
        step: &WorkerTransition,
        wrong: &mut Vec<String>,
    ) {
        let (uid, asks) = match input {
            Input::Update { uid, facts, kind, .. } => {
                (uid, facts.deleted || facts.terminal || matches!(kind, SyncPodType::Kill(_)))
            }
            Input::Remove(uid) | Input::Orphan { uid, .. } => (uid, true),
            _ => return,
        };
        let Some(state) = after.pods.get(uid) else { return };
        if asks && state.termination.is_none() && before.is_known(uid) {
            wrong.push(format!("10: the termination of {uid} was requested and did not begin"));
        }
        let began =
            state.termination.is_some() && before.pods.get(uid).is_some_and(|s| s.termination.is_none());
        let interruptions = step.effects.contains(&Effect::Cancel(uid.clone()));
        let syncs = self.working.get(uid) == Some(&Work::Sync);
        if began && syncs && !self.entered.contains(uid) && !interruptions {
            wrong.push(format!("10: the sync of {uid} delays its termination"));
        }
    }

    fn effect(
        &mut self,
        after: &PodSyncStatuses,
        effect: &Effect,
        step: &WorkerTransition,
        wrong: &mut Vec<String>,
    ) {
        match effect {
            Effect::Spawn(uid) => {
                if !self.live.insert(uid.clone()) {
                    wrong.push(format!("1: a second worker for {uid}"));
                }
            }
            Effect::Work(_, Work::WaitForFullName { .. }) | Effect::Restart(_) => {}
            Effect::Wake(uid) => {
                if self.working.contains_key(uid) {
                    self.superseded.insert(uid.clone());
                }
            }
            Effect::Work(uid, work) => {
                self.superseded.remove(uid);
                if self.working.insert(uid.clone(), work.clone()).is_some() {
                    wrong.push(format!("1: two actions at once on {uid}"));
                }
                self.name_runs(after, uid, work, wrong);
            }
            Effect::Cancel(uid) => {
                let stops = self.working.get(uid) == Some(&Work::Terminating);
                let syncs = self.working.get(uid) == Some(&Work::Sync);
                if !stops && (self.entered.contains(uid) || !syncs) {
                    wrong.push(format!("1: a runtime call of {uid} was cancelled"));
                }
            }
            Effect::Wait(uid, wait) => self.wait(uid, *wait, wrong),
            Effect::NotifyStopped(uid, waiters) => {
                let stopped = after.pods.get(uid).is_none_or(|s| s.phase() >= WorkerPhase::Terminated);
                for waiter in waiters {
                    if self.waiting.remove(waiter).as_ref() != Some(uid) || !stopped {
                        wrong.push(format!("10: {waiter} was notified of the end of {uid}"));
                    }
                }
            }
            Effect::Forget(uid) => {
                if self.waiting.values().any(|u| u == uid) {
                    wrong.push(format!("9: a caller waits for {uid} forever"));
                }
                let known = self.live.remove(uid);
                let over = self.is_last_of(uid);
                for runs in self.runs.values_mut() {
                    if runs.remove(uid) && !over {
                        wrong.push(format!("1: {uid} was forgotten while it runs"));
                    }
                }
                if known && !step.effects.contains(&Effect::Restart(uid.clone())) {
                    self.superseded.remove(uid);
                }
                self.ends.remove(uid);
                self.recorded.remove(uid);
            }
        }
    }

    fn is_last_of(&self, uid: &PodUid) -> bool {
        self.last.as_ref().is_some_and(|(u, o, _)| u == uid && *o == WorkOutcome::Advance)
    }

    // 1: no two static pods of one full name run at once.
    fn name_runs(&mut self, after: &PodSyncStatuses, uid: &PodUid, work: &Work, wrong: &mut Vec<String>) {
        let Some(facts) = after.pods.get(uid).map(|s| &s.facts).filter(|f| f.is_static) else { return };
        let runs = self.runs.entry(facts.full_name.clone()).or_default();
        if matches!(work, Work::Finished { .. }) {
            runs.remove(uid);
            return;
        }
        runs.insert(uid.clone());
        if runs.len() > 1 {
            wrong.push(format!("1: {runs:?} run under one name"));
        }
    }

    // 5 and 9: no retry without a pause, and no wait beyond the event that it waits for.
    fn wait(&mut self, uid: &PodUid, wait: Duration, wrong: &mut Vec<String>) {
        if wait > RESYNC.mul_f64(1.5) {
            wrong.push(format!("9: {uid} waits for {wait:?}"));
        }
        let Some((last_pod, outcome, work)) = &self.last else { return };
        let superseded = self.superseded.remove(last_pod);
        if superseded && !wait.is_zero() && *outcome != WorkOutcome::Advance {
            wrong.push(format!("9: {uid} waits although an input arrived"));
        }
        match outcome {
            WorkOutcome::Interrupted if wait > Duration::from_secs(1) => {
                wrong.push(format!("9: {uid} is retried only after {wait:?}"));
            }
            WorkOutcome::Failed(None) if wait.is_zero() && !superseded => {
                wrong.push(format!("5: {uid} is retried without a pause"));
            }
            _ => {}
        }
        // The name is free once its pod has nothing left to remove.
        if *outcome == WorkOutcome::Advance && *work == Work::Terminated {
            for runs in self.runs.values_mut() {
                runs.remove(last_pod);
            }
        }
    }

    fn recordings(&mut self, after: &PodSyncStatuses, input: &Input) {
        // A rejected pod never ran.
        if let Input::Reject(uid) = input {
            for runs in self.runs.values_mut() {
                runs.remove(uid);
            }
        }
        // There is no record of a pod that only the runtime has.
        if let Input::TakeWork(uid) = input
            && after.pods.get(uid).is_some_and(|s| !s.is_runtime_only())
            && let Some(termination) = after.termination(uid)
        {
            self.recorded.insert(uid.clone(), termination.clone());
        }
    }
}

// 5: nothing grows with anything but the number of pods.
fn bounds(after: &PodSyncStatuses, wrong: &mut Vec<String>) {
    if after.name_queue.len() > after.pods.len() {
        wrong.push(format!("5: {} queued names of {} pods", after.name_queue.len(), after.pods.len()));
    }
}

fn subject(input: &Input) -> Option<&PodUid> {
    match input {
        Input::Update { uid, .. }
        | Input::Remove(uid)
        | Input::Reject(uid)
        | Input::Orphan { uid, .. }
        | Input::Restore { uid, .. }
        | Input::TakeWork(uid)
        | Input::RuntimeReached(uid)
        | Input::Done { uid, .. }
        | Input::WorkerExited(uid) => Some(uid),
        Input::SyncKnownPods(_) => None,
    }
}

fn about(effect: &Effect) -> (&PodUid, bool) {
    match effect {
        Effect::Wake(uid) => (uid, true),
        Effect::Spawn(uid)
        | Effect::Cancel(uid)
        | Effect::Work(uid, _)
        | Effect::Wait(uid, _)
        | Effect::NotifyStopped(uid, _)
        | Effect::Forget(uid)
        | Effect::Restart(uid) => (uid, false),
    }
}
