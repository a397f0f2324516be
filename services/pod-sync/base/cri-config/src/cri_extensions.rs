//! Messages and fields of the CRI that the generated bindings lack: UpdatePodSandboxResources, image volumes with a sub path,
//! stop signals, and variables whose value is not UTF-8. `KeyValue.value` is `bytes` since Kubernetes 1.36, which has the wire form of
//! the `string` before.
//!
//! In protobuf an embedded message may be sent in parts, which the receiver merges. These fields are sent in a second part of
//! the container's configuration. A runtime that does not know them ignores them, and then rejects the mount, which has no
//! host path.

use k8s_cri::v1 as cri;
use k8s_openapi::api::core::v1::Container;
use prost::Message as _;
use quintlet_model::stop_signal;

use super::env::Env;

/// The second part of a container's configuration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CriExtensions {
    /// Image mounts with their index among all mounts, in that order.
    pub mounts: Vec<(usize, ImageMount)>,
    /// `lifecycle.stopSignal`; 0 if it is not set, or without the feature gate ContainerStopSignals.
    pub stop_signal: i32,
    /// All variables, if the value of one is not UTF-8. The first part has none then.
    pub variables: Vec<Variable>,
}

/// An environment variable whose value need not be UTF-8 (`KeyValue`).
#[derive(Clone, PartialEq, prost::Message)]
pub struct Variable {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// Returns the variables as the bindings have them, or, if the value of one is not UTF-8, all of them for the second part.
#[must_use]
pub fn variables(env: &Env) -> (Vec<cri::KeyValue>, Vec<Variable>) {
    let text = |(name, value): (&String, &Vec<u8>)| {
        let value = std::str::from_utf8(value).ok()?.to_owned();
        Some(cri::KeyValue { key: name.clone(), value })
    };
    let bytes = |(name, value): (&String, &Vec<u8>)| Variable { name: name.clone(), value: value.clone() };
    match env.iter().map(text).collect() {
        Some(all) => (all, Vec::new()),
        None => (Vec::new(), env.iter().map(bytes).collect()),
    }
}

/// The second part on the wire. If there are image mounts it has all mounts, to keep their order.
#[derive(Clone, PartialEq, prost::Message)]
struct ConfigPart {
    #[prost(message, repeated, tag = "6")]
    variables: Vec<Variable>,
    #[prost(bytes = "vec", repeated, tag = "7")]
    mounts: Vec<Vec<u8>>,
    #[prost(int32, tag = "18")]
    stop_signal: i32,
}

/// A mount of an image volume.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ImageMount {
    #[prost(string, tag = "1")]
    pub container_path: String,
    /// Always true.
    #[prost(bool, tag = "3")]
    pub readonly: bool,
    /// A number of `MountPropagation`.
    #[prost(int32, tag = "5")]
    pub propagation: i32,
    /// User ID mappings of the pod, if it has a user namespace.
    #[prost(message, repeated, tag = "6")]
    pub uid_mappings: Vec<cri::IdMapping>,
    /// Group ID mappings of the pod, if it has a user namespace.
    #[prost(message, repeated, tag = "7")]
    pub gid_mappings: Vec<cri::IdMapping>,
    #[prost(bool, tag = "8")]
    pub recursive_read_only: bool,
    #[prost(message, optional, tag = "9")]
    pub image: Option<cri::ImageSpec>,
    /// Path within the image; empty for the whole image.
    #[prost(string, tag = "10")]
    pub image_sub_path: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct UpdatePodSandboxResourcesRequest {
    #[prost(string, tag = "1")]
    pub pod_sandbox_id: String,
    /// Overhead of the sandbox.
    #[prost(message, optional, tag = "2")]
    pub overhead: Option<cri::LinuxContainerResources>,
    /// Resources of all containers together.
    #[prost(message, optional, tag = "3")]
    pub resources: Option<cri::LinuxContainerResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct UpdatePodSandboxResourcesResponse {}

impl CriExtensions {
    /// Returns whether there is no second part.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A CreateContainer request with both parts.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateContainerRequestWithExtensions {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(bytes = "vec", repeated, tag = "2")]
    config: Vec<Vec<u8>>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<cri::PodSandboxConfig>,
}

impl CreateContainerRequestWithExtensions {
    /// Combines a request with the second part of its configuration.
    #[must_use]
    pub fn new(base: cri::CreateContainerRequest, extensions: &CriExtensions) -> Self {
        let mut config = base.config.unwrap_or_default();
        let mut part = ConfigPart {
            variables: extensions.variables.clone(),
            mounts: Vec::new(),
            stop_signal: extensions.stop_signal,
        };
        if !extensions.mounts.is_empty() {
            part.mounts = config.mounts.drain(..).map(|m| m.encode_to_vec()).collect();
            for (place, mount) in &extensions.mounts {
                part.mounts.insert((*place).min(part.mounts.len()), mount.encode_to_vec());
            }
        }
        Self {
            pod_sandbox_id: base.pod_sandbox_id,
            config: vec![config.encode_to_vec(), part.encode_to_vec()],
            sandbox_config: base.sandbox_config,
        }
    }
}

/// Returns the CRI's number of the container's stop signal; 0 if there is none or it is unknown.
#[must_use]
pub fn stop_signal(container: &Container) -> i32 {
    let name = container.lifecycle.as_ref().and_then(|l| l.stop_signal.as_deref());
    name.and_then(stop_signal::number).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_parts_of_an_extended_message_are_merged_and_older_receivers_read_the_known_fields() {
        let base = cri::CreateContainerRequest {
            pod_sandbox_id: "s".to_owned(),
            config: Some(cri::ContainerConfig {
                working_dir: "/w".to_owned(),
                mounts: vec![cri::Mount { container_path: "/a".to_owned(), ..cri::Mount::default() }],
                ..cri::ContainerConfig::default()
            }),
            sandbox_config: Some(cri::PodSandboxConfig { hostname: "h".to_owned(), ..Default::default() }),
        };
        let image = cri::ImageSpec { image: "sha256:1".to_owned(), ..cri::ImageSpec::default() };
        let mount = ImageMount {
            container_path: "/b".to_owned(),
            readonly: true,
            image: Some(image),
            image_sub_path: "sub".to_owned(),
            ..ImageMount::default()
        };
        let extensions =
            CriExtensions { mounts: vec![(0, mount.clone())], stop_signal: 23, ..CriExtensions::default() };
        let bytes = CreateContainerRequestWithExtensions::new(base.clone(), &extensions).encode_to_vec();

        let old = cri::CreateContainerRequest::decode(&bytes[..]).unwrap();
        let (got, want) = (old.config.unwrap(), base.config.unwrap());
        assert_eq!((old.pod_sandbox_id, old.sandbox_config), (base.pod_sandbox_id, base.sandbox_config));
        assert_eq!((&got.working_dir, &got.mounts[1]), (&want.working_dir, &want.mounts[0]));
        assert_eq!((got.mounts.len(), got.mounts[0].container_path.as_str()), (2, "/b"));

        #[derive(Clone, PartialEq, prost::Message)]
        struct New {
            #[prost(message, optional, tag = "2")]
            config: Option<ConfigPart>,
        }
        let config = New::decode(&bytes[..]).unwrap().config.unwrap();
        assert_eq!((config.stop_signal, &config.mounts[0]), (23, &mount.encode_to_vec()));
    }

    #[test]
    fn variables_are_sent_as_bytes_and_only_in_the_second_part_if_one_is_not_text() {
        let env =
            |value: &[u8]| Env::from([("A".to_owned(), b"1".to_vec()), ("B".to_owned(), value.to_vec())]);
        let (all, none) = variables(&env("é".as_bytes()));
        let texts: Vec<_> = all.iter().map(|v| (v.key.as_str(), v.value.as_str())).collect();
        assert_eq!((texts, none), (vec![("A", "1"), ("B", "é")], Vec::new()));

        let (none, all) = variables(&env(b"AB\xff\xfe\x80Z"));
        assert_eq!(none, []);
        let extensions = CriExtensions { variables: all, ..CriExtensions::default() };
        assert!(!extensions.is_empty());
        let config = cri::ContainerConfig { envs: none, ..cri::ContainerConfig::default() };
        let base =
            cri::CreateContainerRequest { config: Some(config), ..cri::CreateContainerRequest::default() };
        let bytes = CreateContainerRequestWithExtensions::new(base, &extensions).encode_to_vec();
        #[derive(Clone, PartialEq, prost::Message)]
        struct New {
            #[prost(message, optional, tag = "2")]
            config: Option<ConfigPart>,
        }
        let got = New::decode(&bytes[..]).unwrap().config.unwrap().variables;
        let got: Vec<_> = got.iter().map(|v| (v.name.as_str(), v.value.as_slice())).collect();
        assert_eq!(got, [("A", &b"1"[..]), ("B", b"AB\xff\xfe\x80Z")]);
    }

    #[test]
    fn a_stop_signal_is_converted_to_the_enum_of_the_cri() {
        let of = |name: Option<&str>| {
            let lifecycle = json!({"stopSignal": name});
            stop_signal(&serde_json::from_value(json!({"name": "c", "lifecycle": lifecycle})).unwrap())
        };
        for (name, want) in [
            (None, 0),
            (Some("SIGABRT"), 1),
            (Some("SIGTERM"), 23),
            (Some("SIGRTMAX"), 65),
            (Some("TERM"), 0),
        ] {
            assert_eq!(of(name), want, "{name:?}");
        }
    }
}
