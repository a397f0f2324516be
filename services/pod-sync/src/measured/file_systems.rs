//! The file systems that the runtime uses: it says where, the kernel says what they have.

use std::time::Duration;

use parking_lot::Mutex;
use pod_sync_clients::CallError;
use quintlet_kit::contain::contained_request;
use quintlet_kit::task;
use quintlet_proto::podsync::v1 as wire;
use tokio::time::Instant;

/// So long it is not asked again: what it says changes with its configuration alone.
const KEEP: Duration = Duration::from_secs(60);
/// Whoever reads statistics waits no longer for a runtime; then what it said before has to do.
const PATIENCE: Duration = Duration::from_secs(1);

/// Directories, as last heard, and when.
#[derive(Debug, Default)]
pub(crate) struct FileSystems(Mutex<Option<(Instant, Vec<String>)>>);

impl FileSystems {
    /// What each has now; asks the runtime where they are when that is due.
    pub(crate) async fn look<F>(&self, ask: impl FnOnce() -> F) -> Vec<wire::RuntimeFileSystem>
    where
        F: Future<Output = Result<Vec<String>, CallError>>,
    {
        let known = self.0.lock().clone();
        let fresh = known.as_ref().filter(|(at, _)| at.elapsed() < KEEP).map(|(_, places)| places.clone());
        let places = match fresh {
            Some(places) => places,
            None => match tokio::time::timeout(PATIENCE, ask()).await {
                Ok(Ok(places)) => {
                    *self.0.lock() = Some((Instant::now(), places.clone()));
                    places
                }
                Ok(Err(_)) | Err(_) => known.map(|(_, places)| places).unwrap_or_default(),
            },
        };
        // A file system that is far away may not answer; that holds up nobody else. A panic in there has been logged.
        let measured = task::blocking(|| places.into_iter().filter_map(measure).collect());
        contained_request(None, measured).await.unwrap_or_default()
    }
}

fn measure(mountpoint: String) -> Option<wire::RuntimeFileSystem> {
    let fs = rustix::fs::statfs(&mountpoint).ok()?;
    Some(wire::RuntimeFileSystem { usage: Some(super::figures(&fs)), mountpoint })
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_runtime_is_asked_once_a_minute_and_one_that_hangs_leaves_what_it_said() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().display().to_string();
        let places = FileSystems::default();
        let unknown = places.look(pending).await;
        assert!(unknown.is_empty(), "{unknown:?}");
        let said = vec![place.clone(), "/nowhere/at/all".to_owned()];
        let seen = places.look(|| ready(Ok(said))).await;
        let [one] = seen.as_slice() else { panic!("{seen:?}") };
        let usage = one.usage.unwrap();
        assert_eq!(one.mountpoint, place);
        assert!(
            usage.capacity_bytes > usage.available_bytes && usage.capacity_bytes >= usage.used_bytes,
            "{usage:?}"
        );
        let never = || -> std::future::Ready<Result<Vec<String>, CallError>> { panic!("asked too soon") };
        assert_eq!(places.look(never).await.len(), 1);
        tokio::time::advance(KEEP).await;
        assert_eq!(places.look(pending).await.len(), 1, "what it said before");
        assert_eq!(places.look(|| ready(Ok(Vec::new()))).await, []);
    }
}
