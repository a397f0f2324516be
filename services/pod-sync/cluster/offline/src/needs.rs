//! What the start of a pod asks of the API server.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, SecretReference, Volume};
use pod_sync_csi::paths::attachment_name;
use pod_sync_in_tree::translation;
use pod_sync_objects::References;
use quintlet_model::pod as pods;

use crate::answer::AnswerKey;

/// Namespace of the Service of the API server, whose variables every pod gets.
const MASTER_NAMESPACE: &str = "default";

/// The claims and volumes that are known.
pub(crate) trait KnownVolumes {
    fn claim(&self, namespace: &str, name: &str) -> Option<PersistentVolumeClaim>;
    fn volume(&self, name: &str) -> Option<PersistentVolume>;
}

/// Returns what the start of a pod asks, but for tokens. Claims and volumes that are not known yet hide what
/// they refer to.
pub(crate) fn needs(pod: &Pod, node: &str, known: &impl KnownVolumes) -> BTreeSet<AnswerKey> {
    let spec = pods::spec(pod);
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let named = |name: &String| (namespace.clone(), name.clone());
    let references = References::of(pod);
    let mut all = BTreeSet::from([
        AnswerKey::Services(namespace.clone()),
        AnswerKey::Services(MASTER_NAMESPACE.to_owned()),
    ]);
    let pairs = |(namespace, name): (String, String)| AnswerKey::ConfigMap(namespace, name);
    all.extend(references.config_maps.iter().map(named).map(pairs));
    let pairs = |(namespace, name): (String, String)| AnswerKey::Secret(namespace, name);
    all.extend(references.secrets.iter().map(named).map(pairs));
    all.extend(spec.runtime_class_name.iter().cloned().map(AnswerKey::RuntimeClass));
    let account = spec.service_account_name.clone().filter(|name| !name.is_empty());
    let account = account.unwrap_or_else(|| "default".to_owned());
    all.insert(AnswerKey::ServiceAccount(namespace.clone(), account));
    for volume in spec.volumes.iter().flatten() {
        of_volume(pod, volume, &namespace, node, known, &mut all);
    }
    all
}

fn of_volume(
    pod: &Pod,
    volume: &Volume,
    namespace: &str,
    node: &str,
    known: &impl KnownVolumes,
    all: &mut BTreeSet<AnswerKey>,
) {
    for source in volume.projected.iter().flat_map(|v| v.sources.iter().flatten()) {
        let Some(bundle) = &source.cluster_trust_bundle else { continue };
        all.extend(bundle.name.clone().map(AnswerKey::TrustBundle));
        let selector = serde_json::to_string(&bundle.label_selector).unwrap_or_default();
        let signed = bundle.signer_name.clone().filter(|_| bundle.name.is_none());
        all.extend(signed.map(|signer| AnswerKey::TrustBundles(signer, selector)));
    }
    if let Some(inline) = &volume.csi {
        all.insert(AnswerKey::Driver(inline.driver.clone()));
        let secret = inline.node_publish_secret_ref.as_ref().map(|secret| secret.name.clone());
        all.extend(secret.map(|name| AnswerKey::VolumeSecret(namespace.to_owned(), name)));
    }
    // A type without a driver that is mounted by one.
    if let Ok(Some(object)) = translation::of_pod(volume, namespace) {
        of_persistent_volume(&object, node, all);
    }
    let generated = || format!("{}-{}", pod.metadata.name.as_deref().unwrap_or_default(), volume.name);
    let claimed = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.clone());
    let Some(claim) = claimed.or_else(|| volume.ephemeral.as_ref().map(|_| generated())) else { return };
    all.insert(AnswerKey::Claim(namespace.to_owned(), claim.clone()));
    let bound = known.claim(namespace, &claim).and_then(|claim| claim.spec?.volume_name);
    let Some(bound) = bound.filter(|name| !name.is_empty()) else { return };
    all.insert(AnswerKey::Volume(bound.clone()));
    if let Some(object) = known.volume(&bound).and_then(|object| translation::to_csi(object).ok()) {
        of_persistent_volume(&object, node, all);
    }
}

fn of_persistent_volume(object: &PersistentVolume, node: &str, all: &mut BTreeSet<AnswerKey>) {
    let Some(spec) = &object.spec else { return };
    let secret = |secret: &SecretReference| {
        let (namespace, name) = (secret.namespace.clone()?, secret.name.clone()?);
        Some(AnswerKey::VolumeSecret(namespace, name))
    };
    if let Some(csi) = &spec.csi {
        all.insert(AnswerKey::Driver(csi.driver.clone()));
        all.insert(AnswerKey::Attachment(attachment_name(&csi.volume_handle, &csi.driver, node)));
        let secrets = [&csi.node_stage_secret_ref, &csi.node_publish_secret_ref, &csi.node_expand_secret_ref];
        all.extend(secrets.into_iter().flatten().filter_map(secret));
    }
    all.extend(spec.iscsi.iter().filter_map(|iscsi| secret(iscsi.secret_ref.as_ref()?)));
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    struct Known {
        claim: Value,
        volume: Value,
    }

    impl KnownVolumes for Known {
        fn claim(&self, _: &str, _: &str) -> Option<PersistentVolumeClaim> {
            serde_json::from_value(self.claim.clone()).ok()
        }

        fn volume(&self, _: &str) -> Option<PersistentVolume> {
            serde_json::from_value(self.volume.clone()).ok()
        }
    }

    fn names(spec: Value, known: &Known) -> Vec<String> {
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "ns"}, "spec": spec}))
                .unwrap();
        let found = needs(&pod, "n1", known);
        let always = ["Services(\"default\")", "Services(\"ns\")", "ServiceAccount(\"ns\", \"default\")"];
        found.iter().map(|key| format!("{key:?}")).filter(|key| !always.contains(&key.as_str())).collect()
    }

    #[test]
    fn a_pod_needs_what_its_spec_its_claims_and_their_volumes_refer_to() {
        let nothing = || Known { claim: Value::Null, volume: Value::Null };
        let claim = json!({"spec": {"volumeName": "pv"}});
        let csi = json!({"spec": {"csi": {"driver": "d", "volumeHandle": "h",
            "nodeStageSecretRef": {"namespace": "x", "name": "s"}}}});
        let volumes = |volume: Value| json!({"containers": [], "volumes": [volume]});
        let of_claim = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        let attachment = format!("Attachment({:?})", attachment_name("h", "d", "n1"));
        let cases: [(&str, Value, Known, Vec<&str>); 9] = [
            ("nothing", json!({"containers": []}), nothing(), vec![]),
            (
                "class, account and pull secret",
                json!({"containers": [], "runtimeClassName": "gvisor", "serviceAccountName": "default",
                    "imagePullSecrets": [{"name": "pull"}]}),
                nothing(),
                vec!["Secret(\"ns\", \"pull\")", "RuntimeClass(\"gvisor\")"],
            ),
            (
                "variables",
                json!({"containers": [{"name": "c", "envFrom": [{"configMapRef": {"name": "m"}}],
                    "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}]}),
                nothing(),
                vec!["ConfigMap(\"ns\", \"m\")", "Secret(\"ns\", \"s\")"],
            ),
            (
                "inline volume",
                volumes(json!({"name": "v", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "s"}}})),
                nothing(),
                vec!["Secret(\"ns\", \"s\")", "Driver(\"d\")", "VolumeSecret(\"ns\", \"s\")"],
            ),
            ("unknown claim", volumes(of_claim.clone()), nothing(), vec!["Claim(\"ns\", \"c\")"]),
            (
                "unknown volume",
                volumes(of_claim.clone()),
                Known { claim: claim.clone(), volume: Value::Null },
                vec!["Claim(\"ns\", \"c\")", "Volume(\"pv\")"],
            ),
            (
                "volume of a driver",
                volumes(of_claim),
                Known { claim, volume: csi },
                vec![
                    "Claim(\"ns\", \"c\")",
                    "Volume(\"pv\")",
                    "Driver(\"d\")",
                    &attachment,
                    "VolumeSecret(\"x\", \"s\")",
                ],
            ),
            (
                "generated claim",
                volumes(json!({"name": "v", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}})),
                nothing(),
                vec!["Claim(\"ns\", \"p-v\")"],
            ),
            (
                "certificates",
                volumes(json!({"name": "v", "projected": {"sources": [
                    {"clusterTrustBundle": {"name": "b", "path": "x"}},
                    {"clusterTrustBundle": {"signerName": "s", "path": "y"}}]}})),
                nothing(),
                vec!["TrustBundle(\"b\")", "TrustBundles(\"s\", \"null\")"],
            ),
        ];
        for (case, spec, known, want) in cases {
            assert_eq!(names(spec, &known), want, "{case}");
        }
    }
}
