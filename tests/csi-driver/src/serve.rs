//! Serves the driver and its registration.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Parser;
use quintlet_kit::socket::{PeerPolicy, incoming};
use quintlet_plugin_api::csi::identity_server::IdentityServer;
use quintlet_plugin_api::csi::node_server::NodeServer;
use quintlet_plugin_api::csi::node_service_capability::rpc::Type;
use quintlet_plugin_api::csi::{NodeGetInfoResponse, Topology};
use quintlet_plugin_api::registration::PluginInfo;
use quintlet_plugin_api::registration::registration_server::RegistrationServer;
use tokio::net::UnixListener;
use tonic::transport::Server;

use crate::fault::Faults;
use crate::volumes::Volumes;
use crate::{Identity, NodeService, Registrar};

/// A CSI driver for tests.
#[derive(Debug, Parser)]
pub struct Args {
    /// Name of the driver.
    #[arg(long, default_value = "test.csi.quintlet.dev")]
    name: String,
    /// Root directory of the node agent.
    #[arg(long)]
    root: PathBuf,
    /// Directory for volumes, faults and logs.
    #[arg(long)]
    state: PathBuf,
    /// Name of the registration socket in `plugins_registry`.
    #[arg(long, default_value = "reg.sock")]
    registration: String,
    /// Socket of the driver. The default is `<root>/plugins/<name>/csi.sock`.
    #[arg(long)]
    endpoint: Option<PathBuf>,
    /// Plugin type.
    #[arg(long, default_value = "CSIPlugin")]
    kind: String,
    /// Supported versions of CSI.
    #[arg(long, value_delimiter = ',', default_value = "1.0.0")]
    versions: Vec<String>,
    /// The driver's ID of the node.
    #[arg(long, default_value = "node-1")]
    node_id: String,
    /// Largest number of volumes.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    max_volumes: i64,
    /// Topology segments, KEY=VALUE.
    #[arg(long, value_delimiter = ',')]
    topology: Vec<String>,
    /// Capabilities of the node service.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "STAGE_UNSTAGE_VOLUME,GET_VOLUME_STATS,EXPAND_VOLUME"
    )]
    capabilities: Vec<String>,
}

fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    std::fs::create_dir_all(path.parent().unwrap_or(path))?;
    // The socket of a process that ended.
    let _ = std::fs::remove_file(path);
    Ok(UnixListener::bind(path)?)
}

/// Serves until the future is dropped.
///
/// # Errors
/// Fails if a socket or a directory cannot be created.
pub async fn serve(args: Args) -> anyhow::Result<()> {
    let endpoint =
        args.endpoint.unwrap_or_else(|| args.root.join("plugins").join(&args.name).join("csi.sock"));
    let faults = Arc::new(Faults::new(&args.state));
    let segments = args.topology.iter().filter_map(|pair| pair.split_once('='));
    let segments = segments.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let node = NodeService {
        info: NodeGetInfoResponse {
            node_id: args.node_id,
            max_volumes_per_node: args.max_volumes,
            accessible_topology: (!args.topology.is_empty()).then_some(Topology { segments }),
        },
        capabilities: args.capabilities.iter().filter_map(|name| Type::from_str_name(name)).collect(),
        volumes: Volumes::new(&args.state)?,
        contexts: args.state.join("contexts.log"),
        faults: Arc::clone(&faults),
    };
    let driver = bind(&endpoint)?;
    let identity = Identity { name: args.name.clone(), faults: Arc::clone(&faults) };
    let csi = Server::builder()
        .add_service(IdentityServer::new(identity))
        .add_service(NodeServer::new(node))
        .serve_with_incoming(incoming(driver, PeerPolicy::Any));
    let registrar = Registrar {
        info: PluginInfo {
            r#type: args.kind,
            name: args.name,
            endpoint: endpoint.to_string_lossy().into_owned(),
            supported_versions: args.versions,
        },
        log: args.state.join("registrations.log"),
        faults,
    };
    let registry = bind(&args.root.join("plugins_registry").join(&args.registration))?;
    let registration = Server::builder()
        .add_service(RegistrationServer::new(registrar))
        .serve_with_incoming(incoming(registry, PeerPolicy::Any));
    tokio::try_join!(csi, registration)?;
    Ok(())
}
