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

use quintlet_kit::lookup;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};

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

/// Connects to the first address of `host`, a name or an IP address, that accepts the connection.
///
/// # Errors
/// The text of Go's error for the first address.
pub(super) async fn dial(host: &str, port: u16, purpose: Purpose) -> Result<(Connection, Route), String> {
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
    Err(first.unwrap_or_default())
}

async fn connect(remote: SocketAddr, purpose: Purpose) -> Result<(Connection, Route), String> {
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
        Err(error) => Err(format!("dial tcp {remote}: connect: {}", go_error_text(&error))),
    }
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
