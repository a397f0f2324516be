//! The loop of one probe: ticks at a fixed rate, and sooner when the way opens.

use std::sync::Arc;
use std::time::Duration;

use quintlet_kit::backoff::Backoff;
use quintlet_kit::clock::deadline_after;
use quintlet_kit::contain::{Work, contained};
use quintlet_kit::seam::{self, Seam};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep};

use crate::decide::Gate;
use crate::prober::Shared;
use crate::slot::Slot;

/// Before a probe whose last evaluation panicked, doubled with each in a row, and the longest.
const AFTER_PANIC: Duration = Duration::from_secs(10);
const LONGEST_AFTER_PANIC: Duration = Duration::from_secs(3600);

/// Evaluates until it is aborted, for the first time after `jitter`.
///
/// Missed ticks collapse into one. A container that has just started, or whose initial delay has just passed, is
/// probed at once and the rate counts from there; nothing else moves the ticks.
pub(crate) async fn run(shared: Arc<Shared>, slot: Arc<Slot>, jitter: Duration) {
    let mut ticker = interval_at(deadline_after(Instant::now(), jitter), slot.period());
    ticker.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let work = Work::new(slot.key.uid.as_str(), format!("{}/{}", slot.pod.namespace, slot.pod.name));
    let mut after_panic = Backoff::new(AFTER_PANIC, 2, LONGEST_AFTER_PANIC);
    loop {
        let delay = match slot.gate(shared.clock.boot()) {
            Gate::After(delay) => Some(delay),
            Gate::Idle(_) | Gate::Stopped(_) | Gate::Probe(_) => None,
        };
        // A dropped tick stays due, a dropped wake stays set, and the delay is computed anew.
        tokio::select! {
            _ = ticker.tick() => {}
            () = slot.wake.notified() => {
                if !matches!(slot.gate(shared.clock.boot()), Gate::Probe(_)) {
                    continue;
                }
                ticker.reset();
            }
            () = sleep(delay.unwrap_or_default()), if delay.is_some() => ticker.reset(),
        }
        let evaluation = Box::pin(async {
            seam::around(Seam::Work, "probe evaluated", || ());
            slot.evaluate(&shared).await;
        });
        match contained(work.clone(), evaluation).await {
            Ok(()) => after_panic.reset(),
            // The result stays as it was. An end of the task loses nothing.
            Err(_) => sleep(after_panic.next_wait()).await,
        }
    }
}
