//! What pods' volumes take on the node's disk, for the statistics: measured now and then, told from memory; and what the file
//! systems have that the runtime uses, looked at when asked.
//!
//! Here, since volumes and the runtime's directories belong to root. One task measures one pod after the other, each once per `volumeStatsAggPeriod`
//! (pkg/kubelet/server/stats), and works a tenth of the time, so that a volume of a million files costs no pod its disk.

mod walk;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Volume};
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::storage_server::Storage;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::context::{Context, PodWork};
use crate::measured::figures;
use crate::serve::Service;
use crate::view::unix_ns;
use pod_sync_volumes::metrics::plugin;
use pod_sync_volumes::referenced;

/// How often it is looked for pods that are due, new ones among them.
const LOOK: Duration = Duration::from_secs(10);
/// So long is counted without a pause.
const SLICE: Duration = Duration::from_millis(10);
/// A pause is so many times as long as what was counted before it.
const REST: u32 = 9;
/// Files between two looks at the clock.
const FILES: u32 = 64;

/// File systems in memory: the kernel keeps count of them.
const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;

/// Measures pods until told to stop; a `period` of zero: never.
pub async fn run(ctx: Arc<Context>, period: Duration, stop: CancellationToken) {
    if period.is_zero() {
        return;
    }
    loop {
        let views = ctx.views.all();
        let pods: Vec<_> = views
            .iter()
            .filter(|view| !ctx.is_over(&view.pod_ref.uid))
            .map(|view| (view.pod_ref.uid.clone(), Arc::clone(&view.pod)))
            .collect();
        for (uid, pod) in ctx.measured.due(&pods, period) {
            let Ok(pod_work) = quintlet_model::pod::pod_ref(&pod).map(|pod| PodWork::of(&pod)) else {
                continue;
            };
            if ctx.containment.wait(&uid).is_some() {
                continue;
            }
            let (dir, now, stopping) = (ctx.pod_dir(&uid), ctx.clock.wall(), stop.clone());
            let of = uid.clone();
            let metrics = ctx.metrics.clone();
            let work = move || {
                let mut pace = HousekeepingPace::new(stopping);
                measure(&of, &pod, &dir, now, |place| {
                    let began = Instant::now();
                    let usage = walk::usage(place, || pace.step());
                    metrics.volume_measured(began.elapsed());
                    usage
                })
            };
            let began = Instant::now();
            let measured = ctx.contained(&pod_work, quintlet_kit::task::blocking(work)).await;
            // Small volumes of many pods are much to count, too.
            tokio::time::sleep(began.elapsed().min(SLICE).saturating_mul(REST)).await;
            if stop.is_cancelled() {
                return;
            }
            if let Some(storage) = measured {
                ctx.measured.put(uid, storage);
            }
        }
        // Both only wait.
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK.min(period)) => {}
        }
    }
}

/// Counting with pauses.
struct HousekeepingPace {
    stop: CancellationToken,
    files: u32,
    began: Instant,
}

impl HousekeepingPace {
    fn new(stop: CancellationToken) -> Self {
        Self { stop, files: 0, began: Instant::now() }
    }

    fn step(&mut self) -> io::Result<()> {
        self.files = self.files.saturating_add(1);
        if self.files < FILES {
            return Ok(());
        }
        self.files = 0;
        if self.stop.is_cancelled() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let worked = self.began.elapsed();
        if worked >= SLICE {
            std::thread::sleep(worked.saturating_mul(REST));
            self.began = Instant::now();
        }
        Ok(())
    }
}

/// Measures the volumes of a pod that are there, and its file of hosts. What cannot be measured is left out.
fn measure(
    uid: &PodUid,
    pod: &Pod,
    dir: &Path,
    now: Timestamp,
    mut count: impl FnMut(&Path) -> io::Result<walk::Usage>,
) -> wire::PodStorage {
    let mut look = |place: &Path| match usage(place, &mut count) {
        Ok(usage) => Some(usage),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::debug!(pod.uid = %uid, place = %place.display(), %error, "not measured");
            None
        }
    };
    let volumes = referenced(pod).into_iter().filter_map(|volume| {
        Some(wire::VolumeStorage {
            name: volume.name.clone(),
            is_ephemeral: is_ephemeral(volume),
            measured_unix_ns: unix_ns(now),
            usage: Some(look(&place(volume, dir)?)?),
        })
    });
    let volumes = volumes.collect();
    wire::PodStorage { uid: uid.to_string(), volumes, hosts: look(&dir.join("etc-hosts")) }
}

/// Where a volume is that this process made; none for those of the host and the runtime, which nobody measures.
fn place(volume: &Volume, dir: &Path) -> Option<PathBuf> {
    match plugin(volume) {
        "kubernetes.io/host-path" | "kubernetes.io/image" | "unknown" => None,
        plugin => Some(dir.join("volumes").join(plugin.replace('/', "~")).join(&volume.name)),
    }
}

/// It lies on the node's disk and counts as the pod's (pkg/volume/util:IsLocalEphemeralVolume).
fn is_ephemeral(volume: &Volume) -> bool {
    let on_disk = |medium: &Option<String>| medium.as_deref().unwrap_or_default().is_empty();
    volume.config_map.is_some() || volume.empty_dir.as_ref().is_some_and(|source| on_disk(&source.medium))
}

/// What a volume takes, and what its file system has.
fn usage(
    place: &Path,
    count: &mut impl FnMut(&Path) -> io::Result<walk::Usage>,
) -> io::Result<wire::DiskUsage> {
    let fs = rustix::fs::statfs(place)?;
    let whole = figures(&fs);
    // One in memory has nothing but the volume in it. Counted by its files, it would be open when it is to be unmounted.
    if matches!(fs.f_type, TMPFS | HUGETLBFS) && is_mount(place)? {
        return Ok(whole);
    }
    let used = count(place)?;
    Ok(wire::DiskUsage { used_bytes: used.bytes, inodes_used: used.inodes, ..whole })
}

fn is_mount(place: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    let parent = place.parent().unwrap_or(place);
    Ok(std::fs::symlink_metadata(place)?.dev() != std::fs::symlink_metadata(parent)?.dev())
}

#[tonic::async_trait]
impl Storage for Service {
    async fn list(
        &self,
        _: Request<wire::ListStorageRequest>,
    ) -> Result<Response<wire::ListStorageReply>, Status> {
        let measured = &self.ctx.measured;
        let runtime = measured.file_systems.look(|| self.ctx.runtime.file_systems()).await;
        Ok(Response::new(wire::ListStorageReply { pods: measured.all(), runtime }))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

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
    fn volumes_that_are_there_are_measured_and_those_on_disk_are_the_pods_own() {
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
        let count = |place: &Path| walk::usage(place, || Ok(()));
        let storage = measure(&uid("u1"), &pod(), dir.path(), Timestamp::UNIX_EPOCH, count);
        let told: Vec<_> = storage
            .volumes
            .iter()
            .map(|v| (v.name.as_str(), v.is_ephemeral, v.usage.unwrap().inodes_used))
            .collect();
        assert_eq!(told, [("scratch", true, 2), ("memory", false, 1), ("config", true, 1)]);
        let scratch = storage.volumes[0].usage.unwrap();
        assert!(
            scratch.used_bytes >= 1 << 20 && scratch.capacity_bytes > scratch.available_bytes,
            "{scratch:?}"
        );
        let hosts = storage.hosts.unwrap();
        assert_eq!(hosts.inodes_used, 1);
        assert!(hosts.used_bytes >= 4 << 20, "a file that a container grew counts in full: {hosts:?}");
    }

    #[test]
    fn a_volume_in_memory_is_asked_and_never_opened() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("volumes/kubernetes.io~empty-dir/memory");
        fs::create_dir_all(&place).unwrap();
        let none = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", &place, "tmpfs", none, Some(c"size=8m")).unwrap();
        fs::write(place.join("f"), vec![1; 1 << 20]).unwrap();
        let opened = |place: &Path| -> io::Result<walk::Usage> { panic!("{}", place.display()) };
        let storage = measure(&uid("u1"), &pod(), dir.path(), Timestamp::UNIX_EPOCH, opened);
        rustix::mount::unmount(&place, rustix::mount::UnmountFlags::empty()).unwrap();
        let usage = storage.volumes[0].usage.unwrap();
        assert_eq!((usage.used_bytes, usage.capacity_bytes, usage.inodes_used), (1 << 20, 8 << 20, 2));
    }

    #[test]
    fn a_count_that_goes_on_rests_nine_tenths_of_the_time_and_ends_when_told() {
        let stop = CancellationToken::new();
        let mut pace = HousekeepingPace::new(stop.clone());
        let began = Instant::now();
        let mut worked = Duration::ZERO;
        for _ in 0..3 * FILES {
            let step = Instant::now();
            std::thread::sleep(SLICE / FILES);
            worked += step.elapsed();
            pace.step().unwrap();
        }
        assert!(began.elapsed() >= worked * REST, "{worked:?} of {:?}", began.elapsed());
        stop.cancel();
        let ended = (0..FILES).find_map(|_| pace.step().err());
        assert_eq!(ended.map(|e| e.kind()), Some(io::ErrorKind::Interrupted));
    }
}
