//! Copies bytes between a client and the runtime's streaming server.

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadHalf, WriteHalf};

/// Size of the buffer for one direction of a connection.
const BUFFER: usize = 32 << 10;

/// Copies both ways until both have ended, or one has and the other does not within `half_open`. A client that has to speak
/// within `first` and does not has ended.
pub(crate) async fn copy<A, B>(client: A, runtime: B, first: Option<Duration>, half_open: Duration)
where
    A: AsyncRead + AsyncWrite + Unpin,
    B: AsyncRead + AsyncWrite + Unpin,
{
    let (client_in, client_out) = tokio::io::split(client);
    let (runtime_in, runtime_out) = tokio::io::split(runtime);
    let mut up = std::pin::pin!(one_way(client_in, runtime_out, first));
    let mut down = std::pin::pin!(one_way(runtime_in, client_out, None));
    // What has ended is not polled again; the other gets the rest of the time.
    tokio::select! {
        () = up.as_mut() => drop(tokio::time::timeout(half_open, down).await),
        () = down.as_mut() => drop(tokio::time::timeout(half_open, up).await),
    }
}

async fn one_way<R: AsyncRead, W: AsyncWrite>(
    mut from: ReadHalf<R>,
    mut to: WriteHalf<W>,
    mut first: Option<Duration>,
) {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = from.read(&mut buffer);
        let read = match first.take() {
            Some(limit) => tokio::time::timeout(limit, read).await.unwrap_or(Ok(0)),
            None => read.await,
        };
        match read {
            Ok(n) if n > 0 => {
                if to.write_all(&buffer[..n]).await.is_err() || to.flush().await.is_err() {
                    return;
                }
            }
            _ => {
                // The other end may be gone, too.
                let _ = to.shutdown().await;
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
    async fn when_one_direction_has_ended_the_other_has_a_moment_and_no_more() {
        let (client, mut far_client) = tokio::io::duplex(64);
        let (runtime, mut far_runtime) = tokio::io::duplex(64);
        let copied = task::spawn("copy", copy(client, runtime, None, Duration::from_secs(10)));
        far_client.write_all(b"ping").await.unwrap();
        let mut four = [0; 4];
        far_runtime.read_exact(&mut four).await.unwrap();
        assert_eq!(&four, b"ping");
        far_client.shutdown().await.unwrap();
        // The runtime neither answers nor hangs up.
        let before = tokio::time::Instant::now();
        copied.await.unwrap();
        assert_eq!(before.elapsed(), Duration::from_secs(10));
    }

    #[tokio::test(start_paused = true)]
    async fn who_has_to_speak_first_and_does_not_is_hung_up_on_and_who_spoke_may_be_silent() {
        let (first, half_open) = (Duration::from_secs(30), Duration::from_secs(10));
        for (speaks, kept) in [(false, false), (true, true)] {
            let (client, mut far_client) = tokio::io::duplex(64);
            let (runtime, _far_runtime) = tokio::io::duplex(64);
            let copied = task::spawn("copy", copy(client, runtime, Some(first), half_open));
            if speaks {
                far_client.write_all(b"ping").await.unwrap();
            }
            let ended = tokio::time::timeout(Duration::from_secs(3600), copied).await.is_ok();
            assert_eq!(ended, !kept, "speaks: {speaks}");
        }
    }
}
