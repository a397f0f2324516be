//! probe-service runs the probes of containers and remembers their results. It makes no decision about a pod
//! and holds no credentials. pod-sync drives it over `quintlet.probe.v1`.
//!
//! - `decide` computes the next step of a probe and the meaning of an attempt, without I/O or a clock.
//! - `slot` holds one probe with its memory, and `pace` bounds its reports. `worker` is the task of a probe:
//!   one per pod, container and probe type.
//! - [`handlers`] make the attempts: HTTP, TCP and gRPC from this process, commands through cri-proxy's probe
//!   socket.
//! - `evaluations` keeps the newest evaluations for observers, which resume by a cursor. `subscribe` serves
//!   the state of each probe to programs that are not part of Quintlet.
//! - [`prober`] owns all probes. `mailbox` holds the reports that the driver has not taken yet: the latest
//!   memory of each probe and a bounded number of failed evaluations. `service` serves gRPC.
//!
//! Life cycle: only the driver adds and removes probes. Probes continue while there is no driver. The memory
//! of probes ends with the process; pod-sync keeps a copy and hands it over to the next instance.

// A value of a pod, a runtime or a file must not end this process.
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod convert;
mod decide;
mod evaluations;
pub mod handlers;
mod mailbox;
pub mod metrics;
mod pace;
pub mod prober;
mod process;
mod service;
mod shared;
mod slot;
mod stall;
mod subscribe;
pub mod target;
mod worker;

pub use crate::process::main;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use quintlet_kit::args::SubscriberArgs;
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_kit::clock::Clock;
use quintlet_kit::server::Server;
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_proto::probe::v1::probe_server::ProbeServer;
use quintlet_proto::subscribe::v1::probes_server::ProbesServer;
use tokio_util::sync::CancellationToken;

use crate::handlers::RealAttempts;
use crate::metrics::Metrics;
use crate::prober::Prober;
use crate::service::ProbeService;
use crate::subscribe::ProbesService;

/// Name of the service in health, logs and traces.
pub const SERVICE: &str = "probe-service";

/// Mode of the socket: its user, its group and root may connect.
const SOCKET_MODE: u32 = 0o660;

/// Reason why the service ends other than by a stop.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The socket cannot be created.
    #[error("failed to bind socket {}", path.display())]
    Bind {
        /// Path of the socket.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The server failed after its start.
    #[error("failed to serve gRPC")]
    Serve(#[source] tonic::transport::Error),
}

/// Probes and serves `<run>/probe/<id>.sock` until `stop` is cancelled, then removes the socket. The users
/// `observers` may ask for health and metrics, and `subscribers` for the states of probes on a socket of
/// their own.
///
/// # Errors
/// The socket cannot be bound, or the transport fails.
pub async fn run(
    run_dir: &Path,
    id: &str,
    observers: &[u32],
    subscribers: &SubscriberArgs,
    stop: CancellationToken,
) -> Result<(), RunError> {
    let paths = Paths::new(run_dir);
    let socket = paths.probe(id);
    let attempts = RealAttempts::new(&paths.cri(CriSocket::Probe));
    let jitter = Box::new(rand::random::<f64>);
    let prober = Prober::new(Arc::new(attempts), Clock::system(), Metrics::new(), jitter);
    let listener =
        bind_unix(&socket, SOCKET_MODE).map_err(|source| RunError::Bind { path: socket.clone(), source })?;
    let server = Server::new(SERVICE).observers(observers);
    server.health().set_serving("").await;
    quintlet_kit::subscribe::serve(&paths.probe_subscribers(id), subscribers, &stop, |server| {
        server.add_service(ProbesServer::new(ProbesService::new(prober.keep_states(), stop.clone())))
    });
    let service = ProbeServer::new(ProbeService::new(prober.clone(), stop.clone()));
    let served = server.add_service(service).serve(listener, PeerPolicy::root_and_self(), stop).await;
    prober.shutdown();
    // pod-sync waits for an instance as long as its socket exists.
    // Blocks: the service has ended.
    let _ = std::fs::remove_file(&socket);
    served.map_err(RunError::Serve)
}
