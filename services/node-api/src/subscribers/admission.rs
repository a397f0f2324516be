//! Decides which clients may subscribe over TCP, by their certificates.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use node_api_access::x509::{ClientCa, X509Error};
use quintlet_kit::clock::Clock;
use rustls::CertificateError;
use rustls::pki_types::{CertificateDer, UnixTime};
use tonic::Status;

/// Open streams of one kind that a client may have.
pub(super) const STREAMS_OF_CLIENT: usize = 8;

/// Open streams of one kind over TCP. The service that serves them gives one user 16
/// ([`quintlet_kit::subscribe::STREAMS_OF_USER`]), and all of these are streams of node-api's user.
pub(super) const STREAMS: usize = 16;

/// The reason why a client may not subscribe.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("a client certificate is required")]
    NoCertificate,
    #[error("the client certificate is signed by another CA")]
    OtherAuthority,
    #[error("the client certificate has expired, or is not valid yet")]
    Expired,
    #[error("the client certificate is not valid")]
    Invalid,
    #[error("{0:?} may not subscribe")]
    Name(String),
    #[error("{0:?} has {STREAMS_OF_CLIENT} streams of this kind already")]
    StreamsOfClient(String),
    #[error("the node has {STREAMS} streams of this kind over TCP already")]
    Streams,
    #[error("{0:?} has too many connections already")]
    Connections(String),
}

impl Refusal {
    /// All reasons in metrics.
    #[cfg(test)]
    pub(super) const REASONS: [&'static str; 8] = [
        "no_certificate",
        "authority",
        "expired",
        "certificate",
        "name",
        "client_streams",
        "streams",
        "connections",
    ];

    /// Returns the reason in metrics.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::NoCertificate => "no_certificate",
            Self::OtherAuthority => "authority",
            Self::Expired => "expired",
            Self::Invalid => "certificate",
            Self::Name(_) => "name",
            Self::StreamsOfClient(_) => "client_streams",
            Self::Streams => "streams",
            Self::Connections(_) => "connections",
        }
    }

    /// Returns the answer to the client.
    pub(super) fn status(&self) -> Status {
        let message = self.to_string();
        match self {
            Self::NoCertificate | Self::OtherAuthority | Self::Expired | Self::Invalid => {
                Status::unauthenticated(message)
            }
            Self::Name(_) => Status::permission_denied(message),
            Self::StreamsOfClient(_) | Self::Streams | Self::Connections(_) => {
                Status::resource_exhausted(message)
            }
        }
    }

    /// Returns whether the client is not trusted at all, so that its connection ends.
    pub(super) fn ends_connection(&self) -> bool {
        match self {
            Self::NoCertificate | Self::OtherAuthority | Self::Expired | Self::Invalid | Self::Name(_) => {
                true
            }
            Self::StreamsOfClient(_) | Self::Streams | Self::Connections(_) => false,
        }
    }
}

impl From<X509Error> for Refusal {
    fn from(error: X509Error) -> Self {
        use CertificateError as C;
        match error {
            X509Error::Verify(rustls::Error::InvalidCertificate(reason)) => match reason {
                C::Expired | C::ExpiredContext { .. } | C::NotValidYet | C::NotValidYetContext { .. } => {
                    Self::Expired
                }
                // A signature that is not valid is that of another CA with the same name.
                C::UnknownIssuer | C::BadSignature => Self::OtherAuthority,
                // The enum is not exhaustive.
                _ => Self::Invalid,
            },
            _ => Self::Invalid,
        }
    }
}

/// The clients that may subscribe.
#[derive(Debug, Clone)]
pub(super) struct Admission {
    pub(super) ca: Arc<ClientCa>,
    /// Common names of the certificates of clients that may subscribe.
    pub(super) names: Arc<BTreeSet<String>>,
    pub(super) clock: Clock,
}

impl Admission {
    /// Returns the name of the client with this certificate chain.
    ///
    /// # Errors
    /// The certificate is not valid now, or its name may not subscribe.
    pub(super) fn admit(&self, chain: &[CertificateDer<'static>]) -> Result<String, Refusal> {
        if chain.is_empty() {
            return Err(Refusal::NoCertificate);
        }
        let now = u64::try_from(self.clock.wall().as_second()).unwrap_or(0);
        let user = self.ca.user(chain, UnixTime::since_unix_epoch(Duration::from_secs(now)))?;
        if self.names.contains(&user.name) { Ok(user.name) } else { Err(Refusal::Name(user.name)) }
    }
}

/// Returns the instance of probe-service that a client asked for, or the only one.
///
/// # Errors
/// There is no instance, or not the one that the client named, or the client did not choose among several
/// ones.
pub(super) fn choose_instance<'a>(instances: &'a [String], wanted: Option<&str>) -> Result<&'a str, Status> {
    let list = || instances.join(", ");
    match (wanted, instances) {
        (_, []) => Err(Status::unavailable("no instance of probe-service has a socket for subscribers")),
        (Some(wanted), _) => {
            instances.iter().find(|instance| *instance == wanted).map(String::as_str).ok_or_else(|| {
                Status::not_found(format!("no such instance of probe-service; there are: {}", list()))
            })
        }
        (None, [only]) => Ok(only),
        (None, _) => Err(Status::failed_precondition(format!(
            "several instances of probe-service, name one in the metadata {INSTANCE}: {}",
            list()
        ))),
    }
}

/// Name of the metadata with the instance of probe-service.
pub(super) const INSTANCE: &str = "quintlet-probe-instance";

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn each_refusal_has_a_reason_and_a_code_of_its_own_kind() {
        let name = || "x".to_owned();
        let all = [
            (Refusal::NoCertificate, Code::Unauthenticated),
            (Refusal::OtherAuthority, Code::Unauthenticated),
            (Refusal::Expired, Code::Unauthenticated),
            (Refusal::Invalid, Code::Unauthenticated),
            (Refusal::Name(name()), Code::PermissionDenied),
            (Refusal::StreamsOfClient(name()), Code::ResourceExhausted),
            (Refusal::Streams, Code::ResourceExhausted),
            (Refusal::Connections(name()), Code::ResourceExhausted),
        ];
        for ((refusal, code), reason) in all.iter().zip(Refusal::REASONS) {
            assert_eq!((refusal.reason(), refusal.status().code()), (reason, *code));
            assert_eq!(refusal.ends_connection(), *code != Code::ResourceExhausted, "{refusal:?}");
        }
    }

    #[test]
    fn the_streams_over_tcp_are_those_that_a_service_gives_to_one_user() {
        assert_eq!(STREAMS, quintlet_kit::subscribe::STREAMS_OF_USER);
        const { assert!(STREAMS_OF_CLIENT < STREAMS, "no client may take all") };
    }

    #[test]
    fn a_client_chooses_an_instance_unless_there_is_only_one() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let (one, two) = (names(&["probe-0"]), names(&["probe-0", "probe-1"]));
        assert_eq!(choose_instance(&one, None).unwrap(), "probe-0");
        assert_eq!(choose_instance(&two, Some("probe-1")).unwrap(), "probe-1");
        for (instances, wanted, code, message) in [
            (&two, None, Code::FailedPrecondition, "quintlet-probe-instance: probe-0, probe-1"),
            (&two, Some("../../pleg/pleg"), Code::NotFound, "there are: probe-0, probe-1"),
            (&one, Some(""), Code::NotFound, "there are: probe-0"),
            (&names(&[]), Some("probe-0"), Code::Unavailable, "no instance"),
        ] {
            let status = choose_instance(instances, wanted).unwrap_err();
            assert_eq!(status.code(), code);
            assert!(status.message().contains(message), "{status}");
        }
    }
}
