//! An HTTP or HTTPS server on loopback with one request per connection and replies by path.
#![allow(clippy::unwrap_used, reason = "a server that does not start fails the test")]

use std::sync::Arc;

use parking_lot::Mutex;
use rustls::RootCertStore;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;

type Answer = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// A server on loopback, which runs as long as the test's executor.
pub struct HttpServer {
    /// Port of the server.
    pub port: u16,
    /// `http` or `https`.
    pub scheme: &'static str,
    /// Root certificates for its certificate for 127.0.0.1; empty without TLS.
    pub roots: RootCertStore,
    requests: Arc<Mutex<Vec<String>>>,
}

impl HttpServer {
    /// Starts a server that replies with the result of `answer` for a path.
    pub async fn start(tls: bool, answer: impl Fn(&str) -> String + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (requests, answer): (Arc<Mutex<Vec<String>>>, Answer) = (Arc::default(), Arc::new(answer));
        let mut roots = RootCertStore::empty();
        let acceptor = tls.then(|| acceptor(&mut roots));
        let seen = Arc::clone(&requests);
        crate::spawn(async move {
            while let Ok((peer, _)) = listener.accept().await {
                match &acceptor {
                    Some(acceptor) => {
                        if let Ok(peer) = acceptor.accept(peer).await {
                            serve(peer, &seen, &answer).await;
                        }
                    }
                    None => serve(peer, &seen, &answer).await,
                }
            }
        });
        Self { port, scheme: if tls { "https" } else { "http" }, roots, requests }
    }

    /// Returns the requests so far.
    pub fn requests(&self) -> Vec<String> {
        self.requests.lock().clone()
    }
}

async fn serve(mut io: impl AsyncRead + AsyncWrite + Unpin, seen: &Mutex<Vec<String>>, answer: &Answer) {
    let mut request: Vec<u8> = Vec::new();
    // Bodies do not matter. What is not HTTP, such as the start of TLS, is answered at once.
    let is_complete = |request: &[u8]| {
        request.first().is_some_and(|byte| !byte.is_ascii_uppercase())
            || request.windows(4).any(|end| end == b"\r\n\r\n")
    };
    while !is_complete(&request) && io.read_buf(&mut request).await.is_ok_and(|n| n > 0) {}
    let request = String::from_utf8_lossy(&request).into_owned();
    let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
    seen.lock().push(request);
    let _ = io.write_all(answer(&path).as_bytes()).await;
    let _ = io.shutdown().await;
}

fn acceptor(roots: &mut RootCertStore) -> tokio_rustls::TlsAcceptor {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    roots.add(made.cert.der().clone()).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(quintlet_kit::crypto::provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    tokio_rustls::TlsAcceptor::from(Arc::new(config))
}
