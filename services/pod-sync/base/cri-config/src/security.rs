//! Computes security contexts (`pkg/securitycontext`, `pkg/kubelet/kuberuntime: security_context.go`).

use std::path::Path;

use k8s_openapi::api::core::v1::{AppArmorProfile, Container, Pod, SELinuxOptions, SeccompProfile};
use pod_sync_layout::{HandlerFeatures, NodeSettings};
use quintlet_cri_api::v1::security_profile::ProfileType;
use quintlet_cri_api::v1::{
    Capability, Int64Value, LinuxContainerSecurityContext, LinuxSandboxSecurityContext, NamespaceMode,
    NamespaceOption, SeLinuxOption, SecurityProfile, SupplementalGroupsPolicy, UserNamespace,
};
use quintlet_model::pod;

use super::error::ConfigError;

const MASKED: [&str; 12] = [
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
const APPARMOR_ANNOTATION: &str = "container.apparmor.security.beta.kubernetes.io/";

/// User in an image's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageUser {
    /// A number, which is the UID.
    Uid(i64),
    /// A user name, whose UID is unknown.
    Name(String),
}

impl ImageUser {
    /// Builds the user from the runtime's image status: the UID, else the name, else root.
    #[must_use]
    pub fn from_status(uid: Option<i64>, name: &str) -> Self {
        match uid {
            Some(uid) => Self::Uid(uid),
            None if name.is_empty() => Self::Uid(0),
            None => Self::Name(name.to_owned()),
        }
    }
}

/// Returns the existing `thermal_throttle` directories below `cpus`.
#[must_use]
pub fn thermal_throttle_paths(cpus: &Path) -> Vec<String> {
    let mut paths: Vec<String> = std::fs::read_dir(cpus)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| {
            let name = e.file_name();
            let digits = name.to_str().and_then(|n| n.strip_prefix("cpu")).unwrap_or_default();
            !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
        })
        .map(|e| e.path().join("thermal_throttle"))
        .filter(|p| p.exists())
        .map(|p| p.display().to_string())
        .collect();
    paths.sort();
    paths
}

/// Checks `runAsNonRoot` against the effective user (`pkg/kubelet/kuberuntime: verifyRunAsNonRoot`).
///
/// # Errors
/// The container would run as root, or the user is unknown.
pub fn verify_run_as_non_root(
    pod: &Pod,
    container: &Container,
    image: &ImageUser,
) -> Result<(), ConfigError> {
    let pod_context = pod::spec(pod).security_context.as_ref();
    let own = container.security_context.as_ref();
    let non_root =
        own.and_then(|c| c.run_as_non_root).or_else(|| pod_context.and_then(|c| c.run_as_non_root));
    if non_root != Some(true) {
        return Ok(());
    }
    let described = pod::pod_ref(pod).map(|r| r.to_string()).unwrap_or_default();
    let whom = format!("(pod: {described:?}, container: {})", container.name);
    let user = own.and_then(|c| c.run_as_user).or_else(|| pod_context.and_then(|c| c.run_as_user));
    let problem = match (user, image) {
        (Some(0), _) => format!("container's runAsUser breaks non-root policy {whom}"),
        (Some(_), _) => return Ok(()),
        (None, ImageUser::Uid(0)) => {
            format!("container has runAsNonRoot and image will run as root {whom}")
        }
        (None, ImageUser::Uid(uid)) if !(1..=i64::from(i32::MAX)).contains(uid) => format!(
            "container has runAsNonRoot and image has an invalid user id ({uid}). (Must be 1-(2147483647)): {whom}"
        ),
        (None, ImageUser::Uid(_)) => return Ok(()),
        (None, ImageUser::Name(name)) => format!(
            "container has runAsNonRoot and image has non-numeric user ({name}), cannot verify user is non-root {whom}"
        ),
    };
    Err(ConfigError::Invalid(problem))
}

fn int(value: i64) -> Int64Value {
    Int64Value { value }
}

fn selinux(options: &SELinuxOptions) -> SeLinuxOption {
    SeLinuxOption {
        user: options.user.clone().unwrap_or_default(),
        role: options.role.clone().unwrap_or_default(),
        r#type: options.type_.clone().unwrap_or_default(),
        level: options.level.clone().unwrap_or_default(),
    }
}

fn profile(profile_type: ProfileType, localhost_ref: String) -> SecurityProfile {
    SecurityProfile { profile_type: profile_type as i32, localhost_ref }
}

fn seccomp(pod: &Pod, container: &Container, node: &NodeSettings) -> Result<SecurityProfile, ConfigError> {
    let chosen: Option<&SeccompProfile> = container
        .security_context
        .as_ref()
        .and_then(|c| c.seccomp_profile.as_ref())
        .or_else(|| pod::spec(pod).security_context.as_ref().and_then(|c| c.seccomp_profile.as_ref()));
    let fallback = if node.seccomp_default { ProfileType::RuntimeDefault } else { ProfileType::Unconfined };
    Ok(match chosen.map(|p| (p.type_.as_str(), p.localhost_profile.as_deref())) {
        Some(("Localhost", Some(name))) if !name.is_empty() => {
            let path = node.root_dir.join("seccomp").join(validate_local_descending_path(name)?);
            profile(ProfileType::Localhost, path.display().to_string())
        }
        Some(("Localhost", _)) => {
            return Err(ConfigError::invalid(
                "localhostProfile must be set if seccompProfile type is Localhost",
            ));
        }
        Some(("RuntimeDefault", _)) => profile(ProfileType::RuntimeDefault, String::new()),
        Some(("Unconfined", _)) => profile(ProfileType::Unconfined, String::new()),
        // A word of a newer API may stand for a stricter profile than any of these. It is refused as by
        // kubelet 1.38 (k/k#141958).
        Some((other, _)) => {
            return Err(ConfigError::invalid(format!("unknown seccomp profile type: {other:?}")));
        }
        None => profile(fallback, String::new()),
    })
}

/// Checks the path of a seccomp profile like the API server
/// (`pkg/apis/core/validation: validateLocalDescendingPath`), since any other path would leave the directory
/// that it is joined to.
fn validate_local_descending_path(path: &str) -> Result<&str, ConfigError> {
    let invalid = |why: &str| {
        ConfigError::invalid(format!("seccompProfile.localhostProfile: Invalid value: {path:?}: {why}"))
    };
    if path.starts_with('/') {
        return Err(invalid("must be a relative path"));
    }
    if path.split('/').any(|part| part == "..") {
        return Err(invalid("must not contain '..'"));
    }
    Ok(path)
}

/// Returns the AppArmor profile of a container from its field, its annotation or the pod's field, in this
/// order.
///
/// # Errors
/// The first of them that is set has no known profile.
fn apparmor(pod: &Pod, container: &Container) -> Result<Option<SecurityProfile>, ConfigError> {
    let field = |p: &AppArmorProfile| match p.type_.as_str() {
        "RuntimeDefault" => Ok(profile(ProfileType::RuntimeDefault, String::new())),
        "Unconfined" => Ok(profile(ProfileType::Unconfined, String::new())),
        "Localhost" => match p.localhost_profile.as_deref().filter(|n| !n.is_empty()) {
            Some(name) => Ok(profile(ProfileType::Localhost, name.to_owned())),
            None => Err(ConfigError::invalid(
                "missing localhost apparmor profile name: localhostProfile must be set if appArmorProfile type is Localhost.",
            )),
        },
        other => Err(ConfigError::invalid(format!("unknown apparmor profile type: {other}"))),
    };
    if let Some(own) = container.security_context.as_ref().and_then(|c| c.app_armor_profile.as_ref()) {
        return field(own).map(Some);
    }
    let key = format!("{APPARMOR_ANNOTATION}{}", container.name);
    match pod::annotation(pod, &key) {
        Some("runtime/default") => return Ok(Some(profile(ProfileType::RuntimeDefault, String::new()))),
        Some("unconfined") => return Ok(Some(profile(ProfileType::Unconfined, String::new()))),
        // The API server accepts an empty annotation. It has no meaning.
        Some("") | None => {}
        Some(text) => {
            return match text.strip_prefix("localhost/").filter(|name| !name.is_empty()) {
                Some(name) => Ok(Some(profile(ProfileType::Localhost, name.to_owned()))),
                None => Err(ConfigError::invalid(format!("invalid AppArmor annotation {key}: {text:?}"))),
            };
        }
    }
    let of_pod = pod::spec(pod).security_context.as_ref().and_then(|c| c.app_armor_profile.as_ref());
    of_pod.map(field).transpose()
}

fn legacy_apparmor(profile: &SecurityProfile) -> String {
    match ProfileType::try_from(profile.profile_type) {
        Ok(ProfileType::RuntimeDefault) => "runtime/default".to_owned(),
        Ok(ProfileType::Unconfined) => "unconfined".to_owned(),
        Ok(ProfileType::Localhost) => format!("localhost/{}", profile.localhost_ref),
        Err(_) => String::new(),
    }
}

fn groups_policy(pod: &Pod) -> Result<SupplementalGroupsPolicy, ConfigError> {
    let policy =
        pod::spec(pod).security_context.as_ref().and_then(|c| c.supplemental_groups_policy.as_deref());
    match policy {
        None | Some("Merge") => Ok(SupplementalGroupsPolicy::Merge),
        Some("Strict") => Ok(SupplementalGroupsPolicy::Strict),
        Some(other) => Err(ConfigError::invalid(format!("unsupported supplementalGroupsPolicy: {other}"))),
    }
}

/// Returns the namespaces of the pod.
///
/// # Errors
/// The pod requests a user namespace and `userns` is `None`.
pub fn namespaces(
    pod: &Pod,
    features: HandlerFeatures,
    runtime_handler: &str,
    userns: Option<&UserNamespace>,
) -> Result<NamespaceOption, ConfigError> {
    let spec = pod::spec(pod);
    let node_or_pod =
        |host: Option<bool>| if host.unwrap_or(false) { NamespaceMode::Node } else { NamespaceMode::Pod } as i32;
    let pid = if spec.host_pid.unwrap_or(false) {
        NamespaceMode::Node
    } else if spec.share_process_namespace.unwrap_or(false) {
        NamespaceMode::Pod
    } else {
        NamespaceMode::Container
    };
    let users = match (spec.host_users, userns) {
        (None | Some(true), _) => {
            UserNamespace { mode: NamespaceMode::Node as i32, ..UserNamespace::default() }
        }
        (Some(false), Some(mapped)) if features.user_namespaces => mapped.clone(),
        (Some(false), _) if runtime_handler.is_empty() => {
            return Err(ConfigError::invalid(
                "can't set `spec.hostUsers: false`, runtime does not support user namespaces",
            ));
        }
        (Some(false), _) => {
            return Err(ConfigError::invalid(format!(
                "can't set `spec.hostUsers: false`, RuntimeClass handler {runtime_handler:?} does not support user \
                 namespaces"
            )));
        }
    };
    Ok(NamespaceOption {
        network: node_or_pod(spec.host_network),
        ipc: node_or_pod(spec.host_ipc),
        pid: pid as i32,
        target_id: String::new(),
        userns_options: Some(users),
    })
}

/// Returns whether any container of the pod, including ephemeral ones, is privileged.
#[must_use]
pub fn any_privileged(pod: &Pod) -> bool {
    let spec = pod::spec(pod);
    let own = spec.containers.iter().chain(pod::init_containers(pod)).map(|c| c.security_context.as_ref());
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| c.security_context.as_ref());
    own.chain(ephemeral).flatten().any(|c| c.privileged.unwrap_or(false))
}

/// Returns the security context of the sandbox. Namespaces are set only if the pod has a context, which
/// defaulting ensures.
///
/// # Errors
/// A policy is unknown, or a user namespace is not available.
pub fn sandbox_context(
    pod: &Pod,
    namespaces: NamespaceOption,
    volume_groups: &[i64],
) -> Result<LinuxSandboxSecurityContext, ConfigError> {
    let mut out = LinuxSandboxSecurityContext {
        privileged: any_privileged(pod),
        seccomp: Some(profile(ProfileType::RuntimeDefault, String::new())),
        ..LinuxSandboxSecurityContext::default()
    };
    let Some(context) = &pod::spec(pod).security_context else { return Ok(out) };
    out.run_as_user = context.run_as_user.map(int);
    out.run_as_group = context.run_as_group.map(int);
    out.selinux_options = context.se_linux_options.as_ref().map(selinux);
    out.namespace_options = Some(namespaces);
    out.supplemental_groups.extend(context.fs_group);
    out.supplemental_groups.extend(volume_groups);
    out.supplemental_groups.extend(context.supplemental_groups.iter().flatten());
    out.supplemental_groups_policy = groups_policy(pod)? as i32;
    Ok(out)
}

/// Returns the security context of a container. Its own fields take precedence over the pod's.
///
/// # Errors
/// A profile or policy is invalid.
// For older runtimes the CRI also has the AppArmor profile as a string.
#[allow(deprecated)]
pub fn container_context(
    pod: &Pod,
    container: &Container,
    image: &ImageUser,
    node: &NodeSettings,
    mut namespaces: NamespaceOption,
    target_id: Option<&str>,
    volume_groups: &[i64],
) -> Result<LinuxContainerSecurityContext, ConfigError> {
    let own = container.security_context.clone().unwrap_or_default();
    let of_pod = pod::spec(pod).security_context.clone().unwrap_or_default();
    if let Some(target) = target_id
        && namespaces.pid == NamespaceMode::Container as i32
    {
        namespaces.pid = NamespaceMode::Target as i32;
        target.clone_into(&mut namespaces.target_id);
    }
    let mut out = LinuxContainerSecurityContext {
        privileged: own.privileged.unwrap_or(false),
        readonly_rootfs: own.read_only_root_filesystem.unwrap_or(false),
        no_new_privs: own.allow_privilege_escalation == Some(false),
        capabilities: own.capabilities.map(|c| Capability {
            add_capabilities: c.add.unwrap_or_default(),
            drop_capabilities: c.drop.unwrap_or_default(),
            ..Capability::default()
        }),
        namespace_options: Some(namespaces),
        selinux_options: own.se_linux_options.or(of_pod.se_linux_options).as_ref().map(selinux),
        run_as_group: own.run_as_group.or(of_pod.run_as_group).map(int),
        seccomp: Some(seccomp(pod, container, node)?),
        apparmor: apparmor(pod, container)?,
        supplemental_groups_policy: groups_policy(pod)? as i32,
        ..LinuxContainerSecurityContext::default()
    };
    match (own.run_as_user.or(of_pod.run_as_user), image) {
        (Some(uid), _) => out.run_as_user = Some(int(uid)),
        (None, ImageUser::Uid(uid)) => out.run_as_user = Some(int(*uid)),
        (None, ImageUser::Name(name)) => out.run_as_username.clone_from(name),
    }
    out.apparmor_profile = out.apparmor.as_ref().map(legacy_apparmor).unwrap_or_default();
    out.supplemental_groups.extend(of_pod.fs_group);
    out.supplemental_groups.extend(of_pod.supplemental_groups.iter().flatten());
    out.supplemental_groups.extend(volume_groups);
    if own.proc_mount.as_deref() != Some("Unmasked") {
        out.masked_paths =
            MASKED.iter().map(|p| (*p).to_owned()).chain(node.thermal_throttle.clone()).collect();
        out.readonly_paths = READ_ONLY.map(str::to_owned).to_vec();
    }
    Ok(out)
}

#[cfg(test)]
#[allow(deprecated)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    fn context(
        pod_context: Value,
        own: Value,
        image: &ImageUser,
    ) -> Result<LinuxContainerSecurityContext, String> {
        let p = pod_of(
            json!({"securityContext": pod_context, "containers": [{"name": "c", "securityContext": own}]}),
        );
        let node = NodeSettings { root_dir: "/r".into(), ..NodeSettings::default() };
        let ns = namespaces(&p, HandlerFeatures::default(), "", None).unwrap();
        container_context(&p, &p.spec.as_ref().unwrap().containers[0], image, &node, ns, None, &[4711])
            .map_err(|e| e.to_string())
    }

    #[test]
    fn a_non_root_promise_is_checked_against_spec_and_image() {
        let uid = ImageUser::Uid;
        for (pod_context, own, image, want) in [
            (json!({}), json!({}), uid(0), None),
            (json!({"runAsNonRoot": true}), json!({"runAsNonRoot": false}), uid(0), None),
            (json!({"runAsNonRoot": true}), json!({"runAsUser": 5}), uid(0), None),
            (json!({"runAsNonRoot": true}), json!({}), uid(5), None),
            (
                json!({"runAsNonRoot": true, "runAsUser": 0}),
                json!({}),
                uid(5),
                Some("container's runAsUser breaks non-root policy (pod: \"web_default(u1)\", container: c)"),
            ),
            (
                json!({"runAsNonRoot": true}),
                json!({}),
                uid(0),
                Some(
                    "container has runAsNonRoot and image will run as root (pod: \"web_default(u1)\", container: c)",
                ),
            ),
            (
                json!({}),
                json!({"runAsNonRoot": true}),
                ImageUser::Name("www".into()),
                Some(
                    "container has runAsNonRoot and image has non-numeric user (www), cannot verify user is non-root (pod: \"web_default(u1)\", container: c)",
                ),
            ),
            (
                json!({}),
                json!({"runAsNonRoot": true}),
                uid(-2),
                Some(
                    "container has runAsNonRoot and image has an invalid user id (-2). (Must be 1-(2147483647)): (pod: \"web_default(u1)\", container: c)",
                ),
            ),
        ] {
            let p = pod_of(
                json!({"securityContext": pod_context, "containers": [{"name": "c", "securityContext": own}]}),
            );
            let got = verify_run_as_non_root(&p, &p.spec.as_ref().unwrap().containers[0], &image);
            assert_eq!(got.err().map(|e| e.to_string()).as_deref(), want, "{pod_context} {own}");
        }
        assert_eq!(ImageUser::from_status(None, ""), uid(0));
        assert_eq!(ImageUser::from_status(Some(3), "x"), uid(3));
        assert_eq!(ImageUser::from_status(None, "x"), ImageUser::Name("x".into()));
    }

    #[test]
    fn container_fields_take_precedence_over_pod_fields() {
        let c = context(
            json!({"runAsUser": 1, "runAsGroup": 2, "fsGroup": 7, "supplementalGroups": [8, 9]}),
            json!({"runAsUser": 3, "privileged": true, "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true, "capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]}}),
            &ImageUser::Name("www".into()),
        )
        .unwrap();
        assert_eq!(c.run_as_user, Some(int(3)));
        assert_eq!(c.run_as_group, Some(int(2)));
        assert_eq!(c.run_as_username, "");
        assert_eq!(c.supplemental_groups, [7, 8, 9, 4711]);
        assert!(c.privileged && c.no_new_privs && c.readonly_rootfs);
        assert_eq!(c.capabilities.unwrap().drop_capabilities, ["ALL"]);
        let image = context(json!({}), json!({}), &ImageUser::Name("www".into())).unwrap();
        assert_eq!((image.run_as_user, image.run_as_username.as_str()), (None, "www"));
        assert!(!image.no_new_privs);
        assert!(
            context(json!({"supplementalGroupsPolicy": "X"}), json!({}), &ImageUser::Uid(0))
                .unwrap_err()
                .starts_with("unsupported supplementalGroupsPolicy: X")
        );
    }

    #[test]
    fn proc_is_masked_unless_the_container_unmasks_it() {
        let c = context(json!({}), json!({}), &ImageUser::Uid(0)).unwrap();
        assert_eq!((c.masked_paths.len(), c.readonly_paths.len()), (12, 5));
        let c = context(json!({}), json!({"procMount": "Unmasked"}), &ImageUser::Uid(0)).unwrap();
        assert!(c.masked_paths.is_empty() && c.readonly_paths.is_empty());
    }

    #[test]
    fn profiles_come_from_container_then_annotation_then_pod() {
        let seccomp = |pod: Value, own: Value| {
            context(pod, own, &ImageUser::Uid(0)).map(|c| {
                let s = c.seccomp.unwrap();
                (s.profile_type, s.localhost_ref)
            })
        };
        let local = json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "a/b.json"}});
        let default = json!({"seccompProfile": {"type": "RuntimeDefault"}});
        assert_eq!(seccomp(json!({}), json!({})).unwrap(), (1, String::new()));
        assert_eq!(seccomp(default.clone(), json!({})).unwrap(), (0, String::new()));
        let without = pod_of(json!({"containers": [{"name": "c"}]}));
        let by_default = |seccomp_default: bool| {
            let node = NodeSettings { seccomp_default, ..NodeSettings::default() };
            super::seccomp(&without, &pod::spec(&without).containers[0], &node).unwrap().profile_type
        };
        assert_eq!(
            (by_default(true), by_default(false)),
            (0, 1),
            "RuntimeDefault if the node defaults to it"
        );
        assert_eq!(seccomp(default, local).unwrap(), (2, "/r/seccomp/a/b.json".to_owned()));
        assert_eq!(
            seccomp(json!({}), json!({"seccompProfile": {"type": "Localhost"}})).unwrap_err(),
            "localhostProfile must be set if seccompProfile type is Localhost"
        );
        for (path, why) in [
            ("/etc/passwd", "must be a relative path"),
            ("../passwd", "must not contain '..'"),
            ("a/../../passwd", "must not contain '..'"),
            ("a/..", "must not contain '..'"),
        ] {
            let outside = json!({"seccompProfile": {"type": "Localhost", "localhostProfile": path}});
            let want = format!("seccompProfile.localhostProfile: Invalid value: {path:?}: {why}");
            assert_eq!(seccomp(outside.clone(), json!({})).unwrap_err(), want);
            assert_eq!(seccomp(json!({}), outside).unwrap_err(), want);
        }
        let dots = json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "..a/b..json"}});
        assert_eq!(seccomp(json!({}), dots).unwrap().1, "/r/seccomp/..a/b..json");

        let mut p = pod_of(json!({"securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "c"}]}));
        let legacy_name = |p: &Pod| {
            legacy_apparmor(&apparmor(p, &p.spec.as_ref().unwrap().containers[0]).unwrap().unwrap())
        };
        assert_eq!(legacy_name(&p), "runtime/default");
        p.metadata
            .annotations
            .as_mut()
            .unwrap()
            .insert(format!("{APPARMOR_ANNOTATION}c"), "localhost/x".into());
        assert_eq!(legacy_name(&p), "localhost/x");
        p.spec.as_mut().unwrap().containers[0].security_context =
            Some(serde_json::from_value(json!({"appArmorProfile": {"type": "Unconfined"}})).unwrap());
        assert_eq!(legacy_name(&p), "unconfined");
    }

    #[test]
    fn a_profile_that_is_unknown_or_empty_keeps_the_container_from_starting() {
        let checked = |pod: Value, own: Value| context(pod, own, &ImageUser::Uid(0)).map(drop);
        for word in ["", "runtimeDefault", "unconfined", "localhost/x", "Strict"] {
            for (field, want) in [
                ("seccompProfile", format!("unknown seccomp profile type: {word:?}")),
                ("appArmorProfile", format!("unknown apparmor profile type: {word}")),
            ] {
                let profile = json!({field: {"type": word, "localhostProfile": "x"}});
                let want = Err(want);
                assert_eq!(checked(profile.clone(), json!({})), want, "of the pod");
                assert_eq!(checked(json!({}), profile.clone()), want, "of the container");
                // A known profile of the pod does not replace that of the container.
                assert_eq!(checked(json!({field: {"type": "RuntimeDefault"}}), profile), want);
            }
        }
        for word in ["", "merge", "Loose"] {
            let want = Err(format!("unsupported supplementalGroupsPolicy: {word}"));
            assert_eq!(checked(json!({"supplementalGroupsPolicy": word}), json!({})), want);
        }
        let annotated = |text: &str| {
            let mut p = pod_of(json!({"securityContext": {"appArmorProfile": {"type": "RuntimeDefault"}},
                "containers": [{"name": "c"}]}));
            let annotations = p.metadata.annotations.as_mut().unwrap();
            annotations.insert(format!("{APPARMOR_ANNOTATION}c"), text.to_owned());
            apparmor(&p, &pod::spec(&p).containers[0]).map_err(|e| e.to_string())
        };
        for text in ["localhost/", "RuntimeDefault", "locahost/strict"] {
            let want = format!("invalid AppArmor annotation {APPARMOR_ANNOTATION}c: {text:?}");
            assert_eq!(annotated(text), Err(want));
        }
        assert_eq!(annotated("").unwrap().unwrap().profile_type, 0, "the pod's profile");
    }

    #[test]
    fn an_unknown_proc_mount_is_masked() {
        for word in ["", "unmasked", "Open"] {
            let c = context(json!({}), json!({"procMount": word}), &ImageUser::Uid(0)).unwrap();
            assert_eq!((c.masked_paths.len(), c.readonly_paths.len()), (12, 5), "{word:?}");
        }
    }

    #[test]
    fn namespaces_follow_the_spec() {
        let modes = |spec: Value| {
            let mut spec = spec;
            spec["containers"] = json!([]);
            namespaces(&pod_of(spec), HandlerFeatures::default(), "", None)
                .map(|n| (n.network, n.ipc, n.pid, n.userns_options.unwrap().mode))
                .map_err(|e| e.to_string())
        };
        let (pod, container) = (0, 1);
        let node = 2;
        for (spec, want) in [
            (json!({}), (pod, pod, container, node)),
            (json!({"hostNetwork": true, "hostIPC": true, "hostPID": true}), (node, node, node, node)),
            (json!({"shareProcessNamespace": true, "hostUsers": true}), (pod, pod, pod, node)),
        ] {
            assert_eq!(modes(spec.clone()).unwrap(), want, "{spec}");
        }
        assert_eq!(
            modes(json!({"hostUsers": false})).unwrap_err(),
            "can't set `spec.hostUsers: false`, runtime does not support user namespaces"
        );
        let p = pod_of(json!({"containers": [{"name": "c"}]}));
        let ns = namespaces(&p, HandlerFeatures::default(), "", None).unwrap();
        let c = &p.spec.as_ref().unwrap().containers[0];
        let got =
            container_context(&p, c, &ImageUser::Uid(0), &NodeSettings::default(), ns, Some("id1"), &[])
                .unwrap();
        let ns = got.namespace_options.unwrap();
        assert_eq!((ns.pid, ns.target_id.as_str()), (3, "id1"));
    }

    #[test]
    fn the_sandbox_is_privileged_if_any_container_is() {
        for key in ["containers", "initContainers", "ephemeralContainers"] {
            let mut spec = json!({"containers": [{"name": "a"}]});
            spec[key] = json!([{"name": "p", "securityContext": {"privileged": true}}]);
            let p = pod_of(spec);
            let ns = namespaces(&p, HandlerFeatures::default(), "", None).unwrap();
            let s = sandbox_context(&p, ns, &[]).unwrap();
            assert!(s.privileged, "{key}");
            assert_eq!(s.seccomp.unwrap().profile_type, 0);
        }
        let mut p = pod_of(json!({"containers": [{"name": "a"}]}));
        let ns = namespaces(&p, HandlerFeatures::default(), "", None).unwrap();
        p.spec.as_mut().unwrap().security_context = None;
        assert_eq!(sandbox_context(&p, ns, &[]).unwrap().namespace_options, None);
    }
}
