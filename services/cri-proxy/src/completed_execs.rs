//! Completed ExecSync results, kept so that a restarted pod-sync can read them.
use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_model::outcome::Outcome;

use crate::reply::Reply;
use crate::request_info::CallKey;

/// Number of results: one hook for each pod of a full node.
const CAPACITY: usize = 512;
/// Maximum size of a stored reply. Of a larger one, only the completion is stored.
const MAX_REPLY: usize = 4096;

/// State of an ExecSync call, as far as the proxy knows it.
#[derive(Debug, Clone)]
pub(crate) enum ExecRecord {
    /// The call was not received.
    NotReceived,
    /// The call has completed with this reply.
    Completed(Box<Reply>),
    /// Unknown: the call may have been received, or its reply was not stored.
    Unknown,
}

#[derive(Debug)]
struct CompletedExec {
    key: CallKey,
    entered: Duration,
    reply: Option<Reply>,
}

#[derive(Debug)]
struct Inner {
    // All calls received since this time (CLOCK_BOOTTIME) are known.
    complete_since: Duration,
    execs: VecDeque<CompletedExec>,
}

/// The most recent results.
#[derive(Debug)]
pub(crate) struct CompletedExecs(Mutex<Inner>);

impl CompletedExecs {
    /// Creates an empty store. `now` is CLOCK_BOOTTIME.
    #[must_use]
    pub(crate) fn new(now: Duration) -> Self {
        Self(Mutex::new(Inner { complete_since: now, execs: VecDeque::new() }))
    }

    /// Stores the result of a call that was received at `entered` (CLOCK_BOOTTIME).
    pub(crate) fn record(&self, key: CallKey, entered: Duration, reply: &Reply) {
        let size: usize = reply.data.iter().map(bytes::Bytes::len).sum();
        let reply = match reply.outcome {
            // The runtime did not receive it, so it may be sent again.
            Outcome::NotDispatched => return,
            Outcome::Ok | Outcome::RuntimeError => (size <= MAX_REPLY).then(|| reply.clone()),
            Outcome::Unknown => None,
        };
        let mut inner = self.0.lock();
        if inner.execs.len() == CAPACITY
            && let Some(forgotten) = inner.execs.pop_front()
        {
            inner.complete_since =
                inner.complete_since.max(forgotten.entered.saturating_add(Duration::from_nanos(1)));
        }
        inner.execs.push_back(CompletedExec { key, entered, reply });
    }

    /// Looks up a call that was received at `began` (CLOCK_BOOTTIME) or later and is not in flight.
    #[must_use]
    pub(crate) fn find(&self, key: &CallKey, began: Duration) -> ExecRecord {
        let inner = self.0.lock();
        match inner.execs.iter().rev().find(|end| end.key == *key && end.entered >= began) {
            Some(CompletedExec { reply: Some(reply), .. }) => ExecRecord::Completed(Box::new(reply.clone())),
            Some(CompletedExec { reply: None, .. }) => ExecRecord::Unknown,
            None if began >= inner.complete_since => ExecRecord::NotReceived,
            None => ExecRecord::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tonic::Code;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(id: usize) -> CallKey {
        CallKey::Named { method: "ExecSync", parts: vec![id.to_string()] }
    }

    fn reply(outcome: Outcome, size: usize) -> Reply {
        let mut reply = Reply::local(Code::Ok, "", outcome, Duration::ZERO);
        reply.data = vec![Bytes::from(vec![0; size])];
        reply
    }

    fn found(ended: &CompletedExecs, id: usize, began: Duration) -> &'static str {
        match ended.find(&key(id), began) {
            ExecRecord::NotReceived => "never came",
            ExecRecord::Completed(_) => "ended",
            ExecRecord::Unknown => "nothing",
        }
    }

    #[test]
    fn completed_calls_differ_from_calls_not_received_and_from_unknown_ones() {
        let ended = CompletedExecs::new(10 * SECOND);
        let cases = [
            (1, Outcome::Ok, 1, "ended"),
            (2, Outcome::RuntimeError, 1, "ended"),
            (3, Outcome::Unknown, 1, "nothing"),
            (4, Outcome::NotDispatched, 1, "never came"),
            (5, Outcome::Ok, MAX_REPLY + 1, "nothing"),
        ];
        for (id, outcome, size, _) in cases {
            ended.record(key(id), 12 * SECOND, &reply(outcome, size));
        }
        for (id, outcome, _, known) in cases {
            assert_eq!(found(&ended, id, 11 * SECOND), known, "{outcome}");
        }
        assert_eq!(found(&ended, 6, 11 * SECOND), "never came");
        assert_eq!(found(&ended, 1, 13 * SECOND), "never came", "an earlier one like it is another");
        assert_eq!(found(&ended, 6, 9 * SECOND), "nothing", "it may have come to an earlier process");
    }

    #[test]
    fn a_call_whose_result_was_evicted_is_unknown() {
        let ended = CompletedExecs::new(Duration::ZERO);
        for id in 0..=CAPACITY {
            ended.record(key(id), SECOND * u32::try_from(id).unwrap(), &reply(Outcome::Ok, 0));
        }
        assert_eq!(found(&ended, 0, Duration::ZERO), "nothing");
        assert_eq!(found(&ended, 1, Duration::ZERO), "ended");
        assert_eq!(found(&ended, CAPACITY + 1, SECOND), "never came");
    }
}
