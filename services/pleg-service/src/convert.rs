//! Converts CRI messages to the types of the model. Errors have the path of the field.

use std::collections::HashMap;

use quintlet_cri_api::v1;
use quintlet_model::ids::{ContainerId, PodRef, PodUid, SandboxId};
use quintlet_model::runtime::{Container, ContainerState, Mount, Resources, Sandbox, SandboxState, User};
use quintlet_model::{labels, stop_signal};
use quintlet_proto::runtime::v1 as hints;

use crate::traits::{HintEvent, HintKind, ListedContainer, ListedSandbox, ReadError};

fn bad(what: impl std::fmt::Display) -> ReadError {
    ReadError::Data(what.to_string())
}

/// Returns the pod in the labels, or none if the UID is missing or invalid.
fn labelled(labels: &HashMap<String, String>) -> Option<PodRef> {
    let text = |key: &str| labels.get(key).map_or("", String::as_str);
    Some(PodRef {
        uid: PodUid::parse(text(labels::POD_UID)).ok()?,
        namespace: text(labels::POD_NAMESPACE).into(),
        name: text(labels::POD_NAME).into(),
    })
}

fn sandbox_state(state: i32) -> SandboxState {
    match v1::PodSandboxState::try_from(state) {
        Ok(v1::PodSandboxState::SandboxReady) => SandboxState::Ready,
        // A sandbox in an unknown state, as of a later CRI, counts as not ready.
        Ok(v1::PodSandboxState::SandboxNotready) | Err(_) => SandboxState::NotReady,
    }
}

fn container_state(state: i32) -> ContainerState {
    match v1::ContainerState::try_from(state) {
        Ok(v1::ContainerState::ContainerCreated) => ContainerState::Created,
        Ok(v1::ContainerState::ContainerRunning) => ContainerState::Running,
        Ok(v1::ContainerState::ContainerExited) => ContainerState::Exited,
        Ok(v1::ContainerState::ContainerUnknown) | Err(_) => ContainerState::Unknown,
    }
}

/// A message of a list of sandboxes, without the annotations, which are most of its bytes.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Sandboxes {
    #[prost(message, repeated, tag = "1")]
    pub(crate) items: Vec<SandboxItem>,
}

/// The fields of [`v1::PodSandbox`] that are used.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SandboxItem {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(message, optional, tag = "2")]
    metadata: Option<v1::PodSandboxMetadata>,
    #[prost(enumeration = "v1::PodSandboxState", tag = "3")]
    state: i32,
    #[prost(map = "string, string", tag = "5")]
    labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Containers {
    #[prost(message, repeated, tag = "1")]
    pub(crate) items: Vec<ContainerItem>,
}

/// The fields of [`v1::Container`] that are used.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ContainerItem {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    pod_sandbox_id: String,
    #[prost(enumeration = "v1::ContainerState", tag = "6")]
    state: i32,
    #[prost(map = "string, string", tag = "8")]
    labels: HashMap<String, String>,
}

pub(crate) fn listed_sandbox(s: SandboxItem) -> ListedSandbox {
    let mut pod = labelled(&s.labels);
    if let (Some(pod), Some(meta)) = (&mut pod, s.metadata) {
        pod.namespace = meta.namespace.into();
        pod.name = meta.name.into();
    }
    ListedSandbox { id: s.id, pod, state: sandbox_state(s.state) }
}

pub(crate) fn listed_container(c: ContainerItem) -> ListedContainer {
    let pod = labelled(&c.labels);
    ListedContainer { id: c.id, sandbox_id: c.pod_sandbox_id, pod, state: container_state(c.state) }
}

/// Converts and validates the answer of PodSandboxStatus (`k8s.io/cri-client: verifySandboxStatus`).
pub(crate) fn sandbox(status: Option<v1::PodSandboxStatus>) -> Result<(PodRef, Sandbox), ReadError> {
    let s = status.ok_or_else(|| bad("pod sandbox status is nil"))?;
    let id = SandboxId::parse(&s.id).map_err(|e| bad(format_args!("sandbox.id: {e}")))?;
    let at = |field: &str, problem: &str| bad(format_args!("sandbox {id}: {field}: {problem}"));
    let meta = s.metadata.as_ref().ok_or_else(|| at("metadata", "missing"))?;
    if meta.name.is_empty() {
        return Err(at("metadata.name", "empty"));
    }
    if meta.namespace.is_empty() {
        return Err(at("metadata.namespace", "empty"));
    }
    if s.created_at == 0 {
        return Err(at("created_at", "zero"));
    }
    let uid = PodUid::parse(s.labels.get(labels::POD_UID).unwrap_or(&meta.uid))
        .map_err(|e| at("metadata.uid", &e.to_string()))?;
    let pod = PodRef { uid, namespace: meta.namespace.as_str().into(), name: meta.name.as_str().into() };
    let has_network = s.network.is_some();
    let network = s.network.clone().unwrap_or_default();
    let texts = std::iter::once(network.ip).chain(network.additional_ips.into_iter().map(|p| p.ip));
    let ips = match texts.filter(|t| !t.is_empty()).map(|t| t.parse()).collect::<Result<Vec<_>, _>>() {
        Ok(ips) => ips,
        // One invalid address discards all, as in the kubelet.
        Err(error) => {
            tracing::warn!(pod.uid = %pod.uid, sandbox = %id, %error, "invalid sandbox address ignored");
            Vec::new()
        }
    };
    let options = s.linux.and_then(|l| l.namespaces).and_then(|n| n.options).unwrap_or_default();
    let sandbox = Sandbox {
        attempt: meta.attempt,
        state: sandbox_state(s.state),
        created_unix_ns: s.created_at,
        ips,
        has_network,
        host_network: options.network() == v1::NamespaceMode::Node,
        runtime_handler: s.runtime_handler,
        labels: s.labels.into_iter().collect(),
        annotations: s.annotations.into_iter().collect(),
        id,
    };
    Ok((pod, sandbox))
}

/// Converts and validates the answer of ContainerStatus (`k8s.io/cri-client: verifyContainerStatus`).
pub(crate) fn container(
    status: Option<v1::ContainerStatus>,
    sandbox_id: &str,
) -> Result<Container, ReadError> {
    let c = status.ok_or_else(|| bad("container status is nil"))?;
    let id = ContainerId::parse(&c.id).map_err(|e| bad(format_args!("container.id: {e}")))?;
    let at = |field: &str, problem: &str| bad(format_args!("container {id}: {field}: {problem}"));
    let sandbox_id = SandboxId::parse(sandbox_id).map_err(|e| at("sandbox_id", &e.to_string()))?;
    let meta = c.metadata.as_ref().ok_or_else(|| at("metadata", "missing"))?;
    if meta.name.is_empty() {
        return Err(at("metadata.name", "empty"));
    }
    if c.created_at == 0 {
        return Err(at("created_at", "zero"));
    }
    let image = c.image.as_ref().map(|i| i.image.clone()).unwrap_or_default();
    if image.is_empty() {
        return Err(at("image.image", "empty"));
    }
    if c.image_ref.is_empty() {
        return Err(at("image_ref", "empty"));
    }
    let state = container_state(c.state);
    let exited = state == ContainerState::Exited;
    Ok(Container {
        sandbox_id,
        name: c.labels.get(labels::CONTAINER_NAME).unwrap_or(&meta.name).clone(),
        attempt: meta.attempt,
        state,
        created_unix_ns: c.created_at,
        started_unix_ns: if state == ContainerState::Created { 0 } else { c.started_at },
        finished_unix_ns: if exited { c.finished_at } else { 0 },
        exit_code: if exited { c.exit_code } else { 0 },
        reason: if exited { c.reason } else { String::new() },
        message: if exited { c.message } else { String::new() },
        image,
        image_id: if c.image_id.is_empty() { c.image_ref.clone() } else { c.image_id },
        image_ref: c.image_ref,
        log_path: c.log_path,
        labels: c.labels.into_iter().collect(),
        annotations: c.annotations.into_iter().collect(),
        mounts: c
            .mounts
            .into_iter()
            .map(|m| Mount { container_path: m.container_path, host_path: m.host_path, readonly: m.readonly })
            .collect(),
        resources: c.resources.and_then(|r| r.linux).map(|r| Resources {
            cpu_shares: r.cpu_shares,
            cpu_quota: r.cpu_quota,
            cpu_period: r.cpu_period,
            memory_limit_bytes: r.memory_limit_in_bytes,
        }),
        user: c.user.and_then(|u| u.linux).map(|u| User {
            uid: u.uid,
            gid: u.gid,
            supplemental_groups: u.supplemental_groups,
        }),
        stop_signal: stop_signal::name(c.stop_signal).unwrap_or_default().to_owned(),
        id,
    })
}

/// Converts a message of `RuntimeEvents.Watch`. Returns none for a message that needs no action or is of a
/// later version.
pub(crate) fn hint(event: hints::RuntimeEvent) -> Option<HintEvent> {
    use hints::runtime_event::Event;
    match event.event? {
        Event::Hello(_) => None,
        Event::Source(s) => Some(HintEvent::Source {
            name: match s.source() {
                hints::HintSource::Containerd => "containerd",
                hints::HintSource::Cri => "cri",
                hints::HintSource::None | hints::HintSource::Unspecified => "none",
            },
            live: s.live,
        }),
        Event::Hint(h) => Some(HintEvent::Hint {
            kind: match h.kind() {
                hints::HintKind::Created => HintKind::Created,
                hints::HintKind::Started => HintKind::Started,
                hints::HintKind::Exiting => HintKind::Exiting,
                hints::HintKind::Exited => HintKind::Exited,
                hints::HintKind::Deleted => HintKind::Deleted,
                hints::HintKind::Oom => HintKind::Oom,
                hints::HintKind::Unspecified => return None,
            },
            pod: PodUid::parse(&h.pod_uid).ok(),
            id: h.id,
            trace: event.trace,
            at_unix_ns: h.at_unix_ns,
        }),
        Event::Overrun(o) => Some(HintEvent::Overrun { missed: o.missed }),
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    /// A status with a value in each field of the bindings.
    fn full_status() -> v1::ContainerStatus {
        v1::ContainerStatus {
            id: "c1".into(),
            metadata: Some(v1::ContainerMetadata { name: "main".into(), attempt: 2 }),
            state: v1::ContainerState::ContainerExited as i32,
            created_at: 3,
            started_at: 4,
            finished_at: 5,
            exit_code: 6,
            image: Some(v1::ImageSpec { image: "i".into(), ..Default::default() }),
            image_ref: "r".into(),
            reason: "Error".into(),
            message: "m".into(),
            labels: [(labels::CONTAINER_NAME.to_owned(), "main".to_owned())].into(),
            annotations: [("a".to_owned(), "b".to_owned())].into(),
            mounts: vec![v1::Mount { host_path: "/h".into(), ..Default::default() }],
            log_path: "/l".into(),
            resources: Some(v1::ContainerResources {
                linux: Some(v1::LinuxContainerResources { cpu_shares: 7, ..Default::default() }),
                windows: None,
            }),
            image_id: "x".into(),
            user: Some(v1::ContainerUser {
                linux: Some(v1::LinuxContainerUser { uid: 8, ..Default::default() }),
            }),
            ..Default::default()
        }
    }

    #[test]
    fn the_stop_signal_of_a_container_is_read_from_runtimes_that_report_it() {
        let signal_of = |tail: &[u8]| {
            let mut bytes = full_status().encode_to_vec();
            bytes.extend(tail);
            let status = v1::ContainerStatus::decode(&*bytes).unwrap();
            container(Some(status), "s1").unwrap().stop_signal
        };
        // Field 19 of `ContainerStatus`, a varint: 23 is SIGTERM, 29 SIGUSR1, 99 of a later CRI.
        assert_eq!(signal_of(&[]), "", "containerd 1.6, 1.7 and 2.1");
        assert_eq!(signal_of(&[0x98, 0x01, 0]), "", "RUNTIME_DEFAULT");
        assert_eq!(signal_of(&[0x98, 0x01, 23]), "SIGTERM");
        assert_eq!(signal_of(&[0x98, 0x01, 29]), "SIGUSR1");
        assert_eq!(signal_of(&[0x98, 0x01, 99]), "");
    }

    #[test]
    fn list_fields_are_read_at_the_numbers_of_the_cri() {
        let labels = HashMap::from([
            (labels::POD_UID.to_owned(), "u1".to_owned()),
            (labels::POD_NAME.to_owned(), "web".to_owned()),
            (labels::POD_NAMESPACE.to_owned(), "default".to_owned()),
        ]);
        let meta = v1::PodSandboxMetadata {
            name: "web".into(),
            uid: "u1".into(),
            namespace: "default".into(),
            attempt: 1,
        };
        let sandbox = v1::PodSandbox {
            id: "s1".into(),
            metadata: Some(meta),
            state: v1::PodSandboxState::SandboxNotready as i32,
            created_at: 5,
            labels: labels.clone(),
            annotations: [("a".to_owned(), "b".to_owned())].into(),
            runtime_handler: "h".into(),
        };
        let container = v1::Container {
            id: "c1".into(),
            pod_sandbox_id: "s1".into(),
            state: v1::ContainerState::ContainerExited as i32,
            labels,
            annotations: [("a".to_owned(), "b".to_owned())].into(),
            image_ref: "r".into(),
            ..Default::default()
        };
        let sandboxes = v1::ListPodSandboxResponse { items: vec![sandbox] }.encode_to_vec();
        let containers = v1::ListContainersResponse { containers: vec![container] }.encode_to_vec();
        let sandbox = Sandboxes::decode(&*sandboxes).unwrap().items.remove(0);
        let container = Containers::decode(&*containers).unwrap().items.remove(0);
        let (sandbox, container) = (listed_sandbox(sandbox), listed_container(container));
        let uid = PodUid::parse("u1").unwrap();
        let pod = Some(PodRef { uid, namespace: "default".into(), name: "web".into() });
        assert_eq!(
            sandbox,
            ListedSandbox { id: "s1".into(), pod: pod.clone(), state: SandboxState::NotReady }
        );
        let expected =
            ListedContainer { id: "c1".into(), sandbox_id: "s1".into(), pod, state: ContainerState::Exited };
        assert_eq!(container, expected);
    }
}
