//! Authentication by client certificate: the name from CN, the groups from O. The CA bundle is reloaded when
//! it changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;

use crate::digest::{self, Digest};
use crate::tls::{TlsError, certificates};
use crate::user::User;

/// The reason why a certificate does not identify a user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum X509Error {
    /// No trust anchor signed the certificate, or it is expired, or not for clients.
    #[error("failed to verify the client certificate")]
    Verify(#[source] rustls::Error),
    /// The common name, which is the user name, is absent, repeated or not UTF-8.
    #[error("the client certificate has no valid common name")]
    Name,
}

/// The CA bundle of client certificates.
#[derive(Debug)]
pub struct ClientCa {
    path: PathBuf,
    now: RwLock<Arc<dyn ClientCertVerifier>>,
    /// Digest of the file that was read last, whether valid or not.
    seen: Mutex<Digest>,
}

impl ClientCa {
    /// Loads a bundle.
    ///
    /// # Errors
    /// Fails if the file cannot be read or has no valid CA certificate.
    pub fn load(path: &Path) -> Result<Self, TlsError> {
        // Computed before the file is read, so that a change in between is noticed later.
        let seen = Mutex::new(digest::of_files(&[path.to_owned()]));
        Ok(Self { path: path.to_owned(), now: RwLock::new(read(path)?), seen })
    }

    /// Reloads the bundle if it has changed. Returns whether it has. An invalid bundle leaves the previous
    /// one in use.
    ///
    /// # Errors
    /// Fails as [`ClientCa::load`], once per change.
    pub fn refresh(&self) -> Result<bool, TlsError> {
        let found = digest::of_files(std::slice::from_ref(&self.path));
        if std::mem::replace(&mut *self.seen.lock(), found) == found {
            return Ok(false);
        }
        *self.now.write() = read(&self.path)?;
        Ok(true)
    }

    /// Returns the user of a certificate chain.
    ///
    /// # Errors
    /// Fails if the chain is not valid at `now`, or has no common name.
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
        return Err(unusable(rustls::Error::General("no valid CA certificate".to_owned())));
    }
    let provider = Arc::new(quintlet_kit::crypto::provider());
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .map(|verifier| verifier as Arc<dyn ClientCertVerifier>)
        .map_err(|e| unusable(rustls::Error::General(e.to_string())))
}
