//! Writes of an HTTP/2 connection that wait for one turn of the executor.
//!
//! hyper sends the head of a request at once and its body in the next turn of the executor, since `h2`
//! assigns capacity to a stream only when its head is being written. A small call therefore costs two system
//! calls, and wakes its server twice. The same holds for calls of several tasks that run one after the other.
//! A connection whose write waits for the other tasks that can run writes all of it at once.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A connection that writes when the tasks that could run before have run.
#[derive(Debug)]
pub struct Gathered<S> {
    stream: S,
    // The write has waited. The connection is about to be written, up to the next flush.
    has_waited: bool,
}

impl<S> Gathered<S> {
    /// Wraps a connection.
    pub fn new(stream: S) -> Self {
        Self { stream, has_waited: false }
    }

    fn poll_turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.has_waited {
            return Poll::Ready(());
        }
        self.has_waited = true;
        // A task that wakes itself is polled after the tasks that are ready now.
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gathered<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathered<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_turn(cx));
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_turn(cx));
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(cx))?;
        self.has_waited = false;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// Records the length of each write. The first `refused` writes find no room.
    #[derive(Debug, Default)]
    struct Recorded {
        writes: Arc<Mutex<Vec<usize>>>,
        refused: usize,
    }

    impl AsyncWrite for Recorded {
        fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
            if self.refused > 0 {
                self.refused -= 1;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            self.writes.lock().push(buf.len());
            Poll::Ready(Ok(buf.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Writes what is queued whenever it is polled, as a connection of HTTP/2 does.
    async fn write_queue(stream: &mut Gathered<Recorded>, queue: &Mutex<VecDeque<u8>>) {
        std::future::poll_fn(|cx| {
            loop {
                let all: Vec<u8> = queue.lock().iter().copied().collect();
                if all.is_empty() {
                    return Pin::new(&mut *stream).poll_flush(cx);
                }
                let written = ready!(Pin::new(&mut *stream).poll_write(cx, &all))?;
                queue.lock().drain(..written);
            }
        })
        .await
        .unwrap();
    }

    #[tokio::test]
    async fn what_other_tasks_queue_in_their_turn_is_part_of_the_same_write() {
        for refused in [0, 3] {
            let recorded = Recorded { refused, ..Recorded::default() };
            let writes = Arc::clone(&recorded.writes);
            let mut stream = Gathered::new(recorded);
            let queue = Arc::new(Mutex::new(VecDeque::from([1])));
            let of_other = Arc::clone(&queue);
            let other = crate::task::spawn("other", async move { of_other.lock().extend([2, 3]) });
            write_queue(&mut stream, &queue).await;
            other.await.unwrap();
            assert_eq!(*writes.lock(), [3], "{refused} refused");
            // Without other tasks, a write only takes another turn.
            queue.lock().push_back(4);
            write_queue(&mut stream, &queue).await;
            assert_eq!(*writes.lock(), [3, 1]);
        }
    }

    #[tokio::test]
    async fn everything_that_is_written_arrives() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let mut ours = Gathered::new(ours);
        let sent: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        let expected = sent.clone();
        let writer = crate::task::spawn("writer", async move {
            ours.write_all(&sent).await.unwrap();
            ours.shutdown().await.unwrap();
        });
        let mut received = Vec::new();
        tokio::io::AsyncReadExt::read_to_end(&mut theirs, &mut received).await.unwrap();
        writer.await.unwrap();
        assert_eq!(received, expected);
    }
}
