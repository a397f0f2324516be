//! Compares certificates with authorities by name and key ID. A file of another cluster of kubeadm has an
//! authority of the same name with another key. Signatures are checked where the certificates are used.

use std::collections::BTreeSet;

use x509_parser::certificate::X509Certificate;
use x509_parser::extensions::ParsedExtension;
use x509_parser::pem::Pem;

/// Name and key ID of an authority. An authority without a key ID is known by its name alone.
type Authority = (Vec<u8>, Option<Vec<u8>>);

/// The certificates of a PEM text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Certificates {
    /// The certificates themselves, as authorities.
    own: BTreeSet<Authority>,
    /// The authorities that issued them.
    issuers: BTreeSet<Authority>,
}

/// A text has no valid certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("has no valid certificate in PEM")]
pub(super) struct NoCertificate;

impl Certificates {
    /// Parses all certificates of a PEM text. Other blocks, such as keys, are skipped.
    pub(super) fn parse(pem: &[u8]) -> Result<Self, NoCertificate> {
        let mut found = Self::default();
        for block in Pem::iter_from_buffer(pem) {
            let block = block.map_err(|_| NoCertificate)?;
            if block.label == "CERTIFICATE" {
                let (_, certificate) =
                    x509_parser::parse_x509_certificate(&block.contents).map_err(|_| NoCertificate)?;
                found.own.insert((certificate.subject().as_raw().to_vec(), own_key(&certificate)));
                found.issuers.insert((certificate.issuer().as_raw().to_vec(), issuer_key(&certificate)));
            }
        }
        if found.own.is_empty() { Err(NoCertificate) } else { Ok(found) }
    }

    /// Returns whether both have a certificate in common.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.own.iter().any(|authority| other.own.contains(authority))
    }

    /// Returns whether one of `authorities` issued a certificate of these.
    pub(super) fn is_issued_by(&self, authorities: &Self) -> bool {
        let same_key = |one: &Option<Vec<u8>>, two: &Option<Vec<u8>>| match (one, two) {
            (Some(one), Some(two)) => one == two,
            (None, _) | (_, None) => true,
        };
        self.issuers.iter().any(|(name, key)| {
            authorities.own.iter().any(|(subject, own)| name == subject && same_key(key, own))
        })
    }
}

fn own_key(certificate: &X509Certificate<'_>) -> Option<Vec<u8>> {
    certificate.iter_extensions().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
        _ => None,
    })
}

fn issuer_key(certificate: &X509Certificate<'_>) -> Option<Vec<u8>> {
    certificate.iter_extensions().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::AuthorityKeyIdentifier(id) => id.key_identifier.as_ref().map(|id| id.0.to_vec()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use quintlet_testkit::certificates::{Authority, ExtendedKeyUsagePurpose};

    use super::*;

    /// Returns an authority of this name with a new key, and the certificate of a client of it.
    fn cluster(name: &str) -> (String, String) {
        let authority = Authority::new(name);
        let client = authority.client("node", "nodes", ExtendedKeyUsagePurpose::ClientAuth);
        (authority.pem().to_owned(), client.pem())
    }

    #[test]
    fn authorities_of_one_name_are_distinguished_by_their_keys() {
        let parse = |pem: &str| Certificates::parse(pem.as_bytes()).unwrap();
        let ((one, client), (other, _)) = (cluster("kubernetes"), cluster("kubernetes"));
        assert!(parse(&client).is_issued_by(&parse(&one)) && !parse(&client).is_issued_by(&parse(&other)));
        assert!(parse(&one).overlaps(&parse(&one)) && !parse(&one).overlaps(&parse(&other)));
        let both = parse(&[other, one.clone()].concat());
        assert!(both.overlaps(&parse(&one)), "an authority that is being replaced");
        assert!(parse(&client).is_issued_by(&both));
        for empty in ["", "text", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            assert_eq!(Certificates::parse(empty.as_bytes()), Err(NoCertificate));
        }
    }
}
