//! Sockets for subscribers: programs that are not part of Quintlet and read what a service publishes in
//! `quintlet.subscribe.v1`.
//!
//! A subscriber reads a stream at its own pace. No service keeps messages for it: a stream is a position in
//! the order of changes, so a subscriber that is slow or stalled costs its connection and delays no other
//! reader.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use quintlet_telemetry::metrics;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status};

use crate::args::SubscriberArgs;
use crate::error_chain;
use crate::server::{GuestLimits, Server};
use crate::slots::{ReachedLimit, Share, Slot, Slots};
use crate::socket::{Peer, PeerPolicy, bind_unix};

/// Open streams of one service. Each holds the keys of a snapshot at most, and up to 400 KB of encoded events
/// that its client does not read, in hyper. What the window of the client allows is held by the client;
/// node-api's windows are small ([`crate::socket::channel_with_window`]).
pub const STREAMS: usize = 64;

/// Open streams of one user, which cannot take the places of all others.
pub const STREAMS_OF_USER: usize = 16;

/// A connection for each stream, and a second one that takes its place.
const CONNECTIONS: Share = Share { all: STREAMS * 2, each: STREAMS_OF_USER * 2 };

/// A connection has a stream and reflection.
const LIMITS: GuestLimits = GuestLimits { connections: CONNECTIONS, calls: 2 };

/// Mode of the socket and of its directory. The server checks who connects.
const SOCKET_MODE: u32 = 0o666;
const DIRECTORY_MODE: u32 = 0o755;

/// The subscribers of one service. Clones share them.
#[derive(Debug, Clone)]
pub struct Subscribers {
    stream: &'static str,
    /// By user. A request without a peer did not come over a socket.
    slots: Slots<Option<u32>>,
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
            slots: Slots::default(),
            open: open.get_or_create(&labels).clone(),
            resyncs: counter(
                "quintlet_subscriber_resyncs",
                "Streams of subscribers that started over with a snapshot, since the cursor was not known or the subscriber too slow",
            ),
            rejected: counter(
                "quintlet_subscribers_rejected",
                "Streams of subscribers that were refused, since the service or the user had as many as it may have",
            ),
        }
    }

    /// Returns the number of open streams.
    #[must_use]
    pub fn open(&self) -> usize {
        self.slots.occupied()
    }

    /// Admits a stream, until the result is dropped.
    ///
    /// # Errors
    /// RESOURCE_EXHAUSTED: the service has [`STREAMS`] streams, or the user has [`STREAMS_OF_USER`].
    pub fn admit<T>(&self, request: &Request<T>) -> Result<Subscription, Status> {
        let peer = request.extensions().get::<Peer>();
        let (uid, pid) = (peer.map(|peer| peer.uid), peer.and_then(|peer| peer.pid));
        let admitted = self.place(uid);
        // No more than debug: a subscriber that connects again and again would fill the log.
        if let Err(reason) = &admitted {
            self.rejected.inc();
            tracing::debug!(stream = self.stream, uid, pid, reason, "refused subscriber");
        } else {
            tracing::debug!(stream = self.stream, uid, pid, "subscriber connected");
        }
        admitted.map_err(Status::resource_exhausted)
    }

    /// Takes a place, or returns why there is none.
    fn place(&self, uid: Option<u32>) -> Result<Subscription, String> {
        let share = Share { all: STREAMS, each: STREAMS_OF_USER };
        let slot = self.slots.enter(uid, share).map_err(|reached| match reached {
            ReachedLimit::OfAll => format!("the service has {STREAMS} subscribers already"),
            ReachedLimit::OfClient => format!("this user has {STREAMS_OF_USER} subscribers already"),
        })?;
        self.open.inc();
        Ok(Subscription { open: self.open.clone(), resyncs: self.resyncs.clone(), _slot: slot })
    }
}

/// The place of an open stream.
#[derive(Debug)]
pub struct Subscription {
    open: Gauge,
    resyncs: Counter,
    _slot: Slot<Option<u32>>,
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

/// Serves the gRPC service of `make` to the configured subscribers at `path`, until `stop`. Without any there
/// is no socket. A socket that cannot be created is logged: the node does its work without subscribers.
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
    let policy = policy.and(&args.users());
    let server = make(Server::for_guests(LIMITS)).with_reflection();
    let serving = server.serve(listener, policy, stop.clone());
    crate::task::spawn("subscribers", async move {
        if let Err(error) = serving.await {
            tracing::error!(error = error_chain(&error), "failed to serve subscribers");
        }
    });
}

// Blocks: the service has no work before it listens.
fn listen(path: &Path) -> io::Result<UnixListener> {
    // A directory that exists has the mode that its maker chose.
    let created: Vec<&Path> = path.ancestors().skip(1).take_while(|directory| !directory.exists()).collect();
    let listener = bind_unix(path, SOCKET_MODE)?;
    for directory in created.iter().filter(|directory| !directory.as_os_str().is_empty()) {
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(DIRECTORY_MODE))?;
    }
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::{Mode, umask};
    use quintlet_testkit::logs::Lines;

    use super::*;

    fn request(uid: u32) -> Request<()> {
        let mut request = Request::new(());
        request.extensions_mut().insert(Peer { uid, pid: None });
        request
    }

    #[test]
    fn one_user_cannot_take_the_places_of_all_others() {
        let subscribers = Subscribers::new("kit-test");
        let mut open: Vec<_> =
            (0..STREAMS_OF_USER).map(|_| subscribers.admit(&request(1)).unwrap()).collect();
        let refused = subscribers.admit(&request(1)).map(drop).unwrap_err();
        assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
        open.pop();
        open.push(subscribers.admit(&request(1)).unwrap());
        for uid in 2..=4 {
            open.extend((0..STREAMS_OF_USER).map(|_| subscribers.admit(&request(uid)).unwrap()));
        }
        assert_eq!(subscribers.open(), STREAMS);
        let full = subscribers.admit(&request(5)).map(drop).unwrap_err();
        assert_eq!(full.message(), "the service has 64 subscribers already");
        drop(open);
        assert_eq!(subscribers.open(), 0);
    }

    #[test]
    fn a_subscriber_that_connects_again_and_again_does_not_fill_the_log() {
        let lines = Lines::default();
        let log = quintlet_testkit::logs::capture("test", tracing::Level::INFO, &lines);
        tracing::dispatcher::with_default(&log, || {
            let subscribers = Subscribers::new("kit-test-log");
            let open: Vec<_> = (0..=STREAMS_OF_USER).map(|_| subscribers.admit(&request(1))).collect();
            assert!(open.last().unwrap().is_err());
        });
        assert_eq!(lines.all(), [""; 0]);
    }

    #[tokio::test]
    async fn each_directory_of_a_socket_can_be_entered_whatever_the_umask_is() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("subscribe/pleg/subscribe.sock");
        let before = umask(Mode::from_bits_truncate(0o077));
        let _listener = listen(&path).unwrap();
        umask(before);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let modes: Vec<u32> = path.ancestors().take(3).map(mode).collect();
        assert_eq!(modes, [0o666, 0o755, 0o755], "{}", path.display());
    }
}
