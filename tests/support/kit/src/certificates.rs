//! A certificate authority, and certificates of clients and servers.

pub use rcgen::ExtendedKeyUsagePurpose;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair,
};

/// A certificate authority with a key of its own.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// A certificate with its key.
pub struct Identity {
    certificate: Certificate,
    key: KeyPair,
}

impl Authority {
    /// Makes an authority with a new key.
    ///
    /// # Panics
    /// The certificate cannot be made.
    #[must_use]
    pub fn new(common_name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, common_name);
        let key = new_key();
        let pem = params.self_signed(&key).expect("a CA can be made").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Returns the certificate of the authority, as PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// Makes a certificate of a user in a group. `usage` is ClientAuth, unless a test needs a certificate
    /// that is not valid for clients.
    #[must_use]
    pub fn client(&self, user: &str, group: &str, usage: ExtendedKeyUsagePurpose) -> Identity {
        self.sign(subject(CertificateParams::default(), user, group), usage)
    }

    /// Makes a certificate of a client that is valid until the begin of a year.
    #[must_use]
    pub fn client_until(&self, user: &str, group: &str, year: i32) -> Identity {
        let mut params = subject(CertificateParams::default(), user, group);
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        self.sign(params, ExtendedKeyUsagePurpose::ClientAuth)
    }

    /// Makes a certificate of a server with a DNS name.
    ///
    /// # Panics
    /// The name is not valid.
    #[must_use]
    pub fn server(&self, name: &str) -> Identity {
        let params = CertificateParams::new(vec![name.to_owned()]).expect("a DNS name");
        self.sign(params, ExtendedKeyUsagePurpose::ServerAuth)
    }

    fn sign(&self, mut params: CertificateParams, usage: ExtendedKeyUsagePurpose) -> Identity {
        params.extended_key_usages = vec![usage];
        params.use_authority_key_identifier_extension = true;
        let key = new_key();
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate can be made");
        Identity { certificate, key }
    }
}

impl Identity {
    /// Returns the certificate, as PEM.
    #[must_use]
    pub fn pem(&self) -> String {
        self.certificate.pem()
    }

    /// Returns the certificate, as DER.
    #[must_use]
    pub fn der(&self) -> rustls::pki_types::CertificateDer<'static> {
        self.certificate.der().clone()
    }

    /// Returns the key, as PEM in the form of PKCS #8.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    /// Returns the key, as DER in the form of PKCS #8.
    #[must_use]
    pub fn key_der(&self) -> rustls::pki_types::PrivateKeyDer<'static> {
        rustls::pki_types::PrivateKeyDer::Pkcs8(self.key.serialize_der().into())
    }
}

fn subject(mut params: CertificateParams, user: &str, group: &str) -> CertificateParams {
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, user);
    params.distinguished_name.push(DnType::OrganizationName, group);
    params
}

fn new_key() -> KeyPair {
    KeyPair::generate().expect("a key can be made")
}
