//! Flags of the kubelet that do not correspond to a configuration field.

/// A flag of the kubelet and its support in Quintlet.
#[derive(Debug, Clone, Copy)]
pub struct FlagRow {
    /// Name without dashes.
    pub name: &'static str,
    /// Whether and how Quintlet supports the flag.
    pub support: FlagSupport,
    /// The flag may be given without a value.
    pub is_switch: bool,
}

/// Whether and how Quintlet supports a flag.
#[derive(Debug, Clone, Copy)]
pub enum FlagSupport {
    /// Every service has the flag.
    Same,
    /// Refused. Describes the replacement.
    Instead(&'static str),
    /// Refused for good. Holds the reason.
    Refused(&'static str),
    /// Accepted with a warning. Holds the reason why the flag has no effect.
    Ignored(&'static str),
}

use FlagSupport::{Ignored, Instead, Refused, Same};

const REMOVED: FlagSupport = Refused("a flag of cAdvisor, which kubelet 1.37 has removed");
const NO_CADVISOR: FlagSupport = Ignored("cgroups are read when figures are requested, without cAdvisor");

const fn flag(name: &'static str, support: FlagSupport) -> FlagRow {
    FlagRow { name, support, is_switch: false }
}

const fn switch(name: &'static str, support: FlagSupport) -> FlagRow {
    FlagRow { name, support, is_switch: true }
}

/// All flags without a field.
pub const FLAGS: &[FlagRow] = &[
    flag("application-metrics-count-limit", REMOVED),
    flag("boot-id-file", REMOVED),
    flag("bootstrap-kubeconfig", Instead("the same flag, on pod-sync")),
    flag("cloud-provider", Instead("the same flag, on status-reporter")),
    flag("config", Same),
    flag("config-dir", Same),
    flag("container-hints", REMOVED),
    flag("containerd", REMOVED),
    flag("containerd-namespace", REMOVED),
    switch("enable-load-reader", REMOVED),
    flag("event-storage-age-limit", REMOVED),
    flag("event-storage-event-limit", REMOVED),
    switch(
        "exit-on-lock-contention",
        Refused("pod-sync holds a lock on the root directory; a second instance does not start"),
    ),
    flag("global-housekeeping-interval", REMOVED),
    flag("help", Same),
    flag("housekeeping-interval", NO_CADVISOR),
    flag("image-credential-provider-bin-dir", Instead("the same flag, on pod-sync")),
    flag("image-credential-provider-config", Instead("the same flag, on pod-sync")),
    flag("lock-file", Refused("pod-sync holds a lock on the root directory")),
    switch("log-cadvisor-usage", REMOVED),
    flag("machine-id-file", REMOVED),
    flag("max-housekeeping-interval", NO_CADVISOR),
    flag(
        "maximum-dead-containers",
        Refused(
            "the last instance of a container is kept for its status: limit the other instances with \
             --maximum-dead-containers-per-container",
        ),
    ),
    flag("maximum-dead-containers-per-container", Instead("the same flag, on pod-sync")),
    flag("minimum-container-ttl-duration", Instead("the same flag, on pod-sync")),
    flag(
        "pod-infra-container-image",
        Refused("the configuration of the runtime sets the sandbox image; the kubelet has removed the flag"),
    ),
    flag("storage-driver-buffer-duration", REMOVED),
    flag("storage-driver-db", REMOVED),
    flag("storage-driver-host", REMOVED),
    flag("storage-driver-password", REMOVED),
    switch("storage-driver-secure", REMOVED),
    flag("storage-driver-table", REMOVED),
    flag("storage-driver-user", REMOVED),
    flag("v", Instead("logging.verbosity, or --log-level FILTER")),
    flag("version", Same),
];
