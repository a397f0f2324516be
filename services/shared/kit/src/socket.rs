//! Unix sockets: bound with a mode, open only to known users, reached lazily.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Uri};

/// A peer that says nothing for this long is asked; as long again and it is given up.
pub const KEEPALIVE: Duration = Duration::from_secs(5);

/// Binds a socket with `mode`, its directory made if needed. A socket left by a process that is gone is replaced.
///
/// # Errors
/// The directory or socket cannot be made.
pub fn bind_unix(path: &Path, mode: u32) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    // Bound beside and renamed: the name never stands for a socket without its mode.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temp = path.with_file_name(format!(".{name}.{}", std::process::id()));
    let _ = std::fs::remove_file(&temp);
    let listener = UnixListener::bind(&temp)?;
    std::fs::set_permissions(&temp, std::fs::Permissions::from_mode(mode))?;
    std::fs::rename(&temp, path)?;
    Ok(listener)
}

/// Whom a socket is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerPolicy {
    /// Whoever can open it.
    Any,
    /// These user ids.
    Uids(Vec<u32>),
}

impl PeerPolicy {
    /// Root and the user this process runs as.
    #[must_use]
    pub fn root_and_self() -> Self {
        Self::Uids(vec![0, nix::unistd::geteuid().as_raw()])
    }

    fn allows(&self, uid: u32) -> bool {
        match self {
            Self::Any => true,
            Self::Uids(uids) => uids.contains(&uid),
        }
    }
}

/// Who is at the other end, found in the extensions of every request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// User id.
    pub uid: u32,
    /// Process id, where the kernel tells.
    pub pid: Option<i32>,
}

/// An accepted connection.
#[derive(Debug)]
pub struct UnixConn {
    stream: UnixStream,
    peer: Peer,
}

impl UnixConn {
    /// The other end.
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

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Connections from those the policy allows; others are closed at once and counted.
pub fn incoming(
    listener: UnixListener,
    policy: PeerPolicy,
) -> impl Stream<Item = io::Result<UnixConn>> + Send + 'static {
    let refused = quintlet_telemetry::metrics::counter(
        "quintlet_socket_refused",
        "Connections closed because the peer's user is not allowed",
    );
    futures::stream::unfold((listener, policy, refused), |(listener, policy, refused)| async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => match stream.peer_cred() {
                    Ok(cred) if policy.allows(cred.uid()) => {
                        let conn = UnixConn { stream, peer: Peer { uid: cred.uid(), pid: cred.pid() } };
                        return Some((Ok(conn), (listener, policy, refused)));
                    }
                    Ok(cred) => {
                        tracing::warn!(
                            uid = cred.uid(),
                            "connection refused: user not allowed on this socket"
                        );
                        refused.inc();
                    }
                    Err(error) => tracing::warn!(%error, "connection refused: no peer credentials"),
                },
                Err(error) => {
                    // Out of descriptors, most likely; others give some back.
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    })
}

/// A channel to the socket at `path` that connects when first used and again whenever it must. Calls made while nobody
/// listens fail at once with UNAVAILABLE.
#[must_use]
pub fn channel(path: PathBuf) -> Channel {
    Endpoint::from_static("http://quintlet.local")
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(tower_connector(path))
}

fn tower_connector(
    path: PathBuf,
) -> impl tower::Service<Uri, Response = TokioIo<UnixStream>, Error = io::Error, Future: Send> + Send + 'static
{
    tower::service_fn(move |_: Uri| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    })
}

/// Waits until somebody listens at `path`.
///
/// # Errors
/// Nobody does within `limit`; the last reason.
pub async fn wait_ready(path: &Path, limit: Duration) -> io::Result<()> {
    let deadline = tokio::time::Instant::now() + limit;
    loop {
        match UnixStream::connect(path).await {
            Ok(_) => return Ok(()),
            Err(e) if tokio::time::Instant::now() >= deadline => return Err(e),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}
