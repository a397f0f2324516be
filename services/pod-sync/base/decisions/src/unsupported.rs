//! Fields of a pod that this node cannot enforce, and their effect. docs/pod-fields.md has a verdict for
//! every field.

use k8s_openapi::api::core::v1::{Container, DownwardAPIVolumeFile, HTTPGetAction, KeyToPath, Pod, Volume};
use quintlet_model::pod;
use quintlet_model::text::{self, shortened};

/// Event reason for a field that the node accepts and does not enforce.
pub const NOT_ENFORCED: &str = "FieldNotEnforced";

/// Length of the longest path and of the longest value in a message, in bytes.
const LONGEST_PART: usize = 200;
/// Most messages for one pod.
const MOST_MESSAGES: usize = 16;

/// Feature gates of fields of a pod that are off by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FieldGates {
    /// H2CContainerProbe: `httpGet.protocol` of probes.
    pub h2c_probes: bool,
    /// GRPCContainerProbeTLS: `grpc.mode` of probes.
    pub grpc_probe_tls: bool,
    /// VolumeBindMountOptions: `bindMountOptions` of containers. Without it, pods that have some are
    /// rejected.
    pub bind_mount_options: bool,
    /// EmptyDirVolumeMode: `emptyDir.mode`.
    pub empty_dir_mode: bool,
    /// AtomicWriteVolumeUserFields: `defaultUser` and `user` of configMap, secret, downwardAPI and projected
    /// volumes.
    pub file_owners: bool,
    /// InPlacePodVerticalScalingMemoryBackedVolumes: `emptyDir.sizeLimit` of memory-backed volumes follows a
    /// resize.
    pub memory_volume_resize: bool,
    /// InPlacePodVerticalScalingSchedulerPreemption: no pod is preempted on the node for a resize.
    pub scheduler_preempts_for_resizes: bool,
}

/// Returns a message for each field that is accepted and not enforced, with its path and value.
#[must_use]
pub fn not_enforced(pod: &Pod, gates: FieldGates) -> Vec<String> {
    let mut out = unread_fields(pod, gates);
    if let Some(others) = out.len().checked_sub(MOST_MESSAGES).filter(|others| *others > 0) {
        out.truncate(MOST_MESSAGES);
        out.push(format!("{others} more fields are not enforced"));
    }
    out
}

/// Returns a message for each field that is set and that Kubernetes 1.37 has behind a feature gate that is
/// off.
fn unread_fields(pod: &Pod, gates: FieldGates) -> Vec<String> {
    let (spec, mut out) = (pod::spec(pod), Vec::new());
    for (list, containers) in
        [("initContainers", pod::init_containers(pod)), ("containers", &spec.containers)]
    {
        containers.iter().for_each(|container| unread_of_container(list, container, gates, &mut out));
    }
    spec.volumes.iter().flatten().for_each(|volume| unread_of_volume(volume, gates, &mut out));
    out
}

/// Adds a message if the field at `path` is set. An API server with its defaults drops such fields.
fn unread(out: &mut Vec<String>, path: &str, value: Option<impl std::fmt::Display>) {
    if let Some(value) = value {
        // The text of an author may have megabytes.
        let value = shortened(value.to_string(), LONGEST_PART);
        let path = text::cut(path, LONGEST_PART);
        out.push(format!("{path}: {value} is not enforced: this node does not have the feature"));
    }
}

/// Returns the protocol of a request if it is not the default.
fn protocol(http: Option<&HTTPGetAction>) -> Option<&str> {
    http?.protocol.as_deref().filter(|protocol| *protocol != "HTTP1")
}

fn unread_of_container(list: &str, container: &Container, gates: FieldGates, out: &mut Vec<String>) {
    let path = format!("spec.{list}{{{}}}", container.name);
    for (name, probe) in [
        ("livenessProbe", &container.liveness_probe),
        ("readinessProbe", &container.readiness_probe),
        ("startupProbe", &container.startup_probe),
    ] {
        let Some(probe) = probe else { continue };
        let protocol = protocol(probe.http_get.as_ref()).filter(|_| !gates.h2c_probes);
        unread(out, &format!("{path}.{name}.httpGet.protocol"), protocol);
        let mode = probe.grpc.as_ref().and_then(|grpc| grpc.mode.as_deref());
        let mode = mode.filter(|mode| *mode != "Plaintext" && !gates.grpc_probe_tls);
        unread(out, &format!("{path}.{name}.grpc.mode"), mode);
    }
    // The kubelet has HTTP/2 for probes only.
    let lifecycle = container.lifecycle.as_ref();
    for (name, hook) in [
        ("postStart", lifecycle.and_then(|hooks| hooks.post_start.as_ref())),
        ("preStop", lifecycle.and_then(|hooks| hooks.pre_stop.as_ref())),
    ] {
        let protocol = protocol(hook.and_then(|hook| hook.http_get.as_ref()));
        unread(out, &format!("{path}.lifecycle.{name}.httpGet.protocol"), protocol);
    }
}

fn unread_of_volume(volume: &Volume, gates: FieldGates, out: &mut Vec<String>) {
    let path = format!("spec.volumes{{{}}}", volume.name);
    let mode = volume.empty_dir.as_ref().and_then(|source| source.mode).filter(|_| !gates.empty_dir_mode);
    unread(out, &format!("{path}.emptyDir.mode"), mode.map(|mode| format!("{mode:#o}")));
    if gates.file_owners {
        return;
    }
    if let Some(source) = &volume.config_map {
        unread(out, &format!("{path}.configMap.defaultUser"), source.default_user);
        unread(out, &format!("{path}.configMap.items.user"), user_of_keys(&source.items));
    }
    if let Some(source) = &volume.secret {
        unread(out, &format!("{path}.secret.defaultUser"), source.default_user);
        unread(out, &format!("{path}.secret.items.user"), user_of_keys(&source.items));
    }
    if let Some(source) = &volume.downward_api {
        unread(out, &format!("{path}.downwardAPI.defaultUser"), source.default_user);
        unread(out, &format!("{path}.downwardAPI.items.user"), user_of_files(&source.items));
    }
    let Some(projected) = &volume.projected else { return };
    unread(out, &format!("{path}.projected.defaultUser"), projected.default_user);
    for source in projected.sources.iter().flatten() {
        for user in [
            source.config_map.as_ref().and_then(|source| user_of_keys(&source.items)),
            source.secret.as_ref().and_then(|source| user_of_keys(&source.items)),
            source.downward_api.as_ref().and_then(|source| user_of_files(&source.items)),
            source.service_account_token.as_ref().and_then(|source| source.user),
            source.cluster_trust_bundle.as_ref().and_then(|source| source.user),
            source.pod_certificate.as_ref().and_then(|source| source.user),
        ] {
            unread(out, &format!("{path}.projected.sources.user"), user);
        }
    }
}

fn user_of_keys(items: &Option<Vec<KeyToPath>>) -> Option<i64> {
    items.iter().flatten().find_map(|item| item.user)
}

fn user_of_files(items: &Option<Vec<DownwardAPIVolumeFile>>) -> Option<i64> {
    items.iter().flatten().find_map(|item| item.user)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use quintlet_testkit::pods::pod_json;

    #[test]
    fn both_change_policies_of_selinux_labels_are_enforced() {
        for policy in ["MountOption", "Recursive"] {
            let context = json!({"seLinuxChangePolicy": policy});
            let pod = pod_json(json!({"containers": [{"name": "c"}], "securityContext": context}));
            assert_eq!(not_enforced(&pod, FieldGates::default()), Vec::<String>::new(), "{policy}");
        }
    }

    #[test]
    fn fields_behind_gates_that_are_off_are_named_wherever_they_are_set() {
        let http = |protocol: &str| json!({"httpGet": {"port": 80, "protocol": protocol}});
        let keys = json!([{"key": "k", "path": "p", "user": 7}]);
        let files = json!([{"path": "p", "fieldRef": {"fieldPath": "metadata.name"}, "user": 8}]);
        let pod = pod_json(json!({
            "initContainers": [{"name": "i", "startupProbe": {"grpc": {"port": 1, "mode": "TLS"}}}],
            "containers": [{
                "name": "c",
                "startupProbe": {"grpc": {"port": 1, "mode": "Plaintext"}},
                "livenessProbe": http("HTTP2"),
                "readinessProbe": http("HTTP2"),
                "lifecycle": {"postStart": http("HTTP2"), "preStop": http("HTTP2")},
            }],
            "volumes": [
                {"name": "e", "emptyDir": {"mode": 0o750}},
                {"name": "c", "configMap": {"name": "c", "defaultUser": 1, "items": keys}},
                {"name": "s", "secret": {"secretName": "s", "defaultUser": 2, "items": keys}},
                {"name": "d", "downwardAPI": {"defaultUser": 3, "items": files}},
                {"name": "p", "projected": {"defaultUser": 4, "sources": [
                    {"configMap": {"name": "c", "items": keys}},
                    {"secret": {"name": "s", "items": keys}},
                    {"downwardAPI": {"items": files}},
                    {"serviceAccountToken": {"path": "t", "user": 9}},
                    {"clusterTrustBundle": {"path": "b", "user": 10}},
                    {"podCertificate": {"signerName": "s", "keyType": "ED25519", "user": 11}},
                ]}},
            ],
        }));
        let want = [
            "spec.initContainers{i}.startupProbe.grpc.mode: TLS",
            "spec.containers{c}.livenessProbe.httpGet.protocol: HTTP2",
            "spec.containers{c}.readinessProbe.httpGet.protocol: HTTP2",
            "spec.containers{c}.lifecycle.postStart.httpGet.protocol: HTTP2",
            "spec.containers{c}.lifecycle.preStop.httpGet.protocol: HTTP2",
            "spec.volumes{e}.emptyDir.mode: 0o750",
            "spec.volumes{c}.configMap.defaultUser: 1",
            "spec.volumes{c}.configMap.items.user: 7",
            "spec.volumes{s}.secret.defaultUser: 2",
            "spec.volumes{s}.secret.items.user: 7",
            "spec.volumes{d}.downwardAPI.defaultUser: 3",
            "spec.volumes{d}.downwardAPI.items.user: 8",
            "spec.volumes{p}.projected.defaultUser: 4",
            "spec.volumes{p}.projected.sources.user: 7",
            "spec.volumes{p}.projected.sources.user: 7",
            "spec.volumes{p}.projected.sources.user: 8",
            "spec.volumes{p}.projected.sources.user: 9",
            "spec.volumes{p}.projected.sources.user: 10",
            "spec.volumes{p}.projected.sources.user: 11",
        ];
        let want = want.map(|text| format!("{text} is not enforced: this node does not have the feature"));
        let none = FieldGates::default();
        assert_eq!(unread_fields(&pod, none), want);
        let messages = not_enforced(&pod, none);
        assert_eq!(messages.len(), MOST_MESSAGES + 1);
        assert_eq!(messages[MOST_MESSAGES], "3 more fields are not enforced");

        let left = |gates| unread_fields(&pod, gates);
        let h2c = left(FieldGates { h2c_probes: true, ..none });
        assert_eq!(h2c.len(), want.len() - 2, "hooks have no HTTP/2: {h2c:?}");
        assert_eq!(left(FieldGates { grpc_probe_tls: true, ..none }), want[1..]);
        let modes = left(FieldGates { empty_dir_mode: true, ..none });
        assert!(modes.len() == want.len() - 1 && modes.iter().all(|text| !text.contains("mode: 0o")));
        let owners = left(FieldGates { file_owners: true, ..none });
        assert_eq!(owners, want[..6]);

        let protocol = "x".repeat(1 << 20);
        let pod = pod_json(json!({"containers": [{"name": "c", "livenessProbe": http(&protocol)}]}));
        let messages = not_enforced(&pod, none);
        assert!(messages.len() == 1 && messages[0].len() < 500, "{}", messages[0].len());
    }

    #[test]
    fn the_default_protocol_of_a_request_is_not_reported() {
        let http = json!({"httpGet": {"port": 80, "protocol": "HTTP1"}});
        let container = json!({"name": "c", "livenessProbe": http, "lifecycle": {"preStop": http}});
        let pod = pod_json(json!({"containers": [container]}));
        assert_eq!(not_enforced(&pod, FieldGates::default()), Vec::<String>::new());
    }
}
