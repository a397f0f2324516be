//! What the set-up of a volume has to do, decided from its source and the API objects that it names.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Pod, ProjectedVolumeSource, Secret, Volume, VolumeProjection};
use pod_sync_layout::{ObjectError, TokenCache, TokenKey, paths};
use quintlet_model::ids::PodUid;
use quintlet_model::pod;
use quintlet_model::quantity::Quantity;
use rand::RngExt as _;

use crate::atomic::Payload;
use crate::certificates::{self, CredentialBundles};
use crate::context::VolumeContext;
use crate::empty_dir::{self, EmptyDir, Medium};
use crate::error::{VolumeFailure, VolumeStep};
use crate::payload::{self, FileOwners, KeySelection, MAX_FILE_BYTES};
use crate::quotas::ProjectQuotas;
use crate::spec::fs_group;

/// Tokens are refreshed up to this much earlier, so that the requests of a node's pods are spread.
const TOKEN_JITTER: Duration = Duration::from_secs(10);
const DEFAULT_TOKEN_SECONDS: i64 = 3600;

/// A volume after its objects were fetched.
pub(crate) enum PreparedVolume {
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

impl PreparedVolume {
    /// Adds the mount points of other volumes inside it.
    pub(crate) fn with_nested(mut self, points: Option<BTreeSet<PathBuf>>) -> Self {
        if let Self::Files { nested, .. } = &mut self {
            nested.extend(points.into_iter().flatten());
        }
        self
    }

    /// Subtracts the size of the volume's files from the pod's remaining bytes, and returns it. Fails if
    /// these do not suffice.
    pub(crate) fn within(mut self, left: &mut usize) -> (Self, Option<usize>) {
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

/// Makes the plans of the volumes of one pod.
#[derive(Clone, Copy)]
pub(crate) struct Planner<'a> {
    pub(crate) pod: &'a Pod,
    pub(crate) uid: &'a PodUid,
    pub(crate) ctx: &'a VolumeContext,
    /// The kubelet's root directory.
    pub(crate) root: &'a Path,
    pub(crate) tokens: &'a TokenCache,
    /// `None` without an API server, and while the feature gate `PodCertificateRequest` is off.
    pub(crate) credentials: Option<&'a dyn CredentialBundles>,
    pub(crate) quotas: &'a ProjectQuotas,
}

impl Planner<'_> {
    /// Fetches the objects of a volume, and returns what its set-up has to do.
    pub(crate) async fn plan(&self, volume: &Volume) -> Result<PreparedVolume, VolumeFailure> {
        let Self { pod, uid, ctx, .. } = *self;
        let fail = |step, problem: String| VolumeFailure { volume: volume.name.clone(), step, problem };
        if let Some(source) = &volume.host_path {
            return Ok(PreparedVolume::HostPath {
                path: source.path.clone(),
                kind: source.type_.clone().unwrap_or_default(),
            });
        }
        if let Some(source) = &volume.empty_dir {
            let limit = source.size_limit.as_ref().map(Quantity::of);
            let medium =
                empty_dir::medium(pod, source.medium.as_deref().unwrap_or_default(), limit, &ctx.node)
                    .map_err(|problem| fail(VolumeStep::SetUp, problem))?;
            let counts = medium == Medium::Disk && self.quotas.applies_to(pod);
            let quotas = if counts { self.quotas.clone() } else { ProjectQuotas::default() };
            let dir = EmptyDir {
                path: paths::direct_volume_dir(self.root, uid, "empty-dir", &volume.name),
                marker_dir: Some(paths::empty_dir_marker_dir(self.root, uid, &volume.name)),
                medium,
                mode: source.mode.filter(|_| ctx.node.field_gates.empty_dir_mode).map(empty_dir::mode),
                fs_group: fs_group(pod),
            };
            return Ok(PreparedVolume::EmptyDir(dir, quotas));
        }
        if volume.image.is_some() {
            return Ok(PreparedVolume::Image);
        }
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        let memory = Medium::Memory(empty_dir::memory_size(pod, None, &ctx.node));
        let (plugin, medium, payload) = if let Some(source) = &volume.config_map {
            let optional = source.optional.unwrap_or(false);
            let how = KeySelection {
                items: source.items.as_deref(),
                default_mode: source.default_mode,
                optional,
                owners: self.owners(source.default_user),
            };
            let object = config_map(namespace, &source.name, optional, ctx).await;
            ("configmap", Medium::Disk, object.and_then(|o| payload::config_map(o.as_deref(), how)))
        } else if let Some(source) = &volume.secret {
            let optional = source.optional.unwrap_or(false);
            let how = KeySelection {
                items: source.items.as_deref(),
                default_mode: source.default_mode,
                optional,
                owners: self.owners(source.default_user),
            };
            let name = source.secret_name.as_deref().unwrap_or_default();
            let object = secret(namespace, name, optional, ctx).await;
            ("secret", memory, object.and_then(|o| payload::secret(o.as_deref(), how)))
        } else if let Some(source) = &volume.downward_api {
            let items = source.items.as_deref().unwrap_or_default();
            let owners = self.owners(source.default_user);
            let files = payload::downward_api(pod, items, source.default_mode, owners, &ctx.node);
            ("downward-api", memory, files)
        } else if let Some(source) = &volume.projected {
            ("projected", memory, self.projected(&volume.name, source).await)
        } else {
            let kind = unsupported_kind(volume);
            return Err(fail(
                VolumeStep::FindPlugin,
                format!("no volume plugin matched: {kind} is not supported"),
            ));
        };
        let path = paths::direct_volume_dir(self.root, uid, plugin, &volume.name);
        Ok(PreparedVolume::Files {
            dir: EmptyDir { path, marker_dir: None, medium, mode: None, fs_group: None },
            payload,
            nested: Vec::new(),
        })
    }

    fn owners(&self, default_user: Option<i64>) -> FileOwners {
        FileOwners { is_enabled: self.ctx.node.field_gates.file_owners, default_user }
    }

    async fn projected(&self, volume: &str, source: &ProjectedVolumeSource) -> Result<Payload, String> {
        let Some(default_mode) = source.default_mode else {
            return Err("no defaultMode used, not even the default value for it".to_owned());
        };
        let owners = self.owners(source.default_user);
        let mut out = Payload::new();
        let mut problems = Vec::new();
        for (index, part) in source.sources.iter().flatten().enumerate() {
            match self.projection(volume, index, part, (default_mode, owners)).await {
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
        volume: &str,
        index: usize,
        part: &VolumeProjection,
        (default_mode, owners): (i32, FileOwners),
    ) -> Result<Payload, String> {
        let Self { pod, uid, ctx, .. } = *self;
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        if let Some(source) = &part.config_map {
            let optional = source.optional.unwrap_or(false);
            let items = source.items.as_deref();
            let how = KeySelection { items, default_mode: Some(default_mode), optional, owners };
            let object = config_map(namespace, &source.name, optional, ctx).await?;
            return payload::config_map(object.as_deref(), how);
        }
        if let Some(source) = &part.secret {
            let optional = source.optional.unwrap_or(false);
            let items = source.items.as_deref();
            let how = KeySelection { items, default_mode: Some(default_mode), optional, owners };
            let object = secret(namespace, &source.name, optional, ctx).await?;
            return payload::secret(object.as_deref(), how);
        }
        if let Some(source) = &part.downward_api {
            let items = source.items.as_deref().unwrap_or_default();
            return payload::downward_api(pod, items, Some(default_mode), owners, &ctx.node);
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
            let file = payload::private_file(pod, &token.token, default_mode, owners.owner(source.user));
            return Ok([(source.path.clone(), file)].into());
        }
        if let Some(source) = &part.cluster_trust_bundle {
            let certificates = certificates::trust_anchors(ctx.trust_anchors.as_deref(), source).await?;
            let owner = owners.owner(source.user);
            let file = payload::private_file(pod, &certificates, default_mode, owner);
            return Ok([(source.path.clone(), file)].into());
        }
        if let Some(source) = &part.pod_certificate {
            // The kubelet has this text without an API server, and while the feature gate is off.
            let credentials = self.credentials.ok_or("unimplemented")?;
            let bundle = credentials.read(pod, uid, volume, index, source)?;
            let owner = owners.owner(source.user);
            return Ok(certificates::files_of_bundle(pod, &bundle, source, default_mode, owner));
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

/// Returns the name of the field that is set, as in the API.
fn unsupported_kind(volume: &Volume) -> String {
    let fields = serde_json::to_value(volume).ok();
    fields
        .as_ref()
        .and_then(|v| v.as_object())
        .and_then(|o| o.keys().find(|k| k.as_str() != "name"))
        .cloned()
        .unwrap_or_else(|| "a volume without a source".to_owned())
}
