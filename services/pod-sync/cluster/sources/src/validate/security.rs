//! Validates security contexts of pods and containers.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{
    AppArmorProfile, Container, PodSpec, SeccompProfile, WindowsSecurityContextOptions,
};
use pod_sync_node_decisions::admission::normal_sysctl;

use super::errors::Errors;
use super::names;

/// Longest name of an AppArmor profile, in bytes (`PATH_MAX` of Linux without the terminating null byte).
const MAX_APP_ARMOR: usize = 4095;
/// Longest GMSA credential spec, in bytes (`maxGMSACredentialSpecLength`).
const MAX_GMSA_SPEC: usize = 64 << 10;
/// Length from which the domain of a Windows user is too long, in bytes
/// (`maxRunAsUserNameDomainLength`).
const MAX_USER_DOMAIN: usize = 256;
/// Longest name of a Windows user, in bytes (`maxRunAsUserNameUserLength`).
const MAX_USER: usize = 104;

/// Validates a user or group ID (`IsValidUserID`, `IsValidGroupID`).
pub(super) fn id(id: Option<i64>, path: impl std::fmt::Display, errors: &mut Errors) {
    if let Some(id) = id.filter(|id| !(0..=i64::from(i32::MAX)).contains(id)) {
        errors.invalid(path, id, names::ID);
    }
}

/// `validatePodSpecSecurityContext`, `validateHostUsers` and `validateWindowsHostProcessPod`
pub(super) fn of_pod(spec: &PodSpec, errors: &mut Errors) {
    host_namespaces(spec, errors);
    windows_host_processes(spec, errors);
    let Some(context) = spec.security_context.as_ref() else { return };
    let path = "spec.securityContext";
    id(context.fs_group, format_args!("{path}.fsGroup"), errors);
    id(context.run_as_user, format_args!("{path}.runAsUser"), errors);
    id(context.run_as_group, format_args!("{path}.runAsGroup"), errors);
    for (i, group) in context.supplemental_groups.iter().flatten().enumerate() {
        id(Some(*group), format_args!("{path}.supplementalGroups[{i}]"), errors);
    }
    let mut names = BTreeSet::new();
    for (i, sysctl) in context.sysctls.iter().flatten().enumerate() {
        let path = format_args!("{path}.sysctls[{i}].name");
        let name = sysctl.name.as_str();
        let broken = names::sysctl(name);
        match name {
            "" => errors.required(path, ""),
            name if !broken.is_empty() => errors.format(path, name, broken),
            name if !names.insert(name) => errors.duplicate(path, name),
            _ => {}
        }
        if let Some(namespace) = host_namespace_of(name, spec) {
            let detail = format_args!("may not be specified when '{namespace}' is true");
            errors.invalid(path, name, detail);
        }
    }
    for (field, value, words) in [
        ("fsGroupChangePolicy", &context.fs_group_change_policy, ["Always", "OnRootMismatch"]),
        ("supplementalGroupsPolicy", &context.supplemental_groups_policy, ["Merge", "Strict"]),
        ("seLinuxChangePolicy", &context.se_linux_change_policy, ["MountOption", "Recursive"]),
    ] {
        errors.word_if_set(format_args!("{path}.{field}"), value.as_deref(), &words);
    }
    seccomp(context.seccomp_profile.as_ref(), &format!("{path}.seccompProfile"), errors);
    app_armor(context.app_armor_profile.as_ref(), &format!("{path}.appArmorProfile"), errors);
    windows(context.windows_options.as_ref(), spec, &format!("{path}.windowsOptions"), errors);
}

fn host_namespaces(spec: &PodSpec, errors: &mut Errors) {
    if spec.share_process_namespace == Some(true) && spec.host_pid == Some(true) {
        errors.invalid(
            "spec.securityContext.shareProcessNamespace",
            true,
            "ShareProcessNamespace and HostPID cannot both be enabled",
        );
    }
    if spec.host_users == Some(false) {
        for (field, is_shared) in
            [("hostNetwork", spec.host_network), ("HostPID", spec.host_pid), ("HostIPC", spec.host_ipc)]
        {
            if is_shared == Some(true) {
                errors.forbidden(format_args!("spec.{field}"), "when `pod.Spec.HostUsers` is false");
            }
        }
    }
}

// ValidateHostSysctl: returns the field that shares the namespace of a sysctl with the node.
fn host_namespace_of(sysctl: &str, spec: &PodSpec) -> Option<&'static str> {
    let name = normal_sysctl(sysctl);
    let is_ipc = ["kernel.shm", "kernel.msg", "fs.mqueue."].iter().any(|prefix| name.starts_with(prefix))
        || name == "kernel.sem";
    if name.starts_with("net.") && spec.host_network == Some(true) {
        Some("hostNetwork")
    } else if is_ipc && spec.host_ipc == Some(true) {
        Some("hostIPC")
    } else {
        None
    }
}

/// `ValidateSecurityContext`
pub(super) fn of_container(c: &Container, spec: &PodSpec, path: &str, errors: &mut Errors) {
    let Some(context) = c.security_context.as_ref() else { return };
    id(context.run_as_user, format_args!("{path}.runAsUser"), errors);
    id(context.run_as_group, format_args!("{path}.runAsGroup"), errors);
    let proc_mount = context.proc_mount.as_deref();
    errors.word_if_set(format_args!("{path}.procMount"), proc_mount, &["Default", "Unmasked"]);
    if proc_mount == Some("Unmasked") && spec.host_users != Some(false) {
        errors.invalid(
            format_args!("{path}.procMount"),
            "Unmasked",
            "`hostUsers` must be false to use `Unmasked`",
        );
    }
    seccomp(context.seccomp_profile.as_ref(), &format!("{path}.seccompProfile"), errors);
    if context.allow_privilege_escalation == Some(false) {
        if context.privileged == Some(true) {
            errors.invalid(
                path,
                true,
                "cannot set `allowPrivilegeEscalation` to false and `privileged` to true",
            );
        }
        let added = context.capabilities.iter().flat_map(|c| c.add.iter().flatten());
        if added.into_iter().any(|capability| capability == "CAP_SYS_ADMIN") {
            let detail =
                "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN";
            errors.invalid(path, "CAP_SYS_ADMIN", detail);
        }
    }
    app_armor(context.app_armor_profile.as_ref(), &format!("{path}.appArmorProfile"), errors);
    windows(context.windows_options.as_ref(), spec, &format!("{path}.windowsOptions"), errors);
}

// validateSeccompProfileField
fn seccomp(profile: Option<&SeccompProfile>, path: &str, errors: &mut Errors) {
    let Some(profile) = profile else { return };
    match profile.type_.as_str() {
        "" => errors.required(format_args!("{path}.type"), "type is required when seccompProfile is set"),
        kind => errors.word_if_set(
            format_args!("{path}.type"),
            Some(kind),
            &["Localhost", "RuntimeDefault", "Unconfined"],
        ),
    }
    let path = format_args!("{path}.localhostProfile");
    match (profile.type_ == "Localhost", profile.localhost_profile.as_deref()) {
        (true, None) => errors.required(path, "must be set when seccomp type is Localhost"),
        (true, Some(file)) => errors.format(path, file, names::descending_path(file)),
        (false, None) => {}
        (false, Some(file)) => {
            errors.invalid(path, file, "can only be set when seccomp type is Localhost");
        }
    }
}

// ValidateAppArmorProfileField
fn app_armor(profile: Option<&AppArmorProfile>, path: &str, errors: &mut Errors) {
    let Some(profile) = profile else { return };
    let name = profile.localhost_profile.as_deref();
    let name_path = format_args!("{path}.localhostProfile");
    match (profile.type_.as_str(), name) {
        ("Localhost", None | Some("")) => {
            errors.required(name_path, "must be set when AppArmor type is Localhost");
        }
        ("Localhost", Some(name)) => {
            if name.trim() != name {
                errors.invalid(name_path, name, "must not be padded with whitespace");
            }
            if name.len() > MAX_APP_ARMOR {
                errors.too_long(name_path, MAX_APP_ARMOR);
            }
        }
        ("RuntimeDefault" | "Unconfined", None) => {}
        ("RuntimeDefault" | "Unconfined", Some(name)) => {
            errors.invalid(name_path, name, "can only be set when AppArmor type is Localhost");
        }
        ("", _) => {
            errors.required(format_args!("{path}.type"), "type is required when appArmorProfile is set");
        }
        (other, _) => {
            let kinds = ["Localhost", "RuntimeDefault", "Unconfined"];
            errors.unsupported(format_args!("{path}.type"), other, &kinds);
        }
    }
}

// validateWindowsSecurityContextOptions and validateLinux
fn windows(options: Option<&WindowsSecurityContextOptions>, spec: &PodSpec, path: &str, errors: &mut Errors) {
    let Some(options) = options else { return };
    if spec.os.as_ref().is_some_and(|os| os.name == "linux") {
        errors.forbidden(path, "windows options cannot be set for a linux pod");
    }
    if let Some(name) = options.gmsa_credential_spec_name.as_deref() {
        errors.format(format_args!("{path}.gmsaCredentialSpecName"), name, names::dns_subdomain(name));
    }
    if let Some(text) = options.gmsa_credential_spec.as_deref() {
        let path = format_args!("{path}.gmsaCredentialSpec");
        if text.is_empty() {
            errors.invalid(path, text, "gmsaCredentialSpec cannot be an empty string");
        } else if text.len() > MAX_GMSA_SPEC {
            errors.invalid(path, text, "gmsaCredentialSpec size must be under 64 KiB");
        }
    }
    if let Some(name) = options.run_as_user_name.as_deref() {
        windows_user(name, &format!("{path}.runAsUserName"), errors);
    }
}

fn windows_user(name: &str, path: &str, errors: &mut Errors) {
    if name.is_empty() {
        return errors.invalid(path, name, "runAsUserName cannot be an empty string");
    }
    if name.chars().any(|c| c.is_ascii_control()) {
        return errors.invalid(path, name, "runAsUserName cannot contain control characters");
    }
    let (domain, user) = match name.split_once('\\') {
        None => (None, name),
        Some((_, rest)) if rest.contains('\\') => {
            return errors.invalid(path, name, "runAsUserName cannot contain more than one backslash");
        }
        Some((domain, user)) => (Some(domain), user),
    };
    if let Some(domain) = domain {
        let is_net_bios = (1..=15).contains(&domain.chars().count())
            && !domain.starts_with('.')
            && !domain.contains(['\\', '/', ':', '*', '?', '"', '<', '>', '|']);
        let is_dns = names::dns_subdomain(&domain.to_ascii_lowercase()).is_empty();
        if domain.len() >= MAX_USER_DOMAIN {
            errors.invalid(path, name, "runAsUserName's Domain length must be under 256 characters");
        }
        if !is_net_bios && !is_dns {
            let detail = "runAsUserName's Domain doesn't match the NetBios nor the DNS format";
            errors.invalid(path, name, detail);
        }
    }
    if user.is_empty() {
        errors.invalid(path, name, "runAsUserName's User cannot be empty");
    } else if user.len() > MAX_USER {
        errors.invalid(path, name, "runAsUserName's User length must not be longer than 104 characters");
    }
    if !user.is_empty() && user.chars().all(|c| matches!(c, '.' | ' ')) {
        errors.invalid(path, name, "runAsUserName's User cannot contain only periods or spaces");
    }
    if user.contains(['"', '/', '\\', ':', ';', '|', '=', ',', '+', '*', '?', '<', '>', '@', '[', ']']) {
        let detail = r#"runAsUserName's User cannot contain the following characters: "/\:;|=,+*?<>@[]"#;
        errors.invalid(path, name, detail);
    }
}

fn windows_host_processes(spec: &PodSpec, errors: &mut Errors) {
    let of_pod = spec.security_context.as_ref().and_then(|c| c.windows_options.as_ref()?.host_process);
    let all = || {
        let init = spec.init_containers.iter().flatten().enumerate();
        let init = init.map(|(i, c)| (format!("spec.initContainers[{i}]"), c));
        init.chain(spec.containers.iter().enumerate().map(|(i, c)| (format!("spec.containers[{i}]"), c)))
    };
    let own = |c: &Container| c.security_context.as_ref()?.windows_options.as_ref()?.host_process;
    for (path, container) in all() {
        if let (Some(of_pod), Some(own)) = (of_pod, own(container))
            && of_pod != own
        {
            let detail =
                format_args!("pod hostProcess value must be identical if both are specified, was {of_pod}");
            errors.invalid(format_args!("{path}.securityContext.windowsOptions.hostProcess"), own, detail);
        }
    }
    let count = all().filter(|(_, c)| own(c).or(of_pod) == Some(true)).count();
    if count == 0 {
        return;
    }
    if count != all().count() {
        let detail =
            "If pod contains any hostProcess containers then all containers must be HostProcess containers";
        errors.invalid("spec", "", detail);
    }
    if spec.host_network != Some(true) {
        let detail = "hostNetwork must be true if pod contains any hostProcess containers";
        errors.invalid("spec.hostNetwork", false, detail);
    }
}
