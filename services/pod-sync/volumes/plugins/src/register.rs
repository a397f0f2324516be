//! The registration of one plugin
//! (`pkg/kubelet/pluginmanager/operationexecutor: GenerateRegisterPluginFunc`).

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::{clock, socket};
use quintlet_plugin_api::registration::registration_client::RegistrationClient;
use quintlet_plugin_api::registration::{InfoRequest, RegistrationStatus};
use tokio::time::Instant;
use tonic::transport::Channel;

use crate::call::{CallError, Deadline, call, channel};
use crate::handler::{Plugin, PluginHandler};

/// Time limit for the connection: a socket exists before its process listens.
const DIAL_LIMIT: Duration = Duration::from_secs(10);
/// Time limit of GetInfo.
const INFO_LIMIT: Duration = Duration::from_secs(1);
/// Time limit of NotifyRegistrationStatus.
const NOTIFY_LIMIT: Duration = Duration::from_secs(5);

/// The handlers by plugin type.
pub(crate) type Handlers = HashMap<String, Arc<dyn PluginHandler>>;

/// Reason why a registration failed, with the kubelet's texts. The text of a refusal is also sent to the
/// plugin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegisterError {
    #[error(
        "RegisterPlugin error -- dial failed at socket {0}, err: failed to dial socket {0}, err: {error}",
        .socket.display()
    )]
    Dial { socket: PathBuf, error: io::Error },
    #[error(
        "RegisterPlugin error -- failed to get plugin info using RPC GetInfo at socket {}, err: {error}",
        .socket.display()
    )]
    Info { socket: PathBuf, error: CallError },
    #[error("RegisterPlugin error -- no handler registered for plugin type: {kind} at socket {}", .socket.display())]
    NoHandler { kind: String, socket: PathBuf },
    #[error("RegisterPlugin error -- plugin validation failed with err: {0}")]
    Validation(String),
    #[error("RegisterPlugin error -- plugin registration failed with err: {0}")]
    Registration(String),
    #[error("RegisterPlugin error -- failed to send registration status at socket {}, err: {error}", .socket.display())]
    Notify { socket: PathBuf, error: CallError },
}

/// Registers the plugin that listens at `socket` with the handler of its type, and informs the plugin of the
/// result.
pub(crate) async fn register(
    socket: &Path,
    handlers: &Handlers,
) -> Result<(Plugin, Arc<dyn PluginHandler>), RegisterError> {
    reach(socket).await?;
    let mut client = RegistrationClient::new(channel(socket.to_owned()));
    let info = call(Deadline::after(INFO_LIMIT), InfoRequest {}, |request| client.get_info(request))
        .await
        .map_err(|error| RegisterError::Info { socket: socket.to_owned(), error })?;
    let endpoint = if info.endpoint.is_empty() { socket.to_owned() } else { PathBuf::from(info.endpoint) };
    let plugin = Plugin {
        kind: info.r#type,
        name: info.name,
        endpoint,
        versions: info.supported_versions,
        socket: socket.to_owned(),
    };
    let Some(handler) = handlers.get(&plugin.kind).map(Arc::clone) else {
        let error = RegisterError::NoHandler { kind: plugin.kind, socket: socket.to_owned() };
        return Err(refuse(&mut client, error).await);
    };
    if let Err(error) = handler.validate(&plugin) {
        return Err(refuse(&mut client, RegisterError::Validation(error.to_string())).await);
    }
    if let Err(error) = handler.register(&plugin).await {
        return Err(refuse(&mut client, RegisterError::Registration(error.to_string())).await);
    }
    if let Err(error) = inform(&mut client, true, String::new()).await {
        handler.deregister(&plugin).await;
        return Err(RegisterError::Notify { socket: socket.to_owned(), error });
    }
    Ok((plugin, handler))
}

/// Waits until a process listens at the socket.
async fn reach(socket: &Path) -> Result<(), RegisterError> {
    let deadline = clock::deadline_after(Instant::now(), DIAL_LIMIT);
    loop {
        match socket::connect(socket).await {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && Instant::now() < deadline => {
                tokio::time::sleep(socket::CONNECT_INTERVAL).await;
            }
            Err(error) => return Err(RegisterError::Dial { socket: socket.to_owned(), error }),
        }
    }
}

/// Informs the plugin of its refusal, and returns the reason.
async fn refuse(client: &mut RegistrationClient<Channel>, reason: RegisterError) -> RegisterError {
    if let Err(error) = inform(client, false, reason.to_string()).await {
        tracing::info!(%error, %reason, "plugin did not receive the reason of its refusal");
    }
    reason
}

async fn inform(
    client: &mut RegistrationClient<Channel>,
    plugin_registered: bool,
    error: String,
) -> Result<(), CallError> {
    let status = RegistrationStatus { plugin_registered, error };
    call(Deadline::after(NOTIFY_LIMIT), status, |request| client.notify_registration_status(request))
        .await
        .map(drop)
}
