//! Reads the key, pod, registry and time limit of a request. The original bytes are forwarded.
use bytes::Bytes;
use prost::Message as _;
use quintlet_cri_api::v1;

use crate::policy::{IMAGE, RUNTIME};

/// Identifies mutations in flight.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CallKey {
    /// Calls with the same parts are for the same object (pod UID, name and attempt, or an ID). If their
    /// bytes differ, they conflict.
    Named {
        /// Name of the method.
        method: &'static str,
        /// IDs, or names of the object to create.
        parts: Vec<String>,
    },
    /// Only identical calls have the same key.
    Exact {
        /// Name of the method.
        method: &'static str,
        /// The encoded request.
        bytes: Bytes,
    },
}

impl CallKey {
    /// Returns whether the call ends the processes of the container or sandbox.
    #[must_use]
    pub fn stops(&self, id: &str) -> bool {
        match self {
            Self::Named { method: "StopPodSandbox", parts } => {
                parts.first().is_some_and(|sandbox| sandbox == id)
            }
            Self::Exact { method: "StopContainer", bytes } => {
                ById::decode(&**bytes).is_ok_and(|request| request.id == id)
            }
            Self::Named { .. } | Self::Exact { .. } => false,
        }
    }
}

/// Information from a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestInfo {
    /// Key of the call; `None` for calls that are not joined.
    pub key: Option<CallKey>,
    /// The pod, if the request names it.
    pub pod_uid: Option<String>,
    /// Namespace of the pod, if the request has it.
    pub pod_namespace: Option<String>,
    /// Name of the pod, if the request has it.
    pub pod_name: Option<String>,
    /// Name of the container to create.
    pub container_name: Option<String>,
    /// ID of the container, if the request is about one.
    pub container_id: Option<String>,
    /// Registry of a pull.
    pub registry: Option<String>,
    /// Time limit in the request (StopContainer, ExecSync, CheckpointContainer), in seconds.
    pub seconds: Option<i64>,
}

impl RequestInfo {
    /// Returns the attributes of the call's span that name its pod and its container.
    pub(crate) fn attributes(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let attributes = [
            ("k8s.pod.uid", &self.pod_uid),
            ("k8s.namespace.name", &self.pod_namespace),
            ("k8s.pod.name", &self.pod_name),
            ("k8s.container.name", &self.container_name),
            ("container.id", &self.container_id),
        ];
        attributes.into_iter().filter_map(|(key, value)| Some((key, value.as_deref()?)))
    }
}

/// Requests whose first field is the ID of the object. That also holds for methods of later versions of the
/// CRI.
#[derive(Clone, PartialEq, prost::Message)]
struct ById {
    #[prost(string, tag = "1")]
    id: String,
}

/// The parts of a CreateContainerRequest that identify the container. The other parts, which are most of the
/// bytes, are not decoded.
#[derive(Clone, PartialEq, prost::Message)]
struct CreateContainer {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerIdentity>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<SandboxIdentity>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ContainerIdentity {
    #[prost(message, optional, tag = "1")]
    metadata: Option<v1::ContainerMetadata>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct SandboxIdentity {
    #[prost(message, optional, tag = "1")]
    metadata: Option<v1::PodSandboxMetadata>,
}

/// A request that is not valid protobuf.
#[derive(Debug, thiserror::Error)]
#[error("failed to decode the request of {method}")]
pub(crate) struct UndecodableRequest {
    method: &'static str,
    source: prost::DecodeError,
}

/// Parses the request of a mutation.
///
/// # Errors
/// Fails if the message is not valid protobuf: it could not be fenced.
pub(crate) fn parse(
    service: &str,
    method: &'static str,
    message: &Bytes,
) -> Result<RequestInfo, UndecodableRequest> {
    let unreadable = |source| UndecodableRequest { method, source };
    let named = |parts: Vec<String>| Some(CallKey::Named { method, parts });
    let exact = || Some(CallKey::Exact { method, bytes: message.clone() });
    let bytes = message.clone();
    let info = match (service, method) {
        (RUNTIME, "RunPodSandbox") => {
            let request = v1::RunPodSandboxRequest::decode(bytes).map_err(unreadable)?;
            let metadata = request.config.and_then(|c| c.metadata).unwrap_or_default();
            let parts = vec![
                metadata.uid.clone(),
                metadata.namespace.clone(),
                metadata.name.clone(),
                metadata.attempt.to_string(),
            ];
            RequestInfo { key: named(parts), ..of_pod(metadata) }
        }
        (RUNTIME, "CreateContainer") => {
            let request = CreateContainer::decode(bytes).map_err(unreadable)?;
            let sandbox = request.sandbox_config.and_then(|c| c.metadata).unwrap_or_default();
            let container = request.config.and_then(|c| c.metadata).unwrap_or_default();
            let parts = vec![
                sandbox.uid.clone(),
                request.pod_sandbox_id,
                container.name.clone(),
                container.attempt.to_string(),
            ];
            let container_name = non_empty(container.name);
            RequestInfo { key: named(parts), container_name, ..of_pod(sandbox) }
        }
        // A stop with another grace period is another call: a shorter one must reach the runtime while the
        // first waits.
        (RUNTIME, "StopContainer") => {
            let request = v1::StopContainerRequest::decode(bytes).map_err(unreadable)?;
            RequestInfo {
                key: exact(),
                container_id: Some(request.container_id),
                seconds: Some(request.timeout),
                ..RequestInfo::default()
            }
        }
        // Two hooks of one container may run concurrently.
        (RUNTIME, "ExecSync") => {
            let request = v1::ExecSyncRequest::decode(bytes).map_err(unreadable)?;
            RequestInfo {
                key: exact(),
                container_id: Some(request.container_id),
                seconds: Some(request.timeout),
                ..RequestInfo::default()
            }
        }
        (RUNTIME, "CheckpointContainer") => {
            let request = v1::CheckpointContainerRequest::decode(bytes).map_err(unreadable)?;
            RequestInfo {
                key: named(vec![request.container_id.clone()]),
                container_id: Some(request.container_id),
                seconds: Some(request.timeout),
                ..RequestInfo::default()
            }
        }
        // Credentials and pods differ between calls; the runtime itself downloads a layer once.
        (IMAGE, "PullImage") => {
            let request = v1::PullImageRequest::decode(bytes).map_err(unreadable)?;
            let image = request.image.map(|i| i.image).unwrap_or_default();
            let sandbox = request.sandbox_config.and_then(|c| c.metadata).unwrap_or_default();
            let registry = Some(registry_host(&image).to_owned());
            RequestInfo { key: exact(), registry, ..of_pod(sandbox) }
        }
        (IMAGE, "RemoveImage") => {
            let request = v1::RemoveImageRequest::decode(bytes).map_err(unreadable)?;
            RequestInfo {
                key: named(vec![request.image.map(|i| i.image).unwrap_or_default()]),
                ..RequestInfo::default()
            }
        }
        (RUNTIME, "UpdateRuntimeConfig") => RequestInfo { key: named(Vec::new()), ..RequestInfo::default() },
        (_, _) => {
            let request = ById::decode(bytes).map_err(unreadable)?;
            let container_id = method.contains("Container").then(|| request.id.clone());
            RequestInfo { key: named(vec![request.id]), container_id, ..RequestInfo::default() }
        }
    };
    Ok(info)
}

fn of_pod(metadata: v1::PodSandboxMetadata) -> RequestInfo {
    RequestInfo {
        pod_uid: non_empty(metadata.uid),
        pod_namespace: non_empty(metadata.namespace),
        pod_name: non_empty(metadata.name),
        ..RequestInfo::default()
    }
}

fn non_empty(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

/// Returns the registry of an image reference. The first component is a host only if it has a dot or a colon,
/// or is `localhost`.
#[must_use]
pub(crate) fn registry_host(image: &str) -> &str {
    match image.split_once('/') {
        Some((first, _)) if first == "localhost" || first.contains(['.', ':']) => first,
        Some(_) | None => "docker.io",
    }
}

/// Returns whether a request asks for verbose information.
///
/// # Errors
/// Fails if the message is not valid protobuf. It must not be sent then: a runtime may decode it differently.
pub(crate) fn is_verbose(method: &str, message: &Bytes) -> Result<bool, prost::DecodeError> {
    let message = message.clone();
    Ok(match method {
        "Status" => v1::StatusRequest::decode(message)?.verbose,
        "PodSandboxStatus" => v1::PodSandboxStatusRequest::decode(message)?.verbose,
        "ContainerStatus" => v1::ContainerStatusRequest::decode(message)?.verbose,
        "ImageStatus" => v1::ImageStatusRequest::decode(message)?.verbose,
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(service: &str, method: &'static str, message: &impl prost::Message) -> CallKey {
        parse(service, method, &message.encode_to_vec().into()).unwrap().key.unwrap()
    }

    fn sandbox(uid: &str, attempt: u32, hostname: &str) -> v1::RunPodSandboxRequest {
        let metadata = v1::PodSandboxMetadata { uid: uid.into(), attempt, ..Default::default() };
        let config = v1::PodSandboxConfig {
            metadata: Some(metadata),
            hostname: hostname.into(),
            ..Default::default()
        };
        v1::RunPodSandboxRequest { config: Some(config), ..Default::default() }
    }

    #[test]
    fn the_key_of_a_sandbox_is_its_pod_and_attempt() {
        let sandbox_key =
            |uid, attempt, hostname| key(RUNTIME, "RunPodSandbox", &sandbox(uid, attempt, hostname));
        assert_eq!(sandbox_key("u", 0, "a"), sandbox_key("u", 0, "b"));
        assert_ne!(sandbox_key("u", 0, "a"), sandbox_key("u", 1, "a"));
        assert_ne!(sandbox_key("u", 0, "a"), sandbox_key("v", 0, "a"));
    }

    #[test]
    fn the_key_of_a_container_needs_no_variable_that_is_text() {
        let mut request = v1::CreateContainerRequest {
            pod_sandbox_id: "s".into(),
            config: Some(v1::ContainerConfig {
                metadata: Some(v1::ContainerMetadata { name: "c".into(), attempt: 2 }),
                envs: vec![v1::KeyValue { key: "K".into(), value: b"text".to_vec() }],
                ..Default::default()
            }),
            sandbox_config: sandbox("u", 0, "a").config,
        };
        let parts = ["u", "s", "c", "2"].map(str::to_owned).to_vec();
        let want = CallKey::Named { method: "CreateContainer", parts };
        assert_eq!(key(RUNTIME, "CreateContainer", &request), want);
        request.config.as_mut().unwrap().envs[0].value = b"A\xff\xfeB".to_vec();
        let info = parse(RUNTIME, "CreateContainer", &request.encode_to_vec().into()).unwrap();
        assert_eq!((info.key, info.pod_uid.as_deref()), (Some(want), Some("u")));
    }

    #[test]
    fn the_attributes_of_a_span_name_the_pod_and_the_container_of_the_request() {
        let attributes = |method, message: Vec<u8>| {
            let info = parse(RUNTIME, method, &message.into()).unwrap();
            info.attributes().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>()
        };
        let metadata = v1::PodSandboxMetadata {
            name: "web".into(),
            uid: "u".into(),
            namespace: "default".into(),
            attempt: 0,
        };
        let config = v1::PodSandboxConfig { metadata: Some(metadata), ..Default::default() };
        let container = v1::ContainerMetadata { name: "c".into(), attempt: 0 };
        let create = v1::CreateContainerRequest {
            config: Some(v1::ContainerConfig { metadata: Some(container), ..Default::default() }),
            sandbox_config: Some(config),
            ..Default::default()
        };
        assert_eq!(
            attributes("CreateContainer", create.encode_to_vec()),
            ["k8s.pod.uid=u", "k8s.namespace.name=default", "k8s.pod.name=web", "k8s.container.name=c"]
        );
        let start = v1::StartContainerRequest { container_id: "c1".into() };
        assert_eq!(attributes("StartContainer", start.encode_to_vec()), ["container.id=c1"]);
        let stop = v1::StopPodSandboxRequest { pod_sandbox_id: "s1".into() };
        assert_eq!(attributes("StopPodSandbox", stop.encode_to_vec()), [""; 0]);
    }

    #[test]
    fn stops_with_other_grace_periods_and_pulls_with_other_credentials_have_other_keys() {
        let stop = |timeout| {
            let request = v1::StopContainerRequest { container_id: "c".into(), timeout };
            key(RUNTIME, "StopContainer", &request)
        };
        assert_eq!(stop(30), stop(30));
        assert_ne!(stop(30), stop(2));
        let pull = |auth: Option<&str>| {
            let auth = auth.map(|t| v1::AuthConfig { registry_token: t.into(), ..Default::default() });
            let image = v1::ImageSpec { image: "busybox".into(), ..Default::default() };
            key(IMAGE, "PullImage", &v1::PullImageRequest { image: Some(image), auth, sandbox_config: None })
        };
        assert_ne!(pull(None), pull(Some("x")));
    }

    #[test]
    fn the_key_of_methods_of_later_versions_is_their_first_field() {
        let request = v1::StartContainerRequest { container_id: "c1".into() };
        let expected = CallKey::Named { method: "UpdatePodSandboxResources", parts: vec!["c1".into()] };
        assert_eq!(key(RUNTIME, "UpdatePodSandboxResources", &request), expected);
    }

    #[test]
    fn an_undecodable_request_is_an_error_that_names_the_method() {
        let error = parse(RUNTIME, "StartContainer", &Bytes::from_static(&[0x0a, 0xff])).unwrap_err();
        assert!(error.to_string().contains("StartContainer"), "{error}");
    }

    #[test]
    fn the_registry_of_an_image_reference_is_its_host_or_docker_io() {
        for (image, host) in [
            ("busybox", "docker.io"),
            ("library/busybox:1", "docker.io"),
            ("registry.k8s.io/pause:3.9", "registry.k8s.io"),
            ("localhost/x", "localhost"),
            ("127.0.0.1:5000/x@sha256:00", "127.0.0.1:5000"),
            ("", "docker.io"),
        ] {
            assert_eq!(registry_host(image), host, "{image}");
        }
    }
}
