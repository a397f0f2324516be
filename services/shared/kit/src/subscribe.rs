//! Sockets for subscribers: programs that are not part of Quintlet and read what a service publishes in `quintlet.subscribe.v1`.
//!
//! A subscriber reads a stream at its own pace. No service keeps messages for it: a stream is a position in the order of changes, so a
//! subscriber that is slow or stalled costs its connection and delays no other reader.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_telemetry::metrics;
use tokio::net::UnixListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status};

use crate::args::SubscriberArgs;
use crate::error_chain;
use crate::server::{GuestLimits, Server};
use crate::socket::{Peer, PeerPolicy, bind_unix};

/// Open streams of one service. Each holds a snapshot at most, as pointers to what the service has anyway.
pub const STREAMS: usize = 64;

/// A connection for each stream, and a second one that takes its place.
const LIMITS: GuestLimits = GuestLimits { connections: STREAMS * 2, calls: 8 };

/// Mode of the socket and of its directory. The server checks who connects.
const SOCKET_MODE: u32 = 0o666;
const DIRECTORY_MODE: u32 = 0o755;

/// The subscribers of one service. Clones share them.
#[derive(Debug, Clone)]
pub struct Subscribers {
    stream: &'static str,
    places: Arc<Semaphore>,
    open: Gauge,
    resyncs: Counter,
    rejected: Counter,
}

impl Subscribers {
    /// Returns a service without subscribers. `stream` is `containers`, `probes` or `pods`.
    #[must_use]
    pub fn new(stream: &'static str) -> Self {
        let labels = [("stream", stream)];
        let counter = |name, help| metrics::counter_family(name, help).get_or_create(&labels).clone();
        let open = metrics::gauge_family("quintlet_subscribers", "Open streams of subscribers");
        Self {
            stream,
            places: Arc::new(Semaphore::new(STREAMS)),
            open: open.get_or_create(&labels).clone(),
            resyncs: counter(
                "quintlet_subscriber_resyncs",
                "Streams of subscribers that started over with a snapshot, since the cursor was not known or the subscriber too slow",
            ),
            rejected: counter(
                "quintlet_subscribers_rejected",
                "Streams of subscribers that were refused, since the service had as many as it serves",
            ),
        }
    }

    /// Admits a stream, until the result is dropped.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED: the service has [`STREAMS`] subscribers.
    pub fn admit<T>(&self, request: &Request<T>) -> Result<Subscription, Status> {
        let peer = request.extensions().get::<Peer>();
        let (uid, pid) = (peer.map(|peer| peer.uid), peer.and_then(|peer| peer.pid));
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else {
            self.rejected.inc();
            tracing::debug!(stream = self.stream, uid, pid, "refused subscriber, the service has too many");
            return Err(Status::resource_exhausted(format!("the service has {STREAMS} subscribers already")));
        };
        tracing::info!(stream = self.stream, uid, pid, "subscriber connected");
        self.open.inc();
        Ok(Subscription { open: self.open.clone(), resyncs: self.resyncs.clone(), _place: place })
    }
}

/// The place of an open stream.
#[derive(Debug)]
pub struct Subscription {
    open: Gauge,
    resyncs: Counter,
    _place: OwnedSemaphorePermit,
}

impl Subscription {
    /// Counts a stream that starts over.
    pub fn count_resync(&self) {
        self.resyncs.inc();
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.open.dec();
    }
}

/// Serves the gRPC service of `make` to the configured subscribers at `path`, until `stop`. Without any there is no socket. A socket that
/// cannot be created is logged: the node does its work without subscribers.
pub fn serve(
    path: &Path,
    args: &SubscriberArgs,
    stop: &CancellationToken,
    make: impl FnOnce(Server) -> Server,
) {
    if args.is_empty() {
        return;
    }
    let listener = match listen(path) {
        Ok(listener) => listener,
        Err(error) => {
            let error = error_chain(&error);
            tracing::error!(socket = %path.display(), error, "failed to create the socket for subscribers");
            return;
        }
    };
    let PeerPolicy::Uids(own) = PeerPolicy::root_and_self() else { return };
    let policy = PeerPolicy::Members { uids: own, gids: args.subscriber_gid.clone() };
    let policy = policy.and(&args.subscriber_uid);
    let server = make(Server::for_guests(LIMITS).with_reflection());
    let serving = server.serve(listener, policy, stop.clone());
    crate::task::spawn("subscribers", async move {
        if let Err(error) = serving.await {
            tracing::error!(error = error_chain(&error), "failed to serve subscribers");
        }
    });
}

// Blocks: the service has no work before it listens.
fn listen(path: &Path) -> io::Result<UnixListener> {
    let directory = path.parent().filter(|directory| !directory.exists());
    let listener = bind_unix(path, SOCKET_MODE)?;
    // A directory that exists has the mode that its maker chose.
    if let Some(directory) = directory {
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(DIRECTORY_MODE))?;
    }
    Ok(listener)
}
