//! Registration of plugins: at the agent's socket, and through the directory of all plugins.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use pod_sync_plugins::{HandlerError, Plugin, PluginHandler};
use quintlet_kit::server::Server;
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_kit::task;
use quintlet_plugin_api::device_plugin::registration_server::{Registration, RegistrationServer};
use quintlet_plugin_api::device_plugin::{Empty, RegisterRequest};
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::manager::Devices;
use crate::names::{PluginRefusal, VERSION, check_resource, endpoint};

/// Plugin type in the directory of all plugins.
pub const PLUGIN_TYPE: &str = "DevicePlugin";
/// Name of the agent's socket.
pub const SOCKET: &str = "kubelet.sock";
/// Mode of the agent's socket: plugins run as root.
const MODE: u32 = 0o600;

impl Devices {
    /// Creates the socket at which plugins register. Plugins watch for it.
    ///
    /// # Errors
    /// The socket cannot be created, or another process serves it.
    pub fn listen(&self) -> io::Result<UnixListener> {
        bind_unix(&self.dir().join(SOCKET), MODE)
    }

    /// Serves registrations until `stop`.
    ///
    /// # Errors
    /// The transport fails.
    pub async fn serve(
        self,
        listener: UnixListener,
        stop: CancellationToken,
    ) -> Result<(), tonic::transport::Error> {
        let server =
            Server::new("device-plugins").add_service(RegistrationServer::new(RegistrationService(self)));
        server.serve(listener, PeerPolicy::root_and_self(), stop).await
    }

    /// Returns the handler of device plugins that register in the directory of all plugins.
    #[must_use]
    pub fn handler(&self) -> Arc<dyn PluginHandler> {
        Arc::new(DevicePluginHandler(self.clone()))
    }
}

#[derive(Debug, Clone)]
struct RegistrationService(Devices);

#[async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let devices = self.0.clone();
        let request = request.into_inner();
        // A plugin that goes away cannot cut its registration in half.
        let registered = task::spawn("register-device-plugin", async move {
            let RegisterRequest { version, endpoint: name, resource_name, .. } = request;
            if version != VERSION {
                return Err(PluginRefusal::Version(version));
            }
            check_resource(&resource_name)?;
            let socket = endpoint(devices.dir(), &name)?;
            devices.connect(&resource_name, socket).await
        });
        match registered.await {
            Ok(Ok(())) => Ok(Response::new(Empty {})),
            Ok(Err(refusal)) => {
                tracing::warn!(%refusal, "device plugin refused");
                // The code of an error in Go.
                Err(Status::unknown(refusal.to_string()))
            }
            // A panic ends the process.
            Err(_) => Err(Status::unavailable("the agent is stopping")),
        }
    }
}

#[derive(Debug)]
struct DevicePluginHandler(Devices);

#[async_trait]
impl PluginHandler for DevicePluginHandler {
    fn validate(&self, plugin: &Plugin) -> Result<(), HandlerError> {
        if !plugin.versions.iter().any(|version| version == VERSION) {
            return Err(HandlerError(PluginRefusal::Versions(plugin.versions.clone()).to_string()));
        }
        check_resource(&plugin.name)
            .map_err(|refusal| HandlerError(format!("invalid name of device plugin socket: {refusal}")))
    }

    async fn register(&self, plugin: &Plugin) -> Result<(), HandlerError> {
        let connected = self.0.connect(&plugin.name, plugin.endpoint.clone()).await;
        connected.map_err(|refusal| HandlerError(refusal.to_string()))
    }

    async fn deregister(&self, plugin: &Plugin) {
        self.0.disconnect(&plugin.name, &plugin.endpoint);
    }
}
