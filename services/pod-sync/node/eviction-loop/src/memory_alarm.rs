//! Notifications of the kernel when the memory usage of a cgroup reaches a level, so that memory is measured
//! at once (`kernelMemcgNotification`; `pkg/kubelet/eviction: linuxMemoryThresholdNotifier`).
//!
//! With cgroup v1, the kernel compares the usage with any level. With v2 it reports only that the limit of
//! all pods was reached, which the kubelet does not use.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use futures::future;
use pod_sync_eviction::Signal;
use pod_sync_eviction::thresholds::Threshold;
use pod_sync_eviction::usage::Observations;
use quintlet_cgroups::stats::CgroupStats;
use quintlet_kit::task::blocking;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::net::unix::pipe::Receiver;

use crate::measure::Paths;

/// An event that the kernel reports.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Alarm {
    /// The usage of a cgroup of v1 crosses this number of bytes.
    Usage { dir: PathBuf, level: u64 },
    /// A counter in the file memory.events of a cgroup of v2 changes.
    Events { file: PathBuf },
}

/// Returns when memory usage has crossed one of the thresholds, none of which is crossed in `observed`. Never
/// returns if the kernel does not report that. Cancellation ends the notifications.
pub async fn wait(paths: &Paths, thresholds: &[Threshold], observed: &Observations) {
    let ring = async |alarm: Alarm| {
        if let Err(error) = alarm.ring().await {
            tracing::info!(?alarm, %error, "no notification about memory usage, it is only measured periodically");
            future::pending::<()>().await;
        }
    };
    let paths = paths.clone();
    let thresholds = thresholds.to_vec();
    let observed = observed.clone();
    let alarms = blocking(move || alarms(&paths, &thresholds, &observed)).await;
    let alarms: Vec<_> = alarms.into_iter().map(ring).map(Box::pin).collect();
    if alarms.is_empty() {
        future::pending::<()>().await;
    }
    future::select_all(alarms).await;
}

fn alarms(paths: &Paths, thresholds: &[Threshold], observed: &Observations) -> Vec<Alarm> {
    let pods = CgroupStats::of_pods(&paths.cgroups, &paths.cgroup_root);
    if quintlet_cgroups::is_v2(&paths.cgroups) {
        let file = pods.map(|pods| pods.memory_dir().join("memory.events"));
        return file.map(|file| Alarm::Events { file }).into_iter().collect();
    }
    let alarm = |threshold: &Threshold| {
        let dir = match threshold.signal {
            Signal::MemoryAvailable => paths.cgroups.join("memory"),
            Signal::AllocatableMemoryAvailable => pods.as_ref()?.memory_dir(),
            _ => return None,
        };
        let observation = observed.get(&threshold.signal)?;
        let left = observation.available - threshold.value.of(observation.capacity);
        // What may still be used before the threshold is crossed; it is crossed already if that is negative.
        let left = u64::try_from(left.value()).ok().filter(|left| *left > 0)?;
        let level = usage(&dir).ok()?.saturating_add(left);
        Some(Alarm::Usage { dir, level })
    };
    thresholds.iter().filter_map(alarm).collect()
}

fn usage(dir: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(dir.join("memory.usage_in_bytes"))?;
    text.trim().parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

impl Alarm {
    async fn ring(&self) -> io::Result<()> {
        match self {
            Self::Usage { dir, level } => crosses(dir.clone(), *level).await,
            Self::Events { file } => changes(file.clone()).await,
        }
    }
}

/// Returns when the usage of a cgroup of v1 crosses `level`, in either direction.
async fn crosses(dir: PathBuf, level: u64) -> io::Result<()> {
    let request = move || {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let usage = File::open(dir.join("memory.usage_in_bytes"))?;
        let request = format!("{} {} {level}", event.as_raw_fd(), usage.as_raw_fd());
        fs::write(dir.join("cgroup.event_control"), request)?;
        io::Result::Ok(event)
    };
    let event = blocking(request).await?;
    // The kernel forgets the request when the event is closed.
    Receiver::from_file_unchecked(File::from(event))?.readable().await
}

/// Returns when the kernel changes a file of a cgroup.
async fn changes(file: PathBuf) -> io::Result<()> {
    let request = move || {
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        inotify::add_watch(&watch, &file, WatchFlags::MODIFY)?;
        io::Result::Ok(watch)
    };
    let watch = blocking(request).await?;
    Receiver::from_file_unchecked(File::from(watch))?.readable().await
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use pod_sync_eviction::thresholds::Amount;
    use pod_sync_eviction::usage::Observation;
    use quintlet_model::quantity::{Format, Quantity};

    use super::*;

    fn threshold(signal: Signal, value: Amount) -> Threshold {
        Threshold { signal, value, grace: Duration::ZERO, minimum_reclaim: None }
    }

    fn observed(signal: Signal, available: i64, capacity: i64) -> (Signal, Observation) {
        (signal, Observation::new(signal, available, capacity, Duration::ZERO).unwrap())
    }

    #[test]
    fn the_level_is_the_usage_at_which_the_threshold_is_crossed() {
        let dir = tempfile::tempdir().unwrap();
        let cgroups = dir.path().to_owned();
        let pods = cgroups.join("memory/kubepods");
        fs::create_dir_all(&pods).unwrap();
        fs::write(cgroups.join("memory/memory.usage_in_bytes"), "5000\n").unwrap();
        fs::write(pods.join("memory.usage_in_bytes"), "700\n").unwrap();
        let paths = Paths {
            root_dir: cgroups.clone(),
            pod_logs_dir: cgroups.clone(),
            cgroups: cgroups.clone(),
            cgroup_root: String::new(),
            proc: cgroups.clone(),
            subtracts_huge_pages: true,
        };
        let bytes = |count| Amount::Quantity(Quantity::from_units(count, Format::Binary));
        let thresholds = [
            threshold(Signal::MemoryAvailable, bytes(100)),
            threshold(Signal::MemoryAvailable, Amount::Share(0.5)),
            threshold(Signal::AllocatableMemoryAvailable, bytes(100)),
            threshold(Signal::NodeFsAvailable, bytes(1)),
        ];
        let observed = Observations::from([
            observed(Signal::MemoryAvailable, 4000, 10_000),
            observed(Signal::AllocatableMemoryAvailable, 300, 1000),
            observed(Signal::NodeFsAvailable, 300, 1000),
        ]);
        let want = [
            Alarm::Usage { dir: cgroups.join("memory"), level: 8900 },
            Alarm::Usage { dir: pods, level: 900 },
        ];
        assert_eq!(alarms(&paths, &thresholds, &observed), want, "half of the memory is in use already");
        assert_eq!(alarms(&paths, &thresholds, &Observations::new()), [], "not measured");
    }

    #[tokio::test]
    async fn a_change_of_the_counters_of_all_pods_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let (root, pods) = (dir.path(), dir.path().join("kubepods"));
        fs::create_dir_all(&pods).unwrap();
        fs::write(root.join("cgroup.controllers"), "memory\n").unwrap();
        let events = pods.join("memory.events");
        fs::write(&events, "low 0\nhigh 0\nmax 0\n").unwrap();
        let paths = Paths {
            root_dir: root.to_owned(),
            pod_logs_dir: root.to_owned(),
            cgroups: root.to_owned(),
            cgroup_root: String::new(),
            proc: root.to_owned(),
            subtracts_huge_pages: true,
        };
        let none = Observations::new();
        let mut alarm = Box::pin(wait(&paths, &[], &none));
        let soon = Duration::from_millis(50);
        assert!(tokio::time::timeout(soon, &mut alarm).await.is_err(), "nothing has changed");
        fs::write(&events, "low 0\nhigh 0\nmax 1\n").unwrap();
        tokio::time::timeout(Duration::from_secs(10), alarm).await.unwrap();
    }
}
