//! Computes the mounts of a container, including `/etc/hosts` and the termination log
//! (`pkg/kubelet: makeMounts`).

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, Pod, VolumeMount};
use pod_sync_layout::{HandlerFeatures, NodeSettings, paths};
use quintlet_cri_api::v1::{Device, IdMapping, ImageSpec, Mount, MountPropagation};
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use quintlet_model::pod;
use rand::RngExt as _;

use super::env::{Env, expand_sub_path, sort_pod_ips};
use super::error::ConfigError;
use super::hostname::pod_hostname;
use super::{hosts, subpath};

const ETC_HOSTS: &str = "/etc/hosts";

/// A volume that is set up on the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    /// Name of the volume's directory: that of its PersistentVolume, or that in the pod. Subpaths are bound
    /// below it, where a kubelet looks for those to unmount (`CleanSubPaths`).
    pub spec_name: String,
    /// Path on the node; empty for an image volume, which the runtime mounts.
    pub host_path: PathBuf,
    /// Volumes of this kind are read-only in containers.
    pub read_only: bool,
    /// The runtime sets SELinux labels on its files.
    pub relabel: bool,
}

/// Volumes of a pod, by name.
pub type MountedVolumes = BTreeMap<String, MountedVolume>;

/// Input of [`make_mounts`].
#[derive(Debug, Clone, Copy)]
pub struct MountsInput<'a> {
    /// The pod with the volumes.
    pub pod: &'a Pod,
    /// UID of the pod, which its directories are named by.
    pub uid: &'a PodUid,
    /// The container with the mounts.
    pub container: &'a Container,
    /// Directories and settings of the node.
    pub node: &'a NodeSettings,
    /// The volumes that are set up.
    pub volumes: &'a MountedVolumes,
    /// Images of the pod's image volumes, by the name of the volume.
    pub images: &'a BTreeMap<String, ImageSpec>,
    /// Environment variables, for `subPathExpr`.
    pub env: &'a Env,
    /// IP addresses of the sandbox.
    pub pod_ips: &'a [IpAddr],
    /// Features of the pod's runtime handler.
    pub features: HandlerFeatures,
    /// User and group ID mappings, if the pod has a user namespace.
    pub id_mappings: Option<(&'a [IdMapping], &'a [IdMapping])>,
}

/// Returns the mounts of a container, in the kubelet's order. Binds subpaths, writes the hosts file and
/// creates a termination log. Blocks; called for each start of a container.
///
/// # Errors
/// The message becomes that of waiting reason `CreateContainerConfigError`.
pub fn make_mounts(input: MountsInput<'_>) -> Result<Vec<Mount>, ConfigError> {
    let pod_dir = paths::pod_dir(&input.node.root_dir, input.uid);
    let mut out = Vec::new();
    let mut own_hosts = false;
    for (index, mount) in input.container.volume_mounts.iter().flatten().enumerate() {
        own_hosts |= mount.mount_path == ETC_HOSTS;
        let sub = sub_path(mount, input.env)?;
        let made = volume_mount(input, mount)?;
        out.push(match input.images.get(&mount.name) {
            Some(image) => image_mount(made, image, sub),
            None => Mount { host_path: host_path(input, mount, &sub, index, &pod_dir)?, ..made },
        });
    }
    if !own_hosts && (pod::host_network(input.pod) || !input.pod_ips.is_empty()) {
        let path = write_hosts(input, &pod_dir)?;
        out.push(file_mount(&path, ETC_HOSTS, input.node.selinux));
    }
    if let Some(inside) = input.container.termination_message_path.as_deref().filter(|p| !p.is_empty()) {
        let path = new_termination_log(&pod_dir, &input.container.name)
            .map_err(|e| ConfigError::io("cannot create the termination log", e))?;
        out.push(file_mount(&path, &make_absolute(inside), input.node.selinux));
    }
    if let Some((uids, gids)) = input.id_mappings {
        for mount in &mut out {
            mount.uid_mappings = uids.to_vec();
            mount.gid_mappings = gids.to_vec();
        }
    }
    Ok(out)
}

/// Returns the block devices of a container (`pkg/kubelet: makeBlockVolumes`). A volume whose link to its
/// device is absent is left out. Blocks.
///
/// # Errors
/// The message becomes that of waiting reason `CreateContainerConfigError`.
pub fn block_devices(container: &Container, volumes: &MountedVolumes) -> Result<Vec<Device>, ConfigError> {
    let mut out = Vec::new();
    for device in container.volume_devices.iter().flatten() {
        if !device.device_path.starts_with('/') {
            let text = format!("error DevicePath `{}` must be an absolute path", device.device_path);
            return Err(ConfigError::invalid(text));
        }
        let volume = volumes.get(&device.name).ok_or_else(|| {
            let (volume, container) = (&device.name, &container.name);
            ConfigError::invalid(format!(
                "cannot find volume {volume:?} to pass into container {container:?}"
            ))
        })?;
        if !volume.host_path.is_symlink() {
            continue;
        }
        let permissions = if volume.read_only { "r" } else { "mrw" };
        out.push(Device {
            container_path: device.device_path.clone(),
            host_path: volume.host_path.display().to_string(),
            permissions: permissions.to_owned(),
        });
    }
    Ok(out)
}

fn file_mount(host: &Path, inside: &str, relabel: bool) -> Mount {
    Mount {
        container_path: inside.to_owned(),
        host_path: host.display().to_string(),
        selinux_relabel: relabel,
        ..Mount::default()
    }
}

/// Returns a container path as an absolute path (`pkg/volume/util: MakeAbsolutePath`).
#[must_use]
pub fn make_absolute(path: &str) -> String {
    if path.starts_with('/') { path.to_owned() } else { format!("/{path}") }
}

fn volume<'a>(input: MountsInput<'a>, mount: &VolumeMount) -> Result<&'a MountedVolume, ConfigError> {
    input.volumes.get(&mount.name).ok_or_else(|| {
        let (volume, container) = (&mount.name, &input.container.name);
        ConfigError::invalid(format!("cannot find volume {volume:?} to mount into container {container:?}"))
    })
}

/// Returns a mount without its path on the node.
fn volume_mount(input: MountsInput<'_>, mount: &VolumeMount) -> Result<Mount, ConfigError> {
    let volume = volume(input, mount)?;
    let propagation = propagation(mount.mount_propagation.as_deref())?;
    let recursive = recursive_read_only(mount, input.features).map_err(|problem| {
        ConfigError::invalid(format!("failed to resolve recursive read-only mode: {problem}"))
    })?;
    Ok(Mount {
        container_path: make_absolute(&mount.mount_path),
        readonly: volume.read_only || mount.read_only.unwrap_or(false),
        selinux_relabel: input.node.selinux && volume.relabel,
        propagation: propagation as i32,
        recursive_read_only: recursive,
        mount_options: bind_mount_options(input, mount)?,
        ..Mount::default()
    })
}

/// Returns the options of a mount. They restrict the container, so it does not start without them.
fn bind_mount_options(input: MountsInput<'_>, mount: &VolumeMount) -> Result<Vec<String>, ConfigError> {
    let options = mount.bind_mount_options.clone().unwrap_or_default();
    if options.is_empty() || input.node.field_gates.bind_mount_options && input.features.mount_options {
        return Ok(options);
    }
    let path = &mount.mount_path;
    let missing = if input.node.field_gates.bind_mount_options {
        "the container runtime does not support mount options"
    } else {
        "the feature gate VolumeBindMountOptions is off"
    };
    Err(ConfigError::invalid(format!(
        "failed to apply bindMountOptions [{}] of mount {path:?}: {missing}",
        options.join(" ")
    )))
}

fn image_mount(mount: Mount, image: &ImageSpec, sub: String) -> Mount {
    Mount { readonly: true, image: Some(image.clone()), image_sub_path: sub, ..mount }
}

/// Returns the path within the volume; empty for the whole volume.
fn sub_path(mount: &VolumeMount, env: &Env) -> Result<String, ConfigError> {
    let sub = match mount.sub_path_expr.as_deref().filter(|e| !e.is_empty()) {
        Some(expression) => expand_sub_path(expression, env)?,
        None => mount.sub_path.clone().unwrap_or_default(),
    };
    let path = Path::new(&sub);
    if path.is_absolute() {
        return Err(ConfigError::invalid(format!("error SubPath `{sub}` must not be an absolute path")));
    }
    if path.components().any(|c| c == Component::ParentDir) {
        return Err(ConfigError::invalid(format!(
            "unable to provision SubPath `{sub}`: must not contain '..'"
        )));
    }
    Ok(sub)
}

fn host_path(
    input: MountsInput<'_>,
    mount: &VolumeMount,
    sub: &str,
    index: usize,
    pod_dir: &Path,
) -> Result<String, ConfigError> {
    let (volume, container) = (volume(input, mount)?, &input.container.name);
    if sub.is_empty() {
        return Ok(volume.host_path.display().to_string());
    }
    let at = subpath::target(pod_dir, &volume.spec_name, container, index);
    prepare_sub_path(sub, mount, container, &volume.host_path, &at)?;
    Ok(at.display().to_string())
}

fn prepare_sub_path(
    sub: &str,
    mount: &VolumeMount,
    container: &str,
    volume: &Path,
    at: &Path,
) -> Result<(), ConfigError> {
    let path = Path::new(sub);
    // A directory is created only if it is known not to exist.
    if fs::symlink_metadata(volume.join(path)).is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
        let make = || -> io::Result<()> {
            let mode = fs::metadata(volume)?.permissions().mode();
            subpath::make_dirs(volume, path, mode)
        };
        if let Err(e) = make() {
            tracing::info!(volume = %volume.display(), sub, error = %e, "subPath directory creation failed");
            return Err(ConfigError::invalid(format!(
                "failed to create subPath directory for volumeMount {:?} of container {container:?}",
                mount.name
            )));
        }
    }
    subpath::bind(volume, path, at).map_err(|e| {
        // The pod may control the path, so the reason of the failure is only logged, as in the kubelet.
        tracing::info!(volume = %volume.display(), sub, error = %e, "subPath preparation failed");
        ConfigError::invalid(format!(
            "failed to prepare subPath for volumeMount {:?} of container {container:?}",
            mount.name
        ))
    })
}

fn propagation(mode: Option<&str>) -> Result<MountPropagation, ConfigError> {
    match mode {
        None | Some("None") => Ok(MountPropagation::PropagationPrivate),
        Some("HostToContainer") => Ok(MountPropagation::PropagationHostToContainer),
        Some("Bidirectional") => Ok(MountPropagation::PropagationBidirectional),
        Some(other) => Err(ConfigError::invalid(format!("invalid MountPropagation mode: {other:?}"))),
    }
}

fn recursive_read_only(mount: &VolumeMount, features: HandlerFeatures) -> Result<bool, String> {
    let mode = match mount.recursive_read_only.as_deref() {
        None | Some("Disabled") => return Ok(false),
        Some(mode) => mode,
    };
    let problem = format!("volume {:?} requested recursive read-only mode, but it is not", mount.name);
    if !mount.read_only.unwrap_or(false) {
        return Err(format!("{problem} read-only"));
    }
    if let Some(p) = mount.mount_propagation.as_deref().filter(|p| *p != "None") {
        return Err(format!("{problem} compatible with propagation {p:?}"));
    }
    match mode {
        "IfPossible" => Ok(features.recursive_read_only_mounts),
        "Enabled" if features.recursive_read_only_mounts => Ok(true),
        "Enabled" => Err(format!("{problem} supported by the runtime")),
        other => Err(format!("unknown recursive read-only mode {other:?}")),
    }
}

// Written in place: running containers have this file mounted.
fn write_hosts(input: MountsInput<'_>, pod_dir: &Path) -> Result<PathBuf, ConfigError> {
    let spec = pod::spec(input.pod);
    let aliases = spec.host_aliases.as_deref().unwrap_or_default();
    let text = if pod::host_network(input.pod) {
        let node_file =
            fs::read(ETC_HOSTS).map_err(|e| ConfigError::io("cannot read the node's /etc/hosts", e))?;
        hosts::host_network_hosts(&node_file, aliases)
    } else {
        let name = pod_hostname(input.pod, &input.node.cluster_domain)?;
        hosts::pod_hosts(&sort_pod_ips(input.pod_ips, input.node.node_ips.first()), &name, aliases)
            .into_bytes()
    };
    let path = pod_dir.join("etc-hosts");
    let write = || -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o750).create(pod_dir)?;
        let mut file =
            fs::OpenOptions::new().create(true).write(true).truncate(true).mode(0o644).open(&path)?;
        file.write_all(&text)?;
        file.set_permissions(fs::Permissions::from_mode(0o644))
    };
    failpoint::file!("hosts file written", write)
        .map_err(|e| ConfigError::io("cannot write the hosts file", e))?;
    Ok(path)
}

/// Creates an empty termination log `containers/<container>/<8 hex digits>` that every user of the container
/// may write.
///
/// # Errors
/// The directory or file cannot be created.
pub fn new_termination_log(pod_dir: &Path, container: &str) -> io::Result<PathBuf> {
    let dir = pod_dir.join("containers").join(container);
    fs::DirBuilder::new().recursive(true).mode(0o750).create(&dir)?;
    let path = dir.join(format!("{:08x}", rand::rng().random::<u32>()));
    let file = failpoint::file!("termination log made", || {
        fs::OpenOptions::new().create_new(true).write(true).open(&path)
    })?;
    file.set_permissions(fs::Permissions::from_mode(0o666))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use quintlet_testkit::pods::pod_of;
    use serde_json::{Value, json};

    struct Root {
        dir: tempfile::TempDir,
        node: NodeSettings,
        volumes: MountedVolumes,
        images: BTreeMap<String, ImageSpec>,
    }

    impl Root {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let volume = dir.path().join("v");
            fs::create_dir(&volume).unwrap();
            fs::write(volume.join("f"), "x").unwrap();
            std::os::unix::fs::symlink("/etc", volume.join("out")).unwrap();
            let plain = MountedVolume {
                spec_name: "pv".to_owned(),
                host_path: volume.clone(),
                read_only: false,
                relabel: true,
            };
            let fixed = MountedVolume { read_only: true, ..plain.clone() };
            let node = NodeSettings {
                root_dir: dir.path().to_owned(),
                node_ips: vec!["192.168.0.1".parse().unwrap()].into(),
                ..NodeSettings::default()
            };
            let image = MountedVolume { host_path: PathBuf::new(), relabel: false, ..fixed.clone() };
            let spec = ImageSpec { image: "sha256:1".to_owned(), ..ImageSpec::default() };
            Self {
                dir,
                node,
                volumes: [("v".to_owned(), plain), ("ro".to_owned(), fixed), ("image".to_owned(), image)]
                    .into(),
                images: [("image".to_owned(), spec)].into(),
            }
        }

        fn run(&self, spec: Value, ips: &[&str], features: HandlerFeatures) -> Result<Vec<Mount>, String> {
            let p = pod_of(spec);
            let ips: Vec<IpAddr> = ips.iter().map(|i| i.parse().unwrap()).collect();
            let env = [("SUB".to_owned(), b"made".to_vec()), ("UP".to_owned(), b"..".to_vec())].into();
            make_mounts(MountsInput {
                pod: &p,
                uid: &PodUid::parse("u1").unwrap(),
                container: &p.spec.as_ref().unwrap().containers[0],
                node: &self.node,
                volumes: &self.volumes,
                images: &self.images,
                env: &env,
                pod_ips: &ips,
                features,
                id_mappings: None,
            })
            .map_err(|e| e.to_string())
        }

        fn one(&self, mount: Value) -> Result<Mount, String> {
            self.run(
                json!({"containers": [{"name": "c", "volumeMounts": [mount]}]}),
                &[],
                HandlerFeatures::default(),
            )
            .map(|m| m[0].clone())
        }
    }

    impl Drop for Root {
        fn drop(&mut self) {
            for i in 0..4 {
                let at = subpath::target(&self.dir.path().join("pods/u1"), "pv", "c", i);
                let _ = subpath::unmount_all(&at);
            }
        }
    }

    #[test]
    fn a_device_is_passed_by_its_link_and_one_without_a_link_is_left_out() {
        let root = Root::new();
        let link = root.dir.path().join("device");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        let volume = |host_path: PathBuf, read_only| {
            let spec_name = "pv".to_owned();
            MountedVolume { spec_name, host_path, read_only, relabel: false }
        };
        let volumes = MountedVolumes::from([
            ("rw".to_owned(), volume(link.clone(), false)),
            ("ro".to_owned(), volume(link.clone(), true)),
            ("absent".to_owned(), volume(root.dir.path().join("nothing"), false)),
        ]);
        let device_paths = |name: &str, path: &str| {
            let pod = pod_of(json!({"containers": [
                {"name": "c", "volumeDevices": [{"name": name, "devicePath": path}]},
            ]}));
            let devices = block_devices(&pod.spec.as_ref().unwrap().containers[0], &volumes);
            devices.map(|all| {
                let text = |d: &Device| format!("{} {} {}", d.container_path, d.host_path, d.permissions);
                all.iter().map(text).collect::<Vec<_>>()
            })
        };
        let link = link.display();
        assert_eq!(device_paths("rw", "/dev/x").unwrap(), [format!("/dev/x {link} mrw")]);
        assert_eq!(device_paths("ro", "/dev/x").unwrap(), [format!("/dev/x {link} r")]);
        assert!(device_paths("absent", "/dev/x").unwrap().is_empty());
        let text = |name: &str, path: &str| device_paths(name, path).unwrap_err().to_string();
        assert_eq!(text("rw", "x"), "error DevicePath `x` must be an absolute path");
        assert_eq!(text("other", "/x"), "cannot find volume \"other\" to pass into container \"c\"");
    }

    #[test]
    fn volumes_hosts_and_termination_log_come_in_this_order() {
        let root = Root::new();
        let spec = json!({"containers": [{"name": "c", "terminationMessagePath": "/dev/termination-log",
            "volumeMounts": [{"name": "ro", "mountPath": "data"}, {"name": "v", "mountPath": "/b", "readOnly": true}]}]});
        let got = root.run(spec, &["10.0.0.5"], HandlerFeatures::default()).unwrap();
        let short: Vec<(&str, bool)> = got.iter().map(|m| (m.container_path.as_str(), m.readonly)).collect();
        assert_eq!(
            short,
            [("/data", true), ("/b", true), ("/etc/hosts", false), ("/dev/termination-log", false)]
        );
        let hosts = fs::read_to_string(&got[2].host_path).unwrap();
        assert!(hosts.ends_with("10.0.0.5\tweb\n"));
        let log = fs::metadata(&got[3].host_path).unwrap();
        assert_eq!((log.permissions().mode() & 0o777, log.len()), (0o666, 0));
        let name = Path::new(&got[3].host_path).file_name().unwrap().to_str().unwrap();
        assert_eq!(name.len(), 8);
        assert!(got.iter().all(|m| !m.selinux_relabel));
    }

    #[test]
    fn the_hosts_file_is_managed_unless_the_container_mounts_one() {
        let root = Root::new();
        let count =
            |spec: Value, ips: &[&str]| root.run(spec, ips, HandlerFeatures::default()).unwrap().len();
        assert_eq!(count(json!({"containers": [{"name": "c"}]}), &[]), 0);
        assert_eq!(count(json!({"hostNetwork": true, "containers": [{"name": "c"}]}), &[]), 1);
        let own = json!({"containers": [{"name": "c", "volumeMounts": [{"name": "v", "mountPath": "/etc/hosts"}]}]});
        assert_eq!(count(own, &["10.0.0.5"]), 1);
        let text = fs::read_to_string(root.dir.path().join("pods/u1/etc-hosts")).unwrap();
        assert!(text.starts_with("# Kubernetes-managed hosts file (host network).\n"));
    }

    #[test]
    fn a_hosts_file_that_a_container_extended_is_recreated_for_the_next_container() {
        let root = Root::new();
        let start = || {
            let spec = json!({"containers": [{"name": "c"}]});
            root.run(spec, &["10.0.0.5"], HandlerFeatures::default()).unwrap();
        };
        start();
        let path = root.dir.path().join("pods/u1/etc-hosts");
        let text = fs::read(&path).unwrap();
        fs::write(&path, vec![b'#'; 1 << 20]).unwrap();
        start();
        assert_eq!(fs::metadata(&path).unwrap().len(), u64::try_from(text.len()).unwrap());
        assert_eq!(fs::read(&path).unwrap(), text);
    }

    #[test]
    fn an_invalid_mount_names_the_violated_rule() {
        let root = Root::new();
        let m = |more: Value| {
            let mut mount = json!({"name": "v", "mountPath": "/m"});
            mount.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            root.one(mount).unwrap_err()
        };
        for (more, want) in [
            (json!({"name": "x"}), "cannot find volume \"x\" to mount into container \"c\""),
            (json!({"subPath": "/a"}), "error SubPath `/a` must not be an absolute path"),
            (json!({"subPath": "a/../b"}), "unable to provision SubPath `a/../b`: must not contain '..'"),
            (json!({"subPathExpr": "$(NO)"}), "missing value for NO"),
            (json!({"subPath": "out"}), "failed to prepare subPath for volumeMount \"v\" of container \"c\""),
            (
                json!({"subPath": "out/new"}),
                "failed to create subPath directory for volumeMount \"v\" of container \"c\"",
            ),
            (
                json!({"subPath": "f/new"}),
                "failed to prepare subPath for volumeMount \"v\" of container \"c\"",
            ),
            (json!({"name": "image", "subPath": "/a"}), "error SubPath `/a` must not be an absolute path"),
            (
                json!({"name": "image", "subPathExpr": "$(UP)/a"}),
                "unable to provision SubPath `../a`: must not contain '..'",
            ),
            (json!({"name": "image", "subPathExpr": "$(NO)"}), "missing value for NO"),
            (
                json!({"name": "image", "recursiveReadOnly": "Enabled", "readOnly": true}),
                "failed to resolve recursive read-only mode: volume \"image\" requested recursive read-only mode, but it is not supported by the runtime",
            ),
            (json!({"mountPropagation": "X"}), "invalid MountPropagation mode: \"X\""),
            (
                json!({"recursiveReadOnly": "Enabled"}),
                "failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but it is not read-only",
            ),
            (
                json!({"recursiveReadOnly": "Enabled", "readOnly": true, "mountPropagation": "HostToContainer"}),
                "failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but it is not compatible with propagation \"HostToContainer\"",
            ),
            (
                json!({"recursiveReadOnly": "Enabled", "readOnly": true}),
                "failed to resolve recursive read-only mode: volume \"v\" requested recursive read-only mode, but it is not supported by the runtime",
            ),
            (
                json!({"recursiveReadOnly": "X", "readOnly": true}),
                "failed to resolve recursive read-only mode: unknown recursive read-only mode \"X\"",
            ),
        ] {
            assert_eq!(m(more.clone()), want, "{more}");
        }
    }

    #[test]
    fn propagation_and_recursive_read_only_reach_the_runtime() {
        let root = Root::new();
        let mount = |more: Value, able: bool| {
            let mut mount = json!({"name": "v", "mountPath": "/m", "readOnly": true});
            mount.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let features = HandlerFeatures { recursive_read_only_mounts: able, ..HandlerFeatures::default() };
            let spec = json!({"containers": [{"name": "c", "volumeMounts": [mount]}]});
            let m = root.run(spec, &[], features).unwrap().remove(0);
            (m.propagation, m.recursive_read_only)
        };
        assert_eq!(mount(json!({}), true), (0, false));
        assert_eq!(mount(json!({"mountPropagation": "HostToContainer"}), true), (1, false));
        assert_eq!(mount(json!({"mountPropagation": "Bidirectional"}), true), (2, false));
        assert_eq!(mount(json!({"recursiveReadOnly": "IfPossible"}), false), (0, false));
        assert_eq!(mount(json!({"recursiveReadOnly": "IfPossible"}), true), (0, true));
        assert_eq!(mount(json!({"recursiveReadOnly": "Enabled"}), true), (0, true));
    }

    #[test]
    fn a_container_with_bind_mount_options_starts_only_if_the_runtime_applies_them() {
        let mut root = Root::new();
        let mount = json!({"name": "v", "mountPath": "/m", "bindMountOptions": ["noexec", "nodev"]});
        let spec = json!({"containers": [{"name": "c", "volumeMounts": [
            mount, {"name": "v", "mountPath": "/n", "bindMountOptions": []}]}]});
        let mut outcome = |gate, mount_options| {
            root.node.field_gates.bind_mount_options = gate;
            let features = HandlerFeatures { mount_options, ..HandlerFeatures::default() };
            let mounts = root.run(spec.clone(), &[], features)?;
            Ok::<_, String>(mounts.into_iter().map(|mount| mount.mount_options).collect::<Vec<_>>())
        };
        let options = vec!["noexec".to_owned(), "nodev".to_owned()];
        assert_eq!(outcome(true, true).unwrap(), [options, Vec::new()]);
        let refused = |missing: &str| {
            format!("failed to apply bindMountOptions [noexec nodev] of mount \"/m\": {missing}")
        };
        let runtime = refused("the container runtime does not support mount options");
        assert_eq!(outcome(true, false).unwrap_err(), runtime);
        let gate = refused("the feature gate VolumeBindMountOptions is off");
        assert_eq!(outcome(false, true).unwrap_err(), gate);
    }

    #[test]
    fn an_image_volume_has_the_options_of_its_mount_and_the_place_of_the_mount() {
        let root = Root::new();
        let spec = json!({"containers": [{"name": "c", "volumeMounts": [
            {"name": "image", "mountPath": "models", "subPathExpr": "v1/$(SUB)"},
            {"name": "v", "mountPath": "/v"},
            {"name": "image", "mountPath": "/all", "readOnly": true, "recursiveReadOnly": "IfPossible"},
            {"name": "image", "mountPath": "/part", "subPath": "a/b", "mountPropagation": "HostToContainer"}]}]});
        let features = HandlerFeatures { recursive_read_only_mounts: true, ..HandlerFeatures::default() };
        let got = root.run(spec, &[], features).unwrap();
        let short = |m: &Mount| {
            let image = m.image.as_ref().map(|i| i.image.clone()).unwrap_or_default();
            let flags = (m.readonly, m.recursive_read_only, m.propagation);
            (m.container_path.clone(), image, m.image_sub_path.clone(), m.host_path.is_empty(), flags)
        };
        let row = |path: &str, image: &str, sub: &str, flags| {
            (path.to_owned(), image.to_owned(), sub.to_owned(), !image.is_empty(), flags)
        };
        let want = [
            row("/models", "sha256:1", "v1/made", (true, false, 0)),
            row("/v", "", "", (false, false, 0)),
            row("/all", "sha256:1", "", (true, true, 0)),
            row("/part", "sha256:1", "a/b", (true, false, 1)),
        ];
        assert_eq!(got.iter().map(short).collect::<Vec<_>>(), want);
        assert!(!root.dir.path().join("pods/u1/volume-subpaths").exists(), "nothing is made on the node");
    }

    #[test]
    fn a_sub_path_is_bound_below_the_pods_directory_by_the_name_of_the_volumes_directory() {
        let root = Root::new();
        let spec = json!({"containers": [{"name": "c", "volumeMounts": [
            {"name": "v", "mountPath": "/f", "subPath": "f"}, {"name": "v", "mountPath": "/d", "subPathExpr": "$(SUB)/x"}]}]});
        let got = root.run(spec, &[], HandlerFeatures::default()).unwrap();
        let base = root.dir.path().join("pods/u1/volume-subpaths/pv/c");
        assert_eq!(Path::new(&got[0].host_path), base.join("0"));
        assert_eq!(fs::read_to_string(base.join("0")).unwrap(), "x");
        assert!(root.dir.path().join("v/made/x").is_dir());
        fs::write(base.join("1/seen"), "").unwrap();
        assert!(root.dir.path().join("v/made/x/seen").exists());
    }
}
