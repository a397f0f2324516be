//! Builds the CRI configuration of a container (`pkg/kubelet/kuberuntime: generateContainerConfig`).

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::core::v1::{Container, EphemeralContainer, Pod};
use pod_sync_layout::{HandlerFeatures, NodeSettings, paths};
use quintlet_cri_api::v1::{
    CdiDevice, ContainerConfig, ContainerMetadata, Device, ImageSpec, KeyValue, LinuxContainerConfig, Mount,
    UserNamespace,
};
use quintlet_model::hash::container_hash;
use quintlet_model::ids::PodRef;
use quintlet_model::{labels, stop_signal};

use super::env::{Env, expand_argument};
use super::error::ConfigError;
use super::expand::Budget;
use super::resources::ContainerPlacement;
use super::security::ImageUser;
use super::{go_json, resources, security};

/// The part of a container's configuration that the plugins of its devices add (`DeviceRunContainerOptions`).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeviceAdditions {
    /// Variables, which those of the container override.
    pub envs: BTreeMap<String, Vec<u8>>,
    /// Host paths that the devices need. They precede the container's own mounts.
    pub mounts: Vec<Mount>,
    /// Device nodes, with their paths in the container and their permissions.
    pub devices: Vec<Device>,
    /// Annotations, which those of the node agent override.
    pub annotations: BTreeMap<String, String>,
    /// Qualified names of CDI devices.
    pub cdi_devices: Vec<String>,
}

/// Input of [`container_config`].
#[derive(Debug, Clone, Copy)]
pub struct ContainerInput<'a> {
    /// The pod, with its allocated resources in the spec.
    pub pod: &'a Pod,
    /// Name, namespace and UID.
    pub names: &'a PodRef,
    /// The container. An ephemeral one is converted by [`container_of_ephemeral`].
    pub container: &'a Container,
    /// Restart count of the new instance.
    pub restarts: u32,
    /// Image reference that the pull returned.
    pub image_ref: &'a str,
    /// User in the image's configuration.
    pub image_user: &'a ImageUser,
    /// Directories and settings of the node.
    pub node: &'a NodeSettings,
    /// Environment variables of [`super::env::make_env`].
    pub env: &'a Env,
    /// Mounts of [`super::mounts::make_mounts`].
    pub mounts: &'a [Mount],
    /// Block devices of [`super::mounts::block_devices`].
    pub devices: &'a [Device],
    /// The part that the plugins of the container's devices add.
    pub additions: &'a DeviceAdditions,
    /// The CPUs and NUMA nodes of the container.
    pub placement: &'a ContainerPlacement,
    /// Handler of the pod's RuntimeClass; empty for the default.
    pub runtime_handler: &'a str,
    /// Features of that handler.
    pub features: HandlerFeatures,
    /// ID mappings of the pod, if it has a user namespace.
    pub userns: Option<&'a UserNamespace>,
    /// Supplemental groups that the PersistentVolumes of the pod add.
    pub volume_groups: &'a [i64],
    /// ID of the container whose PID namespace an ephemeral container joins.
    pub target_id: Option<&'a str>,
}

/// Returns the configuration of a container.
///
/// # Errors
/// The message becomes that of waiting reason `CreateContainerConfigError`.
pub fn container_config(input: ContainerInput<'_>) -> Result<ContainerConfig, ConfigError> {
    let ContainerInput { pod, names, container, node, env, additions, .. } = input;
    security::verify_run_as_non_root(pod, container, input.image_user)?;
    let mut budget = Budget::new("command and args");
    let mut expanded = |list: &Option<Vec<String>>| -> Result<Vec<String>, ConfigError> {
        list.iter().flatten().map(|a| expand_argument(a, env, &mut budget)).collect()
    };
    let (command, args) = (expanded(&container.command)?, expanded(&container.args)?);
    let namespaces = security::namespaces(pod, input.features, input.runtime_handler, input.userns)?;
    let context = security::container_context(
        pod,
        container,
        input.image_user,
        node,
        namespaces,
        input.target_id,
        input.volume_groups,
    )?;
    let mut annotations: HashMap<String, String> = additions.annotations.clone().into_iter().collect();
    annotations.extend(container_annotations(pod, container, input.restarts)?);
    let key_value = |(key, value): (&String, &Vec<u8>)| KeyValue { key: key.clone(), value: value.clone() };
    Ok(ContainerConfig {
        metadata: Some(ContainerMetadata { name: container.name.clone(), attempt: input.restarts }),
        image: Some(ImageSpec {
            image: input.image_ref.to_owned(),
            user_specified_image: container.image.clone().unwrap_or_default(),
            ..ImageSpec::default()
        }),
        command,
        args,
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: additions.envs.iter().chain(env.iter()).map(key_value).collect(),
        mounts: additions.mounts.iter().chain(input.mounts).cloned().collect(),
        devices: additions.devices.iter().chain(input.devices).cloned().collect(),
        cdi_devices: additions.cdi_devices.iter().map(|name| CdiDevice { name: name.clone() }).collect(),
        labels: container_labels(names, container),
        annotations,
        log_path: paths::container_log_path(&container.name, input.restarts),
        stdin: container.stdin.unwrap_or(false),
        stdin_once: container.stdin_once.unwrap_or(false),
        tty: container.tty.unwrap_or(false),
        stop_signal: if node.stop_signals { stop_signal(container) } else { 0 },
        linux: Some(LinuxContainerConfig {
            resources: Some(resources::container_resources(pod, container, node, input.placement)),
            security_context: Some(context),
        }),
        ..ContainerConfig::default()
    })
}

/// Returns the CRI's number of the container's stop signal; 0 if there is none or it is unknown.
fn stop_signal(container: &Container) -> i32 {
    let name = container.lifecycle.as_ref().and_then(|l| l.stop_signal.as_deref());
    name.and_then(stop_signal::number).unwrap_or(0)
}

fn container_labels(names: &PodRef, container: &Container) -> HashMap<String, String> {
    [
        (labels::POD_NAME, names.name.to_string()),
        (labels::POD_NAMESPACE, names.namespace.to_string()),
        (labels::POD_UID, names.uid.to_string()),
        (labels::CONTAINER_NAME, container.name.clone()),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v))
    .collect()
}

// The container is killed according to these annotations if the pod's spec is lost.
fn container_annotations(
    pod: &Pod,
    container: &Container,
    restarts: u32,
) -> Result<HashMap<String, String>, ConfigError> {
    let json = |what: &str, value: Result<String, serde_json::Error>| {
        value.map_err(|e| ConfigError::invalid(format!("cannot write {what}: {e}")))
    };
    let image = container.image.as_deref().unwrap_or_default();
    let text = |t: &Option<String>| t.clone().unwrap_or_default();
    let mut out: HashMap<String, String> = [
        (labels::CONTAINER_HASH, container_hash(&container.name, image)),
        (labels::RESTART_COUNT, restarts.to_string()),
        (labels::TERMINATION_MESSAGE_PATH, text(&container.termination_message_path)),
        (labels::TERMINATION_MESSAGE_POLICY, text(&container.termination_message_policy)),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v))
    .collect();
    if let Some(grace) = pod.metadata.deletion_grace_period_seconds {
        out.insert(labels::POD_DELETION_GRACE.to_owned(), grace.to_string());
    }
    if let Some(grace) = quintlet_model::pod::spec(pod).termination_grace_period_seconds {
        out.insert(labels::POD_TERMINATION_GRACE.to_owned(), grace.to_string());
    }
    if let Some(hook) = container.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref()) {
        let hook = json("preStop handler", go_json::handler(hook))?;
        out.insert(labels::PRE_STOP_HANDLER.to_owned(), hook);
    }
    if let Some(ports) = container.ports.as_ref().filter(|p| !p.is_empty()) {
        out.insert(labels::CONTAINER_PORTS.to_owned(), json("ports", go_json::ports(ports))?);
    }
    Ok(out)
}

/// Returns the fields that an ephemeral container shares with a container.
#[must_use]
pub fn container_of_ephemeral(e: &EphemeralContainer) -> Container {
    let e = e.clone();
    Container {
        args: e.args,
        command: e.command,
        env: e.env,
        env_from: e.env_from,
        image: e.image,
        image_pull_policy: e.image_pull_policy,
        lifecycle: e.lifecycle,
        liveness_probe: e.liveness_probe,
        name: e.name,
        ports: e.ports,
        readiness_probe: e.readiness_probe,
        resize_policy: e.resize_policy,
        resources: e.resources,
        restart_policy: e.restart_policy,
        restart_policy_rules: e.restart_policy_rules,
        security_context: e.security_context,
        startup_probe: e.startup_probe,
        stdin: e.stdin,
        stdin_once: e.stdin_once,
        termination_message_path: e.termination_message_path,
        termination_message_policy: e.termination_message_policy,
        tty: e.tty,
        volume_devices: e.volume_devices,
        volume_mounts: e.volume_mounts,
        working_dir: e.working_dir,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    fn build(container: Value) -> Result<ContainerConfig, String> {
        build_on(&NodeSettings::default(), container)
    }

    fn build_on(node: &NodeSettings, container: Value) -> Result<ContainerConfig, String> {
        build_with(node, &DeviceAdditions::default(), container)
    }

    fn build_with(
        node: &NodeSettings,
        additions: &DeviceAdditions,
        container: Value,
    ) -> Result<ContainerConfig, String> {
        let mut p = pod_of(json!({"terminationGracePeriodSeconds": 30, "containers": [container]}));
        p.metadata.deletion_grace_period_seconds = Some(5);
        let env = [("A".to_owned(), b"1".to_vec()), ("B64".to_owned(), b"\xff\x00".to_vec())].into();
        container_config(ContainerInput {
            pod: &p,
            names: &quintlet_model::pod::pod_ref(&p).unwrap(),
            container: &p.spec.as_ref().unwrap().containers[0],
            restarts: 3,
            image_ref: "sha256:abc",
            image_user: &ImageUser::Uid(0),
            node,
            env: &env,
            devices: &[],
            additions,
            placement: &ContainerPlacement::default(),
            mounts: &[],
            runtime_handler: "",
            features: HandlerFeatures::default(),
            userns: None,
            volume_groups: &[],
            target_id: None,
        })
        .map_err(|e| e.to_string())
    }

    #[test]
    fn what_device_plugins_add_comes_first_and_the_container_overrides_it() {
        let text = |text: &str| text.to_owned();
        let additions = DeviceAdditions {
            envs: [(text("A"), b"device".to_vec()), (text("DEVICE"), b"d1".to_vec())].into(),
            mounts: vec![Mount { container_path: text("/device"), ..Mount::default() }],
            devices: vec![Device { container_path: text("/dev/d1"), ..Device::default() }],
            annotations: [(text("a.com/d"), text("d1")), (text(labels::RESTART_COUNT), text("99"))].into(),
            cdi_devices: vec![text("a.com/d=1")],
        };
        let container = json!({"name": "foo", "image": "bar"});
        let c = build_with(&NodeSettings::default(), &additions, container).unwrap();
        let envs: Vec<_> = c.envs.iter().map(|v| (v.key.as_str(), v.value.as_slice())).collect();
        // The runtime uses the last of two variables with one name.
        assert_eq!(envs, [("A", &b"device"[..]), ("DEVICE", b"d1"), ("A", b"1"), ("B64", b"\xff\x00")]);
        assert_eq!(c.mounts.len() + c.devices.len(), 2);
        assert_eq!(c.cdi_devices, [CdiDevice { name: text("a.com/d=1") }]);
        assert_eq!(c.annotations["a.com/d"], "d1");
        assert_eq!(c.annotations[labels::RESTART_COUNT], "3");
    }

    #[test]
    fn a_container_has_the_annotations_that_the_kubelet_writes() {
        let c = build(json!({"name": "foo", "image": "bar", "command": ["sh", "$(A)", "$$(A)", "$(B)"],
            "args": ["x$(A)"], "workingDir": "/w", "stdin": true, "tty": true,
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File",
            "ports": [{"containerPort": 80}],
            "lifecycle": {"preStop": {"exec": {"command": ["true"]}}}}))
        .unwrap();
        assert_eq!(c.metadata.unwrap(), ContainerMetadata { name: "foo".into(), attempt: 3 });
        let image = c.image.unwrap();
        assert_eq!((image.image.as_str(), image.user_specified_image.as_str()), ("sha256:abc", "bar"));
        assert_eq!(c.command, ["sh", "1", "$(A)", "$(B)"]);
        assert_eq!(c.args, ["x1"]);
        assert_eq!(c.log_path, "foo/3.log");
        assert_eq!((c.stdin, c.stdin_once, c.tty, c.working_dir.as_str()), (true, false, true, "/w"));
        let envs: Vec<_> = c.envs.iter().map(|v| (v.key.as_str(), v.value.as_slice())).collect();
        assert_eq!(envs, [("A", &b"1"[..]), ("B64", &b"\xff\x00"[..])]);
        assert_eq!(c.labels.len(), 4);
        assert_eq!(c.labels[labels::CONTAINER_NAME], "foo");
        for (key, want) in [
            (labels::CONTAINER_HASH, "11a6d6d6"),
            (labels::RESTART_COUNT, "3"),
            (labels::TERMINATION_MESSAGE_PATH, "/dev/termination-log"),
            (labels::TERMINATION_MESSAGE_POLICY, "File"),
            (labels::POD_DELETION_GRACE, "5"),
            (labels::POD_TERMINATION_GRACE, "30"),
            (labels::PRE_STOP_HANDLER, "{\"exec\":{\"command\":[\"true\"]}}"),
            (labels::CONTAINER_PORTS, "[{\"containerPort\":80}]"),
        ] {
            assert_eq!(c.annotations[key], want, "{key}");
        }
    }

    #[test]
    fn a_stop_signal_is_converted_to_the_enum_of_the_cri_with_the_feature_gate() {
        let number = |gate: bool, name: Option<&str>| {
            let node = NodeSettings { stop_signals: gate, ..NodeSettings::default() };
            let lifecycle = json!({"stopSignal": name});
            build_on(&node, json!({"name": "c", "lifecycle": lifecycle})).unwrap().stop_signal
        };
        for (name, want) in [
            (None, 0),
            (Some("SIGABRT"), 1),
            (Some("SIGTERM"), 23),
            (Some("SIGRTMAX"), 65),
            (Some("TERM"), 0),
        ] {
            assert_eq!(number(true, name), want, "{name:?}");
            assert_eq!(number(false, name), 0, "{name:?}");
        }
    }

    #[test]
    fn a_container_that_must_not_be_root_is_refused() {
        let got = build(json!({"name": "c", "securityContext": {"runAsNonRoot": true}}));
        assert!(got.unwrap_err().starts_with("container has runAsNonRoot and image will run as root"));
    }
}
