//! Watches whether a process listens at the socket of a plugin.
//!
//! The monitor holds a connection of its own, which carries no call. Its end shows at once that the plugin
//! has ended. The HTTP/2 preface is sent, since servers of grpc-go close a connection without it.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use quintlet_kit::socket;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::{Channel, Endpoint, Uri};

/// Interval between two attempts to connect.
const RETRY: Duration = Duration::from_secs(1);

/// Reports each change until `stop`: whether a process listens.
pub(crate) async fn watch(path: &Path, stop: &CancellationToken, mut report: impl FnMut(bool)) {
    loop {
        let end = CancellationToken::new();
        // Dropping a connection in progress closes it.
        let connected = tokio::select! {
            connected = connect(path, end.clone()) => connected,
            () = stop.cancelled() => return,
        };
        if let Ok(channel) = connected {
            report(true);
            // Both arms only wait.
            tokio::select! {
                () = end.cancelled() => {}
                () = stop.cancelled() => return,
            }
            drop(channel);
            report(false);
        }
        // Both arms only wait.
        tokio::select! {
            () = tokio::time::sleep(RETRY) => {}
            () = stop.cancelled() => return,
        }
    }
}

/// Connects, and cancels `end` when the connection is closed.
async fn connect(path: &Path, end: CancellationToken) -> Result<Channel, tonic::transport::Error> {
    let path = path.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let (path, end) = (path.clone(), end.clone());
        async move {
            let stream = socket::connect(&path).await?;
            io::Result::Ok(TokioIo::new(WatchedStream { stream, _end: end.drop_guard() }))
        }
    });
    Endpoint::from_static("http://plugin.local").connect_with_connector(connector).await
}

/// A connection that cancels a token when it is dropped.
struct WatchedStream {
    stream: UnixStream,
    _end: DropGuard,
}

impl AsyncRead for WatchedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for WatchedStream {
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
