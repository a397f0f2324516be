//! Checks the thresholds of evictions against each other and the capacity of this machine, at the start.
//!
//! The configuration alone does not show how an amount compares with a percentage. The capacity of the
//! runtime's file systems is not known at the start: their thresholds are compared, and a contradiction
//! logged, by the loop of evictions ([`pod_sync_eviction_loop`]).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pod_sync_eviction::Signal;
use pod_sync_eviction::contradictions::{AboveCapacity, WithoutEffect, above_capacity, without_effect};
use pod_sync_eviction::thresholds::{Amount, Threshold};
use pod_sync_eviction_loop::measure::{self, Paths, RuntimeMounts};
use pod_sync_layout::NodeSettings;
use quintlet_config::Config;
use quintlet_config::diagnostics::Diagnostic;
use quintlet_config::node::{LocatedValue, Origin};
use quintlet_config::table::Document;
use quintlet_model::quantity::{Format, Quantity};

use crate::args::Args;
use crate::startup::CGROUP_FS;

const HARD: &str = "evictionHard";
const SOFT: &str = "evictionSoft";
const RECLAIM: &str = "evictionMinimumReclaim";

/// Returns the problems of the thresholds on this machine: an error for each soft threshold without an
/// effect, a warning for each threshold above the capacity.
pub(crate) fn problems(args: &Args, config: &Config) -> Vec<Diagnostic> {
    of_capacities(args, config, &capacities(args))
}

fn of_capacities(args: &Args, config: &Config, capacities: &BTreeMap<Signal, Quantity>) -> Vec<Diagnostic> {
    // The start reports thresholds that cannot be used at all.
    let Ok(Some(settings)) = args.eviction.settings(args.resources.enforces_pods()) else {
        return Vec::new();
    };
    let capacity = |signal| capacities.get(&signal).copied();
    let contradictions = without_effect(&settings.thresholds, capacity);
    let above = above_capacity(&settings.thresholds, capacity).into_iter().filter(|above| {
        // The configuration alone shows it for two percentages, and the threshold of all pods is a copy of
        // that of the node.
        let Threshold { signal, value, minimum_reclaim, .. } = above.threshold;
        let is_copy =
            signal == Signal::AllocatableMemoryAvailable && value_of(config, HARD, signal).is_none();
        !is_copy && !matches!((value, minimum_reclaim), (Amount::Share(_), Some(Amount::Share(_))))
    });
    let errors = contradictions.iter().map(|pair| contradiction(config, pair));
    errors.chain(above.map(|above| beyond(config, &above))).collect()
}

fn contradiction(config: &Config, pair: &WithoutEffect) -> Diagnostic {
    let WithoutEffect { soft, hard, capacity } = pair;
    let [soft_text, hard_text] = [soft, hard].map(|threshold| threshold.value.text(*capacity));
    let message = format!(
        "{soft_text} is not above {} {hard_text}, and has no effect",
        hard_field(config, hard.signal)
    );
    let field = format!("{SOFT}.{}", soft.signal);
    Diagnostic::error(origin(config, SOFT, soft.signal), field, message)
}

fn beyond(config: &Config, above: &AboveCapacity) -> Diagnostic {
    let AboveCapacity { threshold: Threshold { signal, value, minimum_reclaim, .. }, capacity } = *above;
    let field =
        if above.threshold.is_hard() { hard_field(config, signal) } else { format!("{SOFT}.{signal}") };
    match minimum_reclaim {
        Some(reclaim) => Diagnostic::warning(
            origin(config, RECLAIM, signal),
            format!("{RECLAIM}.{signal}"),
            format!("{reclaim} and {field} {value} are more than the capacity of {capacity}"),
        ),
        None => {
            let name = if above.threshold.is_hard() { HARD } else { SOFT };
            let message = format!("{value} is more than the capacity of {capacity}");
            Diagnostic::warning(origin(config, name, signal), field, message)
        }
    }
}

/// Returns the field of a hard threshold. That of all pods together is a copy of the node's, unless it is
/// set.
fn hard_field(config: &Config, signal: Signal) -> String {
    match signal {
        Signal::AllocatableMemoryAvailable if value_of(config, HARD, signal).is_none() => {
            format!("{HARD}.{}", Signal::MemoryAvailable)
        }
        signal => format!("{HARD}.{signal}"),
    }
}

fn value_of<'a>(config: &'a Config, field: &str, signal: Signal) -> Option<&'a LocatedValue> {
    config.value(Document::Kubelet, field)?.get(signal.as_str())
}

fn origin(config: &Config, field: &str, signal: Signal) -> Origin {
    value_of(config, field, signal).map_or(Origin::Default, |value| value.origin.clone())
}

/// Returns the capacities that are known before the runtime answers.
fn capacities(args: &Args) -> BTreeMap<Signal, Quantity> {
    let paths = Paths {
        root_dir: existing(&args.root_dir).to_owned(),
        pod_logs_dir: args.pod_logs_dir.clone(),
        cgroups: PathBuf::from(CGROUP_FS),
        cgroup_root: args.cgroup_root.clone(),
        proc: PathBuf::from("/proc"),
        subtracts_huge_pages: args.resources.subtracts_huge_pages(),
    };
    let observed = measure::node(&paths, &RuntimeMounts::default(), Duration::ZERO);
    let mut all: BTreeMap<_, _> =
        observed.into_iter().map(|(signal, observation)| (signal, observation.capacity)).collect();
    let pods = all.get(&Signal::MemoryAvailable).and_then(|machine| memory_of_pods(args, machine.value()));
    // The cgroup of all pods may still have the limit of an earlier configuration.
    all.remove(&Signal::AllocatableMemoryAvailable);
    all.extend(
        pods.map(|bytes| (Signal::AllocatableMemoryAvailable, Quantity::from_units(bytes, Format::Binary))),
    );
    all
}

fn memory_of_pods(args: &Args, memory_bytes: i64) -> Option<i64> {
    let reserved = args.resources.reservations().ok()?.total();
    let enforce_reserved = args.resources.enforces_pods();
    pod_sync_node_object::pod_limits(&NodeSettings {
        memory_bytes,
        enforce_reserved,
        reserved,
        ..NodeSettings::default()
    })
    .memory_bytes
}

/// Returns the directory, or the one in which it will be created.
fn existing(dir: &Path) -> &Path {
    dir.ancestors().find(|dir| dir.exists()).unwrap_or(dir)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use quintlet_config::diagnostics::render;
    use quintlet_config::table::Service;
    use quintlet_config::{Loaded, read};

    use super::*;

    const HEAD: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";

    fn loaded(file: &str, flags: &[&str]) -> Loaded<Args> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.yaml");
        std::fs::write(&path, format!("{HEAD}{file}\n")).unwrap();
        let start = ["pod-sync".into(), "--config".into(), path.into_os_string()];
        let line: Vec<OsString> = start.into_iter().chain(flags.iter().map(Into::into)).collect();
        read(Service::PodSync, line).unwrap()
    }

    /// A node with 16 GiB of memory, of which pods may use 8, a disk of 100 GiB with a million inodes, and
    /// 32,768 process IDs.
    fn node() -> BTreeMap<Signal, Quantity> {
        let gib = |count: i64| Quantity::from_units(count << 30, Format::Binary);
        let number = |count: i64| Quantity::from_units(count, Format::Decimal);
        [
            (Signal::MemoryAvailable, gib(16)),
            (Signal::AllocatableMemoryAvailable, gib(8)),
            (Signal::NodeFsAvailable, gib(100)),
            (Signal::NodeFsInodesFree, number(1_000_000)),
            (Signal::PidAvailable, number(32_768)),
        ]
        .into()
    }

    /// Returns the problems without the name of the file.
    fn found(file: &str, flags: &[&str]) -> Vec<String> {
        let loaded = loaded(file, flags);
        let problems = render(&of_capacities(&loaded.args, &loaded.config, &node()));
        problems.lines().filter(|line| line.starts_with("  ")).map(|line| line.trim().to_owned()).collect()
    }

    #[test]
    fn an_amount_and_a_percentage_that_contradict_each_other_are_refused_with_file_and_line() {
        let soft = |signal: &str, value: &str| {
            format!("evictionSoftGracePeriod: {{{signal}: 1m}}\nevictionSoft: {{{signal}: \"{value}\"}}")
        };
        let both = |signal: &str, hard: &str, value: &str| {
            format!("{}\nevictionHard: {{{signal}: \"{hard}\"}}", soft(signal, value))
        };
        for (file, want) in [
            (
                both("memory.available", "2Gi", "5%"),
                "line 4  evictionSoft.memory.available: 5% of 16Gi is not above evictionHard.memory.available 2Gi, and has no effect",
            ),
            (
                both("memory.available", "12.5%", "2Gi"),
                "line 4  evictionSoft.memory.available: 2Gi is not above evictionHard.memory.available 12.5% of 16Gi, and has no effect",
            ),
            (
                both("nodefs.inodesFree", "5%", "50k"),
                "line 4  evictionSoft.nodefs.inodesFree: 50k is not above evictionHard.nodefs.inodesFree 5% of 1M, and has no effect",
            ),
            (
                both("pid.available", "1000", "3%"),
                "line 4  evictionSoft.pid.available: 3% of 32768 is not above evictionHard.pid.available 1k, and has no effect",
            ),
            // The default of a signal counts as well.
            (
                soft("nodefs.available", "1Gi"),
                "line 4  evictionSoft.nodefs.available: 1Gi is not above evictionHard.nodefs.available 10% of 100Gi, and has no effect",
            ),
            // The threshold of all pods is that of the node.
            (
                soft("allocatableMemory.available", "1%"),
                "line 4  evictionSoft.allocatableMemory.available: 1% of 8Gi is not above evictionHard.memory.available 100Mi, and has no effect",
            ),
        ] {
            assert_eq!(found(&file, &[]), [want], "{file}");
        }
        let flag = found(&both("memory.available", "2Gi", "15%"), &["--eviction-soft=memory.available<5%"]);
        let want = "--eviction-soft  evictionSoft.memory.available: 5% of 16Gi is not above evictionHard.memory.available 2Gi, and has no effect";
        assert_eq!(flag, [want]);
        for file in [
            both("memory.available", "2Gi", "13%"),
            both("memory.available", "12%", "2Gi"),
            soft("nodefs.available", "11Gi"),
            both("nodefs.available", "0%", "1Gi"),
            "evictionSoftGracePeriod: {memory.available: 0s}\nevictionSoft: {memory.available: 0.1%}"
                .to_owned(),
            // The runtime has not reported its file system yet.
            both("imagefs.available", "15%", "1Gi"),
            both("imagefs.inodesFree", "5%", "1"),
        ] {
            assert_eq!(found(&file, &[]), [""; 0], "{file}");
        }
    }

    #[test]
    fn a_threshold_above_the_capacity_of_the_machine_causes_a_warning() {
        for (file, want) in [
            (
                "evictionHard: {pid.available: 40k}",
                "warning: line 3  evictionHard.pid.available: 40k is more than the capacity of 32768",
            ),
            (
                "evictionSoft: {nodefs.available: 200Gi}\nevictionSoftGracePeriod: {nodefs.available: 1m}",
                "warning: line 3  evictionSoft.nodefs.available: 200Gi is more than the capacity of 100Gi",
            ),
            (
                "evictionMinimumReclaim: {nodefs.available: 95Gi}",
                "warning: line 3  evictionMinimumReclaim.nodefs.available: 95Gi and evictionHard.nodefs.available 10% are more than the capacity of 100Gi",
            ),
            (
                "evictionMinimumReclaim: {memory.available: 16Gi}",
                "warning: line 3  evictionMinimumReclaim.memory.available: 16Gi and evictionHard.memory.available 100Mi are more than the capacity of 16Gi",
            ),
        ] {
            assert_eq!(found(file, &[]), [want], "{file}");
        }
        for file in ["", "evictionMinimumReclaim: {nodefs.available: 89Gi, imagefs.available: 2Ti}"] {
            assert_eq!(found(file, &[]), [""; 0], "{file}");
        }
    }

    #[test]
    fn the_capacities_are_those_of_this_machine_and_of_the_disk_on_which_the_root_directory_will_be() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("not/yet");
        let args = loaded("systemReserved: {memory: 1Gi}", &["--root-dir", root.to_str().unwrap()]).args;
        let capacities = capacities(&args);
        let memory = capacities[&Signal::MemoryAvailable].value();
        assert_eq!(capacities[&Signal::AllocatableMemoryAvailable].value(), memory - (1 << 30));
        let disk = nix::sys::statvfs::statvfs(dir.path()).unwrap();
        let bytes = i64::try_from(disk.blocks() * disk.fragment_size()).unwrap();
        assert_eq!(capacities[&Signal::NodeFsAvailable].value(), bytes);
        assert!(capacities.contains_key(&Signal::PidAvailable));
        assert!(!capacities.contains_key(&Signal::ImageFsAvailable), "only the runtime reports it");
    }
}
