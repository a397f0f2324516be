//! What happens next with the certificate of one source: plain functions
//! (`pkg/kubelet/podcertificate: handleProjection`).

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::certificates::v1::PodCertificateRequestStatus;
use pod_sync_direct_volumes::certificates::CredentialBundle;

use super::key::PrivateKey;
use crate::pem_blocks;

/// A request that the watch does not have at this age was deleted. A younger one may not have arrived yet.
const ASSUME_DELETED: SignedDuration = SignedDuration::from_mins(10);
/// A certificate is overdue this long after its refresh should have begun.
const OVERDUE: SignedDuration = SignedDuration::from_mins(10);
const NOT_ISSUED: &str = "credential bundle is not issued yet";

/// The certificate of one source of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CertificateState {
    /// No request exists: the source is new, or its first request was deleted. A read fails. A request is
    /// due.
    Initial,
    /// The first request exists and has no outcome. A read fails.
    Waiting(Pending),
    /// The signer refused a request. Final. A read fails with the signer's reason.
    Denied { reason: String, message: String },
    /// The signer could not issue a certificate. Final. A read fails with the signer's reason.
    Failed { reason: String, message: String },
    /// A certificate was issued. A read returns it. A request is due when its refresh begins.
    Issued(Issued),
    /// A certificate was issued, and the request for the next one has no outcome. A read returns the old
    /// certificate.
    Refreshing { current: Issued, pending: Pending },
}

/// A request without an outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pending {
    pub(super) key: PrivateKey,
    /// Name of the PodCertificateRequest.
    pub(super) request: String,
    /// From this time on, a request that the watch does not have was deleted.
    pub(super) abandon_at: Timestamp,
}

impl Pending {
    pub(super) fn new(key: PrivateKey, request: String, created: Timestamp, jitter: SignedDuration) -> Self {
        Self { key, request, abandon_at: later(created, ASSUME_DELETED.saturating_add(jitter)) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Issued {
    pub(super) bundle: Arc<CredentialBundle>,
    pub(super) refresh_at: Timestamp,
    pub(super) not_after: Timestamp,
    /// The event of an overdue certificate was recorded.
    pub(super) reported_overdue: bool,
    /// The event of an expired certificate was recorded.
    pub(super) reported_expired: bool,
}

/// The status of a PodCertificateRequest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RequestStatus {
    Pending,
    Denied { reason: String, message: String },
    Failed { reason: String, message: String },
    Issued { chain: String, begin_refresh_at: Timestamp, not_after: Timestamp },
}

impl RequestStatus {
    /// Returns the outcome of a request. One that lacks fields which the API server requires is pending.
    pub(super) fn of(status: Option<&PodCertificateRequestStatus>) -> Self {
        let Some(status) = status else { return Self::Pending };
        for condition in status.conditions.iter().flatten() {
            let (reason, message) = (condition.reason.clone(), condition.message.clone());
            match condition.type_.as_str() {
                "Denied" => return Self::Denied { reason, message },
                "Failed" => return Self::Failed { reason, message },
                "Issued" => {
                    let chain = status.certificate_chain.as_deref().and_then(clean);
                    let times = (status.begin_refresh_at.as_ref(), status.not_after.as_ref());
                    let (Some(chain), (Some(refresh), Some(end))) = (chain, times) else {
                        return Self::Pending;
                    };
                    return Self::Issued { chain, begin_refresh_at: refresh.0, not_after: end.0 };
                }
                _ => {}
            }
        }
        Self::Pending
    }
}

/// Returns the certificates of a chain, without text between them and headers.
fn clean(chain: &str) -> Option<String> {
    let contents = pem_blocks::contents(chain).ok()?;
    Some(pem_blocks::certificates(contents)).filter(|chain| !chain.is_empty())
}

/// The action on a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Create a request with a new key.
    Create,
    /// Decide again when the request changes, and at this time.
    WaitUntil(Timestamp),
    /// Decide again when the request changes.
    Wait,
    /// Do nothing as long as the pod exists.
    Nothing,
}

/// A Warning about the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) reason: String,
    pub(super) message: String,
}

impl Event {
    fn new(reason: &str, message: impl Into<String>) -> Self {
        Self { reason: reason.to_owned(), message: message.into() }
    }
}

/// A decision about a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Decision {
    pub(super) state: CertificateState,
    pub(super) action: Action,
    pub(super) events: Vec<Event>,
    /// A read returns something else than before.
    pub(super) is_changed: bool,
}

/// Returns the next state and action of a source. `outcome` is that of the pending request; `None` if the
/// watch does not have it. `jitter` is added to the beginning of a refresh. `namespace` is that of the pod,
/// for texts.
pub(super) fn decide(
    state: CertificateState,
    outcome: Option<RequestStatus>,
    now: Timestamp,
    jitter: SignedDuration,
    namespace: &str,
) -> Decision {
    match state {
        CertificateState::Initial => unchanged(CertificateState::Initial, Action::Create),
        CertificateState::Denied { .. } | CertificateState::Failed { .. } => {
            unchanged(state, Action::Nothing)
        }
        CertificateState::Issued(current) if now < current.refresh_at => {
            let again = current.refresh_at;
            unchanged(CertificateState::Issued(current), Action::WaitUntil(again))
        }
        CertificateState::Issued(mut current) => {
            let events = age_events(&mut current, now);
            Decision { events, ..unchanged(CertificateState::Issued(current), Action::Create) }
        }
        CertificateState::Waiting(pending) => match outcome {
            None if now > pending.abandon_at => unchanged(CertificateState::Initial, Action::Create),
            None => {
                let again = pending.abandon_at;
                unchanged(CertificateState::Waiting(pending), Action::WaitUntil(after(again)))
            }
            Some(RequestStatus::Pending) => unchanged(CertificateState::Waiting(pending), Action::Wait),
            Some(outcome) => ended(&pending, outcome, jitter, namespace),
        },
        CertificateState::Refreshing { mut current, pending } => match outcome {
            None if now > pending.abandon_at => unchanged(CertificateState::Issued(current), Action::Create),
            None => {
                let again = pending.abandon_at;
                unchanged(CertificateState::Refreshing { current, pending }, Action::WaitUntil(after(again)))
            }
            Some(RequestStatus::Pending) => {
                let events = age_events(&mut current, now);
                let action = next_age(&current).map_or(Action::Wait, |at| Action::WaitUntil(after(at)));
                Decision { events, ..unchanged(CertificateState::Refreshing { current, pending }, action) }
            }
            Some(outcome) => ended(&pending, outcome, jitter, namespace),
        },
    }
}

/// Returns the state after a request was created.
pub(super) fn created(state: CertificateState, pending: Pending) -> CertificateState {
    match state {
        CertificateState::Issued(current) | CertificateState::Refreshing { current, .. } => {
            CertificateState::Refreshing { current, pending }
        }
        CertificateState::Initial | CertificateState::Waiting(_) => CertificateState::Waiting(pending),
        CertificateState::Denied { .. } | CertificateState::Failed { .. } => state,
    }
}

/// Returns the key and the certificates of a source.
///
/// # Errors
/// There are none. The texts are the kubelet's.
pub(super) fn read(state: &CertificateState) -> Result<Arc<CredentialBundle>, String> {
    let ended = |how: &str, reason: &str, message: &str| {
        Err(format!("PodCertificateRequest was permanently {how}: reason={reason:?} message={message:?}"))
    };
    match state {
        CertificateState::Initial | CertificateState::Waiting(_) => Err(NOT_ISSUED.to_owned()),
        CertificateState::Denied { reason, message } => ended("denied", reason, message),
        CertificateState::Failed { reason, message } => ended("failed", reason, message),
        CertificateState::Issued(current) | CertificateState::Refreshing { current, .. } => {
            Ok(Arc::clone(&current.bundle))
        }
    }
}

/// Returns the label `state` of the kubelet's metric.
pub(super) fn label(state: &CertificateState, now: Timestamp) -> &'static str {
    match state {
        CertificateState::Initial | CertificateState::Waiting(_) => "not_yet_issued",
        CertificateState::Denied { .. } => "denied",
        CertificateState::Failed { .. } => "failed",
        CertificateState::Issued(current) | CertificateState::Refreshing { current, .. } => {
            if now > current.not_after {
                "expired"
            } else if now > later(current.refresh_at, OVERDUE) {
                "overdue_for_refresh"
            } else {
                "fresh"
            }
        }
    }
}

fn unchanged(state: CertificateState, action: Action) -> Decision {
    Decision { state, action, events: Vec::new(), is_changed: false }
}

/// Returns the decision after a request has an outcome.
fn ended(pending: &Pending, outcome: RequestStatus, jitter: SignedDuration, namespace: &str) -> Decision {
    let name = &pending.request;
    let (state, action, events) = match outcome {
        RequestStatus::Pending => return unchanged(CertificateState::Waiting(pending.clone()), Action::Wait),
        RequestStatus::Denied { reason, message } => {
            let text = format!(
                "PodCertificateRequest {namespace}/{name} was denied, reason={reason:?}, message={message:?}"
            );
            // The kubelet passes the type of the condition as the reason of the event, and the reason as its
            // format.
            let events = vec![Event::new("Denied", text)];
            (CertificateState::Denied { reason, message }, Action::Nothing, events)
        }
        RequestStatus::Failed { reason, message } => {
            let text = format!(
                "PodCertificateRequest {namespace}/{name} failed, reason={reason:?}, message={message:?}"
            );
            let events = vec![Event::new("Failed", text)];
            (CertificateState::Failed { reason, message }, Action::Nothing, events)
        }
        RequestStatus::Issued { chain, begin_refresh_at, not_after } => {
            let refresh_at = later(begin_refresh_at, jitter);
            let bundle = CredentialBundle { key: pending.key.expose().to_owned(), certificates: chain };
            let current = Issued {
                bundle: Arc::new(bundle),
                refresh_at,
                not_after,
                reported_overdue: false,
                reported_expired: false,
            };
            (CertificateState::Issued(current), Action::WaitUntil(refresh_at), Vec::new())
        }
    };
    Decision { state, action, events, is_changed: true }
}

/// Returns the events of a certificate whose refresh is late, each once.
fn age_events(current: &mut Issued, now: Timestamp) -> Vec<Event> {
    let mut events = Vec::new();
    if now > later(current.refresh_at, OVERDUE) && !current.reported_overdue {
        current.reported_overdue = true;
        events.push(Event::new("CertificateOverdueForRefresh", "PodCertificate refresh overdue"));
    }
    if now > current.not_after && !current.reported_expired {
        current.reported_expired = true;
        events.push(Event::new("CertificateExpired", "PodCertificate expired"));
    }
    events
}

/// Returns the time after which the next event of [`age_events`] is due.
fn next_age(current: &Issued) -> Option<Timestamp> {
    let overdue = (!current.reported_overdue).then(|| later(current.refresh_at, OVERDUE));
    let expired = (!current.reported_expired).then_some(current.not_after);
    overdue.into_iter().chain(expired).min()
}

// Times come from the API server.
fn later(time: Timestamp, duration: SignedDuration) -> Timestamp {
    time.checked_add(duration).unwrap_or(Timestamp::MAX)
}

/// Returns a time at which `now > time` holds.
fn after(time: Timestamp) -> Timestamp {
    later(time, SignedDuration::from_millis(1))
}

#[cfg(test)]
mod tests;
