//! A device plugin for tests, behind a real socket, with faults in any call.
//!
//! The plugin runs in a thread of the test's process with a runtime of its own. Dropping it ends the plugin
//! as a crash does: the socket stays, and connections break. A call that hangs never returns.

mod service;
mod state;

pub use crate::state::{Fault, Method};

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use quintlet_kit::socket;
use quintlet_kit::socket::{PeerPolicy, incoming};
use quintlet_plugin_api::device_plugin as api;
use quintlet_plugin_api::device_plugin::device_plugin_server::DevicePluginServer;
use quintlet_plugin_api::device_plugin::registration_client::RegistrationClient;
use quintlet_plugin_api::registration::registration_server::RegistrationServer;
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tonic::Status;

use crate::service::{PluginService, WatcherService};
use crate::state::PluginState;

/// A running plugin.
#[derive(Debug)]
pub struct TestPlugin {
    state: Arc<PluginState>,
    socket: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TestPlugin {
    /// Starts a plugin at this socket, which must not exist, with healthy devices.
    ///
    /// # Panics
    /// Panics if the socket cannot be created.
    #[must_use]
    pub fn start(socket: &Path, devices: &[&str]) -> Self {
        let state = Arc::new(PluginState::default());
        *state.name.lock() = "example.com/device".to_owned();
        let (stop, stopped) = oneshot::channel::<()>();
        let listener = std::os::unix::net::UnixListener::bind(socket).expect("the socket can be created");
        listener.set_nonblocking(true).expect("the socket can be used");
        let service = PluginService(Arc::clone(&state));
        let watcher = WatcherService(Arc::clone(&state));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be made").block_on(async {
                let listener = UnixListener::from_std(listener).expect("the socket can be used");
                let server = tonic::transport::Server::builder()
                    .add_service(DevicePluginServer::new(service))
                    .add_service(RegistrationServer::new(watcher))
                    .serve_with_incoming(incoming(listener, PeerPolicy::Any));
                // Dropping the runtime ends the calls in flight.
                tokio::select! {
                    served = server => served.expect("the plugin serves"),
                    _ = stopped => {}
                }
            });
        });
        let plugin = Self { state, socket: socket.to_owned(), stop: Some(stop), thread: Some(thread) };
        plugin.list(devices);
        plugin
    }

    /// Sets the answer of GetDevicePluginOptions.
    pub fn set_options(&self, pre_start_required: bool, get_preferred_allocation_available: bool) {
        *self.state.options.lock() =
            api::DevicePluginOptions { pre_start_required, get_preferred_allocation_available };
    }

    /// Lists other devices. A name with a leading `!` is unhealthy; one such as `d1@0` is that of a device on
    /// NUMA node 0.
    ///
    /// # Panics
    /// Panics if the node is no number.
    pub fn list(&self, devices: &[&str]) {
        let device = |name: &&str| {
            let (id, node) = name.split_once('@').unwrap_or((name, ""));
            let node = Some(node).filter(|node| !node.is_empty());
            let nodes = node.map(|node| api::NumaNode { id: node.parse().expect("a number") });
            api::Device {
                id: id.trim_start_matches('!').to_owned(),
                health: if id.starts_with('!') { "Unhealthy" } else { "Healthy" }.to_owned(),
                topology: nodes.map(|node| api::TopologyInfo { nodes: vec![node] }),
            }
        };
        self.state.devices.send_replace(devices.iter().map(device).collect());
    }

    /// Sets the answer of GetPreferredAllocation.
    pub fn prefer(&self, devices: &[&str]) {
        *self.state.preferred.lock() = devices.iter().map(|&id| id.to_owned()).collect();
    }

    /// Sets the fault of a method, or ends it.
    pub fn set_fault(&self, method: Method, fault: Option<Fault>) {
        match fault {
            Some(fault) => self.state.faults.lock().insert(method, fault),
            None => self.state.faults.lock().remove(&method),
        };
    }

    /// Leaves CDI devices out of the answers of Allocate: a real runtime refuses those that no file
    /// describes.
    pub fn leave_out_cdi_devices(&self) {
        *self.state.without_cdi.lock() = true;
    }

    /// Sets name and endpoint for a registration in the directory of all plugins. An empty endpoint is the
    /// socket itself.
    pub fn set_identity(&self, name: &str, endpoint: &str) {
        *self.state.name.lock() = name.to_owned();
        *self.state.endpoint.lock() = endpoint.to_owned();
    }

    /// Returns the results of registrations in the directory of all plugins.
    #[must_use]
    pub fn informed(&self) -> Vec<Result<(), String>> {
        self.state.informed.lock().clone()
    }

    /// Returns the calls so far: method and device IDs.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        self.state.calls.lock().clone()
    }

    /// Returns the number of calls that begin with a text.
    #[must_use]
    pub fn calls_of(&self, call: &str) -> usize {
        self.calls().iter().filter(|made| made.starts_with(call)).count()
    }

    /// Ends the streams of ListAndWatch; the plugin stays.
    pub fn end_lists(&self) {
        self.state.list_ends.send_modify(|ends| *ends += 1);
    }

    /// Registers the plugin at the agent's socket. The plugin's own socket is in the same directory.
    ///
    /// # Errors
    /// The agent refuses it.
    ///
    /// # Panics
    /// Panics if the socket has no name.
    pub async fn register(&self, agent: &Path, resource: &str) -> Result<(), Status> {
        let name = self.socket.file_name().expect("a socket has a name");
        register(agent, "v1beta1", &name.to_string_lossy(), resource).await
    }
}

impl Drop for TestPlugin {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A panic of the plugin was printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Registers an endpoint at the agent's socket.
///
/// # Errors
/// The agent refuses it.
pub async fn register(agent: &Path, version: &str, endpoint: &str, resource: &str) -> Result<(), Status> {
    let mut client = RegistrationClient::new(socket::channel(agent.to_owned()));
    let request = api::RegisterRequest {
        version: version.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: resource.to_owned(),
        options: None,
    };
    client.register(request).await.map(drop)
}
