//! SELinux labels with which volumes are mounted (`pkg/volume/util/selinux.go: GetMountSELinuxLabel`).

use std::collections::BTreeSet;
use std::path::Path;

use k8s_openapi::api::core::v1::{Container, Pod, SELinuxOptions};
use quintlet_model::pod as pods;

use crate::claims::{DriverRules, Provided, Source};

/// Default label of containers' files, such as `system_u:object_r:container_file_t:s0`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileLabel {
    user: String,
    role: String,
    kind: String,
    /// PersistentVolumes of all access modes are mounted with a label, not only those for one pod (feature
    /// gate `SELinuxMount`).
    for_all_modes: bool,
}

impl FileLabel {
    /// Reads the label from the policy of the machine whose root directory is `root`. Blocks.
    pub(crate) fn read(root: &Path) -> Option<Self> {
        let read = |path: &Path| std::fs::read_to_string(root.join(path)).ok();
        let contexts = read(Path::new("usr/share/containers/selinux/contexts")).or_else(|| {
            let config = read(Path::new("etc/selinux/config"))?;
            let policy = config.lines().find_map(|line| line.trim().strip_prefix("SELINUXTYPE="))?;
            let policy = policy.trim_matches('"');
            read(&Path::new("etc/selinux").join(policy).join("contexts/lxc_contexts"))
        });
        Self::parse(&contexts?)
    }

    /// Parses the last line `file = "user:role:type:level"` of the policy's contexts of containers.
    fn parse(contexts: &str) -> Option<Self> {
        let mut values = contexts.lines().filter_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.trim() == "file").then(|| value.trim().trim_matches('"').to_owned())
        });
        let value = values.next_back()?;
        let mut parts = value.splitn(4, ':').map(str::to_owned);
        Some(Self { user: parts.next()?, role: parts.next()?, kind: parts.next()?, for_all_modes: false })
    }

    /// Sets whether PersistentVolumes of all access modes are mounted with a label.
    pub(crate) fn for_all_modes(mut self, for_all_modes: bool) -> Self {
        self.for_all_modes = for_all_modes;
        self
    }

    /// Returns whether a volume may be mounted with a label. A mismatch of labels is an error then
    /// (`VolumeSupportsSELinuxMount`).
    pub(crate) fn is_enforced(&self, provided: &Provided) -> bool {
        provided.is_for_one_pod || (self.for_all_modes && provided.object_uid.is_some())
    }

    /// Returns the label of the files of containers with these options. Without a level, the runtime chooses
    /// one, and the volume has no label of its own.
    fn with(&self, options: &SELinuxOptions) -> Option<String> {
        let level = options.level.as_deref().filter(|level| !level.is_empty())?;
        let user = options.user.as_deref().filter(|user| !user.is_empty()).unwrap_or(&self.user);
        Some(format!("{user}:{}:{}:{level}", self.role, self.kind))
    }
}

/// The labels of a volume of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Labels {
    /// The volume is mounted with this label.
    pub(crate) mount: Option<String>,
    /// The label with which the volume would be mounted if volumes of all access modes were
    /// (`originalSELinuxLabel`).
    pub(crate) original: Option<String>,
    /// The plugin can mount the volume with a label.
    pub(crate) is_supported: bool,
    /// The containers that use the volume have several labels, which is no error since the volume is not
    /// mounted with one.
    pub(crate) are_several: bool,
}

/// A mismatch of labels, or its absence, which metrics count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Finding {
    /// The containers of a pod have several labels of a volume.
    PodMismatch,
    /// A pod needs another label than the pods that have the volume.
    VolumeMismatch,
    /// The first pod of a volume needs one label that the plugin can mount the volume with.
    Admitted,
}

/// Returns the labels of a volume of a pod. `files` is `None` on a machine without SELinux.
///
/// A PersistentVolume is mounted with a label if its driver supports that, the pod does not choose
/// `Recursive`, and [`FileLabel::is_enforced`].
///
/// # Errors
/// Fails if the containers that use such a volume have several labels.
pub(crate) fn labels(
    pod: &Pod,
    pod_volume: &str,
    provided: &Provided,
    rules: &DriverRules,
    files: Option<&FileLabel>,
) -> Result<Labels, String> {
    let Some(files) = files.filter(|_| !provided.is_block) else { return Ok(Labels::default()) };
    let context = pods::spec(pod).security_context.as_ref();
    let mut labels: BTreeSet<Option<String>> = BTreeSet::new();
    let mut add = |container: &Container| {
        if !container.volume_mounts.iter().flatten().any(|mount| mount.name == pod_volume) {
            return;
        }
        let own = container.security_context.as_ref().and_then(|context| context.se_linux_options.as_ref());
        let options = own.or_else(|| context.and_then(|context| context.se_linux_options.as_ref()));
        if let Some(options) = options {
            labels.insert(files.with(options));
        }
    };
    let spec = pods::spec(pod);
    spec.containers.iter().chain(pods::init_containers(pod)).for_each(&mut add);
    for container in spec.ephemeral_containers.iter().flatten() {
        add(&pod_sync_cri_config::container::container_of_ephemeral(container));
    }
    let is_enforced = files.is_enforced(provided);
    if labels.len() > 1 && !is_enforced {
        return Ok(Labels { are_several: true, ..Labels::default() });
    }
    if labels.len() > 1 {
        let list: Vec<String> = labels.into_iter().map(Option::unwrap_or_default).collect();
        return Err(format!("multiple SELinux labels found: {}", list.join(",")));
    }
    let is_recursive =
        context.and_then(|context| context.se_linux_change_policy.as_deref()) == Some("Recursive");
    // `SupportsSELinuxContextMount` of the plugin.
    let is_supported = match &provided.source {
        Source::Csi(_) => rules.selinux_mount,
        Source::InTree(volume) => volume.plugin().is_disk(),
    };
    let original = labels.pop_first().flatten().filter(|_| is_supported && !is_recursive);
    let mount = original.clone().filter(|_| is_enforced);
    Ok(Labels { mount, original, is_supported, are_several: false })
}

/// Returns what is counted about a volume when a pod that did not have it is declared; `others` are the
/// original labels of the volume for the pods that have it.
pub(crate) fn finding<'a>(
    labels: &Labels,
    mut others: impl Iterator<Item = Option<&'a str>>,
) -> Option<Finding> {
    let original = labels.original.as_deref();
    match others.next() {
        None => original.map(|_| Finding::Admitted),
        Some(first) => (labels.is_supported && first != original).then_some(Finding::VolumeMismatch),
    }
}

/// Returns why a pod cannot have a volume with a label, `None` for a volume without one, that other pods
/// should have with the labels `others` (`AddPodToVolume`).
pub(crate) fn conflict<'a>(
    spec_name: &str,
    label: Option<&str>,
    mut others: impl Iterator<Item = Option<&'a str>>,
) -> Option<String> {
    let (other, label) =
        (others.find(|other| *other != label)?.unwrap_or_default(), label.unwrap_or_default());
    Some(format!("conflicting SELinux labels of volume {spec_name}: {other:?} and {label:?}"))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::storage::v1::CSIDriver;
    use pod_sync_csi::volume::AccessMode::{self, ReadWriteOnce, ReadWriteOncePod};
    use quintlet_model::ids::PodUid;
    use quintlet_testkit::pods::pod_json;
    use serde_json::{Value, json};

    use super::*;

    const CONTEXTS: &str = "process = \"system_u:system_r:container_t:s0\"\n\
        content = \"system_u:object_r:virt_var_lib_t:s0\"\nfile = \"system_u:object_r:container_file_t:s0\"\n";

    fn mount_label(
        pod: &Pod,
        provided: &Provided,
        rules: &DriverRules,
        files: Option<&FileLabel>,
    ) -> Result<Option<String>, String> {
        labels(pod, "v", provided, rules, files).map(|labels| labels.mount)
    }

    #[test]
    fn a_volume_for_one_pod_is_mounted_with_the_label_of_the_pods_files() {
        let files = FileLabel::parse(CONTEXTS).unwrap();
        let driver = |mount: bool| -> CSIDriver {
            serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": {"seLinuxMount": mount}}))
                .unwrap()
        };
        let provided = |mode: AccessMode| {
            let source = serde_json::from_value(json!({"driver": "d"})).unwrap();
            let mut provided =
                crate::claims::of_inline(&Pod::default(), &PodUid::parse("u1").unwrap(), "v", &source);
            provided.is_for_one_pod = mode == ReadWriteOncePod;
            provided
        };
        let pod = |of_pod: Value, own: Value, policy: Value| {
            let mounts = json!([{"name": "v", "mountPath": "/v"}]);
            pod_json(json!({
                "securityContext": {"seLinuxOptions": of_pod, "seLinuxChangePolicy": policy},
                "containers": [
                    {"name": "a", "volumeMounts": mounts},
                    {"name": "b", "volumeMounts": mounts, "securityContext": {"seLinuxOptions": own}},
                    {"name": "c", "securityContext": {"seLinuxOptions": {"level": "s0:c9,c9"}}},
                ],
            }))
        };
        let (level, other) = (json!({"level": "s0:c1,c2"}), json!({"level": "s0:c3,c4"}));
        let label = || Some("system_u:object_r:container_file_t:s0:c1,c2".to_owned());
        let none = Value::Null;
        for (of_pod, own, policy, mode, supported, expected) in [
            (&level, &none, json!(null), ReadWriteOncePod, true, Ok(label())),
            (&level, &level, json!("MountOption"), ReadWriteOncePod, true, Ok(label())),
            (&level, &none, json!("Recursive"), ReadWriteOncePod, true, Ok(None)),
            (&level, &none, json!(null), ReadWriteOncePod, false, Ok(None)),
            (&level, &none, json!(null), ReadWriteOnce, true, Ok(None)),
            (&none, &none, json!(null), ReadWriteOncePod, true, Ok(None)),
            (&json!({"type": "spc_t"}), &none, json!(null), ReadWriteOncePod, true, Ok(None)),
            (
                &json!({"level": "s0:c1,c2", "user": "u", "role": "r", "type": "t"}),
                &none,
                json!(null),
                ReadWriteOncePod,
                true,
                Ok(Some("u:object_r:container_file_t:s0:c1,c2".to_owned())),
            ),
            (&level, &other, json!(null), ReadWriteOnce, true, Ok(None)),
            (
                &level,
                &other,
                json!(null),
                ReadWriteOncePod,
                false,
                Err("multiple SELinux labels found: system_u:object_r:container_file_t:s0:c1,c2,\
                     system_u:object_r:container_file_t:s0:c3,c4"
                    .to_owned()),
            ),
        ] {
            let pod = pod(of_pod.clone(), own.clone(), policy.clone());
            let rules = DriverRules::of(Some(&driver(supported)));
            let got = mount_label(&pod, &provided(mode), &rules, Some(&files));
            assert_eq!(got, expected, "{of_pod} {own} {policy} {mode:?} {supported}");
            assert_eq!(mount_label(&pod, &provided(mode), &rules, None), Ok(None));
        }
    }

    #[test]
    fn a_disk_is_mounted_with_a_label_and_other_volumes_without_a_driver_are_not() {
        let files = FileLabel::parse(CONTEXTS).unwrap();
        let pod = |own: Value, policy: Value| {
            let mounts = json!([{"name": "v", "mountPath": "/v"}]);
            pod_json(json!({
                "securityContext": {"seLinuxOptions": {"level": "s0:c1,c2"}, "seLinuxChangePolicy": policy},
                "containers": [
                    {"name": "a", "volumeMounts": mounts},
                    {"name": "b", "volumeMounts": mounts, "securityContext": {"seLinuxOptions": own}},
                ],
            }))
        };
        let provided_by = |source: Value, mode: &str, volume_mode: &str| {
            let mut volume = json!({"metadata": {"name": "pv"}, "spec": {
                "accessModes": [mode], "capacity": {"storage": "1Gi"}, "volumeMode": volume_mode,
            }});
            volume["spec"].as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
            crate::claims::of_object(&serde_json::from_value(volume).unwrap(), false).unwrap()
        };
        let iscsi =
            json!({"iscsi": {"targetPortal": "10.0.0.1", "iqn": "iqn.2017-05.com.example:a", "lun": 0}});
        let fc = json!({"fc": {"targetWWNs": ["50060e801049cfd1"], "lun": 0}});
        let nfs = json!({"nfs": {"server": "s", "path": "/a"}});
        let local = json!({"local": {"path": "/a"}});
        let host_path = json!({"hostPath": {"path": "/a"}});
        let label = || Ok(Some("system_u:object_r:container_file_t:s0:c1,c2".to_owned()));
        let other = || {
            let text = "multiple SELinux labels found: system_u:object_r:container_file_t:s0:c1,c2,\
                        system_u:object_r:container_file_t:s0:c3,c4";
            Err(text.to_owned())
        };
        let (one, two) = (json!(null), json!({"level": "s0:c3,c4"}));
        let pod_mode = "ReadWriteOncePod";
        // Source, access mode, volume mode, label of the second container, policy; the label.
        for (source, mode, volume_mode, own, policy, expected) in [
            (&iscsi, pod_mode, "Filesystem", &one, json!(null), label()),
            (&fc, pod_mode, "Filesystem", &one, json!("MountOption"), label()),
            (&fc, pod_mode, "Filesystem", &one, json!("Recursive"), Ok(None)),
            (&iscsi, "ReadWriteOnce", "Filesystem", &one, json!(null), Ok(None)),
            (&iscsi, "ReadWriteOnce", "Filesystem", &two, json!(null), Ok(None)),
            (&iscsi, pod_mode, "Filesystem", &two, json!(null), other()),
            (&iscsi, pod_mode, "Block", &two, json!(null), Ok(None)),
            (&nfs, pod_mode, "Filesystem", &one, json!(null), Ok(None)),
            (&local, pod_mode, "Filesystem", &one, json!(null), Ok(None)),
            (&host_path, pod_mode, "Filesystem", &one, json!(null), Ok(None)),
            // As in the kubelet, the labels are compared before the plugin is asked.
            (&nfs, pod_mode, "Filesystem", &two, json!(null), other()),
        ] {
            let provided = provided_by(source.clone(), mode, volume_mode);
            let pod = pod(own.clone(), policy.clone());
            let rules = DriverRules::of(None);
            let got = mount_label(&pod, &provided, &rules, Some(&files));
            assert_eq!(got, expected, "{source} {mode} {volume_mode} {own} {policy}");
            assert_eq!(mount_label(&pod, &provided, &rules, None), Ok(None));
        }
    }

    #[test]
    fn labels_of_volumes_of_all_access_modes_are_compared_and_those_for_one_pod_are_refused() {
        let files = FileLabel::parse(CONTEXTS).unwrap();
        let driver = |mount: bool| -> CSIDriver {
            serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": {"seLinuxMount": mount}}))
                .unwrap()
        };
        let pod = |levels: [&str; 2], policy: Value| {
            let container = |(name, level): (&str, &str)| {
                json!({"name": name, "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                    "securityContext": {"seLinuxOptions": {"level": level}}})
            };
            pod_json(json!({
                "securityContext": {"seLinuxChangePolicy": policy},
                "containers": [container(("a", levels[0])), container(("b", levels[1]))],
            }))
        };
        let source = serde_json::from_value(json!({"driver": "d"})).unwrap();
        let volume = crate::claims::of_inline(&Pod::default(), &PodUid::parse("u1").unwrap(), "v", &source);
        let label = |level: &str| Some(format!("system_u:object_r:container_file_t:{level}"));
        let none = Labels::default();
        let several = Labels { are_several: true, ..none.clone() };
        let wanted =
            |mount| Labels { mount, original: label("s0:c1"), is_supported: true, are_several: false };
        // Levels of the containers, policy, support of the driver, whether the volume is for one pod; the
        // labels.
        for (levels, policy, supported, one_pod, expected) in [
            (["s0:c1", "s0:c1"], json!(null), true, false, Some(wanted(None))),
            (["s0:c1", "s0:c1"], json!(null), true, true, Some(wanted(label("s0:c1")))),
            (
                ["s0:c1", "s0:c1"],
                json!("Recursive"),
                true,
                false,
                Some(Labels { original: None, ..wanted(None) }),
            ),
            (["s0:c1", "s0:c1"], json!(null), false, false, Some(none.clone())),
            (["s0:c1", "s0:c2"], json!(null), true, false, Some(several.clone())),
            (["s0:c1", "s0:c2"], json!(null), false, false, Some(several)),
            (["s0:c1", "s0:c2"], json!(null), true, true, None),
        ] {
            let provided = Provided { is_for_one_pod: one_pod, ..volume.clone() };
            let rules = DriverRules::of(Some(&driver(supported)));
            let pod = pod(levels, policy.clone());
            let got = labels(&pod, "v", &provided, &rules, Some(&files)).ok();
            assert_eq!(got, expected, "{levels:?} {policy} {supported} {one_pod}");
            assert_eq!(labels(&pod, "v", &provided, &rules, None), Ok(none.clone()));
        }
    }

    #[test]
    fn persistent_volumes_of_all_access_modes_are_mounted_with_a_label_by_the_feature_gate() {
        let driver: CSIDriver =
            serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": {"seLinuxMount": true}}))
                .unwrap();
        let rules = DriverRules::of(Some(&driver));
        let source = serde_json::from_value(json!({"driver": "d"})).unwrap();
        let inline = crate::claims::of_inline(&Pod::default(), &PodUid::parse("u1").unwrap(), "v", &source);
        let persistent = Provided { object_uid: Some("u2".to_owned()), ..inline.clone() };
        let pod = |second: &str, policy: Value| {
            let container = |(name, level): (&str, &str)| {
                json!({"name": name, "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                    "securityContext": {"seLinuxOptions": {"level": level}}})
            };
            pod_json(json!({
                "securityContext": {"seLinuxChangePolicy": policy},
                "containers": [container(("a", "s0:c1")), container(("b", second))],
            }))
        };
        let label = || Ok(Some("system_u:object_r:container_file_t:s0:c1".to_owned()));
        let several = || {
            let text = "multiple SELinux labels found: system_u:object_r:container_file_t:s0:c1,\
                        system_u:object_r:container_file_t:s0:c2";
            Err(text.to_owned())
        };
        // The gate, the volume, the level of the second container, the policy; the label.
        for (gate, volume, second, policy, expected) in [
            (true, &persistent, "s0:c1", json!(null), label()),
            (true, &persistent, "s0:c1", json!("MountOption"), label()),
            (true, &persistent, "s0:c1", json!("Recursive"), Ok(None)),
            (true, &persistent, "s0:c2", json!(null), several()),
            // As in the kubelet, the labels are compared before the policy is read.
            (true, &persistent, "s0:c2", json!("Recursive"), several()),
            (true, &inline, "s0:c1", json!(null), Ok(None)),
            (true, &inline, "s0:c2", json!(null), Ok(None)),
            (false, &persistent, "s0:c1", json!(null), Ok(None)),
            (false, &persistent, "s0:c2", json!(null), Ok(None)),
        ] {
            let files = FileLabel::parse(CONTEXTS).unwrap().for_all_modes(gate);
            let got = mount_label(&pod(second, policy.clone()), volume, &rules, Some(&files));
            assert_eq!(got, expected, "{gate} {:?} {second} {policy}", volume.object_uid);
        }
    }

    #[test]
    fn the_first_pod_of_a_volume_is_admitted_and_another_label_later_is_a_mismatch() {
        let labels = |original: Option<&str>, is_supported| Labels {
            original: original.map(str::to_owned),
            is_supported,
            ..Labels::default()
        };
        // Label of the pod, support of the plugin, labels of the pods that have the volume.
        for (original, supported, others, expected) in [
            (Some("a"), true, &[][..], Some(Finding::Admitted)),
            (None, true, &[], None),
            (None, false, &[], None),
            (Some("a"), true, &[Some("a")], None),
            (Some("a"), true, &[Some("b")], Some(Finding::VolumeMismatch)),
            (Some("a"), true, &[None], Some(Finding::VolumeMismatch)),
            (None, true, &[Some("b")], Some(Finding::VolumeMismatch)),
            (None, false, &[Some("b")], None),
        ] {
            let got = finding(&labels(original, supported), others.iter().copied());
            assert_eq!(got, expected, "{original:?} {supported} {others:?}");
        }
    }

    #[test]
    fn a_pod_with_another_label_than_the_pods_of_the_volume_is_refused() {
        let conflict = |label, others: &[Option<&str>]| conflict("pv", label, others.iter().copied());
        let text = |first: &str, second: &str| {
            Some(format!("conflicting SELinux labels of volume pv: \"{first}\" and \"{second}\""))
        };
        for (label, others, expected) in [
            (Some("a"), &[][..], None),
            (Some("a"), &[Some("a")], None),
            (None, &[None, None], None),
            (Some("b"), &[Some("a")], text("a", "b")),
            (None, &[Some("a")], text("a", "")),
            (Some("a"), &[Some("a"), None], text("", "a")),
        ] {
            assert_eq!(conflict(label, others), expected, "{label:?} {others:?}");
        }
    }

    #[test]
    fn the_label_of_containers_files_comes_from_the_machines_policy() {
        const SHARED: &str = "usr/share/containers/selinux/contexts";
        const CONFIG: &str = "etc/selinux/config";
        const TARGETED: &str = "etc/selinux/targeted/contexts/lxc_contexts";
        let config = "# SELINUXTYPE=minimum\nSELINUX=enforcing\n\n SELINUXTYPE=targeted \nSELINUXTYPE=mls\n";
        let quoted = "SELINUXTYPE=\"targeted\"\n";
        let file = |label: &str| format!("process = \"p:p:p\"\nfile = {label}\n");
        let (a, b) = (file("\"u:r:a:s0\""), file("u:r:b:s0"));
        let twice = format!("{a}; file = \"u:r:x:s0\"\n{b}");
        // Files of the machine; the type of the label.
        type Row<'a> = (&'a [(&'a str, &'a str)], Option<&'a str>);
        let table: [Row<'_>; 12] = [
            (&[(SHARED, CONTEXTS)], Some("container_file_t")),
            (&[(SHARED, &a), (CONFIG, config), (TARGETED, &b)], Some("a")),
            (&[(CONFIG, config), (TARGETED, &b)], Some("b")),
            (&[(CONFIG, quoted), (TARGETED, &b)], Some("b")),
            (&[(CONFIG, config)], None),
            (&[(TARGETED, &b)], None),
            (&[(CONFIG, "SELINUX=enforcing\n"), (TARGETED, &b)], None),
            (&[(SHARED, "process = \"a:b:c:d\"\n"), (CONFIG, config), (TARGETED, &b)], None),
            (&[(SHARED, "file = \"u:r\"\n")], None),
            (&[(SHARED, "# file = \"u:r:t\"\n")], None),
            (&[(SHARED, &twice)], Some("b")),
            (&[], None),
        ];
        for (files, expected) in table {
            let root = tempfile::tempdir().unwrap();
            for (path, content) in files {
                let path = root.path().join(path);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, content).unwrap();
            }
            let label = FileLabel::read(root.path());
            assert_eq!(label.map(|label| label.kind).as_deref(), expected, "{files:?}");
        }
    }
}
