//! What to do about a certificate: when to request another one, with which names and usages, and what an
//! answer means.

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1::CertificateSigningRequestStatus;
use k8s_openapi::api::core::v1::NodeAddress;
use sha2::{Digest as _, Sha512_256};

/// Group of all nodes.
const NODES_GROUP: &str = "system:nodes";
/// Prefix of the user name of a node.
const NODE_USER: &str = "system:node:";

/// The parts of a certificate that decide about its use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Start of the validity.
    pub not_before: Timestamp,
    /// End of the validity, the earliest of the chain.
    pub not_after: Timestamp,
    /// Common name of the subject.
    pub common_name: String,
    /// Organizations of the subject.
    pub organizations: BTreeSet<String>,
    /// Sorted names of the extension for alternative names.
    pub dns_names: BTreeSet<String>,
    /// Addresses of the extension for alternative names; a client certificate has none.
    pub ips: BTreeSet<IpAddr>,
    /// Bits of the public key.
    pub public_key: Vec<u8>,
}

/// The two certificates of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CertificatePurpose {
    /// Identifies the node to the API server.
    Client,
    /// Identifies the node API to its clients.
    Serving,
}

impl CertificatePurpose {
    /// Returns the prefix of the names of files, as in the kubelet.
    #[must_use]
    pub fn file_prefix(self) -> &'static str {
        match self {
            Self::Client => "kubelet-client",
            Self::Serving => "kubelet-server",
        }
    }

    /// Returns the signer of the API server.
    #[must_use]
    pub fn signer(self) -> &'static str {
        match self {
            Self::Client => "kubernetes.io/kube-apiserver-client-kubelet",
            Self::Serving => "kubernetes.io/kubelet-serving",
        }
    }

    /// Returns the usages to request. Only a key of RSA encrypts others (`DefaultKubeletClientGetUsages`).
    #[must_use]
    pub fn usages(self, is_rsa: bool) -> Vec<String> {
        let purpose = match self {
            Self::Client => "client auth",
            Self::Serving => "server auth",
        };
        // In the order of the kubelet: the name of the request depends on it.
        let rsa = is_rsa.then_some("key encipherment");
        let usages = match self {
            Self::Client => ["digital signature", purpose].into_iter().chain(rsa).collect::<Vec<_>>(),
            Self::Serving => rsa.into_iter().chain(["digital signature", purpose]).collect::<Vec<_>>(),
        };
        usages.into_iter().map(str::to_owned).collect()
    }
}

/// The subject and the names that a certificate has to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedCertificate {
    /// Common name of the subject.
    pub common_name: String,
    /// Sorted names of the extension for alternative names.
    pub dns_names: BTreeSet<String>,
    /// Addresses of the extension for alternative names; a client certificate has none.
    pub ips: BTreeSet<IpAddr>,
}

impl WantedCertificate {
    /// Returns the names of the client certificate of a node.
    #[must_use]
    pub fn client(node: &str) -> Self {
        Self { common_name: format!("{NODE_USER}{node}"), dns_names: BTreeSet::new(), ips: BTreeSet::new() }
    }

    /// Returns the names of the serving certificate of a node, or none while it has no IP address
    /// (`pkg/kubelet/certificate: newGetTemplateFn, addressesToHostnamesAndIPs`).
    #[must_use]
    pub fn serving(node: &str, addresses: &[NodeAddress]) -> Option<Self> {
        let mut wanted = Self::client(node);
        for NodeAddress { type_, address } in addresses.iter().filter(|listed| !listed.address.is_empty()) {
            match (type_.as_str(), address.parse::<IpAddr>()) {
                ("Hostname" | "InternalIP" | "ExternalIP", Ok(ip)) => {
                    wanted.ips.insert(ip);
                }
                ("Hostname", Err(_)) | ("InternalDNS" | "ExternalDNS", _) => {
                    wanted.dns_names.insert(address.clone());
                }
                _ => {}
            }
        }
        (!wanted.ips.is_empty()).then_some(wanted)
    }

    /// Returns the organization of the subject.
    #[must_use]
    pub fn organization(&self) -> &'static str {
        NODES_GROUP
    }

    /// Returns what a certificate lacks. Further names of the certificate do not matter
    /// (`certSatisfiesTemplateLocked`).
    #[must_use]
    pub fn first_lack(&self, facts: &CertificateFacts) -> Option<Lack> {
        if facts.common_name != self.common_name {
            return Some(Lack::CommonName(facts.common_name.clone()));
        }
        if !facts.organizations.contains(NODES_GROUP) {
            return Some(Lack::Organization);
        }
        let names: Vec<String> = self
            .dns_names
            .difference(&facts.dns_names)
            .cloned()
            .chain(self.ips.difference(&facts.ips).map(IpAddr::to_string))
            .collect();
        (!names.is_empty()).then_some(Lack::Names(names))
    }
}

/// A part that a certificate lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lack {
    /// The subject is this one.
    CommonName(String),
    /// The subject is not in the group of nodes.
    Organization,
    /// These names and addresses are missing.
    Names(Vec<String>),
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CommonName(name) => write!(f, "the certificate is for {name:?}"),
            Self::Organization => write!(f, "the certificate is not in the organization {NODES_GROUP:?}"),
            Self::Names(names) => write!(f, "the certificate lacks {}", names.join(", ")),
        }
    }
}

/// The reason of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestReason {
    /// There is no certificate.
    Missing,
    /// The certificate has expired.
    Expired,
    /// The certificate lacks a name.
    Lacks(Lack),
    /// The certificate has reached its age for a rotation.
    Due,
}

impl fmt::Display for RequestReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => f.write_str("there is no certificate"),
            Self::Expired => f.write_str("the certificate has expired"),
            Self::Lacks(lack) => lack.fmt(f),
            Self::Due => f.write_str("the certificate is due for rotation"),
        }
    }
}

/// The next work for a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CertificateWork {
    /// The names are unknown: the node has no address yet.
    AwaitNames,
    /// The certificate is good until this time.
    WaitUntil(Timestamp),
    /// Another certificate is necessary now.
    Request(RequestReason),
}

/// Returns the next work for a certificate. It is rotated after `share` of its life, between 0.7 and 0.9 in
/// the kubelet (`nextRotationDeadline`, `jitteryDuration`).
#[must_use]
pub fn next_work(
    current: Option<&CertificateFacts>,
    wanted: Option<&WantedCertificate>,
    now: Timestamp,
    share: f64,
) -> CertificateWork {
    let Some(wanted) = wanted else { return CertificateWork::AwaitNames };
    let Some(facts) = current else { return CertificateWork::Request(RequestReason::Missing) };
    if is_expired(facts, now) {
        return CertificateWork::Request(RequestReason::Expired);
    }
    if let Some(lack) = wanted.first_lack(facts) {
        return CertificateWork::Request(RequestReason::Lacks(lack));
    }
    let deadline = rotation_time(facts, share);
    if now >= deadline {
        CertificateWork::Request(RequestReason::Due)
    } else {
        CertificateWork::WaitUntil(deadline)
    }
}

/// Returns the time after `share` of the life of a certificate.
#[must_use]
pub fn rotation_time(facts: &CertificateFacts, share: f64) -> Timestamp {
    let life = facts.not_after.duration_since(facts.not_before).as_secs_f64();
    let age = SignedDuration::try_from_secs_f64(life * share).unwrap_or(SignedDuration::ZERO);
    facts.not_before.saturating_add(age).unwrap_or(facts.not_after)
}

/// Returns whether a certificate has expired.
#[must_use]
pub fn is_expired(facts: &CertificateFacts, now: Timestamp) -> bool {
    now > facts.not_after
}

/// The credential of a kubeconfig.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KubeconfigCredential {
    /// There is no file.
    NoFile,
    /// The file or a file that it names cannot be used.
    Unusable(String),
    /// A client certificate with its key.
    Certificate(Box<CertificateFacts>),
    /// A token, a plugin or no credential at all.
    Other,
}

/// The facts that decide about the client certificate.
#[derive(Debug, Clone)]
pub struct ClientFacts {
    /// The credential of the kubeconfig.
    pub kubeconfig: KubeconfigCredential,
    /// The certificate in the directory of certificates.
    pub stored: Option<CertificateFacts>,
    /// There is a bootstrap kubeconfig.
    pub has_bootstrap: bool,
    /// Whether a certificate that is due is requested again: the field `rotateCertificates`.
    pub rotates: bool,
}

/// The next work for the client certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientWork {
    /// The credential is good. The time is that of the next decision.
    WaitUntil(Timestamp),
    /// The certificate in the directory is good, and the kubeconfig does not name it: a kubeconfig is
    /// written.
    WriteKubeconfig,
    /// The certificate in the directory is good, and the one in the kubeconfig has expired: a kubelet has
    /// rotated it. The kubeconfig is changed.
    UseStored,
    /// A certificate is requested with the credential of the bootstrap kubeconfig.
    Bootstrap(RequestReason),
    /// A certificate is requested with the current one.
    Rotate(RequestReason),
    /// The credential cannot be used, and nothing can replace it.
    Stuck(String),
    /// The kubeconfig has no certificate: there is nothing to rotate.
    NotOurs,
}

/// Returns the next work for the client certificate
/// (`pkg/kubelet/certificate/bootstrap: LoadClientConfig, isClientConfigStillValid`).
#[must_use]
pub fn client_work(
    facts: &ClientFacts,
    wanted: &WantedCertificate,
    now: Timestamp,
    share: f64,
) -> ClientWork {
    let unusable = match &facts.kubeconfig {
        KubeconfigCredential::Certificate(current) if !is_expired(current, now) => {
            if !facts.rotates {
                return ClientWork::WaitUntil(current.not_after);
            }
            return match next_work(Some(current), Some(wanted), now, share) {
                CertificateWork::WaitUntil(deadline) => ClientWork::WaitUntil(deadline),
                CertificateWork::Request(reason) => ClientWork::Rotate(reason),
                CertificateWork::AwaitNames => ClientWork::WaitUntil(now),
            };
        }
        // A kubelet without a bootstrap kubeconfig uses any credential.
        KubeconfigCredential::Other if !facts.has_bootstrap => return ClientWork::NotOurs,
        KubeconfigCredential::Other => "the kubeconfig has no client certificate".to_owned(),
        KubeconfigCredential::Certificate(current) => {
            format!("the client certificate expired at {}", current.not_after)
        }
        KubeconfigCredential::NoFile => "there is no kubeconfig".to_owned(),
        KubeconfigCredential::Unusable(error) => error.clone(),
    };
    let stored = facts.stored.as_ref();
    let is_good = |stored: &CertificateFacts| !is_expired(stored, now) && wanted.first_lack(stored).is_none();
    match (stored, facts.has_bootstrap, &facts.kubeconfig) {
        (Some(stored), true, _) if is_good(stored) => ClientWork::WriteKubeconfig,
        (Some(stored), true, _) if is_expired(stored, now) => ClientWork::Bootstrap(RequestReason::Expired),
        (_, true, _) => ClientWork::Bootstrap(RequestReason::Missing),
        (Some(stored), false, KubeconfigCredential::Certificate(_)) if facts.rotates && is_good(stored) => {
            ClientWork::UseStored
        }
        (_, false, _) => ClientWork::Stuck(unusable),
    }
}

/// The meaning of the status of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestAnswer {
    /// Neither approved nor refused, or approved and not signed.
    Pending,
    /// The signer refused it, in the words of the kubelet.
    Refused(String),
    /// The certificate with its chain.
    Issued(Vec<u8>),
}

/// Returns the meaning of the status of a request (`client-go/util/certificate/csr: WaitForCertificate`).
#[must_use]
pub fn answer_of(status: Option<&CertificateSigningRequestStatus>) -> RequestAnswer {
    let Some(status) = status else { return RequestAnswer::Pending };
    let mut is_approved = false;
    for condition in status.conditions.iter().flatten() {
        let because = || {
            let text = |field: &Option<String>| field.clone().unwrap_or_default();
            format!("reason: {}, message: {}", text(&condition.reason), text(&condition.message))
        };
        match condition.type_.as_str() {
            "Denied" => {
                return RequestAnswer::Refused(format!(
                    "certificate signing request is denied, {}",
                    because()
                ));
            }
            "Failed" => {
                return RequestAnswer::Refused(format!("certificate signing request failed, {}", because()));
            }
            "Approved" => is_approved = true,
            _ => {}
        }
    }
    match &status.certificate {
        Some(certificate) if is_approved && !certificate.0.is_empty() => {
            RequestAnswer::Issued(certificate.0.clone())
        }
        _ => RequestAnswer::Pending,
    }
}

/// The reason why an issued certificate is not used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The certificate belongs to another key.
    #[error("the issued certificate is for another key")]
    Key,
    /// The certificate has another subject or lacks names.
    #[error("the issued certificate does not fit: {0}")]
    Names(Lack),
    /// The certificate has expired.
    #[error("the issued certificate expired at {0}")]
    Expired(Timestamp),
}

/// Checks an issued certificate. The kubelet checks the key only, and requests again at once where names are
/// missing.
///
/// # Errors
/// Returns why the certificate is not used.
pub fn check_issued(
    facts: &CertificateFacts,
    public_key: &[u8],
    wanted: &WantedCertificate,
    now: Timestamp,
) -> Result<(), Unfit> {
    if facts.public_key != public_key {
        return Err(Unfit::Key);
    }
    if let Some(lack) = wanted.first_lack(facts) {
        return Err(Unfit::Names(lack));
    }
    if is_expired(facts, now) {
        return Err(Unfit::Expired(facts.not_after));
    }
    Ok(())
}

/// Returns the name of a request at the bootstrap: equal for an equal key, so that a restarted process finds
/// its request (`pkg/kubelet/certificate/bootstrap: digestedName`).
#[must_use]
pub fn request_name(public_key_info: &[u8], wanted: &WantedCertificate, usages: &[String]) -> String {
    use base64::Engine as _;

    let encode = |bytes: &[u8]| base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes);
    let mut hash = Sha512_256::new();
    let parts = [public_key_info, wanted.common_name.as_bytes(), wanted.organization().as_bytes()];
    for part in parts.into_iter().chain(usages.iter().map(String::as_bytes)) {
        hash.update(encode(part));
        hash.update(b"|");
    }
    format!("node-csr-{}", encode(&hash.finalize()))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;
    use k8s_openapi::api::certificates::v1::CertificateSigningRequestCondition;

    use super::*;

    fn time(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn facts() -> CertificateFacts {
        CertificateFacts {
            not_before: time("2026-01-01T00:00:00Z"),
            not_after: time("2026-01-11T00:00:00Z"),
            common_name: "system:node:n1".to_owned(),
            organizations: [NODES_GROUP.to_owned()].into(),
            dns_names: BTreeSet::new(),
            ips: BTreeSet::new(),
            public_key: vec![1],
        }
    }

    fn address(kind: &str, address: &str) -> NodeAddress {
        NodeAddress { type_: kind.to_owned(), address: address.to_owned() }
    }

    #[test]
    fn a_certificate_is_requested_if_it_is_missing_expired_unfit_or_due() {
        use CertificateWork::{AwaitNames, Request, WaitUntil};
        let client = WantedCertificate::client("n1");
        let serving = WantedCertificate::serving("n1", &[address("InternalIP", "10.0.0.1")]).unwrap();
        let other = CertificateFacts { common_name: "system:node:n2".to_owned(), ..facts() };
        let ungrouped = CertificateFacts { organizations: BTreeSet::new(), ..facts() };
        let named = CertificateFacts {
            ips: ["10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap()].into(),
            ..facts()
        };
        for (current, wanted, now, work) in [
            (Some(facts()), None, "2026-01-20T00:00:00Z", AwaitNames),
            (None, Some(&client), "2026-01-02T00:00:00Z", Request(RequestReason::Missing)),
            (Some(facts()), Some(&client), "2026-01-02T00:00:00Z", WaitUntil(time("2026-01-09T00:00:00Z"))),
            // Before its first day, as after a step of the clock.
            (Some(facts()), Some(&client), "2025-01-02T00:00:00Z", WaitUntil(time("2026-01-09T00:00:00Z"))),
            (Some(facts()), Some(&client), "2026-01-08T23:59:59Z", WaitUntil(time("2026-01-09T00:00:00Z"))),
            (Some(facts()), Some(&client), "2026-01-09T00:00:00Z", Request(RequestReason::Due)),
            (Some(facts()), Some(&client), "2026-01-11T00:00:00Z", Request(RequestReason::Due)),
            (Some(facts()), Some(&client), "2026-01-11T00:00:01Z", Request(RequestReason::Expired)),
            (
                Some(other),
                Some(&client),
                "2026-01-02T00:00:00Z",
                Request(RequestReason::Lacks(Lack::CommonName("system:node:n2".to_owned()))),
            ),
            (
                Some(ungrouped),
                Some(&client),
                "2026-01-02T00:00:00Z",
                Request(RequestReason::Lacks(Lack::Organization)),
            ),
            (
                Some(facts()),
                Some(&serving),
                "2026-01-02T00:00:00Z",
                Request(RequestReason::Lacks(Lack::Names(vec!["10.0.0.1".to_owned()]))),
            ),
            // An address that is gone does not matter.
            (Some(named), Some(&serving), "2026-01-02T00:00:00Z", WaitUntil(time("2026-01-09T00:00:00Z"))),
        ] {
            assert_eq!(next_work(current.as_ref(), wanted, time(now), 0.8), work, "{now}");
        }
    }

    #[test]
    fn a_rotation_is_at_a_share_of_the_life_even_of_an_odd_one() {
        let minute = CertificateFacts { not_after: time("2026-01-01T00:01:00Z"), ..facts() };
        assert_eq!(rotation_time(&minute, 0.7), time("2026-01-01T00:00:42Z"));
        assert_eq!(rotation_time(&minute, 0.9), time("2026-01-01T00:00:54Z"));
        let backwards = CertificateFacts { not_after: time("2025-01-01T00:00:00Z"), ..facts() };
        assert!(rotation_time(&backwards, 0.8) < backwards.not_before);
        let longest = CertificateFacts { not_before: Timestamp::MIN, not_after: Timestamp::MAX, ..facts() };
        assert!(rotation_time(&longest, 0.8) < Timestamp::MAX);
        assert_eq!(rotation_time(&longest, f64::NAN), Timestamp::MIN);
    }

    #[test]
    fn the_client_certificate_is_bootstrapped_rotated_or_left_alone() {
        use KubeconfigCredential::{Certificate, NoFile, Other, Unusable};
        let now = time("2026-01-02T00:00:00Z");
        let (end, due) = (time("2026-01-11T00:00:00Z"), time("2026-01-09T00:00:00Z"));
        let good = || Certificate(Box::new(facts()));
        let old = CertificateFacts { not_after: time("2026-01-01T12:00:00Z"), ..facts() };
        let other = CertificateFacts { common_name: "system:node:n2".to_owned(), ..facts() };
        let lack = RequestReason::Lacks(Lack::CommonName("system:node:n2".to_owned()));
        let (missing, expired) = (RequestReason::Missing, RequestReason::Expired);
        for (kubeconfig, stored, has_bootstrap, rotates, work) in [
            (good(), None, false, false, ClientWork::WaitUntil(end)),
            (good(), None, true, false, ClientWork::WaitUntil(end)),
            (good(), None, false, true, ClientWork::WaitUntil(due)),
            (good(), None, true, true, ClientWork::WaitUntil(due)),
            (Certificate(Box::new(other.clone())), None, false, false, ClientWork::WaitUntil(end)),
            (Certificate(Box::new(other.clone())), None, false, true, ClientWork::Rotate(lack)),
            (NoFile, None, true, false, ClientWork::Bootstrap(missing.clone())),
            (NoFile, None, true, true, ClientWork::Bootstrap(missing.clone())),
            (NoFile, None, false, true, ClientWork::Stuck("there is no kubeconfig".to_owned())),
            (NoFile, Some(facts()), true, false, ClientWork::WriteKubeconfig),
            (NoFile, Some(old.clone()), true, true, ClientWork::Bootstrap(expired.clone())),
            (NoFile, Some(other), true, true, ClientWork::Bootstrap(missing.clone())),
            (Unusable("torn".to_owned()), None, true, true, ClientWork::Bootstrap(missing.clone())),
            (Unusable("torn".to_owned()), Some(facts()), true, true, ClientWork::WriteKubeconfig),
            (Unusable("torn".to_owned()), None, false, true, ClientWork::Stuck("torn".to_owned())),
            (
                Certificate(Box::new(old.clone())),
                Some(old.clone()),
                true,
                false,
                ClientWork::Bootstrap(expired),
            ),
            (Certificate(Box::new(old.clone())), Some(facts()), false, true, ClientWork::UseStored),
            (
                Certificate(Box::new(old.clone())),
                Some(facts()),
                false,
                false,
                ClientWork::Stuck("the client certificate expired at 2026-01-01T12:00:00Z".to_owned()),
            ),
            (
                Certificate(Box::new(old)),
                None,
                false,
                true,
                ClientWork::Stuck("the client certificate expired at 2026-01-01T12:00:00Z".to_owned()),
            ),
            (Other, None, false, true, ClientWork::NotOurs),
            (Other, None, false, false, ClientWork::NotOurs),
            (Other, None, true, false, ClientWork::Bootstrap(missing)),
        ] {
            let shown = format!("{kubeconfig:?}, {stored:?}, {has_bootstrap}, {rotates}");
            let facts = ClientFacts { kubeconfig, stored, has_bootstrap, rotates };
            assert_eq!(client_work(&facts, &WantedCertificate::client("n1"), now, 0.8), work, "{shown}");
        }
    }

    #[test]
    fn a_serving_certificate_names_the_addresses_of_the_node_and_needs_an_ip() {
        let wanted = |addresses: &[NodeAddress]| {
            WantedCertificate::serving("n1", addresses).map(|wanted| {
                let ips: Vec<String> = wanted.ips.iter().map(IpAddr::to_string).collect();
                (wanted.dns_names.into_iter().collect::<Vec<_>>(), ips)
            })
        };
        assert_eq!(wanted(&[]), None);
        assert_eq!(wanted(&[address("Hostname", "n1"), address("InternalDNS", "n1.example")]), None);
        assert_eq!(wanted(&[address("InternalIP", "no-address"), address("Other", "10.0.0.1")]), None);
        let all = [
            address("Hostname", "n1"),
            address("Hostname", "10.0.0.9"),
            address("InternalIP", "10.0.0.1"),
            address("InternalIP", "fd00::1"),
            address("ExternalIP", "192.0.2.1"),
            address("ExternalIP", "10.0.0.1"),
            address("ExternalIP", ""),
            address("InternalDNS", "n1.internal"),
            address("ExternalDNS", "n1.example"),
            address("ExternalDNS", "n1"),
        ];
        let (names, ips) = wanted(&all).unwrap();
        assert_eq!(names, ["n1", "n1.example", "n1.internal"]);
        assert_eq!(ips, ["10.0.0.1", "10.0.0.9", "192.0.2.1", "fd00::1"]);
    }

    #[test]
    fn only_a_key_of_rsa_has_the_usage_of_encryption() {
        use CertificatePurpose::{Client, Serving};
        assert_eq!(Client.usages(false), ["digital signature", "client auth"]);
        assert_eq!(Client.usages(true), ["digital signature", "client auth", "key encipherment"]);
        assert_eq!(Serving.usages(false), ["digital signature", "server auth"]);
        assert_eq!(Serving.usages(true), ["key encipherment", "digital signature", "server auth"]);
    }

    #[test]
    fn a_certificate_counts_only_with_an_approval_and_without_a_refusal() {
        let condition = |kind: &str| CertificateSigningRequestCondition {
            type_: kind.to_owned(),
            status: "True".to_owned(),
            reason: Some("Because".to_owned()),
            message: Some("no".to_owned()),
            ..CertificateSigningRequestCondition::default()
        };
        let status = |kinds: &[&str], certificate: Option<&[u8]>| CertificateSigningRequestStatus {
            conditions: Some(kinds.iter().map(|kind| condition(kind)).collect()),
            certificate: certificate.map(|bytes| ByteString(bytes.to_vec())),
        };
        let denied = "certificate signing request is denied, reason: Because, message: no";
        let failed = "certificate signing request failed, reason: Because, message: no";
        assert_eq!(answer_of(None), RequestAnswer::Pending);
        for (kinds, certificate, answer) in [
            (&[][..], None, RequestAnswer::Pending),
            (&["Approved"], None, RequestAnswer::Pending),
            (&["Approved"], Some(&b""[..]), RequestAnswer::Pending),
            (&[], Some(b"c"), RequestAnswer::Pending),
            (&["Other"], Some(b"c"), RequestAnswer::Pending),
            (&["Approved"], Some(b"c"), RequestAnswer::Issued(b"c".to_vec())),
            (&["Denied"], None, RequestAnswer::Refused(denied.to_owned())),
            (&["Approved", "Denied"], Some(b"c"), RequestAnswer::Refused(denied.to_owned())),
            (&["Approved", "Failed"], None, RequestAnswer::Refused(failed.to_owned())),
        ] {
            assert_eq!(answer_of(Some(&status(kinds, certificate))), answer, "{kinds:?} {certificate:?}");
        }
    }

    #[test]
    fn an_issued_certificate_needs_the_key_the_names_and_time_left() {
        let (wanted, now) = (WantedCertificate::client("n1"), time("2026-01-02T00:00:00Z"));
        let other = CertificateFacts { common_name: "system:node:n2".to_owned(), ..facts() };
        assert_eq!(check_issued(&facts(), &[1], &wanted, now), Ok(()));
        assert_eq!(check_issued(&facts(), &[2], &wanted, now), Err(Unfit::Key));
        let lack = Lack::CommonName("system:node:n2".to_owned());
        assert_eq!(check_issued(&other, &[1], &wanted, now), Err(Unfit::Names(lack)));
        let late = time("2027-01-02T00:00:00Z");
        assert_eq!(check_issued(&facts(), &[1], &wanted, late), Err(Unfit::Expired(facts().not_after)));
    }

    #[test]
    fn a_certificate_whose_life_has_not_begun_is_used_and_not_requested_again() {
        use KubeconfigCredential::{Certificate, NoFile};
        let (wanted, now) = (WantedCertificate::client("n1"), time("2025-06-01T00:00:00Z"));
        let (end, due) = (time("2026-01-11T00:00:00Z"), time("2026-01-09T00:00:00Z"));
        let begun = time("2025-01-01T00:00:00Z");
        let expired =
            CertificateFacts { not_before: begun, not_after: time("2025-05-01T00:00:00Z"), ..facts() };
        for (kubeconfig, stored, has_bootstrap, rotates, work) in [
            (Certificate(Box::new(facts())), None, true, true, ClientWork::WaitUntil(due)),
            (Certificate(Box::new(facts())), None, true, false, ClientWork::WaitUntil(end)),
            (NoFile, Some(facts()), true, true, ClientWork::WriteKubeconfig),
            (Certificate(Box::new(expired)), Some(facts()), false, true, ClientWork::UseStored),
        ] {
            let given = ClientFacts { kubeconfig, stored, has_bootstrap, rotates };
            assert_eq!(client_work(&given, &wanted, now, 0.8), work, "{given:?}");
        }
        assert_eq!(check_issued(&facts(), &[1], &wanted, now), Ok(()));
    }

    #[test]
    fn the_name_of_a_request_depends_on_key_subject_and_usages() {
        let name = |key: &[u8], node: &str, usages: &[&str]| {
            let usages: Vec<String> = usages.iter().map(|usage| (*usage).to_owned()).collect();
            request_name(key, &WantedCertificate::client(node), &usages)
        };
        let first = name(b"key", "n1", &["a", "b"]);
        assert_eq!(first, name(b"key", "n1", &["a", "b"]));
        let others = [
            name(b"kez", "n1", &["a", "b"]),
            name(b"key", "n2", &["a", "b"]),
            name(b"key", "n1", &["ab"]),
            name(b"key", "n1", &["b", "a"]),
        ];
        assert!(others.iter().all(|other| *other != first), "{first} {others:?}");
        assert_eq!(first.len(), "node-csr-".len() + 43, "{first}");
    }
}
