//! Capacity and allocatable resources of the node.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use pod_sync_layout::NodeSettings;
use quintlet_cgroups::KubepodsLimits;
use quintlet_model::cpu_list::CpuList;
use quintlet_model::quantity::{Format, Quantity as Amount};

use crate::machine;

/// Returns the capacity of the node: CPUs, memory, huge pages, disk of the root directory, pods.
#[must_use]
pub fn capacity(settings: &NodeSettings) -> BTreeMap<String, Quantity> {
    let disk = || {
        nix::sys::statvfs::statvfs(&settings.root_dir)
            .map_or(0, |s| s.blocks().saturating_mul(s.fragment_size()))
    };
    // A number of bytes without a binary suffix (`pkg/kubelet/cadvisor: EphemeralStorageCapacityFromFsInfo`).
    let bytes = || i64::try_from(disk()).unwrap_or(i64::MAX);
    let storage = settings
        .isolates_storage
        .then(|| ("ephemeral-storage", Amount::from_units(bytes(), Format::Decimal).to_api().0));
    [
        ("cpu", cpus().to_string()),
        ("memory", format!("{}Ki", settings.memory_bytes / 1024)),
        ("pods", settings.max_pods.to_string()),
    ]
    .into_iter()
    .chain(storage)
    .map(|(k, v)| (k.to_owned(), Quantity(v)))
    .chain(huge_pages(settings).into_iter().map(|(k, v)| (k, Amount::from_units(v, Format::Binary).to_api())))
    .collect()
}

fn huge_pages(settings: &NodeSettings) -> BTreeMap<String, i64> {
    machine::huge_pages(Path::new("/sys/kernel/mm/hugepages"), &settings.hugepage_sizes)
}

/// Returns the allocatable resources: the capacity without reservations and hard eviction thresholds, and
/// memory without huge pages (pkg/kubelet/cm: GetNodeAllocatableReservation).
#[must_use]
pub fn allocatable(settings: &NodeSettings) -> BTreeMap<String, Quantity> {
    let mut left = capacity(settings);
    let mut take = |name: &str, taken: Amount| {
        if let Some(amount) = left.get_mut(name).filter(|_| taken.is_positive()) {
            let rest = Amount::of(amount) - taken;
            *amount = if rest.is_positive() { rest } else { Amount::default() }.to_api();
        }
    };
    for (name, reserved) in settings.reserved.iter().chain(&settings.eviction_reserve) {
        take(name, *reserved);
    }
    for bytes in huge_pages(settings).into_values() {
        take("memory", Amount::from_units(bytes, Format::Binary));
    }
    left
}

/// Returns the limits of all pods together: the resources of the machine, without reservations if they are
/// enforced.
#[must_use]
pub fn pod_limits(settings: &NodeSettings) -> KubepodsLimits {
    let reserved = |name: &str| {
        let amount = settings.reserved.get(name).copied().filter(|_| settings.enforce_reserved);
        amount.unwrap_or_default()
    };
    KubepodsLimits {
        memory_bytes: (settings.memory_bytes > 0)
            .then(|| settings.memory_bytes.saturating_sub(reserved("memory").value()).max(0)),
        cpu_milli: Some((cpus().saturating_mul(1000)).saturating_sub(reserved("cpu").milli_value()).max(0)),
        // Without a reservation as well, so that the limit of an earlier configuration does not stay.
        pids: pid_capacity().map(|pids| pids.saturating_sub(reserved("pid").value()).max(1)),
    }
}

/// Returns the online CPUs of the machine. Those of this process may be fewer: its cgroup may have a quota or
/// a CPU set.
#[must_use]
pub fn online_cpus() -> CpuList {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online");
    online.ok().and_then(|text| CpuList::parse(&text).ok()).unwrap_or_default()
}

/// Returns the number of CPUs of the machine.
#[must_use]
pub fn cpus() -> i64 {
    let cpus = match online_cpus().count() {
        0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        online => online,
    };
    i64::try_from(cpus).unwrap_or(i64::MAX)
}

/// Returns the number of pods that the node accepts (`maxPods`, `podsPerCore`).
#[must_use]
pub fn max_pods(cpus: i64, most: u32, per_core: u32) -> u32 {
    if per_core == 0 {
        return most;
    }
    let by_cores = i64::from(per_core).saturating_mul(cpus);
    most.min(u32::try_from(by_cores).unwrap_or(u32::MAX))
}

/// Returns the number of processes that the machine can run.
fn pid_capacity() -> Option<i64> {
    let read = |path: &str| std::fs::read_to_string(path).ok().and_then(|t| t.trim().parse::<i64>().ok());
    let limits = ["/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max"].map(read);
    limits.into_iter().flatten().min()
}

/// Returns the swap of the machine, in bytes.
#[must_use]
pub fn swap_bytes() -> i64 {
    use procfs::Current as _;
    procfs::Meminfo::current().map_or(0, |m| i64::try_from(m.swap_total).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ephemeral_storage_is_an_exact_number_of_bytes_without_a_binary_suffix() {
        let dir = tempfile::tempdir().unwrap();
        let settings = NodeSettings { root_dir: dir.path().to_owned(), ..NodeSettings::default() };
        let disk = nix::sys::statvfs::statvfs(dir.path()).unwrap();
        let bytes = i64::try_from(disk.blocks() * disk.fragment_size()).unwrap();
        let reserved = [("ephemeral-storage".to_owned(), Amount::parse("1Ki").unwrap())].into();
        let reserving = NodeSettings { reserved, ..settings.clone() };
        for (name, amounts, want) in [
            ("capacity", capacity(&settings), bytes),
            ("allocatable", allocatable(&settings), bytes),
            ("allocatable beside a reservation", allocatable(&reserving), bytes - 1024),
        ] {
            let amount = &amounts["ephemeral-storage"];
            assert_eq!(Amount::of(amount).value(), want, "{name}");
            assert!(!amount.0.ends_with('i'), "{name}: {}", amount.0);
        }
        let shared = NodeSettings { isolates_storage: false, ..settings };
        assert!(!capacity(&shared).contains_key("ephemeral-storage"));
    }
}
