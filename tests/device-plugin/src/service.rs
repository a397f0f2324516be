//! The services of the plugin.

use std::pin::Pin;
use std::sync::Arc;

use quintlet_plugin_api::device_plugin as api;
use quintlet_plugin_api::device_plugin::device_plugin_server::DevicePlugin;
use quintlet_plugin_api::registration::registration_server::Registration;
use quintlet_plugin_api::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tokio_stream::wrappers::{ReceiverStream, WatchStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status};

use crate::state::{Fault, Method, PluginState};

/// The service `v1beta1.DevicePlugin`.
pub(crate) struct PluginService(pub(crate) Arc<PluginState>);

impl PluginService {
    // Records a call. Returns whether its answer is empty.
    async fn called(&self, method: Method, ids: &[String]) -> Result<bool, Status> {
        let ids: Vec<&str> = ids.iter().map(|id| id.get(..32).unwrap_or(id)).collect();
        let call = format!("{method:?} {}", ids.join(" ")).trim_end().to_owned();
        self.0.calls.lock().push(call);
        let fault = self.0.faults.lock().get(&method).copied();
        match fault {
            None => Ok(false),
            Some(Fault::Empty) => Ok(true),
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::Fail(code)) => Err(Status::new(code, format!("{method:?} fails"))),
        }
    }
}

type ListStream = Pin<Box<dyn Stream<Item = Result<api::ListAndWatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl DevicePlugin for PluginService {
    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        self.called(Method::GetDevicePluginOptions, &[]).await?;
        Ok(Response::new(*self.0.options.lock()))
    }

    type ListAndWatchStream = ListStream;

    async fn list_and_watch(&self, _: Request<api::Empty>) -> Result<Response<ListStream>, Status> {
        self.called(Method::ListAndWatch, &[]).await?;
        Ok(Response::new(send_lists(&self.0)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        let containers = request.into_inner().container_requests;
        let ids: Vec<String> = containers.into_iter().flat_map(|c| c.available_device_i_ds).collect();
        if self.called(Method::GetPreferredAllocation, &ids).await? {
            return Ok(Response::new(Default::default()));
        }
        let device_i_ds = self.0.preferred.lock().clone();
        let container = api::ContainerPreferredAllocationResponse { device_i_ds };
        Ok(Response::new(api::PreferredAllocationResponse { container_responses: vec![container] }))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let containers = request.into_inner().container_requests;
        let ids: Vec<String> = containers.into_iter().flat_map(|c| c.devices_ids).collect();
        if self.called(Method::Allocate, &ids).await? {
            return Ok(Response::new(Default::default()));
        }
        let file = |id: &String| api::DeviceSpec {
            container_path: format!("/dev/{id}"),
            host_path: "/dev/null".to_owned(),
            permissions: "rw".to_owned(),
        };
        let cdi = |id: &String| api::CdiDevice { name: format!("example.com/device={id}") };
        let container = api::ContainerAllocateResponse {
            envs: [("DEVICES".to_owned(), ids.join(","))].into(),
            mounts: vec![api::Mount {
                container_path: "/device".to_owned(),
                host_path: "/tmp".to_owned(),
                read_only: true,
            }],
            devices: ids.iter().map(file).collect(),
            annotations: [("example.com/devices".to_owned(), ids.join(","))].into(),
            cdi_devices: if *self.0.without_cdi.lock() { Vec::new() } else { ids.iter().map(cdi).collect() },
        };
        Ok(Response::new(api::AllocateResponse { container_responses: vec![container] }))
    }

    async fn pre_start_container(
        &self,
        request: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        self.called(Method::PreStartContainer, &request.into_inner().devices_ids).await?;
        Ok(Response::new(Default::default()))
    }
}

// Sends the lists until they are ended.
fn send_lists(state: &PluginState) -> ListStream {
    let (sender, receiver) = quintlet_kit::queue::channel("reports", 1);
    let mut lists = WatchStream::new(state.devices.subscribe());
    let mut ends = state.list_ends.subscribe();
    drop(quintlet_kit::task::spawn("lists", async move {
        loop {
            tokio::select! {
                _ = ends.changed() => return,
                Some(devices) = lists.next() => {
                    if sender.send(Ok(api::ListAndWatchResponse { devices })).await.is_err() {
                        return;
                    }
                }
            }
        }
    }));
    Box::pin(ReceiverStream::new(receiver))
}

/// The service `pluginregistration.Registration`, for the directory of all plugins.
pub(crate) struct WatcherService(pub(crate) Arc<PluginState>);

#[tonic::async_trait]
impl Registration for WatcherService {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: "DevicePlugin".to_owned(),
            name: self.0.name.lock().clone(),
            endpoint: self.0.endpoint.lock().clone(),
            supported_versions: vec!["v1beta1".to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        let result = if status.plugin_registered { Ok(()) } else { Err(status.error) };
        self.0.informed.lock().push(result);
        Ok(Response::new(Default::default()))
    }
}
