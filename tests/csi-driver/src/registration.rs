//! The service Registration.

use std::path::PathBuf;
use std::sync::Arc;

use quintlet_plugin_api::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse, registration_server,
};
use tonic::{Request, Response, Status};

use crate::fault::{Faults, append};

/// The service Registration of the driver.
#[derive(Debug)]
pub struct Registrar {
    /// The description that the node agent receives.
    pub info: PluginInfo,
    /// Log of the results, a line each: `registered`, or `refused: ` and the reason.
    pub log: PathBuf,
    /// Faults of the process, which a test sets.
    pub faults: Arc<Faults>,
}

#[tonic::async_trait]
impl registration_server::Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        self.faults.call("GetInfo", "", || Ok(self.info.clone())).await.map(Response::new)
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let status = request.into_inner();
        let record = || {
            match status.plugin_registered {
                true => append(&self.log, "registered"),
                false => append(&self.log, &format!("refused: {}", status.error)),
            }
            Ok(RegistrationStatusResponse {})
        };
        self.faults.call("NotifyRegistrationStatus", "", record).await.map(Response::new)
    }
}
