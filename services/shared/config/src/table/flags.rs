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
}

use FlagSupport::{Instead, Refused, Same};

const fn flag(name: &'static str, support: FlagSupport) -> FlagRow {
    FlagRow { name, support, is_switch: false }
}

const fn switch(name: &'static str, support: FlagSupport) -> FlagRow {
    FlagRow { name, support, is_switch: true }
}

/// All flags without a field.
pub const FLAGS: &[FlagRow] = &[
    flag("bootstrap-kubeconfig", Instead("the same flag, on pod-sync")),
    flag("cloud-provider", Instead("the same flag, on status-reporter")),
    flag("config", Same),
    flag("config-dir", Same),
    switch(
        "exit-on-lock-contention",
        Refused("pod-sync holds a lock on the root directory; a second instance does not start"),
    ),
    flag("help", Same),
    flag("image-credential-provider-bin-dir", Instead("the same flag, on pod-sync")),
    flag("image-credential-provider-config", Instead("the same flag, on pod-sync")),
    flag("lock-file", Refused("pod-sync holds a lock on the root directory")),
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
    flag("v", Instead("logging.verbosity, or --log-level FILTER")),
    flag("version", Same),
];
