//! Queue of reports for a driver: the latest memory of each probe, a bounded number of failed evaluations,
//! and replies. Adding a report never blocks.

use std::collections::{HashMap, VecDeque};

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use quintlet_kit::queue::Counted;
use quintlet_model::probe::ProbeKey;
use quintlet_proto::common::v1::Trace;
use quintlet_proto::probe::v1 as wire;
use quintlet_proto::probe::v1::drive_report::Report;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

/// Failed evaluations that are kept. 110 pods with two containers of three probes that each fail once in one
/// period make 660. Results need no bound: there is one per probe.
pub(crate) const UNHEALTHY_CAPACITY: usize = 1024;

/// The reports for one driver.
#[derive(Debug)]
pub struct Mailbox {
    inner: Mutex<Inner>,
    filled: Notify,
    dropped: Counter,
    queue: Counted,
    /// Cancelled when another driver has replaced this one.
    pub replaced: CancellationToken,
}

#[derive(Debug, Default)]
struct Inner {
    results: HashMap<ProbeKey, (wire::Result, Option<Trace>)>,
    unhealthy: VecDeque<(wire::Unhealthy, Option<Trace>)>,
    answers: VecDeque<Report>,
}

impl Mailbox {
    /// Creates an empty mailbox. `dropped` counts failed evaluations that are dropped.
    #[must_use]
    pub fn new(dropped: Counter) -> Self {
        Self {
            inner: Mutex::default(),
            filled: Notify::new(),
            dropped,
            queue: Counted::new("probe-reports", UNHEALTHY_CAPACITY),
            replaced: CancellationToken::new(),
        }
    }

    /// Adds the latest memory of a probe, and drops an earlier one.
    pub fn result(&self, key: ProbeKey, result: wire::Result, trace: Option<Trace>) {
        self.inner.lock().results.insert(key, (result, trace));
        self.filled.notify_one();
    }

    /// Adds a failed evaluation, and drops the oldest if there are [`UNHEALTHY_CAPACITY`].
    pub fn unhealthy(&self, unhealthy: wire::Unhealthy, trace: Option<Trace>) {
        let mut inner = self.inner.lock();
        if inner.unhealthy.len() >= UNHEALTHY_CAPACITY {
            inner.unhealthy.pop_front();
            self.dropped.inc();
            self.queue.dropped();
        }
        inner.unhealthy.push_back((unhealthy, trace));
        self.queue.set(inner.unhealthy.len());
        drop(inner);
        self.filled.notify_one();
    }

    /// Adds the answer to a request of the driver. The requests bound the number of answers.
    pub fn answer(&self, answer: Report) {
        self.inner.lock().answers.push_back(answer);
        self.filled.notify_one();
    }

    /// Drops the result of a probe that was removed.
    pub fn forget(&self, key: &ProbeKey) {
        self.inner.lock().results.remove(key);
    }

    /// Waits for reports and takes all. Results come before answers, so that an answer follows the results
    /// that it completes.
    ///
    /// Cancellation safety: no report is lost.
    pub async fn take(&self) -> Vec<wire::DriveReport> {
        loop {
            let batch = self.take_now();
            if !batch.is_empty() {
                return batch;
            }
            self.filled.notified().await;
        }
    }

    fn take_now(&self) -> Vec<wire::DriveReport> {
        let mut inner = self.inner.lock();
        let results = inner.results.drain().map(|(_, (r, trace))| (Report::Result(r), trace));
        let mut batch: Vec<_> = results.collect();
        self.queue.set(0);
        batch.extend(inner.unhealthy.drain(..).map(|(u, trace)| (Report::Unhealthy(u), trace)));
        batch.extend(inner.answers.drain(..).map(|answer| (answer, None)));
        batch.into_iter().map(|(report, trace)| wire::DriveReport { report: Some(report), trace }).collect()
    }
}

#[cfg(test)]
mod tests {
    use quintlet_model::ids::PodUid;
    use quintlet_model::probe::ProbeType;

    use super::*;

    fn key(container: &str) -> ProbeKey {
        ProbeKey {
            uid: PodUid::parse("u1").unwrap(),
            container: container.to_owned(),
            probe: ProbeType::Liveness,
        }
    }

    #[tokio::test]
    async fn a_slow_driver_receives_the_latest_result_and_then_the_replies() {
        let mailbox = Mailbox::new(Counter::default());
        mailbox.answer(Report::ReplayEnd(wire::ReplayEnd {}));
        for counter in 0..5 {
            let memory = wire::Memory { counter, ..Default::default() };
            let result = wire::Result { memory: Some(memory), ..Default::default() };
            mailbox.result(key("a"), result, None);
        }
        let batch = mailbox.take().await;
        assert_eq!(batch.len(), 2);
        assert!(
            matches!(&batch[0].report, Some(Report::Result(r)) if r.memory.as_ref().is_some_and(|m| m.counter == 4))
        );
        assert!(matches!(batch[1].report, Some(Report::ReplayEnd(_))));
    }

    #[tokio::test]
    async fn evaluations_for_events_are_bounded_and_drops_are_counted() {
        let dropped = Counter::default();
        let mailbox = Mailbox::new(dropped.clone());
        for at in 0..UNHEALTHY_CAPACITY + 7 {
            mailbox.unhealthy(wire::Unhealthy { message: at.to_string(), ..Default::default() }, None);
        }
        let batch = mailbox.take().await;
        assert_eq!((batch.len(), dropped.get()), (UNHEALTHY_CAPACITY, 7));
        assert!(matches!(&batch[0].report, Some(Report::Unhealthy(u)) if u.message == "7"));
    }
}
