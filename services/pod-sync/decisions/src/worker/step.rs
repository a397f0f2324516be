//! The table.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use quintlet_model::ids::PodUid;

use super::{
    Busy, Cause, Effect, Ending, Facts, Input, Judge, Kill, Kind, Line, NAME_WAIT, NameWaiter, ORPHAN_GRACE,
    Outcome, Phase, PodGrace, Rule, Sound, State, Step, Work, Workers, jitter,
};

/// When, and with what luck.
#[derive(Debug, Clone, Copy)]
struct At {
    now: Duration,
    chance: f64,
}

impl Workers {
    /// No pod. `resync` is `syncFrequency`.
    #[must_use]
    pub fn new(resync: Duration) -> Self {
        Self { resync, pods: BTreeMap::new(), line: Line::default(), synced: false }
    }

    /// One step. `now` is CLOCK_BOOTTIME, `chance` is in `[0, 1)`.
    pub fn step(&mut self, input: Input, now: Duration, chance: f64) -> Step {
        self.step_by(&Sound, input, now, chance)
    }

    pub(super) fn step_by(&mut self, judge: &impl Judge, input: Input, now: Duration, chance: f64) -> Step {
        let mut out = Step::default();
        let at = At { now, chance };
        match input {
            Input::Update { uid, facts, kind, quiet } => {
                self.update(judge, uid, facts, kind, quiet, at, &mut out);
            }
            Input::Remove(uid) => self.remove(judge, &uid, at, &mut out),
            Input::Refuse(uid) => self.refuse(&uid, at, &mut out),
            Input::Orphan { uid, full_name } => self.orphan(judge, uid, full_name, at, &mut out),
            Input::Restore { uid, facts, ending, started } => {
                let ending = judge.restored(ending, now);
                self.restore(judge, uid, facts, ending, started, &mut out);
            }
            Input::Known(desired) => self.known(judge, &desired, at, &mut out),
            Input::Take(uid) => self.take(judge, uid, at, &mut out),
            Input::Entered(uid) => {
                if let Some(busy) = self.pods.get_mut(&uid).and_then(|s| s.busy.as_mut()) {
                    busy.cancellable = false;
                    out.rules.push(Rule::EnteredRuntime);
                }
            }
            Input::Done { uid, outcome } => self.done(judge, uid, outcome, at, &mut out),
            Input::Lost(uid) => {
                if let Some(state) = self.pods.get_mut(&uid) {
                    state.busy = None;
                    out.rules.push(Rule::LostWorkerReplaced);
                    out.effects.push(Effect::Spawn(uid));
                }
            }
        }
        out
    }

    fn add(&mut self, uid: &PodUid, state: State, out: &mut Step) {
        if state.facts.is_static && !state.started {
            self.line.join(&state.facts.full_name, uid);
        }
        self.pods.insert(uid.clone(), state);
        out.effects.push(Effect::Spawn(uid.clone()));
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of one input")]
    fn update(
        &mut self,
        judge: &impl Judge,
        uid: PodUid,
        facts: Facts,
        kind: Kind,
        quiet: bool,
        at: At,
        out: &mut Step,
    ) {
        if !self.pods.contains_key(&uid) {
            let mut state = State::new(facts.clone());
            if facts.terminal && quiet {
                // Only what is left of it has to go.
                state.started = true;
                state.acknowledged = true;
                state.deleted = facts.deleted;
                let mut ending = begin(judge, Cause::Completed, facts.grace, None, at.now);
                ending.stopped = true;
                state.ending = Some(ending);
                out.rules.push(Rule::CreatedAlreadyOver);
                return self.add(&uid, state, out);
            }
            let ends = facts.deleted || facts.terminal || matches!(kind, Kind::Kill(_));
            out.rules.push(if ends { Rule::CreatedEnding } else { Rule::Created });
            self.add(&uid, state, out);
        }
        let Some(state) = self.pods.get_mut(&uid) else { return };
        if state.ending.is_some() && kind == Kind::Create {
            // A UID that is used again: this life ends first.
            if !state.restart_requested {
                state.restart_requested = true;
                wake(state, &uid, out);
            }
            out.rules.push(Rule::CreateWhileEndingIsRestart);
            return;
        }
        let kill = match kind {
            Kind::Kill(kill) => Some(kill),
            Kind::Create | Kind::Update => None,
        };
        if state.phase() >= Phase::Terminated {
            // A deletion still has to reach the status.
            state.deleted |= facts.deleted;
            state.facts = facts;
            match kill.and_then(|k| k.waiter) {
                Some(waiter) => {
                    out.rules.push(Rule::KillOfStoppedAnsweredAtOnce);
                    out.effects.push(Effect::Stopped(uid, vec![waiter]));
                }
                None => {
                    out.rules.push(Rule::UpdateOfFinishedIgnored);
                    wake(state, &uid, out);
                }
            }
            return;
        }
        let cause = if facts.deleted {
            Some((Cause::Deleted, Rule::DeletionBegins))
        } else if facts.terminal {
            Some((Cause::Completed, Rule::TerminalPhaseBegins))
        } else {
            kill.as_ref().map(|k| match k.evict {
                true => (Cause::Evicted, Rule::EvictionBegins),
                false => (Cause::Removed, Rule::KillBegins),
            })
        };
        if !state.runtime_only {
            state.facts = facts;
        }
        match cause {
            Some((cause, rule)) => end(judge, state, &uid, cause, rule, kill, at, out),
            // Without a cause of its own an update of a pod that ends may still bring a shorter grace.
            None if state.ending.is_some() => {
                shorten(judge, state, &uid, None, at, out);
                wake(state, &uid, out);
            }
            None => {
                out.rules.push(Rule::UpdateWhileRunning);
                wake(state, &uid, out);
            }
        }
    }

    fn remove(&mut self, judge: &impl Judge, uid: &PodUid, at: At, out: &mut Step) {
        let Some(state) = self.pods.get_mut(uid) else {
            out.rules.push(Rule::RemoveOfUnknown);
            return;
        };
        state.removed = true;
        state.deleted = true;
        state.restart_requested = false;
        if state.ending.is_some() {
            if state.ending.as_ref().is_some_and(|e| e.cause == Cause::Completed)
                && let Some(ending) = state.ending.as_mut()
            {
                ending.cause = Cause::Removed;
            }
            out.rules.push(Rule::RemoveWhileEnding);
            wake(state, uid, out);
            return;
        }
        end(judge, state, uid, Cause::Removed, Rule::RemoveBegins, None, at, out);
    }

    // Its worker is there to keep its status until somebody deletes it.
    fn refuse(&mut self, uid: &PodUid, at: At, out: &mut Step) {
        let Some(state) = self.pods.get_mut(uid) else { return };
        if state.ending.is_some() {
            return;
        }
        let grace = state.facts.grace;
        let mut ending = begin(&Sound, Cause::Completed, grace, None, at.now);
        (ending.stopped, ending.finished) = (true, true);
        state.ending = Some(ending);
        state.acknowledged = true;
        out.rules.push(Rule::Refused);
        self.free_name(uid, out);
    }

    fn orphan(&mut self, judge: &impl Judge, uid: PodUid, full_name: String, at: At, out: &mut Step) {
        let Some(state) = self.pods.get_mut(&uid) else {
            let grace = PodGrace { deletion: Some(ORPHAN_GRACE), termination: None };
            let mut state = State::new(Facts { full_name, grace, ..Facts::default() });
            (state.runtime_only, state.observed, state.deleted) = (true, true, true);
            state.removed = true;
            state.ending = Some(begin(judge, Cause::Removed, grace, None, at.now));
            out.rules.push(Rule::OrphanOfUnknown);
            return self.add(&uid, state, out);
        };
        state.observed = true;
        if state.ending.is_some() {
            out.rules.push(Rule::OrphanAgain);
            wake(state, &uid, out);
            return;
        }
        state.deleted = true;
        end(judge, state, &uid, Cause::Removed, Rule::OrphanOfKnownBegins, None, at, out);
    }

    fn restore(
        &mut self,
        judge: &impl Judge,
        uid: PodUid,
        facts: Facts,
        ending: Option<Ending>,
        started: bool,
        out: &mut Step,
    ) {
        let mut state = State::new(facts);
        // What ends has begun to: a pod that never started is not recorded as ending.
        state.started = started || ending.is_some();
        state.acknowledged = ending.is_some();
        state.deleted = state.facts.deleted || ending.as_ref().is_some_and(|e| e.cause == Cause::Removed);
        state.removed = ending.as_ref().is_some_and(|e| e.cause == Cause::Removed);
        state.evicted = ending.as_ref().is_some_and(|e| e.cause == Cause::Evicted);
        state.ending = ending;
        if state.facts.is_static && state.started && judge.holds_name(state.phase()) {
            self.line.start(&state.facts.full_name, &uid);
        }
        out.rules.push(match (&state.ending, state.facts.is_static && !state.started) {
            (Some(_), _) => Rule::RestoredEnding,
            (None, true) => Rule::RestoredWaitingForName,
            (None, false) => Rule::RestoredRunning,
        });
        self.add(&uid, state, out);
    }

    fn known(&mut self, judge: &impl Judge, desired: &BTreeSet<PodUid>, at: At, out: &mut Step) {
        self.synced = true;
        let uids: Vec<PodUid> = self.pods.keys().cloned().collect();
        for uid in uids {
            let Some(state) = self.pods.get_mut(&uid) else { continue };
            let orphan = judge.is_orphan(desired, &uid);
            if !orphan {
                out.rules.push(Rule::KnownKept);
                continue;
            }
            let was_removed = std::mem::replace(&mut state.removed, true);
            state.deleted = true;
            state.restart_requested = false;
            if state.phase() == Phase::Finished {
                out.rules.push(Rule::KnownFinishedReleased);
                if !was_removed {
                    wake(state, &uid, out);
                }
            } else if !state.started && !state.observed && state.busy.is_none() {
                out.rules.push(Rule::KnownNeverStartedForgotten);
                self.forget(&uid, out);
            } else if state.ending.is_none() {
                end(judge, state, &uid, Cause::Removed, Rule::KnownOrphanBegins, None, at, out);
            } else {
                out.rules.push(Rule::KnownOrphanReplayed);
                if !was_removed {
                    wake(state, &uid, out);
                }
            }
        }
    }

    fn take(&mut self, judge: &impl Judge, uid: PodUid, at: At, out: &mut Step) {
        let Some(state) = self.pods.get_mut(&uid) else {
            out.rules.push(Rule::TakeOfUnknown);
            out.effects.push(Effect::Forget(uid));
            return;
        };
        if !judge.may_take(state.busy.is_some()) {
            out.rules.push(Rule::TakeWhileBusy);
            return;
        }
        if !state.started && !self.starts(judge, &uid, at, out) {
            return;
        }
        let Some(state) = self.pods.get_mut(&uid) else { return };
        let phase = state.phase();
        let clean = state.removed || state.restart_requested;
        let (work, rule) = match phase {
            Phase::Sync => (Work::Sync, Rule::TakeSync),
            Phase::Terminating => (Work::Terminating, Rule::TakeTerminating),
            Phase::Terminated => (Work::Terminated, Rule::TakeTerminated),
            Phase::Finished if clean => (Work::Finished { clean }, Rule::TakeFinishedClean),
            Phase::Finished => (Work::Finished { clean }, Rule::TakeFinished),
        };
        state.acknowledged |= phase > Phase::Sync;
        state.busy = Some(Busy { phase, cancellable: phase == Phase::Sync });
        state.overtaken = false;
        out.rules.push(rule);
        out.effects.push(Effect::Work(uid, work));
    }

    // False: it does not start now, and what it is to do instead has been said.
    fn starts(&mut self, judge: &impl Judge, uid: &PodUid, at: At, out: &mut Step) -> bool {
        let Some(state) = self.pods.get(uid) else { return false };
        let name = state.facts.full_name.clone();
        if !state.facts.is_static {
            out.rules.push(Rule::TakeStartsPod);
        } else if state.ending.is_some() && state.observed {
            // What runs of it has to go, whoever has the name.
            out.rules.push(Rule::TakeStartsPod);
        } else if state.ending.is_some() {
            // Nothing of it ever ran, and nothing ever will.
            out.rules.push(Rule::TakeNeverToStart);
            if let Some(ending) = self.pods.get_mut(uid).and_then(|s| s.ending.as_mut()) {
                (ending.stopped, ending.finished) = (true, true);
            }
            self.stopped(uid, out);
            self.free_name(uid, out);
        } else {
            let holder = self.line.holder(&name).cloned();
            let line: Vec<NameWaiter> = self
                .line
                .waiting(&name)
                .iter()
                .map(|u| NameWaiter {
                    uid: u.clone(),
                    live: self.pods.get(u).is_some_and(|s| s.ending.is_none()),
                })
                .collect();
            if !judge.may_start(uid, holder.as_ref(), &line) {
                let other = holder.or_else(|| line.into_iter().find(|w| w.live).map(|w| w.uid));
                out.rules.push(Rule::TakeNameHeld);
                out.effects.push(Effect::Work(uid.clone(), Work::WaitName { other }));
                out.effects.push(Effect::Wait(uid.clone(), jitter(NAME_WAIT, at.chance)));
                return false;
            }
            self.line.start(&name, uid);
            out.rules.push(Rule::TakeStartsStatic);
        }
        if let Some(state) = self.pods.get_mut(uid) {
            state.started = true;
        }
        true
    }

    fn done(&mut self, judge: &impl Judge, uid: PodUid, outcome: Outcome, at: At, out: &mut Step) {
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
        let overtaken = std::mem::take(&mut state.overtaken);
        let cuts = if outcome == Outcome::Cut { state.cuts } else { 0 };
        state.cuts = if outcome == Outcome::Cut { cuts.saturating_add(1) } else { 0 };
        if outcome == Outcome::Advance {
            return self.advance(judge, uid, busy.phase, at, out);
        }
        out.rules.push(match outcome {
            Outcome::Advance | Outcome::Again => Rule::DoneAgain,
            Outcome::Idle(_) => Rule::DoneIdle,
            Outcome::NetworkNotReady => Rule::DoneNetwork,
            Outcome::Failed(_) => Rule::DoneFailed,
            Outcome::Cut => Rule::DoneCut,
            Outcome::Cancelled => Rule::DoneCancelled,
        });
        let wait = if overtaken {
            out.rules.push(Rule::DoneOvertaken);
            Duration::ZERO
        } else {
            judge.wait(outcome, cuts, resync, at.chance)
        };
        out.effects.push(Effect::Wait(uid, wait));
    }

    fn advance(&mut self, judge: &impl Judge, uid: PodUid, from: Phase, at: At, out: &mut Step) {
        let Some(state) = self.pods.get_mut(&uid) else { return };
        if from == Phase::Finished || (state.runtime_only && from == Phase::Terminating) {
            out.rules.push(if state.runtime_only { Rule::OrphanStopped } else { Rule::Gone });
            return self.forget(&uid, out);
        }
        if state.ending.is_none() {
            // No deletion, no kill: its containers came to their end.
            let mut ending = begin(judge, Cause::Completed, state.facts.grace, None, at.now);
            state.deleted |= state.facts.deleted;
            state.acknowledged = true;
            ending.killed_as = None;
            state.ending = Some(ending);
            out.rules.push(Rule::SyncEnds);
        } else if from > Phase::Sync {
            let next = judge.next_phase(from);
            if let Some(ending) = state.ending.as_mut() {
                ending.stopped = next >= Phase::Terminated;
                ending.finished = next >= Phase::Finished;
            }
            out.rules.push(match from {
                Phase::Sync | Phase::Terminating => Rule::ContainersStopped,
                Phase::Terminated | Phase::Finished => Rule::TakenDown,
            });
            if next >= Phase::Terminated {
                self.stopped(&uid, out);
            }
            if !judge.holds_name(next) {
                self.free_name(&uid, out);
            }
        } else {
            out.rules.push(Rule::DoneOvertaken);
        }
        out.effects.push(Effect::Wait(uid, Duration::ZERO));
    }

    fn stopped(&mut self, uid: &PodUid, out: &mut Step) {
        let waiters = self.pods.get_mut(uid).map(|s| std::mem::take(&mut s.waiters)).unwrap_or_default();
        if !waiters.is_empty() {
            out.effects.push(Effect::Stopped(uid.clone(), waiters));
        }
    }

    fn free_name(&mut self, uid: &PodUid, out: &mut Step) {
        let Some(name) = self.pods.get(uid).map(|s| s.facts.full_name.clone()) else { return };
        if self.line.free(&name, uid) {
            out.rules.push(Rule::NameFreed);
        }
        let live = |u: &&PodUid| self.pods.get(*u).is_some_and(|s| s.ending.is_none());
        if let Some(next) = self.line.waiting(&name).iter().find(live) {
            out.effects.push(Effect::Wake(next.clone()));
        }
    }

    fn forget(&mut self, uid: &PodUid, out: &mut Step) {
        self.stopped(uid, out);
        self.free_name(uid, out);
        let Some(state) = self.pods.remove(uid) else { return };
        out.effects.push(Effect::Forget(uid.clone()));
        if state.restart_requested {
            out.rules.push(Rule::GoneAndRestarts);
            out.effects.push(Effect::Restart(uid.clone()));
        }
    }
}

fn begin(judge: &impl Judge, cause: Cause, grace: PodGrace, wanted: Option<i64>, now: Duration) -> Ending {
    let grace_seconds = judge.grace(0, grace, wanted).seconds;
    Ending {
        cause,
        grace_seconds,
        deadline: now.saturating_add(Duration::from_secs(u64::try_from(grace_seconds).unwrap_or(1))),
        since: now,
        stopped: false,
        finished: false,
        killed_as: None,
    }
}

// The end of a pod begins, or what began is joined.
#[allow(clippy::too_many_arguments, reason = "the whole of one transition")]
fn end(
    judge: &impl Judge,
    state: &mut State,
    uid: &PodUid,
    cause: Cause,
    rule: Rule,
    kill: Option<Kill>,
    at: At,
    out: &mut Step,
) {
    let wanted = kill.as_ref().and_then(|k| k.grace);
    state.deleted |= cause == Cause::Deleted;
    state.evicted |= kill.as_ref().is_some_and(|k| k.evict);
    match state.ending.as_mut() {
        None => {
            let mut ending = begin(judge, cause, state.facts.grace, wanted, at.now);
            ending.killed_as = kill.as_ref().and_then(|k| k.killed_as.clone());
            state.ending = Some(ending);
            out.rules.push(rule);
            cancel(judge, state, uid, true, false, out);
        }
        Some(ending) => {
            // A deletion says more than the end of the containers did.
            if cause == Cause::Deleted || ending.cause == Cause::Completed {
                ending.cause = cause;
            }
            if let Some(kill) = &kill {
                out.rules.push(Rule::KillWhileTerminatingJoins);
                if kill.killed_as.is_some() {
                    ending.killed_as.clone_from(&kill.killed_as);
                }
            }
            shorten(judge, state, uid, wanted, at, out);
        }
    }
    state.waiters.extend(kill.and_then(|k| k.waiter));
    wake(state, uid, out);
}

fn shorten(judge: &impl Judge, state: &mut State, uid: &PodUid, wanted: Option<i64>, at: At, out: &mut Step) {
    let Some(ending) = state.ending.as_mut() else { return };
    let effective = judge.grace(ending.grace_seconds, state.facts.grace, wanted);
    if !effective.shortened {
        out.rules.push(Rule::GraceKept);
        return;
    }
    ending.grace_seconds = effective.seconds;
    ending.deadline = judge.deadline(ending.deadline, at.now, effective.seconds);
    out.rules.push(Rule::GraceShortened);
    cancel(judge, state, uid, false, true, out);
}

fn cancel(judge: &impl Judge, state: &State, uid: &PodUid, begins: bool, shortened: bool, out: &mut Step) {
    let Some(busy) = state.busy.as_ref() else { return };
    match busy.phase {
        Phase::Sync if judge.cancels(!busy.cancellable, begins, shortened) => {
            out.rules.push(Rule::SyncCancelled);
            out.effects.push(Effect::Cancel(uid.clone()));
        }
        Phase::Sync => out.rules.push(Rule::SyncPastCancelling),
        // The kubelet lets a hook that hangs take the grace it began with; here who wants it sooner gets it.
        Phase::Terminating if shortened => {
            out.rules.push(Rule::StopCutShort);
            out.effects.push(Effect::Cancel(uid.clone()));
        }
        Phase::Terminating | Phase::Terminated | Phase::Finished => {}
    }
}

fn wake(state: &mut State, uid: &PodUid, out: &mut Step) {
    state.overtaken = state.busy.is_some();
    out.effects.push(Effect::Wake(uid.clone()));
}
