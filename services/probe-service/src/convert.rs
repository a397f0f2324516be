//! Converts wire types of `quintlet.probe.v1` to the types of this crate, and back.

use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::url_scheme::UrlScheme;
use quintlet_model::convert::{self, ConvertError};
use quintlet_model::ids::{ContainerId, PodRef, PodUid};
use quintlet_model::probe::{ProbeKey, ProbeMemory, ProbeType};
use quintlet_model::text::cut;
use quintlet_proto::probe::v1 as wire;

use crate::target::{Handler, HttpGet, Pod, Probe, Target, View};

/// Longest output in a report, in bytes.
pub(crate) const MAX_REPORT_OUTPUT: usize = 1024;

/// Shortest period that a target sets in milliseconds. A shorter one counts as this one.
const SHORTEST_PERIOD: Duration = Duration::from_millis(100);

/// Parses the UID of a pod.
pub(crate) fn uid(value: &str) -> Result<PodUid, ConvertError> {
    PodUid::parse(value).map_err(|source| ConvertError::Id { field: "uid", source })
}

/// Converts a target. A field that is zero gets the default of the API: period 10 s, timeout 1 s, thresholds
/// 1 and 3.
///
/// # Errors
/// An ID, a probe type or a memory is invalid. An unknown handler is no error: its attempts are unknown.
pub(crate) fn pod(wire: wire::PodTarget) -> Result<Pod, ConvertError> {
    let pod = PodRef { uid: uid(&wire.uid)?, namespace: wire.namespace.into(), name: wire.name.into() };
    let mut probes = Vec::new();
    for container in wire.containers {
        let name: Arc<str> = container.name.into();
        let container_id = match container.container_id.as_str() {
            "" => None,
            id => Some(
                ContainerId::parse(id)
                    .map_err(|source| ConvertError::Id { field: "containers.container_id", source })?,
            ),
        };
        let view = View {
            container_id,
            running: container.running,
            started_at: (container.started_boottime_ns > 0)
                .then(|| Duration::from_nanos(container.started_boottime_ns)),
            started: container.started,
            pod_ip: wire.pod_ip.clone(),
        };
        for spec in container.probes {
            let seed = match spec.memory.clone() {
                Some(memory) if !memory.container_id.is_empty() => Some(ProbeMemory::try_from(memory)?),
                _ => None,
            };
            probes.push(Target {
                container: Arc::clone(&name),
                probe: Arc::new(probe(spec)?),
                view: view.clone(),
                seed,
            });
        }
    }
    Ok(Pod { pod, generation: wire.generation, probes })
}

fn probe(spec: wire::ProbeSpec) -> Result<Probe, ConvertError> {
    let host = |host: String| Some(host).filter(|h| !h.is_empty());
    let handler = match spec.handler {
        Some(
            wire::probe_spec::Handler::Http(wire::HttpGet { port_error: why, .. })
            | wire::probe_spec::Handler::Tcp(wire::TcpSocket { port_error: why, .. }),
        ) if !why.is_empty() => Handler::Broken(why),
        Some(wire::probe_spec::Handler::Http(http)) => Handler::Http(HttpGet {
            scheme: UrlScheme::parse(&http.scheme),
            host: host(http.host),
            port: http.port,
            path: http.path,
            headers: http.headers.into_iter().map(|h| (h.key, h.value)).collect(),
            h2c: http.h2c,
        }),
        Some(wire::probe_spec::Handler::Tcp(tcp)) => Handler::Tcp { host: host(tcp.host), port: tcp.port },
        Some(wire::probe_spec::Handler::Grpc(grpc)) => {
            Handler::Grpc { port: grpc.port, service: grpc.service, tls: grpc.tls }
        }
        Some(wire::probe_spec::Handler::Exec(exec)) => {
            Handler::Exec { command: exec.command, grant: exec.grant }
        }
        None => Handler::Missing,
    };
    let or = |value: u32, default: u32| if value == 0 { default } else { value };
    let period = match spec.period_ms {
        0 => Duration::from_secs(or(spec.period_seconds, 10).into()),
        ms => Duration::from_millis(ms.into()).max(SHORTEST_PERIOD),
    };
    Ok(Probe {
        kind: convert::probe_type(spec.r#type)?,
        handler,
        initial_delay: Duration::from_secs(spec.initial_delay_seconds.into()),
        period,
        timeout: Duration::from_secs(or(spec.timeout_seconds, 1).into()),
        success_threshold: or(spec.success_threshold, 1),
        failure_threshold: or(spec.failure_threshold, 3),
    })
}

/// Returns the report of the memory of one probe.
#[must_use]
pub(crate) fn result(key: &ProbeKey, generation: u64, memory: &ProbeMemory, output: &str) -> wire::Result {
    wire::Result {
        uid: key.uid.to_string(),
        generation,
        container: key.container.clone(),
        r#type: kind(key.probe),
        memory: Some(memory.into()),
        output: cut(output, MAX_REPORT_OUTPUT).to_owned(),
    }
}

/// Returns the number of the type in `quintlet.probe.v1`.
#[must_use]
pub(crate) fn kind(kind: ProbeType) -> i32 {
    wire::ProbeType::from(kind) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(spec: wire::ProbeSpec) -> wire::PodTarget {
        wire::PodTarget {
            uid: "u1".into(),
            name: "web".into(),
            namespace: "default".into(),
            generation: 3,
            pod_ip: "10.0.0.1".into(),
            containers: vec![wire::ContainerTarget {
                name: "app".into(),
                container_id: "c1".into(),
                running: true,
                started_boottime_ns: 5_000_000_000,
                started: true,
                probes: vec![spec],
            }],
        }
    }

    #[test]
    fn a_zero_field_gets_the_default_of_the_api() {
        let spec = wire::ProbeSpec { r#type: kind(ProbeType::Liveness), ..Default::default() };
        let pod = pod(target(spec)).unwrap();
        let Target { probe, view, seed, .. } = &pod.probes[0];
        assert_eq!(probe.period, Duration::from_secs(10));
        assert_eq!(probe.timeout, Duration::from_secs(1));
        assert_eq!((probe.success_threshold, probe.failure_threshold), (1, 3));
        assert_eq!(probe.handler, Handler::Missing);
        assert_eq!(view.started_at, Some(Duration::from_secs(5)));
        assert_eq!(*seed, None);
    }

    #[test]
    fn a_period_in_milliseconds_replaces_that_in_seconds_and_is_never_below_100() {
        for (period_seconds, period_ms, want) in
            [(1, 0, 1000), (1, 250, 250), (0, 100, 100), (5, 1, 100), (1, u32::MAX, u32::MAX.into())]
        {
            let r#type = kind(ProbeType::Readiness);
            let spec = wire::ProbeSpec { r#type, period_seconds, period_ms, ..Default::default() };
            let pod = pod(target(spec)).unwrap();
            let period = pod.probes[0].probe.period;
            assert_eq!(period, Duration::from_millis(want), "{period_seconds} s, {period_ms} ms");
        }
    }

    #[test]
    fn the_protocols_of_network_probes_arrive() {
        let handler = |handler: wire::probe_spec::Handler| {
            let kind = kind(ProbeType::Liveness);
            let spec = wire::ProbeSpec { r#type: kind, handler: Some(handler), ..Default::default() };
            pod(target(spec)).unwrap().probes[0].probe.handler.clone()
        };
        for on in [false, true] {
            let http = wire::HttpGet { h2c: on, scheme: "http".into(), ..Default::default() };
            let http = handler(wire::probe_spec::Handler::Http(http));
            assert!(matches!(&http, Handler::Http(get) if get.h2c == on), "{http:?}");
            let grpc = wire::Grpc { tls: on, ..Default::default() };
            let grpc = handler(wire::probe_spec::Handler::Grpc(grpc));
            assert!(matches!(&grpc, Handler::Grpc { tls, .. } if *tls == on), "{grpc:?}");
        }
    }

    #[test]
    fn an_invalid_field_is_named_in_the_error() {
        let mut no_type = target(wire::ProbeSpec::default());
        assert_eq!(pod(no_type.clone()).unwrap_err().to_string(), "probe.type: unknown value 0");
        no_type.uid = "../etc".into();
        assert!(matches!(pod(no_type), Err(ConvertError::Id { field: "uid", .. })));
    }

    #[test]
    fn output_is_truncated_at_a_character_boundary() {}
}
