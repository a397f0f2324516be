//! Mutations in flight, so that an identical call joins instead of running twice.
use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::facts::Key;
use crate::fence::Terms;
use crate::reply::Reply;

/// The answer to come. A sender dropped without one means that the call's task died.
pub type Answer = watch::Receiver<Option<Arc<Reply>>>;

/// What a new call finds.
#[derive(Debug)]
pub enum Admission {
    /// Nothing like it is in flight: run it.
    Lead(Lead),
    /// The same call is: wait for its answer.
    Join(Answer),
    /// Another call under the same key is.
    Conflict,
}

#[derive(Debug)]
struct Entry {
    bytes: Bytes,
    terms: Arc<Mutex<Terms>>,
    answer: Answer,
}

type Entries = Arc<Mutex<HashMap<Key, Entry>>>;

/// All mutations in flight.
#[derive(Debug, Default)]
pub struct InFlight(Entries);

/// The call that runs for all who joined it. Dropped unanswered, it makes room and its joiners learn that nothing is known.
#[derive(Debug)]
pub struct Lead {
    entries: Entries,
    key: Key,
    terms: Arc<Mutex<Terms>>,
    answer: watch::Sender<Option<Arc<Reply>>>,
}

impl InFlight {
    /// Enters a call.
    #[must_use]
    pub fn enter(&self, key: Key, bytes: &Bytes, terms: Terms) -> Admission {
        let mut entries = self.0.lock();
        if let Some(entry) = entries.get(&key) {
            if entry.bytes != *bytes {
                return Admission::Conflict;
            }
            let mut of_lead = entry.terms.lock();
            *of_lead = of_lead.joined(terms);
            return Admission::Join(entry.answer.clone());
        }
        let (answer, receiver) = watch::channel(None);
        let terms = Arc::new(Mutex::new(terms));
        entries.insert(key.clone(), Entry { bytes: bytes.clone(), terms: terms.clone(), answer: receiver });
        Admission::Lead(Lead { entries: self.0.clone(), key, terms, answer })
    }

    /// The answer of an identical call, where one is in flight.
    #[must_use]
    pub fn join(&self, key: &Key, bytes: &Bytes, terms: Terms) -> Option<Answer> {
        let entries = self.0.lock();
        let entry = entries.get(key).filter(|e| e.bytes == *bytes)?;
        let mut of_lead = entry.terms.lock();
        *of_lead = of_lead.joined(terms);
        Some(entry.answer.clone())
    }

    /// Calls in flight.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}

impl Lead {
    /// The terms as joiners have extended them.
    #[must_use]
    pub fn terms(&self) -> Arc<Mutex<Terms>> {
        self.terms.clone()
    }

    /// The answer as joiners get it.
    #[must_use]
    pub fn subscribe(&self) -> Answer {
        self.answer.subscribe()
    }

    /// Ends the call: a later one like it runs anew.
    pub fn finish(self, reply: Reply) {
        self.entries.lock().remove(&self.key);
        self.answer.send_replace(Some(Arc::new(reply)));
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // After `finish` the key may already be another call's.
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

    const TERMS: Terms = Terms { epoch: Some(1), deadline: None };

    fn key(id: &str) -> Key {
        Key::Named { method: "StartContainer", parts: vec![id.into()] }
    }

    #[test]
    fn identical_calls_join_others_conflict_and_the_end_makes_room() {
        let calls = InFlight::default();
        let (a, b) = (Bytes::from_static(b"a"), Bytes::from_static(b"b"));
        let Admission::Lead(lead) = calls.enter(key("1"), &a, TERMS) else { panic!("first") };
        let Admission::Join(answer) = calls.enter(key("1"), &a, Terms { epoch: Some(2), ..TERMS }) else {
            panic!("same")
        };
        assert!(matches!(calls.enter(key("1"), &b, TERMS), Admission::Conflict));
        assert!(matches!(calls.enter(key("2"), &b, TERMS), Admission::Lead(_)));
        assert_eq!(
            lead.terms().lock().epoch,
            Some(2),
            "the newer owner's call must not fall to the older's fence"
        );
        lead.finish(Reply::refused(tonic::Code::Ok, "", Outcome::Ok, Duration::ZERO));
        assert!(answer.borrow().is_some());
        assert!(matches!(calls.enter(key("1"), &b, TERMS), Admission::Lead(_)));
        assert!(calls.is_empty(), "leads dropped unanswered make room too");
    }

    #[test]
    fn one_that_only_joins_never_begins_a_call() {
        let calls = InFlight::default();
        let (a, b) = (Bytes::from_static(b"a"), Bytes::from_static(b"b"));
        assert!(calls.join(&key("1"), &a, TERMS).is_none());
        assert!(calls.is_empty());
        let Admission::Lead(lead) = calls.enter(key("1"), &a, TERMS) else { panic!("first") };
        assert!(
            calls.join(&key("1"), &b, TERMS).is_none(),
            "another call under the same key is not the same"
        );
        assert!(calls.join(&key("1"), &a, Terms { epoch: Some(2), ..TERMS }).is_some());
        assert_eq!(lead.terms().lock().epoch, Some(2), "it runs on for the newer owner");
    }
}
