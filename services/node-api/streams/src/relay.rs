//! Copies bytes between a client and the runtime's streaming server.

use std::time::Duration;

use quintlet_kit::clock::FAR;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf};
use tokio_util::sync::CancellationToken;

/// Size of the buffer for one direction of a connection.
const BUFFER: usize = 32 << 10;

/// Copies both directions until both have ended. After one has ended, the other has `half_open` to end. The
/// client has to send its first byte within `first`. At `stop` both connections are shut down: a connection
/// that is just dropped ends for a client of TLS as if it was cut.
pub(crate) async fn copy<A, B>(
    client: A,
    runtime: B,
    first: Option<Duration>,
    half_open: Duration,
    stop: &CancellationToken,
) where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let (client_in, client_out) = tokio::io::split(client);
    let (runtime_in, runtime_out) = tokio::io::split(runtime);
    let mut up = std::pin::pin!(one_way(client_in, runtime_out, first, stop));
    let mut down = std::pin::pin!(one_way(runtime_in, client_out, None, stop));
    // A completed direction is not polled again.
    tokio::select! {
        () = up.as_mut() => drop(tokio::time::timeout(half_open, down).await),
        () = down.as_mut() => drop(tokio::time::timeout(half_open, up).await),
    }
}

async fn one_way<R: AsyncRead, W: AsyncWrite>(
    mut reader: ReadHalf<R>,
    mut writer: WriteHalf<W>,
    mut first: Option<Duration>,
    stop: &CancellationToken,
) {
    let mut buffer = vec![0; BUFFER];
    loop {
        let limit = first.take().unwrap_or(FAR);
        // A dropped read has read nothing.
        let read = tokio::select! {
            read = tokio::time::timeout(limit, reader.read(&mut buffer)) => read.unwrap_or(Ok(0)),
            () = stop.cancelled() => Ok(0),
        };
        match read {
            Ok(n) if n > 0 => {
                if writer.write_all(&buffer[..n]).await.is_err() || writer.flush().await.is_err() {
                    return;
                }
            }
            _ => {
                // The other side may be closed as well.
                let _ = writer.shutdown().await;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use quintlet_kit::task;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn after_one_direction_ends_the_other_one_ends_within_its_time_limit() {
        let (client, mut far_client) = tokio::io::duplex(64);
        let (runtime, mut far_runtime) = tokio::io::duplex(64);
        let copied = task::spawn("copy", async move {
            copy(client, runtime, None, Duration::from_secs(10), &CancellationToken::new()).await;
        });
        far_client.write_all(b"ping").await.unwrap();
        let mut four = [0; 4];
        far_runtime.read_exact(&mut four).await.unwrap();
        assert_eq!(&four, b"ping");
        far_client.shutdown().await.unwrap();
        // The runtime neither answers nor closes the connection.
        let before = tokio::time::Instant::now();
        copied.await.unwrap();
        assert_eq!(before.elapsed(), Duration::from_secs(10));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_shuts_down_both_connections() {
        let (client, mut far_client) = tokio::io::duplex(64);
        let (runtime, mut far_runtime) = tokio::io::duplex(64);
        let stop = CancellationToken::new();
        let stopping = stop.clone();
        let copied = task::spawn("copy", async move {
            copy(client, runtime, None, Duration::from_secs(10), &stopping).await;
        });
        far_client.write_all(b"ping").await.unwrap();
        let mut four = [0; 4];
        far_runtime.read_exact(&mut four).await.unwrap();
        stop.cancel();
        assert_eq!(
            (far_client.read(&mut four).await.unwrap(), far_runtime.read(&mut four).await.unwrap()),
            (0, 0)
        );
        copied.await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_sends_no_first_byte_in_time_is_disconnected_and_may_be_idle_later() {
        let (first, half_open) = (Duration::from_secs(30), Duration::from_secs(10));
        for (speaks, kept) in [(false, false), (true, true)] {
            let (client, mut far_client) = tokio::io::duplex(64);
            let (runtime, _far_runtime) = tokio::io::duplex(64);
            let copied = task::spawn("copy", async move {
                copy(client, runtime, Some(first), half_open, &CancellationToken::new()).await;
            });
            if speaks {
                far_client.write_all(b"ping").await.unwrap();
            }
            let ended = tokio::time::timeout(Duration::from_secs(3600), copied).await.is_ok();
            assert_eq!(ended, !kept, "speaks: {speaks}");
        }
    }
}
