//! TLS to a collector.

use std::path::PathBuf;
use std::sync::Arc;

use hyper_rustls::ConfigBuilderExt as _;
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig, Identity};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

/// The reason why certificates cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or has no certificate or key.
    #[error("{name}: failed to read {}", path.display())]
    Pem {
        /// The variable that names the file.
        name: String,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: rustls::pki_types::pem::Error,
    },
    /// The certificates cannot be used.
    #[error("failed to use the certificates of the OTLP exporter")]
    Certificates(#[source] rustls::Error),
    /// No file of certificates is configured, and the machine has none.
    #[error("failed to read the trusted certificates of the machine")]
    NoRoots(#[source] std::io::Error),
}

/// A file, and the variable that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedFile {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
}

/// Files of certificates. Each is read once, when the exporter is built.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    /// Authorities of the collector. Without it, those of the machine.
    pub(crate) authorities: Option<NamedFile>,
    /// Certificate and key of the client.
    pub(crate) client: Option<(NamedFile, NamedFile)>,
}

/// Returns the configuration of a client over HTTP that trusts the configured authorities or, without them,
/// those of the machine.
pub(crate) fn of_http(files: &TlsFiles) -> Result<ClientConfig, TlsError> {
    #[expect(
        clippy::disallowed_methods,
        reason = "kit::crypto depends on this crate; P-521 is for servers of pods"
    )]
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Certificates)?;
    let builder = match &files.authorities {
        Some(file) => {
            let mut roots = RootCertStore::empty();
            for certificate in read_certificates(file)? {
                roots.add(certificate).map_err(TlsError::Certificates)?;
            }
            builder.with_root_certificates(roots)
        }
        None => builder.with_native_roots().map_err(TlsError::NoRoots)?,
    };
    let Some((certificate, key)) = &files.client else { return Ok(builder.with_no_client_auth()) };
    builder
        .with_client_auth_cert(read_certificates(certificate)?, read_private_key(key)?)
        .map_err(TlsError::Certificates)
}

/// Returns the same for a client over gRPC.
pub(crate) fn of_grpc(files: &TlsFiles) -> Result<ClientTlsConfig, TlsError> {
    let tls = match &files.authorities {
        Some(file) => {
            read_certificates(file)?;
            ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read_file(file)?))
        }
        None => ClientTlsConfig::new().with_native_roots(),
    };
    let Some((certificate, key)) = &files.client else { return Ok(tls) };
    read_certificates(certificate)?;
    read_private_key(key)?;
    Ok(tls.identity(Identity::from_pem(read_file(certificate)?, read_file(key)?)))
}

fn read_file(file: &NamedFile) -> Result<Vec<u8>, TlsError> {
    std::fs::read(&file.path).map_err(|error| unreadable(file, rustls::pki_types::pem::Error::Io(error)))
}

fn read_private_key(file: &NamedFile) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(&file.path).map_err(|source| unreadable(file, source))
}

fn read_certificates(file: &NamedFile) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = CertificateDer::pem_file_iter(&file.path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let found = read.map_err(|source| unreadable(file, source))?;
    if found.is_empty() {
        return Err(unreadable(file, rustls::pki_types::pem::Error::NoItemsFound));
    }
    Ok(found)
}

fn unreadable(file: &NamedFile, source: rustls::pki_types::pem::Error) -> TlsError {
    TlsError::Pem { name: file.name.clone(), path: file.path.clone(), source }
}
