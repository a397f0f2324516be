//! Execs that ended, for an owner that died while it waited: it can tell what ran from what never began.
use std::collections::VecDeque;
use std::time::Duration;

use parking_lot::Mutex;
use quintlet_model::outcome::Outcome;

use crate::facts::Key;
use crate::reply::Reply;

/// Ends that are remembered: the hooks of a full node's pods, once over.
const REMEMBERED: usize = 512;
/// An answer that is larger is not kept; that it ended is.
const KEPT: usize = 4096;

/// What is known of a call that may have come.
#[derive(Debug, Clone)]
pub enum Known {
    /// It did not come.
    NeverCame,
    /// It came and ended with this.
    Ended(Box<Reply>),
    /// Nobody can tell, or nobody knows how it ended.
    Nothing,
}

#[derive(Debug)]
struct End {
    key: Key,
    entered: Duration,
    reply: Option<Reply>,
}

#[derive(Debug)]
struct Inner {
    // Boottime from which on no call that came is missing.
    since: Duration,
    ends: VecDeque<End>,
}

/// The last ends.
#[derive(Debug)]
pub struct Ended(Mutex<Inner>);

impl Ended {
    /// Remembers what ends from now on; `now` is boottime.
    #[must_use]
    pub fn since(now: Duration) -> Self {
        Self(Mutex::new(Inner { since: now, ends: VecDeque::new() }))
    }

    /// Takes note of the end of a call that came at `entered` (boottime).
    pub fn note(&self, key: Key, entered: Duration, reply: &Reply) {
        let size: usize = reply.data.iter().map(bytes::Bytes::len).sum();
        let reply = match reply.outcome {
            // As if it never came.
            Outcome::NotDispatched => return,
            Outcome::Ok | Outcome::RuntimeError => (size <= KEPT).then(|| reply.clone()),
            Outcome::Unknown => None,
        };
        let mut inner = self.0.lock();
        if inner.ends.len() == REMEMBERED
            && let Some(forgotten) = inner.ends.pop_front()
        {
            inner.since = inner.since.max(forgotten.entered.saturating_add(Duration::from_nanos(1)));
        }
        inner.ends.push_back(End { key, entered, reply });
    }

    /// What is known of a call that came at `began` (boottime) or later, if it did, and is not in flight.
    #[must_use]
    pub fn find(&self, key: &Key, began: Duration) -> Known {
        let inner = self.0.lock();
        match inner.ends.iter().rev().find(|end| end.key == *key && end.entered >= began) {
            Some(End { reply: Some(reply), .. }) => Known::Ended(Box::new(reply.clone())),
            Some(End { reply: None, .. }) => Known::Nothing,
            None if began >= inner.since => Known::NeverCame,
            None => Known::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tonic::Code;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn key(id: usize) -> Key {
        Key::Named { method: "ExecSync", parts: vec![id.to_string()] }
    }

    fn reply(outcome: Outcome, size: usize) -> Reply {
        let mut reply = Reply::refused(Code::Ok, "", outcome, Duration::ZERO);
        reply.data = vec![Bytes::from(vec![0; size])];
        reply
    }

    fn told(ended: &Ended, id: usize, began: Duration) -> &'static str {
        match ended.find(&key(id), began) {
            Known::NeverCame => "never came",
            Known::Ended(_) => "ended",
            Known::Nothing => "nothing",
        }
    }

    #[test]
    fn what_ran_is_told_from_what_never_came_and_from_what_nobody_saw() {
        let ended = Ended::since(10 * SECOND);
        let cases = [
            (1, Outcome::Ok, 1, "ended"),
            (2, Outcome::RuntimeError, 1, "ended"),
            (3, Outcome::Unknown, 1, "nothing"),
            (4, Outcome::NotDispatched, 1, "never came"),
            (5, Outcome::Ok, KEPT + 1, "nothing"),
        ];
        for (id, outcome, size, _) in cases {
            ended.note(key(id), 12 * SECOND, &reply(outcome, size));
        }
        for (id, outcome, _, known) in cases {
            assert_eq!(told(&ended, id, 11 * SECOND), known, "{outcome}");
        }
        assert_eq!(told(&ended, 6, 11 * SECOND), "never came");
        assert_eq!(told(&ended, 1, 13 * SECOND), "never came", "an earlier one like it is another");
        assert_eq!(told(&ended, 6, 9 * SECOND), "nothing", "it may have come to an earlier process");
    }

    #[test]
    fn what_is_forgotten_is_not_said_to_have_never_come() {
        let ended = Ended::since(Duration::ZERO);
        for id in 0..=REMEMBERED {
            ended.note(key(id), SECOND * u32::try_from(id).unwrap(), &reply(Outcome::Ok, 0));
        }
        assert_eq!(told(&ended, 0, Duration::ZERO), "nothing");
        assert_eq!(told(&ended, 1, Duration::ZERO), "ended");
        assert_eq!(told(&ended, REMEMBERED + 1, SECOND), "never came");
    }
}
