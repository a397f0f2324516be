//! Computes the settings of the node from the arguments, and thus from the configuration.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use pod_sync_cri_config::resources::hugepage_sizes;
use pod_sync_cri_config::security::thermal_throttle_paths;
use pod_sync_decisions::qos::ResourceList;
use pod_sync_layout::NodeSettings;
use quintlet_model::quantity::Quantity;

use crate::args::Args;

/// Returns the settings and facts of the node.
///
/// # Errors
/// Arguments contradict each other or do not fit this machine.
pub(crate) fn settings(args: &Args) -> anyhow::Result<NodeSettings> {
    pod_sync_node_object::check_addresses(&args.node_ip).map_err(anyhow::Error::msg)?;
    let node_name = args.node.node_name();
    let mut settings = NodeSettings {
        node_ips: pod_sync_node_object::initial_addresses(&args.node_ip, &node_name),
        node_name,
        node_api_port: args.node_api_port,
        root_dir: args.root_dir.clone(),
        pod_logs_dir: args.pod_logs_dir.clone(),
        cluster_domain: args.cluster_domain.clone(),
        cluster_dns: args.cluster_dns.clone(),
        resolv_conf: Some(args.resolv_conf.clone()).filter(|f| !f.is_empty()).map(PathBuf::from),
        ..NodeSettings::default()
    };
    detect(&mut settings, &args.selinux_root);
    resources(args, &mut settings)?;
    Ok(settings)
}

/// Sets the facts of the machine: memory, cgroup version, huge pages, swap controller, SELinux, AppArmor,
/// thermal throttling.
fn detect(settings: &mut NodeSettings, selinux_root: &Path) {
    use procfs::Current as _;
    if let Ok(info) = procfs::Meminfo::current() {
        settings.memory_bytes = i64::try_from(info.mem_total).unwrap_or(i64::MAX);
    }
    settings.cgroup_v2 = quintlet_cgroups::is_v2(Path::new("/sys/fs/cgroup"));
    settings.swap_controller = !settings.cgroup_v2
        && Path::new("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes").exists()
        || settings.cgroup_v2 && quintlet_cgroups::has_swap_controller();
    settings.single_process_oom_kill = !settings.cgroup_v2;
    settings.app_armor = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled")
        .is_ok_and(|enabled| enabled.trim() == "Y");
    settings.selinux = selinux_root.join("sys/fs/selinux/enforce").exists();
    settings.hugepage_sizes = hugepage_sizes(Path::new("/sys/kernel/mm/hugepages"));
    settings.thermal_throttle = thermal_throttle_paths(Path::new("/sys/devices/system/cpu"));
}

/// Sets the limits of pods, after the facts of the machine.
fn resources(args: &Args, settings: &mut NodeSettings) -> anyhow::Result<()> {
    let given = &args.resources;
    settings.seccomp_default = given.seccomp_default;
    settings.allowed_sysctls.clone_from(&args.allowed_unsafe_sysctls);
    if given.sets_sysctls_of_pods() {
        settings.default_sysctls = args.default_pod_sysctls.iter().cloned().collect();
    }
    settings.field_gates = given.field_gates();
    settings.probe_rates = given.probe_rates();
    settings.cgroup.cfs_quota = given.cpu_cfs_quota;
    settings.cgroup.period_us = u64::try_from(given.cpu_cfs_quota_period.as_micros()).unwrap_or(u64::MAX);
    settings.cgroup.pids_limit = given.pod_max_pids;
    if let Some(single) = given.single_process_oom_kill {
        ensure!(single || settings.cgroup_v2, "single-process-oom-kill: false needs cgroup v2");
        settings.single_process_oom_kill = single;
    }
    settings.limited_swap_bytes = (given.memory_swap_behavior == "LimitedSwap" && settings.cgroup_v2)
        .then(pod_sync_node_object::swap_bytes);
    settings.memory_qos = given.memory_qos().filter(|_| settings.cgroup_v2);
    settings.cgroup.protects_memory =
        settings.memory_qos.is_some_and(|memory_qos| memory_qos.protects_requests);
    settings.stop_signals = given.has_stop_signals();
    settings.device_health = given.reports_device_health();
    settings.volume_health = given.reports_volume_health();
    settings.qos_reserved_percent = given.qos_reserved_percent();
    settings.max_pods =
        pod_sync_node_object::max_pods(pod_sync_node_object::cpus(), given.max_pods, given.pods_per_core);
    settings.enforce_reserved = given.enforces_pods();
    settings.isolates_storage = args.eviction.local_storage_capacity_isolation;
    settings.reserved = given.reservations()?.total();
    let capacity = pod_sync_node_object::capacity(settings);
    settings.eviction_reserve = args.eviction.reservations(&capacity)?;
    for (name, wanted) in settings.reserved.iter().chain(&settings.eviction_reserve) {
        let Some(have) = capacity.get(name).map(Quantity::of) else { continue };
        // Either of the two may be missing.
        let quantity = |list: &ResourceList| list.get(name).copied().unwrap_or_default();
        ensure!(
            quantity(&settings.reserved) + quantity(&settings.eviction_reserve) <= have,
            "invalid Node Allocatable configuration. Resource {name:?} has a reservation of {wanted} but capacity of {have}. \
             Expected capacity >= reservation."
        );
    }
    settings.allocatable = pod_sync_node_object::allocatable(settings)
        .iter()
        .map(|(name, q)| (name.clone(), Quantity::of(q)))
        .collect();
    Ok(())
}

#[cfg(test)]
mod tests;
