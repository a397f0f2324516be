//! TLS connections of probes. The certificate of the server is not verified. Errors have the texts of Go.

use std::sync::{Arc, LazyLock};

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::dial::{self, Connection};

/// The protocols that a probe offers (ALPN).
#[derive(Debug, Clone, Copy)]
pub(super) enum Protocols {
    /// HTTP/2, then HTTP/1.1.
    Http,
    /// HTTP/2 only.
    Grpc,
}

impl Protocols {
    fn config(self) -> Arc<ClientConfig> {
        static HTTP: LazyLock<Arc<ClientConfig>> = LazyLock::new(|| unverified(&[b"h2", b"http/1.1"]));
        static GRPC: LazyLock<Arc<ClientConfig>> = LazyLock::new(|| unverified(&[b"h2"]));
        match self {
            Self::Http => Arc::clone(&HTTP),
            Self::Grpc => Arc::clone(&GRPC),
        }
    }
}

/// Makes the TLS handshake with a host name or an address.
///
/// # Errors
/// The host is not valid in a certificate, or the handshake fails. There is no time limit.
pub(super) async fn handshake(
    host: &str,
    protocols: Protocols,
    connection: Connection,
) -> Result<TlsStream<Connection>, String> {
    let name = ServerName::try_from(host.to_owned()).map_err(|e| format!("tls: {e}"))?;
    let connecting = TlsConnector::from(protocols.config()).connect(name, connection);
    connecting.await.map_err(|error| error_text(&error))
}

fn unverified(protocols: &[&[u8]]) -> Arc<ClientConfig> {
    let mut config = quintlet_kit::tls::unverified();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    Arc::new(config)
}

fn error_text(error: &std::io::Error) -> String {
    match error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidMessage(_)) => {
            "tls: first record does not look like a TLS handshake".to_owned()
        }
        Some(rustls::Error::AlertReceived(alert)) => format!("remote error: tls: {alert:?}"),
        Some(other) => format!("tls: {other}"),
        None if error.kind() == std::io::ErrorKind::UnexpectedEof => "EOF".to_owned(),
        None => dial::go_error_text(error),
    }
}
