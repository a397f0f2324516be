//! Volumes that a pod's worker sets up and removes in its pass, by `pod-sync-direct-volumes`.
//!
//! They are in the same states as the others, and [`reconcile_direct`] hands out their operations. The worker
//! executes these itself: they are a few system calls, so a task of their own, or a wake-up of one, would
//! cost more than the work.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Volume};
use pod_sync_direct_volumes::{
    SetUp, VolumeContext, Volumes, error::VolumeFailure, is_direct, metrics::plugin, referenced,
};
use pod_sync_volume_reconcile::VolumeName;
use pod_sync_volume_reconcile::actual::MountState;
use pod_sync_volume_reconcile::desired::{DesiredVolume, Reach};
use pod_sync_volume_reconcile::operations::{FIRST_WAIT, LONGEST_WAIT, OperationKey};
use pod_sync_volume_reconcile::reconcile::{Operation, reconcile_direct};
use quintlet_kit::task;
use quintlet_model::ids::PodUid;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::state::{ManagerState, Running, StillMounted};
use crate::tasks::{Shared, VolumeTasks};
use crate::work::OperationStep;

/// Longest wait after a failed set-up that keeps a pod from its start, and after a failed removal. The
/// kubelet waits up to two minutes.
const LONGEST_WAIT_OF_A_POD: Duration = Duration::from_secs(16);

/// The volumes of a pod that are set up again, beside those that are not set up and whose back-off has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Again {
    /// No volume is set up again.
    None,
    /// Volumes with content of API objects (`MarkRemountRequired`).
    Content,
    /// Volumes with content of API objects, which has changed: their back-off ends.
    Changed,
    /// All volumes, since containers are about to start: their back-off ends.
    All,
}

impl Again {
    fn is_for(self, volume: &VolumeName) -> bool {
        match self {
            Self::None => false,
            Self::Content | Self::Changed => Volumes::needs_refresh(volume.plugin_of_pod()),
            Self::All => true,
        }
    }

    fn ends_backoff(self) -> bool {
        match self {
            Self::None | Self::Content => false,
            Self::Changed | Self::All => true,
        }
    }
}

/// The result of an operation.
#[derive(Debug)]
enum Ended {
    Done,
    /// The volume is ready, and keeps its old content.
    Stale(String),
    Failed {
        text: String,
        /// Directories, files or a mount may be left.
        is_partial: bool,
    },
    /// The worker was cancelled before the volume was touched.
    Abandoned,
}

impl ManagerState {
    /// Makes the direct volumes of a pod desired.
    fn declare_direct(&mut self, pod: &PodUid, volumes: &[&Volume], again: Again, wall: Timestamp) {
        for volume in volumes {
            if self.desired.direct(pod, &volume.name).is_some() {
                continue;
            }
            let desired = DesiredVolume {
                name: VolumeName::of_pod(plugin(volume), pod, &volume.name),
                spec_name: volume.name.clone(),
                reach: Reach::Direct,
                size: None,
                label: None,
            };
            self.need(pod, &volume.name, wall);
            self.desired.add_direct(pod, volume.name.clone(), desired);
        }
        if again.ends_backoff() {
            let due = self.desired.direct_of(pod).filter(|(_, volume)| again.is_for(&volume.name));
            for (_, volume) in due {
                self.direct_operations.end_backoff(&key(&volume.name, pod));
            }
        }
        self.actual.request_direct_remount(pod, |name| again.is_for(name));
    }

    /// Makes the direct volumes of a pod undesired.
    fn release_direct(&mut self, pod: &PodUid) {
        for volume in self.desired.remove_direct(pod) {
            let key = key(&volume.name, pod);
            self.direct_operations.end_backoff(&key);
            if self.actual.mount(&volume.name, pod).is_none() {
                self.errors.remove(&key);
            }
        }
    }

    /// Returns the operations that are due for a pod, which the caller executes.
    fn begin_direct(&mut self, pod: &PodUid, now: Instant) -> Vec<Operation> {
        let plan = reconcile_direct(&self.desired, &self.actual, &self.direct_operations, pod, now);
        for operation in &plan.start {
            let key = operation.key();
            self.direct_operations.started(key.clone(), operation.kind());
            self.running.insert(key, Running { pod: Some(pod.clone()), step: None, since: now });
        }
        plan.start
    }

    fn direct_step(&mut self, operation: &Operation, step: OperationStep, now: Instant) {
        if let Some(running) = self.running.get_mut(&operation.key()) {
            running.step = Some(step);
            running.since = now;
        }
    }

    /// Returns the time until a failed operation of a pod is due; `None` if none has failed.
    pub(crate) fn direct_wait(&self, pod: &PodUid, now: Instant) -> Option<Duration> {
        let plan = reconcile_direct(&self.desired, &self.actual, &self.direct_operations, pod, now);
        plan.next.map(|next| next.saturating_duration_since(now))
    }

    /// Returns the direct volumes of a pod that are not mounted, and the last error of one of them.
    pub(crate) fn missing_direct(&self, pod: &PodUid) -> Option<Option<String>> {
        let is_mounted = |volume: &DesiredVolume| {
            self.actual.mount(&volume.name, pod).map(|mount| mount.state) == Some(MountState::Mounted)
        };
        let mut missing = self.desired.direct_of(pod).filter(|(_, volume)| !is_mounted(volume)).peekable();
        missing.peek()?;
        Some(missing.find_map(|(_, volume)| {
            let (error, _) = self.errors.get(&key(&volume.name, pod))?;
            Some(error.clone())
        }))
    }

    fn direct_ended(&mut self, operation: &Operation, ended: Ended, now: Instant, wall: Timestamp) {
        let key = operation.key();
        self.running.remove(&key);
        let (volume, pod) = match operation {
            Operation::Mount { volume, pod, .. } => (&volume.name, pod),
            Operation::Unmount { volume, pod } => (volume, pod),
            Operation::Attach { .. }
            | Operation::Expand { .. }
            | Operation::UnmountDevice { .. }
            | Operation::Detach { .. } => return,
        };
        let was_mounted =
            self.actual.mount(volume, pod).map(|mount| mount.state) == Some(MountState::Mounted);
        let error = match (operation, ended) {
            (_, Ended::Abandoned) => {
                self.direct_operations.abandoned(&key);
                return;
            }
            (Operation::Mount { volume, pod, .. }, ended) => match ended {
                Ended::Stale(text) => {
                    self.actual.direct_mounted(volume, pod, true);
                    Some(text)
                }
                Ended::Failed { text, is_partial } => {
                    self.actual.direct_mount_failed(volume, pod, is_partial);
                    Some(text)
                }
                Ended::Done | Ended::Abandoned => {
                    self.actual.direct_mounted(volume, pod, false);
                    None
                }
            },
            (_, Ended::Stale(text) | Ended::Failed { text, .. }) => {
                self.actual.unmount_failed(volume, pod);
                Some(format!("UnmountVolume.TearDown failed for volume \"{volume}\" : {text}"))
            }
            (_, Ended::Done) => {
                self.actual.unmounted(volume, pod);
                None
            }
        };
        let is_present = self.actual.mount(volume, pod).is_some();
        match error.filter(|_| is_present || self.desired.has(pod, volume)) {
            None => {
                self.direct_operations.succeeded(&key);
                self.errors.remove(&key);
            }
            Some(error) => {
                let is_refresh = was_mounted && matches!(operation, Operation::Mount { .. });
                let longest = if is_refresh { LONGEST_WAIT } else { LONGEST_WAIT_OF_A_POD };
                let text = self.direct_operations.failed_within(longest, &key, &error, now, wall);
                tracing::info!(text, "volume operation failed, retrying");
                self.errors.insert(key, (error, wall));
            }
        }
    }
}

fn key(volume: &VolumeName, pod: &PodUid) -> OperationKey {
    OperationKey { volume: volume.clone(), pod: Some(pod.clone()) }
}

/// Operations that a worker executes. One without a result when this is dropped counts as interrupted: its
/// volume is uncertain.
struct InFlight {
    shared: Arc<Shared>,
    /// By the name in the pod.
    operations: BTreeMap<String, Operation>,
    cancel: CancellationToken,
}

impl InFlight {
    fn report(&mut self, name: &str, progress: SetUp) {
        let ended = match progress {
            SetUp::Begun => {
                if let Some(operation) = self.operations.get(name) {
                    self.shared.state.lock().direct_step(operation, OperationStep::SetUp, Instant::now());
                }
                return;
            }
            SetUp::Ready => Ended::Done,
            // The reads of a cancelled worker fail.
            SetUp::Stale(_) | SetUp::Failed { is_partial: false, .. } if self.cancel.is_cancelled() => {
                Ended::Abandoned
            }
            SetUp::Stale(failure) => Ended::Stale(failure.to_string()),
            SetUp::Failed { failure, is_partial } => Ended::Failed { text: failure.to_string(), is_partial },
        };
        self.ended(name, ended);
    }

    fn ended(&mut self, name: &str, ended: Ended) {
        let Some(operation) = self.operations.remove(name) else { return };
        let (now, wall) = (Instant::now(), self.shared.tools.clock.wall());
        self.shared.state.lock().direct_ended(&operation, ended, now, wall);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        while let Some(name) = self.operations.keys().next().cloned() {
            let text = "the operation was interrupted".to_owned();
            self.ended(&name, Ended::Failed { text, is_partial: true });
        }
    }
}

impl VolumeTasks {
    /// Sets up the direct volumes of a pod before its containers start: those that are not set up and due,
    /// and those of `again`. Returns what failed, each with the kubelet's text of an event.
    /// [`VolumeTasks::wait`] says whether the pod can start.
    ///
    /// Cancellation safety: volumes whose files are being written are completed. The others are uncertain.
    ///
    /// # Errors
    /// The directories of the pod cannot be created.
    pub async fn set_up(
        &self,
        pod: &Pod,
        uid: &PodUid,
        ctx: &VolumeContext,
        again: Again,
        cancel: &CancellationToken,
    ) -> io::Result<Vec<VolumeFailure>> {
        let (volumes, operations) = self.begin(pod, uid, again);
        self.execute(pod, uid, ctx, (&volumes, operations), cancel).await
    }

    /// Repeats the set-up of direct volumes of a pod at rest: of those of `again`, and of failed ones that
    /// are due. A failure leaves the old content. Returns what failed.
    pub async fn refresh_direct(
        &self,
        pod: &Pod,
        uid: &PodUid,
        again: Again,
        ctx: impl FnOnce() -> VolumeContext,
        cancel: &CancellationToken,
    ) -> Vec<VolumeFailure> {
        let (volumes, operations) = self.begin(pod, uid, again);
        if operations.is_empty() {
            return Vec::new();
        }
        match self.execute(pod, uid, &ctx(), (&volumes, operations), cancel).await {
            Ok(failures) => failures,
            Err(error) => {
                tracing::warn!(pod.uid = %uid, %error, "volume refresh failed, retrying");
                Vec::new()
            }
        }
    }

    /// Returns the time until a failed set-up of a pod's direct volumes is due; `None` if none has failed.
    #[must_use]
    pub fn direct_wait(&self, uid: &PodUid) -> Option<Duration> {
        self.0.state.lock().direct_wait(uid, Instant::now())
    }

    fn begin<'a>(&self, pod: &'a Pod, uid: &PodUid, again: Again) -> (Vec<&'a Volume>, Vec<Operation>) {
        let mut volumes = referenced(pod);
        volumes.retain(|volume| is_direct(volume));
        let mut state = self.0.state.lock();
        state.declare_direct(uid, &volumes, again, self.0.tools.clock.wall());
        let operations = state.begin_direct(uid, Instant::now());
        (volumes, operations)
    }

    async fn execute(
        &self,
        pod: &Pod,
        uid: &PodUid,
        ctx: &VolumeContext,
        (volumes, operations): (&[&Volume], Vec<Operation>),
        cancel: &CancellationToken,
    ) -> io::Result<Vec<VolumeFailure>> {
        let mut in_flight = self.in_flight(cancel.clone());
        let mut removals = Vec::new();
        for operation in operations {
            match operation {
                Operation::Mount { ref volume, .. } => {
                    drop(in_flight.operations.insert(volume.spec_name.clone(), operation));
                }
                removal => removals.push(removal),
            }
        }
        if !removals.is_empty() {
            let (removing, uid) = (self.in_flight(cancel.clone()), uid.clone());
            task::blocking(move || remove(removing, &uid, removals)).await;
        }
        let is_due = |volume: &&&Volume| in_flight.operations.contains_key(&volume.name);
        let due: Vec<&Volume> = volumes.iter().filter(is_due).copied().collect();
        let progress = move |name: &str, progress| in_flight.report(name, progress);
        self.0.volumes.set_up(pod, uid, &due, ctx, progress).await
    }

    fn in_flight(&self, cancel: CancellationToken) -> InFlight {
        InFlight { shared: Arc::clone(&self.0), operations: BTreeMap::new(), cancel }
    }

    /// Unmounts the subpaths of a pod whose containers have stopped, makes its direct volumes undesired, and
    /// removes them.
    pub(crate) async fn remove_direct(&self, uid: &PodUid) -> Result<(), StillMounted> {
        let (removing, uid) = (self.in_flight(CancellationToken::new()), uid.clone());
        let removed = move || {
            let shared = Arc::clone(&removing.shared);
            // Mounts of subpaths go before those of volumes.
            let subpaths = shared.volumes.tear_down_subpaths(&uid);
            subpaths.map_err(|error| StillMounted { text: error.to_string(), retry_after: None })?;
            let operations = {
                let mut state = shared.state.lock();
                state.release_direct(&uid);
                state.begin_direct(&uid, Instant::now())
            };
            remove(removing, &uid, operations);
            shared.volumes.release_projects(&uid);
            let state = shared.state.lock();
            if state.actual.direct_of(&uid).next().is_none() {
                return Ok(());
            }
            // Without a failed one, an operation of a worker before is in progress.
            let retry_after = state.direct_wait(&uid, Instant::now()).or(Some(FIRST_WAIT));
            Err(StillMounted { retry_after, ..state.still_mounted(&uid) })
        };
        task::blocking(removed).await
    }
}

/// Executes the removals one after the other, and records each result before the next one begins. Blocks.
fn remove(mut in_flight: InFlight, uid: &PodUid, removals: Vec<Operation>) {
    let mut names = Vec::with_capacity(removals.len());
    for operation in removals {
        let Operation::Unmount { volume, .. } = &operation else { continue };
        let name = {
            let state = in_flight.shared.state.lock();
            state.actual.mount(volume, uid).map(|mount| mount.spec_name.clone()).unwrap_or_default()
        };
        names.push((volume.plugin_of_pod().to_owned(), name, volume.to_string()));
        in_flight.operations.insert(volume.to_string(), operation);
    }
    for (plugin, name, volume) in names {
        if let Some(operation) = in_flight.operations.get(&volume) {
            in_flight.shared.state.lock().direct_step(operation, OperationStep::TearDown, Instant::now());
        }
        let ended = match in_flight.shared.volumes.tear_down(uid, &plugin, &name) {
            Ok(()) => Ended::Done,
            Err(error) => Ended::Failed { text: error.to_string(), is_partial: true },
        };
        in_flight.ended(&volume, ended);
    }
}

#[cfg(test)]
mod tests;
