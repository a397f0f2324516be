//! The service Node.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use quintlet_plugin_api::csi::node_get_storage_health_response::StorageBackendHealth;
use quintlet_plugin_api::csi::node_service_capability::rpc::Type;
use quintlet_plugin_api::csi::node_service_capability::{self, Rpc};
use quintlet_plugin_api::csi::volume_capability::access_mode::Mode;
use quintlet_plugin_api::csi::volume_capability::{AccessMode, AccessType, BlockVolume};
use quintlet_plugin_api::csi::volume_health::VolumeHealthEntry;
use quintlet_plugin_api::csi::volume_usage::Unit;
use quintlet_plugin_api::csi::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetCapabilitiesRequest,
    NodeGetCapabilitiesResponse, NodeGetInfoRequest, NodeGetInfoResponse, NodeGetStorageHealthRequest,
    NodeGetStorageHealthResponse, NodeGetVolumeHealthRequest, NodeGetVolumeHealthResponse,
    NodeGetVolumeStatsRequest, NodeGetVolumeStatsResponse, NodePublishVolumeRequest,
    NodePublishVolumeResponse, NodeServiceCapability, NodeStageVolumeRequest, NodeStageVolumeResponse,
    NodeUnpublishVolumeRequest, NodeUnpublishVolumeResponse, NodeUnstageVolumeRequest,
    NodeUnstageVolumeResponse, VolumeCapability, VolumeHealth, VolumeUsage, node_server,
};
use tonic::{Request, Response, Status};

use crate::fault::{Faults, StorageCondition, append};
use crate::volumes::{Medium, Volumes, bind, detach, loop_device, mount, unmount};

/// The service Node of the driver.
#[derive(Debug)]
pub struct NodeService {
    /// Answer of NodeGetInfo.
    pub info: NodeGetInfoResponse,
    /// Answer of NodeGetCapabilities.
    pub capabilities: Vec<Type>,
    /// The volumes on disk.
    pub volumes: Volumes,
    /// Log of the contexts and access modes in requests, one JSON object per line.
    pub contexts: std::path::PathBuf,
    /// Faults of the process, which a test sets.
    pub faults: Arc<Faults>,
}

fn failed(error: io::Error) -> Status {
    Status::internal(error.to_string())
}

fn is_block(capability: Option<&VolumeCapability>) -> bool {
    capability.is_some_and(|capability| matches!(capability.access_type, Some(AccessType::Block(_))))
}

/// Removes a mount point that the driver created.
fn remove(target: &Path) -> io::Result<()> {
    let removed = if target.is_dir() { fs::remove_dir(target) } else { fs::remove_file(target) };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

impl NodeService {
    fn stage(&self, request: &NodeStageVolumeRequest) -> io::Result<()> {
        let attributes: BTreeMap<String, String> = request.volume_context.clone().into_iter().collect();
        if is_block(request.volume_capability.as_ref()) {
            return Ok(());
        }
        let medium = self.volumes.medium(&request.volume_id, &attributes)?;
        mount(&medium, Path::new(&request.staging_target_path))
    }

    fn publish(&self, request: &NodePublishVolumeRequest) -> io::Result<()> {
        let attributes: BTreeMap<String, String> = request.volume_context.clone().into_iter().collect();
        let target = Path::new(&request.target_path);
        if is_block(request.volume_capability.as_ref()) {
            let device = match self.volumes.medium(&request.volume_id, &attributes)? {
                Medium::Loop(file) => loop_device(&file)?,
                // A kernel device that always exists represents the volume.
                Medium::Directory(_) | Medium::Tmpfs => "/dev/null".into(),
            };
            fs::File::create(target)?;
            return bind(&device, target, false);
        }
        fs::create_dir_all(target)?;
        if !request.staging_target_path.is_empty() {
            return bind(Path::new(&request.staging_target_path), target, request.readonly);
        }
        match self.volumes.medium(&request.volume_id, &attributes)? {
            Medium::Directory(source) => bind(&source, target, request.readonly),
            medium => mount(&medium, target),
        }
    }

    /// Records the volume's fields of a request. Secrets are recorded by their names.
    fn record(&self, method: &str, capability: Option<&VolumeCapability>, request: serde_json::Value) {
        let access = capability.map(|c| format!("{c:?}"));
        let line = serde_json::json!({"method": method, "access": access, "request": request});
        append(&self.contexts, &line.to_string());
    }
}

#[tonic::async_trait]
impl node_server::Node for NodeService {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Result<Response<NodeStageVolumeResponse>, Status> {
        let request = request.into_inner();
        self.record(
            "NodeStageVolume",
            request.volume_capability.as_ref(),
            serde_json::json!({
                "context": request.volume_context, "publish": request.publish_context,
                "secrets": request.secrets.keys().collect::<Vec<_>>(),
            }),
        );
        let work = || self.stage(&request).map(|()| NodeStageVolumeResponse {}).map_err(failed);
        self.faults.call("NodeStageVolume", &request.volume_id, work).await.map(Response::new)
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Result<Response<NodeUnstageVolumeResponse>, Status> {
        let request = request.into_inner();
        let work = || {
            unmount(Path::new(&request.staging_target_path)).map_err(failed)?;
            detach(&self.volumes.backing(&request.volume_id)).map_err(failed)?;
            Ok(NodeUnstageVolumeResponse {})
        };
        self.faults.call("NodeUnstageVolume", &request.volume_id, work).await.map(Response::new)
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Result<Response<NodePublishVolumeResponse>, Status> {
        let request = request.into_inner();
        self.record(
            "NodePublishVolume",
            request.volume_capability.as_ref(),
            serde_json::json!({
                "context": request.volume_context, "publish": request.publish_context,
                "readonly": request.readonly, "secrets": request.secrets.keys().collect::<Vec<_>>(),
            }),
        );
        let work = || self.publish(&request).map(|()| NodePublishVolumeResponse {}).map_err(failed);
        self.faults.call("NodePublishVolume", &request.volume_id, work).await.map(Response::new)
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Result<Response<NodeUnpublishVolumeResponse>, Status> {
        let request = request.into_inner();
        let target = Path::new(&request.target_path);
        let work = || {
            unmount(target).and_then(|()| remove(target)).map_err(failed)?;
            Ok(NodeUnpublishVolumeResponse {})
        };
        self.faults.call("NodeUnpublishVolume", &request.volume_id, work).await.map(Response::new)
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Result<Response<NodeGetVolumeStatsResponse>, Status> {
        let request = request.into_inner();
        let work = || {
            let stat = rustix::fs::statvfs(request.volume_path.as_str()).map_err(|e| failed(e.into()))?;
            let bytes = |blocks: u64| i64::try_from(blocks.saturating_mul(stat.f_frsize)).unwrap_or(i64::MAX);
            let count = |inodes: u64| i64::try_from(inodes).unwrap_or(i64::MAX);
            let usage = vec![
                VolumeUsage {
                    unit: Unit::Bytes.into(),
                    total: bytes(stat.f_blocks),
                    available: bytes(stat.f_bavail),
                    used: bytes(stat.f_blocks.saturating_sub(stat.f_bfree)),
                },
                VolumeUsage {
                    unit: Unit::Inodes.into(),
                    total: count(stat.f_files),
                    available: count(stat.f_ffree),
                    used: count(stat.f_files.saturating_sub(stat.f_ffree)),
                },
            ];
            Ok(NodeGetVolumeStatsResponse { usage })
        };
        self.faults.call("NodeGetVolumeStats", &request.volume_id, work).await.map(Response::new)
    }

    async fn node_get_volume_health(
        &self,
        request: Request<NodeGetVolumeHealthRequest>,
    ) -> Result<Response<NodeGetVolumeHealthResponse>, Status> {
        let request = request.into_inner();
        if !self.capabilities.contains(&Type::GetVolumeHealth) {
            return Err(Status::unimplemented("the driver does not have the capability GET_VOLUME_HEALTH"));
        }
        let fields = serde_json::json!({
            "published": request.volume_publish_path, "staged": request.staging_target_path,
        });
        self.record("NodeGetVolumeHealth", None, fields);
        let entry = |(status, reason, message)| VolumeHealthEntry { status, reason, message };
        let work = || {
            let health_statuses = self.faults.health().into_iter().map(entry).collect();
            let volume_health = VolumeHealth { volume_id: request.volume_id.clone(), health_statuses };
            Ok(NodeGetVolumeHealthResponse { volume_health: Some(volume_health) })
        };
        self.faults.call("NodeGetVolumeHealth", &request.volume_id, work).await.map(Response::new)
    }

    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Result<Response<NodeGetStorageHealthResponse>, Status> {
        if !self.capabilities.contains(&Type::GetStorageHealth) {
            return Err(Status::unimplemented("the driver does not have the capability GET_STORAGE_HEALTH"));
        }
        let mode = |mode: String| Mode::from_str_name(&mode).unwrap_or_default().into();
        let entry = |(status, reason, message, access): StorageCondition| StorageBackendHealth {
            status,
            reason,
            message,
            volume_capability: access.map(|name| VolumeCapability {
                access_type: Some(AccessType::Block(BlockVolume {})),
                access_mode: Some(AccessMode { mode: mode(name) }),
            }),
        };
        let work = || {
            let backend_health = self.faults.storage_health().into_iter().map(entry).collect();
            Ok(NodeGetStorageHealthResponse { backend_health })
        };
        self.faults.call("NodeGetStorageHealth", "", work).await.map(Response::new)
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Result<Response<NodeExpandVolumeResponse>, Status> {
        let request = request.into_inner();
        self.record(
            "NodeExpandVolume",
            request.volume_capability.as_ref(),
            serde_json::json!({
                "path": request.volume_path, "staging": request.staging_target_path,
                "bytes": request.capacity_range.map(|range| range.required_bytes),
                "secrets": request.secrets.keys().collect::<Vec<_>>(),
            }),
        );
        let capacity_bytes = request.capacity_range.map_or(0, |range| range.required_bytes);
        let work = || Ok(NodeExpandVolumeResponse { capacity_bytes });
        self.faults.call("NodeExpandVolume", &request.volume_id, work).await.map(Response::new)
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Result<Response<NodeGetCapabilitiesResponse>, Status> {
        let capability = |kind: &Type| NodeServiceCapability {
            r#type: Some(node_service_capability::Type::Rpc(Rpc { r#type: (*kind).into() })),
        };
        let answer = || {
            Ok(NodeGetCapabilitiesResponse {
                capabilities: self.capabilities.iter().map(capability).collect(),
            })
        };
        self.faults.call("NodeGetCapabilities", "", answer).await.map(Response::new)
    }

    async fn node_get_info(
        &self,
        _: Request<NodeGetInfoRequest>,
    ) -> Result<Response<NodeGetInfoResponse>, Status> {
        let info = || NodeGetInfoResponse {
            max_volumes_per_node: self.faults.max_volumes().unwrap_or(self.info.max_volumes_per_node),
            ..self.info.clone()
        };
        self.faults.call("NodeGetInfo", "", || Ok(info())).await.map(Response::new)
    }
}
