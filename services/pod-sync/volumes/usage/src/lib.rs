//! Disk usage of volumes, for the node's statistics (pkg/kubelet/server/stats).
//!
//! [`run`] is a future that the caller spawns. It measures one pod after another, each once per
//! `volumeStatsAggPeriod`, and stores the results in [`Measured`]. It works a tenth of the time, so that a
//! volume with a million files leaves the disk to the pods. A volume whose file system hangs delays the
//! others only once ([`Stalls`]). [`run_provided`] requests the usage of drivers' volumes. [`count_volumes`],
//! another such future, sets the gauges of volumes. [`Measured`] also reads the figures of the runtime's file
//! systems on request. There are no channels. pod-sync does this, since only root may read volumes.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod file_systems;
mod measured;
mod provided;
mod volume_counts;
mod walk;

pub use crate::measured::Measured;
pub use crate::provided::{Drivers, ProvidedVolume, run as run_provided};
pub use crate::volume_counts::run as count_volumes;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Volume};
use pod_sync_direct_volumes::metrics::plugin;
use pod_sync_direct_volumes::quotas::{ProjectQuotas, QuotaUsage};
use pod_sync_direct_volumes::referenced;
use pod_sync_layout::paths;
use pod_sync_metrics::PodMetrics;
use quintlet_kit::clock::Clock;
use quintlet_kit::stalls::{Pass, Stalls};
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1 as wire;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::file_systems::figures;

/// Interval between scans for pods whose volumes are due for measurement.
const SCAN_PERIOD: Duration = Duration::from_secs(10);
/// Longest time of measurement without a pause.
const SLICE: Duration = Duration::from_millis(10);
/// Length of a pause, as a multiple of the measurement before it.
const REST: u32 = 9;
/// Longest pause, which is shorter than a stall.
const MAX_REST: Duration = Duration::from_secs(10);
/// Time after which a file system hangs that has not answered for [`FILES`] files.
const STALL: Duration = Duration::from_secs(30);
/// Files between two readings of the clock.
const FILES: u32 = 64;
/// File systems in memory, whose usage the kernel counts.
const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;

/// The pods whose volumes are measured.
pub trait Pods: Send + Sync + 'static {
    /// Returns the pods that have not terminated.
    fn running(&self) -> Vec<(PodUid, Arc<Pod>)>;

    /// Runs a measurement as work of the pod. Returns `None` if the pod is suspended or the work panicked.
    fn measure<T>(&self, uid: &PodUid, measurement: impl FnOnce() -> T) -> Option<T>;
}

/// Directories and interval of measurements.
#[derive(Debug, Clone)]
pub struct StorageSettings {
    /// Root directory of the kubelet, below which pods have their volumes.
    pub root_dir: PathBuf,
    /// Interval between measurements of a pod; zero disables them.
    pub period: Duration,
    /// Wall time and CLOCK_BOOTTIME.
    pub clock: Clock,
    /// Gets the durations of measurements.
    pub metrics: PodMetrics,
    /// Projects that count the usage of volumes. Other volumes are walked.
    pub quotas: ProjectQuotas,
}

/// Measures the volumes of pods until `stop`.
pub async fn run(
    pods: Arc<impl Pods>,
    measured: Arc<Measured>,
    settings: StorageSettings,
    stop: CancellationToken,
) {
    let period = settings.period;
    if period.is_zero() {
        return;
    }
    let settings = Arc::new(settings);
    let stalls = Stalls::new("volume", STALL);
    loop {
        if !measured.due(&pods.running(), period).is_empty() {
            let pods = Arc::clone(&pods);
            let measured = Arc::clone(&measured);
            let settings = Arc::clone(&settings);
            let stop = stop.clone();
            let work = move |pass: &Pass| {
                measure_due(&*pods, &measured, &settings, &stop, pass, |place, step| {
                    walk::usage(place, step)
                });
            };
            // No volume is measured while too many hang.
            let _measured = stalls.run(work).await;
        }
        // Each branch only waits.
        tokio::select! {
            () = stop.cancelled() => return,
            () = quintlet_kit::timers::pause(SCAN_PERIOD.min(period)) => {}
        }
    }
}

/// Called before each file.
type Step<'a> = dyn FnMut() -> io::Result<()> + 'a;

/// Measures all pods that are due, one after another, with pauses. Blocks the thread. One thread for all of
/// them saves wake-ups.
fn measure_due(
    pods: &impl Pods,
    measured: &Measured,
    settings: &StorageSettings,
    stop: &CancellationToken,
    pass: &Pass,
    walk: impl Fn(&Path, &mut Step<'_>) -> io::Result<walk::Usage>,
) {
    let mut throttle = Throttle::new(|| pass.progress() && !stop.is_cancelled());
    for (uid, pod) in measured.due(&pods.running(), settings.period) {
        let (dir, now) = (paths::pod_dir(&settings.root_dir, &uid), settings.clock.wall());
        let count = |place: &Path, throttle: &mut Throttle<_>| {
            let began = Instant::now();
            let counted = of_project(&settings.quotas, place);
            let by_project = counted.is_some();
            let usage = counted.map_or_else(|| walk(place, &mut || throttle.step()), Ok);
            settings.metrics.volume_measured(by_project, began.elapsed());
            usage
        };
        let look = |place: &Path| {
            let usage = pass.touch(place, || usage(place, |place| count(place, &mut throttle)));
            usage.unwrap_or_else(|| Err(io::ErrorKind::Interrupted.into()))
        };
        let storage = pods.measure(&uid, || measure(&uid, &pod, &dir, now, |_| true, look));
        // Many small volumes need pauses, too.
        if throttle.pause().is_err() {
            return;
        }
        if let Some(storage) = storage {
            measured.put(uid, storage);
        }
    }
}

/// Measures the ephemeral storage of pods at once and without pauses, for an eviction that depends on it.
/// Blocks the thread. A volume that is not counted before `deadline` is left out. Other volumes are not
/// touched: the server of one may not answer.
#[must_use]
pub fn measure_now(
    root_dir: &Path,
    quotas: &ProjectQuotas,
    pods: &[(PodUid, Arc<Pod>)],
    now: Timestamp,
    deadline: std::time::Duration,
) -> Vec<wire::PodStorage> {
    let began = Instant::now();
    let step = || {
        if began.elapsed() < deadline { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) }
    };
    let count = |(uid, pod): &(PodUid, Arc<Pod>)| {
        let count = |place: &Path| {
            step()?;
            of_project(quotas, place).map_or_else(|| walk::usage(place, step), Ok)
        };
        measure(uid, pod, &paths::pod_dir(root_dir, uid), now, is_ephemeral, |place| usage(place, count))
    };
    pods.iter().map(count).collect()
}

/// Returns the usage of a volume by its project, or `None` if it has none.
fn of_project(quotas: &ProjectQuotas, place: &Path) -> Option<walk::Usage> {
    quotas.usage(place).map(|QuotaUsage { bytes, inodes }| walk::Usage { bytes, inodes })
}

/// Pauses measurements, so that they run a tenth of the time.
struct Throttle<F> {
    /// Returns whether the measurements are still wanted.
    is_wanted: F,
    files: u32,
    began: Instant,
}

impl<F: Fn() -> bool> Throttle<F> {
    fn new(is_wanted: F) -> Self {
        Self { is_wanted, files: 0, began: Instant::now() }
    }

    fn step(&mut self) -> io::Result<()> {
        self.files = self.files.saturating_add(1);
        if self.files < FILES {
            return Ok(());
        }
        self.files = 0;
        self.pause()
    }

    fn pause(&mut self) -> io::Result<()> {
        let worked = self.began.elapsed();
        if worked >= SLICE && (self.is_wanted)() {
            std::thread::sleep(worked.saturating_mul(REST).min(MAX_REST));
            self.began = Instant::now();
        }
        if (self.is_wanted)() { Ok(()) } else { Err(io::ErrorKind::Interrupted.into()) }
    }
}

/// Measures the existing volumes of a pod, its hosts file and its termination logs. Volumes that cannot be
/// measured are left out.
fn measure(
    uid: &PodUid,
    pod: &Pod,
    dir: &Path,
    now: Timestamp,
    is_wanted: fn(&Volume) -> bool,
    mut usage: impl FnMut(&Path) -> io::Result<wire::DiskUsage>,
) -> wire::PodStorage {
    let mut look = |place: &Path| match usage(place) {
        Ok(usage) => Some(usage),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::debug!(pod.uid = %uid, place = %place.display(), %error, "failed to measure volume");
            None
        }
    };
    let volumes = referenced(pod).into_iter().filter(|volume| is_wanted(volume)).filter_map(|volume| {
        Some(wire::VolumeStorage {
            name: volume.name.clone(),
            is_ephemeral: is_ephemeral(volume),
            measured_unix_ns: i64::try_from(now.as_nanosecond()).unwrap_or(i64::MAX),
            usage: Some(look(&place(volume, dir)?)?),
            claim: None,
        })
    });
    let volumes = volumes.collect();
    let (hosts, termination_logs) = (look(&dir.join("etc-hosts")), look(&dir.join("containers")));
    wire::PodStorage { uid: uid.to_string(), volumes, hosts, termination_logs }
}

/// Returns the directory of a volume, or `None` for volumes of the host and of the runtime, which are not
/// measured.
fn place(volume: &Volume, dir: &Path) -> Option<PathBuf> {
    match plugin(volume) {
        "kubernetes.io/host-path" | "kubernetes.io/image" | "unknown" => None,
        plugin => Some(dir.join("volumes").join(plugin.replace('/', "~")).join(&volume.name)),
    }
}

/// Returns whether a volume counts as ephemeral storage of its pod (pkg/volume/util: IsLocalEphemeralVolume).
fn is_ephemeral(volume: &Volume) -> bool {
    let on_disk = |medium: &Option<String>| medium.as_deref().unwrap_or_default().is_empty();
    volume.config_map.is_some() || volume.empty_dir.as_ref().is_some_and(|source| on_disk(&source.medium))
}

/// Returns the usage of a volume and the figures of its file system.
fn usage(place: &Path, count: impl FnOnce(&Path) -> io::Result<walk::Usage>) -> io::Result<wire::DiskUsage> {
    let fs = rustix::fs::statfs(place)?;
    let whole = figures(&fs);
    // A file system in memory holds only this volume. Walking it would keep it open while it is unmounted.
    if matches!(fs.f_type, TMPFS | HUGETLBFS) && is_mount(place)? {
        return Ok(whole);
    }
    let used = count(place)?;
    Ok(wire::DiskUsage { used_bytes: used.bytes, inodes_used: used.inodes, ..whole })
}

/// Returns the usage of the file system at a path. Blocks, as long as a server of the file system does not
/// answer.
///
/// # Errors
/// The file system cannot be read.
pub fn file_system_usage(place: &Path) -> io::Result<wire::DiskUsage> {
    Ok(figures(&rustix::fs::statfs(place)?))
}

fn is_mount(place: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    let parent = place.parent().unwrap_or(place);
    Ok(std::fs::symlink_metadata(place)?.dev() != std::fs::symlink_metadata(parent)?.dev())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc;

    use parking_lot::Mutex;
    use pod_sync_direct_volumes::quotas::{Mount, QuotaTool};
    use serde_json::json;

    use super::*;

    fn uid(name: &str) -> PodUid {
        PodUid::parse(name).unwrap()
    }

    fn pod() -> Pod {
        let names = ["scratch", "memory", "config", "host", "late"];
        let mounts: Vec<_> = names.map(|n| json!({"name": n, "mountPath": format!("/{n}")})).into();
        serde_json::from_value(json!({
            "metadata": {"name": "p"},
            "spec": {
                "containers": [{"name": "c", "volumeMounts": mounts}],
                "volumes": [
                    {"name": "scratch", "emptyDir": {}},
                    {"name": "memory", "emptyDir": {"medium": "Memory"}},
                    {"name": "config", "configMap": {"name": "m"}},
                    {"name": "host", "hostPath": {"path": "/"}},
                    {"name": "late", "emptyDir": {}},
                    {"name": "unused", "emptyDir": {}},
                ],
            },
        }))
        .unwrap()
    }

    #[test]
    fn existing_volumes_are_measured_and_those_on_disk_are_ephemeral_storage() {
        let dir = tempfile::tempdir().unwrap();
        let at = |plugin: &str, name: &str| {
            let place = dir.path().join(format!("volumes/kubernetes.io~{plugin}/{name}"));
            fs::create_dir_all(&place).unwrap();
            place
        };
        fs::write(at("empty-dir", "scratch").join("f"), vec![1; 1 << 20]).unwrap();
        at("empty-dir", "memory");
        at("empty-dir", "unused");
        at("configmap", "config");
        fs::write(dir.path().join("etc-hosts"), vec![1; 4 << 20]).unwrap();
        for container in ["c", "d"] {
            let termination_logs = dir.path().join("containers").join(container);
            fs::create_dir_all(&termination_logs).unwrap();
            fs::write(termination_logs.join("0a0b0c0d"), vec![1; 1 << 20]).unwrap();
        }
        let count = |place: &Path| usage(place, |place| walk::usage(place, || Ok(())));
        let storage = measure(&uid("u1"), &pod(), dir.path(), Timestamp::UNIX_EPOCH, |_| true, count);
        let measured: Vec<_> = storage
            .volumes
            .iter()
            .map(|v| (v.name.as_str(), v.is_ephemeral, v.usage.unwrap().inodes_used))
            .collect();
        assert_eq!(measured, [("scratch", true, 2), ("memory", false, 1), ("config", true, 1)]);
        let scratch = storage.volumes[0].usage.unwrap();
        assert!(
            scratch.used_bytes >= 1 << 20 && scratch.capacity_bytes > scratch.available_bytes,
            "{scratch:?}"
        );
        let hosts = storage.hosts.unwrap();
        assert_eq!(hosts.inodes_used, 1);
        assert!(hosts.used_bytes >= 4 << 20, "a file that a container grew counts in full: {hosts:?}");
        let logs = storage.termination_logs.unwrap();
        assert!((2 << 20..4 << 20).contains(&logs.used_bytes), "the logs of all containers: {logs:?}");
        fs::remove_dir_all(dir.path().join("containers")).unwrap();
        let storage = measure(&uid("u1"), &pod(), dir.path(), Timestamp::UNIX_EPOCH, |_| true, count);
        assert_eq!(storage.termination_logs, None);
    }

    #[test]
    fn an_immediate_measurement_is_of_ephemeral_storage_and_ends_at_its_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = paths::pod_dir(dir.path(), &uid("u1")).join("volumes/kubernetes.io~empty-dir/scratch");
        fs::create_dir_all(&scratch).unwrap();
        fs::write(scratch.join("f"), vec![1; 1 << 20]).unwrap();
        fs::create_dir_all(scratch.with_file_name("memory")).unwrap();
        let pods = [(uid("u1"), Arc::new(pod()))];
        let measured = |deadline| -> Vec<u64> {
            let all =
                measure_now(dir.path(), &ProjectQuotas::default(), &pods, Timestamp::UNIX_EPOCH, deadline);
            assert_eq!(all[0].uid, "u1");
            all[0].volumes.iter().map(|v| v.usage.unwrap().inodes_used).collect()
        };
        assert_eq!(measured(Duration::from_secs(60)), [2]);
        assert_eq!(measured(Duration::ZERO), [0; 0]);
    }

    /// A file system whose only project has one GiB.
    #[derive(Default)]
    struct OneGib(AtomicBool);

    impl QuotaTool for OneGib {
        fn has_accounting(&self, _: &Mount) -> io::Result<bool> {
            Ok(true)
        }
        fn project_of(&self, _: &Path) -> io::Result<u32> {
            Ok(0)
        }
        fn set_project(&self, _: &Mount, _: &Path, _: u32) -> io::Result<()> {
            self.0.store(true, Ordering::Relaxed);
            Ok(())
        }
        fn usage(&self, _: &Mount, _: u32) -> io::Result<QuotaUsage> {
            let used = QuotaUsage { bytes: 1 << 30, inodes: 9 };
            Ok(if self.0.load(Ordering::Relaxed) { used } else { QuotaUsage::default() })
        }
    }

    #[test]
    fn a_volume_with_a_project_is_not_walked() {
        let dir = tempfile::tempdir().unwrap();
        let pod_dir = paths::pod_dir(dir.path(), &uid("u1"));
        let at = |name: &str| {
            let place = pod_dir.join(format!("volumes/kubernetes.io~empty-dir/{name}"));
            fs::create_dir_all(&place).unwrap();
            place
        };
        let mounts = dir.path().join("mounts");
        fs::write(&mounts, format!("/dev/a {} xfs rw,prjquota 0 0\n", dir.path().display())).unwrap();
        let quotas = ProjectQuotas::with_tool(dir.path(), dir.path(), mounts, Box::new(OneGib::default()));
        let pods = [(uid("u1"), Arc::new(pod()))];
        at("late");
        quotas.assign(&at("scratch"));
        let all = measure_now(dir.path(), &quotas, &pods, Timestamp::UNIX_EPOCH, Duration::from_secs(60));
        let seen: Vec<_> = all[0]
            .volumes
            .iter()
            .map(|v| (v.name.as_str(), v.usage.unwrap().inodes_used, v.usage.unwrap().used_bytes >= 1 << 30))
            .collect();
        assert_eq!(seen, [("scratch", 9, true), ("late", 1, false)]);
    }

    struct Running(Vec<(PodUid, Arc<Pod>)>);

    impl Pods for Running {
        fn running(&self) -> Vec<(PodUid, Arc<Pod>)> {
            self.0.clone()
        }
        fn measure<T>(&self, _: &PodUid, measurement: impl FnOnce() -> T) -> Option<T> {
            Some(measurement())
        }
    }

    #[tokio::test]
    async fn a_volume_that_hangs_is_left_out_and_delays_the_others_once() {
        let dir = tempfile::tempdir().unwrap();
        let at = |pod: &str, name: &str| {
            let volumes = paths::pod_dir(dir.path(), &uid(pod)).join("volumes/kubernetes.io~empty-dir");
            fs::create_dir_all(volumes.join(name)).unwrap();
            volumes.join(name)
        };
        at("u1", "late");
        at("u2", "scratch");
        let hanging = at("u1", "scratch");
        let (release, hangs) = mpsc::channel::<()>();
        let hangs = Arc::new(Mutex::new(hangs));
        let began = Arc::new(AtomicUsize::new(0));
        let settings = StorageSettings {
            root_dir: dir.path().to_owned(),
            period: Duration::from_millis(1),
            clock: Clock::system(),
            metrics: PodMetrics::default(),
            quotas: ProjectQuotas::default(),
        };
        let pods = ["u1", "u2"].map(|name| (uid(name), Arc::new(pod())));
        let (measured, settings) = (Arc::new(Measured::default()), Arc::new(settings));
        let stalls = Stalls::new("volume", Duration::from_millis(500));
        let names = || async {
            let pods = Running(pods.to_vec());
            let results = Arc::clone(&measured);
            let settings = Arc::clone(&settings);
            let hanging = hanging.clone();
            let (hangs, began) = (Arc::clone(&hangs), Arc::clone(&began));
            let stop = CancellationToken::new();
            let walk = move |place: &Path, step: &mut Step<'_>| {
                if place == hanging {
                    began.fetch_add(1, Ordering::Relaxed);
                    let _ended = hangs.lock().recv();
                }
                walk::usage(place, step)
            };
            let work = move |pass: &Pass| measure_due(&pods, &results, &settings, &stop, pass, &walk);
            stalls.run(work).await.unwrap();
            let volumes =
                |pod: wire::PodStorage| pod.volumes.into_iter().map(move |v| (pod.uid.clone(), v.name));
            measured.all().into_iter().flat_map(volumes).collect::<Vec<_>>()
        };
        let named = |names: &[(&str, &str)]| -> Vec<(String, String)> {
            names.iter().map(|(pod, name)| ((*pod).to_owned(), (*name).to_owned())).collect()
        };
        let others = named(&[("u1", "late"), ("u2", "scratch")]);
        assert_eq!(names().await, others);
        assert_eq!(names().await, others);
        assert_eq!(began.load(Ordering::Relaxed), 1, "the volume is known to hang");
        drop(release);
        let all = named(&[("u1", "scratch"), ("u1", "late"), ("u2", "scratch")]);
        let deadline = Instant::now() + Duration::from_secs(10);
        while names().await != all {
            assert!(Instant::now() < deadline, "the volume is skipped");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[test]
    fn a_volume_in_memory_is_never_opened() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("volumes/kubernetes.io~empty-dir/memory");
        fs::create_dir_all(&place).unwrap();
        let none = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", &place, "tmpfs", none, Some(c"size=8m")).unwrap();
        fs::write(place.join("f"), vec![1; 1 << 20]).unwrap();
        let opened = |place: &Path| -> io::Result<walk::Usage> { panic!("{}", place.display()) };
        let look = |place: &Path| usage(place, opened);
        let storage = measure(&uid("u1"), &pod(), dir.path(), Timestamp::UNIX_EPOCH, |_| true, look);
        rustix::mount::unmount(&place, rustix::mount::UnmountFlags::empty()).unwrap();
        let usage = storage.volumes[0].usage.unwrap();
        assert_eq!((usage.used_bytes, usage.capacity_bytes, usage.inodes_used), (1 << 20, 8 << 20, 2));
    }

    #[test]
    fn a_measurement_pauses_nine_tenths_of_the_time_and_ends_on_stop() {
        let stop = CancellationToken::new();
        let mut throttle = Throttle::new(|| !stop.is_cancelled());
        let began = Instant::now();
        let mut worked = Duration::ZERO;
        for _ in 0..3 * FILES {
            let step = Instant::now();
            std::thread::sleep(SLICE / FILES);
            worked += step.elapsed();
            throttle.step().unwrap();
        }
        assert!(began.elapsed() >= worked * REST, "{worked:?} of {:?}", began.elapsed());
        stop.cancel();
        let ended = (0..FILES).find_map(|_| throttle.step().err());
        assert_eq!(ended.map(|e| e.kind()), Some(io::ErrorKind::Interrupted));
    }
}
