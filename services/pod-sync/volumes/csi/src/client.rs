//! The calls of one driver (`pkg/volume/csi/csi_client.go`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pod_sync_plugins::call::{CallError, Deadline, call, channel};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use quintlet_plugin_api::csi::identity_client::IdentityClient;
use quintlet_plugin_api::csi::node_client::NodeClient;
use quintlet_plugin_api::csi::node_get_storage_health_response::StorageBackendHealth;
use quintlet_plugin_api::csi::node_service_capability::{Type as CapabilityType, rpc::Type};
use quintlet_plugin_api::csi::volume_capability::{self, AccessType, BlockVolume, MountVolume};
use quintlet_plugin_api::csi::volume_health::VolumeHealthEntry;
use quintlet_plugin_api::csi::volume_usage::Unit;
use quintlet_plugin_api::csi::{
    CapacityRange, NodeExpandVolumeRequest, NodeGetCapabilitiesRequest, NodeGetInfoRequest,
    NodeGetStorageHealthRequest, NodeGetVolumeHealthRequest, NodeGetVolumeStatsRequest,
    NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
    ProbeRequest, VolumeCapability,
};
use quintlet_telemetry::metrics::{Buckets, histogram_family_of};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Request, Response, Status};

use crate::volume::{AccessMode, Secrets};

/// Time limit of an operation with all its calls.
pub const LIMIT: Duration = Duration::from_secs(120);

/// Buckets of the durations of calls, in seconds: those of the kubelet.
const BUCKETS: &[f64] = &[0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 120.0, 300.0, 600.0];

/// Labels of a call.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CallLabel {
    driver_name: String,
    method_name: &'static str,
    grpc_status_code: &'static str,
    migrated: &'static str,
}

/// The node's description by a driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// The driver's ID of this node.
    pub node_id: String,
    /// Number of volumes that the node can use; zero without a limit.
    pub max_volumes: i64,
    /// Topology segments that the node can access.
    pub topology: BTreeMap<String, String>,
}

/// Capabilities of a driver's node service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// Volumes are staged before they are published.
    pub stage_unstage: bool,
    /// Usage of volumes.
    pub volume_stats: bool,
    /// Expansion on the node.
    pub expand: bool,
    /// The driver has NodeGetVolumeHealth.
    pub volume_health: bool,
    /// The driver has NodeGetStorageHealth.
    pub storage_health: bool,
    /// Access modes for one writer and for several writers on one node differ.
    pub single_node_multi_writer: bool,
    /// The driver applies fsGroup.
    pub volume_mount_group: bool,
}

/// Access type of a volume (`VolumeCapability.access_type`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Mounted as a file system.
    Mount {
        /// File system; empty for the driver's default.
        fs_type: String,
        /// Mount options of the PersistentVolume, or of its StorageClass.
        options: Vec<String>,
        /// fsGroup, if the driver applies it.
        group: Option<i64>,
    },
    /// Passed through as a block device.
    Block,
}

/// Arguments of NodeStageVolume and NodePublishVolume, apart from paths.
#[derive(Debug, Clone)]
pub struct MountCall<'a> {
    /// ID of the volume in its storage system.
    pub handle: &'a str,
    /// Metadata of the attachment.
    pub publish_context: &'a BTreeMap<String, String>,
    /// Attributes of the volume.
    pub attributes: BTreeMap<String, String>,
    /// File system or block device.
    pub access: Access,
    /// Access mode, which the driver may check against its capabilities.
    pub mode: AccessMode,
    /// Content of the referenced Secret; empty if there is none.
    pub secrets: &'a Secrets,
    /// Capabilities of the driver, which decide on optional fields.
    pub capabilities: Capabilities,
    /// The volume is of an in-tree type that the driver replaced.
    pub migrated: bool,
}

/// Arguments of NodeExpandVolume.
#[derive(Debug, Clone)]
pub struct ExpandCall<'a> {
    /// ID of the volume in its storage system.
    pub handle: &'a str,
    /// Publish path of the volume.
    pub path: &'a Path,
    /// Staging path of the volume, if the driver stages volumes.
    pub staging: Option<&'a Path>,
    /// Requested size in bytes.
    pub bytes: i64,
    /// File system or block device.
    pub access: Access,
    /// Access mode of the volume.
    pub mode: AccessMode,
    /// Content of `nodeExpandSecretRef`; empty if there is none.
    pub secrets: &'a Secrets,
    /// Capabilities of the driver, which decide on optional fields.
    pub capabilities: Capabilities,
    /// The volume is of an in-tree type that the driver replaced.
    pub migrated: bool,
}

/// Usage of a volume in one unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Available to unprivileged users.
    pub available: i64,
    /// Capacity, as the driver reports it.
    pub total: i64,
    /// Used amount, as the driver reports it.
    pub used: i64,
}

/// Statistics of a volume.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VolumeStats {
    /// Usage in bytes; `None` if the driver does not report it.
    pub bytes: Option<Usage>,
    /// Usage in inodes; `None` if the driver does not report it.
    pub inodes: Option<Usage>,
}

/// A condition of an unhealthy volume, as a driver reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthEntry {
    /// `VolumeHealthErrorType`; may be of a later version of CSI.
    pub status: i32,
    /// The driver's code, in CamelCase.
    pub reason: String,
    /// The driver's description, for people.
    pub message: String,
}

/// A condition of a driver's unhealthy storage, as the driver reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StorageEntry {
    /// `StorageHealthErrorType`; may be of a later version of CSI.
    pub status: i32,
    /// The driver's code, in CamelCase.
    pub reason: String,
    /// The driver's description, for people.
    pub message: String,
    /// Access mode of the affected volumes; `None` for all modes, and for one that the API does not have.
    pub mode: Option<AccessMode>,
    /// The affected volumes are block devices, or have a file system; `None` for both.
    pub is_block: Option<bool>,
}

impl From<StorageBackendHealth> for StorageEntry {
    fn from(entry: StorageBackendHealth) -> Self {
        let capability = entry.volume_capability.unwrap_or_default();
        let mode = capability.access_mode.and_then(|mode| AccessMode::from_csi(mode.mode()));
        let is_block = capability.access_type.map(|kind| matches!(kind, AccessType::Block(_)));
        Self { status: entry.status, reason: entry.reason, message: entry.message, mode, is_block }
    }
}

/// Arguments of NodeGetVolumeHealth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthCall {
    /// ID of the volume in its storage system.
    pub handle: String,
    /// Path at which the volume is published, certainly or possibly.
    pub published: Option<PathBuf>,
    /// Path at which the volume is staged, certainly or possibly.
    pub staged: Option<PathBuf>,
}

/// Effect of a failed expansion on the claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExpansionFailure {
    /// The driver does not expand volumes in use.
    InUse,
    /// The size or volume is impossible: retries are slow.
    Infeasible,
    /// Any other failure. The expansion is retried with the back-off of its volume.
    Other,
}

impl ExpansionFailure {
    /// Classifies an error of NodeExpandVolume (`inUseError`, `isInfeasibleError`).
    #[must_use]
    pub fn of(error: &CallError) -> Self {
        match error.code {
            Code::FailedPrecondition => Self::InUse,
            Code::InvalidArgument | Code::OutOfRange | Code::NotFound => Self::Infeasible,
            _ => Self::Other,
        }
    }
}

/// A client of a driver's socket. Clones share one connection, which is opened by the first call.
///
/// Cancellation safety: a call whose future is dropped is cancelled, and the driver may or may not execute
/// it.
#[derive(Debug, Clone)]
pub struct DriverClient {
    driver: String,
    channel: Channel,
    /// Durations of calls (`RecordCSIOperationLatencyMetrics`).
    calls: Family<CallLabel, Histogram, Buckets>,
}

impl DriverClient {
    /// Returns a client of the driver with this name at `endpoint`.
    #[must_use]
    pub fn new(driver: String, endpoint: PathBuf) -> Self {
        let calls = histogram_family_of(
            "csi_operations_seconds",
            "Container Storage Interface operation duration with gRPC error code status total",
            BUCKETS,
        );
        Self { driver, channel: channel(endpoint), calls }
    }

    /// Executes a call, and records its duration.
    async fn call<Q, A, F>(
        &self,
        (method_name, migrated): (&'static str, bool),
        deadline: Deadline,
        request: Q,
        rpc: impl FnOnce(Request<Q>) -> F,
    ) -> Result<A, CallError>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let began = Instant::now();
        let answer = call(deadline, request, rpc).await;
        let label = CallLabel {
            driver_name: self.driver.clone(),
            method_name,
            grpc_status_code: answer.as_ref().err().map_or("OK", CallError::code_name),
            migrated: if migrated { "true" } else { "false" },
        };
        self.calls.get_or_create(&label).observe(began.elapsed().as_secs_f64());
        answer
    }

    fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel.clone())
    }

    fn identity(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.channel.clone())
    }

    /// Returns whether the driver is ready. A response without the field `ready` counts as ready.
    ///
    /// # Errors
    /// Fails if the call fails.
    pub async fn probe(&self, deadline: Deadline) -> Result<bool, CallError> {
        let mut client = self.identity();
        let method = ("/csi.v1.Identity/Probe", false);
        let answer = self.call(method, deadline, ProbeRequest {}, |request| client.probe(request)).await?;
        Ok(answer.ready.is_none_or(|ready| ready.value))
    }

    /// Returns the driver's description of the node.
    ///
    /// # Errors
    /// Fails if the call fails.
    pub async fn node_info(&self, deadline: Deadline) -> Result<NodeInfo, CallError> {
        let mut client = self.node();
        let method = ("/csi.v1.Node/NodeGetInfo", false);
        let info = self
            .call(method, deadline, NodeGetInfoRequest {}, |request| client.node_get_info(request))
            .await?;
        let topology = info.accessible_topology.map(|topology| topology.segments).unwrap_or_default();
        Ok(NodeInfo {
            node_id: info.node_id,
            max_volumes: info.max_volumes_per_node,
            topology: topology.into_iter().collect(),
        })
    }

    /// Returns the capabilities of the node service. They may change when the driver is updated, so each
    /// operation reads them again.
    ///
    /// # Errors
    /// Fails if the call fails.
    pub async fn capabilities(&self, deadline: Deadline) -> Result<Capabilities, CallError> {
        let mut client = self.node();
        let method = ("/csi.v1.Node/NodeGetCapabilities", false);
        let request = NodeGetCapabilitiesRequest {};
        let answer =
            self.call(method, deadline, request, |request| client.node_get_capabilities(request)).await?;
        let mut found = Capabilities::default();
        for capability in answer.capabilities {
            let Some(CapabilityType::Rpc(rpc)) = capability.r#type else { continue };
            match rpc.r#type() {
                Type::StageUnstageVolume => found.stage_unstage = true,
                Type::GetVolumeStats => found.volume_stats = true,
                Type::ExpandVolume => found.expand = true,
                Type::GetVolumeHealth => found.volume_health = true,
                Type::GetStorageHealth => found.storage_health = true,
                Type::SingleNodeMultiWriter => found.single_node_multi_writer = true,
                Type::VolumeMountGroup => found.volume_mount_group = true,
                // A capability of a later version of CSI.
                Type::Unknown => {}
            }
        }
        Ok(found)
    }

    /// Stages a volume at a directory that exists.
    ///
    /// # Errors
    /// Fails if the call fails; see [`CallError::is_final`].
    pub async fn stage(
        &self,
        deadline: Deadline,
        args: MountCall<'_>,
        staging: &Path,
    ) -> Result<(), CallError> {
        let method = ("/csi.v1.Node/NodeStageVolume", args.migrated);
        let request = NodeStageVolumeRequest {
            volume_id: args.handle.to_owned(),
            publish_context: args.publish_context.clone().into_iter().collect(),
            staging_target_path: text(staging),
            volume_capability: Some(capability(args.access, args.mode, args.capabilities)),
            secrets: args.secrets.0.clone().into_iter().collect(),
            volume_context: args.attributes.into_iter().collect(),
        };
        let mut client = self.node();
        self.call(method, deadline, request, |request| client.node_stage_volume(request)).await.map(drop)
    }

    /// Publishes a volume at `target`, which the driver creates.
    ///
    /// # Errors
    /// Fails if the call fails; see [`CallError::is_final`].
    pub async fn publish(
        &self,
        deadline: Deadline,
        args: MountCall<'_>,
        staging: Option<&Path>,
        target: &Path,
        read_only: bool,
    ) -> Result<(), CallError> {
        let method = ("/csi.v1.Node/NodePublishVolume", args.migrated);
        let request = NodePublishVolumeRequest {
            volume_id: args.handle.to_owned(),
            publish_context: args.publish_context.clone().into_iter().collect(),
            staging_target_path: staging.map(text).unwrap_or_default(),
            target_path: text(target),
            volume_capability: Some(capability(args.access, args.mode, args.capabilities)),
            readonly: read_only,
            secrets: args.secrets.0.clone().into_iter().collect(),
            volume_context: args.attributes.into_iter().collect(),
        };
        let mut client = self.node();
        self.call(method, deadline, request, |request| client.node_publish_volume(request)).await.map(drop)
    }

    /// Unpublishes a volume. The driver removes `target`.
    ///
    /// # Errors
    /// Fails if the call fails.
    pub async fn unpublish(&self, deadline: Deadline, handle: &str, target: &Path) -> Result<(), CallError> {
        let request = NodeUnpublishVolumeRequest { volume_id: handle.to_owned(), target_path: text(target) };
        let mut client = self.node();
        let method = ("/csi.v1.Node/NodeUnpublishVolume", false);
        self.call(method, deadline, request, |request| client.node_unpublish_volume(request)).await.map(drop)
    }

    /// Unstages a volume.
    ///
    /// # Errors
    /// Fails if the call fails.
    pub async fn unstage(&self, deadline: Deadline, handle: &str, staging: &Path) -> Result<(), CallError> {
        let request =
            NodeUnstageVolumeRequest { volume_id: handle.to_owned(), staging_target_path: text(staging) };
        let mut client = self.node();
        let method = ("/csi.v1.Node/NodeUnstageVolume", false);
        self.call(method, deadline, request, |request| client.node_unstage_volume(request)).await.map(drop)
    }

    /// Returns the usage of a volume.
    ///
    /// # Errors
    /// Fails if the call fails.
    pub async fn volume_stats(
        &self,
        deadline: Deadline,
        handle: &str,
        path: &Path,
    ) -> Result<VolumeStats, CallError> {
        let request = NodeGetVolumeStatsRequest {
            volume_id: handle.to_owned(),
            volume_path: text(path),
            staging_target_path: String::new(),
        };
        let mut client = self.node();
        let method = ("/csi.v1.Node/NodeGetVolumeStats", false);
        let answer =
            self.call(method, deadline, request, |request| client.node_get_volume_stats(request)).await?;
        let mut stats = VolumeStats::default();
        for usage in answer.usage {
            let values = Usage { available: usage.available, total: usage.total, used: usage.used };
            match usage.unit() {
                Unit::Bytes => stats.bytes = Some(values),
                Unit::Inodes => stats.inodes = Some(values),
                Unit::Unknown => {}
            }
        }
        Ok(stats)
    }

    /// Returns what is wrong with a volume.
    ///
    /// # Errors
    /// Fails if the call fails.
    pub async fn volume_health(
        &self,
        deadline: Deadline,
        args: &HealthCall,
    ) -> Result<Vec<HealthEntry>, CallError> {
        let path = |path: &Option<PathBuf>| path.as_deref().map(text).unwrap_or_default();
        let request = NodeGetVolumeHealthRequest {
            volume_id: args.handle.clone(),
            volume_publish_path: path(&args.published),
            staging_target_path: path(&args.staged),
        };
        let mut client = self.node();
        let method = ("/csi.v1.Node/NodeGetVolumeHealth", false);
        let answer =
            self.call(method, deadline, request, |request| client.node_get_volume_health(request)).await?;
        let entries = answer.volume_health.unwrap_or_default().health_statuses.into_iter();
        let entry = |entry: VolumeHealthEntry| HealthEntry {
            status: entry.status,
            reason: entry.reason,
            message: entry.message,
        };
        Ok(entries.map(entry).collect())
    }

    /// Returns what is wrong with the storage of the driver, as seen from this node.
    ///
    /// # Errors
    /// Fails if the call fails.
    pub async fn storage_health(&self, deadline: Deadline) -> Result<Vec<StorageEntry>, CallError> {
        // As in the kubelet, there are no secrets.
        let request = NodeGetStorageHealthRequest::default();
        let mut client = self.node();
        let method = ("/csi.v1.Node/NodeGetStorageHealth", false);
        let answer =
            self.call(method, deadline, request, |request| client.node_get_storage_health(request)).await?;
        Ok(answer.backend_health.into_iter().map(StorageEntry::from).collect())
    }

    /// Expands a volume, and returns its new size in bytes.
    ///
    /// # Errors
    /// Fails if the call fails; see [`CallError::is_final`] and [`ExpansionFailure::of`].
    pub async fn expand(&self, deadline: Deadline, args: ExpandCall<'_>) -> Result<i64, CallError> {
        let method = ("/csi.v1.Node/NodeExpandVolume", args.migrated);
        let request = NodeExpandVolumeRequest {
            volume_id: args.handle.to_owned(),
            volume_path: text(args.path),
            capacity_range: Some(CapacityRange { required_bytes: args.bytes, limit_bytes: 0 }),
            staging_target_path: args.staging.map(text).unwrap_or_default(),
            volume_capability: Some(capability(args.access, args.mode, args.capabilities)),
            secrets: args.secrets.0.clone().into_iter().collect(),
        };
        let mut client = self.node();
        let answer =
            self.call(method, deadline, request, |request| client.node_expand_volume(request)).await?;
        Ok(answer.capacity_bytes)
    }
}

/// The paths below a root directory in UTF-8 are UTF-8: their other components are hashes or come from the
/// API.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn capability(access: Access, mode: AccessMode, capabilities: Capabilities) -> VolumeCapability {
    let access_type = match access {
        Access::Block => AccessType::Block(BlockVolume {}),
        Access::Mount { fs_type, options, group } => AccessType::Mount(MountVolume {
            fs_type,
            mount_flags: options,
            volume_mount_group: group.map(|group| group.to_string()).unwrap_or_default(),
        }),
    };
    let mode = mode.to_csi(capabilities.single_node_multi_writer).into();
    VolumeCapability {
        access_type: Some(access_type),
        access_mode: Some(volume_capability::AccessMode { mode }),
    }
}
