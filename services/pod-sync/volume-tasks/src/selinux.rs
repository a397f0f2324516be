//! SELinux labels with which volumes are mounted (`pkg/volume/util/selinux.go: GetMountSELinuxLabel`).

use std::collections::BTreeSet;
use std::path::Path;

use k8s_openapi::api::core::v1::{Container, Pod, SELinuxOptions};
use quintlet_model::pod as pods;

use crate::claims::{DriverRules, Provided};

/// Default label of containers' files, such as `system_u:object_r:container_file_t:s0`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileLabel {
    user: String,
    role: String,
    kind: String,
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
        Some(Self { user: parts.next()?, role: parts.next()?, kind: parts.next()? })
    }

    /// Returns the label of the files of containers with these options. Without a level, the runtime chooses one, and the volume
    /// has no label of its own.
    fn with(&self, options: &SELinuxOptions) -> Option<String> {
        let level = options.level.as_deref().filter(|level| !level.is_empty())?;
        let user = options.user.as_deref().filter(|user| !user.is_empty()).unwrap_or(&self.user);
        Some(format!("{user}:{}:{}:{level}", self.role, self.kind))
    }
}

/// Returns the label with which a volume of a pod is mounted. `files` is `None` on a machine without SELinux.
///
/// Only a volume for one pod is mounted with a label, if its driver supports that and the pod does not choose `Recursive`.
///
/// # Errors
/// Fails if the containers that use such a volume have several labels.
pub(crate) fn mount_label(
    pod: &Pod,
    pod_volume: &str,
    provided: &Provided,
    rules: &DriverRules,
    files: Option<&FileLabel>,
) -> Result<Option<String>, String> {
    let Some(files) = files else { return Ok(None) };
    if !provided.is_for_one_pod || provided.is_block {
        return Ok(None);
    }
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
    if labels.len() > 1 {
        let list: Vec<String> = labels.into_iter().map(Option::unwrap_or_default).collect();
        return Err(format!("multiple SELinux labels found: {}", list.join(",")));
    }
    let is_recursive =
        context.and_then(|context| context.se_linux_change_policy.as_deref()) == Some("Recursive");
    Ok(labels.pop_first().flatten().filter(|_| rules.selinux_mount && !is_recursive))
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
            let got = mount_label(&pod, "v", &provided(mode), &rules, Some(&files));
            assert_eq!(got, expected, "{of_pod} {own} {policy} {mode:?} {supported}");
            assert_eq!(mount_label(&pod, "v", &provided(mode), &rules, None), Ok(None));
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
