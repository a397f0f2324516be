//! Probe results as the decisions read them, and the start times and ports of containers that probes need.

use std::collections::{BTreeMap, HashMap};
use std::num::IntErrorKind;
use std::time::Duration;

use k8s_openapi::api::core::v1::Container;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use quintlet_model::ids::ContainerId;
use quintlet_model::probe::{ProbeMemory, ProbeResult, ProbeType};
use quintlet_model::runtime::{self, ContainerState};

/// Probe results after thresholds, by container ID. An instance without an entry has no result yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProbeResults {
    results: HashMap<(ContainerId, ProbeType), ProbeResult>,
}

impl ProbeResults {
    /// Adds the result of a probe memory, if it has one.
    pub fn add(&mut self, probe: ProbeType, memory: &ProbeMemory) {
        if let Some(result) = memory.result {
            self.set(probe, memory.container_id.clone(), result);
        }
    }

    /// Records the last result of a container instance's probe. Replaces an earlier one.
    pub fn set(&mut self, probe: ProbeType, container: ContainerId, result: ProbeResult) {
        self.results.insert((container, probe), result);
    }

    /// Returns the last result; `None` before the first one, and for a container without the probe.
    #[must_use]
    pub fn get(&self, probe: ProbeType, container: &ContainerId) -> Option<ProbeResult> {
        self.results.get(&(container.clone(), probe)).copied()
    }
}

/// CLOCK_BOOTTIME at which containers started, by container ID.
pub type ContainerStarts = BTreeMap<String, Duration>;

/// Adds the start of each running container that has none yet, and removes containers that the runtime no
/// longer lists.
///
/// A start is computed once: an initial delay counts from it and must not follow the wall clock. Read `wall`
/// before `boot`, so that the time between the two readings makes a start later, never earlier.
pub fn record_starts(
    starts: &mut ContainerStarts,
    containers: &[runtime::Container],
    wall: jiff::Timestamp,
    boot: Duration,
) {
    starts.retain(|id, _| containers.iter().any(|c| c.id.as_str() == id));
    for c in containers.iter().filter(|c| c.state == ContainerState::Running) {
        starts
            .entry(c.id.as_str().to_owned())
            .or_insert_with(|| start_on_boottime(c.started_unix_ns, wall, boot));
    }
}

/// Converts a start to CLOCK_BOOTTIME. A start before this boot becomes its first nanosecond. A start that is
/// unknown or in the future becomes `boot`, which makes an initial delay too long rather than too short.
fn start_on_boottime(started_unix_ns: i64, wall: jiff::Timestamp, boot: Duration) -> Duration {
    let ago = match started_unix_ns {
        1.. => wall.as_nanosecond().saturating_sub(i128::from(started_unix_ns)).max(0),
        ..1 => 0,
    };
    let ago = Duration::from_nanos(u64::try_from(ago).unwrap_or(u64::MAX));
    boot.saturating_sub(ago).max(Duration::from_nanos(1))
}

/// The port of a probe or hook does not exist. The texts are the kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    /// The number is not between 1 and 65535.
    #[error("invalid port number: {0}")]
    OutOfRange(i64),
    /// No port of the container has this name, and it is no number.
    #[error("strconv.Atoi: parsing {0:?}: invalid syntax")]
    Unknown(String),
    /// The text is a number that does not fit an integer.
    #[error("strconv.Atoi: parsing {0:?}: value out of range")]
    TooLarge(String),
}

/// Returns the port of a probe or hook: a number, the name of a port of the container, or a number as text.
///
/// # Errors
/// There is no such port; with the kubelet's message (`pkg/probe: ResolveContainerPort`).
pub fn resolve_port(port: &IntOrString, container: Option<&Container>) -> Result<u16, PortError> {
    let number = match port {
        IntOrString::Int(n) => i64::from(*n),
        IntOrString::String(name) => {
            let mut ports = container.into_iter().flat_map(|c| c.ports.iter().flatten());
            match ports.find(|p| p.name.as_deref() == Some(name)) {
                Some(named) => i64::from(named.container_port),
                None => name.parse::<i64>().map_err(|e| match e.kind() {
                    IntErrorKind::PosOverflow | IntErrorKind::NegOverflow => {
                        PortError::TooLarge(name.clone())
                    }
                    _ => PortError::Unknown(name.clone()),
                })?,
            }
        }
    };
    u16::try_from(number).ok().filter(|n| *n > 0).ok_or(PortError::OutOfRange(number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::{RuntimeBuilder, at};

    const NS: i64 = 1_000_000_000;

    #[test]
    fn a_start_on_boottime_is_exact_or_later_and_never_earlier() {
        let wall = at(1000);
        let now = i64::try_from(wall.as_nanosecond()).unwrap();
        let boot = Duration::new(500, 123);
        for (name, started, want) in [
            ("a moment ago", now - 1, Duration::new(500, 122)),
            ("900 ms ago: not cut to whole seconds", now - 900_000_000, Duration::new(499, 100_000_123)),
            ("a minute ago", now - 60 * NS, Duration::new(440, 123)),
            ("before this boot", now - 700 * NS, Duration::from_nanos(1)),
            ("in the future: the wall clock was set back", now + 60 * NS, boot),
            ("as far in the future as there is", i64::MAX, boot),
            ("unknown", 0, boot),
            ("less than nothing", i64::MIN, boot),
        ] {
            assert_eq!(start_on_boottime(started, wall, boot), want, "{name}");
        }
    }

    #[test]
    fn a_start_time_is_computed_once_per_container_and_not_affected_by_the_clock() {
        let mut starts = ContainerStarts::new();
        let one = RuntimeBuilder::ready().running("main").build();
        record_starts(&mut starts, &one.containers, at(1000), Duration::from_secs(500));
        let first = starts.clone();
        assert_eq!(first.keys().collect::<Vec<_>>(), ["main-0"]);
        for wall in [0, 999, 1_000_000] {
            record_starts(&mut starts, &one.containers, at(wall), Duration::from_secs(520));
            assert_eq!(starts, first, "the wall clock says {wall}");
        }
        let restarted = RuntimeBuilder::ready().exited("main", 1).running("main").build();
        record_starts(&mut starts, &restarted.containers, at(1010), Duration::from_secs(510));
        assert_eq!(starts.keys().collect::<Vec<_>>(), ["main-0", "main-1"], "the next instance has its own");
        record_starts(&mut starts, &restarted.containers[..0], at(1010), Duration::from_secs(510));
        assert_eq!(starts, ContainerStarts::new(), "a container that is removed is forgotten");
    }

    #[test]
    fn a_port_is_resolved_with_the_kubelets_words() {
        let container: Container = serde_json::from_value(serde_json::json!({"name": "c", "ports": [
            {"name": "web", "containerPort": 8080}, {"name": "bad", "containerPort": 65536}]}))
        .unwrap();
        let text = |name: &str| IntOrString::String(name.to_owned());
        for (port, want) in [
            (IntOrString::Int(1), Ok(1)),
            (IntOrString::Int(65535), Ok(65535)),
            (IntOrString::Int(0), Err("invalid port number: 0")),
            (IntOrString::Int(65536), Err("invalid port number: 65536")),
            (IntOrString::Int(i32::MIN), Err("invalid port number: -2147483648")),
            (text("web"), Ok(8080)),
            (text("bad"), Err("invalid port number: 65536")),
            (text("81"), Ok(81)),
            (text("none"), Err(r#"strconv.Atoi: parsing "none": invalid syntax"#)),
            (text(""), Err(r#"strconv.Atoi: parsing "": invalid syntax"#)),
            (
                text("99999999999999999999"),
                Err(r#"strconv.Atoi: parsing "99999999999999999999": value out of range"#),
            ),
        ] {
            let resolved = resolve_port(&port, Some(&container)).map_err(|e| e.to_string());
            assert_eq!(resolved, want.map_err(str::to_owned), "{port:?}");
        }
    }
}
