//! Users by client certificate: name from CN, groups from O, verified with the CA bundle of now.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;

use super::User;
use crate::digest::{self, Digest};
use crate::tls::{TlsError, certificates};

/// Why a certificate says nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum X509Error {
    /// Not signed by our CA, expired, not for clients.
    #[error("verifying the client certificate")]
    Verify(#[source] rustls::Error),
    /// It has no readable name.
    #[error("the client certificate has no common name that can be read")]
    Name,
}

/// The CA bundle.
#[derive(Debug)]
pub struct ClientCa {
    path: PathBuf,
    now: RwLock<Arc<dyn ClientCertVerifier>>,
    /// Of what was read last, whether it could be used or not.
    seen: Mutex<Digest>,
}

impl ClientCa {
    /// Reads a bundle.
    ///
    /// # Errors
    /// It cannot be read or holds no certificate that can be a root.
    pub fn load(path: &Path) -> Result<Self, TlsError> {
        // Taken before reading: what changes in between is read again.
        let seen = Mutex::new(digest::of_files(&[path.to_owned()]));
        Ok(Self { path: path.to_owned(), now: RwLock::new(read(path)?), seen })
    }

    /// Reads the bundle again if it has changed, and tells whether it had; one that cannot be used leaves that of before.
    ///
    /// # Errors
    /// As [`ClientCa::load`], once per change.
    pub fn refresh(&self) -> Result<bool, TlsError> {
        let found = digest::of_files(std::slice::from_ref(&self.path));
        if std::mem::replace(&mut *self.seen.lock(), found) == found {
            return Ok(false);
        }
        *self.now.write() = read(&self.path)?;
        Ok(true)
    }

    /// Who a chain stands for at a time.
    ///
    /// # Errors
    /// Nobody, and why.
    pub fn user(&self, chain: &[CertificateDer<'static>], now: UnixTime) -> Result<User, X509Error> {
        let Some((leaf, intermediates)) = chain.split_first() else { return Err(X509Error::Name) };
        let verifier = self.now.read().clone();
        verifier.verify_client_cert(leaf, intermediates, now).map_err(X509Error::Verify)?;
        named(leaf)
    }
}

fn named(leaf: &CertificateDer<'_>) -> Result<User, X509Error> {
    let (_, cert) = x509_parser::parse_x509_certificate(leaf).map_err(|_| X509Error::Name)?;
    let text = |a: &x509_parser::x509::AttributeTypeAndValue<'_>| a.as_str().ok().map(str::to_owned);
    let name = cert.subject().iter_common_name().filter_map(text).next().filter(|n| !n.is_empty());
    let groups = cert.subject().iter_organization().filter_map(text).collect();
    Ok(User { name: name.ok_or(X509Error::Name)?, groups, ..User::default() }.authenticated())
}

fn read(path: &Path) -> Result<Arc<dyn ClientCertVerifier>, TlsError> {
    let mut roots = rustls::RootCertStore::empty();
    let (usable, _) = roots.add_parsable_certificates(certificates(path)?);
    let unusable = |source| TlsError::Pair { path: path.to_owned(), source };
    if usable == 0 {
        return Err(unusable(rustls::Error::General("no certificate of a CA".to_owned())));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .map(|verifier| verifier as Arc<dyn ClientCertVerifier>)
        .map_err(|e| unusable(rustls::Error::General(e.to_string())))
}
