//! The configuration file of containerd. Its functions are pure.

use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};

use crate::host::ContainerdVersion;

/// Inputs of the configuration.
#[derive(Debug, Clone)]
pub struct ContainerdSettings<'a> {
    /// Version of containerd, which determines the format of the file.
    pub version: ContainerdVersion,
    /// Directory of images, snapshots and metadata.
    pub root: &'a Path,
    /// Directory of sockets, tasks and network namespaces.
    pub state: &'a Path,
    /// Socket of the CRI.
    pub socket: &'a Path,
    /// The binary that runs containers.
    pub runc: &'a Path,
    /// Directory of the CNI plugins.
    pub cni_bin_dir: &'a Path,
    /// Directory of the instance's network configuration.
    pub cni_conf_dir: &'a Path,
    /// Directory of the instance's files of the Container Device Interface (CDI), which containerd 1.7 and
    /// later read.
    pub cdi_dir: &'a Path,
    /// Image of the sandbox's own container.
    pub sandbox_image: &'a str,
    /// `overlayfs` or `native`.
    pub snapshotter: &'a str,
    /// Whether containers may have a lower OOM score than containerd. If not, they would fail to start with
    /// one.
    pub may_lower_oom_score: bool,
}

/// Plugins for devices, file systems or collectors that a private instance does not use.
const DISABLED: [&str; 8] = [
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.internal.v1.opt",
    "io.containerd.internal.v1.restart",
    "io.containerd.tracing.processor.v1.otlp",
];

/// Returns the file: version 2 for containerd 1.x, version 3 from 2.0 on.
///
/// # Errors
/// Fails if a path is not UTF-8.
pub fn render(settings: &ContainerdSettings<'_>) -> Result<String, toml::ser::Error> {
    let (version, plugins) = match settings.version.major {
        0 | 1 => (2, plugins_v2(settings)),
        _ => (3, plugins_v3(settings)),
    };
    toml::to_string_pretty(&File {
        version,
        root: settings.root,
        state: settings.state,
        disabled_plugins: &DISABLED,
        grpc: Grpc { address: settings.socket },
        plugins,
    })
}

#[derive(Serialize)]
struct File<'a> {
    version: u32,
    root: &'a Path,
    state: &'a Path,
    disabled_plugins: &'a [&'a str],
    grpc: Grpc<'a>,
    plugins: Value,
}

#[derive(Serialize)]
struct Grpc<'a> {
    address: &'a Path,
}

/// runc's state is below the instance's directory, so that instances do not see each other's containers.
fn runc_runtime(settings: &ContainerdSettings<'_>) -> Value {
    json!({
        "runtime_type": "io.containerd.runc.v2",
        "options": {
            "BinaryName": settings.runc,
            "Root": settings.state.join("runc"),
            "SystemdCgroup": false,
        },
    })
}

fn cni(settings: &ContainerdSettings<'_>) -> Value {
    json!({ "bin_dir": settings.cni_bin_dir, "conf_dir": settings.cni_conf_dir, "max_conf_num": 1 })
}

fn plugins_v2(settings: &ContainerdSettings<'_>) -> Value {
    let mut plugins = json!({
        "io.containerd.grpc.v1.cri": {
            "sandbox_image": settings.sandbox_image,
            "stream_server_address": "127.0.0.1",
            "stream_server_port": "0",
            "disable_tcp_service": true,
            "restrict_oom_score_adj": !settings.may_lower_oom_score,
            "netns_mounts_under_state_dir": true,
            "cni": cni(settings),
            "containerd": {
                "snapshotter": settings.snapshotter,
                "default_runtime_name": "runc",
                "runtimes": { "runc": runc_runtime(settings) },
            },
        },
    });
    // NRI exists since 1.7. Its socket has a fixed path that the host's containerd may own.
    if settings.version.minor >= 7 {
        plugins["io.containerd.nri.v1.nri"] = json!({ "disable": true });
        // containerd 1.7 leaves CDI devices out by default, 1.6 always.
        let cri = &mut plugins["io.containerd.grpc.v1.cri"];
        cri["enable_cdi"] = json!(true);
        cri["cdi_spec_dirs"] = json!([settings.cdi_dir]);
    }
    plugins
}

fn plugins_v3(settings: &ContainerdSettings<'_>) -> Value {
    json!({
        "io.containerd.cri.v1.images": {
            "snapshotter": settings.snapshotter,
            "pinned_images": { "sandbox": settings.sandbox_image },
        },
        "io.containerd.cri.v1.runtime": {
            "restrict_oom_score_adj": !settings.may_lower_oom_score,
            "netns_mounts_under_state_dir": true,
            "cdi_spec_dirs": [settings.cdi_dir],
            "cni": cni(settings),
            "containerd": {
                "default_runtime_name": "runc",
                "runtimes": { "runc": runc_runtime(settings) },
            },
        },
        "io.containerd.grpc.v1.cri": {
            "disable_tcp_service": true,
            "stream_server_address": "127.0.0.1",
            "stream_server_port": "0",
        },
        "io.containerd.nri.v1.nri": { "disable": true },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rendered(major: u32, minor: u32, may_lower_oom_score: bool) -> toml::Table {
        let text = render(&ContainerdSettings {
            version: ContainerdVersion { major, minor },
            root: Path::new("/n/root"),
            state: Path::new("/n/state"),
            socket: Path::new("/n/containerd.sock"),
            runc: Path::new("/usr/sbin/runc"),
            cni_bin_dir: Path::new("/usr/lib/cni"),
            cni_conf_dir: Path::new("/n/cni/conf"),
            cdi_dir: Path::new("/n/cdi"),
            sandbox_image: "registry.k8s.io/pause:3.10",
            snapshotter: "overlayfs",
            may_lower_oom_score,
        })
        .unwrap();
        text.parse().unwrap()
    }

    #[test]
    fn each_containerd_version_gets_its_configuration_format() {
        for (major, minor, format, cri, nri) in [
            (1, 6, 2, "io.containerd.grpc.v1.cri", false),
            (1, 7, 2, "io.containerd.grpc.v1.cri", true),
            (2, 0, 3, "io.containerd.cri.v1.runtime", true),
            (2, 1, 3, "io.containerd.cri.v1.runtime", true),
        ] {
            let file = rendered(major, minor, true);
            let plugins = file["plugins"].as_table().unwrap();
            assert_eq!(file["version"].as_integer(), Some(format), "{major}.{minor}");
            assert_eq!(file["grpc"]["address"].as_str(), Some("/n/containerd.sock"));
            assert_eq!(plugins[cri]["cni"]["conf_dir"].as_str(), Some("/n/cni/conf"), "{major}.{minor}");
            assert_eq!(plugins[cri]["netns_mounts_under_state_dir"].as_bool(), Some(true));
            let runc = &plugins[cri]["containerd"]["runtimes"]["runc"]["options"];
            assert_eq!(runc["Root"].as_str(), Some("/n/state/runc"));
            assert_eq!(runc["SystemdCgroup"].as_bool(), Some(false));
            assert_eq!(plugins.contains_key("io.containerd.nri.v1.nri"), nri, "{major}.{minor}");
            let cdi = plugins[cri].get("cdi_spec_dirs").and_then(|dirs| dirs[0].as_str());
            assert_eq!(cdi, (minor != 6).then_some("/n/cdi"), "{major}.{minor}");
            let enabled = plugins[cri].get("enable_cdi").and_then(toml::Value::as_bool);
            assert_eq!(enabled, (minor == 7).then_some(true), "{major}.{minor}");
            assert_eq!(plugins["io.containerd.grpc.v1.cri"]["stream_server_port"].as_str(), Some("0"));
        }
    }

    #[test]
    fn oom_scores_are_restricted_exactly_when_they_cannot_be_lowered() {
        for (major, cri) in [(1, "io.containerd.grpc.v1.cri"), (2, "io.containerd.cri.v1.runtime")] {
            for may in [true, false] {
                let file = rendered(major, 6, may);
                assert_eq!(
                    file["plugins"][cri]["restrict_oom_score_adj"].as_bool(),
                    Some(!may),
                    "{major} {may}"
                );
            }
        }
    }

    #[test]
    fn the_sandbox_image_and_snapshotter_are_in_the_section_of_each_version() {
        let v1 = rendered(1, 6, true);
        let cri = &v1["plugins"]["io.containerd.grpc.v1.cri"];
        assert_eq!(cri["sandbox_image"].as_str(), Some("registry.k8s.io/pause:3.10"));
        assert_eq!(cri["containerd"]["snapshotter"].as_str(), Some("overlayfs"));
        let v2 = rendered(2, 1, true);
        let images = &v2["plugins"]["io.containerd.cri.v1.images"];
        assert_eq!(images["pinned_images"]["sandbox"].as_str(), Some("registry.k8s.io/pause:3.10"));
        assert_eq!(images["snapshotter"].as_str(), Some("overlayfs"));
    }
}
