//! Fields of a pod that this node cannot enforce, and their effect. docs/pod-fields.md has a verdict for every field.

use k8s_openapi::api::core::v1::{Container, DownwardAPIVolumeFile, KeyToPath, Pod, Volume};
use quintlet_model::pod;
use quintlet_model::text::{self, shortened};

/// Event reason for a field that the node accepts and does not enforce.
pub const NOT_ENFORCED: &str = "FieldNotEnforced";

/// Length of the longest path and of the longest value in a message, in bytes.
const LONGEST_PART: usize = 200;
/// Most messages for one pod.
const MOST_MESSAGES: usize = 16;

/// Returns a message for each field that is accepted and not enforced, with its path and value.
#[must_use]
pub fn not_enforced(pod: &Pod) -> Vec<String> {
    let mut out = unread_fields(pod);
    if let Some(others) = out.len().checked_sub(MOST_MESSAGES).filter(|others| *others > 0) {
        out.truncate(MOST_MESSAGES);
        out.push(format!("{others} more fields are not enforced"));
    }
    out
}

/// Returns a message for each field that is set and that Kubernetes 1.37 has behind a feature gate that is off by default.
fn unread_fields(pod: &Pod) -> Vec<String> {
    let (spec, mut out) = (pod::spec(pod), Vec::new());
    for (list, containers) in
        [("initContainers", pod::init_containers(pod)), ("containers", &spec.containers)]
    {
        containers.iter().for_each(|container| unread_of_container(list, container, &mut out));
    }
    spec.volumes.iter().flatten().for_each(|volume| unread_of_volume(volume, &mut out));
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

fn unread_of_container(list: &str, container: &Container, out: &mut Vec<String>) {
    let path = format!("spec.{list}{{{}}}", container.name);
    for mount in container.volume_mounts.iter().flatten() {
        let options = mount.bind_mount_options.as_ref().map(|options| options.join(","));
        unread(out, &format!("{path}.volumeMounts{{{}}}.bindMountOptions", mount.mount_path), options);
    }
    for (name, probe) in [
        ("livenessProbe", &container.liveness_probe),
        ("readinessProbe", &container.readiness_probe),
        ("startupProbe", &container.startup_probe),
    ] {
        let Some(probe) = probe else { continue };
        let protocol = probe.http_get.as_ref().and_then(|http| http.protocol.as_deref());
        unread(out, &format!("{path}.{name}.httpGet.protocol"), protocol);
        let mode =
            probe.grpc.as_ref().and_then(|grpc| grpc.mode.as_deref()).filter(|mode| *mode != "Plaintext");
        unread(out, &format!("{path}.{name}.grpc.mode"), mode);
    }
    let lifecycle = container.lifecycle.as_ref();
    for (name, hook) in [
        ("postStart", lifecycle.and_then(|hooks| hooks.post_start.as_ref())),
        ("preStop", lifecycle.and_then(|hooks| hooks.pre_stop.as_ref())),
    ] {
        let protocol = hook.and_then(|hook| hook.http_get.as_ref()?.protocol.as_deref());
        unread(out, &format!("{path}.lifecycle.{name}.httpGet.protocol"), protocol);
    }
}

fn unread_of_volume(volume: &Volume, out: &mut Vec<String>) {
    let path = format!("spec.volumes{{{}}}", volume.name);
    let mode = volume.empty_dir.as_ref().and_then(|source| source.mode);
    unread(out, &format!("{path}.emptyDir.mode"), mode.map(|mode| format!("{mode:#o}")));
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
            assert_eq!(not_enforced(&pod), Vec::<String>::new(), "{policy}");
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
                "volumeMounts": [{"name": "e", "mountPath": "/e", "bindMountOptions": ["noexec", "nodev"]}],
                "startupProbe": {"grpc": {"port": 1, "mode": "Plaintext"}},
                "livenessProbe": http("H2C"),
                "readinessProbe": http("H2C"),
                "lifecycle": {"postStart": http("H2C"), "preStop": http("H2C")},
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
            "spec.containers{c}.volumeMounts{/e}.bindMountOptions: noexec,nodev",
            "spec.containers{c}.livenessProbe.httpGet.protocol: H2C",
            "spec.containers{c}.readinessProbe.httpGet.protocol: H2C",
            "spec.containers{c}.lifecycle.postStart.httpGet.protocol: H2C",
            "spec.containers{c}.lifecycle.preStop.httpGet.protocol: H2C",
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
        assert_eq!(unread_fields(&pod), want);
        let messages = not_enforced(&pod);
        assert_eq!(messages.len(), MOST_MESSAGES + 1);
        assert_eq!(messages[MOST_MESSAGES], "4 more fields are not enforced");

        let mount = json!([{"name": "e", "mountPath": "/e", "bindMountOptions": ["x".repeat(1 << 20)]}]);
        let pod = pod_json(json!({"containers": [{"name": "c", "volumeMounts": mount}]}));
        let messages = not_enforced(&pod);
        assert!(messages.len() == 1 && messages[0].len() < 500, "{}", messages[0].len());
    }
}
