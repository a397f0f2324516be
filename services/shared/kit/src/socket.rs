//! Unix sockets. Servers bind them with a mode and check the client's user. Clients connect lazily and check
//! the server's user.

use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use hyper_util::rt::TokioIo;
use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::gathered::Gathered;
use crate::local_authority::LocalAuthority;
use crate::rate::LogInterval;
use crate::slots::{ReachedLimit, Share, Slot, Slots};
use crate::stack::Caller;

/// Interval between attempts to reach a server at a socket of this machine: another service, the runtime or
/// a plugin. An attempt is one connection, so it costs little, and a server that was restarted is used again
/// before a person would notice.
pub const CONNECT_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of HTTP/2 keepalive pings on an idle connection. A unix socket reports at once that its peer has
/// ended, so pings only find a server that is suspended or hangs. Servers of clients that are part of
/// Quintlet send none: a client that is suspended costs its connection, and nothing waits for it.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// Time limit for the answer to a ping. The connection is closed after it.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Mode of a socket's directory that does not exist yet: only this user and its group may enter.
const DIR_MODE: u32 = 0o750;

/// Binds a socket with `mode`. Creates its directory if it does not exist, without access for other users.
/// Replaces the socket of a process that has ended, and of this process.
///
/// # Errors
/// Returns `AddrInUse` if another process serves the socket: its clients must not be taken over. Fails if the
/// directory or the socket cannot be created.
// Blocks: the service has no work before it listens.
pub fn bind_unix(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !dir.is_dir() {
        dir.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::DirBuilder::new().recursive(true).mode(DIR_MODE).create(dir)?;
    }
    if let Some(pid) = listener_pid(path)
        && u32::try_from(pid) != Ok(std::process::id())
    {
        let message = format!("{} is in use by another instance (pid {pid})", path.display());
        return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
    }
    // The socket is bound under a temporary name and renamed, so that it never exists under its name without
    // its mode.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let prefix = format!(".{name}.");
    let bound = tempfile::Builder::new().prefix(&prefix).make_in(dir, |temp| UnixListener::bind(temp))?;
    let (listener, temp) = bound.into_parts();
    std::fs::set_permissions(&temp, std::fs::Permissions::from_mode(mode))?;
    temp.persist(path).map_err(|e| e.error)?;
    Ok(listener)
}

/// Returns the process that listens at `path`, if any. Returns 0 if its PID is unknown, as in another
/// container.
fn listener_pid(path: &Path) -> Option<i32> {
    use nix::errno::Errno;
    use nix::sys::socket::{
        AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let probe = socket(AddressFamily::Unix, SockType::Stream, flags, None).ok()?;
    match connect(std::os::fd::AsRawFd::as_raw_fd(&probe), &UnixAddr::new(path).ok()?) {
        Ok(()) => Some(getsockopt(&probe, sockopt::PeerCredentials).map_or(0, |cred| cred.pid())),
        // The process listens but does not accept: it hangs or is stopped, and may continue.
        Err(Errno::EAGAIN) => Some(0),
        Err(_) => None,
    }
}

/// The users that may connect to a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerPolicy {
    /// Any user that can open the socket.
    Any,
    /// Users with these IDs.
    Uids(Vec<u32>),
    /// Users with these IDs, and processes whose group is one of `gids`.
    Members {
        /// IDs of users.
        uids: Vec<u32>,
        /// IDs of groups.
        gids: Vec<u32>,
    },
}

impl PeerPolicy {
    /// Allows root and the user of this process.
    #[must_use]
    pub fn root_and_self() -> Self {
        Self::Uids(vec![0, nix::unistd::geteuid().as_raw()])
    }

    /// Returns whether a user may connect.
    #[must_use]
    pub fn allows(&self, uid: u32) -> bool {
        match self {
            Self::Any => true,
            Self::Uids(uids) | Self::Members { uids, .. } => uids.contains(&uid),
        }
    }

    /// Returns whether a process with this user and this group may connect.
    fn admits(&self, uid: u32, gid: u32) -> bool {
        self.allows(uid) || matches!(self, Self::Members { gids, .. } if gids.contains(&gid))
    }

    /// Returns a policy that also allows these users.
    #[must_use]
    pub fn and(self, more: &[u32]) -> Self {
        match self {
            Self::Any => Self::Any,
            Self::Uids(uids) => Self::Uids(uids.into_iter().chain(more.iter().copied()).collect()),
            Self::Members { uids, gids } => {
                Self::Members { uids: uids.into_iter().chain(more.iter().copied()).collect(), gids }
            }
        }
    }
}

/// The process at the other end of a connection, as found in the extensions of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// User ID.
    pub uid: u32,
    /// Process ID, if the kernel reports it.
    pub pid: Option<i32>,
}

/// An accepted connection.
#[derive(Debug)]
pub struct UnixConn {
    stream: LocalAuthority<Gathered<UnixStream>>,
    peer: Peer,
    // Freed with the connection.
    _slot: Option<Slot<u32>>,
}

impl UnixConn {
    /// Returns the process at the other end.
    #[must_use]
    pub fn peer(&self) -> Peer {
        self.peer
    }
}

impl Connected for UnixConn {
    type ConnectInfo = Peer;
    fn connect_info(&self) -> Peer {
        self.peer
    }
}

impl AsyncRead for UnixConn {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for UnixConn {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

fn refused() -> Counter {
    quintlet_telemetry::metrics::counter(
        "quintlet_socket_refused",
        "Connections closed because the peer's user is not allowed, or because the socket has too many",
    )
}

/// Passes on as many connections as `share` has, of all users and of each user. Closes and counts other
/// connections.
pub fn at_most(
    share: Share,
    connections: impl Stream<Item = io::Result<UnixConn>> + Send + 'static,
) -> impl Stream<Item = io::Result<UnixConn>> + Send + 'static {
    let (slots, refused) = (Slots::default(), refused());
    let interval = || LogInterval::new(REFUSAL_LOG_INTERVAL);
    let mut log = RefusalLog { of_user: interval(), of_all: interval() };
    connections.filter_map(move |connection| {
        let admitted = connection.map(|connection| match slots.enter(connection.peer.uid, share) {
            Ok(slot) => Some(UnixConn { _slot: Some(slot), ..connection }),
            Err(reached) => {
                refused.inc();
                log.refused(connection.peer, reached);
                None
            }
        });
        std::future::ready(admitted.transpose())
    })
}

/// Interval between log lines of refused connections: a client that connects again and again would fill the
/// log.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Logs connections that a socket refuses, since there are too many. Each reason has an interval of its own,
/// so that one does not hide the other.
#[derive(Debug)]
struct RefusalLog {
    of_user: LogInterval,
    of_all: LogInterval,
}

impl RefusalLog {
    fn refused(&mut self, peer: Peer, reached: ReachedLimit) {
        let (interval, reason) = match reached {
            ReachedLimit::OfClient => (&mut self.of_user, "the user has too many"),
            ReachedLimit::OfAll => (&mut self.of_all, "the socket has too many"),
        };
        let Some(count) = interval.count() else { return };
        let Peer { uid, pid } = peer;
        tracing::info!(uid, pid, count, "refused connections, {reason}");
    }
}

/// Logs a refused connection. Any user can open a socket for members, and could fill the log.
fn log_refused(policy: &PeerPolicy, uid: u32) {
    match policy {
        PeerPolicy::Members { .. } => {
            tracing::debug!(uid, "refused connection, user is not allowed on this socket");
        }
        PeerPolicy::Any | PeerPolicy::Uids(_) => {
            tracing::warn!(uid, "refused connection, user is not allowed on this socket");
        }
    }
}

/// Returns the connections of users that the policy allows. Closes and counts other connections.
pub fn incoming(
    listener: UnixListener,
    policy: PeerPolicy,
) -> impl Stream<Item = io::Result<UnixConn>> + Send + 'static {
    let refused = refused();
    futures::stream::unfold((listener, policy, refused), |(listener, policy, refused)| async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => match stream.peer_cred() {
                    Ok(cred) if policy.admits(cred.uid(), cred.gid()) => {
                        let stream = LocalAuthority::new(Gathered::new(stream));
                        let conn =
                            UnixConn { stream, peer: Peer { uid: cred.uid(), pid: cred.pid() }, _slot: None };
                        return Some((Ok(conn), (listener, policy, refused)));
                    }
                    Ok(cred) => {
                        log_refused(&policy, cred.uid());
                        refused.inc();
                    }
                    Err(error) => tracing::warn!(%error, "refused connection, no peer credentials"),
                },
                Err(error) => {
                    // Most likely the process has no free descriptors; closed connections release some.
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    })
}

/// Maximum size of the headers and trailers of an answer, in bytes: as Go's gRPC clients have it. A status
/// message is a trailer, and that of a runtime repeats paths and arguments of a pod. An answer beyond the
/// limit is lost, and with it the reason.
pub const MAX_TRAILERS: u32 = 16 << 20;

/// Returns a channel to the socket at `path` that connects on first use and reconnects as needed. Calls fail
/// at once with UNAVAILABLE while no process listens or the server is not trusted, see [`connect`].
#[must_use]
pub fn channel(path: PathBuf) -> Channel {
    endpoint().connect_with_connector_lazy(tower_connector(path))
}

/// Returns a [`channel`] that adds the trace and the pod of the caller to each request.
#[must_use]
pub fn caller(path: PathBuf) -> Caller<Channel> {
    Caller::new(channel(path))
}

/// Does the same as [`channel`] with a window of this size for the connection and for each stream. With
/// hyper's own windows, a server sends 2 MiB of a stream before its client reads.
#[must_use]
pub fn channel_with_window(path: PathBuf, window: u32) -> Channel {
    let endpoint = endpoint().initial_stream_window_size(window).initial_connection_window_size(window);
    endpoint.connect_with_connector_lazy(tower_connector(path))
}

fn endpoint() -> Endpoint {
    Endpoint::from_static("http://quintlet.local")
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .http2_max_header_list_size(MAX_TRAILERS)
}

fn tower_connector(
    path: PathBuf,
) -> impl tower::Service<Uri, Response = TokioIo<Gathered<UnixStream>>, Error = io::Error, Future: Send>
+ Send
+ 'static {
    tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { Ok(TokioIo::new(Gathered::new(connect(&path).await?))) }
    })
}

/// Connects to the socket at `path`, if root or the owner of its directory serves it. The directory belongs
/// to the user of the service, so a socket that another user planted there is not trusted.
///
/// # Errors
/// Returns `PermissionDenied` if this user may not connect or the server is not trusted. Fails if no process
/// listens.
pub async fn connect(path: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path).await?;
    let server = stream.peer_cred()?.uid();
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Blocks: the path of the socket was just resolved by connect(2).
    let owner = std::fs::metadata(dir)?.uid();
    if !is_trusted(server, owner) {
        let message = format!(
            "{} is served by uid {server}, but its directory belongs to uid {owner}: not trusted",
            path.display()
        );
        tracing::warn!(socket = %path.display(), server, owner, "closed connection, server is not trusted");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    Ok(stream)
}

/// Returns whether the user `server` may serve a socket in a directory of `owner`.
fn is_trusted(server: u32, owner: u32) -> bool {
    server == 0 || server == owner
}

/// Waits until the health of the service at `path` is SERVING.
///
/// # Errors
/// Returns `TimedOut`, with the last reason, if the service is not ready within `limit`.
pub async fn wait_ready(path: &Path, limit: Duration) -> io::Result<()> {
    let mut client = HealthClient::new(channel(path.to_owned()));
    let deadline = crate::clock::deadline_after(tokio::time::Instant::now(), limit);
    let mut last = "no answer".to_owned();
    loop {
        match tokio::time::timeout_at(deadline, client.check(HealthCheckRequest::default())).await {
            Ok(Ok(reply)) if reply.get_ref().status() == ServingStatus::Serving => return Ok(()),
            Ok(Ok(reply)) => last = reply.get_ref().status().as_str_name().to_owned(),
            Ok(Err(status)) => last = status.message().to_owned(),
            Err(_) => {}
        }
        if tokio::time::Instant::now() >= deadline {
            let message = format!("{} is not ready: {last}", path.display());
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_and_the_owner_of_its_directory_may_serve_a_socket() {
        for (server, owner, trusted) in
            [(0, 0, true), (0, 7, true), (7, 7, true), (7, 0, false), (8, 7, false)]
        {
            assert_eq!(is_trusted(server, owner), trusted, "{server} in the directory of {owner}");
        }
    }

    #[test]
    fn a_process_connects_by_its_user_or_its_group() {
        let members = PeerPolicy::Members { uids: vec![0, 7], gids: vec![9] };
        let users = PeerPolicy::Uids(vec![7]);
        for (policy, uid, gid, admitted) in [
            (&members, 0, 0, true),
            (&members, 7, 7, true),
            (&members, 8, 9, true),
            (&members, 9, 8, false),
            (&members, 8, 8, false),
            (&users, 7, 9, true),
            (&users, 8, 7, false),
        ] {
            assert_eq!(policy.admits(uid, gid), admitted, "{policy:?} {uid} {gid}");
        }
        let more = members.and(&[5]);
        assert!(more.admits(5, 5) && more.admits(8, 9) && !more.admits(8, 5));
    }

    #[tokio::test]
    async fn a_stranger_at_a_socket_for_members_is_counted_and_does_not_fill_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let stranger = nix::unistd::geteuid().as_raw().saturating_add(1);
        for (policy, logged) in [
            (PeerPolicy::Members { uids: vec![stranger], gids: Vec::new() }, 0),
            (PeerPolicy::Uids(vec![stranger]), 1),
        ] {
            let path = dir.path().join("x.sock");
            let lines = quintlet_testkit::logs::Lines::default();
            let log = quintlet_testkit::logs::capture("test", tracing::Level::INFO, &lines);
            let _of_this_thread = tracing::dispatcher::set_default(&log);
            let mut connections = Box::pin(incoming(bind_unix(&path, 0o600).unwrap(), policy));
            let before = refused().get();
            let mut stream = UnixStream::connect(&path).await.unwrap();
            let mut closed = [0];
            tokio::select! {
                _ = connections.next() => panic!("the connection is admitted"),
                read = tokio::io::AsyncReadExt::read(&mut stream, &mut closed) => assert_eq!(read.unwrap(), 0),
            }
            assert!(refused().get() > before);
            assert_eq!(lines.all().len(), logged, "{:?}", lines.all());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connections_of_one_user_take_no_places_of_others_and_do_not_fill_the_log() {
        let lines = quintlet_testkit::logs::Lines::default();
        let log = quintlet_testkit::logs::capture("test", tracing::Level::INFO, &lines);
        let _of_this_thread = tracing::dispatcher::set_default(&log);
        let connection = |uid| {
            let stream = LocalAuthority::new(Gathered::new(UnixStream::pair().unwrap().0));
            Ok(UnixConn { stream, peer: Peer { uid, pid: None }, _slot: None })
        };
        let share = Share { all: 5, each: 3 };
        let (sender, receiver) = futures::channel::mpsc::unbounded();
        let mut admitted = Box::pin(at_most(share, receiver));
        let before = refused().get();
        let uids = [vec![1; 100], vec![2, 3, 4]].concat();
        uids.iter().for_each(|uid| sender.unbounded_send(connection(*uid)).unwrap());
        let mut open = Vec::new();
        for _ in 0..share.all {
            open.push(admitted.next().await.unwrap().unwrap());
        }
        let owners: Vec<u32> = open.iter().map(|open| open.peer.uid).collect();
        assert_eq!(owners, [1, 1, 1, 2, 3]);
        // The place of a closed connection is free again, at first for its user.
        assert!(futures::poll!(admitted.next()).is_pending(), "user 4 is beyond the limit of the socket");
        drop(open.remove(3));
        tokio::time::advance(REFUSAL_LOG_INTERVAL).await;
        for uid in [2, 1, 1] {
            sender.unbounded_send(connection(uid)).unwrap();
            if uid == 2 {
                open.push(admitted.next().await.unwrap().unwrap());
            }
        }
        assert!(futures::poll!(admitted.next()).is_pending());
        assert!(refused().get() >= before + 100, "{} after {before}", refused().get());
        let lines = lines.all();
        let has = |line: &str, parts: [&str; 2]| parts.iter().all(|part| line.contains(part));
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(has(&lines[0], ["the user has too many", "\"count\":1"]), "{lines:?}");
        assert!(
            has(&lines[1], ["the socket has too many", "\"count\":1"]),
            "one reason does not hide another: {lines:?}"
        );
        assert!(has(&lines[2], ["the user has too many", "\"count\":97"]), "{lines:?}");
    }

    #[tokio::test]
    async fn a_channel_with_a_window_sends_its_size_to_the_server() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.sock");
        let listener = bind_unix(&path, 0o600).unwrap();
        let mut client = HealthClient::new(channel_with_window(path, 300_000));
        let call =
            crate::task::spawn("call", async move { client.check(HealthCheckRequest::default()).await });
        let (mut server, _) = listener.accept().await.unwrap();
        let read = async {
            let mut preface = [0; 24];
            tokio::io::AsyncReadExt::read_exact(&mut server, &mut preface).await.unwrap();
            let (mut of_stream, mut of_connection) = (None, None);
            while of_stream.is_none() || of_connection.is_none() {
                let mut head = [0; 9];
                tokio::io::AsyncReadExt::read_exact(&mut server, &mut head).await.unwrap();
                let mut body = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
                tokio::io::AsyncReadExt::read_exact(&mut server, &mut body).await.unwrap();
                let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap());
                match head[3] {
                    // SETTINGS, of which INITIAL_WINDOW_SIZE has the number 4.
                    4 => {
                        of_stream = body.chunks(6).find(|s| s[..2] == [0, 4]).map(|s| number(&s[2..]));
                    }
                    // WINDOW_UPDATE, added to the initial window of a connection. A small increase is sent
                    // later.
                    8 => of_connection = Some(number(&body) + 65_535),
                    _ => {}
                }
            }
            (of_stream, of_connection)
        };
        let read = tokio::time::timeout(Duration::from_secs(30), read).await.expect("both windows");
        assert_eq!(read, (Some(300_000), Some(300_000)));
        call.abort();
    }

    #[tokio::test]
    async fn a_new_socket_directory_is_closed_to_others_and_has_only_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/x.sock");
        let _first = bind_unix(&path, 0o660).unwrap();
        let _second = bind_unix(&path, 0o660).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(path.parent().unwrap()) & 0o027, mode(&path)), (0, 0o660));
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        connect(&path).await.unwrap();
    }
}
