//! A driver of dynamic resource allocation for tests, behind a real socket, with faults in any call.
//!
//! The driver runs in a thread of the test's process with a runtime of its own. Dropping it ends the driver
//! as a crash does: the socket stays, and connections break. A call that hangs never returns.

mod service;
mod state;

pub use quintlet_plugin_api::dra_health::v1::HealthStatus;

pub use crate::state::{Fault, Method};

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use quintlet_kit::socket::{PeerPolicy, incoming};
use quintlet_plugin_api::dra::v1 as api;
use quintlet_plugin_api::dra::v1::dra_plugin_server::DraPluginServer;
use quintlet_plugin_api::dra::v1beta1::dra_plugin_server::DraPluginServer as BetaServer;
use quintlet_plugin_api::dra_health::v1 as health;
use quintlet_plugin_api::dra_health::v1::dra_resource_health_server::DraResourceHealthServer;
use quintlet_plugin_api::dra_health::v1alpha1::dra_resource_health_server::DraResourceHealthServer as AlphaHealthServer;
use quintlet_plugin_api::registration::registration_server::RegistrationServer;
use tokio::net::UnixListener;
use tokio::sync::oneshot;
use tokio_stream::StreamExt as _;

use crate::service::{BetaPluginService, HealthService, PluginService, WatcherService};
use crate::state::DriverState;

/// A running driver.
#[derive(Debug)]
pub struct TestDriver {
    state: Arc<DriverState>,
    socket: PathBuf,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TestDriver {
    /// Starts a driver at this socket, which must not exist. In the directory of all plugins, it registers
    /// with the service `v1.DRAPlugin` at the same socket.
    ///
    /// # Panics
    /// Panics if the socket cannot be created.
    #[must_use]
    pub fn start(socket: &Path, name: &str) -> Self {
        Self::start_as(socket, name, &["v1.DRAPlugin"])
    }

    /// Starts a driver that registers with these services.
    ///
    /// # Panics
    /// Panics if the socket cannot be created.
    #[must_use]
    pub fn start_as(socket: &Path, name: &str, services: &[&str]) -> Self {
        let state = Arc::new(DriverState::default());
        *state.name.lock() = name.to_owned();
        *state.services.lock() = services.iter().map(|&name| name.to_owned()).collect();
        let (stop, stopped) = oneshot::channel::<()>();
        let listener = std::os::unix::net::UnixListener::bind(socket).expect("the socket can be created");
        listener.set_nonblocking(true).expect("the socket can be used");
        let served = Arc::clone(&state);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be made").block_on(async {
                let listener = UnixListener::from_std(listener).expect("the socket can be used");
                let state = || Arc::clone(&served);
                let counted = Arc::clone(&served);
                let connections = incoming(listener, PeerPolicy::Any).map(move |connection| {
                    *counted.connections.lock() += 1;
                    connection
                });
                let server = tonic::transport::Server::builder()
                    .add_service(DraPluginServer::new(PluginService(state())))
                    .add_service(BetaServer::new(BetaPluginService(state())))
                    .add_service(DraResourceHealthServer::new(HealthService(state())))
                    .add_service(AlphaHealthServer::new(HealthService(state())))
                    .add_service(RegistrationServer::new(WatcherService(state())))
                    .serve_with_incoming(connections);
                // Dropping the runtime ends the calls in flight.
                tokio::select! {
                    served = server => served.expect("the driver serves"),
                    _ = stopped => {}
                }
            });
        });
        Self { state, socket: socket.to_owned(), stop: Some(stop), thread: Some(thread) }
    }

    /// Returns the path at which the driver listens.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sets the endpoint that the driver registers. An empty one is the socket itself.
    pub fn set_endpoint(&self, endpoint: &str) {
        *self.state.endpoint.lock() = endpoint.to_owned();
    }

    /// Sets the fault of a method, or ends it.
    pub fn set_fault(&self, method: Method, fault: Option<Fault>) {
        self.state.faults.send_modify(|faults| {
            match fault {
                Some(fault) => faults.insert(method, fault),
                None => faults.remove(&method),
            };
        });
    }

    /// Sets the devices of the claim with this name.
    pub fn set_devices(&self, claim: &str, devices: Vec<api::Device>) {
        self.state.devices.lock().insert(claim.to_owned(), devices);
    }

    /// Leaves CDI devices out of prepared devices: a real runtime refuses those that no file describes.
    pub fn leave_out_cdi_devices(&self) {
        *self.state.without_cdi.lock() = true;
    }

    /// Writes a CDI file to this directory for each claim that is prepared, with a variable `CDI_CLAIM` that
    /// is its name, and removes it once the claim is unprepared.
    pub fn describe_devices_in(&self, dir: &Path) {
        *self.state.cdi_dir.lock() = Some(dir.to_owned());
    }

    /// Reports the health of devices: pool, device, health, message, and timeout in seconds.
    pub fn report_health(&self, devices: &[(&str, &str, health::HealthStatus, &str, i64)]) {
        let report =
            |(pool, device, status, message, timeout): &(&str, &str, health::HealthStatus, &str, i64)| {
                health::DeviceHealth {
                    device: Some(health::DeviceIdentifier {
                        pool_name: (*pool).to_owned(),
                        device_name: (*device).to_owned(),
                    }),
                    health: (*status).into(),
                    last_updated_time: 0,
                    health_check_timeout_seconds: *timeout,
                    message: (*message).to_owned(),
                }
            };
        self.state.health.send_replace(devices.iter().map(report).collect());
    }

    /// Ends the streams of health; the driver stays.
    pub fn end_health(&self) {
        self.state.health_ends.send_modify(|ends| *ends += 1);
    }

    /// Returns the results of registrations in the directory of all plugins.
    #[must_use]
    pub fn informed(&self) -> Vec<Result<(), String>> {
        self.state.informed.lock().clone()
    }

    /// Returns the calls of the registration so far.
    #[must_use]
    pub fn registration_calls(&self) -> Vec<Method> {
        self.state.registration_calls.lock().clone()
    }

    /// Returns the calls so far: version, method, and names of claims.
    #[must_use]
    pub fn calls(&self) -> Vec<String> {
        self.state.calls.lock().clone()
    }

    /// Returns the number of calls that contain a text.
    #[must_use]
    pub fn calls_of(&self, text: &str) -> usize {
        self.calls().iter().filter(|call| call.contains(text)).count()
    }

    /// Returns the number of connections that the driver has accepted.
    #[must_use]
    pub fn connections(&self) -> usize {
        *self.state.connections.lock()
    }

    /// Returns the UIDs of the claims that are prepared.
    #[must_use]
    pub fn prepared(&self) -> Vec<String> {
        self.state.prepared.lock().iter().cloned().collect()
    }

    /// Returns the names of claims that were in two calls at the same time.
    #[must_use]
    pub fn overlaps(&self) -> Vec<String> {
        self.state.overlaps.lock().clone()
    }
}

impl Drop for TestDriver {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A panic of the driver was printed.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
