//! TLS to a collector.

use std::sync::Arc;

use hyper_rustls::ConfigBuilderExt as _;
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig, Identity};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

use crate::otlp::{NamedFile, OtlpError, TlsFiles};

/// Returns the configuration of a client over HTTP that trusts the configured authorities or, without them, those of the machine.
pub(crate) fn of_http(files: &TlsFiles) -> Result<ClientConfig, OtlpError> {
    #[expect(
        clippy::disallowed_methods,
        reason = "kit::crypto depends on this crate; P-521 is for servers of pods"
    )]
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(OtlpError::Certificates)?;
    let builder = match &files.authorities {
        Some(file) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(file)? {
                roots.add(certificate).map_err(OtlpError::Certificates)?;
            }
            builder.with_root_certificates(roots)
        }
        None => builder.with_native_roots().map_err(OtlpError::NoRoots)?,
    };
    let Some((certificate, key)) = &files.client else { return Ok(builder.with_no_client_auth()) };
    builder
        .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
        .map_err(OtlpError::Certificates)
}

/// Returns the same for a client over gRPC.
pub(crate) fn of_grpc(files: &TlsFiles) -> Result<ClientTlsConfig, OtlpError> {
    let tls = match &files.authorities {
        Some(file) => {
            certificates(file)?;
            ClientTlsConfig::new().ca_certificate(Certificate::from_pem(text(file)?))
        }
        None => ClientTlsConfig::new().with_native_roots(),
    };
    let Some((certificate, key)) = &files.client else { return Ok(tls) };
    certificates(certificate)?;
    private_key(key)?;
    Ok(tls.identity(Identity::from_pem(text(certificate)?, text(key)?)))
}

fn text(file: &NamedFile) -> Result<Vec<u8>, OtlpError> {
    std::fs::read(&file.path).map_err(|error| unreadable(file, rustls::pki_types::pem::Error::Io(error)))
}

fn private_key(file: &NamedFile) -> Result<PrivateKeyDer<'static>, OtlpError> {
    PrivateKeyDer::from_pem_file(&file.path).map_err(|source| unreadable(file, source))
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
