//! probe-service: probes containers and remembers the results. It decides nothing about a pod and holds no
//! credentials; pod-sync drives it over `quintlet.probe.v1`.
//!
//! - [`decide`] says what a probe does next and what an attempt means, without I/O or a clock.
//! - `slot` holds one probe with its memory; `worker` is its task, one per (pod, container, probe type).
//! - [`handlers`] make the attempts: HTTP, TCP and gRPC from here, commands through cri-proxy's probe socket.
//! - [`evaluations`] keeps the newest evaluations for observers, who resume by a cursor.
//! - [`prober`] keeps all probes; [`mailbox`] holds what the driver has not taken yet, the latest memory per probe and
//!   a bounded number of evaluations. [`service`] is the gRPC surface.
//!
//! Life cycle: probes come with the driver's targets and go by its word only. Without a driver they go on. When the
//! service stops, memory is gone here and lives on in pod-sync, which hands it over to the next one.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod convert;
pub mod decide;
pub mod evaluations;
pub mod handlers;
pub mod mailbox;
pub mod metrics;
pub mod prober;
mod process;
pub mod service;
mod slot;
mod stall;
pub mod target;
mod worker;

pub use crate::process::main;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quintlet_kit::clock::Clock;
use quintlet_kit::paths::{CriSocket, Paths};
use quintlet_kit::server::Server;
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_proto::probe::v1::probe_server::ProbeServer;
use tokio_util::sync::CancellationToken;

use crate::handlers::RealAttempts;
use crate::metrics::Metrics;
use crate::prober::Prober;
use crate::service::ProbeService;

/// Name of the service in health, logs and traces.
pub const SERVICE: &str = "probe-service";

/// Who may open the socket: its user and group, and root.
const SOCKET_MODE: u32 = 0o660;

/// Why the service ended.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The socket cannot be made.
    #[error("the socket {} cannot be made", path.display())]
    Bind {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The transport failed.
    #[error("serving ended")]
    Serve(#[source] tonic::transport::Error),
}

/// Probes and serves `<run>/probe/<id>.sock` until `stop` is cancelled; removes the socket at the end. `observers` may ask
/// it for health and metrics.
///
/// # Errors
/// The socket cannot be made, or the transport fails.
pub async fn run(
    run_dir: &Path,
    id: &str,
    observers: &[u32],
    stop: CancellationToken,
) -> Result<(), RunError> {
    let paths = Paths::new(run_dir);
    let socket = paths.probe(id);
    let attempts = RealAttempts::new(&paths.cri(CriSocket::Probe));
    let chance = Box::new(rand::random::<f64>);
    let prober = Prober::new(Arc::new(attempts), Clock::system(), Metrics::new(), chance);
    let listener =
        bind_unix(&socket, SOCKET_MODE).map_err(|source| RunError::Bind { path: socket.clone(), source })?;
    let server = Server::new(SERVICE).observers(observers);
    server.health().set_serving("").await;
    let service = ProbeServer::new(ProbeService::new(prober.clone(), stop.clone()));
    let served = server.add_service(service).serve(listener, PeerPolicy::root_and_self(), stop).await;
    prober.shutdown();
    // An instance that has gone for good is not to be waited for.
    let _ = std::fs::remove_file(&socket);
    served.map_err(RunError::Serve)
}
