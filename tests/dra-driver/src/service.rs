//! The services of the driver.

use std::pin::Pin;
use std::sync::Arc;

use quintlet_plugin_api::dra::v1 as api;
use quintlet_plugin_api::dra::v1::dra_plugin_server::DraPlugin;
use quintlet_plugin_api::dra::v1beta1 as beta;
use quintlet_plugin_api::dra::v1beta1::dra_plugin_server::DraPlugin as BetaDraPlugin;
use quintlet_plugin_api::dra_health::v1 as health;
use quintlet_plugin_api::dra_health::v1::dra_resource_health_server::DraResourceHealth;
use quintlet_plugin_api::dra_health::v1alpha1 as alpha;
use quintlet_plugin_api::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealth as AlphaDraResourceHealth;
use quintlet_plugin_api::registration::registration_server::Registration;
use quintlet_plugin_api::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};

use crate::state::{DriverState, Method};

/// The service `v1.DRAPlugin`.
pub(crate) struct PluginService(pub(crate) Arc<DriverState>);

#[tonic::async_trait]
impl DraPlugin for PluginService {
    async fn node_prepare_resources(
        &self,
        request: Request<api::NodePrepareResourcesRequest>,
    ) -> Result<Response<api::NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let _in_call = self.0.called("v1", Method::NodePrepareResources, &claims).await?;
        Ok(Response::new(api::NodePrepareResourcesResponse { claims: self.0.prepare(&claims) }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<api::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<api::NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        let _in_call = self.0.called("v1", Method::NodeUnprepareResources, &claims).await?;
        let claims = self.0.unprepare(&claims).into_iter();
        let claims = claims.map(|(uid, error)| (uid, api::NodeUnprepareResourceResponse { error })).collect();
        Ok(Response::new(api::NodeUnprepareResourcesResponse { claims }))
    }
}

/// The service `v1beta1.DRAPlugin`.
pub(crate) struct BetaPluginService(pub(crate) Arc<DriverState>);

fn claims(claims: Vec<beta::Claim>) -> Vec<api::Claim> {
    let claim =
        |claim: beta::Claim| api::Claim { namespace: claim.namespace, uid: claim.uid, name: claim.name };
    claims.into_iter().map(claim).collect()
}

#[tonic::async_trait]
impl BetaDraPlugin for BetaPluginService {
    async fn node_prepare_resources(
        &self,
        request: Request<beta::NodePrepareResourcesRequest>,
    ) -> Result<Response<beta::NodePrepareResourcesResponse>, Status> {
        let claims = claims(request.into_inner().claims);
        let _in_call = self.0.called("v1beta1", Method::NodePrepareResources, &claims).await?;
        let device = |device: api::Device| beta::Device {
            request_names: device.request_names,
            pool_name: device.pool_name,
            device_name: device.device_name,
            cdi_device_ids: device.cdi_device_ids,
        };
        let answer = |answer: api::NodePrepareResourceResponse| beta::NodePrepareResourceResponse {
            devices: answer.devices.into_iter().map(device).collect(),
            error: answer.error,
        };
        let claims = self.0.prepare(&claims).into_iter().map(|(uid, result)| (uid, answer(result))).collect();
        Ok(Response::new(beta::NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<beta::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<beta::NodeUnprepareResourcesResponse>, Status> {
        let claims = claims(request.into_inner().claims);
        let _in_call = self.0.called("v1beta1", Method::NodeUnprepareResources, &claims).await?;
        let claims = self.0.unprepare(&claims).into_iter();
        let claims =
            claims.map(|(uid, error)| (uid, beta::NodeUnprepareResourceResponse { error })).collect();
        Ok(Response::new(beta::NodeUnprepareResourcesResponse { claims }))
    }
}

/// The services `v1.DRAResourceHealth` and `v1alpha1.DRAResourceHealth`.
pub(crate) struct HealthService(pub(crate) Arc<DriverState>);

type Reports<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl DraResourceHealth for HealthService {
    type NodeWatchResourcesStream = Reports<health::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _: Request<health::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        self.0.called("v1", Method::NodeWatchResources, &[]).await?;
        let devices = |devices| health::NodeWatchResourcesResponse { devices };
        Ok(Response::new(reports(&self.0, devices)))
    }
}

#[tonic::async_trait]
impl AlphaDraResourceHealth for HealthService {
    type NodeWatchResourcesStream = Reports<alpha::NodeWatchResourcesResponse>;

    async fn node_watch_resources(
        &self,
        _: Request<alpha::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        self.0.called("v1alpha1", Method::NodeWatchResources, &[]).await?;
        let device = |device: health::DeviceHealth| alpha::DeviceHealth {
            device: device.device.map(|device| alpha::DeviceIdentifier {
                pool_name: device.pool_name,
                device_name: device.device_name,
            }),
            // The enums have the same numbers.
            health: device.health,
            last_updated_time: device.last_updated_time,
            health_check_timeout_seconds: device.health_check_timeout_seconds,
            message: device.message,
        };
        let report = move |devices: Vec<health::DeviceHealth>| alpha::NodeWatchResourcesResponse {
            devices: devices.into_iter().map(device).collect(),
        };
        Ok(Response::new(reports(&self.0, report)))
    }
}

// Sends the reports until they are ended.
fn reports<T: Send + 'static>(
    state: &DriverState,
    report: impl Fn(Vec<health::DeviceHealth>) -> T + Send + 'static,
) -> Reports<T> {
    let (sender, receiver) = quintlet_kit::queue::channel("reports", 1);
    let mut lists = WatchStream::new(state.health.subscribe());
    let mut ends = state.health_ends.subscribe();
    drop(quintlet_kit::task::spawn("reports", async move {
        loop {
            tokio::select! {
                _ = ends.changed() => return,
                Some(devices) = lists.next() => {
                    if sender.send(Ok(report(devices))).await.is_err() {
                        return;
                    }
                }
            }
        }
    }));
    Box::pin(ReceiverStream::new(receiver))
}

/// The service `pluginregistration.Registration`, for the directory of all plugins.
pub(crate) struct WatcherService(pub(crate) Arc<DriverState>);

#[tonic::async_trait]
impl Registration for WatcherService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        self.0.registering(Method::GetInfo).await?;
        Ok(Response::new(PluginInfo {
            r#type: "DRAPlugin".to_owned(),
            name: self.0.name.lock().clone(),
            endpoint: self.0.endpoint.lock().clone(),
            supported_versions: self.0.services.lock().clone(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.0.registering(Method::NotifyRegistrationStatus).await?;
        let status = request.into_inner();
        let result = if status.plugin_registered { Ok(()) } else { Err(status.error) };
        self.0.informed.lock().push(result);
        Ok(Response::new(Default::default()))
    }
}
