//! Options of a fake runtime, and results of its commands.

use std::time::Duration;

use quintlet_cri_api::v1;

/// Default start of the runtime's wall clock: 2026-01-01T00:00:00Z in nanoseconds.
pub const WALL_BASE_UNIX_NS: i64 = 1_767_225_600_000_000_000;

/// Options of a runtime.
#[derive(Debug, Clone)]
pub struct Options {
    /// `runtime_name` of Version.
    pub name: String,
    /// `runtime_version` of Version.
    pub version: String,
    /// Whether to serve containerd's event service.
    pub containerd_events: bool,
    /// Whether to serve CRI GetContainerEvents.
    pub cri_events: bool,
    /// Delay of the CRI state after the exit event, as with containerd.
    pub exit_lag: Duration,
    /// Wall clock at creation, in nanoseconds since 1970.
    pub wall_base_unix_ns: i64,
    /// Base of the URLs of Exec, Attach and PortForward, which are Unimplemented without it.
    pub streaming_base: Option<String>,
    /// Reply of RuntimeConfig, which is Unimplemented without it.
    pub cgroup_driver: Option<v1::CgroupDriver>,
    /// Whether CheckpointContainer is implemented. It writes a file with the container's ID.
    pub checkpoints: bool,
    /// Whether every image exists in the registry.
    pub registry_has_everything: bool,
    /// `features` of Status.
    pub features: Option<v1::RuntimeFeatures>,
    /// `runtime_handlers` of Status.
    pub handlers: Vec<v1::RuntimeHandler>,
    /// Whether containers have stop signals (CRI of Kubernetes 1.33): the signal of the configuration, else
    /// SIGTERM, is in ContainerStatus.
    pub stop_signals: bool,
    /// Mount point of images in ImageFsInfo.
    pub image_mountpoint: String,
}

impl Default for Options {
    /// Returns the options of containerd 1.6: its own event service, no CRI events, the exit event 5 ms
    /// before the state.
    fn default() -> Self {
        Self {
            name: "containerd".to_owned(),
            version: "1.6.20".to_owned(),
            containerd_events: true,
            cri_events: false,
            exit_lag: Duration::from_millis(5),
            wall_base_unix_ns: WALL_BASE_UNIX_NS,
            streaming_base: None,
            cgroup_driver: None,
            checkpoints: false,
            registry_has_everything: true,
            features: None,
            handlers: Vec::new(),
            stop_signals: false,
            image_mountpoint: "/var/lib/fake".to_owned(),
        }
    }
}

impl Options {
    /// Returns the options of containerd 2.x: also CRI events, after the state changed.
    #[must_use]
    pub fn containerd2() -> Self {
        Self { version: "2.1.4".to_owned(), cri_events: true, exit_lag: Duration::ZERO, ..Self::default() }
    }

    /// Returns the options of a runtime without events.
    #[must_use]
    pub fn silent() -> Self {
        Self {
            name: "silent".to_owned(),
            version: "1.0.0".to_owned(),
            containerd_events: false,
            exit_lag: Duration::ZERO,
            ..Self::default()
        }
    }
}

/// Result of a command that ExecSync runs.
#[derive(Debug, Clone, Default)]
pub struct ExecReply {
    /// Standard output of the command.
    pub stdout: Vec<u8>,
    /// Standard error of the command.
    pub stderr: Vec<u8>,
    /// Exit code of the command.
    pub exit_code: i32,
    /// Duration of the command. A duration beyond the call's timeout results in DEADLINE_EXCEEDED.
    pub after: Duration,
}
