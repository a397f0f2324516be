//! TCP connections of probes: no proxy, SO_LINGER 1 s, error texts of Go.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};

const LINGER: Duration = Duration::from_secs(1);

/// A connection that is closed on a blocking thread, since SO_LINGER lets a close block for a second.
#[derive(Debug)]
pub(super) struct Connection {
    stream: Option<TcpStream>,
    route: String,
}

/// Connects.
///
/// # Errors
/// The text of Go's error, with the address.
pub(super) async fn dial(host: &str, port: u16) -> Result<Connection, String> {
    let to = join_host_port(host, port);
    let addresses = match host.parse::<IpAddr>() {
        Ok(ip) => vec![SocketAddr::new(ip, port)],
        Err(_) => match tokio::net::lookup_host((host, port)).await {
            Ok(found) => found.collect(),
            Err(_) => Vec::new(),
        },
    };
    let mut first = None;
    for address in addresses {
        match connect(address).await {
            Ok(stream) => {
                let route = match stream.local_addr() {
                    Ok(local) => format!("{local}->{address}"),
                    Err(_) => to,
                };
                return Ok(Connection { stream: Some(stream), route });
            }
            Err(error) => {
                first
                    .get_or_insert_with(|| format!("dial tcp {address}: connect: {}", go_error_text(&error)));
            }
        }
    }
    Err(first.unwrap_or_else(|| format!("dial tcp: lookup {host}: no such host")))
}

async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    rustix::net::sockopt::set_socket_linger(&socket, Some(LINGER))?;
    socket.connect(address).await
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

impl Connection {
    /// Returns `local->remote`, as in Go's errors of a connection.
    pub(super) fn route(&self) -> &str {
        &self.route
    }

    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let Some(stream) = self.stream.take() else { return };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn_blocking(move || drop(stream));
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream()?.poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(cx)
    }
}
