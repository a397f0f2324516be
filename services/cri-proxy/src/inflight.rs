//! Mutations in flight. An identical call joins the one in flight instead of running twice.
use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::fence::FencingToken;
use crate::reply::Reply;
use crate::request_info::CallKey;

/// A pending reply. A sender dropped without a reply means that the task of the call ended unexpectedly.
pub(crate) type PendingReply = watch::Receiver<Option<Arc<Reply>>>;

/// The decision about a new call.
#[derive(Debug)]
pub enum Admission {
    /// No call with this key is in flight: the caller runs it.
    Lead(Leader),
    /// An identical call is in flight: the caller waits for its reply.
    Join(PendingReply),
    /// A different call with the same key is in flight.
    Conflict,
}

#[derive(Debug)]
struct Entry {
    bytes: Bytes,
    token: Arc<Mutex<FencingToken>>,
    answer: PendingReply,
}

type Entries = Arc<Mutex<HashMap<CallKey, Entry>>>;

/// Unary calls in flight by key, so that equal calls join and different ones of one object exclude each
/// other. Clones share the calls.
#[derive(Debug, Clone, Default)]
pub struct InFlight(Entries);

/// The call that runs for all that joined it. If it is dropped without a reply, its key is free and the
/// joined calls get an unknown outcome.
#[derive(Debug)]
pub struct Leader {
    entries: Entries,
    key: CallKey,
    token: Arc<Mutex<FencingToken>>,
    answer: watch::Sender<Option<Arc<Reply>>>,
}

impl InFlight {
    /// Joins the call in flight with the same key, or makes the caller the leader of a new one.
    #[must_use]
    pub fn enter(&self, key: CallKey, bytes: &Bytes, token: FencingToken) -> Admission {
        let mut entries = self.0.lock();
        if let Some(entry) = entries.get(&key) {
            if entry.bytes != *bytes {
                return Admission::Conflict;
            }
            let mut of_leader = entry.token.lock();
            *of_leader = of_leader.merged(token);
            return Admission::Join(entry.answer.clone());
        }
        let (answer, receiver) = watch::channel(None);
        let token = Arc::new(Mutex::new(token));
        entries.insert(key.clone(), Entry { bytes: bytes.clone(), token: token.clone(), answer: receiver });
        Admission::Lead(Leader { entries: self.0.clone(), key, token, answer })
    }

    /// Joins an identical call, if one is in flight.
    #[must_use]
    pub fn join(&self, key: &CallKey, bytes: &Bytes, token: FencingToken) -> Option<PendingReply> {
        let entries = self.0.lock();
        let entry = entries.get(key).filter(|e| e.bytes == *bytes)?;
        let mut of_leader = entry.token.lock();
        *of_leader = of_leader.merged(token);
        Some(entry.answer.clone())
    }

    /// Returns whether pod-sync is stopping the container or the sandbox.
    #[must_use]
    pub fn is_stopping(&self, id: &str) -> bool {
        self.0.lock().keys().any(|key| key.stops(id))
    }

    /// Returns the number of keys in flight; joined calls count once.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Returns whether no call is in flight.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}

impl Leader {
    /// Returns the token, which joined calls may have extended.
    #[must_use]
    pub fn token(&self) -> Arc<Mutex<FencingToken>> {
        self.token.clone()
    }

    /// Returns the pending reply.
    #[must_use]
    pub fn subscribe(&self) -> PendingReply {
        self.answer.subscribe()
    }

    /// Completes the call. A later identical call runs again.
    pub fn finish(self, reply: Reply) {
        self.entries.lock().remove(&self.key);
        self.answer.send_replace(Some(Arc::new(reply)));
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        // After `finish`, the key may belong to another call.
        if self.answer.borrow().is_none() {
            self.entries.lock().remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use quintlet_model::outcome::Outcome;

    use super::*;

    const TOKEN: FencingToken = FencingToken { epoch: Some(1), deadline: None };

    fn key(id: &str) -> CallKey {
        CallKey::Named { method: "StartContainer", parts: vec![id.into()] }
    }

    #[test]
    fn identical_calls_join_different_ones_conflict_and_completion_frees_the_key() {
        let calls = InFlight::default();
        let (a, b) = (Bytes::from_static(b"a"), Bytes::from_static(b"b"));
        let Admission::Lead(lead) = calls.enter(key("1"), &a, TOKEN) else { panic!("first") };
        let Admission::Join(answer) = calls.enter(key("1"), &a, FencingToken { epoch: Some(2), ..TOKEN })
        else {
            panic!("same")
        };
        assert!(matches!(calls.enter(key("1"), &b, TOKEN), Admission::Conflict));
        assert!(matches!(calls.enter(key("2"), &b, TOKEN), Admission::Lead(_)));
        assert_eq!(
            lead.token().lock().epoch,
            Some(2),
            "the newer owner's call must not fall to the older's fence"
        );
        lead.finish(Reply::local(tonic::Code::Ok, "", Outcome::Ok, Duration::ZERO));
        assert!(answer.borrow().is_some());
        assert!(matches!(calls.enter(key("1"), &b, TOKEN), Admission::Lead(_)));
        assert!(calls.is_empty(), "leads dropped unanswered make room too");
    }

    #[test]
    fn a_call_that_may_only_join_does_not_start_a_new_one() {
        let calls = InFlight::default();
        let (a, b) = (Bytes::from_static(b"a"), Bytes::from_static(b"b"));
        assert!(calls.join(&key("1"), &a, TOKEN).is_none());
        assert!(calls.is_empty());
        let Admission::Lead(lead) = calls.enter(key("1"), &a, TOKEN) else { panic!("first") };
        assert!(
            calls.join(&key("1"), &b, TOKEN).is_none(),
            "another call under the same key is not the same"
        );
        assert!(calls.join(&key("1"), &a, FencingToken { epoch: Some(2), ..TOKEN }).is_some());
        assert_eq!(lead.token().lock().epoch, Some(2), "it runs on for the newer owner");
    }
}
