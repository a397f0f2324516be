//! The newest evaluations in the order in which they were made, for observers who read at their own pace.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use quintlet_proto::probe::v1 as wire;
use tokio::sync::watch;

/// Evaluations kept for observers that are behind or away: three seconds of 330 probes with a period of 1 s.
pub const CAPACITY: usize = 1024;

/// Where an observer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// After this evaluation.
    After(u64),
    /// The cursor is not of this run, and why: everything kept follows, which is what comes after this evaluation.
    Resync(u64, &'static str),
}

/// What comes next for an observer.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// The evaluation with this number.
    Evaluation(u64, Arc<wire::Evaluation>),
    /// So many are no longer kept; the observer goes on after the evaluation with the given number.
    Missed(u64, u64),
    /// Nothing yet.
    End,
}

/// The evaluations of one run of the service. Numbers begin at 1.
#[derive(Debug)]
pub struct Evaluations {
    epoch: u64,
    kept: Mutex<VecDeque<Arc<wire::Evaluation>>>,
    last: watch::Sender<u64>,
}

impl Evaluations {
    /// None yet. Later runs have larger epochs.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self { epoch, kept: Mutex::default(), last: watch::Sender::new(0) }
    }

    /// Adds one; the oldest goes when there is no room.
    pub fn push(&self, evaluation: wire::Evaluation) {
        let mut kept = self.kept.lock();
        if kept.len() >= CAPACITY {
            kept.pop_front();
        }
        kept.push_back(Arc::new(evaluation));
        // Under the lock, so that the number and what is kept belong together.
        self.last.send_modify(|last| *last = last.saturating_add(1));
    }

    /// The number of the last evaluation, and its changes.
    #[must_use]
    pub fn last(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    /// The cursor after the evaluation with this number.
    #[must_use]
    pub fn cursor(&self, seq: u64) -> wire::Cursor {
        wire::Cursor { epoch: self.epoch, seq }
    }

    /// Where an observer with this cursor begins; without one, after the last evaluation.
    #[must_use]
    pub fn start(&self, resume: Option<wire::Cursor>) -> Start {
        let kept = self.kept.lock();
        let last = *self.last.borrow();
        let oldest = last.saturating_sub(u64::try_from(kept.len()).unwrap_or(u64::MAX));
        match resume {
            None => Start::After(last),
            Some(at) if at.epoch != self.epoch => Start::Resync(oldest, "probe-service was restarted since"),
            Some(at) if at.seq > last => Start::Resync(oldest, "the cursor is ahead of this service"),
            Some(at) => Start::After(at.seq),
        }
    }

    /// What comes after the evaluation with the number `at`.
    #[must_use]
    pub fn after(&self, at: u64) -> Next {
        let kept = self.kept.lock();
        let last = *self.last.borrow();
        let oldest = last.saturating_sub(u64::try_from(kept.len()).unwrap_or(u64::MAX));
        if at < oldest {
            return Next::Missed(oldest.saturating_sub(at), oldest);
        }
        let index = usize::try_from(at.saturating_sub(oldest)).unwrap_or(usize::MAX);
        match kept.get(index) {
            Some(evaluation) => Next::Evaluation(at.saturating_add(1), Arc::clone(evaluation)),
            None => Next::End,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(count: usize) -> Evaluations {
        let evaluations = Evaluations::new(7);
        for n in 1..=count {
            evaluations.push(wire::Evaluation { run: u32::try_from(n).unwrap(), ..Default::default() });
        }
        evaluations
    }

    #[test]
    fn an_observer_goes_on_where_it_was_and_learns_how_much_is_no_longer_kept() {
        let some = filled(5);
        let at = |epoch, seq| Some(wire::Cursor { epoch, seq });
        for (resume, want) in [
            (None, Start::After(5)),
            (at(7, 0), Start::After(0)),
            (at(7, 3), Start::After(3)),
            (at(7, 5), Start::After(5)),
            (at(7, 6), Start::Resync(0, "the cursor is ahead of this service")),
            (at(6, 3), Start::Resync(0, "probe-service was restarted since")),
        ] {
            assert_eq!(some.start(resume), want, "{resume:?}");
        }
        assert!(matches!(some.after(3), Next::Evaluation(4, e) if e.run == 4));
        assert_eq!(some.after(5), Next::End);
        let more = filled(CAPACITY + 3);
        assert_eq!(more.after(1), Next::Missed(2, 3));
        assert!(matches!(more.after(3), Next::Evaluation(4, e) if e.run == 4));
        assert_eq!(more.start(at(1, 1)), Start::Resync(3, "probe-service was restarted since"));
    }
}
