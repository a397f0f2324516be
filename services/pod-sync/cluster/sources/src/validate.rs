//! Validates static pods, which no API server has validated (`pkg/apis/core/validation: ValidatePodCreate`).
//!
//! Field paths and messages are the kubelet's. References to API objects that a static pod must not have are
//! rejected as well (`pkg/kubelet/config: tryDecodeSinglePod`). Every check is linear in the size of the pod.

mod containers;
mod errors;
mod field_ref;
mod handlers;
mod names;
mod resources;
mod scheduling;
mod security;
#[cfg(test)]
mod tests;
mod volumes;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{HostAlias, Pod, PodDNSConfig, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta, OwnerReference};
use quintlet_model::ids::PodUid;

use self::errors::Errors;
pub use self::errors::FieldError;
pub(crate) use self::volumes::has_no_source;

/// Limit of all annotations together, in bytes.
const MAX_ANNOTATIONS: usize = 256 << 10;
const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_BYTES: usize = 2048;
const MAX_FIELD_MANAGER: usize = 128;
const MAX_SUBRESOURCE: usize = 256;
const MAX_HOSTNAME_OVERRIDE: usize = 64;
const STANDARD_FINALIZERS: [&str; 3] = ["kubernetes", "orphan", "foregroundDeletion"];
const SECCOMP_POD: &str = "seccomp.security.alpha.kubernetes.io/pod";
const SECCOMP_CONTAINER: &str = "container.seccomp.security.alpha.kubernetes.io/";
const APP_ARMOR_CONTAINER: &str = "container.apparmor.security.beta.kubernetes.io/";
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// Returns the errors of a static pod with defaults.
#[must_use]
pub fn static_pod(pod: &Pod) -> Vec<FieldError> {
    let mut errors = Errors::default();
    metadata(&pod.metadata, &mut errors);
    match pod.spec.as_ref() {
        None => errors.required("spec", ""),
        Some(spec) => {
            annotations_of_profiles(pod.metadata.annotations.as_ref(), spec, &mut errors);
            pod_spec(pod, spec, &mut errors);
        }
    }
    errors.into_vec()
}

// apimachinery/pkg/api/validation: ValidateObjectMeta
fn metadata(meta: &ObjectMeta, errors: &mut Errors) {
    if let Some(prefix) = meta.generate_name.as_deref().filter(|p| !p.is_empty()) {
        // A prefix may end in a dash, which a name may not.
        let name = prefix.strip_suffix('-').map_or_else(|| prefix.to_owned(), |p| format!("{p}a"));
        errors.format("metadata.generateName", prefix, names::dns_subdomain(&name));
    }
    match meta.name.as_deref() {
        None | Some("") => errors.required("metadata.name", "name or generateName is required"),
        Some(name) => errors.format("metadata.name", name, names::dns_subdomain(name)),
    }
    match meta.namespace.as_deref() {
        None | Some("") => errors.required("metadata.namespace", ""),
        Some(namespace) => errors.format("metadata.namespace", namespace, names::dns_label(namespace)),
    }
    if let Some(uid) = meta.uid.as_deref()
        && let Err(e) = PodUid::parse(uid)
    {
        errors.invalid("metadata.uid", uid, e);
    }
    if let Some(generation) = meta.generation.filter(|g| *g < 0) {
        errors.invalid("metadata.generation", generation, names::NOT_NEGATIVE);
    }
    names::labels(meta.labels.as_ref(), "metadata.labels", errors);
    annotations(meta.annotations.as_ref(), errors);
    owners(meta.owner_references.as_deref().unwrap_or_default(), errors);
    for (i, finalizer) in meta.finalizers.iter().flatten().enumerate() {
        let path = format!("metadata.finalizers[{i}]");
        errors.format(&path, finalizer, names::qualified(finalizer));
        if !finalizer.contains('/') && !STANDARD_FINALIZERS.contains(&finalizer.as_str()) {
            let detail = "name is neither a standard finalizer name nor is it fully qualified";
            errors.invalid(&path, finalizer.as_str(), detail);
        }
    }
    for (i, entry) in meta.managed_fields.iter().flatten().enumerate() {
        managed_fields(entry, &format!("metadata.managedFields[{i}]"), errors);
    }
}

fn annotations(annotations: Option<&BTreeMap<String, String>>, errors: &mut Errors) {
    let path = "metadata.annotations";
    let mut bytes: usize = 0;
    for (key, value) in annotations.into_iter().flatten() {
        errors.format(path, key, names::qualified(&key.to_lowercase()));
        bytes = bytes.saturating_add(key.len()).saturating_add(value.len());
    }
    if bytes > MAX_ANNOTATIONS {
        errors.too_long(path, MAX_ANNOTATIONS);
    }
}

// ValidatePodSpecificAnnotations
fn annotations_of_profiles(
    annotations: Option<&BTreeMap<String, String>>,
    spec: &PodSpec,
    errors: &mut Errors,
) {
    for (key, value) in annotations.into_iter().flatten() {
        let path = format_args!("metadata.annotations[{key}]");
        if key == DELETION_COST && value.parse::<i32>().is_err() {
            errors.invalid(path, value.as_str(), "must be a 32bit integer");
        }
        if key == SECCOMP_POD || key.starts_with(SECCOMP_CONTAINER) {
            let path = format!("metadata.annotations.{key}");
            match value.strip_prefix("localhost/") {
                Some(profile) => errors.format(&path, profile, names::descending_path(profile)),
                None if ["runtime/default", "docker/default", "unconfined"].contains(&value.as_str()) => {}
                None => errors.invalid(&path, value.as_str(), "must be a valid seccomp profile"),
            }
        }
        if let Some(container) = key.strip_prefix(APP_ARMOR_CONTAINER) {
            let mut all = spec.init_containers.iter().flatten().chain(&spec.containers);
            if !all.any(|c| c.name == container) {
                errors.invalid(path, container, "container not found");
            }
            let is_known = ["", "runtime/default", "unconfined"].contains(&value.as_str());
            if !is_known && !value.starts_with("localhost/") {
                errors.invalid(
                    path,
                    value.as_str(),
                    format_args!("invalid AppArmor profile name: {value:?}"),
                );
            }
        }
    }
}

fn owners(owners: &[OwnerReference], errors: &mut Errors) {
    let path = "metadata.ownerReferences";
    let mut has_controller = false;
    for owner in owners {
        let (group, version) = owner.api_version.split_once('/').unwrap_or(("", &owner.api_version));
        if version.is_empty() || version.contains('/') {
            errors.invalid(
                format_args!("{path}.apiVersion"),
                owner.api_version.as_str(),
                "version must not be empty",
            );
        }
        for (field, value) in [("kind", &owner.kind), ("name", &owner.name), ("uid", &owner.uid)] {
            if value.is_empty() {
                errors.invalid(format_args!("{path}.{field}"), "", "must not be empty");
            }
        }
        if owner.kind == "Event" && (group, version) == ("", "v1") {
            errors.invalid(path, owner.kind.as_str(), "is disallowed from being an owner");
        }
        if owner.controller == Some(true) {
            if has_controller {
                errors.invalid(
                    path,
                    owner.name.as_str(),
                    "Only one reference can have Controller set to true",
                );
            }
            has_controller = true;
        }
    }
}

fn managed_fields(entry: &ManagedFieldsEntry, path: &str, errors: &mut Errors) {
    let operation = entry.operation.as_deref().unwrap_or_default();
    if !["Apply", "Update"].contains(&operation) {
        errors.invalid(format_args!("{path}.operation"), operation, "must be `Apply` or `Update`");
    }
    let kind = entry.fields_type.as_deref().unwrap_or_default();
    if !["", "FieldsV1"].contains(&kind) {
        errors.invalid(format_args!("{path}.fieldsType"), kind, "must be `FieldsV1`");
    }
    let manager = entry.manager.as_deref().unwrap_or_default();
    if manager.len() > MAX_FIELD_MANAGER {
        errors.too_long(format_args!("{path}.fieldManager"), MAX_FIELD_MANAGER);
    }
    if manager.chars().any(char::is_control) {
        errors.invalid(
            format_args!("{path}.fieldManager"),
            manager,
            "should only contain printable characters",
        );
    }
    if entry.subresource.as_ref().is_some_and(|s| s.len() > MAX_SUBRESOURCE) {
        errors.too_long(format_args!("{path}.subresource"), MAX_SUBRESOURCE);
    }
}

// ValidatePodSpec
fn pod_spec(pod: &Pod, spec: &PodSpec, errors: &mut Errors) {
    api_references(spec, errors);
    let volumes = volumes::all(spec, errors);
    containers::all(spec, &volumes, errors);
    if spec.ephemeral_containers.as_ref().is_some_and(|c| !c.is_empty()) {
        errors.forbidden("spec.ephemeralContainers", "cannot be set on create");
    }
    resources::of_pod(pod, spec, errors);
    errors.word("spec.restartPolicy", spec.restart_policy.as_deref(), &["Always", "OnFailure", "Never"]);
    errors.word(
        "spec.dnsPolicy",
        spec.dns_policy.as_deref(),
        &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"],
    );
    names::labels(spec.node_selector.as_ref(), "spec.nodeSelector", errors);
    security::of_pod(spec, errors);
    scheduling::all(spec, errors);
    dns_config(spec.dns_config.as_ref(), spec.dns_policy.as_deref(), errors);
    for (i, gate) in spec.readiness_gates.iter().flatten().enumerate() {
        let path = format_args!("spec.readinessGates[{i}].conditionType");
        errors.format(path, &gate.condition_type, names::qualified(&gate.condition_type));
    }
    if let Some(seconds) = spec.active_deadline_seconds
        && !(1..=i64::from(i32::MAX)).contains(&seconds)
    {
        errors.invalid("spec.activeDeadlineSeconds", seconds, names::IN_DEADLINE);
    }
    hostname(spec, errors);
    for (i, alias) in spec.host_aliases.iter().flatten().enumerate() {
        host_alias(alias, &format!("spec.hostAliases[{i}]"), errors);
    }
    if let Some(name) = spec.priority_class_name.as_deref().filter(|n| !n.is_empty()) {
        errors.format("spec.priorityClassName", name, names::dns_subdomain(name));
    }
    if let Some(name) = spec.runtime_class_name.as_deref() {
        errors.format("spec.runtimeClassName", name, names::dns_subdomain(name));
    }
    errors.word_if_set(
        "spec.preemptionPolicy",
        spec.preemption_policy.as_deref(),
        &["PreemptLowerPriority", "Never"],
    );
    resources::list(
        "spec.overhead.limits",
        spec.overhead.as_ref(),
        resources::ResourceOwner::Container,
        errors,
    );
    match spec.os.as_ref().map(|os| os.name.as_str()) {
        None | Some("linux" | "windows") => {}
        Some("") => errors.required("spec.os.name", "cannot be empty"),
        Some(other) => errors.unsupported("spec.os", other, &["linux", "windows"]),
    }
}

/// Rejects references to objects that only the API server has, as a kubelet does. ConfigMaps and Secrets are
/// allowed here, since they may be among the manifests.
fn api_references(spec: &PodSpec, errors: &mut Errors) {
    if spec.resource_claims.as_ref().is_some_and(|claims| !claims.is_empty()) {
        errors.plain("spec.resourceClaims", "static pods may not reference resourceclaims");
    }
    if spec.service_account_name.as_deref().is_some_and(|s| !s.is_empty()) {
        errors.plain("spec.serviceAccountName", "static pods may not reference serviceaccounts");
    }
}

fn hostname(spec: &PodSpec, errors: &mut Errors) {
    for (field, value) in [("hostname", &spec.hostname), ("subdomain", &spec.subdomain)] {
        if let Some(value) = value.as_deref().filter(|v| !v.is_empty()) {
            errors.format(format_args!("spec.{field}"), value, names::dns_label(value));
        }
    }
    let Some(name) = spec.hostname_override.as_deref() else { return };
    let path = "spec.hostnameOverride";
    errors.format(path, name, names::dns_subdomain(name));
    if name.len() > MAX_HOSTNAME_OVERRIDE {
        errors.too_long(path, MAX_HOSTNAME_OVERRIDE);
    }
    if spec.host_network == Some(true) {
        errors.forbidden(path, "cannot be set when `hostNetwork` is true");
    }
    if spec.set_hostname_as_fqdn == Some(true) {
        errors.forbidden(path, "cannot be set when `setHostnameAsFQDN` is true");
    }
}

fn host_alias(alias: &HostAlias, path: &str, errors: &mut Errors) {
    errors.format(format_args!("{path}.ip"), &alias.ip, names::ip(&alias.ip));
    for (i, name) in alias.hostnames.iter().flatten().enumerate() {
        errors.format(format_args!("{path}.hostnames[{i}]"), name, names::dns_subdomain(name));
    }
}

// validatePodDNSConfig
fn dns_config(config: Option<&PodDNSConfig>, policy: Option<&str>, errors: &mut Errors) {
    let path = "spec.dnsConfig";
    let servers = config.and_then(|c| c.nameservers.as_deref()).unwrap_or_default();
    if policy == Some("None") {
        if config.is_none() {
            return errors.required(path, "must provide `dnsConfig` when `dnsPolicy` is None");
        }
        if servers.is_empty() {
            return errors.required(
                format_args!("{path}.nameservers"),
                "must provide at least one DNS nameserver when `dnsPolicy` is None",
            );
        }
    }
    let Some(config) = config else { return };
    if servers.len() > MAX_NAMESERVERS {
        let detail = format_args!("must not have more than {MAX_NAMESERVERS} nameservers");
        errors.invalid(format_args!("{path}.nameservers"), servers.len(), detail);
    }
    for (i, server) in servers.iter().enumerate() {
        errors.format(format_args!("{path}.nameservers[{i}]"), server, names::ip(server));
    }
    let searches = config.searches.as_deref().unwrap_or_default();
    if searches.len() > MAX_SEARCHES {
        let detail = format_args!("must not have more than {MAX_SEARCHES} search paths");
        errors.invalid(format_args!("{path}.searches"), searches.len(), detail);
    }
    let spaces = searches.len().saturating_sub(1);
    let bytes = searches.iter().fold(spaces, |sum, s| sum.saturating_add(s.len()));
    if bytes > MAX_SEARCH_BYTES {
        let detail = format_args!(
            "must not have more than {MAX_SEARCH_BYTES} characters (including spaces) in the search list"
        );
        errors.invalid(format_args!("{path}.searches"), searches.len(), detail);
    }
    for (i, search) in searches.iter().enumerate().filter(|(_, s)| *s != ".") {
        let name = search.strip_suffix('.').unwrap_or(search);
        errors.format(
            format_args!("{path}.searches[{i}]"),
            search,
            names::dns_subdomain_with_underscore(name),
        );
    }
    for (i, option) in config.options.iter().flatten().enumerate() {
        if option.name.as_deref().unwrap_or_default().is_empty() {
            errors.required(format_args!("{path}.options[{i}]"), "must not be empty");
        }
    }
}
