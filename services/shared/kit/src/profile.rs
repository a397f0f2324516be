//! CPU profiles of this process, for debug.v1 and for node-api ([`quintlet_profile`]).
//!
//! Task: [`start`] spawns one, which ends with the profile or when its receiver is dropped.

use quintlet_profile::cpu::{ProfileError, Recording, Sampling};
use tokio::sync::oneshot;

use crate::task;

/// A CPU profile that is being taken. Dropping it ends the profile.
#[derive(Debug)]
pub struct CpuProfile(oneshot::Receiver<Result<Vec<u8>, ProfileError>>);

/// Starts a CPU profile.
///
/// # Errors
/// Another profile of this process is being taken, or the profiler cannot be used.
pub async fn start(sampling: Sampling) -> Result<CpuProfile, ProfileError> {
    let recording = task::blocking(move || Recording::start(sampling)).await?;
    let (mut sender, receiver) = oneshot::channel();
    task::spawn("cpu-profile", async move {
        // Both arms only wait.
        tokio::select! {
            () = tokio::time::sleep(sampling.duration()) => {
                let profile = task::blocking(move || recording.finish()).await;
                // The receiver may have been dropped; that is not an error.
                let _ = sender.send(profile);
            }
            () = sender.closed() => task::blocking(move || drop(recording)).await,
        }
    });
    Ok(CpuProfile(receiver))
}

impl CpuProfile {
    /// Waits for the end of the profile, and returns it as a compressed message of pprof.
    ///
    /// # Errors
    /// The samples cannot be read.
    pub async fn finish(self) -> Result<Vec<u8>, ProfileError> {
        let ended =
            |_| ProfileError::Profiler { action: "take a profile", reason: "the process ends".to_owned() };
        self.0.await.map_err(ended)?
    }
}

/// Returns jemalloc's profile of the heap as text.
///
/// # Errors
/// The allocator of this process does not record allocations, or the profile cannot be written.
pub async fn heap() -> Result<Vec<u8>, ProfileError> {
    task::blocking(quintlet_profile::heap::profile).await
}
