//! What the proxy reads from a request: its key, pod, registry and seconds. The bytes sent on are the caller's.
use bytes::Bytes;
use k8s_cri::v1;
use prost::Message as _;

use crate::policy::{IMAGE, RUNTIME};

/// Under which mutations in flight are told apart.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Key {
    /// What makes the call unique: pod uid, name and attempt, or an id. Other bytes under it are a conflict.
    Named {
        /// The method.
        method: &'static str,
        /// Its parts.
        parts: Vec<String>,
    },
    /// Only an identical call is the same one.
    Exact {
        /// The method.
        method: &'static str,
        /// The request.
        bytes: Bytes,
    },
}

/// What a request says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// Its key; None for calls that are not joined.
    pub key: Option<Key>,
    /// The pod, where the request names it.
    pub pod_uid: Option<String>,
    /// The registry host of a pull.
    pub registry: Option<String>,
    /// The seconds the request names (StopContainer, ExecSync, CheckpointContainer).
    pub seconds: Option<i64>,
}

/// Requests whose first field is the id of what they change. Ids of later versions of the CRI are there as well.
#[derive(Clone, PartialEq, prost::Message)]
struct ById {
    #[prost(string, tag = "1")]
    id: String,
}

/// Why a request has no key.
#[derive(Debug, thiserror::Error)]
#[error("the request of {method} cannot be read")]
pub struct Unreadable {
    method: &'static str,
    source: prost::DecodeError,
}

/// Reads the message of a mutation or of a call with seconds in it.
///
/// # Errors
/// When it is not the protobuf message it has to be: what cannot be read cannot be fenced.
pub fn read(service: &str, method: &'static str, message: &Bytes) -> Result<Facts, Unreadable> {
    let unreadable = |source| Unreadable { method, source };
    let named = |parts: Vec<String>| Some(Key::Named { method, parts });
    let exact = || Some(Key::Exact { method, bytes: message.clone() });
    let bytes = message.clone();
    let facts = match (service, method) {
        (RUNTIME, "RunPodSandbox") => {
            let request = v1::RunPodSandboxRequest::decode(bytes).map_err(unreadable)?;
            let metadata = request.config.and_then(|c| c.metadata).unwrap_or_default();
            let parts =
                vec![metadata.uid.clone(), metadata.namespace, metadata.name, metadata.attempt.to_string()];
            Facts { key: named(parts), pod_uid: some(metadata.uid), ..Facts::default() }
        }
        (RUNTIME, "CreateContainer") => {
            let request = v1::CreateContainerRequest::decode(bytes).map_err(unreadable)?;
            let sandbox = request.sandbox_config.and_then(|c| c.metadata).unwrap_or_default();
            let container = request.config.and_then(|c| c.metadata).unwrap_or_default();
            let parts = vec![
                sandbox.uid.clone(),
                request.pod_sandbox_id,
                container.name,
                container.attempt.to_string(),
            ];
            Facts { key: named(parts), pod_uid: some(sandbox.uid), ..Facts::default() }
        }
        // A stop with other seconds is another call: a shorter grace must reach the runtime while the first waits.
        (RUNTIME, "StopContainer") => {
            let request = v1::StopContainerRequest::decode(bytes).map_err(unreadable)?;
            Facts { key: exact(), seconds: Some(request.timeout), ..Facts::default() }
        }
        // Two hooks of one container may run at once.
        (RUNTIME, "ExecSync") => {
            let request = v1::ExecSyncRequest::decode(bytes).map_err(unreadable)?;
            Facts { key: exact(), seconds: Some(request.timeout), ..Facts::default() }
        }
        (RUNTIME, "CheckpointContainer") => {
            let request = v1::CheckpointContainerRequest::decode(bytes).map_err(unreadable)?;
            Facts {
                key: named(vec![request.container_id]),
                seconds: Some(request.timeout),
                ..Facts::default()
            }
        }
        // Credentials and pod differ from call to call; the runtime itself fetches a layer once.
        (IMAGE, "PullImage") => {
            let request = v1::PullImageRequest::decode(bytes).map_err(unreadable)?;
            let image = request.image.map(|i| i.image).unwrap_or_default();
            let uid = request.sandbox_config.and_then(|c| c.metadata).map(|m| m.uid).unwrap_or_default();
            Facts {
                key: exact(),
                pod_uid: some(uid),
                registry: Some(registry_host(&image).to_owned()),
                seconds: None,
            }
        }
        (IMAGE, "RemoveImage") => {
            let request = v1::RemoveImageRequest::decode(bytes).map_err(unreadable)?;
            Facts { key: named(vec![request.image.map(|i| i.image).unwrap_or_default()]), ..Facts::default() }
        }
        (RUNTIME, "UpdateRuntimeConfig") => Facts { key: named(Vec::new()), ..Facts::default() },
        (_, _) => {
            let request = ById::decode(bytes).map_err(unreadable)?;
            Facts { key: named(vec![request.id]), ..Facts::default() }
        }
    };
    Ok(facts)
}

fn some(text: String) -> Option<String> {
    (!text.is_empty()).then_some(text)
}

/// The host of an image reference, as the container tools split it: the first component counts only if it has a
/// dot or a colon or is `localhost`.
#[must_use]
pub fn registry_host(image: &str) -> &str {
    match image.split_once('/') {
        Some((first, _)) if first == "localhost" || first.contains(['.', ':']) => first,
        Some(_) | None => "docker.io",
    }
}

/// Whether a request asks the runtime for more than the CRI has.
///
/// # Errors
/// The message cannot be read. It must not be sent then: what a runtime reads in it is not known.
pub fn asks_verbosely(method: &str, message: &Bytes) -> Result<bool, prost::DecodeError> {
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

    fn key(service: &str, method: &'static str, message: &impl prost::Message) -> Key {
        read(service, method, &message.encode_to_vec().into()).unwrap().key.unwrap()
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
    fn a_sandbox_is_keyed_by_pod_and_attempt_alone() {
        let of = |uid, attempt, hostname| key(RUNTIME, "RunPodSandbox", &sandbox(uid, attempt, hostname));
        assert_eq!(of("u", 0, "a"), of("u", 0, "b"));
        assert_ne!(of("u", 0, "a"), of("u", 1, "a"));
        assert_ne!(of("u", 0, "a"), of("v", 0, "a"));
    }

    #[test]
    fn stops_with_other_seconds_and_pulls_for_other_pods_are_other_calls() {
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
    fn methods_of_later_versions_are_keyed_by_their_first_field() {
        let request = v1::StartContainerRequest { container_id: "c1".into() };
        let expected = Key::Named { method: "UpdatePodSandboxResources", parts: vec!["c1".into()] };
        assert_eq!(key(RUNTIME, "UpdatePodSandboxResources", &request), expected);
    }

    #[test]
    fn a_request_that_is_no_protobuf_is_an_error_that_names_the_method() {
        let error = read(RUNTIME, "StartContainer", &Bytes::from_static(&[0x0a, 0xff])).unwrap_err();
        assert!(error.to_string().contains("StartContainer"), "{error}");
    }

    #[test]
    fn hosts_of_references() {
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
