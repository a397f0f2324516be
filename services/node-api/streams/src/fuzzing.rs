//! Entry points of `tests/fuzz` to private functions.

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;

use crate::remote_command::Streams;
use crate::websocket;

/// Serves a WebSocket client of `v5.channel.k8s.io` with all streams: error, stdin, stdout, stderr, resize.
pub async fn channels<C, R>(client: C, runtime: R)
where
    C: AsyncRead + AsyncWrite + Unpin + Send,
    R: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let all = Streams { stdin: true, stdout: true, stderr: true, tty: true };
    websocket::channels(client, runtime, all, &CancellationToken::new()).await;
}
