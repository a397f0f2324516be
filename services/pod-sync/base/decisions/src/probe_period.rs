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

/// The shares of the pods in the attempts of a node.
///
/// A namespace that asks has an equal part of each limit: the limit divided by the number of namespaces with
/// a share or a request that waits. A namespace may use more while no other one asks for it. A request within
/// the part of its namespace takes what it lacks from namespaces above theirs, from the pods that came last.
/// Within a namespace, a pod keeps its share until it requests less or is removed.
#[derive(Debug)]
pub struct RateShares {
    limits: RateLimits,
    shares: BTreeMap<PodUid, Share>,
    /// Pods that requested more than was left.
    waiting: BTreeMap<PodUid, Waiting>,
    /// Number of the next share, in the order of time.
    arrivals: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Share {
    namespace: String,
    arrival: u64,
    rates: Rates,
}

/// A request that was not granted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Waiting {
    namespace: String,
    lacks: Rates,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Rates {
    network: Milli,
    exec: Milli,
}

/// A kind of probe that has a limit of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Network,
    Exec,
}

const KINDS: [Kind; 2] = [Kind::Network, Kind::Exec];

impl Rates {
    fn of(self, kind: Kind) -> Milli {
        match kind {
            Kind::Network => self.network,
            Kind::Exec => self.exec,
        }
    }

    fn of_mut(&mut self, kind: Kind) -> &mut Milli {
        match kind {
            Kind::Network => &mut self.network,
            Kind::Exec => &mut self.exec,
        }
    }
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RateGrant {
    /// The periods that the pod may use now.
    pub periods: GrantedPeriods,
    /// Pods that should request again, since there is room now or they have lost a share.
    pub again: Vec<PodUid>,
}

impl RateShares {
    /// Returns the shares of a node whose pods have none yet.
    #[must_use]
    pub fn new(limits: RateLimits) -> Self {
        Self { limits, shares: BTreeMap::new(), waiting: BTreeMap::new(), arrivals: 0 }
    }

    /// Returns the limits of the node.
    #[must_use]
    pub fn limits(&self) -> RateLimits {
        self.limits
    }

    /// Replaces the share of a pod. Probes of a kind that do not fit into the limit together get nothing, the
    /// others of the pod do. `None` gives the share back.
    pub fn request(&mut self, uid: &PodUid, namespace: &str, wanted: Option<FastProbes>) -> RateGrant {
        let asking_before = KINDS.map(|kind| self.asking(kind).len());
        let before = self.shares.remove(uid);
        self.waiting.remove(uid);
        let mut rates = Rates::default();
        let mut periods = GrantedPeriods::default();
        let mut again = Vec::new();
        if let Some(FastProbes { period_ms, network, exec }) = wanted {
            let requested = Rates { network: rate(network, period_ms), exec: rate(exec, period_ms) };
            let mut lacks = Rates::default();
            for kind in KINDS.into_iter().filter(|kind| requested.of(*kind) > 0) {
                let requested = requested.of(kind);
                if let Some(losers) = self.losers(kind, namespace, requested) {
                    self.take(kind, &losers);
                    again.extend(losers);
                    *rates.of_mut(kind) = requested;
                } else {
                    *lacks.of_mut(kind) = requested;
                }
            }
            periods.network = (rates.network > 0).then_some(period_ms);
            periods.exec = (rates.exec > 0).then_some(period_ms);
            let namespace = namespace.to_owned();
            if rates != Rates::default() {
                let arrival = before.as_ref().map_or(self.arrivals, |share| share.arrival);
                self.arrivals = self.arrivals.saturating_add(1);
                self.shares.insert(uid.clone(), Share { namespace: namespace.clone(), arrival, rates });
            }
            if lacks != Rates::default() {
                self.waiting.insert(uid.clone(), Waiting { namespace, lacks });
            }
        }
        let before = before.map_or_else(Rates::default, |share| share.rates);
        let is_less = rates.network < before.network || rates.exec < before.exec;
        let asking = KINDS.map(|kind| self.asking(kind).len());
        let have_larger_parts = asking.iter().zip(asking_before).any(|(now, before)| *now < before);
        if is_less || have_larger_parts {
            again.extend(self.waiting.keys().filter(|waiting| *waiting != uid).cloned());
        } else if !again.is_empty() {
            // The shares that were taken may be more than what was missing.
            again.extend(
                self.waiting.iter().filter(|(_, waiting)| self.fits(waiting)).map(|(uid, _)| uid.clone()),
            );
        }
        again.sort();
        again.dedup();
        RateGrant { periods, again }
    }

    /// Returns whether a pod that waits would get a share of a kind now.
    fn fits(&self, waiting: &Waiting) -> bool {
        KINDS.into_iter().any(|kind| {
            let lacks = waiting.lacks.of(kind);
            lacks > 0 && self.losers(kind, &waiting.namespace, lacks).is_some()
        })
    }

    /// Returns the pods that lose their shares of a kind if a pod gets this one; none of them if there is
    /// room. They are the newest ones of the namespace that uses most, as long as it is above its part.
    /// Returns `None` if the pod does not get the share.
    fn losers(&self, kind: Kind, namespace: &str, requested: Milli) -> Option<Vec<PodUid>> {
        let limit = match kind {
            Kind::Network => self.limits.network,
            Kind::Exec => self.limits.exec,
        };
        let limit = Milli::from(limit).saturating_mul(1000);
        let mut used = self.used(kind);
        let all = used.values().fold(0, |sum: Milli, used| sum.saturating_add(*used));
        let mut missing = requested.saturating_sub(limit.saturating_sub(all));
        if missing == 0 {
            return Some(Vec::new());
        }
        let mut asking = self.asking(kind);
        asking.insert(namespace);
        let part = limit.checked_div(Milli::try_from(asking.len()).ok()?)?;
        if used.get(namespace).copied().unwrap_or_default().saturating_add(requested) > part {
            return None;
        }
        let mut losers: Vec<PodUid> = Vec::new();
        while missing > 0 {
            let (largest, used) =
                used.iter_mut().filter(|(_, used)| **used > part).max_by_key(|(_, used)| **used)?;
            let shares = self.shares.iter().filter(|(uid, share)| {
                share.namespace == **largest && share.rates.of(kind) > 0 && !losers.contains(uid)
            });
            let (loser, share) = shares.max_by_key(|(_, share)| share.arrival)?;
            *used = used.saturating_sub(share.rates.of(kind));
            missing = missing.saturating_sub(share.rates.of(kind));
            losers.push(loser.clone());
        }
        Some(losers)
    }

    /// Takes the shares of a kind from these pods, which wait for it then.
    fn take(&mut self, kind: Kind, losers: &[PodUid]) {
        for uid in losers {
            let Some(share) = self.shares.get_mut(uid) else { continue };
            let waiting = self
                .waiting
                .entry(uid.clone())
                .or_insert_with(|| Waiting { namespace: share.namespace.clone(), lacks: Rates::default() });
            *waiting.lacks.of_mut(kind) = std::mem::take(share.rates.of_mut(kind));
            if share.rates == Rates::default() {
                self.shares.remove(uid);
            }
        }
    }

    /// Returns the namespaces that have a share of a kind or wait for one.
    fn asking(&self, kind: Kind) -> BTreeSet<&str> {
        let shares = self.shares.values().filter(|share| share.rates.of(kind) > 0);
        let waiting = self.waiting.values().filter(|waiting| waiting.lacks.of(kind) > 0);
        let waiting = waiting.map(|waiting| &*waiting.namespace);
        shares.map(|share| &*share.namespace).chain(waiting).collect()
    }

    /// Returns the attempts of each namespace that has some.
    fn used(&self, kind: Kind) -> BTreeMap<&str, Milli> {
        let mut used: BTreeMap<&str, Milli> = BTreeMap::new();
        for share in self.shares.values().filter(|share| share.rates.of(kind) > 0) {
            let of_namespace = used.entry(&share.namespace).or_default();
            *of_namespace = of_namespace.saturating_add(share.rates.of(kind));
        }
        used
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
            assert_eq!(shares.request(&uid(name), "n", wanted).periods, want, "{name} {wanted:?}");
        }
        let mut off = RateShares::new(RateLimits::default());
        assert_eq!(off.request(&uid("a"), "n", probes(1000, 1, 1)).periods, none);
    }

    #[test]
    fn a_share_that_is_given_back_lets_the_waiting_pods_request_again() {
        let mut shares = RateShares::new(RateLimits { network: 10, exec: 0 });
        let names = |grant: RateGrant| grant.again.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(names(shares.request(&uid("a"), "n", probes(100, 1, 0))), [""; 0]);
        assert_eq!(names(shares.request(&uid("b"), "n", probes(100, 1, 0))), [""; 0]);
        assert_eq!(names(shares.request(&uid("c"), "n", probes(200, 1, 0))), [""; 0]);
        assert_eq!(names(shares.request(&uid("a"), "n", probes(200, 1, 0))), ["b", "c"]);
        assert_eq!(shares.request(&uid("c"), "n", probes(200, 1, 0)).periods.network, Some(200));
        assert_eq!(names(shares.request(&uid("a"), "n", None)), ["b"]);
        assert_eq!(names(shares.request(&uid("b"), "n", None)), [""; 0], "a pod that waits no longer");
        assert_eq!(names(shares.request(&uid("c"), "n", None)), [""; 0]);
        assert!(shares.used(Kind::Network).is_empty());
    }

    #[test]
    fn a_namespace_that_asks_for_its_part_takes_it_from_one_that_has_more() {
        let mut shares = RateShares::new(RateLimits { network: 40, exec: 0 });
        let mut ask = |name: &str, namespace: &str, wanted| {
            let RateGrant { periods, again } = shares.request(&uid(name), namespace, wanted);
            let again: Vec<String> = again.iter().map(ToString::to_string).collect();
            (periods.network, again.join(" "))
        };
        let one = probes(100, 1, 0);
        let granted = |again: &str| (Some(100), again.to_owned());
        let refused = (None, String::new());
        for name in ["a1", "a2", "a3", "a4"] {
            assert_eq!(ask(name, "a", one), granted(""), "{name}: nobody else asks");
        }
        assert_eq!(ask("a5", "a", one), refused);
        // The newest pods of the namespace lose their shares, and keep asking in vain.
        assert_eq!(ask("b1", "b", one), granted("a4"));
        assert_eq!(ask("a4", "a", one), refused);
        assert_eq!(ask("b2", "b", one), granted("a3"));
        assert_eq!(ask("b3", "b", one), refused, "the part of each is half");
        assert_eq!(ask("a3", "a", one), refused);
        // A third namespace has a third. Neither of the others loses more than it has above that.
        assert_eq!(ask("c1", "c", one), granted("b2"));
        assert_eq!(ask("c2", "c", one), refused);
        assert_eq!(ask("b2", "b", one), refused);
        // A namespace that leaves gives its part to those that wait.
        let (_, again) = ask("c1", "c", None);
        assert_eq!(again, "a3 a4 a5 b2 b3 c2");
        ask("c2", "c", None);
        assert_eq!(ask("a3", "a", one), granted(""));
        assert_eq!(ask("b2", "b", one), granted("a3"));
    }

    proptest::proptest! {
        #[test]
        fn the_shares_are_within_the_limit_and_fair_between_namespaces(
            limits in (0_u32..60, 0_u32..60),
            requested in proptest::collection::vec((0_usize..12, 100_u32..1000, 0_u32..4, 0_u32..4), 1..60),
        ) {
            let mut shares = RateShares::new(RateLimits { network: limits.0, exec: limits.1 });
            let mut wants: BTreeMap<PodUid, (String, Option<FastProbes>)> = BTreeMap::new();
            for (pod, period_ms, network, exec) in requested {
                let (name, namespace) = (uid(&format!("p{pod}")), format!("n{}", pod % 4));
                let wanted = probes(period_ms, network, exec).filter(|w| w.network > 0 || w.exec > 0);
                wants.insert(name.clone(), (namespace.clone(), wanted));
                let mut queue = shares.request(&name, &namespace, wanted).again;
                // Workers request again when they are woken. It comes to rest.
                let mut steps = 0;
                while let Some(next) = queue.pop() {
                    steps += 1;
                    proptest::prop_assert!(steps < 10_000, "requests wake each other for ever");
                    let (namespace, wanted) = wants[&next].clone();
                    for woken in shares.request(&next, &namespace, wanted).again {
                        if !queue.contains(&woken) {
                            queue.push(woken);
                        }
                    }
                }
                for (kind, limit) in [(Kind::Network, limits.0), (Kind::Exec, limits.1)] {
                    let limit = Milli::from(limit) * 1000;
                    let used = shares.used(kind);
                    let all: Milli = used.values().sum();
                    proptest::prop_assert!(all <= limit, "{all} of {limit}");
                    for (pod, waiting) in &shares.waiting {
                        let lacks = waiting.lacks.of(kind);
                        if lacks == 0 {
                            continue;
                        }
                        proptest::prop_assert!(lacks > limit - all, "{pod} waits although there is room");
                        let part = limit / Milli::try_from(shares.asking(kind).len()).unwrap();
                        let own = used.get(&*waiting.namespace).copied().unwrap_or_default();
                        let above = used.iter().filter(|(_, used)| **used > part);
                        let more: Milli = above.map(|(_, used)| used - part).sum();
                        proptest::prop_assert!(
                            own + lacks > part || lacks > limit - all + more,
                            "{pod} waits for {lacks} within the part {part}, others have {more} above theirs"
                        );
                    }
                }
            }
        }
    }
}
