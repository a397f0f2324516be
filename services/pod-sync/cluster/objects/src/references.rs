//! The ConfigMaps and Secrets that a pod refers to.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{EnvFromSource, EnvVar, Pod, Volume};
use quintlet_model::pod as pods;

/// Names of the objects in the pod's namespace that a pod refers to
/// (`pkg/api/v1/pod: VisitPodConfigmapNames`, `VisitPodSecretNames`). Secrets of a PersistentVolume are not
/// among them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct References {
    /// ConfigMaps of volumes and variables.
    pub config_maps: BTreeSet<String>,
    /// Secrets of volumes, variables and image pulls.
    pub secrets: BTreeSet<String>,
}

impl References {
    /// Returns the references of a pod.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let spec = pods::spec(pod);
        let mut all = Self::default();
        for secret in spec.image_pull_secrets.iter().flatten() {
            all.add_secret(Some(&secret.name));
        }
        for container in spec.init_containers.iter().flatten().chain(&spec.containers) {
            all.add_environment(container.env_from.as_deref(), container.env.as_deref());
        }
        for container in spec.ephemeral_containers.iter().flatten() {
            all.add_environment(container.env_from.as_deref(), container.env.as_deref());
        }
        for volume in spec.volumes.iter().flatten() {
            all.add_volume(volume);
        }
        all
    }

    fn add_config_map(&mut self, name: Option<&String>) {
        self.config_maps.extend(name.filter(|name| !name.is_empty()).cloned());
    }

    fn add_secret(&mut self, name: Option<&String>) {
        self.secrets.extend(name.filter(|name| !name.is_empty()).cloned());
    }

    fn add_environment(&mut self, env_from: Option<&[EnvFromSource]>, env: Option<&[EnvVar]>) {
        for source in env_from.into_iter().flatten() {
            self.add_config_map(source.config_map_ref.as_ref().map(|r| &r.name));
            self.add_secret(source.secret_ref.as_ref().map(|r| &r.name));
        }
        for source in env.into_iter().flatten().filter_map(|variable| variable.value_from.as_ref()) {
            self.add_config_map(source.config_map_key_ref.as_ref().map(|r| &r.name));
            self.add_secret(source.secret_key_ref.as_ref().map(|r| &r.name));
        }
    }

    // A volume has one source. The fields of types that no kubelet mounts any more count as in the kubelet.
    fn add_volume(&mut self, volume: &Volume) {
        self.add_config_map(volume.config_map.as_ref().map(|v| &v.name));
        for source in volume.projected.iter().flat_map(|v| v.sources.iter().flatten()) {
            self.add_config_map(source.config_map.as_ref().map(|s| &s.name));
            self.add_secret(source.secret.as_ref().map(|s| &s.name));
        }
        self.add_secret(volume.secret.as_ref().and_then(|v| v.secret_name.as_ref()));
        self.add_secret(volume.azure_file.as_ref().map(|v| &v.secret_name));
        let named = [
            volume.cephfs.as_ref().and_then(|v| v.secret_ref.as_ref()),
            volume.cinder.as_ref().and_then(|v| v.secret_ref.as_ref()),
            volume.csi.as_ref().and_then(|v| v.node_publish_secret_ref.as_ref()),
            volume.flex_volume.as_ref().and_then(|v| v.secret_ref.as_ref()),
            volume.iscsi.as_ref().and_then(|v| v.secret_ref.as_ref()),
            volume.rbd.as_ref().and_then(|v| v.secret_ref.as_ref()),
            volume.scale_io.as_ref().map(|v| &v.secret_ref),
            volume.storageos.as_ref().and_then(|v| v.secret_ref.as_ref()),
        ];
        for reference in named.into_iter().flatten() {
            self.add_secret(Some(&reference.name));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn names(all: &BTreeSet<String>) -> Vec<&str> {
        all.iter().map(String::as_str).collect()
    }

    #[test]
    fn every_reference_of_a_pod_counts() {
        let secret_ref = json!({"secretRef": {"name": "s"}});
        let with = |more: Value| {
            let mut volume = secret_ref.clone();
            volume.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            volume
        };
        let env = json!([{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "m", "key": "k"}}},
            {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}, {"name": "C", "value": "c"}]);
        let env_from = json!([{"configMapRef": {"name": "m"}}, {"secretRef": {"name": "s"}}]);
        let volume = |source: &str, value: Value| json!({"volumes": [{"name": "v", source: value}]});
        // Spec, and whether it has a ConfigMap m and a Secret s.
        let table = [
            (json!({}), false, false),
            (json!({"imagePullSecrets": [{"name": "s"}, {"name": ""}]}), false, true),
            (json!({"containers": [{"name": "c", "env": env}]}), true, true),
            (json!({"containers": [{"name": "c", "envFrom": env_from}]}), true, true),
            (json!({"initContainers": [{"name": "c", "env": env}]}), true, true),
            (json!({"initContainers": [{"name": "c", "envFrom": env_from}]}), true, true),
            (json!({"ephemeralContainers": [{"name": "c", "env": env}]}), true, true),
            (json!({"ephemeralContainers": [{"name": "c", "envFrom": env_from}]}), true, true),
            (volume("configMap", json!({"name": "m"})), true, false),
            (volume("configMap", json!({"name": ""})), false, false),
            (volume("secret", json!({"secretName": "s"})), false, true),
            (volume("secret", json!({})), false, false),
            (
                volume(
                    "projected",
                    json!({"sources": [{"configMap": {"name": "m"}}, {"secret": {"name": "s"}},
                    {"serviceAccountToken": {"path": "t"}}]}),
                ),
                true,
                true,
            ),
            (volume("csi", json!({"driver": "d", "nodePublishSecretRef": {"name": "s"}})), false, true),
            (volume("azureFile", json!({"secretName": "s", "shareName": "a"})), false, true),
            (volume("cephfs", with(json!({"monitors": []}))), false, true),
            (volume("cinder", with(json!({"volumeID": "a"}))), false, true),
            (volume("flexVolume", with(json!({"driver": "a"}))), false, true),
            (volume("iscsi", with(json!({"targetPortal": "a", "iqn": "a", "lun": 0}))), false, true),
            (volume("rbd", with(json!({"monitors": [], "image": "a"}))), false, true),
            (volume("scaleIO", with(json!({"gateway": "a", "system": "a"}))), false, true),
            (volume("storageos", secret_ref.clone()), false, true),
            (volume("emptyDir", json!({})), false, false),
        ];
        for (mut spec, config_map, secret) in table {
            if spec["containers"].is_null() {
                spec["containers"] = json!([]);
            }
            let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
            let all = References::of(&pod);
            let want = |is_there: bool, name: &'static str| if is_there { vec![name] } else { Vec::new() };
            assert_eq!(names(&all.config_maps), want(config_map, "m"), "{spec}");
            assert_eq!(names(&all.secrets), want(secret, "s"), "{spec}");
        }
    }
}
