//! The serving certificate and the TLS settings: versions, cipher suites, key exchange groups.
//!
//! A client certificate is requested but not required, and an untrusted one does not fail the handshake: each
//! request decides whether it identifies a user ([`crate::x509`]). The handshake proves that the client has
//! the certificate's key.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use quintlet_config::tls::{self as names, Support};
use rustls::ServerConfig;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::digest::{self, Digest};

/// The reason why TLS cannot be served.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file of a certificate or key cannot be read.
    #[error("failed to access {}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file can be read, and is no PEM file of the expected content.
    #[error("{} has no valid {what}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// The expected content.
        what: &'static str,
        /// The first error in the file.
        source: rustls::pki_types::pem::Error,
    },
    /// The key is not that of the certificate, or of an unknown kind.
    #[error("failed to use certificate {} with its key", path.display())]
    Pair {
        /// Path of the certificate.
        path: PathBuf,
        /// The error of rustls.
        source: rustls::Error,
    },
    /// There is no certificate file, and the certificate in its place could not be made.
    #[error("failed to create a self-signed certificate")]
    SelfSigned(#[source] rcgen::Error),
    /// A TLS flag has an unknown value.
    #[error("{setting}: {value:?} is not one of {known}")]
    Setting {
        /// The flag.
        setting: &'static str,
        /// The given value.
        value: String,
        /// The valid values.
        known: String,
    },
    /// The versions and cipher suites do not go together.
    #[error("failed to apply the TLS settings")]
    Config(#[source] rustls::Error),
}

/// Versions, cipher suites and groups that a server of TLS accepts.
#[derive(Debug, Clone, Default)]
pub struct TlsSettings {
    /// `VersionTLS12` or `VersionTLS13`; empty means `VersionTLS12`.
    pub min_version: String,
    /// Names of cipher suites for TLS 1.2; empty means all.
    pub cipher_suites: Vec<String>,
    /// IANA numbers: 29 (X25519), 23 (P-256), 24 (P-384); empty means all.
    pub curves: Vec<u16>,
}

/// Returns a provider with the configured cipher suites and groups. Those that Go has and rustls lacks are
/// ignored; the check of the configuration warns of them.
///
/// # Errors
/// Fails if a name is unknown, or if nothing remains.
pub fn provider(settings: &TlsSettings) -> Result<CryptoProvider, TlsError> {
    let mut provider = quintlet_kit::crypto::provider();
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
        let known_names: Vec<String> =
            known.iter().map(|kx| format!("{} ({:?})", u16::from(kx.name()), kx.name())).collect();
        let known_names: Vec<&str> = known_names.iter().map(String::as_str).collect();
        for number in &settings.curves {
            match names::group(*number) {
                // In the configured order of preference.
                Support::Supported(_) => provider
                    .kx_groups
                    .extend(known.iter().copied().filter(|kx| u16::from(kx.name()) == *number)),
                Support::Unsupported(_) | Support::Always => {}
                Support::Unknown => return Err(unknown(CURVES, &number.to_string(), &known_names)),
            }
        }
        if provider.kx_groups.is_empty() {
            return Err(unknown(CURVES, &format!("{:?}", settings.curves), &known_names));
        }
    }
    Ok(provider)
}

const SUITES: &str = "--tls-cipher-suites";
const CURVES: &str = "--tls-curve-preferences";

/// Returns the name of a suite in IANA's registry.
fn suite_name(suite: &rustls::SupportedCipherSuite) -> String {
    format!("{:?}", suite.suite())
}

fn unknown(setting: &'static str, value: &str, known: &[&str]) -> TlsError {
    TlsError::Setting { setting, value: value.to_owned(), known: known.join(", ") }
}

/// Returns the TLS configuration of a listener.
///
/// # Errors
/// Fails if a setting is invalid.
pub fn server_config(
    settings: &TlsSettings,
    serving: Arc<ServingCertificate>,
) -> Result<ServerConfig, TlsError> {
    let versions: &[&rustls::SupportedProtocolVersion] = match settings.min_version.as_str() {
        "" | "VersionTLS12" => &[&rustls::version::TLS13, &rustls::version::TLS12],
        "VersionTLS13" => &[&rustls::version::TLS13],
        other => {
            return Err(unknown("--tls-min-version", other, &["VersionTLS12", "VersionTLS13"]));
        }
    };
    let provider = Arc::new(provider(settings)?);
    let mut config = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(versions)
        .map_err(TlsError::Config)?
        .with_client_cert_verifier(quintlet_kit::tls::unverified_client_certificate(provider))
        .with_cert_resolver(serving);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// The serving certificate, which is reloaded when its files change.
#[derive(Debug)]
pub struct ServingCertificate {
    files: [PathBuf; 2],
    /// Is empty until a requested certificate is issued. Handshakes fail until then, as with a kubelet.
    now: RwLock<Option<Arc<CertifiedKey>>>,
    /// Digest of the files that were read last, whether valid or not.
    seen: Mutex<Digest>,
}

impl ServingCertificate {
    /// Loads a certificate and its key.
    ///
    /// # Errors
    /// Fails if the files cannot be read or do not belong together.
    pub fn load(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let files = [cert.to_owned(), key.to_owned()];
        // Computed before the files are read, so that a change in between is noticed later.
        let seen = Mutex::new(digest::of_files(&files));
        let now = RwLock::new(Some(Arc::new(read_pair(cert, key)?)));
        Ok(Self { files, now, seen })
    }

    /// Returns the certificate of a file that also has the key, and that may not exist yet.
    ///
    /// # Errors
    /// Fails if the file exists and is invalid.
    pub fn awaiting(path: &Path) -> Result<Self, TlsError> {
        let files = [path.to_owned(), path.to_owned()];
        let seen = Mutex::new(digest::of_files(&files));
        let now = match read_pair(path, path) {
            Err(TlsError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                tracing::info!("no serving certificate is issued yet, TLS handshakes fail until then");
                None
            }
            read => Some(Arc::new(read?)),
        };
        Ok(Self { files, now: RwLock::new(now), seen })
    }

    /// Reloads the files if they have changed. Returns whether they have. Invalid files leave the previous
    /// certificate in use.
    ///
    /// # Errors
    /// Fails as [`ServingCertificate::load`], once per change.
    pub fn refresh(&self) -> Result<bool, TlsError> {
        let found = digest::of_files(&self.files);
        if std::mem::replace(&mut *self.seen.lock(), found) == found {
            return Ok(false);
        }
        let [cert, key] = &self.files;
        *self.now.write() = Some(Arc::new(read_pair(cert, key)?));
        Ok(true)
    }
}

impl ResolvesServerCert for ServingCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.now.read().clone()
    }
}

fn read_pair(cert: &Path, key: &Path) -> Result<CertifiedKey, TlsError> {
    let chain = certificates(cert)?;
    let key = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|source| TlsError::Pem {
        path: key.to_owned(),
        what: "private key",
        source,
    })?;
    CertifiedKey::from_der(chain, key, &quintlet_kit::crypto::provider())
        .map_err(|source| TlsError::Pair { path: cert.to_owned(), source })
}

/// Returns the certificates of a PEM file, at least one.
///
/// # Errors
/// Fails if the file cannot be read or has no certificate.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bad = |source| TlsError::Pem { path: path.to_owned(), what: "certificate", source };
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    let all = all.map_err(bad)?;
    if all.is_empty() { Err(bad(rustls::pki_types::pem::Error::NoItemsFound)) } else { Ok(all) }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::File { path: path.to_owned(), source })
}

/// Returns the paths of `kubelet.crt` and `kubelet.key` in `dir`. Creates them for `host` if they are missing
/// or invalid.
///
/// The certificate is valid for a year. It is signed by a CA whose certificate is appended and whose key is
/// discarded (`cmd/kubelet/app: InitializeTLS`).
///
/// # Errors
/// Fails if they cannot be created or written.
pub fn self_signed(dir: &Path, host: &str, now: jiff::Timestamp) -> Result<(PathBuf, PathBuf), TlsError> {
    let (cert, key) = (dir.join("kubelet.crt"), dir.join("kubelet.key"));
    if read_pair(&cert, &key).is_ok() {
        return Ok((cert, key));
    }
    let (chain, private) = make(host, now).map_err(TlsError::SelfSigned)?;
    std::fs::create_dir_all(dir).map_err(|source| TlsError::File { path: dir.to_owned(), source })?;
    for (path, text, mode) in [(&key, &private, 0o600), (&cert, &chain, 0o644)] {
        quintlet_kit::atomic_file::write_durable(path, text.as_bytes(), mode)
            .map_err(|source| TlsError::File { path: path.clone(), source })?;
    }
    Ok((cert, key))
}

fn make(host: &str, now: jiff::Timestamp) -> Result<(String, String), rcgen::Error> {
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose,
    };
    const YEAR: i64 = 365 * 24 * 3600;
    let date_after = |seconds: i64| {
        let at = jiff::Timestamp::from_second(now.as_second().saturating_add(seconds)).unwrap_or(now);
        let date = at.to_zoned(jiff::tz::TimeZone::UTC);
        rcgen::date_time_ymd(i32::from(date.year()), date.month().unsigned_abs(), date.day().unsigned_abs())
    };
    let params = |name: String| {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        // Dates have no time of day: one more day on each side.
        (params.not_before, params.not_after) = (date_after(-24 * 3600), date_after(YEAR));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_self_signed_certificate_is_created_once_and_names_its_host() {
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
        let settings = TlsSettings { cipher_suites, curves: curves.to_vec(), ..TlsSettings::default() };
        let provider = provider(&settings).map_err(|e| e.to_string())?;
        let of_12 = provider.cipher_suites.iter().filter(|s| s.tls13().is_none()).map(suite_name);
        Ok((of_12.collect(), provider.kx_groups.iter().map(|kx| u16::from(kx.name())).collect()))
    }

    #[test]
    fn the_names_that_the_configuration_supports_are_those_of_rustls() {
        let (mut suites, mut groups) = left(&[], &[]).unwrap();
        suites.sort();
        groups.sort_unstable();
        assert_eq!(suites, names::SUITES);
        let known_names = |number: &u16| matches!(names::group(*number), Support::Supported(_));
        assert_eq!(groups, (0..=u16::MAX).filter(known_names).collect::<Vec<u16>>());
    }

    #[test]
    fn the_provider_has_the_configured_suites_and_groups_that_rustls_supports() {
        let gcm = "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256";
        let chacha = "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256";
        let (suites, groups) = left(&[gcm, "TLS_AES_128_GCM_SHA256"], &[24, 23]).unwrap();
        assert_eq!((suites, groups), (vec![gcm.to_owned()], vec![24, 23]));
        // A list from hardening guides, with a name from before the registry and with insecure suites.
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
    fn invalid_files_leave_the_previous_certificate_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let (cert, key) = self_signed(dir.path(), "n", jiff::Timestamp::UNIX_EPOCH).unwrap();
        let serving = ServingCertificate::load(&cert, &key).unwrap();
        let certificate = || serving.now.read().as_ref().unwrap().cert.clone();
        let before = certificate();
        std::fs::write(&cert, "rubbish").unwrap();
        assert!(serving.refresh().is_err());
        assert!(!serving.refresh().unwrap(), "reported once");
        assert_eq!(certificate(), before);
        self_signed(dir.path(), "n", jiff::Timestamp::UNIX_EPOCH).unwrap();
        assert!(serving.refresh().unwrap());
        assert_ne!(certificate(), before);
    }

    #[test]
    fn a_certificate_that_pod_sync_obtains_is_served_once_it_is_issued_and_after_each_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let issued = |host: &str| {
            let made = tempfile::tempdir().unwrap();
            let (cert, key) = self_signed(made.path(), host, jiff::Timestamp::UNIX_EPOCH).unwrap();
            let [cert, key] = [cert, key].map(|path| std::fs::read_to_string(path).unwrap());
            let path = dir.path().join(host);
            std::fs::write(&path, cert + &key).unwrap();
            path
        };
        let current = dir.path().join("kubelet-server-current.pem");
        let serving = ServingCertificate::awaiting(&current).unwrap();
        assert!(!serving.now.read().is_some() && !serving.refresh().unwrap());
        std::os::unix::fs::symlink(issued("a"), &current).unwrap();
        assert!(serving.refresh().unwrap() && serving.now.read().is_some());
        let first = serving.now.read().as_ref().unwrap().cert.clone();
        std::fs::remove_file(&current).unwrap();
        std::os::unix::fs::symlink(issued("b"), &current).unwrap();
        assert!(serving.refresh().unwrap());
        assert_ne!(serving.now.read().as_ref().unwrap().cert, first);
        assert!(ServingCertificate::awaiting(&current).unwrap().now.read().is_some());
        std::fs::write(dir.path().join("b"), "torn").unwrap();
        assert!(ServingCertificate::awaiting(&current).is_err());
    }
}
