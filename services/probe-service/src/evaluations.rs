//! The newest evaluations, in order, for observers that read at their own pace.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use quintlet_proto::probe::v1 as wire;
use tokio::sync::watch;

/// Evaluations that are kept: three seconds of 330 probes with a period of 1 s.
pub(crate) const CAPACITY: usize = 1024;

/// The position at which an observer starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// After the evaluation with this number.
    After(u64),
    /// The cursor is invalid for the given reason. The observer starts after the evaluation with this number,
    /// so that it reads all evaluations that are kept.
    Resync(u64, &'static str),
}

/// The next item for an observer.
#[derive(Debug, Clone, PartialEq)]
pub enum NextEvaluation {
    /// An evaluation, with its number.
    Evaluation(u64, Arc<wire::Evaluation>),
    /// The number of evaluations that are no longer kept, and the number of the evaluation after which the
    /// observer continues.
    Missed(u64, u64),
    /// There is no newer evaluation.
    End,
}

/// The evaluations of one run of the service, numbered from 1.
#[derive(Debug)]
pub struct Evaluations {
    epoch: u64,
    kept: Mutex<VecDeque<Arc<wire::Evaluation>>>,
    last: watch::Sender<u64>,
}

impl Evaluations {
    /// Creates an empty list. Later runs of the service have larger epochs.
    #[must_use]
    pub fn new(epoch: u64) -> Self {
        Self { epoch, kept: Mutex::default(), last: watch::Sender::new(0) }
    }

    /// Appends an evaluation, and drops the oldest if there are [`CAPACITY`].
    pub fn push(&self, evaluation: wire::Evaluation) {
        let mut kept = self.kept.lock();
        if kept.len() >= CAPACITY {
            kept.pop_front();
        }
        kept.push_back(Arc::new(evaluation));
        // The lock is held so that the number matches the list.
        self.last.send_modify(|last| *last = last.saturating_add(1));
    }

    /// Returns the number of the last evaluation, to be watched for changes.
    #[must_use]
    pub fn last(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    /// Returns the cursor after the evaluation with this number.
    #[must_use]
    pub fn cursor(&self, seq: u64) -> wire::Cursor {
        wire::Cursor { epoch: self.epoch, seq }
    }

    /// Returns the position at which an observer with this cursor starts; without a cursor, after the last
    /// evaluation.
    #[must_use]
    pub fn start(&self, resume: Option<wire::Cursor>) -> Start {
        let kept = self.kept.lock();
        let last = *self.last.borrow();
        let oldest = last.saturating_sub(u64::try_from(kept.len()).unwrap_or(u64::MAX));
        match resume {
            None => Start::After(last),
            Some(at) if at.epoch != self.epoch => Start::Resync(oldest, "probe-service was restarted"),
            Some(at) if at.seq > last => Start::Resync(oldest, "the cursor is ahead of this service"),
            Some(at) => Start::After(at.seq),
        }
    }

    /// Returns the item after the evaluation with the number `at`.
    #[must_use]
    pub fn after(&self, at: u64) -> NextEvaluation {
        let kept = self.kept.lock();
        let last = *self.last.borrow();
        let oldest = last.saturating_sub(u64::try_from(kept.len()).unwrap_or(u64::MAX));
        if at < oldest {
            return NextEvaluation::Missed(oldest.saturating_sub(at), oldest);
        }
        let index = usize::try_from(at.saturating_sub(oldest)).unwrap_or(usize::MAX);
        match kept.get(index) {
            Some(evaluation) => NextEvaluation::Evaluation(at.saturating_add(1), Arc::clone(evaluation)),
            None => NextEvaluation::End,
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
    fn an_observer_resumes_at_its_position_and_learns_the_number_of_dropped_evaluations() {
        let some = filled(5);
        let at = |epoch, seq| Some(wire::Cursor { epoch, seq });
        for (resume, want) in [
            (None, Start::After(5)),
            (at(7, 0), Start::After(0)),
            (at(7, 3), Start::After(3)),
            (at(7, 5), Start::After(5)),
            (at(7, 6), Start::Resync(0, "the cursor is ahead of this service")),
            (at(6, 3), Start::Resync(0, "probe-service was restarted")),
        ] {
            assert_eq!(some.start(resume), want, "{resume:?}");
        }
        assert!(matches!(some.after(3), NextEvaluation::Evaluation(4, e) if e.run == 4));
        assert_eq!(some.after(5), NextEvaluation::End);
        let more = filled(CAPACITY + 3);
        assert_eq!(more.after(1), NextEvaluation::Missed(2, 3));
        assert!(matches!(more.after(3), NextEvaluation::Evaluation(4, e) if e.run == 4));
        assert_eq!(more.start(at(1, 1)), Start::Resync(3, "probe-service was restarted"));
    }
}
