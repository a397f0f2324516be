//! Reads the runtime state of the pod and computes the status from it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::PodStatus;
use pod_sync_clients::{EventType, ObserveError, Observed};
use pod_sync_decisions::active::PodStart;
use pod_sync_decisions::container_status::WaitingReason;
use pod_sync_decisions::probes::{ContainerStarts, ProbeResults, record_starts};
use pod_sync_decisions::worker::freshness::{Freshness, NextObservation};
use pod_sync_decisions::{status, waiting};
use pod_sync_records::PodRecord;
use quintlet_kit::task::blocking;
use quintlet_model::ids::ContainerId;
use quintlet_model::pod;
use quintlet_model::probe::{ProbeMemory, ProbeType};
use quintlet_model::runtime::{ContainerState, Cursor, Known, PodRuntime, SharedPodRuntime};

use super::{Halt, Pass, Worker, probe_targets, termination_message};

/// Probes that do not run, since they are too large.
#[derive(Debug, PartialEq, Eq)]
struct ProbesLeftOut {
    /// Empty for all probes of the pod.
    container: String,
    message: String,
}

/// The runtime state of the pod, as the worker last saw it.
#[derive(Default)]
pub(super) struct ObservedRuntime {
    pub(super) freshness: Freshness,
    pub(super) last: Option<SharedPodRuntime>,
    // Termination messages of exited containers.
    termination_messages: HashMap<ContainerId, String>,
    // The probe results of an earlier run were handed to probe-service.
    is_probe_memory_seeded: bool,
    probes_left_out: Vec<ProbesLeftOut>,
    // The last targets are of these.
    targets_of: Option<probe_targets::Basis>,
}

impl Worker {
    // Returns the runtime state of the pod, never older than the last action.
    pub(super) async fn observe(&mut self) -> Result<SharedPodRuntime, Halt> {
        let uid = &self.pod_ref.uid;
        let cached = self.ctx.runtime.pleg.get(uid);
        let runtime = match (self.observed.freshness.next_observation(cached.as_deref()), cached) {
            (NextObservation::UseCached, Some(cached)) => cached,
            (look, cached) => {
                let last = cached.as_ref().or(self.observed.last.as_ref());
                let mut known = last.map_or_else(Known::default, |p| Known::of(p));
                known.add(self.observed.freshness.created());
                let full = look != NextObservation::Inspect { full: false };
                match self.ctx.runtime.pleg.observe(uid, known, full).await {
                    // A restarted pleg-service has only listed the pods, which is not a full inspection.
                    Ok(observed) if !full && !self.observed.freshness.is_from_epoch(observed.epoch) => {
                        return Err(Halt::Interrupted("pleg-service was restarted".to_owned()));
                    }
                    Ok(Observed { pod: Some(runtime), .. }) => runtime,
                    Ok(Observed { pod: None, epoch }) => Arc::new(PodRuntime::empty(
                        self.pod_ref.clone(),
                        Cursor { epoch, rev: 0 },
                        self.ctx.clock.boot(),
                    )),
                    Err(ObserveError::Unavailable(why)) => {
                        self.wait_for(&waiting::Waiting::Service { name: "pleg-service" }, None);
                        return Err(Halt::Interrupted(format!("runtime state cannot be read: {why}")));
                    }
                    Err(ObserveError::Runtime(why)) => {
                        let message = format!("error determining status: {why}");
                        self.ctx.reporting.events.pod(
                            &self.pod,
                            EventType::Warning,
                            "FailedSync",
                            &message,
                            "",
                        );
                        return Err(Halt::failed(waiting::Waiting::Runtime { error: Some(why) }, message));
                    }
                }
            }
        };
        self.observed.freshness.observed(runtime.cursor.epoch);
        self.observed_now(&runtime).await;
        Ok(runtime)
    }

    // Takes over a runtime state, and reads the termination messages of containers that have exited.
    pub(super) async fn observed_now(&mut self, runtime: &SharedPodRuntime) {
        self.observed.last = Some(Arc::clone(runtime));
        let exited: Vec<_> = runtime
            .containers
            .iter()
            .filter(|c| {
                c.state == ContainerState::Exited && !self.observed.termination_messages.contains_key(&c.id)
            })
            .cloned()
            .collect();
        if !exited.is_empty() {
            let pod = self.ctx.node.pod_dir(&self.pod_ref.uid);
            let logs =
                pod_sync_layout::paths::pod_log_dir(&self.ctx.node.settings.pod_logs_dir, &self.pod_ref);
            let read = move || {
                let places = termination_message::Places { pod: &pod, logs: &logs };
                exited.into_iter().map(|c| (c.id.clone(), termination_message::of(&c, places))).collect()
            };
            let read: Vec<_> = blocking(read).await;
            self.observed.termination_messages.extend(read);
        }
        self.observed.termination_messages.retain(|id, _| runtime.containers.iter().any(|c| c.id == *id));
    }

    // Begins a pass: observes the runtime and computes the status.
    pub(super) async fn look(&mut self, is_terminal: bool) -> Result<Pass, Halt> {
        let runtime = self.observe().await?;
        let named = !self.ctx.runtime.state.borrow().name.is_empty()
            || self.record.status.as_deref().and_then(status::runtime_name).is_some();
        if !named && !runtime.containers.is_empty() {
            return Err(Halt::Interrupted(
                "the runtime's name, a part of container ids, is not known yet".to_owned(),
            ));
        }
        if !self.observed.is_probe_memory_seeded {
            self.observed.is_probe_memory_seeded = true;
            let api = self.record.status.as_deref().or(self.pod.status.as_ref());
            for (container, probe, memory) in
                api.map(|s| probe_targets::seeds(&self.pod, s, &runtime)).unwrap_or_default()
            {
                let known = self.ctx.probes.memory(&self.pod_ref.uid);
                if known
                    .get(&(container.clone(), probe))
                    .is_none_or(|m| m.container_id != memory.container_id)
                {
                    self.ctx.probes.seed(&self.pod_ref.uid, &container, probe, memory);
                }
            }
        }
        Ok(self.pass_of(runtime, is_terminal))
    }

    // Computes the status from a runtime state and the newest probe results.
    pub(super) fn pass_of(&mut self, runtime: SharedPodRuntime, is_terminal: bool) -> Pass {
        let (wall, boot) = (self.ctx.clock.wall(), self.ctx.clock.boot());
        let mut container_starts = self.record.container_starts.clone();
        record_starts(&mut container_starts, &runtime.containers, wall, boot);
        let memory = self.ctx.probes.memory(&self.pod_ref.uid);
        let mut probes = ProbeResults::default();
        for ((_, probe), m) in &memory {
            probes.add(*probe, m);
        }
        let probes_kept: Vec<_> = memory.into_iter().map(|((c, t), m)| (c, t, m)).collect();
        let new_probes = !same_but_for_counters(&self.record.probes, &probes_kept);
        if self.record.termination.is_none() {
            self.note_resize(&runtime);
        }
        let known = self.record.status.as_deref().or(self.pod.status.as_ref());
        let active = match known.and_then(|s| s.start_time.as_ref()) {
            Some(start) => Some(PodStart::at(start.0, self.record.active, wall, boot)),
            None => self.record.active,
        };
        let findings = Findings { container_starts, probes: new_probes.then_some(probes_kept), active };
        let status = self.make_status(&runtime, &probes, active, &self.record.waiting, is_terminal);
        Pass { pod: Arc::clone(&self.pod), runtime, probes, findings, status }
    }

    pub(super) fn make_status(
        &self,
        runtime: &PodRuntime,
        probes: &ProbeResults,
        active: Option<PodStart>,
        waiting: &BTreeMap<String, WaitingReason>,
        is_terminal: bool,
    ) -> PodStatus {
        let handler = runtime.sandboxes.first().map(|s| s.runtime_handler.as_str()).unwrap_or_default();
        let mut facts = self.ctx.node_facts(handler);
        if facts.runtime_name.is_empty() {
            // Before the first answer of the runtime, the scheme of the recorded container ids is used.
            facts.runtime_name =
                self.record.status.as_deref().and_then(status::runtime_name).unwrap_or_default();
        }
        status::generate(&status::StatusInput {
            pod: &self.pod,
            old: self.record.status.as_deref(),
            runtime,
            probes,
            waiting,
            termination_messages: &self.observed.termination_messages,
            resize: &self.ctx.checkpoints.allocations.condition_list(&self.pod_ref.uid),
            actuated: self.ctx.checkpoints.allocations.actuated(&self.pod_ref.uid).as_ref(),
            node: &facts,
            is_terminal,
            now: self.ctx.clock.wall(),
            unstepped: self.steady_now(active),
        })
    }

    // Wall time without the steps of the clock since the pod started.
    pub(super) fn steady_now(&self, active: Option<PodStart>) -> jiff::Timestamp {
        active.map_or_else(|| self.ctx.clock.wall(), |active| active.now(self.ctx.clock.boot()))
    }

    // Registers the probes of the pod with probe-service.
    pub(super) fn set_targets(&mut self, pass: &Pass, terminating: bool) {
        let input = probe_targets::TargetInput {
            pod: &pass.pod,
            status: &pass.status,
            runtime: &pass.runtime,
            terminating,
            key: &self.ctx.node.grant_key,
            starts: &pass.findings.container_starts,
        };
        let basis = probe_targets::Basis::of(&pass.pod, &input);
        if self.observed.targets_of.as_ref() == Some(&basis) {
            return;
        }
        let probe_targets::Targets { target, left_out } = probe_targets::targets(&input);
        let mut faults: Vec<ProbesLeftOut> = left_out
            .into_iter()
            .map(|(container, probe, error)| ProbesLeftOut {
                message: format!("{probe} probe errored and resulted in unknown state: {error}"),
                container,
            })
            .collect();
        if let Some(target) = target
            && let Err(error) = self.ctx.probes.set_target(&self.pod_ref.uid, target)
        {
            let message = format!("The probes of the pod do not run: {error}");
            faults.push(ProbesLeftOut { container: String::new(), message });
        }
        self.report_left_out(pass, faults);
        self.observed.targets_of = Some(basis);
    }

    // Ends the probes of the pod.
    pub(super) fn remove_targets(&mut self) {
        self.ctx.probes.remove(&self.pod_ref.uid);
        self.observed.targets_of = None;
    }

    // Reports each probe that does not run, once.
    fn report_left_out(&mut self, pass: &Pass, faults: Vec<ProbesLeftOut>) {
        let is_sidecar = |name: &str| pod::init_containers(&pass.pod).iter().any(|c| c.name == name);
        for fault in faults.iter().filter(|fault| !self.observed.probes_left_out.contains(fault)) {
            let path = match fault.container.as_str() {
                "" => String::new(),
                name if is_sidecar(name) => format!("spec.initContainers{{{name}}}"),
                name => format!("spec.containers{{{name}}}"),
            };
            let events = &self.ctx.reporting.events;
            events.pod(&pass.pod, EventType::Warning, "Unhealthy", &fault.message, &path);
        }
        self.observed.probes_left_out = faults;
    }

    // Adds the probes that do not run to the errors of the view.
    pub(super) fn explain_left_out(&mut self) {
        for fault in &self.observed.probes_left_out {
            let place = if fault.container.is_empty() { "" } else { ": " };
            let error = format!("{}{place}{}", fault.container, fault.message);
            if !self.published.decision.errors.contains(&error) {
                Arc::make_mut(&mut self.published.decision).errors.push(error);
            }
        }
    }

    pub(super) fn acted(&mut self) {
        self.observed.freshness.action_ended(self.ctx.clock.boot());
    }
}

/// Observations of a pass, recorded together with the status that was computed from them.
pub(super) struct Findings {
    container_starts: ContainerStarts,
    // The memory of the probes; none if only counters have changed.
    probes: Option<Vec<(String, ProbeType, ProbeMemory)>>,
    pub(super) active: Option<PodStart>,
}

impl Findings {
    pub(super) fn record(&self, record: &mut PodRecord) {
        record.container_starts.clone_from(&self.container_starts);
        if let Some(probes) = &self.probes {
            record.probes.clone_from(probes);
        }
        record.active = self.active;
    }
}

type Memories = [(String, ProbeType, ProbeMemory)];

// Counters grow with every probe. Only changes that a restart must not lose are written.
fn same_but_for_counters(a: &Memories, b: &Memories) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|((ac, at, am), (bc, bt, bm))| {
            (ac, at) == (bc, bt) && *am == ProbeMemory { counter: am.counter, ..bm.clone() }
        })
}
