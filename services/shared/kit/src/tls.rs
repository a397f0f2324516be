//! TLS without verification of certificates: for probes and lifecycle hooks, as in the kubelet, and for
//! servers that decide about a client certificate after the handshake.

mod client_certificate;

use std::sync::Arc;

use rsa::pkcs1::DecodeRsaPublicKey as _;
use rsa::sha2::{Sha256, Sha384, Sha512};
use rsa::signature::Verifier;
use rsa::traits::PublicKeyParts as _;
use rsa::{RsaPublicKey, pkcs1v15, pss};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, PeerMisbehaved, SignatureScheme};
use webpki::RawPublicKeyEntity;
use x509_parser::prelude::{FromDer as _, X509Certificate};
use x509_parser::public_key::PublicKey;
use x509_parser::x509::SubjectPublicKeyInfo;

pub use client_certificate::unverified_client_certificate;

/// Returns a client configuration that accepts any certificate, as Go's `InsecureSkipVerify`: name, validity
/// and issuer are not checked, but the server must hold the certificate's key. The caller sets the
/// application protocols.
#[must_use]
pub fn unverified() -> ClientConfig {
    let provider = Arc::new(crate::crypto::provider());
    ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("ring has suites for TLS 1.2 and 1.3")
        .dangerous()
        .with_custom_certificate_verifier(unverified_certificate())
        .with_no_client_auth()
}

/// Returns the certificate verifier of [`unverified`], for clients that are configured separately.
#[must_use]
pub fn unverified_certificate() -> Arc<dyn ServerCertVerifier> {
    Arc::new(Unverified(crate::crypto::provider()))
}

#[derive(Debug)]
struct Unverified(CryptoProvider);

impl Unverified {
    /// Verifies a handshake signature with the certificate's key only. rustls' own check requires a version 3
    /// certificate; Go also accepts version 1, which appliances and `openssl x509` still create.
    fn check(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let (_, parsed) =
            X509Certificate::from_der(cert).map_err(|_| Error::from(CertificateError::BadEncoding))?;
        let mapping = self.0.signature_verification_algorithms.mapping;
        let (_, algorithms) = mapping
            .iter()
            .find(|(scheme, _)| *scheme == dss.scheme)
            .ok_or(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme)?;
        let is_right = match short_rsa(parsed.public_key()) {
            Some(key) => is_signed(&key, message, dss),
            None => {
                let key = SubjectPublicKeyInfoDer::from(parsed.public_key().raw);
                let key = RawPublicKeyEntity::try_from(&key)
                    .map_err(|_| Error::from(CertificateError::BadEncoding))?;
                // A TLS 1.2 signature scheme covers several curves; the key has one of them.
                algorithms.iter().any(|a| key.verify_signature(*a, message, dss.signature()).is_ok())
            }
        };
        match is_right {
            true => Ok(HandshakeSignatureValid::assertion()),
            false => Err(CertificateError::BadSignature.into()),
        }
    }
}

/// Lengths in bits of the RSA keys that Go accepts and ring does not.
const SHORT_RSA_BITS: std::ops::Range<usize> = 1024..2048;

/// Returns the key if it is an RSA key that is too short for ring.
fn short_rsa(key: &SubjectPublicKeyInfo<'_>) -> Option<RsaPublicKey> {
    if !matches!(key.parsed(), Ok(PublicKey::RSA(_))) {
        return None;
    }
    let key = RsaPublicKey::from_pkcs1_der(&key.subject_public_key.data).ok()?;
    SHORT_RSA_BITS.contains(&key.n().bits()).then_some(key)
}

/// Returns whether a handshake message was signed with this key by its signature scheme.
fn is_signed(key: &RsaPublicKey, message: &[u8], dss: &DigitallySignedStruct) -> bool {
    use SignatureScheme as S;
    let key = key.clone();
    match dss.scheme {
        S::RSA_PKCS1_SHA256 => verifies(&pkcs1v15::VerifyingKey::<Sha256>::new(key), message, dss),
        S::RSA_PKCS1_SHA384 => verifies(&pkcs1v15::VerifyingKey::<Sha384>::new(key), message, dss),
        S::RSA_PKCS1_SHA512 => verifies(&pkcs1v15::VerifyingKey::<Sha512>::new(key), message, dss),
        S::RSA_PSS_SHA256 => verifies(&pss::VerifyingKey::<Sha256>::new(key), message, dss),
        S::RSA_PSS_SHA384 => verifies(&pss::VerifyingKey::<Sha384>::new(key), message, dss),
        S::RSA_PSS_SHA512 => verifies(&pss::VerifyingKey::<Sha512>::new(key), message, dss),
        _ => false,
    }
}

fn verifies<'a, T>(key: &impl Verifier<T>, message: &[u8], dss: &'a DigitallySignedStruct) -> bool
where
    T: TryFrom<&'a [u8]>,
{
    T::try_from(dss.signature()).is_ok_and(|signature| key.verify(message, &signature).is_ok())
}

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        // TLS 1.3 does not allow PKCS #1 v1.5 or SHA-1 for handshake signatures.
        use SignatureScheme as S;
        match dss.scheme {
            S::RSA_PKCS1_SHA1
            | S::ECDSA_SHA1_Legacy
            | S::RSA_PKCS1_SHA256
            | S::RSA_PKCS1_SHA384
            | S::RSA_PKCS1_SHA512 => Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into()),
            _ => self.check(message, cert, dss),
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
pub(crate) mod handshake;

#[cfg(test)]
mod tests {
    use rsa::RsaPrivateKey;
    use rsa::pkcs1::EncodeRsaPublicKey as _;
    use rsa::rand_core::OsRng;
    use rsa::signature::{RandomizedSigner as _, SignatureEncoding as _, Signer as _};
    use rustls::crypto::ring::sign::any_supported_type;
    use rustls::pki_types::PrivateKeyDer;
    use rustls::server::{ClientHello, ResolvesServerCert};
    use rustls::sign::{CertifiedKey, Signer, SigningKey};
    use rustls::{ServerConfig, SignatureAlgorithm, SupportedProtocolVersion};

    use super::*;

    #[derive(Debug)]
    struct Serves(Arc<CertifiedKey>);

    impl ResolvesServerCert for Serves {
        fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
            Some(self.0.clone())
        }
    }

    /// Performs a handshake of `client` with a server that presents `cert` and signs with `key`.
    fn handshake(
        client: ClientConfig,
        version: &'static SupportedProtocolVersion,
        cert: &CertificateDer<'static>,
        key: &rcgen::KeyPair,
    ) -> Result<(), Error> {
        let key = any_supported_type(&PrivateKeyDer::Pkcs8(key.serialize_der().into()))?;
        handshake_with(client, version, cert, key)
    }

    fn handshake_with(
        client: ClientConfig,
        version: &'static SupportedProtocolVersion,
        cert: &CertificateDer<'static>,
        key: Arc<dyn SigningKey>,
    ) -> Result<(), Error> {
        let provider = Arc::new(crate::crypto::provider());
        let serves = Serves(Arc::new(CertifiedKey::new(vec![cert.clone()], key)));
        let server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(serves));
        handshake::perform(client, server)
    }

    fn with(verifier: Arc<dyn ServerCertVerifier>) -> ClientConfig {
        let mut config = unverified();
        config.dangerous().set_certificate_verifier(verifier);
        config
    }

    const VERSIONS: [&SupportedProtocolVersion; 2] = [&rustls::version::TLS12, &rustls::version::TLS13];

    #[test]
    fn any_certificate_is_accepted_if_the_server_holds_its_key() {
        let (key, other) = (rcgen::KeyPair::generate().unwrap(), rcgen::KeyPair::generate().unwrap());
        let mut params = rcgen::CertificateParams::new(vec!["somebody".to_owned()]).unwrap();
        params.not_after = rcgen::date_time_ymd(2001, 1, 1);
        let cert = params.self_signed(&key).unwrap().der().clone();
        for version in VERSIONS {
            assert_eq!(handshake(unverified(), version, &cert, &key), Ok(()), "{version:?}");
            let stolen = handshake(unverified(), version, &cert, &other);
            assert_eq!(stolen, Err(CertificateError::BadSignature.into()), "{version:?}");
        }
    }

    #[test]
    fn a_certificate_of_version_1_is_accepted_although_rustls_refuses_it() {
        let (key, other) = (rcgen::KeyPair::generate().unwrap(), rcgen::KeyPair::generate().unwrap());
        let made = rcgen::CertificateParams::default().self_signed(&key).unwrap();
        let mut der = made.der().to_vec();
        let version = der.windows(5).position(|w| w == [0xa0, 3, 2, 1, 2]).unwrap();
        der[version + 4] = 0;
        let cert = CertificateDer::from(der);
        let theirs = rustls::client::WebPkiServerVerifier::builder_with_provider(
            Arc::new(roots(made.der())),
            Arc::new(crate::crypto::provider()),
        );
        let theirs = theirs.build().unwrap();
        for version in VERSIONS {
            assert!(handshake(with(theirs.clone()), version, &cert, &key).is_err());
            assert_eq!(handshake(unverified(), version, &cert, &key), Ok(()), "{version:?}");
            let stolen = handshake(unverified(), version, &cert, &other);
            assert_eq!(stolen, Err(CertificateError::BadSignature.into()), "{version:?}");
        }
    }

    /// An RSA key of any length that signs with one scheme.
    #[derive(Debug, Clone)]
    struct Rsa {
        key: RsaPrivateKey,
        public: Vec<u8>,
        scheme: SignatureScheme,
    }

    impl Rsa {
        fn new(bits: usize) -> Self {
            let key = RsaPrivateKey::new(&mut OsRng, bits).unwrap();
            let public = key.to_public_key().to_pkcs1_der().unwrap().into_vec();
            Self { key, public, scheme: SignatureScheme::RSA_PKCS1_SHA256 }
        }
    }

    impl SigningKey for Rsa {
        fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
            offered.contains(&self.scheme).then(|| Box::new(self.clone()) as Box<dyn Signer>)
        }

        fn algorithm(&self) -> SignatureAlgorithm {
            SignatureAlgorithm::RSA
        }
    }

    impl Signer for Rsa {
        fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
            use SignatureScheme as S;
            let key = self.key.clone();
            Ok(match self.scheme {
                S::RSA_PKCS1_SHA256 => pkcs1v15::SigningKey::<Sha256>::new(key).sign(message).to_vec(),
                S::RSA_PKCS1_SHA384 => pkcs1v15::SigningKey::<Sha384>::new(key).sign(message).to_vec(),
                S::RSA_PKCS1_SHA512 => pkcs1v15::SigningKey::<Sha512>::new(key).sign(message).to_vec(),
                S::RSA_PSS_SHA256 => {
                    pss::SigningKey::<Sha256>::new(key).sign_with_rng(&mut OsRng, message).to_vec()
                }
                S::RSA_PSS_SHA384 => {
                    pss::SigningKey::<Sha384>::new(key).sign_with_rng(&mut OsRng, message).to_vec()
                }
                other => panic!("{other:?}"),
            })
        }

        fn scheme(&self) -> SignatureScheme {
            self.scheme
        }
    }

    impl rcgen::PublicKeyData for Rsa {
        fn der_bytes(&self) -> &[u8] {
            &self.public
        }

        fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
            &rcgen::PKCS_RSA_SHA256
        }
    }

    impl rcgen::SigningKey for Rsa {
        fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
            Signer::sign(self, message).map_err(|_| rcgen::Error::RemoteKeyError)
        }
    }

    #[test]
    fn a_short_rsa_key_is_accepted_unless_it_is_too_short_for_go() {
        use SignatureScheme as S;
        let serve = |cert: &Rsa, signs: &Rsa, version, scheme| {
            let cert = rcgen::CertificateParams::default().self_signed(cert).unwrap().der().clone();
            handshake_with(unverified(), version, &cert, Arc::new(Rsa { scheme, ..signs.clone() }))
        };
        let bad: Result<(), Error> = Err(CertificateError::BadSignature.into());
        let (tls12, tls13) = (&rustls::version::TLS12, &rustls::version::TLS13);
        let key = Rsa::new(1024);
        let other = Rsa::new(1024);
        let tiny = Rsa::new(768);
        for (version, schemes) in [
            (tls12, &[S::RSA_PKCS1_SHA256, S::RSA_PKCS1_SHA384, S::RSA_PKCS1_SHA512, S::RSA_PSS_SHA256][..]),
            (tls13, &[S::RSA_PSS_SHA256, S::RSA_PSS_SHA384]),
        ] {
            for scheme in schemes {
                assert_eq!(serve(&key, &key, version, *scheme), Ok(()), "{version:?} {scheme:?}");
                assert_eq!(serve(&key, &other, version, *scheme), bad, "{version:?} {scheme:?}");
            }
            assert_eq!(serve(&tiny, &tiny, version, S::RSA_PSS_SHA256), bad, "{version:?}");
        }
        assert!(serve(&key, &key, tls13, S::RSA_PKCS1_SHA256).is_err());
    }

    fn roots(cert: &CertificateDer<'static>) -> rustls::RootCertStore {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(cert.clone()).unwrap();
        roots
    }
}
