//! Flags of the requirements on the machine.

use std::path::PathBuf;
use std::sync::Arc;

use clap::ArgAction;
use pod_sync_in_tree::commands::{Commands, SystemCommands};
use pod_sync_in_tree::host::Host;
use pod_sync_node_object::MachineRules;

/// Requirements on the machine. Those of the kubelet apply with a configuration file; without one, any
/// machine will do.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Machine")]
pub struct MachineArgs {
    /// Do not start while the machine swaps. Default: true with a KubeletConfiguration, false without.
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub fail_swap_on: Option<bool>,
    /// Do not start on a machine with cgroup v1. Default: true with a KubeletConfiguration, false without.
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub fail_cgroup_v1: Option<bool>,
    /// Do not start if a kernel tunable differs from what pods rely on.
    #[arg(long, default_value_t = false, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub protect_kernel_defaults: bool,
    /// Set kernel tunables that differ from what pods rely on. Default: true with a KubeletConfiguration,
    /// false without.
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub set_kernel_tunables: Option<bool>,
    /// Make chains of iptables that other components rely on. Default: true with a KubeletConfiguration,
    /// false without.
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub make_iptables_util_chains: Option<bool>,
}

/// Places of the machine's disks and of the tools for them.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Volumes")]
pub struct DiskArgs {
    /// Directory of device files, for iscsi and fc volumes.
    #[arg(long, default_value = "/dev", value_name = "DIR")]
    pub device_dir: PathBuf,
    /// Mount point of sysfs, for iscsi and fc volumes, CPUs and NUMA nodes.
    #[arg(long, default_value = "/sys", value_name = "DIR")]
    pub sysfs_dir: PathBuf,
    /// Directory that is searched for mount, iscsiadm and the tools of file systems before PATH.
    #[arg(long, value_name = "DIR")]
    pub volume_tools_dir: Option<PathBuf>,
}

impl DiskArgs {
    /// Returns the directories of devices.
    #[must_use]
    pub fn host(&self) -> Host {
        Host { dev: self.device_dir.clone(), sys: self.sysfs_dir.clone(), ..Host::default() }
    }

    /// Returns the commands of the machine.
    #[must_use]
    pub fn commands(&self) -> Arc<dyn Commands> {
        Arc::new(SystemCommands { first: self.volume_tools_dir.clone() })
    }
}

impl MachineArgs {
    /// Returns whether a requirement was set neither by a flag nor with a KubeletConfiguration.
    #[must_use]
    pub fn has_defaults_without_file(&self) -> bool {
        [self.fail_swap_on, self.fail_cgroup_v1, self.set_kernel_tunables].contains(&None)
    }

    /// Returns the rules for the machine.
    #[must_use]
    pub fn rules(&self, limited_swap: bool, tolerates_user_namespace: bool) -> MachineRules {
        MachineRules {
            fail_swap_on: self.fail_swap_on.unwrap_or(false),
            fail_cgroup_v1: self.fail_cgroup_v1.unwrap_or(false),
            limited_swap,
            protect_kernel_defaults: self.protect_kernel_defaults,
            set_kernel_tunables: self.set_kernel_tunables.unwrap_or(false),
            tolerates_user_namespace,
        }
    }
}
