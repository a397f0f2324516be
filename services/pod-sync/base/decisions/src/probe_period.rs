//! Probes with a period below one second: the annotation of a pod, and the attempts per second that a node
//! allows.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Pod, Probe};
use quintlet_model::ids::PodUid;
use quintlet_model::labels::PROBE_PERIOD_MS;
use quintlet_model::pod;
use quintlet_model::text::cut;

/// Shortest and longest period of the annotation, in milliseconds.
const PERIODS: std::ops::RangeInclusive<u32> = 100..=1000;

/// Longest part of an invalid value in a message, in bytes.
const MAX_SHOWN: usize = 64;

/// Attempts per second, in thousandths, so that the shares of any periods can be added.
type Milli = u64;

/// The annotation has no effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProbePeriodError {
    /// The annotation's value is no number, or out of bounds.
    #[error("{value:?} is no whole number of milliseconds from {} to {}", PERIODS.start(), PERIODS.end())]
    Invalid {
        /// The annotation's value.
        value: String,
    },
    /// There is nothing to speed up: no probe has the shortest period of the API.
    #[error("no probe of the pod has periodSeconds: 1")]
    NoProbe,
}

/// The probes of a pod to which its annotation applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FastProbes {
    /// Period in milliseconds.
    pub period_ms: u32,
    /// Number of HTTP, TCP and gRPC probes.
    pub network: u32,
    /// Number of exec probes.
    pub exec: u32,
}

/// Returns whether the annotation applies to a probe: to those that have the shortest period which the API
/// knows.
#[must_use]
pub fn is_fast(probe: &Probe) -> bool {
    probe.period_seconds == Some(1)
}

/// Returns the probes to which the annotation `quintlet.dev/probe-period-ms` applies; none without the
/// annotation.
///
/// # Errors
/// The value is invalid, or the pod has no such probe. All probes then have their `periodSeconds`.
pub fn fast_probes(pod: &Pod) -> Result<Option<FastProbes>, ProbePeriodError> {
    let Some(value) = pod::annotation(pod, PROBE_PERIOD_MS) else { return Ok(None) };
    let is_number = !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit());
    let period_ms = value.parse().ok().filter(|ms| is_number && PERIODS.contains(ms));
    let Some(period_ms) = period_ms else {
        return Err(ProbePeriodError::Invalid { value: cut(value, MAX_SHOWN).to_owned() });
    };
    let mut fast = FastProbes { period_ms, network: 0, exec: 0 };
    let sidecars = pod::init_containers(pod).iter().filter(|c| pod::is_sidecar(c));
    let containers = pod::spec(pod).containers.iter().chain(sidecars);
    let probes = containers.flat_map(|c| [&c.startup_probe, &c.readiness_probe, &c.liveness_probe]);
    for probe in probes.flatten().filter(|probe| is_fast(probe)) {
        let count = if probe.exec.is_some() { &mut fast.exec } else { &mut fast.network };
        *count = count.saturating_add(1);
    }
    if fast.network == 0 && fast.exec == 0 { Err(ProbePeriodError::NoProbe) } else { Ok(Some(fast)) }
}

/// Attempts per second that all fast probes of a node may make together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RateLimits {
    /// HTTP, TCP and gRPC probes (`subSecondProbes.networkRate`).
    pub network: u32,
    /// Exec probes (`subSecondProbes.execRate`).
    pub exec: u32,
}

/// The period of a pod's fast probes in milliseconds, by kind; `None`: `periodSeconds` applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GrantedPeriods {
    /// Period of HTTP, TCP and gRPC probes.
    pub network: Option<u32>,
    /// Period of exec probes.
    pub exec: Option<u32>,
}

/// The shares of the pods in the attempts of a node. A pod keeps its share until it requests less or is
/// removed.
#[derive(Debug)]
pub struct RateShares {
    limits: RateLimits,
    shares: BTreeMap<PodUid, Share>,
    /// Pods that requested more than was left.
    waiting: BTreeSet<PodUid>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Share {
    network: Milli,
    exec: Milli,
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RateGrant {
    /// The periods that the pod may use now.
    pub periods: GrantedPeriods,
    /// Pods that should request again, since there is room now.
    pub again: Vec<PodUid>,
}

impl RateShares {
    /// Returns the shares of a node whose pods have none yet.
    #[must_use]
    pub fn new(limits: RateLimits) -> Self {
        Self { limits, shares: BTreeMap::new(), waiting: BTreeSet::new() }
    }

    /// Returns the limits of the node.
    #[must_use]
    pub fn limits(&self) -> RateLimits {
        self.limits
    }

    /// Replaces the share of a pod. Probes of a kind that do not fit into the limit together get nothing, the
    /// others of the pod do. `None` gives the share back.
    pub fn request(&mut self, uid: &PodUid, wanted: Option<FastProbes>) -> RateGrant {
        let before = self.shares.remove(uid).unwrap_or_default();
        self.waiting.remove(uid);
        let mut share = Share::default();
        let mut periods = GrantedPeriods::default();
        if let Some(FastProbes { period_ms, network, exec }) = wanted {
            let used = self.used();
            let (network, exec) = (rate(network, period_ms), rate(exec, period_ms));
            let fits = |used: Milli, more: Milli, limit: u32| {
                used.saturating_add(more) <= Milli::from(limit).saturating_mul(1000)
            };
            let takes_network = network > 0 && fits(used.network, network, self.limits.network);
            let takes_exec = exec > 0 && fits(used.exec, exec, self.limits.exec);
            if takes_network {
                share.network = network;
                periods.network = Some(period_ms);
            }
            if takes_exec {
                share.exec = exec;
                periods.exec = Some(period_ms);
            }
            if takes_network != (network > 0) || takes_exec != (exec > 0) {
                self.waiting.insert(uid.clone());
            }
            if share != Share::default() {
                self.shares.insert(uid.clone(), share);
            }
        }
        let is_less = share.network < before.network || share.exec < before.exec;
        let again = self.waiting.iter().filter(|waiting| is_less && *waiting != uid).cloned().collect();
        RateGrant { periods, again }
    }

    fn used(&self) -> Share {
        self.shares.values().fold(Share::default(), |sum, share| Share {
            network: sum.network.saturating_add(share.network),
            exec: sum.exec.saturating_add(share.exec),
        })
    }
}

/// Returns the rate of `probes` probes, rounded up.
fn rate(probes: u32, period_ms: u32) -> Milli {
    Milli::from(probes).saturating_mul(1_000_000).div_ceil(Milli::from(period_ms.max(1)))
}

#[cfg(test)]
mod tests {
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    use super::*;

    fn annotated(value: &str, spec: Value) -> Pod {
        let mut pod = pod_of(spec);
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(PROBE_PERIOD_MS.to_owned(), value.to_owned());
        pod
    }

    fn one_probe() -> Value {
        json!({"containers": [{"name": "c", "readinessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": 1}}]})
    }

    #[test]
    fn a_period_is_a_whole_number_of_100_to_1000_milliseconds() {
        for (value, want) in [
            ("100", Some(100)),
            ("101", Some(101)),
            ("999", Some(999)),
            ("1000", Some(1000)),
            ("0250", Some(250)),
            ("99", None),
            ("1", None),
            ("0", None),
            ("1001", None),
            ("4294967396", None),
            ("99999999999999999999999999", None),
            ("", None),
            (" 100", None),
            ("100\n", None),
            ("+100", None),
            ("-100", None),
            ("100ms", None),
            ("1e2", None),
            ("100.0", None),
            ("0x64", None),
            ("１００", None),
            ("true", None),
        ] {
            let found = fast_probes(&annotated(value, one_probe()));
            let want = match want {
                Some(period_ms) => Ok(Some(FastProbes { period_ms, network: 1, exec: 0 })),
                None => Err(ProbePeriodError::Invalid { value: value.to_owned() }),
            };
            assert_eq!(found, want, "{value:?}");
        }
        assert_eq!(fast_probes(&pod_of(one_probe())), Ok(None));
        let error = fast_probes(&annotated(&"x".repeat(200_000), one_probe())).unwrap_err().to_string();
        let want = format!("\"{}\" is no whole number of milliseconds from 100 to 1000", "x".repeat(64));
        assert_eq!(error, want);
    }

    #[test]
    fn the_annotation_applies_to_all_probes_with_a_period_of_one_second() {
        let (tcp, exec) = (json!({"port": 1}), json!({"command": ["up"]}));
        let spec = json!({
            "initContainers": [
                {"name": "side", "restartPolicy": "Always", "startupProbe": {"exec": exec, "periodSeconds": 1}},
                {"name": "once", "readinessProbe": {"exec": exec, "periodSeconds": 1}},
            ],
            "containers": [
                {"name": "a", "readinessProbe": {"httpGet": tcp, "periodSeconds": 1},
                 "livenessProbe": {"grpc": tcp, "periodSeconds": 1}},
                {"name": "b", "readinessProbe": {"tcpSocket": tcp, "periodSeconds": 2},
                 "livenessProbe": {"exec": exec, "periodSeconds": 10}, "startupProbe": {"exec": exec}},
            ],
        });
        let want = FastProbes { period_ms: 100, network: 2, exec: 1 };
        assert_eq!(fast_probes(&annotated("100", spec)), Ok(Some(want)));
        for probe in [json!({"exec": exec}), json!({"tcpSocket": tcp, "periodSeconds": 2})] {
            let spec = json!({"containers": [{"name": "c", "readinessProbe": probe}]});
            assert_eq!(fast_probes(&annotated("100", spec)), Err(ProbePeriodError::NoProbe));
        }
    }

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    fn probes(period_ms: u32, network: u32, exec: u32) -> Option<FastProbes> {
        Some(FastProbes { period_ms, network, exec })
    }

    #[test]
    fn probes_of_a_kind_run_fast_while_the_rate_of_the_node_allows_all_of_them() {
        let mut shares = RateShares::new(RateLimits { network: 25, exec: 10 });
        let both = |network, exec| GrantedPeriods { network, exec };
        let none = GrantedPeriods::default();
        let cases = [
            ("a", probes(100, 1, 0), both(Some(100), None)),
            ("b", probes(100, 2, 1), both(None, Some(100))),
            ("c", probes(100, 1, 1), both(Some(100), None)),
            ("d", probes(300, 2, 0), none),
            ("d", probes(200, 1, 0), both(Some(200), None)),
            ("e", probes(1000, 1, 1), none),
            // A pod that has a share does not compete with itself.
            ("a", probes(100, 1, 0), both(Some(100), None)),
            ("a", probes(100, 2, 0), none),
            ("f", probes(101, 1, 0), both(Some(101), None)),
        ];
        for (name, wanted, want) in cases {
            assert_eq!(shares.request(&uid(name), wanted).periods, want, "{name} {wanted:?}");
        }
        let mut off = RateShares::new(RateLimits::default());
        assert_eq!(off.request(&uid("a"), probes(1000, 1, 1)).periods, none);
    }

    #[test]
    fn a_share_that_is_given_back_lets_the_waiting_pods_request_again() {
        let mut shares = RateShares::new(RateLimits { network: 10, exec: 0 });
        let names = |grant: RateGrant| grant.again.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(names(shares.request(&uid("a"), probes(100, 1, 0))), [""; 0]);
        assert_eq!(names(shares.request(&uid("b"), probes(100, 1, 0))), [""; 0]);
        assert_eq!(names(shares.request(&uid("c"), probes(200, 1, 0))), [""; 0]);
        assert_eq!(names(shares.request(&uid("a"), probes(200, 1, 0))), ["b", "c"]);
        assert_eq!(shares.request(&uid("c"), probes(200, 1, 0)).periods.network, Some(200));
        assert_eq!(names(shares.request(&uid("a"), None)), ["b"]);
        assert_eq!(names(shares.request(&uid("b"), None)), [""; 0], "a pod that waits no longer");
        assert_eq!(names(shares.request(&uid("c"), None)), [""; 0]);
        assert_eq!(shares.used(), Share::default());
    }
}
