//! Calls of the plugin of one driver.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pod_sync_plugins::call::{CallError, Deadline, call, channel};
use quintlet_plugin_api::dra::v1 as api;
use quintlet_plugin_api::dra::v1::dra_plugin_client::DraPluginClient;
use quintlet_plugin_api::dra::v1beta1 as beta;
use quintlet_plugin_api::dra::v1beta1::dra_plugin_client::DraPluginClient as BetaClient;
use quintlet_plugin_api::dra_health::v1 as health;
use quintlet_plugin_api::dra_health::v1::dra_resource_health_client::DraResourceHealthClient;
use quintlet_plugin_api::dra_health::v1alpha1 as alpha;
use quintlet_plugin_api::dra_health::v1alpha1::dra_resource_health_client::DraResourceHealthClient as AlphaClient;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::error::DriverMethod;
use crate::inventory::{ClaimCall, PreparedDevice};
use crate::plugins::{CallVersion, HealthVersion, PluginNumber, PluginServices};

/// Time limit of a call (`defaultClientCallTimeout`).
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(45);

/// Names of the methods in metrics.
const PREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
const UNPREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources";
const BETA_PREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources";
const BETA_UNPREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources";

/// The results of a call by the UID of the claim: its devices, or the driver's error.
pub(crate) type CallResults = BTreeMap<String, Result<Vec<PreparedDevice>, String>>;

/// A plugin with the services that it registered, which are those of its calls.
#[derive(Debug)]
pub(crate) struct DriverPlugin {
    /// Name of the driver.
    pub(crate) driver: String,
    /// Number of the registration.
    pub(crate) number: PluginNumber,
    /// Socket of the plugin.
    pub(crate) endpoint: PathBuf,
    pub(crate) services: PluginServices,
    channel: Channel,
    /// Cancelled at the end of the registration.
    pub(crate) ended: CancellationToken,
}

impl DriverPlugin {
    pub(crate) fn new(
        driver: &str,
        number: PluginNumber,
        endpoint: &Path,
        services: PluginServices,
        ended: CancellationToken,
    ) -> Self {
        let channel = channel(endpoint.to_owned());
        Self { driver: driver.to_owned(), number, endpoint: endpoint.to_owned(), services, channel, ended }
    }

    /// Returns the name of a method in metrics.
    pub(crate) fn method_name(&self, method: DriverMethod) -> &'static str {
        match (self.services.calls, method) {
            (CallVersion::V1, DriverMethod::Prepare) => PREPARE,
            (CallVersion::V1, DriverMethod::Unprepare) => UNPREPARE,
            (CallVersion::V1beta1, DriverMethod::Prepare) => BETA_PREPARE,
            (CallVersion::V1beta1, DriverMethod::Unprepare) => BETA_UNPREPARE,
        }
    }

    /// Calls a method for claims. The results of NodeUnprepareResources have no devices.
    pub(crate) async fn call(
        &self,
        method: DriverMethod,
        claims: &[ClaimCall],
    ) -> Result<CallResults, CallError> {
        match (self.services.calls, method) {
            (CallVersion::V1, DriverMethod::Prepare) => self.prepare(claims).await,
            (CallVersion::V1, DriverMethod::Unprepare) => self.unprepare(claims).await,
            (CallVersion::V1beta1, DriverMethod::Prepare) => self.prepare_beta(claims).await,
            (CallVersion::V1beta1, DriverMethod::Unprepare) => self.unprepare_beta(claims).await,
        }
    }

    async fn prepare(&self, claims: &[ClaimCall]) -> Result<CallResults, CallError> {
        let request = api::NodePrepareResourcesRequest { claims: claims.iter().map(claim).collect() };
        let mut client = DraPluginClient::new(self.channel.clone());
        let limit = Deadline::after(CALL_LIMIT);
        let answer = call(limit, request, |request| client.node_prepare_resources(request)).await?;
        let result = |answer: api::NodePrepareResourceResponse| {
            let devices = || answer.devices.into_iter().map(device).collect();
            if answer.error.is_empty() { Ok(devices()) } else { Err(answer.error) }
        };
        Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, result(answer))).collect())
    }

    async fn unprepare(&self, claims: &[ClaimCall]) -> Result<CallResults, CallError> {
        let request = api::NodeUnprepareResourcesRequest { claims: claims.iter().map(claim).collect() };
        let mut client = DraPluginClient::new(self.channel.clone());
        let limit = Deadline::after(CALL_LIMIT);
        let answer = call(limit, request, |request| client.node_unprepare_resources(request)).await?;
        Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, unprepared(answer.error))).collect())
    }

    async fn prepare_beta(&self, claims: &[ClaimCall]) -> Result<CallResults, CallError> {
        let claims = claims.iter().map(beta_claim).collect();
        let request = beta::NodePrepareResourcesRequest { claims };
        let mut client = BetaClient::new(self.channel.clone());
        let limit = Deadline::after(CALL_LIMIT);
        let answer = call(limit, request, |request| client.node_prepare_resources(request)).await?;
        let result = |answer: beta::NodePrepareResourceResponse| {
            let devices = || answer.devices.into_iter().map(beta_device).collect();
            if answer.error.is_empty() { Ok(devices()) } else { Err(answer.error) }
        };
        Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, result(answer))).collect())
    }

    async fn unprepare_beta(&self, claims: &[ClaimCall]) -> Result<CallResults, CallError> {
        let claims = claims.iter().map(beta_claim).collect();
        let request = beta::NodeUnprepareResourcesRequest { claims };
        let mut client = BetaClient::new(self.channel.clone());
        let limit = Deadline::after(CALL_LIMIT);
        let answer = call(limit, request, |request| client.node_unprepare_resources(request)).await?;
        Ok(answer.claims.into_iter().map(|(uid, answer)| (uid, unprepared(answer.error))).collect())
    }

    /// Opens the stream of the health of all devices.
    pub(crate) async fn watch_health(&self, version: HealthVersion) -> Result<HealthReports, CallError> {
        let channel = self.channel.clone();
        match version {
            HealthVersion::V1 => {
                let request = health::NodeWatchResourcesRequest {};
                let answer = DraResourceHealthClient::new(channel).node_watch_resources(request).await;
                Ok(HealthReports::V1(answer.map_err(CallError::from)?.into_inner()))
            }
            HealthVersion::V1alpha1 => {
                let request = alpha::NodeWatchResourcesRequest {};
                let answer = AlphaClient::new(channel).node_watch_resources(request).await;
                Ok(HealthReports::V1alpha1(answer.map_err(CallError::from)?.into_inner()))
            }
        }
    }
}

/// A stream of reports on all devices of a driver.
#[derive(Debug)]
pub(crate) enum HealthReports {
    V1(Streaming<health::NodeWatchResourcesResponse>),
    V1alpha1(Streaming<alpha::NodeWatchResourcesResponse>),
}

impl HealthReports {
    /// Returns the next report. None: the stream has ended.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<health::DeviceHealth>>, CallError> {
        match self {
            Self::V1(reports) => {
                let report = reports.message().await.map_err(CallError::from)?;
                Ok(report.map(|report| report.devices))
            }
            Self::V1alpha1(reports) => {
                let report = reports.message().await.map_err(CallError::from)?;
                Ok(report.map(|report| report.devices.into_iter().map(alpha_health).collect()))
            }
        }
    }
}

/// Refuses a link, whose owner could change its target, and anything that is not a socket. A plugin may
/// register before it listens. Blocks.
pub(crate) fn check_endpoint(path: &Path) -> Result<(), String> {
    let refused = |reason: &str| Err(format!("{} {reason}", path.display()));
    match std::fs::symlink_metadata(path) {
        Ok(meta) if meta.file_type().is_symlink() => refused("is a symbolic link"),
        Ok(meta) if !meta.file_type().is_socket() => refused("is not a socket"),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => refused(&error.to_string()),
    }
}

fn unprepared(error: String) -> Result<Vec<PreparedDevice>, String> {
    if error.is_empty() { Ok(Vec::new()) } else { Err(error) }
}

fn claim(claim: &ClaimCall) -> api::Claim {
    let ClaimCall { key, uid } = claim;
    api::Claim { namespace: key.namespace.clone(), uid: uid.clone(), name: key.name.clone() }
}

fn beta_claim(claim: &ClaimCall) -> beta::Claim {
    let ClaimCall { key, uid } = claim;
    beta::Claim { namespace: key.namespace.clone(), uid: uid.clone(), name: key.name.clone() }
}

fn device(device: api::Device) -> PreparedDevice {
    PreparedDevice {
        pool: device.pool_name,
        device: device.device_name,
        share: device.share_id,
        requests: device.request_names,
        cdi: device.cdi_device_ids,
    }
}

fn beta_device(device: beta::Device) -> PreparedDevice {
    PreparedDevice {
        pool: device.pool_name,
        device: device.device_name,
        share: None,
        requests: device.request_names,
        cdi: device.cdi_device_ids,
    }
}

fn alpha_health(device: alpha::DeviceHealth) -> health::DeviceHealth {
    let status = match device.health() {
        alpha::HealthStatus::Healthy => health::HealthStatus::Healthy,
        alpha::HealthStatus::Unhealthy => health::HealthStatus::Unhealthy,
        alpha::HealthStatus::Unknown => health::HealthStatus::Unknown,
    };
    health::DeviceHealth {
        device: device.device.map(|device| health::DeviceIdentifier {
            pool_name: device.pool_name,
            device_name: device.device_name,
        }),
        health: status.into(),
        last_updated_time: device.last_updated_time,
        health_check_timeout_seconds: device.health_check_timeout_seconds,
        message: device.message,
    }
}
