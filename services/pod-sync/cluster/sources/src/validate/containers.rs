//! Validates containers with their variables, mounts and ports.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    Container, ContainerPort, ContainerResizePolicy, EnvFromSource, EnvVar, FileKeySelector, PodSpec, Volume,
    VolumeMount,
};

use super::errors::Errors;
use super::field_ref::field_ref;
use super::volumes::Volumes;
use super::{handlers, names, resources, security};

const MAX_RESTART_RULES: usize = 20;
const MAX_EXIT_CODES: usize = 255;
const FIELDS_OF_VARIABLES: [&str; 9] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

/// The facts about a pod that checks of its containers need.
struct Context<'a> {
    spec: &'a PodSpec,
    volumes: &'a Volumes<'a>,
    claims: BTreeSet<&'a str>,
}

/// `validateContainers`, `validateInitContainers` and `validateContainersOnlyForPod`
pub(super) fn all(spec: &PodSpec, volumes: &Volumes<'_>, errors: &mut Errors) {
    let claims = spec.resource_claims.iter().flatten().map(|c| c.name.as_str()).collect();
    let context = Context { spec, volumes, claims };
    if spec.containers.is_empty() {
        errors.required("spec.containers", "");
    }
    let mut names = BTreeSet::new();
    let mut host_ports = BTreeSet::new();
    for (i, container) in spec.containers.iter().enumerate() {
        let path = format!("spec.containers[{i}]");
        common(container, &context, &path, errors);
        if !names.insert(container.name.as_str()) {
            errors.duplicate(format_args!("{path}.name"), container.name.as_str());
        }
        handlers::all(container, context.spec, &path, errors);
        unique_host_ports(container, &mut host_ports, &path, errors);
        if spec.host_network == Some(true) {
            for (i, port) in container.ports.iter().flatten().enumerate() {
                let host_port = port.host_port.unwrap_or(0);
                if host_port != port.container_port {
                    errors.invalid(
                        format_args!("{path}.ports[{i}].hostPort"),
                        host_port,
                        "must match `containerPort` when `hostNetwork` is true",
                    );
                }
            }
        }
    }
    for (i, container) in spec.init_containers.iter().flatten().enumerate() {
        let path = format!("spec.initContainers[{i}]");
        common(container, &context, &path, errors);
        if !names.insert(container.name.as_str()) {
            errors.duplicate(format_args!("{path}.name"), container.name.as_str());
        }
        // Init containers run one at a time, so their host ports may be equal.
        unique_host_ports(container, &mut BTreeSet::new(), &path, errors);
        if container.restart_policy.as_deref() == Some("Always") {
            handlers::all(container, context.spec, &path, errors);
            continue;
        }
        for (field, is_set) in [
            ("lifecycle", container.lifecycle.is_some()),
            ("livenessProbe", container.liveness_probe.is_some()),
            ("readinessProbe", container.readiness_probe.is_some()),
            ("startupProbe", container.startup_probe.is_some()),
        ] {
            if is_set {
                errors.forbidden(
                    format_args!("{path}.{field}"),
                    "may not be set for init containers without restartPolicy=Always",
                );
            }
        }
    }
}

// validateContainerCommon
fn common(c: &Container, context: &Context<'_>, path: &str, errors: &mut Errors) {
    match c.name.as_str() {
        "" => errors.required(format_args!("{path}.name"), ""),
        name => errors.format(format_args!("{path}.name"), name, names::dns_label(name)),
    }
    match c.image.as_deref() {
        None | Some("") => errors.required(format_args!("{path}.image"), ""),
        Some(image) if image.trim() != image => {
            errors.invalid(
                format_args!("{path}.image"),
                image,
                "must not have leading or trailing whitespace",
            );
        }
        Some(_) => {}
    }
    errors.word(
        format_args!("{path}.terminationMessagePolicy"),
        c.termination_message_policy.as_deref(),
        &["File", "FallbackToLogsOnError"],
    );
    ports(c.ports.as_deref().unwrap_or_default(), path, errors);
    for (i, variable) in c.env.iter().flatten().enumerate() {
        env(variable, context.volumes, &format!("{path}.env[{i}]"), errors);
    }
    for (i, source) in c.env_from.iter().flatten().enumerate() {
        env_from(source, &format!("{path}.envFrom[{i}]"), errors);
    }
    mounts(c, context.volumes, path, errors);
    devices(c, context.volumes, path, errors);
    errors.word(
        format_args!("{path}.imagePullPolicy"),
        c.image_pull_policy.as_deref(),
        &["Always", "IfNotPresent", "Never"],
    );
    resources::of_container(c, &context.claims, &format!("{path}.resources"), errors);
    let resize = c.resize_policy.as_deref().unwrap_or_default();
    resize_policies(resize, context.spec, &format!("{path}.resizePolicy"), errors);
    security::of_container(c, context.spec, &format!("{path}.securityContext"), errors);
    restart_policy(c, path, errors);
}

// validateContainerRestartPolicy
fn restart_policy(c: &Container, path: &str, errors: &mut Errors) {
    let rules = c.restart_policy_rules.as_deref().unwrap_or_default();
    if c.restart_policy.is_none() && !rules.is_empty() {
        errors.required(
            format_args!("{path}.restartPolicy"),
            "must specify restartPolicy when restart rules are used",
        );
    }
    errors.word_if_set(
        format_args!("{path}.restartPolicy"),
        c.restart_policy.as_deref(),
        &["Always", "OnFailure", "Never"],
    );
    if rules.len() > MAX_RESTART_RULES {
        errors.too_many(format_args!("{path}.restartPolicyRules"), rules.len(), MAX_RESTART_RULES);
    }
    for (i, rule) in rules.iter().enumerate() {
        let path = format!("{path}.restartPolicyRules[{i}]");
        errors.word_if_set(
            format_args!("{path}.action"),
            Some(rule.action.as_str()),
            &["Restart", "RestartAllContainers"],
        );
        let Some(codes) = rule.exit_codes.as_ref() else {
            errors.required(format_args!("{path}.exitCodes"), "must be specified");
            continue;
        };
        errors.word_if_set(
            format_args!("{path}.exitCodes.operator"),
            Some(codes.operator.as_str()),
            &["In", "NotIn"],
        );
        let count = codes.values.as_ref().map_or(0, Vec::len);
        if count > MAX_EXIT_CODES {
            errors.too_many(format_args!("{path}.exitCodes.values"), count, MAX_EXIT_CODES);
        }
    }
}

// validateContainerPorts
fn ports(ports: &[ContainerPort], path: &str, errors: &mut Errors) {
    let mut names = BTreeSet::new();
    for (i, port) in ports.iter().enumerate() {
        let path = format!("{path}.ports[{i}]");
        if let Some(name) = port.name.as_deref().filter(|n| !n.is_empty()) {
            let broken = names::port_name(name);
            if broken.is_empty() && !names.insert(name) {
                errors.duplicate(format_args!("{path}.name"), name);
            }
            errors.format(format_args!("{path}.name"), name, broken);
        }
        if port.container_port == 0 {
            errors.required(format_args!("{path}.containerPort"), "");
        } else {
            handlers::port_number(port.container_port, format_args!("{path}.containerPort"), errors);
        }
        if let Some(host_port) = port.host_port.filter(|p| *p != 0) {
            handlers::port_number(host_port, format_args!("{path}.hostPort"), errors);
        }
        errors.word(format_args!("{path}.protocol"), port.protocol.as_deref(), &["SCTP", "TCP", "UDP"]);
    }
}

// AccumulateUniqueHostPorts
fn unique_host_ports(c: &Container, seen: &mut BTreeSet<String>, path: &str, errors: &mut Errors) {
    for (i, port) in c.ports.iter().flatten().enumerate() {
        let Some(number) = port.host_port.filter(|p| *p != 0) else { continue };
        let protocol = port.protocol.as_deref().unwrap_or_default();
        let id = format!("{protocol}/{}/{number}", port.host_ip.as_deref().unwrap_or_default());
        if seen.contains(&id) {
            errors.duplicate(format_args!("{path}.ports[{i}].hostPort"), id.as_str());
        } else {
            seen.insert(id);
        }
    }
}

// ValidateEnv
fn env(variable: &EnvVar, volumes: &Volumes<'_>, path: &str, errors: &mut Errors) {
    match variable.name.as_str() {
        "" => errors.required(format_args!("{path}.name"), ""),
        name => errors.format(format_args!("{path}.name"), name, names::variable(name)),
    }
    let Some(source) = variable.value_from.as_ref() else { return };
    let path = format!("{path}.valueFrom");
    let mut sources: usize = 0;
    if let Some(field) = source.field_ref.as_ref() {
        sources = sources.saturating_add(1);
        field_ref(field, &FIELDS_OF_VARIABLES, &format!("{path}.fieldRef"), errors);
    }
    if let Some(resource) = source.resource_field_ref.as_ref() {
        sources = sources.saturating_add(1);
        resources::field_ref(resource, false, &format!("{path}.resourceFieldRef"), errors);
    }
    if let Some(key) = source.config_map_key_ref.as_ref() {
        sources = sources.saturating_add(1);
        key_ref(&key.name, &key.key, &format!("{path}.configMapKeyRef"), errors);
    }
    if let Some(key) = source.secret_key_ref.as_ref() {
        sources = sources.saturating_add(1);
        key_ref(&key.name, &key.key, &format!("{path}.secretKeyRef"), errors);
    }
    if let Some(key) = source.file_key_ref.as_ref() {
        sources = sources.saturating_add(1);
        file_key_ref(key, volumes, &format!("{path}.fileKeyRef"), errors);
    }
    if sources == 0 {
        let detail = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef`, `secretKeyRef` or `fileKeyRef`";
        errors.invalid(&path, "", detail);
    } else if variable.value.as_deref().is_some_and(|v| !v.is_empty()) {
        errors.invalid(&path, "", "may not be specified when `value` is not empty");
    } else if sources > 1 {
        errors.invalid(&path, "", "may not have more than one field specified at a time");
    }
}

fn key_ref(name: &str, key: &str, path: &str, errors: &mut Errors) {
    errors.format(format_args!("{path}.name"), name, names::dns_subdomain(name));
    match key {
        "" => errors.required(format_args!("{path}.key"), ""),
        key => errors.format(format_args!("{path}.key"), key, names::config_map_key(key)),
    }
}

fn file_key_ref(key: &FileKeySelector, volumes: &Volumes<'_>, path: &str, errors: &mut Errors) {
    match key.key.as_str() {
        "" => errors.required(format_args!("{path}.key"), ""),
        name => errors.format(format_args!("{path}.key"), name, names::variable(name)),
    }
    match key.path.as_str() {
        "" => errors.required(format_args!("{path}.path"), ""),
        file => errors.format(format_args!("{path}.path"), file, names::unreserved_path(file)),
    }
    let path = format_args!("{path}.volumeName");
    match (key.volume_name.as_str(), volumes.get(key.volume_name.as_str())) {
        ("", _) => errors.required(path, ""),
        (name, None) => errors.not_found(path, name, ""),
        (name, Some(volume)) if volume.empty_dir.is_none() => {
            errors.invalid(path, name, "referenced volume must be of type emptyDir");
        }
        (_, Some(_)) => {}
    }
}

// ValidateEnvFrom
fn env_from(source: &EnvFromSource, path: &str, errors: &mut Errors) {
    if let Some(prefix) = source.prefix.as_deref().filter(|p| !p.is_empty()) {
        errors.format(format_args!("{path}.prefix"), prefix, names::variable(prefix));
    }
    let config_map = source.config_map_ref.as_ref().map(|s| ("configMapRef", s.name.as_str()));
    let secret = source.secret_ref.as_ref().map(|s| ("secretRef", s.name.as_str()));
    for (field, name) in [config_map, secret].into_iter().flatten() {
        let path = format_args!("{path}.{field}.name");
        match name {
            "" => errors.required(path, ""),
            name => errors.format(path, name, names::dns_subdomain(name.strip_suffix('-').unwrap_or(name))),
        }
    }
    match (config_map, secret) {
        (None, None) => errors.invalid(path, "", "must specify one of: `configMapRef` or `secretRef`"),
        (Some(_), Some(_)) => {
            errors.invalid(path, "", "may not have more than one field specified at a time");
        }
        _ => {}
    }
}

// ValidateVolumeMounts
fn mounts(c: &Container, volumes: &Volumes<'_>, path: &str, errors: &mut Errors) {
    let devices = c.volume_devices.as_deref().unwrap_or_default();
    let device_names: BTreeSet<&str> = devices.iter().map(|d| d.name.as_str()).collect();
    let device_paths: BTreeSet<&str> = devices.iter().map(|d| d.device_path.as_str()).collect();
    let mut paths = BTreeSet::new();
    for (i, mount) in c.volume_mounts.iter().flatten().enumerate() {
        let path = format!("{path}.volumeMounts[{i}]");
        let volume = volumes.get(mount.name.as_str());
        if mount.name.is_empty() {
            errors.required(format_args!("{path}.name"), "");
        }
        if volume.is_none() {
            errors.not_found(format_args!("{path}.name"), &mount.name, "");
        }
        if mount.mount_path.is_empty() {
            errors.required(format_args!("{path}.mountPath"), "");
        }
        if !paths.insert(mount.mount_path.as_str()) {
            errors.invalid(format_args!("{path}.mountPath"), mount.mount_path.as_str(), "must be unique");
        }
        if device_names.contains(mount.name.as_str()) {
            let detail = "must not already exist in volumeDevices";
            errors.invalid(format_args!("{path}.name"), mount.name.as_str(), detail);
        }
        if device_paths.contains(mount.mount_path.as_str()) {
            let detail = "must not already exist as a path in volumeDevices";
            errors.invalid(format_args!("{path}.mountPath"), mount.mount_path.as_str(), detail);
        }
        bind_mount_options(mount, volume, &format!("{path}.bindMountOptions"), errors);
        let sub_paths = [("subPath", &mount.sub_path), ("subPathExpr", &mount.sub_path_expr)];
        for (field, value) in sub_paths {
            let Some(value) = value.as_deref().filter(|v| !v.is_empty()) else { continue };
            errors.format(format_args!("{path}.{field}"), value, names::descending_path(value));
        }
        if sub_paths.iter().all(|(_, value)| value.as_ref().is_some_and(|v| !v.is_empty())) {
            errors.invalid(
                format_args!("{path}.subPathExpr"),
                mount.sub_path_expr.as_deref().unwrap_or_default(),
                "subPathExpr and subPath are mutually exclusive",
            );
        }
        modes_of_mount(mount, c, &path, errors);
    }
}

fn bind_mount_options(mount: &VolumeMount, volume: Option<&&Volume>, path: &str, errors: &mut Errors) {
    let options = mount.bind_mount_options.as_deref().unwrap_or_default();
    if !options.is_empty() && volume.is_some_and(|volume| volume.image.is_some()) {
        errors.forbidden(path, "may not be specified for image volumes");
    }
    let mut seen = BTreeSet::new();
    for (i, option) in options.iter().enumerate() {
        let path = format_args!("{path}[{i}]");
        errors.word_if_set(path, Some(option), &["noexec", "nodev", "nosuid"]);
        if !seen.insert(option) {
            errors.duplicate(path, option.as_str());
        }
    }
}

// validateMountPropagation and validateMountRecursiveReadOnly
fn modes_of_mount(mount: &VolumeMount, c: &Container, path: &str, errors: &mut Errors) {
    let propagation = mount.mount_propagation.as_deref();
    errors.word_if_set(
        format_args!("{path}.mountPropagation"),
        propagation,
        &["Bidirectional", "HostToContainer", "None"],
    );
    let is_privileged = c.security_context.as_ref().is_some_and(|s| s.privileged == Some(true));
    if propagation == Some("Bidirectional") && !is_privileged {
        errors.forbidden(
            format_args!("{path}.mountPropagation"),
            "Bidirectional mount propagation is available only to privileged containers",
        );
    }
    let recursive = mount.recursive_read_only.as_deref();
    let path = format_args!("{path}.recursiveReadOnly");
    errors.word_if_set(path, recursive, &["Disabled", "Enabled", "IfPossible"]);
    if matches!(recursive, Some("Enabled" | "IfPossible")) {
        if mount.read_only != Some(true) {
            errors.forbidden(path, "may only be specified when readOnly is true");
        }
        if propagation.is_some_and(|p| p != "None") {
            errors.forbidden(path, "may only be specified when mountPropagation is None or not specified");
        }
    }
}

// ValidateVolumeDevices
fn devices(c: &Container, volumes: &Volumes<'_>, path: &str, errors: &mut Errors) {
    let mounts = c.volume_mounts.as_deref().unwrap_or_default();
    let mount_names: BTreeSet<&str> = mounts.iter().map(|m| m.name.as_str()).collect();
    let mount_paths: BTreeSet<&str> = mounts.iter().map(|m| m.mount_path.as_str()).collect();
    let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
    for (i, device) in c.volume_devices.iter().flatten().enumerate() {
        let (name, at) = (device.name.as_str(), device.device_path.as_str());
        let name_path = format!("{path}.volumeDevices[{i}].name");
        let at_path = format!("{path}.volumeDevices[{i}].devicePath");
        if name.is_empty() {
            errors.required(&name_path, "");
        }
        if !name.is_empty() && !names.insert(name) {
            errors.invalid(&name_path, name, "must be unique");
        }
        match volumes.get(name) {
            None => errors.not_found(&name_path, name, ""),
            Some(v) if v.persistent_volume_claim.is_none() && v.ephemeral.is_none() => {
                let detail =
                    "can only use volume source type of PersistentVolumeClaim or Ephemeral for block mode";
                errors.invalid(&name_path, name, detail);
            }
            Some(_) => {}
        }
        if at.is_empty() {
            errors.required(&at_path, "");
        }
        if !names::path_without_backsteps(at).is_empty() {
            errors.invalid(&at_path, at, "can not contain backsteps ('..')");
        } else if !paths.insert(at) {
            errors.invalid(&at_path, at, "must be unique");
        }
        if mount_names.contains(name) {
            errors.invalid(&name_path, name, "must not already exist in volumeMounts");
        }
        if mount_paths.contains(at) {
            errors.invalid(&at_path, at, "must not already exist as a path in volumeMounts");
        }
    }
}

// validateResizePolicy
fn resize_policies(policies: &[ContainerResizePolicy], spec: &PodSpec, path: &str, errors: &mut Errors) {
    let mut seen = BTreeSet::new();
    for (i, policy) in policies.iter().enumerate() {
        if !seen.insert(policy.resource_name.as_str()) {
            errors.duplicate(format_args!("{path}[{i}]"), policy.resource_name.as_str());
        }
        errors.word(path, Some(policy.resource_name.as_str()), &["cpu", "memory"]);
        let restart = policy.restart_policy.as_str();
        errors.word(path, Some(restart), &["NotRequired", "RestartContainer"]);
        if spec.restart_policy.as_deref() == Some("Never") && restart != "NotRequired" {
            errors.invalid(path, restart, "must be 'NotRequired' when `restartPolicy` is 'Never'");
        }
    }
}
