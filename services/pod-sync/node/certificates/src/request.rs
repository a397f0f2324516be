//! CertificateSigningRequests: creation, and the wait for an answer (client-go `util/certificate/csr`).

use std::time::Duration;

use futures::StreamExt as _;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::certificates::v1::{CertificateSigningRequest, CertificateSigningRequestSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, PostParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use pod_sync_clients::{REQUEST_TIMEOUT, RequestError, retry_on_lag};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer as _;

use crate::decide::{
    CertificatePurpose, RequestAnswer, Unfit, WantedCertificate, answer_of, check_issued, is_expired,
    request_name,
};
use crate::key::{NodeKey, PemError, facts_of};

/// A certificate was not issued.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestFailure {
    #[error("failed to make the request")]
    Make(#[source] PemError),
    /// The message of the API server is enough: its whole status would be a long line.
    #[error("failed to create the certificate signing request: {0}")]
    Create(RequestError),
    /// A request with this name exists for another key, subject or signer, or its certificate has expired.
    #[error("certificate signing request {0} exists and does not fit")]
    Occupied(String),
    #[error("certificate signing request {0} was deleted")]
    Deleted(String),
    #[error("{0}")]
    Refused(String),
    #[error("certificate signing request {name} had no answer within {} s", limit.as_secs())]
    Unanswered { name: String, limit: Duration },
    #[error("failed to use the issued certificate")]
    Unusable(#[source] PemError),
    #[error("{0}")]
    Unfit(Unfit),
}

impl RequestFailure {
    /// Returns whether another request with the same key would have the same end.
    pub(crate) fn ends_key(&self) -> bool {
        match self {
            Self::Occupied(_)
            | Self::Deleted(_)
            | Self::Refused(_)
            | Self::Unusable(_)
            | Self::Unfit(_)
            | Self::Make(_) => true,
            Self::Create(_) | Self::Unanswered { .. } => false,
        }
    }
}

/// A request to make.
#[derive(Debug)]
pub(crate) struct CertificateOrder<'a> {
    pub(crate) purpose: CertificatePurpose,
    pub(crate) wanted: &'a WantedCertificate,
    pub(crate) key: &'a NodeKey,
    /// The name depends on the key, so that a restarted process finds the request.
    pub(crate) is_named: bool,
    pub(crate) now: Timestamp,
    /// Longest wait for an answer.
    pub(crate) limit: Duration,
}

/// Requests a certificate and returns it with its chain once it is issued.
///
/// Cancellation safety: a request that exists stays, and is found again if it is named.
pub(crate) async fn obtain(
    client: &kube::Client,
    order: &CertificateOrder<'_>,
) -> Result<String, RequestFailure> {
    let usages = order.purpose.usages(order.key.is_rsa());
    let metadata = if order.is_named {
        let name = request_name(&order.key.public_key_info(), order.wanted, &usages);
        ObjectMeta { name: Some(name), ..ObjectMeta::default() }
    } else {
        ObjectMeta { generate_name: Some("csr-".to_owned()), ..ObjectMeta::default() }
    };
    let request = order.key.request(order.wanted).map_err(RequestFailure::Make)?;
    let request = CertificateSigningRequest {
        metadata,
        spec: CertificateSigningRequestSpec {
            request: ByteString(request.into_bytes()),
            signer_name: order.purpose.signer().to_owned(),
            usages: Some(usages),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    let api: Api<CertificateSigningRequest> = Api::all(client.clone());
    let (name, uid) = create(&api, &request, order).await?;
    tracing::info!(csr = name, signer = order.purpose.signer(), "waiting for the certificate");
    let waiting = answer(&api, &name, &uid);
    let unanswered = |_| RequestFailure::Unanswered { name: name.clone(), limit: order.limit };
    let issued = tokio::time::timeout(order.limit, waiting).await.map_err(unanswered)??;
    let issued =
        String::from_utf8(issued).map_err(|_| RequestFailure::Unusable(PemError::Absent("certificate")))?;
    let facts = facts_of(&issued).map_err(RequestFailure::Unusable)?;
    check_issued(&facts, order.key.public_key(), order.wanted, order.now).map_err(RequestFailure::Unfit)?;
    Ok(issued)
}

/// Creates a request, or finds the one of an earlier run. Returns its name and UID.
async fn create(
    api: &Api<CertificateSigningRequest>,
    request: &CertificateSigningRequest,
    order: &CertificateOrder<'_>,
) -> Result<(String, String), RequestFailure> {
    let params = PostParams::default();
    let identity = |object: CertificateSigningRequest| {
        let ObjectMeta { name, uid, .. } = object.metadata;
        (name.unwrap_or_default(), uid.unwrap_or_default())
    };
    match retry_on_lag(REQUEST_TIMEOUT, || api.create(&params, request)).await {
        Ok(created) => Ok(identity(created)),
        Err(RequestError::Failed(kube::Error::Api(status))) if status.code == 409 && order.is_named => {
            let name = request.metadata.name.clone().unwrap_or_default();
            let existing = retry_on_lag(REQUEST_TIMEOUT, || api.get(&name)).await;
            let existing = existing.map_err(RequestFailure::Create)?;
            if is_same(&existing, request, order) {
                Ok(identity(existing))
            } else {
                Err(RequestFailure::Occupied(name))
            }
        }
        Err(error) => Err(RequestFailure::Create(error)),
    }
}

/// Returns whether an existing request is for the same key, subject and signer, and not expired
/// (`ensureCompatible`).
fn is_same(
    existing: &CertificateSigningRequest,
    own: &CertificateSigningRequest,
    order: &CertificateOrder<'_>,
) -> bool {
    let parts = |request: &CertificateSigningRequest| {
        let block = pem::parse(&request.spec.request.0).ok()?;
        let (_, parsed) = X509CertificationRequest::from_der(block.contents()).ok()?;
        let info = &parsed.certification_request_info;
        let key = info.subject_pki.subject_public_key.data.to_vec();
        Some((info.subject.as_raw().to_vec(), key, request.spec.signer_name.clone()))
    };
    let is_usable = match answer_of(existing.status.as_ref()) {
        RequestAnswer::Issued(certificate) => std::str::from_utf8(&certificate)
            .ok()
            .and_then(|text| facts_of(text).ok())
            .is_some_and(|facts| !is_expired(&facts, order.now)),
        RequestAnswer::Pending | RequestAnswer::Refused(_) => true,
    };
    is_usable && parts(existing).is_some() && parts(existing) == parts(own)
}

/// Waits for the answer to a request. An error of the watch is retried for as long as the caller waits.
async fn answer(
    api: &Api<CertificateSigningRequest>,
    name: &str,
    uid: &str,
) -> Result<Vec<u8>, RequestFailure> {
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut events = std::pin::pin!(watcher(api.clone(), config).default_backoff());
    let mut is_listed = false;
    while let Some(event) = events.next().await {
        let object = match event {
            Ok(watcher::Event::Init) => {
                is_listed = false;
                continue;
            }
            Ok(watcher::Event::InitDone) if is_listed => continue,
            Ok(watcher::Event::InitDone | watcher::Event::Delete(_)) => {
                return Err(RequestFailure::Deleted(name.to_owned()));
            }
            Ok(watcher::Event::InitApply(object)) => {
                is_listed = true;
                object
            }
            Ok(watcher::Event::Apply(object)) => object,
            Err(_) => continue,
        };
        if object.metadata.uid.as_deref() != Some(uid) {
            return Err(RequestFailure::Deleted(name.to_owned()));
        }
        match answer_of(object.status.as_ref()) {
            RequestAnswer::Pending => {}
            RequestAnswer::Refused(reason) => return Err(RequestFailure::Refused(reason)),
            RequestAnswer::Issued(certificate) => return Ok(certificate),
        }
    }
    Err(RequestFailure::Deleted(name.to_owned()))
}
