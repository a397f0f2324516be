//! Sets up, refreshes and tears down volumes of pods (`pkg/volume`, `pkg/kubelet/volumemanager`).
//!
//! [`Volumes`] executes. `pod-sync-volume-manager` has the state and decides which volumes of a pod are due.
//! The only state here is caches: tokens, projects, and the sizes of volumes. Whether a volume is ready is
//! read from disk and the mount table, so a set-up can be repeated, also by the next process. Calls for one
//! pod come from that pod's worker, one at a time. API objects are fetched first. Files are then written in a
//! blocking task, which a caller that is dropped does not interrupt.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, Volume};
use parking_lot::Mutex;
use pod_sync_cri_config::mounts::{MountedVolume, MountedVolumes};
use pod_sync_layout::{TokenCache, paths};
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use tokio::time::Instant;

mod apply;
mod atomic;
pub mod certificates;
mod context;
mod empty_dir;
pub mod error;
pub mod found;
pub mod host_path;
pub mod layout;
pub mod metrics;
pub mod mount_table;
pub mod ownership;
mod payload;
mod plan;
pub mod quotas;
mod resize;
mod set_up;
mod spec;
mod teardown;

#[cfg(test)]
mod tests;

pub use context::VolumeContext;
pub use set_up::SetUp;
pub use spec::{became_csi, is_direct, referenced};
pub use teardown::OrphanError;

use apply::apply;
use certificates::CredentialBundles;
use error::{TearDownError, VolumeFailure, VolumeStep};
use metrics::VolumeMetrics;
use mount_table::{MountTable, ProcMountTable};
use payload::MAX_FILE_BYTES;
use plan::Planner;
use quotas::ProjectQuotas;
use spec::{fs_group, nested_mount_points};

/// Volumes of this node's pods.
#[derive(Clone)]
pub struct Volumes {
    root: PathBuf,
    metrics: VolumeMetrics,
    table: Arc<dyn MountTable>,
    tokens: Arc<TokenCache>,
    /// `None` without an API server, and while the feature gate `PodCertificateRequest` is off.
    credentials: Option<Arc<dyn CredentialBundles>>,
    quotas: ProjectQuotas,
    /// Bytes of the files of each volume: the limit is for all volumes of a pod, also if some are set up
    /// alone.
    sizes: Arc<Mutex<HashMap<PodUid, BTreeMap<String, usize>>>>,
}

/// The set-up of one volume, for metrics: fetching objects and writing files are separate.
struct Mount {
    metrics: VolumeMetrics,
    plugin: &'static str,
    began: Instant,
    took: Duration,
}

impl Mount {
    fn begin(metrics: &VolumeMetrics, volume: &Volume) -> Self {
        let plugin = metrics::plugin(volume);
        Self { metrics: metrics.clone(), plugin, began: Instant::now(), took: Duration::ZERO }
    }

    fn planned(self) -> Self {
        Self { took: self.began.elapsed(), ..self }
    }

    fn and(self, more: Duration) -> Self {
        Self { took: self.took.saturating_add(more), ..self }
    }

    fn done(self, ok: bool) {
        self.metrics.observe("volume_mount", self.plugin, ok, self.took);
    }
}

impl Volumes {
    /// Returns the volumes below `root`, the kubelet's root directory.
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        Self::with_table(root, Arc::new(ProcMountTable))
    }

    /// Like [`Volumes::new`], with another mount table.
    #[must_use]
    pub fn with_table(root: PathBuf, table: Arc<dyn MountTable>) -> Self {
        let (credentials, quotas) = (None, ProjectQuotas::default());
        let metrics = VolumeMetrics::default();
        let tokens = Arc::default();
        let sizes = Arc::default();
        Self { root, metrics, table, tokens, credentials, quotas, sizes }
    }

    /// Adds the keys and certificates of sources `podCertificate`.
    #[must_use]
    pub fn with_credentials(self, credentials: Option<Arc<dyn CredentialBundles>>) -> Self {
        Self { credentials, ..self }
    }

    /// Returns how often a certificate of the pod was issued or refused. The volumes are outdated after that.
    #[must_use]
    pub fn changes(&self, uid: &PodUid) -> u64 {
        self.credentials.as_ref().map_or(0, |credentials| credentials.changes(uid))
    }

    fn forget(&self, uid: &PodUid) {
        self.sizes.lock().remove(uid);
        self.tokens.remove_pod(uid.as_str());
        if let Some(credentials) = &self.credentials {
            credentials.forget(uid);
        }
    }

    /// Returns the projects that count the usage of volumes.
    #[must_use]
    pub fn quotas(&self) -> ProjectQuotas {
        self.quotas.clone()
    }

    /// Counts the usage of emptyDir volumes by projects.
    #[must_use]
    pub fn with_quotas(self, quotas: ProjectQuotas) -> Self {
        Self { quotas, ..self }
    }

    /// Creates the pod's directories, and sets up these of its volumes. Repeating it refreshes files and
    /// changes nothing else. `progress` receives the name and progress of each volume, the results on a
    /// thread for blocking work. Returns what failed.
    ///
    /// Cancellation safety: volumes whose files are being written are completed.
    ///
    /// # Errors
    /// The directories cannot be created, and no volume was set up.
    pub async fn set_up(
        &self,
        pod: &Pod,
        uid: &PodUid,
        volumes: &[&Volume],
        ctx: &VolumeContext,
        mut progress: impl FnMut(&str, SetUp) + Send + 'static,
    ) -> io::Result<Vec<VolumeFailure>> {
        let mut plans = Vec::with_capacity(volumes.len());
        let planner = self.planner(pod, uid, ctx);
        let mut left = self.bytes_beside(uid, volumes);
        let mut nested = if volumes.is_empty() { BTreeMap::new() } else { nested_mount_points(pod) };
        for volume in volumes {
            progress(&volume.name, SetUp::Begun);
            let mount = Mount::begin(&self.metrics, volume);
            let plan = planner.plan(volume).await.map(|plan| {
                let (plan, size) = plan.within(&mut left);
                if let Some(size) = size {
                    self.sizes.lock().entry(uid.clone()).or_default().insert(volume.name.clone(), size);
                }
                plan.with_nested(nested.remove(&volume.name))
            });
            plans.push((volume.name.clone(), plan, mount.planned()));
        }
        let (table, now) = (self.table.clone(), ctx.now);
        let fs_group = fs_group(pod);
        let pod_dir = paths::pod_dir(&self.root, uid);
        let apply = move || {
            let made = make_pod_dirs(&pod_dir);
            let mut failures = Vec::new();
            for (name, plan, mount) in plans {
                let began = Instant::now();
                let applied = match (&made, plan) {
                    (Err(error), _) => {
                        let problem = format!("error making pod data directories: {error}");
                        let failure =
                            VolumeFailure { volume: name.clone(), step: VolumeStep::SetUp, problem };
                        SetUp::Failed { failure, is_partial: false }
                    }
                    (Ok(()), Ok(plan)) => apply(&name, plan, fs_group, now, &*table),
                    (Ok(()), Err(failure)) => SetUp::Failed { failure, is_partial: false },
                };
                mount.and(began.elapsed()).done(applied == SetUp::Ready);
                failures.extend(applied.failure().cloned());
                progress(&name, applied);
            }
            made.map(|()| failures)
        };
        quintlet_kit::task::blocking(apply).await
    }

    /// Returns how many bytes the files of these volumes may take beside those of the pod's other volumes.
    fn bytes_beside(&self, uid: &PodUid, volumes: &[&Volume]) -> usize {
        let sizes = self.sizes.lock();
        let others = sizes.get(uid).into_iter().flatten();
        let others = others.filter(|(name, _)| volumes.iter().all(|volume| volume.name != **name));
        others.fold(MAX_FILE_BYTES, |left, (_, size)| left.saturating_sub(*size))
    }

    /// Returns where the containers of a pod find its direct volumes.
    #[must_use]
    pub fn mounted(&self, pod: &Pod, uid: &PodUid) -> MountedVolumes {
        let place = |volume: &Volume| {
            let at = |host_path, read_only, relabel| MountedVolume {
                spec_name: volume.name.clone(),
                host_path,
                read_only,
                relabel,
            };
            if let Some(source) = &volume.host_path {
                return at((&source.path).into(), false, false);
            }
            let plugin = metrics::plugin(volume);
            if volume.image.is_some() {
                return at(PathBuf::new(), true, false);
            }
            let dir = plugin.rsplit_once('/').map_or(plugin, |(_, name)| name);
            at(paths::direct_volume_dir(&self.root, uid, dir, &volume.name), volume.empty_dir.is_none(), true)
        };
        let all = referenced(pod).into_iter().filter(|volume| is_direct(volume));
        all.map(|volume| (volume.name.clone(), place(volume))).collect()
    }

    /// Returns whether a volume has content from an API object that may change.
    #[must_use]
    pub fn needs_refresh(plugin: &str) -> bool {
        matches!(
            plugin,
            "kubernetes.io/configmap"
                | "kubernetes.io/secret"
                | "kubernetes.io/projected"
                | "kubernetes.io/downward-api"
        )
    }

    /// Unmounts and removes the subpaths of a pod, and drops its tokens and keys. The containers have
    /// stopped. Blocks.
    ///
    /// # Errors
    /// A mount is busy. It may be called again.
    pub fn tear_down_subpaths(&self, uid: &PodUid) -> Result<(), TearDownError> {
        self.forget(uid);
        teardown::tear_down_subpaths(&paths::pod_dir(&self.root, uid), &*self.table)
    }

    /// Unmounts and removes a volume of a pod, whose subpaths are gone. Blocks.
    ///
    /// # Errors
    /// A mount is busy. It may be called again.
    pub fn tear_down(&self, uid: &PodUid, plugin: &str, volume: &str) -> Result<(), TearDownError> {
        let (began, dir) = (Instant::now(), paths::pod_dir(&self.root, uid));
        let done = teardown::tear_down_volume(&dir, plugin, volume, &*self.table);
        self.metrics.observe("volume_unmount", plugin, done.is_ok(), began.elapsed());
        done
    }

    /// Releases the projects of a pod whose volumes are removed. Blocks.
    pub fn release_projects(&self, uid: &PodUid) {
        self.quotas.release(&paths::pod_dir(&self.root, uid));
    }

    /// Removes the directory of a deleted pod after tearing down its volumes. Blocks.
    ///
    /// # Errors
    /// The directory stays, for the returned reason.
    pub fn remove_orphaned_pod_dir(&self, uid: &PodUid) -> Result<(), OrphanError> {
        let dir = paths::pod_dir(&self.root, uid);
        self.forget(uid);
        let done = teardown::tear_down_pod(&dir, &*self.table);
        self.quotas.release(&dir);
        done.map_err(|source| OrphanError::Rest { uid: uid.to_string(), source })?;
        teardown::remove_orphaned_pod_dir(&dir, &*self.table)
    }

    /// Tears down the remaining volumes of a deleted pod. Its directory stays. Blocks.
    ///
    /// # Errors
    /// A volume stays, for the returned reason.
    pub fn tear_down_orphaned_volumes(&self, uid: &PodUid) -> Result<(), OrphanError> {
        let dir = paths::pod_dir(&self.root, uid);
        self.forget(uid);
        let done = teardown::tear_down_pod(&dir, &*self.table);
        self.quotas.release(&dir);
        done.map_err(|source| OrphanError::Rest { uid: uid.to_string(), source })?;
        teardown::tear_down_orphaned_volumes(&dir, &*self.table)
    }

    /// Drops expired tokens. Call it about once a minute.
    pub fn remove_expired_tokens(&self, now: Timestamp) {
        self.tokens.remove_expired(now);
    }

    fn planner<'a>(&'a self, pod: &'a Pod, uid: &'a PodUid, ctx: &'a VolumeContext) -> Planner<'a> {
        Planner {
            pod,
            uid,
            ctx,
            root: &self.root,
            tokens: &self.tokens,
            credentials: self.credentials.as_deref(),
            quotas: &self.quotas,
        }
    }
}

/// Creates the directories that each pod has. `plugins` is made with the first marker, unlike in the kubelet,
/// which makes it for each pod.
fn make_pod_dirs(pod_dir: &Path) -> io::Result<()> {
    for dir in [pod_dir.to_owned(), pod_dir.join("volumes")] {
        failpoint::file!("pod directory made", || fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(dir))?;
    }
    Ok(())
}
