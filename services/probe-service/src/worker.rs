//! The task of one probe.

use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::contain::{Work, contained};
use quintlet_kit::{failpoint, timers};
use tokio::time::{Instant, sleep, sleep_until};

use crate::decide::NextStep;
use crate::shared::Shared;
use crate::slot::Slot;

/// Wait after an evaluation that panicked. Each further panic in a row doubles it, up to
/// [`LONGEST_AFTER_PANIC`].
const AFTER_PANIC: Duration = Duration::from_secs(10);
const LONGEST_AFTER_PANIC: Duration = Duration::from_secs(3600);

/// Parts of a period in which its evaluations begin together, so that the process wakes once for several
/// probes, and finds its code in the processor's caches. A probe begins up to one part later for it: 40 ms of
/// a period of one second.
const SLOTS: u32 = 25;

/// The times at which a probe is due: the first exactly, the others in slots.
struct Ticks {
    /// The last tick; none before the first.
    last: Option<Instant>,
    next: Instant,
    period: Duration,
}

impl Ticks {
    fn new(first: Instant, period: Duration) -> Self {
        Self { last: None, next: first, period }
    }

    /// Lets the next tick be one period after `at`.
    fn restart(&mut self, at: Instant) {
        self.last = Some(at);
        self.begin_after(at, 1);
    }

    /// Changes the period. The next tick is one new period after the last one, or now if that has passed.
    fn set_period(&mut self, period: Duration) {
        if self.period == period {
            return;
        }
        self.period = period;
        let now = Instant::now();
        match self.last {
            Some(last) if deadline_after(last, period) > now => self.begin_after(last, 1),
            Some(_) => self.next = now,
            // The jitter before the first tick is at most one period.
            None => self.next = self.next.min(deadline_after(now, period)),
        }
    }

    fn begin_after(&mut self, at: Instant, periods: u32) {
        let slot = self.period.checked_div(SLOTS).unwrap_or_default();
        self.next = timers::slotted(deadline_after(at, self.period.saturating_mul(periods)), slot);
    }

    /// Returns the time of the next tick once it has come. Missed ticks collapse into one.
    ///
    /// Cancellation safety: the tick of a dropped call stays due.
    async fn tick(&mut self) -> Instant {
        let due = self.next;
        sleep_until(due).await;
        let late = due.elapsed().as_nanos().checked_div(self.period.as_nanos()).unwrap_or_default();
        self.last = Some(due);
        self.begin_after(due, u32::try_from(late).unwrap_or(u32::MAX).saturating_add(1));
        due
    }
}

/// Evaluates the probe every period until the task is aborted, for the first time after `jitter`.
///
/// Missed ticks collapse into one, and an evaluation that takes longer than a period delays the next one, so
/// that a probe never overlaps itself. The probe is evaluated at once when its container starts or its
/// initial delay ends, and the period counts from there. A changed period counts from the last tick. Nothing
/// else moves the ticks.
pub(crate) async fn run(shared: Arc<Shared>, slot: Arc<Slot>, jitter: Duration) {
    let mut ticks = Ticks::new(deadline_after(Instant::now(), jitter), slot.period());
    let work = Work::new(slot.key.uid.as_str(), format!("{}/{}", slot.pod.namespace, slot.pod.name));
    let mut after_panic = Backoff::new(AFTER_PANIC, 2.0, LONGEST_AFTER_PANIC);
    loop {
        ticks.set_period(slot.period());
        let delay = match slot.next_step(shared.clock.boot()) {
            NextStep::After(delay) => Some(delay),
            NextStep::Idle(_) | NextStep::Stopped(_) | NextStep::Probe(_) => None,
        };
        let ready = Instant::now();
        // A dropped tick stays due, a dropped wake stays set, and the delay is computed again.
        let due = tokio::select! {
            // A tick that passed during the last evaluation is due now.
            at = ticks.tick() => at.max(ready),
            () = slot.wake.notified() => {
                if !matches!(slot.next_step(shared.clock.boot()), NextStep::Probe(_)) {
                    continue;
                }
                let now = Instant::now();
                ticks.restart(now);
                now
            }
            () = slot.period_changed.notified() => continue,
            () = sleep(delay.unwrap_or_default()), if delay.is_some() => {
                ticks.restart(Instant::now());
                deadline_after(ready, delay.unwrap_or_default())
            }
        };
        shared.metrics.lag.observe(due.elapsed().as_secs_f64());
        let evaluation = Box::pin(async {
            failpoint::work!("probe evaluated");
            slot.evaluate(&shared).await;
        });
        match contained(work.clone(), evaluation).await {
            Ok(()) => after_panic.reset(),
            // The result stays unchanged. An abort during the wait loses nothing.
            Err(_) => sleep(after_panic.next_wait()).await,
        }
    }
}
