//! The cryptography of TLS: ring, and certificates and keys of the curve P-521, which ring lacks and Go has.

use std::sync::{Arc, LazyLock};

use p521::ecdsa::signature::RandomizedSigner as _;
use p521::ecdsa::signature::hazmat::PrehashVerifier as _;
use p521::ecdsa::{self, Signature};
use p521::pkcs8::{DecodePrivateKey as _, EncodePublicKey as _};
use rsa::rand_core::OsRng;
use rsa::sha2::{Digest as _, Sha256, Sha384, Sha512};
use rustls::crypto::{CryptoProvider, KeyProvider, WebPkiSupportedAlgorithms};
use rustls::pki_types::{
    AlgorithmIdentifier, InvalidSignature, PrivateKeyDer, SignatureVerificationAlgorithm,
    SubjectPublicKeyInfoDer, alg_id,
};
use rustls::sign::{Signer, SigningKey};
use rustls::{Error, SignatureAlgorithm, SignatureScheme};

/// Bytes of a scalar of P-521.
const SCALAR: usize = 66;

/// Returns the provider that all TLS of a process uses.
#[must_use]
pub fn provider() -> CryptoProvider {
    static ALGORITHMS: LazyLock<WebPkiSupportedAlgorithms> = LazyLock::new(|| with_p521(&ring()));
    CryptoProvider { signature_verification_algorithms: *ALGORITHMS, key_provider: &Keys, ..ring() }
}

/// Makes [`provider`] the one of libraries that take the default of the process. The first call counts.
pub fn install() {
    let _ = provider().install_default();
}

#[expect(clippy::disallowed_methods, reason = "the one place that adds to it")]
fn ring() -> CryptoProvider {
    rustls::crypto::ring::default_provider()
}

// The lists of rustls are static: this one is made once per process, and never freed.
fn with_p521(ring: &CryptoProvider) -> WebPkiSupportedAlgorithms {
    const P521: &[&dyn SignatureVerificationAlgorithm] =
        &[&Verifies(Hash::Sha256), &Verifies(Hash::Sha384), &Verifies(Hash::Sha512)];
    const P521_SHA512: &[&dyn SignatureVerificationAlgorithm] = &[&Verifies(Hash::Sha512)];
    let own = ring.signature_verification_algorithms;
    let mut mapping = own.mapping.to_vec();
    mapping.push((SignatureScheme::ECDSA_NISTP521_SHA512, P521_SHA512));
    WebPkiSupportedAlgorithms { all: [own.all, P521].concat().leak(), mapping: mapping.leak() }
}

/// The hash of a signature.
#[derive(Debug, Clone, Copy)]
enum Hash {
    Sha256,
    Sha384,
    Sha512,
}

/// Verifies signatures of keys of P-521.
#[derive(Debug)]
struct Verifies(Hash);

impl SignatureVerificationAlgorithm for Verifies {
    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        alg_id::ECDSA_P521
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        match self.0 {
            Hash::Sha256 => alg_id::ECDSA_SHA256,
            Hash::Sha384 => alg_id::ECDSA_SHA384,
            Hash::Sha512 => alg_id::ECDSA_SHA512,
        }
    }

    fn verify_signature(
        &self,
        public_key: &[u8],
        message: &[u8],
        signature: &[u8],
    ) -> Result<(), InvalidSignature> {
        let key = ecdsa::VerifyingKey::from_sec1_bytes(public_key).map_err(|_| InvalidSignature)?;
        let signature = Signature::from_der(signature).map_err(|_| InvalidSignature)?;
        let hash = match self.0 {
            Hash::Sha256 => Sha256::digest(message).to_vec(),
            Hash::Sha384 => Sha384::digest(message).to_vec(),
            Hash::Sha512 => Sha512::digest(message).to_vec(),
        };
        // The hash is a number below the order. The library refuses one of less than half the length, so it
        // gets zeros in front.
        let mut number = vec![0; SCALAR.saturating_sub(hash.len())];
        number.extend_from_slice(&hash);
        key.verify_prehash(&number, &signature).map_err(|_| InvalidSignature)
    }
}

/// Loads private keys.
#[derive(Debug)]
struct Keys;

impl KeyProvider for Keys {
    fn load_private_key(&self, der: PrivateKeyDer<'static>) -> Result<Arc<dyn SigningKey>, Error> {
        match P521Key::of_der(&der) {
            Some(key) => Ok(Arc::new(key)),
            None => ring().key_provider.load_private_key(der),
        }
    }
}

#[derive(Clone)]
struct P521Key(Arc<p521::SecretKey>);

impl P521Key {
    fn of_der(der: &PrivateKeyDer<'_>) -> Option<Self> {
        let key = match der {
            PrivateKeyDer::Pkcs8(der) => p521::SecretKey::from_pkcs8_der(der.secret_pkcs8_der()).ok(),
            PrivateKeyDer::Sec1(der) => p521::SecretKey::from_sec1_der(der.secret_sec1_der()).ok(),
            _ => None,
        };
        key.map(|key| Self(Arc::new(key)))
    }
}

impl std::fmt::Debug for P521Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("P521Key")
    }
}

impl SigningKey for P521Key {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        offered
            .contains(&SignatureScheme::ECDSA_NISTP521_SHA512)
            .then(|| Box::new(self.clone()) as Box<dyn Signer>)
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        SignatureAlgorithm::ECDSA
    }

    fn public_key(&self) -> Option<SubjectPublicKeyInfoDer<'_>> {
        let der = self.0.public_key().to_public_key_der().ok()?;
        Some(SubjectPublicKeyInfoDer::from(der.into_vec()))
    }
}

impl Signer for P521Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        let failed = |_| Error::General("failed to sign with a key of P-521".to_owned());
        let key = ecdsa::SigningKey::from_bytes(&self.0.to_bytes()).map_err(failed)?;
        let signature: Signature = key.try_sign_with_rng(&mut OsRng, message).map_err(failed)?;
        Ok(signature.to_der().as_bytes().to_vec())
    }

    fn scheme(&self) -> SignatureScheme {
        SignatureScheme::ECDSA_NISTP521_SHA512
    }
}

#[cfg(test)]
mod tests {
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateSec1KeyDer};
    use rustls::sign::{CertifiedKey, SingleCertAndKey};
    use rustls::{ClientConfig, RootCertStore, ServerConfig};

    use super::*;

    /// Made with openssl: `openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:secp521r1`, for the name
    /// `node`.
    const CERTIFICATE: &[u8] = include_bytes!("crypto/p521.crt");
    const KEY: &[u8] = include_bytes!("crypto/p521.key");

    fn certificate() -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(CERTIFICATE).unwrap()
    }

    fn key() -> P521Key {
        P521Key::of_der(&PrivateKeyDer::from_pem_slice(KEY).unwrap()).unwrap()
    }

    fn sec1(key: &P521Key) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Sec1(PrivateSec1KeyDer::from(key.0.to_sec1_der().unwrap().to_vec()))
    }

    fn other() -> P521Key {
        P521Key(Arc::new(p521::SecretKey::random(&mut OsRng)))
    }

    fn handshake(
        version: &'static rustls::SupportedProtocolVersion,
        served: CertifiedKey,
    ) -> Result<(), Error> {
        let mut roots = RootCertStore::empty();
        roots.add(certificate()).unwrap();
        let client = ClientConfig::builder_with_provider(provider().into())
            .with_protocol_versions(&[version])?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let served = SingleCertAndKey::from(served);
        let server = ServerConfig::builder_with_provider(provider().into())
            .with_protocol_versions(&[version])?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(served));
        crate::tls::handshake::perform(client, server)
    }

    #[test]
    fn certificates_of_p521_are_served_and_verified() {
        for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
            for key in [PrivateKeyDer::from_pem_slice(KEY).unwrap(), sec1(&key())] {
                let served = CertifiedKey::from_der(vec![certificate()], key, &provider()).unwrap();
                assert_eq!(handshake(version, served), Ok(()), "{version:?}");
            }
            let stolen = CertifiedKey::new(vec![certificate()], Arc::new(other()));
            assert!(handshake(version, stolen).is_err(), "{version:?}");
        }
        let without = CertifiedKey::from_der(vec![certificate()], sec1(&key()), &ring());
        assert!(without.is_err(), "ring has no P-521");
        let wrong = CertifiedKey::from_der(vec![certificate()], sec1(&other()), &provider());
        assert!(wrong.is_err(), "the key of another certificate");
    }

    #[test]
    fn a_signature_of_p521_may_have_a_shorter_hash() {
        use p521::ecdsa::signature::hazmat::RandomizedPrehashSigner as _;
        let key = ecdsa::SigningKey::from_bytes(&key().0.to_bytes()).unwrap();
        let public = ecdsa::VerifyingKey::from(&key).to_encoded_point(false);
        for (hash, digest) in
            [(Hash::Sha256, Sha256::digest(b"m").to_vec()), (Hash::Sha384, Sha384::digest(b"m").to_vec())]
        {
            let mut number = vec![0; SCALAR - digest.len()];
            number.extend(digest);
            let signed: Signature = key.sign_prehash_with_rng(&mut OsRng, &number).unwrap();
            let signed = signed.to_der();
            let verify = |message: &[u8]| {
                Verifies(hash).verify_signature(public.as_bytes(), message, signed.as_bytes())
            };
            assert!(verify(b"m").is_ok() && verify(b"n").is_err(), "{hash:?}");
        }
    }
}
