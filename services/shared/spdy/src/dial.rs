//! Connects to the runtime's streaming server, with TLS for an `https` URL.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::Uri;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// Limit of a connection attempt, with the TLS handshake.
const LIMIT: Duration = Duration::from_secs(5);

/// A connection to a streaming server.
pub trait Transport: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Transport for T {}

/// Connects to the server of an `http` or `https` URL. The certificate of an `https` server must chain to a
/// root that the system trusts, as in the kubelet.
///
/// # Errors
/// The URL is invalid, the connection fails, or the certificate is not trusted.
pub async fn dial(uri: &Uri) -> io::Result<Box<dyn Transport>> {
    dial_trusting(uri, system_roots).await
}

async fn dial_trusting(
    uri: &Uri,
    roots: impl FnOnce() -> io::Result<RootCertStore>,
) -> io::Result<Box<dyn Transport>> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidInput, what.to_owned());
    let (with_tls, default_port) = match uri.scheme_str() {
        Some("http") => (false, 80),
        Some("https") => (true, 443),
        _ => return Err(invalid("neither http nor https")),
    };
    let authority = uri.authority().ok_or_else(|| invalid("no address"))?;
    let host = authority.host().trim_matches(['[', ']']);
    let connecting = async {
        let stream = TcpStream::connect((host, authority.port_u16().unwrap_or(default_port))).await?;
        // Without this option, the kernel would delay single keystrokes.
        stream.set_nodelay(true)?;
        if !with_tls {
            return Ok(Box::new(stream) as Box<dyn Transport>);
        }
        let name = ServerName::try_from(host.to_owned()).map_err(|_| invalid("not a host name"))?;
        let provider = Arc::new(quintlet_kit::crypto::provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(io::Error::other)?
            .with_root_certificates(roots()?)
            .with_no_client_auth();
        // HTTP/2 has no upgrade to SPDY or WebSocket.
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Box::new(TlsConnector::from(Arc::new(config)).connect(name, stream).await?) as Box<dyn Transport>)
    };
    timeout(LIMIT, connecting).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Reads the trusted roots of the system, which may change while the process runs.
fn system_roots() -> io::Result<RootCertStore> {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    let (usable, _) = roots.add_parsable_certificates(found.certs);
    match (usable, found.errors.into_iter().next()) {
        (0, Some(error)) => Err(io::Error::other(error)),
        (0, None) => Err(io::Error::new(io::ErrorKind::NotFound, "the system trusts no certificate")),
        _ => Ok(roots),
    }
}

#[cfg(test)]
mod tests {
    use quintlet_kit::task;
    use rustls::ServerConfig;
    use rustls::pki_types::PrivateKeyDer;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;

    /// Starts a TLS server that greets, and returns the root certificates of a client that trusts it.
    async fn server(name: &str) -> (u16, RootCertStore) {
        let key = rcgen::KeyPair::generate().unwrap();
        let cert = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap().self_signed(&key).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(cert.der().clone()).unwrap();
        let config = ServerConfig::builder_with_provider(quintlet_kit::crypto::provider().into())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], PrivateKeyDer::Pkcs8(key.serialize_der().into()))
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        task::spawn("server", async move {
            let acceptor = TlsAcceptor::from(Arc::new(config));
            while let Ok((stream, _)) = listener.accept().await {
                if let Ok(mut stream) = acceptor.accept(stream).await {
                    stream.write_all(b"hello").await.unwrap();
                }
            }
        });
        (port, roots)
    }

    async fn greeting(url: &str, roots: &RootCertStore) -> io::Result<String> {
        let mut stream = dial_trusting(&url.parse().unwrap(), || Ok(roots.clone())).await?;
        let mut text = [0; 5];
        stream.read_exact(&mut text).await?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    #[tokio::test]
    async fn a_tls_server_needs_a_certificate_for_its_name() {
        let (port, roots) = server("127.0.0.1").await;
        let (_, others) = server("127.0.0.1").await;
        let url = format!("https://127.0.0.1:{port}/exec/token");
        assert_eq!(greeting(&url, &roots).await.unwrap(), "hello");
        assert!(greeting(&url, &others).await.is_err(), "the certificate of another CA");
        let (port, roots) = server("10.0.0.9").await;
        let url = format!("https://127.0.0.1:{port}/exec/token");
        assert!(greeting(&url, &roots).await.is_err(), "another host's certificate");
        for no_url in ["ftp://127.0.0.1/", "/path"] {
            assert_eq!(
                greeting(no_url, &roots).await.unwrap_err().kind(),
                io::ErrorKind::InvalidInput,
                "{no_url}"
            );
        }
    }
}
