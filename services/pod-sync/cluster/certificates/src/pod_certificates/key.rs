//! Private keys of pods, and the requests that prove their possession
//! (`pkg/kubelet/podcertificate: generateKeyAndProof`).

use std::fmt;

use p521::elliptic_curve::sec1::ToEncodedPoint as _;
use ring::rand::{SecureRandom as _, SystemRandom};
use ring::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair, EcdsaSigningAlgorithm,
    Ed25519KeyPair, KeyPair as _, RSA_PKCS1_SHA256, RsaKeyPair,
};
use rsa::pkcs8::{EncodePrivateKey as _, EncodePublicKey as _};
use yasna::models::ObjectIdentifier;
use yasna::{Tag, construct_der};

use crate::pem_blocks;

const ED25519: &[u64] = &[1, 3, 101, 112];
const EC_PUBLIC_KEY: &[u64] = &[1, 2, 840, 10045, 2, 1];
const P256: &[u64] = &[1, 2, 840, 10045, 3, 1, 7];
const P384: &[u64] = &[1, 3, 132, 0, 34];
const P521: &[u64] = &[1, 3, 132, 0, 35];
const ECDSA_WITH_SHA256: &[u64] = &[1, 2, 840, 10045, 4, 3, 2];
const ECDSA_WITH_SHA384: &[u64] = &[1, 2, 840, 10045, 4, 3, 3];
const ECDSA_WITH_SHA512: &[u64] = &[1, 2, 840, 10045, 4, 3, 4];
const SHA256_WITH_RSA: &[u64] = &[1, 2, 840, 113_549, 1, 1, 11];

/// Length of the private key of Ed25519, in bytes.
const ED25519_SEED: usize = 32;

/// A private key as PKCS#8 in PEM. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct PrivateKey(String);

impl PrivateKey {
    fn of_der(der: &[u8]) -> Self {
        Self(pem_blocks::block("PRIVATE KEY", der.to_vec()))
    }

    /// Returns the PEM block.
    pub(super) fn expose(&self) -> &str {
        &self.0
    }

    #[cfg(test)]
    pub(super) fn fake(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey")
    }
}

/// A new private key with its request.
#[derive(Debug)]
pub(super) struct KeyAndRequest {
    pub(super) key: PrivateKey,
    /// A PKCS#10 request as DER without a subject, signed with the key.
    pub(super) request: Vec<u8>,
}

/// No key was generated.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeyError {
    #[error("unknown key type {0:?}")]
    UnknownType(String),
    #[error("failed to generate the key: {0}")]
    Generate(&'static str),
}

/// Returns the signature of a message.
type Sign = Box<dyn FnOnce(&[u8]) -> Result<Vec<u8>, KeyError>>;

/// A public key, and how its private key signs.
struct Signed {
    /// SubjectPublicKeyInfo as DER.
    public_key: Vec<u8>,
    /// AlgorithmIdentifier of signatures as DER.
    algorithm: Vec<u8>,
    sign: Sign,
}

/// Generates a key of a `keyType` of the API, and its request. Blocks the thread: a key of type RSA4096 takes
/// seconds.
pub(super) fn generate(key_type: &str) -> Result<KeyAndRequest, KeyError> {
    match key_type {
        "RSA3072" => rsa_key(3072),
        "RSA4096" => rsa_key(4096),
        "ECDSAP256" => ecdsa_key(&ECDSA_P256_SHA256_ASN1_SIGNING, P256, ECDSA_WITH_SHA256),
        "ECDSAP384" => ecdsa_key(&ECDSA_P384_SHA384_ASN1_SIGNING, P384, ECDSA_WITH_SHA384),
        "ECDSAP521" => p521_key(),
        "ED25519" => ed25519_key(),
        unknown => Err(KeyError::UnknownType(unknown.to_owned())),
    }
}

// The crate rsa generates the key and ring signs: the signatures of ring take a time that does not depend on
// the key.
fn rsa_key(bits: usize) -> Result<KeyAndRequest, KeyError> {
    let failed = || KeyError::Generate("RSA");
    let key = rsa::RsaPrivateKey::new(&mut rsa::rand_core::OsRng, bits).map_err(|_| failed())?;
    let der = key.to_pkcs8_der().map_err(|_| failed())?;
    let public_key = key.to_public_key().to_public_key_der().map_err(|_| failed())?;
    let signer = RsaKeyPair::from_pkcs8(der.as_bytes()).map_err(|_| failed())?;
    let sign = move |message: &[u8]| {
        let mut signature = vec![0; signer.public().modulus_len()];
        let signed = signer.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), message, &mut signature);
        signed.map(|()| signature).map_err(|_| failed())
    };
    let algorithm = construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_oid(&oid(SHA256_WITH_RSA));
            writer.next().write_null();
        });
    });
    finish(der.as_bytes(), Signed { public_key: public_key.into_vec(), algorithm, sign: Box::new(sign) })
}

fn ecdsa_key(
    algorithm: &'static EcdsaSigningAlgorithm,
    curve: &[u64],
    signature: &[u64],
) -> Result<KeyAndRequest, KeyError> {
    let failed = || KeyError::Generate("ECDSA");
    let random = SystemRandom::new();
    let der = EcdsaKeyPair::generate_pkcs8(algorithm, &random).map_err(|_| failed())?;
    let signer = EcdsaKeyPair::from_pkcs8(algorithm, der.as_ref(), &random).map_err(|_| failed())?;
    let public_key = ec_public_key(curve, signer.public_key().as_ref());
    let sign = move |message: &[u8]| {
        let signed = signer.sign(&random, message);
        signed.map(|signature| signature.as_ref().to_vec()).map_err(|_| failed())
    };
    finish(der.as_ref(), Signed { public_key, algorithm: bare(signature), sign: Box::new(sign) })
}

fn p521_key() -> Result<KeyAndRequest, KeyError> {
    use p521::ecdsa::signature::RandomizedSigner as _;
    use p521::pkcs8::EncodePrivateKey as _;

    let failed = || KeyError::Generate("ECDSA");
    let secret = p521::SecretKey::random(&mut rsa::rand_core::OsRng);
    let der = secret.to_pkcs8_der().map_err(|_| failed())?;
    let public_key = ec_public_key(P521, secret.public_key().to_encoded_point(false).as_bytes());
    let signer = p521::ecdsa::SigningKey::from_bytes(&secret.to_bytes()).map_err(|_| failed())?;
    let sign = move |message: &[u8]| {
        let signed = signer.try_sign_with_rng(&mut rsa::rand_core::OsRng, message);
        let signature: p521::ecdsa::Signature = signed.map_err(|_| failed())?;
        Ok(signature.to_der().as_bytes().to_vec())
    };
    finish(der.as_bytes(), Signed { public_key, algorithm: bare(ECDSA_WITH_SHA512), sign: Box::new(sign) })
}

fn ed25519_key() -> Result<KeyAndRequest, KeyError> {
    let failed = || KeyError::Generate("Ed25519");
    let mut seed = [0; ED25519_SEED];
    SystemRandom::new().fill(&mut seed).map_err(|_| failed())?;
    // Version 1 of PKCS#8, as the kubelet writes it: OpenSSL before 3 does not read version 2 of ring.
    let der = construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_u8(0);
            writer.next().write_sequence(|writer| writer.next().write_oid(&oid(ED25519)));
            writer.next().write_bytes(&construct_der(|writer| writer.write_bytes(&seed)));
        });
    });
    let signer = Ed25519KeyPair::from_pkcs8_maybe_unchecked(&der).map_err(|_| failed())?;
    let public_key = public_key_info(&bare(ED25519), signer.public_key().as_ref());
    let sign = move |message: &[u8]| Ok(signer.sign(message).as_ref().to_vec());
    finish(&der, Signed { public_key, algorithm: bare(ED25519), sign: Box::new(sign) })
}

fn finish(der: &[u8], signed: Signed) -> Result<KeyAndRequest, KeyError> {
    Ok(KeyAndRequest { key: PrivateKey::of_der(der), request: request(signed)? })
}

/// Returns a CertificationRequest (RFC 2986) without a subject and attributes.
fn request(signed: Signed) -> Result<Vec<u8>, KeyError> {
    let info = construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_u8(0);
            writer.next().write_sequence(|_| {});
            writer.next().write_der(&signed.public_key);
            writer.next().write_tagged_implicit(Tag::context(0), |writer| writer.write_set(|_| {}));
        });
    });
    let signature = (signed.sign)(&info)?;
    Ok(construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_der(&info);
            writer.next().write_der(&signed.algorithm);
            write_bits(writer.next(), &signature);
        });
    }))
}

fn ec_public_key(curve: &[u64], point: &[u8]) -> Vec<u8> {
    let algorithm = construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_oid(&oid(EC_PUBLIC_KEY));
            writer.next().write_oid(&oid(curve));
        });
    });
    public_key_info(&algorithm, point)
}

fn public_key_info(algorithm: &[u8], key: &[u8]) -> Vec<u8> {
    construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_der(algorithm);
            write_bits(writer.next(), key);
        });
    })
}

fn write_bits(writer: yasna::DERWriter<'_>, bytes: &[u8]) {
    writer.write_bitvec_bytes(bytes, bytes.len().saturating_mul(8));
}

/// Returns an AlgorithmIdentifier without parameters.
fn bare(algorithm: &[u64]) -> Vec<u8> {
    construct_der(|writer| writer.write_sequence(|writer| writer.next().write_oid(&oid(algorithm))))
}

fn oid(components: &[u64]) -> ObjectIdentifier {
    ObjectIdentifier::from_slice(components)
}

#[cfg(test)]
mod tests {
    use p521::ecdsa::signature::Verifier as _;
    use rsa::pkcs8::DecodePrivateKey as _;
    use x509_parser::certification_request::X509CertificationRequest;
    use x509_parser::prelude::FromDer as _;

    use super::*;

    fn der_of(key: &PrivateKey) -> Vec<u8> {
        let block = pem::parse(key.expose()).unwrap();
        assert_eq!(block.tag(), "PRIVATE KEY");
        block.into_contents()
    }

    /// Returns the public key of a private key, by another path than the product's.
    fn public_key(key_type: &str, der: &[u8]) -> Vec<u8> {
        let random = SystemRandom::new();
        let ecdsa = |algorithm| {
            let pair = EcdsaKeyPair::from_pkcs8(algorithm, der, &random).unwrap();
            pair.public_key().as_ref().to_vec()
        };
        match key_type {
            "ECDSAP256" => ecdsa(&ECDSA_P256_SHA256_ASN1_SIGNING),
            "ECDSAP384" => ecdsa(&ECDSA_P384_SHA384_ASN1_SIGNING),
            "ECDSAP521" => {
                let key: p521::SecretKey = p521::pkcs8::DecodePrivateKey::from_pkcs8_der(der).unwrap();
                key.public_key().to_encoded_point(false).as_bytes().to_vec()
            }
            "ED25519" => Ed25519KeyPair::from_seed_unchecked(&der[der.len() - ED25519_SEED..])
                .unwrap()
                .public_key()
                .as_ref()
                .to_vec(),
            _ => {
                use rsa::pkcs1::EncodeRsaPublicKey as _;
                let key = rsa::RsaPrivateKey::from_pkcs8_der(der).unwrap();
                assert!(key.validate().is_ok());
                key.to_public_key().to_pkcs1_der().unwrap().into_vec()
            }
        }
    }

    #[test]
    fn each_key_type_has_a_request_without_a_subject_that_its_key_has_signed() {
        for (key_type, bits) in [
            ("ECDSAP256", 256),
            ("ECDSAP384", 384),
            ("ECDSAP521", 521),
            ("ED25519", 256),
            ("RSA3072", 3072),
            ("RSA4096", 4096),
        ] {
            let KeyAndRequest { key, request } = generate(key_type).unwrap();
            let (rest, parsed) = X509CertificationRequest::from_der(&request).unwrap();
            let info = &parsed.certification_request_info;
            assert!(rest.is_empty(), "{key_type}");
            assert_eq!((info.version.0, info.subject.iter().count(), info.attributes().len()), (0, 0, 0));
            let subject_key = &info.subject_pki;
            let of_request = subject_key.subject_public_key.data.to_vec();
            assert_eq!(of_request, public_key(key_type, &der_of(&key)), "{key_type}");
            let size = match subject_key.parsed().unwrap() {
                x509_parser::public_key::PublicKey::RSA(key) => key.key_size(),
                x509_parser::public_key::PublicKey::EC(point) => point.key_size(),
                _ => of_request.len() * 8,
            };
            assert_eq!(size.min(bits), bits, "{key_type}");
            if key_type == "ECDSAP521" {
                // ring does not verify signatures of this curve.
                let verifying = p521::ecdsa::VerifyingKey::from_sec1_bytes(&of_request).unwrap();
                let signature = p521::ecdsa::Signature::from_der(&parsed.signature_value.data).unwrap();
                verifying.verify(info.raw, &signature).unwrap();
            } else {
                parsed.verify_signature().unwrap();
            }
        }
    }

    #[test]
    fn each_key_is_another_and_none_is_printed() {
        let keys = ["ECDSAP256", "ECDSAP256", "ECDSAP521", "ECDSAP521", "ED25519", "ED25519"];
        let keys: Vec<KeyAndRequest> = keys.into_iter().map(|key_type| generate(key_type).unwrap()).collect();
        let distinct: std::collections::HashSet<&str> = keys.iter().map(|key| key.key.expose()).collect();
        assert_eq!(distinct.len(), keys.len());
        for key in keys {
            let printed = format!("{:?}", key.key);
            assert_eq!(printed, "PrivateKey");
        }
        assert_eq!(generate("RSA1024").unwrap_err().to_string(), "unknown key type \"RSA1024\"");
    }
}
