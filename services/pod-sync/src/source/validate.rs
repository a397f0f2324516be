//! What the API server would have refused, for pods that never passed it (pkg/apis/core/validation).
//!
//! The checks are those that the node itself depends on; a field the runtime judges is left to the runtime.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Probe, Volume};

/// One field that cannot stay as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldError {
    /// Path, as in `spec.containers[0].image`.
    pub field: String,
    /// What is wrong.
    pub message: String,
}

#[derive(Default)]
struct Errors(Vec<FieldError>);

impl Errors {
    fn add(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.0.push(FieldError { field: field.into(), message: message.into() });
    }
}

/// Everything wrong with a static pod, in the order of its fields.
#[must_use]
pub fn static_pod(pod: &Pod) -> Vec<FieldError> {
    let mut errors = Errors::default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    if !is_dns_subdomain(name) {
        errors.add(
            "metadata.name",
            format!("{name:?} is not a DNS subdomain (lower-case letters, digits, '-' and '.', at most 253)"),
        );
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    if !is_dns_label(namespace) {
        errors.add("metadata.namespace", format!("{namespace:?} is not a DNS label"));
    }
    if let Some(uid) = pod.metadata.uid.as_deref()
        && let Err(e) = quintlet_model::ids::PodUid::parse(uid)
    {
        errors.add("metadata.uid", e.to_string());
    }
    match pod.spec.as_ref() {
        None => errors.add("spec", "required"),
        Some(spec) => pod_spec(spec, &mut errors),
    }
    errors.0
}

fn pod_spec(spec: &PodSpec, errors: &mut Errors) {
    if spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
        errors.add("spec.resourceClaims", "static pods may not reference resourceclaims");
    }
    if spec.containers.is_empty() {
        errors.add("spec.containers", "required: at least one container");
    }
    one_of(errors, "spec.restartPolicy", spec.restart_policy.as_deref(), &["Always", "OnFailure", "Never"]);
    one_of(
        errors,
        "spec.dnsPolicy",
        spec.dns_policy.as_deref(),
        &["ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"],
    );
    if spec.termination_grace_period_seconds.is_some_and(|s| s < 0) {
        errors.add("spec.terminationGracePeriodSeconds", "must not be negative");
    }
    if spec.active_deadline_seconds.is_some_and(|s| s < 1) {
        errors.add("spec.activeDeadlineSeconds", "must be at least 1");
    }
    if spec.service_account_name.as_deref().is_some_and(|s| !s.is_empty()) {
        errors.add("spec.serviceAccountName", "static pods may not reference serviceaccounts");
    }
    if spec.ephemeral_containers.as_ref().is_some_and(|c| !c.is_empty()) {
        errors.add("spec.ephemeralContainers", "cannot be set on create");
    }
    let mut volumes = BTreeSet::new();
    for (i, volume) in spec.volumes.iter().flatten().enumerate() {
        let path = format!("spec.volumes[{i}]");
        if !is_dns_label(&volume.name) {
            errors.add(format!("{path}.name"), format!("{:?} is not a DNS label", volume.name));
        } else if !volumes.insert(volume.name.as_str()) {
            errors.add(format!("{path}.name"), format!("duplicate name {:?}", volume.name));
        }
        static_volume(volume, &path, errors);
    }
    let mut names = BTreeSet::new();
    let init = spec
        .init_containers
        .iter()
        .flatten()
        .enumerate()
        .map(|(i, c)| (format!("spec.initContainers[{i}]"), c, true));
    let regular =
        spec.containers.iter().enumerate().map(|(i, c)| (format!("spec.containers[{i}]"), c, false));
    for (path, c, is_init) in init.chain(regular) {
        if !names.insert(c.name.clone()) {
            errors.add(format!("{path}.name"), format!("duplicate name {:?}", c.name));
        }
        container(c, is_init, &path, &volumes, errors);
    }
}

fn container(c: &Container, is_init: bool, path: &str, volumes: &BTreeSet<&str>, errors: &mut Errors) {
    if c.name.is_empty() {
        errors.add(format!("{path}.name"), "required");
    } else if !is_dns_label(&c.name) {
        errors.add(format!("{path}.name"), format!("{:?} is not a DNS label", c.name));
    }
    match c.image.as_deref() {
        None | Some("") => errors.add(format!("{path}.image"), "required"),
        Some(image) if image.trim() != image => {
            errors.add(format!("{path}.image"), "must not begin or end with a blank")
        }
        Some(_) => {}
    }
    one_of(
        errors,
        format!("{path}.imagePullPolicy"),
        c.image_pull_policy.as_deref(),
        &["Always", "IfNotPresent", "Never"],
    );
    one_of(
        errors,
        format!("{path}.restartPolicy"),
        c.restart_policy.as_deref(),
        &["Always", "OnFailure", "Never"],
    );
    one_of(
        errors,
        format!("{path}.terminationMessagePolicy"),
        c.termination_message_policy.as_deref(),
        &["File", "FallbackToLogsOnError"],
    );
    for (i, port) in c.ports.iter().flatten().enumerate() {
        if !(1..=65535).contains(&port.container_port) {
            errors.add(
                format!("{path}.ports[{i}].containerPort"),
                format!("{} is not between 1 and 65535", port.container_port),
            );
        }
        if let Some(p) = port.host_port
            && !(0..=65535).contains(&p)
        {
            errors.add(format!("{path}.ports[{i}].hostPort"), format!("{p} is not between 0 and 65535"));
        }
        one_of(
            errors,
            format!("{path}.ports[{i}].protocol"),
            port.protocol.as_deref(),
            &["TCP", "UDP", "SCTP"],
        );
    }
    for (i, env) in c.env.iter().flatten().enumerate() {
        if env.name.is_empty() || env.name.contains('=') {
            errors.add(
                format!("{path}.env[{i}].name"),
                format!("{:?} is not the name of a variable", env.name),
            );
        }
        if env.value.as_deref().is_some_and(|v| !v.is_empty()) && env.value_from.is_some() {
            errors.add(format!("{path}.env[{i}].valueFrom"), "may not be given together with value");
        }
    }
    let mut paths = BTreeSet::new();
    for (i, mount) in c.volume_mounts.iter().flatten().enumerate() {
        if !volumes.contains(mount.name.as_str()) {
            errors.add(format!("{path}.volumeMounts[{i}].name"), format!("no volume named {:?}", mount.name));
        }
        if mount.mount_path.is_empty() {
            errors.add(format!("{path}.volumeMounts[{i}].mountPath"), "required");
        } else if !paths.insert(mount.mount_path.as_str()) {
            errors.add(
                format!("{path}.volumeMounts[{i}].mountPath"),
                format!("{:?} is mounted twice", mount.mount_path),
            );
        }
    }
    let sidecar = c.restart_policy.as_deref() == Some("Always");
    for (name, p) in [
        ("livenessProbe", &c.liveness_probe),
        ("readinessProbe", &c.readiness_probe),
        ("startupProbe", &c.startup_probe),
    ] {
        let Some(p) = p else { continue };
        if is_init && !sidecar {
            errors.add(
                format!("{path}.{name}"),
                "may not be set for init containers without restartPolicy=Always",
            );
            continue;
        }
        probe(p, name, &format!("{path}.{name}"), errors);
    }
}

fn probe(p: &Probe, name: &str, path: &str, errors: &mut Errors) {
    let handlers = [p.exec.is_some(), p.http_get.is_some(), p.tcp_socket.is_some(), p.grpc.is_some()];
    match handlers.iter().filter(|h| **h).count() {
        0 => errors.add(path, "must specify a handler type"),
        1 => {}
        _ => errors.add(path, "may not specify more than 1 handler type"),
    }
    for (field, value) in [
        ("initialDelaySeconds", p.initial_delay_seconds),
        ("timeoutSeconds", p.timeout_seconds),
        ("periodSeconds", p.period_seconds),
        ("successThreshold", p.success_threshold),
        ("failureThreshold", p.failure_threshold),
    ] {
        if value.is_some_and(|v| v < 0) {
            errors.add(format!("{path}.{field}"), "must not be negative");
        }
    }
    if name != "readinessProbe" && p.success_threshold.is_some_and(|v| v != 1) {
        errors.add(format!("{path}.successThreshold"), "must be 1");
    }
    if name == "readinessProbe" && p.termination_grace_period_seconds.is_some() {
        errors.add(format!("{path}.terminationGracePeriodSeconds"), "must not be set for readinessProbes");
    }
    if p.exec.as_ref().is_some_and(|e| e.command.as_ref().is_none_or(Vec::is_empty)) {
        errors.add(format!("{path}.exec.command"), "required");
    }
}

// The kubelet refuses every reference to an API object from a static pod. ConfigMaps and Secrets are allowed here since
// they may stand among the manifests (standalone use); others have nowhere to come from.
fn static_volume(volume: &Volume, path: &str, errors: &mut Errors) {
    if volume.persistent_volume_claim.is_some() {
        errors.add(
            format!("{path}.persistentVolumeClaim"),
            "static pods may not reference persistentvolumeclaims",
        );
    }
    if volume.ephemeral.is_some() {
        errors.add(
            format!("{path}.ephemeral"),
            "static pods may not reference persistentvolumeclaims (via ephemeral volumes)",
        );
    }
    if volume.csi.is_some() {
        errors.add(format!("{path}.csi"), "static pods may not reference csidrivers (via CSI volumes)");
    }
    if volume.glusterfs.is_some() {
        errors.add(
            format!("{path}.glusterfs"),
            "static pods may not reference endpoints (via glusterFS volumes)",
        );
    }
    if volume.azure_file.is_some() {
        errors.add(
            format!("{path}.azureFile"),
            "static pods may not reference secrets (via azureFile volumes)",
        );
    }
    for source in volume.projected.iter().flat_map(|p| p.sources.iter().flatten()) {
        for (there, what) in [
            (source.service_account_token.is_some(), "serviceaccounts (via projected volumes)"),
            (source.cluster_trust_bundle.is_some(), "clustertrustbundles"),
            (source.pod_certificate.is_some(), "podcertificates"),
        ] {
            if there {
                errors.add(format!("{path}.projected"), format!("static pods may not reference {what}"));
            }
        }
    }
}

fn one_of(errors: &mut Errors, field: impl Into<String>, value: Option<&str>, allowed: &[&str]) {
    if let Some(value) = value
        && !allowed.contains(&value)
    {
        errors.add(field, format!("unsupported value {value:?}: want one of {}", allowed.join(", ")));
    }
}

/// RFC 1123 label: lower-case letters, digits and `-`, at most 63.
#[must_use]
pub fn is_dns_label(text: &str) -> bool {
    let alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    !bytes.is_empty()
        && bytes.len() <= 63
        && bytes.iter().all(|&b| alnum(b) || b == b'-')
        && alnum(bytes[0])
        && bytes.last().is_some_and(|&b| alnum(b))
}

/// RFC 1123 subdomain: labels joined by dots, at most 253.
#[must_use]
pub fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(|label| !label.is_empty() && is_long_label(label))
}

fn is_long_label(text: &str) -> bool {
    let alnum = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.iter().all(|&b| alnum(b) || b == b'-') && alnum(bytes[0]) && bytes.last().is_some_and(|&b| alnum(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_static_pod_may_not_refer_to_what_only_the_api_server_has() {
        let errors = |spec: Value| {
            let pod: Pod = serde_json::from_value(
                json!({"metadata": {"name": "a", "namespace": "n", "uid": "u"}, "spec": spec}),
            )
            .unwrap();
            static_pod(&pod).into_iter().map(|e| e.message).collect::<Vec<_>>()
        };
        let volume = |source: Value| {
            let mut volume = json!({"name": "v"});
            volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
            json!({"containers": [{"name": "c", "image": "i"}], "volumes": [volume]})
        };
        for (source, want) in [
            (json!({"persistentVolumeClaim": {"claimName": "x"}}), "persistentvolumeclaims"),
            (json!({"ephemeral": {}}), "persistentvolumeclaims (via ephemeral volumes)"),
            (json!({"csi": {"driver": "x"}}), "csidrivers (via CSI volumes)"),
            (json!({"glusterfs": {"endpoints": "x", "path": "y"}}), "endpoints (via glusterFS volumes)"),
            (json!({"azureFile": {"secretName": "x", "shareName": "y"}}), "secrets (via azureFile volumes)"),
            (
                json!({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}),
                "serviceaccounts (via projected volumes)",
            ),
            (
                json!({"projected": {"sources": [{"clusterTrustBundle": {"path": "t"}}]}}),
                "clustertrustbundles",
            ),
            (
                json!({"projected": {"sources": [{"podCertificate": {"keyType": "k", "signerName": "s"}}]}}),
                "podcertificates",
            ),
        ] {
            let got = errors(volume(source));
            assert!(got.contains(&format!("static pods may not reference {want}")), "{want}: {got:?}");
        }
        let claims = json!({"containers": [{"name": "c", "image": "i"}], "resourceClaims": [{"name": "r"}]});
        assert_eq!(errors(claims), ["static pods may not reference resourceclaims"]);
        let fields = json!({"projected": {"sources": [{"downwardAPI": {"items": []}}]}});
        assert_eq!(errors(volume(fields)), Vec::<String>::new());
    }
}
