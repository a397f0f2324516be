//! Builds the probe target of a pod from its spec, its status and the runtime state.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, EnvVar, Pod, PodStatus, Probe};
use pod_sync_cri_config::error::ConfigError;
use pod_sync_cri_config::expand::{Budget, expand_text};
use pod_sync_decisions::probe_period::{GrantedPeriods, is_fast};
use pod_sync_decisions::probes::{ContainerStarts, resolve_port};
use pod_sync_decisions::unsupported::FieldGates;
use quintlet_kit::failpoint;
use quintlet_kit::grant::GrantKey;
use quintlet_model::ids::ContainerId;
use quintlet_model::pod;
use quintlet_model::probe::{ProbeMemory, ProbeResult, ProbeType};
use quintlet_model::runtime::{ContainerState, PodRuntime};
use quintlet_proto::common::v1::KeyValue;
use quintlet_proto::probe::v1 as wire;

/// Limit of the expanded commands of all probes of a pod, in bytes. `execve(2)` refuses longer arguments: 128
/// KiB each, and a quarter of the stack limit in all, 2 MiB by default. With the rest of a pod's spec (1.5
/// MiB) the target stays below `quintlet_proto::limits::ITEM`.
const MAX_COMMANDS: usize = 2 << 20;

/// The probes of a pod.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Targets {
    /// The target; none if the pod has no probes to run.
    pub target: Option<wire::PodTarget>,
    /// Probes whose command exceeds [`MAX_COMMANDS`] after the expansion: container, probe and error. The
    /// runtime would refuse each attempt, which leaves the result of the probe as it is.
    pub left_out: Vec<(String, ProbeType, String)>,
}

/// The part of the input on which [`targets`] depends. Targets of an equal basis are not built again: they
/// may have megabytes, and a grant is signed for each command.
#[derive(Debug)]
pub(super) struct Basis {
    pod: Arc<Pod>,
    terminating: bool,
    pod_ip: Option<String>,
    periods: GrantedPeriods,
    containers: Vec<ContainerBasis>,
}

/// The part of a [`Basis`] that is about one container.
#[derive(Debug, PartialEq)]
struct ContainerBasis {
    name: String,
    /// ID and state of the newest instance.
    instance: Option<(ContainerId, ContainerState)>,
    /// Start of that instance (CLOCK_BOOTTIME).
    start: Option<Duration>,
    /// The container has started, as in its status.
    started: Option<bool>,
}

impl PartialEq for Basis {
    fn eq(&self, other: &Self) -> bool {
        let Self { pod, terminating, pod_ip, periods, containers } = self;
        *terminating == other.terminating
            && *periods == other.periods
            && *pod_ip == other.pod_ip
            && *containers == other.containers
            // A worker has one pod, whose metadata and status change more often.
            && (Arc::ptr_eq(pod, &other.pod) || pod.spec == other.pod.spec)
    }
}

impl Basis {
    /// Returns the basis of a pass over `pod`.
    pub(super) fn of(pod: &Arc<Pod>, input: &TargetInput<'_>) -> Self {
        let spec = pod::spec(pod);
        let all = spec.containers.iter().chain(pod::init_containers(pod)).map(|container| {
            let newest = input.runtime.newest(&container.name);
            ContainerBasis {
                name: container.name.clone(),
                instance: newest.map(|instance| (instance.id.clone(), instance.state)),
                start: newest.and_then(|instance| input.starts.get(instance.id.as_str()).copied()),
                started: container_status(input.status, &container.name).and_then(|s| s.started),
            }
        });
        Self {
            pod: Arc::clone(pod),
            terminating: input.terminating,
            pod_ip: input.status.pod_ip.clone(),
            periods: input.periods,
            containers: all.collect(),
        }
    }
}

/// The input of [`targets`].
#[derive(Debug)]
pub(super) struct TargetInput<'a> {
    pub pod: &'a Pod,
    /// The newest status.
    pub status: &'a PodStatus,
    /// The runtime state.
    pub runtime: &'a PodRuntime,
    /// Whether the pod is terminating: readiness probes continue, the others stop, those of sidecars too.
    /// kubelet 1.36 continues the others of sidecars (`pkg/kubelet/prober: manager.StopLivenessAndStartup`).
    pub terminating: bool,
    /// Signs exec probes.
    pub key: &'a GrantKey,
    /// Decides whether probes use HTTP/2 without TLS, and gRPC with TLS.
    pub gates: FieldGates,
    /// Periods of the probes to which the pod's annotation applies.
    pub periods: GrantedPeriods,
    /// Start times of the containers.
    pub starts: &'a ContainerStarts,
}

/// The budget for the commands of the probes of a pod, and the probes that exceed it.
struct Commands {
    budget: Budget,
    left_out: Vec<(String, ProbeType, String)>,
}

/// Returns the target of a pod, and the probes that are not in it.
#[must_use]
pub(super) fn targets(input: &TargetInput<'_>) -> Targets {
    let budget = Budget::with_limit(MAX_COMMANDS, "the commands of the pod's probes");
    let mut commands = Commands { budget, left_out: Vec::new() };
    let target = target(input, &mut commands);
    Targets { target, left_out: commands.left_out }
}

fn target(input: &TargetInput<'_>, commands: &mut Commands) -> Option<wire::PodTarget> {
    let spec = pod::spec(input.pod);
    let sidecars = pod::init_containers(input.pod).iter().filter(|c| pod::is_sidecar(c));
    let containers: Vec<_> =
        spec.containers.iter().chain(sidecars).filter_map(|c| container(input, commands, c)).collect();
    if containers.is_empty() {
        return None;
    }
    Some(wire::PodTarget {
        uid: input.pod.metadata.uid.clone().unwrap_or_default(),
        name: input.pod.metadata.name.clone().unwrap_or_default(),
        namespace: input.pod.metadata.namespace.clone().unwrap_or_default(),
        generation: 0,
        pod_ip: input.status.pod_ip.clone().unwrap_or_default(),
        containers,
    })
}

fn container(
    input: &TargetInput<'_>,
    commands: &mut Commands,
    c: &Container,
) -> Option<wire::ContainerTarget> {
    let instance = input.runtime.newest(&c.name);
    let id = instance.map(|i| i.id.as_str().to_owned()).unwrap_or_default();
    let all = [
        (ProbeType::Startup, &c.startup_probe),
        (ProbeType::Readiness, &c.readiness_probe),
        (ProbeType::Liveness, &c.liveness_probe),
    ];
    let probes: Vec<_> = all
        .into_iter()
        .filter(|(t, _)| !input.terminating || *t == ProbeType::Readiness)
        .filter_map(|(t, p)| Some((t, p.as_ref()?)))
        .filter(|(_, p)| {
            let ends = input.terminating && p.exec.is_some();
            !(ends && failpoint::planted!("readiness frozen in termination"))
        })
        .filter_map(|(t, p)| probe(input, commands, c, &id, t, p))
        .collect();
    if probes.is_empty() {
        return None;
    }
    let status = container_status(input.status, &c.name);
    let running = instance.is_some_and(|i| i.state == ContainerState::Running);
    let started = input.starts.get(&id).filter(|_| running);
    let started = started.map_or(0, |at| u64::try_from(at.as_nanos()).unwrap_or(u64::MAX));
    Some(wire::ContainerTarget {
        name: c.name.clone(),
        container_id: id,
        running,
        started_boottime_ns: started,
        started: status.and_then(|s| s.started).unwrap_or(false),
        probes,
    })
}

fn probe(
    input: &TargetInput<'_>,
    commands: &mut Commands,
    c: &Container,
    id: &str,
    probe: ProbeType,
    p: &Probe,
) -> Option<wire::ProbeSpec> {
    let timeout_seconds = positive(p.timeout_seconds, 1);
    let port = |port| match resolve_port(port, Some(c)) {
        Ok(number) => (number.into(), String::new()),
        Err(error) => (0, error.to_string()),
    };
    let handler = if let Some(http) = &p.http_get {
        let (port, port_error) = port(&http.port);
        wire::probe_spec::Handler::Http(wire::HttpGet {
            scheme: http.scheme.as_deref().unwrap_or("HTTP").to_ascii_lowercase(),
            host: http.host.clone().unwrap_or_default(),
            port,
            port_error,
            path: http.path.clone().unwrap_or_else(|| "/".to_owned()),
            h2c: input.gates.h2c_probes && http.protocol.as_deref() == Some("HTTP2"),
            headers: http
                .http_headers
                .iter()
                .flatten()
                .map(|h| KeyValue { key: h.name.clone(), value: h.value.clone() })
                .collect(),
        })
    } else if let Some(tcp) = &p.tcp_socket {
        let (port, port_error) = port(&tcp.port);
        wire::probe_spec::Handler::Tcp(wire::TcpSocket {
            host: tcp.host.clone().unwrap_or_default(),
            port,
            port_error,
        })
    } else if let Some(grpc) = &p.grpc {
        wire::probe_spec::Handler::Grpc(wire::Grpc {
            port: u32::try_from(grpc.port).unwrap_or(0),
            service: grpc.service.clone().unwrap_or_default(),
            tls: input.gates.grpc_probe_tls && grpc.mode.as_deref() == Some("TLS"),
        })
    } else if let Some(exec) = &p.exec {
        let command = exec.command.as_deref().unwrap_or_default();
        let command = match expand_static(command, c, &mut commands.budget) {
            Ok(command) => command,
            Err(error) => {
                commands.left_out.push((c.name.clone(), probe, error.to_string()));
                return None;
            }
        };
        let grant = input.key.sign(id, &command, timeout_seconds);
        wire::probe_spec::Handler::Exec(wire::ExecCommand { command, grant })
    } else {
        return None;
    };
    let periods = input.periods;
    let period_ms = if p.exec.is_some() { periods.exec } else { periods.network };
    Some(wire::ProbeSpec {
        r#type: wire::ProbeType::from(probe) as i32,
        handler: Some(handler),
        initial_delay_seconds: u32::try_from(p.initial_delay_seconds.unwrap_or(0)).unwrap_or(0),
        period_seconds: positive(p.period_seconds, 10),
        period_ms: period_ms.filter(|_| is_fast(p)).unwrap_or(0),
        timeout_seconds,
        success_threshold: positive(p.success_threshold, 1),
        failure_threshold: positive(p.failure_threshold, 3),
        memory: None,
    })
}

fn positive(value: Option<i32>, default: u32) -> u32 {
    value.and_then(|v| u32::try_from(v).ok()).filter(|v| *v > 0).unwrap_or(default)
}

/// Expands `$(NAME)` with the literal variables of the container; `$$` is a dollar sign
/// (`pkg/kubelet/container: ExpandContainerCommandOnlyStatic`).
///
/// # Errors
/// The command exceeds the budget, which then stays as it is.
fn expand_static(command: &[String], c: &Container, budget: &mut Budget) -> Result<Vec<String>, ConfigError> {
    let vars: BTreeMap<&str, &[u8]> = c.env.iter().flatten().map(literal).collect();
    let mut left = budget.clone();
    let mut expand = |part: &String| expand_text(part, &mut left, |name| vars.get(name).copied());
    let expanded = command.iter().map(&mut expand).collect::<Result<_, _>>()?;
    *budget = left;
    Ok(expanded)
}

fn literal(variable: &EnvVar) -> (&str, &[u8]) {
    (&variable.name, variable.value.as_deref().unwrap_or_default().as_bytes())
}

/// Returns the status of a regular or init container.
#[must_use]
pub(super) fn container_status<'a>(status: &'a PodStatus, name: &str) -> Option<&'a ContainerStatus> {
    let regular = status.container_statuses.iter().flatten();
    regular.chain(status.init_container_statuses.iter().flatten()).find(|s| s.name == name)
}

/// Returns probe results, from the status in the API server, for containers that ran before pod-sync was
/// here. Without them a Ready pod would become unready, and a passed startup probe would run again.
#[must_use]
pub(super) fn seeds(
    pod: &Pod,
    api: &PodStatus,
    runtime: &PodRuntime,
) -> Vec<(String, ProbeType, ProbeMemory)> {
    let spec = pod::spec(pod);
    let mut out = Vec::new();
    let sidecars = pod::init_containers(pod).iter().filter(|c| pod::is_sidecar(c));
    for c in spec.containers.iter().chain(sidecars) {
        let Some(instance) = runtime.newest(&c.name).filter(|i| i.state == ContainerState::Running) else {
            continue;
        };
        let Some(status) = container_status(api, &c.name) else { continue };
        let shown = status.container_id.as_deref().and_then(|id| id.rsplit_once("://")).map(|(_, id)| id);
        let is_replaced = shown != Some(instance.id.as_str());
        if is_replaced && !failpoint::planted!("ready before its own probe") {
            continue;
        }
        let is_forgotten = pod::is_sidecar(c) && failpoint::planted!("sidecar's startup is forgotten");
        let mut seed = |probe: ProbeType, id: &ContainerId| {
            let memory = ProbeMemory {
                container_id: id.clone(),
                counter: 0,
                result: Some(ProbeResult::Success).filter(|_| !(is_forgotten && probe == ProbeType::Startup)),
                last: ProbeResult::Success,
                run: 1,
                on_hold: probe == ProbeType::Startup,
            };
            out.push((c.name.clone(), probe, memory));
        };
        if c.startup_probe.is_some() && status.started == Some(true) && !is_replaced {
            seed(ProbeType::Startup, &instance.id);
        }
        if c.readiness_probe.is_some() && status.ready {
            seed(ProbeType::Readiness, &instance.id);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use quintlet_model::runtime::Cursor;
    use quintlet_testkit::pods::pod_of;
    use serde_json::json;

    use super::*;

    #[test]
    fn protocols_of_network_probes_are_sent_with_their_feature_gates() {
        let pod = pod_of(json!({"containers": [{
            "name": "c",
            "startupProbe": {"httpGet": {"port": 1, "protocol": "HTTP1"}},
            "readinessProbe": {"httpGet": {"port": 1, "protocol": "HTTP2"}},
            "livenessProbe": {"grpc": {"port": 1, "mode": "TLS"}},
        }, {
            "name": "plain",
            "readinessProbe": {"httpGet": {"port": 1}},
            "livenessProbe": {"grpc": {"port": 1, "mode": "Plaintext"}},
        }]}));
        let runtime =
            PodRuntime::empty(pod::pod_ref(&pod).unwrap(), Cursor { epoch: 1, rev: 1 }, Duration::ZERO);
        let sent = |gates: FieldGates| -> Vec<bool> {
            let input = TargetInput {
                pod: &pod,
                status: &PodStatus::default(),
                runtime: &runtime,
                terminating: false,
                key: &GrantKey::from_bytes([0; 32]),
                gates,
                periods: GrantedPeriods::default(),
                starts: &ContainerStarts::default(),
            };
            let target = targets(&input).target.unwrap();
            let probes = target.containers.into_iter().flat_map(|container| container.probes);
            let protocol = |probe: wire::ProbeSpec| match probe.handler.unwrap() {
                wire::probe_spec::Handler::Http(http) => http.h2c,
                wire::probe_spec::Handler::Grpc(grpc) => grpc.tls,
                wire::probe_spec::Handler::Tcp(_) | wire::probe_spec::Handler::Exec(_) => panic!("not set"),
            };
            probes.map(protocol).collect()
        };
        let none = FieldGates::default();
        assert_eq!(sent(none), [false; 5]);
        let h2c = FieldGates { h2c_probes: true, ..none };
        assert_eq!(sent(h2c), [false, true, false, false, false]);
        let tls = FieldGates { grpc_probe_tls: true, ..none };
        assert_eq!(sent(tls), [false, false, true, false, false]);
    }

    #[test]
    fn granted_periods_are_sent_for_the_probes_with_a_period_of_one_second() {
        let pod = pod_of(json!({"containers": [{
            "name": "c",
            "startupProbe": {"exec": {"command": ["up"]}, "periodSeconds": 1},
            "readinessProbe": {"httpGet": {"port": 1}, "periodSeconds": 1},
            "livenessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": 3},
        }]}));
        let runtime =
            PodRuntime::empty(pod::pod_ref(&pod).unwrap(), Cursor { epoch: 1, rev: 1 }, Duration::ZERO);
        for (network, exec, want) in
            [(None, None, [0, 0, 0]), (Some(100), None, [0, 100, 0]), (Some(250), Some(500), [500, 250, 0])]
        {
            let input = TargetInput {
                pod: &pod,
                status: &PodStatus::default(),
                runtime: &runtime,
                terminating: false,
                key: &GrantKey::from_bytes([0; 32]),
                gates: FieldGates::default(),
                periods: GrantedPeriods { network, exec },
                starts: &ContainerStarts::default(),
            };
            let target = targets(&input).target.unwrap();
            let probes = target.containers.into_iter().flat_map(|container| container.probes);
            assert_eq!(probes.map(|probe| probe.period_ms).collect::<Vec<_>>(), want);
        }
    }
}
