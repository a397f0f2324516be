//! TCP connections of probes: no proxy, error texts of Go.
//!
//! The kubelet sets SO_LINGER to 1 s (`pkg/probe: ProbeDialer`), to shorten TIME-WAIT. On Linux a positive
//! time does not change what is sent, nor TIME-WAIT: close(2) waits for the peer, up to that long.
//! Connections are closed without it, so that a probe needs no second thread.
//!
//! On a connection that begins with a request, Linux sends no segment that only acknowledges: the request
//! acknowledges the handshake, and the close an answer that arrived whole. Linux acknowledges at once, as by
//! default, as soon as the probe waits for the rest of an answer: a server with Nagle's algorithm sends the
//! rest only after that.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};

use nix::errno::Errno;
use quintlet_kit::lookup;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};

use super::attempt::{Attempt, Broken};

/// Both ends of a connection, written `local->remote` as in Go's errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    local: Option<SocketAddr>,
    remote: SocketAddr,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(local) = self.local {
            write!(f, "{local}->")?;
        }
        write!(f, "{}", self.remote)
    }
}

/// The use of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The probe sends a request at once.
    Request,
    /// The probe ends with the handshake.
    Handshake,
}

/// When Linux acknowledges what it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Acknowledgement {
    /// With the next segment that has to be sent, or after 40 ms.
    Later,
    /// The same, and a part of the answer has arrived.
    LaterWithAnswer,
    /// At once, as Linux does by default on a new connection.
    Now,
}

/// A TCP connection of a probe.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    acknowledgement: Acknowledgement,
}

#[cfg(test)]
impl Connection {
    /// Returns the option TCP_QUICKACK.
    pub(super) fn acknowledges_at_once(&self) -> bool {
        SockRef::from(&self.stream).tcp_quickack().unwrap()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        match (self.acknowledgement, &read) {
            (Acknowledgement::Later, Poll::Ready(_)) => {
                self.acknowledgement = Acknowledgement::LaterWithAnswer;
            }
            (Acknowledgement::LaterWithAnswer, Poll::Pending) => {
                self.acknowledgement = Acknowledgement::Now;
                SockRef::from(&self.stream).set_tcp_quickack(true)?;
            }
            _ => {}
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    // Every connection is closed after its shutdown, which sends the same.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// No connection was made.
#[derive(Debug)]
pub(super) struct DialError {
    /// The text of Go's error.
    text: String,
    /// This process or the node has no file descriptor or memory left, which says nothing about the
    /// container.
    is_of_node: bool,
}

impl DialError {
    /// Returns the outcome of an attempt, a failure with this text unless the node was the reason.
    pub(super) fn outcome(self, failure: impl FnOnce(&str) -> String) -> Attempt {
        if !self.is_of_node {
            return Attempt::Failure(failure(&self.text));
        }
        tracing::warn!(error = self.text, "probe could not be attempted");
        Attempt::Broken(Broken { state: "unknown", error: self.text, event: false })
    }

    /// Returns the error with a text around its own.
    pub(super) fn described(self, describe: impl FnOnce(&str) -> String) -> Self {
        Self { text: describe(&self.text), ..self }
    }
}

impl From<String> for DialError {
    fn from(text: String) -> Self {
        Self { text, is_of_node: false }
    }
}

/// Connects to the first address of `host`, a name or an IP address, that accepts the connection.
///
/// # Errors
/// The error for the first address.
pub(super) async fn dial(host: &str, port: u16, purpose: Purpose) -> Result<(Connection, Route), DialError> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return connect(SocketAddr::new(ip, port), purpose).await;
    }
    let mut first = None;
    for address in lookup::addresses(host, port).await.map_err(|e| format!("dial tcp: {e}"))? {
        match connect(address, purpose).await {
            Ok(connected) => return Ok(connected),
            Err(error) => {
                first.get_or_insert(error);
            }
        }
    }
    Err(first.unwrap_or_else(|| String::new().into()))
}

async fn connect(remote: SocketAddr, purpose: Purpose) -> Result<(Connection, Route), DialError> {
    let connected = async {
        let socket = if remote.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        let acknowledgement = match purpose {
            Purpose::Request => {
                SockRef::from(&socket).set_tcp_quickack(false)?;
                Acknowledgement::Later
            }
            Purpose::Handshake => Acknowledgement::Now,
        };
        Ok(Connection { stream: socket.connect(remote).await?, acknowledgement })
    };
    match connected.await {
        Ok(connection) => {
            let local = connection.stream.local_addr().ok();
            Ok((connection, Route { local, remote }))
        }
        Err(error) => Err(DialError {
            text: format!("dial tcp {remote}: connect: {}", go_error_text(&error)),
            is_of_node: is_of_node(&error),
        }),
    }
}

fn is_of_node(error: &io::Error) -> bool {
    let lacks = [Errno::EMFILE, Errno::ENFILE, Errno::ENOBUFS, Errno::ENOMEM];
    error.raw_os_error().is_some_and(|code| lacks.contains(&Errno::from_raw(code)))
}

/// Returns `host:port`, with brackets around an IPv6 address.
pub(super) fn join_host_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Returns Go's text of an I/O error, which is the C library's in lower case.
pub(super) fn go_error_text(error: &io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_without_file_descriptors_or_memory_is_no_failure_of_a_container() {
        for (code, is_failure) in [
            (Errno::EMFILE, false),
            (Errno::ENFILE, false),
            (Errno::ENOBUFS, false),
            (Errno::ENOMEM, false),
            (Errno::ECONNREFUSED, true),
            (Errno::EHOSTUNREACH, true),
            (Errno::ETIMEDOUT, true),
        ] {
            let error = io::Error::from_raw_os_error(code as i32);
            let failed = DialError { text: "why".to_owned(), is_of_node: is_of_node(&error) };
            let unknown = Broken { state: "unknown", error: "why".to_owned(), event: false };
            let want = if is_failure {
                Attempt::Failure("failed: why".to_owned())
            } else {
                Attempt::Broken(unknown)
            };
            assert_eq!(failed.outcome(|text| format!("failed: {text}")), want, "{code}");
        }
    }
}
