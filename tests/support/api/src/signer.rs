//! A signer of CertificateSigningRequests that signs, denies, stalls, or signs what was not requested.

use std::collections::VecDeque;
use std::time::Duration;

use base64::Engine as _;
use parking_lot::Mutex;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair, PublicKeyData,
    SanType, SignatureAlgorithm,
};
use serde_json::{Value, json};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::FromDer as _;
use x509_parser::x509::AttributeTypeAndValue;

use crate::TestApi;

const PLURAL: &str = "certificatesigningrequests";

/// The answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignerAnswer {
    /// Approves and signs.
    Sign,
    /// Denies, with the message `not today`.
    Deny,
    /// Approves, and fails to sign.
    Fail,
    /// Approves, and never signs.
    Stall,
    /// Signs for the node `other`.
    WrongName,
    /// Signs another key.
    WrongKey,
    /// Signs with a text that is no certificate.
    Rubbish,
}

/// A signer with a CA of its own.
pub struct TestSigner {
    issuer: Issuer<'static, KeyPair>,
    ca: String,
    /// Answers to the next requests; all others are signed.
    answers: Mutex<VecDeque<SignerAnswer>>,
}

impl Default for TestSigner {
    fn default() -> Self {
        Self::new()
    }
}

impl TestSigner {
    /// Returns a signer with a new CA.
    ///
    /// # Panics
    /// The CA cannot be made.
    #[must_use]
    pub fn new() -> Self {
        let key = KeyPair::generate().expect("a key can be generated");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = params.self_signed(&key).expect("a CA can be made").pem();
        Self { issuer: Issuer::new(params, key), ca, answers: Mutex::default() }
    }

    /// Returns the certificate of the CA as PEM.
    #[must_use]
    pub fn ca(&self) -> &str {
        &self.ca
    }

    /// Adds answers to the next requests.
    pub fn script(&self, answers: &[SignerAnswer]) {
        self.answers.lock().extend(answers);
    }

    /// Answers all requests without an answer, with certificates that begin at `start` and live for `life`.
    /// Returns their names.
    ///
    /// # Panics
    /// A request cannot be parsed.
    pub fn answer_all(&self, api: &TestApi, start: jiff::Timestamp, life: Duration) -> Vec<String> {
        let open = |request: &Value| request["status"]["conditions"].as_array().is_none_or(Vec::is_empty);
        let mut answered = Vec::new();
        for request in api.list(PLURAL).into_iter().filter(open) {
            let name = request["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            let answer = self.answers.lock().pop_front().unwrap_or(SignerAnswer::Sign);
            let condition = |kind: &str| json!({"type": kind, "status": "True", "reason": "Because", "message": "not today"});
            let (kinds, certificate) = match answer {
                SignerAnswer::Deny => (&["Denied"][..], None),
                SignerAnswer::Fail => (&["Approved", "Failed"][..], None),
                SignerAnswer::Stall => (&["Approved"][..], None),
                SignerAnswer::Rubbish => (&["Approved"][..], Some("rubbish".to_owned())),
                SignerAnswer::Sign | SignerAnswer::WrongName | SignerAnswer::WrongKey => {
                    (&["Approved"][..], Some(self.sign(&request, answer, start, life)))
                }
            };
            let change = |object: &mut Value| {
                object["status"]["conditions"] = kinds.iter().map(|kind| condition(kind)).collect();
                if let Some(text) = &certificate {
                    object["status"]["certificate"] =
                        json!(base64::engine::general_purpose::STANDARD.encode(text));
                }
            };
            api.edit(&format!("{PLURAL}/status"), "", &name, change).expect("the request exists");
            answered.push(name);
        }
        answered
    }

    fn sign(&self, request: &Value, answer: SignerAnswer, start: jiff::Timestamp, life: Duration) -> String {
        let encoded = request["spec"]["request"].as_str().expect("a request has its content");
        let pem = base64::engine::general_purpose::STANDARD.decode(encoded).expect("it is base64");
        let der = x509_parser::pem::parse_x509_pem(&pem).expect("it is PEM").1.contents;
        let (_, parsed) = X509CertificationRequest::from_der(&der).expect("it is a request");
        let info = &parsed.certification_request_info;
        let subject = &info.subject;
        let text = |name: Option<&AttributeTypeAndValue<'_>>| {
            name.and_then(|name| name.as_str().ok()).unwrap_or_default().to_owned()
        };
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, text(subject.iter_organization().next()));
        let common_name = if answer == SignerAnswer::WrongName {
            "system:node:other".to_owned()
        } else {
            text(subject.iter_common_name().next())
        };
        params.distinguished_name.push(DnType::CommonName, common_name);
        for extension in parsed.requested_extensions().into_iter().flatten() {
            if let ParsedExtension::SubjectAlternativeName(names) = extension {
                params.subject_alt_names.extend(names.general_names.iter().filter_map(san));
            }
        }
        let epoch = rcgen::date_time_ymd(1970, 1, 1);
        params.not_before = epoch + Duration::from_secs(start.as_second().unsigned_abs());
        params.not_after = params.not_before + life;
        let key = if answer == SignerAnswer::WrongKey {
            KeyPair::generate().expect("a key can be generated").public_key_raw().to_vec()
        } else {
            info.subject_pki.subject_public_key.data.to_vec()
        };
        let signed = params.signed_by(&RequestedKey(key), &self.issuer).expect("the CA can sign");
        signed.pem() + &self.ca
    }
}

fn san(name: &GeneralName<'_>) -> Option<SanType> {
    match name {
        GeneralName::DNSName(name) => Some(SanType::DnsName((*name).try_into().ok()?)),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).map(std::net::IpAddr::from);
            let ip = v4.or_else(|_| <[u8; 16]>::try_from(*bytes).map(std::net::IpAddr::from)).ok()?;
            Some(SanType::IpAddress(ip))
        }
        _ => None,
    }
}

/// A public key of ECDSA P-256, as bits.
struct RequestedKey(Vec<u8>);

impl PublicKeyData for RequestedKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}
