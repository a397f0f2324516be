//! The service Identity.

use std::sync::Arc;

use quintlet_plugin_api::csi::identity_server;
use quintlet_plugin_api::csi::{
    BoolValue, GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest,
    GetPluginInfoResponse, ProbeRequest, ProbeResponse,
};
use tonic::{Request, Response, Status};

use crate::fault::Faults;

/// The service Identity of the driver.
#[derive(Debug)]
pub struct Identity {
    /// Name of the driver.
    pub name: String,
    /// Faults of the process, which a test sets.
    pub faults: Arc<Faults>,
}

#[tonic::async_trait]
impl identity_server::Identity for Identity {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        let name = self.name.clone();
        let answer = || {
            let vendor_version = env!("CARGO_PKG_VERSION").to_owned();
            Ok(GetPluginInfoResponse { name, vendor_version, ..Default::default() })
        };
        self.faults.call("GetPluginInfo", "", answer).await.map(Response::new)
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let answer = || Ok(GetPluginCapabilitiesResponse::default());
        self.faults.call("GetPluginCapabilities", "", answer).await.map(Response::new)
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        let answer = || Ok(ProbeResponse { ready: Some(BoolValue { value: true }) });
        self.faults.call("Probe", "", answer).await.map(Response::new)
    }
}
