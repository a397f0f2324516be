//! Versions of the services that a process uses: the `Hello` of a peer is compared with the own one.
//!
//! Only streams have a `Hello`. The client of each stream decides before it uses a message, and the server of
//! a stream with changes (targets, statuses, volumes) decides before it applies one. `quintctl health` shows
//! the peers that a process refuses.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_proto::common::v1::Hello;
use quintlet_proto::debug::v1::RefusedPeer;
use quintlet_proto::features;
use tonic::{Code, Status};

use crate::backoff::Backoff;

/// Largest difference of two schemas that work together.
const MAX_DIFFERENCE: u32 = 1;

/// Longest interval between attempts to use a peer that was refused.
pub const MAX_REFUSED_RETRY: Duration = Duration::from_secs(5);
const REFUSED_RETRY: Duration = Duration::from_millis(500);

/// A feature that a service works without if its peer does not have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerFeature {
    /// gRPC probes with TLS. An older probe-service sends them without.
    GrpcProbeTls,
    /// HTTP probes with HTTP/2 and without TLS. An older probe-service sends HTTP/1.1.
    HttpProbeH2c,
}

impl PeerFeature {
    /// Returns the name in a `Hello`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::GrpcProbeTls => features::GRPC_PROBE_TLS,
            Self::HttpProbeH2c => features::HTTP_PROBE_H2C,
        }
    }
}

/// Whether and how a peer is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerDecision {
    /// The peer has all features.
    Use,
    /// The peer does not have these features, and is used for the rest.
    UseWithout(Vec<PeerFeature>),
    /// The peer is not used. The text names the peer, both schemas, and what to do.
    Refuse(String),
}

/// Decides about a peer by its `Hello`. `wanted` has the features that this process would use.
#[must_use]
pub fn decide(name: &str, own: &Hello, peer: &Hello, wanted: &[PeerFeature]) -> PeerDecision {
    let lowest = own.schema.saturating_sub(MAX_DIFFERENCE);
    let highest = own.schema.saturating_add(MAX_DIFFERENCE);
    let service = format!("{name} {}", peer.build);
    let (schemas, own) = (format!("its schema is {}", peer.schema), own.schema);
    if peer.schema > highest {
        return PeerDecision::Refuse(format!(
            "{service} is too new: {schemas}, and this service has {own}: upgrade this service, or go back to {name} of schema {highest}"
        ));
    }
    if peer.schema < lowest {
        return PeerDecision::Refuse(format!(
            "{service} is too old: {schemas}, and this service has {own}: upgrade {name} to schema {lowest} at least"
        ));
    }
    let has = |feature: &PeerFeature| peer.features.iter().any(|name| name == feature.name());
    let missing: Vec<PeerFeature> = wanted.iter().copied().filter(|feature| !has(feature)).collect();
    if missing.is_empty() { PeerDecision::Use } else { PeerDecision::UseWithout(missing) }
}

/// Returns an error if a peer cannot be used. For single calls: nothing is logged or shown by
/// `quintctl health`.
///
/// # Errors
/// Returns FAILED_PRECONDITION.
pub fn admit(name: &str, hello: &Hello) -> Result<(), Status> {
    match decide(name, &quintlet_proto::hello(), hello, &[]) {
        PeerDecision::Use | PeerDecision::UseWithout(_) => Ok(()),
        PeerDecision::Refuse(reason) => Err(Status::failed_precondition(reason)),
    }
}

/// Returns whether an error says that a peer is refused.
#[must_use]
pub fn is_refusal(status: &Status) -> bool {
    status.code() == Code::FailedPrecondition
}

/// The peers that this process refuses, by the number of their [`Neighbour`].
static REFUSED: Mutex<BTreeMap<u64, RefusedPeer>> = Mutex::new(BTreeMap::new());
static NUMBER: AtomicU64 = AtomicU64::new(0);

/// Returns the peers that this process refuses. A peer with several streams is listed once for each of its
/// reasons.
#[must_use]
pub fn refused_peers() -> Vec<RefusedPeer> {
    let mut peers: Vec<RefusedPeer> = Vec::new();
    for peer in REFUSED.lock().values() {
        if !peers.contains(peer) {
            peers.push(peer.clone());
        }
    }
    peers
}

/// A service that this process uses or serves over streams.
#[derive(Debug)]
pub struct Neighbour {
    number: u64,
    name: String,
    wanted: &'static [PeerFeature],
    state: Mutex<NeighbourState>,
}

#[derive(Debug)]
struct NeighbourState {
    /// The last decision and the version that it is about.
    decided: Option<(PeerDecision, String)>,
    backoff: Backoff,
}

impl Neighbour {
    /// Returns a peer that has not sent a `Hello`. `wanted` has the features that this process would use.
    #[must_use]
    pub fn new(name: impl Into<String>, wanted: &'static [PeerFeature]) -> Self {
        let backoff = Backoff::new(REFUSED_RETRY, 2.0, MAX_REFUSED_RETRY);
        Self {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            name: name.into(),
            wanted,
            state: Mutex::new(NeighbourState { decided: None, backoff }),
        }
    }

    /// Takes the `Hello` of a stream. Logs a decision that differs from the one before.
    ///
    /// # Errors
    /// Returns FAILED_PRECONDITION if the peer is refused: the caller ends the stream without using another
    /// message of it.
    pub fn greeted(&self, hello: &Hello) -> Result<(), Status> {
        let decision = decide(&self.name, &quintlet_proto::hello(), hello, self.wanted);
        let mut state = self.state.lock();
        let decided = Some((decision.clone(), hello.build.clone()));
        let is_new = state.decided != decided;
        let was_refused = state.is_refused();
        state.decided = decided;
        let (peer, build) = (&self.name, &hello.build);
        let schema = hello.schema;
        let PeerDecision::Refuse(reason) = decision else {
            state.backoff.reset();
            REFUSED.lock().remove(&self.number);
            if let PeerDecision::UseWithout(missing) = &decision
                && is_new
            {
                let missing: Vec<&str> = missing.iter().map(|feature| feature.name()).collect();
                tracing::info!(peer, build, schema, ?missing, "using an older peer without some features");
            }
            if was_refused {
                tracing::info!(peer, build, schema, "peer is compatible again");
            }
            return Ok(());
        };
        if is_new {
            tracing::error!(peer, build, schema, reason, "refusing an incompatible peer");
            let refused = RefusedPeer { peer: peer.clone(), reason: reason.clone() };
            REFUSED.lock().insert(self.number, refused);
        }
        Err(Status::failed_precondition(reason))
    }

    /// Returns an error while the peer is refused, for calls outside of the stream.
    ///
    /// # Errors
    /// Returns FAILED_PRECONDITION.
    pub fn check(&self) -> Result<(), Status> {
        match &self.state.lock().decided {
            Some((PeerDecision::Refuse(reason), _)) => Err(Status::failed_precondition(reason.clone())),
            Some(_) | None => Ok(()),
        }
    }

    /// Returns whether the peer, which has sent a `Hello`, has a feature of `wanted`.
    #[must_use]
    pub fn has(&self, feature: PeerFeature) -> bool {
        match &self.state.lock().decided {
            Some((PeerDecision::UseWithout(missing), _)) => !missing.contains(&feature),
            Some(_) | None => true,
        }
    }

    /// Returns the time until the next attempt: `usual`, or longer and longer for a peer that is refused.
    pub fn next_wait(&self, usual: Duration) -> Duration {
        let mut state = self.state.lock();
        if state.is_refused() { state.backoff.next_wait().max(usual) } else { usual }
    }
}

impl NeighbourState {
    fn is_refused(&self) -> bool {
        matches!(self.decided, Some((PeerDecision::Refuse(_), _)))
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        REFUSED.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(schema: u32, features: &[&str]) -> Hello {
        let features = features.iter().map(|name| (*name).to_owned()).collect();
        Hello { build: "9.0.0".to_owned(), features, schema }
    }

    #[test]
    fn a_peer_is_used_up_to_one_schema_apart_and_without_the_features_that_it_does_not_have() {
        use PeerFeature::{GrpcProbeTls, HttpProbeH2c};
        let both = [features::GRPC_PROBE_TLS, features::HTTP_PROBE_H2C];
        let without = |missing: &[PeerFeature]| PeerDecision::UseWithout(missing.to_vec());
        let refuse = |text: &str| PeerDecision::Refuse(text.to_owned());
        let all: &[PeerFeature] = &[GrpcProbeTls, HttpProbeH2c];
        let cases = [
            (3, hello(3, &both), all, PeerDecision::Use),
            (3, hello(2, &both), all, PeerDecision::Use),
            (3, hello(4, &both), all, PeerDecision::Use),
            (3, hello(4, &["unknown", both[0], both[1]]), all, PeerDecision::Use),
            (3, hello(3, &[]), all, without(all)),
            (3, hello(2, &[features::HTTP_PROBE_H2C]), all, without(&[GrpcProbeTls])),
            (3, hello(3, &[]), &[], PeerDecision::Use),
            (
                3,
                hello(5, &both),
                all,
                refuse(
                    "probe-service 9.0.0 is too new: its schema is 5, and this service has 3: upgrade this service, or go back to \
                     probe-service of schema 4",
                ),
            ),
            (
                3,
                hello(1, &both),
                &[],
                refuse(
                    "probe-service 9.0.0 is too old: its schema is 1, and this service has 3: upgrade probe-service to schema 2 at least",
                ),
            ),
            // A peer without a schema is one of before the first.
            (1, hello(0, &[]), &[], PeerDecision::Use),
            (u32::MAX, hello(u32::MAX, &[]), &[], PeerDecision::Use),
        ];
        for (own, peer, wanted, want) in cases {
            let decided = decide("probe-service", &hello(own, &both), &peer, wanted);
            assert_eq!(decided, want, "{own} {peer:?}");
        }
    }

    #[test]
    fn this_build_has_all_features() {
        let own = quintlet_proto::hello();
        let wanted = [PeerFeature::GrpcProbeTls, PeerFeature::HttpProbeH2c];
        assert_eq!(decide("probe-service", &own, &own, &wanted), PeerDecision::Use);
    }

    #[test]
    fn a_refused_peer_is_shown_and_tried_again_with_a_back_off_until_it_is_compatible() {
        let usual = Duration::from_millis(100);
        let peer = Neighbour::new("test-peer", &[PeerFeature::GrpcProbeTls]);
        let shown = || refused_peers().into_iter().filter(|refused| refused.peer == "test-peer").count();
        assert_eq!((peer.next_wait(usual), peer.check().is_ok(), shown()), (usual, true, 0));
        assert!(peer.has(PeerFeature::GrpcProbeTls));
        let too_new = quintlet_proto::SCHEMA + 2;
        for _ in 0..2 {
            let refusal = peer.greeted(&hello(too_new, &[])).unwrap_err();
            assert!(is_refusal(&refusal));
            assert_eq!((peer.check().unwrap_err().message(), shown()), (refusal.message(), 1));
        }
        let second = Neighbour::new("test-peer", &[]);
        second.greeted(&hello(too_new, &[])).unwrap_err();
        assert_eq!(shown(), 1, "a second stream to the same peer");
        drop(second);
        let waits: Vec<u128> = (0..6).map(|_| peer.next_wait(usual).as_millis()).collect();
        assert_eq!(waits, [500, 1000, 2000, 4000, 5000, 5000]);
        peer.greeted(&hello(quintlet_proto::SCHEMA, &[])).unwrap();
        assert_eq!((peer.next_wait(usual), peer.check().is_ok(), shown()), (usual, true, 0));
        assert!(!peer.has(PeerFeature::GrpcProbeTls));
        peer.greeted(&hello(too_new, &[])).unwrap_err();
        drop(peer);
        assert_eq!(shown(), 0, "a peer that is gone");
    }
}
