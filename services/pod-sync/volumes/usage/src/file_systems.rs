//! The file systems of the runtime: their mount points come from the runtime, their figures from the kernel.

use std::time::Duration;

use parking_lot::Mutex;
use pod_sync_clients::CallError;
use quintlet_kit::contain::contained_request;
use quintlet_kit::task;
use quintlet_proto::podsync::v1 as wire;
use tokio::time::Instant;

/// Time for which mount points are cached; they change only with the configuration of the runtime.
const KEEP: Duration = Duration::from_secs(60);
/// Longest wait for the runtime. After that the cached mount points are used.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Cached mount points, with the time of the answer.
#[derive(Debug, Default)]
pub(crate) struct FileSystems(Mutex<Option<(Instant, Vec<String>)>>);

impl FileSystems {
    /// Returns the usage of each file system. Calls `ask` for the mount points if the cached ones are too
    /// old.
    pub(crate) async fn usage<F>(&self, ask: impl FnOnce() -> F) -> Vec<wire::RuntimeFileSystem>
    where
        F: Future<Output = Result<Vec<String>, CallError>>,
    {
        let known = self.0.lock().clone();
        let fresh = known.as_ref().filter(|(at, _)| at.elapsed() < KEEP).map(|(_, places)| places.clone());
        let places = match fresh {
            Some(places) => places,
            None => match tokio::time::timeout(TIMEOUT, ask()).await {
                Ok(Ok(places)) => {
                    *self.0.lock() = Some((Instant::now(), places.clone()));
                    places
                }
                Ok(Err(_)) | Err(_) => known.map(|(_, places)| places).unwrap_or_default(),
            },
        };
        // A remote file system may hang, so this runs on a blocking thread. A panic has been logged.
        let measured = task::blocking(|| places.into_iter().filter_map(measure).collect());
        contained_request(None, measured).await.unwrap_or_default()
    }
}

fn measure(mountpoint: String) -> Option<wire::RuntimeFileSystem> {
    let fs = rustix::fs::statfs(&mountpoint).ok()?;
    Some(wire::RuntimeFileSystem { usage: Some(figures(&fs)), mountpoint })
}

/// Returns the figures of a whole file system.
pub(crate) fn figures(fs: &rustix::fs::StatFs) -> wire::DiskUsage {
    let block = u64::try_from(fs.f_bsize).unwrap_or(0);
    wire::DiskUsage {
        available_bytes: fs.f_bavail.saturating_mul(block),
        capacity_bytes: fs.f_blocks.saturating_mul(block),
        used_bytes: fs.f_blocks.saturating_sub(fs.f_bfree).saturating_mul(block),
        inodes: fs.f_files,
        inodes_free: fs.f_ffree,
        inodes_used: fs.f_files.saturating_sub(fs.f_ffree),
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_runtime_is_queried_once_a_minute_and_cached_mount_points_are_used_if_it_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().display().to_string();
        let places = FileSystems::default();
        let unknown = places.usage(pending).await;
        assert!(unknown.is_empty(), "{unknown:?}");
        let mount_points = vec![place.clone(), "/nowhere/at/all".to_owned()];
        let seen = places.usage(|| ready(Ok(mount_points))).await;
        let [one] = seen.as_slice() else { panic!("{seen:?}") };
        let usage = one.usage.unwrap();
        assert_eq!(one.mountpoint, place);
        assert!(
            usage.capacity_bytes > usage.available_bytes && usage.capacity_bytes >= usage.used_bytes,
            "{usage:?}"
        );
        let never = || -> std::future::Ready<Result<Vec<String>, CallError>> { panic!("asked too soon") };
        assert_eq!(places.usage(never).await.len(), 1);
        tokio::time::advance(KEEP).await;
        assert_eq!(places.usage(pending).await.len(), 1, "the cached mount points");
        assert_eq!(places.usage(|| ready(Ok(Vec::new()))).await, []);
    }
}
