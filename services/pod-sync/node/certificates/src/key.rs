//! Private keys, requests and certificates as PEM.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use jiff::Timestamp;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, PublicKeyData as _, SanType};
use x509_parser::extensions::GeneralName;
use yasna::models::ObjectIdentifier;

use crate::decide::{CertificateFacts, WantedCertificate};

const CERTIFICATE: &str = "CERTIFICATE";
const PKCS8: &str = "PRIVATE KEY";
/// The form in which a kubelet writes keys of elliptic curves (RFC 5915).
const SEC1: &str = "EC PRIVATE KEY";
const EC_PUBLIC_KEY: &[u64] = &[1, 2, 840, 10045, 2, 1];
const P256: &[u64] = &[1, 2, 840, 10045, 3, 1, 7];

/// A key, a request or a certificate cannot be used. Never contains a key.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PemError {
    #[error("failed to parse PEM")]
    Pem(#[source] pem::PemError),
    #[error("there is no {0}")]
    Absent(&'static str),
    #[error("failed to parse the certificate: {0}")]
    Certificate(String),
    #[error("failed to use the private key")]
    Key(#[source] rcgen::Error),
    #[error("the private key does not belong to the certificate")]
    Mismatch,
    #[error("failed to make the certificate request")]
    Request(#[source] rcgen::Error),
}

/// A private key. Never printed.
pub(crate) struct NodeKey {
    pair: KeyPair,
    pem: String,
}

impl fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeKey")
    }
}

impl NodeKey {
    /// Generates a key of ECDSA P-256, as the kubelet does.
    pub(crate) fn generate() -> Result<Self, PemError> {
        let pair = KeyPair::generate().map_err(PemError::Key)?;
        let pem = pair.serialize_pem();
        Ok(Self { pair, pem })
    }

    /// Reads the first key of a PEM file: PKCS#8, or the form of RFC 5915 with P-256.
    pub(crate) fn parse(text: &str) -> Result<Self, PemError> {
        let blocks = pem::parse_many(text).map_err(PemError::Pem)?;
        let block = blocks.iter().find(|block| [PKCS8, SEC1].contains(&block.tag()));
        let block = block.ok_or(PemError::Absent("private key"))?;
        let der = match block.tag() {
            SEC1 => pkcs8_of(block.contents()),
            _ => block.contents().to_vec(),
        };
        let pair = KeyPair::try_from(der).map_err(PemError::Key)?;
        Ok(Self { pair, pem: pem::encode_config(block, line_ends()) })
    }

    /// Returns the PEM block.
    pub(crate) fn expose(&self) -> &str {
        &self.pem
    }

    pub(crate) fn is_rsa(&self) -> bool {
        self.pair.algorithm() == &rcgen::PKCS_RSA_SHA256
    }

    /// Returns the bits of the public key, as [`CertificateFacts::public_key`].
    pub(crate) fn public_key(&self) -> &[u8] {
        self.pair.der_bytes()
    }

    /// Returns the SubjectPublicKeyInfo as DER.
    pub(crate) fn public_key_info(&self) -> Vec<u8> {
        self.pair.subject_public_key_info()
    }

    /// Returns a request as PEM that this key has signed.
    pub(crate) fn request(&self, wanted: &WantedCertificate) -> Result<String, PemError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, wanted.organization());
        params.distinguished_name.push(DnType::CommonName, wanted.common_name.as_str());
        let names = wanted
            .dns_names
            .iter()
            .map(|name| name.as_str().try_into().map(SanType::DnsName).map_err(PemError::Request));
        let ips = wanted.ips.iter().map(|ip| Ok(SanType::IpAddress(*ip)));
        params.subject_alt_names = names.chain(ips).collect::<Result<_, _>>()?;
        let request = params.serialize_request(&self.pair).map_err(PemError::Request)?;
        request.pem().map_err(PemError::Request)
    }
}

fn line_ends() -> pem::EncodeConfig {
    pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF)
}

/// Wraps a key of RFC 5915 with the curve P-256 as PKCS#8.
fn pkcs8_of(sec1: &[u8]) -> Vec<u8> {
    yasna::construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_u8(0);
            writer.next().write_sequence(|writer| {
                writer.next().write_oid(&ObjectIdentifier::from_slice(EC_PUBLIC_KEY));
                writer.next().write_oid(&ObjectIdentifier::from_slice(P256));
            });
            writer.next().write_bytes(sec1);
        });
    })
}

/// Returns the certificates of a PEM text, without keys.
pub(crate) fn chain_of(text: &str) -> Result<String, PemError> {
    let blocks = pem::parse_many(text).map_err(PemError::Pem)?;
    let chain: Vec<pem::Pem> = blocks.into_iter().filter(|block| block.tag() == CERTIFICATE).collect();
    if chain.is_empty() {
        return Err(PemError::Absent("certificate"));
    }
    Ok(pem::encode_many_config(&chain, line_ends()))
}

/// Returns the facts of the first certificate of a PEM text. The chain ends with the certificate that expires
/// first.
pub(crate) fn facts_of(text: &str) -> Result<CertificateFacts, PemError> {
    let blocks = pem::parse_many(text).map_err(PemError::Pem)?;
    let mut leaf = None::<CertificateFacts>;
    for block in blocks.iter().filter(|block| block.tag() == CERTIFICATE) {
        let facts = facts_of_der(block.contents())?;
        leaf = Some(match leaf {
            None => facts,
            Some(leaf) => CertificateFacts { not_after: leaf.not_after.min(facts.not_after), ..leaf },
        });
    }
    leaf.ok_or(PemError::Absent("certificate"))
}

fn facts_of_der(der: &[u8]) -> Result<CertificateFacts, PemError> {
    let failed = |error: &dyn fmt::Display| PemError::Certificate(error.to_string());
    let (_, parsed) = x509_parser::parse_x509_certificate(der).map_err(|error| failed(&error))?;
    let time = |seconds: i64| Timestamp::from_second(seconds).map_err(|error| failed(&error));
    let subject = parsed.subject();
    let text = |value: &x509_parser::x509::AttributeTypeAndValue<'_>| {
        value.as_str().map(str::to_owned).unwrap_or_default()
    };
    let (mut dns_names, mut ips) = (BTreeSet::new(), BTreeSet::new());
    if let Some(names) = parsed.subject_alternative_name().map_err(|error| failed(&error))? {
        for name in &names.value.general_names {
            match name {
                GeneralName::DNSName(name) => {
                    dns_names.insert((*name).to_owned());
                }
                GeneralName::IPAddress(bytes) => ips.extend(ip_of(bytes)),
                _ => {}
            }
        }
    }
    Ok(CertificateFacts {
        not_before: time(parsed.validity().not_before.timestamp())?,
        not_after: time(parsed.validity().not_after.timestamp())?,
        common_name: subject.iter_common_name().next().map(text).unwrap_or_default(),
        organizations: subject.iter_organization().map(text).collect(),
        dns_names,
        ips,
        public_key: parsed.public_key().subject_public_key.data.to_vec(),
    })
}

fn ip_of(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// Returns the facts of a certificate whose key is `key`.
pub(crate) fn facts_of_pair(chain: &str, key: &str) -> Result<CertificateFacts, PemError> {
    let facts = facts_of(chain)?;
    if NodeKey::parse(key)?.public_key() == facts.public_key { Ok(facts) } else { Err(PemError::Mismatch) }
}

#[cfg(test)]
mod tests {
    use super::*;

    // openssl ecparam -name prime256v1 -genkey -noout: what Go's x509.MarshalECPrivateKey writes.
    const SEC1_KEY: &str = include_str!("sec1.key");

    #[test]
    fn keys_of_a_kubelet_and_own_keys_are_read_and_none_is_printed() {
        let own = NodeKey::generate().unwrap();
        let read = NodeKey::parse(own.expose()).unwrap();
        assert_eq!(read.public_key(), own.public_key());
        assert_eq!(read.expose(), own.expose());
        assert_eq!(format!("{own:?}"), "NodeKey");
        let kubelets = NodeKey::parse(SEC1_KEY).unwrap();
        assert_eq!((kubelets.public_key().len(), kubelets.is_rsa()), (65, false));
        assert!(kubelets.expose().starts_with("-----BEGIN EC PRIVATE KEY-----\n"), "kept as it is");
        for bad in ["", "text", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"] {
            assert!(NodeKey::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_request_has_the_subject_and_the_names_and_no_more() {
        use x509_parser::certification_request::X509CertificationRequest;
        use x509_parser::prelude::FromDer as _;

        let key = NodeKey::parse(SEC1_KEY).unwrap();
        let mut wanted = WantedCertificate::client("n1");
        for (names, ips) in [(0, 0), (2, 2)] {
            if names > 0 {
                wanted.dns_names = ["a".to_owned(), "b.example".to_owned()].into();
                wanted.ips = ["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()].into();
            }
            let der = pem::parse(key.request(&wanted).unwrap()).unwrap().into_contents();
            let (_, request) = X509CertificationRequest::from_der(&der).unwrap();
            let info = &request.certification_request_info;
            assert_eq!(info.subject.to_string(), "O=system:nodes, CN=system:node:n1");
            assert_eq!(info.subject_pki.subject_public_key.data.as_ref(), key.public_key());
            let found =
                request.requested_extensions().into_iter().flatten().flat_map(|extension| match extension {
                    x509_parser::extensions::ParsedExtension::SubjectAlternativeName(names) => {
                        names.general_names.clone()
                    }
                    other => panic!("{other:?}"),
                });
            assert_eq!(found.count(), names + ips);
        }
        let odd = WantedCertificate { dns_names: ["ü".to_owned()].into(), ..wanted };
        assert!(key.request(&odd).is_err());
    }

    #[test]
    fn the_facts_of_a_certificate_are_those_of_its_leaf_and_of_the_earliest_end() {
        let key = NodeKey::generate().unwrap();
        let pem_of = |year, names: &[&str]| {
            let mut params =
                CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
                    .unwrap();
            params.distinguished_name = DistinguishedName::new();
            params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
            params.distinguished_name.push(DnType::CommonName, "system:node:n1");
            params.not_before = rcgen::date_time_ymd(2025, 1, 1);
            params.not_after = rcgen::date_time_ymd(year, 1, 1);
            params.self_signed(&key.pair).unwrap().pem()
        };
        let leaf = pem_of(2030, &["n1", "10.0.0.1", "fd00::1"]);
        let chain = format!("{leaf}{}{}", key.expose(), pem_of(2028, &[]));
        let facts = facts_of_pair(&chain, key.expose()).unwrap();
        assert_eq!(facts.common_name, "system:node:n1");
        assert_eq!(facts.organizations, ["system:nodes".to_owned()].into());
        assert_eq!(facts.dns_names, ["n1".to_owned()].into());
        assert_eq!(facts.ips, ["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()].into());
        assert_eq!(facts.not_before, "2025-01-01T00:00:00Z".parse().unwrap());
        assert_eq!(facts.not_after, "2028-01-01T00:00:00Z".parse().unwrap());
        assert!(!chain_of(&chain).unwrap().contains("PRIVATE KEY"));
        let other = NodeKey::generate().unwrap();
        assert!(matches!(facts_of_pair(&leaf, other.expose()), Err(PemError::Mismatch)));
        assert!(matches!(facts_of(key.expose()), Err(PemError::Absent(_))));
        assert!(facts_of("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").is_err());
    }
}
