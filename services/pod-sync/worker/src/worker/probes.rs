//! The probes of the pod at probe-service: their targets, and the memory that they begin with.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use pod_sync_clients::{EventType, Probes};
use pod_sync_decisions::probe_period::{self, FastProbes, GrantedPeriods, RateLimits};
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use quintlet_model::labels::PROBE_PERIOD_MS;
use quintlet_model::pod;
use quintlet_model::runtime::PodRuntime;

use super::pass::Pass;
use super::probe_targets::{self, Basis, TargetInput, Targets};
use crate::ProbeRates;
use crate::context::{NodeConfig, Reporting};

/// Reason of the event of an annotation that has no effect.
const PERIOD_IGNORED: &str = "ProbePeriodIgnored";

/// A probe that does not run, since it is too large.
#[derive(Debug, PartialEq, Eq)]
struct ProbeLeftOut {
    /// Empty for all probes of the pod.
    container: String,
    message: String,
}

/// The probes of one pod.
pub(super) struct PodProbes {
    probes: Arc<Probes>,
    rates: Arc<ProbeRates>,
    node: Arc<NodeConfig>,
    reporting: Arc<Reporting>,
    uid: PodUid,
    // Why the annotation of the period has no effect.
    period_problem: Option<String>,
    // The probe results of an earlier run were handed to probe-service.
    is_memory_seeded: bool,
    left_out: Vec<ProbeLeftOut>,
    // What the last targets were made from.
    basis: Option<Basis>,
}

impl PodProbes {
    /// Returns the probes of a pod that has no targets yet.
    pub(super) fn new(
        probes: Arc<Probes>,
        rates: Arc<ProbeRates>,
        node: Arc<NodeConfig>,
        reporting: Arc<Reporting>,
        uid: PodUid,
    ) -> Self {
        Self {
            probes,
            rates,
            node,
            reporting,
            uid,
            period_problem: None,
            is_memory_seeded: false,
            left_out: Vec::new(),
            basis: None,
        }
    }

    /// Returns the newest results of the probes.
    pub(super) fn memory(&self) -> pod_sync_clients::PodMemory {
        self.probes.memory(&self.uid)
    }

    /// Hands the results that a status shows to probe-service, once, for containers whose results it does not
    /// have.
    pub(super) fn seed(&mut self, pod: &Pod, status: Option<&PodStatus>, runtime: &PodRuntime) {
        if std::mem::replace(&mut self.is_memory_seeded, true) {
            return;
        }
        let Some(status) = status else { return };
        for (container, probe, mut memory) in probe_targets::seeds(pod, status, runtime) {
            let known = self.memory();
            let mut recorded = known.get(&(container.clone(), probe));
            let ready = failpoint::planted!("ready before its own probe");
            let forgotten = failpoint::planted!("sidecar's startup is forgotten");
            if [ready, forgotten].contains(&true) {
                memory.counter = recorded.map_or(0, |recorded| recorded.counter.saturating_add(1));
                recorded = None;
            }
            if recorded.is_none_or(|m| m.container_id != memory.container_id || m.result.is_none()) {
                self.probes.seed(&self.uid, &container, probe, memory);
            }
        }
    }

    /// Lets the next [`Self::seed`] hand over results again, from the status of a mirror pod that was not
    /// known before.
    pub(super) fn seed_again(&mut self) {
        self.is_memory_seeded = false;
    }

    /// Registers the probes of a pass with probe-service, unless nothing has changed for them.
    pub(super) fn set_targets(&mut self, pass: &Pass, terminating: bool) {
        let periods = self.request_periods(&pass.pod);
        let input = TargetInput {
            pod: &pass.pod,
            status: &pass.status,
            runtime: &pass.runtime,
            terminating,
            key: &self.node.grant_key,
            gates: self.node.settings.field_gates,
            periods,
            starts: &pass.findings.container_starts,
        };
        let basis = Basis::of(&pass.pod, &input);
        if self.basis.as_ref() == Some(&basis) {
            return;
        }
        let Targets { target, left_out } = probe_targets::targets(&input);
        let left_out = left_out.into_iter().map(|(container, probe, error)| ProbeLeftOut {
            message: format!("{probe} probe errored and resulted in unknown state: {error}"),
            container,
        });
        let mut left_out: Vec<ProbeLeftOut> = left_out.collect();
        match target.map(|target| self.probes.set_target(&self.uid, target)) {
            Some(Ok(())) => {}
            Some(Err(error)) => {
                self.probes.stop(&self.uid);
                let message = format!("The probes of the pod do not run: {error}");
                left_out.push(ProbeLeftOut { container: String::new(), message });
            }
            // No probe is left to run, as in a pod that terminates and has no readiness probe.
            None => self.probes.stop(&self.uid),
        }
        self.report_left_out(&pass.pod, left_out);
        self.basis = Some(basis);
    }

    /// Requests the periods below one second of the pod's annotation. An annotation without an effect is
    /// reported once.
    fn request_periods(&mut self, pod: &Pod) -> GrantedPeriods {
        let found = probe_period::fast_probes(pod);
        let wanted = found.as_ref().ok().copied().flatten();
        let periods =
            self.rates.request(&self.uid, pod.metadata.namespace.as_deref().unwrap_or_default(), wanted);
        let problem = match found {
            Ok(None) => None,
            Ok(Some(wanted)) => not_granted(&wanted, periods, self.rates.limits()),
            Err(error) => Some(format!("{error}. The probes run with their periodSeconds.")),
        };
        let problem = problem.map(|problem| format!("annotation {PROBE_PERIOD_MS}: {problem}"));
        if problem != self.period_problem {
            if let Some(problem) = &problem {
                self.reporting.events.pod(pod, EventType::Warning, PERIOD_IGNORED, problem, "");
            }
            self.period_problem = problem;
        }
        periods
    }

    /// Returns whether targets were registered.
    pub(super) fn has_targets(&self) -> bool {
        self.basis.is_some()
    }

    /// Ends the probes of the pod.
    pub(super) fn remove_targets(&mut self) {
        self.probes.remove(&self.uid);
        self.rates.request(&self.uid, "", None);
        self.basis = None;
    }

    /// Reports each probe that does not run, once.
    fn report_left_out(&mut self, pod: &Pod, left_out: Vec<ProbeLeftOut>) {
        let is_sidecar = |name: &str| pod::init_containers(pod).iter().any(|c| c.name == name);
        for new in left_out.iter().filter(|new| !self.left_out.contains(new)) {
            let path = match new.container.as_str() {
                "" => String::new(),
                name if is_sidecar(name) => format!("spec.initContainers{{{name}}}"),
                name => format!("spec.containers{{{name}}}"),
            };
            self.reporting.events.pod(pod, EventType::Warning, "Unhealthy", &new.message, &path);
        }
        self.left_out = left_out;
    }

    /// Returns an error for each probe that does not run, and for an annotation without an effect.
    pub(super) fn errors(&self) -> impl Iterator<Item = String> {
        let left_out = self.left_out.iter().map(|left_out| {
            let place = if left_out.container.is_empty() { "" } else { ": " };
            format!("{}{place}{}", left_out.container, left_out.message)
        });
        left_out.chain(self.period_problem.clone())
    }
}

/// Returns which probes run with their `periodSeconds` since the node has no room for their attempts.
fn not_granted(wanted: &FastProbes, periods: GrantedPeriods, limits: RateLimits) -> Option<String> {
    let kinds = [
        (
            wanted.network > 0 && periods.network.is_none(),
            "HTTP, TCP and gRPC",
            "networkRate",
            limits.network,
        ),
        (wanted.exec > 0 && periods.exec.is_none(), "exec", "execRate", limits.exec),
    ];
    let parts = kinds.into_iter().filter(|(is_refused, ..)| *is_refused).map(|(_, kind, field, limit)| {
        format!(
            "the node allows {limit} attempts per second of {kind} probes of all pods (subSecondProbes.{field}), so these probes run with \
             their periodSeconds"
        )
    });
    let parts: Vec<String> = parts.collect();
    (!parts.is_empty()).then(|| parts.join("; "))
}
