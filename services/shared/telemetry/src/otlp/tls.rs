//! TLS to a collector.

use std::sync::Arc;

use hyper_rustls::ConfigBuilderExt as _;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};

use crate::otlp::settings::{NamedFile, OtlpError, TlsFiles};

/// Returns the configuration of a client that trusts the configured authorities or, without them, those of the machine.
pub(crate) fn client(files: &TlsFiles) -> Result<ClientConfig, OtlpError> {
    let builder = match &files.authorities {
        Some(file) => builder()?.with_root_certificates(authorities(file)?),
        None => builder()?.with_native_roots().map_err(OtlpError::NoRoots)?,
    };
    let Some((certificate, key)) = &files.client else { return Ok(builder.with_no_client_auth()) };
    let key = PrivateKeyDer::from_pem_file(&key.path).map_err(|source| unreadable(key, source))?;
    builder.with_client_auth_cert(certificates(certificate)?, key).map_err(OtlpError::Certificates)
}

/// Returns a configuration for an endpoint without TLS, which trusts no certificate.
pub(crate) fn unused() -> Result<ClientConfig, OtlpError> {
    Ok(builder()?.with_root_certificates(RootCertStore::empty()).with_no_client_auth())
}

fn builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, OtlpError> {
    #[expect(
        clippy::disallowed_methods,
        reason = "kit::crypto depends on this crate; P-521 is for servers of pods"
    )]
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(OtlpError::Certificates)
}

fn authorities(file: &NamedFile) -> Result<RootCertStore, OtlpError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(file)? {
        roots.add(certificate).map_err(OtlpError::Certificates)?;
    }
    Ok(roots)
}

fn certificates(file: &NamedFile) -> Result<Vec<CertificateDer<'static>>, OtlpError> {
    let read = CertificateDer::pem_file_iter(&file.path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let found = read.map_err(|source| unreadable(file, source))?;
    if found.is_empty() {
        return Err(unreadable(file, rustls::pki_types::pem::Error::NoItemsFound));
    }
    Ok(found)
}

fn unreadable(file: &NamedFile, source: rustls::pki_types::pem::Error) -> OtlpError {
    OtlpError::Pem { name: file.name.clone(), path: file.path.clone(), source }
}
