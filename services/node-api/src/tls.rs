//! The serving certificate and what TLS may be: versions, cipher suites, groups.
//!
//! A client certificate is asked for and never required, and a foreign one does not fail the handshake: whether it says
//! who the client is, is decided with each request ([`crate::auth::x509`]). That the client has its key is checked here.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use quintlet_config::tls::{self as names, Support};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, DistinguishedName, ServerConfig, SignatureScheme};

use crate::digest::{self, Digest};

/// Why TLS cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read or written.
    #[error("cannot use {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file is not what it should be.
    #[error("{} holds no usable {what}", path.display())]
    Pem {
        /// Which.
        path: PathBuf,
        /// What was looked for.
        what: &'static str,
        /// What is wrong.
        source: rustls::pki_types::pem::Error,
    },
    /// Key and certificate do not serve.
    #[error("{} cannot be served", path.display())]
    Pair {
        /// The certificate.
        path: PathBuf,
        /// Why not.
        source: rustls::Error,
    },
    /// A certificate cannot be made.
    #[error("no self-signed certificate")]
    SelfSigned(#[source] rcgen::Error),
    /// A setting names what is not there.
    #[error("{setting}: {value:?} is not one of {known}")]
    Setting {
        /// Its flag.
        setting: &'static str,
        /// What was given.
        value: String,
        /// What could be.
        known: String,
    },
    /// The settings leave nothing.
    #[error("TLS settings")]
    Config(#[source] rustls::Error),
}

/// What may be negotiated.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// `VersionTLS12` or `VersionTLS13`; empty: the former.
    pub min_version: String,
    /// Names of suites for TLS 1.2; empty: all.
    pub cipher_suites: Vec<String>,
    /// IANA numbers: 29 (X25519), 23 (P-256), 24 (P-384); empty: all.
    pub curves: Vec<u16>,
}

/// The cryptography that `settings` leave. What Go has and this has not is left out: the configuration was told of it when it
/// was read.
///
/// # Errors
/// Nobody has what is named, or nothing is left.
pub fn provider(settings: &Settings) -> Result<CryptoProvider, TlsError> {
    let mut provider = rustls::crypto::ring::default_provider();
    if !settings.cipher_suites.is_empty() {
        let mut wanted = Vec::new();
        let mut is_left = false;
        for name in &settings.cipher_suites {
            match names::suite(name) {
                Support::Supported(suite) => wanted.push(suite),
                Support::Always => is_left = true,
                Support::Unsupported(_) => {}
                Support::Unknown => return Err(unknown(SUITES, name, &names::SUITES)),
            }
        }
        if wanted.is_empty() && !is_left {
            return Err(unknown(SUITES, &settings.cipher_suites.join(","), &names::SUITES));
        }
        provider.cipher_suites.retain(|s| s.tls13().is_some() || wanted.contains(&suite_name(s).as_str()));
    }
    if !settings.curves.is_empty() {
        let known = std::mem::take(&mut provider.kx_groups);
        let spoken: Vec<String> =
            known.iter().map(|kx| format!("{} ({:?})", u16::from(kx.name()), kx.name())).collect();
        let spoken: Vec<&str> = spoken.iter().map(String::as_str).collect();
        for number in &settings.curves {
            match names::group(*number) {
                // In the order of their preference.
                Support::Supported(_) => provider
                    .kx_groups
                    .extend(known.iter().copied().filter(|kx| u16::from(kx.name()) == *number)),
                Support::Unsupported(_) | Support::Always => {}
                Support::Unknown => return Err(unknown(CURVES, &number.to_string(), &spoken)),
            }
        }
        if provider.kx_groups.is_empty() {
            return Err(unknown(CURVES, &format!("{:?}", settings.curves), &spoken));
        }
    }
    Ok(provider)
}

const SUITES: &str = "--tls-cipher-suites";
const CURVES: &str = "--tls-curve-preferences";

/// Its name in the registry of IANA.
fn suite_name(suite: &rustls::SupportedCipherSuite) -> String {
    format!("{:?}", suite.suite())
}

fn unknown(setting: &'static str, value: &str, known: &[&str]) -> TlsError {
    TlsError::Setting { setting, value: value.to_owned(), known: known.join(", ") }
}

/// What a listener needs.
///
/// # Errors
/// A setting is not known, or they leave nothing.
pub fn server_config(settings: &Settings, serving: Arc<Serving>) -> Result<ServerConfig, TlsError> {
    let versions: &[&rustls::SupportedProtocolVersion] = match settings.min_version.as_str() {
        "" | "VersionTLS12" => &[&rustls::version::TLS13, &rustls::version::TLS12],
        "VersionTLS13" => &[&rustls::version::TLS13],
        other => {
            return Err(unknown("--tls-min-version", other, &["VersionTLS12", "VersionTLS13"]));
        }
    };
    let provider = Arc::new(provider(settings)?);
    let verifier = Arc::new(AnyCertificate { provider: provider.clone() });
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .map_err(TlsError::Config)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(serving);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// The certificate that is served now.
#[derive(Debug)]
pub struct Serving {
    files: [PathBuf; 2],
    now: RwLock<Arc<CertifiedKey>>,
    /// Of what was read last, whether it could be used or not.
    seen: Mutex<Digest>,
}

impl Serving {
    /// Serves from two files.
    ///
    /// # Errors
    /// They cannot be read or do not belong together.
    pub fn load(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let files = [cert.to_owned(), key.to_owned()];
        // Taken before reading: what changes in between is read again.
        let seen = Mutex::new(digest::of_files(&files));
        let now = RwLock::new(Arc::new(read_pair(cert, key)?));
        Ok(Self { files, now, seen })
    }

    /// Reads the files again if they have changed, and tells whether they had; what cannot be used leaves the certificate
    /// that is served.
    ///
    /// # Errors
    /// As [`Serving::load`], once per change.
    pub fn refresh(&self) -> Result<bool, TlsError> {
        let found = digest::of_files(&self.files);
        if std::mem::replace(&mut *self.seen.lock(), found) == found {
            return Ok(false);
        }
        let [cert, key] = &self.files;
        *self.now.write() = Arc::new(read_pair(cert, key)?);
        Ok(true)
    }
}

impl ResolvesServerCert for Serving {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.now.read().clone())
    }
}

fn read_pair(cert: &Path, key: &Path) -> Result<CertifiedKey, TlsError> {
    let chain = certificates(cert)?;
    let key = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|source| TlsError::Pem {
        path: key.to_owned(),
        what: "private key",
        source,
    })?;
    CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider())
        .map_err(|source| TlsError::Pair { path: cert.to_owned(), source })
}

/// The certificates of a PEM file; at least one.
///
/// # Errors
/// It cannot be read or holds none.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bad = |source| TlsError::Pem { path: path.to_owned(), what: "certificate", source };
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let all = all.map_err(bad)?;
    if all.is_empty() { Err(bad(rustls::pki_types::pem::Error::NoItemsFound)) } else { Ok(all) }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::File { path: path.to_owned(), source })
}

/// `kubelet.crt` and `kubelet.key` in `dir`, made for `host` unless they are there and usable.
///
/// A certificate of one year, signed by a CA whose key is thrown away and whose certificate stands behind it in the file
/// (cmd/kubelet/app/server.go:InitializeTLS).
///
/// # Errors
/// They cannot be made or written.
pub fn self_signed(dir: &Path, host: &str, now: jiff::Timestamp) -> Result<(PathBuf, PathBuf), TlsError> {
    let (cert, key) = (dir.join("kubelet.crt"), dir.join("kubelet.key"));
    if read_pair(&cert, &key).is_ok() {
        return Ok((cert, key));
    }
    let (chain, private) = make(host, now).map_err(TlsError::SelfSigned)?;
    std::fs::create_dir_all(dir).map_err(|source| TlsError::File { path: dir.to_owned(), source })?;
    for (path, text, mode) in [(&key, &private, 0o600), (&cert, &chain, 0o644)] {
        quintlet_kit::atomic_file::write(path, text.as_bytes(), mode)
            .map_err(|source| TlsError::File { path: path.clone(), source })?;
    }
    Ok((cert, key))
}

fn make(host: &str, now: jiff::Timestamp) -> Result<(String, String), rcgen::Error> {
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose,
    };
    const YEAR: i64 = 365 * 24 * 3600;
    let from = |seconds: i64| {
        let at = jiff::Timestamp::from_second(now.as_second().saturating_add(seconds)).unwrap_or(now);
        let date = at.to_zoned(jiff::tz::TimeZone::UTC);
        rcgen::date_time_ymd(i32::from(date.year()), date.month().unsigned_abs(), date.day().unsigned_abs())
    };
    let params = |name: String| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        // Dates are whole days: a day of grace on both sides.
        (params.not_before, params.not_after) = (from(-24 * 3600), from(YEAR));
        params
    };
    let mut ca = params(format!("{host}-ca@{}", now.as_second()));
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    let ca_key = rcgen::KeyPair::generate()?;
    let ca_pem = ca.self_signed(&ca_key)?.pem();
    let mut leaf = params(format!("{host}@{}", now.as_second()));
    leaf.subject_alt_names = CertificateParams::new(vec![host.to_owned()])?.subject_alt_names;
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = rcgen::KeyPair::generate()?;
    let signed = leaf.signed_by(&key, &rcgen::Issuer::new(ca, ca_key))?;
    Ok((format!("{}{ca_pem}", signed.pem()), key.serialize_pem()))
}

/// Takes any certificate whose key the client has.
#[derive(Debug)]
struct AnyCertificate {
    provider: Arc<CryptoProvider>,
}

impl ClientCertVerifier for AnyCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // Without a hint a client sends what it has; the CA bundle may change while the listener lives.
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_self_signed_certificate_is_made_once_and_names_its_host() {
        let dir = tempfile::tempdir().unwrap();
        let now = "2026-11-21T02:31:07Z".parse().unwrap();
        let (cert, key) = self_signed(dir.path(), "node-1", now).unwrap();
        let text = std::fs::read(&cert).unwrap();
        let chain = certificates(&cert).unwrap();
        assert_eq!(chain.len(), 2);
        let (_, leaf) = x509_parser::parse_x509_certificate(&chain[0]).unwrap();
        let names = leaf.subject_alternative_name().unwrap().unwrap();
        assert_eq!(names.value.general_names, [x509_parser::prelude::GeneralName::DNSName("node-1")]);
        assert_eq!(leaf.subject().to_string(), format!("CN=node-1@{}", now.as_second()));
        assert!(leaf.validity().not_before.timestamp() <= now.as_second());
        self_signed(dir.path(), "another", now).unwrap();
        assert_eq!(std::fs::read(&cert).unwrap(), text);
        use std::os::unix::fs::PermissionsExt as _;
        assert_eq!(std::fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&key, "rubbish").unwrap();
        self_signed(dir.path(), "another", now).unwrap();
        assert_ne!(std::fs::read(&cert).unwrap(), text);
    }

    fn left(suites: &[&str], curves: &[u16]) -> Result<(Vec<String>, Vec<u16>), String> {
        let cipher_suites = suites.iter().map(|s| (*s).to_owned()).collect();
        let settings = Settings { cipher_suites, curves: curves.to_vec(), ..Settings::default() };
        let provider = provider(&settings).map_err(|e| e.to_string())?;
        let of_12 = provider.cipher_suites.iter().filter(|s| s.tls13().is_none()).map(suite_name);
        Ok((of_12.collect(), provider.kx_groups.iter().map(|kx| u16::from(kx.name())).collect()))
    }

    #[test]
    fn the_names_that_the_configuration_takes_for_spoken_are_those_of_the_library() {
        let (mut suites, mut groups) = left(&[], &[]).unwrap();
        suites.sort();
        groups.sort_unstable();
        assert_eq!(suites, names::SUITES);
        let spoken = |number: &u16| matches!(names::group(*number), Support::Supported(_));
        assert_eq!(groups, (0..=u16::MAX).filter(spoken).collect::<Vec<u16>>());
    }

    #[test]
    fn suites_and_groups_are_those_named_as_far_as_they_are_spoken() {
        let gcm = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256";
        let chacha = "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256";
        let (suites, groups) = left(&[gcm, "TLS_AES_128_GCM_SHA256"], &[24, 23]).unwrap();
        assert_eq!((suites, groups), (vec![gcm.to_owned()], vec![24, 23]));
        // The list that hardening guides give, with a name from before the registry and suites that no longer are safe.
        let usual = [
            "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
            "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305",
            "TLS_RSA_WITH_AES_256_GCM_SHA384",
            "TLS_RSA_WITH_AES_128_GCM_SHA256",
        ];
        let (mut suites, groups) = left(&usual, &[4588, 29, 25]).unwrap();
        suites.sort();
        assert_eq!((suites, groups), (vec![gcm.to_owned(), chacha.to_owned()], vec![29]));
        let (suites, _) = left(&["TLS_AES_128_GCM_SHA256"], &[]).unwrap();
        assert_eq!(suites, [""; 0], "TLS 1.3 alone");
        for (suites, curves) in [
            (vec!["TLS_RSA_WITH_RC4_128_SHA"], vec![]),
            (vec![gcm, "TLS_RSA_WITH_NULL_SHA"], vec![]),
            (vec![], vec![25]),
            (vec![], vec![29, 1]),
        ] {
            assert!(left(&suites, &curves).is_err(), "{suites:?} {curves:?}");
        }
    }

    #[test]
    fn rubbish_in_the_files_leaves_the_certificate_that_is_served() {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = self_signed(dir.path(), "n", jiff::Timestamp::UNIX_EPOCH).unwrap();
        let serving = Serving::load(&cert, &key).unwrap();
        let before = serving.now.read().cert.clone();
        std::fs::write(&cert, "rubbish").unwrap();
        assert!(serving.refresh().is_err());
        assert!(!serving.refresh().unwrap(), "told once");
        assert_eq!(serving.now.read().cert, before);
        self_signed(dir.path(), "n", jiff::Timestamp::UNIX_EPOCH).unwrap();
        assert!(serving.refresh().unwrap());
        assert_ne!(serving.now.read().cert, before);
    }
}
