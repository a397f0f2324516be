//! The transition function.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quintlet_model::ids::PodUid;

#[cfg(not(test))]
use super::policy;
#[cfg(test)]
use super::tests::faulty_policy as policy;
use super::{
    Effect, FullNameQueue, FullNameWaiter, InFlightWork, Input, KillPodOptions, NAME_WAIT, ORPHAN_GRACE,
    OrphanState, PodFacts, PodGrace, PodSyncStatus, PodSyncStatuses, Rule, SourceState, SyncPodType,
    Termination, TerminationCause, TerminationProgress, Work, WorkOutcome, WorkerPhase, WorkerTransition,
    jitter,
};

/// Time and randomness of a step.
#[derive(Debug, Clone, Copy)]
struct At {
    now: Duration,
    chance: f64,
}

impl PodSyncStatuses {
    /// Returns the state without pods. `resync` is `syncFrequency`.
    #[must_use]
    pub fn new(resync: Duration) -> Self {
        Self { resync, pods: BTreeMap::new(), name_queue: FullNameQueue::default(), synced: false }
    }

    /// Applies an input. `now` is CLOCK_BOOTTIME, `chance` is in `[0, 1)`.
    pub fn step(&mut self, input: Input, now: Duration, chance: f64) -> WorkerTransition {
        let mut out = WorkerTransition::default();
        let at = At { now, chance };
        match input {
            Input::Update { uid, facts, kind, quiet } => {
                self.update(uid, facts, kind, quiet, at, &mut out);
            }
            Input::Remove(uid) => self.remove(&uid, at, &mut out),
            Input::Reject(uid) => self.refuse(&uid, at, &mut out),
            Input::Orphan { uid, full_name } => self.orphan(uid, full_name, at, &mut out),
            Input::Restore { uid, facts, termination, started } => {
                let termination = policy::restored(termination, now);
                self.restore(uid, facts, termination, started, &mut out);
            }
            Input::SyncKnownPods(desired) => self.known(&desired, at, &mut out),
            Input::TakeWork(uid) => self.take(uid, at, &mut out),
            Input::RuntimeReached(uid) => {
                if let Some(busy) = self.pods.get_mut(&uid).and_then(|s| s.busy.as_mut()) {
                    busy.cancellable = false;
                    out.rules.push(Rule::RuntimeReached);
                }
            }
            Input::Done { uid, outcome } => self.done(uid, outcome, at, &mut out),
            Input::WorkerExited(uid) => {
                if let Some(state) = self.pods.get_mut(&uid) {
                    state.busy = None;
                    out.rules.push(Rule::ExitedWorkerReplaced);
                    out.effects.push(Effect::Spawn(uid));
                }
            }
        }
        out
    }

    fn add(&mut self, uid: &PodUid, state: PodSyncStatus, out: &mut WorkerTransition) {
        if state.facts.is_static && !state.started {
            self.name_queue.join(&state.facts.full_name, uid);
        }
        self.pods.insert(uid.clone(), state);
        out.effects.push(Effect::Spawn(uid.clone()));
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of one input")]
    fn update(
        &mut self,
        uid: PodUid,
        facts: PodFacts,
        kind: SyncPodType,
        quiet: bool,
        at: At,
        out: &mut WorkerTransition,
    ) {
        if !self.pods.contains_key(&uid) {
            let mut state = PodSyncStatus::new(facts.clone());
            if facts.terminal && quiet {
                // Only its remains have to be removed.
                state.started = true;
                let mut termination = begin(TerminationCause::Completed, facts.grace, None, at.now);
                termination.progress = TerminationProgress::Stopped;
                state.termination = Some(termination);
                out.rules.push(Rule::CreatedAlreadyTerminal);
                return self.add(&uid, state, out);
            }
            let ends = facts.deleted || facts.terminal || matches!(kind, SyncPodType::Kill(_));
            out.rules.push(if ends { Rule::CreatedTerminating } else { Rule::Created });
            self.add(&uid, state, out);
        }
        let Some(state) = self.pods.get_mut(&uid) else { return };
        if state.termination.is_some() && kind == SyncPodType::Create {
            // The UID is used again: the previous pod terminates first.
            if !matches!(state.source, SourceState::AddedAgain { .. }) {
                state.source = SourceState::AddedAgain { was_removed: state.source.was_removed() };
                wake(state, &uid, out);
            }
            out.rules.push(Rule::CreateWhileTerminatingRequestsRestart);
            return;
        }
        let kill = match kind {
            SyncPodType::Kill(kill) => Some(kill),
            SyncPodType::Create | SyncPodType::Update => None,
        };
        if state.phase() >= WorkerPhase::Terminated {
            // A deletion still has to be reported in the status.
            state.facts = facts;
            match kill.and_then(|k| k.waiter) {
                Some(waiter) => {
                    out.rules.push(Rule::KillOfStoppedAnsweredAtOnce);
                    out.effects.push(Effect::NotifyStopped(uid, vec![waiter]));
                }
                None => {
                    out.rules.push(Rule::UpdateOfFinishedIgnored);
                    wake(state, &uid, out);
                }
            }
            return;
        }
        let cause = if facts.deleted {
            Some((TerminationCause::Deleted, Rule::TerminatesOnDeletion))
        } else if facts.terminal {
            Some((TerminationCause::Completed, Rule::TerminatesOnTerminalPhase))
        } else {
            kill.as_ref().map(|k| match k.evict {
                true => (TerminationCause::Evicted, Rule::TerminatesOnEviction),
                false => (TerminationCause::Removed, Rule::TerminatesOnKill),
            })
        };
        if !state.is_runtime_only() {
            state.facts = facts;
        }
        match cause {
            Some((cause, rule)) => end(state, &uid, cause, rule, kill, at, out),
            // An update of a terminating pod may shorten its grace period.
            None if state.termination.is_some() => {
                shorten(state, &uid, None, at, out);
                wake(state, &uid, out);
            }
            None => {
                out.rules.push(Rule::UpdateWhileRunning);
                wake(state, &uid, out);
            }
        }
    }

    fn remove(&mut self, uid: &PodUid, at: At, out: &mut WorkerTransition) {
        let Some(state) = self.pods.get_mut(uid) else {
            out.rules.push(Rule::RemoveOfUnknown);
            return;
        };
        state.source = SourceState::Removed;
        if state.termination.is_some() {
            if state.termination.as_ref().is_some_and(|e| e.cause == TerminationCause::Completed)
                && let Some(termination) = state.termination.as_mut()
            {
                termination.cause = TerminationCause::Removed;
            }
            out.rules.push(Rule::RemoveWhileTerminating);
            wake(state, uid, out);
            return;
        }
        end(state, uid, TerminationCause::Removed, Rule::TerminatesOnRemove, None, at, out);
    }

    // The worker exists to keep the status until the pod is deleted.
    fn refuse(&mut self, uid: &PodUid, at: At, out: &mut WorkerTransition) {
        let Some(state) = self.pods.get_mut(uid) else { return };
        if state.termination.is_some() {
            return;
        }
        let grace = state.facts.grace;
        let mut termination = begin(TerminationCause::Completed, grace, None, at.now);
        termination.progress = TerminationProgress::Finished;
        state.termination = Some(termination);
        out.rules.push(Rule::Rejected);
        self.free_name(uid, out);
    }

    fn orphan(&mut self, uid: PodUid, full_name: String, at: At, out: &mut WorkerTransition) {
        let Some(state) = self.pods.get_mut(&uid) else {
            let grace = PodGrace { deletion: Some(ORPHAN_GRACE), termination: None };
            let mut state = PodSyncStatus::new(PodFacts { full_name, grace, ..PodFacts::default() });
            state.orphan = OrphanState::RuntimeOnly;
            state.source = SourceState::Removed;
            state.termination = Some(begin(TerminationCause::Removed, grace, None, at.now));
            out.rules.push(Rule::OrphanOfUnknown);
            return self.add(&uid, state, out);
        };
        if state.orphan == OrphanState::NotFound {
            state.orphan = OrphanState::Found;
        }
        if state.termination.is_some() {
            out.rules.push(Rule::OrphanAgain);
            wake(state, &uid, out);
            return;
        }
        end(state, &uid, TerminationCause::Removed, Rule::TerminatesKnownOrphan, None, at, out);
    }

    fn restore(
        &mut self,
        uid: PodUid,
        facts: PodFacts,
        termination: Option<Termination>,
        started: bool,
        out: &mut WorkerTransition,
    ) {
        let mut state = PodSyncStatus::new(facts);
        // A terminating pod had started: a pod that never started is not recorded as terminating.
        state.started = started || termination.is_some();
        let cause = termination.as_ref().map(|termination| termination.cause);
        let is_removed = cause == Some(TerminationCause::Removed);
        if is_removed {
            state.source = SourceState::Removed;
        }
        // The previous process had taken up the termination.
        state.termination =
            termination.map(|t| Termination { progress: t.progress.max(TerminationProgress::Stopping), ..t });
        if state.facts.is_static && state.started && policy::holds_name(state.phase()) {
            self.name_queue.start(&state.facts.full_name, &uid);
        }
        out.rules.push(match (&state.termination, state.facts.is_static && !state.started) {
            (Some(_), _) => Rule::RestoredTerminating,
            (None, true) => Rule::RestoredWaitingForName,
            (None, false) => Rule::RestoredRunning,
        });
        self.add(&uid, state, out);
    }

    fn known(&mut self, desired: &BTreeSet<PodUid>, at: At, out: &mut WorkerTransition) {
        self.synced = true;
        let uids: Vec<PodUid> = self.pods.keys().cloned().collect();
        for uid in uids {
            let Some(state) = self.pods.get_mut(&uid) else { continue };
            let orphan = policy::is_orphan(desired, &uid);
            if !orphan {
                out.rules.push(Rule::SyncKeepsDesired);
                continue;
            }
            let was_removed = state.source.was_removed();
            state.source = SourceState::Removed;
            if state.phase() == WorkerPhase::Finished {
                out.rules.push(Rule::SyncReleasesFinished);
                if !was_removed {
                    wake(state, &uid, out);
                }
            } else if !state.started && state.orphan == OrphanState::NotFound && state.busy.is_none() {
                out.rules.push(Rule::SyncForgetsNeverStarted);
                self.forget(&uid, out);
            } else if state.termination.is_none() {
                end(state, &uid, TerminationCause::Removed, Rule::SyncTerminatesOrphan, None, at, out);
            } else {
                out.rules.push(Rule::SyncOfTerminatingOrphan);
                if !was_removed {
                    wake(state, &uid, out);
                }
            }
        }
    }

    fn take(&mut self, uid: PodUid, at: At, out: &mut WorkerTransition) {
        let Some(state) = self.pods.get_mut(&uid) else {
            out.rules.push(Rule::TakeOfUnknown);
            out.effects.push(Effect::Forget(uid));
            return;
        };
        if !policy::may_take(state.busy.is_some()) {
            out.rules.push(Rule::TakeWhileBusy);
            return;
        }
        if !state.started && !self.starts(&uid, at, out) {
            return;
        }
        let Some(state) = self.pods.get_mut(&uid) else { return };
        let phase = state.phase();
        let clean = state.source != SourceState::Present;
        let (work, rule) = match phase {
            WorkerPhase::Sync => (Work::Sync, Rule::TakeSync),
            WorkerPhase::Terminating => (Work::Terminating, Rule::TakeTerminating),
            WorkerPhase::Terminated => (Work::Terminated, Rule::TakeTerminated),
            WorkerPhase::Finished if clean => (Work::Finished { clean }, Rule::TakeFinishedClean),
            WorkerPhase::Finished => (Work::Finished { clean }, Rule::TakeFinished),
        };
        if let Some(termination) = state.termination.as_mut() {
            termination.progress = termination.progress.max(TerminationProgress::Stopping);
        }
        let cancellable = phase == WorkerPhase::Sync;
        state.busy = Some(InFlightWork { phase, cancellable, superseded: false });
        out.rules.push(rule);
        out.effects.push(Effect::Work(uid, work));
    }

    /// Returns false if the pod does not start now; the effects say what happens instead.
    fn starts(&mut self, uid: &PodUid, at: At, out: &mut WorkerTransition) -> bool {
        let Some(state) = self.pods.get(uid) else { return false };
        let name = state.facts.full_name.clone();
        if !state.facts.is_static {
            out.rules.push(Rule::TakeStartsPod);
        } else if state.termination.is_some() && state.orphan != OrphanState::NotFound {
            // The running containers of the pod are stopped, whichever pod has the full name.
            out.rules.push(Rule::TakeStartsPod);
        } else if state.termination.is_some() {
            // It never ran and never will.
            out.rules.push(Rule::TakeNeverStarted);
            if let Some(state) = self.pods.get_mut(uid) {
                state.set_progress(TerminationProgress::Finished);
            }
            self.stopped(uid, out);
            self.free_name(uid, out);
        } else {
            let holder = self.name_queue.holder(&name).cloned();
            let name_queue: Vec<FullNameWaiter> = self
                .name_queue
                .waiting(&name)
                .iter()
                .map(|u| FullNameWaiter {
                    uid: u.clone(),
                    live: self.pods.get(u).is_some_and(|s| s.termination.is_none()),
                })
                .collect();
            if !policy::may_start(uid, holder.as_ref(), &name_queue) {
                let other = holder.or_else(|| name_queue.into_iter().find(|w| w.live).map(|w| w.uid));
                out.rules.push(Rule::TakeNameHeld);
                out.effects.push(Effect::Work(uid.clone(), Work::WaitForFullName { other }));
                out.effects.push(Effect::Wait(uid.clone(), jitter(NAME_WAIT, at.chance)));
                return false;
            }
            self.name_queue.start(&name, uid);
            out.rules.push(Rule::TakeStartsStatic);
        }
        if let Some(state) = self.pods.get_mut(uid) {
            state.started = true;
        }
        true
    }

    fn done(&mut self, uid: PodUid, outcome: WorkOutcome, at: At, out: &mut WorkerTransition) {
        let resync = self.resync;
        let Some(state) = self.pods.get_mut(&uid) else {
            out.rules.push(Rule::DoneOfUnknown);
            out.effects.push(Effect::Forget(uid));
            return;
        };
        let Some(busy) = state.busy.take() else {
            out.rules.push(Rule::DoneOfUnknown);
            return;
        };
        let interruptions = if outcome == WorkOutcome::Interrupted { state.interruptions } else { 0 };
        state.interruptions =
            if outcome == WorkOutcome::Interrupted { interruptions.saturating_add(1) } else { 0 };
        if outcome == WorkOutcome::Advance {
            return self.advance(uid, busy.phase, at, out);
        }
        out.rules.push(match outcome {
            WorkOutcome::Advance | WorkOutcome::Requeue => Rule::DoneRequeue,
            WorkOutcome::Idle(_) => Rule::DoneIdle,
            WorkOutcome::NetworkNotReady => Rule::DoneNetwork,
            WorkOutcome::Failed(_) => Rule::DoneFailed,
            WorkOutcome::Interrupted => Rule::DoneInterrupted,
            WorkOutcome::Cancelled => Rule::DoneCancelled,
        });
        let wait = if busy.superseded {
            out.rules.push(Rule::DoneSuperseded);
            Duration::ZERO
        } else {
            policy::wait(outcome, interruptions, resync, at.chance)
        };
        out.effects.push(Effect::Wait(uid, wait));
    }

    fn advance(&mut self, uid: PodUid, phase: WorkerPhase, at: At, out: &mut WorkerTransition) {
        let Some(state) = self.pods.get_mut(&uid) else { return };
        if phase == WorkerPhase::Finished || (state.is_runtime_only() && phase == WorkerPhase::Terminating) {
            out.rules.push(if state.is_runtime_only() { Rule::OrphanStopped } else { Rule::PodForgotten });
            return self.forget(&uid, out);
        }
        if state.termination.is_none() {
            // Neither deleted nor killed: its phase became terminal.
            let mut termination = begin(TerminationCause::Completed, state.facts.grace, None, at.now);
            termination.progress = TerminationProgress::Stopping;
            state.termination = Some(termination);
            out.rules.push(Rule::SyncCompleted);
        } else if phase > WorkerPhase::Sync {
            let next = policy::next_phase(phase);
            state.set_progress(match next {
                WorkerPhase::Sync | WorkerPhase::Terminating => TerminationProgress::Stopping,
                WorkerPhase::Terminated => TerminationProgress::Stopped,
                WorkerPhase::Finished => TerminationProgress::Finished,
            });
            out.rules.push(match phase {
                WorkerPhase::Sync | WorkerPhase::Terminating => Rule::ContainersStopped,
                WorkerPhase::Terminated | WorkerPhase::Finished => Rule::PodTornDown,
            });
            if next >= WorkerPhase::Terminated {
                self.stopped(&uid, out);
            }
            if !policy::holds_name(next) {
                self.free_name(&uid, out);
            }
        } else {
            out.rules.push(Rule::DoneSuperseded);
        }
        out.effects.push(Effect::Wait(uid, Duration::ZERO));
    }

    fn stopped(&mut self, uid: &PodUid, out: &mut WorkerTransition) {
        let waiters = self.pods.get_mut(uid).map(|s| std::mem::take(&mut s.waiters)).unwrap_or_default();
        if !waiters.is_empty() {
            out.effects.push(Effect::NotifyStopped(uid.clone(), waiters));
        }
    }

    fn free_name(&mut self, uid: &PodUid, out: &mut WorkerTransition) {
        let Some(name) = self.pods.get(uid).map(|s| s.facts.full_name.clone()) else { return };
        if self.name_queue.free(&name, uid) {
            out.rules.push(Rule::NameFreed);
        }
        let live = |u: &&PodUid| self.pods.get(*u).is_some_and(|s| s.termination.is_none());
        if let Some(next) = self.name_queue.waiting(&name).iter().find(live) {
            out.effects.push(Effect::Wake(next.clone()));
        }
    }

    fn forget(&mut self, uid: &PodUid, out: &mut WorkerTransition) {
        self.stopped(uid, out);
        self.free_name(uid, out);
        let Some(state) = self.pods.remove(uid) else { return };
        out.effects.push(Effect::Forget(uid.clone()));
        if matches!(state.source, SourceState::AddedAgain { .. }) {
            out.rules.push(Rule::PodForgottenAndRestarted);
            out.effects.push(Effect::Restart(uid.clone()));
        }
    }
}

fn begin(cause: TerminationCause, grace: PodGrace, wanted: Option<i64>, now: Duration) -> Termination {
    let grace_seconds = policy::grace(0, grace, wanted).seconds;
    Termination {
        cause,
        grace_seconds,
        deadline: now.saturating_add(Duration::from_secs(u64::try_from(grace_seconds).unwrap_or(1))),
        since: now,
        progress: TerminationProgress::Requested,
        killed_as: None,
    }
}

/// Begins a termination, or joins the one in progress.
#[allow(clippy::too_many_arguments, reason = "the whole of one transition")]
fn end(
    state: &mut PodSyncStatus,
    uid: &PodUid,
    cause: TerminationCause,
    rule: Rule,
    kill: Option<KillPodOptions>,
    at: At,
    out: &mut WorkerTransition,
) {
    let wanted = kill.as_ref().and_then(|k| k.grace);
    match state.termination.as_mut() {
        None => {
            let mut termination = begin(cause, state.facts.grace, wanted, at.now);
            termination.killed_as = kill.as_ref().and_then(|k| k.killed_as.clone());
            state.termination = Some(termination);
            out.rules.push(rule);
            cancel(state, uid, true, false, out);
        }
        Some(termination) => {
            // A deletion outranks a completed pod.
            if cause == TerminationCause::Deleted || termination.cause == TerminationCause::Completed {
                termination.cause = cause;
            }
            if let Some(kill) = &kill {
                out.rules.push(Rule::KillWhileTerminatingJoins);
                if kill.killed_as.is_some() {
                    termination.killed_as.clone_from(&kill.killed_as);
                }
            }
            shorten(state, uid, wanted, at, out);
        }
    }
    state.waiters.extend(kill.and_then(|k| k.waiter));
    wake(state, uid, out);
}

fn shorten(state: &mut PodSyncStatus, uid: &PodUid, wanted: Option<i64>, at: At, out: &mut WorkerTransition) {
    let Some(termination) = state.termination.as_mut() else { return };
    let effective = policy::grace(termination.grace_seconds, state.facts.grace, wanted);
    if !effective.shortened {
        out.rules.push(Rule::GraceKept);
        return;
    }
    termination.grace_seconds = effective.seconds;
    termination.deadline = policy::deadline(termination.deadline, at.now, effective.seconds);
    out.rules.push(Rule::GraceShortened);
    cancel(state, uid, false, true, out);
}

fn cancel(state: &PodSyncStatus, uid: &PodUid, begins: bool, shortened: bool, out: &mut WorkerTransition) {
    let Some(busy) = state.busy.as_ref() else { return };
    match busy.phase {
        WorkerPhase::Sync if policy::cancels(!busy.cancellable, begins, shortened) => {
            out.rules.push(Rule::SyncCancelled);
            out.effects.push(Effect::Cancel(uid.clone()));
        }
        WorkerPhase::Sync => out.rules.push(Rule::SyncNotCancellable),
        // In the kubelet a hook in progress keeps the grace period that it began with. Here a shorter one
        // applies at once.
        WorkerPhase::Terminating if shortened => {
            out.rules.push(Rule::StopInterruptedByShorterGrace);
            out.effects.push(Effect::Cancel(uid.clone()));
        }
        WorkerPhase::Terminating | WorkerPhase::Terminated | WorkerPhase::Finished => {}
    }
}

fn wake(state: &mut PodSyncStatus, uid: &PodUid, out: &mut WorkerTransition) {
    if let Some(busy) = state.busy.as_mut() {
        busy.superseded = true;
    }
    out.effects.push(Effect::Wake(uid.clone()));
}
