//! The node's lease, renewed independently of all other writes.

use std::time::Duration;

use jiff::Timestamp;
use quintlet_kit::clock::Clock;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::api::{ApiClient, ApiFailure, node_path};
use crate::status::text;

const COLLECTION: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases";

/// Default of `nodeLeaseDurationSeconds`.
pub const DURATION_SECONDS: u32 = 40;

/// Duration and renewal interval of the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term {
    /// `leaseDurationSeconds` of the lease.
    pub seconds: u32,
    /// Pause between renewals. A jitter of up to 4 % is added.
    pub every: Duration,
}

impl Term {
    /// Renews after a quarter of the duration.
    #[must_use]
    pub fn of(seconds: u32) -> Self {
        Self { seconds, every: Duration::from_millis(u64::from(seconds).saturating_mul(250)) }
    }
}

const JITTER: f64 = 0.04;

/// Immediate attempts per renewal.
const TRIES: u32 = 5;

const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The next step after an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextAttempt {
    /// Wait until the next renewal.
    Rest,
    /// Update again immediately.
    Again,
    /// Read or create the lease, then update it.
    Ensure,
    /// Read or create the lease after this pause.
    Pause(Duration),
}

/// Returns the next step after the result of an attempt. `failures` includes this attempt.
#[must_use]
pub fn next(outcome: Result<(), &ApiFailure>, failures: u32) -> NextAttempt {
    match outcome {
        Ok(()) => NextAttempt::Rest,
        Err(_) if failures >= TRIES => {
            let doubled =
                FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(TRIES).min(10)));
            NextAttempt::Pause(doubled.min(LONGEST_PAUSE))
        }
        // Another client changed or deleted the lease: read it.
        Err(
            ApiFailure::Conflict(_)
            | ApiFailure::NotFound(_)
            | ApiFailure::AlreadyExists(_)
            | ApiFailure::Invalid(_),
        ) => NextAttempt::Ensure,
        Err(
            ApiFailure::Refused(_)
            | ApiFailure::TooLarge(_)
            | ApiFailure::Denied(_)
            | ApiFailure::NamespaceEnding(_)
            | ApiFailure::TooMany { .. }
            | ApiFailure::Server(_)
            | ApiFailure::Unreachable(_)
            | ApiFailure::Panicked(_),
        ) => NextAttempt::Again,
    }
}

/// Returns the lease with a new renew time. Other fields stay.
#[must_use]
pub fn renewed(
    lease: Option<&Value>,
    node: &str,
    node_uid: Option<&str>,
    seconds: u32,
    now: Timestamp,
) -> Value {
    let mut lease = lease.cloned().unwrap_or_else(|| {
        json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": node, "namespace": "kube-node-lease"}, "spec": {},
        })
    });
    lease["spec"]["holderIdentity"] = json!(node);
    lease["spec"]["leaseDurationSeconds"] = json!(seconds);
    lease["spec"]["renewTime"] = json!(now.strftime("%Y-%m-%dT%H:%M:%S.%6fZ").to_string());
    if !has_owner(&lease)
        && let Some(uid) = node_uid
    {
        lease["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid}]);
    }
    lease
}

fn has_owner(lease: &Value) -> bool {
    lease["metadata"]["ownerReferences"].as_array().is_some_and(|o| !o.is_empty())
}

/// Renews the lease until `stop`. The lease is never deleted.
pub async fn run(api: ApiClient, node: String, clock: Clock, term: Term, stop: CancellationToken) {
    let keeper = Keeper { path: format!("{COLLECTION}/{node}"), api, node, clock, term };
    // The next process repeats a dropped renewal.
    tokio::select! {
        () = keeper.run() => {}
        () = stop.cancelled() => {}
    }
}

struct Keeper {
    api: ApiClient,
    node: String,
    path: String,
    clock: Clock,
    term: Term,
}

impl Keeper {
    async fn run(self) {
        let mut lease = None;
        loop {
            self.renew(&mut lease).await;
            let jitter = 1.0 + JITTER * rand::random::<f64>();
            tokio::time::sleep(self.term.every.mul_f64(jitter)).await;
        }
    }

    /// Retries until the lease is renewed.
    async fn renew(&self, lease: &mut Option<Value>) {
        let mut failures = 0_u32;
        loop {
            let outcome = match lease.as_ref() {
                Some(known) => self.update(known).await.map(Some),
                None => self.ensure().await,
            };
            let step = match outcome {
                Ok(Some(fresh)) => {
                    *lease = Some(fresh);
                    next(Ok(()), failures)
                }
                Ok(None) => {
                    debug!(node = %self.node, "lease not created, the node does not exist yet");
                    NextAttempt::Pause(LONGEST_PAUSE)
                }
                Err(failure) => {
                    failures = failures.saturating_add(1);
                    debug!(%failure, failures, "renew lease failed");
                    if failures == TRIES {
                        warn!(%failure, "renew lease failed repeatedly");
                    }
                    next(Err(&failure), failures)
                }
            };
            match step {
                NextAttempt::Rest => return,
                NextAttempt::Again => {}
                NextAttempt::Ensure => *lease = None,
                NextAttempt::Pause(pause) => {
                    *lease = None;
                    tokio::time::sleep(pause).await;
                }
            }
        }
    }

    async fn update(&self, lease: &Value) -> Result<Value, ApiFailure> {
        // A heartbeat does not wait for its owner.
        let owner = if has_owner(lease) { None } else { self.node_uid().await.ok().flatten() };
        self.api.update(&self.path, &self.renewed(Some(lease), owner.as_deref())).await
    }

    fn renewed(&self, lease: Option<&Value>, owner: Option<&str>) -> Value {
        renewed(lease, &self.node, owner, self.term.seconds, self.clock.wall())
    }

    /// Renews the lease as it is, or creates it. Without a Node no lease is created, and the result is
    /// `None`: a lease without an owner would outlive its Node (`pkg/kubelet/util: SetNodeOwnerFunc`).
    async fn ensure(&self) -> Result<Option<Value>, ApiFailure> {
        match self.api.get(&self.path).await {
            Ok(lease) => self.update(&lease).await.map(Some),
            Err(ApiFailure::NotFound(_)) => {
                let Some(owner) = self.node_uid().await? else { return Ok(None) };
                self.api.create(COLLECTION, &self.renewed(None, Some(&owner))).await.map(Some)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Returns the UID of the Node for the owner reference; `None` without a Node.
    async fn node_uid(&self) -> Result<Option<String>, ApiFailure> {
        match self.api.get(&node_path(&self.node)).await {
            Ok(node) => Ok(Some(text(&node["metadata"], "uid").to_owned()).filter(|uid| !uid.is_empty())),
            Err(ApiFailure::NotFound(_)) => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_lease_failure_has_its_next_step() {
        let unreachable = ApiFailure::Unreachable("x".into());
        let conflict = ApiFailure::Conflict("x".into());
        let cases = [
            (Ok(()), 0, NextAttempt::Rest),
            (Err(&unreachable), 1, NextAttempt::Again),
            (Err(&unreachable), 4, NextAttempt::Again),
            (Err(&conflict), 1, NextAttempt::Ensure),
            (Err(&unreachable), 5, NextAttempt::Pause(Duration::from_millis(200))),
            (Err(&conflict), 6, NextAttempt::Pause(Duration::from_millis(400))),
            (Err(&unreachable), 50, NextAttempt::Pause(Duration::from_secs(1))),
        ];
        for (outcome, failures, want) in cases {
            assert_eq!(next(outcome, failures), want, "{outcome:?} {failures}");
        }
    }

    #[test]
    fn a_renewal_keeps_existing_fields_and_adds_a_missing_owner() {
        let now = "2026-01-01T00:00:00.1234567Z".parse().unwrap();
        let first = renewed(None, "n1", None, 40, now);
        assert_eq!(
            first["spec"],
            json!({"holderIdentity": "n1", "leaseDurationSeconds": 40, "renewTime": "2026-01-01T00:00:00.123456Z"})
        );
        assert_eq!(first["metadata"].get("ownerReferences"), None);
        let mut live = first;
        live["metadata"]["resourceVersion"] = json!("7");
        let owned = renewed(Some(&live), "n1", Some("u"), 40, now);
        assert_eq!(owned["metadata"]["resourceVersion"], "7");
        assert_eq!(owned["metadata"]["ownerReferences"][0]["uid"], "u");
        let kept = renewed(Some(&owned), "n1", Some("other"), 40, now);
        assert_eq!(kept["metadata"]["ownerReferences"][0]["uid"], "u");
    }
}
