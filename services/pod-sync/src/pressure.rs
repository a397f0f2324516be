//! The service Pressure of podsync.v1: signals, thresholds, conditions, and the pod that is evicted next.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use pod_sync_eviction::layout::Reclaim;
use pod_sync_eviction::rank::RankFacts;
use pod_sync_eviction::report::{ConditionReport, Report, SignalReport, ThresholdReport};
use pod_sync_eviction::usage::Candidate;
use pod_sync_eviction_loop::{LastRound, Scope};
use quintlet_kit::clock::Clock;
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::pressure_server::Pressure;
use tokio::sync::{Notify, watch};
use tonic::{Request, Response, Status};

/// Longest wait for a measurement of all pods. Commands of quintctl wait for 5 s.
const FULL_ROUND_TIMEOUT: Duration = Duration::from_secs(3);

/// The rounds of evictions.
#[derive(Debug, Clone)]
pub(crate) struct EvictionRounds {
    pub(crate) last: watch::Receiver<Option<Arc<LastRound>>>,
    /// Requests a round in which all pods are measured.
    pub(crate) full_round: Arc<Notify>,
}

/// Reports the pressure on the resources of the node.
#[derive(Debug)]
pub(crate) struct PressureReports {
    pub(crate) clock: Clock,
    /// `None` if no pod is ever evicted.
    pub(crate) rounds: Option<EvictionRounds>,
}

#[tonic::async_trait]
impl Pressure for PressureReports {
    async fn get(
        &self,
        _: Request<wire::GetPressureRequest>,
    ) -> Result<Response<wire::GetPressureReply>, Status> {
        let Some(rounds) = self.rounds.clone() else {
            return Ok(Response::new(wire::GetPressureReply { is_enabled: false, ..Default::default() }));
        };
        let last = full_round(rounds).await;
        let reply = last.as_deref().map_or_else(Default::default, |round| reply(&self.clock, round));
        Ok(Response::new(wire::GetPressureReply { is_enabled: true, ..reply }))
    }
}

/// Requests a round in which all pods are measured, and returns it. Returns the last round if none begins
/// within the time limit, since an eviction is in progress or the node cannot be measured.
async fn full_round(mut rounds: EvictionRounds) -> Option<Arc<LastRound>> {
    rounds.last.mark_unchanged();
    rounds.full_round.notify_one();
    let is_full = async {
        while rounds.last.changed().await.is_ok() {
            let round = rounds.last.borrow_and_update().clone();
            if round.as_ref().is_some_and(|round| round.scope == Scope::All) {
                return;
            }
        }
    };
    // The last round is the answer then.
    let _timed_out = tokio::time::timeout(FULL_ROUND_TIMEOUT, is_full).await;
    rounds.last.borrow().clone()
}

fn reply(clock: &Clock, round: &LastRound) -> wire::GetPressureReply {
    let times = Times { wall: clock.wall(), boot: clock.boot() };
    let report = Report::of(&round.manager, &round.snapshot);
    wire::GetPressureReply {
        is_enabled: true,
        measured_unix_ns: times.unix_ns(round.at),
        conditions: report.conditions.into_iter().map(|condition| times.condition(condition)).collect(),
        signals: report.signals.iter().map(|signal| times.signal(signal)).collect(),
    }
}

/// The same moment on both clocks.
#[derive(Debug, Clone, Copy)]
struct Times {
    wall: Timestamp,
    boot: Duration,
}

impl Times {
    fn unix_ns(self, boot: Duration) -> i64 {
        let at = match boot.checked_sub(self.boot) {
            Some(ahead) => self.wall.checked_add(ahead),
            None => self.wall.checked_sub(self.boot.saturating_sub(boot)),
        };
        at.map_or(0, |at| i64::try_from(at.as_nanosecond()).unwrap_or(i64::MAX))
    }

    fn condition(self, report: ConditionReport) -> wire::PressureCondition {
        wire::PressureCondition {
            r#type: report.condition.as_str().to_owned(),
            is_true: report.last_crossed.is_some(),
            last_crossed_unix_ns: report.last_crossed.map_or(0, |at| self.unix_ns(at)),
            until_unix_ns: report.until.map_or(0, |at| self.unix_ns(at)),
        }
    }

    fn signal(self, report: &SignalReport) -> wire::PressureSignal {
        let threshold = |t: &ThresholdReport| self.threshold(t, report);
        wire::PressureSignal {
            signal: report.signal.as_str().to_owned(),
            resource: report.signal.resource().as_str().to_owned(),
            available: report.observation.map(|o| o.available.value()),
            capacity: report.observation.map(|o| o.capacity.value()),
            thresholds: report.thresholds.iter().map(threshold).collect(),
            reclaims: report.reclaims.iter().map(|what| reclaim(*what).to_owned()).collect(),
            next: report.next.as_ref().map(|(candidate, facts)| next(candidate, facts)),
        }
    }

    fn threshold(self, report: &ThresholdReport, signal: &SignalReport) -> wire::PressureThreshold {
        let threshold = &report.threshold;
        let capacity = signal.observation.map(|o| o.capacity);
        let amount = |amount: pod_sync_eviction::thresholds::Amount| match (amount.percent(), capacity) {
            (Some(_), None) => None,
            (_, capacity) => Some(amount.of(capacity.unwrap_or_default()).value()),
        };
        wire::PressureThreshold {
            value: amount(threshold.value),
            percent: threshold.value.percent(),
            minimum_reclaim: threshold.minimum_reclaim.and_then(amount).unwrap_or(0),
            grace_ms: i64::try_from(threshold.grace.as_millis()).unwrap_or(i64::MAX),
            crossed_since_unix_ns: report.since.map_or(0, |at| self.unix_ns(at)),
            due_unix_ns: report.due.map_or(0, |at| self.unix_ns(at)),
        }
    }
}

fn reclaim(what: Reclaim) -> &'static str {
    match what {
        Reclaim::DeadContainers => "dead containers",
        Reclaim::UnusedImages => "unused images",
    }
}

fn next(candidate: &Candidate, facts: &RankFacts) -> wire::EvictionCandidate {
    let metadata = &candidate.pod.metadata;
    wire::EvictionCandidate {
        pod_uid: candidate.uid.to_string(),
        namespace: metadata.namespace.clone().unwrap_or_default(),
        name: metadata.name.clone().unwrap_or_default(),
        is_measured: facts.is_measured,
        used: facts.used.value(),
        request: facts.request.value(),
        exceeds_request: facts.exceeds_request,
        priority: facts.priority,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pod_sync_eviction::Signal;
    use pod_sync_eviction::layout::Layout;
    use pod_sync_eviction::manager::{EvictionManager, EvictionSettings, Snapshot};
    use pod_sync_eviction::thresholds::{self, ThresholdConfig};
    use pod_sync_eviction::usage::{Observation, PodUsage};
    use quintlet_model::ids::PodUid;
    use serde_json::json;

    use super::*;

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn times_since_boot_become_times_of_day_and_percentages_amounts() {
        let wall = Timestamp::from_second(1_000_000).unwrap();
        let clock = Clock::fixed(wall, Duration::from_secs(500));
        let text = |signal: &str, value: &str| (signal.to_owned(), value.to_owned());
        let thresholds = thresholds::parse(&ThresholdConfig {
            hard: Some(&[text("memory.available", "25%"), text("nodefs.available", "1Gi")]),
            soft: &[text("memory.available", "50%")],
            soft_grace: &[("memory.available".to_owned(), Duration::from_secs(90))],
            minimum_reclaim: &[text("nodefs.available", "500")],
            ..ThresholdConfig::default()
        });
        let mut manager = EvictionManager::new(EvictionSettings {
            thresholds: thresholds.unwrap(),
            layout: Layout::Single,
            transition: Duration::from_secs(300),
            max_grace: 0,
            enforces_limits: true,
            skips_memory_volumes: false,
        });
        let at = Duration::from_secs(490);
        let observed = Observation::new(Signal::MemoryAvailable, 400, 1000, at).unwrap();
        let metadata = json!({ "name": "p", "namespace": "n", "uid": "u" });
        let pod = json!({ "metadata": metadata, "spec": { "containers": [], "priority": 3 } });
        let uid = PodUid::parse("u").unwrap();
        let usage = PodUsage { working_set: Some(77), ..PodUsage::default() };
        let snapshot = Snapshot {
            observations: [(Signal::MemoryAvailable, observed)].into(),
            usages: [(uid.clone(), usage)].into(),
            candidates: vec![Candidate { uid, pod: Arc::new(serde_json::from_value(pod).unwrap()) }],
        };
        manager.decide(&snapshot, at);

        let reply = reply(&clock, &LastRound { snapshot, scope: Scope::All, manager, at });
        let crossed = (1_000_000 - 10) * SECOND;
        assert_eq!(reply.measured_unix_ns, crossed);
        let memory = &reply.conditions[0];
        assert_eq!((memory.r#type.as_str(), memory.is_true), ("MemoryPressure", true));
        assert_eq!((memory.last_crossed_unix_ns, memory.until_unix_ns), (crossed, 0));
        assert!(!reply.conditions[1].is_true);

        let memory = &reply.signals[0];
        assert_eq!((memory.signal.as_str(), memory.resource.as_str()), ("memory.available", "memory"));
        assert_eq!((memory.available, memory.capacity), (Some(400), Some(1000)));
        let seen: Vec<_> = memory
            .thresholds
            .iter()
            .map(|t| (t.value, t.percent, t.grace_ms, t.crossed_since_unix_ns, t.due_unix_ns))
            .collect();
        let soft = (Some(500), Some(50.0), 90_000, crossed, crossed + 90 * SECOND);
        assert_eq!(seen, [(Some(250), Some(25.0), 0, 0, 0), soft]);
        let next = memory.next.as_ref().unwrap();
        assert_eq!((next.namespace.as_str(), next.name.as_str(), next.priority), ("n", "p", 3));
        assert_eq!((next.used, next.request, next.exceeds_request), (77, 0, true));

        let disk = reply.signals.iter().find(|s| s.signal == "nodefs.available").unwrap();
        assert_eq!((disk.available, disk.thresholds[0].value), (None, Some(1 << 30)));
        assert_eq!(disk.thresholds[0].minimum_reclaim, 500);
        assert_eq!(disk.reclaims, ["dead containers", "unused images"]);
    }
}
