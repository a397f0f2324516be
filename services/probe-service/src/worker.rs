//! The task of one probe.

use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::contain::{Work, contained};
use quintlet_kit::failpoint;
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};

use crate::decide::NextStep;
use crate::shared::Shared;
use crate::slot::Slot;

/// Wait after an evaluation that panicked. Each further panic in a row doubles it, up to [`LONGEST_AFTER_PANIC`].
const AFTER_PANIC: Duration = Duration::from_secs(10);
const LONGEST_AFTER_PANIC: Duration = Duration::from_secs(3600);

/// Evaluates the probe every period until the task is aborted, for the first time after `jitter`.
///
/// Missed ticks collapse into one. The probe is evaluated at once when its container starts or its initial delay ends, and the
/// period counts from there. Nothing else moves the ticks.
pub(crate) async fn run(shared: Arc<Shared>, slot: Arc<Slot>, jitter: Duration) {
    let mut ticker = interval_at(deadline_after(Instant::now(), jitter), slot.period());
    ticker.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let work = Work::new(slot.key.uid.as_str(), format!("{}/{}", slot.pod.namespace, slot.pod.name));
    let mut after_panic = Backoff::new(AFTER_PANIC, 2.0, LONGEST_AFTER_PANIC);
    loop {
        let delay = match slot.next_step(shared.clock.boot()) {
            NextStep::After(delay) => Some(delay),
            NextStep::Idle(_) | NextStep::Stopped(_) | NextStep::Probe(_) => None,
        };
        let ready = Instant::now();
        // A dropped tick stays due, a dropped wake stays set, and the delay is computed again.
        let due = tokio::select! {
            // A tick that passed during the last evaluation is due now.
            at = ticker.tick() => at.max(ready),
            () = slot.wake.notified() => {
                if !matches!(slot.next_step(shared.clock.boot()), NextStep::Probe(_)) {
                    continue;
                }
                ticker.reset();
                Instant::now()
            }
            () = sleep(delay.unwrap_or_default()), if delay.is_some() => {
                ticker.reset();
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
