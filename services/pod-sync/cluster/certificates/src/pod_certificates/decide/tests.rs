use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::*;

/// Seconds after an arbitrary time.
fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_767_225_600 + seconds).unwrap()
}

const ABANDON: i64 = 600;
const REFRESH: i64 = 10_000;
const OVERDUE_AT: i64 = REFRESH + 600;
const END: i64 = 20_000;
const ZERO: SignedDuration = SignedDuration::ZERO;

fn pending(request: &str) -> Pending {
    Pending::new(PrivateKey::fake(&format!("key of {request}")), request.to_owned(), at(0), ZERO)
}

fn issued_by(request: &str) -> Issued {
    let key = format!("key of {request}");
    Issued {
        bundle: Arc::new(CredentialBundle { key, certificates: "chain".to_owned() }),
        refresh_at: at(REFRESH),
        not_after: at(END),
        reported_overdue: false,
        reported_expired: false,
    }
}

fn chain() -> RequestStatus {
    RequestStatus::Issued { chain: "chain".to_owned(), begin_refresh_at: at(REFRESH), not_after: at(END) }
}

fn refusal() -> (String, String) {
    ("Because".to_owned(), "no \"luck\"".to_owned())
}

fn denied() -> RequestStatus {
    let (reason, message) = refusal();
    RequestStatus::Denied { reason, message }
}

fn failed() -> RequestStatus {
    let (reason, message) = refusal();
    RequestStatus::Failed { reason, message }
}

fn refreshing() -> CertificateState {
    CertificateState::Refreshing { current: issued_by("req-1"), pending: pending("req-2") }
}

#[test]
fn each_state_has_one_next_state_and_action() {
    const OVERDUE: &str = "CertificateOverdueForRefresh";
    const EXPIRED: &str = "CertificateExpired";
    let (reason, message) = refusal();
    let is_denied = || CertificateState::Denied { reason: reason.clone(), message: message.clone() };
    let is_failed = || CertificateState::Failed { reason: reason.clone(), message: message.clone() };
    let waiting = || CertificateState::Waiting(pending("req-1"));
    let issued = |request| CertificateState::Issued(issued_by(request));
    let until = |seconds| Action::WaitUntil(at(seconds));
    let just_after = |seconds| Action::WaitUntil(after(at(seconds)));
    let late = |reported_overdue, reported_expired| Issued {
        reported_overdue,
        reported_expired,
        ..issued_by("req-1")
    };
    let of_issued = |overdue, expired| CertificateState::Issued(late(overdue, expired));
    let of_refresh = |overdue, expired| CertificateState::Refreshing {
        current: late(overdue, expired),
        pending: pending("req-2"),
    };
    let pending_now = || Some(RequestStatus::Pending);
    let create = Action::Create;
    // State, outcome of its request, time; next state, action, reasons of events.
    type Row =
        (CertificateState, Option<RequestStatus>, i64, CertificateState, Action, &'static [&'static str]);
    let table: Vec<Row> = vec![
        (CertificateState::Initial, None, 0, CertificateState::Initial, create, &[]),
        // A young request that the watch does not have may arrive; an old one was deleted.
        (waiting(), None, 0, waiting(), just_after(ABANDON), &[]),
        (waiting(), None, ABANDON, waiting(), just_after(ABANDON), &[]),
        (waiting(), None, ABANDON + 1, CertificateState::Initial, create, &[]),
        (waiting(), pending_now(), ABANDON + 1, waiting(), Action::Wait, &[]),
        (waiting(), Some(denied()), 0, is_denied(), Action::Nothing, &["Denied"]),
        (waiting(), Some(failed()), 0, is_failed(), Action::Nothing, &["Failed"]),
        (waiting(), Some(chain()), 0, issued("req-1"), until(REFRESH), &[]),
        (is_denied(), None, END, is_denied(), Action::Nothing, &[]),
        (is_failed(), None, END, is_failed(), Action::Nothing, &[]),
        (issued("req-1"), None, REFRESH - 1, issued("req-1"), until(REFRESH), &[]),
        (issued("req-1"), None, REFRESH, issued("req-1"), create, &[]),
        (issued("req-1"), None, OVERDUE_AT, issued("req-1"), create, &[]),
        // Each event of age occurs once.
        (issued("req-1"), None, OVERDUE_AT + 1, of_issued(true, false), create, &[OVERDUE]),
        (of_issued(true, false), None, END, of_issued(true, false), create, &[]),
        (of_issued(true, false), None, END + 1, of_issued(true, true), create, &[EXPIRED]),
        (of_issued(true, true), None, END + 1, of_issued(true, true), create, &[]),
        // The old certificate stays until the request for the next one has an outcome.
        (refreshing(), None, 0, refreshing(), just_after(ABANDON), &[]),
        (refreshing(), None, ABANDON + 1, issued("req-1"), create, &[]),
        (refreshing(), pending_now(), REFRESH, refreshing(), just_after(OVERDUE_AT), &[]),
        (refreshing(), pending_now(), OVERDUE_AT + 1, of_refresh(true, false), just_after(END), &[OVERDUE]),
        (refreshing(), pending_now(), END + 1, of_refresh(true, true), Action::Wait, &[OVERDUE, EXPIRED]),
        (of_refresh(true, true), pending_now(), END + 1, of_refresh(true, true), Action::Wait, &[]),
        (refreshing(), Some(denied()), REFRESH, is_denied(), Action::Nothing, &["Denied"]),
        (refreshing(), Some(failed()), REFRESH, is_failed(), Action::Nothing, &["Failed"]),
        (refreshing(), Some(chain()), REFRESH - 5, issued("req-2"), until(REFRESH), &[]),
    ];
    for (state, outcome, now, next, action, events) in table {
        let case = format!("{state:?} {outcome:?} {now}");
        let before = read(&state);
        let decision = decide(state, outcome, at(now), ZERO, "shop");
        assert_eq!(decision.state, next, "{case}");
        assert_eq!(decision.action, action, "{case}");
        let reasons: Vec<&str> = decision.events.iter().map(|event| event.reason.as_str()).collect();
        assert_eq!(reasons, events, "{case}");
        // A worker is woken for each change of what it reads.
        assert_eq!(decision.is_changed, read(&decision.state) != before, "{case}");
    }
}

#[test]
fn a_created_request_keeps_the_certificate_that_was_issued() {
    let created = |state| created(state, pending("req-2"));
    assert_eq!(created(CertificateState::Initial), CertificateState::Waiting(pending("req-2")));
    assert_eq!(created(CertificateState::Issued(issued_by("req-1"))), refreshing());
    assert_eq!(read(&refreshing()).unwrap().key, "key of req-1");
}

#[test]
fn jitter_delays_the_refresh_and_the_age_of_a_deleted_request() {
    let jitter = SignedDuration::from_secs(7);
    let decision = decide(CertificateState::Waiting(pending("req-1")), Some(chain()), at(0), jitter, "shop");
    assert_eq!(decision.action, Action::WaitUntil(at(REFRESH + 7)));
    let pending = Pending::new(PrivateKey::fake("k"), "r".to_owned(), at(0), jitter);
    assert_eq!(pending.abandon_at, at(ABANDON + 7));
}

#[test]
fn times_at_the_end_of_the_calendar_are_no_error() {
    let (begin_refresh_at, not_after) = (Timestamp::MAX, Timestamp::MAX);
    let outcome = RequestStatus::Issued { chain: "c".to_owned(), begin_refresh_at, not_after };
    let jitter = SignedDuration::from_secs(7);
    let decision = decide(CertificateState::Waiting(pending("req-1")), Some(outcome), at(0), jitter, "shop");
    assert_eq!(decision.action, Action::WaitUntil(Timestamp::MAX));
    assert_eq!(label(&decision.state, Timestamp::MAX), "fresh");
}

#[test]
fn refusals_have_the_kubelets_texts() {
    let text = |outcome| {
        let decision =
            decide(CertificateState::Waiting(pending("req-1")), Some(outcome), at(0), ZERO, "shop");
        (decision.events[0].message.clone(), read(&decision.state).unwrap_err())
    };
    let reason = r#"reason="Because""#;
    let message = r#""no \"luck\"""#;
    for (outcome, event, verb) in [(denied(), "was denied", "denied"), (failed(), "failed", "failed")] {
        let event = format!("PodCertificateRequest shop/req-1 {event}, {reason}, message={message}");
        let error = format!("PodCertificateRequest was permanently {verb}: {reason} message={message}");
        assert_eq!(text(outcome), (event, error));
    }
    assert_eq!(read(&CertificateState::Initial).unwrap_err(), "credential bundle is not issued yet");
}

#[test]
fn states_are_counted_by_the_labels_of_the_kubelet() {
    for (state, now, expected) in [
        (CertificateState::Initial, 0, "not_yet_issued"),
        (CertificateState::Waiting(pending("r")), END, "not_yet_issued"),
        (CertificateState::Issued(issued_by("r")), OVERDUE_AT, "fresh"),
        (refreshing(), OVERDUE_AT + 1, "overdue_for_refresh"),
        (refreshing(), END + 1, "expired"),
        (CertificateState::Denied { reason: String::new(), message: String::new() }, 0, "denied"),
        (CertificateState::Failed { reason: String::new(), message: String::new() }, 0, "failed"),
    ] {
        assert_eq!(label(&state, at(now)), expected, "{state:?}");
    }
}

#[test]
fn the_outcome_is_that_of_the_condition_and_certificates_are_cleaned() {
    let condition = |kind: &str| {
        json!([{"type": kind, "status": "True", "reason": "Because", "message": "no \"luck\"",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}])
    };
    let block =
        |content: &str| format!("-----BEGIN CERTIFICATE-----\n{content}\n-----END CERTIFICATE-----\n");
    let chain = format!("leaf\n{}\nmore\n{}", block("YQ=="), block("Yg=="));
    let issued = json!({"conditions": condition("Issued"), "certificateChain": chain,
        "beginRefreshAt": Time(at(REFRESH)), "notAfter": Time(at(END))});
    let without = |field: &str| {
        let mut status = issued.clone();
        status.as_object_mut().unwrap().remove(field);
        status
    };
    let mut empty = issued.clone();
    empty["certificateChain"] = json!("no block");
    let clean = format!("{}{}", block("YQ=="), block("Yg=="));
    let is_issued = RequestStatus::Issued { chain: clean, begin_refresh_at: at(REFRESH), not_after: at(END) };
    for (status, expected) in [
        (json!(null), RequestStatus::Pending),
        (json!({"conditions": condition("Mine")}), RequestStatus::Pending),
        (json!({"conditions": condition("Denied")}), denied()),
        (json!({"conditions": condition("Failed")}), failed()),
        (issued.clone(), is_issued),
        (without("certificateChain"), RequestStatus::Pending),
        (without("beginRefreshAt"), RequestStatus::Pending),
        (without("notAfter"), RequestStatus::Pending),
        (empty, RequestStatus::Pending),
    ] {
        let read: Option<PodCertificateRequestStatus> = serde_json::from_value(status.clone()).unwrap();
        assert_eq!(RequestStatus::of(read.as_ref()), expected, "{status}");
    }
}
