//! One self-signed certificate per process, for 127.0.0.1 and localhost.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

struct Identity {
    pem: String,
    config: Arc<ServerConfig>,
}

static IDENTITY: OnceLock<Identity> = OnceLock::new();

fn identity() -> &'static Identity {
    IDENTITY.get_or_init(|| Identity::read(&generate()).expect("a new certificate has its key"))
}

/// Returns a certificate and its key as PEM.
fn generate() -> String {
    let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).expect("a certificate for fixed names can be made");
    made.cert.pem() + &made.signing_key.serialize_pem()
}

/// Uses the certificate and key of a file, which is created if it does not exist, for this process.
///
/// # Errors
/// The file cannot be read or written, or its content is something else.
pub(crate) fn keep(path: &Path) -> io::Result<()> {
    let pem = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let pem = generate();
            std::fs::write(path, &pem)?;
            pem
        }
        read => read?,
    };
    let kept = Identity::read(&pem)?;
    IDENTITY.set(kept).map_err(|_| io::Error::other("the process has served another certificate"))
}

impl Identity {
    fn read(pem: &str) -> io::Result<Self> {
        let certificate = CertificateDer::from_pem_slice(pem.as_bytes()).map_err(io::Error::other)?;
        let key = PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(io::Error::other)?;
        let end = pem.find("-----BEGIN PRIVATE KEY").unwrap_or(pem.len());
        let provider = Arc::new(quintlet_kit::crypto::provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider has the default versions")
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .map_err(io::Error::other)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { pem: pem[..end].to_owned(), config: Arc::new(config) })
    }
}

/// Returns the certificate to trust, as PEM.
pub(crate) fn placeholder_ca() -> &'static str {
    &identity().pem
}

pub(crate) fn acceptor() -> TlsAcceptor {
    TlsAcceptor::from(identity().config.clone())
}
