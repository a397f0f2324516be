//! Sets up, refreshes and tears down volumes of pods (`pkg/volume`, `pkg/kubelet/volumemanager`).
//!
//! [`Volumes`] executes. `pod-sync-volume-tasks` has the state and decides which volumes of a pod are due. The only state here is caches:
//! tokens, projects, and the sizes of volumes. Whether a volume is ready is read from disk and the mount table, so a set-up can be
//! repeated, also by the next process. Calls for one pod come from that pod's worker, one at a time. API objects are fetched first.
//! Files are then written in a blocking task, which a caller that is dropped does not interrupt.

// A value from a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![allow(missing_docs, reason = "only pod-sync and tests build on this crate")]

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    ConfigMap, Pod, ProjectedVolumeSource, Secret, Volume, VolumeMount, VolumeProjection,
};
use parking_lot::Mutex;
use quintlet_kit::failpoint;
use quintlet_model::ids::PodUid;
use quintlet_model::pod;
use rand::RngExt as _;
use tokio::time::Instant;

mod atomic;
pub mod certificates;
mod empty_dir;
pub mod error;
pub mod found;
pub mod host_path;
pub mod layout;
pub mod metrics;
pub mod mount_table;
pub mod ownership;
mod payload;
pub mod quotas;
mod teardown;
pub mod token;

#[cfg(test)]
mod tests;

pub use teardown::OrphanError;

use atomic::Payload;
use certificates::{CredentialBundles, TrustAnchors};
use empty_dir::{EmptyDir, Medium};
use error::{TearDownError, VolumeFailure, VolumeStep};
use metrics::VolumeMetrics;
use mount_table::{MountTable, ProcMountTable};
use payload::KeySelection;
use pod_sync_cri_config::mounts::{MountedVolume, MountedVolumes};
use pod_sync_cri_config::objects::{ObjectError, ObjectSource};
use pod_sync_cri_config::{NodeSettings, paths, subpath};
use quintlet_model::quantity::Quantity;
use quotas::ProjectQuotas;
use token::{TokenCache, TokenKey, TokenSource};

/// Progress of the set-up of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SetUp {
    /// The objects of the volume are being read.
    Begun,
    /// The volume is ready and has the content of its objects.
    Ready,
    /// The volume is ready, and keeps its old content.
    Stale(VolumeFailure),
    /// The volume is not ready.
    Failed {
        failure: VolumeFailure,
        /// Directories, files or a mount may be left.
        is_partial: bool,
    },
}

impl SetUp {
    fn failure(&self) -> Option<&VolumeFailure> {
        match self {
            Self::Begun | Self::Ready => None,
            Self::Stale(failure) | Self::Failed { failure, .. } => Some(failure),
        }
    }
}

/// External inputs of volumes.
#[derive(Clone)]
pub struct VolumeContext {
    /// ConfigMaps and Secrets.
    pub objects: Arc<dyn ObjectSource>,
    /// Service account tokens; `None` without an API server.
    pub tokens: Option<Arc<dyn TokenSource>>,
    /// Certificates of ClusterTrustBundles; `None` without an API server, and while the feature gate is off.
    pub trust_anchors: Option<Arc<dyn TrustAnchors>>,
    pub node: Arc<NodeSettings>,
    /// Wall time, for the names of versions and the expiry of tokens.
    pub now: Timestamp,
}

// Tokens are refreshed up to this much earlier, so that the requests of a node's pods are spread.
const TOKEN_JITTER: Duration = Duration::from_secs(10);
const DEFAULT_TOKEN_SECONDS: i64 = 3600;
/// Limit of the files of all ConfigMaps, Secrets and projected volumes of one pod, in bytes. They are in memory at the same
/// time, and one key of an object may be in any number of them.
const MAX_FILE_BYTES: usize = 128 << 20;

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
    /// Bytes of the files of each volume: the limit is for all volumes of a pod, also if some are set up alone.
    sizes: Arc<Mutex<HashMap<PodUid, BTreeMap<String, usize>>>>,
}

/// A volume after its objects were fetched.
enum Plan {
    HostPath {
        path: String,
        kind: String,
    },
    /// With the projects, if the volume gets one.
    EmptyDir(EmptyDir, ProjectQuotas),
    /// Mounted by the runtime; nothing is set up on the node.
    Image,
    Files {
        dir: EmptyDir,
        payload: Result<Payload, String>,
        nested: Vec<PathBuf>,
    },
}

impl Plan {
    /// Adds the mount points of other volumes inside it.
    fn with_nested(mut self, points: Option<BTreeSet<PathBuf>>) -> Self {
        if let Self::Files { nested, .. } = &mut self {
            nested.extend(points.into_iter().flatten());
        }
        self
    }

    /// Subtracts the size of the volume's files from the pod's remaining bytes, and returns it. Fails if these do not suffice.
    fn within(mut self, left: &mut usize) -> (Self, Option<usize>) {
        let mut size = None;
        if let Self::Files { payload, .. } = &mut self
            && let Ok(files) = payload
        {
            let bytes = payload::size(files);
            match left.checked_sub(bytes) {
                Some(rest) => {
                    *left = rest;
                    size = Some(bytes);
                }
                None => *payload = Err(payload::too_large(MAX_FILE_BYTES)),
            }
        }
        (self, size)
    }
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
        let (metrics, tokens, sizes) = (VolumeMetrics::default(), Arc::default(), Arc::default());
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

    /// Creates the pod's directories, and sets up these of its volumes. Repeating it refreshes files and changes nothing else.
    /// `progress` receives the name and progress of each volume, the results on a thread for blocking work. Returns what failed.
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
        let mut left = self.bytes_beside(uid, volumes);
        let mut nested = if volumes.is_empty() { BTreeMap::new() } else { nested_mount_points(pod) };
        for volume in volumes {
            progress(&volume.name, SetUp::Begun);
            let mount = Mount::begin(&self.metrics, volume);
            let plan = self.plan(pod, uid, volume, ctx).await.map(|plan| {
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
            if let Some(source) = &volume.host_path {
                return MountedVolume { host_path: (&source.path).into(), read_only: false, relabel: false };
            }
            let plugin = metrics::plugin(volume);
            if volume.image.is_some() {
                return MountedVolume { host_path: PathBuf::new(), read_only: true, relabel: false };
            }
            let dir = plugin.rsplit_once('/').map_or(plugin, |(_, name)| name);
            let (host_path, _marker) = self.places(uid, dir, &volume.name, true);
            MountedVolume { host_path, read_only: volume.empty_dir.is_none(), relabel: true }
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

    /// Unmounts and removes the subpaths of a pod, and drops its tokens and keys. The containers have stopped. Blocks.
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

    fn places(&self, uid: &PodUid, plugin: &str, volume: &str, wrapped: bool) -> (PathBuf, PathBuf) {
        let pod_dir = paths::pod_dir(&self.root, uid);
        let marker = if wrapped { format!("wrapped_{volume}") } else { volume.to_owned() };
        (
            pod_dir.join("volumes").join(format!("kubernetes.io~{plugin}")).join(volume),
            pod_dir.join("plugins").join("kubernetes.io~empty-dir").join(marker),
        )
    }

    async fn plan(
        &self,
        pod: &Pod,
        uid: &PodUid,
        volume: &Volume,
        ctx: &VolumeContext,
    ) -> Result<Plan, VolumeFailure> {
        let fail = |step, problem: String| VolumeFailure { volume: volume.name.clone(), step, problem };
        if let Some(source) = &volume.host_path {
            return Ok(Plan::HostPath {
                path: source.path.clone(),
                kind: source.type_.clone().unwrap_or_default(),
            });
        }
        if let Some(source) = &volume.empty_dir {
            let limit = source.size_limit.as_ref().map(Quantity::of);
            let medium =
                empty_dir::medium(pod, source.medium.as_deref().unwrap_or_default(), limit, &ctx.node)
                    .map_err(|problem| fail(VolumeStep::SetUp, problem))?;
            let (path, marker_dir) = self.places(uid, "empty-dir", &volume.name, false);
            let counts = medium == Medium::Disk && self.quotas.applies_to(pod);
            let quotas = if counts { self.quotas.clone() } else { ProjectQuotas::default() };
            let dir = EmptyDir { path, marker_dir, medium, fs_group: fs_group(pod) };
            return Ok(Plan::EmptyDir(dir, quotas));
        }
        if volume.image.is_some() {
            return Ok(Plan::Image);
        }
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        let memory = Medium::Memory(empty_dir::memory_size(pod, None, &ctx.node));
        let (plugin, medium, payload) = if let Some(source) = &volume.config_map {
            let optional = source.optional.unwrap_or(false);
            let how =
                KeySelection { items: source.items.as_deref(), default_mode: source.default_mode, optional };
            let object = config_map(namespace, &source.name, optional, ctx).await;
            ("configmap", Medium::Disk, object.and_then(|o| payload::config_map(o.as_deref(), how)))
        } else if let Some(source) = &volume.secret {
            let optional = source.optional.unwrap_or(false);
            let how =
                KeySelection { items: source.items.as_deref(), default_mode: source.default_mode, optional };
            let name = source.secret_name.as_deref().unwrap_or_default();
            let object = secret(namespace, name, optional, ctx).await;
            ("secret", memory, object.and_then(|o| payload::secret(o.as_deref(), how)))
        } else if let Some(source) = &volume.downward_api {
            let items = source.items.as_deref().unwrap_or_default();
            ("downward-api", memory, payload::downward_api(pod, items, source.default_mode, &ctx.node))
        } else if let Some(source) = &volume.projected {
            ("projected", memory, self.projected(pod, uid, (&volume.name, source), ctx).await)
        } else {
            let kind = unsupported_kind(volume);
            return Err(fail(
                VolumeStep::FindPlugin,
                format!("no volume plugin matched: {kind} is not supported"),
            ));
        };
        let (path, marker_dir) = self.places(uid, plugin, &volume.name, true);
        Ok(Plan::Files {
            dir: EmptyDir { path, marker_dir, medium, fs_group: None },
            payload,
            nested: Vec::new(),
        })
    }

    async fn projected(
        &self,
        pod: &Pod,
        uid: &PodUid,
        (volume, source): (&str, &ProjectedVolumeSource),
        ctx: &VolumeContext,
    ) -> Result<Payload, String> {
        let Some(default_mode) = source.default_mode else {
            return Err("no defaultMode used, not even the default value for it".to_owned());
        };
        let mut out = Payload::new();
        let mut problems = Vec::new();
        for (index, part) in source.sources.iter().flatten().enumerate() {
            match self.projection(pod, uid, (volume, index, part), default_mode, ctx).await {
                Ok(files) => out.extend(files),
                Err(problem) => problems.push(problem),
            }
            if payload::size(&out) > MAX_FILE_BYTES {
                return Err(payload::too_large(MAX_FILE_BYTES));
            }
        }
        if problems.is_empty() { Ok(out) } else { Err(payload::aggregate(problems)) }
    }

    async fn projection(
        &self,
        pod: &Pod,
        uid: &PodUid,
        (volume, index, part): (&str, usize, &VolumeProjection),
        default_mode: i32,
        ctx: &VolumeContext,
    ) -> Result<Payload, String> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        if let Some(source) = &part.config_map {
            let optional = source.optional.unwrap_or(false);
            let how =
                KeySelection { items: source.items.as_deref(), default_mode: Some(default_mode), optional };
            let object = config_map(namespace, &source.name, optional, ctx).await?;
            return payload::config_map(object.as_deref(), how);
        }
        if let Some(source) = &part.secret {
            let optional = source.optional.unwrap_or(false);
            let how =
                KeySelection { items: source.items.as_deref(), default_mode: Some(default_mode), optional };
            let object = secret(namespace, &source.name, optional, ctx).await?;
            return payload::secret(object.as_deref(), how);
        }
        if let Some(source) = &part.downward_api {
            let items = source.items.as_deref().unwrap_or_default();
            return payload::downward_api(pod, items, Some(default_mode), &ctx.node);
        }
        if let Some(source) = &part.service_account_token {
            let spec = pod::spec(pod);
            let key = TokenKey {
                namespace: namespace.to_owned(),
                service_account: spec.service_account_name.clone().unwrap_or_else(|| "default".to_owned()),
                audiences: source.audience.clone().filter(|a| !a.is_empty()).into_iter().collect(),
                expiration_seconds: source.expiration_seconds.unwrap_or(DEFAULT_TOKEN_SECONDS),
                pod_name: pod.metadata.name.clone().unwrap_or_default(),
                pod_uid: uid.to_string(),
            };
            let jitter = TOKEN_JITTER.mul_f64(rand::rng().random::<f64>());
            let token = self.tokens.get(&key, ctx.tokens.as_deref(), ctx.now, jitter).await;
            let token = token.map_err(|e| e.to_string())?;
            let file = payload::private_file(pod, &token.token, default_mode);
            return Ok([(source.path.clone(), file)].into());
        }
        if let Some(source) = &part.cluster_trust_bundle {
            let certificates = certificates::trust_anchors(ctx.trust_anchors.as_deref(), source).await?;
            let file = payload::private_file(pod, &certificates, default_mode);
            return Ok([(source.path.clone(), file)].into());
        }
        if let Some(source) = &part.pod_certificate {
            // The kubelet has this text without an API server, and while the feature gate is off.
            let credentials = self.credentials.as_ref().ok_or("unimplemented")?;
            let bundle = credentials.read(pod, uid, volume, index, source)?;
            return Ok(certificates::files_of_bundle(pod, &bundle, source, default_mode));
        }
        Err("projection of an unknown source is not supported".to_owned())
    }
}

async fn config_map(
    namespace: &str,
    name: &str,
    optional: bool,
    ctx: &VolumeContext,
) -> Result<Option<Arc<ConfigMap>>, String> {
    found(ctx.objects.config_map(namespace, name).await, optional)
}

async fn secret(
    namespace: &str,
    name: &str,
    optional: bool,
    ctx: &VolumeContext,
) -> Result<Option<Arc<Secret>>, String> {
    found(ctx.objects.secret(namespace, name).await, optional)
}

fn found<T>(object: Result<T, ObjectError>, optional: bool) -> Result<Option<T>, String> {
    match object {
        Ok(object) => Ok(Some(object)),
        Err(e) if optional && e.is_not_found() => Ok(None),
        Err(e) => Err(e.to_string()),
    }
}

fn apply(name: &str, plan: Plan, fs_group: Option<u32>, now: Timestamp, table: &dyn MountTable) -> SetUp {
    let fail = |problem: String| VolumeFailure { volume: name.to_owned(), step: VolumeStep::SetUp, problem };
    let failed = |problem: String, is_partial| SetUp::Failed { failure: fail(problem), is_partial };
    match plan {
        // A directory that this makes on the host is never removed.
        Plan::HostPath { path, kind } => match host_path::check_type(&path, &kind) {
            Ok(()) => SetUp::Ready,
            Err(problem) => failed(problem, false),
        },
        Plan::EmptyDir(dir, quotas) => match dir.set_up(table) {
            Ok(is_new) => {
                // A container may have filled a volume that was set up before. Moving its files to a project would walk them.
                if is_new {
                    quotas.assign(&dir.path);
                }
                SetUp::Ready
            }
            Err(error) => failed(error.to_string(), true),
        },
        Plan::Image => SetUp::Ready,
        Plan::Files { dir, payload, nested } => {
            let has_content = match dir.is_ready(table) {
                Ok(is_ready) => is_ready && dir.path.join("..data").exists(),
                Err(error) => return failed(error.to_string(), true),
            };
            let was_read = payload.is_ok();
            match payload.and_then(|p| write_files(&dir, &p, &nested, fs_group, now, table)) {
                Ok(()) => SetUp::Ready,
                Err(problem) if has_content => SetUp::Stale(fail(problem)),
                Err(problem) => failed(problem, was_read),
            }
        }
    }
}

fn write_files(
    dir: &EmptyDir,
    payload: &Payload,
    nested: &[PathBuf],
    fs_group: Option<u32>,
    now: Timestamp,
    table: &dyn MountTable,
) -> Result<(), String> {
    dir.set_up(table).map_err(|e| e.to_string())?;
    for point in nested {
        subpath::make_dirs(&dir.path, point, 0o755).map_err(|e| e.to_string())?;
    }
    let own = |root: &Path| match fs_group {
        Some(gid) => ownership::set_volume_ownership(root, gid, true),
        None => Ok(()),
    };
    atomic::write(&dir.path, payload, now, own).map(|_| ()).map_err(|e| e.to_string())
}

fn make_pod_dirs(pod_dir: &Path) -> io::Result<()> {
    for dir in [pod_dir.to_owned(), pod_dir.join("volumes"), pod_dir.join("plugins")] {
        failpoint::file!("pod directory made", || fs::DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(dir))?;
    }
    Ok(())
}

fn fs_group(pod: &Pod) -> Option<u32> {
    let group = pod::spec(pod).security_context.as_ref()?.fs_group?;
    u32::try_from(group).ok()
}

fn mounts_of(pod: &Pod) -> Vec<&[VolumeMount]> {
    let spec = pod::spec(pod);
    let own = spec.containers.iter().chain(pod::init_containers(pod)).map(|c| c.volume_mounts.as_deref());
    let ephemeral = spec.ephemeral_containers.iter().flatten().map(|c| c.volume_mounts.as_deref());
    own.chain(ephemeral).flatten().collect()
}

/// Returns whether a pod's worker sets a volume up in its pass, by this crate. The others can hang, and tasks mount them: that of a
/// claim, a generic ephemeral or inline CSI one, nfs, iscsi, fc, or a type that became a CSI driver.
#[must_use]
pub fn is_direct(volume: &Volume) -> bool {
    volume.nfs.is_none()
        && volume.iscsi.is_none()
        && volume.fc.is_none()
        && volume.persistent_volume_claim.is_none()
        && volume.ephemeral.is_none()
        && volume.csi.is_none()
        && !became_csi(volume)
}

/// Returns whether the in-tree plugin of a volume became a CSI driver (`pkg/volume/csimigration: IsMigratable`).
#[must_use]
pub fn became_csi(volume: &Volume) -> bool {
    volume.aws_elastic_block_store.is_some()
        || volume.azure_disk.is_some()
        || volume.azure_file.is_some()
        || volume.cinder.is_some()
        || volume.gce_persistent_disk.is_some()
        || volume.portworx_volume.is_some()
        || volume.vsphere_volume.is_some()
}

/// Returns the volumes that a container mounts or uses as a device. The others are ignored.
#[must_use]
pub fn referenced(pod: &Pod) -> Vec<&Volume> {
    let spec = pod::spec(pod);
    let mut names: BTreeSet<&str> = mounts_of(pod).into_iter().flatten().map(|m| m.name.as_str()).collect();
    let devices =
        spec.containers.iter().chain(pod::init_containers(pod)).filter_map(|c| c.volume_devices.as_ref());
    names.extend(devices.flatten().map(|d| d.name.as_str()));
    spec.volumes.iter().flatten().filter(|v| names.contains(v.name.as_str())).collect()
}

/// Returns, by volume, the outermost directories on which other volumes of a container are mounted. Linear in the mounts of the
/// pod except for sorting them, since a pod may have thousands.
fn nested_mount_points(pod: &Pod) -> BTreeMap<String, BTreeSet<PathBuf>> {
    let clean = |path: &str| -> PathBuf { Path::new("/").join(path).components().collect() };
    let mut out: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for mounts in mounts_of(pod) {
        let mut all: Vec<(PathBuf, &str)> =
            mounts.iter().map(|m| (clean(&m.mount_path), m.name.as_str())).collect();
        all.sort();
        for (at, (own, volume)) in all.iter().enumerate() {
            let mut outermost: Option<&PathBuf> = None;
            // Sorted by components, descendants follow their ancestor.
            let behind = all.iter().skip(at).map(|(point, _)| point);
            for point in behind.take_while(|point| point.starts_with(own)).filter(|point| *point != own) {
                let Ok(inside) = point.strip_prefix(own) else { continue };
                if outermost.is_none_or(|o| !point.starts_with(o)) {
                    outermost = Some(point);
                    out.entry((*volume).to_owned()).or_default().insert(inside.to_owned());
                }
            }
        }
    }
    out
}

// Returns the name of the field that is set, as in the API.
fn unsupported_kind(volume: &Volume) -> String {
    let fields = serde_json::to_value(volume).ok();
    fields
        .as_ref()
        .and_then(|v| v.as_object())
        .and_then(|o| o.keys().find(|k| k.as_str() != "name"))
        .cloned()
        .unwrap_or_else(|| "a volume without a source".to_owned())
}
