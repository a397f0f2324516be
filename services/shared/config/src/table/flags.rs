//! Flags of the kubelet that are no fields of a configuration.

/// A flag and what to write here.
#[derive(Debug, Clone, Copy)]
pub struct FlagRow {
    /// Name without dashes.
    pub name: &'static str,
    /// What comes of it.
    pub verdict: FlagVerdict,
    /// It needs no value.
    pub is_switch: bool,
}

/// What comes of a flag.
#[derive(Debug, Clone, Copy)]
pub enum FlagVerdict {
    /// Every service has it.
    Same,
    /// Another way to say it.
    Instead(&'static str),
    /// Not there yet; what happens until then.
    NotYet(&'static str),
    /// Never; why.
    Refused(&'static str),
}

use FlagVerdict::{Instead, NotYet, Refused, Same};

const fn flag(name: &'static str, verdict: FlagVerdict) -> FlagRow {
    FlagRow { name, verdict, is_switch: false }
}

const fn switch(name: &'static str, verdict: FlagVerdict) -> FlagRow {
    FlagRow { name, verdict, is_switch: true }
}

/// The flags.
pub const FLAGS: &[FlagRow] = &[
    flag("bootstrap-kubeconfig", NotYet("the kubeconfig has to have working credentials")),
    flag("cloud-provider", NotYet("nodes are registered without the taint of an external provider")),
    flag("config", Same),
    flag("config-dir", Same),
    switch(
        "exit-on-lock-contention",
        Refused("pod-sync holds a lock on the root directory and does not start beside another"),
    ),
    flag("help", Same),
    flag("image-credential-provider-bin-dir", Instead("the same flag, on pod-sync")),
    flag("image-credential-provider-config", Instead("the same flag, on pod-sync")),
    flag("lock-file", Refused("pod-sync holds a lock on the root directory")),
    flag(
        "maximum-dead-containers",
        Refused(
            "the last instance of a container stays for its status, however many containers there are: limit the others by \
             --maximum-dead-containers-per-container",
        ),
    ),
    flag("maximum-dead-containers-per-container", Instead("the same flag, on pod-sync")),
    flag("minimum-container-ttl-duration", Instead("the same flag, on pod-sync")),
    flag(
        "pod-infra-container-image",
        Refused("the runtime's configuration names the sandbox image; the kubelet has removed the flag"),
    ),
    flag("runtime-cgroups", NotYet("no process is moved between cgroups")),
    flag("v", Instead("logging.verbosity, or --log-level FILTER")),
    flag("version", Same),
];
